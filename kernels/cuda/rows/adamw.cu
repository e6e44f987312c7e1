/* adamw.cu: the optimizer step and the sum of squares behind gradient clipping.
 *
 * The step is the pause of generation at a publish, so it moves each byte once: for a bf16 weight
 * with its residual 28 bytes a parameter where the moments are f32, 20 where they are bf16, 16
 * where they are 8-bit codes. Its arithmetic is spelt in single rounded operations, none fused, as
 * in kernels/cpu/adamw.c, and the moments' rounding is the same code (kernels/moments.h): f32
 * weights, bf16 weights with residual, CPU and CUDA give the same bits.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/moments.h"

#define THREADS 256

struct coefficients {
    float decay, beta1, rest1, beta2, rest2, step, root_correction2, eps;
    const float *grad_scale; // (1), device
    uint32_t steps;          // seeds the rounding
    int64_t number;          // of the first parameter, for the same
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

// A moment in memory: float, or bf16 bits.
__device__ __forceinline__ float moment_load(float x)
{
    return x;
}
__device__ __forceinline__ float moment_load(uint16_t x)
{
    return f32_from_bf16(x);
}
__device__ __forceinline__ void moment_store(float &to, float x, uint32_t)
{
    to = x;
}
__device__ __forceinline__ void moment_store(uint16_t &to, float x, uint32_t noise)
{
    to = moment_to_bf16(x, noise);
}

// W is float, or uint16_t: the upper half of the master beside `low`. M is float or uint16_t
// (bf16). A thread does V parameters; `first` is the number of the range's first one.
template <typename W, typename M, int V>
__global__ void __launch_bounds__(THREADS)
    adamw_kernel(W *w, uint16_t *low, M *m, M *v, const float *grad, int64_t first, int64_t n,
                 coefficients c)
{
    grid_wait();                     // no release before all weights are written
    constexpr int F = V < 4 ? V : 4; // floats an access
    constexpr int FM = sizeof(M) == 4 ? F : V;
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (i >= n) return;
    float clip = c.grad_scale[0];
    pack<float, F> gs[V / F];
    pack<M, FM> ms[V / FM], vs[V / FM];
    pack<W, sizeof(W) == 4 ? F : V> ws[sizeof(W) == 4 ? V / F : 1];
    pack<uint16_t, V> lows;
#pragma unroll
    for (int k = 0; k < V / F; k++) {
        gs[k] = reinterpret_cast<const pack<float, F> *>(grad + i)[k];
        if (sizeof(W) == 4) ws[k] = reinterpret_cast<decltype(&ws[0])>(w + i)[k];
    }
#pragma unroll
    for (int k = 0; k < V / FM; k++) {
        ms[k] = reinterpret_cast<const pack<M, FM> *>(m + i)[k];
        vs[k] = reinterpret_cast<const pack<M, FM> *>(v + i)[k];
    }
    if (sizeof(W) == 2) {
        ws[0] = *reinterpret_cast<decltype(&ws[0])>(w + i);
        lows = *reinterpret_cast<const pack<uint16_t, V> *>(low + i);
    }
#pragma unroll
    for (int k = 0; k < V; k++) {
        float mk = moment_load(ms[k / FM].at[k % FM]), vk = moment_load(vs[k / FM].at[k % FM]);
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
        uint32_t noise =
            sizeof(M) == 4 ? 0 : moment_noise((uint64_t)(c.number + first + i + k), c.steps);
        moment_store(ms[k / FM].at[k % FM], mk, noise >> 16);
        moment_store(vs[k / FM].at[k % FM], vk, noise & 0xffff);
    }
#pragma unroll
    for (int k = 0; k < V / FM; k++) {
        reinterpret_cast<pack<M, FM> *>(m + i)[k] = ms[k];
        reinterpret_cast<pack<M, FM> *>(v + i)[k] = vs[k];
    }
    if (sizeof(W) == 4) {
#pragma unroll
        for (int k = 0; k < V / F; k++) reinterpret_cast<decltype(&ws[0])>(w + i)[k] = ws[k];
    } else {
        *reinterpret_cast<decltype(&ws[0])>(w + i) = ws[0];
        *reinterpret_cast<pack<uint16_t, V> *>(low + i) = lows;
    }
}

#define LANE 4 // parameters of a lane: a warp does one block of 8-bit moments
static_assert(LANE * 32 == MOMENT_BLOCK, "a warp is a block");

// `count` values at `from`, in one access where they are LANE; the rest are 0.
template <typename T> __device__ __forceinline__ pack<T, LANE> lane_load(const T *from, int count)
{
    pack<T, LANE> p = {};
    if (count == LANE) return *reinterpret_cast<const pack<T, LANE> *>(from);
#pragma unroll
    for (int k = 0; k < LANE; k++)
        if (k < count) p.at[k] = from[k];
    return p;
}

template <typename T>
__device__ __forceinline__ void lane_store(T *to, const pack<T, LANE> &p, int count)
{
    if (count == LANE) {
        *reinterpret_cast<pack<T, LANE> *>(to) = p;
        return;
    }
#pragma unroll
    for (int k = 0; k < LANE; k++)
        if (k < count) to[k] = p.at[k];
}

// The same with moments of 8 bits. Pointers are aligned to LANE elements.
template <typename W>
__global__ void __launch_bounds__(THREADS)
    adamw_8bit_kernel(W *w, uint16_t *low, moments to, const float *grad, int64_t n, coefficients c)
{
    grid_wait();
    int64_t block = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    int64_t i = block * MOMENT_BLOCK + threadIdx.x % 32 * LANE;
    if (block * MOMENT_BLOCK >= n) return; // the whole warp
    int count = i + LANE <= n ? LANE : i < n ? (int)(n - i) : 0;
    uint8_t *m_codes = (uint8_t *)to.m + i, *v_codes = (uint8_t *)to.v + i;
    float clip = c.grad_scale[0], m_scale = to.m_scale[block], v_scale = to.v_scale[block];
    pack<float, LANE> gs = lane_load(grad + i, count);
    pack<W, LANE> ws = lane_load(w + i, count);
    pack<uint16_t, LANE> lows = {};
    if (sizeof(W) == 2) lows = lane_load<uint16_t>(low + i, count);
    pack<uint8_t, LANE> ms = lane_load<uint8_t>(m_codes, count);
    pack<uint8_t, LANE> vs = lane_load<uint8_t>(v_codes, count);
    float m[LANE], v[LANE], m_most = 0, v_most = 0;
#pragma unroll
    for (int k = 0; k < LANE; k++) {
        m[k] = moment_unpack_m(ms.at[k], m_scale);
        v[k] = moment_unpack_v(vs.at[k], v_scale);
        float g = __fmul_rn(gs.at[k], clip);
        if (sizeof(W) == 4) {
            ws.at[k] = (W)adamw_step((float)ws.at[k], m[k], v[k], g, c);
        } else {
            float p = adamw_step(master_join((uint16_t)ws.at[k], lows.at[k]), m[k], v[k], g, c);
            ws.at[k] = (W)master_high(p);
            lows.at[k] = master_low(p);
        }
        m_most = fmaxf(m_most, fabsf(m[k]));
        v_most = fmaxf(v_most, v[k]);
    }
    m_most = lanes_max(m_most);
    v_most = lanes_max(v_most);
    float m_inverse = moment_inverse(m_most), v_inverse = moment_inverse(v_most);
#pragma unroll
    for (int k = 0; k < LANE; k++) {
        uint32_t noise = moment_noise((uint64_t)(c.number + i + k), c.steps);
        ms.at[k] = moment_pack_m(m[k], m_inverse, noise >> 16);
        vs.at[k] = moment_pack_v(v[k], v_inverse, noise & 0xffff);
    }
    lane_store(w + i, ws, count);
    if (sizeof(W) == 2) lane_store(low + i, lows, count);
    lane_store(m_codes, ms, count);
    lane_store(v_codes, vs, count);
    if (threadIdx.x % 32 == 0) {
        to.m_scale[block] = m_most;
        to.v_scale[block] = v_most;
    }
}

// The multiple of V parameters wide, the rest one by one.
template <typename W, typename M, int V>
static void adamw_all(struct device *dev, W *w, uint16_t *low, M *m, M *v, const float *grad,
                      int64_t n, const coefficients &c)
{
    int64_t whole = aligned(16, {w, low, m, v, grad}, {}) ? n / V * V : 0;
    auto range = [&](auto kernel, int wide, int64_t first, int64_t count) {
        if (count > 0)
            cuda_launch(dev, "adamw", kernel, ceil_div(count, THREADS * wide), THREADS, 0,
                        w + first, low ? low + first : low, m + first, v + first, grad + first,
                        first, count, c);
    };
    range(adamw_kernel<W, M, V>, V, 0, whole);
    range(adamw_kernel<W, M, 1>, 1, whole, n - whole);
}

template <typename W, int V>
static void adamw_kinds(struct device *dev, W *w, uint16_t *low, const moments &moments,
                        const float *grad, int64_t n, const coefficients &c)
{
    void *m = moments.m, *v = moments.v;
    if (moments.kind == MOMENTS_F32)
        adamw_all<W, float, V>(dev, w, low, (float *)m, (float *)v, grad, n, c);
    else if (moments.kind == MOMENTS_BF16)
        adamw_all<W, uint16_t, V>(dev, w, low, (uint16_t *)m, (uint16_t *)v, grad, n, c);
    else if (!aligned(16, {w, low, m, v, grad}, {}))
        device_fail(dev, "adamw: 8-bit moments need arrays aligned to 16 bytes");
    else
        cuda_launch(dev, "adamw", adamw_8bit_kernel<W>, ceil_div(n, MOMENT_BLOCK * (THREADS / 32)),
                    THREADS, 0, w, low, moments, grad, n, c);
}

void cuda_adamw(struct device *dev, void *w, uint16_t *low, const struct moments *moments,
                const float *grad, int64_t n, const struct adamw *shape, enum dtype w_dt)
{
    if (!(w_dt == DT_F32 && !low) && !(w_dt == DT_BF16 && low)) {
        device_fail(dev, "adamw: weights are f32, or bf16 with their lower halves; these are %s %s",
                    dtype_name(w_dt), low ? "with" : "without");
        return;
    }
    if (n <= 0) return;
    coefficients c;
    c.decay = shape->lr * shape->weight_decay;
    c.beta1 = (float)shape->beta1;
    c.rest1 = (float)(1 - shape->beta1);
    c.beta2 = (float)shape->beta2;
    c.rest2 = (float)(1 - shape->beta2);
    c.step = shape->lr / shape->bias_correction1;
    c.root_correction2 = sqrtf(shape->bias_correction2);
    c.eps = shape->eps;
    c.grad_scale = shape->grad_scale;
    c.steps = shape->step;
    c.number = shape->first;
    if (w_dt == DT_F32)
        adamw_kinds<float, 4>(dev, (float *)w, NULL, *moments, grad, n, c);
    else
        adamw_kinds<uint16_t, 8>(dev, (uint16_t *)w, low, *moments, grad, n, c);
}

// ---- sum of squares ----------------------------------------------------------------------------

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
