/* matmul.cu: matrix multiplication through cuBLASLt.
 *
 * A row-major C = A B is the column-major C' = B' A', so A and B change places and nothing is
 * moved. f32 runs with tf32 off; bf16 sums in f32. The algorithm of a shape is the library's first
 * choice, not a timed one: timing would pick differently from run to run, and results must not. All
 * of its split-K schemes add in a fixed order, so every algorithm gives the same bits each time.
 * Plans (layouts, descriptor, algorithm) are kept per shape; making one takes host time only, so a
 * matmul can be captured the first time it is seen. Forward matmuls of bf16 take no algorithm
 * that splits k, which keeps the order of docs/numerics.md; few rows of them go to matmul_small.cu.
 */
#include "common/base/hash.h"
#include "kernels/cuda/cuda.cuh"
#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

#define WORKSPACE_BYTES (64u << 20)
#define PLAN_SLOTS      4096 // open addressing; emptied when three quarters full

struct plan_key {
    int m, n, k;
    uint8_t trans_a, trans_b, beta, in, out, bias, align_a, align_b, align_c, pad[3];
};

struct plan {
    struct plan_key key;
    bool used, add_bias; // add_bias: by a kernel of ours, where the library has no epilogue for it
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c; // of the column-major matmul
    cublasLtMatmulAlgo_t algorithm;
};

struct matmul_state {
    cublasLtHandle_t handle;
    void *workspace;
    struct plan plans[PLAN_SLOTS];
    int n_plans;
};

static void plan_clear(struct plan *plan)
{
    if (plan->operation) cublasLtMatmulDescDestroy(plan->operation);
    if (plan->a) cublasLtMatrixLayoutDestroy(plan->a);
    if (plan->b) cublasLtMatrixLayoutDestroy(plan->b);
    if (plan->c) cublasLtMatrixLayoutDestroy(plan->c);
    memset(plan, 0, sizeof *plan);
}

enum status matmul_state_new(struct device *dev, struct matmul_state **ret)
{
    struct matmul_state *state = (struct matmul_state *)calloc(1, sizeof *state);
    if (!state) return status_fail(ST_NO_MEMORY, "no memory for matmul plans");
    cublasStatus_t blas = cublasLtCreate(&state->handle);
    if (blas != CUBLAS_STATUS_SUCCESS) {
        free(state);
        return status_fail(ST_DEVICE, "%s: starting cuBLASLt: %s", dev->spec,
                           cublasLtGetStatusName(blas));
    }
    cudaError_t error = cudaMalloc(&state->workspace, WORKSPACE_BYTES);
    if (error != cudaSuccess) {
        cublasLtDestroy(state->handle);
        free(state);
        return status_fail(ST_NO_MEMORY, "%s: no room for cuBLASLt's workspace of %u bytes: %s",
                           dev->spec, WORKSPACE_BYTES, cudaGetErrorString(error));
    }
    *ret = state;
    return ST_OK;
}

void matmul_state_free(struct matmul_state *state)
{
    if (!state) return;
    for (int i = 0; i < PLAN_SLOTS; i++) plan_clear(&state->plans[i]);
    cublasLtDestroy(state->handle);
    cudaFree(state->workspace);
    free(state);
}

