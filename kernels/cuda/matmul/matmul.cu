/* matmul.cu: matrix multiplication through cuBLASLt.
 *
 * A row-major C = A B is the column-major C' = B' A', so A and B change places and nothing is
 * moved. f32 runs with tf32 off; bf16 sums in f32. How a shape is computed is its plan's
 * (matmul_plan.cu); few rows of a forward matmul in bf16 go to matmul_small.cu. */
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
                    dtype_name(shape->in), dtype_name(shape->out), cublasLtGetStatusName(st));
        return;
    }
    if (plan->add_bias)
        with_type(shape->in, [&](auto t) {
            using T = decltype(t);
            cuda_launch(dev, "adding a bias", add_bias_kernel<T>,
                        dim3(shape->m, ceil_div(shape->n, 256)), 256, 0, (float *)c,
                        (const T *)bias, shape->n);
        });
    state->after_graph = false;
}

size_t cuda_matmul_scratch(int rows, int width)
{
    return (size_t)rows * width * sizeof(bf16);
}

static void matmul_columns(struct device *dev, void *c, const void *a, const void *b,
                           const void *bias, const struct matmul *shape)
{
    if (matmul_small_columns(dev, c, a, b, bias, shape)) return;
    struct matmul own = *shape;
    const size_t width = shape->n * dtype_size(shape->out);
    own.columns = NULL;
    cuda_matmul(dev, (char *)shape->parts + comm_rank(shape->columns) * (shape->m * width), a, b,
                bias, &own);
    comm_gather_columns(shape->columns, c, shape->parts, shape->m, width);
}

void cuda_matmul(struct device *dev, void *c, const void *a, const void *b, const void *bias,
                 const struct matmul *shape)
{
    if (shape->m <= 0 || shape->n <= 0) return;
    if (shape->columns) {
        matmul_columns(dev, c, a, b, bias, shape);
        return;
    }
    if (shape->sum && matmul_small_sent(dev, c, a, b, bias, shape)) return;
    if (matmul_small(dev, c, a, b, bias, shape)) return;
    if (shape->beta == 0 || shape->out != DT_BF16) {
        matmul_large(dev, c, a, b, bias, shape);
        return;
    }
    // Of the library's algorithms some round before they add C, some do not.
    struct matmul plain = *shape;
    void *sum = cuda_workspace(dev, cuda_matmul_scratch(shape->m, shape->n));
    if (!sum) return;
    plain.beta = 0;
    matmul_large(dev, sum, a, b, bias, &plain);
    cuda_add(dev, c, sum, (int64_t)shape->m * shape->n, DT_BF16);
}
