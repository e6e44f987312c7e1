/* quant.c: see gguf.h. Each function decodes one block as ggml lays it out (llama.cpp,
 * ggml-common.h): scales are f16, of two values in a byte one is 16 or 32 values behind the other.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/dtype.h"
#include "common/model/gguf.h"
#include <string.h>

#define MAX_BLOCK 256

static uint16_t word_at(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static float half_at(const uint8_t *p)
{
    return f32_from_f16(word_at(p));
}

static void read_f32(const struct quant_type *t, const uint8_t *p, float *ret)
{
    memcpy(ret, p, (size_t)t->bytes);
}

static void read_f16(const struct quant_type *t, const uint8_t *p, float *ret)
{
    for (int i = 0; i < t->values; i++) ret[i] = half_at(p + 2 * i);
}

static void read_bf16(const struct quant_type *t, const uint8_t *p, float *ret)
{
    for (int i = 0; i < t->values; i++) ret[i] = f32_from_bf16(word_at(p + 2 * i));
}

// 4 bits, and a fifth: a scale, and the least value or a zero.
static void read_4_5(const struct quant_type *t, const uint8_t *p, float *ret)
{
    const float scale = half_at(p), min = t->min ? half_at(p + t->min) : 0;
    for (int i = 0; i < 32; i++) {
        int q = p[t->low + i % 16] >> (i / 16 * 4) & 15;
        if (t->high) q |= (p[t->high + i / 8] >> i % 8 & 1) << 4;
        ret[i] = scale * (float)(q - t->zero) + min;
    }
}

static void read_8(const struct quant_type *t, const uint8_t *p, float *ret)
{
    for (int i = 0; i < 32; i++) ret[i] = (float)(int8_t)p[t->low + i] * half_at(p);
}

// 4 bits, and a fifth, in eight runs of 32, each with a scale and a least value of 6 bits: those of
// the first four runs in a byte each, those of the others in half a byte and the two bits left
// over.
static void read_4_5_k(const struct quant_type *t, const uint8_t *p, float *ret)
{
    for (int run = 0; run < 8; run++) {
        const uint8_t *s = p + 4 + run % 4;
        const int a = run < 4 ? s[0] & 63 : (s[8] & 15) | s[0] >> 6 << 4;
        const int b = run < 4 ? s[4] & 63 : s[8] >> 4 | s[4] >> 6 << 4;
        const float scale = half_at(p) * (float)a, min = half_at(p + t->min) * (float)b;
        for (int i = 0; i < 32; i++) {
            int q = p[t->low + run / 2 * 32 + i] >> (run % 2 * 4) & 15;
            if (t->high) q |= (p[t->high + i] >> run & 1) << 4;
            ret[run * 32 + i] = scale * (float)q - min;
        }
    }
}

// 6 bits, in runs of 16 with a scale each.
static void read_6_k(const struct quant_type *t, const uint8_t *p, float *ret)
{
    for (int i = 0; i < 256; i++) {
        const int half = i / 128, run = i % 128 / 32;
        const int low = p[half * 64 + i % 64] >> (run / 2 * 4) & 15;
        const int high = p[t->high + half * 32 + i % 32] >> (run * 2) & 3;
        const float scale = half_at(p + 208) * (float)(int8_t)p[192 + i / 16];
        ret[i] = scale * (float)((low | high << 4) - t->zero);
    }
}

static const struct quant_type types[] = {
    [0] = {"F32", 1, 4, .read = read_f32},
    [1] = {"F16", 1, 2, .read = read_f16},
    [2] = {"Q4_0", 32, 18, read_4_5, .low = 2, .zero = 8},
    [3] = {"Q4_1", 32, 20, read_4_5, .low = 4, .min = 2},
    [6] = {"Q5_0", 32, 22, read_4_5, .low = 6, .high = 2, .zero = 16},
    [7] = {"Q5_1", 32, 24, read_4_5, .low = 8, .high = 4, .min = 2},
    [8] = {"Q8_0", 32, 34, read_8, .low = 2},
    [10] = {.name = "Q2_K"},
    [11] = {.name = "Q3_K"},
    [12] = {"Q4_K", 256, 144, read_4_5_k, .low = 16, .min = 2},
    [13] = {"Q5_K", 256, 176, read_4_5_k, .low = 48, .high = 16, .min = 2},
    [14] = {"Q6_K", 256, 210, read_6_k, .high = 128, .zero = 32},
    [20] = {.name = "IQ4_NL"},
    [23] = {.name = "IQ4_XS"},
    [30] = {"BF16", 1, 2, .read = read_bf16},
    [39] = {.name = "MXFP4"},
};

const struct quant_type *quant_type_at(uint32_t number)
{
    const bool known = number < sizeof types / sizeof *types && types[number].name;
    return known ? &types[number] : NULL;
}

void quant_read(const struct quant_type *t, const void *data, int64_t first, int64_t n, float *ret)
{
    float block[MAX_BLOCK];
    for (int64_t i = first, end = first + n, count; i < end; i += count, ret += count) {
        const int64_t skip = i % t->values, whole = t->values - skip;
        const uint8_t *p = (const uint8_t *)data + i / t->values * t->bytes;
        count = whole < end - i ? whole : end - i;
        t->read(t, p, count == t->values ? ret : block);
        if (count < t->values) memcpy(ret, block + skip, (size_t)count * sizeof *ret);
    }
}
