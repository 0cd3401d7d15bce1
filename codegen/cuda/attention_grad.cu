// Attention, backward: from q, k, v, the log-sum-exp and delta = rowsum(d_out out) - d_lse of the
// forward pass, and d_out: with w = exp(score - lse) where keys are seen, 0 elsewhere, and
// s = w (d_out v^T - delta), times 1 - (score / c)^2 if CAPPED; if DROPS, w in d_v and d_out v^T are
// multiplied by what the weight was,
//   d_v = w^T d_out,   d_k = scale s^T q   (attention_grad_keys: a block owns ROWS keys of a group)
//   d_q = scale s k                        (attention_grad_queries: a block owns ROWS queries of a head)
//   d_bias = sums of s, without the slope of a cap, by offset (attention_grad_bias, if BIASED: a thread owns an offset of a head)
// Scores are computed in all kernels; so every sum has one owner and one order, and the same
// result in every run (Dao, 2023, without its atomic additions).
//
// Bytes: what a block owns once; the other side's tiles once per block that sees them.
// Launch: (ceil(keys / ROWS), groups, batch) or (ceil(queries / ROWS), heads, batch) blocks of
// 2 ROWS SPLIT threads; shared memory of two tiles of ROWS rows, and twice two of COLS rows. attention_grad_bias:
// (ceil(offsets / OFFSETS), heads) blocks of OFFSETS threads.
//
// Defined before: ELEM, WIDTH, VALUE_WIDTH, ROWS, COLS, ALIGNED, CAPPED, SLOPED, BIASED, SEGMENTS, DROPS as for attention.cu; SPLIT:
// warps that share 16 rows, each making its part of the columns of the results.
#include "attention.cuh"

struct Params {
    const ELEM *q, *k, *v, *d_out;
    const float *lse, *delta;
    const int *q_pos, *k_pos;
    const float* slopes;  // of heads, if SLOPED
    ELEM *d_q, *d_k, *d_v;
    // [b, position, head]
    i64 q_stride[3], k_stride[3], v_stride[3], d_out_stride[3], lse_stride[3], delta_stride[3];
    i64 d_q_stride[3], d_k_stride[3], d_v_stride[3];
    i64 queries, keys, repeat, width, value_width;
    Mask mask;
    double scale, softcap;
#if BIASED
    Bias bias;
#endif
#if SEGMENTS
    Segments segments;
#endif
#if DROPS
    Kept kept;
#endif
};

const int THREADS = 2 * ROWS * SPLIT;
// Products are made by groups.
const bool GROUPS =
    ROWS % 64 == 0 && for_groups<ELEM>(WIDTH / SPLIT) && for_groups<ELEM>(VALUE_WIDTH / SPLIT);

// As in attention.cu. As many as leave a thread 168 registers.
const int BLOCKS = WIDTH == 80 && VALUE_WIDTH == 80 ? 384 / THREADS : 0;

// Tiles of so many rows, of either width, one after the other.
template <int Rows>
struct Pair {
    Tile<ELEM, Rows, WIDTH, GROUPS> own;
    Tile<ELEM, Rows, VALUE_WIDTH, GROUPS> value;
    static const int SIZE = decltype(own)::SIZE + decltype(value)::SIZE;
    DEVICE Pair(ELEM* begin) : own{begin}, value{own.end()} {}
};

DEVICE i64 at(const i64 (&stride)[3], int b, i64 position, int head) {
    return b * stride[0] + position * stride[1] + head * stride[2];
}

