/* sinks.c: the gradient of attention's sinks. A sink's value is 0, so with w its weight in a row's
 * softmax, the gradient of its score is w * (0 - dout . out). */
#include "kernels/cpu/cpu.h"

void cpu_attn_sinks_back(struct device *dev, float *dsinks, const void *dout, const void *out,
                         const float *lse, int rows, const struct attn_shape *shape)
{
    if (!cpu_is_f32(dev, "attn_sinks_back", shape->dt)) return;
    const int heads = shape->n_heads, dim = shape->head_dim;
    const float *sinks = shape->sinks;
#pragma omp parallel for if ((int64_t)rows * heads * dim > PARALLEL_WORK)
    for (int h = 0; h < heads; h++) {
        float sum = 0;
        for (int r = 0; r < rows; r++) {
            const int64_t at = (int64_t)r * heads + h;
            const float *x = (const float *)dout + at * dim, *y = (const float *)out + at * dim;
            sum = fma_f32(-exp_f32(sinks[h] - lse[at]), dot_f32(x, y, dim), sum);
        }
        dsinks[h] += sum;
    }
}
