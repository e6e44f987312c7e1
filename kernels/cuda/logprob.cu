/* logprob.cu: log-probability of a chosen token and entropy of each row of logits, the likeliest
 * tokens of a row, and the gradient. A block reads a row once (softmax.cuh); a row's result does
 * not depend on the others. */
#include "kernels/cuda/softmax.cuh"

#define THREADS 512

// Of a row, by a block; valid in thread 0.
template <int V>
__device__ __forceinline__ running<true> sum_row(const float *row, int vocab, float scale)
{
    __shared__ running<true> shared[THREADS / 32];
    running<true> r = {-INFINITY, 0, 0};
#pragma unroll 2
    for (int t = threadIdx.x * V; t < vocab; t += THREADS * V) take<V>(r, row, t, scale);
    lanes_join(r, shared);
    return threadIdx.x == 0 ? shared_join(shared) : r;
}

__device__ __forceinline__ float logprob_of(float logit, float scale, float max, float log_sum)
{
    return (logit * scale - max) - log_sum;
}

template <int V>
__global__ void logprob_kernel(float *logprob, float *lse, float *entropy, const float *logits,
                               const int32_t *target, int vocab, float scale)
{
    grid_begin();
    const float *row = logits + (int64_t)blockIdx.x * vocab;
    running<true> r = sum_row<V>(row, vocab, scale);
    if (threadIdx.x) return;
    float log_sum = logf(r.sum);
    int t = target[blockIdx.x];
    lse[blockIdx.x] = r.max + log_sum;
    logprob[blockIdx.x] = t >= 0 && t < vocab ? logprob_of(row[t], scale, r.max, log_sum) : NAN;
    if (entropy) entropy[blockIdx.x] = log_sum - r.weighted / r.sum;
}

void cuda_logprob(struct device *dev, float *logprob, float *lse, float *entropy,
                  const struct head_args *h)
{
    if (h->n <= 0) return;
    bool fits = aligned(16, {h->logits}, {(int64_t)h->vocab * 4});
    cuda_launch(dev, "logprob", fits ? logprob_kernel<4> : logprob_kernel<1>, h->n, THREADS, 0,
                logprob, lse, entropy, h->logits, h->target, h->vocab, 1.f / h->temperature);
}

// ---- the likeliest tokens ----------------------------------------------------------------------

#define HELD 4 // likeliest of its tokens that a thread holds

// Tokens in order: the likelier first, of equal logits the lower one.
struct candidate {
    float z;
    int token;
};

__device__ __forceinline__ bool is_before(candidate a, candidate b)
{
    return a.z > b.z || (a.z == b.z && a.token < b.token);
}

// A logit that is not a number comes last, so that every token has a place.
__device__ __forceinline__ candidate candidate_of(const float *row, int t)
{
    float z = row[t];
    return {isnan(z) ? -INFINITY : z, t};
}

// The first of the block's candidates, given to every thread.
__device__ __forceinline__ candidate block_first(candidate c, candidate *shared)
{
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        candidate other = {__shfl_xor_sync(~0u, c.z, o), __shfl_xor_sync(~0u, c.token, o)};
        if (is_before(other, c)) c = other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = c;
    __syncthreads();
    c = shared[0];
#pragma unroll
    for (int i = 1; i < THREADS / 32; i++)
        if (is_before(shared[i], c)) c = shared[i];
    return c;
}

// The first HELD of this thread's tokens that come behind `last`, in order; token `vocab` stands
// for none.
__device__ __forceinline__ void gather(candidate (&held)[HELD], const float *row, int vocab,
                                       candidate last)
{
#pragma unroll
    for (int i = 0; i < HELD; i++) held[i] = {-INFINITY, vocab};
#pragma unroll 4
    for (int t = threadIdx.x; t < vocab; t += THREADS) {
        candidate c = candidate_of(row, t);
        if (!is_before(last, c) || !is_before(c, held[HELD - 1])) continue;
        held[HELD - 1] = c;
#pragma unroll
        for (int i = HELD - 1; i > 0; i--) {
            if (!is_before(held[i], held[i - 1])) continue;
            candidate other = held[i - 1];
            held[i - 1] = held[i];
            held[i] = other;
        }
    }
}

