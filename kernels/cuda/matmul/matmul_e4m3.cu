/* matmul_e4m3.cu: C = A B^T [+ bias] [+ C] for few rows of bf16 and weights B in e4m3 on Hopper,
 * and the same for each expert of a mixture: a decode step's matmuls with half the bytes to read.
 *
 * A code times 2^120 is the bf16 number that its bits are when they are moved to a bf16's places,
 * exactly, so weights are widened in registers and multiplied in k16 order as bf16 is, and the
 * row's power of two is applied to the sums: the bits are those of the widened matrix. wgmma takes
 * its left operand from registers, so here the weights are that, 64 rows a group of four warps, and
 * the tokens, in shared memory, the right one. A warp widens what it multiplies: a slab of 8 rows
 * or two. ldmatrix gives a thread four neighbouring codes of a row for each 16 of k; they lie so
 * that these are its four columns (e4m3.h). BATCH steps of 16 of k are widened while
 * as many are multiplied.
 *
 * ROUNDED: the tokens are codes too, and what ldmatrix gives is the left operand of wgmma as it is,
 * 32 of k a step. The sums of E4M3_CHUNK of k are added to the total in f32 while the next chunk's
 * run: its bits are those of cuBLASLt's algorithms without fast accumulation, which have the larger
 * batches (matmul.cu). Only these additions have an order, so where a block has up to 32 rows it
 * multiplies two chunks at once, in what wgmma would waste (paired_sums()).
 *
 * How much a block takes at once was searched on an H200, 2026-11-28, over rows, tokens, groups and
 * bytes of the ring at the sizes of a 1.5 B and a 7.6 B model (plan_of()): as many rows as give
 * each SM a tile, four slabs at least; many tokens are cut among blocks where rows are few. Weights
 * in tiles that are widened in shared memory, warps that widen for others, and mma.sync were
 * slower. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/e4m3.cuh"
#include "kernels/cuda/matmul/few.cuh"
#include <algorithm>

#define MAX_TOKENS  512        // beyond, a matrix is widened as a whole
#define MAX_ROUNDED 64         // beyond, the library is faster
#define MAX_SLABS   24         // of a block
#define AHEAD       (64 << 10) // bytes of weights that are asked for before the first tokens

// Stages have 256 of k where blocks are small, else 128, and in pairs (paired_sums()) 512: chunks
// of 128 bytes of the weights' rows.
__host__ __device__ constexpr int chunks_of(int j, int groups, bool in_pairs = false)
{
    return in_pairs ? 4 : j <= 4 && groups == 1 ? 2 : 1;
}

// Stages of the ring that k takes.
__host__ __device__ constexpr int steps_of(int k, int chunks)
{
    return (k + 128 * chunks - 1) / (128 * chunks);
}

#if HAS_WGMMA

// A warp's slabs of a block's: its number, and where it has two that plus `apart`.
template <int SLABS> struct own_slabs {
    bool has[SLABS];
    uint32_t offset; // of what this lane gives the address of, in the weights of a chunk

    INLINE own_slabs(int warp, int slabs, int apart)
    {
        const int lane = threadIdx.x % 32, row = lane % 8;
        unrolled<SLABS>([&](int h) { has[h] = warp < apart && warp + h * apart < slabs; });
        const int second = SLABS == 2 ? lane / 8 % 2 : 0, step = lane / (SLABS == 2 ? 16 : 8);
        const int slab = has[0] ? warp + (second && has[SLABS - 1] ? apart : 0) : 0;
        offset = slab * 1024 + row * 128 + ((step ^ row) << 4);
    }
};

// The sums of a tile: of 16 rows of weights, or 8, of each warp, by 8 J tokens.
template <int J, int SLABS, int GROUPS>
INLINE void e4m3_sums(float (&sum)[J][4], few_ring &ring, int slabs, const own_slabs<SLABS> &own,
                      int steps)
{
    constexpr int CHUNKS = chunks_of(J, GROUPS), BATCH = 2 * CHUNKS, BATCHES = 4;
    constexpr int MATRICES = BATCH * SLABS, LOADS = MATRICES / 4;
    static_assert(MATRICES % 4 == 0, "ldmatrix loads four");
    const bool first_lane = threadIdx.x % 32 == 0;
    uint32_t left[2][BATCH][4], raw[2][LOADS][4];
    auto load = [&](uint32_t(&to)[LOADS][4], int batch) {
        const uint32_t from =
            ring.stage() + ring.a_bytes + batch * BATCH / 8 * slabs * 1024 + own.offset;
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            load_matrices(to[i], from ^ ((batch * BATCH % 8 + i * (4 / SLABS)) << 4));
    };
    auto multiply = [&](int batch, uint64_t tokens) {
        wgmma_wait<1>(); // of the batch before the last the registers are free
        auto &l = left[batch & 1];
        const auto &r = raw[batch & 1];
#pragma unroll
        for (int q = 0; q < BATCH; q++) {
#pragma unroll
            for (int h = 0; h < SLABS; h++)
                widen(r[(q * SLABS + h) / 4][(q * SLABS + h) % 4], l[q][h], l[q][2 + h]);
            if (SLABS == 1) // nobody's rows: whatever is there
                asm volatile("" : "=r"(l[q][1]), "=r"(l[q][3]));
        }
        wgmma_fence();
#pragma unroll
        for (int q = 0; q < BATCH; q++) {
            const int step = batch * BATCH + q;
            wgmma_left(sum, l[q], behind(tokens, step / 4 * (J * 64) + step % 4 * 2), 1);
        }
        wgmma_commit();
    };
    unrolled<J, 4>([&](int j, int i) { sum[j][i] = 0; });
    // A stage's last batch stands behind the next one's first load: no gap between stages.
    uint64_t tokens = operand(ring.stage());
    barrier_wait(ring.is_full(), ring.parity);
    load(raw[0], 0);
#pragma unroll
    for (int batch = 0; batch < BATCHES - 1; batch++) {
        load(raw[(batch + 1) & 1], batch + 1);
        multiply(batch, tokens);
    }
#pragma unroll 1
    for (int step = 1; step < steps; step++) {
        const uint32_t before = ring.is_empty();
        const uint64_t tokens_before = tokens;
        ring.next();
        tokens = operand(ring.stage());
        barrier_wait(ring.is_full(), ring.parity);
        load(raw[0], 0);
        multiply(BATCHES - 1, tokens_before);
#pragma unroll
        for (int batch = 0; batch < BATCHES - 1; batch++) {
            load(raw[(batch + 1) & 1], batch + 1);
            multiply(batch, tokens);
            // the batch before was waited for only now, and with it all of the stage before
            if (batch == 1 && first_lane) barrier_arrive(before);
        }
    }
    multiply(BATCHES - 1, tokens);
    wgmma_wait<0>();
    settle(sum);
    if (first_lane) barrier_arrive(ring.is_empty());
    ring.next();
}

/* The same sums of tokens in e4m3, of E4M3_CHUNK of k at a time. Where registers allow it there are
 * sums of two chunks by turns, so that one's are added while the next one's run. k is a multiple of
 * 64, and what a last chunk has past its end is not multiplied. */
