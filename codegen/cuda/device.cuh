// What kernels are written in: element types, tiles in shared memory, products of tiles, reductions.
// Nothing else includes or contains instructions of the processor, so that a kernel's text runs
// unchanged where EMULATED is defined and the same helpers are given as plain C++ before this file.
#ifndef DEVICE_CUH
#define DEVICE_CUH

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// A 16-bit float: the upper half of an f32.
struct Bf16 {
    u16 bits;
};
struct alignas(8) Float2 {
    float x, y;
};
struct alignas(16) Float4 {
    float x, y, z, w;
};
// N adjacent elements that are read or written at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
    T at[N];
};
// What is moved at once.
struct alignas(16) Bytes16 {
    u32 word[4];
};
struct alignas(8) Bytes8 {
    u32 word[2];
};

#ifndef EMULATED

#define KERNEL extern "C" __global__
#define DEVICE __device__ __forceinline__
// Parameters that threads index: they stay where the launch puts them.
#define CONSTANT const __grid_constant__
// All the shared memory that the launch asks for.
#define DYNAMIC_SHARED(T, name)                                        \
    extern __shared__ __align__(128) unsigned char name##_bytes[];     \
    T* name = reinterpret_cast<T*>(name##_bytes)

DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x / y within 2 units in the last place; 0 where |y| > 2^126.
DEVICE float divide_fast(float x, float y) { return __fdividef(x, y); }

// Two numbers, rounded to nearest even, the first in the lower half.
DEVICE u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four matrices of 8x8 16-bit elements; lane 8i+j names row j of matrix i.
DEVICE void load_matrices(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)) : "memory");
}

