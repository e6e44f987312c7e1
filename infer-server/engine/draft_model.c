/* draft_model.c: owns the draft model's scratch, its KV pool, and the logits that the last drafts
 * were drawn from. The engine's thread.
 *
 * Keys and values. Prompts are computed right behind the policy's (draft_model_follow), as long as
 * drafting pays; a sample catches up on anything else in the first pass of its next drafts, which
 * is the one that feeds its last token anyway. `holds` says of each block what of the tokens that
 * the policy has in it is computed here, so that a sample that shares blocks need not compute them
 * again: all of them once both models have computed the block's last token, until the policy writes
 * into it; nothing once the policy writes it from its start. A wrong key here could not make the
 * output wrong, only the drafts bad.
 *
 * Drawing. One pass a depth, over the samples that want a draft that deep, most of them captured
 * decode steps on CUDA. Each pass waits for its tokens, which the next one feeds. The draws come
 * from a random stream of their own, derived from the sample's: acceptance by rejection must not
 * know of them. Coupled drafts, which are accepted where the policy draws the same, take the
 * sample's own: with the same noise, like distributions give like tokens. */
#include "infer-server/engine/draft_model.h"
#include "common/base/clock.h"
#include "common/model/model.h"
#include "infer-server/engine/kv_memory.h"
#include "infer-server/engine/sampler.h"
#include "infer-server/engine/step_timing.h"
#include "infer-server/speculative/step_cost.h"
#include <stdlib.h>

#define DRAFT_STREAM 1 // of sampler_stream()

enum holds { NOTHING, SOME, ALL }; // of a block's keys and values

struct draft_model {
    struct device *dev;
    struct draft_model_limits limits;
    int max_context, max_tokens;
    int max_rows; // of a pass: a sample's last token, and one it is behind
    struct model *model;
    struct batch *batch;
    struct kv_memory kv;
    struct sampler *sampler;
    enum holds *holds;              // (n_blocks)
    float *logits;                  // device; (max_drafts + max_batch, vocab)
    int32_t *tokens;                // (max_tokens) of one sample
    struct sampler_row *rows;       // (max_rows)
    const struct top_logprob **top; // (max_rows)
    struct sample **drawing; // (max_rows) that the rows of the present pass draw for; or NULL
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
    d->max_rows = 2 * batch;
    d->max_tokens = d->max_rows + limits->prefill_chunk;
    d->max_context =
        limits->max_context < config->max_positions ? limits->max_context : config->max_positions;
    CHECK(model_new(dev, config, weights, d->max_tokens, d->max_rows, d->max_context, &d->model));
    CHECK(batch_new(dev, d->max_tokens, d->max_rows, (limits->max_context + block - 1) / block,
                    d->max_rows, &d->batch));
    CHECK(sampler_new(dev, d->max_rows, config->vocab_size, config->eos_ids, config->n_eos,
                      &d->sampler));
    CHECK(device_alloc(dev,
                       ((size_t)limits->max_drafts + (size_t)batch) * vocab * sizeof *d->logits,
                       (void **)&d->logits));
    const size_t rows = (size_t)d->max_rows;
    d->tokens = malloc((size_t)d->max_tokens * sizeof *d->tokens);
    d->rows = malloc(rows * sizeof *d->rows);
    d->top = malloc(rows * sizeof(struct top_logprob *));
    d->drawing = malloc(rows * sizeof *d->drawing);
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
    free(d->holds);
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
    d->holds = calloc((size_t)n_blocks, sizeof *d->holds);
    if (!d->holds) return status_fail(ST_NO_MEMORY, "no memory for a draft model");
    return kv_memory_alloc(&d->kv, d->dev, d->model->config, d->model->dt, d->limits.block_size,
                           n_blocks);
}

void draft_model_copy_block(struct draft_model *d, int32_t from, int32_t to)
{
    d->holds[to] = d->holds[from] == NOTHING ? NOTHING : SOME;
    if (d->holds[from] != NOTHING) kv_memory_copy_block(&d->kv, from, to);
}

// A pass that draws nothing.
static enum status compute(struct draft_model *d)
{
    if (batch_tokens(d->batch) == 0) return ST_OK;
    enum status st = batch_commit(d->batch, 0);
    if (st == ST_OK) model_step(d->model, d->batch, &d->kv.view);
    return st;
}

