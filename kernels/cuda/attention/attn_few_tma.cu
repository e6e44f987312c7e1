/* attn_few_tma.cu: attention of a few rows a sequence, as attn_few.cu, on Hopper and where there
 * are more chunks than SMs. There instructions bound attn_few.cu, of which copying is the most: it
 * has an address for each 16 bytes, where the TMA has one for a block's 16 keys.
 *
 * As many blocks as the device holds take the items by turns: a task and a run of its chunks, all
 * of them where there are tasks enough. A block is four warps that compute what attn_order.cuh
 * prescribes, tile by tile (a warp has 16 keys of a tile while scores are computed, and a quarter
 * of the dimensions while values are summed), and one that copies: a ring of tiles of keys and of
 * values, which it keeps filled ahead across items. A task of one item is joined in registers; of
 * several, the last block to finish joins the parts.
 *
 * Of a pool in e4m3 the ring has codes, which are widened in registers: an element of ldmatrix is
 * two of them, so that a lane's four are the two halves of 16 dimensions of a key, or two
 * dimensions of two neighbouring keys (e4m3.h). Scales are powers of two, which commute with
 * rounding: a key's is applied to its dot products, a value's to its weights, which are then
 * summed with its inverse.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention/attn_few.cuh"
#include "kernels/cuda/attention/attn_rows.cuh"
#include "kernels/cuda/hopper.cuh"
#include <algorithm>

#define WARPS       4 // that compute
#define THREADS     (WARPS * 32)
#define BOX_KEYS    16 // a tile has a box for each of the warps
#define MAX_STAGES  12
#define MAX_SEQS    1024 // of a launch that splits contexts
#define BEHIND_RING 8704 // bytes

static_assert(TILE_KEYS == WARPS * BOX_KEYS, "a warp has a box of a tile's keys");

// A launch. whole: a block takes whole tasks, each gridDim.x-th. Else there are `tasks` blocks to a
// group, each with one of a sequence's, and the groups share out the chunks of all sequences
// evenly, each a run of them. Either way neighbours read the same tokens at about the same time.
struct tma_plan {
    bool whole;
    int tasks, row_tiles; // of a sequence
    int chunks;           // of a context, at most
    int stages;
    float *parts; // !whole: of each task those of `chunks` chunks, part_rows rows each
    unsigned *tickets;
    int part_rows;
};

#if HAS_WGMMA

template <int HD, bool E4M3> constexpr int box_bytes = BOX_KEYS *HD *(E4M3 ? 1 : 2);
template <int HD, bool E4M3> constexpr int stage_bytes = WARPS *box_bytes<HD, E4M3>;

// What is behind the ring.
struct block_memory {
    bf16 weights[TASK_ROWS * TILE_KEYS];
    float most[TASK_ROWS][WARPS]; // largest dot product of a row and a warp's keys
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    // E4M3: of a stage of keys and its boxes, of the keys and of their values; of a tile's values
    // 1 / 2^scale
    __align__(16) int8_t scales[MAX_STAGES][WARPS][KV_SCALES][BOX_KEYS];
    bf16 inverse[TILE_KEYS];
    int is_last;
    int ends[MAX_SEQS]; // !whole: chunks of the sequences up to this one
};
static_assert(sizeof(block_memory) <= BEHIND_RING, "room behind the ring");

// Some chunks of a task.
struct item : task {
    int number;   // of the task
    int chunk, n; // the first of them, and how many
};

// !whole: fills in m.ends. One warp.
__device__ __forceinline__ void count_chunks(block_memory &m, const attn_args<bf16> &a,
                                             const tma_plan &p)
{
    const int lane = threadIdx.x % 32;
    int before = 0;
#pragma unroll 4
    for (int first = 0; first < a.n_seqs; first += 32) {
        const int s = min(first + lane, a.n_seqs - 1);
        const int n = number_at<true>(a.query_start + s + 1) - number_at<true>(a.query_start + s);
        const int keys = number_at<true>(a.context_len + s);
        int x = min(max((keys + CHUNK_KEYS - 1) / CHUNK_KEYS, 1), p.chunks);
        if (n * a.group > FEW_ROWS || first + lane >= a.n_seqs) x = 0;
        x = lanes_until(x) + before;
        if (first + lane < a.n_seqs) m.ends[s] = x;
        before = __shfl_sync(~0u, x, 31);
    }
}

// The items of a block, one after the other.
struct item_walk {
    int at, end; // tasks; !whole: chunks
    int s, task;

    __device__ __forceinline__ item_walk(const block_memory &m, const attn_args<bf16> &a,
                                         const tma_plan &p)
        : at(blockIdx.x), end(a.n_seqs * p.tasks), s(0), task(0)
    {
        if (p.whole) return;
        const int groups = gridDim.x / p.tasks, group = blockIdx.x / p.tasks;
        task = blockIdx.x - group * p.tasks;
        at = m.ends[a.n_seqs - 1] * group / groups;
        end = m.ends[a.n_seqs - 1] * (group + 1) / groups;
    }
    // False behind the last one. An item may have nothing to do: n is 0.
    __device__ __forceinline__ bool next(item &w, const block_memory &m, const attn_args<bf16> &a,
                                         const tma_plan &p)
    {
        if (at >= end) return false;
        int chunk = 0, n = p.chunks;
        if (p.whole) {
            s = at / p.tasks;
            task = at - s * p.tasks;
            at += gridDim.x;
        } else {
            while (m.ends[s] <= at) s++;
            chunk = at - (s > 0 ? m.ends[s - 1] : 0);
            n = min(m.ends[s], end) - at;
            at += n;
        }
        w.number = s * p.tasks + task;
        w.chunk = chunk;
        w.n = task_of(w, a, p.row_tiles, s, task, chunk, n) ? min(n, w.n_chunks - chunk) : 0;
        w.begin = max(w.begin, w.low / TILE_KEYS * TILE_KEYS);
        return true;
    }
};

// The warps that compute meet.
__device__ __forceinline__ void meet()
{
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// ---- copies ------------------------------------------------------------------------------------

// The scales of a tile's keys and values, four to a lane, as a stage has them.
__device__ __forceinline__ uint32_t scales_of_tile(const attn_args<bf16> &a, const item &w, int key)
{
    const int lane = threadIdx.x % 32, first = key + lane / 8 * BOX_KEYS;
    if (first >= w.end || first + BOX_KEYS <= w.low) return 0;
    const int slot = (int)key_row<true, true>(a, w.s, first), block = slot >> a.block_shift;
    const int64_t at = kv_scale_at(block, slot - (block << a.block_shift) + lane % 4 * 4,
                                   a.block_size, a.n_kv_heads, w.kv_head, lane / 4 % 2);
    return __ldcg((const unsigned *)(a.scales + at));
}

// A warp: keeps the ring filled. waits: not before there is a key of this batch to be copied.
template <int HD, bool E4M3>
__device__ void copy_items(stage_ring ring, const CUtensorMap *k_map, const CUtensorMap *v_map,
                           block_memory &m, const attn_args<bf16> &a, const tma_plan &p, bool waits)
{
    const int lane = threadIdx.x % 32;
    int used = 0;
    item w;
    for (item_walk walk(m, a, p); walk.next(w, m, a, p);) {
        if (w.n == 0) continue;
        const int old = waits ? number_at<true>(a.stored + w.s) : 0;
        if (a.block_shift < 0) __builtin_unreachable(); // attn_few_tma_takes()
        // of the boxes of 512 keys, a lane each
        auto look_up = [&](int key) {
            key += lane * BOX_KEYS;
            return key < w.end ? (int)key_row<true, true>(a, w.s, key) : 0;
        };
        int rows = 0, next = look_up(w.begin);
        uint32_t scales = 0, next_scales = 0;
        bool ahead = false; // next_scales are this tile's
        for (int key = w.begin; key < w.end; key += TILE_KEYS) {
            const int at = (key - w.begin) / BOX_KEYS % 32;
            if (at == 0) {
                rows = next;
                next = look_up(key + 32 * BOX_KEYS);
            }
            if (waits && min(key + TILE_KEYS, w.end) > old) {
                grid_wait();
                waits = false;
            }
            if (E4M3) { // a tile ahead, but for one with keys of this batch
                scales = ahead ? next_scales : scales_of_tile(a, w, key);
                ahead =
                    key + TILE_KEYS < w.end && (!waits || min(key + 2 * TILE_KEYS, w.end) <= old);
                if (ahead) next_scales = scales_of_tile(a, w, key + TILE_KEYS);
            }
            const int first = max(w.low - key, 0) / BOX_KEYS;
            const int end = min((w.end - key + BOX_KEYS - 1) / BOX_KEYS, WARPS);
#pragma unroll
            for (int values = 0; values < 2; values++, ring.next(), used++) {
                if (used >= ring.n) barrier_wait(ring.is_empty(), ring.parity ^ 1);
                if (E4M3 && !values) {
                    reinterpret_cast<uint32_t *>(m.scales[ring.slot])[lane] = scales;
                    __syncwarp();
                }
                if (lane == 0) barrier_expect(ring.is_full(), (end - first) * box_bytes<HD, E4M3>);
                for (int i = first; i < end; i++) {
                    const int row = __shfl_sync(~0u, rows, at + i);
                    if (lane == 0)
                        copy_box(ring.stage() + i * box_bytes<HD, E4M3>, values ? v_map : k_map,
                                 row, 0, w.kv_head, ring.is_full(), L2_EVICT_FIRST);
                }
            }
        }
    }
}

// Unit u of row r of a box, an address: columns come in groups of 64.
__device__ __forceinline__ uint32_t box_unit(uint32_t box, int r, int u)
{
    return box + u / 8 * (BOX_KEYS * 128) + r * 128 + ((u % 8 ^ (r & 7)) << 4);
}

// The same of codes, 16 of them a unit.
template <int HD> __device__ __forceinline__ uint32_t code_unit(uint32_t box, int r, int u)
{
    const uint32_t at = r * HD + u * 16;
    return box + (at ^ (at >> 7 & (HD / 16 - 1)) << 4);
}

// Makes zeros of the warp's keys of a tile that are none: 0 times what lies there may be anything.
template <int HD, bool E4M3>
__device__ __forceinline__ void clear_unseen(uint32_t box, int key, const item &w)
{
    constexpr int UNITS = HD / (E4M3 ? 16 : 8);
    const int low = w.low - key, end = w.end - key;
    if ((low <= 0 && end >= BOX_KEYS) || low >= BOX_KEYS || end <= 0) return;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < BOX_KEYS * UNITS; i += 32) {
        const int r = i / UNITS, u = i % UNITS;
        if (r < low || r >= end)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                             E4M3 ? code_unit<HD>(box, r, u) : box_unit(box, r, u)),
                         "r"(0)
                         : "memory");
    }
    fence_async(); // the copy engine writes there next
}

// ---- a tile ------------------------------------------------------------------------------------

// The rows' queries as the left operands of products, 16 dimensions each.
template <int HD>
__device__ __forceinline__ void load_queries(uint32_t (&q)[HD / 16][4], const attn_args<bf16> &a,
                                             const packed_rows &rows)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = lane / 4 + h * 8;
        const bool in = rows.in(r);
        const bf16 *row = a.q + (in ? query_at(a, place_of(a, rows, r)) : 0) + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < HD / 8; i++)
            q[i / 2][i % 2 * 2 + h] = in ? *reinterpret_cast<const uint32_t *>(row + i * 8) : 0;
    }
}

// Dot products of the 16 rows and this warp's 16 keys of a tile.
template <int HD>
__device__ __forceinline__ void multiply_keys(float (&dot)[2][4], const uint32_t (&q)[HD / 16][4],
                                              uint32_t box)
{
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < HD / 16; i++) {
        uint32_t k[4];
        load_matrices(k, box_unit(box, row, i * 2 + lane / 8 % 2));
        mma(dot[0], q[i], k[0], k[1]);
        mma(dot[1], q[i], k[2], k[3]);
    }
}

// The same of codes; then the keys' scales. of_values: the scales of the values beside them.
template <int HD>
__device__ __forceinline__ void multiply_codes(float (&dot)[2][4], int8_t (&of_values)[2][2],
                                               const uint32_t (&q)[HD / 16][4], uint32_t box,
                                               const int8_t (&scales)[KV_SCALES][BOX_KEYS])
{
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < HD / 16; i += 2) {
        uint32_t codes[4], k[2];
        load_matrices(codes, code_unit<HD>(box, row, i + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < 4; n++) {
            widen(codes[n], k[0], k[1]);
            mma(dot[n / 2], q[i + n % 2], k[0], k[1]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int key = n * 8 + lane % 4 * 2 + e;
            const float factor = e4m3_factor(scales[0][key]);
            dot[n][e] *= factor;
            dot[n][e + 2] *= factor;
            of_values[n][e] = scales[1][key];
        }
}

// From dot products, -inf where a row does not see the key, to weights in shared memory. E4M3:
// those of the values' codes.
template <bool E4M3>
__device__ __forceinline__ void weigh(float (&shrink)[2], float (&top)[2], const float (&dot)[2][4],
                                      const int8_t (&of_values)[2][2], block_memory &m,
                                      float factor)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float most =
            fmaxf(fmaxf(dot[0][h * 2], dot[0][h * 2 + 1]), fmaxf(dot[1][h * 2], dot[1][h * 2 + 1]));
        const float of_row = lanes_max<4>(most);
        if (lane % 4 == 0) m.most[lane / 4 + h * 8][warp] = of_row;
    }
    meet();
    if (E4M3 && lane < 4)
#pragma unroll
        for (int i = 0; i < 2; i++)
            store_pair(m.inverse + warp * BOX_KEYS + i * 8 + lane * 2,
                       power_of_two(-of_values[i][0]), power_of_two(-of_values[i][1]));
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = lane / 4 + h * 8;
        const float4 x = *reinterpret_cast<const float4 *>(m.most[r]);
        const tile_step step = next_tile(top[h], fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), factor);
        shrink[h] = step.shrink;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float w[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                w[e] = weight_of(dot[i][h * 2 + e], factor, step.shift);
                // where there is no key, its scale may be anything
                if (E4M3 && w[e] > 0) w[e] *= e4m3_factor(of_values[i][e]);
            }
            store_pair(unit_at<TILE_KEYS / 8>(m.weights, r, warp * 2 + i) + lane % 4 * 2, w[0],
                       w[1]);
        }
    }
}

// Of a box of codes.
template <int HD>
__device__ __forceinline__ void add_codes(row_sums<HD / WARPS> &r, const uint32_t (&x)[4],
                                          uint32_t box)
{
    constexpr int UNITS = HD / WARPS / 16; // of a warp: 1 or 2
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t codes[4];
    load_matrices_transposed(
        codes, code_unit<HD>(box, lane % 16, warp * UNITS + (UNITS > 1 ? lane / 16 : 0)));
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        uint32_t lower[2], upper[2]; // of the 16 dimensions the first eight and the others
        widen(codes[i * 2], lower[0], upper[0]);
        widen(codes[i * 2 + 1], lower[1], upper[1]);
        mma(r.out[i * 2], x, lower[0], lower[1]);
        mma(r.out[i * 2 + 1], x, upper[0], upper[1]);
    }
}

// Of the boxes first .. end - 1 of a tile; the others are weighted with 0.
template <int HD, bool E4M3>
__device__ __forceinline__ void add_values(row_sums<HD / WARPS> &r, block_memory &m, uint32_t stage,
                                           int first, int end)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int box = 0; box < WARPS; box++) {
        if (box < first || box >= end) continue;
        uint32_t x[4];
        load_matrices(x, unit_at<TILE_KEYS / 8>(m.weights, lane % 16, box * 2 + lane / 16));
        if constexpr (E4M3) {
            const uint32_t *inverse =
                reinterpret_cast<const uint32_t *>(m.inverse + box * BOX_KEYS);
            mma(r.sum, x, inverse[lane % 4], inverse[lane % 4 + 4]);
            add_codes<HD>(r, x, stage + box * box_bytes<HD, E4M3>);
            continue;
        }
        add_row_sums(r.sum, x);
#pragma unroll
        for (int d = 0; d < HD / WARPS; d += 16) {
            uint32_t y[4];
            const int unit = (warp * (HD / WARPS) + d) / 8 + lane / 16;
            load_matrices_transposed(y,
                                     box_unit(stage + box * box_bytes<HD, E4M3>, lane % 16, unit));
            mma(r.out[d / 8], x, y[0], y[1]);
            mma(r.out[d / 8 + 1], x, y[2], y[3]);
        }
    }
}

// ---- items -------------------------------------------------------------------------------------

template <int HD>
__device__ __forceinline__ void store_part(float *part, const row_sums<HD / WARPS> &r,
                                           const packed_rows &rows)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!rows.in(lane / 4 + h * 8)) continue;
        float *row = part + (lane / 4 + h * 8) * part_width<HD>;
#pragma unroll
        for (int i = 0; i < HD / WARPS / 8; i++)
            store_pair(row + warp * (HD / WARPS) + i * 8 + lane % 4 * 2, r.out[i][h * 2],
                       r.out[i][h * 2 + 1]);
        if (warp == 0 && lane % 4 == 0) store_pair(row + HD, r.top[h], r.sum[h * 2]);
    }
}

template <int HD, bool E4M3>
__device__ __forceinline__ void sum_item(stage_ring &ring, block_memory &m,
                                         const attn_args<bf16> &a, const tma_plan &p, const item &w,
                                         const rows_seen &seen)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool whole = w.n == w.n_chunks;
    const int64_t stride = (int64_t)p.part_rows * part_width<HD>;
    float *parts = p.parts + w.number * p.chunks * stride;
    uint32_t q[HD / 16][4];
    load_queries<HD>(q, a, w.rows);
    row_sums<HD / WARPS> r;
    waiting_sums<HD / WARPS> before;
    clear(r);
    for (int key = w.begin, chunk = w.chunk; key < w.end; key += TILE_KEYS) {
        float dot[2][4] = {}, shrink[2];
        barrier_wait(ring.is_full(), ring.parity);
        const uint32_t keys = ring.stage() + warp * box_bytes<HD, E4M3>;
        int8_t of_values[2][2];
        if constexpr (E4M3)
            multiply_codes<HD>(dot, of_values, q, keys, m.scales[ring.slot][warp]);
        else
            multiply_keys<HD>(dot, q, keys);
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.is_empty());
        ring.next();
        const float factor = to_scores<16>(a, dot);
        if (a.window > 0 || key + TILE_KEYS > w.lowest + 1)
            hide<16>(dot, seen, key + warp * BOX_KEYS, -INFINITY);
        weigh<E4M3>(shrink, r.top, dot, of_values, m, factor);
        barrier_wait(ring.is_full(), ring.parity);
        clear_unseen<HD, E4M3>(ring.stage() + warp * box_bytes<HD, E4M3>, key + warp * BOX_KEYS, w);
        meet();
        shrink_sums(r, shrink);
        add_values<HD, E4M3>(r, m, ring.stage(), max(w.low - key, 0) / BOX_KEYS,
                             (w.end - key + BOX_KEYS - 1) / BOX_KEYS);
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.is_empty());
        ring.next();
        const bool ends = key + TILE_KEYS >= w.end;
        if ((key + TILE_KEYS) % CHUNK_KEYS && !ends) continue;
        if (!whole) {
            store_part<HD>(parts + chunk * stride, r, w.rows);
        } else if (w.n_chunks > 1) {
            join_chunk(r, &before, chunk == 0);
            if (!ends) put_aside(&before, r);
        }
        chunk++;
        if (!ends) clear(r);
    }
    if (whole)
        store_result(r, a, w.rows, 0, warp * (HD / WARPS));
    else if (completes(&p.tickets[w.number], w.n, w.n_chunks, threadIdx.x == 0, &m.is_last,
                       [] { meet(); }))
        join_chunks<HD>(a, w, parts, stride, threadIdx.x, THREADS);
}

#endif

// a.early: the kernel before this one writes none of the batch's numbers and no key of an earlier
// batch.
template <int HD, bool E4M3>
__global__ void __launch_bounds__(THREADS + 32, 3)
    few_tma_kernel(const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, attn_args<bf16> a, tma_plan p)
{
#if HAS_WGMMA
    extern __shared__ __align__(1024) char shared[];
    block_memory &m = *reinterpret_cast<block_memory *>(shared + p.stages * stage_bytes<HD, E4M3>);
    stage_ring ring = {shared_address(shared),
                       stage_bytes<HD, E4M3>,
                       shared_address(m.full),
                       shared_address(m.empty),
                       p.stages,
                       0,
                       0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; i++) {
            barrier_init(ring.full + i * 8, 1);
            barrier_init(ring.empty + i * 8, WARPS);
        }
        barriers_made();
    }
    if (!a.early) grid_wait();
    if (!p.whole && threadIdx.x < 32) count_chunks(m, a, p);
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        copy_items<HD, E4M3>(ring, &k_map, &v_map, m, a, p, a.early);
        return;
    }
    item w;
    rows_seen seen;
    item_walk walk(m, a, p);
    auto next = [&] {
        if (!walk.next(w, m, a, p)) return false;
        seen = seen_by<true, true>(a, w.s, w.rows, 0);
        return true;
    };
    bool more = next();
    if (a.early) grid_wait();
    grid_release();
    for (; more; more = next())
        if (w.n > 0) sum_item<HD, E4M3>(ring, m, a, p, w, seen);
#endif
}

// ---- launches ----------------------------------------------------------------------------------

#define WHOLE_CHUNKS 4 // contexts of up to so many are not split where there are tasks enough

template <int HD> static void launch(struct device *dev, const attn_call &c)
{
    struct cuda_state *state = cuda_use(dev);
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    const int max_query = c.batch->max_query, n_seqs = a.n_seqs;
    const int rows = std::min(max_query * a.group, FEW_ROWS);
    tma_plan p = {};
    p.row_tiles = ceil_div(rows, TASK_ROWS);
    p.tasks = a.n_kv_heads * p.row_tiles;
    p.chunks = attn_chunks(a, max_query, c.batch->max_context);
    p.part_rows = std::min(rows, TASK_ROWS);
    p.tickets = state->tickets;
    const int all_tasks = p.tasks * n_seqs, sms = state->n_sms;
    p.whole = p.chunks == 1 || (p.chunks <= WHOLE_CHUNKS && all_tasks > sms / 2);
    int turn = n_seqs;
    if (!p.whole) {
        int64_t bytes = (int64_t)p.tasks * p.chunks * p.part_rows * part_width<HD> * sizeof(float);
        turn = std::min({turn, MAX_SEQS, N_TICKETS / p.tasks});
        turn = std::max(1, (int)std::min((int64_t)turn, MAX_PART_BYTES / bytes));
        p.parts = (float *)cuda_workspace(dev, turn * bytes);
        if (!p.parts) return;
    }
    CUtensorMap maps[2];
    const void *pools[2] = {a.k, a.v}, *codes[2] = {a.k_codes, a.v_codes};
    const int element = a.scales ? 1 : 2,
              columns = std::min(64, HD * element / 2); // two codes each
    const int groups = HD * element / 2 / columns;
    const cuuint64_t keys = (cuuint64_t)c.kv->n_blocks * a.block_size;
    for (int i = 0; i < 2; i++)
        if (!tensor_map(dev, &maps[i], a.scales ? codes[i] : pools[i],
                        {4,
                         {(cuuint64_t)columns, keys, (cuuint64_t)groups, (cuuint64_t)a.n_kv_heads},
                         {(cuuint64_t)a.kv_stride * element, 128, (cuuint64_t)HD * element},
                         {(cuuint32_t)columns, BOX_KEYS, (cuuint32_t)groups, 1}}))
            return;
    // of whole tasks two blocks on an SM, where these take no more rounds than three would
    const bool two =
        p.whole && ceil_div(all_tasks, 2 * sms) * 2 <= ceil_div(all_tasks, 3 * sms) * 3;
    const int per_sm = two ? 2 : 3, stage = TILE_KEYS * HD * element;
    // of an SM's memory 1 KB a block is the system's
    const int bytes = (state->max_shared + 1024) / per_sm - 1024 - BEHIND_RING;
    p.stages = std::min(MAX_STAGES, bytes / stage);
    for (int s = 0; s < n_seqs; s += turn) {
        const int n = std::min(turn, n_seqs - s), most = per_sm * sms;
        const int blocks = p.whole ? std::min(p.tasks * n, most)
                                   : std::min(std::max(1, most / p.tasks), n * p.chunks) * p.tasks;
        cuda_launch(dev, "attention of few rows",
                    a.scales ? few_tma_kernel<HD, true> : few_tma_kernel<HD, false>, dim3(blocks),
                    THREADS + 32, p.stages * stage + BEHIND_RING, maps[0], maps[1],
                    attn_args_part(a, s, n), p);
    }
}

// Where there are fewer, attn_few.cu has all chunks under way at once, or joins them sooner.
bool attn_few_tma_takes(struct device *dev, const attn_call &c)
{
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    const int sms = cuda_use(dev)->n_sms, heads = a.n_seqs * a.n_kv_heads;
    const int chunks = attn_chunks(a, c.batch->max_query, c.batch->max_context);
    const bool many = heads > sms / 2 || (heads >= sms / 8 && heads * chunks > 2 * sms);
    return many && on_hopper(dev) && (a.head_dim == 64 || a.head_dim == 128) &&
           a.block_size >= BOX_KEYS && a.block_shift > 0 &&
           (a.scales ? a.in_sixteens : aligned(16, {a.k, a.v}, {a.kv_stride * 2}));
}

void attn_few_tma(struct device *dev, const attn_call &c)
{
    (c.shape->head_dim == 64 ? launch<64> : launch<128>)(dev, c);
}
