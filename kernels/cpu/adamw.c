/* adamw.c: the optimizer step and the sum of squares behind gradient clipping.
 *
 * The step must give the same bits for an f32 weight and for a bf16 weight with its 16-bit
 * residual, so the arithmetic stands in one place. Nothing in it is fused, as on CUDA; it is bound
 * by memory either way. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include "kernels/moments.h"

static inline float adamw_step(float p, float *m, float *v, float g, struct adamw_factors c)
{
    p = p - c.decay * p;
    *m = c.beta1 * *m + c.rest1 * g;
    *v = c.beta2 * *v + c.rest2 * (g * g);
    return p - c.step * *m / (sqrtf(*v) / c.root_correction2 + c.eps);
}

// n parameters; low NULL: w is f32.
static void step_range(void *w, uint16_t *low, float *m, float *v, const float *grad, int n,
                       struct adamw_factors c, float scale)
{
    if (!low) {
        float *p = w;
#pragma omp simd
        for (int i = 0; i < n; i++) p[i] = adamw_step(p[i], &m[i], &v[i], grad[i] * scale, c);
        return;
    }
    uint16_t *high = w;
#pragma omp simd
    for (int i = 0; i < n; i++) {
        float p = adamw_step(master_join(high[i], low[i]), &m[i], &v[i], grad[i] * scale, c);
        high[i] = master_high(p);
        low[i] = master_low(p);
    }
}

// m or v (squares) of the n parameters from `at` on, in f32 and back; at: a multiple of
// MOMENT_BLOCK. scales: of 8-bit codes, else NULL.
static void unpack(float *x, const void *from, const float *scales, int64_t at, int n, bool squares)
{
    const uint16_t *halves = (const uint16_t *)from + at;
    const uint8_t *codes = (const uint8_t *)from + at;
    if (!scales)
        for (int i = 0; i < n; i++) x[i] = f32_from_bf16(halves[i]);
    for (int i = 0; scales && i < n; i++)
        x[i] = moment_unpack(codes[i], scales[at / MOMENT_BLOCK], squares);
}

static void pack(void *to, float *scales, const float *x, const uint32_t *noise, int64_t at, int n,
                 bool squares)
{
    uint16_t *halves = (uint16_t *)to + at;
    uint8_t *codes = (uint8_t *)to + at;
    float largest = 0;
    for (int i = 0; i < n; i++) largest = fmaxf(largest, fabsf(x[i]));
    const float inverse = moment_inverse(largest);
    if (scales) scales[at / MOMENT_BLOCK] = largest;
    for (int i = 0; i < n; i++) {
        const uint32_t bits = squares ? noise[i] & 0xffff : noise[i] >> 16;
        if (scales)
            codes[i] = moment_pack(x[i], inverse, bits, squares);
        else
            halves[i] = moment_to_bf16(x[i], bits);
    }
}

void cpu_adamw(struct device *dev, void *w, uint16_t *low, const struct moments *moments,
               const float *grad, int64_t n, const struct adamw *shape, enum dtype w_dt)
{
    if (!adamw_takes(dev, w_dt, low)) return;
    const struct adamw_factors c = adamw_factors_of(shape);
    const float scale = shape->grad_scale[0];
#pragma omp parallel for if (n > PARALLEL_WORK / 4)
    for (int64_t at = 0; at < n; at += MOMENT_BLOCK) {
        int count = n - at < MOMENT_BLOCK ? (int)(n - at) : MOMENT_BLOCK;
        float m[MOMENT_BLOCK], v[MOMENT_BLOCK];
        uint32_t noise[MOMENT_BLOCK];
        void *part = (char *)w + at * (int64_t)dtype_size(w_dt);
        uint16_t *low_part = low ? low + at : NULL;
        if (moments->kind == MOMENTS_F32) {
            step_range(part, low_part, (float *)moments->m + at, (float *)moments->v + at,
                       grad + at, count, c, scale);
            continue;
        }
        for (int i = 0; i < count; i++)
            noise[i] = moment_noise((uint64_t)(shape->first + at + i), shape->step);
        unpack(m, moments->m, moments->m_scale, at, count, false);
        unpack(v, moments->v, moments->v_scale, at, count, true);
        step_range(part, low_part, m, v, grad + at, count, c, scale);
        pack(moments->m, moments->m_scale, m, noise, at, count, false);
        pack(moments->v, moments->v_scale, v, noise, at, count, true);
    }
}

enum { CHUNK = 1 << 15 };

size_t cpu_squares_scratch(int64_t n)
{
    return (size_t)((n + CHUNK - 1) / CHUNK + 1) * sizeof(double);
}

// Partial sums of fixed chunks, added in order: the same for any number of threads.
void cpu_sum_squares(struct device *dev, double *out, const float *x, int64_t n)
{
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    double *part = cpu_workspace(dev, cpu_squares_scratch(n));
    if (!part) return;
#pragma omp parallel for if (n > PARALLEL_WORK)
    for (int64_t p = 0; p < chunks; p++) {
        int64_t end = (p + 1) * CHUNK < n ? (p + 1) * CHUNK : n;
        double lane[LANES] = {0}, sum = 0;
        int64_t i = p * CHUNK;
        for (; i + LANES <= end; i += LANES)
#pragma omp simd
            for (int l = 0; l < LANES; l++) lane[l] += (double)x[i + l] * x[i + l];
        for (int l = 0; i + l < end; l++) lane[l] += (double)x[i + l] * x[i + l];
        for (int l = 0; l < LANES; l++) sum += lane[l];
        part[p] = sum;
    }
    double total = 0;
    for (int64_t p = 0; p < chunks; p++) total += part[p];
    out[0] = total;
}
