/* k16_order.h: the order that sums of matrix products on Hopper's tensor cores are held to
 * (docs/internals/numerics.md), in its plainest form: one warp a tile of 16 x 8, one mma m16n8k16
 * after the other along k. Needs a build with CUDA. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_K16_ORDER_H
#define TESTS_SUPPORT_K16_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Whether the CUDA device `index` is one whose orders are known: compute capability 9.0.
bool k16_order_known(int index);

// c (m, n) f32 = a (m, k) b (n, k)^T of bf16, all in device memory of the current device; k a
// multiple of 16. Waits for the device before and after. False where a CUDA call failed.
bool k16_order_matmul(float *c, const uint16_t *a, const uint16_t *b, int m, int n, int k);

#ifdef __cplusplus
}
#endif
#endif
