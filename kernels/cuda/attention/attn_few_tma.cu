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
 * Of a pool in e4m3 two tiles are computed at a time, for what bounds it is the latency of a tile,
 * with one meeting of the warps before both have weights and one before their values are added; one
 * that has no keys is copied and computed as one of keys that nobody sees, which changes nothing
 * (attn_order.cuh). The ring has codes, which are widened in registers: an element of ldmatrix is
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

#define WARPS      4 // that compute
#define THREADS    (WARPS * 32)
#define BOX_KEYS   16 // a tile has a box for each of the warps
#define MAX_STAGES 12
#define MAX_SEQS   1024 // of a launch that splits contexts
#define MAX_DIM    128

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

// Tiles that are computed at once.
template <bool E4M3> constexpr int turn_tiles = E4M3 ? 2 : 1;
template <bool E4M3> constexpr int turn_keys = turn_tiles<E4M3> *TILE_KEYS;

// What is behind the ring.
template <bool E4M3> struct block_memory {
    bf16 weights[turn_tiles<E4M3>][TASK_ROWS * TILE_KEYS];
    __align__(256) bf16 queries[E4M3 ? TASK_ROWS * MAX_DIM : 8];
    float most[turn_tiles<E4M3>][TASK_ROWS][WARPS]; // largest dot product with a warp's keys
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    // E4M3: of a stage of keys and its boxes, of the keys and of their values; 1 / 2^scale of the
    // values of a turn
    __align__(16) int8_t scales[E4M3 ? MAX_STAGES : 1][WARPS][KV_SCALES][BOX_KEYS];
    bf16 inverse[turn_tiles<E4M3>][TILE_KEYS];
    int is_last;
    int ends[MAX_SEQS]; // !whole: chunks of the sequences up to this one
};

#if HAS_WGMMA

template <int HD, bool E4M3> constexpr int box_bytes = BOX_KEYS *HD *(E4M3 ? 1 : 2);
template <int HD, bool E4M3> constexpr int stage_bytes = WARPS *box_bytes<HD, E4M3>;

// Some chunks of a task.
struct item : task {
    int number;   // of the task
    int chunk, n; // the first of them, and how many
};

// !whole: fills in block_memory's ends. One warp.
INLINE void count_chunks(int *ends, const attn_args<bf16> &a, const tma_plan &p)
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
        if (first + lane < a.n_seqs) ends[s] = x;
        before = __shfl_sync(~0u, x, 31);
    }
}

// The items of a block, one after the other.
struct item_walk {
    int at, end; // tasks; !whole: chunks
    int s, task;

    INLINE item_walk(const int *ends, const attn_args<bf16> &a, const tma_plan &p)
        : at(blockIdx.x), end(a.n_seqs * p.tasks), s(0), task(0)
    {
        if (p.whole) return;
        const int groups = gridDim.x / p.tasks, group = blockIdx.x / p.tasks;
        task = blockIdx.x - group * p.tasks;
        at = ends[a.n_seqs - 1] * group / groups;
        end = ends[a.n_seqs - 1] * (group + 1) / groups;
    }
    // False behind the last one. An item may have nothing to do: n is 0.
    INLINE bool next(item &w, const int *ends, const attn_args<bf16> &a, const tma_plan &p)
    {
        if (at >= end) return false;
        int chunk = 0, n = p.chunks;
        if (p.whole) {
            s = at / p.tasks;
            task = at - s * p.tasks;
            at += gridDim.x;
        } else {
            while (ends[s] <= at) s++;
            chunk = at - (s > 0 ? ends[s - 1] : 0);
            n = min(ends[s], end) - at;
            at += n;
        }
        w.number = s * p.tasks + task;
        w.chunk = chunk;
        w.n = task_of(w, a, p.row_tiles, s, task, chunk, n) ? min(n, w.n_chunks - chunk) : 0;
        const int turn = a.scales ? turn_keys<true> : turn_keys<false>;
        w.begin = max(w.begin, w.low / turn * turn);
        return true;
    }
};

