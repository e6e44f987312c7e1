/* dataset_run.c: the steps of a run without a server: gradients of the next examples, one update,
 * a line of metrics.jsonl; evaluations and checkpoints between them. The main thread. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/program.h"
#include "trainer/data/data.h"
#include "trainer/learn/step.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/metrics.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <math.h>

// ---- a pass -------------------------------------------------------------------------------------

static int64_t tokens_of(const struct dataset_run *s, const struct dataset_examples *data, int item)
{
    int64_t n = 0;
    for (int k = 0; k < s->task->sides; k++) {
        const struct example *e = &data->sides[k]->examples[item];
        n += e->prompt_ids.n + e->completion_ids.n; // prompts once a completion, as TRL counts
    }
    return n;
}

// The mean over all held-out examples, of which each rank computes its share.
static enum status evaluate(struct dataset_run *s, json_t *metrics)
{
    const int each = (int)s->config->examples_per_step;
    struct step step = {.loss = s->loss};
    struct update_stats stats = {0};
    struct samples *samples = NULL;
    char best[BEST_WORDS];
    enum status st;
    CHECK(dataset_run_samples(s, &s->eval, NULL, s->eval.n, &samples));
    step.scale = loss_scale_of(&s->loss, samples, 0, s->eval.n);
    for (int at = 0; at < s->eval.n; at += each)
        CHECK(learner_pass(s->learner, PASS_LOSS, samples, at,
                           s->eval.n - at < each ? s->eval.n - at : each, &step, &stats));
    CHECK(stats_merge(s->ranks.copies, &stats));
    stats_put(&stats, loss_stats(&s->loss), "eval/", metrics);
    const double loss = stats.range[STAT_LOSS].sum;
    best_words(&s->best, best_consider(&s->best, s->step, -loss), s->step, best);
    log_progress_end();
    log_info("step %" PRId64 ": held-out loss %.4f on %d examples%s", s->step, loss, s->eval.n,
             best);
out:
    samples_free(samples);
    return status_context(st, "evaluation");
}

// ---- a step -------------------------------------------------------------------------------------

static enum status dataset_run_step(struct dataset_run *s, struct update_stats *ret,
                                    double *ret_seconds)
{
    enum status st;
    const int n = (int)s->config->examples_per_step;
    const int64_t start = clock_now_ns();
    const struct update_config config = {
        .step = {.loss = s->loss, .lr = schedule_at(&s->schedule, s->step)}, .num_iterations = 1};
    struct samples *samples = NULL;
    for (int i = 0; i < n; i++) {
        s->items[i] = data_order_at(&s->order, s->taken + i);
        s->num_tokens += tokens_of(s, &s->data, s->items[i]);
    }
    CHECK(dataset_run_samples(s, &s->data, s->items, n, &samples));
    CHECK(update_policy(s->learner, &config, samples, ret));
    CHECK(device_sync(s->dev));
    s->taken += n;
    s->step++;
    s->skipped += ret->skipped;
    *ret_seconds = clock_ms_since(start) / 1e3;
out:
    samples_free(samples);
    return st;
}

// stats: of the step just done; NULL: there is none.
static enum status put_line(struct dataset_run *s, const struct update_stats *stats, double seconds)
{
    const int64_t total = s->schedule.total_steps;
    enum status st = ST_OK;
    json_t *m = json_pack("{s:I}", "step", (json_int_t)s->step);
    if (!m) return status_fail(ST_NO_MEMORY, "no memory for the step's metrics");
    if (stats) {
        stats_put(stats, loss_stats(&s->loss), "", m);
        metrics_put(m, "grad_norm", stats->skipped ? NAN : stats->grad_norm);
        metrics_put(m, "learning_rate", stats->lr);
        metrics_put(m, "epoch", (double)s->taken / s->data.n);
        metrics_put(m, "num_tokens", (double)s->num_tokens);
        metrics_put(m, "step_s", seconds);
        json_object_set_new(m, "skipped_updates", json_integer(s->skipped));
        ranks_put(stats, s->ranks.all, m);
    }
    if (s->eval.n && (!stats || step_due(s->step, s->config->eval_steps, total)))
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

static void say_progress(const struct dataset_run *s, struct recent *r)
{
    const int64_t total = s->schedule.total_steps;
    const double seconds = clock_ms_since(r->start_ns) / 1e3;
    const double left = seconds / (double)(s->step - r->first_step) * (double)(total - s->step);
    char text[DURATION_ROOM];
    if (s->step % s->config->saving.logging_steps != 0 && s->step != total) return;
    if (r->steps > 0 && train_ranks_lead(&s->ranks))
        log_progress("step %" PRId64 "/%" PRId64 "  loss %.4f  %.0f tokens/s  %s left", s->step,
                     total, r->loss / (double)r->steps, (double)r->targets / seconds,
                     duration_text(left, text));
    r->loss = 0;
    r->steps = 0;
}

static enum status save_if_due(struct dataset_run *s)
{
    enum save_kind kind;
    enum status st =
        saver_due(&s->saver, s->step, s->schedule.total_steps, &s->best, &s->ranks, &kind);
    return st == ST_OK && kind != SAVE_NOT ? dataset_run_save(s, kind == SAVE_INTERIM) : st;
}

// A model that is half trained is not what --out asks for, and must not look like it: it becomes a
// checkpoint, where there is no run folder in one of its own.
static enum status end_unfinished(struct dataset_run *s)
{
    const char *command = s->task->command, *out = s->config->out;
    enum status st;
    if (!s->folder[0]) {
        char *none = NULL;
        if (train_ranks_lead(&s->ranks)) CHECK(folder_open(NULL, s->folder, &s->folder_lock));
        CHECK(folder_agree(&s->ranks, s->folder, &none));
        CHECK(dataset_run_describe(s, false));
    }
    CHECK(dataset_run_save(s, false));
    st = status_fail(ST_CANCELLED,
                     "stopped at step %" PRId64 " of %" PRId64 "%s%s%s; go on from the checkpoint: "
                     "cw-trainer %s --run-dir %s --resume",
                     s->step, s->schedule.total_steps, out ? ": --out " : "", out ? out : "",
                     out ? " is not written" : "", command, s->folder);
out:
    return st;
}

// One rank that was told to stop stops all of them.
static enum status goes_on(const struct dataset_run *s, bool *ret)
{
    bool stop = stop_requested();
    enum status st = train_ranks_any(&s->ranks, &stop);
    *ret = !stop;
    return st;
}

static enum status train_steps(struct dataset_run *s)
{
    const int64_t total = s->schedule.total_steps, first = s->step;
    struct recent recent = {.start_ns = clock_now_ns(), .first_step = first};
    const int64_t patience = s->config->early_stop_patience;
    enum status st = ST_OK;
    int skipped = 0;
    bool on = true;
    if (s->step == 0 && s->eval.n) {
        s->best = BEST_NONE;
        CHECK(put_line(s, NULL, 0));
        CHECK(dataset_run_save(s, false));
    }
    while (s->step < total && !best_out_of_patience(&s->best, patience)) {
        struct update_stats stats;
        double seconds;
        CHECK(goes_on(s, &on));
        if (!on) break;
        CHECK(dataset_run_step(s, &stats, &seconds));
        CHECK(dataset_run_compare_weights(s));
        if (s->step == first + 1) memory_log_taken(s->learner);
        if (stats.skipped) log_warn("step %" PRId64 ": %s", s->step, status_message());
        CHECK(learning_skipped(&skipped, stats.skipped, "the", "lower --learning-rate"));
        CHECK(put_line(s, &stats, seconds));
        if (!stats.skipped) {
            recent.loss += stats.range[STAT_LOSS].sum;
            recent.steps++;
            recent.targets += stats.range[STAT_ENTROPY].n;
        }
        say_progress(s, &recent);
        CHECK(save_if_due(s));
    }
    log_progress_end();
    if (!on) st = end_unfinished(s);
out:
    return st;
}

static enum status dataset_run_train(struct dataset_run *s)
{
    char best[BEST_WORDS];
    enum status st;
    CHECK(train_steps(s));
    CHECK(dataset_run_save(s, false));
    best_end_words(&(struct best){.step = s->best.step, .score = -s->best.score}, "loss", best);
    if (s->step < s->schedule.total_steps)
        log_info("stopped early at step %" PRId64 " of %" PRId64 ": %" PRId64
                 " evaluations in a row were no better (--early-stop-patience)",
                 s->step, s->schedule.total_steps, s->best.waited);
    if (s->folder[0]) log_info("run folder %s%s", s->folder, best);
    if (s->config->load_best_model_at_end && s->config->out) CHECK(dataset_run_take_best(s));
out:
    return st;
}

// ---- the program --------------------------------------------------------------------------------

struct started {
    struct dataset_config config;
    struct dataset_run run;
    struct job job;
    char **argv; // of this program
};

static enum status check(void *context, struct option_set *set)
{
    struct started *p = context;
    return dataset_run_check(p->run.task, set, &p->config, &p->job);
}

static enum status run(void *context)
{
    struct started *p = context;
    struct dataset_run *s = &p->run;
    struct stop *stop = NULL;
    enum status st;
    if (p->job.launches) return job_launch(&p->job, p->argv);
    stop_catch_signals();
    CHECK(stop_watch_new(&(struct stop_options){.first = STOP_AT_STEP}, &stop));
    CHECK(dataset_run_open(s));
    CHECK(dataset_run_train(s));
    st = dataset_run_write_out(s);
out:
    if (st == ST_CANCELLED) log_warn("%s", status_message());
    stop_watch_end(stop);
    dataset_run_release(s, st);
    return st;
}

int dataset_main(const struct dataset_task *task, const char *usage, int argc, char **argv)
{
    struct started p = {
        .run = {.task = task, .config = &p.config, .ranks = {.job = &p.job}, .folder_lock = -1},
        .argv = argv};
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
