/* sampler.c: owns the buffers that carry sampling parameters to the device and results back. The
 * engine's thread.
 *
 * What comes back each step is one sample_result a row; this copy's wait is the step's only one. A
 * row of logits (the vocabulary, half a megabyte) is copied out only for a request that asked for
 * the most likely tokens, and is sorted out on the host. */
#include "infer-server/engine/sampler.h"
#include "common/base/rng.h"
#include <math.h>
#include <stdlib.h>

#define LEAST_LOGIT (-1e30f) // finite, so that sums over a row stay numbers

struct sampler {
    struct device *dev;
    int max_rows, vocab, n_eos;
    const int *eos_ids; // the model config's
    struct sample_params *params, *host_params;
    struct sample_draft *drafts, *host_drafts;
    struct sample_result *results, *host_results;
    float *host_row;         // (vocab), once wanted
    struct top_logprob *top; // (max_rows, SAMPLER_MOST_TOP)
};

uint64_t sampler_stream(uint64_t seed, int sample)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)sample, 0, 0, 0};
    uint32_t words[4];
    philox4x32(counter, key, words);
    return (uint64_t)words[1] << 32 | words[0];
}

enum status sampler_new(struct device *dev, int max_rows, int vocab, const int *eos_ids, int n_eos,
                        struct sampler **ret)
{
    enum status st = ST_OK;
    struct sampler *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for a sampler");
    s->dev = dev;
    s->max_rows = max_rows;
    s->vocab = vocab;
    s->eos_ids = eos_ids;
    s->n_eos = n_eos;
    const size_t n = (size_t)max_rows;
    CHECK(device_alloc(dev, n * sizeof *s->params, (void **)&s->params));
    CHECK(device_alloc(dev, n * sizeof *s->drafts, (void **)&s->drafts));
    CHECK(device_alloc(dev, n * sizeof *s->results, (void **)&s->results));
    CHECK(device_host_alloc(dev, n * sizeof *s->host_params, (void **)&s->host_params));
    CHECK(device_host_alloc(dev, n * sizeof *s->host_drafts, (void **)&s->host_drafts));
    CHECK(device_host_alloc(dev, n * sizeof *s->host_results, (void **)&s->host_results));
    s->top = malloc(n * SAMPLER_MOST_TOP * sizeof *s->top);
    if (!s->top) {
        st = status_fail(ST_NO_MEMORY, "no memory for a sampler of %d rows", max_rows);
        goto out;
    }
    *ret = s;
    return ST_OK;
out:
    sampler_free(s);
    return st;
}

void sampler_free(struct sampler *s)
{
    if (!s) return;
    device_release(s->dev, s->params);
    device_release(s->dev, s->drafts);
    device_release(s->dev, s->results);
    device_host_release(s->dev, s->host_params);
    device_host_release(s->dev, s->host_drafts);
    device_host_release(s->dev, s->host_results);
    device_host_release(s->dev, s->host_row);
    free(s->top);
    free(s);
}

bool sampler_is_stop(const struct sampler *s, const struct sampling *sampling, int32_t token)
{
    for (int i = 0; i < s->n_eos && !sampling->ignore_eos; i++)
        if (s->eos_ids[i] == token) return true;
    for (int i = 0; i < sampling->n_stop_ids; i++)
        if (sampling->stop_ids[i] == token) return true;
    return false;
}

static void forbid(struct sampler *s, float *row, int32_t token)
{
    static const float least = LEAST_LOGIT;
    if (token >= 0 && token < s->vocab) device_copy_in(s->dev, row + token, &least, sizeof least);
}

static void forbid_stops(struct sampler *s, float *row, const struct sampling *sampling)
{
    for (int i = 0; i < s->n_eos && !sampling->ignore_eos; i++) forbid(s, row, s->eos_ids[i]);
    for (int i = 0; i < sampling->n_stop_ids; i++) forbid(s, row, sampling->stop_ids[i]);
}

