/* k16_order.cu: see k16_order.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/k16_order.h"
#include <cuda_runtime.h>

__global__ void tile_kernel(float *c, const uint16_t *a, const uint16_t *b, int m, int n, int k)
{
    int lane = threadIdx.x, g = lane / 4, t = lane % 4, row0 = blockIdx.y * 8,
        column0 = blockIdx.x * 16;
    const uint16_t *in = a + (int64_t)min(row0 + g, m - 1) * k + 2 * t;
    const uint16_t *w[2];
    for (int h = 0; h < 2; h++) w[h] = b + (int64_t)min(column0 + g + 8 * h, n - 1) * k + 2 * t;
    float d[4] = {};
    for (int p = 0; p < k; p += 16) {
        auto at = [&](const uint16_t *x) { return *(const uint32_t *)(x + p); };
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(at(w[0])), "r"(at(w[1])), "r"(at(w[0] + 8)), "r"(at(w[1] + 8)),
                       "r"(at(in)), "r"(at(in + 8)));
    }
    for (int e = 0; e < 4; e++) {
        int row = row0 + 2 * t + e % 2, column = column0 + g + e / 2 * 8;
        if (row < m && column < n) c[(int64_t)row * n + column] = d[e];
    }
}

bool k16_order_known(int index)
{
    int major = 0;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) ==
               cudaSuccess &&
           major == 9;
}

bool k16_order_matmul(float *c, const uint16_t *a, const uint16_t *b, int m, int n, int k)
{
    if (cudaDeviceSynchronize() != cudaSuccess) return false;
    tile_kernel<<<dim3((n + 15) / 16, (m + 7) / 8), 32>>>(c, a, b, m, n, k);
    return cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
}
