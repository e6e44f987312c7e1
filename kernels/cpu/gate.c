/* gate.c: a gate beside a value, its gradient, and the rows of attention whose queries have one. */
#include "kernels/cpu/cpu.h"
#include <string.h>

static inline float open_to(enum gate_kind kind, float g)
{
    return kind == GATE_SILU ? g * sigmoid(g) : sigmoid(g);
}

void cpu_gate(struct device *dev, void *y, const struct gate_args *a)
{
    if (!cpu_is_f32(dev, "gate", a->dt)) return;
#pragma omp parallel for if ((int64_t)a->rows * a->width > PARALLEL_WORK / 8)
    for (int r = 0; r < a->rows; r++) {
        const float *x = (const float *)a->x + (int64_t)r * a->width;
        const float *g = (const float *)a->g + (int64_t)r * a->g_stride;
        float *out = (float *)y + (int64_t)r * a->width;
#pragma omp simd
        for (int c = 0; c < a->width; c++) out[c] = x[c] * open_to(a->kind, g[c]);
    }
}

void cpu_gate_back(struct device *dev, void *dx, void *dg, const void *dy,
                   const struct gate_args *a)
{
    if (!cpu_is_f32(dev, "gate_back", a->dt)) return;
#pragma omp parallel for if ((int64_t)a->rows * a->width > PARALLEL_WORK / 8)
    for (int r = 0; r < a->rows; r++) {
        const float *x = (const float *)a->x + (int64_t)r * a->width;
        const float *g = (const float *)a->g + (int64_t)r * a->g_stride;
        const float *grad = (const float *)dy + (int64_t)r * a->width;
        float *to_x = (float *)dx + (int64_t)r * a->width;
        float *to_g = (float *)dg + (int64_t)r * a->g_stride;
#pragma omp simd
        for (int c = 0; c < a->width; c++) {
            const float s = sigmoid(g[c]), d = grad[c];
            const float slope = s * (a->kind == GATE_SILU ? fma_f32(g[c], 1 - s, 1) : 1 - s);
            to_g[c] = d * x[c] * slope;
            to_x[c] = d * open_to(a->kind, g[c]);
        }
    }
}

void cpu_split_gate(struct device *dev, void *qkv, void *gate, void *fused, int rows,
                    const struct attn_shape *s, bool join)
{
    if (!cpu_is_f32(dev, "split_gate", s->dt)) return;
    const size_t head = (size_t)s->head_dim, q = head * (size_t)s->n_heads,
                 kv = 2 * head * (size_t)s->n_kv_heads;
    for (size_t r = 0; r < (size_t)rows; r++) {
        float *split[2] = {(float *)qkv + r * (q + kv), (float *)gate + r * q};
        float *both = (float *)fused + r * (2 * q + kv);
        for (size_t h = 0; h < 2 * (size_t)s->n_heads; h++) {
            float *part = split[h % 2] + h / 2 * head, *whole = both + h * head;
            memcpy(join ? whole : part, join ? part : whole, head * sizeof(float));
        }
        float *part = split[0] + q, *whole = both + 2 * q;
        memcpy(join ? whole : part, join ? part : whole, kv * sizeof(float));
    }
}
