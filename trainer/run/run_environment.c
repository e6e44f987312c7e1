/* run_environment.c: a run whose samples are made by environments (--rollouts). The main thread
 * opens and closes; steps are pulled by whichever thread samples them.
 *
 * A trajectory is a sample like any other: the curriculum, the queue, scoring and the learner do
 * not know that a process made it. */
#include "common/base/log.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <string.h>

static void say_other_reward(const struct run *run)
{
    for (int k = 0; k < reward_terms(run->reward); k++)
        if (strcmp(reward_term_name(run->reward, k), "environment") == 0) return;
    log_warn("--reward %s: what the environment gives does not count, whose term is "
             "\"environment\"",
             run->config->reward.names);
}

enum status run_open_environment(struct run *run)
{
    const struct train_config *c = run->config;
    enum status st;
    if (!c->rollouts) return ST_OK;
    run->server_context = run->model->max_positions; // of a server that is started later
    if (run_serves(run)) CHECK(rollout_context(&run->source, &run->server_context));
    CHECK(environment_new(c->rollouts + strlen(ROLLOUTS_COMMAND), (int)c->rollout_processes,
                          c->rollout_process_timeout, &run->environment));
    CHECK(environment_check(run->environment));
    say_other_reward(run);
out:
    return status_context(st, "--rollouts");
}

enum status run_use_environment(struct run *run, int64_t step, bool evaluation,
                                struct environment_rollouts *of, struct rollout_source *source)
{
    *of = (struct environment_rollouts){
        .environment = run->environment,
        .data = evaluation ? run->eval_data->path : run->data->path,
        .step = step,
        .evaluation = evaluation,
        .max_tokens = (int)run_longest(run),
    };
    source->environments = run->environment ? of : NULL;
    if (!run->environment || evaluation) return ST_OK;
    return journal_open(run->folder, step, run->job->ranks.rank, &of->journal);
}

void run_end_environment(struct environment_rollouts *of)
{
    if (of->stats.replayed > 0) {
        log_progress_end();
        log_info("step %" PRId64 ": %ld of %ld calls of tools have their results out of the "
                 "journal, and were not made again",
                 of->step, of->stats.replayed, of->stats.calls);
    }
    journal_close(of->journal);
    of->journal = NULL;
}

enum status run_sum_environment(const struct run *run, struct rollout_step *s)
{
    struct environment_stats *e = &s->environment;
    long *const fields[] = {&e->samples,  &e->turns,  &e->calls,
                            &e->replayed, &e->unlike, &e->restarts};
    enum { N = sizeof fields / sizeof *fields };
    double sums[N];
    if (!run->environment) return ST_OK;
    for (int i = 0; i < N; i++) sums[i] = (double)*fields[i];
    enum status st = comm_sum_host(run->comm, sums, N);
    for (int i = 0; st == ST_OK && i < N; i++) *fields[i] = (long)sums[i];
    return st;
}

enum status run_forget_journals(const struct run *run)
{
    return run->environment ? journal_forget(run->folder, run->step) : ST_OK;
}

void run_put_environment(const struct run *run, const struct rollout_step *s, json_t *metrics)
{
    const struct environment_stats *e = &s->environment;
    const double samples = (double)e->samples;
    if (!run->environment) return;
    metrics_put(metrics, "environment/turns", (double)e->turns / samples);
    metrics_put(metrics, "environment/calls", (double)e->calls / samples);
    metrics_put(metrics, "environment/replayed", (double)e->replayed);
    metrics_put(metrics, "environment/unlike_prompts", (double)e->unlike);
    metrics_put(metrics, "environment/restarts", (double)e->restarts);
}
