/* attn_wgmma.cuh: what attention of many rows on Hopper is made of, forward and
 * gradient, after FlashAttention-3 (Shah et al. 2024).
 *
 * A block stays on its SM and takes one item of work after the other. Its first GROUPS warpgroups
 * compute, each 64 rows of the item (packed rows, or keys): the rows that stay for the item, the
 * `kept`, against the `stream`, tiles of 64 rows of two arrays that its last warpgroup copies into
 * a ring ahead of them, across the border of items. Products are wgmma, scores stay in registers,
 * and while one warpgroup has no product under way the other does.
 *
 * Copies are cp.async, not TMA: packed rows of a group, ancestors' rows and pages come row by row.
 * A tile is 64 rows of HD elements in blocks of 64 columns, swizzled as hopper.cuh says.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_ATTN_WGMMA_CUH
#define KERNELS_CUDA_ATTN_WGMMA_CUH

#include "kernels/cuda/attention/attn_rows.cuh"
#include "kernels/cuda/hopper.cuh"

#define GROUPS     2
#define ROWS       64 // of a tile, and of a warpgroup
#define BLOCK_ROWS (GROUPS * ROWS)
#define COPIERS    128 // threads
#define THREADS    (GROUPS * 128 + COPIERS)
#define MAX_STAGES 6 // of the ring

enum work_kind { NO_MORE, OF_QUERIES, OF_KEYS, OF_VALUES };

// An item: BLOCK_ROWS packed rows (or, OF_KEYS and OF_VALUES, rows of the batch from p.start on as
// keys) against the tiles from first to end - 1, each step-th: keys of sequence s (or packed rows
// of p).
struct work {
    work_kind kind;
    packed_rows p;
    int s, kv_head, first, end, step;
    int part,
        n_parts; // OF_KEYS, OF_VALUES; and of a context that is spread over items (attn_latent.cu)
};

template <int HD> constexpr int tile_bytes = ROWS *HD * 2;
template <int HD> constexpr int stage_bytes = 2 * tile_bytes<HD>;
#define COLUMNS_APART (ROWS * 128) // bytes between a tile's blocks of 64 columns

// Barriers, and what is said across them.
struct block_state {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES], kept_full, kept_empty;
    work item;   // of the kept rows
    int next[2]; // items, in turn
};

// ---- items -------------------------------------------------------------------------------------

/* Tiles of N packed rows are numbered so that a number gives its sequence: those of s begin at
 * (query_start[s] - query_start[0]) * group / N + s, which leaves room for all, and no more than
 * one number a sequence to no tile; what other sequences of the batch have (attn_widened()) is
 * behind them. */
template <int N = BLOCK_ROWS> static inline int query_items(const attn_args<bf16> &a)
{
    return (int)((int64_t)a.n_tokens * a.group / N + a.n_seqs) * a.n_kv_heads;
}

#if HAS_WGMMA

template <int N> INLINE int first_tile(const attn_args<bf16> &a, int s)
{
    return (a.query_start[s] - a.query_start[0]) * a.group / N + s;
}

// False where there is no such tile, or its sequence has no more than `few` packed rows, which
// another kernel takes. The last rows, which see most, have the lowest numbers.
template <bool PAGED, int N = BLOCK_ROWS>
INLINE bool take_queries(work &w, const attn_args<bf16> &a, int item,
                         int few = PAGED ? FEW_ROWS : 0)
{
    int tile = a.n_tokens * a.group / N + a.n_seqs - 1 - item / a.n_kv_heads;
    int s = 0;
    for (int last = a.n_seqs - 1; s < last;) {
        int middle = (s + last + 1) / 2;
        if (first_tile<N>(a, middle) <= tile)
            s = middle;
        else
            last = middle - 1;
    }
    row_tile t;
    if (!row_tile_of<N>(t, a, s, item % a.n_kv_heads, tile - first_tile<N>(a, s)) ||
        t.rows.n <= few)
        return false;
    w = {OF_QUERIES, t.rows, s, t.kv_head, t.low / ROWS * ROWS, t.highest + 1, ROWS, 0, 1};
    return true;
}

// ---- copying -----------------------------------------------------------------------------------

INLINE void copiers_sync()
{
    asm volatile("bar.sync 1, %0;" ::"n"(COPIERS) : "memory");
}

// The copying warpgroup's view.
struct copier {
    block_state *state;
    stage_ring stream;
    uint32_t kept, kept_full, kept_empty, kept_parity;

