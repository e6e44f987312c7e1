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

void cpu_rope_store(struct device *dev, void *qkv, const float *table, int rot_dim,
                    const struct kv_view *kv, int layer, const struct batch_view *batch,
                    const struct attn_shape *s)
{
    int width = (s->n_heads + 2 * s->n_kv_heads) * s->head_dim;
    cpu_rope(dev, qkv, table, batch->positions, batch->n_tokens, width, s->n_heads + s->n_kv_heads,
             s->head_dim, rot_dim, 1, kv->dt);
    cpu_kv_store(dev, kv, layer, qkv, batch, s);
}
