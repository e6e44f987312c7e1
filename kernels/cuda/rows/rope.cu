/* rope.cu: rotary position embedding, in place, and storing keys and values into the block pool. */
#include "kernels/cuda/rows/rope.cuh"

#define THREADS 128

// A thread rotates V pairs of one head.
template <typename T, int V>
__global__ void rope_kernel(T *qkv, const float *table, const int32_t *positions, int64_t stride,
                            int n, int head_dim, int half, float sign)
{
    grid_begin();
    int per_head = half / V, i = blockIdx.y * THREADS + threadIdx.x;
    if (i >= n * per_head) return;
    int head = i / per_head, pair = i % per_head * V;
    T *lower = qkv + blockIdx.x * stride + (int64_t)head * head_dim + pair, *upper = lower + half;
    const float2 *angle = (const float2 *)table + (int64_t)positions[blockIdx.x] * half + pair;
    float a[V], b[V];
    load<T, V>(a, lower);
    load<T, V>(b, upper);
#pragma unroll
    for (int k = 0; k < V; k++) rotate(a[k], b[k], angle[k], sign);
    store<T, V>(lower, a);
    store<T, V>(upper, b);
}

// A thread rotates a pair of neighbours.
template <typename T>
__global__ void rope_neighbours_kernel(T *qkv, const float *table, const int32_t *positions,
                                       int64_t stride, int n, int head_dim, int half, float sign)
{
    grid_begin();
    int i = blockIdx.y * THREADS + threadIdx.x;
    if (i >= n * half) return;
    int head = i / half, pair = i % half;
    T *at = qkv + blockIdx.x * stride + (int64_t)head * head_dim + 2 * pair;
    float a = to_f32(at[0]), b = to_f32(at[1]);
    rotate(a, b, ((const float2 *)table)[(int64_t)positions[blockIdx.x] * half + pair], sign);
    at[0] = from_f32<T>(a);
    at[1] = from_f32<T>(b);
}

void cuda_rope(struct device *dev, void *qkv, const struct rope_args *a)
{
    int half = a->rot_dim / 2, size = (int)dtype_size(a->dt);
    if (a->rows <= 0 || a->n <= 0 || half <= 0) return;
    bool fits =
        aligned(4 * size, {qkv}, {a->stride * size, (int64_t)a->head_dim * size, half * size});
    with_type(a->dt, [&](auto t) {
        using T = decltype(t);
        auto launch = [&](auto kernel, int wide) {
            cuda_launch(dev, "rope", kernel, dim3(a->rows, ceil_div(a->n * (half / wide), THREADS)),
                        THREADS, 0, (T *)qkv, a->table, a->positions, a->stride, a->n, a->head_dim,
                        half, a->sign);
        };
        if (a->interleaved)
            launch(rope_neighbours_kernel<T>, 1);
        else if (fits)
            launch(rope_kernel<T, 4>, 4);
        else
            launch(rope_kernel<T, 1>, 1);
    });
}

// Copies units of U bytes' worth (an integer type) of each row's keys, then values: `units` in all.
template <typename U>
__global__ void kv_store_kernel(U *k, U *v, const U *qkv, const int32_t *slots, int64_t row_units,
                                int64_t q_units, int kv_units, int units, int64_t slot_units)
{
    grid_begin();
    int i = blockIdx.y * THREADS + threadIdx.x, slot = slots[blockIdx.x];
    if (i >= units || slot < 0) return;
    U unit = qkv[blockIdx.x * row_units + q_units + i];
    U *to = i < kv_units ? k + i : v + (i - kv_units);
    to[slot * slot_units] = unit;
}

