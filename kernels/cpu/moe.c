/* moe.c: mixture of experts: routing, the experts' products, the weighted sum of what they give,
 * and the gradients. The products are one ordinary matrix product for each expert over its rows,
 * which lie together in sorted order: with trans_b a row of it has the same bits whichever rows go
 * to the same expert (matmul.c). Every other sum is one thread's and runs in order. */
#include "kernels/cpu/cpu.h"

// A logit's rank among the others: NaN comes first, so that it shows in the weights.
static float rank_of(float logit)
{
    return isnan(logit) ? INFINITY : logit;
}

// The likeliest expert after `last` (-1: of all), in order of logits; of equals the lower number.
static int next_expert(const float *logits, int n_experts, int last)
{
    int best = -1;
    for (int e = 0; e < n_experts; e++) {
        float rank = rank_of(logits[e]);
        if (last >= 0) {
            float limit = rank_of(logits[last]);
            if (rank > limit || (rank == limit && e <= last)) continue;
        }
        if (best < 0 || rank > rank_of(logits[best])) best = e;
    }
    return best;
}

static void route_row(int32_t *expert, float *weight, const float *logits,
                      const struct moe_shape *s)
{
    float sum = 0;
    for (int j = 0; j < s->top_k; j++) {
        expert[j] = next_expert(logits, s->n_experts, j > 0 ? expert[j - 1] : -1);
        weight[j] = expf(logits[expert[j]] - logits[expert[0]]); // the first is the largest
        sum += weight[j];
    }
    for (int j = 0; j < s->top_k; j++) weight[j] /= sum;
}

void cpu_moe_route(struct device *dev, const struct moe_routing *r, const float *logits,
                   const struct moe_shape *s)
{
    (void)dev;
    const int k = s->top_k, n = s->rows * k;
#pragma omp parallel for if ((int64_t)n * s->n_experts > PARALLEL_WORK)
    for (int i = 0; i < s->rows; i++)
        route_row(r->expert + (int64_t)i * k, r->weight + (int64_t)i * k,
                  logits + (int64_t)i * s->n_experts, s);

    // Counting sort. While assignments are placed, offsets[e] is the next free place of expert e:
    // at the end the first of expert e + 1, hence the shift.
    int32_t *offsets = r->offsets;
    memset(offsets, 0, ((size_t)s->n_experts + 1) * sizeof *offsets);
    for (int a = 0; a < n; a++) offsets[r->expert[a] + 1]++;
    for (int e = 0; e < s->n_experts; e++) offsets[e + 1] += offsets[e];
    for (int a = 0; a < n; a++) {
        int32_t place = offsets[r->expert[a]]++;
        r->place[a] = place;
        r->row[place] = a / k;
    }
    memmove(offsets + 1, offsets, (size_t)s->n_experts * sizeof *offsets);
    offsets[0] = 0;
}

// Of the softmax over the chosen: dlogit_j = weight_j (dweight_j - sum of weight * dweight).
void cpu_moe_route_back(struct device *dev, void *dlogits, const float *dweight,
                        const struct moe_routing *r, const struct moe_shape *s, enum dtype dt)
{
    if (!cpu_is_f32(dev, "moe_route_back", dt)) return;
    const int k = s->top_k;
#pragma omp parallel for if ((int64_t)s->rows * s->n_experts > PARALLEL_WORK)
    for (int i = 0; i < s->rows; i++) {
        const int32_t *expert = r->expert + (int64_t)i * k;
        const float *weight = r->weight + (int64_t)i * k, *dw = dweight + (int64_t)i * k;
        float *out = (float *)dlogits + (int64_t)i * s->n_experts;
        float mean = 0;
        for (int j = 0; j < k; j++) mean += weight[j] * dw[j];
        memset(out, 0, (size_t)s->n_experts * sizeof *out);
        for (int j = 0; j < k; j++) out[expert[j]] = weight[j] * (dw[j] - mean);
    }
}

void cpu_matmul_experts(struct device *dev, void *c, const void *a, const void *b,
                        const int32_t *offsets, int n_experts, const struct matmul *shape)
{
    const int64_t n = shape->n, k = shape->k;
    for (int e = 0; e < n_experts; e++) {
        const int64_t start = offsets[e];
        struct matmul one = *shape;
        one.m = offsets[e + 1] - offsets[e];
        cpu_matmul(dev, (float *)c + start * n, (const float *)a + start * k,
                   (const float *)b + e * n * k, NULL, &one);
    }
}

void cpu_matmul_experts_back(struct device *dev, float *dw, const void *dy, const void *x,
                             const int32_t *offsets, int n_experts, int m, int n, int k,
                             enum dtype dt)
{
    (void)m;
    for (int e = 0; e < n_experts; e++) {
        const int64_t start = offsets[e];
        struct matmul one = {.m = n, .n = k, .trans_a = true, .beta = 1, .in = dt, .out = DT_F32};
        one.k = offsets[e + 1] - offsets[e];
        cpu_matmul(dev, dw + (int64_t)e * n * k, (const float *)dy + start * n,
                   (const float *)x + start * k, NULL, &one);
    }
}

void cpu_moe_combine(struct device *dev, void *y, const void *x, const int32_t *place,
                     const float *weight, const struct moe_shape *s, int width, bool add,
                     enum dtype dt)
{
    if (!cpu_is_f32(dev, "moe_combine", dt)) return;
#pragma omp parallel for if ((int64_t)s->rows * s->top_k * width > PARALLEL_WORK)
    for (int i = 0; i < s->rows; i++) {
        float *to = (float *)y + (int64_t)i * width;
        if (!add) memset(to, 0, (size_t)width * sizeof *to);
        for (int64_t a = (int64_t)i * s->top_k; a < (int64_t)(i + 1) * s->top_k; a++) {
            const float *from = (const float *)x + (int64_t)place[a] * width;
            const float scale = weight ? weight[a] : 1;
#pragma omp simd
            for (int c = 0; c < width; c++) to[c] += scale * from[c];
        }
    }
}

void cpu_moe_combine_back(struct device *dev, void *dx, float *dweight, const void *dy,
                          const void *x, const struct moe_routing *r, const struct moe_shape *s,
                          int width, enum dtype dt)
{
    if (!cpu_is_f32(dev, "moe_combine_back", dt)) return;
    const int n = s->rows * s->top_k;
#pragma omp parallel for if ((int64_t)n * width > PARALLEL_WORK)
    for (int a = 0; a < n; a++) {
        const float *from = (const float *)dy + (int64_t)(a / s->top_k) * width;
        const float *value = (const float *)x + (int64_t)r->place[a] * width;
        float *to = (float *)dx + (int64_t)r->place[a] * width;
        const float scale = r->weight[a];
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < width; c++) {
            to[c] = scale * from[c];
            sum += from[c] * value[c];
        }
        dweight[a] = sum;
    }
}
