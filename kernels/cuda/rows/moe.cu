/* moe.cu: mixture of experts: routing, its balance, the weighted sum of what the experts give, and
 * their gradients. The experts' matmuls are in matmul_experts.cu. No sum is shared between blocks,
 * so the order of every sum is fixed, and a row's weights and result do not depend on the other
 * rows.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda.cuh"
#include "kernels/routing.h"
#include <limits.h>

#define ROW_WARPS  4 // rows of a block of the kernels that give a row to a warp
#define SORT_WARPS 16
#define THREADS    128

// ---- routing -----------------------------------------------------------------------------------

// The entry after (limit, last), in order of rank and number, of those whose rank is a number; a
// warp's. It is returned to every lane, its rank in `limit`.
INLINE int next_largest(const float *rank, int n, float &limit, int last)
{
    ranked best = {-INFINITY, INT_MAX}; // which a lane without one keeps
    for (int e = threadIdx.x % 32; e < n; e += 32) {
        bool left = rank[e] < limit || (rank[e] == limit && e > last);
        if (left && (best.index == INT_MAX || rank[e] > best.value)) best = {rank[e], e};
    }
    best = lanes_first(best);
    limit = best.value;
    return best.index;
}

// A group is as good as its best expert, or its two best together.
INLINE float group_rank(const float *rank, int n, moe_scoring scoring)
{
    float first = -INFINITY, second = -INFINITY;
    for (int e = 0; e < n; e++) {
        second = fmaxf(second, fminf(first, rank[e]));
        first = fmaxf(first, rank[e]);
    }
    return scoring == MOE_SOFTMAX || n < 2 ? first : first + second;
}

// Rules out the experts of all but the best groups. A warp's; of_group: (n_group) scratch.
INLINE void limit_groups(float *rank, float *of_group, const moe_shape &s)
{
    int lane = threadIdx.x % 32, size = s.n_experts / s.n_group, last = -1;
    float limit = INFINITY;
    for (int g = lane; g < s.n_group; g += 32)
        of_group[g] = group_rank(rank + g * size, size, s.scoring);
    __syncwarp();
    for (int i = 0; i < s.topk_group; i++) last = next_largest(of_group, s.n_group, limit, last);
    for (int e = lane; e < s.n_experts; e += 32) {
        int g = e / size;
        bool good = of_group[g] > limit || (of_group[g] == limit && g <= last);
        if (!good) rank[e] = NAN;
    }
    __syncwarp();
}

// The largest of a row's logits, and the sum of e^(logit - max); a warp's.
INLINE void row_sums(const float *logits, int n, float &ret_max, float &ret_sum)
{
    float max = -INFINITY, sum = 0;
    for (int e = threadIdx.x % 32; e < n; e += 32) max = fmaxf(max, logits[e]);
    ret_max = max = lanes_max(max);
    for (int e = threadIdx.x % 32; e < n; e += 32) sum += expf(logits[e] - max);
    ret_sum = lanes_sum(sum);
}

// A warp has a row. Each choice is the first, in order of rank and number, after the one before.
__global__ void choose_kernel(int32_t *expert, float *weight, const float *logits,
                              const float *bias, moe_shape s)
{
    grid_begin();
    extern __shared__ float ranks[]; // (ROW_WARPS, 2, n_experts)
    int i = blockIdx.x * ROW_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= s.rows) return;
    logits += (int64_t)i * s.n_experts;
    expert += (int64_t)i * s.top_k;
    weight += (int64_t)i * s.top_k;
    float *rank = ranks + threadIdx.x / 32 * 2 * s.n_experts;
    bool by_logit = routing_by_logit(&s, bias != NULL);
    float max, all, limit = INFINITY, sum = 0;
    row_sums(logits, s.n_experts, max, all);
    for (int e = lane; e < s.n_experts; e += 32) {
        float score = by_logit ? logits[e] : routing_score(&s, logits[e], max, all);
        rank[e] = routing_rank(bias ? score + bias[e] : score);
    }
    __syncwarp();
    if (s.n_group > 1) limit_groups(rank, rank + s.n_experts, s);
    int last = -1;
    for (int j = 0; j < s.top_k; j++) {
        last = next_largest(rank, s.n_experts, limit, last);
        float share = routing_share(&s, logits[last], max);
        sum += share;
        if (lane == 0) {
            expert[j] = last;
            weight[j] = share;
        }
    }
    if (s.scoring == MOE_SIGMOID) sum = s.norm_topk ? sum + ROUTING_TINY : 1.f;
    if (s.scoring == MOE_SOFTMAX && !s.norm_topk) sum = all;
    __syncwarp();
    for (int j = lane; j < s.top_k; j += 32) weight[j] = weight[j] / sum * s.scale;
}

/* Block e places the assignments of expert e. Its offset is the number of assignments to lower
 * experts, so blocks need nothing of each other. Each warp has one stretch of the assignments: it
 * counts those of the expert, and places them after those of the warps before it. */
