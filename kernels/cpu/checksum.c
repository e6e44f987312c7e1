/* checksum.c: position-dependent sums over regions of memory; order of summation does not matter.
 */
#include "kernels/cpu/cpu.h"

// The finaliser of splitmix64 (Steele, Lea and Flood 2014).
static inline uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline uint64_t term(uint32_t word, uint64_t j)
{
    return mix(word + j * 0x9E3779B97F4A7C15u);
}

void cpu_checksum(struct device *dev, uint64_t *sums, const void *base, const uint64_t *offset,
                  const uint64_t *bytes, int n)
{
    (void)dev;
    for (int i = 0; i < n; i++) {
        const unsigned char *region = (const unsigned char *)base + offset[i];
        const uint64_t words = bytes[i] / 4, rest = bytes[i] % 4;
        uint64_t sum = 0;
#pragma omp parallel for simd reduction(+ : sum) if (words > PARALLEL_WORK)
        for (uint64_t j = 0; j < words; j++) {
            uint32_t word;
            memcpy(&word, region + 4 * j, 4);
            sum += term(word, j);
        }
        if (rest) {
            uint32_t word = 0;
            memcpy(&word, region + 4 * words, rest);
            sum += term(word, words);
        }
        sums[i] = sum;
    }
}
