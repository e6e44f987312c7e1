/* draft_model.c: owns the logits that the last drafts were sampled from, and the list of what the
 * draft runner's KV blocks hold. The engine's thread.
 *
 * Keys and values. Prompts are computed right behind the policy's (draft_model_follow), as long as
 * drafting pays; a sample catches up on anything else in the first pass of its next drafts, which
 * is the one that feeds its last token anyway. `holds` says of each block what of the tokens that
 * the policy has in it is computed here, so that a sample that shares blocks need not compute them
 * again: all of them once both models have computed the block's last token, until the policy writes
 * into it; nothing once the policy writes it from its start. A wrong key here could not make the
 * output wrong, only the drafts bad.
 *
 * Sampling. One pass a depth, over the samples that want a draft that deep, most of them captured
 * decode steps on CUDA. Each pass waits for its tokens, which the next one feeds. Drafts come from
 * a random stream of their own, derived from the sample's: acceptance by rejection must not know of
 * them. With shared Gumbel noise, where drafts are accepted if the policy samples the same, they
 * take the sample's own: like distributions then give like tokens.
 *
 * Hidden states, of the policy's own layer that predicts further tokens. A pass gathers them before
 * it: of tokens that are known out of what the policy's last step left in its scratch, each sample
 * knowing its rows there, and behind a draft out of the pass before. Positions whose states are
 * gone keep whatever their slots hold.
 *
 * States, where the model has any. A sample's slot holds the one behind the tokens that are known,
 * computed here, and behind drafts, by which it can be taken back. Blocks that others computed are
 * of no use then. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/draft_model.h"
#include "common/base/clock.h"
#include <assert.h>
#include <stdlib.h>

#define DRAFT_STREAM 1 // of sampler_stream()

enum holds { NOTHING, SOME, ALL }; // of a block's keys and values

struct draft_model {
    struct runner *runner;
    struct draft_model_limits limits;
    enum holds *holds;        // (n_blocks)
    float *logits;            // device; (max_drafts, vocab) f32
    struct sample **sampling; // (max_rows) that the rows of the present pass sample for
    // of the policy's own layer; NULL: it is another model
    const struct model *policy;
    unsigned step;        // the policy's last
    int32_t *hidden_rows; // (max_tokens) of each row of the batch where its hidden state is
    int32_t *want_rows;   // (max_rows) of the batch, that the pass samples behind
};

// ---- life --------------------------------------------------------------------------------------

struct runner_limits draft_model_runner_limits(const struct draft_model_limits *limits,
                                               const struct model_config *config, int max_context,
                                               int block_size)
{
    // Samples' last tokens, and as many as they lag behind.
    const int most =
        limits->max_drafts > limits->max_batch ? limits->max_drafts : limits->max_batch;
    return (struct runner_limits){
        .max_tokens = limits->max_batch + most + limits->prefill_chunk,
        .max_seqs = limits->max_batch + most,
        .max_rows = limits->max_batch,
        .max_context = max_context < config->max_positions ? max_context : config->max_positions,
        .block_size = block_size};
}

enum status draft_model_new(struct runner *runner, const struct model *policy,
                            const struct draft_model_limits *limits, struct draft_model **ret)
{
    enum status st = ST_OK;
    const size_t vocab = (size_t)runner->config->vocab_size;
    const size_t rows = (size_t)limits->max_drafts;
    struct draft_model *d = calloc(1, sizeof *d);
    if (!d) return status_fail(ST_NO_MEMORY, "no memory for a draft model");
    d->runner = runner;
    d->limits = *limits;
    CHECK(device_alloc(runner->dev, rows * vocab * sizeof *d->logits, (void **)&d->logits));
    d->sampling = malloc((size_t)runner->limits.max_rows * sizeof *d->sampling);
    d->want_rows = malloc((size_t)runner->limits.max_rows * sizeof *d->want_rows);
    if (!d->sampling || !d->want_rows)
        FAIL(ST_NO_MEMORY, "no memory for %d drafting sequences", limits->max_batch);
    if (runner->config->mtp) {
        const size_t bytes = (size_t)runner->limits.max_tokens * sizeof *d->hidden_rows;
        d->policy = policy;
        if (!(d->hidden_rows = malloc(bytes)))
            FAIL(ST_NO_MEMORY, "no memory for %d drafting sequences", limits->max_batch);
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
    free(d->sampling);
    free(d->holds);
    free(d->hidden_rows);
    free(d->want_rows);
    device_release(d->runner->dev, d->logits);
    free(d);
}

enum status draft_model_allocate_kv(struct draft_model *d, int n_blocks, int n_states)
{
    d->holds = calloc((size_t)n_blocks, sizeof *d->holds);
    if (!d->holds) return status_fail(ST_NO_MEMORY, "no memory for a draft model");
    return runner_allocate_kv(d->runner, n_blocks, n_states);
}

struct sampler_drafts draft_model_logits(const struct draft_model *d)
{
    return (struct sampler_drafts){.logits = d->logits, .vocab = d->runner->config->vocab_size};
}

bool draft_model_is_mtp(const struct draft_model *d)
{
    return d->policy;
}

// Positions that the sample's known tokens lead to: of the policy's own layer all but the last.
static int positions_of(const struct draft_model *d, const struct sample *sample)
{
    return sample_known(sample) - (d->policy != NULL);
}

// From which on the policy's layer can compute the sample's: those before have no hidden states any
// more. Of another model, and where there are none at all, `from` itself.
static int computable_from(const struct draft_model *d, const struct sample *sample, int from)
{
    const struct sample_hidden *hidden = &sample->hidden;
    return d->policy && hidden->step == d->step && from < hidden->first ? hidden->first : from;
}

// Whether the hidden state is there that the sample's first draft begins with.
static bool has_hidden(const struct draft_model *d, const struct sample *sample)
{
    const struct sample_hidden *hidden = &sample->hidden;
    return hidden->step == d->step && hidden->first < positions_of(d, sample) &&
           hidden->first + hidden->n >= positions_of(d, sample);
}

void draft_model_look(const struct draft_model *d, const struct sample *sample, int *ret_room,
                      int *ret_lag)
{
    const int known = positions_of(d, sample), max_context = d->runner->limits.max_context;
    const int last = (known < max_context ? known : max_context) - 1;
    *ret_room = known <= max_context ? max_context - known + 1 : 0; // the last draft is never fed
    if (d->policy && !has_hidden(d, sample)) *ret_room = 0;
    *ret_lag = last - computable_from(d, sample, sample->kv[RUNNER_DRAFT].computed);
}

// ---- keys and values ---------------------------------------------------------------------------

static int *computed_of(struct sample *sample)
{
    return &sample->kv[RUNNER_DRAFT].computed;
}

// The policy has written an item's tokens.
static void note_written(struct draft_model *d, const struct step_item *item)
{
    const int block = d->runner->limits.block_size;
    for (int i = item->first / block; i * block < item->first + item->n; i++) {
        enum holds *holds = &d->holds[item->sample->blocks.at[i]];
        if (i * block >= item->first)
            *holds = NOTHING;
        else if (*holds == ALL)
            *holds = SOME;
    }
}

// This model has computed the sample's tokens from `first` on.
static void note_computed(struct draft_model *d, struct sample *sample, int first)
{
    const int block = d->runner->limits.block_size, here = *computed_of(sample);
    const int policy = sample_computed(sample), both = policy < here ? policy : here;
    for (int i = first / block; i * block < here; i++)
        d->holds[sample->blocks.at[i]] = (i + 1) * block <= both ? ALL : SOME;
}

// Whole blocks that others, or the sample before it was preempted, have computed here.
static void skip_computed(struct draft_model *d, struct sample *sample)
{
    const int block = d->runner->limits.block_size;
    int *computed = computed_of(sample);
    if (d->runner->kv.n_states > 0) return;
    while (*computed % block == 0 && *computed + block <= sample_computed(sample) &&
           d->holds[sample->blocks.at[*computed / block]] == ALL)
        *computed += block;
}

// Positions first to first + n - 1, of which the policy's layer reads the tokens behind.
static enum status feed_known(struct draft_model *d, const struct sample *sample, int first, int n)
{
    const int state = sample->states.own, row = batch_tokens(d->runner->batch);
    const struct batch_seq seq = {-1, state, state};
    if (!d->policy) return sample_feed(sample, d->runner, first, n, seq);
    for (int i = 0; i < n; i++)
        d->hidden_rows[row + i] = sample->hidden.row + first - sample->hidden.first + i;
    sample_tokens(sample, first + 1, n, d->runner->tokens);
    return runner_feed(d->runner, d->runner->tokens, n, first, sample->blocks.at, sample->blocks.n,
                       seq);
}

// Gathers what the rows of the batch read beside their tokens: out of the policy's last step, or
// out of this model's.
static enum status gather_hidden(struct draft_model *d, bool of_policy)
{
    const int n = batch_tokens(d->runner->batch);
    if (!d->policy || n == 0) return ST_OK;
    return runner_read_hidden(d->runner, of_policy ? d->policy : NULL, d->hidden_rows, n);
}

// Puts the sample's tokens up to `end` into the batch, as far as *room, which becomes less,
// reaches.
static enum status feed(struct draft_model *d, struct sample *sample, int end, int *room)
{
    const int first = computable_from(d, sample, *computed_of(sample)),
              max_context = d->runner->limits.max_context;
    if (end > max_context) end = max_context;
    if (d->policy && end > positions_of(d, sample)) end = positions_of(d, sample);
    if (end > first + *room) end = first + *room;
    if (end <= first) return ST_OK;
    *room -= end - first;
    enum status st = feed_known(d, sample, first, end - first);
    if (st != ST_OK) return st;
    *computed_of(sample) = end;
    note_computed(d, sample, first);
    return ST_OK;
}

enum status draft_model_follow(struct draft_model *d, const struct engine_step *step, bool prompts,
                               int *ret_tokens, double *ret_ms)
{
    int room = d->runner->limits.max_tokens;
    enum status st = ST_OK;
    if (ret_ms) CHECK(device_sync(d->runner->dev)); // for the policy's step
    const int64_t start_ns = clock_now_ns();
    runner_clear(d->runner);
    d->step++;
    for (int i = 0, row = 0; i < step->n_items; row += step->items[i++].n) {
        const struct step_item *item = &step->items[i];
        note_written(d, item);
        item->sample->hidden = (struct sample_hidden){item->first, item->n, row, d->step};
    }
    for (int i = 0; i < step->n_items && prompts; i++) {
        const struct step_item *item = &step->items[i];
        struct sample *sample = item->sample;
        if (sample_uses_frozen(sample)) continue; // is not drafted for
        if (item->first + 1 == sample_known(sample) && sample->text.n_generated > 0) continue;
        skip_computed(d, sample);
        CHECK(feed(d, sample, item->first + item->n, &room));
    }
    *ret_tokens = batch_tokens(d->runner->batch);
    CHECK(gather_hidden(d, true));
    if (*ret_tokens > 0) CHECK(runner_step(d->runner));
    // Siblings of an item's sample share its blocks, and have a copy of the last one.
    for (int i = 0; i < step->n_copies; i++) {
        const struct kv_copy *copy = &step->copies[i].what;
        const bool nothing = !copy->of_state && d->holds[copy->from] == NOTHING;
        if (!copy->of_state) d->holds[copy->to] = nothing ? NOTHING : SOME;
        if (!nothing) CHECK(runner_copy(d->runner, copy));
    }
    for (int i = 0; i < step->n_sampled; i++) {
        struct sample *from = step->items[step->sampled[i].item].sample;
        *computed_of(step->sampled[i].sample) = *computed_of(from);
        step->sampled[i].sample->hidden = from->hidden;
    }
    if (ret_ms) CHECK(device_sync(d->runner->dev));
    if (ret_ms) *ret_ms = clock_ms_since(start_ns);
out:
    return st;
}

void draft_model_truncate(struct draft_model *d, struct sample *sample, int n_kept)
{
    // What the policy's layer computed out of its own hidden states it computes again.
    if (d->policy) n_kept = positions_of(d, sample);
    if (*computed_of(sample) > n_kept) *computed_of(sample) = n_kept;
    assert(*computed_of(sample) <= sample_computed(sample));
    // A step and its drafts reach over two blocks at most, or over so many small ones.
    note_computed(d, sample, n_kept > SPECULATIVE_MAX ? n_kept - SPECULATIVE_MAX - 1 : 0);
}

// ---- drafts ------------------------------------------------------------------------------------

struct pass { // of one depth over the samples that draft so deep
    int depth, first_row;
    int room;         // prompt tokens that it still has room for
    int riders;       // rows beside one of each sample, likewise
    bool decodes;     // nothing but single rows
    int64_t attended; // by the rows
};

static struct sampler_row row_of(const struct draft_model *d, const struct sample *sample,
                                 int depth)
{
    const struct sampling *sampling = &sample->request->sampling;
    const uint64_t stream = sample->text.stream;
    return (struct sampler_row){
        .sampling = sampling,
        .stream = d->limits.shared_noise ? stream : sampler_stream(stream, DRAFT_STREAM),
        .position = (uint64_t)(sample_known(sample) + depth),
        .no_stop = sample->text.n_generated + depth < sampling->min_tokens,
        .draft = SAMPLER_NO_DRAFT};
}

// Samples behind the batch's last row.
static enum status want(struct draft_model *d, const struct pass *pass, struct sample *sample)
{
    const struct sampler_row row = row_of(d, sample, pass->depth);
    d->sampling[d->runner->n_rows] = sample;
    d->want_rows[d->runner->n_rows] = batch_tokens(d->runner->batch) - 1;
    return runner_want(d->runner, batch_tokens(d->runner->batch) - 1, &row);
}

/* The tokens that lead to the sample's first draft: its last one, and those it lags behind. Where
 * these are few, as they are behind a step that accepted drafts, they go in as rows of their own:
 * the pass stays a decode step. */
