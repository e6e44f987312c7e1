/* rope.cu: rotary position embedding, in place, and storing keys and values into the block pool:
 * one kernel for either and for both. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/rows/rope.cuh"

#define THREADS 128
#define WIDE    4 // pairs, or elements, of a thread, where they lie so

// The first n heads of a row are rotated; then, with `store.k`, its keys and values are stored.
template <typename T> struct rope_work {
    T *qkv;
    int64_t stride; // elements between rows
    int rows, n;
    float sign;
    bool interleaved;
    int values = 0; // elements of a row's values
    rope_store_args<T> store = {};
};

// A thread has V pairs of a head, or V elements that are stored as they are.
template <typename T, int V> __global__ void rope_kernel(rope_work<T> w)
{
    grid_begin();
    const rope_store_args<T> &a = w.store;
    const int half = a.rot_dim / 2, per_head = half / V, slot = a.k ? a.slots[blockIdx.x] : -1;
    const int apart = w.interleaved ? 1 : half, step = w.interleaved ? 2 : 1; // interleaved: V is 1
    int unit = blockIdx.y * THREADS + threadIdx.x;
    T *row = w.qkv + blockIdx.x * w.stride;
    T *key = a.k + slot * a.slot_width, *value = a.v + slot * a.slot_width;
    if (unit < w.n * per_head) {
        const int head = unit / per_head, pair = unit % per_head * V, at = pair * step;
        const float2 *angle =
            (const float2 *)a.table + (int64_t)a.positions[blockIdx.x] * half + pair;
        T *lower = row + (int64_t)head * a.head_dim + at;
        float x[V], y[V];
        load<T, V>(x, lower);
        load<T, V>(y, lower + apart);
#pragma unroll
        for (int i = 0; i < V; i++) rotate(x[i], y[i], angle[i], w.sign);
        store<T, V>(lower, x);
        store<T, V>(lower + apart, y);
        if (head < a.n_heads || slot < 0) return;
        key += (head - a.n_heads) * a.head_dim + at;
        store<T, V>(key, x);
        store<T, V>(key + apart, y);
        return;
    }
    if (slot < 0) return;
    unit -= w.n * per_head;
    const int remaining = (a.head_dim - a.rot_dim) / V,
              kept = a.n_kv_heads * remaining; // of the keys
    const T *from = row + a.n_heads * a.head_dim;
    typedef pack<T, V> some;
    if (unit < kept) {
        const int at = unit / remaining * a.head_dim + a.rot_dim + unit % remaining * V;
        *(some *)(key + at) = *(const some *)(from + at);
    } else if ((unit - kept) * V < w.values) {
        const int at = (unit - kept) * V;
        *(some *)(value + at) = *(const some *)(from + a.n_kv_heads * a.head_dim + at);
    }
}

template <typename T> static void launch(struct device *dev, const rope_work<T> &w)
{
    const rope_store_args<T> &a = w.store;
    const int stored = a.k ? a.n_kv_heads * (a.head_dim - a.rot_dim) + w.values : 0;
    const int units = w.n * (a.rot_dim / 2) + stored; // one element, or pair, each
    if (w.rows <= 0 || units <= 0) return;
    const int64_t size = sizeof(T);
    const bool wide = !w.interleaved && a.rot_dim % (2 * WIDE) == 0 &&
                      aligned(WIDE * size, {w.qkv, a.k, a.v},
                              {w.stride * size, a.head_dim * size, a.slot_width * size});
    cuda_launch(dev, "rope and kv_store", wide ? rope_kernel<T, WIDE> : rope_kernel<T, 1>,
                dim3(w.rows, ceil_div(units, (wide ? WIDE : 1) * THREADS)), THREADS, 0, w);
}

void cuda_rope(struct device *dev, void *qkv, const struct rope_args *args)
{
    with_type(args->dt, [&](auto t) {
        rope_work<decltype(t)> w = {(decltype(t) *)qkv, args->stride,     args->rows, args->n,
                                    args->sign,         args->interleaved};
        w.store.table = args->table;
        w.store.positions = args->positions;
        w.store.head_dim = args->head_dim;
        w.store.rot_dim = args->rot_dim / 2 * 2;
        launch(dev, w);
    });
}

// n: heads that are rotated.
static void store_rows(struct device *dev, void *qkv, const struct rope_store *store, int n)
{
    const struct attn_shape *s = store->shape;
    const int64_t width = attn_row_width(s);
    with_type(store->kv->dt, [&](auto t) {
        rope_work<decltype(t)> w = {(decltype(t) *)qkv, width, store->batch->n_tokens, n, 1, false};
        w.values = (int)width - (s->n_heads + s->n_kv_heads) * s->head_dim;
        w.store = rope_store_args<decltype(t)>::make(store);
        launch(dev, w);
    });
}

void cuda_kv_store(struct device *dev, const struct kv_view *kv, int layer, const void *qkv,
                   const struct batch_view *batch, const struct attn_shape *s)
{
    const struct rope_store store = {NULL, 0, kv, layer, batch, s};
    store_rows(dev, (void *)qkv, &store, 0);
}

void cuda_rope_store(struct device *dev, void *qkv, const struct rope_store *store)
{
    store_rows(dev, qkv, store, store->shape->n_heads + store->shape->n_kv_heads);
}
