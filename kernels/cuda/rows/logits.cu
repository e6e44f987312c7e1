/* logits.cu: what goes over rows of logits: the log-probability of a chosen token and the entropy,
 * the likeliest tokens, the gradient, the divergence of a teacher's rows from a student's, and
 * sampling.
 *
 * A row is summed in one order, so that a log-probability has the same bits in sampler and trainer:
 * tiles of 4,096 logits, each by 256 threads that keep its maximum and its sum relative to that,
 * then the tiles by the lanes of a warp. A row's result does not depend on the others. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda.cuh"
#include "kernels/sampling.h"

#define TILE_THREADS 256
#define TILE_GROUPS  4 // of 4 neighbouring logits for each thread
#define TILE         (TILE_THREADS * TILE_GROUPS * 4)

// z of the tokens t .. t + 3; -inf past the end
INLINE void load_scaled(float (&z)[4], const float *row, int t, int vocab, float scale,
                        bool in_fours)
{
    if (in_fours && t + 3 < vocab)
        load<float, 4>(z, row + t);
    else
        unrolled<4>([&](int i) { z[i] = t + i < vocab ? row[t + i] : -INFINITY; });
    unrolled<4>([&](int i) { z[i] = __fmul_rn(z[i], scale); });
}

struct log_sum {
    float max, sum; // of z, and of e^(z - max)
};

// Of the maxima -inf is none to subtract.
INLINE float shift_of(float max)
{
    return max == -INFINITY ? 0.f : max;
}

// Of the tile that the block's threads hold, given to all of them. e: e^(z - max), of -inf 0.
// `shared` holds 32 floats.
INLINE log_sum tile_sum(const float (&z)[TILE_GROUPS][4], float (&e)[TILE_GROUPS][4], float *shared)
{
    float max = -INFINITY, sum = 0;
    unrolled<TILE_GROUPS, 4>([&](int j, int i) { max = fmaxf(max, z[j][i]); });
    max = block_max(max, shared);
    float shift = shift_of(max);
    unrolled<TILE_GROUPS, 4>(
        [&](int j, int i) { sum = __fadd_rn(sum, e[j][i] = expf(__fsub_rn(z[j][i], shift))); });
    return {max, block_sum(sum, shared)};
}

// Of a row's n tiles, the i-th of which tile(i) gives, by a whole warp and given to all of it.
template <typename F> INLINE log_sum join_tiles(int n, F tile)
{
    int lane = threadIdx.x % 32;
    float max = -INFINITY, sum = 0;
    for (int i = lane; i < n; i += 32) max = fmaxf(max, tile(i).max);
    max = lanes_max(max);
    for (int i = lane; i < n; i += 32) {
        log_sum p = tile(i);
        if (p.max > -INFINITY) sum = __fmaf_rn(p.sum, expf(__fsub_rn(p.max, max)), sum);
    }
    return {max, lanes_sum(sum)};
}

// The log-probability of a token; log_of_sum: logf(row.sum)
INLINE float logprob_of(float z, float max, float log_of_sum)
{
    return __fsub_rn(__fsub_rn(z, max), log_of_sum);
}

// ---- log-probabilities -------------------------------------------------------------------------

#define ROW_THREADS  128 // each warp holds 4,096 logits
#define BACK_THREADS 512

// Of a row, or a tile of TILE logits: log_sum, and the sum of (z - max) e^(z - max).
struct row_sum : log_sum {
    float weighted;
};

#define TILE_WARPS (TILE_THREADS / 32)

/* A tile by one warp, which stands in for the TILE_WARPS warps that tile_sum() has: a lane holds
 * what that lane of each of them would, and adds in their order. Nobody waits for a block. */
INLINE row_sum tile_by_warp(const float *row, int first, int vocab, float scale, bool in_fours)
{
    int lane = threadIdx.x % 32;
    float z[TILE_WARPS][TILE_GROUPS][4], max = -INFINITY, sums[TILE_WARPS], weighted = 0;
    unrolled<TILE_WARPS, TILE_GROUPS>([&](int w, int j) {
        load_scaled(z[w][j], row, first + (j * TILE_THREADS + w * 32 + lane) * 4, vocab, scale,
                    in_fours);
    });
#pragma unroll
    for (int w = 0; w < TILE_WARPS; w++)
        unrolled<TILE_GROUPS, 4>([&](int j, int i) { max = fmaxf(max, z[w][j][i]); });
    max = lanes_max(max);
#pragma unroll
    for (int w = 0; w < TILE_WARPS; w++) {
        sums[w] = 0;
        unrolled<TILE_GROUPS, 4>([&](int j, int i) {
            float d = __fsub_rn(z[w][j][i], shift_of(max)), e = expf(d);
            sums[w] = __fadd_rn(sums[w], e);
            weighted += e > 0 ? e * d : 0.f; // a logit of -inf adds nothing
        });
        sums[w] = lanes_sum(sums[w]);
    }
#pragma unroll
    for (int o = TILE_WARPS / 2; o; o /= 2) // as block_sum() does
#pragma unroll
        for (int w = 0; w < o; w++) sums[w] = __fadd_rn(sums[w], sums[w + o]);
    return {{max, sums[0]}, lanes_sum(weighted)};
}

