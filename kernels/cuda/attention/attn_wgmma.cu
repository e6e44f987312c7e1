/* attn_wgmma.cu: attention of many rows in bf16 on Hopper, by wgmma (attn_wgmma.cuh): forward, with
 * the bits that attn_order.cuh prescribes, and its gradient.
 *
 * Forward the kept rows are the queries; the stream is keys and values, and behind a tile's values
 * lie columns of ones, so that the product that sums weighted values sums weights as well. A
 * warpgroup has the scores of a tile and the sums of the one before computed, then makes the scores
 * weights, while the other's products run. It never leaves products under way while it makes
 * weights: what goes on beside them is the other warpgroup's (docs/lab/performance.md). Of heads of
 * more than 128 a thread's registers hold the sums of half the columns: both warpgroups have the
 * same rows, compute all scores, and each sums its half.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention/attn_wgmma.cuh"
#include <algorithm>

#define ONES_BYTES COLUMNS_APART // of which 8 columns are used

template <int HD> constexpr bool is_wide = HD > 128;
template <int HD> constexpr int summed = is_wide<HD> ? HD / 2 : HD; // columns of a warpgroup
template <int HD> constexpr int item_rows = is_wide<HD> ? ROWS : BLOCK_ROWS;
template <int HD> constexpr int forward_stages = is_wide<HD> ? 3 : 4;
template <int HD> constexpr int ones_bytes = is_wide<HD> ? 0 : ONES_BYTES;

#if HAS_WGMMA

// Of a chunk, as row_sums; the last are the sums of weights.
template <int N> using chunk_sums = float[N / 8 + 1][4];

// all = the chunks so far and the next, whose largest scores are top.
template <int HD>
INLINE void join(row_sums<HD> &all, const chunk_sums<HD> &chunk, const float (&top)[2])
{
    join_step s[2] = {next_chunk(all.top[0], top[0]), next_chunk(all.top[1], top[1])};
#pragma unroll
    for (int e = 0; e < 4; e++) {
        all.sum[e] = joined(all.sum[e], chunk[HD / 8][e], s[e / 2]);
#pragma unroll
        for (int i = 0; i < HD / 8; i++)
            all.out[i][e] = joined(all.out[i][e], chunk[i][e], s[e / 2]);
    }
}

// One warpgroup's rows of an item: all tiles of its keys.
template <int HD, bool PAGED>
INLINE void attend(computer &c, const attn_args<bf16> &a, const work &item)
{
    constexpr int N = summed<HD>;
    const work w = item;
    const int row0 = c.row0 % item_rows<HD>, first = is_wide<HD> ? c.group * N : 0; // column
    rows_seen seen = seen_by<PAGED>(a, w.s, w.p, row0);
    int least = __reduce_min_sync(~0u, min(seen.position[0], seen.position[1]));
    int max_hidden = __reduce_max_sync(~0u, max(seen.hidden[0], seen.hidden[1]));
    if (a.softcap > 0) least = -1; // there is something to be done to every tile
    const float factor = score_factor(a);
    row_sums<N> all;
    chunk_sums<N> r = {};
    float dots[ROWS / 8][4], top[2] = {-INFINITY, -INFINITY}, ended[2]; // of the chunk before
    uint32_t x[ROWS / 16][4];
    clear(all);

    // The tile's scores become its weights, and the sums so far make room for them.
    auto weigh = [&](int tile) {
        tile_step step[2];
        if (tile + ROWS - 1 > least || tile <= max_hidden) {
            to_scores<ROWS>(a, dots);
            hide<ROWS>(dots, seen, tile, -INFINITY);
        }
        if (tile % CHUNK_KEYS == 0)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                ended[h] = top[h];
                top[h] = -INFINITY;
            }
        next_tiles<ROWS>(step, dots, top, factor);
        if (tile % CHUNK_KEYS == 0 && tile > w.first) join<N>(all, r, ended);
        unrolled<ROWS / 8, 4>(
            [&](int i, int e) { dots[i][e] = weight_of(dots[i][e], factor, step[e / 2].shift); });
        unrolled<N / 8 + 1, 4>([&](int i, int e) { r[i][e] *= step[e / 2].shrink; });
        as_left(x, dots);
        settle(x);
        settle(r);
    };
    auto add = [&](int tile, uint32_t stage) {
        const int goes_on = tile % CHUNK_KEYS != 0;
        const uint32_t values = stage + tile_bytes<HD> + first / 64 * COLUMNS_APART;
        if constexpr (is_wide<HD>) {
            add_weighted(reinterpret_cast<float(&)[N / 8][4]>(r), x, values, goes_on);
            unrolled<4>([&](int e) { r[N / 8][e] = goes_on ? r[N / 8][e] : 0.f; });
            unrolled<ROWS / 16>([&](int n) { add_row_sums(r[N / 8], x[n]); });
        } else {
            add_weighted(r, x, values, goes_on);
        }
    };

    int tile = w.first;
    uint32_t stage = c.stream.stage(), empty = c.stream.is_empty(); // of the tile
    c.wait_stage();
    c.stream.next();
    multiply<HD>(dots, c.kept, stage);
    bool more = tile + ROWS < w.end;
    if (more) c.wait_stage();
    wgmma_wait<0>();
    settle(dots);
    weigh(tile);
    while (more) {
        uint32_t next = c.stream.stage(), next_empty = c.stream.is_empty();
        multiply<HD>(dots, c.kept, next);
        add(tile, stage);
        tile += ROWS;
        more = tile + ROWS < w.end;
        c.stream.next();
        if (more) c.wait_stage();
        wgmma_wait<0>();
        settle(dots);
        settle(r);
        barrier_arrive(empty);
        weigh(tile);
        stage = next;
        empty = next_empty;
    }
    add(tile, stage);
    wgmma_wait<0>();
    settle(r);
    barrier_arrive(empty);
    c.done_with_kept();
    join<N>(all, r, top);
    store_result<N>(all, a, w.p, row0, first);
}

#endif // HAS_WGMMA

template <int HD, bool PAGED>
__global__ void __launch_bounds__(THREADS, 1)
    attn_wgmma_kernel(attn_args<bf16> a, unsigned *ticket, int n_items)
{
#if HAS_WGMMA
    grid_begin();
    extern __shared__ __align__(1024) char memory[];
    constexpr int STAGES = forward_stages<HD>, ONES = ones_bytes<HD>;
    __shared__ block_state state;
    for (int i = threadIdx.x; i < STAGES * ONES / 16; i += THREADS) {
        int at = i % (ONES_BYTES / 16) * 16, s = i / (ONES_BYTES / 16);
        const uint32_t ones = 0x3f803f80;
        *(uint4 *)(memory + s * (stage_bytes<HD> + ONES) + stage_bytes<HD> + at) =
            make_uint4(ones, ones, ones, ones);
    }
    fence_async();
    run_block<HD, STAGES, is_wide<HD> ? 0 : 1, 2, ONES>(
        state, memory,
        [&](copier &c) {
            c.each_item(ticket, n_items, [&](int item) {
                work w;
                if (!take_queries<PAGED, item_rows<HD>>(w, a, item)) return;
                c.begin(w);
                copy_packed<HD, item_rows<HD> / ROWS, 1>(c, a, w, a.out);
                stream_keys<HD, PAGED>(c, a, w);
            });
        },
        [&](computer &c) {
            c.each_item(state, OF_QUERIES, [&](const work &w) { attend<HD, PAGED>(c, a, w); });
        });
#endif
}

template <int HD> static void forward(struct device *dev, const attn_args<bf16> &a)
{
    struct cuda_state *state = cuda_use(dev);
    int n = query_items<item_rows<HD>>(a);
    cuda_launch(dev, "attention",
                a.block_size > 0 ? attn_wgmma_kernel<HD, true> : attn_wgmma_kernel<HD, false>,
                std::min(n, state->n_sms), THREADS,
                forward_stages<HD> * (stage_bytes<HD> + ones_bytes<HD>)+item_rows<HD> / ROWS *
                    tile_bytes<HD>,
                a, state->tickets, n);
}

bool attn_wgmma_takes(struct device *dev, const attn_call &c)
{
    return on_hopper(dev) && attn_mma_takes(dev, c);
}

void attn_wgmma(struct device *dev, const attn_args<bf16> &a)
{
    (a.head_dim <= 64 ? forward<64> : a.head_dim <= 128 ? forward<128> : forward<256>)(dev, a);
}

// ---- gradient ----------------------------------------------------------------------------------

/* The gradient, in one launch. Items of two kinds, each with its own sums, so that nothing is added
 * in a varying order; in return the scores are computed twice. OF_KEYS: dk and dv of BLOCK_ROWS
 * keys, kept in shared memory, against the packed rows that attend to them, with their gradients;
 * scores are transposed, keys x rows. OF_QUERIES: dq of BLOCK_ROWS packed rows and their gradients,
 * kept in registers, against keys and values. The former are longer and come first; the latter fill
 * what room they leave. Of heads of more than 128 a thread's registers hold the sums of one
 * gradient, so that dv has items of its own, OF_VALUES, and OF_QUERIES keeps its rows in shared
 * memory.
 *
 * A block of keys that many rows attend to (a long sequence's first, those of a prompt that samples
 * share, above all the root of a tree) is several items, parts, each every so many-th tile of its
 * rows. They have one place for their sums, to which each adds its own when those before it have:
 * parts are taken in their order, so that what one waits for is under way. */