__global__ void sort_kernel(int32_t *row, int32_t *place, int32_t *offsets, const int32_t *expert,
                            int n, int top_k)
{
    grid_begin();
    __shared__ int lower[SORT_WARPS], own[SORT_WARPS];
    int e = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int stretch = (n + SORT_WARPS * 32 - 1) / (SORT_WARPS * 32) * 32;
    int begin = min(n, warp * stretch), end = min(n, begin + stretch);
    int lower_sum = 0, own_sum = 0;
#pragma unroll 8
    for (int a = begin + lane; a < end; a += 32) {
        int x = expert[a];
        lower_sum += x < e;
        own_sum += x == e;
    }
    lower_sum = __reduce_add_sync(~0u, lower_sum);
    own_sum = __reduce_add_sync(~0u, own_sum);
    if (lane == 0) {
        lower[warp] = lower_sum;
        own[warp] = own_sum;
    }
    __syncthreads();
    int next = 0;
    for (int w = 0; w < SORT_WARPS; w++) next += lower[w];
    if (threadIdx.x == 0) {
        offsets[e] = next;
        if (e == (int)gridDim.x - 1) offsets[e + 1] = n;
    }
    for (int w = 0; w < warp; w++) next += own[w];
#pragma unroll 4
    for (int start = begin; start < end; start += 32) {
        int a = start + lane;
        bool mine = a < end && expert[a] == e;
        unsigned all = __ballot_sync(~0u, mine);
        if (mine) {
            int to = next + __popc(all & ((1u << lane) - 1));
            place[a] = to;
            row[to] = a / top_k;
        }
        next += __popc(all);
    }
}

void cuda_moe_route(struct device *dev, const struct moe_routing *r, const float *logits,
                    const float *bias, const struct moe_shape *s)
{
    cuda_launch(dev, "moe_route", choose_kernel, ceil_div(s->rows, ROW_WARPS), ROW_WARPS * 32,
                (size_t)ROW_WARPS * 2 * s->n_experts * sizeof(float), r->expert, r->weight, logits,
                bias, *s);
    cuda_launch(dev, "moe_route", sort_kernel, s->n_experts, SORT_WARPS * 32, 0, r->row, r->place,
                r->offsets, r->expert, s->rows * s->top_k, s->top_k);
}

// A warp has a row. Of a softmax over all experts, every logit takes from every weight.
template <typename T>
__global__ void route_back_kernel(T *dlogits, const float *dweight, const float *logits,
                                  const int32_t *expert, const float *weight, moe_shape s)
{
    grid_begin();
    int i = blockIdx.x * ROW_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= s.rows) return;
    dlogits += (int64_t)i * s.n_experts;
    if (logits) logits += (int64_t)i * s.n_experts;
    dweight += (int64_t)i * s.top_k;
    expert += (int64_t)i * s.top_k;
    weight += (int64_t)i * s.top_k;
    float mean = 0, sum = 0, max = 0, all = 1;
    for (int j = lane; j < s.top_k; j += 32) {
        mean += weight[j] / s.scale * dweight[j];
        if (s.scoring == MOE_SIGMOID) sum += routing_sigmoid(logits[expert[j]]);
    }
    mean = lanes_sum(mean);
    sum = lanes_sum(sum);
    bool from_all = s.scoring == MOE_SOFTMAX && !s.norm_topk;
    if (from_all) row_sums(logits, s.n_experts, max, all);
    for (int e = lane; e < s.n_experts; e += 32) {
        float taken = from_all ? -routing_score(&s, logits[e], max, all) * s.scale * mean : 0.f;
        float given = 0;
        for (int j = 0; j < s.top_k; j++) {
            if (expert[j] != e) continue;
            float logit = s.scoring == MOE_SIGMOID ? logits[e] : 0.f;
            given = routing_slope(&s, logit, weight, dweight, j, sum);
        }
        dlogits[e] = from_f32<T>(taken + given);
    }
}

void cuda_moe_route_back(struct device *dev, void *dlogits, const float *dweight,
                         const float *logits, const struct moe_routing *r,
                         const struct moe_shape *s)
{
    launch_typed(s->dt, dev, "moe_route_back", route_back_kernel, ceil_div(s->rows, ROW_WARPS),
                 ROW_WARPS * 32, 0, dlogits, dweight, logits, r->expert, r->weight, *s);
}

// ---- the load-balancing loss -------------------------------------------------------------------