// By a block; given to all of it. tiles: of the row, shared memory.
INLINE row_sum sum_row(row_sum *tiles, const float *row, int vocab, float scale, bool in_fours)
{
    const int n = (vocab + TILE - 1) / TILE;
    __syncthreads(); // the tiles of another row were read
    for (int i = threadIdx.x / 32; i < n; i += blockDim.x / 32) {
        row_sum p = tile_by_warp(row, i * TILE, vocab, scale, in_fours);
        if (threadIdx.x % 32 == 0) tiles[i] = p;
    }
    __syncthreads();
    const log_sum all = join_tiles(n, [&](int i) { return log_sum(tiles[i]); });
    float weighted = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) {
        const row_sum &p = tiles[i];
        float d = p.max - all.max, e = expf(d);
        weighted += e > 0 ? (p.weighted + p.sum * d) * e : 0.f; // where e is 0, d may be infinite
    }
    return {all, lanes_sum(weighted)};
}

static size_t tiles_bytes(int vocab)
{
    return ceil_div(vocab, TILE) * sizeof(struct row_sum);
}

// sums: of each row the maximum of z, and the logarithm of the sum of e^(z - max), and nothing
// else; or NULL.
__global__ void __launch_bounds__(ROW_THREADS)
    logprob_kernel(float *logprob, float *lse, float *entropy, float2 *sums, const float *logits,
                   const int32_t *target, int vocab, float scale, bool in_fours)
{
    grid_begin();
    extern __shared__ row_sum tiles[];
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
    sum_rows(dev, logprob, lse, entropy, NULL, h);
}

// ---- the likeliest tokens ----------------------------------------------------------------------

#define TOP_THREADS 512
#define HELD        4 // likeliest of its tokens that a thread holds

// A logit that is not a number comes last, so that every token has a place.
INLINE ranked candidate_of(const float *row, int t)
{
    float z = row[t];
    return {isnan(z) ? -INFINITY : z, t};
}

// The first of the block's, given to every thread. shared: of each warp.
INLINE ranked block_first(ranked c, ranked *shared)
{
    c = lanes_first(c);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = c;
    __syncthreads();
    return lanes_first(shared[min(threadIdx.x % 32, blockDim.x / 32 - 1)]);
}

