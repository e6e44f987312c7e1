/* attn_wgmma.cu: attention of many rows in bf16 on Hopper, by wgmma (attn_wgmma.cuh), with the bits
 * that attn_order.cuh prescribes.
 *
 * The kept rows are the queries; the stream is keys and values, and behind the values of a tile lie
 * columns of ones, so that the product that sums weighted values sums weights as well. A warpgroup
 * has the scores of a tile and the sums of the one before computed, then makes the scores weights,
 * while the other's products run. It never leaves products under way while it makes weights: what
 * goes on beside them is the other warpgroup's (docs/lab/performance.md).
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention/attn_wgmma.cuh"
#include <algorithm>

#define STAGES     4
#define ONES_BYTES COLUMNS_APART // of which 8 columns are used

#if HAS_WGMMA

// Of a chunk, as row_sums; the last are the sums of weights.
template <int HD> using chunk_sums = float[HD / 8 + 1][4];

// all = the chunks so far and the next, whose largest scores are top.
template <int HD>
__device__ __forceinline__ void join(row_sums<HD> &all, const chunk_sums<HD> &chunk,
                                     const float (&top)[2])
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
__device__ __forceinline__ void attend(computer &c, const attn_args<bf16> &a, const work &item)
{
    const work w = item;
    rows_seen seen = seen_by<PAGED>(a, w.s, w.p, c.row0);
    int least = __reduce_min_sync(~0u, min(seen.position[0], seen.position[1]));
    int most_hidden = __reduce_max_sync(~0u, max(seen.hidden[0], seen.hidden[1]));
    if (a.softcap > 0) least = -1; // there is something to be done to every tile
    const float factor = score_factor(a);
    row_sums<HD> all;
    chunk_sums<HD> r = {};
    float dots[ROWS / 8][4], top[2] = {-INFINITY, -INFINITY}, ended[2]; // of the chunk before
    uint32_t x[ROWS / 16][4];
    clear(all);

    // The tile's scores become its weights, and the sums so far make room for them.
    auto weigh = [&](int tile) {
        tile_step step[2];
        if (tile + ROWS - 1 > least || tile <= most_hidden) {
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
        if (tile % CHUNK_KEYS == 0 && tile > w.first) join<HD>(all, r, ended);
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                dots[i][e] = weight_of(dots[i][e], factor, step[e / 2].shift);
#pragma unroll
        for (int i = 0; i <= HD / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) r[i][e] *= step[e / 2].shrink;
        as_left(x, dots);
        settle(x);
        settle(r);
    };
    auto add = [&](int tile, uint32_t stage) {
        add_weighted(r, x, stage + tile_bytes<HD>, tile % CHUNK_KEYS != 0);
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
    join<HD>(all, r, top);
    store_result<HD>(all, a, w.p, c.row0);
}

#endif // HAS_WGMMA

template <int HD, bool PAGED>
__global__ void __launch_bounds__(THREADS, 1)
    attn_wgmma_kernel(attn_args<bf16> a, unsigned *ticket, int n_items)
{
#if HAS_WGMMA
    grid_begin();
    extern __shared__ __align__(1024) char memory[];
    __shared__ block_state state;
    for (int i = threadIdx.x; i < STAGES * ONES_BYTES / 16; i += THREADS) {
        int at = i % (ONES_BYTES / 16) * 16, s = i / (ONES_BYTES / 16);
        const uint32_t ones = 0x3f803f80;
        *(uint4 *)(memory + s * (stage_bytes<HD> + ONES_BYTES) + stage_bytes<HD> + at) =
            make_uint4(ones, ones, ones, ones);
    }
    fence_async();
    run_block<HD, STAGES, 1, 2, ONES_BYTES>(
        state, memory,
        [&](copier &c) {
            c.each_item(ticket, n_items, [&](int item) {
                work w;
                if (!take_queries<PAGED>(w, a, item)) return;
                c.begin(w);
                packed_places places = places_of(a, w.p, a.out);
#pragma unroll
                for (int g = 0; g < GROUPS; g++)
                    copy_tiles<HD, 1>(c.kept + g * tile_bytes<HD>, a.head_dim,
                                      [&](int, int r, const bf16 *(&from)[2]) {
                                          return places.find(a, w.p, g * ROWS + r, from);
                                      });
                c.kept_copied();
                stream_keys<HD, PAGED>(c, a, w);
            });
        },
        [&](computer &c) {
            c.each_item(state, OF_QUERIES, [&](const work &w) { attend<HD, PAGED>(c, a, w); });
        });
#endif
}

template <int HD> static void forward(struct device *dev, const attn_args<bf16> &a, bool paged)
{
    struct cuda_state *state = cuda_use(dev);
    int n = query_items(a);
    cuda_launch(dev, "attention",
                paged ? attn_wgmma_kernel<HD, true> : attn_wgmma_kernel<HD, false>,
                std::min(n, state->n_sms), THREADS, block_memory<HD, STAGES, 1, ONES_BYTES>, a,
                state->tickets, n);
}

bool attn_wgmma_takes(struct device *dev, const attn_call &c)
{
    return on_hopper(dev) && c.shape->head_dim <= 128 && attn_mma_takes(dev, c);
}

void attn_wgmma(struct device *dev, const attn_call &c)
{
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    (a.head_dim <= 64 ? forward<64> : forward<128>)(dev, a, c.kv != NULL);
}
