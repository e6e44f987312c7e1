/* attn_tensor.cu: attention of many rows in bf16 on the tensor cores, forward and gradient, after
 * FlashAttention-2 (Dao 2023) with mma m16n8k16, where attn_wgmma.cu does not have it: on other
 * GPUs than Hopper, the gradient of heads wider than 192, and that of a soft cap.
 *
 * Forward and dq: a block has 64 packed rows (attention.cuh), 16 a warp, and walks the keys in
 * tiles; scores stay in registers, where the layout of an mma result is that of the next one's left
 * operand. The forward pass keeps the order of attn_order.cuh. dk and dv: a block has 64 keys, 16 a
 * warp, and walks the packed rows that attend to them, computing the scores transposed, so that
 * again nothing goes through shared memory. Scores are computed twice in the gradient; in return no
 * sum is shared between blocks and the order of every sum is fixed.
 *
 * Tiles lie in shared memory with 8 elements of padding a row, which keeps ldmatrix free of bank
 * conflicts, and are filled with 16-byte cp.async; what is out of range is filled with zeros. HD is
 * head_dim rounded up to 64, 128 or 256, in the gradient also to 192.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention/attn_rows.cuh"

#define THREADS 128
#define ROWS    64 // rows (or keys, for dk and dv) of a block
#define PAD     8

// Blocks that registers are kept few enough for: loads of one run under the sums of the others.
template <int HD> constexpr int blocks_per_sm = HD <= 64 ? 4 : HD <= 128 ? 3 : 2;

// ---- pieces ------------------------------------------------------------------------------------

// Starts copying N rows into a tile (N, HD + PAD). place(r, at) sets at to the offset of row r in
// `from` and gives whether there is one; zeros where there is none.
template <int HD, int N, typename F>
INLINE void copy_tile(bf16 *tile, int dims, const bf16 *from, F place)
{
    constexpr int PER_ROW = HD / 8, STEP = THREADS / PER_ROW;
    int d = threadIdx.x % PER_ROW * 8;
    if (THREADS % PER_ROW && threadIdx.x >= STEP * PER_ROW) return;
#pragma unroll
    for (int r = threadIdx.x / PER_ROW; r < N; r += STEP) {
        int64_t at = 0;
        bool valid = place(r, at) && d < dims;
        copy16(tile + r * (HD + PAD) + d, from + (valid ? at + d : 0), valid);
    }
}

// acc (16 x N) = left rows of `a` at row 16 * warp times rows of `b` transposed: scores
template <int HD, int N>
INLINE void product_rows(float (&acc)[N / 8][4], const bf16 *a, const bf16 *b)
{
    int warp = threadIdx.x / 32;
    unrolled<N / 8, 4>([&](int i, int e) { acc[i][e] = 0; });
#pragma unroll
    for (int d = 0; d < HD; d += 16) {
        uint32_t x[4];
        load_left<HD + PAD>(x, a, warp * 16, d);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            uint32_t y[4];
            load_right<HD + PAD>(y, b, n, d);
            mma(acc[n / 8], x, y[0], y[1]);
            mma(acc[n / 8 + 1], x, y[2], y[3]);
        }
    }
}

// dp *= slope of the soft cap at the scores
template <int N>
INLINE void times_slope(const attn_args<bf16> &a, float (&dp)[N / 8][4],
                        const float (&score)[N / 8][4])
{
    if (a.softcap > 0)
        unrolled<N / 8, 4>([&](int i, int e) { dp[i][e] *= softcap_slope(a, score[i][e]); });
}

// out (16 x HD) += w (16 x N, as mma results) times the tile b (N x HD)
template <int HD, int N>
INLINE void add_weighted(float (&out)[HD / 8][4], const float (&w)[N / 8][4], const bf16 *b)
{
#pragma unroll
    for (int n = 0; n < N; n += 16) {
        uint32_t x[4];
        as_left<N>(x, w, n);
#pragma unroll
        for (int d = 0; d < HD; d += 16) {
            uint32_t y[4];
            load_right_across<HD + PAD>(y, b, n, d);
            mma(out[d / 8], x, y[0], y[1]);
            mma(out[d / 8 + 1], x, y[2], y[3]);
        }
    }
}

// ---- forward -----------------------------------------------------------------------------------

template <int HD> constexpr size_t forward_shared()
{
    return (ROWS + 2 * TILE_KEYS) * (HD + PAD) * sizeof(bf16);
}

// A block's tile of queries; false where it has nothing to do. The last rows see most and go first.
INLINE bool block_tile(row_tile &t, const attn_args<bf16> &a)
{
    return row_tile_of<ROWS>(t, a, blockIdx.z, blockIdx.y, gridDim.x - 1 - blockIdx.x) &&
           (a.block_size == 0 || t.rows.n > FEW_ROWS);
}

template <int HD> INLINE void copy_queries(bf16 *to, const attn_args<bf16> &a, const row_tile &t)
{
    copy_tile<HD, ROWS>(to, a.head_dim, a.q, [&](int r, int64_t &at) {
        at = query_at(a, place_of(a, t.rows, r));
        return t.rows.in(r);
    });
}

// Keys, or values, from `start` on; zeros behind the last that the tile sees.
template <int HD, int KEYS>
INLINE void copy_keys(bf16 *to, const bf16 *from, const attn_args<bf16> &a, const row_tile &t,
                      int start)
{
    copy_tile<HD, KEYS>(to, a.head_dim, from, [&](int r, int64_t &at) {
        bool seen = start + r <= t.highest;
        if (seen)
            at = any_key_row(a, t.s, start + r) * a.kv_stride + (int64_t)t.kv_head * a.head_dim;
        return seen;
    });
}

template <int HD>
__global__ void __launch_bounds__(THREADS, blocks_per_sm<HD>) forward_kernel(attn_args<bf16> a)
{
    grid_begin();
    constexpr int KEYS = TILE_KEYS;
    extern __shared__ __align__(16) bf16 tiles[];
    bf16 *queries = tiles, *keys = queries + ROWS * (HD + PAD), *values = keys + KEYS * (HD + PAD);
    int warp = threadIdx.x / 32;
    row_tile t;
    if (!block_tile(t, a)) return;
    const packed_rows &p = t.rows;
    const int first = t.low / KEYS * KEYS;
    copy_queries<HD>(queries, a, t);
    copy_keys<HD, KEYS>(keys, a.k, a, t, first);
    copies_commit();

    rows_seen seen = a.block_size > 0 ? seen_by<true>(a, t.s, p, warp * 16)
                                      : seen_by<false>(a, t.s, p, warp * 16);
    row_sums<HD> r;
    waiting_sums<HD> memory, *before = &memory;
    asm volatile("" : "+l"(before)); // in memory, whatever the compiler would rather do
    bool first_chunk = true;
    clear(r);
    for (int tile = first; tile <= t.highest; tile += KEYS) {
        if (tile % CHUNK_KEYS == 0 && tile > first) {
            join_chunk(r, before, first_chunk);
            put_aside(before, r);
            clear(r);
            first_chunk = false;
        }
        copy_keys<HD, KEYS>(values, a.v, a, t, tile);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        float w[KEYS / 8][4];
        product_rows<HD, KEYS>(w, queries, keys);
        __syncthreads(); // all are done with these keys
        if (tile + KEYS <= t.highest) copy_keys<HD, KEYS>(keys, a.k, a, t, tile + KEYS);
        copies_commit();

        bool all_visible = tile + KEYS - 1 <= t.lowest &&
                           (a.window <= 0 || tile > t.highest - a.window) && p.in(ROWS - 1);
        float factor = to_scores<KEYS>(a, w);
        if (!all_visible) hide<KEYS>(w, seen, tile, -INFINITY);
        float shrink[2];
        take_weights<KEYS>(w, r.top, shrink, factor);
        shrink_sums(r, shrink);
#pragma unroll
        for (int n = 0; n < KEYS; n += 16) {
            uint32_t x[4];
            as_left<KEYS>(x, w, n);
            add_row_sums(r.sum, x);
        }
        copies_wait<1>();
        __syncthreads();
        add_weighted<HD, KEYS>(r.out, w, values);
        __syncthreads();
    }
    copies_wait<0>();
    if (!first_chunk) join_chunk(r, before, false);
    store_result<HD>(r, a, p, warp * 16);
}

template <int HD> static void forward(struct device *dev, const attn_args<bf16> &a, int max_query)
{
    dim3 grid(ceil_div((int64_t)max_query * a.group, ROWS), a.n_kv_heads, a.n_seqs);
    cuda_launch(dev, "attention", forward_kernel<HD>, grid, THREADS, forward_shared<HD>(), a);
}

bool attn_mma_takes(struct device *, const attn_call &c)
{
    const struct attn_shape *s = c.shape;
    if (c.dt != DT_BF16 || s->latent > 0 || s->head_dim % 8 || s->head_dim > 256) return false;
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    return aligned(16, {a.q, a.k, a.v, a.out}, {a.q_stride * 2, a.kv_stride * 2});
}

void attn_mma(struct device *dev, const attn_call &c)
{
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    const auto launch = a.head_dim <= 64    ? forward<64>
                        : a.head_dim <= 128 ? forward<128>
                                            : forward<256>;
    launch(dev, a, c.batch->max_query);
}

// ---- gradient of the queries -------------------------------------------------------------------

#define KEYS_BACK 64

template <int HD> constexpr size_t dq_shared()
{
    return (2 * ROWS + 2 * KEYS_BACK) * (HD + PAD) * sizeof(bf16);
}

template <int HD>
__global__ void __launch_bounds__(THREADS, blocks_per_sm<HD>)
    dq_kernel(attn_args<bf16> a, bf16 *dqkv, const bf16 *dout, const float *delta)
{
    grid_begin();
    constexpr int KEYS = KEYS_BACK;
    extern __shared__ __align__(16) bf16 tiles[];
    bf16 *queries = tiles, *grads = queries + ROWS * (HD + PAD);
    bf16 *keys = grads + ROWS * (HD + PAD), *values = keys + KEYS * (HD + PAD);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row_tile t;
    if (!block_tile(t, a)) return;
    const packed_rows &p = t.rows;
    const int first = t.low / KEYS * KEYS;
    auto copy = [&](bf16 *tile, const bf16 *from, int start) {
        copy_keys<HD, KEYS>(tile, from, a, t, start);
        copies_commit();
    };
    copy_queries<HD>(queries, a, t);
    copy_tile<HD, ROWS>(grads, a.head_dim, dout, [&](int r, int64_t &at) {
        at = index_of(a, place_of(a, p, r)) * a.head_dim;
        return p.in(r);
    });
    copy(keys, a.k, first);
    copy(values, a.v, first);

    rows_seen seen = seen_by<false>(a, t.s, p, warp * 16);
    float lse[2], inner[2], dq[HD / 8][4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int r = warp * 16 + lane / 4 + h * 8;
        bool in = p.in(r);
        int64_t at = index_of(a, place_of(a, p, r));
        lse[h] = in ? a.lse[at] * LOG2E : 0.f;
        inner[h] = in ? delta[at] : 0.f;
    }
    for (int tile = first; tile <= t.highest; tile += KEYS) {
        copies_wait<0>();
        __syncthreads();
        float w[KEYS / 8][4], dp[KEYS / 8][4];
        product_rows<HD, KEYS>(w, queries, keys);
        product_rows<HD, KEYS>(dp, grads, values);
        __syncthreads(); // all are done with these values
        if (tile + KEYS <= t.highest) copy(values, a.v, tile + KEYS);
        bool all_visible = tile + KEYS - 1 <= t.lowest &&
                           (a.window <= 0 || tile > t.highest - a.window) && p.in(ROWS - 1);
        float scale = to_scores<KEYS>(a, w);
        unrolled<KEYS / 8, 4>([&](int i, int e) { dp[i][e] -= inner[e / 2]; });
        times_slope<KEYS>(a, dp, w);
        unrolled<KEYS / 8, 4>(
            [&](int i, int e) { w[i][e] = exp2_fast(w[i][e] * scale - lse[e / 2]) * dp[i][e]; });
        if (!all_visible) hide<KEYS>(w, seen, tile, 0.f);
        add_weighted<HD, KEYS>(dq, w, keys);
        __syncthreads();
        if (tile + KEYS <= t.highest) copy(keys, a.k, tile + KEYS);
    }
    copies_wait<0>();
    scale_rows<HD>(dq, a.scale);
    store_rows<HD>(dq, a.head_dim, [&](int r) -> bf16 * {
        r += warp * 16;
        return p.in(r) ? dqkv + query_at(a, place_of(a, p, r)) : NULL;
    });
}

// ---- gradient of the keys and values -----------------------------------------------------------

template <int HD, int N> constexpr size_t dkv_shared()
{
    return (2 * ROWS + 4 * N) * (HD + PAD) * sizeof(bf16);
}

// Of a packed row, for the columns of the transposed scores.
struct row_info {
    float lse, inner; // log2 units; dout . out
    int row, hidden;  // keys at positions up to hidden are outside its window
};

// Of wide heads the sums of one gradient are all that a thread has registers for.
enum dkv_kind { BOTH, OF_KEYS, OF_VALUES };

/* Block (x, y, z): keys of the batch's rows 64 x .. of kv head y, against N packed rows at a time,
 * every gridDim.z-th tile of them from the z-th on. Where gridDim.z is 1 the sums are the
 * gradients; else they are parts (z, T, n_kv_heads, dk then dv, head_dim) f32 for join_kernel: one
 * block would take twice the average time for the first keys of a sequence, which most rows attend
 * to. */
