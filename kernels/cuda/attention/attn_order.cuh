/* attn_order.cuh: the one order of arithmetic of attention in bf16 (docs/internals/numerics.md), as
 * steps that its kernels are made of. What a row gives is a function of its query, of the keys and
 * values at each position of its context and of the position: never of which kernel computes it,
 * with which rows, or in how many blocks.
 *
 * A context is cut at multiples of CHUNK_KEYS, a chunk at multiples of TILE_KEYS. In a chunk the
 * tiles follow one another as in online softmax (Milakov and Gimelshein 2018), from a maximum and
 * sums that begin anew; then the chunks are joined, the first to the last. Products of queries and
 * keys and of weights and values, and the sums of weights, are mma m16n8k16, 16 of the inner
 * dimension at a time. Keys that a row does not see have the weight 0, and a tile or chunk of
 * nothing else leaves every bit as it was. All roundings are spelt out.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_ATTN_ORDER_CUH
#define KERNELS_CUDA_ATTN_ORDER_CUH

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/tensor.cuh"

#define TILE_KEYS  64
#define CHUNK_KEYS 256

// ---- scores: dot products times score_factor(), in log2 units ----------------------------------

// 1 / x in one instruction, within 1 ulp
INLINE float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// With a soft cap, dots are first made scores by capped().
INLINE float score_factor(const attn_args<bf16> &a)
{
    return a.softcap > 0 ? 1.f : __fmul_rn(a.scale, LOG2E);
}

// cap * tanh(dot * scale / cap), in log2 units. tanh y = 1 - 2 / (1 + e^2y), to 1e-7.
INLINE float capped(const attn_args<bf16> &a, float dot)
{
    float y = __fdiv_rn(__fmul_rn(dot, a.scale), a.softcap);
    float e = exp2_fast(__fmul_rn(y, 2 * LOG2E));
    float tanh = __fmaf_rn(-2.f, reciprocal_fast(__fadd_rn(1.f, fminf(e, 1e30f))), 1.f);
    return __fmul_rn(__fmul_rn(a.softcap, LOG2E), tanh);
}

// ---- tiles of a chunk --------------------------------------------------------------------------

// What a tile does to a row: its weights are 2^(score - shift), and the sums of the tiles before it
// are multiplied by shrink.
struct tile_step {
    float shift, shrink;
};

// top: the row's largest score in the chunk so far, -inf at first; most: the tile's largest dot.
INLINE tile_step next_tile(float &top, float most, float factor)
{
    float now = fmaxf(top, __fmul_rn(most, factor)); // factors are positive
    float shift = now == -INFINITY ? 0.f : now;      // nothing seen yet: every weight is 0
    float shrink = exp2_fast(__fsub_rn(top, shift));
    top = now;
    return {shift, shrink};
}

// Of a dot product; -inf gives 0.
INLINE float weight_of(float dot, float factor, float shift)
{
    return exp2_fast(__fmaf_rn(dot, factor, -shift));
}

// sum (16 x 8, all columns the same) += the row sums of weights, 16 keys of them as an mma's left
// operand: a product with ones.
INLINE void add_row_sums(float (&sum)[4], const uint32_t (&weights)[4])
{
    const uint32_t ones = 0x3f803f80;
    mma(sum, weights, ones, ones);
}

// ---- chunks of a context -----------------------------------------------------------------------

// Chunks that rows of sequences of at most max_query rows see, at most.
static inline int attn_chunks(const attn_args<bf16> &a, int max_query, int max_context)
{
    int chunks = ceil_div(max_context, CHUNK_KEYS);
    if (a.window > 0 && chunks > ceil_div(a.window + max_query, CHUNK_KEYS) + 1)
        chunks = ceil_div(a.window + max_query, CHUNK_KEYS) + 1;
    return chunks > 1 ? chunks : 1;
}

// Factors of the sums of the chunks so far, and of the next chunk's.
struct join_step {
    float before, next;
};

// top: the largest score of the chunks so far, -inf at first.
INLINE join_step next_chunk(float &top, float chunk_top)
{
    float now = fmaxf(top, chunk_top), shift = now == -INFINITY ? 0.f : now;
    join_step j = {exp2_fast(__fsub_rn(top, shift)), exp2_fast(__fsub_rn(chunk_top, shift))};
    top = now;
    return j;
}

INLINE float joined(float before, float next, join_step j)
{
    return __fmaf_rn(next, j.next, __fmul_rn(before, j.before));
}

// What the weighted sum of values is multiplied by in the end; 0 where a row saw nothing.
INLINE float inverse_of(float sum)
{
    return sum > 0 ? __frcp_rn(sum) : 0.f;
}

// Of a zero's sign, which empty tiles and chunks may change, nothing is left.
INLINE float finished(float x, float inverse)
{
    return __fmaf_rn(x, inverse, 0.f);
}

#endif
