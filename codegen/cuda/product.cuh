// A tile of a matrix product by a block of threads: what gemm.cu and grouped.cu have in common.
//
// Tiles of both operands pass through shared memory, copied ahead of their use. A tile lies
// there as it does in memory, so that 16 adjacent bytes stay adjacent: A_ALONG_K says that elements
// along k are adjacent in `a`, else those along m are; B_ALONG_K the same of k and n in `b`.
//
// Defined before: A, B and OUT, the elements; TILE, those of the tiles (Bf16 or F16 if A and B are, which
// are multiplied by tensor cores, else float); A_ALONG_K, B_ALONG_K; A_ALIGNED, B_ALIGNED (see
// load_tile); WIDTH, the adjacent elements of a row of the result that are taken at once, 8 (then all
// begin at multiples of 8) or 1; ACCUMULATE, that the result is added to what is there; TILE_M, TILE_N,
// TILE_K; STAGES; WARPS_M and WARPS_N, the warps of a block; BLOCKS, which share a multiprocessor.
#ifndef PRODUCT_CUH
#define PRODUCT_CUH
#include "device.cuh"

const int THREADS = 32 * WARPS_M * WARPS_N;
const int A_COLS = A_ALONG_K ? TILE_K : TILE_M, B_COLS = B_ALONG_K ? TILE_K : TILE_N;
// Products are made by groups. Then a warp has all columns of its rows.
const bool GROUPS = for_groups<TILE>(A_COLS) && for_groups<TILE>(B_COLS);
// No other block of the multiprocessor computes while this one waits; tiles are copied so many pieces ahead.
const bool ALONE = BLOCKS == 1;
const int AHEAD = GROUPS && ALONE ? STAGES - 2 : STAGES - 1;
static_assert(AHEAD >= 1, "a tile is copied while another is used");
typedef Tile<TILE, A_ALONG_K ? TILE_M : TILE_K, A_COLS, GROUPS> ATile;
typedef Tile<TILE, B_ALONG_K ? TILE_N : TILE_K, B_COLS, GROUPS> BTile;
const int ACROSS = GROUPS ? 1 : WARPS_N, ROWS = TILE_M * ACROSS / (WARPS_M * WARPS_N);
// A warp makes STRIPS times 16 rows of 8 COLUMNS columns.
const int STRIPS = ROWS / 16, COLUMNS = TILE_N / ACROSS / 8;

// A part of the sum over k: where both operands begin, and how long it is.
struct Piece {
    const A* a;
    const B* b;
    int k;
};

// What does not change from piece to piece: strides, and the rows and columns that are there.
struct Shape {
    i64 a_row, a_col, b_row, b_col;
    int m, n;
};

typedef float Sums[STRIPS][COLUMNS][4];

DEVICE void load_piece(const ATile& a, const BTile& b, const Piece& p, const Shape& s) {
    if (A_ALONG_K) {
        load_tile<THREADS, A_ALIGNED>(a, p.a, s.a_row, s.m, p.k, s.a_col);
    } else {
        load_tile<THREADS, A_ALIGNED>(a, p.a, s.a_col, p.k, s.m, s.a_row);
    }
    if (B_ALONG_K) {
        load_tile<THREADS, B_ALIGNED>(b, p.b, s.b_col, s.n, p.k, s.b_row);
    } else {
        load_tile<THREADS, B_ALIGNED>(b, p.b, s.b_row, p.k, s.n, s.b_col);
    }
}

DEVICE int warp_row() { return warp_id() / ACROSS * ROWS; }
DEVICE int warp_col() { return warp_id() % ACROSS * COLUMNS * 8; }

// How much later k begins in an operand, for a group.
template <bool Down, int Rows>
DEVICE constexpr int of_k(int k) {
    return Down ? k * 8 : k / 64 * Rows * 8 + k % 64 / 8;
}

