/* rope.c: rotary position embedding, in place, from a table of cosines and sines. */
#include "kernels/cpu/cpu.h"

void cpu_rope(struct device *dev, void *qkv, const float *table, const int32_t *positions, int rows,
              int64_t stride, int n, int head_dim, int rot_dim, float sign, enum dtype dt)
{
    if (!cpu_is_f32(dev, "rope", dt)) return;
    const int half = rot_dim / 2;
#pragma omp parallel for if ((int64_t)rows * n * rot_dim > PARALLEL_WORK)
    for (int r = 0; r < rows; r++) {
        const float *angle = table + (int64_t)positions[r] * half * 2;
        for (int h = 0; h < n; h++) {
            float *lower = (float *)qkv + r * stride + (int64_t)h * head_dim, *upper = lower + half;
#pragma omp simd
            for (int i = 0; i < half; i++) {
                float c = angle[2 * i], s = sign * angle[2 * i + 1];
                float a = lower[i], b = upper[i];
                lower[i] = a * c - b * s;
                upper[i] = b * c + a * s;
            }
        }
    }
}
