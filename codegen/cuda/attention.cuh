// What the forward and the backward kernels of attention know in common: who sees whom.
#ifndef ATTENTION_CUH
#define ATTENTION_CUH
#include "device.cuh"

const float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// A key is seen from a query if it is not later and less than `window` (2^31: any distance) before.
DEVICE bool sees(int query, int key, u32 window) { return (u32)query - (u32)key < window; }

// A range of positions, or of indices; empty if `first > last`.
struct Range {
    int first, last;
};

// Smallest and largest over all threads of the block.
template <int Threads>
DEVICE Range join(Range mine) {
    __shared__ Range of_warp[Threads / 32];
    const Range r = {min_lanes<32>(mine.first), max_lanes<32>(mine.last)};
    if (lane_id() == 0) of_warp[warp_id()] = r;
    __syncthreads();
    Range all = of_warp[0];
    for (int w = 1; w < Threads / 32; w++) {
        all.first = smaller(all.first, of_warp[w].first);
        all.last = larger(all.last, of_warp[w].last);
    }
    __syncthreads();
    return all;
}

const int MAX_INT = 0x7fffffff, MIN_INT = -MAX_INT - 1;

// The smallest and the largest of some positions.
template <int Threads>
DEVICE Range positions(const int* position, int n) {
    Range r = {MAX_INT, MIN_INT};
    for (int i = threadIdx.x; i < n; i += Threads) {
        r = {smaller(r.first, position[i]), larger(r.last, position[i])};
    }
    return join<Threads>(r);
}

// The indices outside of which no position is from `low` to `high`.
template <int Threads>
DEVICE Range indices(const int* position, int n, i64 low, i64 high) {
    Range r = {MAX_INT, -1};
    for (int i = threadIdx.x; i < n; i += Threads) {
        if (position[i] >= low && position[i] <= high) r = {smaller(r.first, i), i};
    }
    return join<Threads>(r);
}

#endif  // ATTENTION_CUH
