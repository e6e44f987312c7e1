/* run_loop.c: the life of a run, whichever command it is of: options, opening, steps with
 * evaluations and checkpoints between them, and the end. The main thread; the bridge's heartbeat,
 * the watch of stop.h and, with --async, the rollout queue's thread run beside it. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/program.h"
#include "trainer/rollout/source.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/notices.h"
#include "trainer/run/stop.h"

#include <stdio.h>

struct started {
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

// Of the weights as they are found; written down with the first checkpoint.
static enum status baseline(struct run *run)
{
    json_t *metrics = json_pack("{s:i}", "step", 0);
    run->best = BEST_NONE; // also where a run is taken up that ended before its first step
    enum status st = metrics ? run->task->kind->evaluate(run, metrics)
                             : status_fail(ST_NO_MEMORY, "no memory to evaluate");
    if (st == ST_OK) return run_write_line(run, metrics);
    json_decref(metrics);
    return st;
}

// What is to be done before the next step: the baseline of a run that begins, or the rest of a step
// whose evaluation the server's end cut off, and with it its checkpoint.
static enum status before_the_steps(struct run *run)
{
    enum status st = ST_OK;
    if (run->step == 0) {
        if (run->eval_data) CHECK(baseline(run));
        // something to restore before the first update; a folder is there to begin with
        if (run->eval_data || !run->given) CHECK(run_save(run, false));
    } else if (run->line) {
        CHECK(run_finish_line(run));
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

static enum status next_step(struct run *run)
{
    const int64_t before = run->step, epochs_before = epochs_done(run);
    enum status st = run->task->kind->step(run);
    if (run->step > before) { // also where what came after its updates failed
        run->step_version = mapped_version(&run->mapped);
        run->evaluation_due = evaluation_due(run, epochs_before);
    }
    if (st == ST_OK) st = run_finish_line(run);
    if (st == ST_OK) st = run_save_if_due(run);
    return st;
}

static enum status loop(struct run *run)
{
    enum status st;
    bool stop;
    spans_begin(&run->spans);
    CHECK(before_the_steps(run));
    while (run->step < run->total_steps && !run_out_of_patience(run)) {
        CHECK(run_agree_to_stop(run, &stop));
        if (stop) break;
        st = next_step(run);
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
    if (p->run.task->sides) c->job.shards = 1;
    CHECK(job_find(&c->job, &p->job));
    c->serves = p->job.serves || p->job.launches;
    c->several_ranks = p->job.ranks.size > 1;
    CHECK(run_folder_options(set, c));
    log_open(p->job.log_name, c->log_level);
    CHECK(p->run.task->kind->check(&p->run, set, c));
    CHECK(mapped_find(&p->run.mapped, &p->job, c->bridge));
    if (!p->job.launches) train_ranks_log(&p->job, c->log_level);
    if (!c->resume) notice_idle(set, c); // a run that goes on has been told
out:
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
    run->entropy = entropy_begin(&c->entropy);
}

static enum status run_all(void *context)
{
    struct started *p = context;
    const struct train_config *c = &p->config;
    enum status st;
    if (p->job.launches) return job_launch(&p->job, p->argv);
    if (p->job.serves && !c->bridge && c->sync == SYNC_SHARED)
        CHECK(job_open_server(&p->job, c->model, c->server_timeout));
    begin(&p->run);
    CHECK(p->run.task->kind->open(&p->run));
    run_log_course(&p->run);
    st = loop(&p->run);
out:
    run_close(&p->run, st);
    job_close_server(&p->job);
    return st;
}

int run_main(const struct task *task, const char *usage, int argc, char **argv)
{
    struct started p = {.run = {.task = task,
                                .config = &p.config,
                                .servers = &p.servers,
                                .scoring = &p.scoring,
                                .job = &p.job,
                                .ranks = {.job = &p.job},
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
