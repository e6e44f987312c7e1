/* executor.c: owns the model's scratch, the KV memory, and the buffers of a step; turns the
 * scheduler's plan into one batch, runs it, draws, and tells the submitters. The engine's thread.
 *
 * The device is waited for once a step, when the drawn tokens come back: between two steps nothing
 * is in flight on it, and the weights may change. A failed device ends everything, so the plan's
 * book-keeping is not undone.
 *
 * Log-probabilities of prompts are read between drawing and taking what was drawn: the residual
 * stream is still there, and the logits are not needed any more.
 *
 * Drafts (speculative.h): before the plan every decoding sample gets a proposal, and the draft
 * model, where that is the proposer, draws; a step's rows are then drawn with the drafts beside
 * them, and take_draws() keeps what agrees. */
#include "infer-server/engine/executor.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "infer-server/engine/draft_model.h"
#include "infer-server/engine/kv_memory.h"
#include "infer-server/engine/prompt_logprobs.h"
#include "infer-server/engine/sampler.h"
#include "infer-server/speculative/speculative.h"
#include "infer-server/speculative/step_cost.h"
#include <stdlib.h>
#include <string.h>

#define DEFAULT_MOST_CONTEXT 32768
#define DRAFT_ROWS_OFF       64 // of a step, where only single requests ask for drafts
#define DRAFT_ROWS           512
#define UNACCEPTED           32 // drafts of the draft model in vain, before that is said
#define TIME_PROMPTS         8  // steps that follow prompts, one of which is timed

struct unaccepted { // drafts until one is accepted, or it is said that none was
    bool over;
    int drafts, tokens;
};

struct executor {
    struct device *dev;
    const struct model_config *config;
    engine_event_fn on_event;
    void *context;
    int max_context;
    struct model *model;
    struct batch *batch;
    struct kv_memory kv;
    struct kv_cache *cache;
    struct scheduler *scheduler;
    struct sampler *sampler;
    struct prompt_logprobs *prompt_logprobs;
    struct speculative *speculative;
    struct draft_model *draft_model;  // NULL: none
    struct speculative_choice choice; // of requests that do not choose
    int draft_rows;
    unsigned n_followed;            // steps whose prompts the draft model followed
    struct unaccepted unaccepted;   // of the draft model
    bool exact;                     // draws do not know of drafts
    struct draft **drafts;          // (max_batch) of one step
    struct sample **drawing;        // (max_batch) for which the draft model draws
    int32_t *tokens;                // (prefill_chunk) of one item
    int *item_end;                  // (max_batch) of a step: the row behind each item's last
    struct sampler_row *rows;       // (max_batch + draft_rows)
    const struct top_logprob **top; // (max_batch + draft_rows)
    struct engine_stats stats;      // the counters
};

// ---- life --------------------------------------------------------------------------------------

int executor_wished_context(const struct model_config *config, int named)
{
    int most =
        config->max_positions < DEFAULT_MOST_CONTEXT ? config->max_positions : DEFAULT_MOST_CONTEXT;
    return named > 0 ? named : most;
}

static void plan_draft_rows(struct executor *x, const struct engine_options *options)
{
    const int k = speculative_most(options->speculative), max_batch = options->max_batch;
    x->choice = options->speculative;
    x->draft_rows = DRAFT_ROWS_OFF;
    if (k > 0) x->draft_rows = max_batch < DRAFT_ROWS / k ? max_batch * k : DRAFT_ROWS;
    if (x->draft_rows < DRAFT_ROWS_OFF) x->draft_rows = DRAFT_ROWS_OFF;
    x->stats.draft_positions = k;
    x->stats.speculative = x->choice;
}

// While the KV pools are empty.
static enum status measure_costs(struct executor *x, int max_rows)
{
    enum status st = step_cost_measure(x->model, x->batch, x->sampler, &x->kv.view, max_rows,
                                       speculative_step_cost(x->speculative));
    if (st == ST_OK && x->draft_model) {
        double prompt_ms, token_ms;
        st = draft_model_measure(x->draft_model, speculative_pass_cost(x->speculative), &prompt_ms,
                                 &token_ms);
        if (st == ST_OK) speculative_set_prompt_cost(x->speculative, prompt_ms, token_ms);
    }
    return st;
}