// The lower halves of what names a group's operands in the first stage.
struct Operands {
    u32 a, b;
};
template <class TileA, class TileB>
DEVICE Operands operands(const TileA& a, const TileB& b) {
    if constexpr (!GROUPS) return {};
    const int first = of_all_lanes(warp_row()) / 64 * 64;
    return {(u32)(A_ALONG_K ? a.operand(first, 0) : a.operand(0, first)), (u32)b.operand(0, 0)};
}

// Begins the products of groups. `later`: how far these tiles are from those of the first stage, in units
// of 16 bytes.
template <class T, int RowsA, int ColsA, int RowsB, int ColsB>
DEVICE void begin_multiply(Sums& acc, const Tile<T, RowsA, ColsA, true>& a,
                           const Tile<T, RowsB, ColsB, true>& b, const Operands& of, u32 later) {
    const u64 of_a = a.named(of.a + later), of_b = b.named(of.b + later);
    settle(acc[0]);
    group_begin();
    #pragma unroll
    for (int k = 0; k < TILE_K; k += 16) {
        group_multiply_add<T, COLUMNS, !A_ALONG_K, !B_ALONG_K>(
            acc[0], of_a + of_k<!A_ALONG_K, RowsA>(k), of_b + of_k<!B_ALONG_K, RowsB>(k));
    }
    group_begun();
}

// acc += a b, by warps.
template <class T, int RowsA, int ColsA, int RowsB, int ColsB>
DEVICE void multiply(Sums& acc, const Tile<T, RowsA, ColsA, false>& a,
                     const Tile<T, RowsB, ColsB, false>& b) {
    const int lane = lane_id(), low = lane & 7, middle = lane >> 3 & 1, high = lane >> 4;
    #pragma unroll 2
    for (int k = 0; k < TILE_K; k += 16) {
        u32 left[STRIPS][4];
        #pragma unroll
        for (int i = 0; i < STRIPS; i++) {
            const int m = warp_row() + i * 16 + middle * 8;
            if (A_ALONG_K) {
                load_matrices(left[i], a.at(m + low, k + high * 8));
            } else {
                load_matrices_transposed(left[i], a.at(k + high * 8 + low, m));
            }
        }
        #pragma unroll
        for (int j = 0; j < COLUMNS; j += 2) {
            const int n = warp_col() + j * 8 + high * 8;
            u32 right[4];
            if (B_ALONG_K) {
                load_matrices(right, b.at(n + low, k + middle * 8));
            } else {
                load_matrices_transposed(right, b.at(k + middle * 8 + low, n));
            }
            #pragma unroll
            for (int i = 0; i < STRIPS; i++) {
                multiply_add<T>(acc[i][j], left[i], right[0], right[1]);
                multiply_add<T>(acc[i][j + 1], left[i], right[2], right[3]);
            }
        }
    }
}

template <int RowsA, int ColsA, int RowsB, int ColsB>
DEVICE void multiply(Sums& acc, const Tile<float, RowsA, ColsA, false>& a,
                     const Tile<float, RowsB, ColsB, false>& b) {
    #pragma unroll 4
    for (int k = 0; k < TILE_K; k++) {
        float left[STRIPS][2], right[COLUMNS][2];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            #pragma unroll
            for (int i = 0; i < STRIPS; i++) {
                const int m = warp_row() + i * 16 + row_of(2 * h);
                left[i][h] = A_ALONG_K ? *a.at(m, k) : *a.at(k, m);
            }
            #pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const int n = warp_col() + col_of(j, h);
                right[j][h] = B_ALONG_K ? *b.at(n, k) : *b.at(k, n);
            }
        }
        #pragma unroll
        for (int i = 0; i < STRIPS; i++) {
            #pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                #pragma unroll
                for (int e = 0; e < 4; e++) acc[i][j][e] += left[i][e / 2] * right[j][e & 1];
            }
        }
    }
}