static enum status begin(struct draft_model *d, struct sample *sample, struct pass *pass)
{
    const int known = positions_of(d, sample);
    enum status st = ST_OK;
    skip_computed(d, sample);
    const int first = computable_from(d, sample, *computed_of(sample));
    const int lag = known - 1 - first;
    if (lag <= DRAFT_RIDES && lag <= pass->riders) {
        for (int at = first; at < known; at++) CHECK(feed_known(d, sample, at, 1));
        pass->riders -= lag;
        pass->attended += (int64_t)(lag + 1) * known;
        *computed_of(sample) = known;
        note_computed(d, sample, first);
        return want(d, pass, sample);
    }
    pass->decodes = false;
    CHECK(feed(d, sample, known, &pass->room));
    if (*computed_of(sample) == known)
        CHECK(want(d, pass, sample));
    else
        sample->draft.n_verify = 0; // goes on with it in the next step
out:
    return st;
}

static enum status go_on(struct draft_model *d, struct sample *sample, struct pass *pass)
{
    const int position = positions_of(d, sample) - 1 + pass->depth, depth = pass->depth;
    const struct batch_seq seq = {-1, sample->states.own, sample->states.own};
    if (d->policy) d->hidden_rows[batch_tokens(d->runner->batch)] = sample->draft.hidden_row;
    enum status st = runner_feed(d->runner, &sample->draft.tokens[depth - 1], 1, position,
                                 sample->blocks.at, sample->blocks.n, seq);
    if (st != ST_OK) return st;
    *computed_of(sample) = position + 1;
    pass->attended += position + 1;
    return want(d, pass, sample);
}

