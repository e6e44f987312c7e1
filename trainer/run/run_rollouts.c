/* run_rollouts.c: what a run orders of its rollout queue, and how a step is filled. The main thread
 * orders; with --rollout-ahead the queue's own thread fills, and until it is paused run->source,
 * watch, scoring and scored_latency are its own, with the client and the scorers they borrow. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

static enum status fill_step(void *context, struct rollout_step *s)
{
    struct run *run = context;
    enum status st;
    s->version = control_version(run->source.servers[0].control) & ~(uint64_t)1;
    CHECK(spec_watch_begin(run->watch));
    CHECK(rollout_pull(&run->source, &s->sampling, s->rollout));
    CHECK(spec_watch_end(run->watch, &s->spec));
    const int64_t start = clock_now_ns();
    CHECK(scoring_rollout(&run->scoring, s->rollout, &s->scores));
    s->latency = run->scored_latency;
    log_debug("step %" PRId64 ": rollouts by weight version %" PRIu64
              " or newer %.3f s, scores %.3f s",
              s->step + 1, s->version, s->rollout->seconds, clock_ms_since(start) / 1e3);
out:
    return st;
}

enum status run_open_rollouts(struct run *run)
{
    run->scored_latency = run->latency;
    enum status st =
        rollout_queue_new((int)run->config->rollout_ahead + 1, fill_step, run, &run->queue);
    if (st == ST_OK) run->source.cancelled = rollout_queue_cancelled(run->queue);
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
    CHECK(rollout_queue_put(run->queue, s));
    s = NULL;
out:
    rollout_step_free(s);
    return st;
}

enum status run_order_steps(struct run *run)
{
    enum status st = ST_OK;
    struct curriculum_batch batch;
    for (int ahead = rollout_queue_count(run->queue);
         st == ST_OK && ahead <= run->config->rollout_ahead &&
         run->step + ahead < run->total_steps && curriculum_next(run->curriculum, ahead, &batch);
         ahead++)
        st = order_step(run, run->step + ahead, &batch);
    return st;
}

void run_put_staleness(const struct run *run, const struct rollout *r, json_t *metrics)
{
    const double now = (double)run->step_version;
    double sum = 0, max = 0;
    if (run->config->rollout_ahead == 0) return;
    for (int i = 0; i < r->n_groups * r->n_per_group; i++)
        for (int t = 0; t < r->completions[i].n; t++) {
            double updates = (now - (double)r->completions[i].versions[t]) / 2; // both are even
            sum += updates;
            max = fmax(max, updates);
        }
    metrics_put(metrics, "rollout/staleness_mean", r->n_tokens ? sum / (double)r->n_tokens : 0);
    metrics_put(metrics, "rollout/staleness_max", max);
}
