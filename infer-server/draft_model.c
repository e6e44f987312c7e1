/* draft_model.c: owns the draft model's scratch, its KV pool, and the logits that the last drafts
 * were drawn from. The engine's thread.
 *
 * Keys and values. Prompts are computed right behind the policy's (draft_model_follow), as long as
 * drafting pays; a sample catches up on anything else in the first pass of its next drafts, which
 * is the one that feeds its last token anyway. `filled` says of each block whether its keys and
 * values are those of the tokens the policy has in it, so that a sample that shares blocks need not
 * compute them again: the policy's writing into a block clears it, and it is set once both have
 * computed the block's last token. A wrong key here could not make the output wrong, only the
 * drafts bad.
 *
 * Drawing. One pass a depth, over the samples that want a draft that deep, most of them captured
 * decode steps on CUDA. Each pass waits for its tokens, which the next one feeds. The draws come
 * from a random stream of their own, derived from the sample's: acceptance by rejection must not
 * know of them. Coupled drafts, which are accepted where the policy draws the same, take the
 * sample's own: with the same noise, like distributions give like tokens. */
#include "infer-server/draft_model.h"
#include "common/base/clock.h"
#include "common/model/model.h"
#include "infer-server/kv_memory.h"
#include "infer-server/sampler.h"
#include <stdlib.h>

#define DRAFT_STREAM 1 // of sampler_stream()

struct draft_model {
    struct device *dev;
    struct draft_model_limits limits;
    int max_context, max_tokens;
    struct model *model;
    struct batch *batch;
    struct kv_memory kv;
    struct sampler *sampler;
    bool *filled;                   // (n_blocks)
    float *logits;                  // device; (max_drafts, vocab)
    int32_t *tokens;                // (max_tokens) of one sample
    struct sampler_row *rows;       // (max_batch)
    const struct top_logprob **top; // (max_batch)
    struct sample **drawing;        // (max_batch) that have a row in the present pass
};

// ---- life --------------------------------------------------------------------------------------

enum status draft_model_new(struct device *dev, const struct weights *weights,
                            const struct draft_model_limits *limits, struct draft_model **ret)
{
    enum status st = ST_OK;
    const struct model_config *config = weights->config;
    const int batch = limits->max_batch, block = limits->block_size;
    const size_t vocab = (size_t)config->vocab_size;
    struct draft_model *d = calloc(1, sizeof *d);
    if (!d) return status_fail(ST_NO_MEMORY, "no memory for a draft model");
    d->dev = dev;
    d->limits = *limits;
    d->max_tokens = batch + limits->prefill_chunk;
    d->max_context =
        limits->max_context < config->max_positions ? limits->max_context : config->max_positions;
    CHECK(model_new(dev, config, weights, d->max_tokens, batch, d->max_context, &d->model));
    CHECK(batch_new(dev, d->max_tokens, batch, (limits->max_context + block - 1) / block, batch,
                    &d->batch));
    CHECK(sampler_new(dev, batch, config->vocab_size, config->eos_ids, config->n_eos, &d->sampler));
    CHECK(device_alloc(dev, (size_t)limits->max_drafts * vocab * sizeof *d->logits,
                       (void **)&d->logits));
    d->tokens = malloc((size_t)d->max_tokens * sizeof *d->tokens);
    d->rows = malloc((size_t)batch * sizeof *d->rows);
    d->top = malloc((size_t)batch * sizeof(struct top_logprob *));
    d->drawing = malloc((size_t)batch * sizeof *d->drawing);
    if (!d->tokens || !d->rows || !d->top || !d->drawing) {
        st = status_fail(ST_NO_MEMORY, "no memory for a draft model of %d sequences", batch);
        goto out;
    }
    *ret = d;
    return ST_OK;
out:
    draft_model_free(d);
    return status_context(st, "the draft model");
}

void draft_model_free(struct draft_model *d)
{
    if (!d) return;
    free(d->tokens);
    free(d->rows);
    free(d->top);
    free(d->drawing);
    free(d->filled);
    device_release(d->dev, d->logits);
    kv_memory_release(&d->kv);
    sampler_free(d->sampler);
    batch_free(d->batch);
    model_free(d->model);
    free(d);
}

int64_t draft_model_block_bytes(const struct draft_model *d)
{
    return kv_memory_block_bytes(d->model->config, d->model->dt, d->limits.block_size);
}

