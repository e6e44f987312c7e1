/* sample.cu: draws a token for each row of logits.
 *
 * Without a cut one pass does: blocks of 4096 logits keep their maximum, their sum and their best
 * score, and the last block of a row joins them. Rows with a cut (the host cannot know: the
 * parameters are in device memory) go on in a second kernel, one block a row: every cut keeps the
 * tokens whose logit reaches a threshold, so top-k and top-p come down to radix selection over the
 * logits' bits, by count and by mass. Masses are summed as 40-bit fixed-point integers: the order
 * of atomic additions does not matter. Pieces have a fixed size, so a row's result does not depend
 * on the other rows.
 */
#include "kernels/cuda/cuda.cuh"
#include "common/base/rng.h"

#define THREADS     256
#define GROUPS      4 // of 4 neighbouring tokens for each thread
#define PIECE       (THREADS * GROUPS * 4)
#define CUT_THREADS 1024
// -log(-log(u)) for u of rng_open01 lies between these
#define GUMBEL_MIN -2.83f
#define GUMBEL_MAX 16.7f

struct piece {
    float max, sum; // of z, and of e^(z - max)
    float score, z; // best score and its token's z
    int token;
};

__device__ __forceinline__ bool has_cut(const sample_params &p, int vocab)
{
    return (p.top_k > 0 && p.top_k < vocab) || p.top_p < 1.f || p.min_p > 0.f;
}

__device__ __forceinline__ float scale_of(const sample_params &p)
{
    return p.temperature == 0.f ? 1.f : 1.f / p.temperature;
}

// z of the tokens t .. t + 3; -inf past the end
__device__ __forceinline__ void load_scaled(float (&z)[4], const float *row, int t, int vocab,
                                            float scale, bool in_fours)
{
    if (in_fours && t + 3 < vocab)
        load<float, 4>(z, row + t);
    else
#pragma unroll
        for (int i = 0; i < 4; i++) z[i] = t + i < vocab ? row[t + i] : -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; i++) z[i] *= scale;
}

__device__ __forceinline__ void noise(uint32_t (&bits)[4], const sample_params &p, int t)
{
    const uint32_t key[2] = {(uint32_t)p.seed, (uint32_t)(p.seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)t / 4, 0, (uint32_t)p.position,
                                 (uint32_t)(p.position >> 32)};
    philox4x32(counter, key, bits);
}

__device__ __forceinline__ float gumbel(uint32_t bits)
{
    return -logf(-logf(rng_open01(bits)));
}

// Keeps the better of two candidates in `best`; the lower token wins a tie.
__device__ __forceinline__ void better(piece &best, float score, float z, int token)
{
    if (score > best.score || (score == best.score && token < best.token)) {
        best.score = score;
        best.z = z;
        best.token = token;
    }
}

__device__ __forceinline__ void lanes_best(piece &best)
{
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        float score = __shfl_xor_sync(~0u, best.score, o), z = __shfl_xor_sync(~0u, best.z, o);
        int token = __shfl_xor_sync(~0u, best.token, o);
        better(best, score, z, token);
    }
}

// The best of a block, valid in warp 0.
__device__ __forceinline__ void block_best(piece &best)
{
    __shared__ piece shared[32];
    lanes_best(best);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x < 32) {
        if (threadIdx.x < blockDim.x / 32) best = shared[threadIdx.x];
        lanes_best(best);
    }
}