template <int HD, int N, dkv_kind KIND>
__global__ void __launch_bounds__(THREADS)
    dkv_kernel(attn_args<bf16> a, bf16 *dqkv, float *parts, const bf16 *dout, const float *delta)
{
    grid_begin();
    constexpr int TILE = N * (HD + PAD);
    extern __shared__ __align__(16) bf16 tiles[];
    __shared__ int stops[ROWS / 32], min_ends[ROWS / 32];
    __shared__ __align__(16) row_info info[2][N];
    bf16 *keys = tiles, *values = keys + ROWS * (HD + PAD);
    bf16 *queries = values + ROWS * (HD + PAD), *grads = queries + 2 * TILE; // two of each, in turn
    int kv_head = blockIdx.y, base = blockIdx.x * ROWS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (warp < ROWS / 32) {
        int row = base + warp * 32 + lane;
        int stop = row < a.n_tokens ? a.attend_end[a.seq_of[row]] : 0, least = stop;
#pragma unroll
        for (int o = 16; o; o >>= 1) {
            stop = max(stop, __shfl_xor_sync(~0u, stop, o));
            least = min(least, __shfl_xor_sync(~0u, least, o));
        }
        if (lane == 0) {
            stops[warp] = stop;
            min_ends[warp] = least;
        }
    }
    int key[2], end[2], position[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        key[h] = base + warp * 16 + lane / 4 + h * 8;
        int s = key[h] < a.n_tokens ? a.seq_of[key[h]] : 0;
        end[h] = key[h] < a.n_tokens ? a.attend_end[s] : 0;
        position[h] = row_position<false>(a, s, key[h]);
    }
    __syncthreads();
    int stop = stops[0], min_end = min_ends[0];
#pragma unroll
    for (int i = 1; i < ROWS / 32; i++) {
        stop = max(stop, stops[i]);
        min_end = min(min_end, min_ends[i]);
    }
    packed_rows p = {base, 0, (stop - base) * a.group, kv_head * a.group};

    auto key_of = [&](int r, int64_t &at) {
        at = (base + r) * a.kv_stride + (int64_t)kv_head * a.head_dim;
        return base + r < a.n_tokens;
    };
    auto copy_rows = [&](int tile, int turn) {
        p.base = tile;
        copy_tile<HD, N>(queries + turn * TILE, a.head_dim, a.q, [&](int r, int64_t &at) {
            at = query_at(a, place_of(a, p, r));
            return p.in(r);
        });
        copy_tile<HD, N>(grads + turn * TILE, a.head_dim, dout, [&](int r, int64_t &at) {
            at = index_of(a, place_of(a, p, r)) * a.head_dim;
            return p.in(r);
        });
        if (threadIdx.x < N) {
            place at = place_of(a, p, threadIdx.x);
            row_info f = {0, 0, -1, -1}; // a row before every key sees none
            if (p.in(threadIdx.x)) {
                f.lse = a.lse[index_of(a, at)] * LOG2E;
                f.inner = delta[index_of(a, at)];
                f.row = at.row;
                if (a.window > 0)
                    f.hidden = row_position<false>(a, a.seq_of[at.row], at.row) - a.window;
            }
            info[turn][threadIdx.x] = f;
        }
    };
    int first = blockIdx.z * N, step = gridDim.z * N;
    copy_tile<HD, ROWS>(keys, a.head_dim, a.k, key_of);
    if (KIND != OF_VALUES) copy_tile<HD, ROWS>(values, a.head_dim, a.v, key_of);
    if (first < p.n) copy_rows(first, 0);
    copies_commit();

    float dk[HD / 8][4] = {}, dv[HD / 8][4] = {}; // of what KIND leaves out nothing is computed
    int turn = 0;
    for (int tile = first; tile < p.n; tile += step, turn ^= 1) {
        if (tile + step < p.n) copy_rows(tile + step, turn ^ 1);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        float w[N / 8][4], ds[N / 8][4] = {}; // keys x rows
        product_rows<HD, N>(w, keys, queries + turn * TILE);
        if (KIND != OF_VALUES) product_rows<HD, N>(ds, values, grads + turn * TILE);
        float scale = to_scores<N>(a, w);
        // every key of the block is seen by every row of the tile
        bool all_seen = a.window <= 0 && info[turn][0].row >= base + ROWS - 1 &&
                        info[turn][N - 1].row >= 0 && info[turn][N - 1].row < min_end;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                row_info f = info[turn][i * 8 + lane % 4 * 2 + c];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float &score = w[i][h * 2 + c], &d = ds[i][h * 2 + c];
                    d -= f.inner;
                    if (a.softcap > 0) d *= softcap_slope(a, score);
                    score = exp2_fast(score * scale - f.lse);
                    if (!all_seen && (key[h] > f.row || f.row >= end[h] || position[h] <= f.hidden))
                        score = 0.f;
                    d *= score;
                }
            }
        if (KIND != OF_KEYS) add_weighted<HD, N>(dv, w, grads + turn * TILE);
        if (KIND != OF_VALUES) add_weighted<HD, N>(dk, ds, queries + turn * TILE);
        __syncthreads();
    }
    copies_wait<0>();
    scale_rows<HD>(dk, a.scale);
    if (gridDim.z == 1) {
        auto to = [&](int r, int head) -> bf16 * {
            r += base + warp * 16;
            return r < a.n_tokens ? dqkv + r * a.q_stride + (int64_t)head * a.head_dim : NULL;
        };
        if (KIND != OF_VALUES)
            store_rows<HD>(dk, a.head_dim, [&](int r) { return to(r, a.n_heads + kv_head); });
        if (KIND != OF_KEYS)
            store_rows<HD>(dv, a.head_dim,
                           [&](int r) { return to(r, a.n_heads + a.n_kv_heads + kv_head); });
        return;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (key[h] >= a.n_tokens) continue;
        float *to = parts + (((int64_t)blockIdx.z * a.n_tokens + key[h]) * a.n_kv_heads + kv_head) *
                                2 * a.head_dim;
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            int d = i * 8 + lane % 4 * 2;
            if (d >= a.head_dim) continue;
            if (KIND != OF_VALUES)
                *(float2 *)(to + d) = make_float2(dk[i][h * 2], dk[i][h * 2 + 1]);
            if (KIND != OF_KEYS)
                *(float2 *)(to + a.head_dim + d) = make_float2(dv[i][h * 2], dv[i][h * 2 + 1]);
        }
    }
}

