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

enum dtype { DT_F32, DT_BF16, DT_F16, DT_U16, DT_I32, DT_U8, DT_COUNT };

size_t dtype_size(enum dtype dt);                  // bytes of one element
const char *dtype_name(enum dtype dt);             // "f32", "bf16", "f16", "u16", "i32", "u8"
const char *dtype_torch_name(enum dtype dt);       // "torch.float32", ... as bridge files write it
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