// Of one step, in host memory.
static enum status alloc_lists(struct executor *x, int max_batch, int max_rows, int chunk)
{
    x->tokens = malloc((size_t)chunk * sizeof *x->tokens);
    x->item_end = malloc((size_t)max_batch * sizeof *x->item_end);
    x->rows = malloc((size_t)max_rows * sizeof *x->rows);
    x->top = malloc((size_t)max_rows * sizeof(struct top_logprob *));
    x->drafts = malloc((size_t)max_batch * sizeof *x->drafts);
    x->drawing = malloc((size_t)max_batch * sizeof *x->drawing);
    if (x->tokens && x->item_end && x->rows && x->top && x->drafts && x->drawing) return ST_OK;
    return status_fail(ST_NO_MEMORY, "no memory for steps of %d tokens", max_rows + chunk);
}

enum status executor_new(struct device *dev, const struct weights *weights,
                         const struct weights *draft, const struct engine_options *options,
                         engine_event_fn on_event, void *context, struct executor **ret)
{
    enum status st = ST_OK;
    const struct model_config *config = weights->config;
    const int max_batch = options->max_batch, chunk = options->prefill_chunk;
    struct executor *x = calloc(1, sizeof *x);
    if (!x) return status_fail(ST_NO_MEMORY, "no memory for an executor");
    x->dev = dev;
    x->config = config;
    x->on_event = on_event;
    x->context = context;
    plan_draft_rows(x, options);
    const int max_rows = max_batch + x->draft_rows, max_tokens = max_rows + chunk;
    const int wished = executor_wished_context(config, options->max_context);
    if (wished > config->max_positions) {
        st = status_fail(ST_INVALID, "--max-context %d is over the model's %d positions", wished,
                         config->max_positions);
        goto out;
    }
    CHECK(model_new(dev, config, weights, max_tokens, max_rows, wished, &x->model));
    CHECK(sampler_new(dev, max_rows, config->vocab_size, config->eos_ids, config->n_eos,
                      &x->sampler));
    CHECK(prompt_logprobs_new(x->model, &x->prompt_logprobs));
    x->exact = options->exact;
    CHECK(speculative_new(options->speculative_fixed || options->exact, x->draft_rows,
                          &x->speculative));
    const int table_width = (wished + options->block_size - 1) / options->block_size;
    CHECK(batch_new(dev, max_tokens, max_rows, table_width, max_rows, &x->batch));
    const struct draft_model_limits draft_limits = {.max_batch = max_batch,
                                                    .prefill_chunk = chunk,
                                                    .max_context = wished,
                                                    .block_size = options->block_size,
                                                    .max_drafts = x->draft_rows,
                                                    .coupled = x->exact};
    if (draft) CHECK(draft_model_new(dev, draft, &draft_limits, &x->draft_model));
    const struct kv_wish wish = {.bytes = options->kv_bytes,
                                 .percent = options->kv_percent,
                                 .block_size = options->block_size,
                                 .max_batch = max_batch,
                                 .max_context = wished,
                                 .context_is_firm = options->max_context > 0,
                                 .beside = draft ? draft_model_block_bytes(x->draft_model) : 0};
    CHECK(kv_memory_init(&x->kv, dev, config, weights->dt, &wish, &x->max_context));
    if (draft) CHECK(draft_model_take_blocks(x->draft_model, x->kv.view.n_blocks));
    CHECK(kv_cache_new(x->kv.view.n_blocks, options->block_size, &x->cache));
    const struct scheduler_limits limits = {.max_batch = max_batch, .prefill_chunk = chunk};
    CHECK(scheduler_new(&limits, x->cache, &x->scheduler));
    CHECK(alloc_lists(x, max_batch, max_rows, chunk));
    if (speculative_most(options->speculative) > 0 && !options->speculative_fixed && !x->exact)
        CHECK(measure_costs(x, max_rows));
    CHECK(device_sync(dev));
    *ret = x;
    return ST_OK;
out:
    executor_free(x);
    return st;
}

void executor_free(struct executor *x)
{
    if (!x) return;
    free(x->tokens);
    free(x->item_end);
    free(x->rows);
    free(x->top);
    free(x->drafts);
    free(x->drawing);
    draft_model_free(x->draft_model);
    speculative_free(x->speculative);
    scheduler_free(x->scheduler);
    kv_cache_free(x->cache);
    kv_memory_release(&x->kv);
    batch_free(x->batch);
    prompt_logprobs_free(x->prompt_logprobs);
    sampler_free(x->sampler);
    model_free(x->model);
    free(x);
}

