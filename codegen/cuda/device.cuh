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
// A 16-bit float of 11 digits, up to 65504.
struct F16 {
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

template <class T>
const bool IS_BF16 = false;
template <>
const bool IS_BF16<Bf16> = true;

#ifndef EMULATED

#define KERNEL extern "C" __global__
#define DEVICE __device__ __forceinline__
// Parameters that threads index: they stay where the launch puts them.
#define CONSTANT const __grid_constant__
// All the shared memory that the launch asks for.
#define DYNAMIC_SHARED(T, name)                                        \
    extern __shared__ __align__(1024) unsigned char name##_bytes[];    \
    T* name = reinterpret_cast<T*>(name##_bytes)

DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x / y within 2 units in the last place; 0 where |y| > 2^126.
DEVICE float divide_fast(float x, float y) { return __fdividef(x, y); }

// Two numbers of 16 bits, rounded to nearest even, the first in the lower half.
template <class T>
DEVICE u32 pack(float low, float high) {
    u32 r;
    if constexpr (IS_BF16<T>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    return r;
}
DEVICE float widened(F16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
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

#define MULTIPLY_ADD(type)                                                                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "             \
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                    \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// c[16x8] += a[16x16] b[16x8], of elements T
template <class T>
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (IS_BF16<T>) {
        MULTIPLY_ADD("bf16");
    } else {
        MULTIPLY_ADD("f16");
    }
}

// ---- Products by a group, four warps that have 16 rows of the result each, in the order of their
// numbers, and hold them like the result of a warp below. Operands in shared memory are named by
// Tile::operand. Products are made between `group_begin` and `group_begun`, and go on until they are
// waited for; till then their sums and weights in registers are not touched.

// Groups see what this thread has written to shared memory, after the barrier that follows.
DEVICE void show_groups() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_begun() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all products that have begun but those of the last `N` times.
template <int N>
DEVICE void group_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
// Keeps the compiler from moving what makes a register, or uses it, past here.
DEVICE void settle(float& x) { asm volatile("" : "+f"(x) :: "memory"); }
DEVICE void settle(u32& x) { asm volatile("" : "+r"(x) :: "memory"); }

#define SUMS_1(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SUMS_4(c, n) SUMS_1(c, n), SUMS_1(c, n + 1), SUMS_1(c, n + 2), SUMS_1(c, n + 3)
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
                          ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_96 NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
                          ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_128 NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110" \
    ",%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define GROUP_32(type)                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " "            \
                 "{" NAMES_16 "}, %16, %17, %20, 1, 1, %18, %19;"                           \
                 : SUMS_4(c, 0)                                                             \
                 : "l"(a), "l"(b), "n"((int)DownA), "n"((int)DownB), "n"((int)Add)          \
                 : "memory")
#define GROUP_64(type)                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "            \
                 "{" NAMES_32 "}, %32, %33, %36, 1, 1, %34, %35;"                           \
                 : SUMS_4(c, 0), SUMS_4(c, 4)                                               \
                 : "l"(a), "l"(b), "n"((int)DownA), "n"((int)DownB), "n"((int)Add)          \
                 : "memory")
#define GROUP_128(type)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "           \
                 "{" NAMES_64 "}, %64, %65, %68, 1, 1, %66, %67;"                           \
                 : SUMS_4(c, 0), SUMS_4(c, 4), SUMS_4(c, 8), SUMS_4(c, 12)                  \
                 : "l"(a), "l"(b), "n"((int)DownA), "n"((int)DownB), "n"((int)Add)          \
                 : "memory")
#define GROUP_256(type)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " "           \
                 "{" NAMES_128 "}, %128, %129, %132, 1, 1, %130, %131;"                     \
                 : SUMS_4(c, 0), SUMS_4(c, 4), SUMS_4(c, 8), SUMS_4(c, 12),                 \
                   SUMS_4(c, 16), SUMS_4(c, 20), SUMS_4(c, 24), SUMS_4(c, 28)               \
                 : "l"(a), "l"(b), "n"((int)DownA), "n"((int)DownB), "n"((int)Add)          \
                 : "memory")
