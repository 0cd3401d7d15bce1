// The program of a test: reads memory and a launch, runs it, writes the memory.
//   kernel LAUNCH MEMORY
// Memory of operands is allocated one by one, of exactly its size.
#include "emulate.h"

#include <stdio.h>

#include <string>
#include <vector>

extern "C" emulated::Runner find_kernel(const char* name);

static std::vector<uint64_t> file;
static size_t cursor = 0;
static uint64_t next() {
    if (cursor == file.size()) emulated::fail("the file of a launch is too short");
    return file[cursor++];
}

int main(int, char** argv) {
    FILE* in = fopen(argv[1], "rb");
    if (!in) emulated::fail("no file of a launch");
    fseek(in, 0, SEEK_END);
    file.resize(ftell(in) / 8);
    rewind(in);
    if (fread(file.data(), 8, file.size(), in) != file.size()) emulated::fail("a launch is not read");
    fclose(in);

    std::vector<std::pair<char*, size_t>> operands(next());
    for (auto& [at, bytes] : operands) {
        bytes = next();
        at = emulated::allocate(256, bytes);
        memcpy(at, &file[cursor], bytes);
        cursor += (bytes + 7) / 8;
    }
    const size_t length = next();
    const std::string name((const char*)&file[cursor], length);
    cursor += (length + 7) / 8;
    const emulated::Dim grid = {(unsigned)next(), (unsigned)next(), (unsigned)next()};
    const emulated::Dim size = {(unsigned)next(), 1, 1};
    const size_t shared = next();
    std::vector<uint64_t> words(next());
    for (auto& word : words) {
        const uint64_t operand = next(), value = next();
        // An address in an operand, or a number.
        word = operand ? (uint64_t)operands[operand - 1].first + value : value;
    }
    const emulated::Runner kernel = find_kernel(name.c_str());
    if (!kernel) emulated::fail(("no kernel " + name).c_str());
    kernel({words.data(), words.size(), grid, size, shared, false});
    FILE* out = fopen(argv[2], "wb");
    for (auto [at, bytes] : operands) fwrite(at, 1, bytes, out);
    fclose(out);
    for (auto [at, bytes] : operands) free(at);
}