static bool is_before(struct top_logprob a, struct top_logprob b)
{
    return a.logprob > b.logprob || (a.logprob == b.logprob && a.token < b.token);
}

void sampler_top(const float *logits, int vocab, float temperature, int n, struct top_logprob *ret)
{
    const double scale = temperature > 0 ? 1.0 / (double)temperature : 1.0;
    int held = 0;
    for (int t = 0; t < vocab; t++) { // by insertion: n is small
        struct top_logprob entry = {.token = t, .logprob = logits[t]};
        int i = held < n ? held++ : n - 1;
        if (i == n - 1 && held == n && t >= n && !is_before(entry, ret[i])) continue;
        for (; i > 0 && is_before(entry, ret[i - 1]); i--) ret[i] = ret[i - 1];
        ret[i] = entry;
    }
    const double most = ret[0].logprob;
    double sum = 0;
    for (int t = 0; t < vocab; t++) sum += exp(((double)logits[t] - most) * scale);
    const double log_sum = log(sum);
    for (int i = 0; i < n; i++)
        ret[i].logprob = (float)(((double)ret[i].logprob - most) * scale - log_sum);
}

static enum status list_most_likely(struct sampler *s, const float *logits,
                                    const struct sampler_row *rows, int n,
                                    const struct top_logprob **ret_top)
{
    for (int i = 0; i < n; i++) {
        const struct sampling *sampling = rows[i].sampling;
        ret_top[i] = NULL;
        if (sampling->logprobs < 1) continue;
        const size_t bytes = (size_t)s->vocab * sizeof(float);
        enum status st = ST_OK;
        if (!s->host_row) st = device_host_alloc(s->dev, bytes, (void **)&s->host_row);
        if (st != ST_OK) return st;
        device_copy_out(s->dev, s->host_row, logits + (size_t)i * (size_t)s->vocab, bytes);
        st = device_sync(s->dev);
        if (st != ST_OK) return st;
        struct top_logprob *top = s->top + (size_t)i * SAMPLER_MOST_TOP;
        sampler_top(s->host_row, s->vocab, sampling->temperature, sampling->logprobs, top);
        ret_top[i] = top;
    }
    return ST_OK;
}

enum status sampler_draw(struct sampler *s, float *logits, const struct sampler_row *rows, int n,
                         const struct sampler_drafts *drafts,
                         const struct sample_result **ret_results,
                         const struct top_logprob **ret_top)
{
    bool judges = false;
    for (int i = 0; i < n; i++) {
        const struct sampling *sampling = rows[i].sampling;
        s->host_params[i] = (struct sample_params){.temperature = sampling->temperature,
                                                   .top_p = sampling->top_p,
                                                   .min_p = sampling->min_p,
                                                   .top_k = sampling->top_k,
                                                   .seed = rows[i].stream,
                                                   .position = rows[i].position};
        s->host_drafts[i] = rows[i].draft;
        judges |= rows[i].draft.token >= 0;
        if (rows[i].no_stop) forbid_stops(s, logits + (size_t)i * (size_t)s->vocab, sampling);
    }
    device_copy_in(s->dev, s->params, s->host_params, (size_t)n * sizeof *s->params);
    if (judges) device_copy_in(s->dev, s->drafts, s->host_drafts, (size_t)n * sizeof *s->drafts);
    device_ops(s->dev)->sample(s->dev, s->results, logits, s->params, judges ? s->drafts : NULL,
                               judges ? drafts->logits : NULL, n, s->vocab,
                               judges ? drafts->vocab : 0);
    device_copy_out(s->dev, s->host_results, s->results, (size_t)n * sizeof *s->results);
    enum status st = device_sync(s->dev);
    if (st == ST_OK) st = list_most_likely(s, logits, rows, n, ret_top);
    if (st == ST_OK) *ret_results = s->host_results;
    return st;
}
