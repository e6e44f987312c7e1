/* rope.c: rotary position embedding, in place, from a table of cosines and sines. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"

// The pairs lie `step` floats apart, the two of a pair `apart`.
VEC_INLINE void rotate(float *x, const float *angle, int half, float sign, int step, int apart)
{
#pragma omp simd
    for (int i = 0; i < half; i++) {
        float c = angle[2 * i], s = sign * angle[2 * i + 1];
        float a = x[i * step], b = x[i * step + apart];
        x[i * step] = fma_f32(a, c, -(b * s));
        x[i * step + apart] = fma_f32(b, c, a * s);
    }
}

void cpu_rope(struct device *dev, void *qkv, const struct rope_args *args)
{
    if (!cpu_is_f32(dev, "rope", args->dt)) return;
    const int half = args->rot_dim / 2, n = args->n;
    const float sign = args->sign;
#pragma omp parallel for if ((int64_t)args->rows * n * args->rot_dim > PARALLEL_WORK)
    for (int r = 0; r < args->rows; r++) {
        const float *angle = args->table + (int64_t)args->positions[r] * half * 2;
        for (int h = 0; h < n; h++) {
            float *head = (float *)qkv + r * args->stride + (int64_t)h * args->head_dim;
            if (args->interleaved)
                rotate(head, angle, half, sign, 2, 1);
            else
                rotate(head, angle, half, sign, 1, half);
        }
    }
}