// Block (piece, row). stats: (maximum, sum) of each row, for the second kernel.
__global__ void __launch_bounds__(THREADS)
    scan_kernel(sample_result *result, float2 *stats, piece *pieces, unsigned *tickets,
                const float *logits, const sample_params *params, int vocab, bool in_fours)
{
    grid_begin();
    __shared__ float shared[32];
    const sample_params p = params[blockIdx.y];
    const float *row = logits + (int64_t)blockIdx.y * vocab;
    const bool greedy = p.temperature == 0.f;
    const float scale = scale_of(p);
    int t0 = blockIdx.x * PIECE + threadIdx.x * 4;

    float z[GROUPS][4], max = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
        load_scaled(z[j], row, t0 + j * THREADS * 4, vocab, scale, in_fours);
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) max = fmaxf(max, z[j][i]);
    max = block_max(max, shared);
    float shift = max == -INFINITY ? 0.f : max;
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum += expf(z[j][i] - shift);
    sum = block_sum(sum, shared);

    piece best = {max, sum, -INFINITY, -INFINITY, vocab - 1};
    const bool draws = !greedy && !has_cut(p, vocab);
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        int t = t0 + j * THREADS * 4;
        float likeliest = fmaxf(fmaxf(z[j][0], z[j][1]), fmaxf(z[j][2], z[j][3]));
        // what could not win with the largest noise is passed over
        if (likeliest == -INFINITY || likeliest + GUMBEL_MAX < max + GUMBEL_MIN) continue;
        uint32_t bits[4];
        if (draws) noise(bits, p, t);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (z[j][i] > -INFINITY)
                better(best, z[j][i] + (draws ? gumbel(bits[i]) : 0.f), z[j][i], t + i);
    }
    block_best(best);
    if (threadIdx.x == 0) pieces[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = best;
    if (!last_block(&tickets[blockIdx.y], gridDim.x) || threadIdx.x >= 32) return;

    const piece *of_row = pieces + (int64_t)blockIdx.y * gridDim.x;
    best.score = -INFINITY;
    best.token = vocab - 1;
    max = -INFINITY;
    for (int i = threadIdx.x; i < gridDim.x; i += 32) {
        const volatile piece &o = of_row[i];
        max = fmaxf(max, o.max);
        better(best, o.score, o.z, o.token);
    }
    max = lanes_max(max);
    lanes_best(best);
    sum = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += 32) {
        const volatile piece &o = of_row[i];
        sum += o.max == -INFINITY ? 0.f : o.sum * expf(o.max - max);
    }
    sum = lanes_sum(sum);
    if (threadIdx.x) return;
    float logprob = (best.z - max) - logf(sum);
    stats[blockIdx.y] = make_float2(max, sum);
    result[blockIdx.y] = {best.token, logprob, logprob, 1.f};
}

// ---- the cut
// -------------------------------------------------------------------------------------

#define BINS 2048

/* A mass in units of 2^-41 of the likeliest token's. Shared memory adds 32-bit integers natively
 * and 64-bit ones by trial, so a bin has three sums, of the mass's digits in base 2^14. A
 * vocabulary of up to 2^18 cannot overflow them. */
#define DIGIT_BITS 14
#define MAX_VOCAB  (1 << 18)

struct bins {
    uint32_t digit[3][BINS];
};

__device__ __forceinline__ unsigned long long mass_of(float z, float max)
{
    return (unsigned long long)(expf(z - max) * 2199023255552.f);
}

__device__ __forceinline__ unsigned long long bin_sum(const bins &b, int i)
{
    return b.digit[0][i] + ((unsigned long long)b.digit[1][i] << DIGIT_BITS) +
           ((unsigned long long)b.digit[2][i] << 2 * DIGIT_BITS);
}

