/* request.c: owns a request's memory: prompt, samples, generated ids, block tables and their
 * hashes. Everything a sample can ever need is allocated before it is queued, so that no step of
 * the engine can run out of host memory half way. */
#include "infer-server/engine/request.h"
#include "infer-server/engine/engine.h"
#include "infer-server/engine/sampler.h"
#include <assert.h>
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
    r->prompt_key =
        speculative_prompt_key(prompt, n_prompt) ^ sampling->cache_salt ^ sampling->adapter.id;
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
    const int most = r->n_prompt + r->sampling.max_tokens;
    const size_t n_blocks = (size_t)(most + block_size - 1) / (size_t)block_size;
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
                               most);
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
        logit_list_release(&s->text.counted);
    }
    free(r->samples);
    free(r->hashes);
    free(r->prompt_tokens);
    free(r->prompt_top);
    free((void *)r->sampling.logit_bias);
    free(r->prompt);
    free(r);
}

void draft_counts_step(struct draft_counts *c, int n_drafts, int n_accepted)
{
    c->num_drafts++;
    c->num_draft_tokens += n_drafts;
    c->num_accepted_tokens += n_accepted;
    if (n_drafts > c->draft_positions) c->draft_positions = n_drafts;
    for (int i = 0; i < n_accepted; i++) c->num_accepted_tokens_per_pos[i]++;
}

void draft_counts_add(struct draft_counts *sum, const struct draft_counts *more)
{
    sum->num_drafts += more->num_drafts;
    sum->num_draft_tokens += more->num_draft_tokens;
    sum->num_accepted_tokens += more->num_accepted_tokens;
    if (more->draft_positions > sum->draft_positions) sum->draft_positions = more->draft_positions;
    for (int i = 0; i < SPECULATIVE_MOST; i++)
        sum->num_accepted_tokens_per_pos[i] += more->num_accepted_tokens_per_pos[i];
}

void telemetry_count_drafts(struct sample_telemetry *t, const struct token_record *tokens, int n)
{
    t->drafts = (struct draft_counts){0};
    for (int i = 0, accepted; i < n; i += accepted + 1) {
        for (accepted = 0; i + accepted < n && tokens[i + accepted].accepted_at;) accepted++;
        // A step's tokens end with one that was not drafted, unless they were cut.
        const int drafted = i + accepted == n ? accepted : tokens[i].drafted;
        if (drafted > 0) draft_counts_step(&t->drafts, drafted, accepted);
    }
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

// The author's. A prompt the other one computes first, so that siblings find it whole in the prefix
// cache.
enum runner_role sample_tandem_runner(const struct sample *s)
{
    const enum runner_role author = sample_author(s);
    const enum runner_role other = author == RUNNER_FROZEN ? RUNNER_POLICY : RUNNER_FROZEN;
    const bool first = s->text.n_generated == 0 && s->kv[other].computed < s->request->n_prompt - 1;
    return first ? other : author;
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
