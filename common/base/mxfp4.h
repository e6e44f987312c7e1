/* mxfp4.h: numbers of 4 bits (e2m1: a sign, 2 bits of exponent, 1 of mantissa), of which 32
 * neighbours of a row have one scale, a power of two (OCP Microscaling Formats 1.0, 2023). A row of
 * n has n / 2 bytes, the first of two numbers in the low half, and n / 32 scales, exponents plus
 * 127. Every number is one of bf16. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_MXFP4_H
#define COMMON_BASE_MXFP4_H

#include "common/base/dtype.h"

#define MXFP4_BLOCK 32 // numbers with one scale

// What the codes of a block are multiplied by.
DTYPE_INLINE float mxfp4_factor(uint8_t scale)
{
    return scale == 0 ? power_of_two(-126) * 0.5f : power_of_two(scale - 127);
}
// Number i of a row, without its scale. Exponent and mantissa lie where f32 has them, which is
// 2^126 too small, and what has no exponent is a subnormal there.
DTYPE_INLINE float mxfp4_code(const uint8_t *row, int64_t i)
{
    const uint32_t code = row[i / 2] >> (i % 2 * 4) & 15u, u = (code & 8u) << 28 | (code & 7u)
                                                                                       << 22;
    float x;
    memcpy(&x, &u, 4);
    return x * 0x1p126f;
}

#endif
