// Gradients of gated linear recurrences: states before all chunks, then chunks from the last.
//
// Bytes: q, k, v and g twice, cotangents and results once, a chunk's matrices and states from the cache. Launch: as many
// blocks of 256 threads as the workspace has parts, at most one for a head.
#include "recurrence.cuh"

// Σ x y of rows of so many elements, by a warp.
DEVICE float dot(Matrix x, Matrix y, int row, int n) {
    float sum = 0.0f;
    for (int j = lane_id(); j < n; j += 32) sum += x.of(row, j) * y.of(row, j);
    return sum_lanes<32>(sum);
}

// The gradient of a matrix x yᵀ ∘ A becomes that of x yᵀ; what it makes of the sums in A.
DEVICE void of_pairs(int len, Matrix a, Matrix m, Matrix d, double* sums) {
    for (int i = threadIdx.x; i < len; i += THREADS) {
        double sum = 0.0;
        for (int j = 0; j < len; j++) sum += (double)(d.of(i, j) * m.of(i, j)) - (double)(d.of(j, i) * m.of(j, i));
        sums[i] += sum;
    }
    __syncthreads();
    EACH(i, j, len, len) d.of(i, j) *= a.of(i, j);
    __syncthreads();
}

// What follows from the gradient of N by the delta rule: (I + B W)ᵀ dR = dN, dV = B dR, and what W, the state and β are
// made of.
DEVICE void Head::of_delta(const Chunk& c, i64 first, Matrix state, Matrix n, double* sums, double* d_beta) const {
    const Matrix d_v = rows(p.d_v, p.d_v_stride, first), d_k = rows(p.d_k, p.d_k_stride, first);
    const Matrix w = pairs[1], d_w = pairs[3], d_r = values[2];
    for (int top = (c.len - 1) / ROWS * ROWS; top >= 0; top -= ROWS) {
        const int end = smaller(c.len, top + ROWS);
        if (end < c.len) {
            multiply(end - top, VALUE_WIDTH, c.len - end, w.from(end, top).turned(), d_v.from(end, 0), d_r.from(top, 0), -1.0f, true);
        }
        for (int col = threadIdx.x; col < VALUE_WIDTH; col += THREADS) {
            for (int i = end - 1; i >= top; i--) {
                float x = d_r.of(i, col);
                for (int j = i + 1; j < end; j++) x -= w.of(j, i) * d_v.of(j, col);
                d_r.of(i, col) = x;
                d_v.of(i, col) = c.beta[i] * x;
            }
        }
        __syncthreads();
    }
    // Of B W it is -dR Nᵀ.
    multiply(c.len, c.len, VALUE_WIDTH, d_r, n.turned(), d_w, -1.0f, false);
    EACH(i, j, c.len, c.len) if (j >= i) d_w.of(i, j) = 0.0f;
    __syncthreads();
    for (int i = warp_id(); i < c.len; i += WARPS) {
        const float own = dot(d_r, values[1], i, VALUE_WIDTH), pair = dot(d_w, w, i, c.len);
        if (lane_id() == 0) d_beta[i] = (double)own + (double)pair;
    }
    __syncthreads();
    EACH(i, j, c.len, c.len) d_w.of(i, j) *= c.beta[i];
    __syncthreads();
    of_pairs(c.len, pairs[0], w, d_w, sums);
    multiply(c.len, WIDTH, c.len, d_w, keys(first), d_k, 1.0f, true);
    multiply(c.len, WIDTH, c.len, d_w.turned(), keys(first), d_k, 1.0f, true);
    // Of D K S it is -dV.
    multiply(c.len, WIDTH, VALUE_WIDTH, d_v, state.turned(), scaled, -1.0f, false);
    EACH(i, j, c.len, WIDTH) {
        scaled.of(i, j) *= c.before(i);
        d_k.of(i, j) += scaled.of(i, j);
    }
    __syncthreads();
    for (int i = warp_id(); i < c.len; i += WARPS) {
        const float own = dot(scaled, keys(first), i, WIDTH);
        if (lane_id() == 0) sums[i] += (double)own;
    }
    __syncthreads();
}