enum status draft_model_measure(struct draft_model *d, struct step_cost *ret_passes)
{
    return step_timing_measure(d->model, d->batch, d->sampler, &d->kv.view, d->max_rows,
                               ret_passes);
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

// The policy has written an item's tokens.
static void note_written(struct draft_model *d, const struct step_item *item)
{
    const int block = d->limits.block_size;
    for (int i = item->first / block; i * block < item->first + item->n; i++) {
        enum holds *holds = &d->holds[item->sample->blocks[i]];
        if (i * block >= item->first)
            *holds = NOTHING;
        else if (*holds == ALL)
            *holds = SOME;
    }
}

// This model has computed the sample's tokens from `first` on.
static void note_computed(struct draft_model *d, const struct sample *sample, int first)
{
    const int block = d->limits.block_size;
    const int both =
        sample->computed < sample->draft_computed ? sample->computed : sample->draft_computed;
    for (int i = first / block; i * block < sample->draft_computed; i++)
        d->holds[sample->blocks[i]] = (i + 1) * block <= both ? ALL : SOME;
}

// Whole blocks that others, or the sample before it was preempted, have computed here.
static void skip_computed(struct draft_model *d, struct sample *sample)
{
    const int block = d->limits.block_size;
    while (sample->draft_computed % block == 0 &&
           sample->draft_computed + block <= sample->computed &&
           d->holds[sample->blocks[sample->draft_computed / block]] == ALL)
        sample->draft_computed += block;
}

// Puts the sample's tokens up to `end` into the batch, as far as *room, which becomes less,
// reaches.
static enum status feed(struct draft_model *d, struct sample *sample, int end, int *room)
{
    const int block = d->limits.block_size, first = sample->draft_computed;
    if (end > d->max_context) end = d->max_context;
    if (end > first + *room) end = first + *room;
    if (end <= first) return ST_OK;
    *room -= end - first;
    sample_tokens(sample, first, end - first, d->tokens);
    enum status st = batch_add_paged(d->batch, d->tokens, end - first, first, sample->blocks,
                                     sample->n_blocks, block);
    if (st != ST_OK) return st;
    sample->draft_computed = end;
    note_computed(d, sample, first);
    return ST_OK;
}

int draft_model_behind(const struct draft_model *d, const struct sample *sample)
{
    const int end = sample_length(sample) < d->max_context ? sample_length(sample) : d->max_context;
    return end - 1 - sample->draft_computed;
}

enum status draft_model_follow(struct draft_model *d, const struct step *step, bool prompts,
                               int *ret_tokens)
{
    int room = d->max_tokens;
    enum status st = ST_OK;
    batch_clear(d->batch);
    for (int i = 0; i < step->n_items; i++) note_written(d, &step->items[i]);
    for (int i = 0; i < step->n_items && prompts; i++) {
        const struct step_item *item = &step->items[i];
        struct sample *sample = item->sample;
        if (item->first + 1 == sample_length(sample) && sample->n_generated > 0) continue;
        skip_computed(d, sample);
        CHECK(feed(d, sample, item->first + item->n, &room));
    }
    *ret_tokens = batch_tokens(d->batch);
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
    note_computed(d, sample, n_kept > SPECULATIVE_MOST ? n_kept - SPECULATIVE_MOST - 1 : 0);
}

// ---- drafts ------------------------------------------------------------------------------------

static enum status add_row(struct draft_model *d, const struct sample *sample, int32_t token,
                           int position)
{
    enum status st = batch_add_paged(d->batch, &token, 1, position, sample->blocks,
                                     sample->n_blocks, d->limits.block_size);
    if (st == ST_OK) st = batch_want_row(d->batch, batch_tokens(d->batch) - 1);
    return st;
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

static void draw_for(struct draft_model *d, struct sample *sample, int depth, bool wanted,
                     int *rows)
{
    d->rows[*rows] = row_of(d, sample, depth);
    d->drawing[(*rows)++] = wanted ? sample : NULL;
}

/* The tokens that lead to the sample's first draft: its last one, and those it is behind. Where
 * that is one, as it is when all drafts of the step before were accepted, it goes in as a row of
 * its own, whose draw nobody wants: the pass stays a decode step. */
static enum status begin(struct draft_model *d, struct sample *sample, int *rows, int *room,
                         bool *ret_decodes)
{
    const int length = sample_length(sample);
    enum status st = ST_OK;
    skip_computed(d, sample);
    const int first = sample->draft_computed;
    if (length - first <= 2) {
        int32_t tokens[2];
        sample_tokens(sample, first, length - first, tokens);
        for (int i = 0; i < length - first; i++) {
            CHECK(add_row(d, sample, tokens[i], first + i));
            draw_for(d, sample, 0, first + i == length - 1, rows);
        }
        sample->draft_computed = length;
        note_computed(d, sample, first);
        return ST_OK;
    }
    *ret_decodes = false;
    CHECK(feed(d, sample, length, room));
    if (sample->draft_computed < length) {
        sample->draft.n_verify = 0; // goes on with it in the next step
        return ST_OK;
    }
    CHECK(batch_want_row(d->batch, batch_tokens(d->batch) - 1));
    draw_for(d, sample, 0, true, rows);
out:
    return st;
}

static enum status go_on(struct draft_model *d, struct sample *sample, int depth, int *rows)
{
    const int position = sample_length(sample) - 1 + depth;
    enum status st = add_row(d, sample, sample->draft.tokens[depth - 1], position);
    if (st != ST_OK) return st;
    sample->draft_computed = position + 1;
    draw_for(d, sample, depth, true, rows);
    return ST_OK;
}

// One more draft for every sample that wants one this deep; ret_rows: of logits.
static enum status draw_depth(struct draft_model *d, struct sample *const *samples, int n,
                              int depth, int first_row, struct step_cost *passes,
                              struct step_report *report, int *ret_rows)
{
    enum status st = ST_OK;
    const struct sample_result *results = NULL;
    const int64_t start_ns = clock_now_ns();
    int64_t attended = 0;
    bool decodes = true;
    int rows = 0, room = d->limits.prefill_chunk; // beside one row or two of every sample
    batch_clear(d->batch);
    for (int i = 0; i < n; i++) {
        if (samples[i]->draft.n_verify <= depth) continue;
        const int before = rows;
        CHECK(depth == 0 ? begin(d, samples[i], &rows, &room, &decodes)
                         : go_on(d, samples[i], depth, &rows));
        attended += (int64_t)(rows - before) * (sample_length(samples[i]) + depth);
    }
    *ret_rows = rows;
    if (!decodes) report->n_caught_up += d->limits.prefill_chunk - room;
    if (rows == 0) {
        CHECK(compute(d));
        CHECK(device_sync(d->dev));
        report->catch_up_ms += clock_ms_since(start_ns);
        return ST_OK;
    }
    CHECK(batch_commit(d->batch, decodes ? model_decode_padding(d->model, rows) : 0));
    const bool warm = model_step(d->model, d->batch, &d->kv.view);
    CHECK(sampler_draw(d->sampler, d->model->logits, d->rows, rows, NULL, &results, d->top));
    const size_t vocab = (size_t)draft_model_vocab(d);
    device_copy(d->dev, d->logits + (size_t)first_row * vocab, d->model->logits,
                (size_t)rows * vocab * sizeof *d->logits);
    for (int i = 0; i < rows; i++) {
        if (!d->drawing[i]) continue;
        struct draft *draft = &d->drawing[i]->draft;
        draft->tokens[depth] = results[i].token;
        draft->rows[depth] = first_row + i;
        // Behind an end nothing can be accepted; drafts there would only count as refused.
        if (sampler_is_stop(d->sampler, d->rows[i].sampling, results[i].token))
            draft->n_verify = depth + 1;
    }
    const double ms = clock_ms_since(start_ns);
    if (decodes && warm) step_cost_learn(passes, rows, attended, ms);
    if (decodes) report->draft_ms += step_cost_ms(passes, rows, attended);
    if (decodes) report->warm &= warm;
    if (!decodes) report->catch_up_ms += ms;
out:
    return st;
}

enum status draft_model_draw(struct draft_model *d, struct sample *const *samples, int n,
                             struct step_cost *passes, struct step_report *report)
{
    enum status st = ST_OK;
    for (int depth = 0, rows, total = 0; depth < SPECULATIVE_MOST; depth++, total += rows) {
        CHECK(draw_depth(d, samples, n, depth, total, passes, report, &rows));
        if (rows == 0) break;
    }
out:
    return st;
}
