/* latent.cu: what latent attention needs beside attention (ops.h, struct latent_shape): queries
 * into the absorbed form and its results out of it, and the layout of the expanded form.
 *
 * Where latent_tensor.cu does not have the two products, they are an ordinary tiled one for each
 * head, on the ordinary units in f32. */
#include "kernels/cuda/attention/latent.cuh"

#define THREADS 256
#define ROWS    32 // of a block's tile of the result, two a thread
#define COLS    64 // four a thread
#define DEPTH   16

// Of head blockIdx.z.
template <typename T> __global__ void __launch_bounds__(THREADS) product_kernel(heads_product<T> p)
{
    grid_begin();
    __shared__ float left[DEPTH][ROWS + 1], right[DEPTH][COLS + 1];
    const T *a = p.a + blockIdx.z * p.a_head, *b = p.b + blockIdx.z * p.b_head;
    int row0 = blockIdx.x * ROWS, col0 = blockIdx.y * COLS;
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float sum[2][4] = {};
    for (int k0 = 0; k0 < p.depth; k0 += DEPTH) {
        __syncthreads();
        for (int i = threadIdx.x; i < DEPTH * ROWS; i += THREADS) {
            int k = i % DEPTH, r = i / DEPTH;
            bool in = row0 + r < p.rows && k0 + k < p.depth;
            left[k][r] = in ? to_f32(a[(row0 + r) * p.a_row + k0 + k]) : 0.f;
        }
        for (int i = threadIdx.x; i < DEPTH * COLS; i += THREADS) {
            // neighbouring threads read neighbours in memory
            int k = p.b_col == 1 ? i / COLS : i % DEPTH, c = p.b_col == 1 ? i % COLS : i / DEPTH;
            bool in = col0 + c < p.cols && k0 + k < p.depth;
            right[k][c] = in ? to_f32(b[(k0 + k) * p.b_depth + (col0 + c) * p.b_col]) : 0.f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[i][j] = __fmaf_rn(left[k][y + 16 * i], right[k][x + 16 * j], sum[i][j]);
    }
    T *c = p.c + blockIdx.z * p.c_head;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = row0 + y + 16 * i, col = col0 + x + 16 * j;
            if (row < p.rows && col < p.cols) c[row * p.c_row + col] = from_f32<T>(sum[i][j]);
        }
}

// What of the absorbed form is there already: the rotated part of every query, and the key.
template <typename T>
__global__ void absorbed_rest_kernel(T *qkv, const T *q, const T *keys, latent_shape s)
{
    grid_begin();
    int width = s.rank + s.rope, rotated = s.n_heads * s.rope;
    int i = blockIdx.y * THREADS + threadIdx.x;
    T *to = qkv + (int64_t)blockIdx.x * (s.n_heads + 1) * width;
    if (i < rotated) {
        int head = i / s.rope, d = i % s.rope, dim = s.nope + s.rope;
        to[(int64_t)head * width + s.rank + d] =
            q[((int64_t)blockIdx.x * s.n_heads + head) * dim + s.nope + d];
    } else if (i < rotated + width) {
        to[(int64_t)s.n_heads * width + i - rotated] =
            keys[(int64_t)blockIdx.x * width + i - rotated];
    }
}

// A call of latent_query, or, where keys are NULL, of latent_value.
struct latent_call {
    void *c;
    const void *a, *keys, *w;
    const struct latent_shape *shape;
};

template <typename T> static heads_product<T> product_of(const latent_call &call)
{
    const struct latent_shape *s = call.shape;
    const bool query = call.keys;
    heads_product<T> p = {};
    p.c = (T *)call.c;
    p.a = (const T *)call.a;
    p.b = (const T *)call.w + (query ? 0 : (int64_t)s->nope * s->rank);
    p.n_heads = s->n_heads;
    p.early = s->early;
    p.rows = s->rows;
    p.cols = query ? s->rank : s->value;
    p.depth = query ? s->nope : s->rank;
    p.a_head = query ? s->nope + s->rope : s->rank;
    p.a_row = s->n_heads * p.a_head;
    p.b_head = (int64_t)(s->nope + s->value) * s->rank;
    p.b_depth = query ? s->rank : 1;
    p.b_col = query ? 1 : s->rank;
    p.c_head = query ? s->rank + s->rope : s->value;
    p.c_row = (s->n_heads + query) * p.c_head;
    p.rotated = query ? s->rope : 0;
    p.keys = (const T *)call.keys;
    return p;
}

static bool mma_takes(struct device *dev, const latent_call &c)
{
    return c.shape->dt == DT_BF16 && latent_mma_takes(dev, product_of<bf16>(c));
}

static void mma_launch(struct device *dev, const latent_call &c)
{
    latent_mma(dev, product_of<bf16>(c));
}

static void plain(struct device *dev, const latent_call &c)
{
    const struct latent_shape *s = c.shape;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        const heads_product<T> p = product_of<T>(c);
        cuda_launch(dev, "latent attention's heads", product_kernel<T>,
                    dim3(ceil_div(p.rows, ROWS), ceil_div(p.cols, COLS), p.n_heads), THREADS, 0, p);
        if (!p.keys) return;
        int rest = s->n_heads * s->rope + s->rank + s->rope;
        cuda_launch(dev, "latent attention's queries", absorbed_rest_kernel<T>,
                    dim3(s->rows, ceil_div(rest, THREADS)), THREADS, 0, p.c, p.a, p.keys, *s);
    });
}

