/* run_rollouts.c: what a run orders of its rollout queue, how a step is sampled and scored, and
 * what may be learned from. The main thread orders; with --async the queue's own threads sample,
 * each with an HTTP client of its own, and score one at a time, and until it is paused run->watch,
 * scoring and scored_latency are theirs, with the client and the scorers these borrow.
 *
 * A group's staleness is the number of updates between the weights that sampled its oldest token
 * and those that learn from it. What may be ordered follows from its bound: of samples
 *     (max_staleness + version + 1) x batch - (accepted + running)
 * with the version in updates; each step being one batch for updates_per_step of these, that is the
 * next step and max_staleness / updates_per_step behind it. Steps are learned from in the order in
 * which they were ordered, so that a checkpoint needs to know of no step that is in the queue: all
 * that was learned from comes before all that was not.
 *
 * With --rollout-budget a step is gathered of groups of several orders (rollout_queue_gather()).
 * The steps that --max-staleness allows are divided: so many are sampled ahead, and so many a group
 * may go on into. A checkpoint then says which groups of the orders under way were learned from; a
 * run that goes on orders these steps again without them, with the same prompts and seeds.
 *
 * Dynamic sampling (Yu et al. 2025, DAPO): groups whose rewards are all equal teach nothing, and
 * with --filter-groups other prompts are drawn in their place, a bounded number of times, while a
 * step is scored. They are a function of the seed and the step, so that a checkpoint needs to know
 * nothing of them, and epochs count those of the data's order alone. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "trainer/rollout/rollout.h"
#include "trainer/rollout/rollout_queue.h"
#include "trainer/rollout/spec_counters.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// Apart from the data order's streams, which are epochs.
#define ROLLOUT_STREAM ((uint64_t)1 << 32)
#define FILTER_STREAM  ((uint64_t)1 << 33) // of prompts drawn

struct sampling_options run_sampling(const struct run *run, int64_t step)
{
    struct sampling_options sampling = run->config->sampling;
    struct rng rng;
    sampling.text_offset = run->config->log_completions && run->config->log_logprobs;
    rng_init(&rng, (uint64_t)run->config->seed, ROLLOUT_STREAM + (uint64_t)step);
    sampling.seed = rng_u64(&rng) >> 1;
    return sampling;
}

enum status run_settle(struct run *run, int64_t step, bool evaluation)
{
    const bool due = evaluation || step % run->config->restart_interval == 0;
    const int64_t start = clock_now_ns();
    struct source *s = source_that_settles(run->source);
    enum status st = s ? s->settle(s, due ? mapped_version(&run->mapped) : 0, evaluation) : ST_OK;
    run->settle_s += clock_ms_since(start) / 1e3;
    return st;
}

static enum status sample(struct run *run, struct rollout_step *s)
{
    enum status st = ST_OK;
    s->ahead = run->resolved.steps_ahead > 0;
    s->data = run->data->path;
    CHECK(journal_open(run->folder, s->step + 1, run->launch->ranks.rank, &s->journal));
    do st = source_sample(run->source, s);
    while (st != ST_OK && s->again);
out:
    journal_close(s->journal);
    s->journal = NULL;
    return st;
}

static enum status sample_step(void *context, struct rollout_step *s)
{
    struct run *run = context;
    const bool own_prompts = run->source->own_prompts;
    const uint64_t version = control_version(run->servers->servers[0].control);
    enum status st = ST_OK;
    if (run->resolved.steps_ahead == 0) CHECK(run_settle(run, s->step, false));
    const bool watched = !own_prompts && run->resolved.steps_carried == 0;
    if (watched) CHECK(spec_watch_begin(run->watch));
    CHECK(sample(run, s));
    if (watched) CHECK(spec_watch_end(run->watch, &s->spec));
    log_debug("step %" PRId64 ": rollouts begun by weight version %" PRIu64 ", %.3f s", s->step + 1,
              version, s->rollout->seconds);
out:
    return st;
}

// ---- groups that teach nothing ------------------------------------------------------------------

static bool is_flat(const struct rollout *r, const struct scores *scores, int group)
{
    return rewards_are_equal(scores->rewards + (size_t)group * r->n_per_group, r->n_per_group);
}

static int list_flat(const struct rollout_step *s, int *ret_groups)
{
    int n = 0;
    for (int g = 0; g < s->rollout->n_groups; g++)
        if (is_flat(s->rollout, &s->scores, g)) ret_groups[n++] = g;
    return n;
}

static void count_rewards(struct rollout_step *s, const struct scores *scores)
{
    for (int i = 0; i < scores->n; i++) {
        if (isnan(scores->rewards[i])) continue;
        s->filter.reward_sum += scores->rewards[i];
        s->filter.n_rewards++;
    }
}

// Group `from` of r takes the place of group `to` of the step, which goes where that was.
static void exchange(struct rollout_step *s, int to, struct rollout *r, const struct scores *scores,
                     int from)
{
    struct rollout *into = s->rollout;
    const int each = r->n_per_group;
    into->examples[to] = r->examples[from];
    const struct token_list prompt = into->prompts[to];
    into->prompts[to] = r->prompts[from];
    r->prompts[from] = prompt;
    for (int i = 0; i < each; i++) {
        const int here = to * each + i, there = from * each + i;
        const struct completion was = into->completions[here];
        into->completions[here] = r->completions[there];
        r->completions[there] = was;
        into->n_tokens += into->completions[here].n - was.n;
        s->scores.rewards[here] = scores->rewards[there];
        for (int k = 0; k < scores->n_terms; k++)
            s->scores.terms[k * s->scores.n + here] = scores->terms[k * scores->n + there];
    }
}

// Other prompts in place of n groups; those that are flat too are left.
static enum status draw(struct run *run, struct rollout_step *s, struct rng *rng, const int *groups,
                        int n)
{
    struct rollout_step drawn = {.step = s->step,
                                 .first_group = s->rollout->n_groups + s->filter.drawn,
                                 .sampling = s->sampling,
                                 .counts = s->counts};
    struct scores scores = {0};
    enum status st;
    CHECK(rollout_new(n, s->rollout->n_per_group, &drawn.rollout));
    struct rollout *r = drawn.rollout;
    for (int g = 0; g < n; g++)
        r->examples[g] = &run->data->examples[rng_below(rng, (uint32_t)run->data->n)];
    drawn.sampling.seed = rng_u64(rng) >> 1;
    CHECK(sample(run, &drawn));
    s->counts = drawn.counts;
    CHECK(rollout_exchange(run->ranks.all, r));
    CHECK(scoring_rollout(run->scoring, r, &scores));
    CHECK(
        train_ranks_agree(&run->ranks, scores.rewards, (size_t)scores.n * sizeof *scores.rewards));
    count_rewards(s, &scores);
    for (int g = 0; g < n; g++)
        if (!is_flat(r, &scores, g)) exchange(s, groups[g], r, &scores, g);
    s->rollout->seconds += r->seconds;
    s->filter.drawn += n;
out:
    scores_release(&scores);
    rollout_free(drawn.rollout);
    return status_context(st, "--filter-groups");
}

static enum status filter_groups(struct run *run, struct rollout_step *s)
{
    const int64_t max = run->config->filter_groups;
    struct rng rng;
    enum status st = ST_OK;
    if (max == 0) return ST_OK;
    memset(&s->filter, 0, sizeof s->filter); // where it is scored again
    int *groups = calloc((size_t)s->rollout->n_groups, sizeof *groups);
    if (!groups) return status_fail(ST_NO_MEMORY, "no memory for %d groups", s->rollout->n_groups);
    rng_init(&rng, (uint64_t)run->config->seed, FILTER_STREAM + (uint64_t)s->step);
    count_rewards(s, &s->scores);
    for (int64_t i = 0; i < max; i++) {
        const int n = list_flat(s, groups);
        if (n == 0) break;
        log_debug("step %" PRId64 ": the rewards of %d of %d groups are all equal; other prompts "
                  "are drawn",
                  s->step + 1, n, s->rollout->n_groups);
        CHECK(draw(run, s, &rng, groups, n));
    }
    s->filter.flat = list_flat(s, groups);
    if (s->filter.drawn > 0) st = scoring_again(run->scoring, s->rollout, &s->scores);
    if (st == ST_OK && s->filter.drawn > 0)
        st = scoring_turns(run->scoring, s->rollout, &s->scores);
out:
    free(groups);
    return st;
}

// ---- scores -------------------------------------------------------------------------------------

static enum status score_all(struct run *run, struct rollout_step *s)
{
    const int64_t start = clock_now_ns();
    const double sampled_s = s->rollout->seconds;
    struct scores *scores = &s->scores;
    enum status st = ST_OK;
    if (s->scored) return ST_OK;
    scores_release(scores); // where it is scored again
    CHECK(scoring_rollout(run->scoring, s->rollout, scores));
    // A reward may say something else when it is asked again; what counts is what it said to rank
    // 0.
    const size_t n = (size_t)scores->n;
    CHECK(train_ranks_agree(&run->ranks, scores->rewards, n * sizeof *scores->rewards));
    CHECK(train_ranks_agree(&run->ranks, scores->advantages, n * sizeof *scores->advantages));
    CHECK(scoring_turns(run->scoring, s->rollout, scores));
    CHECK(filter_groups(run, s));
    s->latency = run->scored_latency;
    s->score_s += clock_ms_since(start) / 1e3 - (s->rollout->seconds - sampled_s);
    log_debug("step %" PRId64 ": scores %.3f s", s->step + 1, s->score_s);
out:
    return st;
}

// Of several ranks a step is scored once each has the samples of all, with --filter-groups prompts
// are drawn by the weights of its turn, and with --rollout-budget it is gathered then: in
// run_take_step().
static bool scores_when_taken(const struct run *run)
{
    return run->ranks.all || run->config->filter_groups > 0 || run->resolved.steps_carried > 0;
}

static enum status score_step(void *context, struct rollout_step *s)
{
    struct run *run = context;
    return scores_when_taken(run) ? ST_OK : score_all(run, s);
}

// ---- the queue ----------------------------------------------------------------------------------

enum status run_open_rollouts(struct run *run)
{
    const struct rollout_work work = {sample_step, score_step, run};
    const struct train_resolved *r = &run->resolved;
    enum status st;
    int length = r->steps_ahead + r->steps_carried + 1;
    run->scored_latency = run->latency;
    if (!run->gathered) run->ordered = run->step;
    // of a run that was made with a larger --max-staleness
    if (run->step + r->steps_ahead + 1 - run->ordered > length)
        length = (int)(run->step + r->steps_ahead + 1 - run->ordered);
    CHECK(rollout_queue_new(length, &work, &run->queue));
    run->servers->cancelled = rollout_queue_cancelled(run->queue);
out:
    return st;
}

json_t *run_orders(const struct run *run)
{
    json_t *orders;
    if (run->resolved.steps_carried == 0 || rollout_queue_count(run->queue) == 0)
        return json_null();
    orders = rollout_queue_gathered(run->queue);
    json_object_set_new(orders, "prompts_per_step",
                        json_integer(run->config->curriculum.prompts_per_step));
    return orders;
}

enum status run_resume_orders(struct run *run, const json_t *orders)
{
    static const char where[] = "field \"orders\"";
    const int64_t prompts = run->config->curriculum.prompts_per_step;
    int64_t first = -1, made_with = 0;
    enum status st = ST_OK;
    if (!orders || json_is_null(orders)) return ST_OK;
    CHECK(json_get_int(where, orders, "first", 0, run->step, &first));
    CHECK(json_get_int(where, orders, "prompts_per_step", 1, INT32_MAX, &made_with));
    if (first < 0 || !json_is_array(json_object_get(orders, "groups")))
        FAIL(ST_FORMAT, "%s: no \"first\" or \"groups\"", where);
    if (made_with != prompts || run->resolved.steps_carried == 0)
        FAIL(ST_MISMATCH,
             "the run was made with --rollout-budget and --prompts-per-step %" PRId64
             ", and is amid groups that go on into the next steps: take both, with --async "
             "--max-staleness",
             made_with);
    run->ordered = first;
    run->gathered = json_incref((json_t *)orders);
out:
    return st;
}

// The groups of a new order that were learned from before a checkpoint.
static enum status leave_out_gathered(const struct run *run, struct rollout_step *s)
{
    const int64_t first = json_integer_value(json_object_get(run->gathered, "first"));
    const json_t *groups =
        json_array_get(json_object_get(run->gathered, "groups"), (size_t)(s->step - first));
    const json_t *group;
    size_t i;
    json_array_foreach (groups, i, group) {
        const json_int_t g = json_is_integer(group) ? json_integer_value(group) : -1;
        if (g < 0 || g >= s->rollout->n_groups)
            return status_fail(ST_FORMAT,
                               "the checkpoint's field \"orders\": group %zu of step %" PRId64
                               " is none",
                               i, s->step + 1);
        s->rollout->gathered[g] = true;
    }
    return ST_OK;
}

static enum status order_step(struct run *run, int64_t step, const struct curriculum_batch *batch)
{
    enum status st;
    struct rollout_step *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for a step");
    s->step = step;
    s->sampling = run_sampling(run, step);
    CHECK(rollout_new(batch->n, batch->rollouts, &s->rollout));
    for (int g = 0; g < batch->n; g++)
        s->rollout->examples[g] = &run->data->examples[batch->examples[g]];
    CHECK(leave_out_gathered(run, s));
    CHECK(rollout_queue_put(run->queue, s, false));
    run->ordered++;
    s = NULL;
out:
    rollout_step_free(s);
    return st;
}

// With --rollout-budget what is drafted goes on between steps, and counts for the one that ends.
static enum status watch_drafts(struct run *run)
{
    if (run->resolved.steps_carried == 0 || run->watching) return ST_OK;
    const enum status st = spec_watch_begin(run->watch);
    run->watching = st == ST_OK;
    return st;
}

enum status run_order_steps(struct run *run)
{
    struct curriculum_batch batch;
    enum status st = ST_OK;
    // Samplers that have copies of the weights are given new ones while nothing is sampled. Where
    // one was lost, the step that it failed says so when it is taken.
    if (run->resolved.steps_ahead > 0 && source_that_settles(run->source)) {
        rollout_queue_pause(run->queue);
        if (!rollout_queue_failed(run->queue)) st = run_settle(run, run->step, false);
        rollout_queue_resume(run->queue);
    }
    if (st == ST_OK) st = watch_drafts(run);
    while (st == ST_OK && run->ordered <= run->step + run->resolved.steps_ahead &&
           run->ordered < run->total_steps &&
           curriculum_next(run->curriculum, (int)(run->ordered - run->step), &batch))
        st = order_step(run, run->ordered, &batch);
    return st;
}

// The next step with --rollout-budget.
static enum status gather_step(struct run *run, struct rollout_step **ret)
{
    const struct train_config *c = run->config;
    const struct rollout_budget budget = {
        .enough = (int)ceil(c->rollout_budget * (double)c->curriculum.prompts_per_step),
        .carried = run->resolved.steps_carried};
    enum status st;
    struct rollout_step *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for a step");
    s->step = run->step;
    s->sampling = run_sampling(run, run->step);
    CHECK(rollout_new((int)c->curriculum.prompts_per_step, (int)c->curriculum.num_generations,
                      &s->rollout));
    CHECK(rollout_queue_gather(run->queue, &budget, run->ranks.all, s));
    CHECK(spec_watch_end(run->watch, &s->spec));
    run->watching = false;
    if (!source_that_settles(run->source))
        CHECK(watch_drafts(run)); // else there may be new servers
    *ret = s;
    s = NULL;
out:
    rollout_step_free(s);
    return st;
}

enum status run_take_step(struct run *run, struct rollout_step **ret)
{
    enum status st;
    const uint64_t version = mapped_version(&run->mapped) & ~(uint64_t)1;
    const uint64_t behind = 2 * (uint64_t)run->resolved.max_staleness; // an update adds 2
    for (;;) {
        struct rollout_step *s = NULL;
        CHECK(run->resolved.steps_carried > 0 ? gather_step(run, &s)
                                              : rollout_queue_take(run->queue, &s));
        st = rollout_exchange(run->ranks.all, s->rollout);
        const int n = rollout_drop_older(s->rollout, version > behind ? version - behind : 0);
        if (st == ST_OK && n == 0 && scores_when_taken(run)) st = score_all(run, s);
        if (st == ST_OK && n > 0 &&
            run->resolved.steps_carried > 0) // they would have been waited for
            st = status_fail(ST_MISMATCH,
                             "step %" PRId64 ": %d groups have tokens of weights before those that "
                             "--max-staleness allows",
                             s->step + 1, n);
        if (st == ST_OK && n == 0) st = source_counts_sum(&s->counts, run->ranks.all);
        if (st != ST_OK) {
            rollout_step_free(s);
            return st;
        }
        if (n == 0) {
            *ret = s;
            phase_timers_lap(&run->phases, PHASE_WAIT);
            if (run->resolved.steps_ahead > 0) return ST_OK; // other threads did it meanwhile
            phase_timers_move(&run->phases, PHASE_WAIT, PHASE_ROLLOUT, s->rollout->seconds);
            phase_timers_move(&run->phases, PHASE_WAIT, PHASE_SCORE, s->score_s);
            return ST_OK;
        }
        log_debug("step %" PRId64 ": %d of %d groups are more than %" PRId64
                  " updates old, and generated again",
                  s->step + 1, n, s->rollout->n_groups, run->resolved.max_staleness);
        s->n_again += n;
        CHECK(rollout_queue_put(run->queue, s, true)); // there is room where it was taken from
    }
out:
    return st;
}
