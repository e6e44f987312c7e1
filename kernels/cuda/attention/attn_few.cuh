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

// Joins a task's chunks, whose parts lie `stride` floats apart: every n-th set of four dimensions
// from `first` on.
template <int HD>
__device__ __forceinline__ void join_chunks(const attn_args<bf16> &a, const task &w,
                                            const float *parts, int64_t stride, int first, int n)
{
    constexpr int FOURS = HD / 4;
    int rows = min(TASK_ROWS, w.rows.n - w.rows.base);
    for (int i = first; i < rows * FOURS; i += n) {
        int r = i / FOURS, d = i % FOURS * 4;
        float top = -INFINITY, sum = 0, x[4] = {};
#pragma unroll 8
        for (int c = 0; c < w.n_chunks; c++) {
            const float *part = parts + c * stride + r * part_width<HD>;
            float4 next = __ldcg(reinterpret_cast<const float4 *>(part + d));
            float2 ends = __ldcg(reinterpret_cast<const float2 *>(part + HD));
            join_step step = next_chunk(top, ends.x);
            sum = joined(sum, ends.y, step);
            x[0] = joined(x[0], next.x, step);
            x[1] = joined(x[1], next.y, step);
            x[2] = joined(x[2], next.z, step);
            x[3] = joined(x[3], next.w, step);
        }
        if (d >= a.head_dim) continue;
        place at = place_of(a, w.rows, r);
        float inverse = inverse_of(with_sink(a, at.head, top, sum));
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = finished(x[e], inverse);
        store<bf16, 4>(a.out + index_of(a, at) * a.head_dim + d, x);
    }
}

#endif