void cuda_kv_store(struct device *dev, const struct kv_view *kv, int layer, const void *qkv,
                   const struct batch_view *batch, const struct attn_shape *s)
{
    if (batch->n_tokens <= 0) return;
    int64_t size = dtype_size(kv->dt), shift = kv->layers[layer].offset * size;
    char *k = (char *)kv->k + shift, *v = (char *)kv->v + shift;
    int64_t head = s->head_dim * size, q = s->n_heads * head, n = s->n_kv_heads * head;
    int64_t slot = kv->layers[layer].width * size, row = attn_row_width(s) * size, both = row - q;
    if (aligned(16, {k, v, qkv}, {q, n, slot}))
        cuda_launch(dev, "kv_store", kv_store_kernel<uint4>,
                    dim3(batch->n_tokens, ceil_div(both / 16, THREADS)), THREADS, 0, (uint4 *)k,
                    (uint4 *)v, (const uint4 *)qkv, batch->slots, row / 16, q / 16, (int)(n / 16),
                    (int)(both / 16), slot / 16);
    else
        cuda_launch(dev, "kv_store", kv_store_kernel<uint16_t>,
                    dim3(batch->n_tokens, ceil_div(both / 2, THREADS)), THREADS, 0, (uint16_t *)k,
                    (uint16_t *)v, (const uint16_t *)qkv, batch->slots, row / 2, q / 2,
                    (int)(n / 2), (int)(both / 2), slot / 2);
}

// Rotation and storing in one: a thread has FOUR pairs of a query or key head, or FOUR elements
// that are stored as they are.
#define FOUR 4

template <typename T> __global__ void rope_store_kernel(T *qkv, rope_store_args<T> a)
{
    grid_begin();
    int half = a.rot_dim / 2, per_head = half / FOUR, unit = blockIdx.y * THREADS + threadIdx.x;
    int slot = a.slots[blockIdx.x], kv_width = a.n_kv_heads * a.head_dim;
    int rotated = (a.n_heads + a.n_kv_heads) * per_head;
    T *row = qkv + (int64_t)blockIdx.x * (a.n_heads + 2 * a.n_kv_heads) * a.head_dim;
    T *key = a.k + slot * a.slot_width, *value = a.v + slot * a.slot_width;
    if (unit < rotated) {
        int head = unit / per_head, pair = unit % per_head * FOUR;
        T *lower = row + head * a.head_dim + pair;
        const float2 *angle = (const float2 *)a.table + (int64_t)a.positions[blockIdx.x] * half;
        float x[FOUR], y[FOUR];
        load<T, FOUR>(x, lower);
        load<T, FOUR>(y, lower + half);
#pragma unroll
        for (int i = 0; i < FOUR; i++) rotate(x[i], y[i], angle[pair + i], 1);
        store<T, FOUR>(lower, x);
        store<T, FOUR>(lower + half, y);
        if (head < a.n_heads || slot < 0) return;
        key += (head - a.n_heads) * a.head_dim + pair;
        store<T, FOUR>(key, x);
        store<T, FOUR>(key + half, y);
        return;
    }
    unit -= rotated;
    if (slot < 0) return;
    int rest = (a.head_dim - a.rot_dim) / FOUR;
    float x[FOUR];
    if (unit < a.n_kv_heads * rest) {
        int at = unit / rest * a.head_dim + a.rot_dim + unit % rest * FOUR;
        load<T, FOUR>(x, row + a.n_heads * a.head_dim + at);
        store<T, FOUR>(key + at, x);
        return;
    }
    int at = (unit - a.n_kv_heads * rest) * FOUR;
    if (at >= kv_width) return;
    load<T, FOUR>(x, row + (a.n_heads + a.n_kv_heads) * a.head_dim + at);
    store<T, FOUR>(value + at, x);
}

void cuda_rope_store(struct device *dev, void *qkv, const struct rope_store *store)
{
    const struct attn_shape *s = store->shape;
    const struct kv_view *kv = store->kv;
    int rows = store->batch->n_tokens, rot_dim = store->rot_dim;
    if (rows <= 0) return;
    int units =
        (s->n_heads + s->n_kv_heads) * rot_dim / 2 + s->n_kv_heads * (2 * s->head_dim - rot_dim);
    with_type(kv->dt, [&](auto t) {
        using T = decltype(t);
        auto a = rope_store_args<T>::make(store);
        if (rot_dim % (2 * FOUR) || s->head_dim % FOUR ||
            !aligned(FOUR * sizeof(T), {qkv, a.k, a.v}, {})) {
            const struct rope_args rope =
                rope_of_batch(store->table, rot_dim, store->batch, s, 1, kv->dt);
            cuda_rope(dev, qkv, &rope);
            cuda_kv_store(dev, kv, store->layer, qkv, store->batch, s);
            return;
        }
        cuda_launch(dev, "rope and kv_store", rope_store_kernel<T>,
                    dim3(rows, ceil_div(units / FOUR, THREADS)), THREADS, 0, (T *)qkv, a);
    });
}
