/* gate.cu: a gate beside a value, its gradient, and the rows of attention whose queries have one.
 */
#include "kernels/cuda/rows/act.cuh"

#define THREADS 128

__device__ __forceinline__ float open_to(gate_kind kind, float g)
{
    return kind == GATE_SILU ? g * sigmoid(g) : sigmoid(g);
}

// Block x is the row.
template <typename T> __global__ void gate_kernel(T *y, gate_args a)
{
    grid_begin();
    int c = blockIdx.y * THREADS + threadIdx.x;
    if (c >= a.width) return;
    int64_t at = (int64_t)blockIdx.x * a.width + c;
    float g = to_f32(((const T *)a.g)[blockIdx.x * a.g_stride + c]);
    y[at] = from_f32<T>(to_f32(((const T *)a.x)[at]) * open_to(a.kind, g));
}

template <typename T> __global__ void gate_back_kernel(T *dx, T *dg, const T *dy, gate_args a)
{
    grid_begin();
    int c = blockIdx.y * THREADS + threadIdx.x;
    if (c >= a.width) return;
    int64_t at = (int64_t)blockIdx.x * a.width + c, at_g = blockIdx.x * a.g_stride + c;
    float g = to_f32(((const T *)a.g)[at_g]), s = sigmoid(g), d = to_f32(dy[at]);
    float slope = a.kind == GATE_SILU ? s * (1.f + g * (1.f - s)) : s * (1.f - s);
    dg[at_g] = from_f32<T>(d * to_f32(((const T *)a.x)[at]) * slope);
    dx[at] = from_f32<T>(d * open_to(a.kind, g));
}

void cuda_gate(struct device *dev, void *y, const struct gate_args *a)
{
    if (a->rows <= 0 || a->width <= 0) return;
    with_type(a->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "gate", gate_kernel<T>, dim3(a->rows, ceil_div(a->width, THREADS)),
                    THREADS, 0, (T *)y, *a);
    });
}

void cuda_gate_back(struct device *dev, void *dx, void *dg, const void *dy,
                    const struct gate_args *a)
{
    if (a->rows <= 0 || a->width <= 0) return;
    with_type(a->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "gate_back", gate_back_kernel<T>,
                    dim3(a->rows, ceil_div(a->width, THREADS)), THREADS, 0, (T *)dx, (T *)dg,
                    (const T *)dy, *a);
    });
}

template <typename T>
__global__ void split_gate_kernel(T *qkv, T *gate, T *fused, int n_heads, int head_dim, int kv,
                                  bool join)
{
    grid_begin();
    int c = blockIdx.y * THREADS + threadIdx.x, q = n_heads * head_dim;
    if (c >= 2 * q + kv) return;
    int head = c / head_dim;
    bool is_gate = c < 2 * q && head % 2;
    int to = c < 2 * q ? head / 2 * head_dim + c % head_dim : c - q;
    T *split =
        is_gate ? gate + (int64_t)blockIdx.x * q + to : qkv + (int64_t)blockIdx.x * (q + kv) + to;
    T *both = fused + (int64_t)blockIdx.x * (2 * q + kv) + c;
    *(join ? both : split) = *(join ? split : both);
}

void cuda_split_gate(struct device *dev, void *qkv, void *gate, void *fused, int rows,
                     const struct attn_shape *s, bool join)
{
    int width = 2 * (s->n_heads + s->n_kv_heads) * s->head_dim;
    if (rows <= 0) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "split_gate", split_gate_kernel<T>, dim3(rows, ceil_div(width, THREADS)),
                    THREADS, 0, (T *)qkv, (T *)gate, (T *)fused, s->n_heads, s->head_dim,
                    2 * s->n_kv_heads * s->head_dim, join);
    });
}