// The first HELD of this thread's tokens that come behind `last`, in order; token `vocab` stands
// for none.
INLINE void gather(ranked (&held)[HELD], const float *row, int vocab, ranked last)
{
#pragma unroll
    for (int i = 0; i < HELD; i++) held[i] = {-INFINITY, vocab};
#pragma unroll 4
    for (int t = threadIdx.x; t < vocab; t += TOP_THREADS) {
        ranked c = candidate_of(row, t);
        if (!is_before(last, c) || !is_before(c, held[HELD - 1])) continue;
        held[HELD - 1] = c;
#pragma unroll
        for (int i = HELD - 1; i > 0; i--) {
            if (!is_before(held[i], held[i - 1])) continue;
            ranked other = held[i - 1];
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
    __shared__ ranked shared[TOP_THREADS / 32];
    __shared__ int before;
    const float *row = logits + (int64_t)blockIdx.x * vocab;
    token_logprob *of_row = out + (int64_t)blockIdx.x * (1 + k);
    const float max = sums[blockIdx.x].x, log_of_sum = sums[blockIdx.x].y;
    if (threadIdx.x == 0) before = 0;
    __syncthreads();

    const int chosen = target[blockIdx.x];
    const bool valid = chosen >= 0 && chosen < vocab; // the host cannot look
    const ranked wanted = valid ? candidate_of(row, chosen) : ranked{-INFINITY, vocab};
    int own = 0;
    for (int t = threadIdx.x; t < vocab; t += TOP_THREADS)
        own += is_before(candidate_of(row, t), wanted);
    atomicAdd(&before, own);
    __syncthreads();
    if (threadIdx.x == 0)
        of_row[0] = {chosen, before + 1,
                     valid ? logprob_of(__fmul_rn(row[chosen], scale), max, log_of_sum) : NAN};

    ranked held[HELD], last = {INFINITY, -1};
    if (k > 0) gather(held, row, vocab, last);
    for (int j = 1; j <= k; j++) {
        last = block_first(held[0], shared);
        if (threadIdx.x == 0)
            of_row[j] = {last.index, j,
                         logprob_of(__fmul_rn(row[last.index], scale), max, log_of_sum)};
        if (held[0].index != last.index) continue;
#pragma unroll
        for (int i = 0; i + 1 < HELD; i++) held[i] = held[i + 1];
        held[HELD - 1] = {-INFINITY, vocab};
        if (held[0].index == vocab) gather(held, row, vocab, last);
    }
}

void cuda_top_logprobs(struct device *dev, struct token_logprob *out, int k,
                       const struct head_args *h)
{
    if (!top_logprobs_takes(dev, k, h->vocab)) return;
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
    int t = (blockIdx.y * BACK_THREADS + threadIdx.x) * V, hit = target[blockIdx.x];
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
        unrolled<V>([&](int i) { z[i] = 0; });
    }
    store<T, V>(dlogits + at, z);
}

void cuda_logprob_back(struct device *dev, void *dlogits, const struct head_grads *grads,
                       const struct head_args *h, enum dtype dt)
{
    bool fits = aligned(16, {dlogits, h->logits}, {(int64_t)h->vocab * 4}) && h->vocab % 4 == 0;
    with_type(dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "logprob_back",
                    fits ? logprob_back_kernel<T, 4> : logprob_back_kernel<T, 1>,
                    dim3(h->n, ceil_div(h->vocab, BACK_THREADS * (fits ? 4 : 1))), BACK_THREADS, 0,
                    dlogits, *grads, h->logits, h->target, h->vocab, 1.f / h->temperature);
    });
}

// ---- distillation ------------------------------------------------------------------------------

// A block has a row and reads both twice: for their sums, then for what depends on both
// distributions; a third time where the gradient wants a mean of that.
template <typename T, int V>
__global__ void __launch_bounds__(ROW_THREADS)
    distill_kernel(float *divergence, float *overlap, T *dstudent, distill_args a, bool in_fours)
{
    grid_begin();
    extern __shared__ row_sum tiles[];
    __shared__ float shared[32];
    const float inverse = 1.f / a.temperature, beta = a.beta;
    const float scale = a.scale * inverse * (a.weights ? a.weights[blockIdx.x] : 1.f);
    const float *row_p = a.teacher + (int64_t)blockIdx.x * a.teacher_vocab;
    const float *row_q = a.student + (int64_t)blockIdx.x * a.vocab;
    T *gradient = dstudent ? dstudent + (int64_t)blockIdx.x * a.vocab : nullptr;
    const row_sum p = sum_row(tiles, row_p, a.vocab, inverse, in_fours);
    const row_sum q = sum_row(tiles, row_q, a.vocab, inverse, in_fours);
    const float factor_p = 1.f / p.sum, factor_q = 1.f / q.sum;
    const float log_p = logf(p.sum), log_q = logf(q.sum); // of beta 0 outside of the sum
    float sum = 0, mean = 0, common = 0, both = 0;
    const int last = gradient && beta != 0.f;
    for (int pass = 0; pass <= last; pass++) {
#pragma unroll 4
        for (int t = threadIdx.x * V; t < a.vocab; t += ROW_THREADS * V) {
            float zp[V], zq[V], old[V];
            load<float, V>(zp, row_p + t);
            load<float, V>(zq, row_q + t);
            if (a.add && gradient && pass == last) load<T, V>(old, gradient + t);
#pragma unroll
            for (int i = 0; i < V; i++) {
                const float dp = zp[i] * inverse - p.max, dq = zq[i] * inverse - q.max;
                const float pt = expf(dp) * factor_p, qt = expf(dq) * factor_q;
                const distilled d = beta == 0.f ? distil(beta, pt, qt, dp, dq)
                                                : distil(beta, pt, qt, dp - log_p, dq - log_q);
                if (pass == 0) {
                    sum += d.value;
                    mean += qt * d.slope;
                    common += fminf(pt, qt);
                    both +=
                        __fmul_rn(zp[i], inverse) == p.max && __fmul_rn(zq[i], inverse) == q.max;
                }
                zq[i] = scale * (beta == 0.f ? qt - pt : qt * (d.slope - mean));
                if (a.add && gradient && pass == last) zq[i] += old[i];
            }
            if (gradient && pass == last) store<T, V>(gradient + t, zq);
        }
        if (pass == 0 && last) mean = block_sum(mean, shared);
    }
    sum = block_sum(sum, shared);
    common = block_sum(common, shared);
    both = block_sum(both, shared);
    if (threadIdx.x) return;
    divergence[blockIdx.x] = beta == 0.f ? sum - log_p + log_q : sum;
    overlap[blockIdx.x] = common;
    if (a.agrees) a.agrees[blockIdx.x] = both > 0.f;
}

