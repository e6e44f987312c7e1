/* attention.cu: the attention entries of the table, and the general kernels behind them: any
 * head_dim up to 256, f32 and bf16, sums in f32 on the ordinary units. The tables say what goes to
 * attn_few.cu, attn_few_tma.cu, attn_wgmma.cu, attn_tensor.cu and attn_latent.cu instead.
 *
 * Forward and dq: a block has 32 packed rows (attention.cuh), four a warp, and walks the keys in
 * tiles of 32 held in shared memory: first a lane is a key (scores), then a lane is a dimension
 * (the weighted sum). What a forward row gives does not depend on the rows beside it: tiles lie at
 * multiples of 32, and one that a row sees nothing of changes nothing. dk and dv: a block has 32
 * keys, four a warp, and walks the packed rows that attend to them. No sum is shared between
 * blocks, so none needs atomics and the order is fixed.
 */
#include "kernels/cuda/attention/attention.cuh"

#define WARPS           8
#define ROWS            4 // rows (or keys) of a warp
#define TILE            (WARPS * ROWS)
#define KEYS            32 // keys (or rows) of a shared tile: a warp's lanes
#define MAX_DIMS        8  // dimensions of a lane: head_dim <= 256
#define MAX_LATENT_DIMS 16 // the same of latent attention: latent <= 512

