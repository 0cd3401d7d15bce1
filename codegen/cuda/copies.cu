// Tokens and the rows of their copies in the buffers of experts, named by slots:
//   dispatch: row = token * gate, for every copy that has a row
//   unpermute: token = the sum of its copies' rows * gates, in the order of copies
//   combine_gates_grad: gate = token · row; 0 for a copy without a row
//
// Bytes: each row that is there once; tokens once; slots and gates once. Launch: tokens x shards
// blocks (see place) of 128 threads.
//
// Defined before: BUFFER, TOKEN and GATE, their elements; PACK, as for rope.cu.
#include "device.cuh"

struct Params {
    BUFFER* buffer;
    TOKEN* tokens;
    GATE* gates;
    const int* slot;
    // [group, shard, row], [shard, token], [shard, token, copy] twice; the width is adjacent.
    i64 buffer_stride[3], tokens_stride[2], gates_stride[3], slot_stride[3];
    // Tokens of a shard.
    i64 count, copies, groups, rows, width;
};

const int THREADS = 128;

// The token of this block, and its shard.
DEVICE i64 mine(const Params& p) { return place(p.count, 1).x; }
DEVICE i64 shard(const Params& p) { return place(p.count, 1).z; }

DEVICE TOKEN* token(const Params& p) {
    return p.tokens + shard(p) * p.tokens_stride[0] + mine(p) * p.tokens_stride[1];
}

DEVICE GATE* gate(const Params& p, int copy) {
    return p.gates + shard(p) * p.gates_stride[0] + mine(p) * p.gates_stride[1] +
           copy * p.gates_stride[2];
}

// The row of a copy, or null.
DEVICE BUFFER* row(const Params& p, int copy) {
    const int slot = p.slot[shard(p) * p.slot_stride[0] + mine(p) * p.slot_stride[1] +
                            copy * p.slot_stride[2]];
    if (slot < 0 || slot >= p.groups * p.rows) return nullptr;
    const int rows = (int)p.rows;
    return p.buffer + slot / rows * p.buffer_stride[0] + shard(p) * p.buffer_stride[1] +
           slot % rows * p.buffer_stride[2];
}

KERNEL void __launch_bounds__(THREADS) dispatch(const Params p) {
    const TOKEN* x = token(p);
    for (int copy = 0; copy < (int)p.copies; copy++) {
        BUFFER* to = row(p, copy);
        if (!to) continue;
        const float by = number(*gate(p, copy));
        for (int i = threadIdx.x * PACK; i < (int)p.width; i += THREADS * PACK) {
            const Pack<TOKEN, PACK> from = load<PACK>(x + i);
            Pack<BUFFER, PACK> made;
            #pragma unroll
            for (int k = 0; k < PACK; k++) assign(made.at[k], number(from.at[k]) * by);
            store<PACK>(to + i, made);
        }
    }
}

KERNEL void __launch_bounds__(THREADS) unpermute(const Params p) {
    TOKEN* to = token(p);
    for (int i = threadIdx.x * PACK; i < (int)p.width; i += THREADS * PACK) {
        float sum[PACK] = {};
        for (int copy = 0; copy < (int)p.copies; copy++) {
            const BUFFER* from = row(p, copy);
            if (!from) continue;
            const float by = number(*gate(p, copy));
            const Pack<BUFFER, PACK> x = load<PACK>(from + i);
            #pragma unroll
            for (int k = 0; k < PACK; k++) sum[k] += number(x.at[k]) * by;
        }
        Pack<TOKEN, PACK> made;
        #pragma unroll
        for (int k = 0; k < PACK; k++) assign(made.at[k], sum[k]);
        store<PACK>(to + i, made);
    }
}

// A warp for a copy.
KERNEL void __launch_bounds__(THREADS) combine_gates_grad(const Params p) {
    const TOKEN* x = token(p);
    for (int copy = warp_id(); copy < (int)p.copies; copy += THREADS / 32) {
        const BUFFER* y = row(p, copy);
        float sum = 0.0f;
        for (int i = lane_id() * PACK; y && i < (int)p.width; i += 32 * PACK) {
            const Pack<TOKEN, PACK> a = load<PACK>(x + i);
            const Pack<BUFFER, PACK> b = load<PACK>(y + i);
            #pragma unroll
            for (int k = 0; k < PACK; k++) sum += number(a.at[k]) * number(b.at[k]);
        }
        sum = sum_lanes<32>(sum);
        if (lane_id() == 0) assign(*gate(p, copy), sum);
    }
}
