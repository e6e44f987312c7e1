/* attn_wgmma.cu: attention of many rows in bf16 on Hopper, by wgmma (attn_wgmma.cuh), with the bits
 * that attn_order.cuh prescribes.
 *
 * The kept rows are the queries, which each warp holds in registers as left operands; the stream is
 * keys and values. While the values of a tile are summed, the scores of the next become weights.
 */
#include "kernels/cuda/attention/attn_wgmma.cuh"
#include <algorithm>

#define STAGES 6

#if HAS_WGMMA

// One warpgroup's rows of an item: all tiles of its keys.
template <int HD, bool PAGED>
__device__ __forceinline__ void attend(computer &c, const attn_args<bf16> &a, const work &item)
{
    const work w = item;
    uint32_t q[HD / 16][4], x[ROWS / 16][4] = {};
    take_rows<HD>(q, c.kept, c.row0);
    c.done_with_kept();
    rows_seen seen = seen_by<PAGED>(a, w.s, w.p, c.row0);
    int least = __reduce_min_sync(~0u, min(seen.position[0], seen.position[1]));
    int most_hidden = __reduce_max_sync(~0u, max(seen.hidden[0], seen.hidden[1]));
    row_sums<HD> r;
    waiting_sums<HD> memory, *before = &memory;
    asm volatile("" : "+l"(before)); // in memory, whatever the compiler would rather do
    bool first_chunk = true;
    clear(r);

    float dots[ROWS / 8][4], shrink[2];
    float ended[2]; // of the chunk before, where a tile begins one
    auto begins_chunk = [&](int tile) { return tile % CHUNK_KEYS == 0 && tile > w.first; };
    auto weigh = [&](int tile) {
        float factor = to_scores<ROWS>(a, dots);
        if (tile + ROWS - 1 > least || tile <= most_hidden) hide<ROWS>(dots, seen, tile, -INFINITY);
        if (begins_chunk(tile))
#pragma unroll
            for (int h = 0; h < 2; h++) {
                ended[h] = r.top[h];
                r.top[h] = -INFINITY;
            }
        take_weights<ROWS>(dots, r.top, shrink, factor);
    };
    auto add = [&](int tile, uint32_t values) {
        if (begins_chunk(tile)) {
            float top[2] = {r.top[0], r.top[1]};
            r.top[0] = ended[0];
            r.top[1] = ended[1];
            join_chunk(r, before, first_chunk);
            put_aside(before, r);
            clear(r);
            r.top[0] = top[0];
            r.top[1] = top[1];
            first_chunk = false;
        } else {
            shrink_sums(r, shrink);
        }
        settle(r.out);
        add_weighted<HD>(r.out, x, values);
    };
    auto add_sums = [&]() {
#pragma unroll
        for (int n = 0; n < ROWS / 16; n++) add_row_sums(r.sum, x[n]);
    };

    c.wait_stage();
    multiply<HD>(dots, q, c.stream.stage());
    wgmma_wait<0>();
    uint32_t values, summing = 0; // of the tile whose values are summed: they, its barrier
    int tile = w.first;
    for (;; tile += ROWS) {
        wgmma_wait<1>();
        settle(dots);
        add_sums(); // of the tile before, between the instructions that follow
        weigh(tile);
        wgmma_wait<0>();
        settle(r.out);
        if (summing) barrier_arrive(summing);
        as_left(x, dots);
        settle(x);
        values = c.stream.stage() + tile_bytes<HD>;
        summing = c.stream.is_empty();
        c.stream.next();
        if (tile + ROWS >= w.end) break;
        c.wait_stage();
        multiply<HD>(dots, q, c.stream.stage());
        add(tile, values);
    }
    add(tile, values);
    add_sums();
    wgmma_wait<0>();
    settle(r.out);
    barrier_arrive(summing);
    if (!first_chunk) join_chunk(r, before, false);
    store_result<HD>(r, a, w.p, c.row0);
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
    run_block<HD, STAGES, 1>(
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
    cuda_launch(
        dev, "attention", paged ? attn_wgmma_kernel<HD, true> : attn_wgmma_kernel<HD, false>,
        std::min(n, state->n_sms), THREADS, block_memory<HD, STAGES, 1>, a, state->tickets, n);
}

bool attn_wgmma(struct device *dev, const attn_args<bf16> &a, bool paged)
{
    if (cuda_use(dev)->major != 9 || a.head_dim > 128) return false;
    if (a.head_dim <= 64)
        forward<64>(dev, a, paged);
    else
        forward<128>(dev, a, paged);
    return true;
}
