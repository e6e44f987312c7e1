/* matmul_plan.cuh: how cuBLASLt computes a matmul of one shape: its layouts, descriptor and
 * algorithm, made once and kept. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_MATMUL_PLAN_CUH
#define KERNELS_CUDA_MATMUL_PLAN_CUH

#include "kernels/cuda/cuda.cuh"
#include <cublasLt.h>

struct plan_key { // of C(m,n) = op(A) op(B) + beta C [+ bias], row-major; align_*: log2
    int m, n, k;
    uint8_t trans_a, trans_b, beta, in, out, bias, align_a, align_b, align_c, pad[3];
};
struct plan_operands {
    const void *a, *b, *bias;
};
struct plan {
    struct plan_key key;
    bool used, add_bias; // add_bias: by a kernel of ours, where the library has no epilogue for it
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c; // of the column-major matmul
    cublasLtMatmulAlgo_t algorithm;
};

// The key's plan, valid until the next call. A new one of a large matmul is timed with these
// operands, which takes a few milliseconds; none is while a graph is captured.
cublasStatus_t plan_find(struct device *dev, const struct plan_key *key,
                         const struct plan_operands *operands, struct plan **ret);
// What the library says of a result, or why there is none.
const char *plan_status_name(cublasStatus_t status);
// Enqueues it.
cublasStatus_t plan_run(struct device *dev, const struct plan *plan,
                        const struct plan_operands *operands, float beta, void *c);

#endif
