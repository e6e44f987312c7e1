/* executor.c: owns the runners, the block manager and the scheduler; makes a step of the
 * scheduler's plan, runs it, and keeps what verification leaves of what was sampled. The engine's
 * thread.
 *
 * A step is planned, launched and collected. The device is waited for once, in collecting it, when
 * the sampled tokens come back: between two steps nothing is in flight on it, and the weights may
 * change. A failed device ends everything, so what the plan counted as computed is not undone.
 *
 * One step ahead (engine_options.step_ahead): a step stays on its way when executor_step() returns,
 * and the next one is planned and launched before it is collected, so that the device goes from one
 * to the other. Its plan counts the tokens that are coming; they are fed on the device. A sample
 * that turns out to have ended leaves the step that computes it once more. Where the next step
 * depends on what comes (may_go_ahead), the one before it is collected first, as without; where
 * what it samples does (penalties), its layers run meanwhile; masks of constraints are made when
 * the tokens come, and the device waits for these. Rows are computed alone, so that the bits are
 * those without.
 *
 * Log-probabilities of prompts are read between sampling and taking what was sampled: the residual
 * stream is still there, and the logits are not needed any more. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/executor.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "infer-server/weights/adapters.h"
#include "infer-server/engine/drafting.h"
#include "infer-server/engine/logprobs.h"
#include "infer-server/engine/masks_ahead.h"
#include <assert.h>
#include <stdlib.h>
#include <string.h>

void executor_note_state(struct executor *x)
{
    const struct scheduler_counts *counts = scheduler_counts(x->scheduler);
    struct engine_stats *s = x->stats;
    s->running = scheduler_running(x->scheduler);
    s->waiting = scheduler_waiting(x->scheduler);
    s->kv_blocks_total = x->runners[RUNNER_POLICY]->kv.view.n_blocks;
    s->kv_blocks_used = block_manager_used(x->manager);
    s->kv_block_tokens = block_manager_block_size(x->manager);
    s->kv_bytes_per_block = x->block_bytes;
    s->preemptions = counts->preemptions;
    s->cache_queries = counts->queried_tokens;
    s->cache_hits = counts->hit_tokens;
}

// ---- samples -----------------------------------------------------------------------------------

static int n_samples(const struct executor *x)
{
    return scheduler_running(x->scheduler) + scheduler_waiting(x->scheduler);
}

void executor_add(struct executor *x, struct request *r)
{
    const struct speculative_choice choice = r->sampling.speculative;
    if (choice.chosen) x->drafts |= speculative_max(choice) > 0;
    if (scheduler_add(x->scheduler, r)) return;
    for (int i = 0, n = r->sampling.n; i < n; i++) {
        r->samples[i].queue.state = SAMPLE_DONE;
        deliver_end(x, &r->samples[i], FINISH_ERROR, "no memory to queue this request");
    }
    deliver_all(x);
}

void executor_end_cancelled(struct executor *x)
{
    assert(!x->flight.step);
    for (int i = n_samples(x) - 1; i >= 0; i--) {
        struct sample *sample = scheduler_at(x->scheduler, i);
        if (sample->cancel) deliver_end(x, sample, FINISH_CANCELLED, NULL);
    }
    deliver_all(x);
}

// What comes of the step on its way is nobody's.
static void abandon_flight(struct executor *x)
{
    if (x->flight.step && x->flight.masks) masks_job_finish(x->flight.masks, true);
    x->flight.step = NULL;
}

void executor_end_all(struct executor *x, enum finish_reason reason, const char *error)
{
    abandon_flight(x);
    while (n_samples(x) > 0) deliver_end(x, scheduler_at(x->scheduler, 0), reason, error);
    deliver_all(x);
}

void executor_use_adapters(struct executor *x, const struct adapters *adapters)
{
    runner_use_adapters(x->runners[RUNNER_POLICY], adapters ? adapters_table(adapters) : NULL);
}

// ---- a step ------------------------------------------------------------------------------------

/* The drafts of a decoding sample go in as sequences of one row each, with the sample's block
 * table. A verifying step is thus a decode batch of more rows: it takes the same kernels and
 * captured graphs. So do, `apart`, the few tokens that a tandem's model has missed. Drafts go into
 * the sample's state: those that are not accepted are written over. */
