/* What the kernels over rows are written in: 16 elements at a time, in vectors of the compiler.
 *
 * The same arithmetic in the same order as the interpreter in the runtime, so that both give the same
 * bits: nothing is contracted, a fold keeps 16 partial folds of every 16th element, which are then
 * folded in pairs. `count` is 16 but at the end of a row. */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t word;
#define INLINE static inline __attribute__((always_inline))

/* 16 elements are as many parts as the processor's vectors make of them: wider ones the compiler would
 * compare and move element by element. */
#if defined __AVX512F__
#define PARTS 1
#define EACH(m, f) m(f, 0)
#elif defined __AVX2__
#define PARTS 2
#define EACH(m, f) m(f, 0), m(f, 1)
#else
#define PARTS 4
#define EACH(m, f) m(f, 0), m(f, 1), m(f, 2), m(f, 3)
#endif
#define WIDTH (16 / PARTS)
#define LANES for (int lane = 0; lane < WIDTH; lane++)
/* Parts: of f32, of i32, of its bits, and of 16 bits each. */
typedef float P __attribute__((vector_size(4 * WIDTH)));
typedef int32_t I __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t U __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t H __attribute__((vector_size(2 * WIDTH)));
/* 16 elements. */
typedef struct { P part[PARTS]; } V;

/* `f_name` of 16 elements is `p_name` of their parts. */
#define OF_X(f, i) p_##f(x.part[i])
#define OF_XY(f, i) p_##f(x.part[i], y.part[i])
#define OF_XYZ(f, i) p_##f(x.part[i], y.part[i], z.part[i])
#define LIFT(name) INLINE V f_##name(V x) { return (V){{EACH(OF_X, name)}}; }
#define LIFT_2(name) INLINE V f_##name(V x, V y) { return (V){{EACH(OF_XY, name)}}; }
#define LIFT_3(name) INLINE V f_##name(V x, V y, V z) { return (V){{EACH(OF_XYZ, name)}}; }