// acc = the sum of the products of `pieces` pieces, which next() gives one after the other.
template <class Next>
DEVICE void sum_pieces(Sums& acc, int pieces, const Shape& shape, Next next) {
    DYNAMIC_SHARED(TILE, tiles);
    #pragma unroll
    for (int i = 0; i < STRIPS; i++) clear(acc[i]);
    const int STAGE = ATile::SIZE + BTile::SIZE;
    auto a = [&](int i) { return ATile{tiles + (u32)i % STAGES * STAGE}; };
    auto b = [&](int i) { return BTile{a(i).end()}; };
    auto load = [&](int i) {
        if (i < pieces) load_piece(a(i), b(i), next(), shape);
        // An empty group, if there are no more: groups are counted.
        copies_begun();
    };
    const Operands of = operands(a(0), b(0));
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) load(i);
    for (int i = 0; i < pieces; i++) {
        copies_arrive<GROUPS, AHEAD - 1>();
        __syncthreads();
        if constexpr (GROUPS) {
            const u32 later = (u32)i % STAGES * (STAGE * (int)sizeof(TILE) / 16);
            begin_multiply(acc, a(i), b(i), of, later);
            // Where a block is alone, the next products are begun before these have ended; what they read
            // is written to once all threads have waited for them.
            if (!ALONE) load(i + AHEAD);
            group_wait<ALONE ? 1 : 0>();
            settle(acc[0]);
            if (ALONE) load(i + AHEAD);
        } else {
            load(i + AHEAD);
            multiply(acc, a(i), b(i));
        }
    }
    if constexpr (GROUPS) {
        group_wait<0>();
        settle(acc[0]);
    }
    copies_arrive<GROUPS, 0>();
}

// Adjacent elements of a row of the tile, in memory.
struct Stored {
    OUT* out;
    i64 row, col;
    DEVICE void take(int r, int c, const float (&x)[WIDTH]) const {
        OUT* const at = out + r * row + c * col;
        if constexpr (WIDTH == 1) {
            assign(*at, ACCUMULATE ? x[0] + number(*at) : x[0]);
        } else {
            Pack<OUT, WIDTH> made;
            if (ACCUMULATE) made = load<WIDTH>(at);
            #pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                assign(made.at[k], ACCUMULATE ? x[k] + number(made.at[k]) : x[k]);
            }
            store<WIDTH>(at, made);
        }
    }
};

// Gives the block's tile to what becomes of it, WIDTH adjacent elements of a row at a time. It goes through
// shared memory, so that neighbouring threads have neighbouring elements.
template <class Then>
DEVICE void take_tile(const Sums& acc, const Then& then, int m, int n) {
    DYNAMIC_SHARED(float, staged);
    // The four rows that half a warp writes to at once lie in different banks.
    const int LD = TILE_N + 8;
    // What is multiplied lies there still.
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < STRIPS; i++) {
        #pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            #pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int row = warp_row() + i * 16 + row_of(e), col = warp_col() + col_of(j, e);
                assign_pair(staged + row * LD + col, acc[i][j][e], acc[i][j][e + 1]);
            }
        }
    }
    __syncthreads();
    #pragma unroll 2
    for (int i = threadIdx.x * WIDTH; i < TILE_M * TILE_N; i += THREADS * WIDTH) {
        const int row = i / TILE_N, col = i % TILE_N;
        if (row >= m || col >= n) continue;
        const float* const from = staged + row * LD + col;
        float x[WIDTH];
        #pragma unroll
        for (int k = 0; k < WIDTH; k += WIDTH < 4 ? 1 : 4) {
            const Pack<float, WIDTH < 4 ? 1 : 4> some = load<WIDTH < 4 ? 1 : 4>(from + k);
            #pragma unroll
            for (int l = 0; l < (WIDTH < 4 ? 1 : 4); l++) x[k + l] = some.at[l];
        }
        then.take(row, col, x);
    }
}

#endif  // PRODUCT_CUH