static enum status feed_item(struct runner *r, const struct step_item *item, bool apart)
{
    const struct sample *sample = item->sample;
    const int known = item->n - item->n_drafts, each = apart ? 1 : known;
    enum status st = ST_OK;
    struct batch_seq seq = {sample->request->sampling.adapter.index - 1, // the policy's
                            item->state, sample->states.own};
    for (int k = 0; k < known && st == ST_OK; k += each, seq.state_from = seq.state_slot)
        st = sample_feed(sample, r, item->first + k, each, seq);
    if (sample->text.n_coming && item->first + known == sample_known(sample))
        runner_feed_sampled(r, sample->text.coming_row);
    for (int k = 0; k < item->n_drafts && st == ST_OK; k++)
        st = runner_feed(r, &sample->draft.tokens[k], 1, item->first + known + k, sample->blocks.at,
                         sample->blocks.n, seq);
    return st;
}

// Of the k-th row of n_drafts + 1, in the constraint's state before it.
static struct sampler_row row_of(const struct executor *x, const struct sample *sample, int k,
                                 int n_drafts, int state)
{
    const struct sampling *sampling = &sample->request->sampling;
    const struct sample_text *text = &sample->text;
    struct constraint *constraint = state >= 0 ? sampling->constraint : NULL;
    return (struct sampler_row){.sampling = sampling,
                                .stream = text->stream,
                                .position = (uint64_t)(sample_known(sample) + k),
                                .no_stop = sample_n_sampled(sample) + k < sampling->min_tokens &&
                                           !(constraint && constraint_is_over(constraint, state)),
                                .draft = k < n_drafts ? drafting_row(x->drafting, sample, k)
                                                      : SAMPLER_NO_DRAFT,
                                .adjustment = {.list = text->counted.at ? &text->counted : NULL,
                                               .ahead = sample->draft.tokens,
                                               .n_ahead = k,
                                               .constraint = constraint,
                                               .state = state},
                                .n_top = sampling->logprobs > 0 ? sampling->logprobs : 0};
}

// A token behind the sample's last, and one behind each of its drafts.
static enum status want_sample(struct executor *x, struct runner *r, struct sample *sample,
                               int first_row, int n_drafts)
{
    struct constraint *constraint = sample->request->sampling.constraint;
    struct sample_text *text = &sample->text;
    enum status st = ST_OK;
    if (text->counted.at)
        logit_list_count(&text->counted, &sample->request->sampling, text->generated,
                         text->n_generated);
    int state = text->constraint_state;
    for (int k = 0; k <= n_drafts && st == ST_OK; k++) {
        const struct sampler_row row = row_of(x, sample, k, n_drafts, state);
        st = runner_want(r, first_row + k, &row);
        // Behind a draft that may not come no row counts; one that fails here fails when it is
        // taken.
        if (constraint && state >= 0 && k < n_drafts &&
            constraint_next(constraint, state, sample->draft.tokens[k], &state) != ST_OK)
            state = -1;
    }
    return st;
}

// Whether each row is of a sequence of its own: samples that decode, or a tandem's model that has
// missed few tokens.
static bool goes_apart(const struct runner *r, const struct engine_step *step)
{
    bool apart = r->rows_apart && step->n_tokens <= r->limits.max_seqs;
    for (int i = 0; i < step->n_items && apart; i++) {
        const struct step_item *item = &step->items[i];
        const int missed = item->n - item->n_drafts - 1;
        apart = missed == 0 || (missed <= EXECUTOR_MISSED_APART && sample_is_tandem(item->sample));
    }
    return apart;
}

