/* vec.h: registers of floats, the fused multiply-add, and the order of sums. Private to
 * kernels/cpu.
 *
 * The compiler fuses nothing by itself (-ffp-contract=off): a product that is to be fused with a
 * sum says fma_f32 or fma_vec. A sum over neighbours has LANES partial sums under every instruction
 * set, lane l taking terms l, l + LANES, ..., and lanes are added by halves. So a result has the
 * same bits whichever compiler made the program and for whichever processor that has FMA. On one
 * without, a product and a sum are rounded each: its bits are its own. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CPU_VEC_H
#define KERNELS_CPU_VEC_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && !defined(__AVX__)
#pragma GCC diagnostic ignored "-Wpsabi" // of vectors as arguments: every use is inlined
#endif
#if defined(__AVX512F__)
enum { WIDTH = 16 }; // of a register
#else
enum { WIDTH = 8 };
#endif
enum { LANES = 16, PARTS = LANES / WIDTH }; // registers that hold the lanes of one sum
typedef float vec __attribute__((vector_size(WIDTH * 4)));
// the same in memory: aligned as floats are
typedef float loose_vec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

#define VEC_INLINE static inline __attribute__((always_inline))

VEC_INLINE vec load_vec(const float *x)
{
    return *(const loose_vec *)x;
}

VEC_INLINE void store_vec(float *x, vec v)
{
    *(loose_vec *)x = v;
}

// A register of whose floats there are n, or all where n is larger; the others are 0.
VEC_INLINE vec load_some(const float *x, int n)
{
    vec v = {0};
    if (n >= WIDTH) return load_vec(x);
    if (n > 0) memcpy(&v, x, (size_t)n * sizeof *x);
    return v;
}

// The first n of a register's floats, or all where n is larger.
VEC_INLINE void store_some(float *x, vec v, int n)
{
    if (n >= WIDTH)
        store_vec(x, v);
    else
        memcpy(x, &v, (size_t)n * sizeof *x);
}

// a * b + c, rounded once where the processor can.
VEC_INLINE float fma_f32(float a, float b, float c)
{
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

VEC_INLINE vec fma_vec(vec a, vec b, vec c)
{
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    for (int i = 0; i < WIDTH; i++) c[i] = fma_f32(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

VEC_INLINE float add_lanes(const vec part[PARTS])
{
    float lane[LANES];
    memcpy(lane, part, sizeof lane);
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma omp simd
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

// The sum of n floats, in the order of lanes.
static inline float sum_f32(const float *x, int n)
{
    vec part[PARTS] = {{0}};
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int p = 0; p < PARTS; p++) part[p] += load_vec(x + i + p * WIDTH);
    for (int p = 0; p < PARTS && i < n; p++)
        part[p] += load_some(x + i + p * WIDTH, n - i - p * WIDTH);
    return add_lanes(part);
}

// The sum of n products, in the order of lanes.
static inline float dot_f32(const float *x, const float *y, int n)
{
    vec part[PARTS] = {{0}};
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int p = 0, at = i; p < PARTS; p++, at += WIDTH)
            part[p] = fma_vec(load_vec(x + at), load_vec(y + at), part[p]);
    for (int p = 0, at = i; p < PARTS && i < n; p++, at += WIDTH)
        part[p] = fma_vec(load_some(x + at, n - at), load_some(y + at, n - at), part[p]);
    return add_lanes(part);
}

// y += factor * x, n floats, each rounded once.
static inline void add_scaled(float *y, float factor, const float *x, int n)
{
#pragma omp simd
    for (int i = 0; i < n; i++) y[i] = fma_f32(factor, x[i], y[i]);
}

#endif
