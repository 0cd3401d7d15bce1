// Sums along rows, up to each element of a row, in f32 and in order.
//
// Bytes: every element read once and written once; coalesced if rows lie next to each other. Launch:
// ceil(n / 256) blocks of 256 threads, one thread for a row.
//
// Defined before: ELEM, RANK (number of loops over rows), INDEX, REVERSE (from the last element on).
#include "device.cuh"

struct Params {
    const ELEM* x;
    ELEM* out;
    i64 n, extent[RANK], x_stride[RANK], out_stride[RANK];
    i64 len, x_step, out_step;
};

KERNEL void __launch_bounds__(256) scan(const Params p) {
    const INDEX i = (INDEX)blockIdx.x * 256 + threadIdx.x;
    if (i >= (INDEX)p.n) return;
    const ELEM* x = p.x + walk(i, p.extent, p.x_stride);
    ELEM* out = p.out + walk(i, p.extent, p.out_stride);
    float sum = 0.0f;
    for (i64 k = 0; k < p.len; k++) {
        const i64 at = REVERSE ? p.len - 1 - k : k;
        sum += number(x[at * p.x_step]);
        assign(out[at * p.out_step], sum);
    }
}