template <int J, int GROUPS>
INLINE void rounded_sums(float (&total)[J][4], few_ring &ring, int slabs, const own_slabs<2> &own,
                         int k)
{
    constexpr int CHUNKS = chunks_of(J, GROUPS), STEPS = E4M3_CHUNK / 32;
    constexpr bool TURNS = J <= 4 || (J == 8 && GROUPS < 3);
    const bool first_lane = threadIdx.x % 32 == 0;
    const int chunks = (k + E4M3_CHUNK - 1) / E4M3_CHUNK;
    float sum[TURNS + 1][J][4];
    uint32_t codes[TURNS + 1][STEPS][4], before = 0; // before: to be emptied
    unrolled<J, 4>([&](int j, int i) { total[j][i] = sum[0][j][i] = sum[TURNS][j][i] = 0; });
    auto add = [&](float(&x)[J][4]) {
        settle(x);
        unrolled<J, 4>([&](int j, int i) { total[j][i] += x[j][i]; });
        if (before && first_lane) barrier_arrive(before);
        before = 0;
    };
    auto multiply = [&](auto turn, int chunk) {
        constexpr int TURN = decltype(turn)::value, AT = CHUNKS > 1 ? TURN : 0;
        const bool last = chunk + 1 == chunks, whole = !last || k % E4M3_CHUNK == 0;
        auto &own_sum = sum[TURNS * TURN];
        auto &own_codes = codes[TURNS * TURN];
        const uint64_t tokens = operand(ring.stage() + AT * J * 1024);
        const uint32_t from = ring.stage() + ring.a_bytes + AT * slabs * 1024 + own.offset;
        if (AT == 0) barrier_wait(ring.is_full(), ring.parity);
        unrolled<STEPS>([&](int q) { load_matrices(own_codes[q], from ^ (2 * q << 4)); });
        wgmma_fence();
#pragma unroll
        for (int q = 0; q < STEPS; q++) {
            if (q >= STEPS / 2 && !whole) continue;
            wgmma_codes(own_sum, own_codes[q], behind(tokens, 2 * q), q > 0);
        }
        wgmma_commit();
        if (TURNS) {
            wgmma_wait<1>();
            add(sum[TURNS * (1 - TURN)]);
        }
        if (AT + 1 == CHUNKS || last) {
            before = ring.is_empty();
            ring.next();
        }
        if (!TURNS) {
            wgmma_wait<0>();
            add(own_sum);
        }
    };
    int chunk = 0;
#pragma unroll 1
    for (; chunk + 1 < chunks; chunk += 2) {
        multiply(number<0>(), chunk);
        multiply(number<1>(), chunk + 1);
    }
    if (chunk < chunks) multiply(number<0>(), chunk);
    if (!TURNS) return;
    wgmma_wait<0>();
    if (chunk == chunks)
        add(sum[TURNS]);
    else
        add(sum[0]);
}