template <int HD> constexpr int stages_of = HD <= 128 ? 4 : 2;
#define MAX_PARTS 8 // of a block of keys

struct gradient_args {
    attn_args<bf16> a;
    bf16 *dqkv;
    const bf16 *dout;
    const float *delta;
    float *sums;          // of parts: dk and dv, of whole blocks of keys
    int n_parts;          // of a block of keys, at most
    int part_tiles;       // tiles that make a part, about
    int key_items, items; // OF_KEYS; all
    unsigned *tickets;    // the first is the items', behind it one for each 64 keys and kv head
};

// Of the packed rows of a stage.
struct row_numbers {
    float lse[ROWS], inner[ROWS]; // log-sum-exp; dout . out
};

#if HAS_WGMMA

// ---- copying -----------------------------------------------------------------------------------

// False for a part more than the block's tiles make.
INLINE bool take_keys(work &w, const gradient_args &g, int item, work_kind kind)
{
    const attn_args<bf16> &a = g.a;
    int kv_head = item % a.n_kv_heads, part = item / a.n_kv_heads % g.n_parts;
    int base = item / a.n_kv_heads / g.n_parts * BLOCK_ROWS, stop = 0;
    int last = a.seq_of[min(base + BLOCK_ROWS, a.n_tokens) - 1];
    for (int s = a.seq_of[base]; s <= last; s++) stop = max(stop, a.attend_end[s]);
    packed_rows p = {base, 0, (stop - base) * a.group, kv_head * a.group};
    int rows = g.part_tiles * ROWS, n_parts = min(g.n_parts, (p.n + rows - 1) / rows);
    w = {kind, p, 0, kv_head, part * ROWS, p.n, n_parts * ROWS, part, n_parts};
    return part < n_parts;
}

