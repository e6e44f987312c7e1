/* distill.cu: the divergence of a teacher's distribution from a student's, and its gradient. A
 * block owns a row and reads it twice: for both maxima and sums (softmax.cuh), and then for what
 * depends on both distributions. A row's result does not depend on the others. */
#include "kernels/cuda/softmax.cuh"

#define THREADS 1024

template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    distill_kernel(float *kl, float *overlap, T *dstudent, const float *student,
                   const float *teacher, int vocab, int teacher_vocab, float inverse, float slope)
{
    grid_begin();
    __shared__ running<false> shared_p[THREADS / 32], shared_q[THREADS / 32];
    __shared__ float shared[32];
    const float *row_p = teacher + (int64_t)blockIdx.x * teacher_vocab;
    const float *row_q = student + (int64_t)blockIdx.x * vocab;
    running<false> p = {-INFINITY, 0, 0}, q = p;
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
            cuda_launch(dev, "distill", kernel, a->n, THREADS, 0, kl, overlap, (T *)dstudent,
                        a->student, a->teacher, a->vocab, a->teacher_vocab, 1.f / a->temperature,
                        a->scale / a->temperature);
        };
        launch(fits ? distill_kernel<T, 4> : distill_kernel<T, 1>);
    });
}
