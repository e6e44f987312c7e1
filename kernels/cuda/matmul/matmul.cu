/* matmul.cu: the table of the matmul's variants, and matrix multiplication through cuBLASLt: its
 * plans, one a shape, in a table.
 *
 * A row-major C = A B is the column-major C' = B' A', so A and B change places and nothing is
 * moved. f32 runs with tf32 off; bf16 sums in f32. Few rows of a forward matmul in bf16 go to
 * matmul_small.cu.
 *
 * Forward matmuls of bf16, and of rows in e4m3, take no algorithm that splits k, which keeps the
 * order of docs/internals/numerics.md. A matmul of bf16 is timed: the library names its likeliest
 * algorithms, and the fastest that gives the bits of the first is taken, so that which one won
 * shows in no result, and two runs may choose differently. (The library's first choice is not
 * always good: for 192 rows of 8,960 it took 211 us for what took 12 with 128 rows, and the best of
 * what it named for 192 rows 43; so it is asked for the next power of two as well.) Algorithms that
 * do not split k do that but for few (docs/lab/performance.md); where the first choice splits,
 * which only a gradient's may, or timing is not possible (a graph is being captured, no memory for
 * a second result), it stands. What was found for a number of tokens serves all of about that many,
 * on whose number no order of summation of an unsplit algorithm was seen to depend. Every split
 * adds in a fixed order, so each choice gives the same bits each time. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/e4m3.h"
#include "kernels/comm.h"
#include "kernels/cuda/library.cuh"
#include "kernels/cuda/matmul/matmul.cuh"
#include "kernels/cuda/rows/act.cuh"
#include <algorithm>
#include <cublasLt.h>
#include <map>
#include <new>
#include <string.h>

// ---- the library -------------------------------------------------------------------------------

// Where the library is missing a device still opens, with an empty handle: programs that multiply
// no matrices need none. The first matmul then fails with what the loader said.
#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)
static late_library cublaslt("libcublasLt.so." TEXT(CUBLAS_VER_MAJOR), "", "CUDA's cuBLAS");
#define LT(name) LATE_FUNCTION(lt_##name, cublasLt##name, cublaslt, CUBLAS_STATUS_NOT_INITIALIZED)
LT(Create)
LT(Destroy)
LT(Matmul)
LT(MatmulAlgoCheck)
LT(MatmulAlgoConfigGetAttribute)
LT(MatmulAlgoGetHeuristic)
LT(MatmulDescCreate)
LT(MatmulDescDestroy)
LT(MatmulDescSetAttribute)
LT(MatrixLayoutCreate)
LT(MatrixLayoutDestroy)
LT(MatmulPreferenceCreate)
LT(MatmulPreferenceDestroy)
LT(MatmulPreferenceSetAttribute)
LATE_FUNCTION(lt_GetStatusName, cublasLtGetStatusName, cublaslt, cublaslt.missing)

#define WORKSPACE_BYTES  (64u << 20)
#define MAX_PLANS        3072 // with which their table is emptied
#define CANDIDATES       8
#define TIMED_OPERATIONS (1ll << 29) // of a matmul that is worth the time

struct plan_key { // of C(m,n) = op(A) op(B) + beta C [+ bias], row-major; align_*: log2
    int m, n, k;
    uint8_t trans_a, trans_b, beta, in, out, bias, align_a, align_b, align_c, factors, rounds, pad;

    bool operator<(const plan_key &other) const { return memcmp(this, &other, sizeof other) < 0; }
};
struct plan_operands {
    const void *a, *b, *bias;
    const float *a_factors = NULL, *b_factors = NULL; // (m), (n): of A and B in e4m3
};
struct plan {
    struct plan_key key = {};
    bool add_bias = false; // by a kernel of ours, where the library has no epilogue for it
    cublasLtMatmulDesc_t operation = NULL;
    cublasLtMatrixLayout_t a = NULL, b = NULL, c = NULL; // of the column-major matmul
    cublasLtMatmulAlgo_t algorithm = {};

    ~plan()
    {
        if (operation) lt_MatmulDescDestroy(operation);
        for (cublasLtMatrixLayout_t layout : {a, b, c})
            if (layout) lt_MatrixLayoutDestroy(layout);
    }
};

struct matmul_state {
    cublasLtHandle_t handle = NULL;
    void *workspace = NULL;
    std::map<plan_key, plan> plans;
    std::map<plan_key, cublasLtMatmulAlgo_t> choices; // of shapes, their tokens as by bucket()

    ~matmul_state()
    {
        plans.clear();
        if (handle) lt_Destroy(handle);
        cudaFree(workspace);
    }
};

enum status matmul_state_new(struct device *dev, struct matmul_state **ret)
{
    struct matmul_state *state = new (std::nothrow) matmul_state();
    if (!state) return status_fail(ST_NO_MEMORY, "no memory for matmul plans");
    enum status st = ST_OK;
    cublasStatus_t blas = lt_Create(&state->handle);
    if (blas != CUBLAS_STATUS_SUCCESS && !cublaslt.missing[0])
        st = status_fail(ST_DEVICE, "%s: starting cuBLASLt: %s", dev->spec, lt_GetStatusName(blas));
    cudaError_t error = st == ST_OK ? cudaMalloc(&state->workspace, WORKSPACE_BYTES) : cudaSuccess;
    if (error != cudaSuccess)
        st = status_fail(ST_NO_MEMORY, "%s: no room for cuBLASLt's workspace of %u bytes: %s",
                         dev->spec, WORKSPACE_BYTES, cudaGetErrorString(error));
    if (st == ST_OK)
        *ret = state;
    else
        delete state;
    return st;
}

void matmul_state_free(struct matmul_state *state)
{
    delete state;
}

static cudaDataType_t data_type(int dt)
{
    return dt == DT_E4M3 ? CUDA_R_8F_E4M3 : dt == DT_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

// Tells the plan where these operands' vectors are, without which the library names no algorithm
// for rows that have factors.
static cublasStatus_t plan_point(const struct plan *plan, const struct plan_operands *o)
{
    cublasStatus_t st = CUBLAS_STATUS_SUCCESS;
    auto point = [&](cublasLtMatmulDescAttributes_t to, const void *at) {
        if (at && st == CUBLAS_STATUS_SUCCESS)
            st = lt_MatmulDescSetAttribute(plan->operation, to, &at, sizeof at);
    };
    if (!plan->add_bias) point(CUBLASLT_MATMUL_DESC_BIAS_POINTER, o->bias);
    point(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, o->b_factors);
    point(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, o->a_factors);
    return st;
}

// Enqueues it.
static cublasStatus_t plan_run(struct device *dev, const struct plan *plan,
                               const struct plan_operands *o, float beta, void *c)
{
    struct cuda_state *state = cuda_use(dev);
    struct matmul_state *matmul = state->matmul;
    const float one = 1.f;
    cublasStatus_t st = plan_point(plan, o);
    if (st != CUBLAS_STATUS_SUCCESS) return st;
    return lt_Matmul(matmul->handle, plan->operation, &one, o->b, plan->a, o->a, plan->b, &beta, c,
                     plan->c, c, plan->c, &plan->algorithm, matmul->workspace, WORKSPACE_BYTES,
                     state->stream);
}

// Describes the plan's matmul in cuBLASLt's words.
static cublasStatus_t plan_describe(struct plan *plan)
{
    const struct plan_key *key = &plan->key;
    cudaDataType_t in = data_type(key->in), out = data_type(key->out);
    cudaDataType_t of_rows = key->rounds == GRADIENT_E5M2 ? CUDA_R_8F_E5M2 : in;
    // Stored (rows, width) row-major is (width, rows) column-major.
    cublasOperation_t op_a = key->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = key->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    int a_rows = key->trans_b ? key->k : key->n, a_cols = key->trans_b ? key->n : key->k;
    int b_rows = key->trans_a ? key->m : key->k, b_cols = key->trans_a ? key->k : key->m;
    cublasStatus_t st;
#define TRY(call)                                                                                  \
    do {                                                                                           \
        st = (call);                                                                               \
        if (st != CUBLAS_STATUS_SUCCESS) return st;                                                \
    } while (0)
#define DESCRIBE(attribute, value)                                                                 \
    TRY(lt_MatmulDescSetAttribute(plan->operation, attribute, &(value), sizeof(value)))
    TRY(lt_MatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    DESCRIBE(CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    DESCRIBE(CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    plan->add_bias = key->bias && key->in != key->out && key->in != DT_E4M3;
    if (key->bias && !plan->add_bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        DESCRIBE(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
        DESCRIBE(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, out);
    }
    if (key->factors) { // of each row of either
        const cublasLtMatmulMatrixScale_t rows = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
        DESCRIBE(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, rows);
        DESCRIBE(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, rows);
    }
    TRY(lt_MatrixLayoutCreate(&plan->a, in, a_rows, a_cols, a_rows));
    TRY(lt_MatrixLayoutCreate(&plan->b, of_rows, b_rows, b_cols, b_rows));
    TRY(lt_MatrixLayoutCreate(&plan->c, out, key->n, key->m, key->n));
#undef DESCRIBE
#undef TRY
    return st;
}

// ---- the choice of an algorithm -----------------------------------------------------------------

static bool splits_k(const cublasLtMatmulAlgo_t *algorithm)
{
    int n = 0;
    size_t written;
    return lt_MatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &n, sizeof n,
                                           &written) != CUBLAS_STATUS_SUCCESS ||
           n > 1;
}

// Powers of two and what lies halfway between, downwards.
static int bucket(int tokens)
{
    int power = 1;
    while (power <= tokens / 2) power *= 2;
    return tokens >= power + power / 2 ? power + power / 2 : power;
}

static struct plan_key choice_key(const struct plan_key *key)
{
    struct plan_key rounded = *key;
    int *tokens = key->trans_a ? &rounded.k : &rounded.m;
    *tokens = bucket(*tokens);
    return rounded;
}

static bool in_workspace(const struct cuda_state *state, const void *p)
{
    const char *at = (const char *)p, *begin = (const char *)state->workspace;
    return begin && at >= begin + state->workspace_kept && at < begin + state->workspace_bytes;
}

static bool may_be_timed(const struct cuda_state *state, const struct plan *plan,
                         const struct plan_operands *o)
{
    const struct plan_key *key = &plan->key;
    return key->in != DT_F32 && 2ll * key->m * key->n * key->k >= TIMED_OPERATIONS &&
           !state->capturing && !splits_k(&plan->algorithm) && !in_workspace(state, o->a) &&
           !in_workspace(state, o->b); // where the sums of their results go
}

// The plan's result with another algorithm, to memory of nobody's: its checksum, and the shortest
// of some times. False where it does not run.
static bool try_algorithm(struct device *dev, struct plan *plan, const struct plan_operands *o,
                          void *c, cudaEvent_t event[2], uint64_t *ret_sum, float *ret_ms)
{
    cudaStream_t stream = cuda_use(dev)->stream;
    const uint64_t at = 0, bytes = (uint64_t)plan->key.m * plan->key.n *
                                   dtype_size((enum dtype)plan->key.out);
    if (plan_run(dev, plan, o, 0, c) != CUBLAS_STATUS_SUCCESS) return false;
    cuda_checksum(dev, ret_sum, c, &at, &bytes, 1);
    *ret_ms = 1e9f;
    for (int i = 0; i < 3; i++) {
        float ms;
        cudaEventRecord(event[0], stream);
        plan_run(dev, plan, o, plan->key.beta, c);
        cudaEventRecord(event[1], stream);
        if (cudaEventSynchronize(event[1]) != cudaSuccess ||
            cudaEventElapsedTime(&ms, event[0], event[1]) != cudaSuccess)
            return false;
        if (ms < *ret_ms) *ret_ms = ms;
    }
    return true;
}

// Leaves the fastest of the candidates that give the first choice's bits in the plan.
static void take_fastest(struct device *dev, struct plan *plan, const struct plan_operands *o,
                         const cublasLtMatmulHeuristicResult_t *candidates, int n)
{
    cublasLtMatmulAlgo_t best = plan->algorithm;
    cudaEvent_t event[2] = {NULL, NULL};
    void *c = NULL;
    uint64_t first_sum, sum;
    float best_ms, ms;
    size_t bytes = (size_t)plan->key.m * plan->key.n * dtype_size((enum dtype)plan->key.out);
    if (cudaMalloc(&c, bytes) != cudaSuccess || cudaEventCreate(&event[0]) != cudaSuccess ||
        cudaEventCreate(&event[1]) != cudaSuccess)
        goto out;
    if (!try_algorithm(dev, plan, o, c, event, &first_sum, &best_ms)) goto out;
    for (int i = 0; i < n; i++) {
        if (candidates[i].state != CUBLAS_STATUS_SUCCESS) continue;
        plan->algorithm = candidates[i].algo;
        if (!try_algorithm(dev, plan, o, c, event, &sum, &ms) || sum != first_sum) continue;
        if (ms >= best_ms) continue;
        best_ms = ms;
        best = plan->algorithm;
    }
out:
    plan->algorithm = best;
    if (event[0]) cudaEventDestroy(event[0]);
    if (event[1]) cudaEventDestroy(event[1]);
    if (c) cudaFree(c);
    cudaGetLastError(); // no room, or an algorithm that does not run: the first choice stands
}

static cublasStatus_t ask_library(struct matmul_state *state, struct plan *plan, bool may_split,
                                  int wanted, cublasLtMatmulHeuristicResult_t *ret, int *ret_n)
{
    const struct plan_key *key = &plan->key;
    const size_t workspace = WORKSPACE_BYTES;
    const uint32_t align_a = 1u << key->align_b, align_b = 1u << key->align_a,
                   align_c = 1u << key->align_c, no_split = CUBLASLT_REDUCTION_SCHEME_NONE;
    cublasLtMatmulPreference_t preference = NULL;
    cublasStatus_t st = lt_MatmulPreferenceCreate(&preference);
#define PREFER(attribute, value)                                                                   \
    if (st == CUBLAS_STATUS_SUCCESS)                                                               \
    st = lt_MatmulPreferenceSetAttribute(preference, attribute, &(value), sizeof(value))
    PREFER(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align_a);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align_b);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align_c);
    PREFER(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align_c);
    if (!may_split) PREFER(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, no_split);
#undef PREFER
    if (st == CUBLAS_STATUS_SUCCESS)
        st = lt_MatmulAlgoGetHeuristic(state->handle, plan->operation, plan->a, plan->b, plan->c,
                                       plan->c, preference, wanted, ret, ret_n);
    if (preference) lt_MatmulPreferenceDestroy(preference);
    return st;
}

// What the library names for a number of tokens rounded up to a power of two.
static int ask_for_more_tokens(struct matmul_state *state, const struct plan *plan,
                               cublasLtMatmulHeuristicResult_t *ret)
{
    struct plan more;
    int n = 0;
    more.key = plan->key;
    int *tokens = more.key.trans_a ? &more.key.k : &more.key.m, power = 1;
    while (power < *tokens) power *= 2;
    if (power == *tokens) return 0;
    *tokens = power;
    if (plan_describe(&more) != CUBLAS_STATUS_SUCCESS ||
        ask_library(state, &more, false, CANDIDATES, ret, &n) != CUBLAS_STATUS_SUCCESS)
        n = 0;
    return n;
}

// Whether what was chosen for about as many tokens is, if anything was, the plan's now.
static bool take_choice(struct matmul_state *state, struct plan *plan)
{
    cublasLtMatmulHeuristicResult_t result;
    const auto choice = state->choices.find(choice_key(&plan->key));
    if (choice == state->choices.end() ||
        lt_MatmulAlgoCheck(state->handle, plan->operation, plan->a, plan->b, plan->c, plan->c,
                           &choice->second, &result) != CUBLAS_STATUS_SUCCESS ||
        result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > WORKSPACE_BYTES)
        return false;
    plan->algorithm = choice->second;
    return true;
}

static cublasStatus_t choose_algorithm(struct device *dev, struct matmul_state *state,
                                       struct plan *plan, const struct plan_operands *o)
{
    const struct plan_key *key = &plan->key;
    const bool forward = key->in != DT_F32 && key->trans_b && !key->trans_a; // one order
    cublasLtMatmulHeuristicResult_t found[2 * CANDIDATES];
    int n = 0;
    cublasStatus_t st = ask_library(state, plan, !forward, 1, found, &n);
    if (st != CUBLAS_STATUS_SUCCESS) return st;
    if (n < 1) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (found[0].state != CUBLAS_STATUS_SUCCESS) return found[0].state;
    plan->algorithm = found[0].algo;
    if (!may_be_timed(cuda_use(dev), plan, o) || take_choice(state, plan)) return st;
    if (ask_library(state, plan, false, CANDIDATES, found, &n) != CUBLAS_STATUS_SUCCESS) return st;
    n += ask_for_more_tokens(state, plan, found + n);
    take_fastest(dev, plan, o, found, n);
    state->choices[choice_key(key)] = plan->algorithm;
    return st;
}

// The key's plan, valid until the next call. A new one of a large matmul is timed with these
// operands, which takes a few milliseconds; none is while a graph is captured.
static cublasStatus_t plan_find(struct device *dev, const struct plan_key *key,
                                const struct plan_operands *operands, struct plan **ret)
{
    struct matmul_state *state = cuda_use(dev)->matmul;
    if (state->plans.size() >= MAX_PLANS) state->plans.clear();
    const auto [at, is_new] = state->plans.try_emplace(*key);
    struct plan *plan = *ret = &at->second;
    if (!is_new) return CUBLAS_STATUS_SUCCESS;
    plan->key = *key;
    cublasStatus_t st = plan_describe(plan);
    if (st == CUBLAS_STATUS_SUCCESS) st = plan_point(plan, operands);
    if (st == CUBLAS_STATUS_SUCCESS) st = choose_algorithm(dev, state, plan, operands);
    if (st != CUBLAS_STATUS_SUCCESS) state->plans.erase(at);
    return st;
}

// ---- matmuls by the library --------------------------------------------------------------------

// Of the largest power of two up to 256 that divides the address.
static uint8_t log2_alignment(const void *p)
{
    return (uint8_t)__builtin_ctzll((uintptr_t)p | 256);
}

// c (m, n) += bias (n) on every row
template <typename T> __global__ void add_bias_kernel(float *c, const T *bias, int n)
{
    grid_begin();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < n) c[(int64_t)blockIdx.x * n + i] += to_f32(bias[i]);
}

// C = op(A) op(B) + beta C [+ bias] by the library; bias is of the type of A, or of C.
static cublasStatus_t try_large(struct device *dev, void *c, const plan_operands &operands,
                                const struct matmul *shape)
{
    struct cuda_state *state = cuda_use(dev);
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
    key.bias = operands.bias != NULL;
    key.rounds = (uint8_t)shape->rounds;
    key.factors = operands.a_factors != NULL;
    key.align_a = log2_alignment(operands.a);
    key.align_b = log2_alignment(operands.b);
    key.align_c = log2_alignment(c);
    struct plan *plan = NULL;
    cublasStatus_t st = plan_find(dev, &key, &operands, &plan);
    if (st == CUBLAS_STATUS_SUCCESS) st = plan_run(dev, plan, &operands, shape->beta, c);
    if (st != CUBLAS_STATUS_SUCCESS) return st;
    if (plan->add_bias)
        launch_typed(shape->in, dev, "adding a bias", add_bias_kernel,
                     dim3(shape->m, ceil_div(shape->n, 256)), 256, 0, c, operands.bias, shape->n);
    cuda_enqueued(state, true);
    return st;
}

static void matmul_large(struct device *dev, void *c, const plan_operands &operands,
                         const struct matmul *shape)
{
    const cublasStatus_t st = try_large(dev, c, operands, shape);
    if (st != CUBLAS_STATUS_SUCCESS)
        device_fail(dev, "matmul (%d, %d, %d)%s%s %s to %s: cuBLASLt: %s", shape->m, shape->n,
                    shape->k, shape->trans_a ? " A'" : "", shape->trans_b ? " B'" : "",
                    dtype_name(shape->in), dtype_name(shape->out), lt_GetStatusName(st));
}

size_t cuda_matmul_scratch(int rows, int width)
{
    return (size_t)rows * width * sizeof(bf16);
}

// ---- variants ----------------------------------------------------------------------------------

// Whether the call says this of itself.
template <auto FIELD> static bool has(struct device *, const matmul_call &c)
{
    return c.shape->*FIELD;
}

static void act_apart(struct device *dev, const matmul_call &c)
{
    struct matmul s = *c.shape;
    s.act = NULL;
    cuda_matmul(dev, s.x, c.a, c.b, c.bias, &s);
    cuda_act(dev, c.c, s.x, c.shape->act);
}

static bool is_e4m3(struct device *, const matmul_call &c)
{
    return c.shape->scales || c.shape->mx_scales;
}

static void widened(struct device *dev, const matmul_call &c)
{
    struct matmul s = *c.shape;
    const int64_t rows = (int64_t)(s.trans_b ? s.n : s.k) * std::max(1, s.n_experts);
    const int cols = s.trans_b ? s.k : s.n;
    const wide_weights a(dev, c.a, s.a_scales, s.m, s.k, s.in, s.rounds);
    const wide_weights b(dev, c.b, s.scales, rows, cols, s.in, GRADIENT_E4M3, s.mx_scales);
    s.scales = s.a_scales = NULL;
    s.rounds = GRADIENT_AUTO;
    s.mx_scales = NULL;
    s.early = false;
    if (a.w && b.w) cuda_matmul(dev, c.c, a.w, b.w, c.bias, &s);
}

static bool is_rounded(struct device *, const matmul_call &c)
{
    return c.shape->rounds && !c.shape->a_scales;
}

// A gradient that is rounded: it and B are laid out anew, and the call taken as one of rows in
// eight bits.
static void gradient(struct device *dev, const matmul_call &c)
{
    const rounded_gradient g(dev, c.a, c.b, c.shape);
    struct matmul s = *c.shape;
    s.trans_b = true;
    s.scales = (const int8_t *)g.along_scales.memory;
    s.a_scales = (const int8_t *)g.row_scales.memory;
    if (!s.scales || !s.a_scales || !g.rows.memory || !g.along.memory) return;
    if (s.rounds == GRADIENT_E4M3) s.rounds = GRADIENT_AUTO; // as any rows
    cuda_matmul(dev, c.c, g.rows.memory, g.along.memory, c.bias, &s);
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
    const kept_workspace sum(dev, cuda_matmul_scratch(plain.m, plain.n));
    if (!sum.memory) return;
    plain.beta = 0;
    cuda_matmul(dev, sum.memory, c.a, c.b, c.bias, &plain);
    cuda_add(dev, c.c, sum.memory, (int64_t)plain.m * plain.n, 1.0f, DT_BF16);
}

static void library(struct device *dev, const matmul_call &c)
{
    matmul_large(dev, c.c, {c.a, c.b, c.bias}, c.shape);
}

/* Rows in e4m3. The library offers an algorithm that applies a factor for each row of A and of B;
 * and several, for most shapes, that apply one scale to all, which are faster where there are not
 * very many rows. All sum in one order. */
