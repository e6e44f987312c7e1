/* attn_few.cuh: what the kernels of attention of few rows share (attn_few.cu, attn_few_tma.cu):
 * what a block works on, and how the chunks of a context that is spread over blocks are joined. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_ATTN_FEW_CUH
#define KERNELS_CUDA_ATTN_FEW_CUH

#include "kernels/cuda/attention/attn_order.cuh"

#define TASK_ROWS 16 // at most

// What a block works on: packed rows, and some chunks of their context.
struct task : row_tile {
    int first_chunk, n_chunks; // that its rows see
    int begin, end;            // positions of the keys of this block's chunks, up to the last row's
};

// Task `at` of a sequence of up to MOST packed rows (a tile of N of them of a kv head), and of it n
// chunks from `chunk` on. False where there is nothing to do. May run before grid_wait().
template <int N = TASK_ROWS, int MOST = FEW_ROWS>
__device__ __forceinline__ bool task_of(task &w, const attn_args<bf16> &a, int row_tiles, int s,
                                        int at, int chunk, int n)
{
    w.n_chunks = 0;
    if (!row_tile_of<N, true>(w, a, s, at / row_tiles, at % row_tiles) || w.rows.n > MOST)
        return false;
    w.first_chunk = w.low / CHUNK_KEYS;
    w.n_chunks = w.highest < 0 ? 1 : w.highest / CHUNK_KEYS - w.first_chunk + 1;
    w.begin = (w.first_chunk + chunk) * CHUNK_KEYS;
    w.end = min(w.begin + n * CHUNK_KEYS, w.highest + 1);
    return chunk < w.n_chunks;
}

// ---- parts -------------------------------------------------------------------------------------

// What of a chunk is left for the block that joins: of each row HD sums of weighted values, the
// largest score and the sum of weights.
template <int HD> constexpr int part_width = HD + 4;

// How a launch cuts up a sequence: its tasks, tiles of rows of each kv head, and the chunks of its
// context, at most. Each task has a ticket, and parts of so many chunks, part_rows rows each.
struct task_plan {
    int row_tiles, tasks, chunks, part_rows;
    float *parts;
    unsigned *tickets;

    // Floats from `parts` to those of a task's chunk.
    template <int HD> __host__ __device__ int64_t part_at(int number, int chunk) const
    {
        return ((int64_t)number * chunks + chunk) * part_rows * part_width<HD>;
    }
};

static inline task_plan task_plan_of(struct device *dev, const attn_args<bf16> &a, int tile)
{
    const int rows = std::min(a.max_query * a.group, FEW_ROWS), row_tiles = ceil_div(rows, tile);
    const int tasks = a.n_kv_heads * row_tiles, chunks = attn_chunks(a, a.max_query, a.max_context);
    return {row_tiles, tasks, chunks, std::min(rows, tile), NULL, cuda_use(dev)->tickets};
}

// Joins a task's chunks from `chunk` on: every n-th set of four dimensions from `first` on.
template <int HD>
INLINE void join_chunks(const attn_args<bf16> &a, const task &w, const task_plan &p, int number,
                        int chunk, int first, int n)
{
    constexpr int FOURS = HD / 4;
    const float *parts = p.parts + p.part_at<HD>(number, chunk);
    int rows = min(TASK_ROWS, w.rows.n - w.rows.base);
    for (int i = first; i < rows * FOURS; i += n) {
        int r = i / FOURS, d = i % FOURS * 4;
        float top = -INFINITY, sum = 0, x[4] = {};
#pragma unroll 8
        for (int c = 0; c < w.n_chunks - chunk; c++) {
            const float *part = parts + p.part_at<HD>(0, c) + r * part_width<HD>;
            float4 next = __ldcg(reinterpret_cast<const float4 *>(part + d));
            float2 ends = __ldcg(reinterpret_cast<const float2 *>(part + HD));
            join_step step = next_chunk(top, ends.x);
            sum = joined(sum, ends.y, step);
            const float values[4] = {next.x, next.y, next.z, next.w};
            unrolled<4>([&](int e) { x[e] = joined(x[e], values[e], step); });
        }
        if (d >= a.head_dim) continue;
        place at = place_of(a, w.rows, r);
        float inverse = inverse_of(with_sink(a, at.head, top, sum));
        unrolled<4>([&](int e) { x[e] = finished(x[e], inverse); });
        store<bf16, 4>(a.out + index_of(a, at) * a.head_dim + d, x);
    }
}

#endif