template <int HD> INLINE void copy_keys(copier &c, const gradient_args &g, const work &w)
{
    const attn_args<bf16> &a = g.a;
    const int first = w.kv_head * a.head_dim + first_column(a.head_dim);
    c.begin(w);
    copy_kept<HD, GROUPS, 2>(c, a.head_dim, [&](int r, const bf16 *(&from)[2]) {
        int64_t at = min(w.p.start + r, a.n_tokens - 1) * a.kv_stride + first;
        from[0] = a.k + at;
        from[1] = a.v + at;
        return w.p.start + r < a.n_tokens;
    });
}

template <int HD>
INLINE void stream_queries(copier &c, const gradient_args &g, const work &w, row_numbers *numbers)
{
    const attn_args<bf16> &a = g.a;
    packed_rows p = w.p;
    packed_places places = places_of(a, p, g.dout);
#pragma unroll 1
    for (p.base = w.first; p.base < w.end; p.base += w.step) {
        c.begin_stage();
        copy_tiles<HD, 2>(c.stream.stage(), a.head_dim, [&](int, int r, const bf16 *(&from)[2]) {
            return places.find(a, p, r, from);
        });
        int r = threadIdx.x % COPIERS;
        if (r < ROWS) {
            row_numbers &to = numbers[c.stream.slot];
            int64_t i = p.in(r) ? index_of(a, place_of(a, p, r)) : 0;
            copy4(&to.lse[r], a.lse + i, p.in(r));
            copy4(&to.inner[r], g.delta + i, p.in(r));
        }
        c.end_stage();
    }
}

