/* experts.cuh: how the blocks of a launch share the sorted rows of a mixture's experts, whose
 * numbers are in device memory only. Each expert's rows are cut into tiles of `height`; tiles are
 * numbered one expert after the other. Private to kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_EXPERTS_CUH
#define KERNELS_CUDA_EXPERTS_CUH

#include "kernels/cuda/cuda.cuh"
#include <algorithm>

// The most tiles there can be, however m rows fall: each expert that has rows may end in a tile
// that is not full.
static inline int expert_tiles(int m, int n_experts, int height)
{
    int64_t busy = std::min(m, n_experts);
    return (int)((m + busy * (height - 1)) / height);
}

/* Work lists: an expert's tiles are those of each column of its result in
 * turn, `columns` for every expert. before[e]: tiles down the results of experts below e, with
 * n_experts + 1 entries in shared memory. */
#define MAX_EXPERTS 1024 // of a work list

// Fills before, from tiles(rows) of an expert with so many rows. A warp's; the block meets behind
// it.
template <typename F>
INLINE void count_tiles(int *before, const int32_t *offsets, int n_experts, F tiles)
{
    int lane = threadIdx.x % 32, all = 0;
    if (lane == 0) before[0] = 0;
#pragma unroll 4
    for (int base = 0; base < n_experts; base += 32) {
        int e = min(base + lane, n_experts - 1);
        int sum = lanes_until(tiles(offsets[e + 1] - offsets[e]));
        if (base + lane < n_experts) before[e + 1] = all + sum;
        all += __shfl_sync(~0u, sum, 31);
    }
}

// A tile of an expert's result, counted down and across it.
struct expert_tile {
    int expert, down, across;
};

INLINE expert_tile find_expert_tile(const int *before, int n_experts, int columns, int number)
{
    const int e = expert_of(before, n_experts, number / columns);
    int down = before[e + 1] - before[e], at = number - before[e] * columns;
    return {e, at % down, at / down};
}

#endif
