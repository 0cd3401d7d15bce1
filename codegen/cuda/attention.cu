// Attention, forward: out = softmax(score, where keys are seen) v, and the log-sum-exp of the scores,
// which are x = scale q k^T or, if CAPPED, c tanh(x / c). Which keys are seen, the mask says by
// positions, which are data, in any order, and, if SEGMENTS, query and key are of one segment; if SLOPED, a head's
// slope times their distance is taken off; if BIASED, a head's number of their offset is added. A query that sees nothing gets 0 and -inf. If DROPS, some weights are left out of out at random, and the others larger.
//
// Bytes: q, out and lse once, k and v once per block of ROWS queries that sees them (mostly from the
// L2 cache, as heads of a group and blocks of a head run side by side). Scores stay in registers.
// Launch: (ceil(queries / ROWS), heads, batch) blocks of 2 ROWS threads; the shared memory of a tile
// of ROWS queries, and tiles of COLS keys and values.
//
// Defined before: ELEM (Bf16, F16 or float), WIDTH and VALUE_WIDTH (multiples of 16, at least the widths
// of p), ROWS and COLS (multiples of 16), ALIGNED (see load_tile; for out, even strides), CAPPED, SLOPED, BIASED, SEGMENTS, DROPS,
// POSITIVE (the scale is).
#include "attention.cuh"

