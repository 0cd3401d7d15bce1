// A tile of a matrix product by a block of threads: what gemm.cu and grouped.cu have in common.
//
// Tiles of both operands pass through shared memory, STAGES - 1 ahead of their use. A tile lies
// there as it does in memory, so that 16 adjacent bytes stay adjacent: A_ALONG_K says that elements
// along k are adjacent in `a`, else those along m are; B_ALONG_K the same of k and n in `b`.
//
// Defined before: A, B and OUT, the elements; TILE, those of the tiles (Bf16 if A and B are, which
// are multiplied by tensor cores, else float); A_ALONG_K, B_ALONG_K; A_ALIGNED, B_ALIGNED (see
// load_tile) and OUT_ALIGNED and ACCUMULATE (see store_rows); TILE_M, TILE_N, TILE_K; WARPS_M and WARPS_N, the
// warps of a block.
#ifndef PRODUCT_CUH
#define PRODUCT_CUH
#include "device.cuh"

const int THREADS = 32 * WARPS_M * WARPS_N, STAGES = 3;
const int A_LD = pitch<TILE>(A_ALONG_K ? TILE_K : TILE_M);
const int B_LD = pitch<TILE>(B_ALONG_K ? TILE_K : TILE_N);
const int A_TILE = A_LD * (A_ALONG_K ? TILE_M : TILE_K);
const int B_TILE = B_LD * (B_ALONG_K ? TILE_N : TILE_K);
// A warp makes SLABS times 16 rows of 8 COLUMNS columns.
const int SLABS = TILE_M / WARPS_M / 16, COLUMNS = TILE_N / WARPS_N / 8;

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

typedef float Sums[SLABS][COLUMNS][4];

DEVICE void load_piece(TILE* a, TILE* b, const Piece& p, const Shape& s) {
    if (A_ALONG_K) {
        load_tile<TILE_M, TILE_K, THREADS, A_ALIGNED>(a, p.a, s.a_row, s.m, p.k, s.a_col);
    } else {
        load_tile<TILE_K, TILE_M, THREADS, A_ALIGNED>(a, p.a, s.a_col, p.k, s.m, s.a_row);
    }
    if (B_ALONG_K) {
        load_tile<TILE_N, TILE_K, THREADS, B_ALIGNED>(b, p.b, s.b_col, s.n, p.k, s.b_row);
    } else {
        load_tile<TILE_K, TILE_N, THREADS, B_ALIGNED>(b, p.b, s.b_row, p.k, s.n, s.b_col);
    }
}

DEVICE int warp_row() { return warp_id() / WARPS_N * SLABS * 16; }
DEVICE int warp_col() { return warp_id() % WARPS_N * COLUMNS * 8; }

DEVICE void multiply(Sums& acc, const Bf16* a, const Bf16* b) {
    const int lane = lane_id(), low = lane & 7, middle = lane >> 3 & 1, high = lane >> 4;
    #pragma unroll
    for (int k = 0; k < TILE_K; k += 16) {
        u32 left[SLABS][4];
        #pragma unroll
        for (int i = 0; i < SLABS; i++) {
            const int m = warp_row() + i * 16 + middle * 8;
            if (A_ALONG_K) {
                load_matrices(left[i], a + (m + low) * A_LD + k + high * 8);
            } else {
                load_matrices_transposed(left[i], a + (k + high * 8 + low) * A_LD + m);
            }
        }
        #pragma unroll
        for (int j = 0; j < COLUMNS; j += 2) {
            const int n = warp_col() + j * 8 + high * 8;
            u32 right[4];
            if (B_ALONG_K) {
                load_matrices(right, b + (n + low) * B_LD + k + middle * 8);
            } else {
                load_matrices_transposed(right, b + (k + middle * 8 + low) * B_LD + n);
            }
            #pragma unroll
            for (int i = 0; i < SLABS; i++) {
                multiply_add(acc[i][j], left[i], right[0], right[1]);
                multiply_add(acc[i][j + 1], left[i], right[2], right[3]);
            }
        }
    }
}

DEVICE void multiply(Sums& acc, const float* a, const float* b) {
    #pragma unroll 4
    for (int k = 0; k < TILE_K; k++) {
        float left[SLABS][2], right[COLUMNS][2];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            #pragma unroll
            for (int i = 0; i < SLABS; i++) {
                const int m = warp_row() + i * 16 + row_of(2 * h);
                left[i][h] = A_ALONG_K ? a[m * A_LD + k] : a[k * A_LD + m];
            }
            #pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const int n = warp_col() + col_of(j, h);
                right[j][h] = B_ALONG_K ? b[n * B_LD + k] : b[k * B_LD + n];
            }
        }
        #pragma unroll
        for (int i = 0; i < SLABS; i++) {
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
    for (int i = 0; i < SLABS; i++) clear(acc[i]);
    auto load = [&](int i) {
        TILE* to = tiles + i % STAGES * (A_TILE + B_TILE);
        if (i < pieces) load_piece(to, to + A_TILE, next(), shape);
        // An empty group, if there are no more: groups are counted.
        copies_begun();
    };
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++) load(i);
    for (int i = 0; i < pieces; i++) {
        copies_arrive<STAGES - 2>();
        __syncthreads();
        load(i + STAGES - 1);
        const TILE* from = tiles + i % STAGES * (A_TILE + B_TILE);
        multiply(acc, from, from + A_TILE);
    }
    copies_arrive<0>();
}

// Rounds the block's tile to memory.
DEVICE void store_tile(const Sums& acc, OUT* out, i64 row_stride, i64 col_stride, int m, int n) {
    #pragma unroll
    for (int i = 0; i < SLABS; i++) {
        const int row = warp_row() + i * 16, col = warp_col();
        store_rows<OUT_ALIGNED, ACCUMULATE>(acc[i], out + row * row_stride + col * col_stride, row_stride,
                                m - row, n - col, col_stride);
    }
}

// Gives the block's tile to what becomes of it, two adjacent elements of a row at a time.
template <class Then>
DEVICE void take_tile(const Sums& acc, const Then& then, int m, int n) {
    #pragma unroll
    for (int i = 0; i < SLABS; i++) {
        #pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            #pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int row = warp_row() + i * 16 + row_of(e), col = warp_col() + col_of(j, e);
                const float pair[2] = {acc[i][j][e], acc[i][j][e + 1]};
                if (row < m && col < n) then.take(row, col, smaller(n - col, 2), pair);
            }
        }
    }
}

#endif  // PRODUCT_CUH
