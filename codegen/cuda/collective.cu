// What ranks that share a device exchange: elements of one walk of memory written over those of
// another, and folds of several. Elements `start` to `start + n`, in row-major order.
//
// fold_regions folds from the left, in f32, and rounds once; `to` may be one of the parts.
// Bytes: every element read once and written once. Launch: ceil(n / 256) blocks of 256 threads.
//
// Defined before: LOOPS and PARTS, the most loops of a walk and the most parts of a fold.
#include "device.cuh"

enum Elem { F32, BF16, I32, HALF };
enum How { SUM, MAX, MIN };

struct Region {
    void* first;
    i64 elem, extent[LOOPS], stride[LOOPS];
};

struct Copy {
    i64 start, n;
    Region from, to;
};

struct Fold {
    i64 start, n, how, parts;
    Region to, part[PARTS];
};

DEVICE u64 element() { return (u64)blockIdx.x * 256 + threadIdx.x; }

DEVICE float read(const Region& r, u64 i) {
    const i64 at = walk(i, r.extent, r.stride);
    if (r.elem == BF16) return number(((const Bf16*)r.first)[at]);
    if (r.elem == HALF) return number(((const F16*)r.first)[at]);
    return ((const float*)r.first)[at];
}

DEVICE void write(const Region& r, u64 i, float x) {
    const i64 at = walk(i, r.extent, r.stride);
    if (r.elem == BF16) {
        assign(((Bf16*)r.first)[at], x);
    } else if (r.elem == HALF) {
        assign(((F16*)r.first)[at], x);
    } else {
        ((float*)r.first)[at] = x;
    }
}

KERNEL void __launch_bounds__(256) copy_region(const Copy p) {
    if (element() >= (u64)p.n) return;
    const u64 i = p.start + element();
    const bool converted = p.from.elem != p.to.elem;
    if (converted) {
        write(p.to, i, read(p.from, i));
        return;
    }
    // The same bits: they may be integers.
    const i64 from = walk(i, p.from.extent, p.from.stride), to = walk(i, p.to.extent, p.to.stride);
    if (p.to.elem == BF16 || p.to.elem == HALF) {
        ((u16*)p.to.first)[to] = ((const u16*)p.from.first)[from];
    } else {
        ((u32*)p.to.first)[to] = ((const u32*)p.from.first)[from];
    }
}

KERNEL void __launch_bounds__(256) fold_regions(const Fold p) {
    if (element() >= (u64)p.n) return;
    const u64 i = p.start + element();
    float x = read(p.part[0], i);
    for (int k = 1; k < (int)p.parts; k++) {
        const float y = read(p.part[k], i);
        x = p.how == SUM ? x + y : p.how == MAX ? fmaxf(x, y) : fminf(x, y);
    }
    write(p.to, i, x);
}
