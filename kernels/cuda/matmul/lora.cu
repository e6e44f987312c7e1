/* lora.cu: low-rank adapters, in three steps over h (parts, rows, max_rank) f32: `shrink` sums a
 * row's wide vector against each of rank directions, `expand` spreads such an h back over a row's
 * columns, `outer` adds up the factors' gradients. A row's sums run in an order of their own, so
 * that it has the same bits in any batch. In bf16 they run on tensor cores (lora_tensor.cu); the
 * kernels here, over tiles of ROWS rows of which those of one adapter share its loads, are of f32.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/matmul/lora.cuh"

#define THREADS   256
#define ROWS      8
#define RANKS     4   // directions that a thread of outer_kernel sums
#define FEW_ROWS  128 // for which one kernel is quicker than two,
#define FEW_RANKS 64  // of so many, since each block computes all
#define SLICES    8   // of the rows that a gradient sums: else too few blocks have work
#define MANY_ROWS 1024

// The rows from `at` on, up to `end`, that have its adapter.
__device__ __forceinline__ int run_end(const lora_view &l, int at, int end)
{
    int to = at + 1;
    while (to < end && adapter_of(l, to) == adapter_of(l, at)) to++;
    return to;
}

// to (rows, k) = x times the part's dropout. A thread has four columns.
template <typename T> __global__ void drop_kernel(T *to, const T *x, int part, const lora_view l)
{
    grid_begin();
    const int row = blockIdx.x, c = (blockIdx.y * THREADS + threadIdx.x) * 4;
    if (c >= l.k) return;
    float factors[4];
    dropped(factors, l, part, row, c / 4);
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (c + i < l.k)
            to[(int64_t)row * l.k + c + i] =
                from_f32<T>(factors[i] * to_f32(x[(int64_t)row * l.k + c + i]));
}

// h[p][row][j] = sum of x[row][c] * a[j][c]; or, of the gradient (BACK), scale * that of
// dy[row][c] * b[c][j] over the part's columns. A warp takes every eighth j.
template <int V, bool BACK>
__global__ void shrink_kernel(float *h, const float *x, int part0, const lora_view l)
{
    grid_begin();
    const int part = part0 + blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
        const float *weights = (const float *)(BACK ? f.b : f.a);
        for (int j = warp; j < f.rank; j += THREADS / 32) {
            float sum[ROWS] = {};
            for (int c = lane * V; c < n; c += 32 * V) {
                float w[V];
                if (BACK)
                    w[0] = weights[(int64_t)c * f.rank + j];
                else
                    load<float, V>(w, weights + (int64_t)j * n + c);
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    if (base + i < at || base + i >= to) continue;
                    float v[V];
                    load<float, V>(v, x + (int64_t)(base + i) * stride + c);
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

// The factor of an element of x.
__device__ __forceinline__ float kept(const lora_view &l, int part, int row, int c)
{
    if (l.dropout.p <= 0.f) return 1.f;
    float factors[4];
    dropped(factors, l, part, row, c / 4);
    return c % 4 == 0 ? factors[0] : c % 4 == 1 ? factors[1] : c % 4 == 2 ? factors[2] : factors[3];
}

// y[row][c] += scale * sum of h[p][row][j] * b[c][j] over the part that c is of; or, of the
// gradient (BACK), dx[row][c] += sum of h[p][row][j] * a[j][c] over all parts. A thread has a
// column.
template <bool BACK> __global__ void expand_kernel(float *y, const float *h, const lora_view l)
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
        float total[ROWS] = {}, scale = 0;
        for (int p = 0; p < l.n_parts; p++) {
            if (!BACK && (c < l.first[p] || c >= l.first[p + 1])) continue;
            const lora_factors f = l.factors[p * l.n_adapters + adapter];
            if (!f.a) continue;
            const float *weights = BACK ? (const float *)f.a + c
                                        : (const float *)f.b + (int64_t)(c - l.first[p]) * f.rank;
            float sum[ROWS] = {};
            scale = BACK ? 1.f : f.scale;
            for (int j = 0; j < f.rank; j++) {
                const float w = weights[BACK ? (int64_t)j * l.k : j];
#pragma unroll
                for (int i = 0; i < ROWS; i++)
                    if (base + i >= at && base + i < to)
                        sum[i] =
                            fmaf(h[((int64_t)p * l.rows + base + i) * l.max_rank + j], w, sum[i]);
            }
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (base + i >= at && base + i < to)
                    total[i] += BACK ? sum[i] * kept(l, p, base + i, c) : sum[i];
        }
        if (scale == 0.f) continue; // the adapter leaves this column alone
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (base + i < at || base + i >= to) continue;
            float *out = y + (int64_t)(base + i) * width + c;
            *out = fmaf(scale, total[i], *out);
        }
    }
}

// b[c][j] += scale * sum over rows of dy[row][c] * h[row][j] for the part's columns (B); or a[j][c]
// += sum over rows of x[row][c] * h[row][j]. A thread has a column and RANKS directions.
template <bool B>
__global__ void outer_kernel(const float *x, const float *h, int part0, const lora_view l)
{
    grid_begin();
    const int part = part0 + blockIdx.z;
    const lora_factors f = l.factors[part * l.n_adapters];
    float *out = B ? l.grads[part].b : l.grads[part].a;
    const int n = B ? l.first[part + 1] - l.first[part] : l.k;
    const int stride = B ? l.first[l.n_parts] : l.k;
    const int c = blockIdx.x * 32 + threadIdx.x % 32;
    const int j0 = (blockIdx.y * (THREADS / 32) + threadIdx.x / 32) * RANKS;
    if (!f.a || c >= n || j0 >= f.rank) return;
    if (B) x += l.first[part];
    h += (int64_t)part * l.rows * l.max_rank + j0;
    float sum[RANKS] = {};
    for (int row = 0; row < l.rows; row++) {
        const float v = x[(int64_t)row * stride + c];
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

static void shrink(struct device *dev, float *h, const void *x, int part0, int n,
                   const lora_view &l, bool back)
{
    const dim3 grid(ceil_div(l.rows, ROWS), n);
    const float *from = (const float *)x;
    if (back)
        cuda_launch(dev, "lora", shrink_kernel<1, true>, grid, THREADS, 0, h, from, part0, l);
    else if (aligned(16, {x}, {(int64_t)(l.k * sizeof(float))}))
        cuda_launch(dev, "lora", shrink_kernel<4, false>, grid, THREADS, 0, h, from, part0, l);
    else
        cuda_launch(dev, "lora", shrink_kernel<1, false>, grid, THREADS, 0, h, from, part0, l);
}

static void expand(struct device *dev, void *y, const float *h, const lora_view &l, bool back, bool)
{
    const int width = back ? l.k : l.first[l.n_parts];
    cuda_launch(dev, "lora", back ? expand_kernel<true> : expand_kernel<false>,
                dim3(ceil_div(l.rows, ROWS), ceil_div(width, THREADS)), THREADS, 0, y, h, l);
}

static void outer(struct device *dev, float *, const void *x, const float *h, int part0, int n,
                  const lora_view &l, bool of_b)
{
    int width = of_b ? 0 : l.k;
    for (int p = 0; of_b && p < l.n_parts; p++) width = max(width, l.first[p + 1] - l.first[p]);
    const dim3 grid(ceil_div(width, 32), ceil_div(l.max_rank, RANKS * THREADS / 32), n);
    cuda_launch(dev, "lora_back", of_b ? outer_kernel<true> : outer_kernel<false>, grid, THREADS, 0,
                x, h, part0, l);
}

static const struct lora_steps lora_f32 = {shrink, expand, NULL, outer};

// ---- the operations -----------------------------------------------------------------------------

static lora_view view_of(const struct lora_args *l)
{
    lora_view v = {};
    v.factors = l->factors;
    v.adapter = l->adapter;
    v.row = l->row;
    v.n_adapters = l->n_adapters;
    v.n_parts = l->n_parts;
    v.max_rank = l->max_rank;
    v.rows = l->rows;
    v.k = l->k;
    for (int p = 0; p <= l->n_parts; p++) v.first[p] = l->first[p];
    v.dropout = l->dropout;
    return v;
}

// x itself, or what a part's dropout leaves of it, in `to`.
static const void *drop(struct device *dev, void *to, const void *x, int part,
                        const struct lora_args *l, const lora_view &v)
{
    if (v.dropout.p <= 0.f) return x;
    with_type(l->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "dropout", drop_kernel<T>, dim3(v.rows, ceil_div(v.k, 4 * THREADS)),
                    THREADS, 0, to, x, part, v);
    });
    return to;
}

// h of one pass, in f32; what comes behind it is aligned to 16 bytes.
static size_t h_elements(int rows, int max_rank)
{
    return ((size_t)LORA_PARTS * rows * max_rank + 3) / 4 * 4;
}

int lora_slices(int rows, int max_rank)
{
    return rows < MANY_ROWS ? 1 : max(1, SLICES * 16 / max(max_rank, 16));
}

static size_t sums_elements(int rows, int max_rank, int columns)
{
    return (size_t)lora_slices(rows, max_rank) * columns * max_rank;
}

// Twice h, which the backward pass wants, the sums of slices over so many columns, and x after
// dropout.
size_t cuda_lora_scratch(int rows, int max_rank, int columns, size_t dropped)
{
    return (2 * h_elements(rows, max_rank) + sums_elements(rows, max_rank, columns)) *
               sizeof(float) +
           rows * dropped;
}

struct scratch {
    float *h, *dh, *sums; // h of both passes
    void *dropped;
};

// In the workspace; false after a recorded failure.
static bool take_scratch(struct device *dev, const struct lora_args *l, struct scratch *ret)
{
    const size_t each = h_elements(l->rows, l->max_rank);
    const size_t dropped = l->dropout.p > 0.f ? l->k * dtype_size(l->dt) : 0;
    const int columns = max(l->n_parts * l->k, l->first[l->n_parts]);
    float *h =
        (float *)cuda_workspace(dev, cuda_lora_scratch(l->rows, l->max_rank, columns, dropped));
    if (!h) return false;
    *ret = (struct scratch){h, h + each, h + 2 * each, NULL};
    ret->dropped = ret->sums + sums_elements(l->rows, l->max_rank, columns);
    return true;
}

// A call of lora or, with grads, of lora_back.
struct lora_call {
    void *y; // of the gradient: dx
    const void *x;
    const struct lora_args *args;
    const struct lora_grads *grads = NULL;
    const void *dy = NULL;
};

template <const lora_steps *STEPS> static void forward(struct device *dev, const lora_call &c)
{
    struct scratch s;
    const struct lora_args *l = c.args;
    const lora_view v = view_of(l);
    const int at_once = l->dropout.p > 0.f ? 1 : l->n_parts; // parts of the same x
    if (!take_scratch(dev, l, &s)) return;
    for (int p = 0; p < l->n_parts; p += at_once)
        STEPS->shrink(dev, s.h, drop(dev, s.dropped, c.x, p, l, v), p, at_once, v, false);
    STEPS->expand(dev, c.y, s.h, v, false, l->out == DT_F32);
}

template <const lora_steps *STEPS> static void back(struct device *dev, const lora_call &c)
{
    struct scratch s;
    const struct lora_args *l = c.args;
    if (!take_scratch(dev, l, &s)) return;
    lora_view v = view_of(l);
    v.adapter = NULL;
    for (int p = 0; p < l->n_parts; p++) v.grads[p] = c.grads[p];
    const int at_once = l->dropout.p > 0.f ? 1 : l->n_parts; // parts of the same x
    STEPS->shrink(dev, s.dh, c.dy, 0, l->n_parts, v, true);
    for (int p = 0; p < l->n_parts; p += at_once) {
        const void *xp = drop(dev, s.dropped, c.x, p, l, v);
        STEPS->shrink(dev, s.h, xp, p, at_once, v, false);
        STEPS->outer(dev, s.sums, xp, s.dh, p, at_once, v, false);
    }
    STEPS->outer(dev, s.sums, c.dy, s.h, 0, l->n_parts, v, true);
    STEPS->expand(dev, c.y, s.dh, v, true, l->dt == DT_F32);
}

static bool is_bf16(struct device *, const lora_call &c)
{
    return c.args->dt == DT_BF16;
}

static bool is_few(struct device *, const lora_call &c)
{
    const struct lora_args *l = c.args;
    return l->dt == DT_BF16 && l->out == DT_BF16 && l->rows <= FEW_ROWS &&
           l->max_rank <= FEW_RANKS && l->dropout.p <= 0.f;
}

static void at_once(struct device *dev, const lora_call &c)
{
    lora_bf16.both(dev, c.y, c.x, view_of(c.args));
}

static const op_variant forward_rows[] = {
    variant<lora_call, is_few, at_once>(
        "few", "bf16 to bf16 without dropout, up to 128 rows and ranks up to 64: one kernel"),
    variant<lora_call, is_bf16, forward<&lora_bf16>>("mma", "bf16: shrink, then expand"),
    variant<lora_call, otherwise, forward<&lora_f32>>("plain", "f32"),
};
static const op_variant back_rows[] = {
    variant<lora_call, is_bf16, back<&lora_bf16>>("mma", "bf16"),
    variant<lora_call, otherwise, back<&lora_f32>>("plain", "f32"),
};
const struct op_variants lora_variants = {OP_lora, 3, forward_rows};
const struct op_variants lora_back_variants = {OP_lora_back, 2, back_rows};

void cuda_lora(struct device *dev, void *y, const void *x, const struct lora_args *l)
{
    const lora_call call = {y, x, l};
    if (l->rows > 0) op_take_variant(dev, &lora_variants, &call);
}

void cuda_lora_back(struct device *dev, void *dx, const struct lora_grads *grads, const void *dy,
                    const void *x, const struct lora_args *l)
{
    const lora_call call = {dx, x, l, grads, dy};
    if (l->rows > 0) op_take_variant(dev, &lora_back_variants, &call);
}
