/* latent.cu: what latent attention needs beside attention (ops.h, struct latent_shape): queries
 * into the absorbed form and its results out of it, and the layout of the expanded form.
 *
 * The two products are of all heads in one launch. In bf16 few rows take narrow tiles, all of whose
 * weights are on their way at once, as reading these is all the work; more take larger ones, up to
 * 128 x 128. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/matmul/tile.cuh"

#define THREADS  256
#define FEW_ROWS 64

// Of each head: C (rows, cols) = A (rows, depth) B, of which entry (k, c) is at b[k * b_depth + c *
// b_col]. An entry is one sum in the order of the inner dimension, whatever the number of rows: a
// row has the same bits in decoding and in training.
template <typename T> struct heads_product {
    T *c;
    const T *a, *b;
    int n_heads, rows, cols, depth;
    bool early; // B (ops.h, Order)
    int64_t a_row, a_head, b_head, c_row, c_head, b_depth, b_col;
    // What of the absorbed form is there already: behind a row's `depth` and `cols` entries of a
    // head the rotated ones, to be copied, and behind all heads the row's key, c_head wide.
    int rotated;
    const T *keys; // NULL: nothing of this
};

// Copies n rows of `width` elements, which lie so many apart.
template <typename T, int V>
INLINE void copy_entries(T *to, int64_t to_row, const T *from, int64_t from_row, int n, int width)
{
    typedef pack<T, V> unit;
    const int units = width / V;
#pragma unroll 4
    for (int i = threadIdx.x; i < n * units; i += blockDim.x) {
        int r = i / units, u = i % units * V;
        *(unit *)(to + r * to_row + u) = *(const unit *)(from + r * from_row + u);
    }
}

// A head's rotated entries of some rows, and the keys of the head's share of them.
template <typename T, int V> INLINE void copy_rotated(const heads_product<T> &p, int row0, int rows)
{
    rows = min(rows, p.rows - row0);
    copy_entries<T, V>(p.c + row0 * p.c_row + blockIdx.z * p.c_head + p.cols, p.c_row,
                       p.a + row0 * p.a_row + blockIdx.z * p.a_head + p.depth, p.a_row, rows,
                       p.rotated);
    int n = (rows + p.n_heads - 1) / p.n_heads, first = row0 + blockIdx.z * n;
    copy_entries<T, V>(p.c + first * p.c_row + p.n_heads * p.c_head, p.c_row,
                       p.keys + first * p.c_head, p.c_head, min(n, row0 + rows - first),
                       (int)p.c_head);
}

template <typename TILE, typename T, int V> INLINE void multiply_heads(const heads_product<T> &p)
{
    const int row0 = blockIdx.x * TILE::rows, col0 = blockIdx.y * TILE::cols;
    const tile_operand<T> l = {p.a + blockIdx.z * p.a_head + row0 * p.a_row, p.a_row,
                               p.rows - row0};
    const tile_operand<T> r = {p.b + blockIdx.z * p.b_head + col0 * p.b_col,
                               TILE::r_across ? p.b_depth : p.b_col, p.cols - col0};
    const bool early = p.early && col0 < p.cols;
    if (early) TILE::begin_right(r, p.depth);
    grid_begin();
    if (col0 >= p.cols) return copy_rotated<T, V>(p, row0, TILE::rows);
    typename TILE::sums sum = {};
    TILE::multiply(sum, l, r, p.depth, early);
    TILE::store_tile(p.c + blockIdx.z * p.c_head + row0 * p.c_row + col0, p.c_row, sum, l.n, r.n);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define TAKES_MMA false // mma_takes(): so nothing is compiled of it
#else
#define TAKES_MMA true
#endif

// V: elements that are copied at once.
template <typename TILE, typename T, int V>
__global__ void __launch_bounds__(TILE::threads, TILE::blocks) heads_kernel(heads_product<T> p)
{
    if constexpr (TAKES_MMA || !TILE::in_pairs) multiply_heads<TILE, T, V>(p);
}

template <typename TILE> static dim3 tiles_of(int rows, int cols, int heads)
{
    return dim3(ceil_div(rows, TILE::rows), ceil_div(cols, TILE::cols), heads);
}

template <typename TILE, typename T, int V>
static void launch(struct device *dev, const heads_product<T> &p)
{
    dim3 grid = tiles_of<TILE>(p.rows, p.cols, p.n_heads);
    grid.y += p.keys != NULL;
    cuda_launch(dev, "latent attention's heads", heads_kernel<TILE, T, V>, grid, TILE::threads,
                TILE::shared, p);
}

// A call of latent_matmul.
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

// Whether all that is copied comes in 16 bytes.
static bool mma_takes(struct device *dev, const latent_call &c)
{
    if (!on_hopper(dev) || c.shape->dt != DT_BF16) return false;
    const heads_product<bf16> p = product_of<bf16>(c);
    return p.cols % 8 == 0 && p.depth % 8 == 0 && p.rotated % 8 == 0 &&
           aligned(16, {p.a, p.b, p.c, p.keys},
                   {p.a_row * 2, p.a_head * 2, p.b_head * 2, p.c_row * 2, p.c_head * 2,
                    (p.b_col == 1 ? p.b_depth : p.b_col) * 2});
}

// ACROSS: the inner dimension is B's rows.
template <bool ACROSS> static void multiply(struct device *dev, const heads_product<bf16> &p)
{
    using few = mma_tile<16, 64, 1, 4, 64, 8, false, ACROSS>;
    using some = mma_tile<64, 64, 2, 2, 64, 4, false, ACROSS>;
    using many = mma_tile<128, 128, 2, 4, 64, 3, false, ACROSS>;
    const dim3 large = tiles_of<many>(p.rows, p.cols, p.n_heads);
    if (p.rows <= FEW_ROWS)
        launch<few, bf16, 8>(dev, p);
    else if ((int64_t)large.x * large.y * large.z <= 2 * cuda_use(dev)->n_sms)
        launch<some, bf16, 8>(dev, p);
    else
        launch<many, bf16, 8>(dev, p);
}

static void mma_launch(struct device *dev, const latent_call &c)
{
    const heads_product<bf16> p = product_of<bf16>(c);
    (p.b_col == 1 ? multiply<true> : multiply<false>)(dev, p);
}

static void plain(struct device *dev, const latent_call &c)
{
    with_type(c.shape->dt, [&](auto t) {
        using T = decltype(t);
        const heads_product<T> p = product_of<T>(c);
        (p.b_col == 1 ? launch<plain_tile<false, true>, T, 1>
                      : launch<plain_tile<false, false>, T, 1>)(dev, p);
    });
}

static const op_variant rows[] = {
    variant<latent_call, mma_takes, mma_launch>("mma", "bf16 on 9.0, widths are multiples of 8"),
    variant<latent_call, otherwise, plain>("plain", "all else: f32, odd widths, 8.x"),
};
const struct op_variants latent_matmul_variants = {OP_latent_matmul, 2, rows};

void cuda_latent_matmul(struct device *dev, void *to, const void *from, const void *keys,
                        const void *w, const struct latent_shape *s)
{
    latent_shape shape = *s;
    if (shape.rows <= 0) return;
    const wide_weights wide(dev, w, shape.scales, shape.n_heads * (shape.nope + shape.value),
                            shape.rank, shape.dt);
    shape.early = shape.early && !shape.scales;
    const latent_call call = {to, from, keys, wide.w, &shape};
    if (wide.w) op_take_variant(dev, &latent_matmul_variants, &call);
}

// A thread has V entries from d on of head h: of its query, its key and its value. Of the gradient
// (BACK) there are behind these the threads of the rotated entries, which add up the heads' in
// order.
template <typename T, int V, bool BACK>
__global__ void expand_kernel(T *qkv, T *q, T *kv, T *keys, latent_shape s)
{
    grid_begin();
    const int dim = s.nope + s.rope, wide = max(dim, s.value);
    const int i = (blockIdx.y * THREADS + threadIdx.x) * V, n = s.n_heads * wide;
    typedef pack<T, V> unit;
    const int64_t row = blockIdx.x;
    T *expanded = qkv + 3 * row * n, *rotated = keys + row * (s.rank + s.rope) + s.rank;
    if (i >= n) {
        const int d = i - n;
        if (!BACK || d >= s.rope) return;
        float sum[V] = {};
        for (int h = 0; h < s.n_heads; h++) {
            float x[V];
            load<T, V>(x, expanded + n + h * wide + s.nope + d);
            unrolled<V>([&](int k) { sum[k] += x[k]; });
        }
        return store<T, V>(rotated + d, sum);
    }
    const int h = i / wide, d = i % wide;
    const int64_t head = row * s.n_heads + h;
    T *pair = kv + head * (s.nope + s.value), *of_q = q + head * dim + d;
    // other: NULL: there are zeros, of which nothing comes back
    auto copy = [&](T *to, T *other) {
        if (!BACK)
            *(unit *)to = other ? *(const unit *)other : unit();
        else if (other)
            *(unit *)other = *(const unit *)to;
    };
    T *of_key = d < s.nope ? pair + d : !BACK && d < dim ? rotated + d - s.nope : NULL;
    copy(expanded + i, d < dim ? of_q : NULL);
    copy(expanded + n + i, of_key);
    copy(expanded + 2 * n + i, d < s.value ? pair + s.nope + d : NULL);
}

void cuda_latent_expand(struct device *dev, void *qkv, void *q, void *kv, void *keys,
                        const struct latent_shape *s, bool back)
{
    if (s->rows <= 0) return;
    const int n = 16 / (int)dtype_size(s->dt); // elements that may be taken at a time
    const bool in_units = s->nope % n == 0 && s->rope % n == 0 && s->value % n == 0 &&
                          s->rank % n == 0 && aligned(16, {qkv, q, kv, keys}, {});
    const int width =
        s->n_heads * latent_expanded_dim(s->nope, s->rope, s->value) + (back ? s->rope : 0);
    with_type_wide(s->dt, in_units, [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        cuda_launch(dev, "latent attention's expanded form",
                    back ? expand_kernel<T, V, true> : expand_kernel<T, V, false>,
                    dim3(s->rows, ceil_div(width, THREADS * V)), THREADS, 0, qkv, q, kv, keys, *s);
    });
}
