/* offline_run.c: the steps of a run without a server: gradients of the next examples, one update,
 * a line of metrics.jsonl; evaluations and checkpoints between them. The main thread. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/program.h"
#include "trainer/learn/memory.h"
#include "trainer/run/offline.h"
#include "trainer/run/stats_metrics.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <math.h>

// ---- a pass -------------------------------------------------------------------------------------

static int64_t tokens_of(const struct offline *s, const struct offline_data *data, int item)
{
    int64_t n = 0;
    for (int k = 0; k < s->task->sides; k++) {
        const struct example *e = &data->sides[k]->examples[item];
        n += e->prompt_ids.n + e->completion_ids.n; // prompts once a completion, as TRL counts
    }
    return n;
}

// Of examples: what their loss is a mean over.
struct counts {
    int64_t targets, tokens;
};

static void count(const struct offline *s, const struct offline_data *data, int item,
                  struct counts *ret)
{
    ret->targets += s->task->count(data, item);
    ret->tokens += data->sides[0]->examples[item].completion_ids.n;
}

static struct offline_pass pass_over(const struct offline *s, const struct offline_data *data,
                                     const struct counts *counts)
{
    return (struct offline_pass){
        .config = s->config,
        .data = data,
        .items = s->items,
        .weight = 1 / (double)(counts->targets > 0 ? counts->targets : 1),
        .per_token = s->config->sft_weight / (double)(counts->tokens > 0 ? counts->tokens : 1),
    };
}

// The mean over all held-out examples.
static enum status evaluate(struct offline *s, json_t *metrics)
{
    const int each = (int)s->config->examples_per_step;
    struct counts counts = {0};
    for (int i = 0; i < s->eval.n; i++) count(s, &s->eval, i, &counts);
    struct offline_pass pass = pass_over(s, &s->eval, &counts);
    for (int at = 0; at < s->eval.n; at += each) {
        const int n = s->eval.n - at < each ? s->eval.n - at : each;
        for (int i = 0; i < n; i++) s->items[i] = at + i;
        offline_groups(s, &s->eval, n);
        enum status st = learner_evaluate(s->learner, s->groups, n, s->task->loss, &pass);
        if (st != ST_OK) return status_context(st, "evaluation");
    }
    stats_put(&pass.stats, s->task->stats, "eval/", metrics);
    log_progress_end();
    log_info("step %" PRId64 ": held-out loss %.4f on %d examples", s->step,
             pass.stats.of[STAT_LOSS].sum, s->eval.n);
    return ST_OK;
}

// ---- a step -------------------------------------------------------------------------------------

struct step { // what it gave
    struct update_stats stats;
    double norm, lr, seconds;
    bool skipped; // the gradient was not finite, nothing was changed
};

static enum status offline_step(struct offline *s, struct step *ret)
{
    enum status st;
    const int n = (int)s->config->examples_per_step;
    const int64_t start = clock_now_ns();
    struct counts counts = {0};
    *ret = (struct step){.lr = schedule_at(&s->schedule, s->step)};
    for (int i = 0; i < n; i++) {
        s->items[i] = data_order_at(&s->order, s->taken + i);
        count(s, &s->data, s->items[i], &counts);
        s->num_tokens += tokens_of(s, &s->data, s->items[i]);
    }
    struct offline_pass pass = pass_over(s, &s->data, &counts);
    offline_groups(s, &s->data, n);
    CHECK(learner_gradients(s->learner, s->groups, n, s->task->loss, &pass));
    st = learner_clip(s->learner, &ret->norm);
    ret->skipped = st == ST_INVALID;
    if (!ret->skipped) {
        CHECK(st);
        CHECK(learner_apply(s->learner, ret->lr));
    }
    CHECK(device_sync(s->dev));
    s->taken += n;
    s->step++;
    s->skipped += ret->skipped;
    ret->stats = pass.stats;
    ret->seconds = clock_ms_since(start) / 1e3;
out:
    return st;
}

static enum status put_line(struct offline *s, const struct step *step)
{
    const int64_t total = s->schedule.total_steps;
    enum status st = ST_OK;
    json_t *m = json_pack("{s:I}", "step", (json_int_t)s->step);
    if (!m) return status_fail(ST_NO_MEMORY, "no memory for the step's metrics");
    if (step) {
        stats_put(&step->stats, s->task->stats, "", m);
        metrics_put(m, "grad_norm", step->skipped ? NAN : step->norm);
        metrics_put(m, "learning_rate", step->lr);
        metrics_put(m, "epoch", (double)s->taken / s->data.n);
        metrics_put(m, "num_tokens", (double)s->num_tokens);
        metrics_put(m, "step_s", step->seconds);
        json_object_set_new(m, "skipped_updates", json_integer(s->skipped));
    }
    if (s->eval.n && (!step || step_due(s->step, s->config->eval_steps, total)))
        CHECK(evaluate(s, m));
    if (s->log) return runlog_write(s->log, m);
out:
    json_decref(m);
    return st;
}

// ---- all of them --------------------------------------------------------------------------------

struct recent { // since the last progress line, and in all
    double loss;
    int64_t steps, targets, start_ns, first_step;
};

static void say_progress(const struct offline *s, struct recent *r)
{
    const int64_t total = s->schedule.total_steps;
    const double seconds = clock_ms_since(r->start_ns) / 1e3;
    const double left = seconds / (double)(s->step - r->first_step) * (double)(total - s->step);
    char text[DURATION_ROOM];
    if (s->step % s->config->saving.logging_steps != 0 && s->step != total) return;
    if (r->steps > 0)
        log_progress("step %" PRId64 "/%" PRId64 "  loss %.4f  %.0f tokens/s  %s left", s->step,
                     total, r->loss / (double)r->steps, (double)r->targets / seconds,
                     duration_text(left, text));
    r->loss = 0;
    r->steps = 0;
}

static enum status save_if_due(struct offline *s)
{
    const struct saving_options *o = &s->config->saving;
    if (step_due(s->step, o->save_steps, s->schedule.total_steps)) return offline_save(s, false);
    const double minutes = clock_ms_since(s->saved_ns) / 60e3;
    return o->save_minutes > 0 && minutes >= o->save_minutes ? offline_save(s, true) : ST_OK;
}

// A model that is half trained is not what --out asks for, and must not look like it: it becomes a
// checkpoint, where there is no run folder in one of its own.
static enum status end_unfinished(struct offline *s)
{
    const char *command = s->task->command, *out = s->config->out;
    enum status st;
    if (!s->folder[0]) {
        CHECK(folder_open(NULL, s->folder, &s->folder_lock));
        CHECK(offline_describe(s, false));
    }
    CHECK(offline_save(s, false));
    st = status_fail(ST_CANCELLED,
                     "stopped at step %" PRId64 " of %" PRId64 "%s%s%s; go on from the checkpoint: "
                     "cw-trainer %s --run-dir %s --resume",
                     s->step, s->schedule.total_steps, out ? ": --out " : "", out ? out : "",
                     out ? " is not written" : "", command, s->folder);
out:
    return st;
}

static enum status offline_train(struct offline *s)
{
    const int64_t total = s->schedule.total_steps, first = s->step;
    struct recent recent = {.start_ns = clock_now_ns(), .first_step = first};
    enum status st = ST_OK;
    int skipped = 0;
    if (s->step == 0 && s->eval.n) CHECK(put_line(s, NULL));
    while (s->step < total && !stop_requested()) {
        struct step step;
        CHECK(offline_step(s, &step));
        if (s->step == first + 1) memory_say_taken(s->learner);
        if (step.skipped) log_warn("step %" PRId64 ": %s", s->step, status_message());
        CHECK(learning_skipped(&skipped, step.skipped, "the", "lower --learning-rate"));
        CHECK(put_line(s, &step));
        if (!step.skipped) {
            recent.loss += step.stats.of[STAT_LOSS].sum;
            recent.steps++;
            recent.targets += step.stats.of[STAT_ENTROPY].n;
        }
        say_progress(s, &recent);
        CHECK(save_if_due(s));
    }
    log_progress_end();
    if (s->step < total) {
        st = end_unfinished(s);
        goto out;
    }
    CHECK(offline_save(s, false));
    if (s->folder[0]) log_info("run folder %s", s->folder);
out:
    return st;
}

// ---- the program --------------------------------------------------------------------------------

struct started {
    struct offline_config config;
    struct offline run;
};

static enum status check(void *context, struct option_set *set)
{
    struct started *p = context;
    return offline_check(p->run.task, set, &p->config);
}

static enum status run(void *context)
{
    struct offline *s = &((struct started *)context)->run;
    struct stop *stop = NULL;
    enum status st;
    stop_catch_signals();
    CHECK(stop_watch_new(&(struct stop_options){.first = STOP_AT_STEP}, &stop));
    CHECK(offline_open(s));
    CHECK(offline_train(s));
    st = offline_write_out(s);
out:
    stop_watch_end(stop);
    offline_release(s);
    if (st == ST_CANCELLED) log_warn("%s", status_message());
    return st;
}

int offline_main(const struct offline_task *task, const char *usage, int argc, char **argv)
{
    struct started p = {.run = {.task = task, .config = &p.config}};
    const struct program program = {
        .name = "cw-trainer",
        .command = task->command,
        .usage = usage,
        .options = task->options,
        .config = &p.config,
        .check = check,
        .run = run,
        .context = &p,
    };
    return program_main(&program, argc, argv);
}
