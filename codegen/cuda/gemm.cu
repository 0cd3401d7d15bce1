// out[m,n] = sum of a[m,k] b[k,n] for every index of the batch loops, summed over the sum loops too.
//
// Bytes: out once; a once per TILE_N columns and b once per TILE_M rows, mostly from the L2 cache.
// Launch: ceil(m / TILE_M) x ceil(n / TILE_N) x batches blocks (see
// place_in_bands) of 32 WARPS_M WARPS_N threads; the
// shared memory of STAGES tiles of each operand, or of the
// tile of the result in f32 if that is more.
//
// Defined before: those of product.cuh; BATCHES and SUMS, the numbers of loops; if THEN is, the struct
// of what becomes of the result, which is not written then.
#include "product.cuh"

struct Params {
    const A* a;
    const B* b;
    OUT* out;
    i64 m, n, k, a_row, a_col, b_row, b_col, out_row, out_col;
    i64 batch[BATCHES], a_batch[BATCHES], b_batch[BATCHES], out_batch[BATCHES];
    i64 sums, sum[SUMS], a_sum[SUMS], b_sum[SUMS];
#ifdef THEN
    Then then;
#endif
};

KERNEL void __launch_bounds__(THREADS, BLOCKS) gemm(const Params p) {
    const Place block = place_in_bands((p.m + TILE_M - 1) / TILE_M, (p.n + TILE_N - 1) / TILE_N);
    const i64 m = (i64)block.x * TILE_M, n = (i64)block.y * TILE_N;
    const u32 batch = block.z;
    const Shape shape = {p.a_row, p.a_col, p.b_row, p.b_col, (int)smaller(p.m - m, (i64)TILE_M),
                         (int)smaller(p.n - n, (i64)TILE_N)};
    const A* a = p.a + walk(batch, p.batch, p.a_batch) + m * p.a_row;
    const B* b = p.b + walk(batch, p.batch, p.b_batch) + n * p.b_col;
    // Steps of k of a sum, and how long the last one is.
    const int per_sum = (int)((p.k + TILE_K - 1) / TILE_K);
    const int last = (int)(p.k - (i64)(per_sum - 1) * TILE_K);
    const i64 a_step = TILE_K * p.a_col, b_step = TILE_K * p.b_row;
    u32 sum = 0;
    int step = 0;
    // Where this sum begins, and its next step.
    Piece begin = {a, b, 0}, at = begin;
    auto next = [&] {
        const bool ends = ++step == per_sum;
        const Piece piece = {at.a, at.b, ends ? last : TILE_K};
        at.a += a_step;
        at.b += b_step;
        if (ends) {
            step = 0;
            if (SUMS == 1) {
                begin = {begin.a + p.a_sum[0], begin.b + p.b_sum[0], 0};
            } else {
                sum++;
                begin = {a + walk(sum, p.sum, p.a_sum), b + walk(sum, p.sum, p.b_sum), 0};
            }
            at = begin;
        }
        return piece;
    };
    Sums acc;
    sum_pieces(acc, (int)p.sums * per_sum, shape, next);
#ifdef THEN
    Then then = p.then;
    then.move(batch, p.batch, m, n);
#else
    const Stored then = {p.out + walk(batch, p.batch, p.out_batch) + m * p.out_row + n * p.out_col,
                         p.out_row, p.out_col};
#endif
    take_tile(acc, then, shape.m, shape.n);
}