#define MANY_ROWS 1024

// The powers of two of n rows.
__global__ void factors_kernel(float *factors, const int8_t *scales, int n)
{
    grid_begin();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) factors[i] = e4m3_factor(scales[i]);
}

static void rounded_by_factors(struct device *dev, const matmul_call &c, struct matmul s)
{
    const int m = (s.m + 63) / 64 * 64; // aligned
    const kept_workspace memory(dev, (m + s.n) * sizeof(float));
    float *of_a = (float *)memory.memory, *of_b = of_a + m;
    if (!of_a) return;
    cuda_launch(dev, "factors of rows", factors_kernel, ceil_div(s.m, 256), 256, 0, of_a,
                s.a_scales, s.m);
    cuda_launch(dev, "factors of rows", factors_kernel, ceil_div(s.n, 256), 256, 0, of_b, s.scales,
                s.n);
    matmul_large(dev, c.c, {c.a, c.b, c.bias, of_a, of_b}, &s);
}

// c (m, n) = [c +] sums times their rows' powers of two [+ bias], rounded before c is added. A
// thread has 8 columns. GATED: c (m, n / 2), of gates and what they belong to, activated.
template <typename T, bool GATED>
__global__ void scale_sums_kernel(bf16 *c, const T *sums, const int8_t *a_scales,
                                  const int8_t *scales, const bf16 *bias, int n, bool add,
                                  act_kind act)
{
    grid_begin();
    const int width = GATED ? n / 2 : n, at = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (at >= width) return;
    const int64_t to = (int64_t)blockIdx.x * width + at;
    const float of_row = e4m3_factor(a_scales[blockIdx.x]);
    float x[GATED + 1][8], old[8] = {};
    if (add) load<bf16, 8>(old, c + to);
#pragma unroll
    for (int h = 0; h <= GATED; h++) {
        const int column = at + h * width;
        const auto scale = *(const pack<int8_t, 8> *)(scales + column);
        float b[8] = {};
        load<T, 8>(x[h], sums + (int64_t)blockIdx.x * n + column);
        if (bias) load<bf16, 8>(b, bias + column);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float sum = x[h][i] * of_row * e4m3_factor(scale.at[i]);
            x[h][i] = to_f32(from_f32<bf16>(bias ? sum + b[i] : sum));
        }
    }
    if constexpr (GATED) activate_all(x[0], act);
    unrolled<8>([&](int i) { x[0][i] = GATED ? x[0][i] * x[GATED][i] : x[0][i] + old[i]; });
    store<bf16, 8>(c + to, x[0]);
}

