/* act.cu: activation functions, gated (SwiGLU, GeGLU) and plain, the logits' soft cap, and their
 * gradients. One pass, 16-byte accesses; the kind is a run-time number, for the loads bound these.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/rows/act.cuh"
#include <algorithm>

#define THREADS 128

__device__ __forceinline__ float derivative(float x, act_kind kind)
{
    if (kind == ACT_SILU) {
        float s = sigmoid(x);
        return s * (1.f + x * (1.f - s));
    }
    if (kind == ACT_GELU_TANH) {
        float s = sigmoid(gelu_tanh_2u(x));
        return s + x * s * (1.f - s) * 2.f * 0.7978845608f * (1.f + 3.f * 0.044715f * x * x);
    }
    return 0.5f * (1.f + erff(x * 0.70710678f)) + x * 0.3989422804f * expf(-0.5f * x * x);
}

// Blocks of as many threads as a row has groups of V columns, and of several rows where these are
// few and rows many.
static dim3 act_block(const struct act_shape *s, int v)
{
    int across = std::min(THREADS, ceil_div(ceil_div(s->width, v), 32) * 32);
    return dim3(across, s->rows >= 4096 ? 4 * THREADS / across : 1);
}

static dim3 act_grid(const struct act_shape *s, int v, dim3 block)
{
    return dim3(ceil_div(s->rows, block.y), ceil_div(s->width, block.x * v));
}

// Where a thread's V columns are; false where there are none.
template <int V>
__device__ __forceinline__ bool act_place(int64_t &ret_row, int &ret_column, const act_shape &s)
{
    ret_row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    ret_column = (blockIdx.y * blockDim.x + threadIdx.x) * V;
    return ret_row < s.rows && ret_column < s.width;
}

template <typename T, int V> __global__ void act_kernel(T *y, const T *x, act_shape s)
{
    grid_begin_early();
    const int width = s.width;
    const bool gated = s.gated;
    int64_t row;
    int c;
    if (!act_place<V>(row, c, s)) return;
    const T *in = x + row * (gated ? 2 : 1) * width + c;
    float gate[V], up[V];
    load<T, V>(gate, in);
    if (gated) load<T, V>(up, in + width);
#pragma unroll
    for (int i = 0; i < V; i++)
        gate[i] = s.kind == ACT_CLAMPED ? clamped_pair(gate[i], up[i], s).value()
                                        : activate(gate[i], s.kind) * (gated ? up[i] : 1.f);
    store<T, V>(y + row * width + c, gate);
}

// From gate and up to their gradients; what is clamped has none. Gives y again.
__device__ __forceinline__ float clamped_back(float &gate, float &up, float grad,
                                              const act_shape &s)
{
    const clamped_pair c(gate, up, s);
    float slope = c.share * (1.f + s.alpha * c.gate * (1.f - c.share));
    gate = gate <= s.limit ? grad * (c.up + 1.f) * slope : 0.f;
    up = up == c.up ? grad * c.gate * c.share : 0.f;
    return c.value();
}

__device__ __forceinline__ float act_back(float &gate, float &up, float grad, const act_shape &s)
{
    if (s.kind == ACT_CLAMPED) return clamped_back(gate, up, grad, s);
    float dgate = grad * derivative(gate, s.kind), value = activate(gate, s.kind);
    float y = value * (s.gated ? up : 1.f);
    gate = s.gated ? dgate * up : dgate;
    up = grad * value;
    return y;
}

template <typename T, int V>
__global__ void act_back_kernel(T *dx, T *y, const T *dy, const T *x, act_shape s)
{
    grid_begin();
    const int width = s.width;
    const bool gated = s.gated;
    int64_t row;
    int c;
    if (!act_place<V>(row, c, s)) return;
    int64_t at = row * (gated ? 2 : 1) * width + c;
    float gate[V], up[V], grad[V], again[V];
    load<T, V>(gate, x + at);
    load<T, V>(grad, dy + row * width + c);
    if (gated) load<T, V>(up, x + at + width);
#pragma unroll
    for (int i = 0; i < V; i++) again[i] = act_back(gate[i], up[i], grad[i], s);
    store<T, V>(dx + at, gate);
    if (gated) store<T, V>(dx + at + width, up);
    if (y) store<T, V>(y + row * width + c, again);
}

void cuda_act(struct device *dev, void *y, const void *x, const struct act_shape *s)
{
    if (s->rows <= 0 || s->width <= 0) return;
    bool fits = aligned(16, {y, x}, {(int64_t)(s->width * dtype_size(s->dt))});
    with_bf16_wide(s->dt, fits, [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        dim3 block = act_block(s, V);
        cuda_launch(dev, "act", act_kernel<T, V>, act_grid(s, V, block), block, 0, y, x, *s);
    });
}

void cuda_act_back(struct device *dev, void *dx, void *y, const void *dy, const void *x,
                   const struct act_shape *s)
{
    if (s->rows <= 0 || s->width <= 0) return;
    bool fits = aligned(16, {dx, y, dy, x}, {(int64_t)(s->width * dtype_size(s->dt))});
    with_bf16_wide(s->dt, fits, [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        dim3 block = act_block(s, V);
        cuda_launch(dev, "act_back", act_back_kernel<T, V>, act_grid(s, V, block), block, 0, dx, y,
                    dy, x, *s);
    });
}

// ---- the logits' soft cap ----------------------------------------------------------------------

template <int V> __global__ void softcap_kernel(float *x, int64_t n, float cap)
{
    grid_begin();
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (i >= n) return;
    float a[V];
    load<float, V>(a, x + i);
#pragma unroll
    for (int k = 0; k < V; k++) a[k] = cap * tanhf(a[k] / cap);
    store<float, V>(x + i, a);
}

template <int V>
__global__ void softcap_back_kernel(float *dx, const float *capped, int64_t n, float cap)
{
    grid_begin();
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (i >= n) return;
    float g[V], a[V];
    load<float, V>(g, dx + i);
    load<float, V>(a, capped + i);
#pragma unroll
    for (int k = 0; k < V; k++) {
        float t = a[k] / cap;
        g[k] *= 1.f - t * t;
    }
    store<float, V>(dx + i, g);
}

void cuda_softcap(struct device *dev, float *x, int64_t n, float cap)
{
    if (n <= 0) return;
    if (aligned(16, {x}, {n * 4}))
        cuda_launch(dev, "softcap", softcap_kernel<4>, ceil_div(n, 4 * THREADS), THREADS, 0, x, n,
                    cap);
    else
        cuda_launch(dev, "softcap", softcap_kernel<1>, ceil_div(n, THREADS), THREADS, 0, x, n, cap);
}

void cuda_softcap_back(struct device *dev, float *dx, const float *capped, int64_t n, float cap)
{
    if (n <= 0) return;
    if (aligned(16, {dx, capped}, {n * 4}))
        cuda_launch(dev, "softcap_back", softcap_back_kernel<4>, ceil_div(n, 4 * THREADS), THREADS,
                    0, dx, capped, n, cap);
    else
        cuda_launch(dev, "softcap_back", softcap_back_kernel<1>, ceil_div(n, THREADS), THREADS, 0,
                    dx, capped, n, cap);
}

// ---- gates -------------------------------------------------------------------------------------

// A gate beside a value, its gradient, and the rows of attention whose queries have one.
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
    launch_typed(a->dt, dev, "gate", gate_kernel, dim3(a->rows, ceil_div(a->width, THREADS)),
                 THREADS, 0, y, *a);
}

void cuda_gate_back(struct device *dev, void *dx, void *dg, const void *dy,
                    const struct gate_args *a)
{
    if (a->rows <= 0 || a->width <= 0) return;
    launch_typed(a->dt, dev, "gate_back", gate_back_kernel,
                 dim3(a->rows, ceil_div(a->width, THREADS)), THREADS, 0, dx, dg, dy, *a);
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
    launch_typed(s->dt, dev, "split_gate", split_gate_kernel, dim3(rows, ceil_div(width, THREADS)),
                 THREADS, 0, qkv, gate, fused, s->n_heads, s->head_dim,
                 2 * s->n_kv_heads * s->head_dim, join);
}
