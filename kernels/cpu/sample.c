/* sample.c: draws a token for each row of logits. Every cut (top-k, top-p, min-p) keeps the tokens
 * whose logit reaches a threshold, so the three come down to one number, found by partial selection
 * and never by sorting the vocabulary. Without a cut nothing is selected. A row is one thread's. */
#include "common/base/rng.h"
#include "kernels/cpu/cpu.h"
#include <omp.h>

// The largest value -log(-log(u)) takes for u of rng_open01 (1 - 2^-24), rounded up.
#define GUMBEL_MAX 16.7f

static inline float probability(float z, float max)
{
    return exp_f32(z - max);
}

/* The largest value v of z[0..n) such that the weight of all entries >= v is at least `target`; the
 * weight of an entry is 1 (by_count) or e^(z - max). Quickselect: z is reordered. Where rounding
 * keeps the whole from reaching the target, the smallest value. */
static float select_threshold(float *z, int n, double target, bool by_count, float max)
{
    double above = 0; // weight of entries known to lie above z[lo..hi)
    int lo = 0, hi = n;
    float threshold = max;
    while (lo < hi) {
        float a = z[lo], b = z[lo + (hi - lo) / 2], c = z[hi - 1];
        float pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
        // three parts: z[lo..gt) > pivot, z[gt..i) == pivot, z[lt..hi) < pivot
        int gt = lo, i = lo, lt = hi;
        double greater = 0;
        while (i < lt) {
            float x = z[i];
            if (x > pivot) {
                greater += by_count ? 1.0 : (double)probability(x, max);
                z[i++] = z[gt];
                z[gt++] = x;
            } else if (x < pivot) {
                z[i] = z[--lt];
                z[lt] = x;
            } else {
                i++;
            }
        }
        double equal = (double)(lt - gt) * (by_count ? 1.0 : (double)probability(pivot, max));
        if (above + greater >= target) {
            hi = gt;
            continue;
        }
        threshold = pivot;
        above += greater + equal;
        if (above >= target) break;
        lo = lt;
    }
    return threshold;
}

// The lowest scaled logit that the cuts of `params` keep; -inf where there is none.
static float cut_threshold(const float *z, int vocab, float max, const struct sample_params *params,
                           float *scratch)
{
    const bool by_k = params->top_k > 0 && params->top_k < vocab, by_p = params->top_p < 1.0f;
    float threshold = -INFINITY;
    int n = vocab;
    if (by_k || by_p) memcpy(scratch, z, (size_t)vocab * sizeof *scratch);
    if (by_k) threshold = select_threshold(scratch, n, params->top_k, true, max);
    if (by_p) {
        double mass = 0;
        n = 0;
        for (int t = 0; t < vocab; t++) {
            if (!(z[t] >= threshold)) continue;
            mass += (double)probability(z[t], max);
            scratch[n++] = z[t];
        }
        threshold = select_threshold(scratch, n, params->top_p * mass, false, max);
    }
    return threshold;
}

// Sum of e^(z - max) over the entries that reach the threshold and the min-p bound.
static double kept_sum(const float *z, int vocab, float max, float threshold, float min_p)
{
    double sum = 0;
    for (int start = 0; start < vocab; start += 512) {
        int end = vocab - start < 512 ? vocab : start + 512;
        float part = 0;
#pragma omp simd reduction(+ : part)
        for (int t = start; t < end; t++) {
            float e = probability(z[t], max);
            part += (z[t] >= threshold && e >= min_p) ? e : 0.0f;
        }
        sum += part;
    }
    return sum;
}

static float gumbel(uint32_t bits)
{
    return -logf(-logf(rng_open01(bits)));
}

// The random words of tokens 4 * block .. 4 * block + 3.
static void noise_block(const struct sample_params *params, int block, uint32_t bits[4])
{
    const uint32_t key[2] = {(uint32_t)params->seed, (uint32_t)(params->seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)block, 0, (uint32_t)params->position,
                                 (uint32_t)(params->position >> 32)};
    philox4x32(counter, key, bits);
}

// The least u whose noise could lift the likeliest token's logit over `score`, with room for
// rounding.
static float least_u(float score, float max)
{
    return (float)(exp(-exp(-((double)score - max - 1e-3))) - 1e-6);
}

/* argmax over kept tokens of z + noise. The search starts from the likeliest token. Passed over are
 * tokens that could not win with the largest noise there is (most of a peaked vocabulary), and then
 * tokens whose noise would not do even for the likeliest (most of a flat one): both without a log.
 */
static int draw(const float *z, int vocab, float max, float threshold,
                const struct sample_params *params, int likeliest)
{
    uint32_t bits[4];
    noise_block(params, likeliest / 4, bits);
    int best = likeliest;
    float best_score = z[best] + gumbel(bits[best % 4]), u_bound = least_u(best_score, max);
    for (int start = 0; start < vocab; start += 4) {
        int end = vocab - start < 4 ? vocab : start + 4;
        bool possible = false;
        for (int t = start; t < end; t++)
            possible |= z[t] >= threshold && z[t] + GUMBEL_MAX >= best_score;
        if (!possible) continue;
        noise_block(params, start / 4, bits);
        for (int t = start; t < end; t++) {
            if (!(z[t] >= threshold) || rng_open01(bits[t - start]) < u_bound) continue;
            if (params->min_p > 0 && probability(z[t], max) < params->min_p) continue;
            float score = z[t] + gumbel(bits[t - start]);
            if (score > best_score || (score == best_score && t < best)) {
                best_score = score;
                best = t;
                u_bound = least_u(score, max);
            }
        }
    }
    return best;
}

// z: scaled logits, scratch: both (vocab)
static struct sample_result sample_row(const float *logits, int vocab,
                                       const struct sample_params *params, float *z, float *scratch)
{
    const bool greedy = params->temperature == 0;
    const float scale = greedy ? 1.0f : 1.0f / params->temperature;
    float max = -INFINITY;
    int likeliest = 0;
#pragma omp simd reduction(max : max)
    for (int t = 0; t < vocab; t++) {
        z[t] = logits[t] * scale;
        max = z[t] > max ? z[t] : max;
    }
    while (likeliest < vocab - 1 && z[likeliest] != max) likeliest++;

    float threshold = cut_threshold(z, vocab, max, params, scratch);
    double all = kept_sum(z, vocab, max, -INFINITY, 0), kept = all;
    if (threshold > -INFINITY || params->min_p > 0)
        kept = kept_sum(z, vocab, max, threshold, params->min_p);
    int token = greedy ? likeliest : draw(z, vocab, max, threshold, params, likeliest);
    return (struct sample_result){
        .token = token,
        .logprob = (float)((double)(z[token] - max) - log(all)),
        .cut_logprob = (float)((double)(z[token] - max) - log(kept)),
        .kept_mass = (float)(kept / all),
    };
}

void cpu_sample(struct device *dev, struct sample_result *result, const float *logits,
                const struct sample_params *params, int n, int vocab)
{
    size_t row = ((size_t)vocab + 15) / 16 * 16;
    float *scratch = cpu_workspace(dev, (size_t)omp_get_max_threads() * 2 * row * sizeof *scratch);
    if (!scratch) return;
#pragma omp parallel for if ((int64_t)n * vocab > PARALLEL_WORK / 8)
    for (int i = 0; i < n; i++) {
        float *z = scratch + (size_t)omp_get_thread_num() * 2 * row;
        result[i] = sample_row(logits + (int64_t)i * vocab, vocab, &params[i], z, z + row);
    }
}