static enum status build_pass(struct draft_model *d, struct sample *const *samples, int n,
                              struct pass *pass)
{
    enum status st = ST_OK;
    runner_clear(d->runner);
    for (int i = 0; i < n; i++) {
        if (samples[i]->draft.n_verify <= pass->depth) continue;
        CHECK(pass->depth == 0 ? begin(d, samples[i], pass) : go_on(d, samples[i], pass));
    }
out:
    return st;
}

// Keeps what the drafts were sampled from, for their verification.
static void take_drafts(struct draft_model *d, const struct pass *pass)
{
    const struct runner *r = d->runner;
    const size_t row = (size_t)r->config->vocab_size;
    device_copy(r->dev, d->logits + (size_t)pass->first_row * row, r->model->logits,
                (size_t)r->n_rows * row * sizeof *d->logits);
    for (int i = 0; i < r->n_rows; i++) {
        struct draft *draft = &d->sampling[i]->draft;
        draft->tokens[pass->depth] = r->results[i].token;
        draft->rows[pass->depth] = pass->first_row + i;
        draft->hidden_row = d->want_rows[i];
        // Behind an end nothing can be accepted; drafts there would only count as refused.
        if (sampler_is_stop(r->sampler, r->rows[i].sampling, r->results[i].token))
            draft->n_verify = pass->depth + 1;
    }
}