template <int HD> INLINE void copy_queries(copier &c, const gradient_args &g, const work &w)
{
    c.begin(w);
    copy_packed<HD, GROUPS, 2>(c, g.a, w, g.dout);
    stream_keys<HD, false>(c, g.a, w);
}

template <int HD> INLINE void copy_items(copier &c, const gradient_args &g, row_numbers *numbers)
{
    c.each_item(g.tickets, g.items, [&](int item) {
        const int kinds = is_wide<HD> ? 2 : 1, of_kind = item % g.key_items;
        work w;
        if (item < kinds * g.key_items) {
            if (!take_keys(w, g, of_kind, item < g.key_items ? OF_KEYS : OF_VALUES)) return;
            copy_keys<HD>(c, g, w);
            stream_queries<HD>(c, g, w, numbers);
        } else if (take_queries<false>(w, g.a, item - kinds * g.key_items)) {
            copy_queries<HD>(c, g, w);
        }
    });
}

// ---- summing -----------------------------------------------------------------------------------

// Which sums an item has: dq or dk, of what is left of the weights; dv, of these.
template <work_kind KIND> constexpr bool has_ds = KIND != OF_VALUES;
template <int HD, work_kind KIND>
constexpr bool has_dv = KIND == OF_VALUES || (KIND == OF_KEYS && !is_wide<HD>);

/* The sums of a warpgroup's kept rows over the item's tiles from `at` on: dq or dk in `sum`, and
 * dv. multiply_kept(w, i, tile): w = the rows of the i-th kept array times a tile of the i-th
 * stream. weigh(w, at, slot) makes weights of scores, rest(ds, w, slot) what is left of them of the
 * second products. */
