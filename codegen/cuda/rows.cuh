// What printed kernels over rows are written in: functions of one element, packs of elements, and
// folds over the threads that share a row.
//
// Functions are within a few units in the last place of f32; sin and cos up to |x| = 2^30.
#ifndef ROWS_CUH
#define ROWS_CUH
#include "device.cuh"

#ifndef INFINITY
#define INFINITY (-minus_infinity())
#endif
#ifndef NAN
#define NAN __uint_as_float(0x7fc00000u)
#endif

DEVICE float f_add(float a, float b) { return a + b; }
DEVICE float f_sub(float a, float b) { return a - b; }
DEVICE float f_mul(float a, float b) { return a * b; }
DEVICE float f_div(float a, float b) { return a / b; }
// The larger of two; if one is no number, the other.
DEVICE float f_max(float a, float b) { return fmaxf(a, b); }
DEVICE float f_min(float a, float b) { return fminf(a, b); }
DEVICE float f_at_least(float a, float b) { return a >= b ? 1.0f : 0.0f; }
DEVICE float f_where(float a, float b, float x) { return a == b ? x : 0.0f; }
DEVICE float f_select(float m, float a, float b) { return m != 0.0f ? a : b; }
DEVICE float f_pow(float a, float b) { return powf(a, b); }

DEVICE float f_exp(float x) { return expf(x); }
DEVICE float f_expm1(float x) { return expm1f(x); }
DEVICE float f_log(float x) { return logf(x); }
DEVICE float f_sqrt(float x) { return sqrtf(x); }
DEVICE float f_rsqrt(float x) { return rsqrtf(x); }
DEVICE float f_tanh(float x) { return tanhf(x); }
// Where e^-x overflows, the quotient is the 0 that it should be.
DEVICE float f_logistic(float x) { return divide_fast(1.0f, 1.0f + expf(-x)); }
DEVICE float f_silu(float x) { return divide_fast(x, 1.0f + expf(-x)); }
DEVICE float f_erf(float x) { return erff(x); }
DEVICE float f_log1p(float x) { return log1pf(x); }
DEVICE float f_floor(float x) { return floorf(x); }
DEVICE float f_nearest(float x) { return rintf(x); }
// As an element of 16 bits.
template <class T>
DEVICE float rounded(float x) {
    T y;
    assign(y, x);
    return number(y);
}
DEVICE float f_round_bf16(float x) { return rounded<Bf16>(x); }
DEVICE float f_round_f16(float x) { return rounded<F16>(x); }

// The sine of an angle so many quarter turns ahead (Cephes; Moshier, 1984). What is nearest to a
// quarter turn is found in f64: the processor's own functions take memory for large angles.
DEVICE float wave(float angle, int ahead) {
    const double n = rint((double)angle * 0.63661977236758134308);
    const double near = fma(-n, 1.57079632679489655800, (double)angle);
    const float x = (float)fma(-n, 6.12323399573676603587e-17, near), z = x * x;
    const float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * x + x;
    const float c = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z +
                     4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
    const int quarter = (int)(i64)n + ahead;
    const float y = quarter & 1 ? c : s;
    return quarter & 2 ? -y : y;
}
DEVICE float f_sin(float x) { return wave(x, 0); }
DEVICE float f_cos(float x) { return wave(x, 1); }

// `count` elements, `stride` apart, of a pack of N; the others are 0.
template <int N, class T>
DEVICE Pack<T, N> load_some(const T* from, i64 stride, int count) {
    Pack<T, N> x;
    #pragma unroll
    for (int k = 0; k < N; k++) x.at[k] = k < count ? from[k * stride] : T{};
    return x;
}

// Towards 0, within the bounds of the type; NaN is 0.
DEVICE void assign(int& to, float x) {
    to = x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : (int)x;
}
template <int N, class T>
DEVICE void store_all(T* to, const float (&x)[N]) {
    Pack<T, N> y;
    #pragma unroll
    for (int k = 0; k < N; k++) assign(y.at[k], x[k]);
    store<N>(to, y);
}
template <int N, class T>
DEVICE void store_halves(T* to, const float (&x)[N]) {
    if constexpr (N == 1) {
        assign(*to, x[0]);
    } else {
        Pack<u32, N / 2> y;
        #pragma unroll
        for (int k = 0; k < N / 2; k++) y.at[k] = pack<T>(x[2 * k], x[2 * k + 1]);
        store<N / 2>(reinterpret_cast<u32*>(to), y);
    }
}
template <int N>
DEVICE void store_all(Bf16* to, const float (&x)[N]) {
    store_halves<N>(to, x);
}
template <int N>
DEVICE void store_all(F16* to, const float (&x)[N]) {
    store_halves<N>(to, x);
}
template <int N, class T>
DEVICE void store_some(T* to, i64 stride, int count, const float (&x)[N]) {
    #pragma unroll
    for (int k = 0; k < N; k++) {
        if (k < count) assign(to[k * stride], x[k]);
    }
}

// Folds what the threads of a row have; all of them get the result. A row has a power of two of a
// warp's lanes, or all threads of a block, which `shared` has a place for each warp of.
#define FOLD_THREADS(name, function, nothing)                                          \
    template <int Threads>                                                             \
    DEVICE float name(float x, float* shared) {                                        \
        const int lanes = Threads < 32 ? Threads : 32, warps = (Threads + 31) / 32;    \
        _Pragma("unroll")                                                              \
        for (int o = lanes / 2; o; o /= 2) {                                           \
            x = function(x, __shfl_xor_sync(ALL_LANES, x, o));                         \
        }                                                                              \
        if (warps == 1) return x;                                                      \
        if (lane_id() == 0) shared[warp_id()] = x;                                     \
        __syncthreads();                                                               \
        x = lane_id() < warps ? shared[lane_id()] : nothing;                           \
        _Pragma("unroll")                                                              \
        for (int o = 16; o; o /= 2) x = function(x, __shfl_xor_sync(ALL_LANES, x, o)); \
        return x;                                                                      \
    }
FOLD_THREADS(sum_of, f_add, 0.0f)
FOLD_THREADS(max_of, f_max, -INFINITY)
FOLD_THREADS(min_of, f_min, INFINITY)

#endif  // ROWS_CUH
