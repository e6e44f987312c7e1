/* moe.c: mixture of experts: routing, its balance, the weighted sum of what the experts give, and
 * the gradients; their matmuls are in matmul.c. Every sum is one thread's and runs in order. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include "kernels/routing.h"
#include <omp.h>

// The entry after `last` (-1: of all) in order of rank; of equals the lower number. Those whose
// rank is not a number are passed over.
static int next_largest(const float *rank, int n, int last)
{
    int best = -1;
    for (int e = 0; e < n; e++) {
        if (isnan(rank[e])) continue;
        if (last >= 0 && (rank[e] > rank[last] || (rank[e] == rank[last] && e <= last))) continue;
        if (best < 0 || rank[e] > rank[best]) best = e;
    }
    return best;
}

// A group is as good as its best expert, or its two best together.
static float group_rank(const float *rank, int n, enum moe_scoring scoring)
{
    int first = next_largest(rank, n, -1), second = next_largest(rank, n, first);
    return scoring == MOE_SOFTMAX || second < 0 ? rank[first] : rank[first] + rank[second];
}

// Rules out the experts of all but the best groups. of_group: (n_group) scratch.
static void limit_groups(float *rank, float *of_group, const struct moe_shape *s)
{
    const int size = s->n_experts / s->n_group;
    int last = -1;
    for (int g = 0; g < s->n_group; g++)
        of_group[g] = group_rank(rank + g * size, size, s->scoring);
    for (int i = 0; i < s->topk_group; i++) last = next_largest(of_group, s->n_group, last);
    for (int e = 0; e < s->n_experts; e++) {
        const int g = e / size;
        bool good = of_group[g] > of_group[last] || (of_group[g] == of_group[last] && g <= last);
        if (!good) rank[e] = NAN;
    }
}

// Sum of e^(logit - max).
static float sum_of_exp(const float *logits, int n, float max)
{
    float sum = 0;
    for (int e = 0; e < n; e++) sum += expf(logits[e] - max);
    return sum;
}

// rank: (2, n_experts) scratch.
static void route_row(int32_t *expert, float *weight, const float *logits, const float *bias,
                      const struct moe_shape *s, float *rank)
{
    const bool by_logit = routing_by_logit(s, bias != NULL);
    const float max = max_f32(logits, s->n_experts);
    const float all = s->scoring == MOE_SOFTMAX && (bias || !s->norm_topk)
                          ? sum_of_exp(logits, s->n_experts, max)
                          : 0;
    float sum = 0;
    for (int e = 0; e < s->n_experts; e++) {
        float score = by_logit ? logits[e] : routing_score(s, logits[e], max, all);
        rank[e] = routing_rank(bias ? score + bias[e] : score);
    }
    if (s->n_group > 1) limit_groups(rank, rank + s->n_experts, s);
    for (int j = 0; j < s->top_k; j++) {
        expert[j] = next_largest(rank, s->n_experts, j > 0 ? expert[j - 1] : -1);
        weight[j] = routing_share(s, logits[expert[j]], max);
        sum += weight[j];
    }
    if (s->scoring == MOE_SIGMOID) sum = s->norm_topk ? sum + ROUTING_TINY : 1;
    if (s->scoring == MOE_SOFTMAX && !s->norm_topk) sum = all;
    for (int j = 0; j < s->top_k; j++) weight[j] = weight[j] / sum * s->scale;
}

void cpu_moe_route(struct device *dev, const struct moe_routing *r, const float *logits,
                   const float *bias, const struct moe_shape *s)
{
    const int k = s->top_k, n = s->rows * k;
    const size_t each = 2 * (size_t)s->n_experts;
    float *rank = cpu_workspace(dev, (size_t)omp_get_max_threads() * each * sizeof *rank);
    if (!rank) return;
#pragma omp parallel for if ((int64_t)n * s->n_experts > PARALLEL_WORK)
    for (int i = 0; i < s->rows; i++)
        route_row(r->expert + (int64_t)i * k, r->weight + (int64_t)i * k,
                  logits + (int64_t)i * s->n_experts, bias, s,
                  rank + (size_t)omp_get_thread_num() * each);

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

// One row. Of a softmax over all experts, every logit takes from every weight.
static void route_row_back(float *dlogits, const float *dweight, const float *logits,
                           const int32_t *expert, const float *weight, const struct moe_shape *s)
{
    const int k = s->top_k;
    float mean = 0, sum = 0;
    for (int j = 0; j < k; j++) mean += weight[j] / s->scale * dweight[j];
    memset(dlogits, 0, (size_t)s->n_experts * sizeof *dlogits);
    if (s->scoring == MOE_SIGMOID) {
        for (int j = 0; j < k; j++) sum += routing_sigmoid(logits[expert[j]]);
    } else if (!s->norm_topk) {
        const float max = max_f32(logits, s->n_experts);
        const float all = sum_of_exp(logits, s->n_experts, max);
        for (int e = 0; e < s->n_experts; e++)
            dlogits[e] = -routing_score(s, logits[e], max, all) * s->scale * mean;
    }
    for (int j = 0; j < k; j++) {
        float logit = s->scoring == MOE_SIGMOID ? logits[expert[j]] : 0;
        dlogits[expert[j]] += routing_slope(s, logit, weight, dweight, j, sum);
    }
}

void cpu_moe_route_back(struct device *dev, void *dlogits, const float *dweight,
                        const float *logits, const struct moe_routing *r, const struct moe_shape *s)
{
    if (!cpu_is_f32(dev, "moe_route_back", s->dt)) return;
    const int64_t k = s->top_k, n = s->n_experts;
#pragma omp parallel for if (s->rows * n > PARALLEL_WORK)
    for (int i = 0; i < s->rows; i++)
        route_row_back((float *)dlogits + i * n, dweight + i * k, logits ? logits + i * n : NULL,
                       r->expert + i * k, r->weight + i * k, s);
}

// ret (n_experts) = softmax of a row's logits.
static void probabilities(float *ret, const float *logits, int n)
{
    const float max = max_f32(logits, n), all = sum_of_exp(logits, n, max);
    for (int e = 0; e < n; e++) ret[e] = expf(logits[e] - max) / all;
}

void cpu_moe_balance(struct device *dev, float *probs, float *counts, const float *logits,
                     const struct moe_routing *r, const struct moe_shape *s)
{
    const int64_t n = s->n_experts;
    (void)dev;
#pragma omp parallel for if (s->rows * n > PARALLEL_WORK)
    for (int i = 0; i < s->rows; i++) probabilities(probs + i * n, logits + i * n, s->n_experts);
    for (int e = 0; e < s->n_experts; e++) counts[e] += (float)(r->offsets[e + 1] - r->offsets[e]);
}

void cpu_moe_balance_back(struct device *dev, void *dlogits, const float *logits,
                          const float *counts, const struct moe_shape *s, float scale)
{
    const int64_t n = s->n_experts;
    float *all = cpu_workspace(dev, (size_t)(omp_get_max_threads() * n) * sizeof *all);
    if (!all || !cpu_is_f32(dev, "moe_balance_back", s->dt)) return;
#pragma omp parallel for if (s->rows * n > PARALLEL_WORK)
    for (int i = 0; i < s->rows; i++) {
        float *probs = all + omp_get_thread_num() * n, *to = (float *)dlogits + i * n, mean = 0;
        probabilities(probs, logits + i * n, s->n_experts);
        for (int e = 0; e < s->n_experts; e++) mean += probs[e] * counts[e];
        for (int e = 0; e < s->n_experts; e++) to[e] += scale * probs[e] * (counts[e] - mean);
    }
}

void cpu_moe_combine(struct device *dev, void *y, const void *x, const int32_t *place,
                     const float *weight, const struct moe_shape *s, bool add)
{
    if (!cpu_is_f32(dev, "moe_combine", s->dt)) return;
    const int width = s->width;
#pragma omp parallel for if ((int64_t)s->rows * s->top_k * width > PARALLEL_WORK)
    for (int i = 0; i < s->rows; i++) {
        float *to = (float *)y + (int64_t)i * width;
        if (!add) memset(to, 0, (size_t)width * sizeof *to);
        for (int64_t a = (int64_t)i * s->top_k; a < (int64_t)(i + 1) * s->top_k; a++)
            add_scaled(to, weight ? weight[a] : 1, (const float *)x + (int64_t)place[a] * width,
                       width);
    }
}

void cpu_moe_combine_back(struct device *dev, void *dx, float *dweight, const void *dy,
                          const void *x, const struct moe_routing *r, const struct moe_shape *s)
{
    if (!cpu_is_f32(dev, "moe_combine_back", s->dt)) return;
    const int n = s->rows * s->top_k, width = s->width;
#pragma omp parallel for if ((int64_t)n * width > PARALLEL_WORK)
    for (int a = 0; a < n; a++) {
        const float *from = (const float *)dy + (int64_t)(a / s->top_k) * width;
        const float *value = (const float *)x + (int64_t)r->place[a] * width;
        float *to = (float *)dx + (int64_t)r->place[a] * width;
        const float scale = r->weight[a];
#pragma omp simd
        for (int c = 0; c < width; c++) to[c] = scale * from[c];
        dweight[a] = dot_f32(from, value, width);
    }
}
