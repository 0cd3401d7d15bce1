// Elements of any type from one walk of memory to another, and zeros to a walk: bits are moved in
// units as large as lengths and strides allow.
//
// Bytes: every element read once and written once. Launch: ceil(n / 256) blocks of 256 threads.
//
// Defined before: UNIT (what is moved at once), RANK (number of loops), INDEX (u32, or u64 if there
// are 2^32 units or more).
#include "device.cuh"

struct Copy {
    const UNIT* from;
    UNIT* to;
    i64 n, extent[RANK], from_stride[RANK], to_stride[RANK];
};

struct Clear {
    UNIT* to;
    i64 n, extent[RANK], stride[RANK];
};

KERNEL void __launch_bounds__(256) copy(const Copy p) {
    const INDEX i = (INDEX)blockIdx.x * 256 + threadIdx.x;
    if (i >= (INDEX)p.n) return;
    p.to[walk(i, p.extent, p.to_stride)] = p.from[walk(i, p.extent, p.from_stride)];
}

KERNEL void __launch_bounds__(256) clear_block(const Clear p) {
    const INDEX i = (INDEX)blockIdx.x * 256 + threadIdx.x;
    if (i < (INDEX)p.n) p.to[walk(i, p.extent, p.stride)] = UNIT{};
}
