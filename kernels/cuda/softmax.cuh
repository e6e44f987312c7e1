/* softmax.cuh: the online softmax of a row of logits that a block reads once: each thread keeps a
 * running maximum and sums relative to it (Milakov and Gimelshein 2018), which are then joined in a
 * fixed order. Private to kernels/cuda. */
#ifndef KERNELS_CUDA_SOFTMAX_CUH
#define KERNELS_CUDA_SOFTMAX_CUH

#include "kernels/cuda/cuda.cuh"

// Of e^(z - max), and where WEIGHTED of (z - max) e^(z - max).
template <bool WEIGHTED> struct running {
    float max, sum, weighted; // of nothing: -INFINITY, 0, 0
};

template <bool WEIGHTED>
__device__ __forceinline__ running<WEIGHTED> join(running<WEIGHTED> a, running<WEIGHTED> b)
{
    running<WEIGHTED> r = {fmaxf(a.max, b.max), 0, 0};
    if (r.max == -INFINITY) return a;
    float fa = expf(a.max - r.max), fb = expf(b.max - r.max);
    r.sum = a.sum * fa + b.sum * fb;
    if (!WEIGHTED) return r;
    // where f is 0 the shift may be infinite
    float sa = fa > 0 ? (a.weighted + a.sum * (a.max - r.max)) * fa : 0.f;
    float sb = fb > 0 ? (b.weighted + b.sum * (b.max - r.max)) * fb : 0.f;
    r.weighted = sa + sb;
    return r;
}

// Takes in the logits t .. t + V - 1 of a row, times `scale`.
template <int V, bool WEIGHTED>
__device__ __forceinline__ void take(running<WEIGHTED> &r, const float *row, int t, float scale)
{
    float z[V];
    load<float, V>(z, row + t);
    running<WEIGHTED> own = {-INFINITY, 0, 0};
#pragma unroll
    for (int i = 0; i < V; i++) own.max = fmaxf(own.max, z[i] *= scale);
    if (own.max > r.max) r = join(r, own);
    if (r.max == -INFINITY) return;
#pragma unroll
    for (int i = 0; i < V; i++) {
        float d = z[i] - r.max, e = expf(d);
        r.sum += e;
        if (WEIGHTED) r.weighted += e > 0 ? e * d : 0.f; // a logit of -inf adds nothing
    }
}

// Joins each warp's into `shared`, one a warp, for shared_join(); the block meets.
template <bool WEIGHTED>
__device__ __forceinline__ void lanes_join(running<WEIGHTED> r, running<WEIGHTED> *shared)
{
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        running<WEIGHTED> other = {__shfl_xor_sync(~0u, r.max, o), __shfl_xor_sync(~0u, r.sum, o),
                                   0};
        if (WEIGHTED) other.weighted = __shfl_xor_sync(~0u, r.weighted, o);
        r = join(r, other);
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = r;
    __syncthreads();
}

template <bool WEIGHTED>
__device__ __forceinline__ running<WEIGHTED> shared_join(const running<WEIGHTED> *shared)
{
    running<WEIGHTED> r = shared[0];
    for (int i = 1; i < (int)blockDim.x / 32; i++) r = join(r, shared[i]);
    return r;
}

#endif