static enum status build_batch(struct executor *x, const struct engine_step *step)
{
    struct runner *r = x->runners[step->runner];
    const bool apart = goes_apart(r, step);
    enum status st = ST_OK;
    runner_clear(r);
    for (int i = 0; i < step->n_items; i++) {
        CHECK(feed_item(r, &step->items[i], apart));
        x->item_end[i] = batch_tokens(r->batch);
    }
    for (int i = 0; i < step->n_sampled; i++) {
        const int item = step->sampled[i].item, n_drafts = step->items[item].n_drafts;
        CHECK(
            want_sample(x, r, step->sampled[i].sample, x->item_end[item] - 1 - n_drafts, n_drafts));
    }
out:
    return st;
}

// Whether a constrained response ends with the token though the model has none that says so. The
// state is followed over it.
static bool ends(const struct runner *r, const struct sampling *sampling, int32_t token, int *state)
{
    struct constraint *c = r->config->n_eos == 0 ? sampling->constraint : NULL;
    return c && constraint_next(c, *state, token, state) == ST_OK && constraint_is_over(c, *state);
}

// What is kept of what a row and the drafts behind it gave: up to and with the first that differs
// from its draft, or that ends the sample. Drafts behind an end do not count.
static struct verified verify(const struct runner *r, const struct sample *sample,
                              const struct sample_result *results, int n_drafts)
{
    const struct sampling *sampling = &sample->request->sampling;
    struct verified v = {.n_drafts = n_drafts, .finish = FINISH_NONE};
    int state = sample->text.constraint_state;
    for (bool agrees = true; agrees && v.finish == FINISH_NONE;) {
        const int32_t token = results[v.n].token;
        agrees = v.n < n_drafts && token == sample->draft.tokens[v.n];
        v.n_accepted += agrees;
        v.n++;
        if (sampler_is_stop(r->sampler, sampling, token) || ends(r, sampling, token, &state))
            v.finish = FINISH_STOP;
        else if (sample->text.n_generated + v.n == sampling->max_tokens)
            v.finish = FINISH_LENGTH;
    }
    v.n_counted = v.n == v.n_accepted ? v.n : n_drafts; // ended by a draft
    return v;
}

// Follows the request's constraint over a token. False: that goes beyond the constraint's bounds,
// and has ended the sample.
static bool may_come(struct executor *x, struct sample *sample, int32_t token)
{
    struct constraint *constraint = sample->request->sampling.constraint;
    int *state = &sample->text.constraint_state;
    if (!constraint) return true;
    if (constraint_next(constraint, *state, token, state) == ST_OK) return true;
    log_warn("a request ends: %s", status_message());
    deliver_end(x, sample, FINISH_ERROR,
                "the constraint grew beyond its bounds (the log says which)");
    return false;
}

// The sample gets the tokens of its rows; it is gone where they end it. Returns how many.
static int take_tokens(struct executor *x, struct runner *r, struct sample *sample,
                       const struct step_item *item, int row, uint64_t version, int64_t now_ns)
{
    const struct sample_result *results = r->results + row;
    const struct verified v = verify(r, sample, results, item->n_drafts);
    const int before = sample->text.n_generated;
    const bool frozen = sample_author(sample) == RUNNER_FROZEN;
    scheduler_accept(x->scheduler, sample, v.n_accepted);
    if (x->drafts) drafting_verified(x->drafting, sample, &v, results[0].token);
    for (int i = 0; i < v.n; i++) {
        sample_append(sample, results[i].token);
        if (x->drafts) drafting_learn(x->drafting, sample);
    }
    if (sample_is_tandem(sample)) sample_choose_author(sample, x->token_ends, x->n_token_ends);
    sample_check(sample, r->limits.block_size);
    for (int i = 0; i < v.n; i++) {
        if (!may_come(x, sample, results[i].token)) return i;
        const struct token_record record = {.token = results[i].token,
                                            .logprob = results[i].logprob,
                                            .processed_logprob = results[i].processed_logprob,
                                            .retained_mass = results[i].retained_mass,
                                            .weight_version = version,
                                            .drafted = i == 0 ? (uint8_t)v.n_counted : 0,
                                            .accepted_at = i < v.n_accepted ? (uint8_t)(i + 1) : 0,
                                            .frozen = frozen};
        deliver_token(x, sample, before + i + 1, &record, r->top[row + i],
                      i + 1 < v.n ? FINISH_NONE : v.finish, now_ns);
    }
    return v.n;
}

