/* checksum.c: position-dependent sums over regions of memory; order of summation does not matter.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/hash.h"
#include "kernels/cpu/cpu.h"

static inline uint64_t term(uint32_t word, uint64_t j)
{
    return hash_mix(word + j * HASH_SPREAD);
}

void cpu_checksum(struct device *dev, uint64_t *sums, const void *base, const uint64_t *offset,
                  const uint64_t *bytes, int n)
{
    (void)dev;
    for (int i = 0; i < n; i++) {
        const unsigned char *region = (const unsigned char *)base + offset[i];
        const uint64_t words = bytes[i] / 4, remaining = bytes[i] % 4;
        uint64_t sum = 0;
#pragma omp parallel for simd reduction(+ : sum) if (words > PARALLEL_WORK)
        for (uint64_t j = 0; j < words; j++) {
            uint32_t word;
            memcpy(&word, region + 4 * j, 4);
            sum += term(word, j);
        }
        if (remaining) {
            uint32_t word = 0;
            memcpy(&word, region + 4 * words, remaining);
            sum += term(word, words);
        }
        sums[i] = sum;
    }
}
