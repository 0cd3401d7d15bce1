// Places for the copies of tokens in the buffers of groups of experts. First, route_counts: how many
// copies of a shard each expert gets, at most `capacity`. Then, route_places: copies stand by expert,
// then in the order of tokens; slot = group * rows + row, or -1 for a copy that has no place. If the
// copies of a group need more than `rows` rows, `status` becomes the largest number needed.
//
// Bytes: slot and counts once; index once per expert, from the L2 cache. Launch: experts of all
// groups x shards blocks (see place) of 256 threads.
#include "device.cuh"

struct Params {
    const int* index;
    int *slot, *counts;
    u64* status;
    // index and slot walk [shard, token, copy], counts [group, expert, shard].
    i64 index_stride[3], slot_stride[3], counts_stride[3];
    i64 tokens, copies, groups, experts, rows, capacity;
};

const int THREADS = 256;

// The number of this thread's copy, and its expert; -1 for none.
DEVICE int expert_of(const Params& p, int copy, int shard) {
    const int n = (int)(p.tokens * p.copies), k = (int)p.copies;
    if (copy >= n) return -1;
    const i64 at = shard * p.index_stride[0] + copy / k * p.index_stride[1] +
                   copy % k * p.index_stride[2];
    const int e = p.index[at];
    return e >= 0 && e < (int)(p.groups * p.experts) ? e : -1;
}

// Numbers the threads for which `here` holds, after `before`, which grows by as many.
DEVICE int number_threads(bool here, int& before) {
    __shared__ int of_warp[THREADS / 32];
    const u32 lanes = __ballot_sync(ALL_LANES, here);
    if (lane_id() == 0) of_warp[warp_id()] = __popc(lanes);
    __syncthreads();
    int mine = before + __popc(lanes & ((1u << lane_id()) - 1));
    for (int w = 0; w < THREADS / 32; w++) {
        if (w < warp_id()) mine += of_warp[w];
        before += of_warp[w];
    }
    __syncthreads();
    return mine;
}

KERNEL void __launch_bounds__(THREADS) route_counts(const Params p) {
    const Place block = place(p.groups * p.experts, 1);
    const int expert = block.x, shard = block.z, n = (int)(p.tokens * p.copies);
    int found = 0;
    for (int i = 0; i < n; i += THREADS) {
        number_threads(expert_of(p, i + threadIdx.x, shard) == expert, found);
    }
    const int k = (int)p.experts;
    if (threadIdx.x == 0) {
        p.counts[expert / k * p.counts_stride[0] + expert % k * p.counts_stride[1] +
                 shard * p.counts_stride[2]] = (int)smaller((i64)found, p.capacity);
    }
}

KERNEL void __launch_bounds__(THREADS) route_places(const Params p) {
    const Place block = place(p.groups * p.experts, 1);
    const int expert = block.x, shard = block.z, n = (int)(p.tokens * p.copies);
    const int group = expert / (int)p.experts, place = expert % (int)p.experts;
    const int* counts = p.counts + group * p.counts_stride[0] + shard * p.counts_stride[2];
    int first = 0;
    for (int e = 0; e < place; e++) first += counts[e * p.counts_stride[1]];
    const int own = counts[place * p.counts_stride[1]];
    if (threadIdx.x == 0 && first + own > (int)p.rows) atomicMax(p.status, (u64)(first + own));
    int found = 0;
    for (int i = 0; i < n; i += THREADS) {
        const int copy = i + threadIdx.x, wanted = expert_of(p, copy, shard);
        const int row = first + number_threads(wanted == expert, found);
        // A copy that names no expert is the first expert's to drop.
        if (copy >= n || !(wanted == expert || (wanted == -1 && expert == 0))) continue;
        const bool there = wanted == expert && row < first + own && row < (int)p.rows;
        p.slot[shard * p.slot_stride[0] + copy / (int)p.copies * p.slot_stride[1] +
               copy % (int)p.copies * p.slot_stride[2]] = there ? group * (int)p.rows + row : -1;
    }
}
