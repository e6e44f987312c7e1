/* tensor_map.cu: describes arrays of bf16 to Hopper's copy engine (TMA), as tiles of hopper.cuh
 * want them. */
#include "kernels/cuda/hopper.cuh"

bool tensor_map(struct device *dev, CUtensorMap *ret, const void *x, const tensor_boxes &b)
{
    typedef CUresult encode(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                            const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                            const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
    if (!function)
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found);
    cuuint32_t ones[4] = {1, 1, 1, 1};
    CUresult result =
        function && found == cudaDriverEntryPointSuccess
            ? ((encode *)function)(
                  ret, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)b.rank, (void *)x, b.sizes,
                  b.strides, b.box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
            : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS) return true;
    device_fail(dev, "describing an array of rows of %llu to the copy engine: CUDA driver error %d",
                (unsigned long long)b.sizes[0], (int)result);
    return false;
}
