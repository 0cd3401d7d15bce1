// out = x[index]: the element `index - first` of a dim with `len` places `stride` apart; 0 for an
// index outside, and for `without`.
//
// Bytes: indices once per element, out once, and as much of x. Launch: ceil(n / 256) blocks of 256
// threads.
//
// Defined before: UNIT, RANK and INDEX as for copy.cu.
#include "device.cuh"

struct Params {
    const UNIT* x;
    const int* index;
    UNIT* out;
    i64 n, extent[RANK], x_stride[RANK], index_stride[RANK], out_stride[RANK];
    i64 first, len, stride, without;
};

KERNEL void __launch_bounds__(256) take(const Params p) {
    const INDEX i = (INDEX)blockIdx.x * 256 + threadIdx.x;
    if (i >= (INDEX)p.n) return;
    const i64 index = p.index[walk(i, p.extent, p.index_stride)];
    const i64 place = index - p.first;
    UNIT x = UNIT{};
    if (place >= 0 && place < p.len && index != p.without)
        x = p.x[walk(i, p.extent, p.x_stride) + place * p.stride];
    p.out[walk(i, p.extent, p.out_stride)] = x;
}
