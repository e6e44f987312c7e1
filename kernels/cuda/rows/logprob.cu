/* logprob.cu: log-probability of a chosen token and entropy of each row of logits, the likeliest
 * tokens of a row, the gradient, and the divergence of a teacher's rows from a student's. A block
 * sums a row in the order of log_sum.cuh; a row's result does not depend on the others. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/rows/log_sum.cuh"

#define ROW_THREADS 128 // each warp holds 4,096 logits
#define THREADS     512 // of the gradient

// Of a row: log_sum, and the sum of (z - max) e^(z - max).
struct row_sum {
    float max, sum, weighted;
};

// tiles: one for each TILE logits of the row, shared memory.
struct tile_sums {
    log_sum of;
    float weighted;
};

#define TILE_WARPS (TILE_THREADS / 32)

/* A tile by one warp, which stands in for the TILE_WARPS warps that tile_sum() has: a lane holds
 * what that lane of each of them would, and adds in their order. Nobody waits for a block. */
__device__ __forceinline__ tile_sums tile_by_warp(const float *row, int first, int vocab,
                                                  float scale, bool in_fours)
{
    int lane = threadIdx.x % 32;
    float z[TILE_WARPS][TILE_GROUPS][4], max = -INFINITY, sums[TILE_WARPS], weighted = 0;
#pragma unroll
    for (int w = 0; w < TILE_WARPS; w++)
#pragma unroll
        for (int j = 0; j < TILE_GROUPS; j++)
            load_scaled(z[w][j], row, first + (j * TILE_THREADS + w * 32 + lane) * 4, vocab, scale,
                        in_fours);
#pragma unroll
    for (int w = 0; w < TILE_WARPS; w++)
#pragma unroll
        for (int j = 0; j < TILE_GROUPS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) max = fmaxf(max, z[w][j][i]);
    max = lanes_max(max);
#pragma unroll
    for (int w = 0; w < TILE_WARPS; w++) {
        sums[w] = 0;
#pragma unroll
        for (int j = 0; j < TILE_GROUPS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float d = __fsub_rn(z[w][j][i], shift_of(max)), e = expf(d);
                sums[w] = __fadd_rn(sums[w], e);
                weighted += e > 0 ? e * d : 0.f; // a logit of -inf adds nothing
            }
        sums[w] = lanes_sum(sums[w]);
    }
#pragma unroll
    for (int o = TILE_WARPS / 2; o; o /= 2) // as block_sum() does
#pragma unroll
        for (int w = 0; w < o; w++) sums[w] = __fadd_rn(sums[w], sums[w + o]);
    return {{max, sums[0]}, lanes_sum(weighted)};
}

// By a block; given to all of it.
__device__ __forceinline__ row_sum sum_row(tile_sums *tiles, const float *row, int vocab,
                                           float scale, bool in_fours)
{
    const int n = (vocab + TILE - 1) / TILE;
    __syncthreads(); // the tiles of another row were read
    for (int i = threadIdx.x / 32; i < n; i += blockDim.x / 32) {
        tile_sums p = tile_by_warp(row, i * TILE, vocab, scale, in_fours);
        if (threadIdx.x % 32 == 0) tiles[i] = p;
    }
    __syncthreads();
    const log_sum all = join_tiles(n, [&](int i) { return tiles[i].of; });
    float weighted = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) {
        const tile_sums &p = tiles[i];
        float d = p.of.max - all.max, e = expf(d);
        weighted +=
            e > 0 ? (p.weighted + p.of.sum * d) * e : 0.f; // where e is 0, d may be infinite
    }
    return {all.max, all.sum, lanes_sum(weighted)};
}

static size_t tiles_bytes(int vocab)
{
    return ceil_div(vocab, TILE) * sizeof(struct tile_sums);
}