// The warps that compute meet.
INLINE void meet()
{
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// ---- copies ------------------------------------------------------------------------------------

// Bytes that lie together, a multiple of 16 as the addresses are.
INLINE void copy_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The scales of boxes first .. end - 1 of a tile, rows of keys in `rows` from lane `at` on, into a
// stage with its keys: a lane has those of a box's keys or of its values.
INLINE void copy_scales(const attn_args<bf16> &a, int8_t (&to)[WARPS][KV_SCALES][BOX_KEYS],
                        int rows, int at, int first, int end, int kv_head, uint32_t barrier)
{
    const int lane = threadIdx.x % 32, box = lane / KV_SCALES, value = lane % KV_SCALES;
    const int slot = __shfl_sync(~0u, rows, at + box), block = slot >> a.block_shift;
    if (box < first || box >= end) return;
    copy_bytes(shared_address(to[box][value]),
               a.scales + kv_scale_at(block, slot - (block << a.block_shift), a.block_size,
                                      a.n_kv_heads, kv_head, value),
               BOX_KEYS, barrier);
}

// A warp: keeps the ring filled. waits: not before there is a key of this batch to be copied.
template <int HD, bool E4M3>
__device__ void copy_items(stage_ring ring, const CUtensorMap *k_map, const CUtensorMap *v_map,
                           block_memory<E4M3> &m, const attn_args<bf16> &a, const tma_plan &p,
                           bool waits)
{
    const int lane = threadIdx.x % 32;
    int used = 0;
    item w;
    for (item_walk walk(m.ends, a, p); walk.next(w, m.ends, a, p);) {
        if (w.n == 0) continue;
        const int old = waits ? number_at<true>(a.stored + w.s) : 0;
        if (a.block_shift < 0) __builtin_unreachable(); // attn_few_tma_takes()
        // of the boxes of 512 keys, a lane each
        auto look_up = [&](int key) {
            key += lane * BOX_KEYS;
            return key < w.end ? (int)key_row<true, true>(a, w.s, key) : 0;
        };
        int rows = 0, next = look_up(w.begin);
        for (int key = w.begin; key < w.end; key += turn_keys<E4M3>) {
            const int at = (key - w.begin) / BOX_KEYS % 32;
            if (at == 0) {
                rows = next;
                next = look_up(key + 32 * BOX_KEYS);
            }
            if (waits && min(key + turn_keys<E4M3>, w.end) > old) {
                grid_wait();
                waits = false;
            }
#pragma unroll
            for (int i = 0; i < 2 * turn_tiles<E4M3>; i++, ring.next(), used++) {
                const int values = i / turn_tiles<E4M3>, tile = i % turn_tiles<E4M3>;
                const int from = key + tile * TILE_KEYS, lane0 = at + tile * WARPS;
                const int first = max(w.low - from, 0) / BOX_KEYS;
                const int end = min((w.end - from + BOX_KEYS - 1) / BOX_KEYS, WARPS);
                if (used >= ring.n) barrier_wait(ring.is_empty(), ring.parity ^ 1);
                const bool scales = E4M3 && !values;
                const int of_box = box_bytes<HD, E4M3> + (scales ? KV_SCALES * BOX_KEYS : 0);
                if (lane == 0) barrier_expect(ring.is_full(), max(end - first, 0) * of_box);
                if (scales)
                    copy_scales(a, m.scales[ring.slot], rows, lane0, first, end, w.kv_head,
                                ring.is_full());
                for (int box = first; box < end; box++) {
                    const int row = __shfl_sync(~0u, rows, lane0 + box);
                    if (lane == 0)
                        copy_box(ring.stage() + box * box_bytes<HD, E4M3>, values ? v_map : k_map,
                                 row, 0, w.kv_head, ring.is_full(), L2_EVICT_FIRST);
                }
            }
        }
    }
}

// Unit u of row r of a box, an address: columns come in groups of 64.
INLINE uint32_t box_unit(uint32_t box, int r, int u)
{
    return box + u / 8 * (BOX_KEYS * 128) + r * 128 + ((u % 8 ^ (r & 7)) << 4);
}

// The same of codes, 16 of them a unit.
template <int HD> INLINE uint32_t code_unit(uint32_t box, int r, int u)
{
    const uint32_t at = r * HD + u * 16;
    return box + (at ^ (at >> 7 & (HD / 16 - 1)) << 4);
}

// Makes zeros of the warp's keys of a tile that are none: 0 times what lies there may be anything.
template <int HD, bool E4M3> INLINE void clear_unseen(uint32_t box, int key, const item &w)
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
INLINE void load_queries(uint32_t (&q)[HD / 16][4], const attn_args<bf16> &a,
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

// The same in shared memory, by all warps that compute: what widens keys needs the registers.
template <int HD>
INLINE void keep_queries(block_memory<true> &m, const attn_args<bf16> &a, const packed_rows &rows)
{
    constexpr int UNITS = HD / 8;
    meet(); // those of the item before have been read
#pragma unroll
    for (int i = threadIdx.x; i < TASK_ROWS * UNITS; i += THREADS) {
        const int r = i / UNITS, u = i % UNITS;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (rows.in(r))
            x = *reinterpret_cast<const uint4 *>(a.q + query_at(a, place_of(a, rows, r)) + u * 8);
        *reinterpret_cast<uint4 *>(unit_at<UNITS>(m.queries, r, u)) = x;
    }
    meet();
}

// Dot products of the 16 rows and this warp's 16 keys of a tile.
template <int HD>
INLINE void multiply_keys(float (&dot)[2][4], const uint32_t (&q)[HD / 16][4], uint32_t box)
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

// The same of the codes of a turn's tiles. of_values: the scales of the values beside them.
template <int HD>
INLINE void multiply_codes(float (&dot)[2][2][4], char2 (&of_values)[2][2], block_memory<true> &m,
                           const uint32_t (&boxes)[2], const int (&slots)[2])
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
    const uint32_t queries = shared_address(unit_at<HD / 8>(m.queries, lane % 16, lane / 16));
    const uint32_t at = code_unit<HD>(0, row, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < HD / 16; i += 2) {
        uint32_t q[2][4], codes[2][4], k[2];
#pragma unroll
        for (int n = 0; n < 2; n++) load_matrices(q[n], queries ^ (i + n) << 5);
#pragma unroll
        for (int t = 0; t < 2; t++) load_matrices(codes[t], boxes[t] + (at ^ i << 4));
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int t = n % 2, set = n / 2 % 2 * 2 + n / 4; // keys' halves by turns
            widen(codes[t][set], k[0], k[1]);
            mma(dot[t][set / 2], q[set % 2], k[0], k[1]);
        }
    }
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const auto &scales = m.scales[slots[t]][warp];
            const char2 of_keys = *(const char2 *)(scales[0] + n * 8 + lane % 4 * 2);
            of_values[t][n] = *(const char2 *)(scales[1] + n * 8 + lane % 4 * 2);
            const float factor[2] = {e4m3_factor(of_keys.x), e4m3_factor(of_keys.y)};
#pragma unroll
            for (int e = 0; e < 4; e++) dot[t][n][e] *= factor[e % 2];
        }
}