int executor_max_context(const struct executor *x)
{
    return x->max_context;
}
int executor_in_flight(const struct executor *x)
{
    return scheduler_in_flight(x->scheduler);
}

int executor_samples(const struct executor *x)
{
    return scheduler_running(x->scheduler) + scheduler_waiting(x->scheduler);
}

// Of a KV block, in the draft model's pool too.
static int64_t block_bytes(const struct executor *x)
{
    return kv_memory_block_bytes(x->config, x->kv.view.dt, x->kv.view.block_size) +
           (x->draft_model ? draft_model_block_bytes(x->draft_model) : 0);
}

void executor_stats(const struct executor *x, struct engine_stats *stats)
{
    struct engine_stats mine = x->stats;
    mine.state = stats->state;
    memcpy(mine.state_detail, stats->state_detail, sizeof mine.state_detail);
    memcpy(mine.weights_warning, stats->weights_warning, sizeof mine.weights_warning);
    mine.weight_version = stats->weight_version;
    mine.updates = stats->updates;
    mine.restores = stats->restores;
    mine.last_pause_ms = stats->last_pause_ms;
    mine.running = scheduler_running(x->scheduler);
    mine.waiting = scheduler_waiting(x->scheduler);
    mine.kv_blocks_total = kv_cache_blocks(x->cache);
    mine.kv_blocks_used = kv_cache_used(x->cache);
    mine.kv_block_tokens = kv_cache_block_size(x->cache);
    mine.kv_bytes_per_block = block_bytes(x);
    mine.weight_bytes = stats->weight_bytes;
    mine.draft_weight_bytes = stats->draft_weight_bytes;
    mine.preemptions = scheduler_preemptions(x->scheduler);
    scheduler_cache_tokens(x->scheduler, &mine.cache_queries, &mine.cache_hits);
    *stats = mine;
}

// ---- events ------------------------------------------------------------------------------------

// Takes the sample out of the scheduler where it ends; after its request's last event neither may
// be touched.
static void tell(struct executor *x, struct sample *sample, const struct token_record *tokens,
                 int n_tokens, const struct top_logprob *top, enum finish_reason finish,
                 const char *error)
{
    struct request *r = sample->request;
    struct engine_event event = {.request = r,
                                 .sample = sample->index,
                                 .tokens = tokens,
                                 .n_tokens = n_tokens,
                                 .top = top,
                                 .finish = finish,
                                 .error = error};
    if (r->prompt_tokens && !r->prompt_told && request_rows_read(r) == INT32_MAX) {
        event.prompt = r->prompt_tokens;
        event.prompt_top = r->prompt_top;
        r->prompt_told = true;
    }
    if (finish != FINISH_NONE) {
        struct sample_telemetry *t = &sample->telemetry;
        const int64_t end = sample->last_token_ns ? sample->last_token_ns : clock_now_ns();
        const int64_t started = sample->started_ns ? sample->started_ns : end;
        t->queue_ms = (double)(started - sample->queued_ns) / 1e6;
        t->latency_ms = (double)(end - sample->queued_ns) / 1e6;
        t->generated_tokens = sample->n_generated;
        t->cached_prompt_tokens = r->cached_tokens > 0 ? r->cached_tokens : 0;
        t->kv_bytes_peak = sample->peak_blocks * block_bytes(x);
        scheduler_remove(x->scheduler, sample);
        x->stats.requests_done[finish]++;
        event.telemetry = t;
        event.request_done = ++r->n_done == r->sampling.n;
    }
    x->on_event(x->context, &event);
}

void executor_add(struct executor *x, struct request *r)
{
    if (scheduler_add(x->scheduler, r)) return;
    for (int i = 0, n = r->sampling.n; i < n; i++) {
        r->samples[i].state = SAMPLE_DONE;
        tell(x, &r->samples[i], NULL, 0, NULL, FINISH_ERROR, "no memory to queue this request");
    }
}

void executor_end_cancelled(struct executor *x)
{
    for (int i = executor_samples(x) - 1; i >= 0; i--) {
        struct sample *sample = scheduler_at(x->scheduler, i);
        if (sample->cancel) tell(x, sample, NULL, 0, NULL, FINISH_CANCELLED, NULL);
    }
}

