/* cublaslt.cu: cuBLASLt, looked up when it is first used instead of linked: programs that multiply
 * no matrices (cw-ipc-check, libcommonweight-bridge.so) need no CUDA library, and one binary starts
 * on machines with and without CUDA. Each function here has the library's own name and type and
 * passes its call on.
 *
 * Where the library is missing, a device still opens: cublasLtCreate() gives an empty handle, and
 * the first matmul fails with what the loader said (cublasLtGetStatusName()). Any thread. */
#include <cublasLt.h>
#include <dlfcn.h>
#include <mutex>
#include <stdio.h>

#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)
#define LIBRARY  "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)

static char missing[512]; // what the loader said; "": nothing went wrong

static void *library()
{
    static void *handle;
    static std::once_flag once;
    std::call_once(once, [] {
        handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
        if (!handle)
            snprintf(missing, sizeof missing,
                     "%s (install CUDA's cuBLAS, or put its folder into LD_LIBRARY_PATH)",
                     dlerror());
    });
    return handle;
}

static void *find(const char *name)
{
    void *function = library() ? dlsym(library(), name) : NULL;
    if (!function && !missing[0]) snprintf(missing, sizeof missing, LIBRARY " lacks %s", name);
    return function;
}

#define FORWARD(name, parameters, arguments)                                                       \
    extern "C" cublasStatus_t CUBLASWINAPI name parameters                                         \
    {                                                                                              \
        static auto function = (decltype(&name))find(#name);                                       \
        return function ? function arguments : CUBLAS_STATUS_NOT_INITIALIZED;                      \
    }

FORWARD(cublasLtDestroy, (cublasLtHandle_t handle), (handle))
FORWARD(cublasLtMatmul,
        (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
         cublasLtMatrixLayout_t a_desc, const void *b, cublasLtMatrixLayout_t b_desc,
         const void *beta, const void *c, cublasLtMatrixLayout_t c_desc, void *d,
         cublasLtMatrixLayout_t d_desc, const cublasLtMatmulAlgo_t *algo, void *workspace,
         size_t workspace_bytes, cudaStream_t stream),
        (handle, desc, alpha, a, a_desc, b, b_desc, beta, c, c_desc, d, d_desc, algo, workspace,
         workspace_bytes, stream))
FORWARD(cublasLtMatmulAlgoCheck,
        (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
         cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
         const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *result),
        (handle, desc, a, b, c, d, algo, result))
FORWARD(cublasLtMatmulAlgoConfigGetAttribute,
        (const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t attribute,
         void *value, size_t bytes, size_t *written),
        (algo, attribute, value, bytes, written))
FORWARD(cublasLtMatmulAlgoGetHeuristic,
        (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
         cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
         cublasLtMatmulPreference_t preference, int requested,
         cublasLtMatmulHeuristicResult_t results[], int *returned),
        (handle, desc, a, b, c, d, preference, requested, results, returned))
FORWARD(cublasLtMatmulDescCreate,
        (cublasLtMatmulDesc_t * desc, cublasComputeType_t compute, cudaDataType_t scale),
        (desc, compute, scale))
FORWARD(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t desc), (desc))
FORWARD(cublasLtMatmulDescSetAttribute,
        (cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const void *value,
         size_t bytes),
        (desc, attribute, value, bytes))
FORWARD(cublasLtMatrixLayoutCreate,
        (cublasLtMatrixLayout_t * layout, cudaDataType type, uint64_t rows, uint64_t columns,
         int64_t pitch),
        (layout, type, rows, columns, pitch))
FORWARD(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t layout), (layout))
FORWARD(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * preference), (preference))
FORWARD(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t preference), (preference))
FORWARD(cublasLtMatmulPreferenceSetAttribute,
        (cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const void *value, size_t bytes),
        (preference, attribute, value, bytes))

extern "C" cublasStatus_t CUBLASWINAPI cublasLtCreate(cublasLtHandle_t *handle)
{
    static auto function = (decltype(&cublasLtCreate))find("cublasLtCreate");
    if (function) return function(handle);
    *handle = NULL;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" const char *CUBLASWINAPI cublasLtGetStatusName(cublasStatus_t status)
{
    static auto function = (decltype(&cublasLtGetStatusName))find("cublasLtGetStatusName");
    return function ? function(status) : missing;
}
