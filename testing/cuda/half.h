// Floats of 16 bits by their definitions, for what stands in for devices.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

inline float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The upper half of an f32.
inline float of_bf16(uint16_t half) { return of_bits((uint32_t)half << 16); }
// The nearest, ties to even.
inline uint16_t to_bf16(float x) {
    if (x != x) return 0x7fff;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// 5 bits of exponent, 10 of the digits behind the first; of an f32 the exponent is 112 more.
inline float of_f16(uint16_t half) {
    const uint32_t e = half >> 10 & 31, m = half & 1023;
    const float x = e == 31 ? (m ? NAN : INFINITY)
                    : e     ? of_bits(e + 112 << 23 | m << 13)
                            : (float)m * 0x1p-24f;
    return half >> 15 ? -x : x;
}
// The nearest, ties to even; beyond 65504, after rounding, it is infinite.
inline uint16_t to_f16(float x) {
    if (x != x) return 0x7fff;
    const int sign = signbit(x) ? 0x8000 : 0;
    const float a = fabsf(x);
    if (a >= 65520.0f) return (uint16_t)(sign | 0x7c00);
    // Below the least exponent a digit is 2^-24.
    if (a < 0x1p-14f) return (uint16_t)(sign | (int)nearbyintf(a * 0x1p24f));
    uint32_t bits;
    memcpy(&bits, &a, 4);
    return (uint16_t)(sign | (bits + 0xfff + (bits >> 13 & 1) - (112 << 23)) >> 13);
}
