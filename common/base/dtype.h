/* dtype.h: element types of tensors, and the bf16 conversions every part must agree on. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_DTYPE_H
#define COMMON_BASE_DTYPE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__ // the same conversions in kernels
#define DTYPE_INLINE static __host__ __device__ __forceinline__
#else
#define DTYPE_INLINE static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum dtype { DT_F32, DT_BF16, DT_F16, DT_U16, DT_I32, DT_U8, DT_E4M3, DT_COUNT };

size_t dtype_size(enum dtype dt);            // bytes of one element
const char *dtype_name(enum dtype dt);       // "f32", "bf16", "f16", "u16", "i32", "u8", "e4m3"
const char *dtype_torch_name(enum dtype dt); // "torch.float32", ... as bridge files write it
const char *dtype_safetensors_name(enum dtype dt); // "F32", "BF16", ...
int dtype_from_name(const char *name);             // any of the three spellings; -1 if unknown
// Of an option --dtype: "auto", and behind it the types that models compute in, each at its enum's
// value + 1.
extern const char *const dtype_option_names[];

// Round to nearest, ties to even; NaN stays NaN.
DTYPE_INLINE uint16_t bf16_from_f32(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
DTYPE_INLINE float f32_from_bf16(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}
float f32_from_f16(uint16_t h);

// x in 8 bits, of which so many are mantissa, with this bias of the exponent: to nearest, ties to
// even; what is above `largest` becomes that, NaN stays NaN. Without a branch: rows of activations
// are rounded at every matmul.
DTYPE_INLINE uint8_t code_from_f32(float x, int mantissa, int bias, uint32_t largest)
{
    const int shift = 23 - mantissa;
    const uint32_t adds = (uint32_t)(151 - bias - mantissa) << 23; // rounds what is subnormal
    uint32_t u, magnitude, code, small;
    float sum, added;
    memcpy(&u, &x, 4);
    memcpy(&added, &adds, 4);
    magnitude = u & 0x7fffffffu;
    memcpy(&sum, &magnitude, 4);
    sum += added;
    memcpy(&small, &sum, 4);
    code = magnitude + (1u << (shift - 1)) - 1 + (magnitude >> shift & 1u);
    code = (code >> shift) - ((uint32_t)(127 - bias) << mantissa);
    code = code < largest ? code : largest;
    code = magnitude < (uint32_t)(128 - bias) << 23 ? small - adds : code;
    code = magnitude > 0x7f800000u ? 0x7fu : code;
    return (uint8_t)((u >> 24 & 0x80u) | code);
}
// e4m3 (Micikevicius et al. 2022, FP8 Formats for Deep Learning; torch.float8_e4m3fn): a sign, 4
// bits of exponent, 3 of mantissa, no infinity. What is above 448 becomes 448.
DTYPE_INLINE uint8_t e4m3_from_f32(float x)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t codes; // of 0 and x
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(x));
    return (uint8_t)codes;
#else
    return code_from_f32(x, 3, 7, 0x7e);
#endif
}
// Exponent and mantissa lie where f32 has them, which is 2^120 too small, subnormals as well.
// Without a branch, so that a loop of it becomes vector instructions.
DTYPE_INLINE float f32_from_e4m3(uint8_t code)
{
    const uint32_t magnitude = code & 0x7fu;
    const uint32_t u = (code & 0x80u) << 24 | (magnitude == 0x7fu ? 0x7fc00000u : magnitude << 20);
    float x;
    memcpy(&x, &u, 4);
    return x * 0x1p120f;
}
// e5m2 (the same paper; torch.float8_e5m2): 5 bits of exponent, 2 of mantissa, and otherwise alike
// but that there are infinities, which nothing becomes: what is above 57,344 becomes that.
DTYPE_INLINE uint8_t e5m2_from_f32(float x)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t codes; // of 0 and x
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(x));
    return (uint8_t)codes;
#else
    return code_from_f32(x, 2, 15, 0x7b);
#endif
}
DTYPE_INLINE float f32_from_e5m2(uint8_t code)
{
    const uint32_t magnitude = code & 0x7fu;
    const uint32_t u = (code & 0x80u) << 24 | (magnitude > 0x7cu ? 0x7fc00000u : magnitude << 21);
    float x;
    memcpy(&x, &u, 4);
    return x * 0x1p112f;
}
// What a model multiplies, beside its dtype. fp8-weights: the matrices of its layers in e4m3, the
// rest as it is; fp8: the rows that these are multiplied with, too. mxfp4: experts as a folder
// stores them (mxfp4.h), which nobody trains.
enum quantization {
    QUANTIZATION_NONE,
    QUANTIZATION_FP8_WEIGHTS,
    QUANTIZATION_FP8,
    QUANTIZATION_MXFP4
};
extern const char *const quantization_names[];
// In what a KV cache holds keys and values: as they are computed, or in e4m3 with a scale for each
// token and KV head, as which they then count wherever the model computes.
enum kv_cache { KV_CACHE_AUTO, KV_CACHE_FP8 };
extern const char *const kv_cache_names[];
// In what a gradient is multiplied with weights in e4m3 on its way to a layer's input: as it is, or
// rounded a row at a time (ops.h, struct matmul).
enum gradient_dtype { GRADIENT_AUTO, GRADIENT_E4M3, GRADIENT_E5M2 };
extern const char *const gradient_dtype_names[];
// A row in e4m3, of weights or of activations, is codes times a power of two, 2^scale: the smallest
// by which the row's largest magnitude is within 448, so that a row's codes are a function of the
// row alone. Within these bounds every code times the scale is exactly a number of f32 and of bf16.
#define E4M3_SCALE_MIN (-117)
#define E4M3_SCALE_MAX 119
DTYPE_INLINE int8_t e4m3_scale(float largest)
{
    uint32_t u;
    int scale;
    memcpy(&u, &largest, 4);
    scale = (int)(u >> 23 & 0xffu) - 127 - 8 + ((u & 0x7fffffu) > 0x600000u); // 448 is 1.75 2^8
    if (scale < E4M3_SCALE_MIN) scale = E4M3_SCALE_MIN;
    return (int8_t)(scale < E4M3_SCALE_MAX ? scale : E4M3_SCALE_MAX);
}
DTYPE_INLINE float power_of_two(int exponent) // -126 to 127
{
    uint32_t u = (uint32_t)(exponent + 127) << 23;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

// The exact fp32 master in two halves. The shared bf16 weight is the master rounded half up (add
// 0x8000, truncate); `low` keeps the master's lower 16 bits. low >= 0x8000 says that the upper half
// was rounded up, so the two give the master back to the bit (docs/internals/numerics.md).
DTYPE_INLINE uint16_t master_high(float master)
{
    uint32_t u;
    memcpy(&u, &master, 4);
    return (uint16_t)((u + 0x8000u) >> 16);
}
DTYPE_INLINE uint16_t master_low(float master)
{
    uint32_t u;
    memcpy(&u, &master, 4);
    return (uint16_t)u;
}
DTYPE_INLINE float master_join(uint16_t high, uint16_t low)
{
    uint32_t u = ((uint32_t)(uint16_t)(high - (low >= 0x8000u)) << 16) | low;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

#ifdef __cplusplus
}
#endif
#endif
