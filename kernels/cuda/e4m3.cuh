/* e4m3.cuh: codes of e4m3 (common/base/e4m3.h) as numbers of bf16, in registers. Private to
 * kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_E4M3_CUH
#define KERNELS_CUDA_E4M3_CUH

#include "common/base/e4m3.h"
#include "kernels/cuda/cuda.cuh"

// Magnitudes in their order, and behind all others a NaN.
INLINE uint32_t magnitude_bits(float x)
{
    return __float_as_uint(x) & 0x7fffffffu;
}
// The scale of a row whose largest magnitude has these bits.
INLINE int8_t row_scale(uint32_t largest)
{
    return largest > 0x7f800000u ? E4M3_SCALE_NAN : e4m3_scale(__uint_as_float(largest));
}

// x *= y, two numbers of bf16 each.
INLINE void multiply_pair(uint32_t &x, uint32_t y)
{
#if __CUDA_ARCH__ >= 900
    asm("mul.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
#else
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(0x80008000u)); // -0, twice
#endif
}

// Four codes: those at even places and those at odd ones. up: 2^120, twice; or times a factor.
INLINE void widen(uint32_t codes, uint32_t &even, uint32_t &odd, uint32_t up = 0x7b807b80u)
{
    even = (codes << 4 & 0x07f007f0u) | (codes << 8 & 0x80008000u);
    odd = (codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u);
    multiply_pair(even, up);
    multiply_pair(odd, up);
}

// 16 codes of a row with that scale, a multiple of 16 columns from its beginning: the first eight
// columns and the others.
INLINE void widen_row(uint4 codes, int8_t scale, uint4 &lower, uint4 &upper)
{
    const uint32_t factor = bf16_from_f32(e4m3_factor(scale)) * 0x10001u;
    auto both = [&](uint32_t four, uint32_t &even, uint32_t &odd) {
        widen(four, even, odd);
        multiply_pair(even, factor);
        multiply_pair(odd, factor);
    };
    both(codes.x, lower.x, upper.x);
    both(codes.y, lower.y, upper.y);
    both(codes.z, lower.z, upper.z);
    both(codes.w, lower.w, upper.w);
}

#endif
