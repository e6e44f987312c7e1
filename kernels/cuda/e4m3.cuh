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

// The bits of the largest of V magnitudes.
template <typename T, int V> INLINE uint32_t largest_of(const pack<T, V> &x)
{
    uint32_t largest = 0;
    if constexpr (sizeof(T) == 2 && V % 2 == 0) { // two at a time, and of these the larger
        unrolled<V / 2>(
            [&](int i) { largest = __vmaxu2(largest, ((const uint32_t *)&x)[i] & 0x7fff7fffu); });
        return max(largest << 16, largest & 0xffff0000u);
    }
    unrolled<V>([&](int i) { largest = max(largest, magnitude_bits(to_f32(x.at[i]))); });
    return largest;
}

// The codes of two numbers of f32, the first one's in the lower byte.
INLINE uint32_t e4m3_pair(float first, float second)
{
#if __CUDA_ARCH__ >= 890
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
#else
    return e4m3_from_f32(first) | (uint32_t)e4m3_from_f32(second) << 8;
#endif
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

// V numbers of bf16, in pairs, of a row with that scale: times its inverse. Exact but where nothing
// is left in e4m3.
template <int V> INLINE void scale_down(uint32_t (&pairs)[V / 2], const pack<bf16, V> &x, int scale)
{
    const uint32_t down = (__float_as_uint(power_of_two(-scale)) >> 16) * 0x10001u;
    unrolled<V / 2>([&](int i) {
        pairs[i] = ((const uint32_t *)&x)[i];
        multiply_pair(pairs[i], down);
    });
}
INLINE float lower_of(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}
INLINE float upper_of(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
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
