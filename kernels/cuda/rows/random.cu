/* random.cu: random numbers for weights that no file has: those of kernels/cpu/random.c, but for
 * the last bit of a double's logarithm and cosine. */
#include "common/base/rng.h"
#include "kernels/cuda/cuda.cuh"

#define THREADS 256

// A thread has the two numbers of a block of four words.
template <typename T>
__global__ void random_normal_kernel(T *x, int64_t n, float scale, uint64_t seed, uint64_t stream)
{
    grid_begin();
    const int64_t i = 2 * ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (i >= n) return;
    const uint64_t s = stream + (uint64_t)(i / RANDOM_CHUNK);
    const uint32_t counter[4] = {(uint32_t)(i % RANDOM_CHUNK / 2), 0, (uint32_t)s,
                                 (uint32_t)(s >> 32)};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t words[4];
    philox4x32(counter, key, words);
    x[i] = from_f32<T>(scale * rng_normal_of(words[0], words[1]));
    if (i + 1 < n) x[i + 1] = from_f32<T>(scale * rng_normal_of(words[2], words[3]));
}

void cuda_random_normal(struct device *dev, void *x, int64_t n, float scale, uint64_t seed,
                        uint64_t stream, enum dtype dt)
{
    if (n <= 0) return;
    with_type(dt, [&](auto t) {
        cuda_launch(dev, "random numbers", random_normal_kernel<decltype(t)>,
                    ceil_div(n, 2 * THREADS), THREADS, 0, (decltype(t) *)x, n, scale, seed, stream);
    });
}
