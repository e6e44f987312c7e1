/* recurrence.cuh: a batch as recurrences go over it, for all kernels that do. Private to
 * kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_RECURRENCE_CUH
#define KERNELS_CUDA_RECURRENCE_CUH

#include "kernels/cuda/rows/act.cuh"
#include "kernels/recurrence.h"

// As the recurrences go over it (ops.h, delta_batch), by value, and who comes before whom in it.
struct delta_rows {
    const int32_t *query_start, *positions, *seq_of;
    const int32_t *parent, *first_position, *attend_end; // packed
    const int32_t *state_from, *state_slot;              // paged
    int n_tokens, n_seqs;
    bool paged;
    float *states; // of the layer, in slot 0
    int64_t slot_elements;
};

static inline struct delta_rows delta_rows_of(const struct delta_batch *b)
{
    struct delta_rows r = {};
    r.query_start = b->view->query_start;
    r.positions = b->view->positions;
    r.seq_of = b->view->seq_of;
    r.parent = b->view->parent;
    r.first_position = b->view->first_position;
    r.attend_end = b->view->attend_end;
    r.state_from = b->view->state_from;
    r.state_slot = b->view->state_slot;
    r.n_tokens = b->view->n_tokens;
    r.n_seqs = b->view->n_seqs;
    r.paged = b->kv != NULL;
    if (b->kv) {
        r.states = b->kv->states + b->kv->layers[b->layer].state;
        r.slot_elements = b->kv->slot_elements;
    }
    return r;
}

// Whether sequence s goes on from no other of the batch.
__device__ __forceinline__ bool delta_begins(const delta_rows &b, int s)
{
    if (!b.paged) return b.parent[s] < 0;
    return s == 0 || b.state_slot[s] < 0 || b.state_slot[s - 1] != b.state_from[s];
}

// The sequence behind the last that goes on from s, which begins.
__device__ __forceinline__ int delta_unit_end(const delta_rows &b, int s)
{
    do s++;
    while (s < b.n_seqs && !delta_begins(b, s));
    return s;
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