template <int HD, work_kind KIND, typename MULTIPLY, typename WEIGH, typename REST>
INLINE void sum_tiles(computer &c, const work &w, int at, MULTIPLY multiply_kept, WEIGH weigh,
                      REST rest, float (&sum)[HD / 8][4], float (&dv)[HD / 8][4])
{
    constexpr bool HAS_DS = has_ds<KIND>, HAS_DV = has_dv<HD, KIND>;
    float scores[ROWS / 8][4], ds[ROWS / 8][4];
    uint32_t x[ROWS / 16][4], y[ROWS / 16][4], summing = 0; // the barrier of what is being summed
    c.wait_stage();
    multiply_kept(scores, 0, c.stream.stage());
    for (;; at += w.step) {
        const uint32_t first = c.stream.stage(), second = first + tile_bytes<HD>;
        const int slot = c.stream.slot;
        wgmma_wait<1>();
        if (summing) barrier_arrive(summing);
        if (HAS_DS) {
            multiply_kept(ds, 1, second);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        settle(scores);
        weigh(scores, at, slot);
        if (HAS_DS) {
            wgmma_wait<0>();
            settle(ds);
            rest(ds, scores, slot);
        }
        if (HAS_DV) {
            as_left(x, scores);
            settle(x);
        }
        if (HAS_DS) {
            as_left(y, ds);
            settle(y);
        }
        if (HAS_DV) add_weighted(dv, x, second);
        if (HAS_DS) add_weighted(sum, y, first);
        summing = c.stream.is_empty();
        c.stream.next();
        if (at + w.step >= w.end) break;
        c.wait_stage();
        multiply_kept(scores, 0, c.stream.stage());
    }
    wgmma_wait<0>();
    if (HAS_DS) settle(sum);
    if (HAS_DV) settle(dv);
    barrier_arrive(summing);
}

// ---- gradient of the queries -------------------------------------------------------------------

template <int HD> INLINE void sum_queries(computer &c, const gradient_args &g, const work &item)
{
    const work w = item;
    const attn_args<bf16> &a = g.a;
    uint32_t kept[2][HD / 16][4]; // queries, gradients
    if constexpr (!is_wide<HD>) {
        for (int i = 0; i < 2; i++) take_rows<HD>(kept[i], c.kept + i * tile_bytes<HD>, c.row0);
        c.done_with_kept();
    }
    auto multiply_kept = [&](float(&to)[ROWS / 8][4], int i, uint32_t tile) {
        if constexpr (is_wide<HD>)
            multiply<HD>(to, c.kept + i * tile_bytes<HD>, tile);
        else
            multiply<HD>(to, kept[i], tile);
    };
    rows_seen seen = seen_by<false>(a, w.s, w.p, c.row0);
    int least = __reduce_min_sync(~0u, min(seen.position[0], seen.position[1]));
    int max_hidden = __reduce_max_sync(~0u, max(seen.hidden[0], seen.hidden[1]));
    row_info rows[2];
    unrolled<2>(
        [&](int h) { rows[h] = info_of(a, w.p, c.row0 + threadIdx.x % 32 / 4 + h * 8, g.delta); });
    const float factor = score_factor(a);
    auto weigh = [&](float(&scores)[ROWS / 8][4], int tile, int) {
        unrolled<ROWS / 8, 4>([&](int i, int e) {
            scores[i][e] = exp2_fast(scores[i][e] * factor - rows[e / 2].lse);
        });
        if (tile + ROWS - 1 > least || tile <= max_hidden) hide<ROWS>(scores, seen, tile, 0.f);
    };
    auto rest = [&](float(&ds)[ROWS / 8][4], const float(&scores)[ROWS / 8][4], int) {
        unrolled<ROWS / 8, 4>(
            [&](int i, int e) { ds[i][e] = scores[i][e] * (ds[i][e] - rows[e / 2].inner); });
    };
    float dq[HD / 8][4] = {}, none[HD / 8][4];
    sum_tiles<HD, OF_QUERIES>(c, w, w.first, multiply_kept, weigh, rest, dq, none);
    if (is_wide<HD>) c.done_with_kept();
    scale_rows<HD>(dq, a.scale);
    store_rows<HD>(dq, a.head_dim, [&](int r) -> bf16 * {
        r += c.row0;
        return w.p.in(r) ? g.dqkv + query_at(a, place_of(a, w.p, r)) : NULL;
    });
}

// ---- gradient of the keys and values -----------------------------------------------------------

// A warp's keys: first .. first + 15; up to min_end - 1, rows after them see them all.
struct key_rows {
    int first, min_end;
};

INLINE key_rows keys_of(const attn_args<bf16> &a, int first)
{
    int key = first + threadIdx.x % 16;
    int end = key < a.n_tokens ? a.attend_end[a.seq_of[key]] : 0;
    return {first, __reduce_min_sync(~0u, end)};
}

// w = 0 where a key is not seen by the packed row of the column.
INLINE void hide_keys(float (&w)[ROWS / 8][4], const attn_args<bf16> &a, const key_rows &k,
                      const packed_rows &p)
{
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int key = k.first + threadIdx.x % 32 / 4 + h * 8, s = 0, end = 0, own_end = 0;
        if (key < a.n_tokens) {
            s = a.seq_of[key];
            end = a.attend_end[s];
            own_end = a.query_start[s + 1];
        }
        int last = a.window > 0 && end == own_end ? min(end, key + a.window) : end;
        // the tile's packed rows that see it
        int from = (key - p.start) * a.group - p.base, to = (last - p.start) * a.group - p.base;
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int r = i * 8 + column + c;
                if (r < from || r >= to) w[i][h * 2 + c] = 0.f;
            }
        if (a.window <= 0 || end == own_end) continue;
        int position = row_position<false>(a, s, key); // with children: rows see it from anywhere
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int row = min(p.start + by_group(a, p.base + i * 8 + column + c), end - 1);
                if (position <= row_position<false>(a, a.seq_of[row], row) - a.window)
                    w[i][h * 2 + c] = 0.f;
            }
    }
}

// Weights, from scores of keys and the packed rows of p from p.base on.
INLINE void take_weights(float (&w)[ROWS / 8][4], const attn_args<bf16> &a, const key_rows &k,
                         const packed_rows &p, const row_numbers &n)
{
    const float factor = score_factor(a);
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
        float2 lse = *(const float2 *)&n.lse[i * 8 + column];
        lse.x *= LOG2E;
        lse.y *= LOG2E;
#pragma unroll
        for (int e = 0; e < 4; e++) w[i][e] = exp2_fast(w[i][e] * factor - (e % 2 ? lse.y : lse.x));
    }
    int first = p.start + by_group(a, p.base), last = p.start + by_group(a, p.base + ROWS - 1);
    if (a.window > 0 || first < k.first + 15 || last >= k.min_end) hide_keys(w, a, k, p);
}

