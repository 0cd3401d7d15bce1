/* What the kernels over rows are written in: 16 elements at a time, in vectors of the compiler.
 *
 * The same arithmetic in the same order as the interpreter in the runtime, so that both give the same
 * bits: nothing is contracted, a fold keeps 16 partial folds of every 16th element, which are then
 * folded in pairs. `count` is 16 but at the end of a row. */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float V __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef int64_t word;
#define INLINE static inline __attribute__((always_inline))
#define LANES for (int lane = 0; lane < 16; lane++)

INLINE V all(float x) { return x - (V){0}; }
/* The first where the mask is set. Of 64 bytes that is one instruction, which compilers find in the
 * loop. */
#ifdef __AVX512F__
INLINE V pick(I mask, V a, V b) { V y; LANES y[lane] = mask[lane] ? a[lane] : b[lane]; return y; }
#else
INLINE V pick(I mask, V a, V b) { return (V)((mask & (I)a) | (~mask & (I)b)); }
#endif
INLINE I first(int count) {
    const I lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return lanes < count;
}
/* The places of 16 elements in their row. */
INLINE V column(word at) {
    const V lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (float)at + lanes;
}

INLINE V load_f32(const void *from, word at, word stride, int count) {
    const float *x = (const float *)from + at;
    V y = {0};
    if (stride == 1 && count == 16) memcpy(&y, x, 64);
    else if (stride == 1) memcpy(&y, x, (size_t)count * 4);
    else for (int lane = 0; lane < count; lane++) y[lane] = x[lane * stride];
    return y;
}
INLINE V load_i32(const void *from, word at, word stride, int count) {
    return __builtin_convertvector((I)load_f32(from, at, stride, count), V);
}
INLINE V load_bf16(const void *from, word at, word stride, int count) {
    typedef uint16_t H __attribute__((vector_size(32)));
    const uint16_t *x = (const uint16_t *)from + at;
    H y = {0};
    if (stride == 1 && count == 16) memcpy(&y, x, 32);
    else for (int lane = 0; lane < count; lane++) y[lane] = x[lane * stride];
    return (V)(__builtin_convertvector(y, I) << 16);
}
/* Asks for a line of memory ahead of its use; none need be there. */
INLINE void fetch_f32(const void *from, word at) { __builtin_prefetch((const float *)from + at); }
INLINE void fetch_i32(const void *from, word at) { __builtin_prefetch((const int32_t *)from + at); }
INLINE void fetch_bf16(const void *from, word at) { __builtin_prefetch((const uint16_t *)from + at); }
INLINE float one_f32(const void *from, word at) { return ((const float *)from)[at]; }
INLINE float one_i32(const void *from, word at) { return (float)((const int32_t *)from)[at]; }
INLINE float one_bf16(const void *from, word at) {
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The nearest bf16 in the upper half of each lane, ties to even; a NaN stays one. */
INLINE I nearest_bf16(V x) {
    typedef uint32_t U __attribute__((vector_size(64)));
    U bits = (U)x;
    U rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    I nan = x != x;
    return (nan & (I)((bits & 0xffff0000u) | 0x400000u)) | (~nan & (I)rounded);
}
INLINE V round_bf16(V x) { return (V)nearest_bf16(x); }

INLINE void store_f32(void *to, word at, word stride, int count, V x) {
    float *y = (float *)to + at;
    if (stride == 1 && count == 16) memcpy(y, &x, 64);
    else if (stride == 1) memcpy(y, &x, (size_t)count * 4);
    else for (int lane = 0; lane < count; lane++) y[lane * stride] = x[lane];
}
/* Towards 0, within the bounds of the type; NaN is 0. */
INLINE void store_i32(void *to, word at, word stride, int count, V x) {
    int32_t *y = (int32_t *)to + at;
    for (int lane = 0; lane < count; lane++) {
        float v = x[lane];
        y[lane * stride] = v != v ? 0 : v >= 2147483648.0f ? INT32_MAX : v < -2147483648.0f ? INT32_MIN : (int32_t)v;
    }
}
INLINE void store_bf16(void *to, word at, word stride, int count, V x) {
    typedef uint16_t H __attribute__((vector_size(32)));
    typedef uint32_t U __attribute__((vector_size(64)));
    uint16_t *y = (uint16_t *)to + at;
    H bits = __builtin_convertvector((U)nearest_bf16(x) >> 16, H);
    if (stride == 1 && count == 16) memcpy(y, &bits, 32);
    else for (int lane = 0; lane < count; lane++) y[lane * stride] = bits[lane];
}

/* The larger of two; if one is no number, the other. */
INLINE V f_max(V a, V b) { return pick(b != b, a, pick(a > b, a, b)); }
INLINE V f_min(V a, V b) { return pick(b != b, a, pick(a < b, a, b)); }
/* The same of a fold, which is a number, and an element: of zeros the fold. */
INLINE V into_max(V fold, V x) { return pick(x > fold, x, fold); }
INLINE V into_min(V fold, V x) { return pick(x < fold, x, fold); }
INLINE V f_add(V a, V b) { return a + b; }
INLINE V f_sub(V a, V b) { return a - b; }
INLINE V f_mul(V a, V b) { return a * b; }
INLINE V f_div(V a, V b) { return a / b; }
INLINE V f_at_least(V a, V b) { return pick(a >= b, all(1), all(0)); }
INLINE V f_where(V a, V b, V x) { return pick(a == b, x, all(0)); }

/* x between two numbers, or none; y times 2^n, rounded once. */
#ifdef __AVX512F__
#define OF_ALL (unsigned short)-1, 4
/* The second operand if one is no number. Compilers name these instructions differently. */
#ifdef __clang__
INLINE V largest(V a, V b) { return (V)__builtin_ia32_maxps512(a, b, 4); }
INLINE V smallest(V a, V b) { return (V)__builtin_ia32_minps512(a, b, 4); }
#else
INLINE V largest(V a, V b) { return (V)__builtin_ia32_maxps512_mask(a, b, b, OF_ALL); }
INLINE V smallest(V a, V b) { return (V)__builtin_ia32_minps512_mask(a, b, b, OF_ALL); }
#endif
INLINE V between(V x, V low, V high) { return smallest(high, largest(low, x)); }
INLINE V scaled(V y, V n) { return (V)__builtin_ia32_scalefps512_mask(y, n, y, OF_ALL); }
#else
INLINE V between(V x, V low, V high) {
    V y = pick(x < low, low, x);
    return pick(y > high, high, y);
}
INLINE V scaled(V y, V n) {
    /* 2^n in two factors, so that neither overflows where the result does not. */
    const float round = 12582912.0f;
    I i = (I)(n + round) - (I)all(round);
    I half = i >> 1;
    return y * (V)((half + 127) << 23) * (V)((i - half + 127) << 23);
}
#endif
/* e^x within 2 units in the last place (Cephes' expf; Moshier, 1984). */
INLINE V f_exp(V x) {
    const float round = 12582912.0f;
    V c = between(x, all(-104.0f), all(89.0f));
    V n = c * 1.44269504088896341f + round - round;
    V r = c - n * 0.6933594f + n * 2.1219444e-4f;
    V p = r * 1.9875691e-4f + 1.3982e-3f;
    p = p * r + 8.333452e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 0.5f;
    return scaled(p * (r * r) + r + 1.0f, n);
}
INLINE V f_abs(V x) { return (V)((I)x & 0x7fffffff); }
INLINE V f_tanh(V x) {
    V z = x * x;
    V p = z * -5.7049887e-3f + 2.063909e-2f;
    p = p * z - 5.3739716e-2f;
    p = p * z + 1.3331442e-1f;
    p = p * z - 3.333328e-1f;
    V near = p * z * x + x;
    V far = 1.0f - 2.0f / (f_exp(2.0f * f_abs(x)) + 1.0f);
    V sign = (V)(((I)far & 0x7fffffff) | ((I)x & (I)all(-0.0f)));
    return pick(f_abs(x) < 0.625f, near, sign);
}
INLINE V f_sqrt(V x) {
    V y;
    LANES y[lane] = __builtin_sqrtf(x[lane]);
    return y;
}
INLINE V f_rsqrt(V x) { return 1.0f / f_sqrt(x); }
INLINE V f_logistic(V x) { return 1.0f / (1.0f + f_exp(-x)); }
INLINE V f_silu(V x) { return x / (1.0f + f_exp(-x)); }
INLINE V f_gelu(V x) {
    return x / (1.0f + f_exp(-2.0f * 0.7978846f * (x + 0.044715f * x * x * x)));
}
INLINE V f_round(V x) { return round_bf16(x); }
#define BY_LANE(name, f) INLINE V name(V x) { V y; LANES y[lane] = f(x[lane]); return y; }
BY_LANE(f_log, logf)
BY_LANE(f_expm1, expm1f)
BY_LANE(f_sin, sinf)
BY_LANE(f_cos, cosf)

#define FOLD_LANES(name, f) INLINE float name(V x) { \
    for (int n = 8; n > 0; n /= 2) { \
        V y = x; \
        for (int lane = 0; lane < n; lane++) y[lane] = x[lane + n]; \
        x = f(x, y); \
    } \
    return x[0]; }
FOLD_LANES(sum_of, f_add)
FOLD_LANES(max_of, f_max)
FOLD_LANES(min_of, f_min)
