// What the forward and the backward kernels of attention know in common: who sees whom.
#ifndef ATTENTION_CUH
#define ATTENTION_CUH
#include "random.cuh"

const int MAX_INT = 0x7fffffff, MIN_INT = -MAX_INT - 1;
const float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// A range of positions, or of indices; empty if `first > last`.
struct Range {
    int first, last;
    DEVICE bool has(int i) const { return first <= i && i <= last; }
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

// Who sees whom: from a position those from `back` before it to `ahead` behind it are seen (2^32: at any
// distance), in its chunk of so many positions (0: there are no chunks). Both ends ascend with the position.
struct Mask {
    i64 back, ahead, chunk;
    DEVICE Range reach(int at) const {
        i64 first = at - back, last = at + ahead;
        if (chunk > 0) {
            const i64 begin = at - (at % chunk + chunk) % chunk, end = begin + chunk - 1;
            first = begin > first ? begin : first;
            last = end < last ? end : last;
        }
        return {(int)(first < MIN_INT ? MIN_INT : first), (int)(last > MAX_INT ? MAX_INT : last)};
    }
    // What is seen from some position from `first` to `last`, and what from all of them.
    DEVICE Range some(Range r) const { return {reach(r.first).first, reach(r.last).last}; }
    DEVICE Range all(Range r) const { return {reach(r.last).first, reach(r.first).last}; }
    // What keys see of queries.
    DEVICE Mask turned() const { return {ahead, back, chunk}; }
};

// Dropout of probabilities: each is kept or not by the place of its query, its head and the position of its key.
struct Kept {
    const int *run, *place;  // seed in two halves and step; of [b, query]
    i64 place_stride[2], first_head;
    // Halves of the stream's number, what is kept below.
    i64 stream[2], threshold;
    double factor;

    DEVICE bool drops() const { return run[2] != 0; }
    DEVICE u32 at(int b, i64 query) const {
        return (u32)place[b * place_stride[0] + query * place_stride[1]];
    }
    // The words of a key's block: those of four adjacent positions.
    DEVICE Words words(u32 at, int head, int key) const {
        return philox({{(u32)key / 4, at, (u32)run[2], (u32)(first_head + head + 1)}},
                      (u32)stream[0] ^ (u32)run[0], (u32)stream[1] ^ (u32)run[1]);
    }
    // What the probability of a key is multiplied by, one of its block.
    DEVICE float of(const Words& w, int key) const {
        const u32 low = key & 1 ? w.at[1] : w.at[0], high = key & 1 ? w.at[3] : w.at[2];
        return (i64)(key & 2 ? high : low) < threshold ? (float)factor : 0.0f;
    }
    DEVICE float of(u32 at, int head, int key) const { return of(words(at, head, key), key); }
};

// How far apart two positions are.
DEVICE float distance(int a, int b) { return fabsf((float)((i64)a - b)); }

// A bias of scores: of each head a number for each of so many offsets, key less query, the middle one of which is 0;
// those at the ends are of all that are farther. Backward also where its gradient goes.
struct Bias {
    const float* of;
    float* d_of;
    // Between heads.
    i64 stride, d_stride, offsets, batch;

    DEVICE i64 index(int query, int key) const {
        const i64 last = offsets - 1, i = (i64)key - query + last / 2;
        return i < 0 ? 0 : i > last ? last : i;
    }
    DEVICE float at(int head, int query, int key) const { return of[head * stride + index(query, key)]; }
};

// The reach of some positions, of so many rows; of rows behind the last `n` nothing.
template <int Rows, int Threads>
DEVICE void load_reach(Range* to, const Mask& mask, const int* position, int n) {
    for (int i = threadIdx.x; i < Rows; i += Threads) to[i] = i < n ? mask.reach(position[i]) : Range{1, 0};
}

// The smallest and the largest of some positions.
template <int Threads>
DEVICE Range positions(const int* position, int n) {
    Range r = {MAX_INT, MIN_INT};
    for (int i = threadIdx.x; i < n; i += Threads) {
        r = {smaller(r.first, position[i]), larger(r.last, position[i])};
    }
    return join<Threads>(r);
}

// Segments of queries and of keys, of each row of the batch adjacent: those of one segment see each other.
struct Segments {
    const int *q, *k;
    i64 q_stride, k_stride;
};

// The indices outside of which no position is in a range, with a segment, if there are segments, in another.
template <int Threads>
DEVICE Range indices(const int* position, int n, Range near, const int* segment = nullptr, Range one = {0, 0}) {
    Range r = {MAX_INT, -1};
    for (int i = threadIdx.x; i < n; i += Threads) {
        if (near.has(position[i]) && (!segment || one.has(segment[i]))) r = {smaller(r.first, i), i};
    }
    return join<Threads>(r);
}

#endif  // ATTENTION_CUH