// The gradients of a chunk; the workspace's state is that of the state behind it, and becomes that of the state before it.
DEVICE void Head::gradients(const Chunk& c, i64 first, Matrix before) const {
    // Of the sums of g, of β, and products of rows of keys, and of states.
    __shared__ double sums[CHUNK], d_beta[CHUNK], written_[CHUNK], of_states[WARPS];
    const Matrix m = pairs[2], d_m = pairs[3], d_n = values[2];
    const Matrix q = queries(first), k = keys(first), d_out = rows(p.d_out, p.d_out_stride, first);
    const Matrix d_q = rows(p.d_q, p.d_q_stride, first), d_k = rows(p.d_k, p.d_k_stride, first);
    const Matrix d_v = rows(p.d_v, p.d_v_stride, first);
    for (int i = threadIdx.x; i < c.len; i += THREADS) sums[i] = d_beta[i] = 0.0;
    const Matrix n = written(c, first, before, true);
    seen(c, first, q, m, false);
    // dN = Mᵀ dO + Λ K dS'
    times(c, k, false);
    multiply(c.len, VALUE_WIDTH, WIDTH, scaled, state, d_n, 1.0f, false);
    multiply(c.len, VALUE_WIDTH, c.len, m.turned(), d_out, d_n, 1.0f, true);
    // dM = dO Nᵀ
    multiply(c.len, c.len, VALUE_WIDTH, d_out, n.turned(), d_m, 1.0f, false);
    of_pairs(c.len, pairs[0], m, d_m, sums);
    // dQ = D dO Sᵀ + (dM ∘ A) K,  dK = Λ N dS'ᵀ + (dM ∘ A)ᵀ Q
    multiply(c.len, WIDTH, VALUE_WIDTH, d_out, before.turned(), d_q, 1.0f, false);
    multiply(c.len, WIDTH, VALUE_WIDTH, n, state.turned(), d_k, 1.0f, false);
    EACH(i, j, c.len, WIDTH) {
        d_q.of(i, j) *= c.before(i);
        d_k.of(i, j) *= c.behind(i);
    }
    __syncthreads();
    for (int i = warp_id(); i < c.len; i += WARPS) {
        const float of_key = dot(d_k, k, i, WIDTH), of_query = dot(d_q, q, i, WIDTH);
        if (lane_id() != 0) continue;
        written_[i] = of_key;
        sums[i] += (double)of_query - (double)of_key;
    }
    double total = 0.0;
    for (int d = warp_id(); d < WIDTH; d += WARPS) total += (double)dot(state, before, d, VALUE_WIDTH);
    if (lane_id() == 0) of_states[warp_id()] = total;
    __syncthreads();
    const float through = c.before(c.len - 1);
    if (threadIdx.x == 0) {
        double at_end = 0.0, all = 0.0;
        for (int i = 0; i < c.len; i++) at_end += written_[i];
        for (int w = 0; w < WARPS; w++) all += of_states[w];
        sums[c.len - 1] += at_end + (double)through * all;
    }
    multiply(c.len, WIDTH, c.len, d_m, k, d_q, 1.0f, true);
    multiply(c.len, WIDTH, c.len, d_m.turned(), q, d_k, 1.0f, true);
    if (DELTA) {
        of_delta(c, first, before, n, sums, d_beta);
    } else {
        EACH(i, j, c.len, VALUE_WIDTH) d_v.of(i, j) = d_n.of(i, j);
    }
    __syncthreads();
    // dS = e^(G_last) dS' + (D Q)ᵀ dO - (D K)ᵀ dV
    EACH(i, j, WIDTH, VALUE_WIDTH) state.of(i, j) *= through;
    times(c, q, true);
    multiply(WIDTH, VALUE_WIDTH, c.len, scaled.turned(), d_out, state, 1.0f, true);
    if (DELTA) {
        times(c, k, true);
        multiply(WIDTH, VALUE_WIDTH, c.len, scaled.turned(), d_v, state, -1.0f, true);
    }
    if (threadIdx.x == 0) {
        double sum = 0.0;
        for (int i = c.len - 1; i >= 0; i--) {
            sum += sums[i];
            // The state before a border is dropped, however it decays.
            p.d_g[place(p.d_g_stride, first + i)] = borders(first + i) ? 0.0f : (float)sum;
            if (DELTA) p.d_beta[place(p.d_beta_stride, first + i)] = (float)d_beta[i];
        }
    }
    __syncthreads();
}

KERNEL void __launch_bounds__(THREADS) recurrence_grad(CONSTANT Params p) {
    __shared__ Chunk c;
    for (i64 task = blockIdx.x; task < p.all; task += gridDim.x) {
        const Head h(p, task, p.scratch + blockIdx.x * p.words);
        const i64 chunks = (p.tokens + CHUNK - 1) / CHUNK;
        if (chunks > 0) h.copy(p.start, p.start_stride, START, h.before_chunk(0));
        for (i64 i = 0; i + 1 < chunks; i++) {
            const Matrix from = h.before_chunk(i), to = h.before_chunk(i + 1);
            h.chunk(c, i * CHUNK);
            const Matrix n = h.written(c, i * CHUNK, from, false);
            EACH(d, j, WIDTH, VALUE_WIDTH) to.of(d, j) = from.of(d, j);
            __syncthreads();
            h.advance(c, i * CHUNK, n, to);
        }
        h.copy(p.d_end, p.d_end_stride, true, h.state);
        for (i64 i = chunks - 1; i >= 0; i--) {
            h.chunk(c, i * CHUNK);
            h.gradients(c, i * CHUNK, h.before_chunk(i));
        }
        if (START) {
            const Matrix d_start = h.state_of(p.d_start, p.d_start_stride);
            EACH(i, j, WIDTH, VALUE_WIDTH) d_start.of(i, j) = h.state.of(i, j);
        }
        __syncthreads();
    }
}