/* The same where a block has up to 32 rows: of the 64 that wgmma takes, each eight of these is
 * there twice, in two chunks (few_stage), and its columns are the tokens in both. What rows give
 * with the tokens of their own chunk are sums, and a lane has those of both chunks of a row and a
 * token; the rest is nobody's, as is what comes of rows behind the tile's. So through shared
 * memory, which bounds this, each byte of an operand goes once. The two pairs of a stage take
 * turns, so that no wgmma goes on with the sums of the one before it. What is past the end of k is
 * zeros, which change no sum. */
template <int J> INLINE void paired_sums(float (&total)[J][4], few_ring &ring, int slabs, int steps)
{
    const bool first_lane = threadIdx.x % 32 == 0;
    float sum[2][2][2 * J][4];
    uint32_t used[2];
    unrolled<J, 4>([&](int j, int i) { total[j][i] = 0; });
    auto multiply = [&](int turn) {
        const uint64_t tokens = operand(ring.stage()),
                       weights = operand(ring.stage() + ring.a_bytes);
        barrier_wait(ring.is_full(), ring.parity);
        wgmma_fence();
        unrolled<E4M3_CHUNK / 32, 2>([&](int q, int i) {
            wgmma_codes(sum[turn][i], behind(weights, i * slabs * 128 + 2 * q),
                        behind(tokens, i * J * 128 + 2 * q), q > 0);
        });
        wgmma_commit();
        used[turn] = ring.is_empty();
        ring.next();
    };
    auto add = [&](int turn) {
        unrolled<2>([&](int i) { settle(sum[turn][i]); });
        barrier_arrive_if(used[turn], first_lane);
        unrolled<2, J>([&](int i, int j) {
            unrolled<2>([&](int k) {
                total[j][k] += sum[turn][i][j][k];
                total[j][k] += sum[turn][i][J + j][2 + k];
            });
        });
    };
    // None is under way from one of these to the next, for which the compiler would have each wgmma
    // waited for.
    auto several = [&](auto stages) {
        constexpr int N = decltype(stages)::value;
        multiply(0);
        unrolled<N - 1>([&](int i) {
            multiply((i + 1) % 2);
            wgmma_wait<1>();
            add(i % 2);
        });
        wgmma_wait<0>();
        add((N - 1) % 2);
    };
#pragma unroll 1
    for (; steps >= 3; steps -= 3) several(number<3>());
#pragma unroll 1
    for (; steps > 0; steps--) several(number<1>());
}