// One more draft for every sample that wants one this deep. Without any, the pass only catches up.
static enum status run_pass(struct draft_model *d, struct sample *const *samples, int n,
                            struct pass *pass, struct step_cost *passes, struct step_report *report)
{
    struct runner *r = d->runner;
    enum status st = ST_OK;
    const int64_t start_ns = clock_now_ns();
    CHECK(build_pass(d, samples, n, pass));
    if (batch_tokens(r->batch) == 0) return ST_OK;
    CHECK(gather_hidden(d, pass->depth == 0));
    CHECK(runner_step(r));
    CHECK(runner_sample(r));
    CHECK(runner_collect(r));
    if (r->n_rows > 0) take_drafts(d, pass);
    const double ms = clock_ms_since(start_ns);
    if (!pass->decodes) {
        report->n_caught_up += d->limits.prefill_chunk - pass->room;
        report->catch_up_ms += ms;
        return ST_OK;
    }
    const int rows = batch_tokens(r->batch);
    if (r->warm) step_cost_learn(passes, rows, pass->attended, ms);
    report->draft_ms += step_cost_ms(passes, rows, pass->attended);
    report->warm &= r->warm;
out:
    return st;
}

enum status draft_model_sample(struct draft_model *d, struct sample *const *samples, int n,
                               struct step_cost *passes, struct step_report *report)
{
    enum status st = ST_OK;
    int first_row = 0;
    for (int depth = 0; depth < SPECULATIVE_MAX; depth++, first_row += d->runner->n_rows) {
        struct pass pass = {.depth = depth,
                            .first_row = first_row,
                            .room = d->limits.prefill_chunk,
                            .riders = d->runner->limits.max_seqs - n,
                            .decodes = true};
        CHECK(run_pass(d, samples, n, &pass, passes, report));
        if (d->runner->n_rows == 0) break;
    }
out:
    return st;
}
