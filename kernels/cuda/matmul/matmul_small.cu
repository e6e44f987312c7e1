/* matmul_small.cu: C = A B^T [+ bias] [+ C] for few rows of bf16 on Hopper: the matmuls of a
 * decode step, and the same for each expert of a mixture over its rows.
 *
 * The work is reading B, the weights (n, k), once, at the memory's rate, and the sums are in k16
 * order: 16 of k at a time, from the first to the last, never split (docs/internals/numerics.md).
 * So a row's bits are those that the same row has among thousands, in cuBLASLt. A chain of k / 16
 * dependent steps is shortest in wgmma with the weights as its N side (20 cycles a step with 16 of
 * them, mma m16n8k16 26, on one H200, 2026-11-22): a block has N = 8 J of them, as many as make one
 * round of blocks fill the device, and 64 rows of A for each of its GROUPS of four warps, of which
 * those that there are need to be right. One more warp keeps a ring of TMA copies ahead of the
 * sums. What follows the sums goes through shared memory, so that few rows are all threads' work;
 * from 33 rows on each thread ends what it has in registers.
 *
 * The weights do not depend on the kernel before, so they are asked for before grid_wait(): this
 * kernel's reads run under the end of its predecessor. That is safe because a running kernel proves
 * that all but the two before it are complete (cuda.cuh), and `early` of the call says that these
 * write something else.
 *
 * The end of a tile may be more than storing it: the activation of gate and up columns. It needs
 * two columns that lie apart, so the tile then has rows of B from two places, and each thread ends
 * a pair of columns in one and the pair that belongs to it in the other. docs/lab/performance.md
 * says what was tried and lost.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/matmul/few.cuh"
#include <algorithm>

#if HAS_WGMMA

// A group's sums of a tile: 64 rows of A by 8 J of B. The copies of a stage may be overwritten once
// the sums of the next are under way. What a stage has past the end of k is zeros.
template <int J, int CHUNKS>
INLINE void few_sums(float (&sum)[4 * J], few_ring &ring, const few_args &p, int group, int steps)
{
    uint32_t a_step = p.height * CHUNK * 2 / 16, b_step = 8 * J * CHUNK * 2 / 16, before = 0;
    bool first_lane = threadIdx.x % 32 == 0;
#pragma unroll
    for (int i = 0; i < 4 * J; i++) sum[i] = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++, ring.next()) {
        uint64_t a = operand(ring.stage() + group * 64 * CHUNK * 2);
        uint64_t b = operand(ring.stage() + ring.a_bytes);
        barrier_wait(ring.is_full(), ring.parity);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int q = 0; q < CHUNK / 16; q++)
                wgmma(sum, a + c * a_step + 2 * q, b + c * b_step + 2 * q);
        wgmma_commit();
        wgmma_wait<1>();
        if (before && first_lane) barrier_arrive(before);
        before = ring.is_empty();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 4 * J; i++) asm volatile("" : "+f"(sum[i])::"memory"); // not read before
    if (first_lane) barrier_arrive(before);
}

// Sums of the rows that there are, from registers into a tile (rows, tile_pitch<J>).
template <int J> constexpr int tile_pitch = 8 * J + 8;

template <int J> INLINE void few_spread(float *tile, const float (&sum)[4 * J], int rows)
{
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; h++, row += 8)
        if (row < rows)
#pragma unroll
            for (int j = 0; j < J; j++)
                *(float2 *)&tile[row * tile_pitch<J> + j * 8 + lane % 4 * 2] =
                    make_float2(sum[j * 4 + h * 2], sum[j * 4 + h * 2 + 1]);
}

// What a thread ends at once: two neighbours of the block's tile, and where columns come in pairs
// the two that belong to them. What is needed beside the sums is loaded while these run.
#define ENDS_AT_ONCE 4

template <epilogue END, int J> struct epilogue_at {
    using U = std::conditional_t<END == WIDE, float, bf16>; // of c
    static constexpr bool PAIRS = (END == GATED);
    static constexpr int ACROSS = PAIRS ? 2 * J : 4 * J; // of these in a row of the tile
    int row, column, at; // of the tile; of B's rows, or n where there is nothing; in the tile's row
    bf16 bias[PAIRS + 1][2]; // as they lie in memory: not waited for before they are used
    U old[2];

    INLINE void load(const few_args &p, const few_work &rows, int from, int i)
    {
        int end = END == GATED ? p.apart : p.n;
        row = i / ACROSS;
        at = i % ACROSS * 2;
        column = row < rows.rows && from + at < end ? from + at : p.n;
        int64_t to = (int64_t)(rows.first + row) * p.n + column;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (column + k >= p.n) continue;
            if (p.bias) bias[0][k] = p.bias[column + k];
            if (PAIRS && p.bias) bias[PAIRS][k] = p.bias[column + k + p.apart];
            if (!PAIRS && p.add) old[k] = ((const U *)p.c)[to + k];
        }
    }

    INLINE void store(const float *tile, const few_args &p, const few_work &rows) const
    {
        if (column >= p.n) return;
        float x[PAIRS + 1][2];
#pragma unroll
        for (int i = 0; i <= PAIRS; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float sum = tile[row * tile_pitch<J> + at + i * 4 * J + k];
                x[i][k] = p.bias ? sum + to_f32(bias[i][k]) : sum;
                if (END != WIDE) x[i][k] = to_f32(from_f32<bf16>(x[i][k]));
            }
        int row_at = rows.first + row;
        if constexpr (END == GATED)
            store_pair((bf16 *)p.c + (int64_t)row_at * p.apart + column,
                       activate(x[0][0], p.act) * x[1][0], activate(x[0][1], p.act) * x[1][1]);
        else if (END == WIDE && p.peers.size)
            store_columns(row_at, p, x[0]);
        else
            store_sums((U *)p.c + (int64_t)row_at * p.n + column, p, x[0]);
    }

    INLINE void store_columns(int row_at, const few_args &p, float (&x)[2]) const
    {
        const int64_t at = ((int64_t)row_at * p.peers.size + p.peers.rank) * p.n + column;
        for (int r = 0; r < p.peers.size; r++) store_pair(p.columns[r] + at, x[0], x[1]);
    }

    INLINE void store_sums(U *to, const few_args &p, float (&x)[2]) const
    {
        if (p.add)
#pragma unroll
            for (int k = 0; k < 2; k++) x[k] += to_f32(old[k]);
        if (p.n % 2 == 0) {
            store_pair(to, x[0], x[1]);
            return;
        }
        to[0] = from_f32<U>(x[0]); // rows of odd width are not aligned, and end in a half pair
        if (column + 1 < p.n) to[1] = from_f32<U>(x[1]);
    }
};

// What direct_end() adds to, loaded at once: of a few columns before the sums are there, of many
// row by row.
template <epilogue END, int J> struct direct_old {
    using U = std::conditional_t<END == WIDE, float, bf16>;
    static constexpr bool AHEAD = J <= 6;
    pack<U, 2> at[AHEAD ? 2 : 1][J];

    INLINE void load(const few_args &p, const few_work &rows, int h, int row, int column)
    {
        if (!p.add || row >= rows.rows) return;
        const U *from = (const U *)p.c + (int64_t)(rows.first + row) * p.n + column;
#pragma unroll
        for (int j = 0; j < J; j++)
            if (column + j * 8 < p.n) at[h][j] = *(const pack<U, 2> *)(from + j * 8);
    }
};

// Ends a thread's rows of a tile, row and row + 8 of its columns from + 8 j, from the registers
// that the sums are in. Both of a pair of columns are there. ACT: p.act.
template <act_kind ACT, epilogue END, int J>
INLINE void direct_end(const float (&sum)[4 * J], direct_old<END, J> &old, const few_args &p,
                       const few_work &rows, int row, int from)
{
    constexpr int PAIRS = (END == GATED), ACROSS = J / (PAIRS + 1);
    const int end = PAIRS ? p.apart : p.n;
#pragma unroll
    for (int h = 0; h < 2; h++, row += 8) {
        if (row >= rows.rows) break;
        if constexpr (!PAIRS && !old.AHEAD) old.load(p, rows, 0, row, from);
        auto *to = (typename direct_old<END, J>::U *)p.c + (int64_t)(rows.first + row) * end;
        auto value = [&](int j, int k, int i) {
            float x = sum[(j + i * ACROSS) * 4 + h * 2 + k];
            const int column = from + j * 8;
            if (p.bias && column < end) x += to_f32(p.bias[column + k + i * p.apart]);
            return END == WIDE ? x : to_f32(from_f32<bf16>(x));
        };
        float gates[PAIRS ? 2 * ACROSS : 1];
        if constexpr (PAIRS) {
            unrolled<ACROSS, 2>([&](int j, int k) { gates[j * 2 + k] = value(j, k, 0); });
            activate_all(gates, ACT);
        }
#pragma unroll
        for (int j = 0; j < ACROSS; j++) {
            const int column = from + j * 8;
            if (column >= end) break;
            float x[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                x[k] = value(j, k, PAIRS);
                if constexpr (PAIRS)
                    x[k] *= gates[j * 2 + k];
                else if (p.add)
                    x[k] += to_f32(old.at[old.AHEAD ? h : 0][j].at[k]);
            }
            store_pair(to + column, x[0], x[1]);
        }
    }
}

// A tile with many rows.
template <epilogue END, int J, int CHUNKS>
INLINE void direct_tile(few_ring &ring, const few_args &p, const few_work &rows, int group,
                        int steps)
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    const int column = first_column<END>(rows.tile, 8 * J) + lane % 4 * 2;
    direct_old<END, J> old;
    float sum[4 * J];
    if constexpr (END != GATED && old.AHEAD)
#pragma unroll
        for (int h = 0; h < 2; h++) old.load(p, rows, h, row + h * 8, column);
    few_sums<J, CHUNKS>(sum, ring, p, group, steps);
    if (END != GATED || p.act == ACT_SILU)
        direct_end<ACT_SILU>(sum, old, p, rows, row, column);
    else if (p.act == ACT_GELU_TANH)
        direct_end<ACT_GELU_TANH>(sum, old, p, rows, row, column);
    else
        direct_end<ACT_GELU>(sum, old, p, rows, row, column);
}

// A tile with few rows: its sums go through shared memory, so that they are all threads' work.
template <epilogue END, int J, int CHUNKS, int GROUPS>
INLINE void spread_tile(float *tile, few_ring &ring, const few_args &p, const few_work &rows,
                        int group, int steps, peer_call call, bool is_first)
{
    int from = first_column<END>(rows.tile, 8 * J), at = threadIdx.x;
    epilogue_at<END, J> ends[ENDS_AT_ONCE];
#pragma unroll
    for (int k = 0; k < ENDS_AT_ONCE; k++) ends[k].load(p, rows, from, at + k * GROUPS * 128);
    float sum[4 * J];
    few_sums<J, CHUNKS>(sum, ring, p, group, steps);
    if (!is_first) groups_sync<GROUPS>(); // the tile before is stored
    few_spread<J>(tile, sum, rows.rows);
    if (END == WIDE && p.peers.size && is_first && threadIdx.x == 0)
        await_flags(p.peers, call, PEER_READY);
    groups_sync<GROUPS>();
#pragma unroll 1
    for (;;) {
#pragma unroll
        for (int k = 0; k < ENDS_AT_ONCE; k++) ends[k].store(tile, p, rows);
        at += ENDS_AT_ONCE * GROUPS * 128;
        if (at >= rows.rows * ends[0].ACROSS) break;
#pragma unroll
        for (int k = 0; k < ENDS_AT_ONCE; k++) ends[k].load(p, rows, from, at + k * GROUPS * 128);
    }
}

// Ranks put their columns together: all have what the others' blocks write here. Threads of the
// groups, at the block's end; the last block waits for the other ranks' last ones.
template <int GROUPS> INLINE void end_columns(const peer_slots &p, peer_call call)
{
    groups_sync<GROUPS>();
    if (threadIdx.x > 0) return;
    const unsigned blocks = gridDim.x * gridDim.y;
    __threadfence_system();
    if (atomicAdd(p.ended, 1u) != blocks - 1) return;
    *p.ended = 0;
    raise_flag(p, call, PEER_DONE);
    await_flags(p, call, PEER_DONE);
    atomicAdd(p.calls, (unsigned long long)CALL);
}

#endif

// Chunks in a stage: the fewer rows it has, the more of them are worth its barriers.
__host__ __device__ constexpr int chunks_of(int j, int groups)
{
    return j <= 3 ? 4 / groups : j <= 6 ? 2 / groups : 1;
}

// DIRECT: sums are stored from registers.
template <epilogue END, int J, int GROUPS, bool DIRECT>
__global__ void __launch_bounds__(GROUPS * 128 + 32)
    few_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
               few_args p)
{
#if HAS_WGMMA
    constexpr int N = 8 * J, CHUNKS = chunks_of(J, GROUPS);
    extern __shared__ __align__(1024) char stages[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    if (!p.early) grid_wait();
    uint32_t a_bytes = CHUNKS * p.height * CHUNK * 2;
    few_ring ring = {{shared_address(stages), a_bytes + CHUNKS * N * CHUNK * 2,
                      shared_address(full), shared_address(empty), p.stages, 0, 0},
                     a_bytes};
    float *tile = (float *)(stages + p.stages * ring.bytes);
    int *before = (int *)(tile + (DIRECT ? 0 : p.height * tile_pitch<J>));
    if (threadIdx.x == GROUPS * 128) {
        for (int i = 0; i < p.stages; i++) {
            barrier_init(ring.full + i * 8, 1);
            barrier_init(ring.empty + i * 8, GROUPS * 4);
        }
        barriers_made();
    }
    if (p.offsets && threadIdx.x < 32)
        count_tiles(before, p.offsets, p.n_experts,
                    [&](int rows) { return (rows + p.height - 1) / p.height; });
    __syncthreads();

    int all = p.offsets ? before[p.n_experts] * p.tiles : p.tiles;
    int blocks = gridDim.x, rounds = (all - (int)blockIdx.x + blocks - 1) / blocks;
    int steps = (p.k / CHUNK + CHUNKS - 1) / CHUNKS;
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0); // known to be uniform
    if (warp == GROUPS * 4) {
        if (threadIdx.x % 32 == 0)
            few_copy<END>(ring, &a_map, &b_map, p, before, N, {CHUNKS, CHUNKS, p.stages}, rounds,
                          steps);
        return;
    }
    grid_wait();
    grid_release();
    const bool columns = END == WIDE && !DIRECT && p.peers.size;
    const peer_call call = columns ? this_peer_call(p.peers) : peer_call();
    if (columns && blockIdx.x + blockIdx.y + threadIdx.x == 0)
        raise_flag(p.peers, call, PEER_READY);
    for (int i = 0; i < rounds; i++) {
        few_work rows = find_work(p, before, blockIdx.x + i * gridDim.x);
        if constexpr (DIRECT)
            direct_tile<END, J, CHUNKS>(ring, p, rows, warp / 4, steps);
        else
            spread_tile<END, J, CHUNKS, GROUPS>(tile, ring, p, rows, warp / 4, steps, call, i == 0);
    }
    if (columns) end_columns<GROUPS>(p.peers, call);
#endif
}

// ---- launches ----------------------------------------------------------------------------------

struct few_plan {
    int j, groups, height, chunks, stages;
    bool direct;
    dim3 grid;
    size_t shared;
};

// J, from small to large: of any end, and the fewer of some.
template <int... J> struct tile_list {
    static constexpr int all[sizeof...(J)] = {J...};
};
typedef tile_list<1, 2, 4, 5, 6, 8, 12, 16, 18> tile_sizes;

constexpr bool has_tile(epilogue end, int j)
{
    if (end == WIDE) return j <= 2 || j % 4 == 0 || j == 18;
    // a half has whole groups of 8 rows of B
    return end == STORED || j % 2 == 0;
}

// Whether tiles of 8 j may be stored from registers.
constexpr bool has_direct(epilogue end, int j)
{
    return end == STORED || j >= 8;
}

// Calls f(number<j>).
template <epilogue END, typename F, int... J> static void with_tile(int j, F f, tile_list<J...>)
{
    auto among = [&](auto one) {
        if constexpr (has_tile(END, decltype(one)::value))
            if (j == one.value) f(one);
    };
    (among(number<J>()), ...);
}

// The columns of a matmul.
struct few_columns {
    epilogue end;
    int n, apart;
    bool sent; // to other ranks

    // Whether a block of so many rows stores its tiles of 8 j from registers. Of fewer rows a few
    // threads would have all that there is to do.
    bool direct(int j, int height) const
    {
        return has_direct(end, j) && height > 32 && n % 2 == 0 && !sent;
    }
    int tiles(int j) const { return apart > 0 ? ceil_div(n / 2, 4 * j) : ceil_div(n, 8 * j); }
};

// The tile with which the fewest rounds of `blocks` blocks have all columns; 0: none fits.
static int tile_of(const few_columns &columns, int blocks)
{
    const int eights = ceil_div(columns.n, 8);
    for (int rounds = ceil_div(eights, blocks * 18); rounds <= eights; rounds++)
        for (int j : tile_sizes::all)
            if (j >= ceil_div(eights, blocks * rounds) && has_tile(columns.end, j)) return j;
    return 0;
}

// The ring of a plan whose blocks have so many tiles at most, each, and what they need of shared
// memory beside it.
static void plan_ring(struct cuda_state *state, few_plan &plan, int k, int rounds, size_t beside)
{
    plan.groups = ceil_div(plan.height, 64);
    plan.chunks = chunks_of(plan.j, plan.groups);
    size_t tile = beside;
    if (!plan.direct) tile += (size_t)plan.height * (plan.j * 8 + 8) * sizeof(float);
    size_t a_bytes = (size_t)plan.chunks * plan.height * CHUNK * 2;
    size_t stage = a_bytes + (size_t)plan.chunks * plan.j * 8 * CHUNK * 2;
    size_t steps = (size_t)rounds * ceil_div(k / CHUNK, plan.chunks), all = state->max_shared;
    // Where there are no more blocks than SMs, each has one for itself: on one with two, both would
    // take twice as long, and the others wait for them. Its ring is as deep as it can be, for the
    // memory's latency under load.
    bool alone = (int)(plan.grid.x * plan.grid.y) <= state->n_sms || plan.height > 32;
    size_t most = (alone ? all : all / 2) - SHARED_APART;
    plan.stages = (int)std::min({(size_t)MAX_STAGES, (most - tile) / stage, steps});
    // wgmma reads 64 rows of A, past the last stage where fewer are copied
    size_t end = plan.stages * stage + tile;
    size_t read = plan.stages * stage - stage + (plan.chunks - 1) * (a_bytes / plan.chunks) +
                  (size_t)plan.groups * 64 * CHUNK * 2;
    plan.shared = std::max({end, read, alone ? all / 2 : 0});
}

template <epilogue END, int J> static auto few_kernel_of(const few_plan &plan)
{
    if constexpr (has_direct(END, J))
        if (plan.direct)
            return plan.groups == 1 ? few_kernel<END, J, 1, true> : few_kernel<END, J, 2, true>;
    // gated columns of that many rows and tiles of that size are always stored from registers
    if constexpr (END != GATED || !has_direct(END, J))
        if (plan.groups == 2) return few_kernel<END, J, 2, false>;
    return few_kernel<END, J, 1, false>;
}

// The tile with which so many experts' columns cost `blocks` blocks least.
static int cheapest_tile(const few_columns &columns, int experts, int blocks)
{
    const bool many = (int64_t)experts * columns.tiles(12) >= blocks;
    int64_t least = INT64_MAX;
    int best = 0;
    for (int j : tile_sizes::all) {
        // a tile's end costs about as much as 8 columns more; rings of narrow tiles hold too little
        if (!has_tile(columns.end, j) || (many && j < 12)) continue;
        const int64_t cost =
            (int64_t)ceil_div((int64_t)experts * columns.tiles(j), blocks) * (j + 1);
        if (cost >= least) continue;
        least = cost;
        best = j;
    }
    return best;
}

// Whether the call is for few rows: of each expert, or of all. (cuBLASLt keeps the order for any
// number of rows, but not where C's rows are odd.)
static bool is_for_few(struct device *dev, const matmul_call &c)
{
    const struct matmul *s = c.shape;
    const bool few = s->offsets
                         ? s->n_experts <= MAX_EXPERTS && s->m <= std::max(64, 32 * s->n_experts)
                         : s->m <= MAX_ROWS || s->n % 2 != 0;
    return few && on_hopper(dev) && s->in == DT_BF16 && !s->scales && !s->mx_scales &&
           !s->trans_a && s->trans_b && s->k % CHUNK == 0 && s->k > 0 &&
           aligned(16, {c.a, c.b}, {}) && aligned(8, {c.c}, {});
}

// j is 0 where it is not for few rows, or no tile fits.
template <epilogue END>
static few_plan few_plan_of(struct device *dev, const matmul_call &call, const few_args &p)
{
    struct cuda_state *state = cuda_use(dev);
    const int m = p.m, e = p.n_experts, sms = state->n_sms;
    const few_columns columns = {END, p.n, p.apart, p.peers.size > 0};
    few_plan plan = {};
    if (!is_for_few(dev, call)) return plan;
    plan.height = std::min(ceil_div(m, 8) * 8, MAX_ROWS);
    // on average an expert has fewer rows than a tile
    if (e > 0) plan.height = m <= std::max(8, 2 * e) ? 8 : m <= 8 * e ? 16 : 64;
    const int down = e > 0 ? 1 : ceil_div(m, plan.height), across = std::max(1, sms / down);
    plan.j = e > 0 ? cheapest_tile(columns, busy_experts(m, e), sms) : tile_of(columns, across);
    if (!plan.j) return plan;
    const int tiles = columns.tiles(plan.j) * (e > 0 ? expert_tiles(m, e, plan.height) : 1);
    const int rounds = ceil_div(tiles, across);
    plan.direct = columns.direct(plan.j, plan.height);
    plan.grid = dim3(e > 0 ? std::min(sms, tiles) : ceil_div(tiles, rounds), down);
    plan_ring(state, plan, p.k, rounds, e > 0 ? (e + 1) * sizeof(int) : 0);
    return plan;
}

// p: all but what the plan says. False where there is none.
template <epilogue END> static bool few(struct device *dev, const matmul_call &call, few_args p)
{
    const few_plan plan = few_plan_of<END>(dev, call, p);
    CUtensorMap a_map, b_map;
    if (!plan.j) return false;
    boxes a_boxes = {p.m, p.k, 0, plan.height, plan.chunks};
    boxes b_boxes = {(int64_t)p.n * std::max(1, p.n_experts), p.k, p.apart, plan.j * 8,
                     plan.chunks};
    if (!map_of(dev, &a_map, call.a, a_boxes) || !map_of(dev, &b_map, call.b, b_boxes)) return true;
    p.height = plan.height;
    p.tiles = few_columns{END, p.n, p.apart, false}.tiles(plan.j);
    p.stages = plan.stages;
    auto launch = [&](auto j) {
        cuda_launch(dev, "matmul of few rows", few_kernel_of<END, decltype(j)::value>(plan),
                    plan.grid, plan.groups * 128 + 32, plan.shared, a_map, b_map, p);
    };
    with_tile<END>(plan.j, launch, tile_sizes());
    return true;
}

// ---- variants ----------------------------------------------------------------------------------

bool matmul_few(struct device *dev, const matmul_call &call)
{
    return call.shape->out == DT_F32 ? few<WIDE>(dev, call, few_args_of<WIDE>(call))
                                     : few<STORED>(dev, call, few_args_of<STORED>(call));
}

bool matmul_few_columns(struct device *dev, const matmul_call &call)
{
    const struct matmul *s = call.shape;
    if (!s->columns || s->out != DT_F32 || s->n % 2 != 0 || !is_for_few(dev, call)) return false;
    few_args p = few_args_of<WIDE>(call);
    const peer_slots *peers = comm_place_columns(s->columns, call.c, (void **)p.columns);
    if (!peers) return false;
    p.peers = *peers;
    if (!few<WIDE>(dev, call, p)) return false;
    comm_call_enqueued(s->columns, "columns");
    return true;
}

bool matmul_few_gated(struct device *dev, const matmul_call &call)
{
    return may_gate(call) && call.shape->n % 4 == 0 &&
           few<GATED>(dev, call, few_args_of<GATED>(call));
}