// From dot products, -inf where a row does not see the key, to weights in shared memory. E4M3:
// those of the values' codes. halves: 1 where there are no rows behind the eighth, whose weights
// then stay what they are.
template <bool E4M3, int T>
INLINE void weigh(float (&shrink)[T][2], float (&top)[2], const float (&dot)[T][2][4],
                  const char2 (&of_values)[T][2], block_memory<E4M3> &m, float factor, int halves)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (h >= halves) break;
#pragma unroll
        for (int t = 0; t < T; t++) {
            const float(&x)[2][4] = dot[t];
            const float most =
                fmaxf(fmaxf(x[0][h * 2], x[0][h * 2 + 1]), fmaxf(x[1][h * 2], x[1][h * 2 + 1]));
            const float of_row = lanes_max<4>(most);
            if (lane % 4 == 0) m.most[t][lane / 4 + h * 8][warp] = of_row;
        }
    }
    meet();
    if (E4M3 && lane < 4)
#pragma unroll
        for (int i = 0; i < T * 2; i++) {
            const char2 x = of_values[i / 2][i % 2];
            store_pair(m.inverse[i / 2] + warp * BOX_KEYS + i % 2 * 8 + lane * 2,
                       power_of_two(-x.x), power_of_two(-x.y));
        }
#pragma unroll
    for (int t = 0; t < T; t++) shrink[t][1] = 1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (h >= halves) break;
        const int r = lane / 4 + h * 8;
