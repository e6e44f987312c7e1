/* run_loop.c: the life of a run, whichever command it is of: options, opening, steps with
 * evaluations and checkpoints between them, and the end. The main thread; the bridge's heartbeat,
 * the watch of stop.h and, with --async, the rollout queue's thread run beside it. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/model/model_folder.h"
#include "trainer/launch/server_process.h"
#include "trainer/rollout/rollout_queue.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/evaluate.h"
#include "trainer/run/warnings.h"
#include "trainer/run/runlog.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct started {
    struct train_config config;
    struct run run;
    struct rollout_servers servers;
    struct scoring scoring;
    struct launch launch;
    char **argv; // of this program
    char model[PATH_ROOM];
};

// ---- how far it goes, and what it records -------------------------------------------------------

void run_plan_steps(struct run *run)
{
    const struct train_config *c = run->config;
    int64_t examples = (int64_t)ceil(c->num_train_epochs * run->data->n);
    const int64_t each = run->resolved.schedule_per_step;
    run->total_steps = c->max_steps >= 0
                           ? c->max_steps / each
                           : run->step + curriculum_steps_left(run->curriculum, examples);
    run->resolved.schedule.total_steps = run->total_steps * each;
    run->resolved.draft_schedule.total_steps = run->total_steps * each;
}

static enum status report(struct run *run, const struct buckets *buckets, json_t *metrics)
{
    enum status st;
    struct bytes text = BYTES_INIT, line = BYTES_INIT;
    char path[PATH_ROOM];
    struct cluster_report r = {
        .mode = curriculum_mode_names[run->config->curriculum.mode],
        .epoch = curriculum_taken(run->curriculum) / run->data->n,
        .buckets = buckets,
    };
    for (int k = 0; k < buckets->n; k++)
        r.rollouts[k] = curriculum_bucket_rollouts(run->curriculum, k);
    cluster_report_metrics(&r, metrics);
    cluster_report_text(&r, &text);
    cluster_report_line(&r, &line);
    CHECK(bytes_status(&text));
    CHECK(path_put(path, run->folder, "cluster-report-epoch-%" PRId64 ".txt", r.epoch));
    CHECK(file_write_atomic(path, 0644, text.data, text.len));
    log_progress_end();
    log_info("%s (%s)", bytes_text(&line), strrchr(path, '/') + 1);
out:
    bytes_release(&text);
    bytes_release(&line);
    return st;
}

enum status run_record(struct run *run, const struct rollout_step *s, json_t *metrics)
{
    const struct rollout *rollout = s->rollout;
    struct curriculum_batch batch;
    const struct buckets *buckets;
    curriculum_next(run->curriculum, 0, &batch);
    double *means = malloc((size_t)rollout->n_groups * sizeof *means);
    if (!means) return status_fail(ST_NO_MEMORY, "no memory for the rewards of a step");
    for (int g = 0; g < rollout->n_groups; g++)
        mean_std(s->scores.rewards + (size_t)g * rollout->n_per_group, rollout->n_per_group,
                 &means[g], NULL);
    for (int g = 0; g < rollout->n_groups; g++) // where nothing scored a group, it tells nothing
        if (isnan(means[g]))
            means[g] = isnan(s->scores.stats.reward_mean) ? 0 : s->scores.stats.reward_mean;
    enum status st = curriculum_record(run->curriculum, means, &buckets);
    free(means);
    if (st != ST_OK) return st;
    if (run->source->own_prompts) return ST_OK; // there are no epochs
    metrics_put(metrics, "epoch", (double)curriculum_taken(run->curriculum) / run->data->n);
    if (run->config->curriculum.mode == CURRICULUM_OFF) return ST_OK;
    metrics_put(metrics, "curriculum/bucket", batch.bucket + 1); // 0: not in one yet
    metrics_put(metrics, "curriculum/rollouts", batch.rollouts);
    metrics_put(metrics, "curriculum/samples", (double)curriculum_samples(run->curriculum));
    if (!buckets) return ST_OK;
    run_plan_steps(run); // buckets change how many steps an epoch has
    return train_ranks_lead(&run->ranks) ? report(run, buckets, metrics) : ST_OK;
}

// ---- evaluations, and the line of a step -------------------------------------------------------

enum status run_evaluate(struct run *run, json_t *metrics)
{
    struct sampling_options sampling = run_sampling(run, run->step);
    const char *metric = run->best_metric;
    struct eval_result r;
    struct bytes samples = BYTES_INIT;
    char best[BEST_WORDS], key[64], judged[96] = "";
    sampling.temperature = run->config->eval_temperature;
    sampling.tandem.on = false; // the policy alone is evaluated
    const struct evaluation evaluation = {
        .source = run->source,
        .comm = run->ranks.all,
        .data = run->eval_data,
        .limit = (int)run->config->eval_limit,
        .n_samples = (int)run->config->num_generations_eval,
        .step = run->step,
        .reward = run->reward,
        .sampling = &sampling,
    };
    phase_timers_lap(&run->phases, PHASE_LOG);
    rollout_queue_pause(run->queue);
    enum status st = run_settle(run, run->step, true);
    if (st == ST_OK) st = evaluate(&evaluation, &samples, &r);
    rollout_queue_resume(run->queue);
    if (st == ST_OK) st = train_ranks_agree(&run->ranks, &r, sizeof r);
    if (st == ST_OK) st = runlog_rollouts(run->log, run->step, true, &samples);
    bytes_release(&samples);
    if (st != ST_OK) return st;
    eval_result_put(&r, "eval/", metrics);
    snprintf(key, sizeof key, "eval/%s", metric);
    const json_t *score = json_object_get(metrics, key);
    best_words(&run->best,
               best_consider(&run->best, run->step,
                             json_is_number(score) ? json_number_value(score) : NAN),
               run->step, best);
    if (strcmp(metric, r.accuracy >= 0 ? "accuracy" : "reward") != 0)
        snprintf(judged, sizeof judged, ", %s %.4f", metric, json_number_value(score));
    phase_timers_lap(&run->phases, PHASE_EVAL);
    log_progress_end();
    if (r.accuracy >= 0)
        log_info("step %" PRId64 ": held-out accuracy %.1f%% +- %.1f%% on %d prompts%s%s",
                 run->step, 100 * r.accuracy, 100 * eval_error(&r.correct), r.n, judged, best);
    else
        log_info("step %" PRId64 ": held-out reward %.4f +- %.4f on %d prompts%s%s", run->step,
                 r.reward.mean, eval_error(&r.reward), r.n, judged, best);
    return ST_OK;
}

bool run_out_of_patience(const struct run *run)
{
    const int64_t patience = run->config->early_stop_patience;
    return patience > 0 && run->best.waited >= patience;
}

// Evaluates where that is due, and writes run->line into metrics.jsonl, with where the time since
// the one before went.
static enum status finish_line(struct run *run)
{
    struct phase_timers *phases = &run->phases;
    json_t *line = run->line;
    if (run->evaluation_due) {
        enum status st = run->task->kind->evaluate(run, line);
        if (st != ST_OK) return st;
    }
    run->evaluation_due = false;
    run->line = NULL;
    phase_timers_lap(phases, PHASE_LOG);
    for (int i = 0; i < N_PHASES && !run->given; i++) {
        metrics_putf(line, phases->seconds[i], "spans/%s_s", phase_names[i]);
        phases->seconds[i] = 0;
    }
    return runlog_write(run->log, line);
}

// ---- the steps ----------------------------------------------------------------------------------

static int64_t epochs_done(const struct run *run)
{
    return curriculum_taken(run->curriculum) / run->data->n;
}

// epochs_before: done before the step
static bool evaluation_due(const struct run *run, int64_t epochs_before)
{
    const struct train_config *c = run->config;
    if (!run->eval_data) return false;
    if (!c->eval_by_epoch) return step_due(run->step, c->eval_steps, run->total_steps);
    return run->step == run->total_steps ||
           epochs_done(run) / c->eval_epochs > epochs_before / c->eval_epochs;
}

// What is to be done before the next step: the baseline of a run that begins, or the rest of a step
// whose evaluation the server's end cut off, and with it its checkpoint.
static enum status before_the_steps(struct run *run)
{
    enum status st = ST_OK;
    if (run->step == 0) {
        run->best = BEST_NONE; // also where a run is taken up that ended before its first step
        run->evaluation_due = run->eval_data != NULL; // of the weights as they are found
        if (run->evaluation_due && !(run->line = json_pack("{s:i}", "step", 0)))
            FAIL(ST_NO_MEMORY, "no memory to evaluate");
        if (run->line) CHECK(finish_line(run));
        // something to restore before the first update; a folder is there to begin with
        if (run->eval_data || !run->given) CHECK(run_save(run, false));
    } else if (run->line) {
        CHECK(finish_line(run));
        run->saved.step = -1;
        CHECK(run_save(run, !run_keeps(run)));
    }
out:
    return st;
}

// One rank that was told to stop stops all of them.
enum status run_agree_to_stop(const struct run *run, bool *ret_stop)
{
    *ret_stop = stop_requested();
    return train_ranks_any(&run->ranks, ret_stop);
}

static enum status loop(struct run *run)
{
    enum status st;
    bool stop;
    run->phases = (struct phase_timers){.since_ns = clock_now_ns()};
    CHECK(before_the_steps(run));
    while (run->step < run->total_steps && !run_out_of_patience(run)) {
        CHECK(run_agree_to_stop(run, &stop));
        if (stop) break;
        const int64_t before = run->step, epochs_before = epochs_done(run);
        st = run->task->kind->step(run);
        if (run->step > before) { // also where what came after its updates failed
            run->step_version = mapped_version(&run->mapped);
            run->evaluation_due = evaluation_due(run, epochs_before);
        }
        if (st == ST_OK) st = finish_line(run);
        if (st == ST_OK) st = run_save_if_due(run);
        if (st == ST_CANCELLED) break; // by a signal, while it waited for environments
        if (st != ST_OK) goto out;
    }
    st = run->task->kind->end(run);
out:
    if (st != ST_OK) run_save_remains(run, st);
    return st;
}

// ---- the program --------------------------------------------------------------------------------

static enum status check(void *context, struct option_set *set)
{
    struct started *p = context;
    struct train_config *c = &p->config;
    enum status st;
    if (p->run.task->sides) c->launch.shards = 1;
    CHECK(launch_find(&c->launch, &p->launch));
    c->serves = p->launch.serves || p->launch.launches;
    c->several_ranks = p->launch.ranks.size > 1;
    CHECK(run_folder_options(set, c));
    log_open(p->launch.log_name, c->log_level);
    CHECK(p->run.task->kind->check(&p->run, set, c));
    CHECK(mapped_find(&p->run.mapped, &p->launch, c->bridge));
    // What only one of several ranks logs is logged by rank 0.
    if (!p->launch.launches && p->launch.ranks.rank > 0 && c->log_level == LOG_INFO)
        log_open(p->launch.log_name, LOG_WARN);
    if (!c->resume) warn_idle(set, c); // a run that goes on has been told
out:
    if (st != ST_OK) launch_give_up(&p->launch, st);
    return st;
}

static void begin(struct run *run)
{
    const struct train_config *c = run->config;
    run->saved = (struct saved){.step = -1, .interim_step = -1, .ns = clock_now_ns()};
    run->best = BEST_NONE;
    run->best_metric = c->best_metric ? c->best_metric : "reward";
    snprintf(run->mapped.role, sizeof run->mapped.role, "%s%s", c->lora.r ? "adapter:" : "policy",
             c->lora.r ? c->lora.name : "");
    run->entropy = (struct entropy_state){.coef = c->entropy.coef, .last = INFINITY};
}

static enum status run_all(void *context)
{
    struct started *p = context;
    const struct train_config *c = &p->config;
    enum status st;
    if (c->model) CHECK(model_folder_find(c->model, p->model));
    if (c->model) p->config.model = p->model;
    if (p->launch.launches) return launch_ranks(&p->launch, p->argv);
    if (p->launch.serves && !c->bridge && c->sync == SYNC_SHARED)
        CHECK(launch_open_server(&p->launch, c->model, c->server_timeout));
    begin(&p->run);
    CHECK(p->run.task->kind->open(&p->run));
    p->run.made_adapter = false; // from here on it stays
    run_log_course(&p->run);
    st = loop(&p->run);
out:
    if (st != ST_OK && !p->run.ranks.liveness) launch_give_up(&p->launch, st); // none has met
    run_close(&p->run, st);
    server_process_free(p->launch.server);
    return st;
}

int run_main(const struct task *task, const char *usage, int argc, char **argv)
{
    struct started p = {.run = {.task = task,
                                .config = &p.config,
                                .servers = &p.servers,
                                .scoring = &p.scoring,
                                .launch = &p.launch,
                                .ranks = {.launch = &p.launch},
                                .folder_lock = -1},
                        .argv = argv};
    const struct program program = {
        .name = "cw-trainer",
        .command = task->command,
        .usage = usage,
        .options = task->options,
        .config = &p.config,
        .check = check,
        .run = run_all,
        .context = &p,
    };
    return program_main(&program, argc, argv);
}