// A warp has a row.
__global__ void balance_kernel(float *probs, float *counts, const float *logits,
                               const int32_t *offsets, moe_shape s)
{
    grid_begin();
    int i = blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    if (blockIdx.x == 0)
        for (int e = threadIdx.x; e < s.n_experts; e += blockDim.x)
            counts[e] += (float)(offsets[e + 1] - offsets[e]);
    if (i >= s.rows) return;
    float max, all;
    logits += (int64_t)i * s.n_experts;
    probs += (int64_t)i * s.n_experts;
    row_sums(logits, s.n_experts, max, all);
    for (int e = threadIdx.x % 32; e < s.n_experts; e += 32) probs[e] = expf(logits[e] - max) / all;
}

void cuda_moe_balance(struct device *dev, float *probs, float *counts, const float *logits,
                      const struct moe_routing *r, const struct moe_shape *s)
{
    cuda_launch(dev, "moe_balance", balance_kernel, ceil_div(s->rows, ROW_WARPS), ROW_WARPS * 32, 0,
                probs, counts, logits, r->offsets, *s);
}

template <typename T>
__global__ void balance_back_kernel(T *dlogits, const float *logits, const float *counts,
                                    moe_shape s, float scale)
{
    grid_begin();
    int i = blockIdx.x * ROW_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= s.rows) return;
    float max, all, mean = 0;
    dlogits += (int64_t)i * s.n_experts;
    logits += (int64_t)i * s.n_experts;
    row_sums(logits, s.n_experts, max, all);
    for (int e = lane; e < s.n_experts; e += 32) mean += expf(logits[e] - max) / all * counts[e];
    mean = lanes_sum(mean);
    for (int e = lane; e < s.n_experts; e += 32) {
        float more = scale * (expf(logits[e] - max) / all) * (counts[e] - mean);
        dlogits[e] = from_f32<T>(to_f32(dlogits[e]) + more);
    }
}

void cuda_moe_balance_back(struct device *dev, void *dlogits, const float *logits,
                           const float *counts, const struct moe_shape *s, float scale)
{
    launch_typed(s->dt, dev, "moe_balance_back", balance_back_kernel, ceil_div(s->rows, ROW_WARPS),
                 ROW_WARPS * 32, 0, dlogits, logits, counts, *s, scale);
}

// ---- the weighted sum --------------------------------------------------------------------------

template <typename T, int V>
__global__ void combine_kernel(T *y, const T *x, const int32_t *place, const float *weight,
                               int top_k, int width, bool add)
{
    grid_begin();
    int c = (blockIdx.y * THREADS + threadIdx.x) * V;
    if (c >= width) return;
    T *to = y + (int64_t)blockIdx.x * width + c;
    float sum[V] = {};
    if (add) load<T, V>(sum, to);
    int64_t first = (int64_t)blockIdx.x * top_k;
#pragma unroll 2
    for (int j = 0; j < top_k; j++) {
        float v[V], scale = weight ? weight[first + j] : 1.f;
        load<T, V>(v, x + (int64_t)place[first + j] * width + c);
        unrolled<V>([&](int i) { sum[i] += scale * v[i]; });
    }
    store<T, V>(to, sum);
}

void cuda_moe_combine(struct device *dev, void *y, const void *x, const int32_t *place,
                      const float *weight, const struct moe_shape *s, bool add)
{
    const int width = s->width;
    bool fits = aligned(16, {y, x}, {(int64_t)(width * dtype_size(s->dt))});
    launch_columns(s->dt, fits, dev, "moe_combine", combine_kernel, s->rows, width, THREADS, y, x,
                   place, weight, s->top_k, width, add);
}

// A block has an assignment.
template <typename T, int V>
__global__ void combine_back_kernel(T *dx, float *dweight, const T *dy, const T *x,
                                    const int32_t *place, const float *weight, int top_k, int width)
{
    grid_begin();
    __shared__ float shared[32];
    int64_t at = (int64_t)place[blockIdx.x] * width, row = (int64_t)(blockIdx.x / top_k) * width;
    float scale = weight[blockIdx.x], sum = 0;
    for (int c = threadIdx.x * V; c < width; c += THREADS * V) {
        float g[V], v[V];
        load<T, V>(g, dy + row + c);
        load<T, V>(v, x + at + c);
        unrolled<V>([&](int i) {
            sum += g[i] * v[i];
            g[i] *= scale;
        });
        store<T, V>(dx + at + c, g);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) dweight[blockIdx.x] = sum;
}

void cuda_moe_combine_back(struct device *dev, void *dx, float *dweight, const void *dy,
                           const void *x, const struct moe_routing *r, const struct moe_shape *s)
{
    const int width = s->width;
    bool fits = aligned(16, {dx, dy, x}, {(int64_t)(width * dtype_size(s->dt))});
    launch_wide(s->dt, fits, dev, "moe_combine_back", combine_back_kernel, s->rows * s->top_k,
                THREADS, 0, dx, dweight, dy, x, r->place, r->weight, s->top_k, width);
}
