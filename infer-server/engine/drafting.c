/* drafting.c: owns the planner of drafts and the lists of one step's: the engine's thread; and
 * counts drafts, which any thread may. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/drafting.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include <stdlib.h>

#define ROWS_OFF     64 // of a step, where only single requests ask for drafts
#define ROWS         512
#define UNACCEPTED   32 // drafts of the draft model in vain, before that is said
#define TIME_PROMPTS 8  // steps that follow prompts, one of which is timed
#define DECLINED     4  // plans in a row that drafted nothing, after which steps go ahead
#define IDLE         32 // so many, before there is a plan again

struct drafting {
    struct speculative *speculative;
    struct draft_model *model;        // NULL: none
    enum speculative_method method;   // which it is
    struct speculative_choice choice; // of requests that do not choose
    int ahead;                        // of a sample, where states are taken back; 0: any
    bool exact;                       // rows are sampled as without drafts
    bool measures;                    // costs decide how much is drafted
    struct engine_stats *stats;
    struct step_report report; // of the present step
    unsigned n_followed;       // steps whose prompts the draft model followed
    int n_declined;            // plans in a row that drafted nothing, though something could be
    int n_idle;                // steps that go by without a plan, if nothing but a model drafts
    struct {                   // drafts of the draft model until one is accepted, or it is said
        bool over;             // that none was
        int drafts, tokens;
    } unaccepted;
    struct draft **drafts;    // (max_batch) of one step
    struct sample **sampling; // (max_batch) for which the draft model samples
};

// ---- life --------------------------------------------------------------------------------------

int drafting_rows(const struct engine_options *options)
{
    const int k = speculative_max(options->speculative), max_batch = options->max_batch;
    const int rows = k > 0 && max_batch >= ROWS / k ? ROWS : max_batch * k;
    return rows > ROWS_OFF ? rows : ROWS_OFF;
}

enum status drafting_new(const struct engine_options *options, struct draft_model *model,
                         int max_rows, int ahead, struct engine_stats *stats, struct drafting **ret)
{
    const bool fixed = options->speculative_fixed || options->exact;
    enum status st = ST_OK;
    struct drafting *d = calloc(1, sizeof *d);
    if (!d) return status_fail(ST_NO_MEMORY, "no memory for drafts");
    d->model = model;
    d->ahead = ahead;
    d->method = model && draft_model_is_mtp(model) ? SPECULATIVE_MTP : SPECULATIVE_DRAFT_MODEL;
    d->choice = options->speculative;
    d->exact = options->exact;
    d->measures = speculative_max(d->choice) > 0 && !fixed;
    d->stats = stats;
    stats->drafts.draft_positions = speculative_max(d->choice);
    stats->speculative = d->choice;
    CHECK(speculative_new(fixed, max_rows, &d->speculative));
    d->drafts = malloc((size_t)options->max_batch * sizeof *d->drafts);
    d->sampling = malloc((size_t)options->max_batch * sizeof *d->sampling);
    if (!d->drafts || !d->sampling) FAIL(ST_NO_MEMORY, "no memory for the drafts of a step");
    *ret = d;
    return ST_OK;
out:
    drafting_free(d);
    return st;
}

void drafting_free(struct drafting *d)
{
    if (!d) return;
    free(d->drafts);
    free(d->sampling);
    speculative_free(d->speculative);
    free(d);
}

enum status drafting_measure(struct drafting *d, struct runner *const runners[RUNNERS],
                             int max_batch)
{
    enum status st = ST_OK;
    if (!d->measures) return ST_OK;
    CHECK(step_timing_measure(runners[RUNNER_POLICY], max_batch,
                              speculative_step_cost(d->speculative)));
    if (d->model)
        CHECK(step_timing_measure(runners[RUNNER_DRAFT], max_batch,
                                  speculative_pass_cost(d->speculative)));
out:
    return st;
}

// Whether a model sampled it.
static bool is_models(const struct draft *draft)
{
    return !draft_methods[draft->method]->propose;
}

// ---- before a step -----------------------------------------------------------------------------

static struct speculative_choice choice_of(const struct drafting *d, const struct sample *sample)
{
    const struct speculative_choice own = sample->request->sampling.speculative;
    if (sample_uses_frozen(sample)) return (struct speculative_choice){.chosen = true};
    return own.chosen ? own : d->choice;
}

static struct history history_of(const struct sample *sample)
{
    struct request *r = sample->request;
    if (!r->prompt_key)
        r->prompt_key = speculative_prompt_key(r->prompt, r->n_prompt) ^ r->sampling.cache_salt ^
                        r->sampling.adapter.id;
    return (struct history){.prompt = r->prompt,
                            .n_prompt = r->n_prompt,
                            .prompt_key = r->prompt_key,
                            .generated = sample->text.generated,
                            .n_generated = sample->text.n_generated};
}

// Drafts that a step gives the sample, at most: one token more than it accepts. A state that is
// taken back must not have come to the next border.
static int room_for(const struct drafting *d, const struct sample *sample)
{
    const int room = sample->request->sampling.max_tokens - sample->text.n_generated - 1;
    if (d->ahead == 0) return room;
    const int border = DELTA_CHUNK - 1 - sample_known(sample) % DELTA_CHUNK;
    const int back = d->ahead < border ? d->ahead : border;
    return room < back ? room : back;
}

static void propose(struct drafting *d, struct sample *sample)
{
    struct draft *draft = &sample->draft;
    struct speculative_choice choice = choice_of(d, sample);
    const struct history history = history_of(sample);
    const int room = room_for(d, sample);
    int *k = &choice.k[d->method], within = 0, lag = 0;
    if (d->model) draft_model_look(d->model, sample, &within, &lag);
    if (*k > within) *k = within;
    speculative_propose(d->speculative, choice, &history, room, draft);
    draft->lag = lag;
}

// Whether nothing but a model drafts for it: what others find changes from one step to the next.
static bool is_models_alone(struct speculative_choice choice)
{
    for (int m = 0; m < SPECULATIVE_METHODS; m++)
        if (choice.k[m] > 0 && draft_methods[m]->propose) return false;
    return true;
}

bool drafting_is_wanted(const struct drafting *d, const struct scheduler *scheduler)
{
    for (int i = 0; i < scheduler_running(scheduler); i++) {
        const struct speculative_choice choice = choice_of(d, scheduler_at(scheduler, i));
        if (!speculative_wants_drafts(d->speculative, choice)) continue;
        if (d->n_idle == 0 || !is_models_alone(choice)) return true;
    }
    return false;
}

// Whether any sample may draft; counts the decoding ones.
static bool count_decoding(struct drafting *d, struct scheduler *scheduler, int *ret_seqs,
                           int64_t *ret_attended)
{
    bool may = false;
    *ret_seqs = 0;
    *ret_attended = 0;
    for (int i = 0; i < scheduler_running(scheduler); i++) {
        struct sample *sample = scheduler_at(scheduler, i);
        sample->draft.n = sample->draft.n_verify = 0;
        if (!sample_is_decoding(sample)) continue;
        *ret_seqs += 1;
        *ret_attended += sample_known(sample);
        may |= speculative_wants_drafts(d->speculative, choice_of(d, sample));
    }
    return may;
}

enum status drafting_propose(struct drafting *d, struct scheduler *scheduler, bool policy)
{
    const int64_t start_ns = clock_now_ns();
    int64_t attended;
    int n_seqs, n = 0, n_sampling = 0, n_verified = 0;
    d->report = (struct step_report){.warm = true};
    if (!count_decoding(d, scheduler, &n_seqs, &attended) || !policy) return ST_OK;
    for (int i = 0; i < scheduler_running(scheduler); i++) {
        struct sample *sample = scheduler_at(scheduler, i);
        if (!sample_is_decoding(sample) || speculative_max(choice_of(d, sample)) == 0) continue;
        propose(d, sample);
        if (sample->draft.n > 0) d->drafts[n++] = &sample->draft;
    }
    speculative_plan(d->speculative, d->drafts, n, n_seqs, attended);
    for (int i = 0; i < scheduler_running(scheduler); i++) {
        struct sample *sample = scheduler_at(scheduler, i);
        if (sample->draft.n_verify == 0) continue;
        n_verified++;
        scheduler_reserve_drafts(scheduler, sample);
        if (sample->draft.n_verify > 0 && is_models(&sample->draft))
            d->sampling[n_sampling++] = sample;
    }
    if (n > 0) d->n_declined = n_verified > 0 ? 0 : d->n_declined + 1;
    d->n_idle = d->n_declined >= DECLINED ? IDLE : 0;
    d->report.look_ms = clock_ms_since(start_ns);
    if (n_sampling == 0) return ST_OK;
    return draft_model_sample(d->model, d->sampling, n_sampling,
                              speculative_pass_cost(d->speculative), &d->report);
}

// ---- the step ----------------------------------------------------------------------------------

// What the step does beside prompts: its decoding sequences with their drafts.
static void report_rows(const struct engine_step *step, struct step_report *report)
{
    report->decodes = step->n_sampled == step->n_items;
    for (int i = 0; i < step->n_items; i++) {
        const struct step_item *item = &step->items[i];
        if (!step_item_decodes(item)) {
            report->decodes = false;
            continue;
        }
        report->n_seqs++;
        report->n_rows += item->n;
        report->attended += item->first + 1;
    }
}

enum status drafting_follow(struct drafting *d, const struct engine_step *step, bool ahead)
{
    int n_tokens = 0;
    report_rows(step, &d->report);
    if (!d->model) return ST_OK;
    const bool pays = !ahead && speculative_model_pays(d->speculative, d->method);
    const bool timed = pays && !d->report.decodes && d->n_followed++ % TIME_PROMPTS == 0;
    double ms = 0;
    const enum status st = draft_model_follow(d->model, step, pays, &n_tokens, timed ? &ms : NULL);
    if (st == ST_OK && n_tokens > 0) speculative_prompts_took(d->speculative, n_tokens, ms);
    return st;
}

// A deterministic draft, or one with shared noise, has no part in the sampling of its row.
struct sample_draft drafting_row(const struct drafting *d, const struct sample *sample, int k)
{
    const struct draft *draft = &sample->draft;
    if (!is_models(draft) || d->exact) return SAMPLER_NO_DRAFT;
    return (struct sample_draft){.token = draft->tokens[k], .row = draft->rows[k]};
}

// ---- what came of it ---------------------------------------------------------------------------

// A draft model of another tokenizer, or of no sense, is drafted with in vain: said once.
static void watch_draft_model(struct drafting *d, const struct verified *v)
{
    if (d->unaccepted.over) return;
    d->unaccepted.drafts++;
    d->unaccepted.tokens += v->n_counted;
    d->unaccepted.over = v->n_accepted > 0 || d->unaccepted.drafts == UNACCEPTED;
    if (d->unaccepted.over && v->n_accepted == 0)
        log_warn("engine: none of the first %d tokens that the draft model drafted was accepted: "
                 "is it of this model's tokenizer, and trained?",
                 d->unaccepted.tokens);
}

void drafting_verified(struct drafting *d, struct sample *sample, const struct verified *v,
                       int32_t first)
{
    struct draft *draft = &sample->draft;
    if (draft->n > 0)
        speculative_verified(d->speculative, draft, v->n_drafts,
                             v->n_drafts > 0 ? v->n_accepted : first == draft->tokens[0], v->n - 1);
    draft->n = 0;
    if (v->n_counted > 0) {
        if (is_models(draft)) watch_draft_model(d, v);
        draft_counts_step(&sample->telemetry.drafts, v->n_counted, v->n_accepted);
        draft_counts_step(&d->stats->drafts, v->n_counted, v->n_accepted);
    }
    if (d->model) draft_model_truncate(d->model, sample, sample_known(sample) + v->n_accepted);
}

void drafting_learn(struct drafting *d, const struct sample *sample)
{
    const struct history history = history_of(sample);
    speculative_learn(d->speculative, choice_of(d, sample), &history);
}

void drafting_step_over(struct drafting *d, double step_ms, bool warm)
{
    if (d->report.decodes) d->report.warm &= warm;
    d->report.step_ms = step_ms;
    speculative_step_over(d->speculative, &d->report);
}

void drafting_rested(struct drafting *d, double step_ms)
{
    d->n_idle -= d->n_idle > 0;
    speculative_stepped(d->speculative, step_ms);
}

// ---- counts -------------------------------------------------------------------------------------

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
    for (int i = 0; i < SPECULATIVE_MAX; i++)
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