// sums: of each row the maximum of z, and the logarithm of the sum of e^(z - max), and nothing
// else; or NULL.
__global__ void __launch_bounds__(ROW_THREADS)
    logprob_kernel(float *logprob, float *lse, float *entropy, float2 *sums, const float *logits,
                   const int32_t *target, int vocab, float scale, bool in_fours)
{
    grid_begin();
    extern __shared__ tile_sums tiles[];
    const float *row = logits + (int64_t)blockIdx.x * vocab;
    row_sum r = sum_row(tiles, row, vocab, scale, in_fours);
    if (threadIdx.x) return;
    float log_of_sum = logf(r.sum);
    if (sums) {
        sums[blockIdx.x] = make_float2(r.max, log_of_sum);
        return;
    }
    int t = target[blockIdx.x];
    lse[blockIdx.x] = r.max + log_of_sum;
    logprob[blockIdx.x] =
        t >= 0 && t < vocab ? logprob_of(__fmul_rn(row[t], scale), r.max, log_of_sum) : NAN;
    if (entropy) entropy[blockIdx.x] = log_of_sum - r.weighted / r.sum;
}

static void sum_rows(struct device *dev, float *logprob, float *lse, float *entropy, float2 *sums,
                     const struct head_args *h)
{
    cuda_launch(dev, "logprob", logprob_kernel, h->n, ROW_THREADS, tiles_bytes(h->vocab), logprob,
                lse, entropy, sums, h->logits, h->target, h->vocab, 1.f / h->temperature,
                aligned(16, {h->logits}, {(int64_t)h->vocab * 4}));
}

void cuda_logprob(struct device *dev, float *logprob, float *lse, float *entropy,
                  const struct head_args *h)
{
    if (h->n > 0) sum_rows(dev, logprob, lse, entropy, NULL, h);
}

// ---- the likeliest tokens ----------------------------------------------------------------------

