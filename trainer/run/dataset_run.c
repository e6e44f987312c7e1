/* dataset_run.c: the steps of a run without a server: an update by the next examples, and a line of
 * metrics.jsonl; its evaluations, and what it leaves at the end. The main thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/dataset_run.h"
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/data/data.h"
#include "trainer/learn/step.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/runlog.h"

#include <inttypes.h>
#include <math.h>

// ---- a pass -------------------------------------------------------------------------------------

enum status dataset_samples(const struct run *run, const struct dataset_examples *data,
                            const int *items, int n, struct samples **ret)
{
    const int sides = run->task->sides;
    struct samples *samples = NULL;
    enum status st = samples_new(n, sides, &samples);
    if (st != ST_OK) return st;
    for (int i = 0; i < n; i++) {
        const int item = items ? items[i] : i;
        const struct token_list *prompt = &data->sides[0]->examples[item].prompt_ids;
        samples->groups[i].prompt = prompt->ids;
        samples->groups[i].n_prompt = prompt->n;
        samples->groups[i].whole = sides > 1;
        for (int k = 0; k < sides; k++) {
            const struct example *e = &data->sides[k]->examples[item];
            samples->completions[i * sides + k] = (struct pack_completion){
                .ids = e->completion_ids.ids,
                .n = e->completion_ids.n,
                .advantage = 1,
                .authors = e->learnt,
                .reference = data->reference ? data->reference[item * sides + k] : 0,
            };
        }
    }
    return samples_begin(samples, ret);
}

// The mean over all held-out examples, of which each rank computes its share.
static enum status evaluate(struct run *run, json_t *metrics)
{
    const int each = (int)run->config->curriculum.prompts_per_step, n = run->given->eval.n;
    struct step step = {.loss = run->resolved.loss};
    struct update_stats stats = {0};
    struct samples *samples = NULL;
    char best[BEST_WORDS];
    enum status st;
    CHECK(dataset_samples(run, &run->given->eval, NULL, n, &samples));
    step.scale = loss_scale_of(&step.loss, samples, 0, n);
    for (int at = 0; at < n; at += each)
        CHECK(learner_pass(run->learner, PASS_LOSS, samples, at, n - at < each ? n - at : each,
                           &step, &stats));
    CHECK(stats_merge(run->ranks.copies, &stats));
    stats_put(&stats, loss_stats(&step.loss), "eval/", metrics);
    const double loss = stats.range[STAT_LOSS].sum;
    best_words(&run->best, best_consider(&run->best, run->step, -loss), run->step, best);
    log_progress_end();
    log_info("step %" PRId64 ": held-out loss %.4f on %d examples%s", run->step, loss, n, best);
out:
    samples_free(samples);
    return status_context(st, "evaluation");
}

// ---- a step -------------------------------------------------------------------------------------

static void log_step(struct run *run, const struct update_stats *stats)
{
    struct recent *r = &run->given->recent;
    const int64_t step = run->step, total = run->total_steps;
    if (!stats->skipped) {
        r->loss += stats->range[STAT_LOSS].sum;
        r->steps++;
        r->targets += stats->range[STAT_ENTROPY].n;
    }
    if (step % run->config->saving.logging_steps != 0 && step != total) return;
    const double seconds = clock_ms_since(r->start_ns) / 1e3;
    const double left = seconds / (double)(step - r->first_step) * (double)(total - step);
    char text[DURATION_ROOM];
    if (r->steps > 0 && train_ranks_lead(&run->ranks))
        log_progress("step %" PRId64 "/%" PRId64 "  loss %.4f  %.0f tokens/s  %s left", step, total,
                     r->loss / (double)r->steps, (double)r->targets / seconds,
                     duration_text(left, text));
    r->loss = 0;
    r->steps = 0;
}

static enum status step(struct run *run)
{
    const int64_t start = clock_now_ns();
    struct recent *r = &run->given->recent;
    struct curriculum_batch batch;
    const struct buckets *none;
    struct update_stats stats;
    struct samples *samples = NULL;
    enum status st;
    if (!r->start_ns) *r = (struct recent){.start_ns = start, .first_step = run->step};
    curriculum_next(run->curriculum, 0, &batch);
    CHECK(dataset_samples(run, &run->given->data, batch.examples, batch.n, &samples));
    CHECK(run_update(run, samples, schedule_at(&run->resolved.schedule, run->step), &stats));
    CHECK(device_sync(bridge_device(run->mapped.bridge)));
    for (int i = 0; i < samples->n; i++) // prompts once a completion, as TRL counts
        run->num_tokens +=
            samples->groups[i / run->task->sides].n_prompt + samples->completions[i].n;
    CHECK(curriculum_record(run->curriculum, NULL, &none));
    run->step++;
    json_t *m = run->line = json_pack("{s:I}", "step", (json_int_t)run->step);
    if (!m) FAIL(ST_NO_MEMORY, "no memory for the step's metrics");
    stats_put(&stats, loss_stats(&run->resolved.loss), "", m);
    metrics_put(m, "grad_norm", stats.skipped ? NAN : stats.grad_norm);
    metrics_put(m, "learning_rate", stats.lr);
    metrics_put(m, "epoch", (double)curriculum_taken(run->curriculum) / run->data->n);
    metrics_put(m, "num_tokens", (double)run->num_tokens);
    metrics_put(m, "step_s", clock_ms_since(start) / 1e3);
    json_object_set_new(m, "skipped_updates", json_integer(run->skipped));
    ranks_put(&stats, run->ranks.all, m);
    log_step(run, &stats);
out:
    samples_free(samples);
    return st;
}

// ---- the end ------------------------------------------------------------------------------------

// A model that is half trained is not what --out asks for, and must not look like it: it becomes a
// checkpoint, where there is no run folder in one of its own.
static enum status end_unfinished(struct run *run)
{
    const char *out = run->config->out;
    bool replaced = false;
    enum status st;
    if (!run->folder[0]) {
        char none[PATH_ROOM];
        CHECK(run_open_folder(run, &replaced, none));
        CHECK(run_folder_describe(run, false));
    }
    CHECK(run_save(run, false));
    log_progress_end();
    log_warn("stopped at step %" PRId64 " of %" PRId64 "%s%s%s; go on from the checkpoint: "
             "cw-trainer %s --run-dir %s --resume",
             run->step, run->total_steps, out ? ": --out " : "", out ? out : "",
             out ? " is not written" : "", run->task->command, run->folder);
    st = status_fail(ST_CANCELLED, "told to end");
out:
    return st;
}

static enum status end(struct run *run)
{
    const struct train_config *c = run->config;
    enum status st;
    if (run->step < run->total_steps && !run_out_of_patience(run)) return end_unfinished(run);
    CHECK(run_save(run, false));
    run_log_end(run);
    if (c->load_best_model_at_end && c->out) CHECK(run_serve_best(run));
    if (!c->out || !train_ranks_lead(&run->ranks)) goto out;
    struct model_folder model = mapped_folder(&run->mapped);
    if (c->dtype) model.as = (enum dtype)(c->dtype - 1);
    CHECK(model_folder_write(c->out, bridge_device(run->mapped.bridge), &model));
    log_info("wrote %s%s", c->out, model.adapter ? ", an adapter of --model" : "");
out:
    return st;
}

const struct task_kind dataset_kind = {dataset_check, dataset_open, step, evaluate, end};
