// Runs kernels written in CUDA C++ on the CPU, for tests of their numbers: one fiber per thread, a
// block after the other. What is checked beside results: accesses outside of an allocation (with the
// address sanitizer), barriers that not all threads reach, and, by running threads in the opposite
// order, results that depend on their order. Asynchronous copies happen as late as they may, and products by
// groups at once; in the opposite order it is the other way round.
//
// Kernels use the helpers of device.cuh only; those that stand for instructions are here. What is the
// same for all kernels is compiled once, in emulate.cpp, and this file includes little: some hundred
// texts of kernels are compiled with it.
#pragma once
// The headers of C as they are, not those of the library of C++, which have 160 others in them.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#define EMULATED
#define KERNEL static
#define DEVICE inline
#define CONSTANT const
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(emulated::block->shared)

namespace emulated {

struct Dim {
    unsigned x, y, z;
};

// What a kernel sees of the thread and the block that it is.
struct Thread {
    Dim thread;
    unsigned number;
};
struct Place {
    Thread* running;
    Dim number, size, grid;
    char* shared;
};
extern __thread Place* block;

// Of exactly this size, so that the sanitizer sees its end.
inline char* allocate(size_t alignment, size_t bytes) {
    void* at = nullptr;
    if (posix_memalign(&at, alignment, bytes)) abort();
    return (char*)at;
}

[[noreturn]] void fail(const char* what);
void barrier();
// True for all threads if it is for one.
bool barrier_or(bool mine);
// Shows a value to the other lanes of the warp; what they show stays until the next but one time.
const uint64_t* exchange(uint64_t value);
unsigned ballot(bool here);
inline unsigned lane() { return block->running->number % 32; }

template <class T>
T shuffle(T value, unsigned from) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    memcpy(&value, &exchange(bits)[from % 32], sizeof value);
    return value;
}

}  // namespace emulated

#define threadIdx (emulated::block->running->thread)
#define blockIdx (emulated::block->number)
#define blockDim (emulated::block->size)
#define gridDim (emulated::block->grid)
#define __syncthreads() emulated::barrier()
#define __syncthreads_or(x) emulated::barrier_or(x)
#define __syncwarp() emulated::exchange(0)
#define __shfl_sync(mask, x, lane) emulated::shuffle(x, lane)
#define __shfl_xor_sync(mask, x, o) emulated::shuffle(x, emulated::lane() ^ (o))
#define __ballot_sync(mask, x) emulated::ballot(x)
#define __any_sync(mask, x) (emulated::ballot(x) != 0)
#define __popc(x) __builtin_popcount(x)
#define __ffs(x) __builtin_ffs(x)

inline void atomicMax(unsigned long long* at, unsigned long long x) { *at = *at < x ? x : *at; }

inline float __uint_as_float(unsigned x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}
inline unsigned __float_as_uint(float f) {
    unsigned x;
    memcpy(&x, &f, 4);
    return x;
}
inline float minus_infinity() { return -INFINITY; }
inline float exp2_fast(float x) { return exp2f(x); }
inline float divide_fast(float x, float y) { return fabsf(y) > 0x1p126f ? x * 0.0f : x / y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
struct Bf16;
struct F16;
namespace emulated {
unsigned pack(float low, float high, bool bf16);
float widened(uint16_t bits);
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool bf16);
// Whether a type of elements is one or the other; there is no third.
template <class T>
struct Is;
template <>
struct Is<Bf16> {
    static const bool bf16 = true;
};
template <>
struct Is<F16> {
    static const bool bf16 = false;
};
}  // namespace emulated
template <class T>
unsigned pack(float low, float high) {
    return emulated::pack(low, high, emulated::Is<T>::bf16);
}
template <class T>
float widened(T x) {
    static_assert(!emulated::Is<T>::bf16);
    return emulated::widened(x.bits);
}

void load_matrices(unsigned (&r)[4], const void* row);
void load_matrices_transposed(unsigned (&r)[4], const void* row);
template <class T>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulated::multiply_add(c, a, b0, b1, emulated::Is<T>::bf16);
}

void copy16_async(void* to, const void* from, bool there);
void copy4_async(void* to, const void* from, bool there);
void copies_begun();
namespace emulated {
// Waits until no more than `left` groups of copies are under way.
void copies_end(size_t left);
}
template <int N>
void copies_end() {
    emulated::copies_end(N);
}

// Products by groups of four warps.
unsigned shared_address(const void* at);
inline void settle(float&) {}
inline void settle(unsigned&) {}
void show_groups();
void group_begin();
void group_begun();
namespace emulated {
// Waits until products of no more than `left` times are under way.
void group_wait(size_t left);
void multiply_shared(float (*c)[4], int n, bool down_a, bool down_b, bool add, uint64_t a, uint64_t b,
                     bool bf16);
void multiply_held(float (*c)[4], const unsigned (&a)[4], uint64_t b, bool bf16);
}  // namespace emulated
template <int N>
void group_wait() {
    emulated::group_wait(N);
}
template <class T, int N, bool DownA, bool DownB, bool Add = true>
void group_multiply_add(float (*c)[4], unsigned long long a, unsigned long long b) {
    emulated::multiply_shared(c, N, DownA, DownB, Add, a, b, emulated::Is<T>::bf16);
}
template <class T>
void group_multiply_add(float (*c)[4], const unsigned (&a)[4], unsigned long long b) {
    emulated::multiply_held(c, a, b, emulated::Is<T>::bf16);
}

// ---- Kernels by name, called with words of 8 bytes: their parameters.

namespace emulated {

struct Launch {
    const uint64_t* words;
    size_t count;
    Dim grid, size;
    size_t shared;
    bool reversed;
};
using Runner = void (*)(const Launch&);

// Copies the words; they must be as many.
void take(const Launch& l, void* parameters, size_t bytes);
// Runs `body` as every thread of every block; if it fails, the kernel is called `name`. One of the thread-local
// variables of the library or program that the kernel is in tells where its `__shared__` ones are.
void run(const Launch& l, const char* name, void* variable, void (*body)(const void*),
         const void* parameters);

// The parameters of a kernel have one type, which it tells.
template <class P>
P parameters(void (*)(P));

}  // namespace emulated

// Behind the text of kernels, `KERNELS ENTRY(one) ENTRY(other) KERNELS_END`: what finds them by their names.
#define KERNELS                                                                                 \
    extern "C" __attribute__((visibility("default"))) emulated::Runner find_kernel(             \
        const char* kernel) {
#define ENTRY(name)                                                                             \
    if (!strcmp(kernel, #name)) return [](const emulated::Launch& l) {                          \
        using P = decltype(emulated::parameters(name));                                         \
        static_assert(sizeof(P) % 8 == 0, "a parameter is of whole words");                     \
        alignas(P) char parameters[sizeof(P)];                                                  \
        emulated::take(l, parameters, sizeof(P));                                               \
        static thread_local char variable;                                                      \
        emulated::run(l, #name, &variable, [](const void* p) { name(*(const P*)p); },           \
                      parameters);                                                              \
    };
#define KERNELS_END                                                                             \
    return nullptr;                                                                             \
    }
