/* distill.cu: the divergence of a teacher's distribution from a student's, and its gradient. A
 * block owns a row and reads it twice: for both maxima and sums (an online softmax), and then for
 * what depends on both distributions. A row's result does not depend on the others. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda.cuh"

#define THREADS 1024

// ---- the online softmax of a row ---------------------------------------------------------------

// The largest logit and the sum of e^(z - max); of nothing: -INFINITY, 0. Each thread keeps one,
// and they are joined in a fixed order (Milakov and Gimelshein 2018).
struct running {
    float max, sum;
};

__device__ __forceinline__ running join(running a, running b)
{
    float max = fmaxf(a.max, b.max);
    if (max == -INFINITY) return a;
    return {max, a.sum * expf(a.max - max) + b.sum * expf(b.max - max)};
}

// Takes in the logits t .. t + V - 1 of a row, times `scale`.
template <int V>
__device__ __forceinline__ void take(running &r, const float *row, int t, float scale)
{
    float z[V];
    load<float, V>(z, row + t);
    running own = {-INFINITY, 0};
#pragma unroll
    for (int i = 0; i < V; i++) own.max = fmaxf(own.max, z[i] *= scale);
    if (own.max > r.max) r = join(r, own);
    if (r.max == -INFINITY) return;
#pragma unroll
    for (int i = 0; i < V; i++) r.sum += expf(z[i] - r.max);
}

// Joins each warp's into `shared`, one a warp, for shared_join(); the block meets.
__device__ __forceinline__ void lanes_join(running r, running *shared)
{
#pragma unroll
    for (int o = 16; o; o >>= 1)
        r = join(r, {__shfl_xor_sync(~0u, r.max, o), __shfl_xor_sync(~0u, r.sum, o)});
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = r;
    __syncthreads();
}

__device__ __forceinline__ running shared_join(const running *shared)
{
    running r = shared[0];
    for (int i = 1; i < (int)blockDim.x / 32; i++) r = join(r, shared[i]);
    return r;
}

// ---- the kernel --------------------------------------------------------------------------------

template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    distill_kernel(float *kl, float *overlap, T *dstudent, const float *student,
                   const float *teacher, int vocab, int teacher_vocab, float inverse, float slope)
{
    grid_begin();
    __shared__ running shared_p[THREADS / 32], shared_q[THREADS / 32];
    __shared__ float shared[32];
    const float *row_p = teacher + (int64_t)blockIdx.x * teacher_vocab;
    const float *row_q = student + (int64_t)blockIdx.x * vocab;
    running p = {-INFINITY, 0}, q = p;
#pragma unroll 2
    for (int t = threadIdx.x * V; t < vocab; t += THREADS * V) {
        take<V>(p, row_p, t, inverse);
        take<V>(q, row_q, t, inverse);
    }
    lanes_join(p, shared_p);
    lanes_join(q, shared_q);
    p = shared_join(shared_p);
    q = shared_join(shared_q);

    // sums of p (z_p - z_q), z being taken from the maxima, and of min(p, q)
    const float factor_p = 1.f / p.sum, factor_q = 1.f / q.sum;
    float weighted = 0, common = 0;
#pragma unroll 2
    for (int t = threadIdx.x * V; t < vocab; t += THREADS * V) {
        float zp[V], zq[V];
        load<float, V>(zp, row_p + t);
        load<float, V>(zq, row_q + t);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float dp = zp[i] * inverse - p.max, dq = zq[i] * inverse - q.max;
            float pt = expf(dp) * factor_p, qt = expf(dq) * factor_q;
            weighted += pt > 0.f ? pt * (dp - dq) : 0.f; // a logit of -inf adds nothing
            common += fminf(pt, qt);
            zq[i] = slope * (qt - pt);
        }
        if (dstudent) store<T, V>(dstudent + (int64_t)blockIdx.x * vocab + t, zq);
    }
    weighted = block_sum(weighted, shared);
    common = block_sum(common, shared);
    if (threadIdx.x) return;
    kl[blockIdx.x] = weighted - logf(p.sum) + logf(q.sum);
    overlap[blockIdx.x] = common;
}

void cuda_distill(struct device *dev, float *kl, float *overlap, void *dstudent,
                  const struct distill_args *a, enum dtype dt)
{
    if (a->n <= 0) return;
    if (a->teacher_vocab < a->vocab) {
        device_fail(dev, "distill: a teacher vocabulary of %d, smaller than the student's %d",
                    a->teacher_vocab, a->vocab);
        return;
    }
    bool fits = aligned(16, {a->student, a->teacher, dstudent},
                        {(int64_t)a->vocab * 4, (int64_t)a->teacher_vocab * 4});
    with_type(dt, [&](auto t) {
        using T = decltype(t);
        auto launch = [&](auto kernel) {
            cuda_launch(dev, "distill", kernel, a->n, THREADS, 0, kl, overlap, dstudent, a->student,
                        a->teacher, a->vocab, a->teacher_vocab, 1.f / a->temperature,
                        a->scale / a->temperature);
        };
        launch(fits ? distill_kernel<T, 4> : distill_kernel<T, 1>);
    });
}