#define TOP_THREADS 512
#define HELD        4 // likeliest of its tokens that a thread holds

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
    for (int i = 1; i < TOP_THREADS / 32; i++)
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
    for (int t = threadIdx.x; t < vocab; t += TOP_THREADS) {
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
__global__ void __launch_bounds__(TOP_THREADS)
    top_logprobs_kernel(token_logprob *out, const float2 *sums, const float *logits,
                        const int32_t *target, int vocab, int k, float scale)
{
    grid_begin();
    __shared__ candidate shared[TOP_THREADS / 32];
    __shared__ int before;
    const float *row = logits + (int64_t)blockIdx.x * vocab;
    token_logprob *of_row = out + (int64_t)blockIdx.x * (1 + k);
    const float max = sums[blockIdx.x].x, log_of_sum = sums[blockIdx.x].y;
    if (threadIdx.x == 0) before = 0;
    __syncthreads();

    const int chosen = target[blockIdx.x];
    const bool valid = chosen >= 0 && chosen < vocab; // the host cannot look
    const candidate wanted = valid ? candidate_of(row, chosen) : candidate{-INFINITY, vocab};
    int own = 0;
    for (int t = threadIdx.x; t < vocab; t += TOP_THREADS)
        own += is_before(candidate_of(row, t), wanted);
    atomicAdd(&before, own);
    __syncthreads();
    if (threadIdx.x == 0)
        of_row[0] = {chosen, before + 1,
                     valid ? logprob_of(__fmul_rn(row[chosen], scale), max, log_of_sum) : NAN};

    candidate held[HELD], last = {INFINITY, -1};
    if (k > 0) gather(held, row, vocab, last);
    for (int j = 1; j <= k; j++) {
        last = block_first(held[0], shared);
        if (threadIdx.x == 0)
            of_row[j] = {last.token, j,
                         logprob_of(__fmul_rn(row[last.token], scale), max, log_of_sum)};
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
    if (k < 0 || k > h->vocab || k > TOP_LOGPROBS_MAX) {
        device_fail(dev, "top_logprobs: %d likeliest tokens of %d; at most %d", k, h->vocab,
                    TOP_LOGPROBS_MAX);
        return;
    }
    float2 *sums = (float2 *)cuda_workspace(dev, h->n * sizeof(float2));
    if (!sums) return;
    sum_rows(dev, NULL, NULL, NULL, sums, h);
    cuda_launch(dev, "top_logprobs", top_logprobs_kernel, h->n, TOP_THREADS, 0, out, sums,
                h->logits, h->target, h->vocab, k, 1.f / h->temperature);
}

// ---- the gradient ------------------------------------------------------------------------------

template <typename T, int V>
__global__ void logprob_back_kernel(T *dlogits, head_grads grads, const float *logits,
                                    const int32_t *target, int vocab, float scale)
{
    grid_begin();
    int t = (blockIdx.y * THREADS + threadIdx.x) * V, hit = target[blockIdx.x];
    if (t >= vocab) return;
    float g = grads.dlogprob[blockIdx.x] * scale, shift = grads.lse[blockIdx.x], z[V];
    float e = grads.dentropy ? grads.dentropy[blockIdx.x] * scale : 0.f;
    int64_t at = (int64_t)blockIdx.x * vocab + t;
    if (e != 0) { // p log p falls to 0 with p, where a logit of -inf would make it no number
        float h = grads.entropy[blockIdx.x];
        load<float, V>(z, logits + at);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float log_p = z[i] * scale - shift, p = expf(log_p);
            z[i] = g * ((t + i == hit ? 1.f : 0.f) - p) - (p > 0 ? e * p * (log_p + h) : 0.f);
        }
    } else if (g != 0) {
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

void cuda_logprob_back(struct device *dev, void *dlogits, const struct head_grads *grads,
                       const struct head_args *h, enum dtype dt)
{
    if (h->n <= 0) return;
    bool fits = aligned(16, {dlogits, h->logits}, {(int64_t)h->vocab * 4}) && h->vocab % 4 == 0;
    with_type(dt, [&](auto t) {
        using T = decltype(t);
        auto launch = [&](auto kernel, int wide) {
            cuda_launch(dev, "logprob_back", kernel, dim3(h->n, ceil_div(h->vocab, THREADS * wide)),
                        THREADS, 0, dlogits, *grads, h->logits, h->target, h->vocab,
                        1.f / h->temperature);
        };
        if (fits)
            launch(logprob_back_kernel<T, 4>, 4);
        else
            launch(logprob_back_kernel<T, 1>, 1);
    });
}

// ---- distillation ------------------------------------------------------------------------------

// A block has a row and reads both twice: for their sums, then for what depends on both
// distributions.
template <typename T, int V>
__global__ void __launch_bounds__(ROW_THREADS)
    distill_kernel(float *kl, float *overlap, T *dstudent, distill_args a, bool in_fours)
{
    grid_begin();
    extern __shared__ tile_sums tiles[];
    __shared__ float shared[32];
    const float inverse = 1.f / a.temperature, slope = a.scale / a.temperature;
    const float *row_p = a.teacher + (int64_t)blockIdx.x * a.teacher_vocab;
    const float *row_q = a.student + (int64_t)blockIdx.x * a.vocab;
    const row_sum p = sum_row(tiles, row_p, a.vocab, inverse, in_fours);
    const row_sum q = sum_row(tiles, row_q, a.vocab, inverse, in_fours);
    // sums of p (z_p - z_q), z being taken from the maxima, and of min(p, q)
    const float factor_p = 1.f / p.sum, factor_q = 1.f / q.sum;
    float weighted = 0, common = 0;
#pragma unroll 4
    for (int t = threadIdx.x * V; t < a.vocab; t += ROW_THREADS * V) {
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
        if (dstudent) store<T, V>(dstudent + (int64_t)blockIdx.x * a.vocab + t, zq);
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
        cuda_launch(dev, "distill", fits ? distill_kernel<T, 4> : distill_kernel<T, 1>, a->n,
                    ROW_THREADS, tiles_bytes(a->vocab), kl, overlap, dstudent, *a, fits);
    });
}
