/* dropout.h: which elements of a row an adapter's dropout keeps (ops.h, struct lora_dropout), for
 * CPU and CUDA alike. A pure function of the seed, the matrix, the row's sample and position, and
 * the column: a layer that is run again has the same mask, however rows are packed. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_DROPOUT_H
#define KERNELS_DROPOUT_H

#include "common/base/rng.h"
#include "kernels/ops.h"

// Factors of columns 4 * block .. 4 * block + 3 of a row. Those of a whole row are made in fours,
// of which a shard's first column need not be one's first.
RNG_INLINE void dropout_factors(const struct lora_dropout *d, int part, int32_t sample,
                                int32_t position, uint32_t block, float ret[4])
{
    const uint32_t key[2] = {(uint32_t)d->seed, (uint32_t)(d->seed >> 32)};
    const uint32_t first = d->column + 4 * block, ahead = first % 4;
    uint32_t counter[4] = {first / 4, d->matrix + (uint32_t)part, (uint32_t)sample,
                           (uint32_t)position};
    uint32_t words[8] = {0};
    philox4x32(counter, key, words);
    counter[0]++;
    if (ahead) philox4x32(counter, key, words + 4);
    for (int i = 0; i < 4; i++) {
        uint32_t word = words[i];
        for (int k = 1; k < 4; k++) // so that a GPU keeps them in registers
            if (ahead == (uint32_t)k) word = words[i + k];
        ret[i] = rng_open01(word) < d->p ? 0.0f : 1.0f / (1.0f - d->p);
    }
}

#endif
