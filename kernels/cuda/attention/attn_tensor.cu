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
#include <climits>

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

// N packed rows of p: queries, and behind them, where there are such, their gradients.
template <int HD, int N>
INLINE void copy_rows(bf16 *to, const attn_args<bf16> &a, const packed_rows &p, const bf16 *dout)
{
    copy_tile<HD, N>(to, a.head_dim, a.q, [&](int r, int64_t &at) {
        at = query_at(a, place_of(a, p, r));
        return p.in(r);
    });
    if (!dout) return;
    copy_tile<HD, N>(to + N * (HD + PAD), a.head_dim, dout, [&](int r, int64_t &at) {
        at = index_of(a, place_of(a, p, r)) * a.head_dim;
        return p.in(r);
    });
}

// Keys, or values, of the rows that row_of(r) gives; -1: zeros.
template <int HD, int N, typename F>
INLINE void copy_keys(bf16 *to, const bf16 *from, const attn_args<bf16> &a, int kv_head, F row_of)
{
    copy_tile<HD, N>(to, a.head_dim, from, [&](int r, int64_t &at) {
        const int64_t row = row_of(r);
        at = row * a.kv_stride + (int64_t)kv_head * a.head_dim;
        return row >= 0;
    });
}

// Whether every row of the tile sees all n keys from `key` on.
INLINE bool all_visible(const attn_args<bf16> &a, const row_tile &t, int key, int n)
{
    return key + n - 1 <= t.lowest && (a.window <= 0 || key > t.highest - a.window) &&
           t.rows.in(ROWS - 1);
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
    auto copy = [&](bf16 *tile, const bf16 *from, int start) {
        copy_keys<HD, KEYS>(tile, from, a, t.kv_head, [&](int r) -> int64_t {
            return start + r <= t.highest ? any_key_row(a, t.s, start + r) : -1;
        });
        copies_commit();
    };
    copy_rows<HD, ROWS>(queries, a, p, NULL);
    copy(keys, a.k, first);

    rows_seen seen = a.block_size > 0 ? seen_by<true>(a, t.s, p, warp * 16)
                                      : seen_by<false>(a, t.s, p, warp * 16);
    row_sums<HD> r;
    waiting_sums<HD> memory, *before = &memory;
    asm volatile("" : "+l"(before)); // in memory, whatever the compiler would rather do
    bool first_chunk = true;
    clear(r);
    for (int tile = first; tile <= t.highest; tile += KEYS) {
        if (tile % CHUNK_KEYS == 0 && tile > first) end_chunk(r, before, first_chunk);
        copy(values, a.v, tile);
        copies_wait<1>();
        __syncthreads();
        float w[KEYS / 8][4];
        product_rows<HD, KEYS>(w, queries, keys);
        __syncthreads();              // all are done with these keys
        copy(keys, a.k, tile + KEYS); // zeros behind the last

        float factor = to_scores<KEYS>(a, w);
        if (!all_visible(a, t, tile, KEYS)) hide<KEYS>(w, seen, tile, -INFINITY);
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

template <int HD> static void forward(struct device *dev, const attn_args<bf16> &a)
{
    dim3 grid(ceil_div((int64_t)a.max_query * a.group, ROWS), a.n_kv_heads, a.n_seqs);
    cuda_launch(dev, "attention", forward_kernel<HD>, grid, THREADS, forward_shared<HD>(), a);
}

bool attn_mma_takes(struct device *, const attn_call &c)
{
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    return a.dt == DT_BF16 && a.latent == 0 && a.head_dim % 8 == 0 && a.head_dim <= 256 &&
           aligned(16, {a.q, a.k, a.v, a.out}, {a.q_stride * 2, a.kv_stride * 2});
}

void attn_mma(struct device *dev, const attn_args<bf16> &a)
{
    (a.head_dim <= 64 ? forward<64> : a.head_dim <= 128 ? forward<128> : forward<256>)(dev, a);
}

// ---- gradient ----------------------------------------------------------------------------------

// What a block sums: dq of 64 packed rows over the keys that they see, or dk and dv of 64 keys over
// the packed rows that attend to them. Of wide heads the sums of one gradient are all that a thread
// has registers for.
enum back_kind { OF_QUERIES, OF_BOTH, OF_KEYS, OF_VALUES };

template <int HD, int N> constexpr size_t back_shared()
{
    return (2 * ROWS + 4 * N) * (HD + PAD) * sizeof(bf16);
}

/* The block keeps its 64 rows of two arrays, queries and their gradients or keys and values, and
 * walks tiles of N rows of the other two, the next of which is on its way meanwhile.
 *
 * OF_QUERIES, block (x, y, z): rows of sequence z and kv head y. Else keys of the batch's rows
 * 64 x .. of kv head y, against every gridDim.z-th tile of packed rows from the z-th on. Where
 * gridDim.z is 1 the sums are the gradients; else they are parts (z, T, n_kv_heads, dk then dv,
 * head_dim) f32 for join_kernel: one block would take twice the average time for the first keys of
 * a sequence, which most rows attend to. */
template <int HD, int N, back_kind KIND>
__global__ void __launch_bounds__(THREADS)
    back_kernel(attn_args<bf16> a, bf16 *dqkv, float *parts, const bf16 *dout, const float *delta)
{
    grid_begin();
    constexpr bool QUERIES = KIND == OF_QUERIES, HAS_DS = KIND != OF_VALUES;
    constexpr bool HAS_DV = KIND == OF_BOTH || KIND == OF_VALUES;
    constexpr int KEPT = ROWS * (HD + PAD), TILE = N * (HD + PAD);
    extern __shared__ __align__(16) bf16 tiles[];
    __shared__ __align__(16) row_info infos[2][N];
    bf16 *kept = tiles, *stages = kept + 2 * KEPT;
    const int kv_head = blockIdx.y, base = blockIdx.x * ROWS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row0 = warp * 16 + lane / 4; // the thread's first row, the other is eight behind

    row_tile t; // OF_QUERIES
    packed_rows p = {base, 0, 0, kv_head * a.group};
    row_info rows[2];
    key_info keys[2];
    int first, step, end, min_end = INT_MAX; // min_end: up to it rows see every key
    if (QUERIES) {
        if (!block_tile(t, a)) return;
        p = t.rows;
        first = t.low / N * N, step = N, end = t.highest + 1;
        unrolled<2>([&](int h) { rows[h] = info_of(a, p, row0 + h * 8, delta); });
        copy_rows<HD, ROWS>(kept, a, p, dout);
    } else {
        int stop = 0;
        for (int r = base + lane; r < base + ROWS; r += 32) {
            stop = max(stop, info_of(a, r).end);
            min_end = min(min_end, info_of(a, r).end);
        }
        p.n = (__reduce_max_sync(~0u, stop) - base) * a.group;
        min_end = __reduce_min_sync(~0u, min_end);
        first = blockIdx.z * N, step = gridDim.z * N, end = p.n;
        unrolled<2>([&](int h) { keys[h] = info_of(a, base + row0 + h * 8); });
        auto row_of = [&](int r) { return base + r < a.n_tokens ? base + r : -1; };
        copy_keys<HD, ROWS>(kept, a.k, a, kv_head, row_of);
        if (HAS_DS) copy_keys<HD, ROWS>(kept + KEPT, a.v, a, kv_head, row_of);
    }
    auto copy = [&](int tile, int turn) {
        bf16 *to = stages + turn * 2 * TILE;
        if (QUERIES) {
            auto row_of = [&](int r) -> int64_t {
                return tile + r < end ? key_row<false>(a, t.s, tile + r) : -1;
            };
            copy_keys<HD, N>(to, a.k, a, kv_head, row_of);
            copy_keys<HD, N>(to + TILE, a.v, a, kv_head, row_of);
        } else {
            p.base = tile;
            copy_rows<HD, N>(to, a, p, dout);
            if (threadIdx.x < N) infos[turn][threadIdx.x] = info_of(a, p, threadIdx.x, delta);
        }
    };
    if (first < end) copy(first, 0);
    copies_commit();

    // dq or dk, and dv; of what KIND leaves out nothing is computed
    float sum[HD / 8][4] = {}, dv[HD / 8][4] = {};
    for (int tile = first, turn = 0; tile < end; tile += step, turn ^= 1) {
        if (tile + step < end) copy(tile + step, turn ^ 1);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        const bf16 *others = stages + turn * 2 * TILE, *others_too = others + TILE;
        const row_info *info = infos[turn];
        float w[N / 8][4], ds[N / 8][4] = {};
        product_rows<HD, N>(w, kept, others);
        if (HAS_DS) product_rows<HD, N>(ds, kept + KEPT, others_too);
        const float scale = to_scores<N>(a, w);
        const bool all_seen = QUERIES ? all_visible(a, t, tile, N)
                                      : a.window <= 0 && info[0].row >= base + ROWS - 1 &&
                                            info[N - 1].row >= 0 && info[N - 1].row < min_end;
        unrolled<N / 8, 4>([&](int i, int e) {
            const int column = i * 8 + lane % 4 * 2 + e % 2;
            const row_info row = QUERIES ? rows[e / 2] : info[column];
            float &score = w[i][e], &d = ds[i][e];
            d -= row.inner;
            if (a.softcap > 0) d *= softcap_slope(a, score);
            score = exp2_fast(score * scale - row.lse);
            if (!all_seen &&
                !(QUERIES ? visible(a, row.position, tile + column) : visible(a, row, keys[e / 2])))
                score = 0.f;
            d *= score;
        });
        if (HAS_DV) add_weighted<HD, N>(dv, w, others_too);
        if (HAS_DS) add_weighted<HD, N>(sum, ds, others);
        __syncthreads();
    }
    copies_wait<0>();
    scale_rows<HD>(sum, a.scale);
#pragma unroll
    for (int h = 0; h < (QUERIES ? 0 : 2); h++) {
        if (gridDim.z == 1) break;
        if (keys[h].row >= a.n_tokens) continue;
        float *to =
            parts + (((int64_t)blockIdx.z * a.n_tokens + keys[h].row) * a.n_kv_heads + kv_head) *
                        2 * a.head_dim;
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            int d = i * 8 + lane % 4 * 2;
            if (d >= a.head_dim) continue;
            if (HAS_DS) store_pair(to + d, sum[i][h * 2], sum[i][h * 2 + 1]);
            if (HAS_DV) store_pair(to + a.head_dim + d, dv[i][h * 2], dv[i][h * 2 + 1]);
        }
    }
    if (!QUERIES && gridDim.z > 1) return;
    auto to = [&](int r, int head) -> bf16 * {
        r += warp * 16;
        if (QUERIES) return t.rows.in(r) ? dqkv + query_at(a, place_of(a, t.rows, r)) : NULL;
        r += base;
        return r < a.n_tokens ? dqkv + r * a.q_stride + (int64_t)head * a.head_dim : NULL;
    };
    const int head = a.n_heads + kv_head;
    if (HAS_DS) store_rows<HD>(sum, a.head_dim, [&](int r) { return to(r, head); });
    if (HAS_DV) store_rows<HD>(dv, a.head_dim, [&](int r) { return to(r, head + a.n_kv_heads); });
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
    auto launch = [&](auto kernel, int blocks, int z) {
        cuda_launch(dev, "attention gradient", kernel, dim3(blocks, a.n_kv_heads, z), THREADS,
                    back_shared<HD, N>(), a, c.dqkv, c.parts, c.dout, c.delta);
    };
    const int blocks = ceil_div(a.n_tokens, ROWS);
    launch(back_kernel<HD, N, OF_QUERIES>, ceil_div((int64_t)a.max_query * a.group, ROWS),
           a.n_seqs);
    if constexpr (HD <= 128) {
        launch(back_kernel<HD, N, OF_BOTH>, blocks, c.n_parts);
    } else {
        launch(back_kernel<HD, N, OF_KEYS>, blocks, c.n_parts);
        launch(back_kernel<HD, N, OF_VALUES>, blocks, c.n_parts);
    }
    if (c.n_parts > 1)
        cuda_launch(dev, "attention gradient", join_kernel,
                    dim3(a.n_tokens, ceil_div(a.n_kv_heads * 2 * a.head_dim, THREADS * 4)), THREADS,
                    0, a, c.dqkv, c.parts, c.n_parts);
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

// All that a block has of shared memory, its infos as well. Of compute capability 8.6 and 8.9,
// which have 99 KiB, wide heads go to the plain kernels, which say so where they do not fit either.
template <int HD, int N>
constexpr size_t back_room = back_shared<HD, N>() + 2 * N * sizeof(row_info);

bool attn_mma_back_takes(struct device *dev, const attn_call &c)
{
    const int dims = c.shape->head_dim;
    const size_t shared = dims <= 192 ? back_room<192, 32> : back_room<256, 16>;
    return attn_mma_takes(dev, c) && aligned(16, {c.dqkv, c.dout}, {}) &&
           (dims <= 128 || shared <= (size_t)cuda_use(dev)->max_shared);
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