// One head of 32 rows into a tile with an odd stride, so that lanes on different rows hit different
// banks.
template <typename T, typename F>
__device__ __forceinline__ void load_tile(float *tile, int dims, F row_of)
{
    for (int i = threadIdx.x; i < KEYS * dims; i += WARPS * 32) {
        int r = i / dims, d = i % dims;
        const T *row = row_of(r);
        tile[r * (dims + 1) + d] = row ? to_f32(row[d]) : 0.f;
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
    int s = blockIdx.z, kv_head = blockIdx.y, start = a.query_start[s];
    int n_packed = (a.query_start[s + 1] - start) * a.group, base = blockIdx.x * TILE;
    if (base >= n_packed) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    load_tile<T>(queries, dims, [&](int r) -> const T * {
        int p = base + r;
        if (p >= n_packed) return NULL;
        return a.q + (start + p / a.group) * a.q_stride +
               (int64_t)(kv_head * a.group + p % a.group) * dims;
    });
    int first_row = start + base / a.group;
    int last_row = start + (min(base + TILE, n_packed) - 1) / a.group;
    int lo = any_row_position(a, s, first_row), hi = any_row_position(a, s, last_row);
    lo = a.window > 0 ? max(0, lo - a.window + 1) : 0;

    int position[ROWS];
    float top[ROWS], sum[ROWS], out[ROWS][MAX_LATENT_DIMS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int p = base + warp * ROWS + i;
        position[i] = p < n_packed ? any_row_position(a, s, start + p / a.group) : -1;
        top[i] = -INFINITY;
        sum[i] = 0;
    }
    for (int tile = lo / KEYS * KEYS; tile <= hi; tile += KEYS) {
        auto row_of = [&](int r, const T *from) -> const T * {
            if (tile + r > hi) return NULL;
            return from + any_key_row(a, s, tile + r) * a.kv_stride + (int64_t)kv_head * dims;
        };
        __syncthreads();
        load_tile<T>(keys, dims, [&](int r) { return row_of(r, a.k); });
        if (!latent) load_tile<T>(values, dims, [&](int r) { return row_of(r, a.v); });
        __syncthreads();
        float p[ROWS] = {};
        for (int d = 0; d < dims; d++) {
            float k = keys[lane * stride + d];
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                p[i] = __fmaf_rn(queries[(warp * ROWS + i) * stride + d], k, p[i]);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            float score = visible(a, position[i], tile + lane) ? score_log2(a, p[i]) : -INFINITY;
            float now = fmaxf(top[i], lanes_max(score));
            float factor = now == -INFINITY ? 1.f : exp2f(top[i] - now);
            p[i] = now == -INFINITY ? 0.f : exp2f(score - now);
            top[i] = now;
            sum[i] = __fmaf_rn(sum[i], factor, lanes_sum(p[i]));
#pragma unroll
            for (int k = 0; k < MAX_LATENT_DIMS; k++) out[i][k] *= factor;
        }
        int n = min(KEYS, hi - tile + 1);
        for (int j = 0; j < n; j++) {
            float w[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) w[i] = __shfl_sync(~0u, p[i], j);
#pragma unroll
            for (int k = 0; k < MAX_LATENT_DIMS; k++) {
                if (k * 32 >= value_dims) break;
                int d = k * 32 + lane;
                float v = d < value_dims ? values[j * stride + d] : 0.f;
#pragma unroll
                for (int i = 0; i < ROWS; i++) out[i][k] = __fmaf_rn(w[i], v, out[i][k]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int p = base + warp * ROWS + i;
        if (p >= n_packed) break;
        int64_t at = (int64_t)(start + p / a.group) * a.n_heads + kv_head * a.group + p % a.group;
        sum[i] = with_sink(a, kv_head * a.group + p % a.group, top[i], sum[i]);
        float scale = sum[i] > 0 ? 1.f / sum[i] : 0.f;
#pragma unroll
        for (int k = 0; k < MAX_LATENT_DIMS; k++) {
            int d = k * 32 + lane;
            if (d < value_dims) a.out[at * value_dims + d] = from_f32<T>(out[i][k] * scale);
        }
        if (a.lse && lane == 0) a.lse[at] = sum[i] > 0 ? (top[i] + log2f(sum[i])) * LN2 : -INFINITY;
    }
}

static void plain(struct device *dev, const attn_call &c)
{
    with_type(c.dt, [&](auto t) {
        using T = decltype(t);
        const attn_args<T> a = attn_args_of<T>(c);
        dim3 grid(ceil_div((int64_t)c.batch->max_query * a.group, TILE), a.n_kv_heads, a.n_seqs);
        size_t tiles = TILE + (a.latent > 0 ? 1 : 2) * KEYS;
        cuda_launch(dev, "attention", forward_kernel<T>, grid, WARPS * 32,
                    tiles * (a.head_dim + 1) * sizeof(float), a);
    });
}

// Whether a block has the shared memory of a tile of queries and one of keys.
static bool latent_fits(struct device *dev, const struct attn_shape *s)
{
    const size_t bytes = (size_t)(TILE + KEYS) * (s->head_dim + 1) * sizeof(float);
    const size_t most = cuda_use(dev)->max_shared;
    if (s->latent <= 32 * MAX_LATENT_DIMS && s->n_kv_heads == 1 && bytes <= most) return true;
    device_fail(dev,
                "latent attention: keys of %d entries, of which %d are the value, take %zu bytes "
                "of shared memory: values go up to %d, and a block of this GPU has %zu bytes",
                s->head_dim, s->latent, bytes, 32 * MAX_LATENT_DIMS, most);
    return false;
}

static bool shape_fits(struct device *dev, const struct attn_shape *s,
                       const struct batch_view *batch)
{
    if (s->latent > 0 && batch->n_seqs <= 65535) return latent_fits(dev, s);
    if (s->head_dim >= 1 && s->head_dim <= 32 * MAX_DIMS && s->n_heads % s->n_kv_heads == 0 &&
        batch->n_seqs <= 65535)
        return true;
    device_fail(
        dev,
        "attention: %d query heads, %d kv heads of %d, %d sequences: heads go up to %d, query "
        "heads are a multiple of kv heads, sequences go up to 65535",
        s->n_heads, s->n_kv_heads, s->head_dim, batch->n_seqs, 32 * MAX_DIMS);
    return false;
}

// ---- variants of the forward pass ---------------------------------------------------------------

static bool has_many(const attn_call &c)
{
    return c.batch->max_query * (c.shape->n_heads / c.shape->n_kv_heads) > FEW_ROWS;
}

static bool few_takes(struct device *dev, const attn_call &c)
{
    return !has_many(c) && attn_mma_takes(dev, c);
}

static bool few_tma_takes(struct device *dev, const attn_call &c)
{
    return few_takes(dev, c) && attn_few_tma_takes(dev, c);
}

// What `many` leaves of a paged batch, then that.
template <void (*MANY)(struct device *, const attn_call &)>
static void mixed(struct device *dev, const attn_call &c)
{
    if (c.batch->n_seqs > 1) (attn_few_tma_takes(dev, c) ? attn_few_tma : attn_few)(dev, c);
    MANY(dev, c);
}

#define LATENT_WGMMA                                                                               \
    variant<attn_call, attn_latent_takes, attn_latent>(                                            \
        "latent_wgmma", "latent attention in bf16 on 9.0: keys up to 576, values up to 512, "      \
                        "multiples of 8")
#define PLAIN                                                                                      \
    variant<attn_call, otherwise, plain>("plain", "all else: f32, odd heads, latent on 8.x")
static const char for_wgmma[] = "bf16 on 9.0, heads up to 128, a multiple of 8";
static const char for_mma[] = "bf16, heads up to 256, a multiple of 8";

static const op_variant paged_rows[] = {
    LATENT_WGMMA,
    variant<attn_call, few_tma_takes, attn_few_tma>(
        "few_tma", "as few, on 9.0: heads of 64 or 128, blocks of 16 tokens or a multiple, a power "
                   "of 2; sequences times kv heads above half the SMs, or contexts long"),
    variant<attn_call, few_takes, attn_few>("few", "bf16, heads up to 256, a multiple of 8; no "
                                                   "sequence has more than 64 packed rows"),
    variant<attn_call, attn_wgmma_takes, mixed<attn_wgmma>>("wgmma", for_wgmma),
    variant<attn_call, attn_mma_takes, mixed<attn_mma>>("mma", for_mma),
    PLAIN,
};
static const op_variant packed_rows_[] = {
    LATENT_WGMMA,
    variant<attn_call, attn_wgmma_takes, attn_wgmma>("wgmma", for_wgmma),
    variant<attn_call, attn_mma_takes, attn_mma>("mma", for_mma),
    PLAIN,
};
const struct op_variants attn_paged_variants = {OP_attn_paged, 6, paged_rows};
const struct op_variants attn_packed_variants = {OP_attn_packed, 4, packed_rows_};

void cuda_attn_paged(struct device *dev, void *out, const void *qkv, const struct kv_view *kv,
                     int layer, const struct batch_view *batch, const struct attn_shape *shape)
{
    if (batch->n_tokens <= 0 || !shape_fits(dev, shape, batch)) return;
    const attn_call call = {kv->dt, batch, shape, qkv, out, NULL, kv, layer};
    op_take_variant(dev, &attn_paged_variants, &call);
}

void cuda_attn_packed(struct device *dev, void *out, float *lse, const void *qkv,
                      const struct batch_view *batch, const struct attn_shape *shape)
{
    if (batch->n_tokens <= 0 || !shape_fits(dev, shape, batch)) return;
    const attn_call call = {shape->dt, batch, shape, qkv, out, lse};
    op_take_variant(dev, &attn_packed_variants, &call);
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
#pragma unroll
        for (int k = 0; k < V; k++) sum += x[k] * y[k];
    }
    sum = lanes_sum(sum);
    if (threadIdx.x % 32 == 0) delta[i] = sum;
}

template <typename T>
__global__ void __launch_bounds__(WARPS * 32)
    dq_kernel(attn_args<T> a, T *dqkv, const T *dout, const float *delta)
{
    grid_begin();
    extern __shared__ float shared[];
    const int dims = a.head_dim, stride = dims + 1;
    float *queries = shared, *grads = queries + TILE * stride;
    float *keys = grads + TILE * stride, *values = keys + KEYS * stride;
    int s = blockIdx.z, kv_head = blockIdx.y, start = a.query_start[s];
    int n_packed = (a.query_start[s + 1] - start) * a.group, base = blockIdx.x * TILE;
    if (base >= n_packed) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto head_of = [&](int p) { return kv_head * a.group + p % a.group; };

    load_tile<T>(queries, dims, [&](int r) -> const T * {
        int p = base + r;
        if (p >= n_packed) return NULL;
        return a.q + (start + p / a.group) * a.q_stride + (int64_t)head_of(p) * dims;
    });
    load_tile<T>(grads, dims, [&](int r) -> const T * {
        int p = base + r;
        if (p >= n_packed) return NULL;
        return dout + ((int64_t)(start + p / a.group) * a.n_heads + head_of(p)) * dims;
    });
    int first_row = start + base / a.group;
    int last_row = start + (min(base + TILE, n_packed) - 1) / a.group;
    int lo = row_position<false>(a, s, first_row), hi = row_position<false>(a, s, last_row);
    lo = a.window > 0 ? max(0, lo - a.window + 1) : 0;

    int position[ROWS];
    float lse[ROWS], inner[ROWS], dq[ROWS][MAX_DIMS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int p = base + warp * ROWS + i;
        bool in = p < n_packed;
        int64_t at = in ? (int64_t)(start + p / a.group) * a.n_heads + head_of(p) : 0;
        position[i] = in ? row_position<false>(a, s, start + p / a.group) : -1;
        lse[i] = a.lse[at] * LOG2E;
        inner[i] = delta[at];
    }
    for (int tile = lo / KEYS * KEYS; tile <= hi; tile += KEYS) {
        auto row_of = [&](int r, const T *from) -> const T * {
            if (tile + r > hi) return NULL;
            return from + key_row<false>(a, s, tile + r) * a.kv_stride + (int64_t)kv_head * dims;
        };
        __syncthreads();
        load_tile<T>(keys, dims, [&](int r) { return row_of(r, a.k); });
        load_tile<T>(values, dims, [&](int r) { return row_of(r, a.v); });
        __syncthreads();
        float dot[ROWS] = {}, dp[ROWS] = {};
        for (int d = 0; d < dims; d++) {
            float k = keys[lane * stride + d], v = values[lane * stride + d];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                dot[i] += queries[(warp * ROWS + i) * stride + d] * k;
                dp[i] += grads[(warp * ROWS + i) * stride + d] * v;
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            float score = score_log2(a, dot[i]);
            dot[i] =
                visible(a, position[i], tile + lane)
                    ? exp2f(score - lse[i]) * (dp[i] - inner[i]) * a.scale * softcap_slope(a, score)
                    : 0.f;
        }
        int n = min(KEYS, hi - tile + 1);
        for (int j = 0; j < n; j++) {
            float ds[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) ds[i] = __shfl_sync(~0u, dot[i], j);
#pragma unroll
            for (int k = 0; k < MAX_DIMS; k++) {
                if (k * 32 >= dims) break;
                int d = k * 32 + lane;
                float key = d < dims ? keys[j * stride + d] : 0.f;
#pragma unroll
                for (int i = 0; i < ROWS; i++) dq[i][k] += ds[i] * key;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int p = base + warp * ROWS + i;
        if (p >= n_packed) break;
        T *to = dqkv + (start + p / a.group) * a.q_stride + (int64_t)head_of(p) * dims;
#pragma unroll
        for (int k = 0; k < MAX_DIMS; k++) {
            int d = k * 32 + lane;
            if (d < dims) to[d] = from_f32<T>(dq[i][k]);
        }
    }
}

// Block (x, y): keys of the batch's rows 32 x .. of kv head y.
template <typename T>
__global__ void __launch_bounds__(WARPS * 32)
    dkv_kernel(attn_args<T> a, T *dqkv, const T *dout, const float *delta)
{
    grid_begin();
    extern __shared__ float shared[];
    __shared__ int stop_at;
    const int dims = a.head_dim, stride = dims + 1;
    float *keys = shared, *values = keys + TILE * stride;
    float *queries = values + TILE * stride, *grads = queries + KEYS * stride;
    int kv_head = blockIdx.y, base = blockIdx.x * TILE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto head_of = [&](int p) { return kv_head * a.group + p % a.group; };

    auto key_at = [&](int r, const T *from) -> const T * {
        if (base + r >= a.n_tokens) return NULL;
        return from + (base + r) * a.kv_stride + (int64_t)kv_head * dims;
    };
    load_tile<T>(keys, dims, [&](int r) { return key_at(r, a.k); });
    load_tile<T>(values, dims, [&](int r) { return key_at(r, a.v); });
    if (warp == 0) {
        int row = base + lane;
        int end = row < a.n_tokens ? a.attend_end[a.seq_of[row]] : 0;
        end = __reduce_max_sync(~0u, end);
        if (lane == 0) stop_at = end;
    }
    int end[ROWS], position[ROWS];
    float dk[ROWS][MAX_DIMS] = {}, dv[ROWS][MAX_DIMS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = base + warp * ROWS + i, s = row < a.n_tokens ? a.seq_of[row] : 0;
        end[i] = row < a.n_tokens ? a.attend_end[s] : 0;
        position[i] = row_position<false>(a, s, row);
    }
    __syncthreads();
    int n_packed = (stop_at - base) * a.group; // of the rows base .. stop_at - 1
    for (int tile = 0; tile < n_packed; tile += KEYS) {
        __syncthreads();
        load_tile<T>(queries, dims, [&](int r) -> const T * {
            int p = tile + r;
            if (p >= n_packed) return NULL;
            return a.q + (base + p / a.group) * a.q_stride + (int64_t)head_of(p) * dims;
        });
        load_tile<T>(grads, dims, [&](int r) -> const T * {
            int p = tile + r;
            if (p >= n_packed) return NULL;
            return dout + ((int64_t)(base + p / a.group) * a.n_heads + head_of(p)) * dims;
        });
        __syncthreads();
        int packed = tile + lane, row = base + packed / a.group;
        bool in = packed < n_packed;
        int64_t at = in ? (int64_t)row * a.n_heads + head_of(packed) : 0;
        int seen_from = in ? row_position<false>(a, a.seq_of[row], row) : 0;
        float lse = a.lse[at] * LOG2E, inner = delta[at], p[ROWS] = {}, ds[ROWS] = {};
        for (int d = 0; d < dims; d++) {
            float q = queries[lane * stride + d], g = grads[lane * stride + d];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                p[i] += keys[(warp * ROWS + i) * stride + d] * q;
                ds[i] += values[(warp * ROWS + i) * stride + d] * g;
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int key = base + warp * ROWS + i;
            bool seen = in && key <= row && row < end[i] && visible(a, seen_from, position[i]);
            float score = score_log2(a, p[i]);
            p[i] = seen ? exp2f(score - lse) : 0.f;
            ds[i] = seen ? p[i] * (ds[i] - inner) * a.scale * softcap_slope(a, score) : 0.f;
        }
        int n = min(KEYS, n_packed - tile);
        for (int j = 0; j < n; j++) {
            float pj[ROWS], dsj[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                pj[i] = __shfl_sync(~0u, p[i], j);
                dsj[i] = __shfl_sync(~0u, ds[i], j);
            }
#pragma unroll
            for (int k = 0; k < MAX_DIMS; k++) {
                if (k * 32 >= dims) break;
                int d = k * 32 + lane;
                float q = d < dims ? queries[j * stride + d] : 0.f;
                float g = d < dims ? grads[j * stride + d] : 0.f;
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    dv[i][k] += pj[i] * g;
                    dk[i][k] += dsj[i] * q;
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = base + warp * ROWS + i;
        if (row >= a.n_tokens) break;
        T *to_k = dqkv + row * a.q_stride + (int64_t)(a.n_heads + kv_head) * dims;
        T *to_v = to_k + (int64_t)a.n_kv_heads * dims;
#pragma unroll
        for (int k = 0; k < MAX_DIMS; k++) {
            int d = k * 32 + lane;
            if (d < dims) {
                to_k[d] = from_f32<T>(dk[i][k]);
                to_v[d] = from_f32<T>(dv[i][k]);
            }
        }
    }
}

// Floats that a row of a part of dk and dv has; heads are rounded up as attn_wgmma_back.cu has
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

static void plain_back(struct device *dev, const attn_call &c)
{
    const size_t tiles = 4 * (size_t)TILE * (c.shape->head_dim + 1) * sizeof(float);
    if (!shared_fits(dev, c.shape, tiles)) return;
    with_type(c.dt, [&](auto t) {
        using T = decltype(t);
        const attn_args<T> a = attn_args_of<T>(c);
        auto launch = [&](auto kernel, dim3 grid) {
            cuda_launch(dev, "attention gradient", kernel, grid, WARPS * 32, tiles, a, (T *)c.dqkv,
                        (const T *)c.dout, (const float *)c.delta);
        };
        launch(dq_kernel<T>,
               dim3(ceil_div((int64_t)c.batch->max_query * a.group, TILE), a.n_kv_heads, a.n_seqs));
        launch(dkv_kernel<T>, dim3(ceil_div(a.n_tokens, TILE), a.n_kv_heads));
    });
}

static const op_variant back_rows[] = {
    variant<attn_call, attn_wgmma_back_takes, attn_wgmma_back>(
        "wgmma", "bf16 on 9.0, heads up to 192, a multiple of 8, no soft cap"),
    variant<attn_call, attn_mma_back_takes, attn_mma_back>("mma", for_mma),
    variant<attn_call, otherwise, plain_back>("plain", "all else: f32, odd heads"),
};
const struct op_variants attn_packed_back_variants = {OP_attn_packed_back, 3, back_rows};

void cuda_attn_packed_back(struct device *dev, void *dqkv, const void *dout, const void *out,
                           const float *lse, const void *qkv, const struct batch_view *batch,
                           const struct attn_shape *shape)
{
    if (batch->n_tokens <= 0 || !shape_fits(dev, shape, batch)) return;
    const int64_t n = (int64_t)batch->n_tokens * shape->n_heads, delta_floats = (n + 63) / 64 * 64;
    attn_call call = {shape->dt, batch, shape, qkv, NULL, const_cast<float *>(lse)};
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
                    ceil_div(n, WARPS), WARPS * 32, 0, call.delta, (const T *)dout, (const T *)out,
                    n, shape->head_dim);
    });
    op_take_variant(dev, &attn_packed_back_variants, &call);
}

// ---- gradient of the sinks ---------------------------------------------------------------------

// kernels/cpu/attention.c has the formula. A block has a head and walks the rows, one a warp; each
// sum has a fixed order.
#define SINK_WARPS 32

template <typename T>
__global__ void __launch_bounds__(SINK_WARPS * 32)
    sinks_back_kernel(float *dsinks, const T *dout, const T *out, const float *lse, const T *sinks,
                      int rows, int heads, int dim)
{
    grid_begin();
    __shared__ float sums[SINK_WARPS];
    const int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float sink = to_f32(sinks[h]);
    float sum = 0;
#pragma unroll 4
    for (int r = warp; r < rows; r += SINK_WARPS) {
        const int64_t at = (int64_t)r * heads + h;
        float inner = 0;
        for (int c = lane; c < dim; c += 32)
            inner += to_f32(dout[at * dim + c]) * to_f32(out[at * dim + c]);
        sum -= expf(sink - lse[at]) * lanes_sum(inner);
    }
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = lanes_sum(sums[lane]);
    if (lane == 0) dsinks[h] += sum;
}

void cuda_attn_sinks_back(struct device *dev, float *dsinks, const void *dout, const void *out,
                          const float *lse, int rows, const struct attn_shape *s)
{
    if (rows <= 0) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "attn_sinks_back", sinks_back_kernel<T>, s->n_heads, SINK_WARPS * 32, 0,
                    dsinks, (const T *)dout, (const T *)out, lse, (const T *)s->sinks, rows,
                    s->n_heads, s->head_dim);
    });
}
