/* hash.h: the hashes of this tree. FNV-1a and the mixing function are for tables, seeds and
 * checksums of our own data: fast, and no defence against who chooses the input; SHA-256 is. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_HASH_H
#define COMMON_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define HASH_INLINE static __host__ __device__ __forceinline__
#else
#define HASH_INLINE static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define HASH_SPREAD    0x9E3779B97F4A7C15ull // 2^64 by the golden ratio; multiples lie far apart
#define HASH_FNV_START 0xcbf29ce484222325ull
#define HASH_FNV_PRIME 0x100000001b3ull

// The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit of x moves every bit.
HASH_INLINE uint64_t hash_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// FNV-1a (Fowler, Noll and Vo).
HASH_INLINE uint64_t hash_fnv1a(const void *data, size_t len)
{
    uint64_t h = HASH_FNV_START;
    for (size_t i = 0; i < len; i++) h = (h ^ ((const unsigned char *)data)[i]) * HASH_FNV_PRIME;
    return h;
}

#define HASH_SHA256_BYTES 32
void hash_sha256(const void *data, size_t len, unsigned char ret[HASH_SHA256_BYTES]);
// Its first n bytes in hexadecimal digits: ret has room for 2 n and a NUL.
void hash_sha256_hex(const void *data, size_t len, int n, char *ret);

#ifdef __cplusplus
}
#endif
#endif