// Block: row. The next likeliest is the first of what the threads hold of their tokens; a thread
// whose tokens are all taken, which is rare, looks for more among its own.
template <int V>
__global__ void top_logprobs_kernel(token_logprob *out, const float *logits, const int32_t *target,
                                    int vocab, int k, float scale)
{
    grid_begin();
    __shared__ candidate shared[THREADS / 32];
    __shared__ float shared_max, shared_log_sum;
    __shared__ int before;
    const float *row = logits + (int64_t)blockIdx.x * vocab;
    token_logprob *of_row = out + (int64_t)blockIdx.x * (1 + k);
    running<true> r = sum_row<V>(row, vocab, scale);
    if (threadIdx.x == 0) {
        shared_max = r.max;
        shared_log_sum = logf(r.sum);
        before = 0;
    }
    __syncthreads();
    const float max = shared_max, log_sum = shared_log_sum;

    const int chosen = target[blockIdx.x];
    const bool valid = chosen >= 0 && chosen < vocab; // the host cannot look
    const candidate wanted = valid ? candidate_of(row, chosen) : candidate{-INFINITY, vocab};
    int own = 0;
    for (int t = threadIdx.x; t < vocab; t += THREADS)
        own += is_before(candidate_of(row, t), wanted);
    atomicAdd(&before, own);
    __syncthreads();
    if (threadIdx.x == 0)
        of_row[0] = {chosen, before + 1,
                     valid ? logprob_of(row[chosen], scale, max, log_sum) : NAN};

    candidate held[HELD], last = {INFINITY, -1};
    if (k > 0) gather(held, row, vocab, last);
    for (int j = 1; j <= k; j++) {
        last = block_first(held[0], shared);
        if (threadIdx.x == 0)
            of_row[j] = {last.token, j, logprob_of(row[last.token], scale, max, log_sum)};
        if (held[0].token != last.token) continue;
#pragma unroll
        for (int i = 0; i + 1 < HELD; i++) held[i] = held[i + 1];
        held[HELD - 1] = {-INFINITY, vocab};
        if (held[0].token == vocab) gather(held, row, vocab, last);
    }
}

void cuda_top_logprobs(struct device *dev, struct token_logprob *out, int k,
                       const struct head_args *h)
{
    if (h->n <= 0) return;
    if (k < 0 || k > h->vocab || k > TOP_LOGPROBS_MOST) {
        device_fail(dev, "top_logprobs: %d likeliest tokens of %d; at most %d", k, h->vocab,
                    TOP_LOGPROBS_MOST);
        return;
    }
    bool fits = aligned(16, {h->logits}, {(int64_t)h->vocab * 4});
    cuda_launch(dev, "top_logprobs", fits ? top_logprobs_kernel<4> : top_logprobs_kernel<1>, h->n,
                THREADS, 0, out, h->logits, h->target, h->vocab, k, 1.f / h->temperature);
}

// ---- the gradient ------------------------------------------------------------------------------

template <typename T, int V>
__global__ void logprob_back_kernel(T *dlogits, const float *dlogprob, const float *logits,
                                    const float *lse, const int32_t *target, int vocab, float scale)
{
    grid_begin();
    int t = (blockIdx.y * THREADS + threadIdx.x) * V, hit = target[blockIdx.x];
    if (t >= vocab) return;
    float g = dlogprob[blockIdx.x] * scale, shift = lse[blockIdx.x], z[V];
    int64_t at = (int64_t)blockIdx.x * vocab + t;
    if (g != 0) {
        load<float, V>(z, logits + at);
#pragma unroll
        for (int i = 0; i < V; i++)
            z[i] = g * ((t + i == hit ? 1.f : 0.f) - expf(z[i] * scale - shift));
    } else {
#pragma unroll
        for (int i = 0; i < V; i++) z[i] = 0;
    }
    store<T, V>(dlogits + at, z);
}

void cuda_logprob_back(struct device *dev, void *dlogits, const float *dlogprob, const float *lse,
                       const struct head_args *h, enum dtype dt)
{
    if (h->n <= 0) return;
    bool fits = aligned(16, {dlogits, h->logits}, {(int64_t)h->vocab * 4}) && h->vocab % 4 == 0;
    with_type(dt, [&](auto t) {
        using T = decltype(t);
        auto launch = [&](auto kernel, int wide) {
            cuda_launch(dev, "logprob_back", kernel, dim3(h->n, ceil_div(h->vocab, THREADS * wide)),
                        THREADS, 0, (T *)dlogits, dlogprob, h->logits, lse, h->target, h->vocab,
                        1.f / h->temperature);
        };
        if (fits)
            launch(logprob_back_kernel<T, 4>, 4);
        else
            launch(logprob_back_kernel<T, 1>, 1);
    });
}