void executor_end_all(struct executor *x, enum finish_reason reason, const char *error)
{
    while (executor_samples(x) > 0)
        tell(x, scheduler_at(x->scheduler, 0), NULL, 0, NULL, reason, error);
}

void executor_update(struct executor *x, uint64_t version, bool recompute)
{
    scheduler_update(x->scheduler, version, recompute);
}

// ---- a step ------------------------------------------------------------------------------------

static bool item_decodes(const struct step_item *item)
{
    return item->n == 1 + item->n_drafts && item->sample->n_generated > 0;
}

// Every row of the step is one token behind which a token is drawn.
static bool step_decodes(const struct step *step)
{
    for (int i = 0; i < step->n_items; i++)
        if (!item_decodes(&step->items[i])) return false;
    return step->n_draws == step->n_items;
}

/* The drafts of a decoding sample go in as sequences of one row each, with the sample's block
 * table: each layer stores the keys of all rows before any row attends. A verifying step is thus a
 * decode batch of more rows: it takes the same kernels and captured graphs. */
static enum status add_item(struct executor *x, const struct step_item *item)
{
    enum status st = ST_OK;
    const struct sample *sample = item->sample;
    const int known = item->n - item->n_drafts;
    sample_tokens(sample, item->first, known, x->tokens);
    CHECK(batch_add_paged(x->batch, x->tokens, known, item->first, sample->blocks, sample->n_blocks,
                          x->kv.view.block_size));
    for (int k = 0; k < item->n_drafts; k++)
        CHECK(batch_add_paged(x->batch, &sample->draft.tokens[k], 1, item->first + known + k,
                              sample->blocks, sample->n_blocks, x->kv.view.block_size));
out:
    return st;
}

static enum status build_batch(struct executor *x, const struct step *step)
{
    enum status st = ST_OK;
    batch_clear(x->batch);
    for (int i = 0; i < step->n_items; i++) {
        CHECK(add_item(x, &step->items[i]));
        x->item_end[i] = batch_tokens(x->batch);
    }
    for (int i = 0; i < step->n_draws; i++) {
        const int item = step->draws[i].item, end = x->item_end[item];
        for (int row = end - 1 - step->items[item].n_drafts; row < end; row++)
            CHECK(batch_want_row(x->batch, row));
    }
    CHECK(batch_commit(x->batch,
                       step_decodes(step) ? model_decode_padding(x->model, step->n_tokens) : 0));
out:
    return st;
}

// A one-hot or coupled draft has no part in its row's draw (speculative.h).
static struct sample_draft drawn_draft(const struct executor *x, const struct sample *sample, int k)
{
    const struct draft *draft = &sample->draft;
    if (draft->method != SPECULATIVE_DRAFT_MODEL || x->exact) return SAMPLER_NO_DRAFT;
    return (struct sample_draft){.token = draft->tokens[k], .row = draft->rows[k]};
}

static enum status draw_tokens(struct executor *x, const struct step *step,
                               const struct sample_result **ret_results)
{
    int n = 0;
    for (int i = 0; i < step->n_draws; i++) {
        struct sample *sample = step->draws[i].sample;
        const struct sampling *sampling = &sample->request->sampling;
        const int n_drafts = step->items[step->draws[i].item].n_drafts;
        logit_list_count(&sample->adjusted, sampling, sample->generated, sample->n_generated);
        for (int k = 0; k <= n_drafts; k++)
            x->rows[n++] = (struct sampler_row){
                .sampling = sampling,
                .stream = sample->stream,
                .position = (uint64_t)(sample_length(sample) + k),
                .no_stop = sample->n_generated + k < sampling->min_tokens,
                .draft = k < n_drafts ? drawn_draft(x, sample, k) : SAMPLER_NO_DRAFT,
                .adjustment = {.list = sample->adjusted.at ? &sample->adjusted : NULL,
                               .ahead = sample->draft.tokens,
                               .n_ahead = k},
                .n_top = sampling->logprobs > 0 ? sampling->logprobs : 0};
    }
    if (n == 0) return device_sync(x->dev);
    struct sampler_drafts drafts = {0};
    if (x->draft_model)
        drafts = (struct sampler_drafts){.logits = draft_model_logits(x->draft_model),
                                         .vocab = draft_model_vocab(x->draft_model)};
    return sampler_draw(x->sampler, x->model->logits, x->rows, n, &drafts, ret_results, x->top);
}

