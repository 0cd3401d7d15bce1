// Stands in for libnvrtc where there is no GPU: "compiles" CUDA C++ with the C++ compiler and
// emulate.h to a shared object, which is the code it returns. For tests.
//
// Its own folder holds emulate.h and emulate.o, and is where it works.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

struct Program {
    std::string name, text, log, code;
};

static std::string folder() {
    Dl_info here;
    dladdr((void*)&folder, &here);
    const std::string path = here.dli_fname;
    return path.substr(0, path.rfind('/'));
}

// `ENTRY(name)` for every kernel of a text, between what begins and ends them.
static std::string entries(const std::string& text) {
    std::string all = "KERNELS\n";
    const std::string mark = "KERNEL void ", bounds = "__launch_bounds__(";
    for (size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at)) {
        at += mark.size();
        if (text.compare(at, bounds.size(), bounds) == 0) at = text.find(") ", at) + 2;
        all += "ENTRY(" + text.substr(at, text.find('(', at) - at) + ")\n";
    }
    return all + "KERNELS_END\n";
}

// Messages as the real compiler writes them: `file(line): error: …`.
static std::string messages(const std::string& file) {
    std::ifstream in(file);
    std::string all, line;
    while (std::getline(in, line)) {
        const size_t error = line.find(": error: ");
        const size_t column = line.rfind(':', error == std::string::npos ? 0 : error - 1);
        const size_t row = column == std::string::npos ? column : line.rfind(':', column - 1);
        if (error != std::string::npos && row != std::string::npos) {
            const size_t name = line.rfind('/', row) + 1;
            line = line.substr(name, row - name) + "(" + line.substr(row + 1, column - row - 1) +
                   ")" + line.substr(error);
        }
        all += line + "\n";
    }
    return all;
}

extern "C" {

int nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return 0;
}
const char* nvrtcGetErrorString(int) { return "an error of the stand-in"; }

int nvrtcCreateProgram(Program** made, const char* text, const char* name, int headers,
                       const char* const* header_texts, const char* const* header_names) {
    for (int i = 0; i < headers; i++) {
        const std::string path = folder() + "/" + header_names[i];
        const std::string whole = path + "." + std::to_string(getpid());
        std::ofstream(whole) << header_texts[i];
        rename(whole.c_str(), path.c_str());
    }
    *made = new Program{name ? name : "kernel.cu", text, "", ""};
    return 0;
}

int nvrtcCompileProgram(Program* p, int, const char* const*) {
    static std::atomic<int> next{0};
    const std::string stem =
        folder() + "/made-" + std::to_string(getpid()) + "-" + std::to_string(next++);
    std::ofstream(stem + ".cpp")
        << "#include \"emulate.h\"\n#line 1 \"" << p->name << "\"\n" << p->text << "\n"
        << entries(p->text);
    const std::string command =
        "g++ -std=c++17 -O0 -w -march=native -fPIC -shared -fvisibility=hidden -fno-gnu-unique -I" +
        folder() + " " + stem + ".cpp " + folder() + "/emulate.o -o " + stem + ".so 2> " + stem + ".log";
    const int status = system(command.c_str());
    p->log = messages(stem + ".log");
    std::stringstream code;
    code << std::ifstream(stem + ".so").rdbuf();
    p->code = code.str();
    if (p->code.size() > 64) {
        // Code of a device, as its header says; the driver's stand-in puts back what it was.
        p->code.replace(14, 2, p->code.substr(18, 2));
        p->code[18] = (char)190;
        p->code[19] = 0;
    }
    unlink((stem + ".so").c_str());
    unlink((stem + ".log").c_str());
    unlink((stem + ".cpp").c_str());
    return status ? 6 : 0;
}

int nvrtcGetCUBINSize(Program* p, size_t* n) {
    *n = p->code.size();
    return 0;
}
int nvrtcGetCUBIN(Program* p, char* out) {
    memcpy(out, p->code.data(), p->code.size());
    return 0;
}
int nvrtcGetProgramLogSize(Program* p, size_t* n) {
    *n = p->log.size() + 1;
    return 0;
}
int nvrtcGetProgramLog(Program* p, char* out) {
    memcpy(out, p->log.c_str(), p->log.size() + 1);
    return 0;
}
int nvrtcDestroyProgram(Program** p) {
    delete *p;
    *p = nullptr;
    return 0;
}
}
