/* attn_few.cu: attention of a few rows a sequence to its paged context, in bf16 on the tensor
 * cores: decode steps, verification of drafts, and the sequences of a mixed step that only decode.
 *
 * The work is reading the context once. A block takes up to 16 packed rows (attention.cuh) of one
 * sequence and kv head and one chunk of its context, and its eight warps compute what
 * attn_order.cuh prescribes for it side by side: a warp has eight keys of every tile while scores
 * are computed, and every eighth set of 16 dimensions while values are summed. Where a context has
 * several chunks, the last block to finish joins them in their order. The grid depends on
 * max_context only, so that a captured launch serves every shorter context.
 *
 * Keys of earlier steps are complete before the matmul of this one's queries has begun (cuda.cuh),
 * so they are already on their way while that ends and the kernel behind it stores this step's.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention/attn_few.cuh"
#include "kernels/cuda/attention/attn_rows.cuh"
#include <algorithm>

#define WARPS   8
#define THREADS (WARPS * 32)
#define TILES   (CHUNK_KEYS / TILE_KEYS)

static_assert(TILE_KEYS == WARPS * 8, "a warp has eight keys of a tile");
static_assert(CHUNK_KEYS == THREADS, "a thread looks up one key");

// ---- shared memory -----------------------------------------------------------------------------

template <int HD> struct block_memory {
    bf16 keys[CHUNK_KEYS * HD];           // later the values, unless these have room of their own
    bf16 weights[TASK_ROWS * CHUNK_KEYS]; // before: the queries
    float most[TILES][TASK_ROWS][WARPS];  // largest dot product of a row and a warp's keys
    int32_t key_rows[CHUNK_KEYS]; // of the pool; -1: none. In the end [0]: this is the last block
};
static_assert(3 * (sizeof(block_memory<128>) + 1024) <= 228 * 1024, "three blocks on an SM");

// Starts copying rows from .. to - 1 of a chunk's keys or values; zeros where there is no key.
template <int HD>
INLINE void copy_keys(bf16 *tile, const int32_t *key_rows, const bf16 *pool,
                      const attn_args<bf16> &a, int from, int to)
{
    constexpr int UNITS = HD / 8, STEP = THREADS / UNITS;
    int u = threadIdx.x % UNITS;
#pragma unroll 4
    for (int r = from + threadIdx.x / UNITS; r < to; r += STEP) {
        int at = key_rows[r];
        bool valid = at >= 0 && u * 8 < a.head_dim;
        copy16(unit_at<UNITS>(tile, r, u), pool + (valid ? at * a.kv_stride + u * 8 : 0), valid);
    }
}

// The same of a pool in e4m3, at once.
template <int HD>
INLINE void widen_keys(bf16 *tile, const int32_t *key_rows, const attn_args<bf16> &a, int kv_head,
                       int value, int from, int to)
{
    widen_rows<HD, THREADS, 4>(
        a, kv_head, value, threadIdx.x, from, to, [&](int r) { return key_rows[r]; },
        [&](int r, int u, uint4 x) { *(uint4 *)unit_at<HD / 8>(tile, r, u) = x; });
}

template <int HD> INLINE void copy_queries(bf16 *tile, const attn_args<bf16> &a, const task &w)
{
    constexpr int UNITS = HD / 8;
#pragma unroll
    for (int i = threadIdx.x; i < TASK_ROWS * UNITS; i += THREADS) {
        int r = i / UNITS, u = i % UNITS;
        bool valid = w.rows.in(r) && u * 8 < a.head_dim;
        int64_t at = valid ? query_at(a, place_of(a, w.rows, r)) + u * 8 : 0;
        copy16(unit_at<UNITS>(tile, r, u), a.q + at, valid);
    }
}

// ---- a chunk -----------------------------------------------------------------------------------

// Dot products of the 16 rows and this warp's eight keys of each tile. What is past the end of the
// context is hidden later: a branch would let each product wait for its loads by itself.
template <int HD> INLINE void multiply_keys(float (&dot)[TILES][4], block_memory<HD> &m)
{
    constexpr int UNITS = HD / 8;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < UNITS; d += 4) { // 32 dimensions
        uint32_t q[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
            load_matrices(q[i], unit_at<UNITS>(m.weights, lane % 16, d + i * 2 + lane / 16));
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            uint32_t k[4];
            load_matrices(
                k, unit_at<UNITS>(m.keys, tile * TILE_KEYS + warp * 8 + lane % 8, d + lane / 8));
            mma(dot[tile], q[0], k[0], k[1]);
            mma(dot[tile], q[1], k[2], k[3]);
        }
    }
}

// The soft cap, and -inf for keys that a row does not see; then the warp's largest of each row.
template <int HD>
INLINE void mask(float (&dot)[TILES][4], block_memory<HD> &m, const attn_args<bf16> &a,
                 const task &w, const rows_seen &seen)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    to_scores<TILES * 8>(a, dot);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        float(&eight)[1][4] = reinterpret_cast<float(&)[1][4]>(dot[tile]);
        hide<8>(eight, seen, w.begin + tile * TILE_KEYS + warp * 8, -INFINITY);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float most = lanes_max<4>(fmaxf(dot[tile][h * 2], dot[tile][h * 2 + 1]));
            if (lane % 4 == 0) m.most[tile][lane / 4 + h * 8][warp] = most;
        }
    }
}

// From dot products to weights in shared memory.
template <int HD>
INLINE void weigh(float (&shrink)[TILES][2], float (&top)[2], const float (&dot)[TILES][4],
                  block_memory<HD> &m, float factor)
{
    constexpr int UNITS = CHUNK_KEYS / 8;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = lane / 4 + h * 8;
            const float4 *of_warps = reinterpret_cast<const float4 *>(m.most[tile][r]);
            float4 x = of_warps[0], y = of_warps[1];
            float most = fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)),
                               fmaxf(fmaxf(y.x, y.y), fmaxf(y.z, y.w)));
            tile_step step = next_tile(top[h], most, factor);
            shrink[tile][h] = step.shrink;
            store_pair(unit_at<UNITS>(m.weights, r, tile * WARPS + warp) + lane % 4 * 2,
                       weight_of(dot[tile][h * 2], factor, step.shift),
                       weight_of(dot[tile][h * 2 + 1], factor, step.shift));
        }
}

// Dimensions that a warp has, from `columns` times its number on; with heads of 64, four warps have
// none.
template <int HD> constexpr int columns = HD <= 128 ? 16 : HD / WARPS;

template <int HD>
INLINE void add_values(row_sums<columns<HD>> &r, const float (&shrink)[TILES][2],
                       block_memory<HD> &m, bf16 *values, int n)
{
    constexpr int STEPS = TILE_KEYS / 16, ACROSS = columns<HD> / 16;
    const int first = threadIdx.x / 32 * columns<HD>, lane = threadIdx.x % 32;
    const bool has_any = columns<HD> * WARPS <= HD || first < HD;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int from = tile * TILE_KEYS;
        if (from >= n) break;
        uint32_t x[STEPS][4], y[STEPS][ACROSS][4]; // all on their way before the first product
        unrolled<STEPS>([&](int k) {
            load_matrices(
                x[k], unit_at<CHUNK_KEYS / 8>(m.weights, lane % 16, from / 8 + k * 2 + lane / 16));
        });
        if (has_any)
            unrolled<STEPS, ACROSS>([&](int k, int d) {
                load_matrices_transposed(y[k][d], unit_at<HD / 8>(values, from + k * 16 + lane % 16,
                                                                  first / 8 + d * 2 + lane / 16));
            });
        shrink_sums(r, shrink[tile]);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            add_row_sums(r.sum, x[k]);
            if (!has_any) continue;
#pragma unroll
            for (int d = 0; d < ACROSS; d++) {
                mma(r.out[d * 2], x[k], y[k][d][0], y[k][d][1]);
                mma(r.out[d * 2 + 1], x[k], y[k][d][2], y[k][d][3]);
            }
        }
    }
}

// ---- chunks ------------------------------------------------------------------------------------

template <int HD>
INLINE void finish(row_sums<columns<HD>> &r, block_memory<HD> &m, const attn_args<bf16> &a,
                   const task &w, const task_plan &p)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * columns<HD>;
    if (w.n_chunks == 1) {
        if (first < HD) store_result(r, a, w.rows, 0, first);
        return;
    }
    const int number = blockIdx.y * gridDim.x + blockIdx.x;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (first >= HD || !w.rows.in(lane / 4 + h * 8)) continue;
        float *to =
            p.parts + p.part_at<HD>(number, blockIdx.z) + (lane / 4 + h * 8) * part_width<HD>;
#pragma unroll
        for (int i = 0; i < columns<HD> / 8; i++)
            store_pair(to + first + i * 8 + lane % 4 * 2, r.out[i][h * 2], r.out[i][h * 2 + 1]);
        if (warp == 0 && lane % 4 == 0) store_pair(to + HD, r.top[h], r.sum[h * 2]);
    }
    if (last_block(&p.tickets[number], w.n_chunks, m.key_rows))
        join_chunks<HD>(a, w, p, number, 0, threadIdx.x, THREADS);
}

// ---- the kernel --------------------------------------------------------------------------------

// a.early: the kernel before this one writes none of the batch's numbers and no key of an earlier
// batch. at_once: there is room for the values beside the keys.
template <int HD, bool E4M3>
__global__ void __launch_bounds__(THREADS, HD <= 128 ? 3 : 1)
    few_kernel(attn_args<bf16> a, task_plan p, bool at_once)
{
    extern __shared__ __align__(128) char shared[];
    block_memory<HD> &m = *reinterpret_cast<block_memory<HD> *>(shared);
    bf16 *values = at_once ? reinterpret_cast<bf16 *>(shared + sizeof m) : m.keys;
    if (!a.early) grid_wait();
    task w;
    bool works = task_of(w, a, p.row_tiles, blockIdx.y, blockIdx.x, blockIdx.z, 1);
    auto copy = [&](bf16 *tile, int value, int from, int to) {
        if constexpr (E4M3)
            widen_keys<HD>(tile, m.key_rows, a, w.kv_head, value, from, to);
        else
            copy_keys<HD>(tile, m.key_rows, (value ? a.v : a.k) + (int64_t)w.kv_head * a.head_dim,
                          a, from, to);
    };
    int n = 0, old = 0; // keys, in whole tiles; those of earlier batches
    rows_seen seen;
    if (works) {
        int key = w.begin + threadIdx.x;
        bool is_seen = key >= w.low && key < w.end;
        m.key_rows[threadIdx.x] = is_seen ? (int)key_row<true, true>(a, w.s, key) : -1;
        n = (max(0, w.end - w.begin) + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS;
        if (a.early) old = min(n, max(0, number_at<true>(a.stored + w.s) - w.begin));
        __syncthreads();
        copy(m.keys, 0, 0, old);
        if (at_once) copy(values, 1, 0, old);
        seen = seen_by<true, true>(a, w.s, w.rows, 0);
    }
    if (a.early) grid_wait();
    grid_release();
    if (!works) return;
    copy_queries<HD>(m.weights, a, w);
    copy(m.keys, 0, old, n);
    copies_commit();
    if (at_once) copy(values, 1, old, n);
    copies_commit();

    float dot[TILES][4] = {}, shrink[TILES][2];
    row_sums<columns<HD>> r;
    clear(r);
    copies_wait<1>();
    __syncthreads();
    multiply_keys<HD>(dot, m);
    mask<HD>(dot, m, a, w, seen);
    __syncthreads();
    if (!at_once) copy(values, 1, 0, n);
    copies_commit();
    weigh<HD>(shrink, r.top, dot, m, score_factor(a));
    copies_wait<0>();
    __syncthreads();
    add_values<HD>(r, shrink, m, values, n);
    finish<HD>(r, m, a, w, p);
}

template <int HD> static void launch(struct device *dev, const attn_args<bf16> &a)
{
    struct cuda_state *state = cuda_use(dev);
    task_plan p = task_plan_of(dev, a, TASK_ROWS);
    size_t keys = sizeof(bf16) * CHUNK_KEYS * HD, shared = sizeof(block_memory<HD>);
    // values wait for the keys' room where blocks on the same SM have work meanwhile
    auto fit_at_once = [&](int64_t blocks) {
        return shared + keys <= (size_t)state->max_shared && (HD <= 64 || blocks <= state->n_sms);
    };
    auto launch_turn = [&](const attn_args<bf16> &b, void *memory) {
        p.parts = (float *)memory;
        dim3 grid(p.tasks, b.n_seqs, p.chunks); // all first chunks first
        bool at_once = fit_at_once((int64_t)grid.x * grid.y * grid.z);
        cuda_launch(dev, "attention of few rows",
                    a.scales ? few_kernel<HD, true> : few_kernel<HD, false>, grid, THREADS,
                    shared + (at_once ? keys : 0), b, p, at_once);
    };
    const int64_t bytes = p.part_at<HD>(p.tasks, 0) * sizeof(float);
    by_turns(dev, a, N_TICKETS / p.tasks, p.chunks > 1 ? bytes : 0, MAX_PART_BYTES, launch_turn);
}

void attn_few(struct device *dev, const attn_call &c)
{
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    (a.head_dim <= 64 ? launch<64> : a.head_dim <= 128 ? launch<128> : launch<256>)(dev, a);
}
