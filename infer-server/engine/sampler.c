/* sampler.c: owns the buffers that carry sampling parameters to the device and results back. The
 * engine's thread.
 *
 * What comes back each step is one sample_result a row; this copy's wait is the step's only one.
 * Where a request asked for the most likely tokens, or its logits were adjusted, its row is read
 * once more (logprobs.h) behind the sampling, when the logits are as the model gave them again. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/sampler.h"
#include "common/base/rng.h"
#include "infer-server/engine/logprobs.h"
#include <stdlib.h>

struct sampler {
    struct device *dev;
    int max_rows, vocab, n_eos;
    const int *eos_ids; // the model config's
    struct sample_params *params, *host_params;
    struct sample_draft *drafts, *host_drafts;
    struct sample_result *results, *host_results;
    struct adjuster adjuster;
    struct sampled_logprobs logprobs;
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
    s->adjuster = (struct adjuster){.dev = dev, .max_rows = max_rows, .vocab = vocab};
    const size_t n = (size_t)max_rows;
    CHECK(device_alloc(dev, n * sizeof *s->params, (void **)&s->params));
    CHECK(device_alloc(dev, n * sizeof *s->drafts, (void **)&s->drafts));
    CHECK(device_alloc(dev, n * sizeof *s->results, (void **)&s->results));
    CHECK(device_host_alloc(dev, n * sizeof *s->host_params, (void **)&s->host_params));
    CHECK(device_host_alloc(dev, n * sizeof *s->host_drafts, (void **)&s->host_drafts));
    CHECK(device_host_alloc(dev, n * sizeof *s->host_results, (void **)&s->host_results));
    CHECK(sampled_logprobs_init(&s->logprobs, dev, max_rows, vocab));
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
    adjuster_release(&s->adjuster);
    sampled_logprobs_release(&s->logprobs);
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
    static const float min = MIN_LOGIT;
    if (token >= 0 && token < s->vocab) device_copy_in(s->dev, row + token, &min, sizeof min);
}

// Takes the rows' parameters, drafts and adjustments; *ret_drafted: some row has a draft.
static enum status prepare_rows(struct sampler *s, float *logits, const struct sampler_row *rows,
                                int n, bool *ret_drafted)
{
    enum status st = ST_OK;
    *ret_drafted = false;
    adjuster_begin(&s->adjuster);
    for (int i = 0; i < n; i++) {
        const struct sampling *sampling = rows[i].sampling;
        s->host_params[i] = (struct sample_params){
            .temperature = sampling->temperature,
            .top_p = sampling->top_p,
            .min_p = sampling->min_p,
            .top_k = sampling->top_k,
            .seed = rows[i].stream,
            .position = rows[i].position,
            .mask = rows[i].adjustment.made         ? rows[i].adjustment.made
                    : rows[i].adjustment.constraint ? s->adjuster.n_masked + 1
                                                    : 0};
        s->host_drafts[i] = rows[i].draft;
        *ret_drafted |= rows[i].draft.token >= 0;
        float *row = logits + (size_t)i * (size_t)s->vocab;
        for (int k = 0; rows[i].no_stop && k < s->n_eos && !sampling->ignore_eos; k++)
            forbid(s, row, s->eos_ids[k]);
        for (int k = 0; rows[i].no_stop && k < sampling->n_stop_ids; k++)
            forbid(s, row, sampling->stop_ids[k]);
        if (!adjustment_is_any(&rows[i].adjustment)) continue;
        s->host_results[i].token = MASKS_AHEAD_NO_TOKEN;
        CHECK(adjuster_add(&s->adjuster, i, sampling, &rows[i].adjustment));
    }
    st = adjuster_finish(&s->adjuster);
out:
    return st;
}

enum status sampler_launch(struct sampler *s, float *logits, const struct sampler_row *rows, int n,
                           const struct sampler_drafts *drafts)
{
    bool drafted;
    enum status st = prepare_rows(s, logits, rows, n, &drafted);
    if (st != ST_OK) return st;
    device_copy_in(s->dev, s->params, s->host_params, (size_t)n * sizeof *s->params);
    if (drafted) device_copy_in(s->dev, s->drafts, s->host_drafts, (size_t)n * sizeof *s->drafts);
    adjuster_apply(&s->adjuster, logits);
    struct sample_args args = {.logits = logits,
                               .params = s->params,
                               .n = n,
                               .vocab = s->vocab,
                               .masks = s->adjuster.n_masked ? s->adjuster.masks : NULL};
    if (drafted) {
        args.drafts = s->drafts;
        args.draft_logits = drafts->logits;
        args.draft_vocab = drafts->vocab;
    }
    device_ops(s->dev)->sample(s->dev, s->results, &args);
    adjuster_undo(&s->adjuster, logits);
    st = sampled_logprobs_launch(&s->logprobs, logits, rows, n, s->results);
    if (st != ST_OK) return st;
    device_copy_out(s->dev, s->host_results, s->results, (size_t)n * sizeof *s->results);
    return ST_OK;
}

const struct sample_result *sampler_collect(struct sampler *s, const struct sampler_row *rows,
                                            int n, const struct top_logprob **ret_top)
{
    sampled_logprobs_take(&s->logprobs, rows, n, s->host_results, ret_top);
    return s->host_results;
}

enum status sampler_begin_masks(struct sampler *s, struct masks_ahead *masks,
                                const struct constraint_row *rows, int n,
                                const struct sampler *before, struct masks_job **ret)
{
    return adjuster_begin_masks(&s->adjuster, masks, rows, n, before->host_results, ret);
}

const struct sample_result *sampler_results(const struct sampler *s)
{
    return s->results;
}
