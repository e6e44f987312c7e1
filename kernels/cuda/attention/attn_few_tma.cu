/* attn_few_tma.cu: attention of a few rows a sequence, as attn_few.cu, on Hopper and where there
 * are more chunks than SMs. There instructions bound attn_few.cu, of which copying is the most: it
 * has an address for each 16 bytes, where the TMA has one for a block's 16 keys.
 *
 * A team is four warps that compute what attn_order.cuh prescribes, a chunk at a time, and one that
 * copies, which keeps a ring of tiles of keys and of values filled ahead across items. Each warp
 * has a tile's keys while scores are computed, and a quarter of the dimensions while values are
 * summed; they meet when all know their tiles' largest scores, and when all have weights.
 *
 * Where there are tasks enough a block is a team, which has whole ones by turns. Of long contexts a
 * block stays on each SM and has a run, whose chunks its teams take by turns: those from a
 * context's first one on are joined in shared memory, others, in parts, by the last to finish.
 *
 * Keys are the left operand of a product and queries the right one, then values and weights, since
 * the right one has eight columns and the left one 16 rows: sums have the queries' rows for columns
 * (attn_rows.cuh's layout with e % 2 as the half of 16).
 *
 * Of a pool in e4m3 the ring has codes, which are widened in registers: an element of ldmatrix is
 * two of them, so that a lane's four are the two halves of 16 dimensions of a key, or two
 * dimensions of two neighbouring keys (e4m3.h). Scales are powers of two, which commute with
 * rounding: a key's is applied to its dot products, a value's to its weights, which are summed
 * without. Both are doubled and codes widened to halves, so that the scale of a NaN has the
 * infinity's place among exponents.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention/attn_few.cuh"
#include "kernels/cuda/attention/attn_rows.cuh"
#include "kernels/cuda/hopper.cuh"
#include <algorithm>
#include <numeric>

#define WARPS      (CHUNK_KEYS / TILE_KEYS) // of a team, that compute: a tile each
#define TEAM       (WARPS * 32 + 32)        // threads
#define BOX_KEYS   16                       // what a copy brings
#define BOXES      (TILE_KEYS / BOX_KEYS)
#define MAX_STAGES 12
#define MAX_SEQS   1024        // of a launch that splits contexts
#define BESIDE     (130 << 10) // bytes of an SM that a block alone on it leaves the matmuls around it
#define HALVES     0x7b007b00u // 2^119, twice: codes widened to halves of their numbers

// A launch. whole: a block takes whole tasks, each gridDim.x-th. Else there are `tasks` blocks to a
// group, each with one of a sequence's, and the groups share out the chunks of all sequences
// evenly, each a run of them. Either way neighbours read the same tokens at about the same time.
struct tma_plan : task_plan {
    bool whole;
    int teams, stages; // of a block, of a team's ring
};

// What a team has behind the rings. Tasks are of up to 8 N rows.
template <bool E4M3, int N> struct team_memory {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    // of a chunk's keys, right operands of 16 each; E4M3: and of their values' codes
    uint2 weights[E4M3 ? 2 : 1][N][WARPS][BOXES][32];
    float most[2][N * 8][WARPS]; // largest dot product with a tile's keys, of two chunks by turns
    // E4M3: of a stage of keys and its boxes, of the keys and of their values
    __align__(16) int8_t scales[E4M3 ? MAX_STAGES : 1][BOXES][KV_SCALES][BOX_KEYS];
    int is_last;
};

// The sums of a lane for eight rows: of 16 dimensions two are its own, and of the heads a quarter.
template <int HD> using eight_sums = row_sums<HD / WARPS / 2>;
template <int HD> using eight_before = waiting_sums<HD / WARPS / 2>;

// !whole: the chunks of a task so far, which a team leaves for the one that has the next.
template <int HD, int N> struct join_memory {
    eight_before<HD> sums[N][WARPS * 32];
    int joined[WARPS];  // chunks, of all items
    int ends[MAX_SEQS]; // of the sequences, chunks up to this one
};

// On an SM, by what registers there are and, in bf16, memory.
template <int HD, bool E4M3, int N> constexpr int max_teams = N == 1 && (E4M3 || HD == 64) ? 4 : 3;

#if HAS_WGMMA

template <int HD, bool E4M3> constexpr int box_bytes = BOX_KEYS *HD *(E4M3 ? 1 : 2);
template <int HD, bool E4M3> constexpr int stage_bytes = BOXES *box_bytes<HD, E4M3>;

// Some chunks of a task.
struct item : task {
    int number;   // of the task
    int chunk, n; // the first of them, and how many
    int first;    // of these that is this team's, as each `teams`-th behind
};

// The tiles of a chunk that have keys, as stages of a ring: those of the keys lie before those of
// the values.
struct chunk_tiles {
    int key, first, n;

    INLINE chunk_tiles(const item &w, int i)
        : key(w.begin + i * CHUNK_KEYS), first(max(w.low - key, 0) / TILE_KEYS),
          n(min((w.end - key + TILE_KEYS - 1) / TILE_KEYS, WARPS) - first)
    {
    }
};

// !whole: ends[s] = chunks of the sequences up to s. One warp.
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
template <int N> struct item_walk {
    const int *ends;
    int at, end; // tasks; !whole: chunks
    int s, task, groups, seen;

    INLINE item_walk(const int *ends, const attn_args<bf16> &a, const tma_plan &p)
        : ends(ends), at(blockIdx.x), end(a.n_seqs * p.tasks), s(0), task(0),
          groups(gridDim.x / p.tasks), seen(0)
    {
        if (p.whole) return;
        const int group = blockIdx.x / p.tasks;
        task = blockIdx.x - group * p.tasks;
        at = first_of(group, a);
        end = first_of(group + 1, a);
    }
    // !whole: the first chunk of a group
    INLINE int first_of(int group, const attn_args<bf16> &a) const
    {
        return (int64_t)ends[a.n_seqs - 1] * group / groups;
    }
    // !whole: of sequence s the chunks that are joined in shared memory
    INLINE int joined_of(int s, const attn_args<bf16> &a) const
    {
        const int first = s > 0 ? ends[s - 1] : 0, all = ends[a.n_seqs - 1];
        return first_of((((int64_t)first + 1) * groups - 1) / all + 1, a) - first;
    }
    // False behind the last one. An item may have nothing to do: n is 0.
    INLINE bool next(item &w, const attn_args<bf16> &a, const tma_plan &p)
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
        w.n = task_of<N * 8>(w, a, p.row_tiles, s, task, chunk, n) ? min(n, w.n_chunks - chunk) : 0;
        // a context's last chunk is a short one
        w.first = (threadIdx.x / TEAM + seen++) % p.teams;
        return true;
    }
};

// The warps of a team that compute meet.
INLINE void meet()
{
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / TEAM + 1), "n"(WARPS * 32) : "memory");
}

// The stage n behind a ring's next.
INLINE stage_ring ahead(stage_ring ring, int n)
{
    for (ring.slot += n; ring.slot >= ring.n; ring.slot -= ring.n) ring.parity ^= 1;
    return ring;
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
// stage with its keys. In blocks of as many keys as a box those of the values lie behind.
INLINE void copy_scales(const attn_args<bf16> &a, int8_t (&to)[BOXES][KV_SCALES][BOX_KEYS],
                        int rows, int at, int first, int end, int kv_head, uint32_t barrier)
{
    const int copies = a.block_size == BOX_KEYS ? 1 : KV_SCALES;
    const int lane = threadIdx.x % 32, box = lane / copies, value = lane % copies;
    const int slot = __shfl_sync(~0u, rows, at + box), block = slot >> a.block_shift;
    if (box < first || box >= end) return;
    copy_bytes(shared_address(to[box][value]),
               a.scales + kv_scale_at(block, slot - (block << a.block_shift), a.block_size,
                                      a.n_kv_heads, kv_head, value),
               KV_SCALES / copies * BOX_KEYS, barrier);
}

// A warp: keeps the ring filled. waits: not before there is a key of this batch to be copied.
template <int HD, bool E4M3, int N>
__device__ void copy_items(stage_ring ring, const CUtensorMap *k_map, const CUtensorMap *v_map,
                           team_memory<E4M3, N> &m, item_walk<N> walk, const attn_args<bf16> &a,
                           const tma_plan &p, bool waits)
{
    const int lane = threadIdx.x % 32;
    int used = 0;
    if (a.block_shift < 0) __builtin_unreachable(); // attn_few_tma_takes()
    for (item w; walk.next(w, a, p);) {
        if (w.n == 0) continue;
        const int old = waits ? number_at<true>(a.stored + w.s) : 0;
        // of a chunk's boxes, a lane each
        auto look_up = [&](int i) {
            const int key = w.begin + i * CHUNK_KEYS + lane * BOX_KEYS;
            return key < w.end ? (int)key_row<true, true>(a, w.s, key) : 0;
        };
        int rows = 0, next = look_up(w.first);
        for (int i = w.first; i < w.n; i += p.teams) {
            const chunk_tiles tiles(w, i);
            rows = next;
            next = look_up(i + p.teams);
            if (waits && min(tiles.key + CHUNK_KEYS, w.end) > old) {
                grid_wait();
                waits = false;
            }
#pragma unroll 2
            for (int t = 0; t < 2 * tiles.n; t++, ring.next(), used++) {
                const bool values = t >= tiles.n;
                const int tile = tiles.first + (values ? t - tiles.n : t), lane0 = tile * BOXES;
                const int from = tiles.key + tile * TILE_KEYS;
                const int first = max(w.low - from, 0) / BOX_KEYS;
                const int end = min((w.end - from + BOX_KEYS - 1) / BOX_KEYS, BOXES);
                if (used >= ring.n) barrier_wait(ring.is_empty(), ring.parity ^ 1);
                const bool scales = E4M3 && !values;
                const int of_box = box_bytes<HD, E4M3> + (scales ? KV_SCALES * BOX_KEYS : 0);
                if (lane == 0) barrier_expect(ring.is_full(), (end - first) * of_box);
                if (scales)
                    copy_scales(a, m.scales[ring.slot], rows, lane0, first, end, w.kv_head,
                                ring.is_full());
                const int row = __shfl_sync(~0u, rows, lane0 + lane % BOXES);
                if (lane >= first && lane < end)
                    copy_box(ring.stage() + lane * box_bytes<HD, E4M3>, values ? v_map : k_map, row,
                             0, w.kv_head, ring.is_full(), L2_EVICT_FIRST);
            }
        }
    }
}

// ---- a chunk -----------------------------------------------------------------------------------

// d += a b of 16 x 16 and 16 x 8: [e] is row lane / 4 + e % 2 * 8, column lane % 4 * 2 + e / 2.
INLINE void mma_across(float (&d)[4], const uint32_t (&a)[4], uint2 b)
{
    float x[4] = {d[0], d[2], d[1], d[3]};
    mma(x, a, b.x, b.y);
    unrolled<4>([&](int e) { d[e] = x[e % 2 * 2 + e / 2]; });
}

// Of an 8 x 8 matrix of bf16, whose lanes have two neighbours of a row each.
INLINE uint32_t transposed(uint32_t x)
{
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// x times a scale, two numbers of bf16 each: infinity is that of a NaN.
INLINE uint32_t times_scale(uint32_t x, uint32_t scale)
{
    uint32_t nan = scale;
    multiply_pair(nan, 0);
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(scale), "r"(nan));
    return x;
}

// Row r of a box, its unit u of 16 bytes; others up to 8 by exclusive or.
template <int HD, bool E4M3> INLINE uint32_t unit_in_box(int r, int u)
{
    // columns of bf16 come in groups of 64
    if (!E4M3) return u / 8 * (BOX_KEYS * 128) + r * 128 + ((u % 8 ^ (r & 7)) << 4);
    const uint32_t at = r * HD + u * 16;
    return at ^ (at >> 7 & (HD / 16 - 1)) << 4;
}

// The rows' queries as the right operands of products, 16 dimensions each.
template <int HD, int N>
INLINE void load_queries(uint2 (&q)[N][HD / 16], const attn_args<bf16> &a, const packed_rows &rows)
{
    const int lane = threadIdx.x % 32;
    unrolled<N>([&](int n) {
        const bool in = rows.in(n * 8 + lane / 4);
        const bf16 *row = a.q + lane % 4 * 2;
        if (in) row += query_at(a, place_of(a, rows, n * 8 + lane / 4));
        auto pair = [&](int d) { return in ? *reinterpret_cast<const uint32_t *>(row + d) : 0; };
        unrolled<HD / 16>([&](int i) { q[n][i] = {pair(i * 16), pair(i * 16 + 8)}; });
    });
}

// Dot products of the rows and a tile's keys: eight keys a number of dot[n][box].
template <int HD, bool E4M3, int N>
INLINE void multiply_keys(float (&dot)[N][BOXES][4], const uint2 (&q)[N][HD / 16], uint32_t stage)
{
    const int lane = threadIdx.x % 32;
    const uint32_t from = stage + unit_in_box<HD, E4M3>(lane % 16, lane / 16);
    constexpr int SETS = E4M3 ? 2 : 1;                          // of 16 columns in what is loaded
    unrolled<BOXES / 2, HD / 16 / SETS>([&](int boxes, int u) { // two boxes at a time
        uint32_t x[2][4];
        unrolled<2>([&](int t) {
            const uint32_t box = (boxes * 2 + t) * box_bytes<HD, E4M3>;
            load_matrices(x[t], box + (E4M3 ? from ^ u << 5
                                            : (from ^ u % 4 << 5) + u / 4 * (BOX_KEYS * 128)));
        });
        unrolled<SETS, 2>([&](int k, int t) {
            uint32_t wide[4];
            if (E4M3) {
                widen(x[t][k * 2], wide[0], wide[2], HALVES);
                widen(x[t][k * 2 + 1], wide[1], wide[3], HALVES);
            }
            unrolled<N>([&](int n) {
                mma_across(dot[n][boxes * 2 + t], E4M3 ? wide : x[t], q[n][u * SETS + k]);
            });
        });
    });
}

// -inf for keys that a row does not see, of a tile from key on.
template <int N>
INLINE void hide_keys(float (&dot)[N][BOXES][4], const attn_args<bf16> &a, const item &w, int key)
{
    const int lane = threadIdx.x % 32;
    unrolled<N * 2>([&](int h) {
        const int r = h / 2 * 8 + lane % 4 * 2 + h % 2;
        const int position =
            w.rows.in(r) ? row_position<true>(a, w.s, place_of(a, w.rows, r).row) : -1;
        const int hidden = a.window > 0 ? position - a.window : -1;
        unrolled<BOXES * 2>([&](int i) {
            const int j = key + i * 8 + lane / 4;
            if (j > position || j <= hidden) dot[h / 2][i / 2][h % 2 * 2 + i % 2] = -INFINITY;
        });
    });
}

// Dot products with codes times their keys' scales, and twice the scales of the values beside them
// as pairs of bf16: a lane's of each eight keys. Where there is no key a scale may be anything.
template <int N>
INLINE void apply_scales(float (&dot)[N][BOXES][4], uint32_t (&of_values)[BOXES * 2],
                         const int8_t (&scales)[BOXES][KV_SCALES][BOX_KEYS], int low, int end)
{
    unrolled<BOXES * 2>([&](int i) {
        const int in = threadIdx.x % 32 / 4, k = i % 2 * 8 + in, at = i * 8 + in;
        const float twice = __uint_as_float((scales[i / 2][0][k] + 128u) << 23), nan = twice * 0.f;
        of_values[i] = at >= low && at < end ? (scales[i / 2][1][k] + 128u) * 0x800080u : 0;
        unrolled<N, 2>([&](int n, int h) {
            float &x = dot[n][i / 2][h * 2 + i % 2];
            x = __fmaf_rn(x, twice, nan);
        });
    });
}

// A tile's largest dot products, to the others of the team.
template <int N>
INLINE void tell_most(float (&to)[N * 8][WARPS], const float (&dot)[N][BOXES][4], int tile)
{
    const int lane = threadIdx.x % 32;
    unrolled<N, 2>([&](int n, int h) {
        float most = -INFINITY;
        unrolled<BOXES, 2>([&](int i, int e) { most = fmaxf(most, dot[n][i][h * 2 + e]); });
        for (int o = 4; o < 32; o *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        if (lane < 4) to[n * 8 + lane * 2 + h][tile] = most;
    });
}

// From dot products with a tile's keys to weights. of_values: as apply_scales() has them.
template <bool E4M3, int N>
INLINE void weigh(team_memory<E4M3, N> &m, const float (&all)[N * 8][WARPS],
                  const float (&dot)[N][BOXES][4], const uint32_t (&of_values)[BOXES * 2], int tile,
                  float factor)
{
    const int lane = threadIdx.x % 32;
    unrolled<N>([&](int n) {
        float shift[2];
        unrolled<2>([&](int h) {
            float top = -INFINITY;
            unrolled<WARPS>([&](int t) {
                if (t <= tile)
                    shift[h] = next_tile(top, all[n * 8 + lane % 4 * 2 + h][t], factor).shift;
            });
        });
        unrolled<BOXES>([&](int box) {
            uint32_t pair[2], of_codes[2];
            unrolled<2>([&](int i) {
                const float(&x)[4] = dot[n][box];
                const uint32_t both =
                    pack2(weight_of(x[i], factor, shift[0]), weight_of(x[2 + i], factor, shift[1]));
                pair[i] = transposed(both);
                if (E4M3) of_codes[i] = transposed(times_scale(both, of_values[box * 2 + i]));
            });
            m.weights[0][n][tile][box][lane] = {pair[0], pair[1]};
            if (E4M3) m.weights[E4M3][n][tile][box][lane] = {of_codes[0], of_codes[1]};
        });
    });
}

// Makes zeros of a tile's values that are none, in the columns that this warp has: 0 times what
// lies there may be anything. Codes are finite.
template <int HD> INLINE void clear_unseen(uint32_t stage, int key, const item &w)
{
    constexpr int UNITS = HD / WARPS / 8;
    const int warp = threadIdx.x % TEAM / 32;
    if (key >= w.low && key + TILE_KEYS <= w.end) return;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < TILE_KEYS * UNITS; i += 32) {
        const int k = i / UNITS;
        if (key + k >= w.low && key + k < w.end) continue;
        const uint32_t at = stage + k / BOX_KEYS * box_bytes<HD, false> +
                            unit_in_box<HD, false>(k % BOX_KEYS, warp * UNITS + i % UNITS);
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    fence_async(); // the copy engine writes there next
    __syncwarp();
}

// Adds a tile's values, times their weights, in the columns that this warp has.
template <int HD, bool E4M3, int N>
INLINE void add_values(eight_sums<HD> (&r)[N], const team_memory<E4M3, N> &m, uint32_t stage,
                       int tile)
{
    constexpr int SETS = HD / WARPS / 16; // of 16 columns: 1 or 2
    const int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32;
    const uint32_t from =
        stage +
        (E4M3 ? unit_in_box<HD, true>(lane % 16, warp * SETS + (SETS > 1 ? lane / 16 : 0))
              : unit_in_box<HD, false>(lane / 16 * 8 + lane % 8, warp * SETS * 2 + lane / 8 % 2));
    const uint32_t ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    unrolled<BOXES>([&](int box) {
        uint32_t x[2][4];
        unrolled<E4M3 ? 1 : SETS>([&](int i) {
            load_matrices_transposed(x[i], (from ^ i << 5) + box * box_bytes<HD, E4M3>);
        });
        unrolled<N>([&](int n) { mma_across(r[n].sum, ones, m.weights[0][n][tile][box][lane]); });
        unrolled<SETS>([&](int i) {
            uint32_t wide[4];
            if (E4M3) {
                widen(x[0][i * 2], wide[0], wide[1], HALVES);
                widen(x[0][i * 2 + 1], wide[2], wide[3], HALVES);
            }
            unrolled<N>([&](int n) {
                mma_across(r[n].out[i], E4M3 ? wide : x[i], m.weights[E4M3][n][tile][box][lane]);
            });
        });
    });
}

// ---- items -------------------------------------------------------------------------------------

// Of eight rows from `first` on.
template <int HD>
INLINE void store_part(float *part, const eight_sums<HD> &r, const packed_rows &rows, int first)
{
    const int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32;
    unrolled<2>([&](int h) {
        const int at = first + lane % 4 * 2 + h;
        if (!rows.in(at)) return;
        float *row = part + at * part_width<HD>;
        unrolled<HD / WARPS / 8>([&](int i) {
            row[warp * (HD / WARPS) + i * 8 + lane / 4] = r.out[i / 2][h * 2 + i % 2];
        });
        if (warp == 0 && lane < 4) store_pair(row + HD, r.top[h], r.sum[h * 2]);
    });
}

template <int HD>
INLINE void store_item(const eight_sums<HD> &r, const attn_args<bf16> &a, const packed_rows &rows,
                       int first)
{
    const int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32;
    float inverse[2];
    unrolled<2>([&](int h) {
        const int head = place_of(a, rows, first + lane % 4 * 2 + h).head;
        inverse[h] = inverse_of(with_sink(a, head, r.top[h], r.sum[h * 2]));
    });
    bf16 *to = a.out + index_of(a, place_of(a, rows, first + lane / 4)) * HD + warp * (HD / WARPS) +
               lane % 4 * 2;
    unrolled<HD / WARPS / 8>([&](int i) {
        const float(&x)[4] = r.out[i / 2];
        const uint32_t pair =
            transposed(pack2(finished(x[i % 2], inverse[0]), finished(x[2 + i % 2], inverse[1])));
        if (rows.in(first + lane / 4)) *reinterpret_cast<uint32_t *>(to + i * 8) = pair;
    });
}

// Sums a chunk, the next one in the ring.
template <int HD, bool E4M3, int N>
INLINE void sum_chunk(eight_sums<HD> (&r)[N], stage_ring &ring, team_memory<E4M3, N> &m,
                      const uint2 (&q)[N][HD / 16], const attn_args<bf16> &a, const item &w,
                      chunk_tiles tiles, int turn)
{
    const int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32;
    const int own = warp - tiles.first, key = tiles.key + warp * TILE_KEYS;
    const bool has = own >= 0 && own < tiles.n;
    const float factor = score_factor(a);
    auto &most = m.most[turn];
    float dot[N][BOXES][4];
    uint32_t of_values[BOXES * 2];
    unrolled<N * BOXES, 4>(
        [&](int i, int e) { dot[i / BOXES][i % BOXES][e] = has ? 0 : -INFINITY; });
    if (has) {
        const stage_ring at = ahead(ring, own);
        barrier_wait(at.is_full(), at.parity);
        multiply_keys<HD, E4M3, N>(dot, q, at.stage());
        if (E4M3)
            apply_scales<N>(dot, of_values, m.scales[E4M3 ? at.slot : 0], w.low - key, w.end - key);
        __syncwarp();
        if (lane < WARPS) barrier_arrive(at.is_empty()); // for all
        unrolled<N>([&](int n) { to_scores<BOXES * 8>(a, dot[n]); });
        if (a.window > 0 || key + TILE_KEYS > w.lowest + 1) hide_keys(dot, a, w, key);
    }
    tell_most<N>(most, dot, warp);
    meet();
    if (has) weigh(m, most, dot, of_values, warp, factor);
    ring = ahead(ring, tiles.n);
    meet();
#pragma unroll 1
    for (int t = tiles.first; t < tiles.first + tiles.n; t++, ring.next()) {
        unrolled<N>([&](int n) {
            float shrink[2];
            unrolled<2>([&](int h) {
                const float of_tile = most[n * 8 + lane % 4 * 2 + h][t];
                shrink[h] = next_tile(r[n].top[h], of_tile, factor).shrink;
            });
            shrink_sums(r[n], shrink);
        });
        barrier_wait(ring.is_full(), ring.parity);
        if (!E4M3) clear_unseen<HD>(ring.stage(), tiles.key + t * TILE_KEYS, w);
        add_values<HD, E4M3, N>(r, m, ring.stage(), t);
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.is_empty());
    }
}

// summed: chunks of the team so far; joined: those of the block's items before that were joined in
// shared memory.
template <int HD, bool E4M3, int N>
INLINE void sum_item(stage_ring &ring, team_memory<E4M3, N> &m, join_memory<HD, N> *others,
                     const item_walk<N> &walk, const attn_args<bf16> &a, const tma_plan &p,
                     const item &w, int &summed, int &joined)
{
    const int thread = threadIdx.x % TEAM, warp = thread / 32;
    const bool whole = w.n == w.n_chunks, chain = w.chunk == 0 && w.n > 1;
    int stored = 0; // chunks of which the team has left parts
    uint2 q[N][HD / 16];
    eight_before<HD> own[N];
    load_queries<HD, N>(q, a, w.rows);
    for (int i = w.first; i < w.n; i += p.teams) {
        const bool ends = i == w.n - 1;
        eight_sums<HD> r[N];
        unrolled<N>([&](int n) { clear(r[n]); });
        sum_chunk<HD, E4M3, N>(r, ring, m, q, a, w, chunk_tiles(w, i), summed++ % 2);
        if (chain) {
            volatile int *ready = others->joined + warp;
            while (!p.whole && *ready < joined + i) continue;
            __threadfence_block();
            unrolled<N>([&](int n) {
                eight_before<HD> *before = p.whole ? &own[n] : &others->sums[n][thread];
                join_chunk(r[n], before, i == 0);
                if (!ends) put_aside(before, r[n]);
            });
            __threadfence_block();
            __syncwarp();
            if (!p.whole && thread % 32 == 0) *ready = joined + i + 1;
        }
        if (chain && !ends) continue;
        stored += chain ? w.n : 1;
        unrolled<N>([&](int n) {
            if (whole)
                store_item<HD>(r[n], a, w.rows, n * 8);
            else
                store_part<HD>(p.parts + p.part_at<HD>(w.number, w.chunk + i), r[n], w.rows, n * 8);
        });
    }
    if (chain) joined += w.n;
    if (!whole && stored > 0 &&
        completes(&p.tickets[w.number], stored, w.n_chunks, thread == 0, &m.is_last,
                  [] { meet(); }))
        join_chunks<HD>(a, w, p, w.number, min(walk.joined_of(w.s, a), w.n_chunks) - 1, thread,
                        WARPS * 32);
}

#endif

// a.early: the kernel before this one writes none of the batch's numbers and no key of an earlier
// batch.
template <int HD, bool E4M3, int N>
__global__ void __launch_bounds__(max_teams<HD, E4M3, N> *TEAM, 1)
    few_tma_kernel(const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, attn_args<bf16> a, tma_plan p)
{
#if HAS_WGMMA
    extern __shared__ __align__(1024) char shared[];
    const int team = threadIdx.x / TEAM, ring_bytes = p.stages * stage_bytes<HD, E4M3>;
    auto *teams = reinterpret_cast<team_memory<E4M3, N> *>(shared + p.teams * ring_bytes);
    auto *others = reinterpret_cast<join_memory<HD, N> *>(teams + p.teams); // !whole
    auto &m = teams[team];
    stage_ring ring = {shared_address(shared) + team * ring_bytes,
                       stage_bytes<HD, E4M3>,
                       shared_address(m.full),
                       shared_address(m.empty),
                       p.stages,
                       0,
                       0};
    if (threadIdx.x % TEAM == 0) {
        for (int i = 0; i < p.stages; i++) {
            barrier_init(ring.full + i * 8, 1);
            barrier_init(ring.empty + i * 8, WARPS);
        }
        barriers_made();
        for (int i = 0; i < WARPS && !p.whole; i++) others->joined[i] = 0;
    }
    if (!a.early) grid_wait();
    if (!p.whole && threadIdx.x < 32) count_chunks(others->ends, a, p);
    __syncthreads();
    item_walk<N> walk(others->ends, a, p);
    if (threadIdx.x % TEAM >= WARPS * 32) {
        copy_items<HD, E4M3, N>(ring, &k_map, &v_map, m, walk, a, p, a.early);
        return;
    }
    item w;
    bool more = walk.next(w, a, p);
    if (a.early) grid_wait();
    grid_release();
    for (int summed = 0, joined = 0; more; more = walk.next(w, a, p))
        if (w.n > 0) sum_item<HD, E4M3, N>(ring, m, others, walk, a, p, w, summed, joined);
#endif
}

// ---- launches ----------------------------------------------------------------------------------

#define WHOLE_CHUNKS 4 // contexts of up to so many are not split where there are tasks enough

// As many as that or a little fewer, that cut no context of n where all are as long.
static int even_groups(int groups, int n)
{
    for (int g = groups; g > groups * 15 / 16; g--)
        if (g % n == 0 || n % g == 0) return g;
    return groups;
}

template <int HD, bool E4M3, int N> static void launch(struct device *dev, const attn_call &c)
{
    struct cuda_state *state = cuda_use(dev);
    const attn_args<bf16> a = attn_args_of<bf16>(c);
    const int sms = state->n_sms, most = max_teams<HD, E4M3, N>, element = E4M3 ? 1 : 2;
    tma_plan p = {};
    static_cast<task_plan &>(p) = task_plan_of(dev, a, N * 8);
    p.whole = p.chunks <= 2 || (p.chunks <= WHOLE_CHUNKS && p.tasks * a.n_seqs >= 2 * sms);
    CUtensorMap maps[2];
    const void *pools[2] = {a.k, a.v}, *codes[2] = {a.k_codes, a.v_codes};
    const int columns = std::min(64, HD * element / 2); // two codes each
    const int groups = HD * element / 2 / columns;
    const cuuint64_t keys = (cuuint64_t)c.kv->n_blocks * a.block_size;
    for (int i = 0; i < 2; i++)
        if (!tensor_map(dev, &maps[i], E4M3 ? codes[i] : pools[i],
                        {4,
                         {(cuuint64_t)columns, keys, (cuuint64_t)groups, (cuuint64_t)a.n_kv_heads},
                         {(cuuint64_t)a.kv_stride * element, 128, (cuuint64_t)HD * element},
                         {(cuuint32_t)columns, BOX_KEYS, (cuuint32_t)groups, 1},
                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B})) // of another head nothing
            return;
    auto launch_turn = [&](const attn_args<bf16> &b, void *memory) {
        const int tile = TILE_KEYS * HD * element, tasks = p.tasks * b.n_seqs;
        const int runs = std::min(std::max(1, sms / p.tasks), b.n_seqs * p.chunks);
        int per_sm = p.whole ? 2 : 1; // or so many that all tasks take fewer rounds
        auto rounds = [&](int blocks) { return ceil_div(tasks, blocks * sms) * blocks; };
        for (int more = 3; p.whole && more <= most; more++)
            if (rounds(more) <= rounds(per_sm)) per_sm = more;
        int blocks =
            p.whole ? std::min(tasks, per_sm * sms) : even_groups(runs, b.n_seqs) * p.tasks;
        // Beside a prompt only first tiles of rows have any, which every block then meets by turns.
        while (p.whole && blocks < tasks && std::gcd(blocks, p.row_tiles) > 1) blocks--;
        // of an SM's memory 1 KB a block is the system's
        const int joins = p.whole ? 0 : sizeof(join_memory<HD, N>);
        int room = (state->max_shared + 1024) / per_sm - 1024 - joins;
        if (p.whole && !E4M3 && blocks <= sms) room = std::min(room, state->max_shared - BESIDE);
        const int behind = sizeof(team_memory<E4M3, N>);
        // a chunk's keys must have room in a ring
        p.teams = p.whole ? 1 : std::min(most, room / (WARPS * tile + behind));
        p.stages = std::min(MAX_STAGES, (room / p.teams - behind) / tile);
        p.parts = (float *)memory;
        cuda_launch(dev, "attention of few rows", few_tma_kernel<HD, E4M3, N>, dim3(blocks),
                    p.teams * TEAM, p.teams * (p.stages * tile + behind) + joins, maps[0], maps[1],
                    b, p);
    };
    const int max_seqs = p.whole ? a.n_seqs : std::min(MAX_SEQS, N_TICKETS / p.tasks);
    const int64_t bytes = p.part_at<HD>(p.tasks, 0) * sizeof(float);
    by_turns(dev, a, max_seqs, p.whole ? 0 : bytes, MAX_PART_BYTES, launch_turn);
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
    static void (*const launches[2][2][2])(struct device *, const attn_call &) = {
        {{launch<64, false, 1>, launch<64, false, 2>}, {launch<64, true, 1>, launch<64, true, 2>}},
        {{launch<128, false, 1>, launch<128, false, 2>},
         {launch<128, true, 1>, launch<128, true, 2>}}};
    const bool more_rows = c.batch->max_query * c.shape->n_heads > 8 * c.shape->n_kv_heads;
    launches[c.shape->head_dim == 128][c.kv->dt == DT_E4M3][more_rows](dev, c);
}
