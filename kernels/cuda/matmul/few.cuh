/* few.cuh: what the matmuls of few rows share (matmul_small.cu, matmul_e4m3.cu): the tiles that a
 * block goes through, and the ring of TMA copies that one of its warps keeps ahead of the sums.
 * Private to kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_FEW_CUH
#define KERNELS_CUDA_FEW_CUH

#include "kernels/cuda/rows/act.cuh"
#include "kernels/cuda/matmul/experts.cuh"
#include "kernels/cuda/matmul/matmul.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/comm/oneshot.cuh"

#define MAX_ROWS     128 // of a block
#define MAX_STAGES   16
#define SHARED_APART 2048 // bytes of a block's shared memory that are not the ring's or the tile's
#define CHUNK        64   // elements of k in a tile's row

struct few_args {
    void *c; // (m, n); (m, n / 2) where GATED
    const bf16 *bias;
    const int32_t *offsets; // of n_experts > 0, else NULL
    int n_experts, m, n, k;
    int height; // rows of A that are copied for a block: a multiple of 8
    int width;  // columns of a tile
    int tiles;  // of the columns
    int stages; // of the ring
    int apart;
    bool add, early;
    act_kind act;              // GATED
    peer_slots peers;          // WIDE: ranks that put their columns together; size 0: none
    float *columns[MAX_PEERS]; // (m, size * n) on every rank
    const int8_t *scales;      // of B in e4m3, of all its rows
    const int8_t *a_scales;    // of A in e4m3
};

// What a block does at a time: rows first .. first + rows - 1 of A times the rows of B from
// `weights` on, the columns of a tile.
struct few_work {
    int first, rows, weights, tile;
};

#if HAS_WGMMA

// What a block does for the number-th time in its grid: with each of the tiles a row of blocks has,
// or, of experts, with each tile of their work list.
INLINE few_work find_work(const few_args &p, const int *before, int number)
{
    if (!p.offsets) {
        int first = blockIdx.y * p.height;
        return {first, min(p.height, p.m - first), 0, number};
    }
    expert_tile t = find_expert_tile(before, p.n_experts, p.tiles, number);
    int first = p.offsets[t.expert] + t.down * p.height;
    return {first, min(p.height, p.offsets[t.expert + 1] - first), t.expert * p.n, t.across};
}

struct few_ring : stage_ring {
    uint32_t a_bytes; // of a stage
};

// The first of the columns of a tile; where they come in pairs, of the first of each.
template <epilogue END> INLINE int first_column(int tile, int columns)
{
    return tile * (END == GATED ? columns / 2 : columns);
}

// A place in the stages that a block goes through: of `steps` for each of its tiles, whose rows of
// B are those from `row` on.
template <epilogue END> struct few_place {
    int number, step, at, columns, row;
    few_work work;

    __device__ few_place(const few_args &p, const int *before, int columns)
        : number(blockIdx.x), step(0), at(0), columns(columns)
    {
        find(p, before);
    }
    __device__ void find(const few_args &p, const int *before)
    {
        work = find_work(p, before, number);
        row = work.weights + first_column<END>(work.tile, columns);
    }
    __device__ void next(const few_args &p, const int *before, int steps, int total)
    {
        at++;
        if (++step < steps) return;
        step = 0;
        number += gridDim.x;
        if (at < total) find(p, before);
    }
};

// What a stage has of each operand: of A so many chunks of 64 elements of k, of B of 128 bytes; and
// how many stages of B may be asked for before the first of A, which comes behind them. by_eights:
// B's rows come in eights, two chunks of one before the next.
struct few_stage {
    int a_chunks, b_chunks, ahead;
    bool by_eights = false;
};

// One thread: keeps the ring filled for `rounds` tiles of `columns` rows of B, each of `steps`
// stages.
template <epilogue END>
INLINE void few_copy(few_ring ring, const CUtensorMap *a_map, const CUtensorMap *b_map,
                     const few_args &p, const int *before, int columns, few_stage stage, int rounds,
                     int steps)
{
    // else the compiler makes these addresses anew for each stage
    asm volatile("" : "+r"(ring.first), "+r"(ring.full), "+r"(ring.empty));
    auto copy_b = [&](const few_ring &ring, const few_place<END> &place) {
        uint32_t to = ring.stage() + ring.a_bytes;
        const int chunk = place.step * stage.b_chunks;
        barrier_expect(ring.is_full(), ring.bytes);
        if (!stage.by_eights)
            copy_box(to, b_map, place.row, 0, chunk, ring.is_full(), L2_EVICT_FIRST);
        for (int i = 0; stage.by_eights && i < stage.b_chunks; i += 2)
            copy_box(to + i * columns * 128, b_map, 0, chunk + i, place.row / 8, ring.is_full(),
                     L2_EVICT_FIRST);
    };
    int total = rounds * steps, ahead = p.early ? min(stage.ahead, total) : 0;
    if (total == 0) return;
    prefetch_map(a_map);
    few_ring early = ring;
    const few_place<END> begin(p, before, columns);
    for (few_place<END> at = begin; at.at < ahead; early.next(), at.next(p, before, steps, total))
        copy_b(early, at);
    grid_wait();
    for (few_place<END> at = begin; at.at < total; ring.next(), at.next(p, before, steps, total)) {
        if (at.at >= ring.n) barrier_wait(ring.is_empty(), ring.parity ^ 1);
        if (at.at >= ahead) copy_b(ring, at);
        copy_box(ring.stage(), a_map, at.work.first, 0, at.step * stage.a_chunks, ring.is_full(),
                 L2_EVICT_LAST);
    }
}

#endif

// ---- launches ----------------------------------------------------------------------------------

// A matrix of rows of `k` elements of bf16, or two codes, as (64, rows, pairs, k / 64), and what is
// copied of it at once. An odd half of a last chunk is what lies behind it.
struct boxes {
    int64_t rows; // of the matrix
    int k;
    int apart; // > 0: rows in pairs, this far from each other
    int box_rows, box_chunks;
};

static inline bool map_of(struct device *dev, CUtensorMap *ret, const void *x, const boxes &b)
{
    cuuint32_t pairs = b.apart > 0 ? 2 : 1;
    cuuint64_t pitch = (cuuint64_t)b.k * 2;
    return tensor_map(
        dev, ret, x,
        {4,
         {CHUNK, (cuuint64_t)(b.rows - b.apart), pairs, (cuuint64_t)ceil_div(b.k, CHUNK)},
         {pitch, std::max(1, b.apart) * pitch, CHUNK * 2},
         {CHUNK, b.box_rows / pairs, pairs, (cuuint32_t)b.box_chunks}});
}

// How many of n experts m random rows meet, about.
static inline int busy_experts(int m, int n)
{
    double missed = 1;
    for (int i = 0; i < m && missed * n > 0.5; i++) missed *= 1 - 1.0 / n;
    return std::min({m, n, (int)(n * (1 - missed) + 0.5)});
}

// All but what the plan says.
template <epilogue END> static inline few_args few_args_of(const matmul_call &c)
{
    few_args p = {};
    p.c = c.c;
    p.m = c.shape->m;
    p.n = c.shape->n;
    p.k = c.shape->k;
    p.add = c.shape->beta != 0;
    p.early = c.shape->early;
    p.scales = c.shape->scales;
    p.a_scales = c.shape->a_scales;
    p.bias = (const bf16 *)c.bias;
    p.offsets = c.shape->offsets;
    p.n_experts = c.shape->n_experts;
    if (END == GATED) {
        p.apart = c.shape->n / 2;
        p.act = c.shape->act->kind;
    }
    return p;
}

#endif