static void count_prompt(struct executor *x, const struct sample *sample)
{
    if (sample->index == 0) x->stats.prompt_tokens += (uint64_t)sample->telemetry.prompt_tokens;
}

// A sample of max_tokens 0 ends with its prompt; what was drawn behind it is dropped.
static void end_unsampled(struct executor *x, struct sample *sample, uint64_t version,
                          int64_t now_ns)
{
    struct sample_telemetry *t = &sample->telemetry;
    t->weight_version_first = t->weight_version_last = version;
    sample->last_token_ns = now_ns;
    count_prompt(x, sample);
    tell(x, sample, NULL, 0, NULL, FINISH_LENGTH, NULL);
}

// The sample is gone where the token ended it.
static void take_token(struct executor *x, struct sample *sample, const struct token_record *record,
                       const struct top_logprob *top, enum finish_reason finish, int64_t now_ns)
{
    struct sample_telemetry *t = &sample->telemetry;
    x->stats.generated_tokens++;
    if (sample->n_generated == 1) {
        t->weight_version_first = record->weight_version;
        t->first_token_ms = (double)(now_ns - sample->queued_ns) / 1e6;
        histogram_add(&x->stats.first_token, &bounds_first_token, t->first_token_ms / 1e3);
        count_prompt(x, sample);
    } else {
        histogram_add(&x->stats.next_token, &bounds_next_token,
                      (double)(now_ns - sample->last_token_ns) / 1e9);
    }
    t->weight_version_last = record->weight_version;
    sample->last_token_ns = now_ns;
    tell(x, sample, record, 1, top, finish, NULL);
}

// ---- drafts ------------------------------------------------------------------------------------

static struct speculative_choice choice_of(const struct executor *x, const struct sample *sample)
{
    const struct speculative_choice own = sample->request->sampling.speculative;
    return own.chosen ? own : x->choice;
}

static struct history history_of(const struct sample *sample)
{
    const struct request *r = sample->request;
    return (struct history){.prompt = r->prompt,
                            .n_prompt = r->n_prompt,
                            .prompt_key = r->prompt_key,
                            .generated = sample->generated,
                            .n_generated = sample->n_generated};
}

static void propose(struct executor *x, struct sample *sample)
{
    struct draft *draft = &sample->draft;
    struct speculative_choice choice = choice_of(x, sample);
    const struct history history = history_of(sample);
    // The step gives one token more than it accepts.
    const int room = sample->request->sampling.max_tokens - sample->n_generated - 1;
    int *k = &choice.k[SPECULATIVE_DRAFT_MODEL];
    const int within = *k > 0 ? draft_model_room(x->draft_model, sample) : 0;
    if (*k > within) *k = within > 0 ? within : 0;
    speculative_propose(x->speculative, choice, &history, room, draft);
    draft->context = sample_length(sample);
    draft->behind = x->draft_model ? draft_model_behind(x->draft_model, sample) : 0;
}

// Looks for drafts and draws those of the draft model. What it has to report of the step is set.
static enum status draft_step(struct executor *x, struct step_report *report)
{
    const int64_t start_ns = clock_now_ns();
    int64_t attended = 0;
    int n_seqs = 0, n_may = 0, n = 0, n_drawing = 0;
    for (int i = 0; i < scheduler_running(x->scheduler); i++) {
        struct sample *sample = scheduler_at(x->scheduler, i);
        sample->draft.n = sample->draft.n_verify = 0;
        if (!sample_is_decoding(sample)) continue;
        n_seqs++;
        attended += sample_length(sample);
        n_may += speculative_most(choice_of(x, sample)) > 0;
    }
    if (n_may == 0 || !speculative_wants_drafts(x->speculative)) return ST_OK;
    for (int i = 0; i < scheduler_running(x->scheduler); i++) {
        struct sample *sample = scheduler_at(x->scheduler, i);
        if (!sample_is_decoding(sample) || speculative_most(choice_of(x, sample)) == 0) continue;
        propose(x, sample);
        if (sample->draft.n > 0) x->drafts[n++] = &sample->draft;
    }
    speculative_plan(x->speculative, x->drafts, n, n_seqs, attended);
    for (int i = 0; i < scheduler_running(x->scheduler); i++) {
        struct sample *sample = scheduler_at(x->scheduler, i);
        if (sample->draft.n_verify == 0) continue;
        scheduler_hold_drafts(x->scheduler, sample);
        if (sample->draft.n_verify > 0 && sample->draft.method == SPECULATIVE_DRAFT_MODEL)
            x->drawing[n_drawing++] = sample;
    }
    report->looked = true;
    report->look_ms = clock_ms_since(start_ns);
    if (n_drawing == 0) return ST_OK;
    return draft_model_draw(x->draft_model, x->drawing, n_drawing,
                            speculative_pass_cost(x->speculative), report);
}