    // The kept rows' place is free; the item for it is w.
    INLINE void begin(const work &w)
    {
        barrier_wait(kept_empty, kept_parity ^ 1);
        kept_parity ^= 1;
        if (threadIdx.x % COPIERS == 0) {
            state->item = w;
            barrier_arrive(kept_full);
        }
    }
    INLINE void kept_copied() { barrier_arrive_copied(kept_full); }

    INLINE void begin_stage() { barrier_wait(stream.is_empty(), stream.parity ^ 1); }
    INLINE void end_stage()
    {
        barrier_arrive_copied(stream.is_full());
        stream.next();
    }
    INLINE void end_stored_stage() // by stores, not by copies
    {
        fence_async();
        barrier_arrive(stream.is_full());
        stream.next();
    }

    // Goes through the items, numbers 0 .. n - 1 as blocks come to need them: f(number).
    template <typename F> INLINE void each_item(unsigned *ticket, int n, F f)
    {
        bool first = threadIdx.x % COPIERS == 0;
        int item = blockIdx.x;
        for (int turn = 0; item < n; turn ^= 1) {
            f(item);
            if (first) { // not before: what a block has taken no other can do
                unsigned taken = atomicAdd(ticket, 1u);
                if (taken == (unsigned)n - 1) *ticket = 0; // the last that anybody takes
                state->next[turn] = gridDim.x + taken;
            }
            copiers_sync();
            item = state->next[turn];
        }
        begin({NO_MORE});
        kept_copied();
    }
};

// A thread copies the same 16 bytes of each 64 columns of every so many-th row, a multiple of 8.
#define ROWS_APART (COPIERS / 8)
#define ROWS_EACH  (ROWS / ROWS_APART)

// Of the thread: its first row of a tile, and its first column, or 0 where a row has no such.
INLINE int first_row()
{
    return threadIdx.x % COPIERS / 8;
}
INLINE int first_column(int dims)
{
    int d = threadIdx.x % 8 * 8;
    return d < dims ? d : 0;
}

// Starts copying 64 rows of TILES arrays into the tiles at `to`. place(i, r, from): where the
// thread's first columns of row r, its i-th, are, an address in any case; false: the row is zeros.
template <int HD, int TILES, typename F> INLINE void copy_tiles(uint32_t to, int dims, F place)
{
    int u = threadIdx.x % 8, r0 = first_row();
    to += r0 * 128 + ((u ^ r0) % 8) * 16;
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        const bf16 *from[2];
        bool valid = place(i, r0 + i * ROWS_APART, from);
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int b = 0; b < HD / 64; b++) {
                bool in = valid && b * 64 + u * 8 < dims;
                copy16(to + t * tile_bytes<HD> + b * COLUMNS_APART + i * ROWS_APART * 128,
                       in ? from[t] + b * 64 : from[t], in);
            }
    }
}

// from + row * bytes, in one instruction
INLINE const bf16 *row_at(const bf16 *from, int row, int bytes)
{
    const bf16 *at;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(bytes), "l"(from));
    return at;
}

// Where the thread's columns of packed rows are: in q, and in what is (T, n_heads, head_dim).
struct packed_places {
    const bf16 *q, *out;              // of the first row and head
    int head_bytes, q_bytes, o_bytes; // between heads; added from a row's last head to the next row

    INLINE bool find(const attn_args<bf16> &a, const packed_rows &p, int r,
                     const bf16 *(&from)[2]) const
    {
        int x = min(p.base + r, p.n - 1), row = by_group(a, x);
        from[0] = row_at(row_at(q, x, head_bytes), row, q_bytes);
        from[1] = row_at(row_at(out, x, head_bytes), row, o_bytes);
        return p.in(r);
    }
};

INLINE packed_places places_of(const attn_args<bf16> &a, const packed_rows &p, const bf16 *out)
{
    int64_t first = (int64_t)p.head0 * a.head_dim + first_column(a.head_dim);
    return {a.q + p.start * a.q_stride + first,
            out + (int64_t)p.start * a.n_heads * a.head_dim + first, a.head_dim * 2,
            ((int)a.q_stride - a.group * a.head_dim) * 2, (a.n_heads - a.group) * a.head_dim * 2};
}

