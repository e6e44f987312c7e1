/* latent.c: what latent attention needs beside attention (ops.h, struct latent_shape): queries into
 * the absorbed form and its results out of it, and the layout of the expanded form. Each row is
 * computed by itself and in one order. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include <string.h>

static bool many(const struct latent_shape *s, int64_t per_head)
{
    return (int64_t)s->rows * s->n_heads * per_head > PARALLEL_WORK * 8;
}

// The rows of w that make head h's key; those of its value follow.
static const float *key_rows(const float *w, const struct latent_shape *s, int h)
{
    return w + (int64_t)h * (s->nope + s->value) * s->rank;
}

// What of the absorbed form is copied, and the queries times the rows that make keys.
static void into_absorbed(float *qkv, const float *q, const float *keys, const float *w,
                          const struct latent_shape *s)
{
    const int width = s->rank + s->rope, rank = s->rank;
#pragma omp parallel for collapse(2) if (many(s, (int64_t)s->nope * s->rank))
    for (int h = 0; h < s->n_heads; h++)
        for (int r = 0; r < s->rows; r++) {
            const float *from = q + ((int64_t)r * s->n_heads + h) * (s->nope + s->rope);
            float *to = qkv + ((int64_t)r * (s->n_heads + 1) + h) * width;
            memset(to, 0, (size_t)rank * sizeof *to);
            for (int d = 0; d < s->nope; d++)
                add_scaled(to, from[d], key_rows(w, s, h) + (int64_t)d * rank, rank);
            memcpy(to + rank, from + s->nope, (size_t)s->rope * sizeof *to);
            if (h == 0)
                memcpy(to + (int64_t)s->n_heads * width, keys + (int64_t)r * width,
                       (size_t)width * sizeof *to);
        }
}

void cpu_latent_matmul(struct device *dev, void *to, const void *from, const void *keys,
                       const void *w, const struct latent_shape *s)
{
    if (!cpu_is_f32(dev, "latent_matmul", s->dt)) return;
    const float *wide =
        cpu_widened(dev, w, s->scales, NULL, (int64_t)s->n_heads * (s->nope + s->value), s->rank);
    if (!wide) return;
    if (keys) {
        into_absorbed(to, from, keys, wide, s);
        return;
    }
#pragma omp parallel for if (many(s, (int64_t)s->value * s->rank))
    for (int h = 0; h < s->n_heads; h++) {
        const struct dots dots = {.a = (const float *)from + (int64_t)h * s->rank,
                                  .b = key_rows(wide, s, h) + (int64_t)s->nope * s->rank,
                                  .c = (float *)to + (int64_t)h * s->value,
                                  .lda = (int64_t)s->n_heads * s->rank,
                                  .ldb = s->rank,
                                  .ldc = (int64_t)s->n_heads * s->value,
                                  .k = s->rank};
        cpu_dots(&dots, 0, s->rows, 0, s->value);
    }
}

static void copy(float *expanded, float *other, int n, bool back)
{
    memcpy(back ? other : expanded, back ? expanded : other, (size_t)n * sizeof *other);
}

void cpu_latent_expand(struct device *dev, void *qkv, void *q, void *kv, void *keys,
                       const struct latent_shape *s, bool back)
{
    if (!cpu_is_f32(dev, "latent_expand", s->dt)) return;
    const int dim = s->nope + s->rope, wide = latent_expanded_dim(s->nope, s->rope, s->value);
    const int64_t queries = (int64_t)s->n_heads * wide;
#pragma omp parallel for if (many(s, wide))
    for (int r = 0; r < s->rows; r++) {
        float *row = (float *)qkv + 3 * r * queries;
        float *rotated = (float *)keys + (int64_t)r * (s->rank + s->rope) + s->rank;
        if (back)
            memset(rotated, 0, (size_t)s->rope * sizeof *rotated);
        else
            memset(row, 0, 3 * (size_t)queries * sizeof *row);
        for (int h = 0; h < s->n_heads; h++) {
            const int64_t head = (int64_t)r * s->n_heads + h;
            float *pair = (float *)kv + head * (s->nope + s->value);
            float *query = row + (int64_t)h * wide, *key = query + queries, *value = key + queries;
            copy(query, (float *)q + head * dim, dim, back);
            copy(key, pair, s->nope, back);
            copy(value, pair + s->nope, s->value, back);
            if (back)
                for (int i = 0; i < s->rope; i++) rotated[i] += key[s->nope + i];
            else
                copy(key + s->nope, rotated, s->rope, false);
        }
    }
}