// The constraints' states behind what came, beside each other.
static void follow_constraints(struct executor *x, const struct engine_step *step)
{
    const struct sample_result *results = x->runners[step->runner]->results;
    int n = 0;
    for (int i = 0, row = 0; i < step->n_sampled; i++) {
        const struct sample *sample = step->sampled[i].sample;
        struct constraint *constraint = sample ? sample->request->sampling.constraint : NULL;
        if (constraint && sample->request->sampling.max_tokens > 0)
            x->constrained[n++] = (struct constraint_row){constraint, sample->text.constraint_state,
                                                          results[row].token};
        row += step->items[step->sampled[i].item].n_drafts + 1;
    }
    constraint_follow(x->constrained, n);
}

// Returns how many tokens were generated.
static int take_step(struct executor *x, const struct engine_step *step, uint64_t version,
                     int64_t now_ns)
{
    int n_tokens = 0;
    if (!x->masked) follow_constraints(x, step);
    for (int i = 0, row = 0; i < step->n_sampled; i++) {
        struct sample *sample = step->sampled[i].sample;
        const struct step_item *item = &step->items[step->sampled[i].item];
        if (!sample) { // it ended while this step was on its way
        } else if (sample->request->sampling.max_tokens == 0) {
            deliver_prompt(x, sample, version, now_ns);
        } else {
            n_tokens +=
                take_tokens(x, x->runners[step->runner], sample, item, row, version, now_ns);
        }
        row += item->n_drafts + 1;
    }
    return n_tokens;
}

static enum status make_copies(struct executor *x, const struct engine_step *step)
{
    enum status st = ST_OK;
    for (int i = 0; i < step->n_copies && st == ST_OK; i++) {
        const struct step_copy *copy = &step->copies[i];
        st = runner_copy(x->runners[copy->what.of_state ? step->runner : RUNNER_POLICY],
                         &copy->what);
        if (copy->frozen && st == ST_OK) st = runner_copy(x->runners[RUNNER_FROZEN], &copy->what);
    }
    return st;
}

// ---- plan, launch, collect ----------------------------------------------------------------------

// What goes into the next step, drafts among it; step->n_items is 0 where there is nothing to do.
static enum status plan(struct executor *x, uint64_t version, enum scheduler_admit admit,
                        struct flight *ret)
{
    ret->version = version;
    ret->overlapped = false;
    ret->masks = NULL;
    ret->start_ns = clock_now_ns();
    const bool policy =
        !x->runners[RUNNER_FROZEN] || scheduler_choose_runner(x->scheduler) == RUNNER_POLICY;
    ret->drafts = x->drafts;
    const enum status st =
        ret->drafts ? drafting_propose(x->drafting, x->scheduler, policy && !x->flight.step)
                    : ST_OK;
    if (st != ST_OK) return st;
    ret->drafted_ns = clock_now_ns();
    ret->step = schedule(x->scheduler, admit);
    return ST_OK;
}

// Begins with the masks of a step whose batch is built, behind what the one on its way samples.
static enum status begin_masks(struct executor *x, struct flight *f)
{
    const struct engine_step *step = f->step;
    struct runner *r = x->runners[RUNNER_POLICY];
    int n = 0;
    for (int i = 0; i < step->n_sampled; i++) { // no drafts: a row each
        struct adjustment *row = &r->rows[i].adjustment;
        const struct sample_text *text = &step->sampled[i].sample->text;
        if (!row->constraint) continue;
        x->constrained[n++] = (struct constraint_row){row->constraint, row->state,
                                                      text->n_coming ? text->coming_row : -1};
        row->made = n;
    }
    if (n == 0) return ST_OK;
    return sampler_begin_masks(r->sampler, x->masks, x->constrained, n, r->other.sampler,
                               &f->masks);
}

