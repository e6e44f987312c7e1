/* e4m3.h: how a row lies in e4m3, of weights or of activations, or a token's key or value of a
 * head: codes, whose order in memory suits a tensor core, and a scale (dtype.h, e4m3_scale()). */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_E4M3_H
#define COMMON_BASE_E4M3_H

#include "common/base/dtype.h"

#define E4M3_SCALE_NAN 127 // of a row with a NaN, which counts as one as a whole
#define E4M3_CHUNK     128 // of k, whose products are summed by themselves (ops.h, a_scales)

// What a row's codes are multiplied by.
DTYPE_INLINE float e4m3_factor(int8_t scale)
{
    return scale == E4M3_SCALE_NAN ? f32_from_e4m3(0x7f) : power_of_two(scale);
}
// What x of a row with that scale is in e4m3, and is then read as.
DTYPE_INLINE uint8_t e4m3_code(float x, int8_t scale)
{
    return e4m3_from_f32(x * power_of_two(-scale));
}
DTYPE_INLINE float e4m3_rounded(float x, int8_t scale)
{
    return f32_from_e4m3(e4m3_code(x, scale)) * e4m3_factor(scale);
}
// A gradient's row, which may be in e5m2: its scale, from the one that it has in e4m3 (57,344 is
// 448 2^7), and what is left of x times the scale's inverse.
DTYPE_INLINE int8_t gradient_scale(int8_t scale, enum gradient_dtype dt)
{
    if (dt != GRADIENT_E5M2 || scale == E4M3_SCALE_NAN) return scale;
    return (int8_t)(scale - 7 > E4M3_SCALE_MIN ? scale - 7 : E4M3_SCALE_MIN);
}
DTYPE_INLINE uint8_t gradient_code(float x, enum gradient_dtype dt)
{
    return dt == GRADIENT_E5M2 ? e5m2_from_f32(x) : e4m3_from_f32(x);
}
DTYPE_INLINE float f32_from_gradient(uint8_t code, enum gradient_dtype dt)
{
    return dt == GRADIENT_E5M2 ? f32_from_e5m2(code) : f32_from_e4m3(code);
}
// Where the code of column c of a row lies. Of each 16 columns the first eight have the even places
// and the others the odd ones: a thread of a tensor core that takes four neighbouring codes has the
// four columns that it multiplies (kernels/cuda/matmul/matmul_e4m3.cu). Fewer than 16 at a row's
// end lie in order.
DTYPE_INLINE int64_t e4m3_place(int64_t c, int64_t cols)
{
    const int64_t in = c % 16;
    return c - in + 16 > cols ? c : c - in + (in < 8 ? 2 * in : 2 * in - 15);
}

#endif
