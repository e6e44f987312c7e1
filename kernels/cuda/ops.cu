/* ops.cu: the CUDA backend's table of operations. */
#include "kernels/cuda/cuda.cuh"

extern "C" const struct ops ops_cuda;
const struct ops ops_cuda = {
#define X(name) cuda_##name,
    CUDA_OPS(X)
#undef X
};