enum status draft_model_take_blocks(struct draft_model *d, int n_blocks)
{
    d->filled = calloc((size_t)n_blocks, sizeof *d->filled);
    if (!d->filled) return status_fail(ST_NO_MEMORY, "no memory for a draft model");
    return kv_memory_alloc(&d->kv, d->dev, d->model->config, d->model->dt, d->limits.block_size,
                           n_blocks);
}

void draft_model_copy_block(struct draft_model *d, int32_t from, int32_t to)
{
    kv_memory_copy_block(&d->kv, from, to);
}

const float *draft_model_logits(const struct draft_model *d)
{
    return d->logits;
}
int draft_model_vocab(const struct draft_model *d)
{
    return d->model->config->vocab_size;
}

int draft_model_room(const struct draft_model *d, const struct sample *sample)
{
    return d->max_context - sample_length(sample) + 1; // the last draft is never fed
}

// ---- keys and values ---------------------------------------------------------------------------

static void clear_filled(struct draft_model *d, const struct step_item *item)
{
    const int block = d->limits.block_size;
    for (int i = item->first / block; i * block < item->first + item->n; i++)
        d->filled[item->sample->blocks[i]] = false;
}

// Blocks from the one of token `first` on that both models have computed to their end.
static void mark_filled(struct draft_model *d, const struct sample *sample, int first)
{
    const int block = d->limits.block_size;
    const int end =
        sample->computed < sample->draft_computed ? sample->computed : sample->draft_computed;
    for (int i = first / block; (i + 1) * block <= end; i++) d->filled[sample->blocks[i]] = true;
}

// Whole blocks that others, or the sample before it was preempted, have computed here.
static void skip_filled(struct draft_model *d, struct sample *sample)
{
    const int block = d->limits.block_size;
    while (sample->draft_computed % block == 0 &&
           sample->draft_computed + block <= sample->computed &&
           d->filled[sample->blocks[sample->draft_computed / block]])
        sample->draft_computed += block;
}

// Puts the sample's tokens up to `end` into the batch, as far as it has room for them.
static enum status feed(struct draft_model *d, struct sample *sample, int end)
{
    const int block = d->limits.block_size, first = sample->draft_computed;
    const int room = d->max_tokens - batch_tokens(d->batch);
    if (end > d->max_context) end = d->max_context;
    if (end > first + room) end = first + room;
    if (end <= first) return ST_OK;
    sample_tokens(sample, first, end - first, d->tokens);
    enum status st = batch_add_paged(d->batch, d->tokens, end - first, first, sample->blocks,
                                     sample->n_blocks, block);
    if (st != ST_OK) return st;
    sample->draft_computed = end;
    mark_filled(d, sample, first);
    return ST_OK;
}

// A pass that draws nothing.
static enum status compute(struct draft_model *d)
{
    if (batch_tokens(d->batch) == 0) return ST_OK;
    enum status st = batch_commit(d->batch, 0);
    if (st == ST_OK) model_step(d->model, d->batch, &d->kv.view);
    return st;
}

enum status draft_model_follow(struct draft_model *d, const struct step *step, bool prompts)
{
    enum status st = ST_OK;
    batch_clear(d->batch);
    for (int i = 0; i < step->n_items; i++) clear_filled(d, &step->items[i]);
    for (int i = 0; i < step->n_items && prompts; i++) {
        const struct step_item *item = &step->items[i];
        struct sample *sample = item->sample;
        if (item->first + 1 == sample_length(sample) && sample->n_generated > 0) continue;
        skip_filled(d, sample);
        CHECK(feed(d, sample, item->first + item->n));
    }
    CHECK(compute(d));
    // Samples that fork from an item have its blocks, and a copy of the last one.
    for (int i = 0; i < step->n_copies; i++)
        draft_model_copy_block(d, step->copies[i].from, step->copies[i].to);
    for (int i = 0; i < step->n_draws; i++)
        step->draws[i].sample->draft_computed =
            step->items[step->draws[i].item].sample->draft_computed;
out:
    return st;
}

void draft_model_settle(struct draft_model *d, struct sample *sample, int n_kept)
{
    if (sample->draft_computed > n_kept) sample->draft_computed = n_kept;
    // A step and its drafts reach over two blocks at most, or over so many small ones.
    mark_filled(d, sample, n_kept > SPECULATIVE_MOST ? n_kept - SPECULATIVE_MOST - 1 : 0);
}

