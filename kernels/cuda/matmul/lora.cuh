/* lora.cuh: what the kernels of low-rank adapters share (lora.cu: f32; lora_tensor.cu: bf16).
 * Private to kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_LORA_CUH
#define KERNELS_CUDA_LORA_CUH

#include "kernels/cuda/cuda.cuh"
#include "kernels/dropout.h"

struct lora_view { // lora_args on the device
    const lora_factors *factors;
    const int32_t *adapter; // NULL: all rows are of the first
    const int32_t *row;     // NULL: in order
    int n_adapters, n_parts, max_rank, rows, k, first[LORA_PARTS + 1];
    lora_dropout dropout;
    lora_grads grads[LORA_PARTS];
};

__device__ __forceinline__ int adapter_of(const lora_view &l, int row)
{
    return !l.adapter ? 0 : l.adapter[l.row ? l.row[row] : row];
}

// What dropout makes of columns 4 c .. 4 c + 3 of a row of x.
__device__ __forceinline__ void dropped(float (&ret)[4], const lora_view &l, int part, int row,
                                        int c)
{
    const int at = l.row ? l.row[row] : row;
    dropout_factors(&l.dropout, part, l.dropout.sample[at], l.dropout.position[at], c, ret);
}

// The steps of an adapter's passes, over h (parts, rows, max_rank) f32, of one type of element.
// Parts part0 .. part0 + n - 1:
struct lora_steps {
    // h = x a^T; or, of the gradient (back), scale * dy b, dy being x
    void (*shrink)(struct device *, float *h, const void *x, int part0, int n, const lora_view &,
                   bool back);
    // y += scale * h b^T of all parts; or (back) dx += h a, dx being y. f32: y is, whatever x is
    void (*expand)(struct device *, void *y, const float *h, const lora_view &, bool back,
                   bool f32);
    // shrink and expand of all parts at once, of few rows and ranks, where y is as x; NULL: there
    // is none
    void (*both)(struct device *, void *y, const void *x, const lora_view &);
    // Gradients of b from dy and h; or of a from x and dh. l.grads is read. sums: lora_slices()
    void (*outer)(struct device *, float *sums, const void *x, const float *h, int part0, int n,
                  const lora_view &, bool of_b);
};
// `outer` sums the rows in so many slices, each (columns of all parts, max_rank) f32.
int lora_slices(int rows, int max_rank);
extern const struct lora_steps lora_bf16; // lora_tensor.cu

#endif
