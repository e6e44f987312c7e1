/* adamw.c: the optimizer step and the sum of squares behind gradient clipping.
 *
 * The step must give the same bits for an f32 weight and for a bf16 weight with its 16-bit
 * residual, so the arithmetic stands in one place, with contraction to fused multiply-add off: what
 * the compiler fuses could differ between the two loops. It is bound by memory either way. */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "kernels/cpu/cpu.h"

struct coefficients {
    float decay, beta1, rest1, beta2, rest2, step, root_correction2, eps, grad_scale;
};

static inline float adamw_step(float p, float *m, float *v, float grad, struct coefficients c)
{
    float g = grad * c.grad_scale;
    p = p - c.decay * p;
    *m = c.beta1 * *m + c.rest1 * g;
    *v = c.beta2 * *v + c.rest2 * (g * g);
    return p - c.step * *m / (sqrtf(*v) / c.root_correction2 + c.eps);
}

void cpu_adamw(struct device *dev, void *w, uint16_t *low, float *m, float *v, const float *grad,
               const float *grad_scale, int64_t n, const struct adamw *shape, enum dtype w_dt)
{
    if (!(w_dt == DT_F32 && !low) && !(w_dt == DT_BF16 && low)) {
        device_fail(dev, "adamw: weights are f32, or bf16 with their lower halves; these are %s %s",
                    dtype_name(w_dt), low ? "with" : "without");
        return;
    }
    const struct coefficients c = {
        .decay = shape->lr * shape->weight_decay,
        .beta1 = shape->beta1,
        .rest1 = 1.0f - shape->beta1,
        .beta2 = shape->beta2,
        .rest2 = 1.0f - shape->beta2,
        .step = shape->lr / shape->bias_correction1,
        .root_correction2 = sqrtf(shape->bias_correction2),
        .eps = shape->eps,
        .grad_scale = grad_scale[0],
    };
    if (w_dt == DT_F32) {
        float *p = w;
#pragma omp parallel for simd if (n > PARALLEL_WORK / 4)
        for (int64_t i = 0; i < n; i++) p[i] = adamw_step(p[i], &m[i], &v[i], grad[i], c);
    } else {
        uint16_t *high = w;
#pragma omp parallel for simd if (n > PARALLEL_WORK / 4)
        for (int64_t i = 0; i < n; i++) {
            float p = adamw_step(master_join(high[i], low[i]), &m[i], &v[i], grad[i], c);
            high[i] = master_high(p);
            low[i] = master_low(p);
        }
    }
}

// Partial sums of fixed pieces, added in order: the same for any number of threads.
void cpu_sum_squares(struct device *dev, double *out, const float *x, int64_t n)
{
    enum { PIECE = 1 << 15 };
    int64_t pieces = (n + PIECE - 1) / PIECE;
    double *part = cpu_workspace(dev, (size_t)(pieces + 1) * sizeof *part);
    if (!part) return;
#pragma omp parallel for if (n > PARALLEL_WORK)
    for (int64_t p = 0; p < pieces; p++) {
        int64_t end = (p + 1) * PIECE < n ? (p + 1) * PIECE : n;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = p * PIECE; i < end; i++) sum += (double)x[i] * x[i];
        part[p] = sum;
    }
    double total = 0;
    for (int64_t p = 0; p < pieces; p++) total += part[p];
    out[0] = total;
}