// Adds n parts of dk and dv, four elements a thread.
__global__ void join_kernel(attn_args<bf16> a, bf16 *dqkv, const float *parts, int n)
{
    grid_begin();
    int width = a.n_kv_heads * 2 * a.head_dim, c = (blockIdx.y * THREADS + threadIdx.x) * 4;
    if (c >= width) return;
    float sum[4] = {};
    for (int z = 0; z < n; z++) {
        float x[4];
        load<float, 4>(x, parts + ((int64_t)z * a.n_tokens + blockIdx.x) * width + c);
        unrolled<4>([&](int i) { sum[i] += x[i]; });
    }
    int kv_head = c / (2 * a.head_dim), d = c % (2 * a.head_dim), is_v = d >= a.head_dim;
    int64_t head = a.n_heads + is_v * a.n_kv_heads + kv_head;
    store<bf16, 4>(dqkv + blockIdx.x * a.q_stride + head * a.head_dim + d - is_v * a.head_dim, sum);
}

template <int HD, int N> static void back(struct device *dev, const attn_call &c)
{
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    bf16 *dqkv = (bf16 *)c.dqkv;
    const bf16 *dout = (const bf16 *)c.dout;
    const float *delta = c.delta;
    dim3 grid(ceil_div((int64_t)c.batch->max_query * a.group, ROWS), a.n_kv_heads, a.n_seqs);
    cuda_launch(dev, "attention gradient", dq_kernel<HD>, grid, THREADS, dq_shared<HD>(), a, dqkv,
                dout, delta);
    auto launch = [&](auto kernel) {
        cuda_launch(dev, "attention gradient", kernel,
                    dim3(ceil_div(a.n_tokens, ROWS), a.n_kv_heads, c.n_parts), THREADS,
                    dkv_shared<HD, N>(), a, dqkv, c.parts, dout, delta);
    };
    if constexpr (HD <= 128) {
        launch(dkv_kernel<HD, N, BOTH>);
    } else {
        launch(dkv_kernel<HD, N, OF_KEYS>);
        launch(dkv_kernel<HD, N, OF_VALUES>);
    }
    if (c.n_parts > 1)
        cuda_launch(dev, "attention gradient", join_kernel,
                    dim3(a.n_tokens, ceil_div(a.n_kv_heads * 2 * a.head_dim, THREADS * 4)), THREADS,
                    0, a, dqkv, c.parts, c.n_parts);
}

