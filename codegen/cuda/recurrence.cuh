// What gated linear recurrences and their gradients have in common: a chunk of tokens at a time, as
// runtime/src/recurrence.rs has them. A block takes a head of a row after the other, with its part of the workspace, which
// the L2 cache holds; the order of all sums is that of one block.
//
// Defined before: WIDTH (of queries and keys), VALUE_WIDTH, CHUNK (tokens), DELTA, SEGMENTS, START, BACKWARD.
#ifndef RECURRENCE_CUH
#define RECURRENCE_CUH
#include "device.cuh"

struct Params {
    const float *q, *k, *g, *v, *beta;
    const int* segments;
    const float* start;
    float* scratch;
    i64 q_stride[3], k_stride[3], g_stride[3], v_stride[3], beta_stride[3], segments_stride[2], start_stride[3];
    i64 tokens, heads, all, words;
#if BACKWARD
    const float *d_out, *d_end;
    float *d_q, *d_k, *d_g, *d_v, *d_beta, *d_start;
    i64 d_out_stride[3], d_end_stride[3], d_q_stride[3], d_k_stride[3], d_g_stride[3], d_v_stride[3], d_beta_stride[3],
        d_start_stride[3];
#else
    float *out, *end;
    i64 out_stride[3], end_stride[3];
#endif
};

const int THREADS = 256, WARPS = THREADS / 32;
// Sides of what a block multiplies at once, and rows of a triangular system that are solved one by one.
const int SIDE = 64, DEPTH = 16, ROWS = 16;

// Element (i, j) is at[i * row + j * col].
struct Matrix {
    float* at;
    i64 row, col;
    DEVICE float& of(int i, int j) const { return at[i * row + j * col]; }
    DEVICE Matrix turned() const { return {at, col, row}; }
    DEVICE Matrix from(int i, int j) const { return {&of(i, j), row, col}; }
};

DEVICE Matrix rows_of(const float* at, i64 stride) { return {const_cast<float*>(at), stride, 1}; }

// Elements of a matrix, a thread after the other; what was written before is seen behind it.
#define EACH(i, j, rows, cols)                                                                       \
    for (int n_ = threadIdx.x; n_ < (rows) * (cols); n_ += THREADS)                                  \
        for (int c_ = (cols) > 0 ? (cols) : 1, i = n_ / c_, j = n_ % c_, once_ = 1; once_; once_ = 0)

// c[m, n] = by · a b, added to c if `adds`. All threads; a barrier before and behind it.
DEVICE void multiply(int m, int n, int depth, Matrix a, Matrix b, Matrix c, float by, bool adds) {
    __shared__ float of_a[DEPTH][SIDE + 1], of_b[DEPTH][SIDE + 1];
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
    for (int first_row = 0; first_row < m; first_row += SIDE) {
        for (int first_col = 0; first_col < n; first_col += SIDE) {
            float sum[4][4] = {};
            for (int first = 0; first < depth; first += DEPTH) {
                __syncthreads();
                for (int e = threadIdx.x; e < DEPTH * SIDE; e += THREADS) {
                    // Neighbours of memory are read by neighbours.
                    const int ka = a.col == 1 ? e % DEPTH : e / SIDE, i = a.col == 1 ? e / DEPTH : e % SIDE;
                    const int kb = b.col == 1 ? e / SIDE : e % DEPTH, j = b.col == 1 ? e % SIDE : e / DEPTH;
                    const bool in_a = first + ka < depth && first_row + i < m;
                    const bool in_b = first + kb < depth && first_col + j < n;
                    of_a[ka][i] = in_a ? a.of(first_row + i, first + ka) : 0.0f;
                    of_b[kb][j] = in_b ? b.of(first + kb, first_col + j) : 0.0f;
                }
                __syncthreads();
                for (int d = 0; d < DEPTH; d++) {
                    for (int i = 0; i < 4; i++) {
                        for (int j = 0; j < 4; j++) sum[i][j] += of_a[d][y * 4 + i] * of_b[d][x + 16 * j];
                    }
                }
            }
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) {
                    const int row = first_row + y * 4 + i, col = first_col + x + 16 * j;
                    if (row >= m || col >= n) continue;
                    float& to = c.of(row, col);
                    to = adds ? to + by * sum[i][j] : by * sum[i][j];
                }
            }
        }
    }
    __syncthreads();
}

// Tokens that follow each other: sums of g up to each, borders of documents up to each, and β.
struct Chunk {
    double sums[CHUNK];
    int runs[CHUNK], len;
    float beta[CHUNK];
    DEVICE float factor(bool is, double exponent) const { return is ? expf((float)exponent) : 0.0f; }
    // How much of token j token i sees, of the state before the chunk, and what of it is in the state behind it.
    DEVICE float seen(int i, int j) const { return factor(j <= i && runs[i] == runs[j], sums[i] - sums[j]); }
    DEVICE float before(int i) const { return factor(runs[i] == 0, sums[i]); }
    DEVICE float behind(int i) const { return factor(runs[i] == runs[len - 1], sums[len - 1] - sums[i]); }
};

// A head of a row, and matrices of its part of the workspace: A, W, M and the gradient of one of them; N, what that is
// made of and its gradient; rows times a factor each; the state, and backward those before all chunks.
struct Head {
    const Params& p;
    i64 batch, head;
    Matrix pairs[4], values[3], scaled, state;
    float* states;