// What becomes of the sums of a lane: of a row of weights in each slab, a column, and two tokens of
// every eight. Lanes of two neighbouring columns exchange, so that each has both of one token.
template <epilogue END, int J, int SLABS, bool ROUNDED> struct e4m3_end {
    static constexpr int ENDED = END == GATED ? 1 : SLABS; // columns that come of a lane's
    static constexpr bool EARLY = END == STORED && J <= 4; // what is added to is loaded early
    float factor[SLABS], bias[SLABS];
    float of_token[ROUNDED ? J : 1][2]; // ROUNDED; of many, loaded late
    int column[ENDED];                  // the even one of the two; the end where there is nothing
    int end, token;                     // token: of the first eight
    __nv_bfloat162 old[EARLY ? ENDED : 1][J];

    INLINE bf16 *at(const few_args &p, const few_work &work, int h, int j) const
    {
        return (bf16 *)p.c + (int64_t)(work.first + token + j * 8) * end + column[h];
    }
    INLINE bool is_there(const few_work &work, int h, int j) const
    {
        return column[h] < end && token + j * 8 < work.rows;
    }

    INLINE void load_tokens(const few_args &p, const few_work &work)
    {
        const int first = threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < J && ROUNDED; j++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                of_token[j][k] = first + j * 8 + k < work.rows
                                     ? e4m3_factor(p.a_scales[work.first + first + j * 8 + k])
                                     : 0;
    }

    INLINE void load(const few_args &p, const few_work &work, const own_slabs<SLABS> &own, int warp,
                     int apart)
    {
        if constexpr (J <= 8) load_tokens(p, work);
        const int lane = threadIdx.x % 32, from = first_column<END>(work.tile, p.width);
        end = END == GATED ? p.apart : p.n;
        token = lane % 4 * 2 + lane / 4 % 2;
#pragma unroll
        for (int h = 0; h < SLABS; h++) {
            const int own_column = from + (warp + (END == GATED ? 0 : h * apart)) * 8 + lane / 4;
            const bool there = own.has[h] && own_column < end;
            const int row = own_column + (END == GATED && h > 0 ? p.apart : 0);
            factor[h] = there ? e4m3_factor(p.scales[work.weights + row]) : 0;
            bias[h] = there && p.bias ? to_f32(p.bias[row]) : 0;
            if (h < ENDED) column[h] = there ? own_column & ~1 : end;
        }
        if constexpr (EARLY)
            unrolled<J, ENDED>([&](int j, int h) {
                if (p.add && is_there(work, h, j))
                    old[h][j] = *(const __nv_bfloat162 *)at(p, work, h, j);
            });
    }

    // What a matmul by itself gives of a slab's sum for token k of the j-th two.
    INLINE float value(const few_args &p, float sum, int h, int j, int k) const
    {
        const float x = ROUNDED ? sum * factor[h] * of_token[j][k] : sum * factor[h];
        return to_f32(from_f32<bf16>(p.bias ? x + bias[h] : x));
    }

    template <act_kind ACT>
    INLINE void store(const few_args &p, const few_work &work, const float (&sum)[J][4])
    {
        if constexpr (J > 8) load_tokens(p, work);
        const bool odd = threadIdx.x / 4 % 2;
        float gates[END == GATED ? 2 * J : 1];
        if constexpr (END == GATED) {
            unrolled<J, 2>([&](int j, int k) { gates[j * 2 + k] = value(p, sum[j][k], 0, j, k); });
            activate_all(gates, ACT);
        }
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
            for (int h = 0; h < ENDED; h++) {
                float x[2];
#pragma unroll
                for (int k = 0; k < 2; k++)
                    if constexpr (END == GATED)
                        x[k] = gates[j * 2 + k] * value(p, sum[j][2 + k], 1, j, k);
                    else
                        x[k] = value(p, sum[j][h * 2 + k], h, j, k);
                const float other = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 4);
                float left = odd ? other : x[0], right = odd ? x[1] : other;
                if (!is_there(work, h, j)) continue;
                bf16 *to = at(p, work, h, j);
                if (p.add) {
                    __nv_bfloat162 before;
                    if constexpr (EARLY)
                        before = old[h][j];
                    else
                        before = *(const __nv_bfloat162 *)to;
                    left += to_f32(before.x);
                    right += to_f32(before.y);
                }
                store_pair(to, left, right);
            }
    }
};