// ---- drafts ------------------------------------------------------------------------------------

// The row of the sample's next draft: behind its last token, or behind its last draft.
static enum status add_row(struct draft_model *d, struct sample *sample, int depth,
                           bool *ret_single)
{
    const int length = sample_length(sample), before = batch_tokens(d->batch);
    enum status st = ST_OK;
    if (depth > 0) {
        st = batch_add_paged(d->batch, &sample->draft.tokens[depth - 1], 1, length - 1 + depth,
                             sample->blocks, sample->n_blocks, d->limits.block_size);
        sample->draft_computed = length + depth;
    } else {
        skip_filled(d, sample);
        st = feed(d, sample, length);
    }
    if (st != ST_OK) return st;
    const int now = batch_tokens(d->batch);
    *ret_single &= now == before + 1;
    if (depth == 0 && sample->draft_computed < length) {
        sample->draft.n_verify = 0; // goes on with it in the next step
        *ret_single = false;
        return ST_OK;
    }
    return batch_want_row(d->batch, now - 1);
}

static struct sampler_row row_of(const struct draft_model *d, const struct sample *sample,
                                 int depth)
{
    const struct sampling *sampling = &sample->request->sampling;
    return (struct sampler_row){
        .sampling = sampling,
        .stream = d->limits.coupled ? sample->stream : sampler_stream(sample->stream, DRAFT_STREAM),
        .position = (uint64_t)(sample_length(sample) + depth),
        .no_stop = sample->n_generated + depth < sampling->min_tokens,
        .draft = SAMPLER_NO_DRAFT};
}

// One more draft for every sample that wants one this deep; ret_rows: how many those were.
static enum status draw_depth(struct draft_model *d, struct sample *const *samples, int n,
                              int depth, int first_row, struct speculative *speculative,
                              bool *ret_settled, int *ret_rows)
{
    enum status st = ST_OK;
    const struct sample_result *results = NULL;
    const int64_t start_ns = clock_now_ns();
    bool single = true;
    int rows = 0;
    batch_clear(d->batch);
    for (int i = 0; i < n; i++) {
        if (samples[i]->draft.n_verify <= depth) continue;
        CHECK(add_row(d, samples[i], depth, &single));
        if (samples[i]->draft.n_verify == 0) continue;
        d->rows[rows] = row_of(d, samples[i], depth);
        d->drawing[rows++] = samples[i];
    }
    *ret_rows = rows;
    if (rows == 0) return compute(d);
    const int padded = single ? model_decode_padding(d->model, rows) : 0;
    CHECK(batch_commit(d->batch, padded <= d->limits.max_batch ? padded : rows));
    const int n_tokens = batch_tokens(d->batch);
    const bool settled = model_step(d->model, d->batch, &d->kv.view);
    CHECK(sampler_draw(d->sampler, d->model->logits, d->rows, rows, NULL, &results, d->top));
    const size_t vocab = (size_t)draft_model_vocab(d);
    device_copy(d->dev, d->logits + (size_t)first_row * vocab, d->model->logits,
                (size_t)rows * vocab * sizeof *d->logits);
    for (int i = 0; i < rows; i++) {
        struct draft *draft = &d->drawing[i]->draft;
        draft->tokens[depth] = results[i].token;
        draft->rows[depth] = first_row + i;
        // Behind an end nothing can be accepted; drafts there would only count as refused.
        if (sampler_is_stop(d->sampler, d->rows[i].sampling, results[i].token))
            draft->n_verify = depth + 1;
    }
    *ret_settled &= settled;
    if (settled)
        speculative_pass_took(speculative, n_tokens, (double)(clock_now_ns() - start_ns) / 1e6);
out:
    return st;
}

enum status draft_model_draw(struct draft_model *d, struct sample *const *samples, int n,
                             struct speculative *speculative, bool *ret_settled)
{
    enum status st = ST_OK;
    for (int depth = 0, rows, total = 0; depth < SPECULATIVE_MOST; depth++, total += rows) {
        CHECK(draw_depth(d, samples, n, depth, total, speculative, ret_settled, &rows));
        if (rows == 0) break;
    }
out:
    return st;
}
