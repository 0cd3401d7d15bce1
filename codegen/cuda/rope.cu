// Rotary embedding: of rows of `width` elements the first 2 `turns` turn in pairs, (a, b) becoming
// (a cos - b sin, b cos + a sin); the others stay.
//
// Bytes: x and out once; cos and sin once per head, from the L2 cache. Launch: ceil(n / 256) blocks
// of 256 threads, one thread for a pair or for an element that stays.
//
// Defined before: ELEM, INDEX, HALVES (a pair is j and turns + j, else 2j and 2j + 1).
#include "device.cuh"

struct Params {
    const ELEM* x;
    const float *cos, *sin;
    ELEM* out;
    // Loops [b, s, head], then one over pairs and what stays.
    i64 n, extent[4], x_stride[4], cos_stride[4], sin_stride[4], out_stride[4];
    i64 turns;
};

KERNEL void __launch_bounds__(256) rope(const Params p) {
    const INDEX i = (INDEX)blockIdx.x * 256 + threadIdx.x;
    if (i >= (INDEX)p.n) return;
    const INDEX row = i / (INDEX)p.extent[3] * (INDEX)p.extent[3];
    const int turns = (int)p.turns, j = (int)(i - row);
    const ELEM* x = p.x + walk(row, p.extent, p.x_stride);
    ELEM* out = p.out + walk(row, p.extent, p.out_stride);
    if (j >= turns) {
        out[turns + j] = x[turns + j];
        return;
    }
    const int first = HALVES ? j : 2 * j, second = HALVES ? turns + j : 2 * j + 1;
    const float cos = p.cos[walk(row, p.extent, p.cos_stride) + j];
    const float sin = p.sin[walk(row, p.extent, p.sin_stride) + j];
    const float a = number(x[first]), b = number(x[second]);
    assign(out[first], a * cos - b * sin);
    assign(out[second], b * cos + a * sin);
}
