// Floats of 16 bits by their definitions, for what stands in for devices.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

// The upper half of an f32.
inline float of_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
// The nearest, ties to even.
inline uint16_t to_bf16(float x) {
    if (x != x) return 0x7fff;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// 5 bits of exponent, 10 of the digits behind the first.
inline float of_f16(uint16_t half) {
    const int e = half >> 10 & 31, m = half & 1023;
    const float x = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24);
    return half >> 15 ? -x : x;
}
// The nearest, ties to even; beyond 65504, after rounding, it is infinite.
inline uint16_t to_f16(float x) {
    if (x != x) return 0x7fff;
    const int sign = signbit(x) ? 0x8000 : 0;
    const float a = fabsf(x);
    if (a >= 65520.0f) return (uint16_t)(sign | 0x7c00);
    int e;
    frexpf(a, &e);
    e = a == 0.0f || e - 1 < -14 ? -14 : e - 1;
    const int digits = (int)nearbyintf(ldexpf(a, 10 - e));
    return (uint16_t)(sign | ((e + 15) << 10) + digits - 1024);
}
