/* rope.cu: rotary position embedding, in place, and storing keys and values into the block pool. */
#include "kernels/cuda/cuda.cuh"

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
    for (int k = 0; k < V; k++) {
        float c = angle[k].x, s = sign * angle[k].y, x = a[k], y = b[k];
        a[k] = x * c - y * s;
        b[k] = y * c + x * s;
    }
    store<T, V>(lower, a);
    store<T, V>(upper, b);
}

void cuda_rope(struct device *dev, void *qkv, const float *table, const int32_t *positions,
               int rows, int64_t stride, int n, int head_dim, int rot_dim, float sign,
               enum dtype dt)
{
    int half = rot_dim / 2, size = (int)dtype_size(dt);
    if (rows <= 0 || n <= 0 || half <= 0) return;
    bool fits = aligned(4 * size, {qkv}, {stride * size, (int64_t)head_dim * size, half * size});
    with_type(dt, [&](auto t) {
        using T = decltype(t);
        if (fits)
            cuda_launch(dev, "rope", rope_kernel<T, 4>,
                        dim3(rows, ceil_div(n * (half / 4), THREADS)), THREADS, 0, (T *)qkv, table,
                        positions, stride, n, head_dim, half, sign);
        else
            cuda_launch(dev, "rope", rope_kernel<T, 1>, dim3(rows, ceil_div(n * half, THREADS)),
                        THREADS, 0, (T *)qkv, table, positions, stride, n, head_dim, half, sign);
    });
    cuda_use(dev)->activation = qkv;
}

// Copies units of U bytes' worth (an integer type) of each row's keys, then values.
template <typename U>
__global__ void kv_store_kernel(U *k, U *v, const U *qkv, const int32_t *slots, int64_t row_units,
                                int64_t q_units, int kv_units)
{
    grid_begin();
    int i = blockIdx.y * THREADS + threadIdx.x, slot = slots[blockIdx.x];
    if (i >= 2 * kv_units || slot < 0) return;
    U unit = qkv[blockIdx.x * row_units + q_units + i];
    U *to = i < kv_units ? k + i : v + (i - kv_units);
    to[(int64_t)slot * kv_units] = unit;
}

void cuda_kv_store(struct device *dev, const struct kv_view *kv, int layer, const void *qkv,
                   const struct batch_view *batch, const struct attn_shape *s)
{
    if (batch->n_tokens <= 0) return;
    int64_t size = dtype_size(kv->dt), shift = layer * kv->layer_stride * size;
    char *k = (char *)kv->k + shift, *v = (char *)kv->v + shift;
    int64_t head = s->head_dim * size, q = s->n_heads * head, n = s->n_kv_heads * head;
    if (aligned(16, {k, v, qkv}, {q, n}))
        cuda_launch(dev, "kv_store", kv_store_kernel<uint4>,
                    dim3(batch->n_tokens, ceil_div(2 * n / 16, THREADS)), THREADS, 0, (uint4 *)k,
                    (uint4 *)v, (const uint4 *)qkv, batch->slots, (q + 2 * n) / 16, q / 16,
                    (int)(n / 16));
    else
        cuda_launch(dev, "kv_store", kv_store_kernel<uint16_t>,
                    dim3(batch->n_tokens, ceil_div(n, THREADS)), THREADS, 0, (uint16_t *)k,
                    (uint16_t *)v, (const uint16_t *)qkv, batch->slots, (q + 2 * n) / 2, q / 2,
                    (int)(n / 2));
    cuda_use(dev)->activation = k;
}
