/* experts_bias.cu: biases of experts' matmuls, over rows sorted by expert, and their gradients. A
 * column's sum over an expert's rows is one warp lane's and its seven neighbours', in fixed order.
 */
#include "kernels/cuda/cuda.cuh"

#define THREADS 128
#define SLOTS   8 // rows that a block of the gradient adds at a time

// The expert of a sorted row.
__device__ __forceinline__ int expert_of(const int32_t *offsets, int n_experts, int row)
{
    int first = 0;
    for (int last = n_experts - 1; first < last;) {
        int middle = (first + last + 1) / 2;
        if (offsets[middle] <= row)
            first = middle;
        else
            last = middle - 1;
    }
    return first;
}

// A thread's V columns: block x is the row.
template <typename T, int V>
__global__ void bias_kernel(T *y, const T *bias, const int32_t *offsets, expert_rows s)
{
    grid_begin();
    int c = (blockIdx.y * THREADS + threadIdx.x) * V;
    if (c >= s.width) return;
    int e = expert_of(offsets, s.n_experts, blockIdx.x);
    float a[V], b[V];
    T *to = y + (int64_t)blockIdx.x * s.width + c;
    load<T, V>(a, to);
    load<T, V>(b, bias + (int64_t)e * s.width + c);
#pragma unroll
    for (int i = 0; i < V; i++) a[i] += b[i];
    store<T, V>(to, a);
}

// Block (x, y): 32 columns of expert y.
template <typename T>
__global__ void __launch_bounds__(SLOTS * 32)
    bias_back_kernel(float *dbias, const T *dy, const int32_t *offsets, int width)
{
    grid_begin();
    __shared__ float shared[SLOTS][33];
    int lane = threadIdx.x % 32, slot = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    int end = offsets[blockIdx.y + 1];
    float sum = 0;
    if (c < width)
#pragma unroll 4
        for (int r = offsets[blockIdx.y] + slot; r < end; r += SLOTS)
            sum += to_f32(dy[(int64_t)r * width + c]);
    shared[slot][lane] = sum;
    __syncthreads();
    if (slot > 0 || c >= width) return;
    float total = 0;
    for (int s = 0; s < SLOTS; s++) total += shared[s][lane];
    dbias[(int64_t)blockIdx.y * width + c] += total;
}

void cuda_experts_bias(struct device *dev, void *y, const void *bias, const int32_t *offsets,
                       const struct expert_rows *s)
{
    if (s->rows <= 0 || s->width <= 0) return;
    bool fits = aligned(16, {y, bias}, {(int64_t)(s->width * dtype_size(s->dt))});
    with_bf16_wide(s->dt, fits, [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        cuda_launch(dev, "experts_bias", bias_kernel<T, V>,
                    dim3(s->rows, ceil_div(s->width, THREADS * V)), THREADS, 0, (T *)y,
                    (const T *)bias, offsets, *s);
    });
}

void cuda_experts_bias_back(struct device *dev, float *dbias, const void *dy,
                            const int32_t *offsets, const struct expert_rows *s)
{
    if (s->rows <= 0 || s->width <= 0) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "experts_bias_back", bias_back_kernel<T>,
                    dim3(ceil_div(s->width, 32), s->n_experts), SLOTS * 32, 0, dbias, (const T *)dy,
                    offsets, s->width);
    });
}