// c[16x8] += a[16x16] b[16x8]
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Copies to shared memory that are on their way until `copies_arrive`. A barrier must follow.
DEVICE void copy16_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copy4_async(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :: "r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copies_begun() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of copies but the last `N`.
template <int N>
DEVICE void copies_arrive() {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

#endif  // EMULATED

const u32 ALL_LANES = 0xffffffffu;

DEVICE float number(float x) { return x; }
DEVICE float number(int x) { return (float)x; }
DEVICE float number(Bf16 x) { return __uint_as_float((u32)x.bits << 16); }
// The nearest element.
DEVICE void assign(float& to, float x) { to = x; }
DEVICE void assign(Bf16& to, float x) { to.bits = (u16)pack(x, 0.0f); }

DEVICE void assign_pair(float* to, float x, float y) { *reinterpret_cast<Float2*>(to) = {x, y}; }
DEVICE void assign_pair(Bf16* to, float x, float y) { *reinterpret_cast<u32*>(to) = pack(x, y); }

// The same bits if types are equal.
template <class T>
DEVICE void convert(T& to, T x) {
    to = x;
}
DEVICE void convert(float& to, Bf16 x) { to = number(x); }

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE int warp_id() { return threadIdx.x >> 5; }

template <class T>
DEVICE T smaller(T a, T b) {
    return b < a ? b : a;
}
template <class T>
DEVICE T larger(T a, T b) {
    return a < b ? b : a;
}

template <int N, class T>
DEVICE Pack<T, N> load(const T* from) {
    return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <int N, class T>
DEVICE void store(T* to, const Pack<T, N>& x) {
    *reinterpret_cast<Pack<T, N>*>(to) = x;
}

// Folds over the `Lanes` neighbours that a power of two groups together; all get the result.
template <int Lanes>
DEVICE float sum_lanes(float x) {
    #pragma unroll
    for (int o = Lanes / 2; o; o /= 2) x += __shfl_xor_sync(ALL_LANES, x, o);
    return x;
}
template <int Lanes, class T>
DEVICE T max_lanes(T x) {
    #pragma unroll
    for (int o = Lanes / 2; o; o /= 2) x = larger(x, __shfl_xor_sync(ALL_LANES, x, o));
    return x;
}
template <int Lanes, class T>
DEVICE T min_lanes(T x) {
    #pragma unroll
    for (int o = Lanes / 2; o; o /= 2) x = smaller(x, __shfl_xor_sync(ALL_LANES, x, o));
    return x;
}

// Where step `i` of nested loops, the last being the innermost, stands in a walk.
template <class Index, int N>
DEVICE i64 walk(Index i, const i64 (&extent)[N], const i64 (&stride)[N]) {
    i64 at = 0;
    #pragma unroll
    for (int d = N - 1; d > 0; d--) {
        at += (i64)(i % (Index)extent[d]) * stride[d];
        i /= (Index)extent[d];
    }
    return at + (i64)i * stride[0];
}

// ---- Tiles: rows of Cols elements in shared memory, 16 bytes apart so that the 8 rows that a
// matrix load touches lie in different banks.

template <class T>
DEVICE constexpr int pitch(int cols) {
    return cols + 16 / (int)sizeof(T);
}

// Begins to copy the first `rows` rows of `width` elements, `stride` apart, the elements `step`
// apart; all else in the tile becomes zero. With Aligned, rows are of whole 16 bytes, which are
// adjacent and begin at multiples of 16 bytes.
template <int Rows, int Cols, int Threads, bool Aligned, class T, class S>
DEVICE void load_tile(T* tile, const S* from, i64 stride, int rows, int width, i64 step = 1) {
    const int LD = pitch<T>(Cols), Whole = 16 / (int)sizeof(T);
    if (Aligned) {
        for (int i = threadIdx.x; i < Rows * (Cols / Whole); i += Threads) {
            const int r = i / (Cols / Whole), c = i % (Cols / Whole) * Whole;
            T* to = tile + r * LD + c;
            if (r < rows && c < width) {
                copy16_async(to, from + r * stride + c);
            } else {
                *reinterpret_cast<Bytes16*>(to) = Bytes16{};
            }
        }
    } else {
        for (int i = threadIdx.x; i < Rows * Cols; i += Threads) {
            const int r = i / Cols, c = i % Cols;
            const bool there = r < rows && c < width;
            convert(tile[r * LD + c], there ? from[r * stride + c * step] : S{});
        }
    }
}

// As load_tile, of one row of 4-byte elements.
template <int Cols, int Threads, class T>
DEVICE void load_row(T* row, const T* from, i64 stride, int width) {
    for (int i = threadIdx.x; i < Cols; i += Threads) {
        if (i < width) {
            copy4_async(row + i, from + i * stride);
        } else {
            row[i] = T{};
        }
    }
}

// ---- Products of tiles by a warp. A result of 16 rows and 8N columns is `float acc[N][4]`: lane
// 4g+t holds columns 8n + 2t and the next one, of row g in acc[n][0..1], of row g+8 in acc[n][2..3].

DEVICE int row_of(int e) { return lane_id() / 4 + (e & 2) * 4; }
DEVICE int col_of(int n, int e) { return n * 8 + lane_id() % 4 * 2 + (e & 1); }

template <int N>
DEVICE void clear(float (&acc)[N][4]) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
    }
}

// acc += a b^T: dot products of 16 rows of `a` and 8N rows of `b`, of K elements.
template <int K, int N>
DEVICE void dot_rows(float (&acc)[N][4], const Bf16* a, int a_pitch, const Bf16* b, int b_pitch) {
    const int lane = lane_id();
    a += (lane & 15) * a_pitch + (lane >> 4) * 8;
    b += ((lane & 7) + (lane >> 4) * 8) * b_pitch + (lane >> 3 & 1) * 8;
    #pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 left[4];
        load_matrices(left, a + k);
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 right[4];
            load_matrices(right, b + n * 8 * b_pitch + k);
            multiply_add(acc[n], left, right[0], right[1]);
            multiply_add(acc[n + 1], left, right[2], right[3]);
        }
    }
}
template <int K, int N>
DEVICE void dot_rows(float (&acc)[N][4], const float* a, int a_pitch, const float* b, int b_pitch) {
    a += row_of(0) * a_pitch;
    b += col_of(0, 0) * b_pitch;
    #pragma unroll 1
    for (int k = 0; k < K; k += 4) {
        const Float4 a0 = *(const Float4*)(a + k), a1 = *(const Float4*)(a + 8 * a_pitch + k);
        #pragma unroll
        for (int n = 0; n < N; n++) {
            const float* at = b + n * 8 * b_pitch + k;
            const Float4 b0 = *(const Float4*)at, b1 = *(const Float4*)(at + b_pitch);
            acc[n][0] += a0.x * b0.x + a0.y * b0.y + a0.z * b0.z + a0.w * b0.w;
            acc[n][1] += a0.x * b1.x + a0.y * b1.y + a0.z * b1.z + a0.w * b1.w;
            acc[n][2] += a1.x * b0.x + a1.y * b0.y + a1.z * b0.z + a1.w * b0.w;
            acc[n][3] += a1.x * b1.x + a1.y * b1.y + a1.z * b1.z + a1.w * b1.w;
        }
    }
}