#define GROUP_HELD(type)                                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "            \
                 "{" NAMES_32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"                      \
                 : SUMS_4(c, 0), SUMS_4(c, 4)                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory")

// c[64 x 8N] = a[64 x 16] b[16 x 8N], of elements T, with Add in addition to what c was. With Down, k runs
// down the rows of the operand's tile, else along them.
template <class T, int N, bool DownA, bool DownB, bool Add = true>
DEVICE void group_multiply_add(float (*c)[4], u64 a, u64 b) {
    static_assert(N == 4 || N == 8 || N == 16 || N == 32, "32, 64, 128 or 256 columns");
    if constexpr (IS_BF16<T>) {
        if constexpr (N == 4) GROUP_32("bf16");
        else if constexpr (N == 8) GROUP_64("bf16");
        else if constexpr (N == 16) GROUP_128("bf16");
        else GROUP_256("bf16");
    } else {
        if constexpr (N == 4) GROUP_32("f16");
        else if constexpr (N == 8) GROUP_64("f16");
        else if constexpr (N == 16) GROUP_128("f16");
        else GROUP_256("f16");
    }
}
// c[64 x 64] += a[64 x 16] b[16 x 64]. Each warp has its rows of `a` as for multiply_add; k runs down
// the rows of b's tile.
template <class T>
DEVICE void group_multiply_add(float (*c)[4], const u32 (&a)[4], u64 b) {
    if constexpr (IS_BF16<T>) {
        GROUP_HELD("bf16");
    } else {
        GROUP_HELD("f16");
    }
}

