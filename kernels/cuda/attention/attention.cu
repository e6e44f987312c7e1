/* attention.cu: the attention entries of the table, and the general kernels behind them: any
 * head_dim up to 512, f32 and bf16, sums in f32 on the ordinary units. The tables say what goes to
 * attn_few.cu, attn_few_tma.cu, attn_wgmma.cu, attn_tensor.cu and attn_latent.cu instead.
 *
 * Forward and dq: a block has 32 packed rows (attention.cuh), four a warp, and walks the keys in
 * tiles of 32 held in shared memory: first a lane is a key (scores), then a lane is a dimension
 * (the weighted sum). What a forward row gives does not depend on the rows beside it: tiles lie at
 * multiples of 32, and one that a row sees nothing of changes nothing. dk and dv: a block has 32
 * keys, four a warp, and walks the packed rows that attend to them. No sum is shared between
 * blocks, so none needs atomics and the order is fixed.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention/attention.cuh"
#include <algorithm>

#define WARPS     8
#define ROWS      4 // rows (or keys) of a warp
#define TILE      (WARPS * ROWS)
#define KEYS      32  // keys (or rows) of a shared tile: a warp's lanes
#define MAX_DIMS  16  // dimensions of a lane: head_dim, or of latent attention latent, <= 512
#define WIDE_HEAD 256 // the gradient of wider heads has blocks of half as many rows

// Rows of a head into a tile with an odd stride, so that lanes on different rows hit different
// banks. number(r, d): that of row r and dimension d.
template <typename F> INLINE void load_tile(float *tile, int rows, int dims, F number)
{
    for (int i = threadIdx.x; i < rows * dims; i += blockDim.x) {
        int r = i / dims, d = i % dims;
        tile[r * (dims + 1) + d] = number(r, d);
    }
}

// Packed rows' queries into one tile, and their gradients, where there are such, into another.
template <typename T>
INLINE void load_queries(float *queries, float *grads, const attn_args<T> &a, const packed_rows &p,
                         const T *dout, int rows)
{
    load_tile(queries, rows, a.head_dim, [&](int r, int d) {
        return p.in(r) ? to_f32(a.q[query_at(a, place_of(a, p, r)) + d]) : 0.f;
    });
    if (!dout) return;
    load_tile(grads, rows, a.head_dim, [&](int r, int d) {
        return p.in(r) ? to_f32(dout[index_of(a, place_of(a, p, r)) * a.head_dim + d]) : 0.f;
    });
}

// Keys, and where they are not the same their values, of the rows (of a pool: slots) that row_of(r)
// gives, -1: zeros.
template <typename T, typename F>
INLINE void load_keys(float *keys, float *values, const attn_args<T> &a, int kv_head, int rows,
                      F row_of)
{
    auto load = [&](float *tile, int value) {
        const T *head = (value ? a.v : a.k) + (int64_t)kv_head * a.head_dim;
        load_tile(tile, rows, a.head_dim, [&](int r, int d) {
            const int64_t row = row_of(r);
            if (row < 0) return 0.f;
            if (!a.scales) return to_f32(head[row * a.kv_stride + d]);
            const uint8_t *codes = codes_of(a, (int)row, kv_head, value);
            return f32_from_e4m3(codes[e4m3_place(d, a.head_dim)]) *
                   e4m3_factor(scale_of(a, (int)row, kv_head, value));
        });
    };
    load(keys, 0);
    if (values != keys) load(values, 1);
}

// dots[i] += row i of the warp's in one tile times the lane's row of another.
INLINE void add_dots(float (&dots)[ROWS], const float *kept, const float *others, int dims)
{
    kept += threadIdx.x / 32 * ROWS * (dims + 1);
    others += threadIdx.x % 32 * (dims + 1);
    for (int d = 0; d < dims; d++) {
        const float x = others[d];
        unrolled<ROWS>([&](int i) { dots[i] = __fmaf_rn(kept[i * (dims + 1) + d], x, dots[i]); });
    }
}

// sum[i] += the lane's dimensions of a tile's first n rows, row j with the weight w[i] of lane j.
template <int DIMS>
INLINE void add_rows(float (&sum)[ROWS][DIMS], const float (&w)[ROWS], const float *tile,
                     int stride, int dims, int n)
{
    for (int j = 0; j < n; j++) {
        float w_j[ROWS];
        unrolled<ROWS>([&](int i) { w_j[i] = __shfl_sync(~0u, w[i], j); });
#pragma unroll
        for (int k = 0; k < DIMS; k++) {
            const int d = k * 32 + threadIdx.x % 32;
            if (k * 32 >= dims) break;
            const float x = d < dims ? tile[j * stride + d] : 0.f;
            unrolled<ROWS>([&](int i) { sum[i][k] = __fmaf_rn(w_j[i], x, sum[i][k]); });
        }
    }
}

// Of latent attention values are the keys' first entries.
template <typename T> __global__ void __launch_bounds__(WARPS * 32) forward_kernel(attn_args<T> a)
{
    grid_begin();
    extern __shared__ float shared[];
    const bool latent = a.latent > 0;
    const int dims = a.head_dim, stride = dims + 1, value_dims = latent ? a.latent : dims;
    float *queries = shared, *keys = queries + TILE * stride;
    float *values = latent ? keys : keys + KEYS * stride;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row_tile t;
    if (!row_tile_of<TILE>(t, a, blockIdx.z, blockIdx.y, blockIdx.x)) return;
    const packed_rows &rows = t.rows;
    load_queries<T>(queries, NULL, a, rows, NULL, TILE);
    int position[ROWS];
    float top[ROWS], sum[ROWS], out[ROWS][MAX_DIMS] = {};
    unrolled<ROWS>([&](int i) {
        const int r = warp * ROWS + i;
        position[i] = rows.in(r) ? any_row_position(a, t.s, place_of(a, rows, r).row) : -1;
        top[i] = -INFINITY;
        sum[i] = 0;
    });
    for (int tile = t.low / KEYS * KEYS; tile <= t.highest; tile += KEYS) {
        __syncthreads();
        load_keys(keys, values, a, t.kv_head, KEYS, [&](int r) -> int64_t {
            return tile + r <= t.highest ? any_key_row(a, t.s, tile + r) : -1;
        });
        __syncthreads();
        float p[ROWS] = {};
        add_dots(p, queries, keys, dims);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            float score = visible(a, position[i], tile + lane) ? score_log2(a, p[i]) : -INFINITY;
            float now = fmaxf(top[i], lanes_max(score));
            float factor = now == -INFINITY ? 1.f : exp2f(top[i] - now);
            p[i] = now == -INFINITY ? 0.f : exp2f(score - now);
            top[i] = now;
            sum[i] = __fmaf_rn(sum[i], factor, lanes_sum(p[i]));
#pragma unroll
            for (int k = 0; k < MAX_DIMS; k++) out[i][k] *= factor;
        }
        add_rows(out, p, values, stride, value_dims, min(KEYS, t.highest - tile + 1));
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (!rows.in(warp * ROWS + i)) break;
        const place to = place_of(a, rows, warp * ROWS + i);
        const int64_t at = index_of(a, to);
        sum[i] = with_sink(a, to.head, top[i], sum[i]);
        float scale = sum[i] > 0 ? 1.f / sum[i] : 0.f;
        unrolled<MAX_DIMS>([&](int k) {
            int d = k * 32 + lane;
            if (d < value_dims) a.out[at * value_dims + d] = from_f32<T>(out[i][k] * scale);
        });
        if (a.lse && lane == 0) a.lse[at] = sum[i] > 0 ? (top[i] + log2f(sum[i])) * LN2 : -INFINITY;
    }
}

static void plain(struct device *dev, const attn_call &c)
{
    with_type(c.shape->dt, [&](auto t) {
        using T = decltype(t);
        const attn_args<T> a = attn_args_of<T>(c);
        dim3 grid(ceil_div((int64_t)c.batch->max_query * a.group, TILE), a.n_kv_heads, a.n_seqs);
        size_t tiles = TILE + (a.latent > 0 ? 1 : 2) * KEYS;
        cuda_launch(dev, "attention", forward_kernel<T>, grid, WARPS * 32,
                    tiles * (a.head_dim + 1) * sizeof(float), a);
    });
}

// Whether there is such a shape, and a block of the plain kernel has the shared memory of a tile of
// queries, one of keys and, but of latent attention, one of values.
static bool shape_fits(struct device *dev, const struct attn_shape *s,
                       const struct batch_view *batch)
{
    const int values = attn_value_dim(s), tiles = TILE + (s->latent > 0 ? 1 : 2) * KEYS;
    const size_t bytes = (size_t)tiles * (s->head_dim + 1) * sizeof(float);
    const size_t most = cuda_use(dev)->max_shared;
    if (s->head_dim < 1 || s->n_heads % s->n_kv_heads || (s->latent > 0 && s->n_kv_heads != 1) ||
        batch->n_seqs > 65535)
        device_fail(dev,
                    "attention: %d query heads, %d kv heads of %d, %d sequences: query heads are "
                    "a multiple of kv heads, sequences go up to 65535",
                    s->n_heads, s->n_kv_heads, s->head_dim, batch->n_seqs);
    else if (values > 32 * MAX_DIMS || bytes > most)
        device_fail(dev,
                    "attention: keys of %d entries and values of %d take %zu bytes of shared "
                    "memory: values go up to %d, and a block of this GPU has %zu bytes",
                    s->head_dim, values, bytes, 32 * MAX_DIMS, most);
    else
        return true;
    return false;
}

// ---- variants of the forward pass ---------------------------------------------------------------

static bool few_takes(struct device *dev, const attn_call &c)
{
    const int rows = c.batch->max_query * (c.shape->n_heads / c.shape->n_kv_heads);
    return c.kv && rows <= FEW_ROWS && attn_mma_takes(dev, c);
}

static bool few_tma_takes(struct device *dev, const attn_call &c)
{
    return few_takes(dev, c) && attn_few_tma_takes(dev, c);
}

// Block (., y, z): head y / values, keys or values, of sequence z, into the block z of a pool in
// bf16, whose table this writes. A thread has 16 columns.
__global__ void __launch_bounds__(WARPS * 32)
    widen_contexts_kernel(attn_args<bf16> a, attn_args<bf16> to, int32_t *table, int values,
                          int few)
{
    grid_begin();
    const int s = blockIdx.z, head = blockIdx.y / values, value = blockIdx.y % values;
    const int rows = a.query_start[s + 1] - a.query_start[s], end = a.context_len[s];
    // of a tile that a row sees a part of, all keys: 0 times what lies there may be anything
    const int first = a.window > 0 ? max(0, end - rows - a.window) / 64 * 64 : 0;
    const int sets = (a.head_dim + 15) / 16, n = (end - first) * sets;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) table[s] = s;
    if (rows * a.group <= few) return;
    for (int i = blockIdx.x * WARPS * 32 + threadIdx.x; i < n; i += gridDim.x * WARPS * 32) {
        const int key = first + i / sets, d = i % sets * 16;
        const int slot = (int)key_row<true>(a, s, key);
        uint4 lower, upper;
        widen_row(sixteen_codes(a, slot, head, value, d), scale_of(a, slot, head, value), lower,
                  upper);
        bf16 *at = (bf16 *)(value ? to.v : to.k) +
                   ((int64_t)s * to.block_size + key) * to.kv_stride + head * a.head_dim + d;
        *(uint4 *)at = lower;
        if (d + 8 < a.head_dim) *(uint4 *)(at + 8) = upper;
    }
}

#define MAX_WIDE_BYTES ((int64_t)256 << 20) // by_turns()

void attn_widened(struct device *dev, const attn_args<bf16> &a, int few, attn_many *many)
{
    const int values = a.latent > 0 ? 1 : 2, length = (a.max_context + 63) / 64 * 64;
    const int64_t half = (int64_t)length * a.n_kv_heads * a.head_dim; // elements of a sequence
    const int64_t each = values * half * (int64_t)sizeof(bf16);
    const int64_t bytes = each + (int64_t)sizeof(int32_t); // and a table of one block
    by_turns(dev, a, a.n_seqs, bytes, MAX_WIDE_BYTES,
             [&](const attn_args<bf16> &from, void *memory) {
                 const int n = from.n_seqs;
                 bf16 *pool = (bf16 *)memory;
                 int32_t *table = (int32_t *)(pool + n * values * half);
                 attn_args<bf16> to = from;
                 to.k = pool;
                 to.v = pool + (values - 1) * n * half;
                 to.kv_stride = a.n_kv_heads * a.head_dim;
                 to.scales = NULL;
                 to.block_table = table;
                 to.table_stride = 1;
                 to.block_size = length;
                 to.block_shift = shift_of(length);
                 cuda_launch(dev, "keys and values of e4m3", widen_contexts_kernel,
                             dim3(std::min(length / 8, 128), a.n_kv_heads * values, n), WARPS * 32,
                             0, from, to, table, values, few);
                 many(dev, to);
             });
}

// What `many` leaves of a paged batch, then that.
template <attn_many *MANY> static void many(struct device *dev, const attn_call &c)
{
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    if (c.kv && a.n_seqs > 1) (attn_few_tma_takes(dev, c) ? attn_few_tma : attn_few)(dev, c);
    if (a.scales)
        attn_widened(dev, a, FEW_ROWS, MANY);
    else
        MANY(dev, a);
}

static const char for_wgmma[] = "bf16 on 9.0, heads up to 256, a multiple of 8";
static const char for_mma[] = "bf16, heads up to 256, a multiple of 8";

static const op_variant forward_rows[] = {
    variant<attn_call, attn_latent_takes, attn_latent>(
        "latent_wgmma", "latent attention in bf16 on 9.0: keys up to 576, values up to 512, "
                        "multiples of 8"),
    variant<attn_call, few_tma_takes, attn_few_tma>(
        "few_tma", "as few, on 9.0: heads of 64 or 128, blocks of 16 tokens or a multiple, a power "
                   "of 2; sequences times kv heads above half the SMs, or contexts long"),
    variant<attn_call, few_takes, attn_few>("few", "a pool, bf16, heads up to 256, a multiple of "
                                                   "8; no sequence has more than 64 packed rows"),
    variant<attn_call, attn_wgmma_takes, many<attn_wgmma>>("wgmma", for_wgmma),
    variant<attn_call, attn_mma_takes, many<attn_mma>>("mma", for_mma),
    variant<attn_call, otherwise, plain>("plain", "all else: f32, odd heads, latent on 8.x"),
};
const struct op_variants attn_variants = {OP_attn, 6, forward_rows};

void cuda_attn(struct device *dev, void *out, float *lse, const void *qkv, const struct kv_view *kv,
               int layer, const struct batch_view *batch, const struct attn_shape *shape)
{
    if (batch->n_tokens <= 0 || !shape_fits(dev, shape, batch)) return;
    const attn_call call = {batch, shape, qkv, out, lse, kv, layer};
    op_take_variant(dev, &attn_variants, &call);
}

// ---- gradient ----------------------------------------------------------------------------------

// With p the softmax and delta = dout . out:  ds_j = p_j (dout . v_j - delta) scale (times the
// slope of the soft cap);  dq += ds_j k_j,  dk_j += ds_j q,  dv_j += p_j dout.

// delta (T, n_heads): a warp for each row and head, V dimensions a lane at a time
template <typename T, int V>
__global__ void delta_kernel(float *delta, const T *dout, const T *out, int64_t n, int dims)
{
    grid_begin();
    int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (i >= n) return;
    float sum = 0;
    for (int d = threadIdx.x % 32 * V; d < dims; d += 32 * V) {
        float x[V], y[V];
        load<T, V>(x, dout + i * dims + d);
        load<T, V>(y, out + i * dims + d);
        unrolled<V>([&](int k) { sum += x[k] * y[k]; });
    }
    sum = lanes_sum(sum);
    if (threadIdx.x % 32 == 0) delta[i] = sum;
}

/* A block of N warps keeps 4 N rows and walks others, 32 at a time. Its packed rows of sequence z
 * and kv head y, against the keys that they see: dq. Or (OF_KEYS) the keys of the batch's rows
 * 4 N x .. of kv head y, against the packed rows that attend to them: dk and dv. Either way a warp
 * has four of the kept rows, first a lane is one of the others, then one of its DIMS dimensions. */