// acc += w b: sums of 8K rows of `b`, of 8N elements, with weights that are a result of the warp.
template <int K, int N>
DEVICE void sum_rows(float (&acc)[N][4], const float (&w)[K][4], const Bf16* b, int b_pitch) {
    const int lane = lane_id();
    b += (lane & 15) * b_pitch + (lane >> 4) * 8;
    #pragma unroll
    for (int k = 0; k < K; k += 2) {
        const u32 left[4] = {pack(w[k][0], w[k][1]), pack(w[k][2], w[k][3]),
                             pack(w[k + 1][0], w[k + 1][1]), pack(w[k + 1][2], w[k + 1][3])};
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 right[4];
            load_matrices_transposed(right, b + k * 8 * b_pitch + n * 8);
            multiply_add(acc[n], left, right[0], right[1]);
            multiply_add(acc[n + 1], left, right[2], right[3]);
        }
    }
}
template <int K, int N>
DEVICE void sum_rows(float (&acc)[N][4], const float (&w)[K][4], const float* b, int b_pitch) {
    const int quad = lane_id() & ~3;
    b += col_of(0, 0);
    #pragma unroll
    for (int k = 0; k < K; k++) {
        // Lane t of four holds weights of rows 8k + 2t and the next one.
        #pragma unroll 1
        for (int t = 0; t < 4; t++) {
            float x[4];
            #pragma unroll
            for (int e = 0; e < 4; e++) x[e] = __shfl_sync(ALL_LANES, w[k][e], quad | t);
            const float* row = b + (k * 8 + t * 2) * b_pitch;
            #pragma unroll
            for (int n = 0; n < N; n++) {
                const Float2 y = *(const Float2*)(row + n * 8);
                const Float2 z = *(const Float2*)(row + b_pitch + n * 8);
                acc[n][0] += x[0] * y.x + x[1] * z.x;
                acc[n][1] += x[0] * y.y + x[1] * z.y;
                acc[n][2] += x[2] * y.x + x[3] * z.x;
                acc[n][3] += x[2] * y.y + x[3] * z.y;
            }
        }
    }
}

// Rounds a result of the warp to rows of memory, `stride` apart, the elements `step` apart, as far as
// they are there. With Aligned, pairs are adjacent and begin at multiples of two elements.
// With Add, it is added to what is there.
template <bool Aligned, bool Add = false, int N, class T>
DEVICE void store_rows(const float (&acc)[N][4], T* to, i64 stride, int rows, int width,
                       i64 step = 1) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int r = row_of(e), c = col_of(n, e);
            if (r >= rows || c >= width) continue;
            T* at = to + r * stride + c * step;
            float x = acc[n][e], y = acc[n][e + 1];
            if (Add) {
                x += number(at[0]);
                if (c + 1 < width) y += number(at[step]);
            }
            if (Aligned) {
                assign_pair(at, x, y);
            } else {
                assign(at[0], x);
                if (c + 1 < width) assign(at[step], y);
            }
        }
    }
}

#endif  // DEVICE_CUH
