/* moe.cu: mixture of experts: routing, the weighted sum of what the experts give, and their
 * gradients. The experts' products are in matmul_experts.cu. No sum is shared between blocks, so
 * the order of every sum is fixed, and a row's weights and result do not depend on the other rows.
 */
#include "kernels/cuda/cuda.cuh"
#include <limits.h>

#define ROW_WARPS  4 // rows of a block of the kernels that give a row to a warp
#define SORT_WARPS 16
#define THREADS    128

// ---- routing -----------------------------------------------------------------------------------

// A logit's rank among the others: NaN comes first, so that it shows in the weights.
__device__ __forceinline__ float rank_of(float logit)
{
    return isnan(logit) ? INFINITY : logit;
}

// A warp has a row. Each choice is the first, in order of rank and number, after the one before.
__global__ void choose_kernel(int32_t *expert, float *weight, const float *logits, moe_shape s)
{
    grid_begin();
    int i = blockIdx.x * ROW_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= s.rows) return;
    logits += (int64_t)i * s.n_experts;
    expert += (int64_t)i * s.top_k;
    weight += (int64_t)i * s.top_k;
    float limit = INFINITY, first = 0, sum = 0;
    int last = -1;
    for (int j = 0; j < s.top_k; j++) {
        float best = -INFINITY;
        int at = INT_MAX;
        for (int e = lane; e < s.n_experts; e += 32) {
            float rank = rank_of(logits[e]);
            bool left = rank < limit || (rank == limit && e > last);
            if (left && (at == INT_MAX || rank > best)) {
                best = rank;
                at = e;
            }
        }
#pragma unroll
        for (int o = 16; o; o >>= 1) {
            float other = __shfl_xor_sync(~0u, best, o);
            int other_at = __shfl_xor_sync(~0u, at, o);
            // a lane without one has rank -inf and the largest number
            if (other > best || (other == best && other_at < at)) {
                best = other;
                at = other_at;
            }
        }
        float logit = logits[at];
        if (j == 0) first = logit;
        float e = expf(logit - first);
        sum += e;
        if (lane == 0) {
            expert[j] = at;
            weight[j] = e;
        }
        limit = best;
        last = at;
    }
    __syncwarp();
    for (int j = lane; j < s.top_k; j += 32) weight[j] /= sum;
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
                    const struct moe_shape *s)
{
    if (s->rows > 0)
        cuda_launch(dev, "moe_route", choose_kernel, ceil_div(s->rows, ROW_WARPS), ROW_WARPS * 32,
                    0, r->expert, r->weight, logits, *s);
    cuda_launch(dev, "moe_route", sort_kernel, s->n_experts, SORT_WARPS * 32, 0, r->row, r->place,
                r->offsets, r->expert, s->rows * s->top_k, s->top_k);
}

// Of the softmax over the chosen: dlogit_j = weight_j (dweight_j - sum of weight * dweight).
template <typename T>
__global__ void route_back_kernel(T *dlogits, const float *dweight, const int32_t *expert,
                                  const float *weight, moe_shape s)
{
    grid_begin();
    int i = blockIdx.x * ROW_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= s.rows) return;
    dlogits += (int64_t)i * s.n_experts;
    dweight += (int64_t)i * s.top_k;
    expert += (int64_t)i * s.top_k;
    weight += (int64_t)i * s.top_k;
    for (int e = lane; e < s.n_experts; e += 32) dlogits[e] = from_f32<T>(0.f);
    float mean = 0;
    for (int j = lane; j < s.top_k; j += 32) mean += weight[j] * dweight[j];
    mean = lanes_sum(mean);
    __syncwarp(); // the zeros are written
    for (int j = lane; j < s.top_k; j += 32)
        dlogits[expert[j]] = from_f32<T>(weight[j] * (dweight[j] - mean));
}

void cuda_moe_route_back(struct device *dev, void *dlogits, const float *dweight,
                         const struct moe_routing *r, const struct moe_shape *s, enum dtype dt)
{
    if (s->rows <= 0) return;
    with_type(dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "moe_route_back", route_back_kernel<T>, ceil_div(s->rows, ROW_WARPS),
                    ROW_WARPS * 32, 0, (T *)dlogits, dweight, r->expert, r->weight, *s);
    });
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
#pragma unroll
        for (int i = 0; i < V; i++) sum[i] += scale * v[i];
    }
    store<T, V>(to, sum);
}

void cuda_moe_combine(struct device *dev, void *y, const void *x, const int32_t *place,
                      const float *weight, const struct moe_shape *s, int width, bool add,
                      enum dtype dt)
{
    if (s->rows <= 0 || width <= 0) return;
    bool fits = aligned(16, {y, x}, {(int64_t)(width * dtype_size(dt))});
    with_type_wide(dt, fits, [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        cuda_launch(dev, "moe_combine", combine_kernel<T, V>,
                    dim3(s->rows, ceil_div(width, THREADS * V)), THREADS, 0, (T *)y, (const T *)x,
                    place, weight, s->top_k, width, add);
    });
    cuda_use(dev)->activation = y;
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
#pragma unroll
        for (int i = 0; i < V; i++) {
            sum += g[i] * v[i];
            g[i] *= scale;
        }
        store<T, V>(dx + at + c, g);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) dweight[blockIdx.x] = sum;
}

void cuda_moe_combine_back(struct device *dev, void *dx, float *dweight, const void *dy,
                           const void *x, const struct moe_routing *r, const struct moe_shape *s,
                           int width, enum dtype dt)
{
    if (s->rows <= 0) return;
    bool fits = aligned(16, {dx, dy, x}, {(int64_t)(width * dtype_size(dt))});
    with_type_wide(dt, fits, [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        cuda_launch(dev, "moe_combine_back", combine_back_kernel<T, V>, s->rows * s->top_k, THREADS,
                    0, (T *)dx, dweight, (const T *)dy, (const T *)x, r->place, r->weight, s->top_k,
                    width);
    });
}
