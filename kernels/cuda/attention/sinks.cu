/* sinks.cu: the gradient of attention's sinks (kernels/cpu/sinks.c has the formula). A block has a
 * head and walks the rows, one a warp; each sum has a fixed order. */
#include "kernels/cuda/cuda.cuh"

#define WARPS 32

template <typename T>
__global__ void __launch_bounds__(WARPS * 32)
    sinks_back_kernel(float *dsinks, const T *dout, const T *out, const float *lse, const T *sinks,
                      int rows, int heads, int dim)
{
    grid_begin();
    __shared__ float sums[WARPS];
    const int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float sink = to_f32(sinks[h]);
    float sum = 0;
#pragma unroll 4
    for (int r = warp; r < rows; r += WARPS) {
        const int64_t at = (int64_t)r * heads + h;
        float inner = 0;
        for (int c = lane; c < dim; c += 32)
            inner += to_f32(dout[at * dim + c]) * to_f32(out[at * dim + c]);
        sum -= expf(sink - lse[at]) * lanes_sum(inner);
    }
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = lanes_sum(sums[lane]);
    if (lane == 0) dsinks[h] += sum;
}

void cuda_attn_sinks_back(struct device *dev, float *dsinks, const void *dout, const void *out,
                          const float *lse, int rows, const struct attn_shape *s)
{
    if (rows <= 0) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "attn_sinks_back", sinks_back_kernel<T>, s->n_heads, WARPS * 32, 0, dsinks,
                    (const T *)dout, (const T *)out, lse, (const T *)s->sinks, rows, s->n_heads,
                    s->head_dim);
    });
}