// Unsigned integers in the order of the floats.
__device__ __forceinline__ uint32_t order_of(float x)
{
    uint32_t u = __float_as_uint(x);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Calls f(z, t) for every token of the row that is this thread's.
template <typename F>
__device__ __forceinline__ void each_token(const float *row, int vocab, float scale, bool in_fours,
                                           F f)
{
#pragma unroll 2
    for (int t = threadIdx.x * 4; t < vocab; t += CUT_THREADS * 4) {
        float z[4];
        load_scaled(z, row, t, vocab, scale, in_fours);
        f(z, t);
    }
}

/* The order of the largest value v such that the weight of all tokens >= v, among those of order
 * `floor` and above, is at least `target`; the weight of a token is 1 (!MASS) or mass_of it. Where
 * the whole does not reach the target: that of the smallest. */
template <bool MASS>
__device__ uint32_t select(const float *row, int vocab, float scale, bool in_fours, float max,
                           uint32_t floor, double target, bins &b)
{
    __shared__ uint32_t chosen;
    __shared__ unsigned long long above_chosen;
    uint32_t prefix = 0;
    unsigned long long above = 0;
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
        int width = shift ? 11 : 10, n_bins = 1 << width;
        for (int i = threadIdx.x; i < 3 * BINS; i += CUT_THREADS) b.digit[i / BINS][i % BINS] = 0;
        __syncthreads();
        each_token(row, vocab, scale, in_fours, [&](const float(&z)[4], int t) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t order = order_of(z[i]);
                if (t + i >= vocab || order < floor) continue;
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
            unsigned long long own = 0, until;
            for (int i = 0; i < per_lane; i++) own += bin_sum(b, high - i);
            until = own;
#pragma unroll
            for (int o = 1; o < 32; o <<= 1) {
                unsigned long long before = __shfl_up_sync(~0u, until, o);
                if (threadIdx.x >= o) until += before;
            }
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
__global__ void __launch_bounds__(CUT_THREADS)
    cut_kernel(sample_result *result, const float2 *stats, const float *logits,
               const sample_params *params, int vocab, bool in_fours)
{
    grid_begin();
    __shared__ bins b;
    __shared__ float shared[32];
    const sample_params p = params[blockIdx.x];
    if (!has_cut(p, vocab)) return;
    const float *row = logits + (int64_t)blockIdx.x * vocab;
    const float scale = scale_of(p), max = stats[blockIdx.x].x, all = stats[blockIdx.x].y;
    const bool greedy = p.temperature == 0.f;

    uint32_t floor = 0;
    if (p.top_k > 0 && p.top_k < vocab)
        floor = select<false>(row, vocab, scale, in_fours, max, 0, p.top_k, b);
    if (p.top_p < 1.f) {
        __shared__ unsigned long long total;
        if (threadIdx.x == 0) total = 0;
        __syncthreads();
        unsigned long long own = 0;
        each_token(row, vocab, scale, in_fours, [&](const float(&z)[4], int t) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (t + i < vocab && order_of(z[i]) >= floor) own += mass_of(z[i], max);
        });
        atomicAdd(&total, own);
        __syncthreads();
        floor = select<true>(row, vocab, scale, in_fours, max, floor,
                             (double)p.top_p * (double)total, b);
    }

    float kept = 0;
    piece best = {0, 0, -INFINITY, -INFINITY, vocab - 1};
    each_token(row, vocab, scale, in_fours, [&](const float(&z)[4], int t) {
        bool keeps[4], any = false;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float e = expf(z[i] - max);
            keeps[i] = t + i < vocab && order_of(z[i]) >= floor && e >= p.min_p && z[i] > -INFINITY;
            if (keeps[i]) kept += e;
            any |= keeps[i] && z[i] + GUMBEL_MAX >= best.score;
        }
        if (greedy || !any) return;
        uint32_t bits[4];
        noise(bits, p, t);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (keeps[i]) better(best, z[i] + gumbel(bits[i]), z[i], t + i);
    });
    kept = block_sum(kept, shared);
    block_best(best);
    if (threadIdx.x) return;
    sample_result r = result[blockIdx.x];
    if (!greedy) {
        r.token = best.token;
        r.logprob = (best.z - max) - logf(all);
    }
    r.kept_mass = fminf(kept / all, 1.f);
    r.cut_logprob = r.logprob + logf(all) - logf(kept);
    result[blockIdx.x] = r;
}

void cuda_sample(struct device *dev, struct sample_result *result, const float *logits,
                 const struct sample_params *params, int n, int vocab)
{
    if (n <= 0) return;
    if (n > N_TICKETS - 1 || vocab < 1 || vocab > MAX_VOCAB) {
        device_fail(dev, "sample: %d rows of %d logits; at most %d rows of %d", n, vocab,
                    N_TICKETS - 1, MAX_VOCAB);
        return;
    }
    int n_pieces = ceil_div(vocab, PIECE);
    size_t stats_at = (size_t)n * n_pieces * sizeof(struct piece);
    stats_at = (stats_at + 255) / 256 * 256;
    char *work = (char *)cuda_workspace(dev, stats_at + n * sizeof(float2));
    if (!work) return;
    bool in_fours = aligned(16, {logits}, {(int64_t)vocab * 4});
    cuda_launch(dev, "sample", scan_kernel, dim3(n_pieces, n), THREADS, 0, result,
                (float2 *)(work + stats_at), (struct piece *)work, cuda_use(dev)->tickets, logits,
                params, vocab, in_fours);
    cuda_launch(dev, "sample", cut_kernel, n, CUT_THREADS, 0, result,
                (const float2 *)(work + stats_at), logits, params, vocab, in_fours);
}
