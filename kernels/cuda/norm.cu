/* norm.cu: RMS norm and layer norm over rows, and their gradients (formulas: kernels/cpu/norm.c).
 *
 * A row is a warp's where it is at most 512 wide (q/k norms) and a block's otherwise. It is read
 * twice (three times for layer norm), the second time from L1. Gradients of the weights are summed
 * over a fixed assignment of rows to blocks in shared memory, then over blocks: the same bits in
 * every run.
 */
#include "kernels/cuda/cuda.cuh"

#define THREADS    256
#define WARP_WIDTH 512 // widest row for one warp

template <int GROUP> __device__ __forceinline__ float group_sum(float x, float *shared)
{
    return GROUP == 32 ? lanes_sum(x) : block_sum(x, shared);
}

__device__ __forceinline__ int64_t row_offset(const norm_shape &s, int row)
{
    return (int64_t)(row / s.heads) * s.stride + (int64_t)(row % s.heads) * s.width;
}

template <typename T, int V, int GROUP>
__global__ void norm_kernel(T *y, float *rstd, float *mean, const T *x, const T *w, const T *b,
                            norm_shape s)
{
    grid_begin();
    __shared__ float shared[32];
    int r = blockIdx.x * (THREADS / GROUP) + threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    if (r >= s.rows) return; // whole warps, or whole blocks
    int64_t offset = row_offset(s, r);
    x += offset;
    y += offset;

    float centre = 0, squares = 0;
    if (s.kind == NORM_LAYER) {
        float sum = 0;
        for (int c = lane * V; c < s.width; c += GROUP * V) {
            float a[V];
            load<T, V>(a, x + c);
#pragma unroll
            for (int i = 0; i < V; i++) sum += a[i];
        }
        centre = group_sum<GROUP>(sum, shared) / s.width;
    }
    for (int c = lane * V; c < s.width; c += GROUP * V) {
        float a[V];
        load<T, V>(a, x + c);
#pragma unroll
        for (int i = 0; i < V; i++) squares += (a[i] - centre) * (a[i] - centre);
    }
    float factor = 1.f / sqrtf(group_sum<GROUP>(squares, shared) / s.width + s.eps);
    float one = s.kind == NORM_RMS_PLUS_ONE ? 1.f : 0.f;
    for (int c = lane * V; c < s.width; c += GROUP * V) {
        float a[V], scale[V], bias[V] = {};
        load<T, V>(a, x + c);
        load<T, V>(scale, w + c);
        if (b) load<T, V>(bias, b + c);
#pragma unroll
        for (int i = 0; i < V; i++) a[i] = (a[i] - centre) * factor * (one + scale[i]) + bias[i];
        store<T, V>(y + c, a);
    }
    if (lane == 0) {
        if (rstd) rstd[r] = factor;
        if (mean && s.kind == NORM_LAYER) mean[r] = centre;
    }
}