// False where the library has no algorithm.
template <typename T>
static bool rounded_by_sums(struct device *dev, const matmul_call &c, struct matmul s)
{
    const bool add = s.beta != 0;
    const int width = s.act ? s.n / 2 : s.n;
    const act_kind act = s.act ? s.act->kind : ACT_SILU;
    T *sums = (T *)cuda_workspace(dev, (size_t)s.m * s.n * sizeof(T));
    if (!sums) return true; // which failed
    s.beta = 0;
    s.out = sizeof(T) == 4 ? DT_F32 : DT_BF16;
    if (try_large(dev, sums, {c.a, c.b, NULL}, &s) != CUBLAS_STATUS_SUCCESS) return false;
    const auto kernel = s.act ? scale_sums_kernel<T, true> : scale_sums_kernel<T, false>;
    cuda_launch(dev, "scales of sums", kernel, dim3(s.m, ceil_div(width, 8 * 256)), 256, 0,
                (bf16 *)c.c, sums, s.a_scales, s.scales, (const bf16 *)c.bias, s.n, add, act);
    return true;
}

static bool library_rounded(struct device *dev, const matmul_call &c)
{
    struct matmul s = *c.shape;
    const bool many = s.m >= MANY_ROWS && s.beta == 0;
    if (s.offsets || !matmul_in_chunks(dev, c) || (s.act && (!may_gate(c) || s.m >= MANY_ROWS)))
        return false;
    s.in = DT_E4M3;
    if (!many && (c.bias ? rounded_by_sums<float> : rounded_by_sums<bf16>)(dev, c, s)) return true;
    if (s.act)
        act_apart(dev, c);
    else if (s.beta == 0)
        rounded_by_factors(dev, c, s);
    else
        library_add(dev, c);
    return true;
}