INLINE P same(float x) { return x - (P){0}; }
#define SAME(f, i) same(x)
INLINE V all(float x) { return (V){{EACH(SAME, )}}; }
/* The first where the mask is set. Of 64 bytes that is one instruction, which gcc finds in the loop. */
#if defined __AVX512F__ && !defined __clang__
INLINE P pick(I mask, P a, P b) { P y; LANES y[lane] = mask[lane] ? a[lane] : b[lane]; return y; }
#else
INLINE P pick(I mask, P a, P b) { return (P)((mask & (I)a) | (~mask & (I)b)); }
#endif
/* The places of a part's elements among the 16. */
INLINE I place(int part) {
    static const int32_t places[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    I y;
    memcpy(&y, places + part * WIDTH, sizeof y);
    return y;
}
/* The first `count` of x, then those of y. */
#define FIRST(f, i) pick(place(i) < count, x.part[i], y.part[i])
INLINE V first(int count, V x, V y) { return (V){{EACH(FIRST, )}}; }
/* The places of 16 elements in their row. */
#define COLUMN(f, i) (float)at + __builtin_convertvector(place(i), P)
INLINE V column(word at) { return (V){{EACH(COLUMN, )}}; }

INLINE P loaded(const float *x) { P y; memcpy(&y, x, sizeof y); return y; }
#define LOADED(f, i) loaded(x + i * WIDTH)
INLINE V load_f32(const void *from, word at, word stride, int count) {
    const float *x = (const float *)from + at;
    float found[16] = {0};
    if (stride != 1 || count != 16) {
        if (stride == 1) memcpy(found, x, (size_t)count * 4);
        else for (int lane = 0; lane < count; lane++) found[lane] = x[lane * stride];
        x = found;
    }
    return (V){{EACH(LOADED, )}};
}
INLINE P p_number(P x) { return __builtin_convertvector((I)x, P); }
LIFT(number)
INLINE V load_i32(const void *from, word at, word stride, int count) {
    return f_number(load_f32(from, at, stride, count));
}
/* 16 bits above 16 zeros. */
INLINE P widened(const uint16_t *x) {
    H y;
    memcpy(&y, x, sizeof y);
    return (P)(__builtin_convertvector(y, I) << 16);
}
#define WIDENED(f, i) widened(x + i * WIDTH)
INLINE V load_bf16(const void *from, word at, word stride, int count) {
    const uint16_t *x = (const uint16_t *)from + at;
    uint16_t found[16] = {0};
    if (stride != 1 || count != 16) {
        for (int lane = 0; lane < count; lane++) found[lane] = x[lane * stride];
        x = found;
    }
    return (V){{EACH(WIDENED, )}};
}
/* 16 bits of f16: 2^112 times what an f32 of the same bits is, denormal ones too. */
INLINE P number_f16(U bits) {
    U sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
    U number = (U)((P)rest * same(0x1p112f));
    U far = rest | 0x7f800000u | ((U)(rest > (31u << 23)) & 0x400000u), beyond = (U)(rest >= (31u << 23));
    return (P)(sign | (beyond & far) | (~beyond & number));
}
INLINE P widened_f16(const uint16_t *x) {
    H y;
    memcpy(&y, x, sizeof y);
    return number_f16(__builtin_convertvector(y, U));
}
#define WIDENED_F16(f, i) widened_f16(x + i * WIDTH)
INLINE V load_f16(const void *from, word at, word stride, int count) {
    const uint16_t *x = (const uint16_t *)from + at;
    uint16_t found[16] = {0};
    if (stride != 1 || count != 16) {
        for (int lane = 0; lane < count; lane++) found[lane] = x[lane * stride];
        x = found;
    }
    return (V){{EACH(WIDENED_F16, )}};
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

INLINE void fetch_f16(const void *from, word at) { __builtin_prefetch((const uint16_t *)from + at); }
INLINE float one_f16(const void *from, word at) {
    return number_f16((U){0} + (uint32_t)((const uint16_t *)from)[at])[0];
}

/* The nearest bf16 in the upper half of each lane, ties to even; a NaN stays one. */
INLINE U nearest_bf16(P x) {
    U bits = (U)x;
    U rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    U nan = (U)(x != x);
    return (nan & ((bits & 0xffff0000u) | 0x400000u)) | (~nan & rounded);
}
/* The nearest f16 in the lower half of each lane, ties to even: infinite beyond 65504; a NaN stays one. */
INLINE U nearest_f16(P x) {
    U sign = (U)x >> 16 & 0x8000u, rest = (U)x & 0x7fffffffu;
    U nearest = (rest + 0xfffu + (rest >> 13 & 1u) - (112u << 23)) >> 13;
    U over = (U)(nearest > 0x7c00u);
    nearest = (over & 0x7c00u) | (~over & nearest);
    /* Below 2^-14 digits end at 2^-24: as they do of a sum with 0.5. */
    U small = (U)((P)rest + same(0.5f)) - (U)same(0.5f), below = (U)(rest < (113u << 23));
    U nan = (U)(rest > 0x7f800000u), number = (below & small) | (~below & nearest);
    return sign | (nan & (0x7e00u | (rest >> 13 & 0x1ffu))) | (~nan & number);
}
INLINE P p_round_bf16(P x) { return (P)nearest_bf16(x); }
INLINE P p_round_f16(P x) { return number_f16(nearest_f16(x)); }
LIFT(round_bf16)
LIFT(round_f16)

#define STORED(f, i) memcpy(to + i * WIDTH, &x.part[i], sizeof(P))
INLINE void stored(float *to, V x) { EACH(STORED, ); }
INLINE void store_f32(void *to, word at, word stride, int count, V x) {
    float *y = (float *)to + at, all[16];
    if (stride == 1 && count == 16) {
        stored(y, x);
    } else {
        stored(all, x);
        if (stride == 1) memcpy(y, all, (size_t)count * 4);
        else for (int lane = 0; lane < count; lane++) y[lane * stride] = all[lane];
    }
}
/* Towards 0, within the bounds of the type; NaN is 0. */
INLINE void store_i32(void *to, word at, word stride, int count, V x) {
    int32_t *y = (int32_t *)to + at;
    float all[16];
    stored(all, x);
    for (int lane = 0; lane < count; lane++) {
        float v = all[lane];
        y[lane * stride] = v != v ? 0 : v >= 2147483648.0f ? INT32_MAX : v < -2147483648.0f ? INT32_MIN : (int32_t)v;
    }
}
INLINE void halved(uint16_t *to, P x) {
    H y = __builtin_convertvector(nearest_bf16(x) >> 16, H);
    memcpy(to, &y, sizeof y);
}
#define HALVED(f, i) halved(to + i * WIDTH, x.part[i])
INLINE void store_halves(uint16_t *to, V x) { EACH(HALVED, ); }
INLINE void store_bf16(void *to, word at, word stride, int count, V x) {
    uint16_t *y = (uint16_t *)to + at, all[16];
    if (stride == 1 && count == 16) {
        store_halves(y, x);
    } else {
        store_halves(all, x);
        for (int lane = 0; lane < count; lane++) y[lane * stride] = all[lane];
    }
}

INLINE void halved_f16(uint16_t *to, P x) {
    H y = __builtin_convertvector(nearest_f16(x), H);
    memcpy(to, &y, sizeof y);
}
#define HALVED_F16(f, i) halved_f16(to + i * WIDTH, x.part[i])
INLINE void store_halves_f16(uint16_t *to, V x) { EACH(HALVED_F16, ); }
INLINE void store_f16(void *to, word at, word stride, int count, V x) {
    uint16_t *y = (uint16_t *)to + at, all[16];
    if (stride == 1 && count == 16) {
        store_halves_f16(y, x);
    } else {
        store_halves_f16(all, x);
        for (int lane = 0; lane < count; lane++) y[lane * stride] = all[lane];
    }
}

/* The larger of two; if one is no number, the other. */
INLINE P p_max(P a, P b) { return pick(b != b, a, pick(a > b, a, b)); }
INLINE P p_min(P a, P b) { return pick(b != b, a, pick(a < b, a, b)); }
/* The same of a fold, which is a number, and an element: of zeros the fold. */
INLINE P p_into_max(P fold, P x) { return pick(x > fold, x, fold); }
INLINE P p_into_min(P fold, P x) { return pick(x < fold, x, fold); }
INLINE P p_add(P a, P b) { return a + b; }
INLINE P p_sub(P a, P b) { return a - b; }
INLINE P p_mul(P a, P b) { return a * b; }
INLINE P p_div(P a, P b) { return a / b; }
INLINE P p_at_least(P a, P b) { return pick(a >= b, same(1), same(0)); }
INLINE P p_where(P a, P b, P x) { return pick(a == b, x, same(0)); }
INLINE P p_select(P m, P a, P b) { return pick(m != 0, a, b); }
INLINE P p_pow(P a, P b) { P y; LANES y[lane] = powf(a[lane], b[lane]); return y; }
LIFT_2(max)
LIFT_2(min)
LIFT_2(into_max)
LIFT_2(into_min)
LIFT_2(add)
LIFT_2(sub)
LIFT_2(mul)
LIFT_2(div)
LIFT_2(at_least)
LIFT_2(pow)
LIFT_3(where)
LIFT_3(select)

/* x between two numbers, or none; y times 2^n, rounded once. */
#ifdef __AVX512F__
#define OF_ALL (unsigned short)-1, 4
/* The second operand if one is no number. Compilers name these instructions differently. */
#ifdef __clang__
INLINE P largest(P a, P b) { return (P)__builtin_ia32_maxps512(a, b, 4); }
INLINE P smallest(P a, P b) { return (P)__builtin_ia32_minps512(a, b, 4); }
#else
INLINE P largest(P a, P b) { return (P)__builtin_ia32_maxps512_mask(a, b, b, OF_ALL); }
INLINE P smallest(P a, P b) { return (P)__builtin_ia32_minps512_mask(a, b, b, OF_ALL); }
#endif
INLINE P between(P x, P low, P high) { return smallest(high, largest(low, x)); }
INLINE P scaled(P y, P n) { return (P)__builtin_ia32_scalefps512_mask(y, n, y, OF_ALL); }
#else
INLINE P between(P x, P low, P high) {
    P y = pick(x < low, low, x);
    return pick(y > high, high, y);
}
INLINE P scaled(P y, P n) {
    /* 2^n in two factors, so that neither overflows where the result does not. */
    const float round = 12582912.0f;
    I i = (I)(n + round) - (I)same(round);
    I half = i >> 1;
    return y * (P)((half + 127) << 23) * (P)((i - half + 127) << 23);
}
#endif
#define BY_LANE(name, f) INLINE P p_##name(P x) { P y; LANES y[lane] = f(x[lane]); return y; }
/* e^x within 2 units in the last place (Cephes' expf; Moshier, 1984). */
INLINE P p_exp(P x) {
    const float round = 12582912.0f;
    P c = between(x, same(-104.0f), same(89.0f));
    P n = c * 1.44269504088896341f + round - round;
    P r = c - n * 0.6933594f + n * 2.1219444e-4f;
    P p = r * 1.9875691e-4f + 1.3982e-3f;
    p = p * r + 8.333452e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 0.5f;
    return scaled(p * (r * r) + r + 1.0f, n);
}
INLINE P p_abs(P x) { return (P)((I)x & 0x7fffffff); }
INLINE P p_tanh(P x) {
    P z = x * x;
    P p = z * -5.7049887e-3f + 2.063909e-2f;
    p = p * z - 5.3739716e-2f;
    p = p * z + 1.3331442e-1f;
    p = p * z - 3.333328e-1f;
    P near = p * z * x + x;
    P far = 1.0f - 2.0f / (p_exp(2.0f * p_abs(x)) + 1.0f);
    P sign = (P)(((I)far & 0x7fffffff) | ((I)x & (I)same(-0.0f)));
    return pick(p_abs(x) < 0.625f, near, sign);
}
BY_LANE(sqrt, __builtin_sqrtf)
INLINE P p_rsqrt(P x) { return 1.0f / p_sqrt(x); }
INLINE P p_logistic(P x) { return 1.0f / (1.0f + p_exp(-x)); }
INLINE P p_silu(P x) { return x / (1.0f + p_exp(-x)); }
/* Within 2 units in the last place: a polynomial near 0, else 1 - e^p(x). */
INLINE P p_erf(P x) {
    P t = p_abs(x), s = x * x;
    P p = s * -5.96761703e-4f + 4.99119423e-3f;
    p = p * s - 2.67681349e-2f;
    p = p * s + 1.12819925e-1f;
    p = p * s - 3.76125336e-1f;
    p = p * s + 1.28379166e-1f;
    P near = p * x + x;
    P q = t * -1.72853470e-5f + 3.83197126e-4f;
    q = q * s + (t * -3.88396438e-3f + 2.42546219e-2f);
    q = q * t - 1.06777877e-1f;
    q = q * t - 6.34846687e-1f;
    q = q * t - 1.28717512e-1f;
    q = q * t - t;
    P far = 1.0f - p_exp(q);
    P sign = (P)(((I)far & 0x7fffffff) | ((I)x & (I)same(-0.0f)));
    return pick(t > 0.927734375f, sign, near);
}
BY_LANE(log, logf)
BY_LANE(log1p, log1pf)
BY_LANE(floor, __builtin_floorf)
BY_LANE(nearest, __builtin_rintf)
BY_LANE(expm1, expm1f)
BY_LANE(sin, sinf)
BY_LANE(cos, cosf)
LIFT(exp)
LIFT(tanh)
LIFT(sqrt)
LIFT(rsqrt)
LIFT(logistic)
LIFT(silu)
LIFT(log)
LIFT(expm1)
LIFT(sin)
LIFT(cos)
LIFT(erf)
LIFT(log1p)
LIFT(floor)
LIFT(nearest)

/* Folds in pairs: elements 8 apart, then 4, 2, 1; the first element is whole. */
#ifdef __clang__
INLINE P moved(P x, int n) { P y; LANES y[lane] = x[(lane + n) % WIDTH]; return y; }
#else
INLINE P moved(P x, int n) { return __builtin_shuffle(x, place(0) + n); }
#endif
#define FOLD_LANES(name, f) INLINE float name(V x) { \
    for (int n = PARTS / 2; n > 0; n /= 2) \
        for (int i = 0; i < n; i++) x.part[i] = f(x.part[i], x.part[i + n]); \
    P all = x.part[0]; \
    if (WIDTH > 8) all = f(all, moved(all, 8)); \
    if (WIDTH > 4) all = f(all, moved(all, 4)); \
    all = f(all, moved(all, 2)); \
    return f(all, moved(all, 1))[0]; }
FOLD_LANES(sum_of, p_add)
FOLD_LANES(max_of, p_max)
FOLD_LANES(min_of, p_min)
