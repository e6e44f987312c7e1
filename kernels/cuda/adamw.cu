/* adamw.cu: the optimizer step and the sum of squares behind gradient clipping.
 *
 * The step is the pause of generation at a publish, so it moves each byte once: 28 bytes a
 * parameter for a bf16 weight with its residual and f32 moments. Its arithmetic is spelt in single
 * rounded operations, none fused, as in kernels/cpu/adamw.c: f32 weights, bf16 weights with
 * residual, CPU and CUDA give the same bits.
 */
#include "kernels/cuda/cuda.cuh"

#define THREADS 256

struct coefficients {
    float decay, beta1, rest1, beta2, rest2, step, root_correction2, eps;
};

__device__ __forceinline__ float adamw_step(float p, float &m, float &v, float g,
                                            const coefficients &c)
{
    p = __fsub_rn(p, __fmul_rn(c.decay, p));
    m = __fadd_rn(__fmul_rn(c.beta1, m), __fmul_rn(c.rest1, g));
    v = __fadd_rn(__fmul_rn(c.beta2, v), __fmul_rn(c.rest2, __fmul_rn(g, g)));
    float scale = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), c.root_correction2), c.eps);
    return __fsub_rn(p, __fdiv_rn(__fmul_rn(c.step, m), scale));
}

// W is float, or uint16_t: the upper half of the master beside `low`. A thread does V parameters.
template <typename W, int V>
__global__ void __launch_bounds__(THREADS)
    adamw_kernel(W *w, uint16_t *low, float *m, float *v, const float *grad,
                 const float *grad_scale, int64_t n, coefficients c)
{
    grid_wait();                     // no early release: what comes next may read these weights
    constexpr int F = V < 4 ? V : 4; // floats an access
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (i >= n) return;
    float clip = grad_scale[0];
    pack<float, F> gs[V / F], ms[V / F], vs[V / F];
    pack<W, sizeof(W) == 4 ? F : V> ws[sizeof(W) == 4 ? V / F : 1];
    pack<uint16_t, V> lows;
#pragma unroll
    for (int k = 0; k < V / F; k++) {
        gs[k] = reinterpret_cast<const pack<float, F> *>(grad + i)[k];
        ms[k] = reinterpret_cast<const pack<float, F> *>(m + i)[k];
        vs[k] = reinterpret_cast<const pack<float, F> *>(v + i)[k];
        if (sizeof(W) == 4) ws[k] = reinterpret_cast<decltype(&ws[0])>(w + i)[k];
    }
    if (sizeof(W) == 2) {
        ws[0] = *reinterpret_cast<decltype(&ws[0])>(w + i);
        lows = *reinterpret_cast<const pack<uint16_t, V> *>(low + i);
    }
#pragma unroll
    for (int k = 0; k < V; k++) {
        float &mk = ms[k / F].at[k % F], &vk = vs[k / F].at[k % F];
        float g = __fmul_rn(gs[k / F].at[k % F], clip);
        if (sizeof(W) == 4) {
            W &p = ws[k / F].at[k % F];
            p = (W)adamw_step((float)p, mk, vk, g, c);
        } else {
            float p = master_join((uint16_t)ws[0].at[k], lows.at[k]);
            p = adamw_step(p, mk, vk, g, c);
            ws[0].at[k] = (W)master_high(p);
            lows.at[k] = master_low(p);
        }
    }
#pragma unroll
    for (int k = 0; k < V / F; k++) {
        reinterpret_cast<pack<float, F> *>(m + i)[k] = ms[k];
        reinterpret_cast<pack<float, F> *>(v + i)[k] = vs[k];
        if (sizeof(W) == 4) reinterpret_cast<decltype(&ws[0])>(w + i)[k] = ws[k];
    }
    if (sizeof(W) == 2) {
        *reinterpret_cast<decltype(&ws[0])>(w + i) = ws[0];
        *reinterpret_cast<pack<uint16_t, V> *>(low + i) = lows;
    }
}

