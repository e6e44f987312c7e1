/* request.c: owns a request's memory: prompt, samples, generated ids, block tables and their
 * hashes. Everything a sample can ever need is allocated before it is queued, so that no step of
 * the engine can run out of host memory half way. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/request.h"
#include "infer-server/engine/engine.h"
#include "infer-server/engine/sampler.h"
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum status request_new(const int32_t *prompt, int n_prompt, const struct sampling *sampling,
                        void *tag, struct request **ret)
{
    if (n_prompt < 1)
        return status_fail(ST_INVALID, "the prompt is empty; give at least one token");
    if (sampling->n < 1)
        return status_fail(ST_INVALID, "n is %d; it must be at least 1", sampling->n);
    struct request *r = calloc(1, sizeof *r);
    if (!r) goto no_memory;
    r->tag = tag;
    r->sampling = *sampling;
    r->n_prompt = n_prompt;
    r->cached_tokens = -1;
    r->sampling.logit_bias = NULL;
    r->sampling.constraint = constraint_hold(sampling->constraint);
    if (sampling->n_logit_bias > 0) {
        const size_t bytes = (size_t)sampling->n_logit_bias * sizeof *sampling->logit_bias;
        r->sampling.logit_bias = malloc(bytes);
        if (!r->sampling.logit_bias) goto no_memory;
        memcpy((void *)r->sampling.logit_bias, sampling->logit_bias, bytes);
    }
    r->prompt = malloc((size_t)n_prompt * sizeof *r->prompt);
    r->samples = calloc((size_t)sampling->n, sizeof *r->samples);
    if (!r->prompt || !r->samples) goto no_memory;
    memcpy(r->prompt, prompt, (size_t)n_prompt * sizeof *r->prompt);
    for (int i = 0; i < sampling->n; i++) {
        r->samples[i].request = r;
        r->samples[i].index = i;
        r->samples[i].text.stream = sampler_stream(sampling->seed, i);
        r->samples[i].telemetry.prompt_tokens = n_prompt;
    }
    *ret = r;
    return ST_OK;
no_memory:
    request_free(r);
    return status_fail(ST_NO_MEMORY, "no memory for a request of %d tokens and n = %d", n_prompt,
                       sampling->n);
}

// ---- what a model and an engine like these can never do ----------------------------------------

enum status check_drafts(const struct engine_options *o, struct speculative_choice choice,
                         const char *where)
{
    for (int m = 0; m < SPECULATIVE_METHODS; m++)
        if (choice.k[m] < 0 || choice.k[m] > SPECULATIVE_MAX)
            return status_fail(ST_INVALID, "%s: K is %d; it must be 1 to %d", where, choice.k[m],
                               SPECULATIVE_MAX);
    if (choice.k[SPECULATIVE_DRAFT_MODEL] && !o->draft_folder)
        return status_fail(ST_INVALID,
                           "%s: draft_model needs a draft model, and the server was started "
                           "without one; start it with --draft DIR",
                           where);
    if (choice.k[SPECULATIVE_MTP] && !o->speculative.k[SPECULATIVE_MTP])
        return status_fail(ST_INVALID,
                           "%s: mtp drafts with the model's own layer, and the server was started "
                           "without it; start it with --speculative mtp",
                           where);
    return ST_OK;
}

static enum status check_ids(const struct model_config *config, const char *what,
                             const int32_t *ids, int n)
{
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= config->vocab_size)
            return status_fail(ST_INVALID, "%s %d is %d, outside the vocabulary of %d tokens", what,
                               i, (int)ids[i], config->vocab_size);
    return ST_OK;
}

// How many likeliest tokens can be listed beside one: `most`, or all of a smaller vocabulary.
static enum status check_listed(const struct model_config *config, const char *what, int n, int max)
{
    if (max > config->vocab_size) max = config->vocab_size;
    if (n <= max) return ST_OK;
    return status_fail(ST_INVALID, "%s is %d; at most %d can be listed", what, n, max);
}

static enum status check_sampling(const struct model_config *config, const struct sampling *s)
{
    const struct {
        bool bad;
        const char *name;
        double value;
        const char *must;
    } faults[] = {
        {s->max_tokens < 0, "max_tokens", s->max_tokens, "cannot be negative"},
        {!(s->temperature >= 0) || isinf(s->temperature), "temperature", s->temperature,
         "must be 0 or more"},
        {!(s->top_p > 0 && s->top_p <= 1), "top_p", s->top_p, "must be above 0 and at most 1"},
        {!(s->min_p >= 0 && s->min_p <= 1), "min_p", s->min_p, "must be 0 to 1"},
        {s->top_k < 0, "top_k", s->top_k, "must be 0 (off) or more"},
        {!(s->repetition_penalty >= 0) || isinf(s->repetition_penalty), "repetition_penalty",
         s->repetition_penalty, "must be above 0 (1 is off)"},
        {!isfinite(s->frequency_penalty), "frequency_penalty", s->frequency_penalty,
         "must be finite"},
        {!isfinite(s->presence_penalty), "presence_penalty", s->presence_penalty, "must be finite"},
    };
    const int max = (int)(sizeof s->stop_ids / sizeof s->stop_ids[0]);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        if (faults[i].bad)
            return status_fail(ST_INVALID, "%s is %g; it %s", faults[i].name, faults[i].value,
                               faults[i].must);
    if (s->n_stop_ids < 0 || s->n_stop_ids > max)
        return status_fail(ST_INVALID, "%d stop token ids; at most %d are taken", s->n_stop_ids,
                           max);
    enum status st = check_ids(config, "stop token id", s->stop_ids, s->n_stop_ids);
    if (st == ST_OK) st = check_listed(config, "logprobs", s->logprobs, SAMPLER_MAX_TOP);
    if (st == ST_OK) st = check_listed(config, "prompt_logprobs", s->prompt_top, TOP_LOGPROBS_MAX);
    for (int i = 0; i < s->n_logit_bias && st == ST_OK; i++) {
        const struct token_bias *bias = &s->logit_bias[i];
        st = check_ids(config, "logit_bias: token", &bias->token, 1);
        if (st == ST_OK && !isfinite(bias->bias))
            st = status_fail(ST_INVALID, "logit_bias of token %d is %g; it must be finite",
                             (int)bias->token, bias->bias);
    }
    return st;
}

enum status request_check(const struct engine_options *options, const struct model_config *config,
                          const struct request *r)
{
    enum status st = check_ids(config, "prompt token", r->prompt, r->n_prompt);
    if (st == ST_OK) st = check_sampling(config, &r->sampling);
    // Drafts take memory in states, or for some of their own.
    if (st == ST_OK && config_state_elements(config) > 0 &&
        speculative_max(r->sampling.speculative) > 0 && speculative_max(options->speculative) == 0)
        st = status_fail(ST_UNSUPPORTED,
                         "speculative: this model carries a state along each sequence, and the "
                         "server has no memory for those of drafts; start it with --speculative, "
                         "or leave \"speculative\" out");
    if (st == ST_OK && (r->sampling.tandem.on || r->sampling.frozen))
        st = tandem_check(options, &r->sampling);
    if (st == ST_OK) st = check_drafts(options, r->sampling.speculative, "\"speculative\"");
    return st;
}

// ---- its memory --------------------------------------------------------------------------------

static enum status prepare_prompt_logprobs(struct request *r)
{
    const size_t n = (size_t)r->n_prompt, n_top = n * (size_t)r->sampling.prompt_top;
    if (!r->sampling.prompt_logprobs) return ST_OK;
    if (!r->prompt_tokens) r->prompt_tokens = calloc(n, sizeof *r->prompt_tokens);
    if (!r->prompt_top) r->prompt_top = calloc(n_top + 1, sizeof *r->prompt_top);
    if (r->prompt_tokens && r->prompt_top) return ST_OK;
    return status_fail(ST_NO_MEMORY, "no memory for the log-probabilities of %d prompt tokens",
                       r->n_prompt);
}

enum status request_prepare(struct request *r, int block_size, uint64_t cache_salt)
{
    const int max = r->n_prompt + r->sampling.max_tokens;
    const size_t n_blocks = (size_t)(max + block_size - 1) / (size_t)block_size;
    r->full_blocks = r->n_prompt / block_size;
    const size_t n_own = n_blocks - (size_t)r->full_blocks;
    if (!r->hashes) r->hashes = malloc(((size_t)r->full_blocks + 1) * sizeof *r->hashes);
    // Blocks serve those alone that the same models write.
    const uint64_t writers =
        r->sampling.adapter.id << 2 | (uint64_t)r->sampling.frozen << 1 | r->sampling.tandem.on;
    if (r->hashes) r->hashes[0] = (struct block_hash){.part = {cache_salt, writers}};
    if (!r->hashes ||
        !block_hash_chain(r->hashes, r->prompt, block_size, r->full_blocks, r->hashes + 1))
        return status_fail(ST_NO_MEMORY, "no memory for the hashes of %d tokens", r->n_prompt);
    for (int i = 0; i < r->sampling.n; i++) {
        struct sample *s = &r->samples[i];
        s->blocks.n_hashed = r->full_blocks;
        s->owner = r->sampling.frozen ? RUNNER_FROZEN : RUNNER_POLICY;
        if (r->sampling.tandem.on)
            tandem_choose(&r->sampling.tandem, s->text.stream, 0, 0, &s->author);
        struct sample_text *text = &s->text;
        struct sample_blocks *b = &s->blocks;
        if (!text->generated)
            text->generated =
                malloc(((size_t)r->sampling.max_tokens + 1) * sizeof *text->generated);
        if (!b->at) b->at = malloc(n_blocks * sizeof *b->at);
        if (!b->hashes) b->hashes = malloc(n_own * sizeof *b->hashes);
        if (!text->generated || !b->at || !b->hashes)
            return status_fail(ST_NO_MEMORY, "no memory for %d samples of %d tokens", r->sampling.n,
                               max);
        if (text->counted.at || !sampling_adjusts(&r->sampling)) continue;
        enum status st = logit_list_init(&r->sampling, r->prompt, r->n_prompt, &text->counted);
        if (st != ST_OK) return st;
    }
    return prepare_prompt_logprobs(r);
}

void request_free(struct request *r)
{
    if (!r) return;
    for (int i = 0; r->samples && i < r->sampling.n; i++) {
        struct sample *s = &r->samples[i];
        free(s->text.generated);
        free(s->blocks.at);
        free(s->blocks.hashes);
        if (s->text.counted.at) logit_list_release(&s->text.counted);
    }
    free(r->samples);
    free(r->hashes);
    free(r->prompt_tokens);
    free(r->prompt_top);
    free((void *)r->sampling.logit_bias);
    constraint_release(r->sampling.constraint);
    free(r->prompt);
    free(r);
}

void *request_tag(const struct request *r)
{
    return r->tag;
}

void sample_tokens(const struct sample *s, int first, int n, int32_t *ret_tokens)
{
    const struct request *r = s->request;
    for (int i = 0; i < n; i++) {
        int position = first + i;
        ret_tokens[i] = position < r->n_prompt ? r->prompt[position]
                                               : s->text.generated[position - r->n_prompt];
    }
}

enum status sample_feed(const struct sample *s, struct runner *r, int first, int n,
                        struct batch_seq seq)
{
    if (n > r->limits.max_tokens)
        return status_fail(ST_INVALID, "a step of at most %d tokens has no room for %d",
                           r->limits.max_tokens, n);
    sample_tokens(s, first, n, r->tokens);
    return runner_feed(r, r->tokens, n, first, s->blocks.at, s->blocks.n, seq);
}

void sample_append(struct sample *s, int32_t token)
{
    s->text.generated[s->text.n_generated++] = token;
}

void sample_check(const struct sample *s, int block_size)
{
    assert(s->blocks.n_cached * block_size <= sample_computed_by_all(s));
    assert(sample_computed(s) <= sample_known(s));
    assert(sample_computed(s) <= s->blocks.n * block_size);
}
