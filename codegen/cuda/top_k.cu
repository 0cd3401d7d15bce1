// The places of the k largest of n elements, largest first; of equal ones the first. Order is total:
// by the bits of the f32, NaN outside of the infinities; both zeros are equal.
//
// Bytes: x once (k times from the L1 cache), out once. Launch: ceil(rows / 4) blocks of 128 threads,
// a warp for a row.
//
// Defined before: ELEM, RANK, INDEX.
#include "device.cuh"

struct Params {
    const ELEM* x;
    int* out;
    i64 rows, extent[RANK], x_strides[RANK], out_strides[RANK];
    i64 n, k, x_stride, out_stride;
};

// Larger for larger elements, and for earlier ones of the same value.
DEVICE u64 rank_of(float x, int place) {
    const int bits = (int)__float_as_uint(x + 0.0f);
    const u32 ordered = (u32)(bits ^ (int)((u32)(bits >> 31) >> 1)) ^ 0x80000000u;
    return (u64)ordered << 32 | (0xffffffffu - (u32)place);
}

KERNEL void __launch_bounds__(128) top_k(const Params p) {
    const INDEX row = (INDEX)blockIdx.x * 4 + warp_id();
    if (row >= (INDEX)p.rows) return;
    const ELEM* x = p.x + walk(row, p.extent, p.x_strides);
    int* out = p.out + walk(row, p.extent, p.out_strides);
    // Everything of this rank or a larger one has its place.
    u64 last = ~0ull;
    for (int i = 0; i < (int)p.k; i++) {
        u64 best = 0;
        for (int e = lane_id(); e < (int)p.n; e += 32) {
            const u64 r = rank_of(number(x[e * p.x_stride]), e);
            if (r < last) best = larger(best, r);
        }
        last = max_lanes<32>(best);
        if (lane_id() == 0) out[i * p.out_stride] = (int)(0xffffffffu - (u32)last);
    }
}
