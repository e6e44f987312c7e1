/* rope.cuh: a rotation, and what is rotated and stored. Private to kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_ROPE_CUH
#define KERNELS_CUDA_ROPE_CUH

#include "kernels/cuda/cuda.cuh"

// The roundings are spelt out, so that every kernel has the same.
INLINE void rotate(float &lower, float &upper, float2 angle, float sign)
{
    float c = angle.x, s = sign * angle.y, x = lower, y = upper;
    lower = __fmaf_rn(c, x, -__fmul_rn(s, y));
    upper = __fmaf_rn(c, y, __fmul_rn(s, x));
}

// struct rope_store for elements of T.
template <typename T> struct rope_store_args {
    T *k, *v; // of the layer
    const float *table;
    const int32_t *positions, *slots;
    int n_heads, n_kv_heads, head_dim, rot_dim;
    int64_t slot_width; // elements between tokens of k and v

    static rope_store_args make(const struct rope_store *s)
    {
        const struct kv_layer *layer = &s->kv->layers[s->layer];
        return {(T *)s->kv->k + layer->offset,
                (T *)s->kv->v + layer->offset,
                s->table,
                s->batch->positions,
                s->batch->slots,
                s->shape->n_heads,
                s->shape->n_kv_heads,
                s->shape->head_dim,
                s->rot_dim,
                layer->width};
    }
};

#endif