#pragma unroll
        for (int t = 0; t < T; t++) {
            const float4 x = *reinterpret_cast<const float4 *>(m.most[t][r]);
            const tile_step step =
                next_tile(top[h], fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), factor);
            shrink[t][h] = step.shrink;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float w[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    w[e] = weight_of(dot[t][i][h * 2 + e], factor, step.shift);
                    // where there is no key, its scale may be anything
                    if (E4M3 && w[e] > 0)
                        w[e] *= e4m3_factor(e ? of_values[t][i].y : of_values[t][i].x);
                }
                store_pair(unit_at<TILE_KEYS / 8>(m.weights[t], r, warp * 2 + i) + lane % 4 * 2,
                           w[0], w[1]);
            }
        }
    }
}

// Of a box of codes, from those that this lane gives the address of.
template <int HD>
INLINE void add_codes(row_sums<HD / WARPS> &r, const uint32_t (&x)[4], uint32_t from)
{
    constexpr int UNITS = HD / WARPS / 16; // of a warp: 1 or 2
    uint32_t codes[4];
    load_matrices_transposed(codes, from);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        uint32_t lower[2], upper[2]; // of the 16 dimensions the first eight and the others
        widen(codes[i * 2], lower[0], upper[0]);
        widen(codes[i * 2 + 1], lower[1], upper[1]);
        mma(r.out[i * 2], x, lower[0], lower[1]);
        mma(r.out[i * 2 + 1], x, upper[0], upper[1]);
    }
}

