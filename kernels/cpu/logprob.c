/* logprob.c: log-probability of a chosen token and entropy of each row of logits, the likeliest
 * tokens of a row, and the gradient. A row is one thread's and is summed in chunks (f32 within a
 * chunk, double over chunks), so that a vocabulary of 150,000 loses nothing and a row's result does
 * not depend on the others. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"

enum { CHUNK = 512 };

// Of e^(z - max) over a row's z = logit * scale, and of that times (z - max).
struct row_sums {
    float max;
    double sum, weighted;
};

static struct row_sums sum_row(const float *row, int vocab, float scale)
{
    const float max = max_f32(row, vocab) * scale;
    struct row_sums sums = {.max = max};
    for (int start = 0; start < vocab; start += CHUNK) {
        int end = vocab - start < CHUNK ? vocab : start + CHUNK;
        float each[CHUNK], weighted[CHUNK];
#pragma omp simd
        for (int t = start; t < end; t++) {
            float z = row[t] * scale - max, e = exp_f32(z);
            each[t - start] = e;
            weighted[t - start] = e > 0 ? e * z : 0; // a logit of -inf adds nothing
        }
        sums.sum += sum_f32(each, end - start);
        sums.weighted += sum_f32(weighted, end - start);
    }
    return sums;
}

static float logprob_of(float logit, float scale, float max, double log_sum)
{
    return (float)((double)(logit * scale - max) - log_sum);
}

static bool targets_are_valid(struct device *dev, const char *op, const struct head_args *head)
{
    for (int i = 0; i < head->n; i++) {
        if (head->target[i] >= 0 && head->target[i] < head->vocab) continue;
        device_fail(dev, "%s: target %d of row %d is outside the vocabulary of %d", op,
                    head->target[i], i, head->vocab);
        return false;
    }
    return true;
}

void cpu_logprob(struct device *dev, float *logprob, float *lse, float *entropy,
                 const struct head_args *head)
{
    if (!targets_are_valid(dev, "logprob", head)) return;
    const int vocab = head->vocab;
    const float scale = 1.0f / head->temperature;
#pragma omp parallel for if ((int64_t)head->n * vocab > PARALLEL_WORK / 8)
    for (int i = 0; i < head->n; i++) {
        const float *row = head->logits + (int64_t)i * vocab;
        const struct row_sums sums = sum_row(row, vocab, scale);
        const double log_sum = log(sums.sum);
        lse[i] = (float)(sums.max + log_sum);
        logprob[i] = logprob_of(row[head->target[i]], scale, sums.max, log_sum);
        if (entropy) entropy[i] = (float)(log_sum - sums.weighted / sums.sum);
    }
}

// A logit that is not a number comes last, so that every token has a place.
static bool is_before(float a, int32_t a_token, float b, int32_t b_token)
{
    a = isnan(a) ? -INFINITY : a;
    b = isnan(b) ? -INFINITY : b;
    return a > b || (a == b && a_token < b_token);
}

// The k likeliest tokens of a row, by insertion: all but a few fail against the last one held.
static void select_top(const float *row, int vocab, int k, struct token_logprob *ret)
{
    int held = 0;
    for (int32_t t = 0; t < vocab && k > 0; t++) {
        if (held == k && !is_before(row[t], t, row[ret[k - 1].token], ret[k - 1].token)) continue;
        int i = held < k ? held++ : k - 1;
        for (; i > 0 && is_before(row[t], t, row[ret[i - 1].token], ret[i - 1].token); i--)
            ret[i] = ret[i - 1];
        ret[i].token = t;
    }
    for (int i = 0; i < k; i++) ret[i].rank = i + 1;
}

void cpu_top_logprobs(struct device *dev, struct token_logprob *out, int k,
                      const struct head_args *head)
{
    const int32_t *target = head->target;
    const int vocab = head->vocab;
    if (!targets_are_valid(dev, "top_logprobs", head) || !top_logprobs_takes(dev, k, vocab)) return;
    const float scale = 1.0f / head->temperature;
#pragma omp parallel for if ((int64_t)head->n * vocab > PARALLEL_WORK / 8)
    for (int i = 0; i < head->n; i++) {
        const float *row = head->logits + (int64_t)i * vocab;
        struct token_logprob *of_row = out + (int64_t)i * (1 + k);
        const struct row_sums sums = sum_row(row, vocab, scale);
        const double log_sum = log(sums.sum);
        of_row[0] = (struct token_logprob){.token = target[i], .rank = 1};
        for (int32_t t = 0; t < vocab; t++)
            of_row[0].rank += is_before(row[t], t, row[target[i]], target[i]);
        select_top(row, vocab, k, of_row + 1);
        for (int j = 0; j <= k; j++)
            of_row[j].logprob = logprob_of(row[of_row[j].token], scale, sums.max, log_sum);
    }
}

// p log p falls to 0 with p, where a logit of -inf would make it no number.
static void add_entropy_back(float *out, const float *row, int vocab, float scale, float lse,
                             float entropy, float g)
{
#pragma omp simd
    for (int t = 0; t < vocab; t++) {
        const float log_p = row[t] * scale - lse, p = exp_f32(log_p);
        out[t] -= p > 0 ? g * p * (log_p + entropy) : 0;
    }
}

void cpu_logprob_back(struct device *dev, void *dlogits, const struct head_grads *grads,
                      const struct head_args *head, enum dtype dt)
{
    if (!cpu_is_f32(dev, "logprob_back", dt)) return;
    const int vocab = head->vocab;
    const float scale = 1.0f / head->temperature;
#pragma omp parallel for if ((int64_t)head->n * vocab > PARALLEL_WORK / 8)
    for (int i = 0; i < head->n; i++) {
        const float *row = head->logits + (int64_t)i * vocab;
        float *out = (float *)dlogits + (int64_t)i * vocab;
        float g = grads->dlogprob[i] * scale, shift = grads->lse[i];
        float e = grads->dentropy ? grads->dentropy[i] * scale : 0;
        if (g == 0) {
            memset(out, 0, (size_t)vocab * sizeof *out);
        } else {
#pragma omp simd
            for (int t = 0; t < vocab; t++) out[t] = -g * exp_f32(row[t] * scale - shift);
            out[head->target[i]] += g;
        }
        if (e != 0) add_entropy_back(out, row, vocab, scale, shift, grads->entropy[i], e);
    }
}

// ---- distillation ------------------------------------------------------------------------------

// A teacher's distribution and a student's, row by row; summed as above.
void cpu_distill(struct device *dev, float *divergence, float *overlap, void *dstudent,
                 const struct distill_args *args, enum dtype dt)
{
    const int n = args->n, vocab = args->vocab, teacher_vocab = args->teacher_vocab;
    const float beta = args->beta, inverse = 1.0f / args->temperature;
    if ((dstudent && !cpu_is_f32(dev, "distill", dt)) || !distill_takes(dev, args)) return;
#pragma omp parallel for if ((int64_t)n * vocab > PARALLEL_WORK / 8)
    for (int i = 0; i < n; i++) {
        const float *row_p = args->teacher + (int64_t)i * teacher_vocab;
        const float *row_q = args->student + (int64_t)i * vocab;
        const struct row_sums p = sum_row(row_p, vocab, inverse);
        const struct row_sums q = sum_row(row_q, vocab, inverse);
        const float p_share = (float)(1 / p.sum), q_share = (float)(1 / q.sum);
        // of beta 0 they stand outside of the sum
        const float p_log = beta == 0 ? 0 : (float)log(p.sum),
                    q_log = beta == 0 ? 0 : (float)log(q.sum);
        const float scale = args->scale * inverse * (args->weights ? args->weights[i] : 1);
        float *gradient = dstudent ? (float *)dstudent + (int64_t)i * vocab : NULL;
        double sum = 0, mean = 0, common = 0; // of values; of slopes, over q; of min(p, q)
        bool agrees = false;
        const int last = gradient && beta != 0; // a pass for the mean, before the gradient's
        for (int pass = 0; pass <= last; pass++)
            for (int start = 0; start < vocab; start += CHUNK) {
                const int end = vocab - start < CHUNK ? vocab : start + CHUNK;
                float value[CHUNK], slope[CHUNK], min[CHUNK];
                bool both = false;
#pragma omp simd reduction(|| : both)
                for (int t = start; t < end; t++) {
                    const float zp = row_p[t] * inverse - p.max, zq = row_q[t] * inverse - q.max;
                    const float pt = exp_f32(zp) * p_share, qt = exp_f32(zq) * q_share;
                    const struct distilled d = distil(beta, pt, qt, zp - p_log, zq - q_log);
                    value[t - start] = d.value;
                    slope[t - start] = qt * d.slope;
                    min[t - start] = pt < qt ? pt : qt;
                    both = both || (zp == 0 && zq == 0);
                    if (pass < last || !gradient) continue;
                    const float g = scale * (beta == 0 ? qt - pt : qt * (d.slope - (float)mean));
                    gradient[t] = args->add ? gradient[t] + g : g;
                }
                if (pass > 0) continue;
                agrees |= both;
                sum += sum_f32(value, end - start);
                mean += sum_f32(slope, end - start);
                common += sum_f32(min, end - start);
            }
        divergence[i] = (float)(beta == 0 ? sum - log(p.sum) + log(q.sum) : sum);
        overlap[i] = (float)common;
        if (args->agrees) args->agrees[i] = agrees;
    }
}