template <epilogue END, int J, int SLABS, int GROUPS, bool ROUNDED>
INLINE void e4m3_tile(few_ring &ring, const few_args &p, const few_work &work, int warp, int steps)
{
    const int slabs = p.width / 8, apart = END == GATED ? slabs / 2 : 4 * GROUPS;
    const own_slabs<SLABS> own(warp, slabs, apart);
    e4m3_end<END, J, SLABS, ROUNDED> ending;
    float sum[J][4];
    ending.load(p, work, own, warp, apart);
    if constexpr (ROUNDED)
        rounded_sums<J, GROUPS>(sum, ring, slabs, own, p.k);
    else
        e4m3_sums<J, SLABS, GROUPS>(sum, ring, slabs, own, steps);
    if (END != GATED || p.act == ACT_SILU)
        ending.template store<ACT_SILU>(p, work, sum);
    else if (p.act == ACT_GELU_TANH)
        ending.template store<ACT_GELU_TANH>(p, work, sum);
    else
        ending.template store<ACT_GELU>(p, work, sum);
}

template <epilogue END, int J>
INLINE void paired_tile(few_ring &ring, const few_args &p, const few_work &work, int warp,
                        int steps)
{
    e4m3_end<END, J, 1, true> ending;
    float total[J][4];
    ending.load(p, work, own_slabs<1>(warp, p.width / 8, 4), warp, 4);
    paired_sums(total, ring, p.width / 8, steps);
    ending.template store<ACT_SILU>(p, work, total);
}

#endif

// Bytes of 8 tokens in a chunk: 128 of k.
__host__ __device__ constexpr int token_bytes(bool rounded)
{
    return rounded ? 1024 : 2048;
}

template <epilogue END, int J, int SLABS, int GROUPS, bool ROUNDED, bool IN_PAIRS = false>
__global__ void __launch_bounds__(GROUPS * 128 + 32, 1)
    e4m3_kernel(const __grid_constant__ CUtensorMap a_map,
                const __grid_constant__ CUtensorMap b_map, const __grid_constant__ few_args p)
{
#if HAS_WGMMA
    constexpr int CHUNKS = chunks_of(J, GROUPS, IN_PAIRS);
    extern __shared__ __align__(1024) char stages[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    if (!p.early) grid_wait();
    const uint32_t a_bytes = CHUNKS * J * token_bytes(ROUNDED), b_bytes = CHUNKS * p.width * 128;
    few_ring ring = {{shared_address(stages), a_bytes + b_bytes, shared_address(full),
                      shared_address(empty), p.stages, 0, 0},
                     a_bytes};
    int *before = (int *)(stages + p.stages * ring.bytes);
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

    const int all = p.offsets ? before[p.n_experts] * p.tiles : p.tiles, blocks = gridDim.x;
    const int rounds = (all - (int)blockIdx.x + blocks - 1) / blocks;
    const int steps = steps_of(p.k, CHUNKS);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0); // known to be uniform
    if (warp == GROUPS * 4) {
        const few_stage stage = {ROUNDED ? CHUNKS : 2 * CHUNKS, CHUNKS,
                                 min(p.stages, max(1, AHEAD / (int)b_bytes)), IN_PAIRS};
        if (threadIdx.x % 32 == 0)
            few_copy<END>(ring, &a_map, &b_map, p, before, p.width, stage, rounds, steps);
        return;
    }
    grid_wait();
    grid_release();
    for (int i = 0; i < rounds; i++) {
        const few_work work = find_work(p, before, blockIdx.x + i * gridDim.x);
        if constexpr (IN_PAIRS)
            paired_tile<END, J>(ring, p, work, warp, steps);
        else
            e4m3_tile<END, J, SLABS, GROUPS, ROUNDED>(ring, p, work, warp, steps);
    }
#endif
}

// ---- launches ----------------------------------------------------------------------------------

struct e4m3_plan {
    bool rounded;
    int j, slabs, stages; // j 0: none
    bool in_pairs;        // paired_sums()
    dim3 grid;
    size_t shared;
    int groups() const { return ceil_div(slabs, 8); }
    bool single() const { return !rounded && j <= 4 && slabs <= 4; } // a slab a warp
    int chunks() const { return chunks_of(j, groups(), in_pairs); }
};