// A draft model of another tokenizer, or of no sense, is drafted with in vain: said once.
static void watch_draft_model(struct executor *x, int n_drafts, int n_accepted)
{
    struct unaccepted *u = &x->unaccepted;
    if (u->over) return;
    u->drafts++;
    u->tokens += n_drafts;
    u->over = n_accepted > 0 || u->drafts == UNACCEPTED;
    if (u->over && n_accepted == 0)
        log_warn(
            "engine: none of the first %d tokens that the draft model drafted was accepted: is "
            "it of this model's tokenizer, and trained?",
            u->tokens);
}

static void count_drafts(struct executor *x, struct sample *sample, int n_drafts, int n_accepted)
{
    if (sample->draft.method == SPECULATIVE_DRAFT_MODEL) watch_draft_model(x, n_drafts, n_accepted);
    struct sample_telemetry *t = &sample->telemetry;
    struct engine_stats *all = &x->stats;
    if (n_drafts > t->draft_positions) t->draft_positions = n_drafts;
    if (n_drafts > all->draft_positions) all->draft_positions = n_drafts;
    t->num_drafts++;
    t->num_draft_tokens += n_drafts;
    t->num_accepted_tokens += n_accepted;
    all->num_drafts++;
    all->num_draft_tokens += (uint64_t)n_drafts;
    all->num_accepted_tokens += (uint64_t)n_accepted;
    for (int i = 0; i < n_accepted; i++) {
        t->num_accepted_tokens_per_pos[i]++;
        all->num_accepted_tokens_per_pos[i]++;
    }
}

// One row's draw, or those of a row and the drafts behind it: kept up to and with the first that
// differs from its draft, or that ends the sample. Drafts behind an end do not count. Returns how
// many were kept.
static int take_draws(struct executor *x, struct sample *sample,
                      const struct sample_result *results, const struct top_logprob **top,
                      int n_drafts, uint64_t version, int64_t now_ns)
{
    const struct sampling *sampling = &sample->request->sampling;
    const struct speculative_choice choice = choice_of(x, sample);
    const int length = sample_length(sample);
    enum finish_reason finish = FINISH_NONE;
    int n = 0, n_accepted = 0;
    for (bool agrees = true; agrees && finish == FINISH_NONE; n++) {
        const int32_t token = results[n].token;
        agrees = n < n_drafts && token == sample->draft.tokens[n];
        n_accepted += agrees;
        scheduler_drawn(x->scheduler, sample, token);
        const struct history history = history_of(sample);
        speculative_learn(x->speculative, choice, &history);
        if (sampler_is_stop(x->sampler, sampling, token))
            finish = FINISH_STOP;
        else if (sample->n_generated == sampling->max_tokens)
            finish = FINISH_LENGTH;
    }
    if (sample->draft.n > 0)
        speculative_judge(x->speculative, &sample->draft, n_drafts,
                          n_drafts > 0 ? n_accepted : results[0].token == sample->draft.tokens[0]);
    sample->draft.n = 0;
    if (n == n_accepted) n_drafts = n; // ended by a draft
    if (n_drafts > 0) count_drafts(x, sample, n_drafts, n_accepted);
    if (finish == FINISH_NONE) scheduler_settle(x->scheduler, sample, n_accepted);
    if (x->draft_model) draft_model_settle(x->draft_model, sample, length + n_accepted);
    sample->n_generated -= n;
    for (int i = 0; i < n; i++) {
        const struct token_record record = {.token = results[i].token,
                                            .logprob = results[i].logprob,
                                            .processed_logprob = results[i].processed_logprob,
                                            .retained_mass = results[i].retained_mass,
                                            .weight_version = version,
                                            .drafted = i == 0 ? (uint8_t)n_drafts : 0,
                                            .accepted_at = i < n_accepted ? (uint8_t)(i + 1) : 0};
        sample->n_generated++;
        take_token(x, sample, &record, top[i], i + 1 < n ? FINISH_NONE : finish, now_ns);
    }
    return n;
}

