/* rng.h: counter-based random numbers, Philox4x32-10 (Salmon et al., "Parallel random numbers: as
 * easy as 1, 2, 3", SC 2011). A number is a pure function of (seed, stream, position), so batching
 * and timing change nothing, and CPU and CUDA agree to the bit. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_RNG_H
#define COMMON_BASE_RNG_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define RNG_INLINE static __host__ __device__ __forceinline__
#else
#define RNG_INLINE static inline
#endif

#define PHILOX_ROUNDS 10

// One round on a counter's four words; the key is that of this round.
RNG_INLINE void philox_round(uint32_t *c0, uint32_t *c1, uint32_t *c2, uint32_t *c3,
                             const uint32_t key[2], uint32_t round)
{
    uint64_t p0 = (uint64_t)0xD2511F53u * *c0, p1 = (uint64_t)0xCD9E8D57u * *c2;
    *c0 = (uint32_t)(p1 >> 32) ^ *c1 ^ (key[0] + round * 0x9E3779B9u);
    *c2 = (uint32_t)(p0 >> 32) ^ *c3 ^ (key[1] + round * 0xBB67AE85u);
    *c1 = (uint32_t)p1;
    *c3 = (uint32_t)p0;
}

RNG_INLINE void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t ret[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    for (uint32_t round = 0; round < PHILOX_ROUNDS; round++)
        philox_round(&c0, &c1, &c2, &c3, key, round);
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

/* For sampling tokens 23 bits are too few: an event of less than 1e-7 would come too seldom, or
 * never. What is fine there is the distance to 1, which large noise is made of, and for a
 * comparison with a probability the distance to 0. */

// Whether a word is so close to the largest that its distance to 1 takes further bits.
RNG_INLINE bool rng_wants_more(uint32_t bits)
{
    return ~bits < 256;
}

// 1 - u of a uniform u in (0, 1): 1 - rng_open01(bits), with 9 bits or more however small it is,
// and no less than 2^-65. more: another random word, which counts where rng_wants_more(bits) only.
RNG_INLINE float rng_below1(uint32_t bits, uint32_t more)
{
    const uint32_t below = ~bits;
    if (below >= 1u << 23) return 1.0f - rng_open01(bits);
    if (below >= 256) return ((float)below + 0.5f) * (1.0f / 4294967296.0f);
    const uint64_t both = (uint64_t)below << 32 | more;
    return ((float)both + 0.5f) * (1.0f / 18446744073709551616.0f);
}

// Gumbel noise -log(-log(u)) of that u, between the two bounds.
#define RNG_GUMBEL_MIN (-2.83f)
#define RNG_GUMBEL_MAX 45.1f
RNG_INLINE float rng_gumbel(uint32_t bits, uint32_t more)
{
    const float below = rng_below1(bits, more);
    return -logf(below < 1.0f / 512 ? -log1pf(-below) : -logf(1.0f - below));
}

// Uniform in the open interval (0, 1), 52 bits, exact.
RNG_INLINE double rng_open01_f64(uint32_t high, uint32_t low)
{
    const uint64_t bits = (uint64_t)high << 32 | low;
    return ((double)(bits >> 12) + 0.5) * (1.0 / 4503599627370496.0);
}

// Of the standard normal distribution (Box-Muller). The other of the pair is not taken: it would be
// state beside the counter.
RNG_INLINE float rng_normal_of(uint32_t radius, uint32_t angle)
{
    const double r = sqrt(-2.0 * log((double)rng_open01(radius)));
    return (float)(r * cos(2.0 * M_PI * (double)rng_open01(angle)));
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
void rng_shuffle(struct rng *r, void *items, int n, size_t size); // of up to 64 bytes each
float rng_uniform(struct rng *r);                                 // open (0, 1)
float rng_normal(struct rng *r);                                  // rng_normal_of() of the next two

// The seed of the i-th of several prompts that are given one seed together; the first has that seed
// itself, so that a prompt alone gets the same tokens however it is asked for.
uint64_t rng_seed_of(uint64_t seed, int i);

#endif