// 64 keys, or values, of a pool in e4m3 from position `tile` on into the tile at `to`; zeros from
// `end` on. BATCH: as widen_rows() has it.
template <int HD, int BATCH>
INLINE void widen_tile(uint32_t to, const attn_args<bf16> &a, int s, int kv_head, int value,
                       int tile, int end)
{
    widen_rows<HD, COPIERS, BATCH>(
        a, kv_head, value, threadIdx.x % COPIERS, 0, ROWS,
        [&](int r) { return tile + r < end ? (int)key_row<true, true>(a, s, tile + r) : -1; },
        [&](int r, int u, uint4 x) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                             to + u / 8 * COLUMNS_APART + r * 128 + ((u ^ r) % 8) * 16),
                         "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                         : "memory");
        });
}

// Copies the N times 64 rows that stay for an item, of TILES arrays. place(r, from): as
// copy_tiles() has it.
template <int HD, int N, int TILES, typename F> INLINE void copy_kept(copier &c, int dims, F place)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        copy_tiles<HD, TILES>(
            c.kept + i * TILES * tile_bytes<HD>, dims,
            [&](int, int r, const bf16 *(&from)[2]) { return place(i * ROWS + r, from); });
    c.kept_copied();
}

// The same of an item's packed rows: of their queries and, where TILES is 2, of what lies as `out`.
template <int HD, int N, int TILES>
INLINE void copy_packed(copier &c, const attn_args<bf16> &a, const work &w, const bf16 *out)
{
    packed_places places = places_of(a, w.p, out);
    copy_kept<HD, N, TILES>(
        c, a.head_dim, [&](int r, const bf16 *(&from)[2]) { return places.find(a, w.p, r, from); });
}

// A stage: the item's 64 keys from position `tile` on and, where TILES is 2, their values. run: of
// a packed batch, that the thread's last key was in.
template <int HD, bool PAGED, int TILES = 2, bool FROM_L2 = false>
INLINE void copy_stage(copier &c, const attn_args<bf16> &a, const work &w, int tile,
                       context_run &run)
{
    const int first = w.kv_head * a.head_dim + first_column(a.head_dim);
    const bf16 *k = a.k + first, *v = a.v + first;
    int rows[ROWS_EACH], bytes = (int)a.kv_stride * 2;
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        int j = min(tile + first_row() + i * ROWS_APART, max(w.end, 1) - 1);
        if (PAGED)
            rows[i] = w.end > 0 ? (int)key_row<true, FROM_L2>(a, w.s, j) : 0;
        else {
            if (j < run.first || j >= run.end) run = run_of(a, w.s, j);
            rows[i] = j + run.to_row;
        }
    }
    c.begin_stage();
    copy_tiles<HD, TILES>(c.stream.stage(), a.head_dim, [&](int i, int r, const bf16 *(&from)[2]) {
        from[0] = row_at(k, rows[i], bytes);
        if (TILES > 1) from[1] = row_at(v, rows[i], bytes);
        return tile + r < w.end;
    });
    c.end_stage();
}

// The keys and values that an item OF_QUERIES goes through; a row that sees nothing has a tile,
// too.
template <int HD, bool PAGED>
INLINE void stream_keys(copier &c, const attn_args<bf16> &a, const work &w)
{
    context_run run = {0, 0, 0};
    int tile = w.first;
#pragma unroll 1
    do copy_stage<HD, PAGED>(c, a, w, tile, run);
    while ((tile += ROWS) < w.end);
}

// ---- computing ---------------------------------------------------------------------------------

// A computing warp's view.
struct computer {
    stage_ring stream;
    uint32_t kept; // this warpgroup's tiles
    uint32_t kept_full, kept_empty, kept_parity;
    int group, row0; // the warpgroup; the first of the warp's 16 rows of the block's

    INLINE void wait_stage()
    {
        barrier_wait(stream.is_full(), stream.parity);
        fence_async();
    }
    // All lanes say that they are done with what a barrier guards: it is as fast as one lane behind
    // a __syncwarp(), which racecheck does not follow.
    INLINE void done_with_kept()
    {
        barrier_arrive(kept_empty);
        kept_parity ^= 1;
    }

    // Calls f(item) with the items that are next as long as they are of this kind; an item and its
    // kept rows are there until f is done with them.
    template <typename F> INLINE void each_item(const block_state &state, work_kind kind, F f)
    {
        for (;;) {
            barrier_wait(kept_full, kept_parity);
            fence_async();
            if (state.item.kind != kind) return;
            f(state.item);
        }
    }
};