// The ring and what lies behind it; `rounds`: tiles of a block, at most.
static void plan_ring(struct cuda_state *state, e4m3_plan &plan, int k, int rounds, int n_experts)
{
    const int chunks = plan.chunks();
    const size_t stage = (size_t)chunks * (plan.j * token_bytes(plan.rounded) + plan.slabs * 1024);
    // in pairs: what wgmma reads behind the last stage
    const size_t beside = plan.in_pairs ? 4096 : (n_experts + 1) * sizeof(int);
    const size_t most = (plan.j >= 8 || plan.in_pairs ? 200 : 150) << 10;
    const size_t room = std::min<size_t>(most, state->max_shared - SHARED_APART - beside);
    plan.stages = (int)std::min<size_t>(
        {MAX_STAGES, std::max<size_t>(2, room / stage), (size_t)rounds * steps_of(k, chunks)});
    // a block has an SM for itself, as in matmul_small.cu
    plan.shared = std::max<size_t>(plan.stages * stage + beside, state->max_shared / 2);
}

// Of a block: with the sums of many tokens in two registers each it has two groups.
static int max_slabs(const e4m3_plan &plan, int j)
{
    return plan.rounded && j > 8 ? 16 : MAX_SLABS;
}

// Slabs of `eights` rows for each of so many blocks, and no more of these rounds than it takes.
static int slabs_for(int eights, int blocks, int least, int most)
{
    const int rounds = ceil_div(eights, blocks * most), slabs = ceil_div(eights, blocks * rounds);
    return std::max(slabs <= 4 ? least : 8, slabs);
}

// gated: columns come in pairs. splits: k may.
static void plan_tokens(struct cuda_state *state, e4m3_plan &plan, int eights, int m, bool gated,
                        bool splits)
{
    plan.j = 1;
    while (plan.j < 16 && plan.j * 8 < m) plan.j *= 2;
    // Half as many tokens in twice the blocks, where these do not have many rows either: a step of
    // k takes as long as its tokens are many.
    auto across = [&](int j) { return std::max(1, state->n_sms / ceil_div(m, 8 * j)); };
    auto slabs = [&](int j) {
        return slabs_for(eights, across(j), splits && j <= 4 ? 2 : 4, max_slabs(plan, j));
    };
    if (plan.j >= 8 && slabs(plan.j / 2) <= 8) plan.j /= 2;
    plan.slabs = slabs(plan.j);
    plan.in_pairs = splits && plan.j <= 4 && plan.slabs <= 4;
    if (gated) plan.slabs += plan.slabs % 2; // each slab of a half is a slab of the other
    const int tiles = ceil_div(eights, plan.slabs), rounds = ceil_div(tiles, across(plan.j));
    plan.grid = dim3(ceil_div(tiles, rounds), ceil_div(m, 8 * plan.j));
}

// Of experts: the tiles with which all their rows cost the blocks least.
static void plan_experts(struct cuda_state *state, e4m3_plan &plan, int eights, int m, int e)
{
    plan.j = m <= std::max(8, 2 * e) ? 1 : m <= 8 * e ? 2 : m <= 64 * e ? 8 : 16;
    int64_t least = INT64_MAX;
    for (int slabs = std::min(8, eights); slabs <= max_slabs(plan, plan.j); slabs += 4) {
        const int64_t tiles = (int64_t)busy_experts(m, e) * ceil_div(eights, slabs);
        const int64_t cost = ceil_div(tiles, state->n_sms) * (int64_t)(slabs + 1);
        if (cost >= least) continue;
        least = cost;
        plan.slabs = slabs;
    }
    const int tiles = expert_tiles(m, e, 8 * plan.j) * ceil_div(eights, plan.slabs);
    plan.grid = dim3(std::min(state->n_sms, tiles));
}

// What these kernels and, of rows in e4m3, the library take.
static bool fits(struct device *dev, const matmul_call &c)
{
    const struct matmul *s = c.shape;
    return s->scales && on_hopper(dev) && s->in == DT_BF16 && s->out == DT_BF16 && !s->trans_a &&
           s->trans_b && s->k % CHUNK == 0 && s->k > 0 && !s->columns &&
           s->n_experts <= MAX_EXPERTS && aligned(16, {c.a, c.b, c.c}, {});
}

bool matmul_in_chunks(struct device *dev, const matmul_call &c)
{
    return c.shape->a_scales && c.shape->n % 16 == 0 && fits(dev, c);
}