void cuda_distill(struct device *dev, float *divergence, float *overlap, void *dstudent,
                  const struct distill_args *a, enum dtype dt)
{
    if (!distill_takes(dev, a)) return;
    bool fits = aligned(16, {a->student, a->teacher, dstudent},
                        {(int64_t)a->vocab * 4, (int64_t)a->teacher_vocab * 4});
    with_type(dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "distill", fits ? distill_kernel<T, 4> : distill_kernel<T, 1>, a->n,
                    ROW_THREADS, tiles_bytes(a->vocab), divergence, overlap, dstudent, *a, fits);
    });
}

// ---- sampling ----------------------------------------------------------------------------------

/* Without a filter one pass does: tiles of 4096 logits, a block each, keep their maximum, their sum
 * and their best score, and the last block of a row joins them. Rows with a filter (the host cannot
 * know: the parameters are in device memory) go on in a second kernel, one block a row: every
 * filter keeps the tokens whose logit reaches a threshold, so top-k and top-p come down to radix
 * selection over the logits' bits, by count and by mass. Masses are summed as 40-bit fixed-point
 * integers: the order of atomic additions does not matter. Tiles have a fixed size, so a row's
 * result does not depend on the other rows.
 *
 * Where there are drafts, the rows they were sampled from go through both kernels beside the rows
 * to sample from, and a third verifies: with the maximum, sum and threshold of either row at hand
 * it takes one pass, in tiles as the first, over the rows whose draft is rejected. */
#define THREADS        TILE_THREADS
#define GROUPS         TILE_GROUPS
#define FILTER_THREADS 1024

struct vocab_tile {
    float max, sum; // of z, and of e^(z - max)
    ranked best;    // the best score, and its token
};

// What is known of a row once it is filtered.
struct row_stats {
    float max, all, kept; // of z; sums of e^(z - max) over all tokens and those kept
    uint32_t floor;       // the lowest order_of(z) kept
};

// The rows of a launch: 0 .. n - 1 are to be sampled from; n .. 2n - 1, where there are drafts, are
// the rows that the drafts of 0 .. n - 1 were sampled from.
struct row_set : sample_args {
    bool in_fours, draft_in_fours; // rows may be read four logits at once
};

struct row_view {
    const float *logits;  // NULL: nothing to do
    const uint32_t *mask; // NULL: anything may come
    sample_params params;
    int vocab;
    bool in_fours, samples; // samples: a row to sample from, not a draft's
};

// Whether row i has a draft to be verified. The host cannot look: one that makes no sense is none.
INLINE bool is_verified(const row_set &set, int i, const sample_params &p)
{
    sample_draft d = set.drafts[i];
    return d.token >= 0 && d.token < set.draft_vocab && d.row >= 0 && p.temperature != 0.f;
}

// MASKED: some row has a mask; what is compiled for none has no trace of them.
template <bool MASKED> INLINE row_view row_of(const row_set &set, int i)
{
    if (i < set.n) {
        row_view r = {set.logits + (int64_t)i * set.vocab,
                      NULL,
                      set.params[i],
                      set.vocab,
                      set.in_fours,
                      true};
        if (MASKED && r.params.mask > 0)
            r.mask = set.masks + (int64_t)(r.params.mask - 1) * MASK_WORDS(set.vocab);
        return r;
    }
    i -= set.n;
    row_view r = {NULL, NULL, set.params[i], set.draft_vocab, set.draft_in_fours, false};
    if (is_verified(set, i, r.params))
        r.logits = set.draft_logits + (int64_t)set.drafts[i].row * set.draft_vocab;
    return r;
}

// z of token t, which may come or not.
INLINE float scaled_z(const row_view &r, int t, float scale)
{
    const bool may = !r.mask || (r.mask[t / 32] >> t % 32 & 1);
    return __fmul_rn(may ? r.logits[t] : MIN_LOGIT, scale);
}