// ds (of products of values and gradients) = weights times what is left of them
INLINE void times_weights(float (&ds)[ROWS / 8][4], const float (&weights)[ROWS / 8][4],
                          const row_numbers &n)
{
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
        float2 inner = *(const float2 *)&n.inner[i * 8 + threadIdx.x % 4 * 2];
#pragma unroll
        for (int e = 0; e < 4; e++)
            ds[i][e] = weights[i][e] * (ds[i][e] - (e % 2 ? inner.y : inner.x));
    }
}

template <int HD, work_kind KIND>
INLINE void store_keys(computer &c, const gradient_args &g, const work &w,
                       const float (&dk)[HD / 8][4], const float (&dv)[HD / 8][4])
{
    const attn_args<bf16> &a = g.a;
    auto to = [&](int r, int head) -> bf16 * {
        r += w.p.start + c.row0;
        return r < a.n_tokens ? g.dqkv + r * a.q_stride + (int64_t)head * a.head_dim : NULL;
    };
    if (has_ds<KIND>)
        store_rows<HD>(dk, a.head_dim, [&](int r) { return to(r, a.n_heads + w.kv_head); });
    if (has_dv<HD, KIND>)
        store_rows<HD>(dv, a.head_dim,
                       [&](int r) { return to(r, a.n_heads + a.n_kv_heads + w.kv_head); });
}

INLINE void add_four(float (&sum)[4], float4 x)
{
    sum[0] += x.x;
    sum[1] += x.y;
    sum[2] += x.z;
    sum[3] += x.w;
}

// Adds what the parts before have; false where there are further ones, for which it is written.
template <int HD, work_kind KIND>
INLINE bool last_part(computer &c, const gradient_args &g, const work &w, float (&dk)[HD / 8][4],
                      float (&dv)[HD / 8][4])
{
    const int at = (w.p.start / ROWS + c.group) * g.a.n_kv_heads + w.kv_head;
    float4 *sums = (float4 *)g.sums + (int64_t)at * (HD / 4 * 128) + threadIdx.x % 128;
    unsigned *done = g.tickets + 1 + at; // so many parts
    if (KIND == OF_VALUES) done += g.key_items / g.n_parts * GROUPS;
    const bool first = threadIdx.x % 128 == 0, last = w.part + 1 == w.n_parts;
    if (w.part > 0) {
        if (first)
            while (*(volatile unsigned *)done != (unsigned)w.part) __nanosleep(100);
        group_sync(c.group);
        __threadfence();
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            if (has_ds<KIND>) add_four(dk[i], __ldcg(sums + i * 128));
            if (has_dv<HD, KIND>) add_four(dv[i], __ldcg(sums + (HD / 8 + i) * 128));
        }
    }
    if (last) {
        if (first) *done = 0;
        return true;
    }
#pragma unroll
    for (int i = 0; i < HD / 8; i++) {
        if (has_ds<KIND>) sums[i * 128] = make_float4(dk[i][0], dk[i][1], dk[i][2], dk[i][3]);
        if (has_dv<HD, KIND>)
            sums[(HD / 8 + i) * 128] = make_float4(dv[i][0], dv[i][1], dv[i][2], dv[i][3]);
    }
    __threadfence();
    group_sync(c.group);
    if (first) *(volatile unsigned *)done = w.part + 1;
    return false;
}

