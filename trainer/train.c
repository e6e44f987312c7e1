/* train.c: `cw-trainer train`: GRPO on the weights a daemon is serving. The main thread; the
 * bridge's heartbeat and the watch of stop.h run beside it.
 *
 * train_step() is the algorithm: pull groups of samples from the policy as it is served, score
 * them, compare each with its group, and write the update in place. What it needs is opened in
 * run_open.c; what it did is written down in run_metrics.c and run_checkpoint.c, and said in
 * run_say.c.
 */
#include "trainer/train.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/learn/memory.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_SKIPPED 3 // steps in a row whose gradient was not finite

// Also counts what was drafted for it.
static enum status pull_rollout(struct run *run, struct rollout **ret)
{
    struct sampling_options sampling = run_sampling(run);
    struct curriculum_batch batch;
    curriculum_next(run->curriculum, &batch);
    const struct example **examples = malloc((size_t)batch.n * sizeof *examples);
    if (!examples) return status_fail(ST_NO_MEMORY, "no memory for %d prompts", batch.n);
    for (int i = 0; i < batch.n; i++) examples[i] = &run->data->examples[batch.examples[i]];
    struct rollout *rollout = NULL;
    enum status st;
    CHECK(spec_watch_begin(run->watch));
    CHECK(rollout_pull(&run->source, examples, batch.n, batch.rollouts, &sampling, &rollout));
    CHECK(spec_watch_end(run->watch, &run->spec));
    *ret = rollout;
    rollout = NULL;
out:
    rollout_free(rollout);
    free(examples);
    return st;
}

// A draft whose gradient is not finite is left as it is; the policy goes on.
static enum status note_draft(struct run *run, const struct update_stats *update)
{
    run->draft_skips_in_a_row = update->draft_skipped ? run->draft_skips_in_a_row + 1 : 0;
    if (update->draft_skipped)
        log_warn("step %" PRId64
                 ": the draft model's gradient is not finite; its update is skipped",
                 run->step + 1);
    if (run->draft_skips_in_a_row == MAX_SKIPPED)
        return status_fail(ST_INVALID,
                           "the draft model's gradient was not finite in %d steps in a row; lower "
                           "--draft-learning-rate or go back to a checkpoint",
                           MAX_SKIPPED);
    return ST_OK;
}

static enum status learn(struct run *run, const struct rollout *rollout,
                         const struct scores *scores, double lr, struct update_stats *ret)
{
    const struct train_config *c = run->config;
    struct update_config config = {
        .loss = run->resolved.loss,
        .num_iterations = (int)c->num_iterations,
        .mask_truncated = c->mask_truncated_completions,
        .exact = c->exact,
        .quiet_timeout_ms = (int64_t)(c->quiet_timeout * 1e3),
        .draft_lr = schedule_at(&run->resolved.draft_schedule, run->step),
    };
    enum status st = update_policy(run->learner, run->bridge, &config, rollout, scores->advantages,
                                   lr, stop_publish_lock(run->stop), ret);
    if (st != ST_OK) return st;
    if (!run->said_memory) memory_say_taken(run->learner);
    run->said_memory = true;
    run->skipped += ret->skipped;
    run->skipped_in_a_row = ret->applied ? 0 : run->skipped_in_a_row + 1;
    if (ret->skipped)
        log_warn("step %" PRId64 ": the gradient is not finite; %d of %d updates skipped",
                 run->step + 1, ret->skipped, config.num_iterations);
    if (run->skipped_in_a_row == MAX_SKIPPED)
        return status_fail(
            ST_INVALID,
            "the gradient was not finite in %d steps in a row; lower --learning-rate "
            "or go back to a checkpoint",
            MAX_SKIPPED);
    return note_draft(run, ret);
}

// ---- the loop -----------------------------------------------------------------------------------

static bool due(int64_t step, int64_t every, int64_t total)
{
    return step == total || (every > 0 && step % every == 0);
}

static int64_t epochs_done(const struct run *run)
{
    return curriculum_taken(run->curriculum) / run->data->n;
}

// epochs_before: done before the step
static bool evaluation_due(const struct run *run, int64_t epochs_before)
{
    const struct train_config *c = run->config;
    if (!run->eval_data) return false;
    if (!c->eval_by_epoch) return due(run->step, c->eval_steps, run->total_steps);
    return run->step == run->total_steps ||
           epochs_done(run) / c->eval_epochs > epochs_before / c->eval_epochs;
}

static bool out_of_patience(const struct run *run)
{
    const int64_t patience = run->config->early_stop_patience;
    return patience > 0 && run->best.waited >= patience;
}

static enum status train_step(struct run *run)
{
    enum status st;
    struct rollout *rollout = NULL;
    struct scores scores = {0};
    struct update_stats update;
    const struct latency_model latency = run->latency; // before the fit to this step's samples
    const int64_t step = run->step;
    int64_t start = clock_now_ns(), epochs_before = epochs_done(run);
    double lr = schedule_at(&run->resolved.schedule, run->step);

    CHECK(pull_rollout(run, &rollout));
    CHECK(scoring_rollout(&run->scoring, rollout, &scores));
    int64_t learn_start = clock_now_ns();
    CHECK(learn(run, rollout, &scores, lr, &update));
    double train_s = clock_ms_since(learn_start) / 1e3, step_s = clock_ms_since(start) / 1e3;
    run->step++;