// load_scaled() of a row, from token t, a multiple of 4, on.
INLINE void load_row(float (&z)[4], const row_view &r, int t, float scale)
{
    load_scaled(z, r.logits, t, r.vocab, scale, r.in_fours);
    if (!r.mask || t >= r.vocab) return;
    const uint32_t may = r.mask[t / 32] >> t % 32;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (t + i < r.vocab && !(may >> i & 1)) z[i] = __fmul_rn(MIN_LOGIT, scale);
}

// Keeps the better of two candidates in `best`; the lower token wins a tie.
INLINE void better(ranked &best, ranked other)
{
    if (is_before(other, best)) best = other;
}

// The best of a row's tiles, valid in every lane of the calling warp.
INLINE ranked best_of_tiles(const vocab_tile *of_row, int n, int vocab)
{
    ranked best = {-INFINITY, vocab - 1};
    for (int i = threadIdx.x; i < n; i += 32) {
        const volatile ranked &o = of_row[i].best;
        better(best, {o.value, o.index});
    }
    return lanes_first(best);
}

INLINE sample_result result_of(int token, float z, const row_stats &s, bool filtered)
{
    float logprob = logprob_of(z, s.max, logf(s.all));
    if (!filtered) return {token, logprob, logprob, 1.f};
    return {token, logprob, logprob + logf(s.all) - logf(s.kept), fminf(s.kept / s.all, 1.f)};
}

/* Keeps in `best` the best token with noise of a tile, in whichever lane of the block has it. e:
 * e^(z - max). z_of(t) is the z of this thread's token t.
 *
 * Noise is -log(-log(u)) <= -log(1 - u), and close to it where it is large. So a token's hope,
 * e^z / (1 - u), bounds its score without a logarithm, and the warp's greatest hope is nearly
 * always its best score: each lane computes the score of its most hopeful token, then those of the
 * few whose hope still reaches the best of these. */
template <typename F>
INLINE void best_with_noise(ranked &best, const float (&z)[GROUPS][4], float (&e)[GROUPS][4],
                            float max, const sample_params &p, int t0, F z_of)
{
    // rng_below1() is nowhere less than 1 - 2^-14 of its word; the rest of the margin is rounding
    auto enough = [&] { return expf(lanes_max(best.value) - max) * (0.999f / 4294967296.f); };
    float most = 0;
    int hopeful = -1; // token 4 j + i of this thread's
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        float likeliest = fmaxf(fmaxf(z[j][0], z[j][1]), fmaxf(z[j][2], z[j][3]));
        // what could not win with the largest noise is passed over
        bool hopeless = likeliest == -INFINITY || likeliest + RNG_GUMBEL_MAX < max + RNG_GUMBEL_MIN;
        uint32_t bits[4];
        if (!hopeless) sampling_block(&p, t0 / 4 + j * THREADS, SAMPLING_GUMBEL, bits);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &hope = e[j][i];
            hope = hopeless ? 0.f : __fdividef(e[j][i], (float)~bits[i]); // times 2^-32
            if (hope > most) {
                most = hope;
                hopeful = j * 4 + i;
            }
        }
    }
    uint32_t left = hopeful < 0 ? 0 : 1u << hopeful;
    // the code is there once, so that an SM can keep it
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
        for (; left; left &= left - 1) {
            const int at = __ffs(left) - 1, t = t0 + at / 4 * THREADS * 4 + at % 4;
            uint32_t bits[4];
            sampling_block(&p, t / 4, SAMPLING_GUMBEL, bits);
            const uint32_t own = at % 4 == 0   ? bits[0]
                                 : at % 4 == 1 ? bits[1]
                                 : at % 4 == 2 ? bits[2]
                                               : bits[3];
            better(best, {z_of(t) + sampling_gumbel(&p, t, own), t});
        }
        if (pass == 1) return;
        const float least = enough();
        if (least == 0.f && max < INFINITY) return; // the warp has no token that could win
#pragma unroll
        for (int i = 0; i < GROUPS * 4; i++)
            if (!(e[i / 4][i % 4] < least)) left |= 1u << i;
        if (hopeful >= 0) left &= ~(1u << hopeful);
    }
}

