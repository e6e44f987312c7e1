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

// The moments of the n parameters from `at` on, in f32 and back; at: a multiple of MOMENT_BLOCK.
static void unpack(const struct moments *from, int64_t at, int n, float *m, float *v)
{
    if (from->kind == MOMENTS_BF16) {
        const uint16_t *from_m = (const uint16_t *)from->m + at;
        const uint16_t *from_v = (const uint16_t *)from->v + at;
        for (int i = 0; i < n; i++) {
            m[i] = f32_from_bf16(from_m[i]);
            v[i] = f32_from_bf16(from_v[i]);
        }
        return;
    }
    const uint8_t *from_m = (const uint8_t *)from->m + at, *from_v = (const uint8_t *)from->v + at;
    float m_scale = from->m_scale[at / MOMENT_BLOCK], v_scale = from->v_scale[at / MOMENT_BLOCK];
    for (int i = 0; i < n; i++) {
        m[i] = moment_unpack(from_m[i], m_scale, false);
        v[i] = moment_unpack(from_v[i], v_scale, true);
    }
}

static void pack(const struct moments *to, int64_t at, int n, const float *m, const float *v,
                 const struct adamw *shape)
{
    const uint64_t first = (uint64_t)(shape->first + at);
    if (to->kind == MOMENTS_BF16) {
        uint16_t *to_m = (uint16_t *)to->m + at, *to_v = (uint16_t *)to->v + at;
        for (int i = 0; i < n; i++) {
            uint32_t noise = moment_noise(first + (uint64_t)i, shape->step);
            to_m[i] = moment_to_bf16(m[i], noise >> 16);
            to_v[i] = moment_to_bf16(v[i], noise & 0xffff);
        }
        return;
    }
    uint8_t *to_m = (uint8_t *)to->m + at, *to_v = (uint8_t *)to->v + at;
    float m_scale = 0, v_scale = 0;
    for (int i = 0; i < n; i++) {
        m_scale = fmaxf(m_scale, fabsf(m[i]));
        v_scale = fmaxf(v_scale, v[i]);
    }
    float m_inverse = moment_inverse(m_scale), v_inverse = moment_inverse(v_scale);
    for (int i = 0; i < n; i++) {
        uint32_t noise = moment_noise(first + (uint64_t)i, shape->step);
        to_m[i] = moment_pack(m[i], m_inverse, noise >> 16, false);
        to_v[i] = moment_pack(v[i], v_inverse, noise & 0xffff, true);
    }
    to->m_scale[at / MOMENT_BLOCK] = m_scale;
    to->v_scale[at / MOMENT_BLOCK] = v_scale;
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
        void *part = (char *)w + at * (int64_t)dtype_size(w_dt);
        uint16_t *low_part = low ? low + at : NULL;
        if (moments->kind == MOMENTS_F32) {
            step_range(part, low_part, (float *)moments->m + at, (float *)moments->v + at,
                       grad + at, count, c, scale);
            continue;
        }
        unpack(moments, at, count, m, v);
        step_range(part, low_part, m, v, grad + at, count, c, scale);
        pack(moments, at, count, m, v, shape);
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