    DEVICE Head(const Params& p, i64 task, float* at) : p(p), batch(task / p.heads), head(task % p.heads) {
        for (int i = 0; i < (BACKWARD ? 4 : 3); i++, at += CHUNK * CHUNK) pairs[i] = rows_of(at, CHUNK);
        for (int i = 0; i < (BACKWARD ? 3 : 1); i++, at += CHUNK * VALUE_WIDTH) values[i] = rows_of(at, VALUE_WIDTH);
        scaled = rows_of(at, WIDTH);
        state = rows_of(at += CHUNK * WIDTH, VALUE_WIDTH);
        states = at + WIDTH * VALUE_WIDTH;
    }
    DEVICE i64 place(const i64 (&stride)[3], i64 token) const {
        return batch * stride[0] + token * stride[1] + head * stride[2];
    }
    DEVICE Matrix rows(const float* at, const i64 (&stride)[3], i64 token) const {
        return rows_of(at + place(stride, token), stride[1]);
    }
    DEVICE Matrix state_of(const float* at, const i64 (&stride)[3]) const {
        return rows_of(at + batch * stride[0] + head * stride[1], stride[2]);
    }
    DEVICE Matrix before_chunk(i64 i) const { return rows_of(states + i * WIDTH * VALUE_WIDTH, VALUE_WIDTH); }
    DEVICE Matrix keys(i64 token) const { return rows(p.k, p.k_stride, token); }
    DEVICE Matrix queries(i64 token) const { return rows(p.q, p.q_stride, token); }

    // Whether a document begins at a token that is not the first.
    DEVICE bool borders(i64 token) const {
        if (!SEGMENTS || token == 0) return false;
        const int* at = p.segments + batch * p.segments_stride[0] + token * p.segments_stride[1];
        return at[0] != at[-p.segments_stride[1]];
    }

    DEVICE void chunk(Chunk& c, i64 first) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            c.len = (int)smaller((i64)CHUNK, p.tokens - first);
            double sum = 0.0;
            for (int i = 0, run = 0; i < c.len; i++) {
                sum += p.g[place(p.g_stride, first + i)];
                run += borders(first + i);
                c.sums[i] = sum;
                c.runs[i] = run;
                c.beta[i] = DELTA ? p.beta[place(p.beta_stride, first + i)] : 1.0f;
            }
        }
        __syncthreads();
        EACH(i, j, c.len, c.len) pairs[0].of(i, j) = c.seen(i, j);
        __syncthreads();
    }

    DEVICE void copy(const float* from, const i64 (&stride)[3], bool there, Matrix to) const {
        const Matrix own = state_of(from, stride);
        EACH(i, j, WIDTH, VALUE_WIDTH) to.of(i, j) = there ? own.of(i, j) : 0.0f;
        __syncthreads();
    }

    // x Kᵀ ∘ A, below the diagonal only if `strict`.
    DEVICE void seen(const Chunk& c, i64 first, Matrix x, Matrix to, bool strict) const {
        multiply(c.len, c.len, WIDTH, x, keys(first).turned(), to, 1.0f, false);
        EACH(i, j, c.len, c.len) to.of(i, j) = j < i + !strict ? to.of(i, j) * pairs[0].of(i, j) : 0.0f;
        __syncthreads();
    }

    // Rows of tokens times what of the state before the chunk they see, or what of them is in that behind it.
    DEVICE void times(const Chunk& c, Matrix from, bool before) const {
        EACH(i, j, c.len, WIDTH) scaled.of(i, j) = from.of(i, j) * (before ? c.before(i) : c.behind(i));
        __syncthreads();
    }

    // What tokens write to the state, N; what that is made of is left in the second matrix of values, if `keeps`.
    DEVICE Matrix written(const Chunk& c, i64 first, Matrix state, bool keeps) const {
        const Matrix own = rows(p.v, p.v_stride, first), n = values[0], w = pairs[1];
        if (!DELTA) return own;
        seen(c, first, keys(first), w, true);
        multiply(c.len, VALUE_WIDTH, WIDTH, keys(first), state, n, 1.0f, false);
        EACH(i, j, c.len, VALUE_WIDTH) {
            n.of(i, j) = own.of(i, j) - c.before(i) * n.of(i, j);
            if (keeps) values[1].of(i, j) = n.of(i, j);
        }
        __syncthreads();
        for (int top = 0; top < c.len; top += ROWS) {
            const int end = smaller(c.len, top + ROWS);
            if (top > 0) multiply(end - top, VALUE_WIDTH, top, w.from(top, 0), n, n.from(top, 0), -1.0f, true);
            // Columns are solved by themselves.
            for (int col = threadIdx.x; col < VALUE_WIDTH; col += THREADS) {
                for (int i = top; i < end; i++) {
                    float x = n.of(i, col);
                    for (int j = top; j < i; j++) x -= w.of(i, j) * n.of(j, col);
                    n.of(i, col) = x * c.beta[i];
                }
            }
            __syncthreads();
        }
        return n;
    }

    // The state behind a chunk from that before it.
    DEVICE void advance(const Chunk& c, i64 first, Matrix n, Matrix to) const {
        times(c, keys(first), false);
        const float through = c.before(c.len - 1);
        EACH(i, j, WIDTH, VALUE_WIDTH) to.of(i, j) *= through;
        multiply(WIDTH, VALUE_WIDTH, c.len, scaled.turned(), n, to, 1.0f, true);
    }

#if BACKWARD
    DEVICE void gradients(const Chunk& c, i64 first, Matrix state) const;
    DEVICE void of_delta(const Chunk& c, i64 first, Matrix state, Matrix n, double* sums, double* d_beta) const;
#endif
};

#endif
