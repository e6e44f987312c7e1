/* rng.h: counter-based random numbers, Philox4x32-10 (Salmon et al., "Parallel random numbers: as
 * easy as 1, 2, 3", SC 2011). A draw is a pure function of (seed, stream, position), so batching and
 * timing change nothing, and CPU and CUDA agree to the bit. */
#ifndef COMMON_BASE_RNG_H
#define COMMON_BASE_RNG_H

#include <stdint.h>

#ifdef __CUDACC__
#define RNG_INLINE static __host__ __device__ __forceinline__
#else
#define RNG_INLINE static inline
#endif

RNG_INLINE void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t ret[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    ret[0] = c0;
    ret[1] = c1;
    ret[2] = c2;
    ret[3] = c3;
}

// Uniform in the open interval (0, 1): never 0, never 1, exact in f32.
RNG_INLINE float rng_open01(uint32_t bits)
{
    return ((float)(bits >> 9) + 0.5f) * (1.0f / 8388608.0f);
}

// A sequential stream for host code (shuffles, initial weights, test data).
struct rng {
    uint64_t seed, stream, position; // position: of the next block of four
    uint32_t block[4];
    int used; // words of `block` given out
};
void rng_init(struct rng *r, uint64_t seed, uint64_t stream);
uint32_t rng_u32(struct rng *r);
uint64_t rng_u64(struct rng *r);
uint32_t rng_below(struct rng *r, uint32_t n); // uniform in 0..n-1, without bias; n >= 1
float rng_uniform(struct rng *r);              // open (0, 1)
float rng_normal(struct rng *r);               // mean 0, variance 1 (Box-Muller)

#endif