template <typename T, bool OF_KEYS, int N, int DIMS>
__global__ void __launch_bounds__(N * 32)
    gradient_kernel(attn_args<T> a, T *dqkv, const T *dout, const float *delta)
{
    grid_begin();
    extern __shared__ float shared[];
    __shared__ int stop_at;
    const int dims = a.head_dim, stride = dims + 1, kv_head = blockIdx.y;
    constexpr int KEPT = N * ROWS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, base = blockIdx.x * KEPT;
    float *kept = shared, *kept_too = kept + KEPT * stride;
    float *others = kept_too + KEPT * stride, *others_too = others + KEYS * stride;
    packed_rows p = {base, 0, 0, kv_head * a.group};
    int s = 0, first = 0, end = 0; // the others: positions of keys, or packed rows
    row_info rows[ROWS];           // of the kept, or (OF_KEYS) the first: the lane's of the others
    key_info keys[ROWS];
    if (OF_KEYS) {
        load_keys(kept, kept_too, a, kv_head, KEPT,
                  [&](int r) { return base + r < a.n_tokens ? base + r : -1; });
        const int stop = __reduce_max_sync(~0u, info_of(a, base + lane % KEPT).end);
        if (threadIdx.x == 0) stop_at = stop;
#pragma unroll
        for (int i = 0; i < ROWS; i++) keys[i] = info_of(a, base + warp * ROWS + i);
        __syncthreads();
        end = p.n = (stop_at - base) * a.group; // of the rows base .. stop_at - 1
    } else {
        row_tile t;
        if (!row_tile_of<KEPT>(t, a, blockIdx.z, kv_head, blockIdx.x)) return;
        p = t.rows;
        s = t.s;
        first = t.low / KEYS * KEYS;
        end = t.highest + 1;
        load_queries(kept, kept_too, a, p, dout, KEPT);
        unrolled<ROWS>([&](int i) { rows[i] = info_of(a, p, warp * ROWS + i, delta); });
    }
    // of the others times ds, and (OF_KEYS) of their gradients times p
    float sum[ROWS][DIMS] = {}, sum_too[ROWS][DIMS] = {};
    for (int tile = first; tile < end; tile += KEYS) {
        __syncthreads();
        if (OF_KEYS) {
            p.base = tile;
            load_queries(others, others_too, a, p, dout, KEYS);
            rows[0] = info_of(a, p, lane, delta);
        } else {
            load_keys(others, others_too, a, kv_head, KEYS, [&](int r) -> int64_t {
                return tile + r < end ? key_row<false>(a, s, tile + r) : -1;
            });
        }
        __syncthreads();
        float w[ROWS] = {}, ds[ROWS] = {};
        add_dots(w, kept, others, dims);
        add_dots(ds, kept_too, others_too, dims);
        unrolled<ROWS>([&](int i) {
            const row_info &row = rows[OF_KEYS ? 0 : i];
            const key_info &key = keys[i];
            const bool seen =
                OF_KEYS ? visible(a, row, key) : visible(a, row.position, tile + lane);
            const float score = score_log2(a, w[i]);
            w[i] = seen ? exp2f(score - row.lse) : 0.f;
            ds[i] = seen ? w[i] * (ds[i] - row.inner) * a.scale * softcap_slope(a, score) : 0.f;
        });
        const int n = min(KEYS, end - tile);
        add_rows(sum, ds, others, stride, dims, n);
        if (OF_KEYS) add_rows(sum_too, w, others_too, stride, dims, n);
    }
    p.base = base;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int r = warp * ROWS + i;
        if (OF_KEYS ? base + r >= a.n_tokens : !p.in(r)) break;
        T *to = dqkv + (OF_KEYS ? (base + r) * a.q_stride + (int64_t)(a.n_heads + kv_head) * dims
                                : query_at(a, place_of(a, p, r)));
#pragma unroll
        for (int k = 0; k < DIMS; k++) {
            const int d = k * 32 + lane;
            if (d >= dims) break;
            to[d] = from_f32<T>(sum[i][k]);
            if (OF_KEYS) to[(int64_t)a.n_kv_heads * dims + d] = from_f32<T>(sum_too[i][k]);
        }
    }
}

