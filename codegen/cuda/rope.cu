// Rotary embedding: of rows of `width` elements the first 2 `turns` turn in pairs, (a, b) becoming
// (a cos - b sin, b cos + a sin); the others stay.
//
// Bytes: x and out once; cos and sin once per head, from the L2 cache. Launch: ceil(n / 256) blocks
// of 256 threads, one thread for PACK pairs or for PACK elements that stay.
//
// Defined before: ELEM, INDEX, HALVES (a pair is j and turns + j, else 2j and 2j + 1), PACK (a number
// of adjacent elements of which all rows consist, and at whose multiples they begin).
#include "device.cuh"

struct Params {
    const ELEM* x;
    const float *cos, *sin;
    ELEM* out;
    // Loops [b, s, head], then one over packs of pairs and of what stays.
    i64 n, extent[4], x_stride[4], cos_stride[4], sin_stride[4], out_stride[4];
    i64 turns;
};

KERNEL void __launch_bounds__(256) rope(const Params p) {
    const INDEX i = (INDEX)blockIdx.x * 256 + threadIdx.x;
    if (i >= (INDEX)p.n) return;
    const int turns = (int)p.turns, j = (int)(i % (INDEX)p.extent[3]) * PACK;
    const INDEX row = i - j / PACK;
    const ELEM* x = p.x + walk(row, p.extent, p.x_stride);
    ELEM* out = p.out + walk(row, p.extent, p.out_stride);
    if (j >= turns) {
        store<PACK>(out + turns + j, load<PACK>(x + turns + j));
        return;
    }
    const Pack<float, PACK> cos = load<PACK>(p.cos + walk(row, p.extent, p.cos_stride) + j);
    const Pack<float, PACK> sin = load<PACK>(p.sin + walk(row, p.extent, p.sin_stride) + j);
    // Both packs of elements, and where in them the pairs stand.
    const int low = HALVES ? j : 2 * j, high = HALVES ? turns + j : 2 * j + PACK;
    Pack<ELEM, PACK> both[2] = {load<PACK>(x + low), load<PACK>(x + high)};
    #pragma unroll
    for (int k = 0; k < PACK; k++) {
        const int first = HALVES ? k : 2 * k, second = HALVES ? PACK + k : 2 * k + 1;
        ELEM &a = both[first / PACK].at[first % PACK], &b = both[second / PACK].at[second % PACK];
        const float u = number(a), v = number(b);
        assign(a, u * cos.at[k] - v * sin.at[k]);
        assign(b, v * cos.at[k] + u * sin.at[k]);
    }
    store<PACK>(out + low, both[0]);
    store<PACK>(out + high, both[1]);
}
