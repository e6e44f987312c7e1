/* vec.h: the vector type of the kernels that are written with one. Private to kernels/cpu. */
#ifndef KERNELS_CPU_VEC_H
#define KERNELS_CPU_VEC_H

#include <stdint.h>

#if defined(__x86_64__) && !defined(__AVX__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" // of vectors as arguments: every use is inlined
#endif
#if defined(__AVX512F__)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float vec __attribute__((vector_size(LANES * 4)));
// the same in memory: aligned as floats are
typedef float loose_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline __attribute__((always_inline)) vec load(const float *x)
{
    return *(const loose_vec *)x;
}

static inline __attribute__((always_inline)) void store(float *x, vec v)
{
    *(loose_vec *)x = v;
}

#endif