// Floats that a row of a part of dk and dv has; heads are rounded up as attn_wgmma.cu has
// them.
static int64_t part_width(const struct attn_shape *shape)
{
    return (int64_t)shape->n_kv_heads * 2 * ((shape->head_dim + 63) / 64 * 64);
}

size_t cuda_attn_scratch(struct device *dev, const struct attn_shape *shape, int rows,
                         enum dtype dt)
{
    if (shape->latent > 0) return 0; // a form that has no gradient
    int64_t delta = ((int64_t)rows * shape->n_heads + 63) / 64 * 64;
    int64_t part_rows = dt == DT_BF16 ? attn_parts_rows(dev, rows, shape->n_kv_heads) : 0;
    return (size_t)(delta + part_rows * part_width(shape)) * sizeof(float);
}

// Whether a block may have that much shared memory: with heads of 256, not on compute
// capability 8.6 and 8.9.
static bool shared_fits(struct device *dev, const struct attn_shape *shape, size_t bytes)
{
    struct cuda_state *state = cuda_use(dev);
    if (bytes <= (size_t)state->max_shared) return true;
    device_fail(dev,
                "attention gradient: heads of %d take %zu bytes of shared memory, and a block of "
                "this GPU has %d at most; train this model on one of compute capability 8.0 or "
                "9.0, or on the CPU",
                shape->head_dim, bytes, state->max_shared);
    return false;
}

