/* sampling.h: what sampling (ops.h, `sample`) has of formulas, for CPU and CUDA alike, so that both
 * have the same noise to the bit.
 *
 * Random words are Philox blocks with key = the row's seed and counter = (block, use, position's
 * low word, position's high word). */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_SAMPLING_H
#define KERNELS_SAMPLING_H

#include "common/base/rng.h"
#include "kernels/ops.h"

// What a position's random words are for. Token t has word t % 4 of block t / 4.
enum sampling_use {
    SAMPLING_GUMBEL,      // the token's Gumbel noise
    SAMPLING_ACCEPTANCE,  // block 0: whether the row's draft is accepted
    SAMPLING_GUMBEL_MORE, // further bits of the noise, where it is among the 256 largest
    SAMPLING_AUTHOR       // block 0: which of two models samples (infer-server/engine/tandem.h)
};

RNG_INLINE void sampling_key(const struct sample_params *p, uint32_t ret[2])
{
    ret[0] = (uint32_t)p->seed;
    ret[1] = (uint32_t)(p->seed >> 32);
}

RNG_INLINE void sampling_counter(const struct sample_params *p, uint32_t block,
                                 enum sampling_use use, uint32_t ret[4])
{
    ret[0] = block;
    ret[1] = (uint32_t)use;
    ret[2] = (uint32_t)p->position;
    ret[3] = (uint32_t)(p->position >> 32);
}

RNG_INLINE void sampling_block(const struct sample_params *p, uint32_t block, enum sampling_use use,
                               uint32_t ret[4])
{
    uint32_t key[2], counter[4];
    sampling_key(p, key);
    sampling_counter(p, block, use, counter);
    philox4x32(counter, key, ret);
}

// The Gumbel noise of a token whose SAMPLING_GUMBEL word is `bits`.
RNG_INLINE float sampling_gumbel(const struct sample_params *p, int token, uint32_t bits)
{
    uint32_t more[4] = {0, 0, 0, 0};
    if (rng_wants_more(bits)) sampling_block(p, (uint32_t)token / 4, SAMPLING_GUMBEL_MORE, more);
    // chosen so that a GPU keeps them in registers
    return rng_gumbel(bits, token % 4 == 0   ? more[0]
                            : token % 4 == 1 ? more[1]
                            : token % 4 == 2 ? more[2]
                                             : more[3]);
}

// The u of rejection sampling.
RNG_INLINE double sampling_acceptance(const struct sample_params *p)
{
    uint32_t bits[4];
    sampling_block(p, 0, SAMPLING_ACCEPTANCE, bits);
    return rng_open01_f64(bits[0], bits[1]);
}

// What logits are multiplied by. Greedy rows are told of as at temperature 1.
RNG_INLINE float sampling_scale(const struct sample_params *p)
{
    return p->temperature == 0.0f ? 1.0f : 1.0f / p->temperature;
}

RNG_INLINE bool sampling_by_top_k(const struct sample_params *p, int vocab)
{
    return p->top_k > 0 && p->top_k < vocab;
}

RNG_INLINE bool sampling_by_top_p(const struct sample_params *p)
{
    return p->top_p < 1.0f;
}

RNG_INLINE bool sampling_filters(const struct sample_params *p, int vocab)
{
    return sampling_by_top_k(p, vocab) || sampling_by_top_p(p) || p->min_p > 0.0f;
}

#endif
