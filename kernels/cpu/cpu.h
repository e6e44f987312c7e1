/* cpu.h: what the files of the CPU backend share. Private to kernels/cpu. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CPU_CPU_H
#define KERNELS_CPU_CPU_H

#include "kernels/backend.h"
#include "kernels/cpu/vec.h"
#include <math.h>

// Scalar operations below which starting a second thread costs more than it saves (a fork and join
// is a few microseconds).
#define PARALLEL_WORK 32768

struct cpu_state {
    void *workspace; // grow-only scratch of the operation that runs now
    size_t workspace_bytes;
    int64_t timer_start_ns;
};

extern const struct ops cpu_ops;

// Scratch of at least `bytes`, 64-byte aligned, valid until the next call; NULL after device_fail.
void *cpu_workspace(struct device *dev, size_t bytes);
// What attention and the delta rule of packed batches, the sum of squares, and an adapter ask of
// it.
size_t cpu_attn_scratch(const struct attn_shape *shape, int max_context);
size_t cpu_squares_scratch(int64_t n);
size_t cpu_delta_scratch(const struct delta_shape *shape, int rows, int max_context);
size_t cpu_lora_scratch(int rows, int max_rank, int dropped); // dropped: columns of x, or 0
// Where what sequence `seq` of a paged batch carries along begins, n elements at `at` of its slot:
// made what the sequence begins with.
float *cpu_delta_state(const struct delta_batch *b, int seq, int64_t at, int64_t n);
// True for DT_F32; else records that operation `name` does not compute in `dt` here.
bool cpu_is_f32(struct device *dev, const char *name, enum dtype dt);

// c[i][j] = dot(a row i, b row j) over k terms, rows at their leading dimensions lda, ldb, ldc. The
// order of summation depends on k alone (matmul.c).
struct dots {
    const float *a, *b, *bias; // bias (n) or NULL
    float *c;
    int64_t lda, ldb, ldc;
    int k;
    bool add; // to what c holds
};
void cpu_dots(const struct dots *, int i0, int i1, int j0, int j1); // i0 <= i < i1, j0 <= j < j1
// A matrix w (rows, cols) with scales, or those of MXFP4 (ops.h, struct matmul), as f32, in the
// workspace; w itself where it has none. NULL after device_fail.
const float *cpu_widened(struct device *dev, const void *w, const int8_t *scales,
                         const uint8_t *mx_scales, int64_t rows, int64_t cols);

// A row of n numbers in e4m3 (common/base/e4m3.h), and back; returns its scale.
int8_t cpu_quantise_row(uint8_t *codes, const float *x, int n);
void cpu_widen_row(float *to, const uint8_t *codes, int8_t scale, int64_t n);
// In place what a row becomes that is read back of e4m3, or e5m2.
void cpu_round_row(float *x, int64_t n, enum gradient_dtype dt);
void cpu_add_bias(float *y, const float *bias, int rows, int cols); // to every row of y

enum status cpu_shared_create(struct device *dev, const char *name, struct shared_memory *memory);
enum status cpu_shared_open(struct device *dev, struct shared_memory *memory);
void cpu_shared_close(struct shared_memory *memory);
void cpu_huge_pages(void *memory, size_t bytes); // asks for them; only a hint

/* e^x within 2 ulp, in a form that the compiler turns into vector code (glibc's own vector exp
 * needs -ffast-math). x = n ln 2 + r with |r| <= ln 2 / 2, and the Taylor series of e^r, whose
 * first left-out term is below 2^-27. Below -87.3, where the result would be subnormal, it is 0;
 * above 88.7 infinite; NaN stays NaN. */
static inline float exp_f32(float x)
{
    const float round_to_int = 12582912.0f; // 1.5 * 2^23: adding it rounds to a whole number
    float clamped = x < -87.3f ? -87.3f : x;
    clamped = clamped > 89.0f ? 89.0f : clamped;
    float n = fma_f32(clamped, 1.44269504f, round_to_int) - round_to_int;
    float r = fma_f32(n, -0.693359375f, clamped); // ln 2 in two parts; n times the first is exact
    r = fma_f32(n, 2.12194440e-4f, r);
    float e = 1.0f / 5040;
    e = fma_f32(e, r, 1.0f / 720);
    e = fma_f32(e, r, 1.0f / 120);
    e = fma_f32(e, r, 1.0f / 24);
    e = fma_f32(e, r, 1.0f / 6);
    e = fma_f32(e, r, 0.5f);
    e = fma_f32(e, r, 1.0f);
    e = fma_f32(e, r, 1.0f);
    // 2^n in two factors, because n may be 128
    int32_t half = (int32_t)n / 2, remaining = (int32_t)n - half;
    uint32_t a = (uint32_t)(half + 127) << 23, b = (uint32_t)(remaining + 127) << 23;
    float fa, fb;
    memcpy(&fa, &a, 4);
    memcpy(&fb, &b, 4);
    e = e * fa * fb;
    return x < -87.3f ? 0.0f : e;
}

// Number i of an array of f32, bf16 or f16; and of one of f32 or bf16, rounded to nearest.
static inline float number_at(const void *x, enum dtype dt, int64_t i)
{
    if (dt == DT_F32) return ((const float *)x)[i];
    const uint16_t half = ((const uint16_t *)x)[i];
    return dt == DT_BF16 ? f32_from_bf16(half) : f32_from_f16(half);
}

static inline void set_number(void *x, enum dtype dt, int64_t i, float value)
{
    if (dt == DT_F32)
        ((float *)x)[i] = value;
    else
        ((uint16_t *)x)[i] = bf16_from_f32(value);
}

static inline float sigmoid(float x)
{
    return 1.0f / (1.0f + exp_f32(-x));
}

static inline float softplus(float x)
{
    return x > 20 ? x : log1pf(expf(x));
}

static inline float max_f32(const float *x, int n)
{
    float max = -INFINITY;
#pragma omp simd reduction(max : max)
    for (int i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    return max;
}

// The table's entries: cpu_<name> has the type of the field <name> of struct ops.
#define X(name) __typeof__(*((struct ops *)0)->name) cpu_##name;
EACH_OP(X)
#undef X

#endif