template <int HD, work_kind KIND>
INLINE void sum_keys(computer &c, const gradient_args &g, const work &item,
                     const row_numbers *numbers)
{
    const attn_args<bf16> &a = g.a;
    float dk[HD / 8][4] = {}, dv[HD / 8][4] = {};
    packed_rows p = item.p;
    int first_key = p.start + c.group * ROWS;
    for (p.base = item.first; p.base < item.end;
         p.base += item.step) { // rows that come before all keys
        if (p.start + by_group(a, p.base + ROWS - 1) >= first_key) break;
        c.wait_stage();
        barrier_arrive(c.stream.is_empty());
        c.stream.next();
    }
    const work w = item;
    const key_rows keys = keys_of(a, p.start + c.row0);
    if (p.base < w.end)
        sum_tiles<HD, KIND>(
            c, w, p.base,
            [&](float(&to)[ROWS / 8][4], int i, uint32_t tile) {
                multiply<HD>(to, c.kept + i * tile_bytes<HD>, tile);
            },
            [&](float(&scores)[ROWS / 8][4], int base, int slot) {
                p.base = base;
                take_weights(scores, a, keys, p, numbers[slot]);
            },
            [&](float(&ds)[ROWS / 8][4], const float(&scores)[ROWS / 8][4], int slot) {
                times_weights(ds, scores, numbers[slot]);
            },
            dk, dv);
    c.done_with_kept();
    scale_rows<HD>(dk, a.scale);
    if (w.n_parts == 1 || last_part<HD, KIND>(c, g, w, dk, dv))
        store_keys<HD, KIND>(c, g, w, dk, dv);
}

#endif // HAS_WGMMA

// ---- launches ----------------------------------------------------------------------------------

template <int HD>
__global__ void __launch_bounds__(THREADS, 1) attn_gradient_kernel(gradient_args g)
{
#if HAS_WGMMA
    grid_begin();
    extern __shared__ __align__(1024) char memory[];
    __shared__ block_state state;
    __shared__ __align__(16) row_numbers numbers[stages_of<HD>];
    run_block<HD, stages_of<HD>, 2, 2, 0, 24>( // of 232 registers there are too few
        state, memory, [&](copier &c) { copy_items<HD>(c, g, numbers); },
        [&](computer &c) {
            c.each_item(state, OF_KEYS,
                        [&](const work &w) { sum_keys<HD, OF_KEYS>(c, g, w, numbers); });
            if (is_wide<HD>)
                c.each_item(state, OF_VALUES,
                            [&](const work &w) { sum_keys<HD, OF_VALUES>(c, g, w, numbers); });
            c.each_item(state, OF_QUERIES, [&](const work &w) { sum_queries<HD>(c, g, w); });
        });
#endif
}

template <int HD> static void launch(struct device *dev, const gradient_args &g)
{
    cuda_launch(dev, "attention gradient", attn_gradient_kernel<HD>,
                std::min(g.items, cuda_use(dev)->n_sms), THREADS,
                block_memory<HD, stages_of<HD>, 2>, g);
}

// Blocks of keys, times the kinds of their items.
static int key_blocks(const attn_call &c)
{
    return ceil_div(c.batch->n_tokens, BLOCK_ROWS) * c.shape->n_kv_heads;
}
static int kinds_of_keys(const attn_call &c)
{
    return c.shape->head_dim <= 128 ? 1 : 2;
}

bool attn_wgmma_back_takes(struct device *dev, const attn_call &c)
{
    return on_hopper(dev) && c.shape->head_dim <= 192 && c.shape->softcap <= 0 &&
           aligned(16, {c.dqkv, c.dout}, {}) && attn_mma_takes(dev, c);
}

void attn_wgmma_back(struct device *dev, const attn_call &c)
{
    struct cuda_state *state = cuda_use(dev);
    const int blocks = key_blocks(c), tickets = 1 + kinds_of_keys(c) * blocks * GROUPS;
    gradient_args g = {};
    g.a = attn_args_of<bf16>(c);
    g.dqkv = (bf16 *)c.dqkv;
    g.dout = (const bf16 *)c.dout;
    g.delta = c.delta;
    g.sums = c.parts;
    g.n_parts = tickets <= N_TICKETS ? MAX_PARTS : 1;
    // short parts where the blocks of keys alone would leave multiprocessors without work; where
    // there are many, but for what most rows attend to, parts only cost their sums
    g.part_tiles = 48;
    if (blocks * 4 < state->n_sms * 3)
        g.part_tiles = 16;
    else if (blocks >= state->n_sms * 3)
        g.part_tiles = std::max(48, ceil_div(g.a.n_tokens * g.a.group, ROWS * MAX_PARTS));
    g.key_items = blocks * g.n_parts;
    g.items = kinds_of_keys(c) * g.key_items + query_items(g.a);
    g.tickets = state->tickets;
    const int dims = g.a.head_dim;
    (dims <= 64 ? launch<64> : dims <= 128 ? launch<128> : launch<192>)(dev, g);
}