// Rows (of width WIDTH, of width VALUE_WIDTH) are keys and values, columns queries and d_out; or
// the other way round.
template <bool KEYS>
DEVICE void gradients(const Params& p) {
    DYNAMIC_SHARED(ELEM, storage);
    const Pair<ROWS> row_tiles(storage);
    // Of columns that are being used, and of the next.
    auto col_tiles = [&](int i) {
        return Pair<COLS>(storage + Pair<ROWS>::SIZE + (i & 1) * Pair<COLS>::SIZE);
    };
    // Statistics belong to queries, which are rows or columns.
    __shared__ Range row_sees[ROWS];
    __shared__ int col_pos[2][COLS];
    __shared__ float col_lse[2][COLS], col_delta[2][COLS];
#if SEGMENTS
    __shared__ int col_segment[2][COLS];
#endif
#if DROPS
    __shared__ int col_place[2][COLS];
    const bool drops = p.kept.drops();
#endif

    const int tile = KEYS ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const int row = tile * ROWS, b = blockIdx.z, repeat = (int)p.repeat;
    const int row_head = blockIdx.y, col_heads = KEYS ? repeat : 1;
    const int col_head = KEYS ? row_head * repeat : row_head / repeat;
    const int all_rows = (int)(KEYS ? p.keys : p.queries);
    const int all_cols = (int)(KEYS ? p.queries : p.keys);
    const int *row_positions = KEYS ? p.k_pos : p.q_pos, *col_positions = KEYS ? p.q_pos : p.k_pos;
    const int rows = smaller(all_rows - row, ROWS);
    const int width = (int)p.width, value_width = (int)p.value_width;
    const Mask mask = KEYS ? p.mask.turned() : p.mask;

    const Range ours = positions<THREADS>(row_positions + row, rows);
    // What all rows see; not in registers, of which there are few.
    __shared__ Range by_all;
    if (threadIdx.x == 0) by_all = mask.all(ours);
#if SEGMENTS
    const int* q_segments = p.segments.q + b * p.segments.q_stride;
    const int* k_segments = p.segments.k + b * p.segments.k_stride;
    const int *row_segments = KEYS ? k_segments : q_segments, *col_segments = KEYS ? q_segments : k_segments;
    const Range own = positions<THREADS>(row_segments + row, rows);
    const Range seen = indices<THREADS>(col_positions, all_cols, mask.some(ours), col_segments, own);
#else
    const Range seen = indices<THREADS>(col_positions, all_cols, mask.some(ours));
#endif
    // All tiles of all heads, as one sequence: where the next one to load is, and the one in use.
    const int begin = seen.first / COLS * COLS, end = seen.last + 1;
    const int tiles = seen.last < 0 ? 0 : (end - begin + COLS - 1) / COLS * col_heads;
    struct At {
        int head, col;
    };
    auto go_on = [&](At& at) {
        at.col += COLS;
        if (at.col >= end) at = {at.head + 1, begin};
    };
    At loaded = {col_head, begin}, used = loaded;

    auto load_cols = [&](int i) {
        const int head = loaded.head, col = loaded.col, n = all_cols - col;
        go_on(loaded);
        const Pair<COLS> to = col_tiles(i);
        const i64 step = KEYS ? p.q_stride[1] : p.k_stride[1];
        const i64 value_step = KEYS ? p.d_out_stride[1] : p.v_stride[1];
        load_tile<THREADS, ALIGNED>(
            to.own, KEYS ? p.q + at(p.q_stride, b, col, head) : p.k + at(p.k_stride, b, col, head), step,
            n, width);
        load_tile<THREADS, ALIGNED>(
            to.value,
            KEYS ? p.d_out + at(p.d_out_stride, b, col, head) : p.v + at(p.v_stride, b, col, head),
            value_step, n, value_width);
        load_row<COLS, THREADS>(col_pos[i & 1], col_positions + col, 1, n);
#if SEGMENTS
        load_row<COLS, THREADS>(col_segment[i & 1], col_segments + col, 1, n);
#endif
        if (KEYS) {
            load_row<COLS, THREADS>(col_lse[i & 1], p.lse + at(p.lse_stride, b, col, head),
                                    p.lse_stride[1], n);
            load_row<COLS, THREADS>(col_delta[i & 1], p.delta + at(p.delta_stride, b, col, head),
                                    p.delta_stride[1], n);
#if DROPS
            load_row<COLS, THREADS>(col_place[i & 1],
                                    p.kept.place + b * p.kept.place_stride[0] + col * p.kept.place_stride[1],
                                    p.kept.place_stride[1], n);
#endif
        }
        copies_begun();
    };
    load_tile<THREADS, ALIGNED>(
        row_tiles.own, KEYS ? p.k + at(p.k_stride, b, row, row_head) : p.q + at(p.q_stride, b, row, row_head),
        KEYS ? p.k_stride[1] : p.q_stride[1], rows, width);
    load_tile<THREADS, ALIGNED>(
        row_tiles.value,
        KEYS ? p.v + at(p.v_stride, b, row, row_head) : p.d_out + at(p.d_out_stride, b, row, row_head),
        KEYS ? p.v_stride[1] : p.d_out_stride[1], rows, value_width);
    load_reach<ROWS, THREADS>(row_sees, mask, row_positions + row, rows);
    copies_begun();
    if (tiles > 0) load_cols(0);

    // This warp's rows, and its part of the columns of the results; warps next to each other have rows
    // next to each other.
    const int warp = of_all_lanes(warp_id());
    const int first = warp % (ROWS / 16) * 16, part = SPLIT == 1 ? 0 : warp / (ROWS / 16);
    const int from = part * (WIDTH / SPLIT), value_from = part * (VALUE_WIDTH / SPLIT);
    float row_lse[2], row_delta[2];
    int at_row[2];
#if SEGMENTS
    int row_segment[2];
#endif
#if DROPS
    u32 row_place[2];
#endif
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = first + row_of(2 * h);
        const bool there = !KEYS && r < rows;
        at_row[h] = (SLOPED || BIASED || DROPS) && r < rows ? row_positions[row + r] : 0;
#if SEGMENTS
        row_segment[h] = r < rows ? row_segments[row + r] : 0;
#endif
#if DROPS
        row_place[h] = there ? p.kept.at(b, row + r) : 0;
#endif
        row_lse[h] = there ? p.lse[at(p.lse_stride, b, row + r, row_head)] : 0.0f;
        row_delta[h] = there ? p.delta[at(p.delta_stride, b, row + r, row_head)] : 0.0f;
    }

    // Scores in units of log 2; the results are multiplied by their scale at the end, but for f16: without it,
    // gradients of scores are larger than an f16 may be.
    const bool LATE = sizeof(ELEM) == 4 || IS_BF16<ELEM>;
    const float scale = (float)p.scale, cap = (float)p.softcap, unit = (CAPPED ? cap : scale) * LOG2_E;
    #pragma unroll
    for (int h = 0; h < 2; h++) row_lse[h] *= LOG2_E;
    float made[WIDTH / 8 / SPLIT][4], value_made[VALUE_WIDTH / 8 / SPLIT][4];
    clear(made);
    clear(value_made);
    for (int i = 0; i < tiles; i++) {
        if (i + 1 < tiles) {
            load_cols(i + 1);
            copies_arrive<GROUPS, 1>();
        } else {
            copies_arrive<GROUPS, 0>();
        }
        __syncthreads();
        const Pair<COLS> cols = col_tiles(i);
        const int head = used.head, n = all_cols - used.col;
        go_on(used);

        float w[COLS / 8][4], s[COLS / 8][4];
        dot_rows(w, row_tiles.own, first, cols.own);
        dot_rows(s, row_tiles.value, first, cols.value);
        const float of_head = SLOPED ? p.slopes[KEYS ? head : row_head] * LOG2_E : 0.0f;
#if DROPS
        // What the weight of a row and a column of these tiles was multiplied by.
        auto of_pair = [&](int i, int e, int c) {
            if (!drops) return 1.0f;
            const int of_row = at_row[e / 2], of_col = col_pos[i & 1][c];
            return KEYS ? p.kept.of((u32)col_place[i & 1][c], head, of_row)
                        : p.kept.of(row_place[e / 2], row_head, of_col);
        };
#endif
        bool hidden = n < COLS;
        #pragma unroll
        for (int c = lane_id(); c < COLS; c += 32) {
            hidden |= !by_all.has(col_pos[i & 1][c]);
#if SEGMENTS
            hidden |= own.first != own.last || col_segment[i & 1][c] != own.first;
#endif
        }
        hidden = __any_sync(ALL_LANES, hidden);
        if (CAPPED) {
            #pragma unroll
            for (int j = 0; j < COLS / 8; j++) {
                #pragma unroll
                for (int e = 0; e < 4; e++) w[j][e] = tanhf(w[j][e] * scale / cap);
            }
        }
        #pragma unroll
        for (int j = 0; j < COLS / 8; j++) {
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = col_of(j, e);
                const float lse = KEYS ? col_lse[i & 1][c] * LOG2_E : row_lse[e / 2];
                const float delta = KEYS ? col_delta[i & 1][c] : row_delta[e / 2];
                const float slope = CAPPED ? 1.0f - w[j][e] * w[j][e] : 1.0f;
                float x = w[j][e] * unit - lse;
                if (SLOPED) x -= of_head * distance(at_row[e / 2], col_pos[i & 1][c]);
#if BIASED
                const int of_row = at_row[e / 2], of_col = col_pos[i & 1][c];
                x += p.bias.at(KEYS ? head : row_head, KEYS ? of_col : of_row, KEYS ? of_row : of_col) * LOG2_E;
#endif
                w[j][e] = exp2_fast(x);
#if DROPS
                const float kept = of_pair(i, e, c);
                s[j][e] *= kept;
#endif
                s[j][e] = w[j][e] * (s[j][e] - delta);
                if (CAPPED) s[j][e] *= slope;
                if (!LATE) s[j][e] *= scale;
#if DROPS
                w[j][e] *= kept;
#endif
            }
        }
        if (hidden) {
            const Range sees[2] = {row_sees[first + row_of(0)], row_sees[first + row_of(2)]};
            #pragma unroll
            for (int j = 0; j < COLS / 8; j++) {
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int c = col_of(j, e);
                    bool there = c < n && sees[e / 2].has(col_pos[i & 1][c]);
#if SEGMENTS
                    there = there && col_segment[i & 1][c] == row_segment[e / 2];
#endif
                    if (!there) w[j][e] = s[j][e] = 0.0f;
                }
            }
        }
        if (KEYS) sum_rows(value_made, w, cols.value, value_from);
        sum_rows(made, s, cols.own, from);
        __syncthreads();
    }

    copies_arrive<GROUPS, 0>();
    #pragma unroll
    for (int j = 0; j < WIDTH / 8 / SPLIT; j++) {
        #pragma unroll
        for (int e = 0; e < 4; e++) made[j][e] *= LATE ? scale : 1.0f;
    }
    const i64 place = row + first;
    if (KEYS) {
        store_rows<ALIGNED>(made, p.d_k + at(p.d_k_stride, b, place, row_head) + from,
                            p.d_k_stride[1], rows - first, width - from);
        store_rows<ALIGNED>(value_made, p.d_v + at(p.d_v_stride, b, place, row_head) + value_from,
                            p.d_v_stride[1], rows - first, value_width - value_from);
    } else {
        store_rows<ALIGNED>(made, p.d_q + at(p.d_q_stride, b, place, row_head) + from,
                            p.d_q_stride[1], rows - first, width - from);
    }
}

