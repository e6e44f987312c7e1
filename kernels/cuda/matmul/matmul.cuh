/* matmul.cuh: the matmuls of ops.h as the variants of their tables see them (matmul.cu,
 * matmul_experts.cu). Private to kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_MATMUL_CUH
#define KERNELS_CUDA_MATMUL_CUH

#include "kernels/cuda/cuda.cuh"

// A call of matmul, matmul_act, or one of these of experts; or of
// matmul_experts_back: c is dw, a is dy, b is x.
struct matmul_call {
    void *c; // what comes of it all: of matmul_act y
    const void *a, *b, *bias;
    const struct matmul *shape;
    const int32_t *offsets = NULL; // of n_experts > 0
    int n_experts = 0;
    // matmul_act: x is its scratch
    void *x = NULL;
    const struct act_shape *act = NULL;
    bool keep = false;
};

// matmul.cu: B is weights in e4m3, A too or not. They are widened as a whole, and the call taken as
// one of that.
#define MATMUL_E4M3_TAKES                                                                          \
    "B in e4m3, bf16 on 9.0, k a multiple of 64, n of 16; up to 512 rows, 32 of each expert"
#define MATMUL_WIDENED_TAKES "B in e4m3: widened, then as one of what that gives"
bool matmul_is_e4m3(struct device *dev, const matmul_call &call);
void matmul_widened(struct device *dev, const matmul_call &call);

// matmul.cu: A is a gradient that is rounded. It and B are laid out anew, and the call taken as one
// of rows in eight bits.
#define MATMUL_GRADIENT_TAKES "A a gradient in e4m3 or e5m2: rounded, then as rows in e4m3"
bool matmul_rounds(struct device *dev, const matmul_call &call);
void matmul_gradient(struct device *dev, const matmul_call &call);

// matmul_e4m3.cu: the same for few rows in bf16 on Hopper, widened on the way; ROUNDED: A is in
// e4m3, too.
#define MATMUL_ROUNDED_TAKES                                                                       \
    "A and B in e4m3, bf16 on 9.0, k a multiple of 64, n of 16; up to 128 rows, of experts any"
template <bool ROUNDED> bool matmul_e4m3_takes(struct device *dev, const matmul_call &call);
template <bool ROUNDED> void matmul_e4m3(struct device *dev, const matmul_call &call);
template <bool ROUNDED> bool matmul_e4m3_gated_takes(struct device *dev, const matmul_call &call);
template <bool ROUNDED> void matmul_e4m3_gated(struct device *dev, const matmul_call &call);
// Whether A and B are in e4m3 and the sums of E4M3_CHUNK of k by themselves, which no number of
// rows changes: else both are widened.
bool matmul_in_chunks(struct device *dev, const matmul_call &call);

// matmul_small.cu: bf16 on Hopper, few rows, or few rows of each expert. Whether one takes a call,
// and its launch.
bool matmul_few_takes(struct device *dev, const matmul_call &call);
void matmul_few(struct device *dev, const matmul_call &call);
// C is a rank's columns of what all of them put together (matmul.columns).
bool matmul_few_columns_takes(struct device *dev, const matmul_call &call);
void matmul_few_columns(struct device *dev, const matmul_call &call);
// y = act(gate) * up of the two halves of C's columns.
bool matmul_few_gated_takes(struct device *dev, const matmul_call &call);
void matmul_few_gated(struct device *dev, const matmul_call &call);

#endif