// Block (tile, row).
template <bool MASKED>
__global__ void __launch_bounds__(THREADS)
    scan_kernel(sample_result *result, row_stats *stats, vocab_tile *tiles, unsigned *tickets,
                const row_set set)
{
    grid_begin();
    __shared__ float shared[32];
    __shared__ ranked bests[32];
    const row_view r = row_of<MASKED>(set, blockIdx.y);
    if (!r.logits) return;
    const sample_params p = r.params;
    const int vocab = r.vocab, n_tiles = gridDim.x, t0 = blockIdx.x * TILE + threadIdx.x * 4;
    const float scale = sampling_scale(&p);
    const bool with_noise = r.samples && p.temperature != 0.f && !sampling_filters(&p, vocab);
    vocab_tile *of_row = tiles + (int64_t)blockIdx.y * n_tiles;
    ranked best = {-INFINITY, vocab - 1};
    float z[GROUPS][4], e[GROUPS][4];
#pragma unroll
    for (int j = 0; j < GROUPS; j++) load_row(z[j], r, t0 + j * THREADS * 4, scale);
    const log_sum own = tile_sum(z, e, shared);
    if (with_noise)
        best_with_noise(best, z, e, shift_of(own.max), p, t0,
                        [&](int t) { return scaled_z(r, t, scale); });
    else
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (z[j][i] > -INFINITY) better(best, {z[j][i], t0 + j * THREADS * 4 + i});
    best = block_first(best, bests);
    if (threadIdx.x == 0) of_row[blockIdx.x] = {own.max, own.sum, best};
    if (!last_block(&tickets[blockIdx.y], gridDim.x) || threadIdx.x >= 32) return;

    best = best_of_tiles(of_row, n_tiles, vocab);
    const log_sum row = join_tiles(n_tiles, [&](int i) {
        const volatile vocab_tile &o = of_row[i];
        return log_sum{o.max, o.sum};
    });
    if (threadIdx.x) return;
    const row_stats known = {row.max, row.sum, row.sum, 0};
    stats[blockIdx.y] = known;
    if (r.samples)
        result[blockIdx.y] = result_of(best.index, scaled_z(r, best.index, scale), known, false);
}

// ---- filtering ---------------------------------------------------------------------------------

#define BINS 2048

/* A mass in units of 2^-41 of the likeliest token's. Shared memory adds 32-bit integers natively
 * and 64-bit ones by trial, so a bin has three sums, of the mass's digits in base 2^14. A
 * vocabulary of up to 2^18 cannot overflow them. */
#define DIGIT_BITS 14
#define MAX_VOCAB  (1 << 18)

struct bins {
    uint32_t digit[3][BINS];
};

INLINE unsigned long long mass_of(float z, float max)
{
    return (unsigned long long)(expf(z - max) * 2199023255552.f);
}

INLINE unsigned long long bin_sum(const bins &b, int i)
{
    return b.digit[0][i] + ((unsigned long long)b.digit[1][i] << DIGIT_BITS) +
           ((unsigned long long)b.digit[2][i] << 2 * DIGIT_BITS);
}

// Unsigned integers in the order of the floats.
INLINE uint32_t order_of(float x)
{
    uint32_t u = __float_as_uint(x);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

INLINE bool is_kept(float z, float e, uint32_t floor, const sample_params &p)
{
    return order_of(z) >= floor && e >= p.min_p && z > -INFINITY;
}

// Calls f(z, t) for every token of the row that is this thread's.
template <typename F> INLINE void each_token(const row_view &r, float scale, F f)
{
#pragma unroll 2
    for (int t = threadIdx.x * 4; t < r.vocab; t += FILTER_THREADS * 4) {
        float z[4];
        load_row(z, r, t, scale);
        f(z, t);
    }
}

/* The order of the largest value v such that the weight of all tokens >= v, among those of order
 * `floor` and above, is at least `target`; the weight of a token is 1 (!MASS) or mass_of it. Where
 * the whole does not reach the target: that of the smallest. */
template <bool MASS>
INLINE uint32_t select(const row_view &r, float scale, float max, uint32_t floor, double target,
                       bins &b)
{
    __shared__ uint32_t chosen;
    __shared__ unsigned long long above_chosen;
    uint32_t prefix = 0;
    unsigned long long above = 0;
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
        int width = shift ? 11 : 10, n_bins = 1 << width;
        for (int i = threadIdx.x; i < 3 * BINS; i += FILTER_THREADS)
            b.digit[i / BINS][i % BINS] = 0;
        __syncthreads();
        each_token(r, scale, [&](const float(&z)[4], int t) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t order = order_of(z[i]);
                if (t + i >= r.vocab || order < floor) continue;
                if (shift < 21 && order >> (shift + width) != prefix) continue;
                uint32_t bin = order >> shift & (n_bins - 1);
                unsigned long long weight = MASS ? mass_of(z[i], max) : 1ull;
#pragma unroll
                for (int digit = 0; digit < (MASS ? 3 : 1); digit++) {
                    uint32_t part =
                        weight >> digit * DIGIT_BITS & (digit < 2 ? (1u << DIGIT_BITS) - 1 : ~0u);
                    if (part) atomicAdd(&b.digit[digit][bin], part);
                }
            }
        });
        __syncthreads();
        // lane 0 has the highest bins; the first lane at whose end the target is reached looks
        // closer
        if (threadIdx.x < 32) {
            int per_lane = n_bins / 32, high = n_bins - 1 - (int)threadIdx.x * per_lane;
            unsigned long long own = 0;
            for (int i = 0; i < per_lane; i++) own += bin_sum(b, high - i);
            const unsigned long long until = lanes_until(own);
            unsigned reached = __ballot_sync(~0u, (double)(above + until) >= target && own > 0);
            unsigned nonempty = __ballot_sync(~0u, own > 0);
            int lane = reached ? __ffs(reached) - 1 : nonempty ? 31 - __clz(nonempty) : 31;
            if ((int)threadIdx.x == lane) {
                unsigned long long sum = above + until - own;
                int bin = high, last = high;
                unsigned long long above_last = sum;
                for (; bin > high - per_lane; bin--) {
                    unsigned long long here = bin_sum(b, bin);
                    if (!here) continue;
                    last = bin;
                    above_last = sum;
                    sum += here;
                    if ((double)sum >= target) break;
                }
                chosen = prefix << width | (uint32_t)last;
                above_chosen = above_last;
            }
        }
        __syncthreads();
        prefix = chosen;
        above = above_chosen;
        __syncthreads();
    }
    return prefix;
}

