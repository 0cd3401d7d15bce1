// Numbers at random by Philox 4x32-10 (Salmon et al., 2011), each from the run, the stream, a place and an
// index there.
//
// Bytes: every element written once, its place read. Launch: ceil(n / 256) blocks of 256 threads, one
// thread for an element.
//
// Defined before: RANK (number of loops), INDEX, PLACES (there are places), FROM (0 uniform, 1 normal,
// 2 kept or not).
#include "random.cuh"

struct Params {
    const int *run, *place;
    float* out;
    i64 n, extent[RANK], out_stride[RANK], place_stride[RANK], index_stride[RANK];
    // The first index, halves of the stream's number, what is kept below, the number of what is kept.
    i64 first, stream[2], threshold;
    double kept;
};

// Between 0 and 1, in 24 bits.
DEVICE float uniform(u32 word) { return ((float)(word >> 9) + 0.5f) * 1.1920928955078125e-7f; }

KERNEL void __launch_bounds__(256) draw(const Params p) {
    const INDEX i = (INDEX)blockIdx.x * 256 + threadIdx.x;
    if (i >= (INDEX)p.n) return;
    const u32 index = (u32)(p.first + walk(i, p.extent, p.index_stride));
    const u32 place = PLACES ? (u32)p.place[walk(i, p.extent, p.place_stride)] : 0u;
    const u32 step = (u32)p.run[2];
    const u32 block = FROM == 1 ? index / 2 | 0x80000000u : index / 4;
    const Words w = philox({{block, place, step, 0u}}, (u32)p.stream[0] ^ (u32)p.run[0],
                           (u32)p.stream[1] ^ (u32)p.run[1]);
    float x;
    if (FROM == 1) {
        const u32 u = index % 2 ? w.at[2] : w.at[0], turn = index % 2 ? w.at[3] : w.at[1];
        x = sqrtf(-2.0f * logf(uniform(u))) * cosf(6.283185307f * uniform(turn));
    } else {
        const u32 low = index & 1 ? w.at[1] : w.at[0], high = index & 1 ? w.at[3] : w.at[2];
        const u32 word = index & 2 ? high : low;
        x = FROM == 0 ? uniform(word) : step == 0 ? 1.0f : (i64)word < p.threshold ? (float)p.kept : 0.0f;
    }
    p.out[walk(i, p.extent, p.out_stride)] = x;
}
