// Gated linear recurrences:
//
//   M = A ∘ Q Kᵀ    W = A ∘ K Kᵀ below the diagonal    (I + B W) N = B (V - D K S)    (without the delta rule N = V)
//   O = D Q S + M N                                    S' = e^(G_last) S + (Λ K)ᵀ N
//
// Bytes: q, k, g, v and the output once, a chunk's matrices from the cache. Launch: as many blocks of 256 threads as the
// workspace has parts, at most one for a head.
#include "recurrence.cuh"

KERNEL void __launch_bounds__(THREADS) recurrence(CONSTANT Params p) {
    __shared__ Chunk c;
    for (i64 task = blockIdx.x; task < p.all; task += gridDim.x) {
        const Head h(p, task, p.scratch + blockIdx.x * p.words);
        h.copy(p.start, p.start_stride, START, h.state);
        for (i64 first = 0; first < p.tokens; first += CHUNK) {
            h.chunk(c, first);
            const Matrix n = h.written(c, first, h.state, false), m = h.pairs[2];
            h.seen(c, first, h.queries(first), m, false);
            h.times(c, h.queries(first), true);
            const Matrix out = h.rows(p.out, p.out_stride, first);
            multiply(c.len, VALUE_WIDTH, WIDTH, h.scaled, h.state, out, 1.0f, false);
            multiply(c.len, VALUE_WIDTH, c.len, m, n, out, 1.0f, true);
            h.advance(c, first, n, h.state);
        }
        const Matrix end = h.state_of(p.end, p.end_stride);
        EACH(i, j, WIDTH, VALUE_WIDTH) end.of(i, j) = h.state.of(i, j);
        __syncthreads();
    }
}
