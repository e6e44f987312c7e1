/* moments.h: how AdamW's moments are kept in fewer than 32 bits. CPU and CUDA kernels, and tests,
 * call these same functions: what they store has the same bits everywhere.
 *
 * Rounding is stochastic (Gupta et al. 2015): noise is added below the last kept bit, then the rest
 * is cut off, so that the mean of what is stored is what was computed. Rounding to nearest would
 * not do: with beta2 = 0.999 a step changes v by a thousandth, bf16 has steps of 1/256 to 1/128 and
 * the 8-bit code of 1/16 to 1/8, so v would stay for ever where it first came to rest. The noise is
 * a hash of the element's number and the step: a run repeats, and resumes, to the bit.
 *
 * 8 bits are blocks of MOMENT_BLOCK elements with one f32 scale, the largest magnitude in the block
 * (Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization). Within a block a code is a
 * small floating-point number, 3 mantissa bits and the rest exponent, because moments that are
 * 100,000 times smaller than their neighbours' matter as much: AdamW divides one by the root of the
 * other. m has a sign and reaches down to 2^-15.7 of the largest, v has none and reaches to
 * 2^-31.7: the root of v covers what m covers. An m below that becomes 0. A v below that is kept at
 * the smallest code, never at 0, which AdamW would divide by.
 *
 * A block has 128 elements, what tensors are aligned to in the arena (weights.h): none spans two.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_MOMENTS_H
#define KERNELS_MOMENTS_H

#include "common/base/dtype.h"
#include "kernels/ops.h"
#include <math.h>

#define MOMENT_BLOCK 128

// What a step multiplies by (ops.h, adamw).
struct adamw_factors {
    float decay, beta1, rest1, beta2, rest2, step, root_correction2, eps;
};

static inline struct adamw_factors adamw_factors_of(const struct adamw *a)
{
    struct adamw_factors f;
    f.decay = a->lr * a->weight_decay;
    f.beta1 = (float)a->beta1;
    f.rest1 = (float)(1 - a->beta1);
    f.beta2 = (float)a->beta2;
    f.rest2 = (float)(1 - a->beta2);
    f.step = a->lr / a->bias_correction1;
    f.root_correction2 = sqrtf(a->bias_correction2);
    f.eps = a->eps;
    return f;
}

// Mantissa bits that an 8-bit code cuts off, and the code of the block's largest magnitude.
#define MOMENT_CUT   20
#define MOMENT_TOP_M 127
#define MOMENT_TOP_V 255

// 32 random bits for element i at a step (the finaliser of MurmurHash3): the upper half for m, the
// lower for v.
DTYPE_INLINE uint32_t moment_noise(uint64_t i, uint32_t step)
{
    uint32_t h = (uint32_t)i ^ ((uint32_t)(i >> 32) * 0x85ebca77u) ^ (step * 0x9e3779b9u);
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    return h ^ (h >> 16);
}

// noise: 16 bits, here and below.
DTYPE_INLINE uint16_t moment_to_bf16(float x, uint32_t noise)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + noise) >> 16);
}

// What a magnitude is multiplied by before it becomes a code: 1 / the block's largest. 0 where that
// is too small to have an inverse, or 0: the block is then stored as zeros.
DTYPE_INLINE float moment_inverse(float largest)
{
    return largest > 1.2e-38f ? 1.0f / largest : 0.0f;
}

// The code of a magnitude, in 0..top; 0 or less is below the smallest. The sign is not looked at.
DTYPE_INLINE int32_t moment_code(float x, float inverse, uint32_t noise, int32_t top)
{
    float y = x * inverse; // -1..1, or an ulp more
    uint32_t u;
    memcpy(&u, &y, 4);
    u &= 0x7fffffffu; // -0 too
    int32_t code = (int32_t)((u + (noise << (MOMENT_CUT - 16))) >> MOMENT_CUT) -
                   ((0x3f800000 >> MOMENT_CUT) - top);
    return code < top ? code : top;
}

DTYPE_INLINE float moment_value(int32_t code, float largest, int32_t top)
{
    uint32_t u = (uint32_t)(code + ((0x3f800000 >> MOMENT_CUT) - top)) << MOMENT_CUT;
    float y;
    memcpy(&y, &u, 4);
    return code > 0 ? y * largest : 0.0f;
}

// squares: of v; else of m, whose sign is in the upper bit.
DTYPE_INLINE uint8_t moment_pack(float x, float inverse, uint32_t noise, bool squares)
{
    const int32_t code = moment_code(x, inverse, noise, squares ? MOMENT_TOP_V : MOMENT_TOP_M);
    if (squares) return (uint8_t)(code > 0 ? code : x > 0 && inverse > 0);
    return (uint8_t)(code <= 0 ? 0 : code | (x < 0 ? 128 : 0));
}
DTYPE_INLINE float moment_unpack(uint8_t code, float largest, bool squares)
{
    if (squares) return moment_value(code, largest, MOMENT_TOP_V);
    const float m = moment_value(code & 127, largest, MOMENT_TOP_M);
    return code & 128 ? -m : m;
}

// One block of codes that may be of different scales, whose common one is returned. Those of one
// scale stay as they are; others are rounded anew, to the nearest.
static inline float moments_join(uint8_t codes[MOMENT_BLOCK], const float scales[MOMENT_BLOCK],
                                 bool squares)
{
    float values[MOMENT_BLOCK], largest = 0, scale = 0, of_zeros = 0;
    bool same = true;
    for (int i = 0; i < MOMENT_BLOCK; i++) {
        values[i] = moment_unpack(codes[i], scales[i], squares);
        largest = fmaxf(largest, fabsf(values[i]));
        same = same && (codes[i] == 0 || scale == 0 || scale == scales[i]);
        if (codes[i] != 0) scale = scales[i];
        of_zeros = fmaxf(of_zeros, scales[i]);
    }
    if (same) return scale > 0 ? scale : of_zeros;
    const float inverse = moment_inverse(largest);
    for (int i = 0; i < MOMENT_BLOCK; i++)
        codes[i] = moment_pack(values[i], inverse, 1 << 15, squares);
    return largest;
}

#endif
