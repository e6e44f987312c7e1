/* act.cuh: the activation functions (kernels/cpu/act.c has the formulas). Private to kernels/cuda.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_ACT_CUH
#define KERNELS_CUDA_ACT_CUH

#include "kernels/cuda/cuda.cuh"

INLINE float sigmoid(float x)
{
    return 1.f / (1.f + expf(-x));
}

// GELU's tanh form is x * sigmoid(2 u), because (1 + tanh u) / 2 = sigmoid(2 u).
INLINE float gelu_tanh_2u(float x)
{
    return 2.f * 0.7978845608f * (x + 0.044715f * x * x * x);
}

INLINE float activate(float x, act_kind kind)
{
    if (kind == ACT_SILU) return x * sigmoid(x);
    if (kind == ACT_GELU_TANH) return x * sigmoid(gelu_tanh_2u(x));
    if (kind == ACT_RELU2) return x > 0.f ? x * x : 0.f;
    if (kind == ACT_RELU) return fmaxf(x, 0.f);
    return 0.5f * x * (1.f + erff(x * 0.70710678f));
}

// activate() of N numbers, side by side: a division branches, since its result may be subnormal,
// and the next one waits for that; so there is one branch for all.
template <int N> INLINE void activate_all(float (&x)[N], act_kind kind)
{
    bool near = kind == ACT_SILU;
    unrolled<N>([&](int i) { near = near && x[i] > -87.f; }); // 1 + e^87 is below 2^126
    if (!near) {
        unrolled<N>([&](int i) { x[i] = activate(x[i], kind); });
        return;
    }
    unrolled<N>([&](int i) {
        const float sum = 1.f + expf(-x[i]);
        float inverse;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
        x[i] *= __fmaf_rn(inverse, -__fmaf_rn(sum, inverse, -1.f), inverse); // as 1 / sum is
    });
}

// What ACT_CLAMPED makes of a gate and an up.
struct clamped_pair {
    float gate, up, share; // share: the sigmoid

    INLINE clamped_pair(float g, float u, const act_shape &s)
        : gate(fminf(g, s.limit)), up(fmaxf(fminf(u, s.limit), -s.limit)),
          share(sigmoid(s.alpha * gate))
    {
    }
    INLINE float value() const { return gate * share * (up + 1.f); }
};

#endif