static const op_variant rows[] = {
    variant<latent_call, mma_takes, mma_launch>("mma", "bf16 on 9.0, widths are multiples of 8"),
    variant<latent_call, otherwise, plain>("plain", "all else: f32, odd widths, 8.x"),
};
const struct op_variants latent_query_variants = {OP_latent_query, 2, rows};
const struct op_variants latent_value_variants = {OP_latent_value, 2, rows};

void cuda_latent_query(struct device *dev, void *qkv, const void *q, const void *keys,
                       const void *w, const struct latent_shape *s)
{
    const latent_call call = {qkv, q, keys, w, s};
    if (s->rows > 0) op_take_variant(dev, &latent_query_variants, &call);
}

void cuda_latent_value(struct device *dev, void *out, const void *o, const void *w,
                       const struct latent_shape *s)
{
    const latent_call call = {out, o, NULL, w, s};
    if (s->rows > 0) op_take_variant(dev, &latent_value_variants, &call);
}

// Whether entries may be taken 16 bytes at a time.
static bool in_units(const struct latent_shape *s, std::initializer_list<const void *> arrays)
{
    const int n = 16 / (int)dtype_size(s->dt);
    return s->nope % n == 0 && s->rope % n == 0 && s->value % n == 0 && s->rank % n == 0 &&
           aligned(16, arrays, {});
}

// A thread has V entries from d on of head h: of its query, its key and its value.
template <typename T, int V>
__global__ void expand_kernel(T *qkv, const T *q, const T *kv, const T *keys, latent_shape s)
{
    grid_begin();
    int dim = s.nope + s.rope, i = (blockIdx.y * THREADS + threadIdx.x) * V, n = s.n_heads * dim;
    if (i >= n) return;
    typedef pack<T, V> unit;
    int h = i / dim, d = i % dim;
    int64_t row = blockIdx.x;
    const T *from = kv + (row * s.n_heads + h) * (s.nope + s.value);
    const T *key = d < s.nope ? from + d : keys + row * (s.rank + s.rope) + s.rank + d - s.nope;
    T *to = qkv + 3 * row * n + i;
    unit value = {};
    if (d < s.value) value = *(const unit *)(from + s.nope + d);
    *(unit *)to = *(const unit *)(q + row * n + i);
    *(unit *)(to + n) = *(const unit *)key;
    *(unit *)(to + 2 * n) = value;
}

void cuda_latent_expand(struct device *dev, void *qkv, const void *q, const void *kv,
                        const void *keys, const struct latent_shape *s)
{
    if (s->rows <= 0) return;
    with_bf16_wide(s->dt, in_units(s, {qkv, q, kv, keys}), [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        cuda_launch(dev, "latent attention's expanded form", expand_kernel<T, V>,
                    dim3(s->rows, ceil_div(s->n_heads * (s->nope + s->rope), THREADS * V)), THREADS,
                    0, (T *)qkv, (const T *)q, (const T *)kv, (const T *)keys, *s);
    });
}

// The same, and behind these threads those of the rotated entries, which add up the heads' in
// order.
template <typename T, int V>
__global__ void expand_back_kernel(T *dq, T *dkv, T *dkeys, const T *dqkv, latent_shape s)
{
    grid_begin();
    int dim = s.nope + s.rope, i = (blockIdx.y * THREADS + threadIdx.x) * V, n = s.n_heads * dim;
    typedef pack<T, V> unit;
    int64_t row = blockIdx.x;
    const T *from = dqkv + 3 * row * n;
    if (i < n) {
        int h = i / dim, d = i % dim;
        T *to = dkv + (row * s.n_heads + h) * (s.nope + s.value);
        *(unit *)(dq + row * n + i) = *(const unit *)(from + i);
        if (d < s.nope) *(unit *)(to + d) = *(const unit *)(from + n + i);
        if (d < s.value) *(unit *)(to + s.nope + d) = *(const unit *)(from + 2 * n + i);
        return;
    }
    int d = i - n;
    if (d >= s.rope) return;
    float sum[V] = {};
    for (int h = 0; h < s.n_heads; h++) {
        float x[V];
        load<T, V>(x, from + n + h * dim + s.nope + d);
#pragma unroll
        for (int k = 0; k < V; k++) sum[k] += x[k];
    }
    store<T, V>(dkeys + row * (s.rank + s.rope) + s.rank + d, sum);
}

void cuda_latent_expand_back(struct device *dev, void *dq, void *dkv, void *dkeys, const void *dqkv,
                             const struct latent_shape *s)
{
    if (s->rows <= 0) return;
    with_bf16_wide(s->dt, in_units(s, {dq, dkv, dkeys, dqkv}), [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        int units = s->n_heads * (s->nope + s->rope) + s->rope;
        cuda_launch(dev, "latent attention's gradient", expand_back_kernel<T, V>,
                    dim3(s->rows, ceil_div(units, THREADS * V)), THREADS, 0, (T *)dq, (T *)dkv,
                    (T *)dkeys, (const T *)dqkv, *s);
    });
}
