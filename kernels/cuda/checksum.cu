/* checksum.cu: position-dependent sums over regions of memory. Sums are of integers, so the order
 * of the blocks' additions does not matter. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/hash.h"
#include "kernels/cuda/cuda.cuh"

#define THREADS 256
#define CHUNK   (1 << 18) // words of a region that one block sums

// Block (x, y): chunks y, y + gridDim.y, ... of region x.
__global__ void checksum_kernel(unsigned long long *sums, const unsigned char *base,
                                const uint64_t *offset, const uint64_t *bytes)
{
    grid_begin();
    const unsigned char *region = base + offset[blockIdx.x];
    uint64_t size = bytes[blockIdx.x], words = (size + 3) / 4, whole = size / 4, sum = 0;
    bool in_words = (uintptr_t)region % 4 == 0;
    for (uint64_t start = (uint64_t)blockIdx.y * CHUNK; start < words;
         start += (uint64_t)gridDim.y * CHUNK) {
        uint64_t end = start + CHUNK < words ? start + CHUNK : words;
#pragma unroll 4
        for (uint64_t j = start + threadIdx.x; j < end; j += THREADS) {
            uint32_t word = 0;
            if (in_words && j < whole)
                word = reinterpret_cast<const uint32_t *>(region)[j];
            else
                for (int b = 0; b < 4; b++)
                    if (4 * j + b < size) word |= (uint32_t)region[4 * j + b] << 8 * b;
            sum += hash_mix(word + j * HASH_SPREAD);
        }
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (threadIdx.x % 32 == 0 && sum) atomicAdd(&sums[blockIdx.x], (unsigned long long)sum);
}

void cuda_checksum(struct device *dev, uint64_t *sums, const void *base, const uint64_t *offset,
                   const uint64_t *bytes, int n)
{
    if (n <= 0) return;
    struct cuda_state *state = cuda_use(dev);
    size_t list = (size_t)n * sizeof(uint64_t);
    uint64_t *work = (uint64_t *)cuda_workspace(dev, 3 * list), longest = 0;
    if (!work) return;
    for (int i = 0; i < n; i++) longest = bytes[i] > longest ? bytes[i] : longest;
    uint64_t chunks = (longest / 4 + CHUNK) / CHUNK;
    if (!cuda_ok(dev, cudaMemsetAsync(work, 0, list, state->stream), "checksum") ||
        !cuda_ok(dev,
                 cudaMemcpyAsync(work + n, offset, list, cudaMemcpyHostToDevice, state->stream),
                 "checksum") ||
        !cuda_ok(dev,
                 cudaMemcpyAsync(work + 2 * n, bytes, list, cudaMemcpyHostToDevice, state->stream),
                 "checksum"))
        return;
    cuda_launch(dev, "checksum", checksum_kernel, dim3(n, chunks > 1024 ? 1024 : (unsigned)chunks),
                THREADS, 0, (unsigned long long *)work, (const unsigned char *)base,
                (const uint64_t *)(work + n), (const uint64_t *)(work + 2 * n));
    cuda_ok(dev, cudaMemcpyAsync(sums, work, list, cudaMemcpyDeviceToHost, state->stream),
            "checksum");
    cuda_ok(dev, cudaStreamSynchronize(state->stream), "checksum");
}