struct Params {
    const ELEM *q, *k, *v;
    ELEM* out;
    float* lse;
    const int *q_pos, *k_pos;
    const float* slopes;  // of heads, if SLOPED
    // [b, position, head]
    i64 q_stride[3], k_stride[3], v_stride[3], out_stride[3], lse_stride[3];
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

const int THREADS = 2 * ROWS;
// Products are made by groups.
const bool GROUPS =
    ROWS % 64 == 0 && for_groups<ELEM>(WIDTH) && for_groups<ELEM>(VALUE_WIDTH);

// Blocks that a multiprocessor has at least: the compiler keeps to the registers of so many. 0: its own
// choice; 1 would let it take all registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
// By its own choice it spills, or takes more than 128 registers, on Blackwell.
const int BLOCKS = WIDTH <= 80 && VALUE_WIDTH <= 80 && THREADS == 128 ? 4 : 0;
#else
const int BLOCKS = GROUPS && WIDTH == 64 && VALUE_WIDTH == 64 ? 4 : 0;
#endif

KERNEL void __launch_bounds__(THREADS, BLOCKS) attention(const Params p) {
    DYNAMIC_SHARED(ELEM, storage);
    const Tile<ELEM, ROWS, WIDTH, GROUPS> q_tile = {storage};
    const Tile<ELEM, COLS, WIDTH, GROUPS> k_tile = {q_tile.end()};
    const Tile<ELEM, COLS, VALUE_WIDTH, GROUPS> v_tile = {k_tile.end()};
    // What the block's queries see; positions of this tile of keys, and of the next.
    __shared__ Range q_sees[ROWS];
    __shared__ int k_pos[2][COLS];
#if SEGMENTS
    __shared__ int k_segment[2][COLS];
#endif

    // Queries with most keys come first, if positions ascend: short blocks fill the end.
    const int row = (gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y, b = blockIdx.z;
    const int rows = smaller((int)p.queries - row, ROWS), group = head / (int)p.repeat;
    const ELEM* q = p.q + b * p.q_stride[0] + row * p.q_stride[1] + head * p.q_stride[2];
    const ELEM* k = p.k + b * p.k_stride[0] + group * p.k_stride[2];
    const ELEM* v = p.v + b * p.v_stride[0] + group * p.v_stride[2];

    const Range ours = positions<THREADS>(p.q_pos + row, rows), by_all = p.mask.all(ours);
#if SEGMENTS
    const int *q_segments = p.segments.q + b * p.segments.q_stride + row;
    const int *k_segments = p.segments.k + b * p.segments.k_stride;
    const Range own = positions<THREADS>(q_segments, rows);
    const Range seen = indices<THREADS>(p.k_pos, (int)p.keys, p.mask.some(ours), k_segments, own);
#else
    const Range seen = indices<THREADS>(p.k_pos, (int)p.keys, p.mask.some(ours));
#endif
    const int begin = seen.first / COLS * COLS, end = seen.last + 1;

    auto load_keys = [&](int key) {
        const int n = (int)p.keys - key;
        load_tile<THREADS, ALIGNED>(k_tile, k + key * p.k_stride[1], p.k_stride[1], n, (int)p.width);
        load_row<COLS, THREADS>(k_pos[key / COLS & 1], p.k_pos + key, 1, n);
#if SEGMENTS
        load_row<COLS, THREADS>(k_segment[key / COLS & 1], k_segments + key, 1, n);
#endif
        copies_begun();
    };
    load_tile<THREADS, ALIGNED>(q_tile, q, p.q_stride[1], rows, (int)p.width);
    load_reach<ROWS, THREADS>(q_sees, p.mask, p.q_pos + row, rows);
    copies_begun();
    if (begin < end) load_keys(begin);

    // Scores are in units of log 2, once they are multiplied by `unit`: that is done together with the
    // subtraction of the largest, if the order is the same without.
    const float scale = (float)p.scale * LOG2_E, cap = (float)p.softcap * LOG2_E;
    const bool late = !CAPPED && !SLOPED && !BIASED && POSITIVE;
    const float unit = late ? scale : 1.0f;
    const int first = of_all_lanes(warp_id() * 16);
    const float slope = SLOPED ? p.slopes[head] * LOG2_E : 0.0f;
    int at_row[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = first + row_of(2 * h);
        at_row[h] = (SLOPED || BIASED) && r < rows ? p.q_pos[row + r] : 0;
    }
#if SEGMENTS
    int segment[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = first + row_of(2 * h);
        segment[h] = r < rows ? q_segments[r] : 0;
    }
#endif
#if DROPS
    const bool drops = p.kept.drops();
    u32 place[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = first + row_of(2 * h);
        place[h] = r < rows ? p.kept.at(b, row + r) : 0;
    }
#endif
    float out[VALUE_WIDTH / 8][4];
    clear(out);
    // Of rows row_of(0) and row_of(2): the largest score so far, and this lane's part of the sum of
    // weights.
    float most[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.0f, 0.0f};

    for (int key = begin; key < end; key += COLS) {
        copies_arrive<GROUPS, 0>();
        __syncthreads();
        const int n = (int)p.keys - key;
        load_tile<THREADS, ALIGNED>(v_tile, v + key * p.v_stride[1], p.v_stride[1], n,
                                    (int)p.value_width);
        copies_begun();

        float s[COLS / 8][4];
        dot_rows(s, q_tile, first, k_tile);

        const int* keys = k_pos[key / COLS & 1];
        bool hidden = n < COLS;
        #pragma unroll
        for (int i = lane_id(); i < COLS; i += 32) {
            hidden |= !by_all.has(keys[i]);
#if SEGMENTS
            hidden |= own.first != own.last || k_segment[key / COLS & 1][i] != own.first;
#endif
        }
        if (!late) {
            #pragma unroll
            for (int i = 0; i < COLS / 8; i++) {
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[i][e] *= scale;
                    if (CAPPED) s[i][e] = cap * tanhf(s[i][e] / cap);
                    if (SLOPED) s[i][e] -= slope * distance(at_row[e / 2], keys[col_of(i, e)]);
#if BIASED
                    s[i][e] += p.bias.at(head, at_row[e / 2], keys[col_of(i, e)]) * LOG2_E;
#endif
                }
            }
        }
        if (__any_sync(ALL_LANES, hidden)) {
            const Range sees[2] = {q_sees[first + row_of(0)], q_sees[first + row_of(2)]};
            #pragma unroll
            for (int i = 0; i < COLS / 8; i++) {
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int c = col_of(i, e);
                    bool seen = c < n && sees[e / 2].has(keys[c]);
#if SEGMENTS
                    seen = seen && k_segment[key / COLS & 1][c] == segment[e / 2];
#endif
                    if (!seen) s[i][e] = minus_infinity();
                }
            }
        }
        float top[2] = {most[0], most[1]};
        #pragma unroll
        for (int i = 0; i < COLS / 8; i++) {
            #pragma unroll
            for (int e = 0; e < 4; e++) top[e / 2] = larger(top[e / 2], s[i][e]);
        }
        float base[2], shrink[2];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            top[h] = max_lanes<4>(top[h]);
            // Where nothing was seen yet, any finite base gives weights 0.
            base[h] = top[h] == minus_infinity() ? 0.0f : top[h] * unit;
            // Exactly 1, which the rounded product may miss: it would be multiplied by for every tile.
            shrink[h] = most[h] == top[h] ? 1.0f : exp2_fast(most[h] * unit - base[h]);
            most[h] = top[h];
            sum[h] *= shrink[h];
        }
        #pragma unroll
        for (int i = 0; i < COLS / 8; i++) {
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                s[i][e] = exp2_fast(s[i][e] * unit - base[e / 2]);
                sum[e / 2] += s[i][e];
            }
#if DROPS
            // Of two adjacent columns, mostly one block.
            #pragma unroll
            for (int e = 0; drops && e < 4; e += 2) {
                const int a = keys[col_of(i, e)], z = keys[col_of(i, e + 1)];
                const Words w = p.kept.words(place[e / 2], head, a);
                s[i][e] *= p.kept.of(w, a);
                s[i][e + 1] *= (u32)a / 4 == (u32)z / 4 ? p.kept.of(w, z) : p.kept.of(place[e / 2], head, z);
            }
#endif
        }
        // Where the largest stays what it was in all rows of the warp, so do the sums.
        if (__any_sync(ALL_LANES, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
            #pragma unroll
            for (int i = 0; i < VALUE_WIDTH / 8; i++) {
                #pragma unroll
                for (int e = 0; e < 4; e++) out[i][e] *= shrink[e / 2];
            }
        }

        copies_arrive<GROUPS, 0>();
        __syncthreads();
        if (key + COLS < end) load_keys(key + COLS);
        sum_rows(out, s, v_tile, 0);
    }

    copies_arrive<GROUPS, 0>();
    #pragma unroll
    for (int h = 0; h < 2; h++) sum[h] = sum_lanes<4>(sum[h]);
    #pragma unroll
    for (int i = 0; i < VALUE_WIDTH / 8; i++) {
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            out[i][e] = sum[e / 2] > 0.0f ? out[i][e] / sum[e / 2] : 0.0f;
        }
    }
    const i64 at = row + first;
    store_rows<ALIGNED>(out, p.out + b * p.out_stride[0] + at * p.out_stride[1] +
                                 head * p.out_stride[2],
                        p.out_stride[1], rows - first, (int)p.value_width);
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = row_of(2 * h);
        if (lane_id() % 4 == 0 && first + r < rows) {
            p.lse[b * p.lse_stride[0] + (at + r) * p.lse_stride[1] + head * p.lse_stride[2]] =
                sum[h] > 0.0f ? most[h] * unit * LN_2 + logf(sum[h]) : minus_infinity();
        }
    }
}
