/* lora.cu: low-rank adapters. Three kernels, over tiles of ROWS rows: `thin` sums a row's wide
 * vector against each of rank directions into h (parts, rows, max_rank) f32, `widen` spreads such
 * an h back over a row's columns, `outer` adds up the factors' gradients. Rows of a tile that have
 * one adapter share its loads; a row's sums run in an order of their own, so that it has the same
 * bits in any batch. An adapter is small beside the matrix that it belongs to: nothing here uses
 * tensor cores. */
#include "kernels/cuda/cuda.cuh"

#define THREADS 256
#define ROWS    8
#define RANKS   4 // directions that a thread of outer_kernel sums

struct lora_view { // lora_args on the device
    const lora_factors *factors;
    const int32_t *adapter; // NULL: all rows are of the first
    int n_adapters, n_parts, max_rank, rows, k, first[LORA_PARTS + 1];
};

static lora_view view_of(const struct lora_args *l, bool back)
{
    lora_view v = {};
    v.factors = l->factors;
    v.adapter = back ? NULL : l->adapter;
    v.n_adapters = l->n_adapters;
    v.n_parts = l->n_parts;
    v.max_rank = l->max_rank;
    v.rows = l->rows;
    v.k = l->k;
    for (int p = 0; p <= l->n_parts; p++) v.first[p] = l->first[p];
    return v;
}

__device__ __forceinline__ int adapter_of(const lora_view &l, int row)
{
    return l.adapter ? l.adapter[row] : 0;
}

// The rows from `at` on, up to `end`, that have its adapter.
__device__ __forceinline__ int run_end(const lora_view &l, int at, int end)
{
    int to = at + 1;
    while (to < end && adapter_of(l, to) == adapter_of(l, at)) to++;
    return to;
}