template <epilogue END, bool ROUNDED>
static e4m3_plan plan_of(struct device *dev, const matmul_call &call)
{
    struct cuda_state *state = cuda_use(dev);
    const struct matmul *s = call.shape;
    const int e = s->n_experts, eights = s->n / 8;
    e4m3_plan plan = {};
    plan.rounded = ROUNDED;
    if (ROUNDED ? !matmul_in_chunks(dev, call) || s->rounds || (e == 0 && s->m > MAX_ROUNDED)
                : s->a_scales || !fits(dev, call) || s->n % (END == GATED ? 16 : 8) != 0 ||
                      s->m > (e > 0 ? std::max(64, 32 * e) : MAX_TOKENS))
        return plan;
    if (e > 0)
        plan_experts(state, plan, eights, s->m, e);
    else
        plan_tokens(state, plan, eights, s->m, END == GATED,
                    ROUNDED && END == STORED && s->k % E4M3_CHUNK == 0);
    const int tiles =
        ceil_div(eights, plan.slabs) * (e > 0 ? expert_tiles(s->m, e, 8 * plan.j) : 1);
    plan_ring(state, plan, s->k, ceil_div(tiles, plan.grid.x), e);
    return plan;
}

template <epilogue END, int J, bool ROUNDED> static auto kernel_of(const e4m3_plan &plan)
{
    if constexpr (ROUNDED && END == STORED && J <= 4)
        if (plan.in_pairs) return e4m3_kernel<END, J, 2, 1, ROUNDED, true>;
    if constexpr (!ROUNDED && J <= 4 && END == STORED)
        if (plan.single()) return e4m3_kernel<END, J, 1, 1, ROUNDED>;
    if constexpr (!ROUNDED || J <= 8)
        if (plan.groups() == 3) return e4m3_kernel<END, J, 2, 3, ROUNDED>;
    return plan.groups() == 1 ? e4m3_kernel<END, J, 2, 1, ROUNDED>
                              : e4m3_kernel<END, J, 2, 2, ROUNDED>;
}

template <epilogue END, bool ROUNDED> bool matmul_e4m3(struct device *dev, const matmul_call &call)
{
    const struct matmul *s = call.shape;
    if (END == GATED ? !may_gate(call) : s->act != NULL) return false;
    const e4m3_plan plan = plan_of<END, ROUNDED>(dev, call);
    if (!plan.j) return false;
    few_args p = few_args_of<END>(call);
    CUtensorMap a_map, b_map;
    const int chunks = plan.chunks();
    boxes of_a = {s->m, s->k, 0, 8 * plan.j, 2 * chunks};
    if (ROUNDED) of_a = {s->m, s->k / 2, 0, 8 * plan.j, chunks};
    const boxes of_b = {(int64_t)s->n * std::max(1, p.n_experts), s->k / 2, p.apart, plan.slabs * 8,
                        chunks};
    const cuuint64_t pitch = s->k; // of the weights
    const tensor_boxes by_eights = {4,
                                    {CHUNK, 8, pitch / E4M3_CHUNK, (cuuint64_t)s->n / 8},
                                    {pitch, E4M3_CHUNK, 8 * pitch},
                                    {CHUNK, 8, 2, (cuuint32_t)plan.slabs}};
    if (!map_of(dev, &a_map, call.a, of_a) ||
        !(plan.in_pairs ? tensor_map(dev, &b_map, call.b, by_eights)
                        : map_of(dev, &b_map, call.b, of_b)))
        return true;
    p.height = 8 * plan.j;
    p.width = 8 * plan.slabs;
    p.tiles = ceil_div(s->n, p.width);
    p.stages = plan.stages;
    const auto kernel = plan.j == 1   ? kernel_of<END, 1, ROUNDED>(plan)
                        : plan.j == 2 ? kernel_of<END, 2, ROUNDED>(plan)
                        : plan.j == 4 ? kernel_of<END, 4, ROUNDED>(plan)
                        : plan.j == 8 ? kernel_of<END, 8, ROUNDED>(plan)
                                      : kernel_of<END, 16, ROUNDED>(plan);
    cuda_launch(dev, "matmul of few rows with weights of e4m3", kernel, plan.grid,
                plan.groups() * 128 + 32, plan.shared, a_map, b_map, p);
    return true;
}

#define FOR(END, ROUNDED)                                                                          \
    template bool matmul_e4m3<END, ROUNDED>(struct device *, const matmul_call &);
FOR(STORED, false)
FOR(STORED, true)
FOR(GATED, false)
FOR(GATED, true)
#undef FOR
