/* matmul.cu: the tables of the matmuls and of what follows them at once, and matrix multiplication
 * through cuBLASLt.
 *
 * A row-major C = A B is the column-major C' = B' A', so A and B change places and nothing is
 * moved. f32 runs with tf32 off; bf16 sums in f32. How a shape is computed is its plan's
 * (matmul_plan.cu); few rows of a forward matmul in bf16 go to matmul_small.cu. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/matmul/matmul.cuh"
#include "kernels/cuda/matmul/matmul_plan.cuh"
#include "kernels/comm.h"
#include <string.h>

// The largest power of two up to 256 that divides the address.
static uint32_t alignment(const void *p)
{
    uint32_t a = 256;
    while ((uintptr_t)p % a) a /= 2;
    return a;
}

static uint8_t log2_of(uint32_t x)
{
    return (uint8_t)__builtin_ctz(x);
}

// c (m, n) += bias (n) on every row
template <typename T> __global__ void add_bias_kernel(float *c, const T *bias, int n)
{
    grid_begin();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < n) c[(int64_t)blockIdx.x * n + i] += to_f32(bias[i]);
}

// C = op(A) op(B) + beta C [+ bias] by the library; bias is of the type of A.
static void matmul_large(struct device *dev, void *c, const void *a, const void *b,
                         const void *bias, const struct matmul *shape)
{
    struct cuda_state *state = cuda_use(dev);
    const struct plan_operands operands = {a, b, bias};
    struct plan_key key;
    memset(&key, 0, sizeof key);
    key.m = shape->m;
    key.n = shape->n;
    key.k = shape->k;
    key.trans_a = shape->trans_a;
    key.trans_b = shape->trans_b;
    key.beta = shape->beta != 0;
    key.in = (uint8_t)shape->in;
    key.out = (uint8_t)shape->out;
    key.bias = bias != NULL;
    key.align_a = log2_of(alignment(a));
    key.align_b = log2_of(alignment(b));
    key.align_c = log2_of(alignment(c));
    struct plan *plan = NULL;
    cublasStatus_t st = plan_find(dev, &key, &operands, &plan);
    if (st == CUBLAS_STATUS_SUCCESS) st = plan_run(dev, plan, &operands, shape->beta, c);
    if (st != CUBLAS_STATUS_SUCCESS) {
        device_fail(dev, "matmul (%d, %d, %d)%s%s %s to %s: cuBLASLt: %s", shape->m, shape->n,
                    shape->k, shape->trans_a ? " A'" : "", shape->trans_b ? " B'" : "",
                    dtype_name(shape->in), dtype_name(shape->out), plan_status_name(st));
        return;
    }
    if (plan->add_bias)
        with_type(shape->in, [&](auto t) {
            using T = decltype(t);
            cuda_launch(dev, "adding a bias", add_bias_kernel<T>,
                        dim3(shape->m, ceil_div(shape->n, 256)), 256, 0, c, bias, shape->n);
        });
    cuda_enqueued(state, true);
}

size_t cuda_matmul_scratch(int rows, int width)
{
    return (size_t)rows * width * sizeof(bf16);
}

// ---- variants ----------------------------------------------------------------------------------

static bool is_columns(struct device *, const matmul_call &c)
{
    return c.shape->columns;
}

static void gather_columns(struct device *dev, const matmul_call &c)
{
    struct matmul own = *c.shape;
    const size_t width = own.n * dtype_size(own.out);
    own.columns = NULL;
    cuda_matmul(dev, (char *)own.parts + comm_rank(c.shape->columns) * (own.m * width), c.a, c.b,
                c.bias, &own);
    comm_gather_columns(c.shape->columns, c.c, own.parts, own.m, width);
}

static bool adds_to_bf16(struct device *, const matmul_call &c)
{
    return c.shape->beta != 0 && c.shape->out == DT_BF16;
}

// Of the library's algorithms some round before they add C, some do not.
static void library_add(struct device *dev, const matmul_call &c)
{
    struct matmul plain = *c.shape;
    void *sum = cuda_workspace(dev, cuda_matmul_scratch(plain.m, plain.n));
    if (!sum) return;
    plain.beta = 0;
    matmul_large(dev, sum, c.a, c.b, c.bias, &plain);
    cuda_add(dev, c.c, sum, (int64_t)plain.m * plain.n, DT_BF16);
}

static void library(struct device *dev, const matmul_call &c)
{
    matmul_large(dev, c.c, c.a, c.b, c.bias, c.shape);
}

static const op_variant matmul_rows[] = {
    variant<matmul_call, matmul_few_columns_takes, matmul_few_columns>(
        "few_columns", "ranks put columns together and map each other's memory; else as few"),
    variant<matmul_call, is_columns, gather_columns>("columns", "ranks put columns together"),
    variant<matmul_call, matmul_few_takes, matmul_few>(
        "few", "bf16 A B' on 9.0, k a multiple of 64, up to 128 rows or n odd"),
    variant<matmul_call, adds_to_bf16, library_add>("library_add", "beta 1 to bf16"),
    variant<matmul_call, otherwise, library>("library", "all else: cuBLASLt"),
};
const struct op_variants matmul_variants = {OP_matmul, 5, matmul_rows};

void cuda_matmul(struct device *dev, void *c, const void *a, const void *b, const void *bias,
                 const struct matmul *shape)
{
    const matmul_call call = {c, a, b, bias, shape};
    if (shape->m > 0 && shape->n > 0) op_take_variant(dev, &matmul_variants, &call);
}

static void act_apart(struct device *dev, const matmul_call &c)
{
    if (c.n_experts > 0)
        cuda_matmul_experts(dev, c.x, c.a, c.b, c.offsets, c.n_experts, c.shape);
    else
        cuda_matmul(dev, c.x, c.a, c.b, c.bias, c.shape);
    cuda_act(dev, c.c, c.x, c.act);
}

static const op_variant act_rows[] = {
    variant<matmul_call, matmul_few_gated_takes, matmul_few_gated>(
        "few_gated", "as few of the matmul, gated but not clamped, x not kept"),
    variant<matmul_call, otherwise, act_apart>("apart", "all else: the matmul, then act"),
};
const struct op_variants matmul_act_variants = {OP_matmul_act, 2, act_rows};
const struct op_variants matmul_experts_act_variants = {OP_matmul_experts_act, 2, act_rows};

void cuda_matmul_act(struct device *dev, void *y, void *x, const void *a, const void *b,
                     const void *bias, const struct matmul *shape, const struct act_shape *act,
                     bool keep)
{
    const matmul_call call = {y, a, b, bias, shape, NULL, 0, x, act, keep};
    if (shape->m > 0 && shape->n > 0) op_take_variant(dev, &matmul_act_variants, &call);
}

static void rope_store_apart(struct device *dev, const matmul_call &c)
{
    cuda_matmul(dev, c.c, c.a, c.b, c.bias, c.shape);
    cuda_rope_store(dev, c.c, c.store);
}

static const op_variant rope_store_rows[] = {
    variant<matmul_call, matmul_few_rotated_takes, matmul_few_rotated>(
        "few_rotated", "as few, whole heads rotated, a bf16 pool, not 33 to 64 rows"),
    variant<matmul_call, otherwise, rope_store_apart>("apart", "all else: matmul, then rope_store"),
};
const struct op_variants matmul_rope_store_variants = {OP_matmul_rope_store, 2, rope_store_rows};

void cuda_matmul_rope_store(struct device *dev, void *qkv, const void *a, const void *b,
                            const void *bias, const struct matmul *shape,
                            const struct rope_store *store)
{
    matmul_call call = {qkv, a, b, bias, shape};
    call.store = store;
    if (shape->m > 0) op_take_variant(dev, &matmul_rope_store_variants, &call);
}
