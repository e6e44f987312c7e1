/* log_sum.cuh: the one order in which a row of logits is summed, so that a log-probability has the
 * same bits in sampler and trainer: tiles of 4,096 logits, each by 256 threads that keep its
 * maximum and its sum relative to that, then the tiles by the lanes of a warp. Private to
 * kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_LOG_SUM_CUH
#define KERNELS_CUDA_LOG_SUM_CUH

#include "kernels/cuda/cuda.cuh"

#define TILE_THREADS 256
#define TILE_GROUPS  4 // of 4 neighbouring logits for each thread
#define TILE         (TILE_THREADS * TILE_GROUPS * 4)

// z of the tokens t .. t + 3; -inf past the end
__device__ __forceinline__ void load_scaled(float (&z)[4], const float *row, int t, int vocab,
                                            float scale, bool in_fours)
{
    if (in_fours && t + 3 < vocab)
        load<float, 4>(z, row + t);
    else
#pragma unroll
        for (int i = 0; i < 4; i++) z[i] = t + i < vocab ? row[t + i] : -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; i++) z[i] = __fmul_rn(z[i], scale);
}

struct log_sum {
    float max, sum; // of z, and of e^(z - max)
};

// Of the maxima -inf is none to subtract.
__device__ __forceinline__ float shift_of(float max)
{
    return max == -INFINITY ? 0.f : max;
}

// Of the tile that the block's threads hold, given to all of them. e: e^(z - max), of -inf 0.
// `shared` holds 32 floats.
__device__ __forceinline__ log_sum tile_sum(const float (&z)[TILE_GROUPS][4],
                                            float (&e)[TILE_GROUPS][4], float *shared)
{
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < TILE_GROUPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) max = fmaxf(max, z[j][i]);
    max = block_max(max, shared);
    float shift = shift_of(max);
#pragma unroll
    for (int j = 0; j < TILE_GROUPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum = __fadd_rn(sum, e[j][i] = expf(__fsub_rn(z[j][i], shift)));
    return {max, block_sum(sum, shared)};
}

// Of a row's n tiles, the i-th of which tile(i) gives, by a whole warp and given to all of it.
template <typename F> __device__ __forceinline__ log_sum join_tiles(int n, F tile)
{
    int lane = threadIdx.x % 32;
    float max = -INFINITY, sum = 0;
    for (int i = lane; i < n; i += 32) max = fmaxf(max, tile(i).max);
    max = lanes_max(max);
    for (int i = lane; i < n; i += 32) {
        log_sum p = tile(i);
        if (p.max > -INFINITY) sum = __fmaf_rn(p.sum, expf(__fsub_rn(p.max, max)), sum);
    }
    return {max, lanes_sum(sum)};
}

// The log-probability of a token; log_of_sum: logf(row.sum)
__device__ __forceinline__ float logprob_of(float z, float max, float log_of_sum)
{
    return __fsub_rn(__fsub_rn(z, max), log_of_sum);
}

#endif