// h[p][row][j] = sum of x[row][c] * a[j][c]; or, of the gradient (BACK), scale * that of
// dy[row][c] * b[c][j] over the part's columns. A warp takes every eighth j.
template <typename T, int V, bool BACK>
__global__ void thin_kernel(float *h, const T *x, const lora_view l)
{
    grid_begin();
    const int part = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n = BACK ? l.first[part + 1] - l.first[part] : l.k;
    const int stride = BACK ? l.first[l.n_parts] : l.k;
    const int base = blockIdx.x * ROWS, end = min(base + ROWS, l.rows);
    if (BACK) x += l.first[part];
    for (int at = base, to; at < end; at = to) {
        to = run_end(l, at, end);
        const int adapter = adapter_of(l, at);
        if (adapter < 0) continue;
        const lora_factors f = l.factors[part * l.n_adapters + adapter];
        if (!f.a) continue;
        const T *weights = (const T *)(BACK ? f.b : f.a);
        for (int j = warp; j < f.rank; j += THREADS / 32) {
            float sum[ROWS] = {};
            for (int c = lane * V; c < n; c += 32 * V) {
                float w[V];
                if (BACK)
                    w[0] = to_f32(weights[(int64_t)c * f.rank + j]);
                else
                    load<T, V>(w, weights + (int64_t)j * n + c);
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    if (base + i < at || base + i >= to) continue;
                    float v[V];
                    load<T, V>(v, x + (int64_t)(base + i) * stride + c);
#pragma unroll
                    for (int e = 0; e < V; e++) sum[i] = fmaf(v[e], w[e], sum[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                float all = lanes_sum(sum[i]);
                if (lane == 0 && base + i >= at && base + i < to)
                    h[((int64_t)part * l.rows + base + i) * l.max_rank + j] =
                        BACK ? __fmul_rn(all, f.scale) : all;
            }
        }
    }
}

// y[row][c] += scale * sum of h[p][row][j] * b[c][j] over the part that c is of; or, of the
// gradient (BACK), dx[row][c] += sum of h[p][row][j] * a[j][c] over all parts. A thread has a
// column.
template <typename T, bool BACK>
__global__ void widen_kernel(T *y, const float *h, const lora_view l)
{
    grid_begin();
    const int width = BACK ? l.k : l.first[l.n_parts];
    const int base = blockIdx.x * ROWS, end = min(base + ROWS, l.rows);
    const int c = blockIdx.y * THREADS + threadIdx.x;
    if (c >= width) return;
    for (int at = base, to; at < end; at = to) {
        to = run_end(l, at, end);
        const int adapter = adapter_of(l, at);
        if (adapter < 0) continue;
        float sum[ROWS] = {};
        float scale = 0;
        for (int p = 0; p < l.n_parts; p++) {
            if (!BACK && (c < l.first[p] || c >= l.first[p + 1])) continue;
            const lora_factors f = l.factors[p * l.n_adapters + adapter];
            if (!f.a) continue;
            const T *weights =
                BACK ? (const T *)f.a + c : (const T *)f.b + (int64_t)(c - l.first[p]) * f.rank;
            scale = BACK ? 1.f : f.scale;
            for (int j = 0; j < f.rank; j++) {
                const float w = to_f32(weights[BACK ? (int64_t)j * l.k : j]);
#pragma unroll
                for (int i = 0; i < ROWS; i++)
                    if (base + i >= at && base + i < to)
                        sum[i] =
                            fmaf(h[((int64_t)p * l.rows + base + i) * l.max_rank + j], w, sum[i]);
            }
        }
        if (scale == 0.f) continue; // the adapter leaves this column alone
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (base + i < at || base + i >= to) continue;
            T *out = y + (int64_t)(base + i) * width + c;
            *out = from_f32<T>(fmaf(scale, sum[i], to_f32(*out)));
        }
    }
}

// b[c][j] += scale * sum over rows of dy[row][c] * h[row][j] for the part's columns (B); or a[j][c]
// += sum over rows of x[row][c] * h[row][j]. A thread has a column and RANKS directions.
template <typename T, bool B>
__global__ void outer_kernel(float *out, const T *x, const float *h, int part, const lora_view l)
{
    grid_begin();
    const lora_factors f = l.factors[part * l.n_adapters];
    const int n = B ? l.first[part + 1] - l.first[part] : l.k;
    const int stride = B ? l.first[l.n_parts] : l.k;
    const int c = blockIdx.x * 32 + threadIdx.x % 32;
    const int j0 = (blockIdx.y * (THREADS / 32) + threadIdx.x / 32) * RANKS;
    if (!f.a || c >= n || j0 >= f.rank) return;
    if (B) x += l.first[part];
    h += (int64_t)part * l.rows * l.max_rank + j0;
    float sum[RANKS] = {};
    for (int row = 0; row < l.rows; row++) {
        const float v = to_f32(x[(int64_t)row * stride + c]);
#pragma unroll
        for (int j = 0; j < RANKS; j++)
            if (j0 + j < f.rank) sum[j] = fmaf(v, h[(int64_t)row * l.max_rank + j], sum[j]);
    }
#pragma unroll
    for (int j = 0; j < RANKS; j++)
        if (j0 + j < f.rank)
            out[B ? (int64_t)c * f.rank + j0 + j : (int64_t)(j0 + j) * n + c] +=
                B ? f.scale * sum[j] : sum[j];
}

template <typename T, bool BACK>
static void thin(struct device *dev, float *h, const void *x, const struct lora_args *l,
                 const lora_view &v)
{
    const dim3 grid(ceil_div(l->rows, ROWS), l->n_parts);
    constexpr int V = BACK ? 1 : wide<T>;
    if (!BACK && aligned(16, {x}, {(int64_t)(l->k * sizeof(T))}))
        cuda_launch(dev, "lora", thin_kernel<T, V, BACK>, grid, THREADS, 0, h, (const T *)x, v);
    else
        cuda_launch(dev, "lora", thin_kernel<T, 1, BACK>, grid, THREADS, 0, h, (const T *)x, v);
}

void cuda_lora(struct device *dev, void *y, const void *x, const struct lora_args *l)
{
    if (l->rows <= 0) return;
    float *h = (float *)cuda_workspace(dev, cuda_lora_scratch(l->rows, l->max_rank));
    if (!h) return;
    const lora_view v = view_of(l, false);
    const dim3 grid(ceil_div(l->rows, ROWS), ceil_div(l->first[l->n_parts], THREADS));
    with_type(l->dt, [&](auto t) {
        using T = decltype(t);
        thin<T, false>(dev, h, x, l, v);
        cuda_launch(dev, "lora", widen_kernel<T, false>, grid, THREADS, 0, (T *)y, (const float *)h,
                    v);
    });
}

// Of the forward pass a half, of the backward pass both.
size_t cuda_lora_scratch(int rows, int max_rank)
{
    return (size_t)2 * LORA_PARTS * rows * max_rank * sizeof(float);
}

void cuda_lora_back(struct device *dev, void *dx, const struct lora_grads *grads, const void *dy,
                    const void *x, const struct lora_args *l)
{
    if (l->rows <= 0) return;
    float *h = (float *)cuda_workspace(dev, cuda_lora_scratch(l->rows, l->max_rank));
    if (!h) return;
    float *dh = h + (size_t)LORA_PARTS * l->rows * l->max_rank;
    const lora_view v = view_of(l, true);
    const int ranks = ceil_div(l->max_rank, RANKS * THREADS / 32);
    with_type(l->dt, [&](auto t) {
        using T = decltype(t);
        thin<T, false>(dev, h, x, l, v);
        thin<T, true>(dev, dh, dy, l, v);
        for (int p = 0; p < l->n_parts; p++) {
            const int n = l->first[p + 1] - l->first[p];
            cuda_launch(dev, "lora_back", outer_kernel<T, true>, dim3(ceil_div(n, 32), ranks),
                        THREADS, 0, grads[p].b, (const T *)dy, (const float *)h, p, v);
            cuda_launch(dev, "lora_back", outer_kernel<T, false>, dim3(ceil_div(l->k, 32), ranks),
                        THREADS, 0, grads[p].a, (const T *)x, (const float *)dh, p, v);
        }
        cuda_launch(dev, "lora_back", widen_kernel<T, true>,
                    dim3(ceil_div(l->rows, ROWS), ceil_div(l->k, THREADS)), THREADS, 0, (T *)dx,
                    (const float *)dh, v);
    });
}