// The warp's 16 rows of a tile as left operands.
template <int HD> INLINE void take_rows(uint32_t (&x)[HD / 16][4], uint32_t tile, int row0)
{
    int lane = threadIdx.x % 32, row = row0 % ROWS + lane % 16;
#pragma unroll
    for (int k = 0; k < HD / 16; k++) {
        int unit = k * 2 + lane / 16;
        load_matrices(x[k], tile + unit / 8 * COLUMNS_APART + row * 128 + ((unit ^ row) % 8) * 16);
    }
}

// How far 16 columns of a tile lie behind its first, in units of 16 bytes.
INLINE constexpr uint32_t columns_behind(int k)
{
    return k / 4 * (COLUMNS_APART / 16) + k % 4 * 2;
}

// w = a b': the scores of a warpgroup's 64 rows and those of the tile b.
template <int HD> INLINE void multiply(float (&w)[ROWS / 8][4], uint32_t a, uint32_t b)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HD / 16; k++)
        wgmma_to(w, behind(operand(a), columns_behind(k)), behind(operand(b), columns_behind(k)),
                 k > 0);
    wgmma_commit();
}

template <int HD>
INLINE void multiply(float (&w)[ROWS / 8][4], const uint32_t (&a)[HD / 16][4], uint32_t b)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HD / 16; k++)
        wgmma_left(w, a[k], behind(operand(b), columns_behind(k)), k > 0);
    wgmma_commit();
}

// w as left operands of a sum over its columns.
INLINE void as_left(uint32_t (&x)[ROWS / 16][4], const float (&w)[ROWS / 8][4])
{
#pragma unroll
    for (int n = 0; n < ROWS; n += 16) as_left<ROWS>(x[n / 16], w, n);
}

// sum += x b, over the rows of the tile b; without what was in sum where `add` is 0.
template <int J>
INLINE void add_weighted(float (&sum)[J][4], const uint32_t (&x)[ROWS / 16][4], uint32_t b,
                         int add = 1)
{
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < ROWS / 16; n++)
        wgmma_left_of_rows(sum, x[n], behind(operand_of_rows(b, COLUMNS_APART), n * 128),
                           n > 0 ? 1 : add);
    wgmma_commit();
}

// ---- parts of several warpgroups ---------------------------------------------------------------

INLINE void group_sync(int group)
{
    asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
}

// Of n warpgroups the last to arrive. is_last: this warpgroup's, shared.
INLINE bool last_group(unsigned *ticket, int n, int group, int *is_last)
{
    return completes(ticket, 1, n, threadIdx.x % 128 == 0, is_last, [=] { group_sync(group); });
}

// ---- a block -----------------------------------------------------------------------------------

/* Runs a block with N stages of TILES tiles, EXTRA bytes behind each: copying(copier &) in its last
 * warpgroup, whose threads have COPIER registers, computing(computer &) in the others. Behind the
 * ring lie KEPT tiles for each of these, or, where that is 0, what all of them share. */
template <int HD, int N, int KEPT, int TILES = 2, int EXTRA = 0, int COPIER = 40, typename COPY,
          typename COMPUTE>
INLINE void run_block(block_state &state, char *memory, COPY copying, COMPUTE computing)
{
    stage_ring stream = {shared_address(memory),
                         TILES * tile_bytes<HD> + EXTRA,
                         shared_address(state.full),
                         shared_address(state.empty),
                         N,
                         0,
                         0};
    uint32_t kept_tiles = stream.first + N * stream.bytes;
    uint32_t kept_full = shared_address(&state.kept_full);
    uint32_t kept_empty = shared_address(&state.kept_empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < N; i++) {
            barrier_init(stream.full + i * 8, COPIERS);
            barrier_init(stream.empty + i * 8, GROUPS * 128);
        }
        barrier_init(kept_full, COPIERS + 1);
        barrier_init(kept_empty, GROUPS * 128);
    }
    __syncthreads();
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0); // known to be uniform
    if (warp >= GROUPS * 4) {
        fewer_registers<COPIER>();
        copier c = {&state, stream, kept_tiles, kept_full, kept_empty, 0};
        copying(c);
    } else {
        more_registers<252 - COPIER / 2>(); // all begin with 168
        computer c = {stream,    kept_tiles + warp / 4 * KEPT * tile_bytes<HD>,
                      kept_full, kept_empty,
                      0,         warp / 4,
                      warp * 16};
        computing(c);
    }
}

#endif // HAS_WGMMA

template <int HD, int N, int KEPT, int EXTRA = 0>
constexpr size_t block_memory = N *(stage_bytes<HD> + EXTRA) + GROUPS *KEPT *tile_bytes<HD>;

#endif