static const op_variant matmul_rows[] = {
    variant<matmul_call, matmul_e4m3<GATED, true>>(
        "gated_rounded", "as few_rounded, with an act that is gated but not clamped, x not kept"),
    variant<matmul_call, matmul_e4m3<GATED, false>>("gated_e4m3", "as few_e4m3, with such an act"),
    variant<matmul_call, matmul_few_gated>("few_gated", "as few, with such an act"),
    variant<matmul_call, is_rounded, gradient>(
        "gradient", "A a gradient in e4m3 or e5m2: rounded, then as rows in e4m3"),
    variant<matmul_call, matmul_e4m3<STORED, true>>(
        "few_rounded",
        "A and B in e4m3, bf16 on 9.0, k a multiple of 64, n of 16; up to 64 rows, of experts "
        "any"),
    variant<matmul_call, library_rounded>(
        "library_rounded", "as few_rounded, of more rows; up to 1,023 with such an act"),
    variant<matmul_call, has<&matmul::act>, act_apart>("act_apart",
                                                       "any act: the matmul, then that"),
    variant<matmul_call, matmul_e4m3<STORED, false>>(
        "few_e4m3",
        "B in e4m3, bf16 on 9.0, k a multiple of 64, n of 8; up to 512 rows, 32 of each expert"),
    variant<matmul_call, is_e4m3, widened>("widened",
                                           "B in e4m3: widened, then as one of what that gives"),
    variant<matmul_call, matmul_few_columns>(
        "few_columns", "ranks put columns together and map each other's memory; else as few"),
    variant<matmul_call, has<&matmul::columns>, gather_columns>("columns",
                                                                "ranks put columns together"),
    variant<matmul_call, matmul_few>(
        "few", "bf16 A B' on 9.0, k a multiple of 64; up to 128 rows or n odd, of experts up to 64 "
               "or 32 of each"),
    variant<matmul_call, experts_wgmma>(
        "experts_wgmma", "experts, bf16 on 9.0, widths are multiples of 8, up to 1,024 experts"),
    variant<matmul_call, experts_mma>("experts_mma", "experts, bf16, widths are multiples of 8"),
    variant<matmul_call, has<&matmul::offsets>, experts_plain>("experts_plain",
                                                               "experts: f32, odd widths"),
    variant<matmul_call, adds_to_bf16, library_add>("library_add", "beta 1 to bf16"),
    variant<matmul_call, otherwise, library>("library", "all else: cuBLASLt"),
};
const struct op_variants matmul_variants = {OP_matmul, sizeof matmul_rows / sizeof *matmul_rows,
                                            matmul_rows};

void cuda_matmul(struct device *dev, void *c, const void *a, const void *b, const void *bias,
                 const struct matmul *s)
{
    const matmul_call call = {c, a, b, bias, s};
    const bool nobody = s->offsets && (s->n_experts == 0 || s->k == 0); // has rows
    if (s->m > 0 && s->n > 0 && !nobody) op_take_variant(dev, &matmul_variants, &call);
}
