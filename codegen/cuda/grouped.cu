// Products of rows with the weights of their experts, which stand in the buffer of a group and a
// shard one after the other, as many as `counts` says:
//   grouped_rows:    out[c,n] = sum over k of a[c,k] w[n,k] or w[k,n], for the rows c of every expert
//   grouped_weights: out[m,n] = sum over the rows c of an expert of a[c,m] b[c,n], of all shards in
//                    order
//
// Bytes: out once; rows once per TILE_N columns, a weight once per TILE_M rows of its expert. Rows
// of no expert are not touched. Launch, of 32 WARPS_M WARPS_N threads (see
// place_in_bands): the tiles of rows that
// there may be in a buffer x ceil(n / TILE_N) x groups * shards, or ceil(m / TILE_M) x ceil(n / TILE_N) x
// experts of all groups; the shared memory of STAGES tiles of each operand, or of the
// tile of the result in f32 if that is more.
//
// Defined before: those of product.cuh; of b, B_ALONG_K says which of both forms of w it is.
#include "product.cuh"

struct Params {
    const A* a;
    const B* b;
    OUT* out;
    const int* counts;
    // Rows walk [group, shard, row], weights [expert of all groups, row]; counts [group, expert,
    // shard].
    i64 a_stride[3], b_stride[3], out_stride[3], counts_stride[3];
    i64 groups, experts, shards, rows, m, n, k;
};

// Rows of an expert, `before` being those of its group and shard that stand before it: what the
// count says, but none beyond the buffer.
DEVICE int rows_of(const Params& p, int group, int expert, int shard, int before) {
    const int n = p.counts[group * p.counts_stride[0] + expert * p.counts_stride[1] +
                           shard * p.counts_stride[2]];
    return smaller(larger(n, 0), (int)p.rows - before);
}

KERNEL void __launch_bounds__(THREADS, BLOCKS) grouped_rows(const Params p) {
    const Place block =
        place_in_bands(p.rows / TILE_M + smaller(p.experts, p.rows), (p.n + TILE_N - 1) / TILE_N);
    const int group = block.z / (int)p.shards, shard = block.z % (int)p.shards;
    // The expert that this tile belongs to, and its rows.
    int tile = block.x, first = 0, expert = 0, there = 0;
    for (; expert < (int)p.experts; expert++) {
        there = rows_of(p, group, expert, shard, first);
        const int tiles = (there + TILE_M - 1) / TILE_M;
        if (tile < tiles) break;
        tile -= tiles;
        first += there;
    }
    if (expert == (int)p.experts) return;

    const i64 n = (i64)block.y * TILE_N, row = first + tile * TILE_M;
    const i64 of_w = B_ALONG_K ? p.b_stride[1] : 1, of_k = B_ALONG_K ? 1 : p.b_stride[1];
    const Shape shape = {p.a_stride[2], 1, of_k, of_w, smaller(there - tile * TILE_M, TILE_M),
                         (int)smaller(p.n - n, (i64)TILE_N)};
    const A* a = p.a + group * p.a_stride[0] + shard * p.a_stride[1] + row * p.a_stride[2];
    const B* b = p.b + (group * p.experts + expert) * p.b_stride[0] + n * of_w;
    i64 k = 0;
    auto next = [&] {
        const Piece piece = {a + k, b + k * of_k, (int)smaller(p.k - k, (i64)TILE_K)};
        k += TILE_K;
        return piece;
    };
    Sums acc;
    sum_pieces(acc, (int)((p.k + TILE_K - 1) / TILE_K), shape, next);
    OUT* out =
        p.out + group * p.out_stride[0] + shard * p.out_stride[1] + row * p.out_stride[2] + n;
    take_tile(acc, Stored{out, p.out_stride[2], 1}, shape.m, shape.n);
}

KERNEL void __launch_bounds__(THREADS, BLOCKS) grouped_weights(const Params p) {
    const Place block = place_in_bands((p.m + TILE_M - 1) / TILE_M, (p.n + TILE_N - 1) / TILE_N);
    const int group = block.z / (int)p.experts, expert = block.z % (int)p.experts;
    const i64 m = (i64)block.x * TILE_M, n = (i64)block.y * TILE_N;
    const Shape shape = {1, p.a_stride[2], p.b_stride[2], 1, (int)smaller(p.m - m, (i64)TILE_M),
                         (int)smaller(p.n - n, (i64)TILE_N)};
    // Where the expert's rows begin in a shard, and how many there are.
    int first = 0, there = 0;
    auto enter = [&](int shard) {
        first = 0;
        for (int e = 0; e < expert; e++) first += rows_of(p, group, e, shard, first);
        there = rows_of(p, group, expert, shard, first);
    };
    int pieces = 0;
    for (int z = 0; z < (int)p.shards; z++) {
        enter(z);
        pieces += (there + TILE_K - 1) / TILE_K;
    }
    int shard = -1, row = 0;
    there = 0;
    auto next = [&] {
        while (row >= there) {
            enter(++shard);
            row = 0;
        }
        const i64 at = first + row;
        const A* a = p.a + group * p.a_stride[0] + shard * p.a_stride[1] + at * p.a_stride[2] + m;
        const B* b = p.b + group * p.b_stride[0] + shard * p.b_stride[1] + at * p.b_stride[2] + n;
        const Piece piece = {a, b, smaller(there - row, TILE_K)};
        row += TILE_K;
        return piece;
    };
    Sums acc;
    sum_pieces(acc, pieces, shape, next);
    OUT* out = p.out + (i64)block.z * p.out_stride[0] + m * p.out_stride[1] + n;
    take_tile(acc, Stored{out, p.out_stride[1], 1}, shape.m, shape.n);
}
