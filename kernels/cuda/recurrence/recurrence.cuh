/* recurrence.cuh: a batch as recurrences go over it, for all kernels that do. Private to
 * kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_RECURRENCE_CUH
#define KERNELS_CUDA_RECURRENCE_CUH

#include "kernels/cuda/rows/act.cuh"
#include "kernels/recurrence.h"

// As the recurrences go over it (ops.h, delta_batch), by value.
struct delta_rows : batch_view {
    float *states; // of the layer, in slot 0
    int64_t slot_elements;
};

static inline struct delta_rows delta_rows_of(const struct delta_batch *b)
{
    if (!b->kv) return {*b->view, NULL, 0};
    return {*b->view, b->kv->states + b->kv->layers[b->layer].state, b->kv->slot_elements};
}

// Whether sequence s of a unit that ends before `end` leaves its state: no sequence behind it
// leaves another in the same slot.
__device__ __forceinline__ bool delta_leaves(const delta_rows &b, int s, int end)
{
    return s + 1 == end || b.state_slot[s + 1] != b.state_slot[s];
}

__device__ __forceinline__ float softplus_of(float x)
{
    return x > 20.f ? x : log1pf(expf(x));
}

#endif
