// Stands in for libcuda where there is no GPU: STANDIN_DEVICES devices, or one, whose memory is the
// host's, full of NaN at first, and whose streams do at once what they are told; kernels are those that compiler.cpp has
// made, run by emulate.h. For tests. What is wrong with the order of streams is not found by it.
#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "emulate.h"

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       NOT_FOUND = 500, INVALID_IMAGE = 200 };

static const size_t MEMORY = 8ull << 30;
static int contexts[16];
static int devices() {
    const char* set = getenv("STANDIN_DEVICES");
    return set ? atoi(set) : 1;
}
static thread_local void* current = nullptr;

// Allocations, by their first byte.
static std::mutex lock;
static std::map<uint64_t, size_t> device_memory;
static std::set<void*> host_memory;

// True if a range lies inside one allocation of the device.
static bool inside(uint64_t at, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    auto next = device_memory.upper_bound(at);
    if (next == device_memory.begin()) return bytes == 0;
    --next;
    return at + bytes <= next->first + next->second;
}

extern "C" {

int cuInit(unsigned) { return OK; }
int cuDriverGetVersion(int* v) {
    *v = 13000;
    return OK;
}
int cuGetErrorName(int, const char** s) {
    *s = "STAND_IN";
    return OK;
}
int cuGetErrorString(int, const char** s) {
    *s = "an error of the stand-in";
    return OK;
}
int cuDeviceGetCount(int* n) {
    *n = devices();
    return OK;
}
int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < devices() ? OK : INVALID_DEVICE;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 75: *value = 9; break;       // major and
        case 76: *value = 0; break;       // minor of the compute capability
        case 97: *value = 232448; break;  // shared memory of a block
        default: *value = 1;
    }
    return OK;
}
int cuDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return OK;
}
int cuCtxEnablePeerAccess(void*, unsigned) { return current ? OK : INVALID_CONTEXT; }
int cuDevicePrimaryCtxRetain(void** c, int device) {
    *c = &contexts[device];
    return OK;
}
int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
int cuCtxSetCurrent(void* c) {
    current = c;
    return OK;
}
int cuStreamCreate(void** s, unsigned) {
    *s = malloc(1);
    return current ? OK : INVALID_CONTEXT;
}
int cuStreamDestroy_v2(void* s) {
    free(s);
    return OK;
}
int cuStreamSynchronize(void*) { return current ? OK : INVALID_CONTEXT; }

int cuMemAlloc_v2(uint64_t* at, size_t bytes) {
    if (!current) return INVALID_CONTEXT;
    if (bytes == 0) return INVALID_VALUE;
    if (bytes > MEMORY) return OUT_OF_MEMORY;
    char* made = emulated::allocate(256, bytes);
    memset(made, 0xff, bytes);
    std::lock_guard<std::mutex> held(lock);
    device_memory[(uint64_t)made] = bytes;
    *at = (uint64_t)made;
    return OK;
}
int cuMemFree_v2(uint64_t at) {
    std::lock_guard<std::mutex> held(lock);
    if (!device_memory.erase(at)) return INVALID_VALUE;
    free((void*)at);
    return OK;
}
int cuMemHostAlloc(void** at, size_t bytes, unsigned) {
    *at = malloc(bytes);
    std::lock_guard<std::mutex> held(lock);
    host_memory.insert(*at);
    return OK;
}
int cuMemFreeHost(void* at) {
    std::lock_guard<std::mutex> held(lock);
    if (!host_memory.erase(at)) return INVALID_VALUE;
    free(at);
    return OK;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
    if (!inside(to, bytes)) return INVALID_VALUE;
    memcpy((void*)to, from, bytes);
    return OK;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
    if (!inside(from, bytes)) return INVALID_VALUE;
    memcpy(to, (void*)from, bytes);
    return OK;
}
int cuMemsetD8Async(uint64_t at, unsigned char x, size_t bytes, void*) {
    if (!inside(at, bytes)) return INVALID_VALUE;
    memset((void*)at, x, bytes);
    return OK;
}

// The image is a shared object, which ends with its table of sections.
int cuModuleLoadData(void** module, const void* image) {
    const Elf64_Ehdr* head = (const Elf64_Ehdr*)image;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG)) return INVALID_IMAGE;
    const size_t bytes = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
    char path[] = "/tmp/standin-module-XXXXXX";
    const int file = mkstemp(path);
    if (file < 0 || write(file, image, bytes) != (ssize_t)bytes) return INVALID_IMAGE;
    *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    close(file);
    unlink(path);
    return *module ? OK : INVALID_IMAGE;
}
int cuModuleUnload(void* module) {
    dlclose(module);
    return OK;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    auto find = (emulated::Runner(*)(const char*))dlsym(module, "find_kernel");
    *function = find ? (void*)find(name) : nullptr;
    return *function ? OK : NOT_FOUND;
}
int cuFuncSetAttribute(void*, int, int) { return OK; }

// Parameters come as one buffer, by its address and its size.
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void*, void** parameters, void** extra) {
    if (!current) return INVALID_CONTEXT;
    if (parameters || extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4]) return INVALID_VALUE;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || bx * by * bz > 1024 || shared > 232448) {
        return INVALID_VALUE;
    }
    const uint64_t* words = (const uint64_t*)extra[1];
    const size_t n = *(const size_t*)extra[3] / 8;
    ((emulated::Runner)function)(emulated::Words(words, words + n), {gx, gy, gz}, {bx, by, bz},
                                 shared, false);
    return OK;
}
}