// Enqueues all of it, up to the sampling.
static enum status launch_layers(struct executor *x, struct flight *f)
{
    struct runner *r = x->runners[f->step->runner];
    enum status st;
    delivery_started(f->step, f->start_ns);
    CHECK(build_batch(x, f->step));
    if (f->overlapped) CHECK(begin_masks(x, f));
    CHECK(runner_step(r));
    CHECK(make_copies(x, f->step));
    if (f->drafts && f->step->runner == RUNNER_POLICY)
        st = drafting_follow(x->drafting, f->step, f->overlapped);
out:
    return st;
}

static enum status launch(struct executor *x, struct flight *f)
{
    const enum status st = launch_layers(x, f);
    return st == ST_OK ? runner_sample(x->runners[f->step->runner]) : st;
}

// Whether somebody wants the log-probabilities of a prompt that is in it.
static bool scores_prompts(const struct engine_step *step)
{
    for (int i = 0; i < step->n_items; i++) {
        const struct sample *sample = step->items[i].sample;
        if (sample && sample->request->sampling.prompt_logprobs) return true;
    }
    return false;
}

// Waits for what it samples, and for its masks, which the device has waited for.
static enum status wait_for_results(struct runner *r, const struct flight *f)
{
    const enum status st = runner_collect(r);
    struct status_kept kept;
    if (!f->masks) return st;
    if (st != ST_OK) status_keep(&kept, st);
    const enum status made = masks_job_finish(f->masks, st != ST_OK);
    return st == ST_OK ? made : status_recall(&kept);
}

// Waits for it, and gives its samples what they have of it; events are yet to be delivered.
static enum status collect(struct executor *x, const struct flight *f)
{
    const struct engine_step *step = f->step;
    struct runner *r = x->runners[step->runner];
    enum status st;
    CHECK(wait_for_results(r, f));
    if (scores_prompts(step))
        CHECK(prompt_logprobs_read(x->prompt_logprobs, r, step, x->item_end, f->version));
    const int64_t now_ns = clock_now_ns();
    const int64_t start_ns = f->start_ns > x->collected_ns ? f->start_ns : x->collected_ns;
    int n_prompt = 0;
    for (int i = 0; i < step->n_items; i++)
        if (step->items[i].sample && !step_item_decodes(&step->items[i]))
            n_prompt += step->items[i].n;
    const int n_generated = take_step(x, step, f->version, now_ns);
    histogram_add(&x->stats->step_tokens, &bounds_step_tokens, n_prompt + n_generated);
    if (f->drafts && step->runner == RUNNER_POLICY) {
        if (f->overlapped)
            drafting_rested(x->drafting, (double)(now_ns - start_ns) / 1e6);
        else
            drafting_step_over(x->drafting, (double)(now_ns - f->drafted_ns) / 1e6, r->warm);
    }
    x->stats->steps++;
    x->collected_ns = clock_now_ns();
    x->stats->busy_seconds += (double)(x->collected_ns - start_ns) / 1e9;
out:
    return st;
}

// ---- one step ahead -----------------------------------------------------------------------------

// Whether the next step can be planned, and its layers launched, before what the one on its way
// samples is known: nothing in it is chosen by these tokens.
static bool may_go_ahead(const struct executor *x)
{
    const struct engine_step *step = x->flight.step;
    if (scores_prompts(step)) return false;
    for (int i = 0; i < step->n_sampled; i++)
        if (step->items[step->sampled[i].item].n_drafts > 0) return false;
    return !x->drafts || !drafting_is_wanted(x->drafting, x->scheduler);
}