// Block: row.
template <bool MASKED>
__global__ void __launch_bounds__(FILTER_THREADS)
    filter_kernel(sample_result *result, row_stats *stats, const row_set set)
{
    grid_begin();
    __shared__ bins b;
    __shared__ float shared[32];
    __shared__ ranked bests[32];
    const row_view r = row_of<MASKED>(set, blockIdx.x);
    const sample_params p = r.params;
    const int vocab = r.vocab;
    if (!r.logits || !sampling_filters(&p, vocab)) return;
    row_stats known = stats[blockIdx.x];
    const float scale = sampling_scale(&p), max = known.max;
    const bool samples = r.samples && p.temperature != 0.f;

    uint32_t floor = 0;
    if (sampling_by_top_k(&p, vocab)) floor = select<false>(r, scale, max, 0, p.top_k, b);
    if (sampling_by_top_p(&p)) {
        __shared__ unsigned long long total;
        if (threadIdx.x == 0) total = 0;
        __syncthreads();
        unsigned long long own = 0;
        each_token(r, scale, [&](const float(&z)[4], int t) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (t + i < vocab && order_of(z[i]) >= floor) own += mass_of(z[i], max);
        });
        atomicAdd(&total, own);
        __syncthreads();
        floor = select<true>(r, scale, max, floor, (double)p.top_p * (double)total, b);
    }

    float kept = 0;
    ranked best = {-INFINITY, vocab - 1};
    each_token(r, scale, [&](const float(&z)[4], int t) {
        bool keeps[4], any = false;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float e = expf(z[i] - max);
            keeps[i] = t + i < vocab && is_kept(z[i], e, floor, p);
            if (keeps[i]) kept += e;
            any |= keeps[i] && z[i] + RNG_GUMBEL_MAX >= best.value;
        }
        if (!samples || !any) return;
        uint32_t bits[4];
        sampling_block(&p, t / 4, SAMPLING_GUMBEL, bits);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (keeps[i]) better(best, {z[i] + sampling_gumbel(&p, t + i, bits[i]), t + i});
    });
    kept = block_sum(kept, shared);
    best = block_first(best, bests);
    if (threadIdx.x) return;
    known.kept = kept;
    known.floor = floor;
    stats[blockIdx.x] = known;
    if (!r.samples) return;
    // a greedy row has its token, the likeliest, from the first kernel
    if (samples)
        result[blockIdx.x] = result_of(best.index, scaled_z(r, best.index, scale), known, true);
    else
        result[blockIdx.x] = result_of(result[blockIdx.x].token, max, known, true);
}

// ---- drafts ------------------------------------------------------------------------------------

// The probability of a token after temperature and filtering.
INLINE float probability(float z, const row_stats &s, const sample_params &p)
{
    float e = expf(z - s.max);
    return is_kept(z, e, s.floor, p) ? e / s.kept : 0.f;
}