int attn_parts(struct device *dev, int n_tokens, int n_kv_heads)
{
    struct cuda_state *state = cuda_use(dev);
    int blocks = ceil_div(n_tokens, ROWS) * n_kv_heads, sms = state->n_sms;
    // workspace is the price; attn_wgmma.cu needs that of one
    int few = state->major == 9 ? 3 * sms : sms;
    return blocks >= 6 * sms ? 1 : blocks >= few ? 2 : 4;
}

int64_t attn_parts_rows(struct device *dev, int n_tokens, int n_kv_heads)
{
    int64_t most = 0;
    for (int n = n_tokens; n > 0; n = (n - 1) / ROWS * ROWS) { // whole blocks, and the last
        int64_t rows = attn_parts(dev, n, n_kv_heads) * attn_part_rows(n);
        if (rows > most) most = rows;
    }
    return most;
}

bool attn_mma_back_takes(struct device *dev, const attn_call &c)
{
    const int dims = c.shape->head_dim;
    const size_t shared = dims <= 128 ? 0 : dims <= 192 ? dq_shared<192>() : dq_shared<256>();
    return attn_mma_takes(dev, c) && aligned(16, {c.dqkv, c.dout}, {}) &&
           shared <= (size_t)cuda_use(dev)->max_shared;
}

void attn_mma_back(struct device *dev, const attn_call &c)
{
    const int dims = c.shape->head_dim;
    const auto launch = dims <= 64    ? back<64, 64>
                        : dims <= 128 ? back<128, 32>
                        : dims <= 192 ? back<192, 32>
                                      : back<256, 16>;
    launch(dev, c);
}
