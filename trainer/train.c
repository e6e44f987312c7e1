/* train.c: `cw-trainer train`: GRPO on the weights a server is serving. The main thread.
 *
 * train_step() is the algorithm: take groups of completions of the policy as it is served, scored
 * and each compared with its group, and write the update in place. The queue between sampling and
 * learning is the one switch between the plain loop, whose next step is sampled by the weights just
 * written, and the overlapped one. The loop around it is run_loop.c, for every command that trains.
 * What a run needs is opened in run_open.c; rollouts are pulled in run_rollouts.c; what a step did
 * is written down in run_metrics.c and run_checkpoint.c, and logged in run_log.c. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/learn/stats.h"
#include "trainer/rollout/source.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <string.h>

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
    const int64_t start = clock_now_ns();
    const double lr = schedule_at(&run->resolved.schedule, run->step);

    CHECK(run_order_steps(run));
    CHECK(run_take_step(run, &s)); // sampled, and scored against its groups
    const double wait_s = clock_ms_since(start) / 1e3;
    CHECK(run_learn(run, s, lr, &update));
    const double train_s = clock_ms_since(start) / 1e3 - wait_s;
    run->step++;
    run->num_tokens += count_tokens(s->rollout);
    run->latency = s->latency;

    run->line = run_metrics(run, s, &update, wait_s, train_s);
    if (!run->line) FAIL(ST_NO_MEMORY, "no memory for the step's metrics");
    CHECK(run_record(run, s, run->line));
    run_log_step(run, s, &update, wait_s, train_s);
    if (run->config->log_completions) st = run_log_rollout(run, s);
out:
    rollout_step_free(s);
    return st;
}

static enum status end(struct run *run)
{
    enum status st;
    bool stop;
    CHECK(run_save(run, false));
    run_log_end(run);
    CHECK(run_agree_to_stop(run, &stop));
    if (run->config->load_best_model_at_end && !stop) CHECK(run_serve_best(run));
out:
    return st;
}

// Names of what an evaluation gives, behind "eval/", that are better where they are higher.
static enum status check_best_metric(const struct train_config *c, const struct reward_info *reward)
{
    const int64_t n = c->num_generations_eval;
    struct bytes names = BYTES_INIT, name = BYTES_INIT;
    bytes_puts(&names, " reward ");
    if (reward->accuracy_term >= 0) bytes_puts(&names, "accuracy ");
    for (int64_t k = 1; reward->accuracy_term >= 0 && n > 1 && k <= n; k *= 2)
        bytes_printf(&names, "pass@%" PRId64 " ", k);
    if (reward->accuracy_term >= 0 && n > 1) bytes_printf(&names, "maj@%" PRId64 " ", n);
    bytes_printf(&name, " %s ", c->best_metric ? c->best_metric : "reward");
    enum status st = ST_OK;
    if (!strstr(bytes_text(&names), bytes_text(&name)))
        st = status_fail(ST_INVALID,
                         "--metric-for-best-model %s: evaluations with --reward %s give%s"
                         "(--num-generations-eval N: pass@K and maj@N too)",
                         c->best_metric, c->reward.names, bytes_text(&names));
    bytes_release(&names);
    bytes_release(&name);
    return st;
}

static enum status check(struct run *run, struct option_set *set, struct train_config *c)
{
    enum status st;
    c->reward.none = c->teacher && !c->rollouts && !options_given(set, "reward");
    if (c->reward.none && c->eval_data)
        FAIL(
            ST_INVALID,
            "--eval-data %s with --teacher and no --reward: nothing says how good held-out samples "
            "are; give --reward NAME, with --reward-weights 0 where the teacher alone is to teach",
            c->eval_data);
    if (c->reward.none) c->reward.names = "";
    if (c->rollouts && !options_given(set, "reward")) c->reward.names = "environment";
    CHECK(train_config_resolve(c, set, &run->resolved));
    c->reward.environment = c->rollouts != NULL;
    c->reward.max_completion_length = c->sampling.max_tokens;
    CHECK(reward_new(&c->reward, &run->reward));
    CHECK(check_best_metric(c, reward_info(run->reward)));
    if (c->resume && options_given(set, "start-from"))
        log_warn("--start-from has no effect with --resume where the run has a checkpoint");
out:
    return st;
}

int train_main(int argc, char **argv)
{
    static const struct task_kind sampled = {check, run_open, train_step, run_evaluate, end};
    static const struct task task = {
        .command = "train", .options = train_options, .kind = &sampled};
    struct bytes usage = BYTES_INIT;
    bytes_puts(&usage, "--data FILE.jsonl --reward NAME [options]\n\n"
                       "Trains the model a server is serving with GRPO, on the server's own copy "
                       "of the weights; or, with --sync checkpoint, a model folder.\n\nRewards:");
    reward_describe_all(&usage);
    int exit_status = run_main(&task, bytes_text(&usage), argc, argv);
    bytes_release(&usage);
    return exit_status;
}
