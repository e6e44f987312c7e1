/* train.c: `cw-trainer train`: GRPO on the weights a server is serving. The main thread; the
 * bridge's heartbeat, the watch of stop.h and, with --async, the rollout queue's thread run beside
 * it.
 *
 * train_step() is the algorithm: take groups of completions of the policy as it is served, scored
 * and each compared with its group, and write the update in place. The queue between sampling and
 * learning is the one switch between the plain loop, whose next step is sampled by the weights just
 * written, and the overlapped one. What a run needs is opened in run_open.c; rollouts are pulled in
 * run_rollouts.c; what a step did is written down in run_metrics.c and run_checkpoint.c, and logged
 * in run_log.c. */
#include "trainer/commands.h"
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/program.h"
#include "trainer/learn/stats.h"
#include "trainer/rollout/source.h"
#include "trainer/run/notices.h"
#include "trainer/run/run.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <string.h>

struct train {
    struct train_config config;
    struct run run;
    struct rollout_servers servers;
    struct scoring scoring;
    struct job job;
    char **argv; // of this program
};

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

// Prompts once a sample, as TRL counts.
static int64_t count_tokens(const struct rollout *r)
{
    int64_t n = 0;
    for (int i = 0; i < r->n_groups * r->n_per_group; i++)
        n += run_length(&r->completions[i]) + rollout_prompt(r, i / r->n_per_group)->n;
    return n;
}

static enum status train_step(struct run *run)
{
    enum status st;
    struct rollout_step *s = NULL;
    struct update_stats update;
    const int64_t start = clock_now_ns(), epochs_before = epochs_done(run);
    const double lr = schedule_at(&run->resolved.schedule, run->step);

    CHECK(run_order_steps(run));
    CHECK(run_take_step(run, &s)); // sampled, and scored against its groups
    const double wait_s = clock_ms_since(start) / 1e3;
    run_lap_rollouts(run, s);
    CHECK(run_learn(run, s, lr, &update));
    const double train_s = clock_ms_since(start) / 1e3 - wait_s;
    run->step++;
    run->num_tokens += count_tokens(s->rollout);
    run->latency = s->latency;

    run->line = run_metrics(run, s, &update, wait_s, train_s);
    if (!run->line) FAIL(ST_NO_MEMORY, "no memory for the step's metrics");
    CHECK(run_record(run, s, run->line));
    run->step_version = mapped_version(&run->mapped);
    run->evaluation_due = evaluation_due(run, epochs_before);
    run_log_step(run, s, &update, wait_s, train_s);
    run_log_inference(run, s, &update);
    if (run->config->log_completions) CHECK(run_log_rollout(run, s));
    CHECK(run_finish_line(run));
out:
    rollout_step_free(s);
    return st;
}

// Of the weights as they are found; written down with the first checkpoint.
static enum status baseline(struct run *run)
{
    json_t *metrics = json_pack("{s:i}", "step", 0);
    run->best = BEST_NONE; // also where a run is taken up that ended before its first step
    enum status st =
        metrics ? run_evaluate(run, metrics) : status_fail(ST_NO_MEMORY, "no memory to evaluate");
    if (st == ST_OK) return run_write_line(run, metrics);
    json_decref(metrics);
    return st;
}

static enum status save_if_due(struct run *run)
{
    enum save_kind kind;
    enum status st =
        saver_due(&run->saver, run->step, run->total_steps, &run->best, &run->ranks, &kind);
    return st == ST_OK && kind != SAVE_NOT ? run_save(run, kind == SAVE_INTERIM) : st;
}

// What is to be done before the next step: the baseline of a run that begins, or the rest of a step
// whose evaluation the server's end cut off, and with it its checkpoint.
static enum status before_the_steps(struct run *run)
{
    enum status st = ST_OK;
    if (run->step == 0) {
        if (run->eval_data) CHECK(baseline(run));
        CHECK(run_save(run, false)); // something to restore before the first update
    } else if (run->line) {
        CHECK(run_finish_line(run));
        run->saver.step = -1;
        CHECK(run_save(run, !saver_is_kept(&run->saver, run->step, run->total_steps, &run->best)));
    }
out:
    return st;
}

