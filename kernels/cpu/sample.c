/* sample.c: samples a token for each row of logits. Every filter (top-k, top-p, min-p) keeps the
 * tokens whose logit reaches a threshold, so the three come down to one number, found by partial
 * selection and never by sorting the vocabulary. Without a filter nothing is selected. The residual
 * of a rejected draft is sampled as a row of logits is, its logarithm taking their place. A row is
 * one thread's. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include "kernels/sampling.h"
#include <omp.h>

enum { CHUNK = 512 }; // as in logprob.c

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

// The lowest scaled logit that top-k and top-p of `params` keep; -inf where there is none.
static float filter_threshold(const float *z, int vocab, float max,
                              const struct sample_params *params, float *scratch)
{
    const bool by_k = sampling_by_top_k(params, vocab), by_p = sampling_by_top_p(params);
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
    for (int start = 0; start < vocab; start += CHUNK) {
        int end = vocab - start < CHUNK ? vocab : start + CHUNK;
        float kept[CHUNK];
#pragma omp simd
        for (int t = start; t < end; t++) {
            float e = probability(z[t], max);
            kept[t - start] = (z[t] >= threshold && e >= min_p) ? e : 0.0f;
        }
        sum += sum_f32(kept, end - start);
    }
    return sum;
}

#define BLOCKS 16           // whose words are made side by side
#define SPAN   (BLOCKS * 4) // their tokens

// The SAMPLING_GUMBEL words of tokens 4 * first .. : that of token 4 * first + t is bits[t % 4][t /
// 4].
static void random_span(const struct sample_params *params, int first, uint32_t bits[4][BLOCKS])
{
    uint32_t key[2], counter[4];
    sampling_key(params, key);
    for (int b = 0; b < BLOCKS; b++) {
        sampling_counter(params, (uint32_t)(first + b), SAMPLING_GUMBEL, counter);
        for (int word = 0; word < 4; word++) bits[word][b] = counter[word];
    }
    for (uint32_t round = 0; round < PHILOX_ROUNDS; round++)
#pragma omp simd
        for (int b = 0; b < BLOCKS; b++)
            philox_round(&bits[0][b], &bits[1][b], &bits[2][b], &bits[3][b], key, round);
}

/* The least word whose noise could lift the logit z over `score`, with room for rounding: noise is
 * below -log(1 - u), since -log(u) > 1 - u. */
static uint32_t min_word(float z, float score)
{
    const double room = 1e-3 + 1e-6 * fabs((double)score);
    const double most = exp((double)z - (double)score + room) * 4294967296.0 + 512; // of 1 - u
    return most < 4294967295.0 ? ~(uint32_t)most : 0;
}

// A row after temperature and filtering.
struct distribution {
    const float *z; // (vocab) scaled logits
    int vocab, likeliest;
    float max, threshold, min_p; // kept: z >= threshold and e^(z - max) >= min_p
    double all, kept;            // sums of e^(z - max)
};

// The largest logit of a span that reaches the threshold; -inf: none does.
static float span_max(const float *z, int n, float threshold)
{
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int t = 0; t < n; t++) most = z[t] >= threshold && z[t] > most ? z[t] : most;
    return most;
}

static bool any_word(uint32_t bits[4][BLOCKS], uint32_t min)
{
    int any = 0;
    for (int word = 0; word < 4; word++)
#pragma omp simd reduction(| : any)
        for (int b = 0; b < BLOCKS; b++) any |= bits[word][b] >= min;
    return any;
}

/* argmax over kept tokens of z + noise; the sums of `d` are not used. The search starts from the
 * likeliest token. Spans are passed over without a random word where the largest noise there is
 * would not make them win, and without a log where no word in them is large enough. */
static int sample_token(const struct distribution *d, const struct sample_params *params)
{
    const float *z = d->z;
    uint32_t bits[4][BLOCKS], block[4];
    int best = d->likeliest;
    sampling_block(params, (uint32_t)best / 4, SAMPLING_GUMBEL, block);
    float best_score = z[best] + sampling_gumbel(params, best, block[best % 4]);
    for (int start = 0; start < d->vocab; start += SPAN) {
        int n = d->vocab - start < SPAN ? d->vocab - start : SPAN;
        float most = span_max(z + start, n, d->threshold);
        if (!(most + RNG_GUMBEL_MAX >= best_score)) continue;
        random_span(params, start / 4, bits);
        uint32_t min = min_word(most, best_score);
        if (!any_word(bits, min)) continue;
        for (int i = 0; i < n; i++) {
            int t = start + i;
            uint32_t word = bits[i % 4][i / 4];
            if (!(z[t] >= d->threshold) || word < min) continue;
            if (d->min_p > 0 && probability(z[t], d->max) < d->min_p) continue;
            float score = z[t] + sampling_gumbel(params, t, word);
            if (score > best_score || (score == best_score && t < best)) {
                best_score = score;
                best = t;
            }
        }
    }
    return best;
}

