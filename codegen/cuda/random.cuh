// Philox 4x32-10 (Salmon et al., 2011).
#ifndef RANDOM_CUH
#define RANDOM_CUH
#include "device.cuh"

struct Words {
    u32 at[4];
};

DEVICE Words philox(Words c, u32 k0, u32 k1) {
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 a = (u64)c.at[0] * 0xD2511F53u, b = (u64)c.at[2] * 0xCD9E8D57u;
        c = {{(u32)(b >> 32) ^ c.at[1] ^ k0, (u32)b, (u32)(a >> 32) ^ c.at[3] ^ k1, (u32)a}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

#endif  // RANDOM_CUH