// One rank that was told to stop stops all of them.
static enum status agree_to_stop(const struct run *run, bool *ret_stop)
{
    *ret_stop = stop_requested();
    return train_ranks_any(&run->ranks, ret_stop);
}

static enum status train_loop(struct run *run)
{
    enum status st;
    bool stop;
    spans_begin(&run->spans);
    CHECK(before_the_steps(run));
    while (run->step < run->total_steps && !run_out_of_patience(run)) {
        CHECK(agree_to_stop(run, &stop));
        if (stop) break;
        st = train_step(run);
        if (st == ST_CANCELLED) break; // by a signal, while it waited for environments
        if (st != ST_OK) goto out;
        CHECK(save_if_due(run));
    }
    CHECK(run_save(run, false));
    run_log_end(run);
    CHECK(agree_to_stop(run, &stop));
    if (run->config->load_best_model_at_end && !stop) CHECK(run_serve_best(run));
out:
    if (st != ST_OK) run_save_remains(run, st);
    return st;
}

static enum status check(void *context, struct option_set *set)
{
    struct train *t = context;
    struct train_config *c = &t->config;
    enum status st;
    CHECK(job_find(&c->job, &t->job));
    c->serves = t->job.serves || t->job.launches;
    c->several_ranks = t->job.ranks.size > 1;
    CHECK(run_folder_options(set, c));
    CHECK(train_config_resolve(c, set, &t->run.resolved));
    c->reward.environment = c->rollouts != NULL;
    c->reward.max_completion_length = c->sampling.max_tokens;
    if (c->rollouts && !options_given(set, "reward")) c->reward.names = "environment";
    CHECK(reward_new(&c->reward, &t->run.reward));
    log_open(t->job.log_name, c->log_level);
    CHECK(mapped_find(&t->run.mapped, &t->job, c->bridge));
    if (!t->job.launches) train_ranks_log(&t->job, c->log_level);
    if (!c->resume) notice_idle(set, c); // a run that goes on has been told
    if (c->resume && options_given(set, "start-from"))
        log_warn("--start-from has no effect with --resume where the run has a checkpoint");
out:
    return st;
}

static enum status train(void *context)
{
    struct train *t = context;
    struct run *run = &t->run;
    const struct train_config *c = run->config;
    struct curriculum_batch first;
    enum status st;
    if (t->job.launches) return job_launch(&t->job, t->argv);
    if (t->job.serves && !c->bridge && c->sync == SYNC_SHARED)
        CHECK(job_open_server(&t->job, c->model, c->server_timeout));
    CHECK(run_open(run));
    curriculum_next(run->curriculum, 0, &first);
    if (!run->source->own_prompts)
        log_info("%" PRId64 " steps of %" PRId64 " prompts x %d samples%s from %s (%d examples)",
                 run->total_steps, c->curriculum.prompts_per_step, first.rollouts,
                 run->config->curriculum.mode == CURRICULUM_OFF ? "" : " at first", c->data,
                 run->data->n);
    st = train_loop(run);
out:
    run_close(run, st);
    job_close_server(&t->job);
    return st;
}

int train_main(int argc, char **argv)
{
    struct train t = {.run = {.config = &t.config,
                              .servers = &t.servers,
                              .scoring = &t.scoring,
                              .job = &t.job,
                              .ranks = {.job = &t.job},
                              .folder_lock = -1},
                      .argv = argv};
    struct bytes usage = BYTES_INIT;
    bytes_puts(&usage,
               "--data FILE.jsonl --reward NAME [options]\n\n"
               "Trains the model a server is serving with GRPO, on the server's own copy of "
               "the weights; or, with --sync checkpoint, a model folder.\n\nRewards:");
    reward_describe_all(&usage);
    const struct program program = {
        .name = "cw-trainer",
        .command = "train",
        .usage = bytes_text(&usage),
        .options = train_options,
        .config = &t.config,
        .check = check,
        .run = train,
        .context = &t,
    };
    int exit_status = program_main(&program, argc, argv);
    bytes_release(&usage);
    return exit_status;
}