KERNEL void __launch_bounds__(THREADS, BLOCKS) attention_grad_keys(const Params p) { gradients<true>(p); }

KERNEL void __launch_bounds__(THREADS) attention_grad_queries(const Params p) {
    gradients<false>(p);
}

const int OFFSETS = 128;

// A thread adds what all queries and keys have that are so far apart, in their order.
KERNEL void __launch_bounds__(OFFSETS) attention_grad_bias(const Params p) {
#if BIASED
    const int head = blockIdx.y, group = head / (int)p.repeat, keys = (int)p.keys;
    const i64 mine = (i64)blockIdx.x * OFFSETS + threadIdx.x, last = p.bias.offsets - 1;
    // Where keys stand at positions one after the other, an offset says which key it is.
    bool apart = false;
    for (int t = threadIdx.x; t < keys; t += OFFSETS) apart |= p.k_pos[t] != (i64)p.k_pos[0] + t;
    const bool in_row = !__syncthreads_or(apart);
    if (mine > last) return;

    const float scale = (float)p.scale, cap = (float)p.softcap;
#if DROPS
    const bool drops = p.kept.drops();
#endif
    float sum = 0.0f;
    for (int b = 0; b < (int)p.bias.batch; b++) {
        for (int s = 0; s < (int)p.queries; s++) {
            const int at_query = p.q_pos[s];
            i64 begin = 0, end = keys;
            if (in_row) {
                const i64 t = at_query + mine - last / 2 - p.k_pos[0];
                if (mine > 0) begin = larger(t, (i64)0);
                if (mine < last) end = smaller(t + 1, (i64)keys);
            }
            if (begin >= end) continue;
            const Range sees = p.mask.reach(at_query);
            const ELEM *q = p.q + at(p.q_stride, b, s, head), *d_out = p.d_out + at(p.d_out_stride, b, s, head);
            for (int t = (int)begin; t < (int)end; t++) {
                const int at_key = p.k_pos[t];
                bool seen = sees.has(at_key) && p.bias.index(at_query, at_key) == mine;
#if SEGMENTS
                const int own = p.segments.q[b * p.segments.q_stride + s];
                seen = seen && own == p.segments.k[b * p.segments.k_stride + t];
#endif
                if (!seen) continue;
                const ELEM *k = p.k + at(p.k_stride, b, t, group), *v = p.v + at(p.v_stride, b, t, group);
                float x = 0.0f, d = 0.0f;
                for (int i = 0; i < (int)p.width; i++) x += number(q[i]) * number(k[i]);
                for (int i = 0; i < (int)p.value_width; i++) d += number(d_out[i]) * number(v[i]);
                x *= scale;
                if (CAPPED) x = cap * tanhf(x / cap);
                x += p.bias.of[head * p.bias.stride + mine] - p.lse[at(p.lse_stride, b, s, head)];
#if DROPS
                if (drops) d *= p.kept.of(p.kept.at(b, s), head, at_key);
#endif
                sum += exp2_fast(x * LOG2_E) * (d - p.delta[at(p.delta_stride, b, s, head)]);
            }
        }
    }
    p.bias.d_of[head * p.bias.d_stride + mine] = sum;
#endif
}