template <typename W, int V>
static void adamw_range(struct device *dev, W *w, uint16_t *low, float *m, float *v,
                        const float *grad, const float *grad_scale, int64_t n,
                        const coefficients &c)
{
    if (n <= 0) return;
    cuda_launch(dev, "adamw", adamw_kernel<W, V>, ceil_div(n, THREADS * V), THREADS, 0, w, low, m,
                v, grad, grad_scale, n, c);
}

// The multiple of V parameters wide, the rest one by one.
template <typename W, int V>
static void adamw_all(struct device *dev, W *w, uint16_t *low, float *m, float *v,
                      const float *grad, const float *grad_scale, int64_t n, const coefficients &c)
{
    int64_t whole = aligned(16, {w, low, m, v, grad}, {}) ? n / V * V : 0;
    adamw_range<W, V>(dev, w, low, m, v, grad, grad_scale, whole, c);
    adamw_range<W, 1>(dev, w + whole, low ? low + whole : low, m + whole, v + whole, grad + whole,
                      grad_scale, n - whole, c);
}

void cuda_adamw(struct device *dev, void *w, uint16_t *low, float *m, float *v, const float *grad,
                const float *grad_scale, int64_t n, const struct adamw *shape, enum dtype w_dt)
{
    if (!(w_dt == DT_F32 && !low) && !(w_dt == DT_BF16 && low)) {
        device_fail(dev, "adamw: weights are f32, or bf16 with their lower halves; these are %s %s",
                    dtype_name(w_dt), low ? "with" : "without");
        return;
    }
    coefficients c;
    c.decay = shape->lr * shape->weight_decay;
    c.beta1 = shape->beta1;
    c.rest1 = 1.0f - shape->beta1;
    c.beta2 = shape->beta2;
    c.rest2 = 1.0f - shape->beta2;
    c.step = shape->lr / shape->bias_correction1;
    c.root_correction2 = sqrtf(shape->bias_correction2);
    c.eps = shape->eps;
    if (w_dt == DT_F32)
        adamw_all<float, 4>(dev, (float *)w, NULL, m, v, grad, grad_scale, n, c);
    else
        adamw_all<uint16_t, 8>(dev, (uint16_t *)w, low, m, v, grad, grad_scale, n, c);
    cuda_use(dev)->plain_next = true;
}

// ---- sum of squares
// ------------------------------------------------------------------------------

#define SQUARE_BLOCKS 1024

__device__ __forceinline__ double block_sum_f64(double x)
{
    __shared__ double shared[THREADS / 32];
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int i = 0; i < THREADS / 32; i++) x += shared[i];
    return x;
}

template <int V>
__global__ void __launch_bounds__(THREADS) squares_kernel(double *parts, const float *x, int64_t n)
{
    grid_begin();
    double sum = 0;
    int64_t step = (int64_t)gridDim.x * THREADS * V;
#pragma unroll 4
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V; i < n; i += step) {
        float a[V];
        load<float, V>(a, x + i);
#pragma unroll
        for (int k = 0; k < V; k++) sum += (double)a[k] * a[k];
    }
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(THREADS)
    squares_end_kernel(double *out, const double *parts, int n)
{
    grid_begin();
    double sum = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) sum += parts[i];
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) out[0] = sum;
}

void cuda_sum_squares(struct device *dev, double *out, const float *x, int64_t n)
{
    double *parts = (double *)cuda_workspace(dev, SQUARE_BLOCKS * sizeof *parts);
    if (!parts) return;
    bool fits = aligned(16, {x}, {n * 4});
    int64_t want = (n + THREADS * 4 - 1) / (THREADS * 4);
    int blocks = want < 1 ? 1 : want > SQUARE_BLOCKS ? SQUARE_BLOCKS : (int)want;
    if (fits)
        cuda_launch(dev, "sum_squares", squares_kernel<4>, blocks, THREADS, 0, parts, x, n);
    else
        cuda_launch(dev, "sum_squares", squares_kernel<1>, blocks, THREADS, 0, parts, x, n);
    cuda_launch(dev, "sum_squares", squares_end_kernel, 1, THREADS, 0, out, (const double *)parts,
                blocks);
}
