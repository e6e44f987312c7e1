/* dtype.c: names and sizes of element types, in one table, and the f16 conversion. No state. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/dtype.h"

#include <math.h>

static const struct {
    size_t size;
    const char *name, *torch, *safetensors;
} types[DT_COUNT] = {
    [DT_F32] = {4, "f32", "torch.float32", "F32"},
    [DT_BF16] = {2, "bf16", "torch.bfloat16", "BF16"},
    [DT_F16] = {2, "f16", "torch.float16", "F16"},
    [DT_U16] = {2, "u16", "torch.uint16", "U16"},
    [DT_I32] = {4, "i32", "torch.int32", "I32"},
    [DT_U8] = {1, "u8", "torch.uint8", "U8"},
    [DT_E4M3] = {1, "e4m3", "torch.float8_e4m3fn", "F8_E4M3"},
};

const char *const dtype_option_names[] = {"auto", "f32", "bf16", NULL};
const char *const quantization_names[] = {"none", "fp8-weights", "fp8", "mxfp4", NULL};
const char *const kv_cache_names[] = {"auto", "fp8", NULL};
const char *const gradient_dtype_names[] = {"auto", "e4m3", "e5m2", NULL};

size_t dtype_size(enum dtype dt)
{
    return types[dt].size;
}
const char *dtype_name(enum dtype dt)
{
    return types[dt].name;
}
const char *dtype_torch_name(enum dtype dt)
{
    return types[dt].torch;
}
const char *dtype_safetensors_name(enum dtype dt)
{
    return types[dt].safetensors;
}

int dtype_from_name(const char *name)
{
    for (int dt = 0; dt < DT_COUNT; dt++)
        if (strcmp(name, types[dt].name) == 0 || strcmp(name, types[dt].torch) == 0 ||
            strcmp(name, types[dt].safetensors) == 0)
            return dt;
    return -1;
}

float f32_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 0x1fu,
             fraction = h & 0x3ffu;
    if (exponent == 0) { // zero or subnormal: fraction units of 2^-24
        float magnitude = ldexpf((float)fraction, -24);
        return sign ? -magnitude : magnitude;
    }
    // rebias from 15 to 127; all ones (infinity, NaN) stays all ones
    uint32_t u = sign | (exponent == 0x1f ? 0xffu : exponent + 112) << 23 | fraction << 13;
    float x;
    memcpy(&x, &u, 4);
    return x;
}
