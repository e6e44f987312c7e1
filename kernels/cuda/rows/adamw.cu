/* adamw.cu: the optimizer step and the sum of squares behind gradient clipping.
 *
 * The step is the pause of generation at a publish, so it moves each byte once: for a bf16 weight
 * with its residual 28 bytes a parameter where the moments are f32, 20 where they are bf16, 16
 * where they are 8-bit codes. Its arithmetic is spelt in single rounded operations, none fused, as
 * in kernels/cpu/adamw.c, and the moments' rounding is the same code (kernels/moments.h): f32
 * weights, bf16 weights with residual, CPU and CUDA give the same bits.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda.cuh"
#include "kernels/moments.h"
#include <algorithm>

#define THREADS 256

INLINE float adamw_step(float p, float &m, float &v, float g, const adamw_factors &c)
{
    p = __fsub_rn(p, __fmul_rn(c.decay, p));
    m = __fadd_rn(__fmul_rn(c.beta1, m), __fmul_rn(c.rest1, g));
    v = __fadd_rn(__fmul_rn(c.beta2, v), __fmul_rn(c.rest2, __fmul_rn(g, g)));
    float scale = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), c.root_correction2), c.eps);
    return __fsub_rn(p, __fdiv_rn(__fmul_rn(c.step, m), scale));
}

// A moment in memory: f32, bf16 bits, or an 8-bit code of its block's largest (scale; inverse: of
// what the block's largest is now).
template <typename M> INLINE float moment_of(M x, float scale, bool squares)
{
    if constexpr (sizeof(M) == 4)
        return x;
    else if constexpr (sizeof(M) == 2)
        return f32_from_bf16(x);
    else
        return moment_unpack(x, scale, squares);
}
template <typename M> INLINE M moment_kept(float x, float inverse, uint32_t noise, bool squares)
{
    if constexpr (sizeof(M) == 4)
        return x;
    else if constexpr (sizeof(M) == 2)
        return moment_to_bf16(x, noise);
    else
        return moment_pack(x, inverse, noise, squares);
}

#define LANE 4 // parameters of a lane: a warp does one block of 8-bit moments
static_assert(LANE * 32 == MOMENT_BLOCK, "a warp is a block");

// W is float, or uint16_t: the upper half of the master beside `low`. M is float, uint16_t (bf16)
// or uint8_t.
template <typename W, typename M>
__global__ void __launch_bounds__(THREADS)
    adamw_kernel(W *w, uint16_t *low, moments to, const float *grad, int64_t n, adamw shape,
                 adamw_factors c, bool wide)
{
    grid_wait(); // no release before all weights are written
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * LANE;
    const int64_t block = i / MOMENT_BLOCK;
    if (block * MOMENT_BLOCK >= n) return; // the whole warp
    const int count = i + LANE <= n ? LANE : i < n ? (int)(n - i) : 0;
    M *const m_at = (M *)to.m + i, *const v_at = (M *)to.v + i;
    const float clip = shape.grad_scale[0];
    float m_scale = 0, v_scale = 0;
    if (sizeof(M) == 1) {
        m_scale = to.m_scale[block];
        v_scale = to.v_scale[block];
    }
    pack<float, LANE> gs = load_some<float, LANE>(grad + i, count, wide);
    pack<W, LANE> ws = load_some<W, LANE>(w + i, count, wide);
    pack<uint16_t, LANE> lows = {};
    if (sizeof(W) == 2) lows = load_some<uint16_t, LANE>(low + i, count, wide);
    pack<M, LANE> ms = load_some<M, LANE>(m_at, count, wide),
                  vs = load_some<M, LANE>(v_at, count, wide);
    float m[LANE], v[LANE], m_max = 0, v_max = 0;
#pragma unroll
    for (int k = 0; k < LANE; k++) {
        m[k] = moment_of<M>(ms.at[k], m_scale, false);
        v[k] = moment_of<M>(vs.at[k], v_scale, true);
        const float g = __fmul_rn(gs.at[k], clip);
        if (sizeof(W) == 4) {
            ws.at[k] = (W)adamw_step((float)ws.at[k], m[k], v[k], g, c);
        } else {
            float p = adamw_step(master_join((uint16_t)ws.at[k], lows.at[k]), m[k], v[k], g, c);
            ws.at[k] = (W)master_high(p);
            lows.at[k] = master_low(p);
        }
        m_max = fmaxf(m_max, fabsf(m[k]));
        v_max = fmaxf(v_max, v[k]);
    }
    if (sizeof(M) == 1) {
        m_max = lanes_max(m_max);
        v_max = lanes_max(v_max);
        if (threadIdx.x % 32 == 0) {
            to.m_scale[block] = m_max;
            to.v_scale[block] = v_max;
        }
    }
    const float m_inverse = moment_inverse(m_max), v_inverse = moment_inverse(v_max);
#pragma unroll
    for (int k = 0; k < LANE; k++) {
        const uint32_t noise =
            sizeof(M) == 4 ? 0 : moment_noise((uint64_t)(shape.first + i + k), shape.step);
        ms.at[k] = moment_kept<M>(m[k], m_inverse, noise >> 16, false);
        vs.at[k] = moment_kept<M>(v[k], v_inverse, noise & 0xffff, true);
    }
    store_some(w + i, ws, count, wide);
    if (sizeof(W) == 2) store_some(low + i, lows, count, wide);
    store_some(m_at, ms, count, wide);
    store_some(v_at, vs, count, wide);
}

template <typename W>
static void adamw_kinds(struct device *dev, W *w, uint16_t *low, const moments &to,
                        const float *grad, int64_t n, const adamw &shape)
{
    const auto kernel = to.kind == MOMENTS_F32    ? adamw_kernel<W, float>
                        : to.kind == MOMENTS_BF16 ? adamw_kernel<W, uint16_t>
                                                  : adamw_kernel<W, uint8_t>;
    const bool wide = aligned(16, {w, low, to.m, to.v, grad}, {});
    if (!wide && to.kind == MOMENTS_8BIT)
        device_fail(dev, "adamw: 8-bit moments need arrays aligned to 16 bytes");
    else
        cuda_launch(dev, "adamw", kernel, ceil_div(n, THREADS * LANE), THREADS, 0, w, low, to, grad,
                    n, shape, adamw_factors_of(&shape), wide);
}

void cuda_adamw(struct device *dev, void *w, uint16_t *low, const struct moments *moments,
                const float *grad, int64_t n, const struct adamw *shape, enum dtype w_dt)
{
    if (!adamw_takes(dev, w_dt, low) || n <= 0) return;
    if (w_dt == DT_F32)
        adamw_kinds<float>(dev, (float *)w, NULL, *moments, grad, n, *shape);
    else
        adamw_kinds<uint16_t>(dev, (uint16_t *)w, low, *moments, grad, n, *shape);
}

// ---- sum of squares ----------------------------------------------------------------------------

#define SQUARE_BLOCKS 1024

INLINE double block_sum_f64(double x)
{
    __shared__ double shared[THREADS / 32];
    x = lanes_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int i = 0; i < THREADS / 32; i++) x += shared[i];
    return x;
}

template <int V>
__global__ void __launch_bounds__(THREADS)
    squares_kernel(double *out, double *parts, unsigned *ticket, const float *x, int64_t n)
{
    grid_begin();
    double sum = 0;
    int64_t step = (int64_t)gridDim.x * THREADS * V;
#pragma unroll 4
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V; i < n; i += step) {
        float a[V];
        load<float, V>(a, x + i);
        unrolled<V>([&](int k) { sum += (double)a[k] * a[k]; });
    }
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
    if (!last_block(ticket, gridDim.x)) return;
    sum = 0;
    for (int i = threadIdx.x; i < (int)gridDim.x; i += THREADS) sum += __ldcg(parts + i);
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) out[0] = sum;
}

void cuda_sum_squares(struct device *dev, double *out, const float *x, int64_t n)
{
    double *parts = (double *)cuda_workspace(dev, SQUARE_BLOCKS * sizeof *parts);
    if (!parts) return;
    bool fits = aligned(16, {x}, {n * 4});
    const int blocks = std::clamp(ceil_div(n, THREADS * 4), 1, SQUARE_BLOCKS);
    cuda_launch(dev, "sum_squares", fits ? squares_kernel<4> : squares_kernel<1>, blocks, THREADS,
                0, out, parts, cuda_use(dev)->tickets, x, n);
}