template <int N, int DIMS> static void plain_back_of(struct device *dev, const attn_call &c)
{
    constexpr int KEPT = N * ROWS;
    const size_t tiles = 2 * (size_t)(KEPT + KEYS) * (c.shape->head_dim + 1) * sizeof(float);
    if (!shared_fits(dev, c.shape, tiles)) return;
    with_type(c.shape->dt, [&](auto t) {
        using T = decltype(t);
        const attn_args<T> a = attn_args_of<T>(c);
        auto launch = [&](auto kernel, dim3 grid) {
            cuda_launch(dev, "attention gradient", kernel, grid, N * 32, tiles, a, c.dqkv, c.dout,
                        c.delta);
        };
        launch(gradient_kernel<T, false, N, DIMS>,
               dim3(ceil_div((int64_t)c.batch->max_query * a.group, KEPT), a.n_kv_heads, a.n_seqs));
        launch(gradient_kernel<T, true, N, DIMS>, dim3(ceil_div(a.n_tokens, KEPT), a.n_kv_heads));
    });
}

static void plain_back(struct device *dev, const attn_call &c)
{
    if (c.shape->head_dim > WIDE_HEAD)
        plain_back_of<WARPS / 2, MAX_DIMS>(dev, c);
    else
        plain_back_of<WARPS, WIDE_HEAD / 32>(dev, c);
}

