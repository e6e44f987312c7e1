/* experts_bias.c: biases of experts' matmuls, over rows sorted by expert, and their gradients. */
#include "kernels/cpu/cpu.h"

void cpu_experts_bias(struct device *dev, void *y, const void *bias, const int32_t *offsets,
                      const struct expert_rows *s)
{
    if (!cpu_is_f32(dev, "experts_bias", s->dt)) return;
    const int width = s->width;
    for (int e = 0; e < s->n_experts; e++) {
        const float *add = (const float *)bias + (int64_t)e * width;
#pragma omp parallel for if ((int64_t)(offsets[e + 1] - offsets[e]) * width > PARALLEL_WORK)
        for (int r = offsets[e]; r < offsets[e + 1]; r++) {
            float *to = (float *)y + (int64_t)r * width;
#pragma omp simd
            for (int c = 0; c < width; c++) to[c] += add[c];
        }
    }
}

void cpu_experts_bias_back(struct device *dev, float *dbias, const void *dy, const int32_t *offsets,
                           const struct expert_rows *s)
{
    for (int e = 0; e < s->n_experts; e++)
        cpu_column_sum(dev, dbias + (int64_t)e * s->width,
                       (const float *)dy + (int64_t)offsets[e] * s->width,
                       offsets[e + 1] - offsets[e], s->width, s->dt);
}
