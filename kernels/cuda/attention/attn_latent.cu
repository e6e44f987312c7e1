/* attn_latent.cu: latent attention in absorbed form (ops.h) in bf16 on Hopper, with the bits that
 * attn_order.cuh prescribes: one kernel for packed and paged batches, of few rows and of many.
 *
 * All heads share one key, up to WIDTH wide, whose first entries, up to 2 HALF of them, are the
 * value. So the heads of a row are packed rows (attention.cuh), and a tile of keys, copied once,
 * is the operand of both products. A block works as attn_wgmma.cuh says, on 64 packed rows at a
 * time, the kept tile, and a ring of two tiles of keys, which take all of shared memory. 64 rows of
 * the value's width are more sums than a warpgroup has registers for: each of the two has half of
 * the columns. Both compute the same scores, so that nothing passes between them, and while one is
 * at its weights the other has products under way. (In FlashMLA one computes them for both.)
 *
 * Few rows: an item is one chunk of their context, whose sums go to memory, and the last to be done
 * joins them in order. Of the 64 rows of a tile a decode step of 16 heads has 16: that costs no
 * time that reading the keys does not take. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention/attn_few.cuh"
#include "kernels/cuda/attention/attn_wgmma.cuh"
#include <algorithm>
#include <climits>

#define WIDTH      576 // of a tile; narrower keys end with zeros
#define HALF       256 // columns of values of a warpgroup
#define STAGES     2
#define SPREAD_FEW 256 // packed rows of a sequence whose chunks are spread over items

// What a warp leaves of a chunk: of a thread HALF / 8 times four sums of weighted values, and its
// two rows' largest scores and sums of weights.
#define PART ((HALF / 8 + 1) * 32)

// Of each sequence and tile of rows `chunks` parts, each of GROUPS times so many warps.
struct latent_parts {
    float4 *at;            // NULL: there is one chunk
    int row_tiles, chunks; // 0: items walk through their chunks
    int warps;             // with rows, of a tile
};

#if HAS_WGMMA

// ---- items -------------------------------------------------------------------------------------

// False where there is no such tile or chunk, or the sequence has many rows. May run before
// grid_wait().
INLINE bool take_chunk(work &w, const attn_args<bf16> &a, const latent_parts &parts, int item)
{
    const int tasks = parts.row_tiles * a.n_seqs, chunk = item / tasks;
    const int s = item % tasks / parts.row_tiles, at = item % parts.row_tiles;
    task t;
    if (!task_of<ROWS, SPREAD_FEW>(t, a, parts.row_tiles, s, at, chunk, 1)) return false;
    const int first = max(t.begin, t.low / ROWS * ROWS);
    w = {OF_QUERIES, t.rows, s, 0, first, t.end, ROWS, chunk, t.n_chunks};
    return true;
}

// ---- copying -----------------------------------------------------------------------------------

// The tiles from `tile` on whose keys are all before position `end`, at most n.
template <bool PAGED, bool E4M3>
INLINE void stream_latents(copier &c, const attn_args<bf16> &a, const work &w, int &tile, int end,
                           int n)
{
    context_run run = {0, 0, 0};
#pragma unroll 1
    for (; n > 0 && tile < w.end && min(tile + ROWS, w.end) <= end; n--, tile += ROWS) {
        if constexpr (E4M3) {
            c.begin_stage();
            widen_tile<WIDTH, 3>(c.stream.stage(), a, w.s, 0, 0, tile, w.end);
            c.end_stored_stage();
        } else {
            copy_stage<WIDTH, PAGED, 1, PAGED>(c, a, w, tile, run);
        }
    }
}

// Copies an item. early: keys of earlier batches may be read before grid_wait(), which is due.
template <bool PAGED, bool E4M3>
INLINE void copy_item(copier &c, const attn_args<bf16> &a, const work &w, bool early)
{
    int tile = w.first;
    c.begin(w);
    if (early) {
        stream_latents<PAGED, E4M3>(c, a, w, tile, number_at<true>(a.stored + w.s), STAGES);
        grid_wait();
    }
    copy_packed<WIDTH, 1, 1>(c, a, w, a.out);
    stream_latents<PAGED, E4M3>(c, a, w, tile, w.end, INT_MAX);
}

// ---- chunks of one context in several items ----------------------------------------------------

// Where the parts of a warpgroup's warps are; the first one's.
INLINE float4 *latent_part(const latent_parts &parts, const work &w, int chunk, int group)
{
    int64_t task = (int64_t)w.s * parts.row_tiles + w.p.base / ROWS;
    return parts.at + ((task * parts.chunks + chunk) * GROUPS + group) * parts.warps * PART;
}

// Writes the sums of an item; true in the warpgroup that is the last of the context's to do so.
INLINE bool store_chunk(computer &c, const latent_parts &parts, const work &w,
                        const row_sums<HALF> &r, unsigned *tickets, int *is_last)
{
    int warp = threadIdx.x % 128 / 32, task = w.s * parts.row_tiles + w.p.base / ROWS;
    float4 *to = latent_part(parts, w, w.part, c.group) + warp * PART + threadIdx.x % 32;
    if (warp < parts.warps) {
#pragma unroll
        for (int i = 0; i < HALF / 8; i++)
            to[i * 32] = make_float4(r.out[i][0], r.out[i][1], r.out[i][2], r.out[i][3]);
        to[HALF / 8 * 32] = make_float4(r.top[0], r.top[1], r.sum[0], r.sum[2]);
    }
    return last_group(&tickets[1 + task * GROUPS + c.group], w.n_parts, c.group, is_last);
}

// Joins the chunks' sums of a warpgroup's columns, 16 rows and 64 columns a warp at a time, and
// stores what they give.
INLINE void join_parts(computer &c, const attn_args<bf16> &a, const latent_parts &parts,
                       const work &w)
{
    constexpr int SETS = HALF / 64;
    for (int at = threadIdx.x % 128 / 32; at < parts.warps * SETS; at += 4) {
        int rows = at / SETS, set = at % SETS;
        row_sums<64> r;
        clear(r);
#pragma unroll 2
        for (int z = 0; z < w.n_parts; z++) {
            const float4 *from = latent_part(parts, w, z, c.group) + rows * PART + threadIdx.x % 32;
            float4 ends = __ldcg(from + HALF / 8 * 32);
            join_step steps[2] = {next_chunk(r.top[0], ends.x), next_chunk(r.top[1], ends.y)};
            r.sum[0] = joined(r.sum[0], ends.z, steps[0]);
            r.sum[2] = joined(r.sum[2], ends.w, steps[1]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float4 x = __ldcg(from + (set * 8 + i) * 32);
                r.out[i][0] = joined(r.out[i][0], x.x, steps[0]);
                r.out[i][1] = joined(r.out[i][1], x.y, steps[0]);
                r.out[i][2] = joined(r.out[i][2], x.z, steps[1]);
                r.out[i][3] = joined(r.out[i][3], x.w, steps[1]);
            }
        }
        store_result<64>(r, a, w.p, rows * 16, c.group * HALF + set * 64);
    }
}

// ---- computing ---------------------------------------------------------------------------------

// A warpgroup's columns of an item.
template <bool PAGED>
INLINE void attend_latents(computer &c, const attn_args<bf16> &a, const latent_parts &parts,
                           const work &item, unsigned *tickets, int *is_last)
{
    const work w = item;
    const int row0 = c.row0 % ROWS;
    rows_seen seen = seen_by<PAGED>(a, w.s, w.p, row0);
    int least = __reduce_min_sync(~0u, min(seen.position[0], seen.position[1]));
    int max_hidden = __reduce_max_sync(~0u, max(seen.hidden[0], seen.hidden[1]));
    row_sums<HALF> r;
    waiting_sums<HALF> memory, *before = &memory;
    asm volatile("" : "+l"(before)); // in memory, whatever the compiler would rather do
    bool first_chunk = true;
    clear(r);
#pragma unroll 1
    for (int tile = w.first; tile < w.end; tile += ROWS) {
        if (tile % CHUNK_KEYS == 0 && tile > w.first) end_chunk(r, before, first_chunk);
        float dots[ROWS / 8][4], shrink[2];
        uint32_t x[ROWS / 16][4], keys = c.stream.stage();
        c.wait_stage();
        multiply<WIDTH>(dots, c.kept, keys);
        wgmma_wait<0>();
        settle(dots);
        if (tile + ROWS >= w.end) c.done_with_kept();
        float factor = to_scores<ROWS>(a, dots);
        if (tile + ROWS - 1 > least || tile <= max_hidden) hide<ROWS>(dots, seen, tile, -INFINITY);
        take_weights<ROWS>(dots, r.top, shrink, factor);
        shrink_sums(r, shrink);
        as_left(x, dots);
        settle(x);
        settle(r.out);
        add_weighted(r.out, x, keys + c.group * (HALF / 64) * COLUMNS_APART);
        unrolled<ROWS / 16>([&](int n) { add_row_sums(r.sum, x[n]); });
        wgmma_wait<0>();
        settle(r.out);
        barrier_arrive(c.stream.is_empty());
        c.stream.next();
    }
    if (w.end <= w.first) c.done_with_kept(); // rows of padding, which see nothing
    if (!first_chunk) join_chunk(r, before, false);
    if (!PAGED || w.n_parts == 1)
        store_result<HALF>(r, a, w.p, row0, c.group * HALF);
    else if (store_chunk(c, parts, w, r, tickets, is_last))
        join_parts(c, a, parts, w);
}

#endif // HAS_WGMMA

// ---- launches ----------------------------------------------------------------------------------

template <bool PAGED, bool E4M3>
__global__ void __launch_bounds__(THREADS, 1)
    attn_latent_kernel(attn_args<bf16> a, latent_parts parts, unsigned *tickets, int n_items)
{
#if HAS_WGMMA
    const bool spread = PAGED && parts.chunks > 0, early = spread && a.early;
    extern __shared__ __align__(1024) char memory[];
    __shared__ block_state state;
    __shared__ int is_last[GROUPS];
    if (!early) grid_begin();
    run_block<WIDTH, STAGES, 0, 1>(
        state, memory,
        [&](copier &c) {
            bool waits = early; // still to come
            c.each_item(tickets, n_items, [&](int item) {
                work w;
                bool taken = spread ? take_chunk(w, a, parts, item)
                                    : take_queries<PAGED, ROWS>(w, a, item, PAGED ? SPREAD_FEW : 0);
                if (taken)
                    copy_item<PAGED, E4M3>(c, a, w, waits);
                else if (waits)
                    grid_wait();
                waits = false;
            });
        },
        [&](computer &c) {
            if (early) grid_begin();
            c.each_item(state, OF_QUERIES, [&](const work &w) {
                attend_latents<PAGED>(c, a, parts, w, tickets, &is_last[c.group]);
            });
        });
#endif
}

template <bool PAGED>
static void launch(struct device *dev, const attn_args<bf16> &a, const latent_parts &parts, int n)
{
    struct cuda_state *state = cuda_use(dev);
    cuda_launch(dev, "latent attention",
                PAGED && a.scales ? attn_latent_kernel<PAGED, PAGED>
                                  : attn_latent_kernel<PAGED, false>,
                std::min(n, state->n_sms), THREADS, (STAGES + 1) * tile_bytes<WIDTH>, a, parts,
                state->tickets, n);
}

// Of the sequences of few rows.
static void launch_chunks(struct device *dev, const attn_args<bf16> &a)
{
    const int rows = std::min(a.max_query * a.group, SPREAD_FEW);
    latent_parts parts = {NULL, ceil_div(rows, ROWS), attn_chunks(a, a.max_query, a.max_context),
                          std::min(ceil_div(rows, 16), ROWS / 16)};
    const int64_t each = parts.chunks > 1 ? parts.chunks * GROUPS * parts.warps * PART : 0;
    by_turns(dev, a, (N_TICKETS - 1) / (parts.row_tiles * GROUPS),
             parts.row_tiles * each * (int64_t)sizeof(float4), MAX_PART_BYTES,
             [&](const attn_args<bf16> &b, void *memory) {
                 parts.at = (float4 *)memory;
                 launch<true>(dev, b, parts, parts.row_tiles * b.n_seqs * parts.chunks);
             });
}

bool attn_latent_takes(struct device *dev, const attn_call &c)
{
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    return on_hopper(dev) && a.dt == DT_BF16 && a.latent > 0 && a.n_kv_heads == 1 &&
           a.head_dim % 8 == 0 && a.head_dim <= WIDTH && a.latent % 8 == 0 &&
           a.latent <= GROUPS * HALF &&
           aligned(16, {a.q, a.k, a.out}, {a.q_stride * 2, a.kv_stride * 2});
}

template <bool PAGED> static void launch_many(struct device *dev, const attn_args<bf16> &a)
{
    launch<PAGED>(dev, a, {}, query_items<ROWS>(a));
}

void attn_latent(struct device *dev, const attn_call &c)
{
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    const bool has_many = a.max_query * a.group > SPREAD_FEW;
    if (!c.kv) return launch_many<false>(dev, a);
    if (!has_many || a.n_seqs > 1) launch_chunks(dev, a);
    if (has_many && a.scales)
        attn_widened(dev, a, SPREAD_FEW, launch_many<true>);
    else if (has_many)
        launch_many<true>(dev, a);
}
