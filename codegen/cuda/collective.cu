// What ranks that share a device exchange: elements of one walk of memory written over those of
// another, and folds of several. Packs `start` to `start + n` of `pack` adjacent elements each, in row-major
// order: extents and strides of the innermost loop are those of packs.
//
// fold_regions folds from the left, in f32, and rounds once; `to` may be one of the parts.
// Bytes: every element read once and written once. A pack has 16 bytes of its
// smallest elements where regions allow it. Launch: ceil(n / 256) blocks of 256 threads.
//
// Defined before: LOOPS and PARTS, the most loops of a walk and the most parts of a fold.
#include "device.cuh"

enum Elem { F32, BF16, HALF, I32 };
enum How { SUM, MAX, MIN };

struct Region {
    void* first;
    i64 elem, extent[LOOPS], stride[LOOPS];
};

struct Copy {
    i64 start, n, pack;
    Region from, to;
};

struct Fold {
    i64 start, n, pack, how, parts;
    Region to, part[PARTS];
};

DEVICE u64 number_of_thread() { return (u64)blockIdx.x * 256 + threadIdx.x; }

template <int N, class T>
DEVICE Pack<T, N>* pack_of(const Region& r, u64 i) {
    return reinterpret_cast<Pack<T, N>*>((T*)r.first + walk(i, r.extent, r.stride));
}

template <int N, class T>
DEVICE void widen(float (&x)[N], const Pack<T, N>& from) {
    #pragma unroll
    for (int k = 0; k < N; k++) x[k] = number(from.at[k]);
}

template <int N>
DEVICE void read(const Region& r, u64 i, float (&x)[N]) {
    if (r.elem == BF16) {
        widen(x, *pack_of<N, Bf16>(r, i));
    } else if (r.elem == HALF) {
        widen(x, *pack_of<N, F16>(r, i));
    } else {
        widen(x, *pack_of<N, float>(r, i));
    }
}

template <int N, class T>
DEVICE void narrow(Pack<T, N>* to, const float (&x)[N]) {
    Pack<T, N> made;
    #pragma unroll
    for (int k = 0; k < N; k++) assign(made.at[k], x[k]);
    *to = made;
}

template <int N>
DEVICE void write(const Region& r, u64 i, const float (&x)[N]) {
    if (r.elem == BF16) {
        narrow(pack_of<N, Bf16>(r, i), x);
    } else if (r.elem == HALF) {
        narrow(pack_of<N, F16>(r, i), x);
    } else {
        narrow(pack_of<N, float>(r, i), x);
    }
}

template <int N>
DEVICE void copy(const Copy& p, u64 i) {
    if (p.from.elem != p.to.elem) {
        float x[N];
        read(p.from, i, x);
        write(p.to, i, x);
    } else if (p.to.elem == BF16 || p.to.elem == HALF) {
        // The same bits: they may be integers.
        *pack_of<N, u16>(p.to, i) = *pack_of<N, u16>(p.from, i);
    } else {
        *pack_of<N, u32>(p.to, i) = *pack_of<N, u32>(p.from, i);
    }
}

template <int N>
DEVICE void fold(const Fold& p, u64 i) {
    float x[N], y[N];
    read(p.part[0], i, x);
    for (int k = 1; k < (int)p.parts; k++) {
        read(p.part[k], i, y);
        #pragma unroll
        for (int e = 0; e < N; e++) {
            x[e] = p.how == SUM ? x[e] + y[e] : p.how == MAX ? fmaxf(x[e], y[e]) : fminf(x[e], y[e]);
        }
    }
    write(p.to, i, x);
}

KERNEL void __launch_bounds__(256) copy_region(const Copy p) {
    if (number_of_thread() >= (u64)p.n) return;
    const u64 i = p.start + number_of_thread();
    if (p.pack == 8) {
        copy<8>(p, i);
    } else if (p.pack == 4) {
        copy<4>(p, i);
    } else if (p.pack == 2) {
        copy<2>(p, i);
    } else {
        copy<1>(p, i);
    }
}

KERNEL void __launch_bounds__(256) fold_regions(const Fold p) {
    if (number_of_thread() >= (u64)p.n) return;
    const u64 i = p.start + number_of_thread();
    if (p.pack == 8) {
        fold<8>(p, i);
    } else if (p.pack == 4) {
        fold<4>(p, i);
    } else if (p.pack == 2) {
        fold<2>(p, i);
    } else {
        fold<1>(p, i);
    }
}