static cudaDataType_t data_type(int dt)
{
    return dt == DT_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

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

static cublasStatus_t plan_make(struct matmul_state *state, struct plan *plan)
{
    const struct plan_key *key = &plan->key;
    cudaDataType_t in = data_type(key->in), out = data_type(key->out);
    // Stored (rows, width) row-major is (width, rows) column-major.
    cublasOperation_t op_a = key->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = key->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    int a_rows = key->trans_b ? key->k : key->n, a_cols = key->trans_b ? key->n : key->k;
    int b_rows = key->trans_a ? key->m : key->k, b_cols = key->trans_a ? key->k : key->m;
    size_t workspace = WORKSPACE_BYTES;
    uint32_t align_a = 1u << key->align_b, align_b = 1u << key->align_a,
             align_c = 1u << key->align_c;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    cublasStatus_t st;
#define TRY(call)                                                                                  \
    do {                                                                                           \
        st = (call);                                                                               \
        if (st != CUBLAS_STATUS_SUCCESS) goto out;                                                 \
    } while (0)
#define DESCRIBE(attribute, value)                                                                 \
    TRY(cublasLtMatmulDescSetAttribute(plan->operation, attribute, &(value), sizeof(value)))
#define PREFER(attribute, value)                                                                   \
    TRY(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &(value), sizeof(value)))

    TRY(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    DESCRIBE(CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    DESCRIBE(CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    if (key->bias && key->in == key->out) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        DESCRIBE(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
        DESCRIBE(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, in);
    }
    plan->add_bias = key->bias && key->in != key->out;
    TRY(cublasLtMatrixLayoutCreate(&plan->a, in, a_rows, a_cols, a_rows));
    TRY(cublasLtMatrixLayoutCreate(&plan->b, in, b_rows, b_cols, b_rows));
    TRY(cublasLtMatrixLayoutCreate(&plan->c, out, key->n, key->m, key->n));
    TRY(cublasLtMatmulPreferenceCreate(&preference));
    PREFER(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align_a);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align_b);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align_c);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align_c);
    if (key->in == DT_BF16 && key->trans_b && !key->trans_a) { // k16 order
        uint32_t no_split = CUBLASLT_REDUCTION_SCHEME_NONE;
        PREFER(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, no_split);
    }
    TRY(cublasLtMatmulAlgoGetHeuristic(state->handle, plan->operation, plan->a, plan->b, plan->c,
                                       plan->c, preference, 1, &result, &found));
    if (found < 1) {
        st = CUBLAS_STATUS_NOT_SUPPORTED;
        goto out;
    }
    TRY(result.state);
    plan->algorithm = result.algo;
    plan->used = true;
out:
#undef PREFER
#undef DESCRIBE
#undef TRY
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    if (st != CUBLAS_STATUS_SUCCESS) plan_clear(plan);
    return st;
}

static cublasStatus_t plan_find(struct matmul_state *state, const struct plan_key *key,
                                struct plan **ret)
{
    uint64_t hash = hash_fnv1a(key, sizeof *key);
    size_t slot = (hash ^ hash >> 32) % PLAN_SLOTS;
    for (; state->plans[slot].used; slot = (slot + 1) % PLAN_SLOTS)
        if (memcmp(&state->plans[slot].key, key, sizeof *key) == 0) {
            *ret = &state->plans[slot];
            return CUBLAS_STATUS_SUCCESS;
        }
    if (state->n_plans >= PLAN_SLOTS / 4 * 3) {
        for (int i = 0; i < PLAN_SLOTS; i++) plan_clear(&state->plans[i]);
        state->n_plans = 0;
        slot = (hash ^ hash >> 32) % PLAN_SLOTS;
    }
    struct plan *plan = &state->plans[slot];
    plan->key = *key;
    cublasStatus_t st = plan_make(state, plan);
    if (st != CUBLAS_STATUS_SUCCESS) return st;
    state->n_plans++;
    *ret = plan;
    return CUBLAS_STATUS_SUCCESS;
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
    struct matmul_state *matmul = state->matmul;
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
    const float one = 1.f;
    cublasStatus_t st = plan_find(matmul, &key, &plan);
    if (st == CUBLAS_STATUS_SUCCESS && bias && !plan->add_bias)
        st = cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                            &bias, sizeof bias);
    if (st == CUBLAS_STATUS_SUCCESS)
        st = cublasLtMatmul(matmul->handle, plan->operation, &one, b, plan->a, a, plan->b,
                            &shape->beta, c, plan->c, c, plan->c, &plan->algorithm,
                            matmul->workspace, WORKSPACE_BYTES, state->stream);
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

void cuda_matmul(struct device *dev, void *c, const void *a, const void *b, const void *bias,
                 const struct matmul *shape)
{
    if (shape->m <= 0 || shape->n <= 0) return;
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