// Copies to shared memory that are on their way until `copies_end`.
// Where it is not `there`, zeros are, and `from` is not read.
DEVICE void copy16_async(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void copy4_async(void* to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(there ? 4 : 0) : "memory");
}
DEVICE void copies_begun() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all that have begun but the last `N`.
template <int N>
DEVICE void copies_end() {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

#endif  // EMULATED

// True where groups multiply tiles; EMULATED_SM90A: as if it were there.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(EMULATED_SM90A)
const bool WARPGROUPS = true;
#else
const bool WARPGROUPS = false;
#endif

const u32 ALL_LANES = 0xffffffffu;

DEVICE float number(float x) { return x; }
DEVICE float number(int x) { return (float)x; }
DEVICE float number(Bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float number(F16 x) { return widened(x); }
// The nearest element.
DEVICE void assign(float& to, float x) { to = x; }
DEVICE void assign(Bf16& to, float x) { to.bits = (u16)pack<Bf16>(x, 0.0f); }
DEVICE void assign(F16& to, float x) { to.bits = (u16)pack<F16>(x, 0.0f); }

DEVICE void assign_pair(float* to, float x, float y) { *reinterpret_cast<Float2*>(to) = {x, y}; }
// Of two elements of 16 bits.
template <class T>
DEVICE void assign_pair(T* to, float x, float y) {
    *reinterpret_cast<u32*>(to) = pack<T>(x, y);
}

// The same bits if types are equal.
template <class T>
DEVICE void convert(T& to, T x) {
    to = x;
}
DEVICE void convert(float& to, Bf16 x) { to = number(x); }
DEVICE void convert(float& to, F16 x) { to = number(x); }

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE int warp_id() { return threadIdx.x >> 5; }
// What is the same in all lanes; the compiler learns it by this.
DEVICE int of_all_lanes(int x) { return __shfl_sync(ALL_LANES, x, 0); }

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

// The place of a block in a grid of three dims, of which the first has x blocks and the second y. It is
// launched as one dim: a device has fewer than 2^16 blocks along the others.
struct Place {
    u32 x, y, z;
};
DEVICE Place place(i64 x, i64 y) {
    const u32 rest = blockIdx.x / (u32)x;
    return {blockIdx.x % (u32)x, rest % (u32)y, rest / (u32)y};
}

// The same, but blocks of BAND adjacent x go through all y before the next ones: what blocks that run at
// once read, the rows of their x and the columns of their y, is little, and stays in the L2 cache.
const u32 BAND = 16;
DEVICE Place place_in_bands(i64 x, i64 y) {
    const u64 all = (u64)x * (u64)y, band = (u64)BAND * (u64)y, at = blockIdx.x % all;
    const u32 first = (u32)(at / band) * BAND, inside = (u32)(at % band);
    const u32 wide = smaller((u32)x - first, BAND);
    return {first + inside % wide, inside / wide, (u32)(blockIdx.x / all)};
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

// Waits for all copies that have begun but the last `N`, and with Groups shows groups what the thread
// has written. A barrier must follow.
template <bool Groups, int N>
DEVICE void copies_arrive() {
    copies_end<N>();
    if constexpr (Groups) show_groups();
}

// ---- Tiles: Rows rows of Cols elements in shared memory, such that the 8 rows that a matrix load
// touches lie in different banks: rows are 16 bytes longer than their elements. With Groups they lie
// as groups read them: in slabs of 64 columns, rows of 128 bytes, whose 8 parts of 16 bytes are
// exchanged by the last bits of the row's number. Slabs begin at multiples of 1024 bytes, if all
// tiles before are of slabs.

// True where groups read tiles with so many columns.
template <class T>
DEVICE constexpr bool for_groups(int cols) {
    return WARPGROUPS && sizeof(T) == 2 && cols % 64 == 0;
}

template <class T, int Rows, int Cols, bool Groups>
struct Tile {
    static const int LD = Cols + 16 / (int)sizeof(T), SIZE = Rows * (Groups ? Cols : LD);
    T* begin;

    // Neither is negative, as the compiler does not see: then more of this is known beforehand.
    DEVICE T* at(u32 r, u32 c) const {
        return Groups ? begin + (c / 64 * Rows + r) * 64 + (c % 64 ^ r % 8 * 8) : begin + r * LD + c;
    }
    DEVICE T* end() const { return begin + SIZE; }
    // What names a tile in slabs to a group, from a multiple of 8 rows and of 64 columns on: where that
    // begins, how far slabs are apart, and the next 8 rows, in units of 16 bytes; and that parts of 16
    // bytes are exchanged in 128. Plus n it names what begins n units later, also in the lower half,
    // which is all that differs between tiles of a kind.
    DEVICE u64 operand(int r, int c) const {
        return named(shared_address(at(r, c)) >> 4 | (u32)(Rows * 8) << 16);
    }
    DEVICE static u64 named(u32 low) { return low | (u64)64 << 32 | (u64)1 << 62; }
};

// Begins to copy the first `rows` rows of `width` elements, `stride` apart, the elements `step`
// apart; all else in the tile becomes zero. With Aligned, rows are of whole 16 bytes, which are
// adjacent and begin at multiples of 16 bytes.
template <int Threads, bool Aligned, class T, int Rows, int Cols, bool Groups, class S>
DEVICE void load_tile(const Tile<T, Rows, Cols, Groups>& tile, const S* from, i64 stride, int rows,
                      int width, i64 step = 1) {
    const int Whole = 16 / (int)sizeof(T), Across = Cols / Whole, Down = Threads / Across;
    // A thread has one part of every Down-th row; those lie alike in memory, so far apart.
    const bool alike = !Groups || Down % 8 == 0;
    const int apart = Down * (Groups ? 64 : tile.LD);
    if constexpr (Aligned && Threads % Across == 0 && Rows % Down == 0 && alike) {
        const int first = threadIdx.x / Across, c = threadIdx.x % Across * Whole;
        const int last = c < width ? rows - first : 0;
        const S* at = from + first * stride + c;
        T* to = tile.at(first, c);
        #pragma unroll
        for (int r = 0; r < Rows; r += Down, at += Down * stride, to += apart) {
            copy16_async(to, at, r < last);
        }
    } else if constexpr (Aligned) {
        // Once more around costs less than the registers of all places.
        #pragma unroll 1
        for (int i = threadIdx.x; i < Rows * Across; i += Threads) {
            const int r = i / Across, c = i % Across * Whole;
            copy16_async(tile.at(r, c), from + r * stride + c, r < rows && c < width);
        }
    } else {
        for (int i = threadIdx.x; i < Rows * Cols; i += Threads) {
            const int r = i / Cols, c = i % Cols;
            const bool there = r < rows && c < width;
            convert(*tile.at(r, c), there ? from[r * stride + c * step] : S{});
        }
    }
}

// As load_tile, of one row of 4-byte elements.
template <int Cols, int Threads, class T>
DEVICE void load_row(T* row, const T* from, i64 stride, int width) {
    #pragma unroll
    for (int j = 0; j < Cols; j += Threads) {
        const int i = j + threadIdx.x;
        if (i >= Cols) break;
        copy4_async(row + i, from + i * stride, i < width);
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

template <class T, int N>
DEVICE void settle(T (&x)[N][4]) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int e = 0; e < 4; e++) settle(x[n][e]);
    }
}

// acc = a b^T: dot products of 16 rows of `a`, from `row` on, which is of_all_lanes, and the rows of
// `b`. With Groups, all warps of a group call this together, and row / 16 is a warp's number in the
// group, plus multiples of four.
template <int N, class T, int Rows, int Cols, bool Groups>
DEVICE void dot_rows(float (&acc)[N][4], const Tile<T, Rows, Cols, Groups>& a, int row,
                     const Tile<T, 8 * N, Cols, Groups>& b) {
    if constexpr (Groups) {
        const u64 of_a = a.operand(row / 64 * 64, 0), of_b = b.operand(0, 0);
        settle(acc);
        group_begin();
        #pragma unroll
        for (int k = 0; k < Cols; k += 16) {
            const int slab = k / 64, inside = k % 64 / 8;
            const u64 this_a = of_a + (slab * Rows * 8 + inside), this_b = of_b + (slab * 8 * N * 8 + inside);
            if (k == 0) {
                group_multiply_add<T, N, false, false, false>(acc, this_a, this_b);
            } else {
                group_multiply_add<T, N, false, false>(acc, this_a, this_b);
            }
        }
        group_begun();
        group_wait<0>();
        settle(acc);
    } else {
        const int lane = lane_id();
        clear(acc);
        #pragma unroll
        for (int k = 0; k < Cols; k += 16) {
            u32 left[4];
            load_matrices(left, a.at(row + (lane & 15), k + (lane >> 4) * 8));
            #pragma unroll
            for (int n = 0; n < N; n += 2) {
                u32 right[4];
                load_matrices(right, b.at(n * 8 + (lane & 7) + (lane >> 4) * 8,
                                          k + (lane >> 3 & 1) * 8));
                multiply_add<T>(acc[n], left, right[0], right[1]);
                multiply_add<T>(acc[n + 1], left, right[2], right[3]);
            }
        }
    }
}
template <int N, int Rows, int Cols>
DEVICE void dot_rows(float (&acc)[N][4], const Tile<float, Rows, Cols, false>& a, int row,
                     const Tile<float, 8 * N, Cols, false>& b) {
    row += row_of(0);
    clear(acc);
    #pragma unroll 1
    for (int k = 0; k < Cols; k += 4) {
        const Float4 a0 = *(const Float4*)a.at(row, k), a1 = *(const Float4*)a.at(row + 8, k);
        #pragma unroll
        for (int n = 0; n < N; n++) {
            const int col = col_of(n, 0);
            const Float4 b0 = *(const Float4*)b.at(col, k), b1 = *(const Float4*)b.at(col + 1, k);
            acc[n][0] += a0.x * b0.x + a0.y * b0.y + a0.z * b0.z + a0.w * b0.w;
            acc[n][1] += a0.x * b1.x + a0.y * b1.y + a0.z * b1.z + a0.w * b1.w;
            acc[n][2] += a1.x * b0.x + a1.y * b0.y + a1.z * b0.z + a1.w * b0.w;
            acc[n][3] += a1.x * b1.x + a1.y * b1.y + a1.z * b1.z + a1.w * b1.w;
        }
    }
}

// acc += w b: sums of the rows of `b`, of 8N elements from `col` on, with weights that are a result
// of the warp; `col` is of_all_lanes. With Groups, all warps of a group call this together, and `col` is
// a slab's first.
template <int K, int N, class T, int Cols, bool Groups>
DEVICE void sum_rows(float (&acc)[N][4], const float (&w)[K][4],
                     const Tile<T, 8 * K, Cols, Groups>& b, int col) {
    u32 left[K / 2][4];
    #pragma unroll
    for (int k = 0; k < K; k++) {
        left[k / 2][k % 2 * 2] = pack<T>(w[k][0], w[k][1]);
        left[k / 2][k % 2 * 2 + 1] = pack<T>(w[k][2], w[k][3]);
    }
    if constexpr (Groups) {
        const u64 of_b = b.operand(0, col);
        settle(acc);
        settle(left);
        group_begin();
        #pragma unroll
        for (int k = 0; k < K; k += 2) {
            #pragma unroll
            for (int n = 0; n < N; n += 8) {
                group_multiply_add<T>(acc + n, left[k / 2], of_b + (n / 8 * K + k) * 64);
            }
        }
        group_begun();
        group_wait<0>();
        settle(acc);
        settle(left);
    } else {
        const int lane = lane_id();
        #pragma unroll
        for (int k = 0; k < K; k += 2) {
            #pragma unroll
            for (int n = 0; n < N; n += 2) {
                u32 right[4];
                load_matrices_transposed(right, b.at(k * 8 + (lane & 15),
                                                     col + n * 8 + (lane >> 4) * 8));
                multiply_add<T>(acc[n], left[k / 2], right[0], right[1]);
                multiply_add<T>(acc[n + 1], left[k / 2], right[2], right[3]);
            }
        }
    }
}
template <int K, int N, int Cols>
DEVICE void sum_rows(float (&acc)[N][4], const float (&w)[K][4],
                     const Tile<float, 8 * K, Cols, false>& b, int col) {
    const int quad = lane_id() & ~3;
    #pragma unroll
    for (int k = 0; k < K; k++) {
        // Lane t of four holds weights of rows 8k + 2t and the next one.
        #pragma unroll 1
        for (int t = 0; t < 4; t++) {
            float x[4];
            #pragma unroll
            for (int e = 0; e < 4; e++) x[e] = __shfl_sync(ALL_LANES, w[k][e], quad | t);
            const int row = k * 8 + t * 2;
            #pragma unroll
            for (int n = 0; n < N; n++) {
                const Float2 y = *(const Float2*)b.at(row, col + col_of(n, 0));
                const Float2 z = *(const Float2*)b.at(row + 1, col + col_of(n, 0));
                acc[n][0] += x[0] * y.x + x[1] * z.x;
                acc[n][1] += x[0] * y.y + x[1] * z.y;
                acc[n][2] += x[2] * y.x + x[3] * z.x;
                acc[n][3] += x[2] * y.y + x[3] * z.y;
            }
        }
    }
}

// Rounds a result of the warp to rows of memory, `stride` apart, as far as they are there. With Aligned, pairs
// begin at multiples of two elements.
template <bool Aligned, int N, class T>
DEVICE void store_rows(const float (&acc)[N][4], T* to, i64 stride, int rows, int width) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int r = row_of(e), c = col_of(n, e);
            if (r >= rows || c >= width) continue;
            T* at = to + r * stride + c;
            if (Aligned) {
                assign_pair(at, acc[n][e], acc[n][e + 1]);
            } else {
                assign(at[0], acc[n][e]);
                if (c + 1 < width) assign(at[1], acc[n][e + 1]);
            }
        }
    }
}

#endif  // DEVICE_CUH