// A sibling that forks has waited for nothing but its leader: both left the queue together.
static void note_starts(const struct step *step, int64_t now_ns)
{
    for (int i = 0; i < step->n_items; i++)
        if (!step->items[i].sample->started_ns) step->items[i].sample->started_ns = now_ns;
    for (int i = 0; i < step->n_draws; i++) {
        struct sample *sample = step->draws[i].sample;
        if (!sample->started_ns)
            sample->started_ns = step->items[step->draws[i].item].sample->started_ns;
    }
}

// Waiting costs time on CUDA, where the passes else run beside what comes next.
static enum status follow_prompts(struct executor *x, const struct step *step)
{
    const bool pays = speculative_model_pays(x->speculative);
    const bool timed = pays && !step_decodes(step) && x->n_followed++ % TIME_PROMPTS == 0;
    int n_tokens = 0;
    enum status st = ST_OK;
    if (timed) CHECK(device_sync(x->dev));
    const int64_t start_ns = clock_now_ns();
    CHECK(draft_model_follow(x->draft_model, step, pays, &n_tokens));
    if (n_tokens == 0) return ST_OK;
    if (timed) CHECK(device_sync(x->dev));
    speculative_prompts_took(x->speculative, n_tokens, timed ? clock_ms_since(start_ns) : 0);
out:
    return st;
}

// What the step does beside prompts: its decoding sequences with their drafts.
static void report_rows(const struct step *step, struct step_report *report)
{
    for (int i = 0; i < step->n_items; i++) {
        const struct step_item *item = &step->items[i];
        if (!item_decodes(item)) continue;
        report->n_seqs++;
        report->n_rows += item->n;
        report->attended += item->first + 1;
        for (int k = 0; k < item->n; k++) report->attended_by_all += item->first + k + 1;
    }
}

static int prompt_tokens_of(const struct step *step)
{
    int n = 0;
    for (int i = 0; i < step->n_items; i++)
        if (!item_decodes(&step->items[i])) n += step->items[i].n;
    return n;
}

enum status executor_step(struct executor *x, uint64_t version, enum scheduler_admit admit,
                          bool *ret_stepped)
{
    enum status st = ST_OK;
    const int64_t start_ns = clock_now_ns();
    const struct sample_result *results = NULL;
    struct step_report report = {.settled = true};
    CHECK(draft_step(x, &report));
    const int64_t drafted_ns = clock_now_ns();
    const struct step *step = scheduler_plan(x->scheduler, admit);
    *ret_stepped = step->n_items > 0;
    if (step->n_items == 0) return ST_OK;
    note_starts(step, start_ns);
    CHECK(build_batch(x, step));
    report_rows(step, &report);
    report.decodes = step_decodes(step);
    const bool settled = model_step(x->model, x->batch, &x->kv.view);
    if (report.decodes) report.settled &= settled;
    for (int i = 0; i < step->n_copies; i++)
        kv_memory_copy_block(&x->kv, step->copies[i].from, step->copies[i].to);
    if (x->draft_model) CHECK(follow_prompts(x, step));
    CHECK(draw_tokens(x, step, &results));
    CHECK(prompt_logprobs_read(x->prompt_logprobs, step, x->item_end, version));
    const int64_t now_ns = clock_now_ns();
    int n_tokens = prompt_tokens_of(step);
    for (int i = 0, row = 0; i < step->n_draws; i++) {
        struct sample *sample = step->draws[i].sample;
        const int n_drafts = step->items[step->draws[i].item].n_drafts;
        if (sample->request->sampling.max_tokens == 0) {
            end_unsampled(x, sample, version, now_ns);
        } else {
            const int n =
                take_draws(x, sample, results + row, x->top + row, n_drafts, version, now_ns);
            n_tokens += n;
            report.n_saved += n - 1;
        }
        row += n_drafts + 1;
    }
    histogram_add(&x->stats.step_tokens, &bounds_step_tokens, n_tokens);
    report.step_ms = (double)(now_ns - drafted_ns) / 1e6;
    speculative_step_over(x->speculative, &report);
    x->stats.steps++;
    x->stats.busy_seconds += (double)(clock_now_ns() - start_ns) / 1e9;
out:
    return st;
}
