/* act.c: activation functions, gated (SwiGLU, GeGLU, a gate beside a value) and plain, the logits'
 * soft cap, and their gradients. SiLU and the tanh form of GELU run on exp_f32 and vectorise; erf
 * and tanh are libm's.
 */
// SPDX-License-Identifier: Apache-2.0
#include <string.h>
#include "kernels/cpu/cpu.h"

// GELU's tanh form is x * sigmoid(2 u), because (1 + tanh u) / 2 = sigmoid(2 u).
static inline float gelu_tanh_2u(float x)
{
    return 2.0f * 0.7978845608f * fma_f32(0.044715f * x * x, x, x);
}

// An activation, and how it grows with x. Who takes one of the two does not compute the other.
struct bent {
    float value, slope;
};

static inline struct bent bend(float x, enum act_kind kind)
{
    float s;
    switch (kind) {
    case ACT_SILU:
        s = sigmoid(x);
        return (struct bent){x * s, s * fma_f32(x, 1.0f - s, 1.0f)};
    case ACT_GELU_TANH:
        s = sigmoid(gelu_tanh_2u(x));
        return (struct bent){
            x * s, fma_f32(x * s * (1.0f - s),
                           2.0f * 0.7978845608f * fma_f32(3.0f * 0.044715f * x, x, 1.0f), s)};
    case ACT_GELU:
        s = 1.0f + erff(x * 0.70710678f);
        return (struct bent){0.5f * x * s, 0.5f * s + x * 0.3989422804f * expf(-0.5f * x * x)};
    case ACT_RELU2:
        return (struct bent){x > 0 ? x * x : 0, x > 0 ? 2 * x : 0};
    case ACT_RELU:
        return (struct bent){x > 0 ? x : 0, x > 0};
    case ACT_SIGMOID:
        s = sigmoid(x);
        return (struct bent){s, s * (1 - s)};
    case ACT_LINEAR:
    case ACT_CLAMPED: // act_row(), act_back_row()
        break;
    }
    return (struct bent){x, 1};
}

// One row with a kind known to the compiler, and whether it is gated, so that the loop has no
// branch and vectorises.
#define OF_GATED(kind, gated, row, ...)                                                            \
    ((kind) == ACT_SILU        ? row(__VA_ARGS__, gated, ACT_SILU)                                 \
     : (kind) == ACT_GELU_TANH ? row(__VA_ARGS__, gated, ACT_GELU_TANH)                            \
     : (kind) == ACT_RELU2     ? row(__VA_ARGS__, gated, ACT_RELU2)                                \
     : (kind) == ACT_RELU      ? row(__VA_ARGS__, gated, ACT_RELU)                                 \
     : (kind) == ACT_CLAMPED   ? row(__VA_ARGS__, gated, ACT_CLAMPED)                              \
     : (kind) == ACT_SIGMOID   ? row(__VA_ARGS__, gated, ACT_SIGMOID)                              \
     : (kind) == ACT_LINEAR    ? row(__VA_ARGS__, gated, ACT_LINEAR)                               \
                               : row(__VA_ARGS__, gated, ACT_GELU))
#define OF_KIND(s, row, ...)                                                                       \
    ((s)->gated ? OF_GATED((s)->kind, true, row, __VA_ARGS__, s)                                   \
                : OF_GATED((s)->kind, false, row, __VA_ARGS__, s))

// As fminf() and fmaxf(), but of vectors.
static inline float at_most(float x, float limit)
{
    return x < limit ? x : limit;
}
static inline float clamped(float x, float limit)
{
    x = at_most(x, limit);
    return x > -limit ? x : -limit;
}

VEC_INLINE void act_row(float *y, const float *x, const float *up, const struct act_shape *s,
                        bool gated, enum act_kind kind)
{
    const float alpha = s->alpha, limit = s->limit;
#pragma omp simd
    for (int c = 0; c < s->width; c++) {
        const float u = gated ? up[c] : 1.0f, g = at_most(x[c], limit);
        y[c] = kind == ACT_CLAMPED ? g * sigmoid(alpha * g) * (clamped(u, limit) + 1.0f)
                                   : bend(x[c], kind).value * u;
    }
}

// Row r of what a shape that is laid out (backend.h) opens; NULL: of nothing.
static const float *up_row(const struct act_shape *s, int r)
{
    return s->up ? (const float *)s->up + r * s->up_stride : NULL;
}

void cpu_act(struct device *dev, void *y, const void *x, const struct act_shape *shape)
{
    const struct act_shape laid_out = act_laid_out(x, *shape), *s = &laid_out;
    const int64_t width = s->width;
    if (!cpu_is_f32(dev, "act", s->dt)) return;
#pragma omp parallel for if (s->rows * width > PARALLEL_WORK / 8)
    for (int r = 0; r < s->rows; r++)
        OF_KIND(s, act_row, (float *)y + r * width, (const float *)x + r * s->gate_stride,
                up_row(s, r));
}

// What is clamped has no gradient.
VEC_INLINE void act_back_row(float *dx, float *dup, const float *dy, const float *x,
                             const float *up, const struct act_shape *s, bool gated,
                             enum act_kind kind)
{
    const float alpha = s->alpha, limit = s->limit;
#pragma omp simd
    for (int c = 0; c < s->width; c++) {
        const float u = gated ? up[c] : 1.0f, g = at_most(x[c], limit), d = dy[c];
        if (kind == ACT_CLAMPED) {
            const float open = clamped(u, limit), share = sigmoid(alpha * g);
            const float slope = share * fma_f32(alpha * g, 1.0f - share, 1.0f);
            dx[c] = x[c] <= limit ? d * (open + 1.0f) * slope : 0.0f;
            dup[c] = u == open ? d * g * share : 0.0f;
        } else {
            const struct bent b = bend(x[c], kind);
            dx[c] = d * u * b.slope;
            if (gated) dup[c] = d * b.value;
        }
    }
}

void cpu_act_back(struct device *dev, void *dx, void *dup, void *y, const void *dy, const void *x,
                  const struct act_shape *shape)
{
    const struct act_shape laid_out = act_laid_out(x, *shape), *s = &laid_out;
    const int64_t width = s->width;
    if (!cpu_is_f32(dev, "act_back", s->dt)) return;
    if (y) cpu_act(dev, y, x, s);
    if (!shape->up) dup = (float *)dx + width;
#pragma omp parallel for if (s->rows * width > PARALLEL_WORK / 8)
    for (int r = 0; r < s->rows; r++)
        OF_KIND(s, act_back_row, (float *)dx + r * s->gate_stride, (float *)dup + r * s->up_stride,
                (const float *)dy + r * width, (const float *)x + r * s->gate_stride, up_row(s, r));
}

void cpu_softcap(struct device *dev, float *x, int64_t n, float cap, float scale)
{
    (void)dev;
#pragma omp parallel for if (n > PARALLEL_WORK / 8)
    for (int64_t i = 0; i < n; i++) x[i] = cap > 0 ? cap * tanhf(scale * x[i] / cap) : scale * x[i];
}

void cpu_softcap_back(struct device *dev, float *dx, const float *capped, int64_t n, float cap,
                      float scale)
{
    (void)dev;
#pragma omp parallel for simd if (n > PARALLEL_WORK)
    for (int64_t i = 0; i < n; i++) {
        float t = cap > 0 ? capped[i] / cap : 0;
        dx[i] *= scale * fma_f32(-t, t, 1.0f);
    }
}

// Rows of attention whose queries have a gate.
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