    run->line = run_metrics(run, rollout, &scores, &update, lr, train_s, step_s);
    if (!run->line) {
        st = status_fail(ST_NO_MEMORY, "no memory for the step's metrics");
        goto out;
    }
    CHECK(run_record(run, rollout, &scores, run->line));
    run->step_version = control_version(bridge_control(run->bridge));
    run->evaluation_due = evaluation_due(run, epochs_before);
    run_say_step(run, rollout, &scores, &update, learn_start - start, step_s);
    run_say_inference(run, rollout, &scores, &update);
    if (run->config->log_completions) CHECK(run_log_rollout(run, rollout, &scores));
    CHECK(run_finish_line(run));
out:
    if (run->step == step) run->latency = latency; // the step will be run again
    scores_release(&scores);
    rollout_free(rollout);
    return st;
}

// Of the weights as they are found; written down with the first checkpoint.
static enum status baseline(struct run *run)
{
    json_t *metrics = json_pack("{s:i}", "step", 0);
    run->best = BEST_NONE; // also where a run is taken up that ended before its first step
    enum status st =
        metrics ? run_evaluate(run, metrics) : status_fail(ST_NO_MEMORY, "no memory to evaluate");
    if (st == ST_OK) return runlog_write(run->log, metrics);
    json_decref(metrics);
    return st;
}

static void say_end(const struct run *run)
{
    char best[96] = "";
    if (run->best.step >= 0)
        snprintf(best, sizeof best, "; the best was step %" PRId64 " (%s %.4f): checkpoints/best",
                 run->best.step,
                 !run->eval_data                          ? "score"
                 : reward_accuracy_term(run->reward) >= 0 ? "accuracy"
                                                          : "reward",
                 run->best.score);
    struct bytes idle = BYTES_INIT;
    symptoms_sum_up(&run->symptoms, &idle);
    log_progress_end();
    if (idle.len) log_warn("%s", bytes_text(&idle));
    bytes_release(&idle);
    if (run->step < run->total_steps && out_of_patience(run))
        log_info("stopped early at step %" PRId64 " of %" PRId64 ": %" PRId64
                 " evaluations in a row were no better (--early-stop-patience)%s; run folder %s",
                 run->step, run->total_steps, run->best.waited, best, run->folder);
    else
        log_info("%s at step %" PRId64 " of %" PRId64 "%s; run folder %s",
                 run->step < run->total_steps ? "stopped" : "done", run->step, run->total_steps,
                 best, run->folder);
}

// Whether the step just done has a checkpoint of its own, which stays.
static bool checkpoint_due(const struct run *run)
{
    return due(run->step, run->config->save_steps, run->total_steps) || run->best.step == run->step;
}

static enum status save_if_due(struct run *run)
{
    const double minutes = clock_ms_since(run->saved_ns) / 60e3, every = run->config->save_minutes;
    if (checkpoint_due(run)) return run_save(run, false);
    return every > 0 && minutes >= every ? run_save(run, true) : ST_OK;
}

// What is to be done before the next step: the baseline of a run that begins, or the rest of a step
// whose evaluation the daemon's end cut off, and with it its checkpoint.
static enum status before_the_steps(struct run *run)
{
    enum status st = ST_OK;
    if (run->step == 0) {
        if (run->eval_data) CHECK(baseline(run));
        CHECK(run_save(run, false)); // something to restore before the first update
    } else if (run->line) {
        CHECK(run_finish_line(run));
        run->saved_step = -1;
        CHECK(run_save(run, !checkpoint_due(run)));
    }
out:
    return st;
}

static enum status train_loop(struct run *run)
{
    enum status st;
    CHECK(before_the_steps(run));
    while (run->step < run->total_steps && !stop_requested() && !out_of_patience(run)) {
        CHECK(train_step(run));
        CHECK(save_if_due(run));
    }
    CHECK(run_save(run, false));
    say_end(run);
    if (run->config->load_best_model_at_end && !stop_requested()) CHECK(run_serve_best(run));
out:
    if (st != ST_OK) run_save_remains(run, st);
    return st;
}

static enum status train(struct run *run)
{
    const struct train_config *c = run->config;
    enum status st = run_open(run);
    if (st != ST_OK) return st;
    struct curriculum_batch first;
    curriculum_next(run->curriculum, &first);
    log_info("%" PRId64 " steps of %" PRId64 " prompts x %d samples%s from %s (%d examples)",
             run->total_steps, c->prompts_per_step, first.rollouts,
             run->config->curriculum == CURRICULUM_OFF ? "" : " at first", c->data, run->data->n);
    return train_loop(run);
}

int train_main(int argc, char **argv)
{
    struct train_config config = {0};
    struct run run = {.config = &config};
    struct option_set *set = NULL;
    struct bytes usage = BYTES_INIT;
    log_open("cw-trainer", LOG_INFO);
    bytes_puts(&usage,
               "--data FILE.jsonl --reward NAME [options]\n\n"
               "Trains the model a daemon is serving with GRPO, on the daemon's own copy of "
               "the weights.\n\nRewards:");
    reward_describe_all(&usage);
    enum option_result parsed = options_parse(train_options, "cw-trainer train", bytes_text(&usage),
                                              argc, argv, 0, &config, NULL, &set);
    bytes_release(&usage);
    if (parsed == OPTIONS_DONE) return 0;
    int exit_status = 0;
    if (parsed == OPTIONS_BAD || run_folder_options(set, &config) != ST_OK ||
        train_config_resolve(&config, &run.resolved) != ST_OK ||
        reward_new(&config.reward, &run.reward) != ST_OK) {
        log_error("%s", status_message());
        exit_status = 2;
    } else {
        log_open("cw-trainer", config.log_level);
        const char *idle = train_config_idle_cost(&config);
        if (idle) log_warn("--%s has no effect without --cost", idle);
        if (config.resume && options_given(set, "start-from"))
            log_warn("--start-from has no effect with --resume where the run has a checkpoint");
        stop_catch_signals();
        if (train(&run) != ST_OK) {
            log_error("%s", status_message());
            exit_status = 1;
        }
        run_close(&run);
    }
    options_free(set);
    return exit_status;
}
