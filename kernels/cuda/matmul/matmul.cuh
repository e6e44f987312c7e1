/* matmul.cuh: the variants of the matmul (matmul.cu has their table). Each is false where it does
 * not take a call, but for the last of experts. Private to kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_MATMUL_CUH
#define KERNELS_CUDA_MATMUL_CUH

#include "kernels/cuda/cuda.cuh"

struct matmul_call {
    void *c;
    const void *a, *b, *bias;
    const struct matmul *shape;
};

// What becomes of the sums of a tile: they are stored as bf16 or f32; or the tile has pairs of
// columns that belong together, `apart` from each other: a gate and its up.
enum epilogue { STORED, WIDE, GATED };

// Whether the columns of a call may be taken in pairs, of which the activation alone is stored.
static inline bool may_gate(const matmul_call &c)
{
    const struct act_shape *act = c.shape->act;
    return act && act->gated && act->kind <= ACT_GELU && !c.shape->keep && c.shape->out == DT_BF16;
}

// matmul_e4m3.cu: B is weights in e4m3, bf16 on Hopper, few rows: widened on the way; ROUNDED: A is
// in e4m3, too.
template <epilogue END, bool ROUNDED> bool matmul_e4m3(struct device *dev, const matmul_call &call);
// Whether A and B are in e4m3 and the sums of E4M3_CHUNK of k by themselves, which no number of
// rows changes: else both are widened.
bool matmul_in_chunks(struct device *dev, const matmul_call &call);

// matmul_small.cu: bf16 on Hopper, few rows, or few rows of each expert.
bool matmul_few(struct device *dev, const matmul_call &call);
// C is a rank's columns of what all of them put together (matmul.columns).
bool matmul_few_columns(struct device *dev, const matmul_call &call);
// y = act(gate) * up of the two halves of C's columns.
bool matmul_few_gated(struct device *dev, const matmul_call &call);

// matmul_experts.cu: all experts' at once, or the gradients of their weights.
bool experts_wgmma(struct device *dev, const matmul_call &call);
bool experts_mma(struct device *dev, const matmul_call &call);
void experts_plain(struct device *dev, const matmul_call &call);

#endif