// Of the boxes first .. end - 1 of tile t of a turn; the others are weighted with 0.
template <int HD, bool E4M3>
INLINE void add_values(row_sums<HD / WARPS> &r, block_memory<E4M3> &m, uint32_t stage, int t,
                       int first, int end)
{
    constexpr int UNITS = HD / WARPS / 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t weights =
        shared_address(unit_at<TILE_KEYS / 8>(m.weights[t], lane % 16, lane / 16));
    const uint32_t codes =
        code_unit<HD>(stage, lane % 16, warp * UNITS + (UNITS > 1 ? lane / 16 : 0));
#pragma unroll
    for (int box = 0; box < WARPS; box++) {
        if (box < first || box >= end) continue;
        uint32_t x[4];
        load_matrices(x, weights ^ box << 5);
        if constexpr (E4M3) {
            const uint32_t *inverse =
                reinterpret_cast<const uint32_t *>(m.inverse[t] + box * BOX_KEYS);
            mma(r.sum, x, inverse[lane % 4], inverse[lane % 4 + 4]);
            add_codes<HD>(r, x, codes + box * box_bytes<HD, E4M3>);
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
INLINE void store_part(float *part, const row_sums<HD / WARPS> &r, const packed_rows &rows)
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
INLINE void sum_item(stage_ring &ring, block_memory<E4M3> &m, const attn_args<bf16> &a,
                     const tma_plan &p, const item &w, const rows_seen &seen)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool whole = w.n == w.n_chunks;
    const int halves = w.rows.in(8) ? 2 : 1;
    const int64_t stride = (int64_t)p.part_rows * part_width<HD>;
    float *parts = p.parts + w.number * p.chunks * stride;
    uint32_t q[HD / 16][4]; // !E4M3
    if constexpr (E4M3)
        keep_queries<HD>(m, a, w.rows);
    else
        load_queries<HD>(q, a, w.rows);
    row_sums<HD / WARPS> r;
    waiting_sums<HD / WARPS> before;
    clear(r);
    // Of the next T stages, all full: what they hold, and their barriers.
    constexpr int T = turn_tiles<E4M3>;
    uint32_t stages[T], emptied[T];
    int slots[T];
    auto wait = [&] {
#pragma unroll
        for (int t = 0; t < T; t++, ring.next()) {
            barrier_wait(ring.is_full(), ring.parity);
            stages[t] = ring.stage();
            slots[t] = ring.slot;
            emptied[t] = ring.is_empty();
        }
    };
    auto release = [&] {
        __syncwarp();
        for (int t = 0; t < T && lane == 0; t++) barrier_arrive(emptied[t]);
    };
    for (int key = w.begin, chunk = w.chunk; key < w.end; key += turn_keys<E4M3>) {
        float dot[T][2][4] = {}, shrink[T][2], factor;
        char2 of_values[T][2];
        wait();
        if constexpr (E4M3) {
            const uint32_t boxes[2] = {stages[0] + warp * box_bytes<HD, true>,
                                       stages[1] + warp * box_bytes<HD, true>};
            multiply_codes<HD>(dot, of_values, m, boxes, slots);
        } else {
            multiply_keys<HD>(dot[0], q, stages[0] + warp * box_bytes<HD, false>);
        }
        release();
#pragma unroll
        for (int t = 0; t < T; t++) {
            const int from = key + t * TILE_KEYS;
            factor = to_scores<16>(a, dot[t]);
            if (a.window > 0 || from + TILE_KEYS > w.lowest + 1)
                hide<16>(dot[t], seen, from + warp * BOX_KEYS, -INFINITY);
        }
        weigh<E4M3>(shrink, r.top, dot, of_values, m, factor, halves);
        wait();
#pragma unroll
        for (int t = 0; t < T; t++)
            clear_unseen<HD, E4M3>(stages[t] + warp * box_bytes<HD, E4M3>,
                                   key + t * TILE_KEYS + warp * BOX_KEYS, w);
        meet();
#pragma unroll
        for (int t = 0; t < T; t++) {
            const int from = key + t * TILE_KEYS;
            shrink_sums(r, shrink[t]);
            add_values<HD, E4M3>(r, m, stages[t], t, max(w.low - from, 0) / BOX_KEYS,
                                 (w.end - from + BOX_KEYS - 1) / BOX_KEYS);
        }
        release();
        const bool ends = key + turn_keys<E4M3> >= w.end;
        if ((key + turn_keys<E4M3>) % CHUNK_KEYS && !ends) continue;
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
    auto &m = *reinterpret_cast<block_memory<E4M3> *>(shared + p.stages * stage_bytes<HD, E4M3>);
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
    if (!p.whole && threadIdx.x < 32) count_chunks(m.ends, a, p);
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        copy_items<HD, E4M3>(ring, &k_map, &v_map, m, a, p, a.early);
        return;
    }
    item w;
    rows_seen seen;
    item_walk walk(m.ends, a, p);
    auto next = [&] {
        if (!walk.next(w, m.ends, a, p)) return false;
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
                         {(cuuint32_t)columns, BOX_KEYS, (cuuint32_t)groups, 1},
                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B})) // of another head nothing
            return;
    // of whole tasks two blocks on an SM, where these take no more rounds than three would
    const bool two =
        p.whole && ceil_div(all_tasks, 2 * sms) * 2 <= ceil_div(all_tasks, 3 * sms) * 3;
    const int per_sm = two ? 2 : 3, stage = TILE_KEYS * HD * element;
    // of an SM's memory 1 KB a block is the system's
    const int behind = a.scales ? sizeof(block_memory<true>) : sizeof(block_memory<false>);
    const int bytes = (state->max_shared + 1024) / per_sm - 1024 - behind;
    p.stages = std::min(MAX_STAGES, bytes / stage);
    for (int s = 0; s < n_seqs; s += turn) {
        const int n = std::min(turn, n_seqs - s), most = per_sm * sms;
        const int blocks = p.whole ? std::min(p.tasks * n, most)
                                   : std::min(std::max(1, most / p.tasks), n * p.chunks) * p.tasks;
        cuda_launch(dev, "attention of few rows",
                    a.scales ? few_tma_kernel<HD, true> : few_tma_kernel<HD, false>, dim3(blocks),
                    THREADS + 32, p.stages * stage + behind, maps[0], maps[1],
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
           (a.scales ? a.in_sixteens && aligned(16, {a.q}, {a.q_stride * 2})
                     : aligned(16, {a.k, a.v}, {a.kv_stride * 2}));
}

void attn_few_tma(struct device *dev, const attn_call &c)
{
    (c.shape->head_dim == 64 ? launch<64> : launch<128>)(dev, c);
}
