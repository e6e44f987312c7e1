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
 * that was learned from comes before all that was not. */
#include "common/base/clock.h"
#include "bridge/attach.h"
#include "common/base/log.h"
#include "trainer/rollout/rollout.h"
#include "trainer/rollout/rollout_queue.h"
#include "trainer/rollout/spec_counters.h"
#include "trainer/run/run.h"
#include "trainer/run/runlog.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum status run_settle(struct run *run, int64_t step, bool evaluation)
{
    const bool due = evaluation || step % run->config->restart_interval == 0;
    const int64_t start = clock_now_ns();
    struct source *s = source_that_settles(run->source);
    enum status st = s ? s->settle(s, due ? mapped_version(&run->mapped) : 0, evaluation) : ST_OK;
    run->settle_s += clock_ms_since(start) / 1e3;
    return st;
}

enum status run_sample(struct run *run, struct rollout_step *s)
{
    enum status st = ST_OK;
    s->ahead = run->resolved.steps_ahead > 0;
    s->data = run->data->path;
    CHECK(journal_open(run->folder, s->step + 1, run->job->ranks.rank, &s->journal));
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
    if (!own_prompts) CHECK(spec_watch_begin(run->watch));
    CHECK(run_sample(run, s));
    if (!own_prompts) CHECK(spec_watch_end(run->watch, &s->spec));
    log_debug("step %" PRId64 ": rollouts begun by weight version %" PRIu64 ", %.3f s", s->step + 1,
              version, s->rollout->seconds);
out:
    return st;
}

// A reward may say something else when it is asked again; what counts is what it said to rank 0.
static enum status agree_on_scores(const struct run *run, struct scores *s)
{
    enum status st = train_ranks_agree(&run->ranks, s->rewards, (size_t)s->n * sizeof *s->rewards);
    return st == ST_OK
               ? train_ranks_agree(&run->ranks, s->advantages, (size_t)s->n * sizeof *s->advantages)
               : st;
}

static enum status score_all(struct run *run, struct rollout_step *s)
{
    const int64_t start = clock_now_ns();
    const double sampled_s = s->rollout->seconds;
    if (s->scored) return ST_OK;
    scores_release(&s->scores); // where it is scored again
    enum status st = scoring_rollout(run->scoring, s->rollout, &s->scores);
    if (st == ST_OK) st = agree_on_scores(run, &s->scores);
    if (st == ST_OK) st = scoring_turns(run->scoring, s->rollout, &s->scores);
    if (st == ST_OK) st = run_filter_groups(run, s);
    s->latency = run->scored_latency;
    s->score_s += clock_ms_since(start) / 1e3 - (s->rollout->seconds - sampled_s);
    log_debug("step %" PRId64 ": scores %.3f s", s->step + 1, s->score_s);
    return st;
}

// Of several ranks a step is scored once each has the samples of all, and with --filter-groups
// prompts are drawn by the weights of its turn: in run_take_step().
static bool scores_when_taken(const struct run *run)
{
    return run->ranks.all || run->config->filter_groups > 0;
}

static enum status score_step(void *context, struct rollout_step *s)
{
    struct run *run = context;
    return scores_when_taken(run) ? ST_OK : score_all(run, s);
}

// Samplers that have copies of the weights are given new ones while nothing is sampled. Where one
// was lost, the step that it failed says so when it is taken.
static enum status settle_ahead(struct run *run)
{
    enum status st = ST_OK;
    if (run->resolved.steps_ahead == 0 || !source_that_settles(run->source)) return ST_OK;
    rollout_queue_pause(run->queue);
    if (!rollout_queue_failed(run->queue)) st = run_settle(run, run->step, false);
    rollout_queue_resume(run->queue);
    return st;
}

enum status run_open_rollouts(struct run *run)
{
    const struct rollout_work work = {sample_step, score_step, run};
    run->scored_latency = run->latency;
    enum status st = rollout_queue_new(run->resolved.steps_ahead + 1, &work, &run->queue);
    if (st == ST_OK) run->servers->cancelled = rollout_queue_cancelled(run->queue);
    return st;
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
    CHECK(rollout_queue_put(run->queue, s, false));
    s = NULL;
out:
    rollout_step_free(s);
    return st;
}

enum status run_order_steps(struct run *run)
{
    struct curriculum_batch batch;
    enum status st = settle_ahead(run);
    for (int ahead = rollout_queue_count(run->queue);
         st == ST_OK && ahead <= run->resolved.steps_ahead &&
         run->step + ahead < run->total_steps && curriculum_next(run->curriculum, ahead, &batch);
         ahead++)
        st = order_step(run, run->step + ahead, &batch);
    return st;
}

enum status run_take_step(struct run *run, struct rollout_step **ret)
{
    enum status st;
    const uint64_t version = mapped_version(&run->mapped) & ~(uint64_t)1;
    const uint64_t behind = 2 * (uint64_t)run->resolved.max_staleness; // an update adds 2
    for (;;) {
        struct rollout_step *s = NULL;
        CHECK(rollout_queue_take(run->queue, &s));
        st = rollout_exchange(run->ranks.all, s->rollout);
        const int n = rollout_drop_older(s->rollout, version > behind ? version - behind : 0);
        if (st == ST_OK && n == 0 && scores_when_taken(run)) st = score_all(run, s);
        if (st == ST_OK && n == 0) st = source_counts_sum(&s->counts, run->ranks.all);
        if (st != ST_OK) {
            rollout_step_free(s);
            return st;
        }
        if (n == 0) {
            *ret = s;
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

void run_lap_rollouts(struct run *run, const struct rollout_step *s)
{
    spans_lap(&run->spans, SPAN_WAIT);
    if (run->resolved.steps_ahead > 0) return; // other threads did it
    spans_move(&run->spans, SPAN_WAIT, SPAN_ROLLOUT, s->rollout->seconds);
    spans_move(&run->spans, SPAN_WAIT, SPAN_SCORE, s->score_s);
}

static double updates_since(const struct run *run, uint64_t version)
{
    return ((double)run->step_version - (double)version) / 2; // both are even
}

static void put_groups(const struct run *run, const struct rollout *r, json_t *metrics)
{
    for (int64_t age = 0; age <= run->resolved.max_staleness; age++) {
        char key[64];
        int n = 0;
        for (int g = 0; g < r->n_groups; g++) {
            const uint64_t oldest = rollout_oldest(r, g);
            n += (oldest == UINT64_MAX ? 0 : updates_since(run, oldest)) == (double)age;
        }
        snprintf(key, sizeof key, "rollout/staleness_groups/%" PRId64, age);
        metrics_put(metrics, key, n);
    }
}

void run_put_staleness(const struct run *run, const struct rollout_step *s, double wait_s,
                       json_t *metrics)
{
    const struct rollout *r = s->rollout;
    double sum = 0, max = 0;
    if (!run->resolved.async && run->resolved.max_staleness == 0) return;
    for (int i = 0; i < r->n_groups * r->n_per_group; i++)
        for (int t = 0; t < r->completions[i].n; t++) {
            const double updates = updates_since(run, r->completions[i].versions[t]);
            sum += updates;
            max = fmax(max, updates);
        }
    metrics_put(metrics, "rollout/staleness_mean", r->n_tokens ? sum / (double)r->n_tokens : 0);
    metrics_put(metrics, "rollout/staleness_max", max);
    put_groups(run, r, metrics);
    metrics_put(metrics, "rollout/generated_again", (double)s->n_again / r->n_groups);
    metrics_put(metrics, "rollout/trainer_wait_s", wait_s);
    metrics_put(metrics, "rollout/sampler_wait_s", s->idle_s);
}