// parts (blocks, 1 or 2, width): gradients of w, then of b where with_bias
template <typename T, int V, int GROUP>
__global__ void norm_back_kernel(T *dx, float *dw_parts, float *db_parts, const T *dy, const T *x,
                                 const T *w, const float *rstd, const float *mean, norm_shape s,
                                 bool add)
{
    grid_begin();
    extern __shared__ float sums[]; // (groups, width), and again where db_parts
    __shared__ float shared[32];
    constexpr int GROUPS = THREADS / GROUP;
    int group = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    int n_sums = (dw_parts ? 1 : 0) + (db_parts ? 1 : 0);
    float *dw = sums + group * s.width, *db = dw + (dw_parts ? GROUPS * s.width : 0);
    for (int i = threadIdx.x; i < n_sums * GROUPS * s.width; i += THREADS) sums[i] = 0;
    __syncthreads();

    bool layer = s.kind == NORM_LAYER;
    float one = s.kind == NORM_RMS_PLUS_ONE ? 1.f : 0.f;
    for (int r = blockIdx.x * GROUPS + group; r < s.rows; r += gridDim.x * GROUPS) {
        int64_t offset = row_offset(s, r);
        const T *in = x + offset, *grad = dy + offset;
        float factor = rstd[r], centre = layer ? mean[r] : 0.f, dot = 0, sum = 0;
        for (int c = lane * V; c < s.width; c += GROUP * V) {
            float a[V], g[V], scale[V];
            load<T, V>(a, in + c);
            load<T, V>(g, grad + c);
            load<T, V>(scale, w + c);
#pragma unroll
            for (int i = 0; i < V; i++) {
                float n = (a[i] - centre) * factor, gw = g[i] * (one + scale[i]);
                dot += gw * n;
                sum += gw;
                // a column is always the same thread's
                if (dw_parts) dw[c + i] += g[i] * n;
                if (db_parts) db[c + i] += g[i];
            }
        }
        dot = group_sum<GROUP>(dot, shared) / s.width;
        sum = layer ? group_sum<GROUP>(sum, shared) / s.width : 0.f;
        for (int c = lane * V; c < s.width; c += GROUP * V) {
            float a[V], g[V], scale[V], old[V] = {};
            load<T, V>(a, in + c);
            load<T, V>(g, grad + c);
            load<T, V>(scale, w + c);
            if (add) load<T, V>(old, dx + offset + c);
#pragma unroll
            for (int i = 0; i < V; i++)
                g[i] = old[i] +
                       factor * (g[i] * (one + scale[i]) - (a[i] - centre) * factor * dot - sum);
            store<T, V>(dx + offset + c, g);
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < s.width; c += THREADS) {
        int64_t at = (int64_t)blockIdx.x * s.width + c;
        float w_sum = 0, b_sum = 0;
        for (int k = 0; k < GROUPS; k++) {
            if (dw_parts) w_sum += sums[k * s.width + c];
            if (db_parts) b_sum += sums[((dw_parts ? GROUPS : 0) + k) * s.width + c];
        }
        if (dw_parts) dw_parts[at] = w_sum;
        if (db_parts) db_parts[at] = b_sum;
    }
}

// Calls f(element, number<V>, number<GROUP>).
template <typename F> static void choose(const struct norm_shape *s, bool pointers_fit, F f)
{
    int64_t size = dtype_size(s->dt);
    bool fits = pointers_fit && s->width * size % 16 == 0 &&
                (s->rows <= s->heads || s->stride * size % 16 == 0);
    with_type_wide(s->dt, fits, [&](auto t, auto v) {
        if (s->width <= WARP_WIDTH)
            f(t, v, number<32>());
        else
            f(t, v, number<THREADS>());
    });
}

void cuda_norm(struct device *dev, void *y, const struct norm_args *args,
               const struct norm_shape *shape)
{
    if (shape->rows <= 0) return;
    bool fits = aligned(16, {y, args->x, args->w, args->b}, {});
    choose(shape, fits, [&](auto t, auto v, auto group) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value, GROUP = decltype(group)::value;
        cuda_launch(dev, "norm", norm_kernel<T, V, GROUP>, ceil_div(shape->rows, THREADS / GROUP),
                    THREADS, 0, (T *)y, args->rstd, args->mean, (const T *)args->x,
                    (const T *)args->w, (const T *)args->b, *shape);
    });
}

static int most_blocks(struct device *dev)
{
    return 4 * cuda_use(dev)->n_sms;
}

size_t cuda_norm_scratch(struct device *dev, int width)
{
    return (size_t)most_blocks(dev) * width * 2 * sizeof(float); // of dw and db
}

void cuda_norm_back(struct device *dev, void *dx, float *dw, float *db, const void *dy,
                    const struct norm_args *args, const struct norm_shape *shape, bool add)
{
    if (shape->rows <= 0) return;
    int width = shape->width, n_sums = (dw ? 1 : 0) + (db ? 1 : 0);
    bool fits = aligned(16, {dx, dy, args->x, args->w}, {});
    choose(shape, fits, [&](auto t, auto v, auto group) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value, GROUP = decltype(group)::value;
        int blocks = ceil_div(shape->rows, THREADS / GROUP), most = most_blocks(dev);
        if (blocks > most) blocks = most;
        size_t part = (size_t)blocks * width,
               shared = (size_t)n_sums * (THREADS / GROUP) * width * 4;
        float *parts = NULL;
        if (n_sums && !(parts = (float *)cuda_workspace(dev, n_sums * part * 4))) return;
        float *db_parts = db ? parts + (dw ? part : 0) : NULL;
        cuda_launch(dev, "norm_back", norm_back_kernel<T, V, GROUP>, blocks, THREADS, shared,
                    (T *)dx, dw ? parts : (float *)NULL, db_parts, (const T *)dy,
                    (const T *)args->x, (const T *)args->w, (const float *)args->rstd,
                    (const float *)args->mean, *shape, add);
        if (dw) cuda_add_parts(dev, dw, parts, blocks, width);
        if (db) cuda_add_parts(dev, db, db_parts, blocks, width);
    });
}