// mask: NULL, anything may come. z and scratch (vocab) are the caller's; the distribution refers to
// z.
static struct distribution distribution_of(const float *logits, const uint32_t *mask, int vocab,
                                           const struct sample_params *params, float *z,
                                           float *scratch)
{
    const float scale = sampling_scale(params);
    struct distribution d = {.z = z, .vocab = vocab, .min_p = params->min_p};
    for (int t = 0; t < vocab; t++) z[t] = logits[t] * scale;
    for (int t = 0; mask && t < vocab; t++)
        if (!(mask[t / 32] >> t % 32 & 1)) z[t] = MIN_LOGIT * scale;
    const float max = max_f32(z, vocab);
    while (d.likeliest < vocab - 1 && z[d.likeliest] != max) d.likeliest++;
    d.max = max;
    d.threshold = filter_threshold(z, vocab, max, params, scratch);
    d.all = d.kept = kept_sum(z, vocab, max, -INFINITY, 0);
    if (d.threshold > -INFINITY || d.min_p > 0)
        d.kept = kept_sum(z, vocab, max, d.threshold, d.min_p);
    return d;
}

static double probability_of(const struct distribution *d, int token)
{
    if (token >= d->vocab || !(d->z[token] >= d->threshold)) return 0;
    float e = probability(d->z[token], d->max);
    return e >= d->min_p ? (double)e / d->kept : 0;
}

// The token of a row whose draft, sampled from q, was rejected. log_residual: (p->vocab) scratch.
static int sample_residual(const struct distribution *p, const struct distribution *q,
                           const struct sample_params *params, float *log_residual)
{
    struct distribution residual = {
        .z = log_residual, .vocab = p->vocab, .max = -INFINITY, .threshold = -INFINITY};
    for (int t = 0; t < p->vocab; t++) {
        double mass = probability_of(p, t) - probability_of(q, t);
        log_residual[t] = mass > 0 ? logf((float)mass) : -INFINITY;
        if (log_residual[t] <= residual.max) continue;
        residual.max = log_residual[t];
        residual.likeliest = t;
    }
    return sample_token(residual.max > -INFINITY ? &residual : p, params);
}

static bool accepted(const struct distribution *p, const struct distribution *q, int draft,
                     const struct sample_params *params)
{
    return sampling_acceptance(params) * probability_of(q, draft) < probability_of(p, draft);
}

// scratch: (2, stride), or (3, stride) where row i has a draft.
static struct sample_result sample_row(const struct sample_args *args, int i, float *scratch,
                                       size_t stride)
{
    const struct sample_params *params = &args->params[i];
    const struct sample_draft draft =
        args->drafts ? args->drafts[i] : (struct sample_draft){-1, -1};
    const uint32_t *mask = args->masks && params->mask > 0
                               ? args->masks + (int64_t)(params->mask - 1) * MASK_WORDS(args->vocab)
                               : NULL;
    float *spare = scratch + stride;
    const struct distribution p = distribution_of(args->logits + (int64_t)i * args->vocab, mask,
                                                  args->vocab, params, scratch, spare);
    int token;
    if (params->temperature == 0) {
        token = p.likeliest;
    } else if (draft.token < 0) {
        token = sample_token(&p, params);
    } else {
        const struct distribution q =
            distribution_of(args->draft_logits + (int64_t)draft.row * args->draft_vocab, NULL,
                            args->draft_vocab, params, scratch + 2 * stride, spare);
        token = accepted(&p, &q, draft.token, params) ? draft.token
                                                      : sample_residual(&p, &q, params, spare);
    }
    return (struct sample_result){
        .token = token,
        .logprob = (float)((double)(p.z[token] - p.max) - log(p.all)),
        .processed_logprob = (float)((double)(p.z[token] - p.max) - log(p.kept)),
        .retained_mass = (float)(p.kept / p.all),
    };
}

static bool drafts_are_valid(struct device *dev, const struct sample_args *args)
{
    if (!sample_takes(dev, args)) return false;
    for (int i = 0; args->drafts && i < args->n; i++) {
        const struct sample_draft d = args->drafts[i];
        if (d.token < 0 || (d.token < args->draft_vocab && d.row >= 0)) continue;
        device_fail(dev,
                    "sample: the draft of row %d, token %d sampled from row %d, is outside the "
                    "vocabulary of %d or the rows",
                    i, d.token, d.row, args->draft_vocab);
        return false;
    }
    return true;
}

void cpu_sample(struct device *dev, struct sample_result *result, const struct sample_args *args)
{
    if (!drafts_are_valid(dev, args)) return;
    const size_t stride = ((size_t)args->vocab + 15) / 16 * 16;
    const size_t each = (args->drafts ? 3 : 2) * stride;
    float *scratch = cpu_workspace(dev, (size_t)omp_get_max_threads() * each * sizeof *scratch);
    if (!scratch) return;
#pragma omp parallel for if ((int64_t)args->n * args->vocab > PARALLEL_WORK / 8)
    for (int i = 0; i < args->n; i++)
        result[i] = sample_row(args, i, scratch + (size_t)omp_get_thread_num() * each, stride);
}