// Whether its sampling can be launched only when what was sampled before is known: penalties count
// it, and whether a constrained answer may end before min_tokens hangs on it. Masks do not wait.
static bool waits_for_tokens(const struct engine_step *step)
{
    for (int i = 0; i < step->n_sampled; i++) {
        const struct sampling *sampling = &step->sampled[i].sample->request->sampling;
        if (sampling_adjusts(sampling) || (sampling->constraint && sampling->min_tokens > 0))
            return true;
    }
    return false;
}

// Samples from layers that were launched before the tokens that its rows depend on were there.
static enum status sample_late(struct executor *x, const struct engine_step *step)
{
    static const struct sampling nobody = {.temperature = 0};
    struct runner *r = x->runners[RUNNER_POLICY];
    for (int i = 0; i < step->n_sampled; i++) { // no drafts: a row each
        struct sample *sample = step->sampled[i].sample;
        if (!sample) { // it has ended
            r->rows[i] = (struct sampler_row){.sampling = &nobody, .draft = SAMPLER_NO_DRAFT};
            continue;
        }
        struct sample_text *text = &sample->text;
        if (text->counted.at)
            logit_list_count(&text->counted, &sample->request->sampling, text->generated,
                             text->n_generated);
        const int made = r->rows[i].adjustment.made;
        r->rows[i] = row_of(x, sample, 0, 0, text->constraint_state);
        if (r->rows[i].adjustment.constraint) r->rows[i].adjustment.made = made;
    }
    return runner_sample(r);
}

// What the step on its way samples counts as there from here on, or is about to be.
static void note_coming(const struct executor *x, bool coming)
{
    const struct engine_step *step = x->flight.step;
    for (int i = 0; i < step->n_sampled; i++) {
        struct sample *sample = step->sampled[i].sample;
        if (!sample || sample->request->sampling.max_tokens == 0) continue;
        sample->text.n_coming = coming;
        sample->text.coming_row = i;                          // no drafts: a row each
        sample->text.generated[sample->text.n_generated] = 0; // replaced on the device
    }
}

static enum status collect_flight(struct executor *x)
{
    const struct flight f = x->flight;
    x->flight.step = NULL;
    return f.step ? collect(x, &f) : ST_OK;
}

enum status executor_settle(struct executor *x)
{
    const enum status st = collect_flight(x);
    deliver_all(x);
    return st;
}

// The next step is on its way before the one that is there is collected.
static enum status go_ahead(struct executor *x, uint64_t version, enum scheduler_admit admit)
{
    struct runner *r = x->runners[RUNNER_POLICY];
    struct flight next;
    enum status st;
    x->flight.overlapped = true;
    note_coming(x, true);
    st = plan(x, version, admit, &next);
    next.overlapped = true;
    const bool launched = st == ST_OK && next.step->n_items > 0;
    const bool late = launched && waits_for_tokens(next.step);
    if (launched) {
        runner_turn(r);
        st = late ? launch_layers(x, &next) : launch(x, &next);
        runner_turn(r);
        x->stats->steps_ahead++;
    }
    note_coming(x, false);
    x->masked = next.masks;
    if (st == ST_OK)
        st = collect_flight(x);
    else
        abandon_flight(x); // the next one takes its place, for executor_end_all()
    x->masked = false;
    if (launched) {
        runner_turn(r);
        x->flight = next;
        if (late && st == ST_OK) st = sample_late(x, next.step);
    }
    deliver_all(x); // behind the sampling, which the device may wait for
    return st;
}

enum status executor_step(struct executor *x, uint64_t version, enum scheduler_admit admit,
                          bool *ret_stepped)
{
    enum status st;
    *ret_stepped = true;
    if (x->flight.step && may_go_ahead(x)) return go_ahead(x, version, admit);
    *ret_stepped = x->flight.step != NULL;
    CHECK(executor_settle(x));
    CHECK(plan(x, version, admit, &x->flight));
    if (x->flight.step->n_items == 0) {
        x->flight.step = NULL;
        return ST_OK;
    }
    *ret_stepped = true;
    CHECK(launch(x, &x->flight));
    if (!x->ahead) st = executor_settle(x);
out:
    return st;
}
