/* rng.c: a sequential stream of Philox4x32-10 words for host code. The caller owns the state; two
 * streams of one seed never overlap, since the stream number is half of the counter. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "common/base/hash.h"

#include <string.h>

void rng_init(struct rng *r, uint64_t seed, uint64_t stream)
{
    *r = (struct rng){.seed = seed, .stream = stream, .used = 4};
}

uint32_t rng_u32(struct rng *r)
{
    if (r->used == 4) {
        const uint32_t counter[4] = {(uint32_t)r->position, (uint32_t)(r->position >> 32),
                                     (uint32_t)r->stream, (uint32_t)(r->stream >> 32)};
        const uint32_t key[2] = {(uint32_t)r->seed, (uint32_t)(r->seed >> 32)};
        philox4x32(counter, key, r->block);
        r->position++;
        r->used = 0;
    }
    return r->block[r->used++];
}

uint64_t rng_u64(struct rng *r)
{
    uint64_t low = rng_u32(r);
    return (uint64_t)rng_u32(r) << 32 | low;
}

// Lemire, "Fast random integer generation in an interval" (2019): the upper half of bits * n, where
// the few lower halves that would favour some results are drawn again.
uint32_t rng_below(struct rng *r, uint32_t n)
{
    uint32_t unfair = -n % n; // 2^32 mod n
    uint64_t product;
    do product = (uint64_t)rng_u32(r) * n;
    while ((uint32_t)product < unfair);
    return (uint32_t)(product >> 32);
}

// Fisher and Yates.
void rng_shuffle(struct rng *r, void *items, int n, size_t size)
{
    char swap[64];
    for (int k = n - 1; k > 0; k--) {
        char *last = (char *)items + (size_t)k * size,
             *other = (char *)items + rng_below(r, (uint32_t)k + 1) * size;
        memcpy(swap, last, size);
        memmove(last, other, size);
        memcpy(other, swap, size);
    }
}

float rng_uniform(struct rng *r)
{
    return rng_open01(rng_u32(r));
}

float rng_normal(struct rng *r)
{
    const uint32_t radius = rng_u32(r);
    return rng_normal_of(radius, rng_u32(r));
}

uint64_t rng_seed_of(uint64_t seed, int i)
{
    return i == 0 ? seed : hash_mix(seed + (uint64_t)i * HASH_SPREAD);
}