// Block (tile, row), after the rows' statistics are known.
template <bool MASKED>
__global__ void __launch_bounds__(THREADS)
    verify_kernel(sample_result *result, const row_stats *stats, vocab_tile *tiles,
                  unsigned *tickets, const row_set set)
{
    grid_begin();
    const int i = blockIdx.y, draft = set.drafts[i].token;
    const row_view target = row_of<MASKED>(set, i);
    const sample_params p = target.params;
    if (!is_verified(set, i, p)) return;
    const row_view source = row_of<MASKED>(set, set.n + i);
    const row_stats sp = stats[i], sq = stats[set.n + i];
    const float scale = sampling_scale(&p), z_draft = scaled_z(target, draft, scale);
    const bool filtered = sampling_filters(&p, set.vocab);

    double q_draft = probability(source.logits[draft] * scale, sq, p);
    if (sampling_acceptance(&p) * q_draft < (double)probability(z_draft, sp, p)) {
        if (blockIdx.x == 0 && threadIdx.x == 0)
            result[i] = result_of(draft, z_draft, sp, filtered);
        return;
    }

    __shared__ ranked bests[32];
    ranked best = {-INFINITY, set.vocab - 1};
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        int t = blockIdx.x * TILE + (j * THREADS + threadIdx.x) * 4;
        float z[4], z_source[4], residual[4];
        load_row(z, target, t, scale);
        load_row(z_source, source, t, scale);
        bool any = false;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            residual[k] = probability(z[k], sp, p) - probability(z_source[k], sq, p);
            if (t + k == draft)
                residual[k] = 0.f; // however its two probabilities were rounded here
            any |= residual[k] > 0.f;
        }
        if (!any) continue;
        uint32_t bits[4];
        sampling_block(&p, t / 4, SAMPLING_GUMBEL, bits);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (residual[k] > 0.f)
                better(best, {logf(residual[k]) + sampling_gumbel(&p, t + k, bits[k]), t + k});
    }
    best = block_first(best, bests);
    if (threadIdx.x == 0) tiles[(int64_t)i * gridDim.x + blockIdx.x].best = best;
    if (!last_block(&tickets[i], gridDim.x) || threadIdx.x >= 32) return;
    best = best_of_tiles(tiles + (int64_t)i * gridDim.x, gridDim.x, set.vocab);
    // without a residual the plain sample stands
    if (threadIdx.x == 0 && best.value > -INFINITY)
        result[i] = result_of(best.index, scaled_z(target, best.index, scale), sp, filtered);
}

template <bool MASKED>
static void launch_sampling(struct device *dev, struct sample_result *result,
                            struct row_stats *stats, struct vocab_tile *tiles,
                            const struct row_set &set)
{
    const int n_tiles = ceil_div(set.vocab, TILE), rows = set.drafts ? 2 * set.n : set.n;
    unsigned *tickets = cuda_use(dev)->tickets;
    cuda_launch(dev, "sample", scan_kernel<MASKED>, dim3(n_tiles, rows), THREADS, 0, result, stats,
                tiles, tickets, set);
    cuda_launch(dev, "sample", filter_kernel<MASKED>, rows, FILTER_THREADS, 0, result, stats, set);
    if (set.drafts)
        cuda_launch(dev, "sample", verify_kernel<MASKED>, dim3(n_tiles, set.n), THREADS, 0, result,
                    stats, tiles, tickets, set);
}

void cuda_sample(struct device *dev, struct sample_result *result, const struct sample_args *args)
{
    const int n = args->n, vocab = args->vocab, draft_vocab = args->draft_vocab;
    if (n <= 0) return;
    int rows = args->drafts ? 2 * n : n;
    if (rows > N_TICKETS - 1 || vocab < 1 || vocab > MAX_VOCAB) {
        device_fail(dev, "sample: %d rows of %d logits, drafts' rows among them; at most %d of %d",
                    rows, vocab, N_TICKETS - 1, MAX_VOCAB);
        return;
    }
    if (!sample_takes(dev, args)) return;
    int n_tiles = ceil_div(vocab, TILE);
    size_t stats_at = (size_t)rows * n_tiles * sizeof(struct vocab_tile);
    stats_at = (stats_at + 255) / 256 * 256;
    char *work = (char *)cuda_workspace(dev, stats_at + rows * sizeof(struct row_stats));
    if (!work) return;
    struct vocab_tile *tiles = (struct vocab_tile *)work;
    struct row_stats *stats = (struct row_stats *)(work + stats_at);
    struct row_set set = {*args, false, false};
    set.in_fours = aligned(16, {args->logits}, {(int64_t)vocab * 4});
    set.draft_in_fours = aligned(16, {args->draft_logits}, {(int64_t)draft_vocab * 4});
    if (args->masks)
        launch_sampling<true>(dev, result, stats, tiles, set);
    else
        launch_sampling<false>(dev, result, stats, tiles, set);
}