static const op_variant back_rows[] = {
    variant<attn_call, attn_wgmma_back_takes, attn_wgmma_back>(
        "wgmma", "bf16 on 9.0, heads up to 192, a multiple of 8, no soft cap"),
    variant<attn_call, attn_mma_back_takes, attn_mma_back>("mma", for_mma),
    variant<attn_call, otherwise, plain_back>("plain", "all else: f32, odd heads"),
};
const struct op_variants attn_back_variants = {OP_attn_back, 3, back_rows};

// ---- gradient of the sinks ---------------------------------------------------------------------

// kernels/cpu/attention.c has the formula. A block has a head, a thread every so many-th row.
#define SINK_THREADS 1024

template <typename T>
__global__ void __launch_bounds__(SINK_THREADS)
    sinks_back_kernel(float *dsinks, const float *delta, const float *lse, const T *sinks, int rows,
                      int heads)
{
    grid_begin();
    __shared__ float shared[32];
    const float sink = to_f32(sinks[blockIdx.x]);
    float sum = 0;
#pragma unroll 4
    for (int r = threadIdx.x; r < rows; r += SINK_THREADS) {
        const int64_t at = (int64_t)r * heads + blockIdx.x;
        sum -= expf(sink - lse[at]) * delta[at];
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) dsinks[blockIdx.x] += sum;
}

