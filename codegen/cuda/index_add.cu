// out[index] += x in the order of loops, where out is 0 before unless ACCUMULATE: element `index - first` of
// a dim with `len` places `stride` apart; an index outside goes nowhere, nor does `without`.
//
// index_add: positions, of which several may name one place; batches, of which each has its own places and
// indices; columns, which share indices. The block of a position whose place no earlier one names
// adds all that name it, in order: no atomic additions, and the same sums in every run.
// put_apart: no two positions name one place.
//
// Bytes: x once; of out what is named, once, read too if ACCUMULATE. index_add reads the indices of a batch once
// per position, from the L2 cache. Launch: positions x batches (see place) or ceil(n / 256) blocks of 256 threads.
//
// Defined before: ELEM, ACCUMULATE, RANK, INDEX.
#include "device.cuh"

struct Loops {
    i64 n, extent[RANK], x_stride[RANK], index_stride[RANK], out_stride[RANK];
};

struct Params {
    const ELEM* x;
    const int* index;
    float* out;
    i64 first, len, stride, without;
    // With put_apart, only the first.
    Loops columns, positions, batches;
};

const int THREADS = 256;

KERNEL void __launch_bounds__(THREADS) index_add(const Params p) {
    __shared__ u32 named[THREADS / 32];
    const Loops &columns = p.columns, &positions = p.positions;
    const Place block = place(positions.n, p.batches.n);
    const u32 me = block.x, batch = block.y;
    const ELEM* x = p.x + walk(batch, p.batches.extent, p.batches.x_stride);
    const int* index = p.index + walk(batch, p.batches.extent, p.batches.index_stride);
    auto index_of = [&](u32 i) { return index[walk(i, positions.extent, positions.index_stride)]; };
    const int mine = index_of(me);
    const i64 place = mine - p.first;
    if (place < 0 || place >= p.len || mine == p.without) return;
    float* out = p.out + walk(batch, p.batches.extent, p.batches.out_stride) + place * p.stride;

    bool earlier = false;
    for (u32 i = threadIdx.x; i < me && !earlier; i += THREADS) earlier = index_of(i) == mine;
    if (__syncthreads_or(earlier)) return;

    for (u32 from = me; from < (u32)positions.n; from += THREADS) {
        const u32 i = from + threadIdx.x;
        const u32 found = __ballot_sync(ALL_LANES, i < (u32)positions.n && index_of(i) == mine);
        if (lane_id() == 0) named[warp_id()] = found;
        __syncthreads();
        for (int w = 0; w < THREADS / 32; w++) {
            for (u32 rest = named[w]; rest; rest &= rest - 1) {
                const u32 source = from + w * 32 + __ffs(rest) - 1;
                const ELEM* row = x + walk(source, positions.extent, positions.x_stride);
                for (u32 c = threadIdx.x; c < (u32)columns.n; c += THREADS) {
                    const float add = number(row[walk(c, columns.extent, columns.x_stride)]);
                    float& to = out[walk(c, columns.extent, columns.out_stride)];
                    to = !ACCUMULATE && source == me ? add : to + add;
                }
            }
        }
        __syncthreads();
    }
}

KERNEL void __launch_bounds__(THREADS) put_apart(const Params p) {
    const Loops& all = p.columns;
    const INDEX i = (INDEX)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (INDEX)all.n) return;
    const i64 index = p.index[walk(i, all.extent, all.index_stride)];
    const i64 place = index - p.first;
    if (place < 0 || place >= p.len || index == p.without) return;
    const float add = number(p.x[walk(i, all.extent, all.x_stride)]);
    float& to = p.out[walk(i, all.extent, all.out_stride) + place * p.stride];
    to = ACCUMULATE ? to + add : add;
}