void cuda_attn_back(struct device *dev, void *dqkv, float *dsinks, const void *dout,
                    const void *out, const float *lse, const void *qkv,
                    const struct batch_view *batch, const struct attn_shape *shape)
{
    if (batch->n_tokens <= 0 || !shape_fits(dev, shape, batch)) return;
    const int64_t n = (int64_t)batch->n_tokens * shape->n_heads, delta_floats = (n + 63) / 64 * 64;
    attn_call call = {batch, shape, qkv, NULL, const_cast<float *>(lse)};
    call.dqkv = dqkv;
    call.dout = dout;
    if (shape->dt == DT_BF16) call.n_parts = attn_parts(dev, batch->n_tokens, shape->n_kv_heads);
    const int64_t parts = call.n_parts * attn_part_rows(batch->n_tokens) * part_width(shape);
    call.delta = (float *)cuda_workspace(dev, (delta_floats + parts) * sizeof(float));
    if (!call.delta) return;
    call.parts = call.delta + delta_floats;
    const bool in_fours =
        shape->head_dim % 4 == 0 && aligned(4 * dtype_size(shape->dt), {dout, out}, {});
    with_type(shape->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "attention gradient", in_fours ? delta_kernel<T, 4> : delta_kernel<T, 1>,
                    ceil_div(n, WARPS), WARPS * 32, 0, call.delta, dout, out, n, shape->head_dim);
    });
    op_take_variant(dev, &attn_back_variants, &call);
    if (dsinks)
        launch_typed(shape->dt, dev, "attention gradient", sinks_back_kernel, shape->n_heads,
                     SINK_THREADS, 0, dsinks, call.delta, lse, shape->sinks, batch->n_tokens,
                     shape->n_heads);
}
