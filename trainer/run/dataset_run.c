/* dataset_run.c: a run without a server: what it needs (its folder, the model, on a device of its
 * own, the examples, the learner); its steps, which are an update by the next examples and a line
 * of metrics.jsonl; its evaluations, and what it leaves at the end. The main thread; logs what is
 * assumed on the user's behalf, and what is left out.
 *
 * A pair is one file read twice, each time with another completion behind the same prompt. Its two
 * completions are one group, so that the prompt is computed once, and stay in one micro-batch,
 * since the loss compares them. The reference of pairs is what --model gives, before a checkpoint's
 * weights replace it: a run that goes on computes the same numbers again. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/dataset_run.h"
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/data/data.h"
#include "trainer/learn/step.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/runlog.h"
#include "common/base/file.h"
#include "common/model/adapter.h"
#include "common/model/model_folder.h"
#include "common/text/tokenizer.h"
#include "kernels/comm.h"
#include "trainer/run/warnings.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MEASURED_SAID 1000 // passes between two lines of progress

// ---- options -----------------------------------------------------------------------------------

static enum status dataset_check(struct run *run, struct option_set *set, struct train_config *c)
{
    const struct task *task = run->task;
    enum status st;
    if (c->resume && c->run_dir && !c->model && !c->init)
        FAIL(ST_INVALID,
             "--resume: %s holds no run to go on with; a new one needs --model and --data",
             c->run_dir);
    CHECK(options_check(set, c));
    if (!c->model && !c->init)
        FAIL(ST_INVALID, task->sides > 1 ? "--model is missing: the model folder to start from"
                                         : "one of --model DIR and --init CONFIG.json is needed");
    if (!c->data) FAIL(ST_INVALID, "--data is missing: a JSONL file of examples");
    if (c->load_best_model_at_end && c->out && !c->run_dir)
        FAIL(ST_INVALID,
             "--load-best-model-at-end needs --run-dir, whose checkpoints have the best weights");
    // what the options of train are that these commands do not have
    c->sync = SYNC_CHECKPOINT;
    c->lora.name = task->command; // no server asks for it
    c->sampling.temperature = 1;
    c->curriculum.num_generations = task->sides;
    c->curriculum.seed = (uint64_t)c->seed;
    c->num_iterations = c->steps_per_generation = 1;
    c->entropy.top_quantile = 1;
    c->quiesce_timeout = 30; // of nobody
    run->resolved = (struct train_resolved){.loss = c->loss,
                                            .schedule = c->learner.schedule,
                                            .updates_per_step = 1,
                                            .schedule_per_step = 1};
    // in the mean over tokens, or over pairs
    run->resolved.loss.type = (enum loss_type)(task->loss + (task->sides > 1 ? c->preference : 0));
    if (task->sides > 1) CHECK(loss_check_pairs(&run->resolved.loss));
    CHECK(schedule_check(&c->learner.schedule));
    if (c->out && run->launch->ranks.rank == 0) // before anything is trained
        CHECK(model_folder_check_out(c->out, c->overwrite,
                                     OPTION_WORDS(c->model, c->tokenizer, c->init), 3));
    st = prompts_check(&c->prompts);
out:
    return st;
}

// ---- the model ---------------------------------------------------------------------------------

// A new model can still be given the rows that its tokenizer needs; of one that is there it is
// said.
static enum status check_tokenizer(const struct run *run)
{
    struct tokenizer *t;
    const struct train_config *c = run->config;
    const struct model_config *m = run->mapped.model;
    const char *folder = run->mapped.files_folder;
    enum status st = tokenizer_load(folder, &t);
    if (st != ST_OK) return st;
    const int n = tokenizer_vocab_size(t), rows = m->vocab_size, eos = tokenizer_eos(t);
    bool knows_eos = eos < 0 || m->n_eos == 0;
    for (int i = 0; i < m->n_eos; i++) knows_eos |= m->eos_ids[i] == eos;
    tokenizer_free(t);
    if (n > rows && c->init)
        return status_fail(
            ST_MISMATCH,
            "--init %s: vocab_size is %d, and the tokenizer in %s has %d tokens; set "
            "vocab_size to %d or more",
            c->init, rows, c->tokenizer, n, n);
    if (n > rows)
        log_warn(
            "the tokenizer in %s has %d tokens, the model rows for %d: text with the others is "
            "refused",
            folder, n, rows);
    if (c->init && rows > n)
        log_info("--init %s: vocab_size is %d; %d of these rows have no token in %s", c->init, rows,
                 rows - n, c->tokenizer);
    if (!knows_eos)
        log_warn("the tokenizer in %s ends texts with token %d, which is none of the model's "
                 "eos_token_id: completions will end with %d",
                 folder, eos, m->eos_ids[0]);
    return ST_OK;
}

static enum status open_model(struct run *run)
{
    enum status st;
    char words[256];
    const struct train_config *c = run->config;
    CHECK(run_open_own(run));
    run->mapped.model_folder = c->model;
    run->mapped.files_folder = c->tokenizer ? c->tokenizer : c->model;
    CHECK(check_tokenizer(run));
    if (c->model && left_out_describe(run->mapped.model, words, sizeof words))
        log_info("%s: %s", c->model, words);
    CHECK(train_ranks_meet(&run->ranks, &run->mapped, c->launch.rank_timeout));
    CHECK(run_catch_signals(run));
    CHECK(run_become_writer(run->mapped.bridge));
    control_set_role(mapped_control(&run->mapped), run->mapped.role);
out:
    return st;
}

// ---- examples ----------------------------------------------------------------------------------

static void say_turns(const struct dataset *d, const struct train_config *c)
{
    if (d->turns.several == 0) return;
    if (!c->all_turns)
        log_info("%s: %" PRId64 " conversations have several turns of the assistant, of which the "
                 "last alone is learnt; --train-on all learns every one",
                 d->path, d->turns.several);
    else
        log_info("%s: of %" PRId64 " conversations every turn of the assistant is learnt", d->path,
                 d->turns.several);
    if (c->all_turns && d->turns.learnt < d->turns.earlier)
        log_warn("%s: but for %" PRId64 " of %" PRId64 " turns before the last, which the chat "
                 "template renders otherwise once others follow; they are not learnt",
                 d->path, d->turns.earlier - d->turns.learnt, d->turns.earlier);
}

static enum status load_side(const struct run *run, const char *path, int64_t limit,
                             const char *side, struct dataset **ret)
{
    const struct train_config *c = run->config;
    int left_out;
    struct prompt_options options = c->prompts;
    options.max_samples = limit;
    options.completions = true;
    options.all_turns = c->all_turns;
    options.side = side;
    options.end_id = run->mapped.model->n_eos ? run->mapped.model->eos_ids[0] : -1;
    enum status st = prompts_load(path, run->mapped.files_folder, run->mapped.model->vocab_size,
                                  &options, ret, &left_out);
    if (st != ST_OK) return st;
    if (side && strcmp(side, run->task->side_fields[0]) != 0) return ST_OK; // it has been said
    warn_data(*ret, left_out);
    if (!side) say_turns(*ret, c);
    return ST_OK;
}

static bool same_ids(const struct token_list *x, const struct token_list *y)
{
    return x->n == y->n && memcmp(x->ids, y->ids, (size_t)x->n * sizeof *x->ids) == 0;
}

static enum status check_pairs(const struct dataset *a, const struct dataset *b)
{
    int same = 0;
    for (int i = 0; i < a->n && i < b->n; i++) {
        const struct example *x = &a->examples[i], *y = &b->examples[i];
        same += same_ids(&x->completion_ids, &y->completion_ids);
        if (!same_ids(&x->prompt_ids, &y->prompt_ids))
            return status_fail(ST_FORMAT,
                               "%s, line %d: the conversations \"chosen\" and \"rejected\" differ "
                               "before their last message; give a \"prompt\" that both follow",
                               a->path, a->examples[i].line);
    }
    if (same)
        log_warn("%s: of %d of %d pairs \"chosen\" and \"rejected\" are the same: nothing is "
                 "preferred in them",
                 a->path, same, a->n);
    if (a->n == b->n) return ST_OK;
    return status_fail(ST_FORMAT, "%s: prompts of one length are left out of one side alone",
                       a->path);
}

static void release_examples(struct dataset_examples *data)
{
    for (int k = 0; k < TASK_SIDES; k++) dataset_free(data->sides[k]);
    free(data->reference);
    *data = (struct dataset_examples){0};
}

// Longest and widest of the run become theirs, where they are more.
static enum status load_examples(struct run *run, const char *path, int64_t limit,
                                 struct dataset_examples *ret)
{
    enum status st = ST_OK;
    struct dataset_run *given = run->given;
    struct dataset_examples data = {0};
    for (int k = 0; k < run->task->sides; k++)
        CHECK(load_side(run, path, limit, run->task->side_fields[k], &data.sides[k]));
    if (run->task->sides > 1) CHECK(check_pairs(data.sides[0], data.sides[1]));
    data.n = data.sides[0]->n;
    for (int i = 0; i < data.n; i++) {
        const int64_t prompt = data.sides[0]->examples[i].prompt_ids.n;
        int64_t all = prompt;
        for (int k = 0; k < run->task->sides; k++) {
            const int64_t n = data.sides[k]->examples[i].completion_ids.n;
            all += n;
            if (prompt + n > given->longest) given->longest = prompt + n;
        }
        if (all > given->widest) given->widest = all;
    }
    *ret = data;
out:
    if (st != ST_OK) release_examples(&data);
    return st;
}

// What a server chooses by --max-context.
static enum status choose_rope(struct run *run)
{
    char words[128];
    int64_t context = run->config->rope_context;
    if (context > 0 && context < run->given->longest)
        return status_fail(ST_INVALID,
                           "--rope-context %" PRId64 " is below the longest example (%" PRId64
                           " tokens)",
                           context, run->given->longest);
    run->mapped.model->rope_context = (int)(context > 0 ? context : run->given->longest);
    if (rope_describe(run->mapped.model, words, sizeof words))
        log_info("%s%s; a server chooses by its --max-context, %s by --rope-context", words,
                 context > 0 ? "" : ", as the longest example says", run->task->command);
    return ST_OK;
}

static enum status open_data(struct run *run)
{
    enum status st;
    const struct train_config *c = run->config;
    struct dataset_run *given = run->given;
    uint64_t digests[2] = {0}, all[COMM_MAX_RANKS][2];
    CHECK(load_examples(run, c->data, c->prompts.max_samples, &given->data));
    if (c->eval_data) CHECK(load_examples(run, c->eval_data, c->eval_limit, &given->eval));
    run->data = given->data.sides[0];
    run->eval_data = given->eval.sides[0];
    if (given->longest > run->mapped.model->max_positions)
        FAIL(ST_INVALID,
             "%s%s%s: the longest example, prompt and completion, has %" PRId64
             " tokens; the model's context is %d (--max-prompt-length N leaves out longer prompts)",
             c->data, c->eval_data ? ", " : "", c->eval_data ? c->eval_data : "", given->longest,
             run->mapped.model->max_positions);
    CHECK(choose_rope(run));
    // That of rank 0 is not known elsewhere, on whose hosts a file of that name may be another.
    digests[0] = run->data->digest;
    if (run->eval_data) digests[1] = run->eval_data->digest;
    CHECK(comm_gather_host(run->ranks.all, digests, all, sizeof digests));
    for (int r = 1; r < comm_size(run->ranks.all); r++)
        if (memcmp(all[r], all[0], sizeof digests) != 0)
            FAIL(ST_MISMATCH, "rank %d reads another content of --data or --eval-data than rank 0",
                 r);
    st = curriculum_new(&c->curriculum, run->data->n, &run->curriculum);
out:
    return st;
}

// n examples of `data`: those of items, or, NULL, the first ones. ret: begun; it borrows them.
static enum status dataset_samples(const struct run *run, const struct dataset_examples *data,
                                   const int *items, int n, struct samples **ret)
{
    const int sides = run->task->sides;
    struct samples *samples = NULL;
    enum status st = samples_new(n, sides, false, &samples);
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

// ---- the learner, and the reference of pairs ---------------------------------------------------

static enum status open_learner(struct run *run)
{
    const int sides = run->task->sides;
    const int64_t budget = run->config->learner.token_budget,
                  n = run->config->curriculum.prompts_per_step, needed = run->given->widest - sides;
    const struct learner_shape shape = {
        .longest = run->given->longest, .tokens = n * run->given->widest, .seqs = (1 + sides) * n};
    if (sides > 1 && needed > budget)
        return status_fail(ST_INVALID,
                           "--token-budget %" PRId64 " is below the longest pair, a prompt with "
                           "its two completions (%" PRId64 " rows); raise it to that or more",
                           budget, needed);
    log_info("%" PRId64 " parameters on %s", run->mapped.policy->n_parameters,
             device_name(bridge_device(run->mapped.bridge)));
    return run_open_learner(run, &shape);
}

// The log-probabilities by the weights as they are.
static enum status measure(struct run *run, struct dataset_examples *data)
{
    const int each = (int)run->config->curriculum.prompts_per_step;
    struct samples *samples = NULL;
    enum status st;
    CHECK(dataset_samples(run, data, NULL, data->n, &samples));
    data->reference = calloc((size_t)samples->n, sizeof *data->reference);
    if (!data->reference) FAIL(ST_NO_MEMORY, "no memory for the reference");
    for (int at = 0; at < data->n; at += each) {
        const int n = data->n - at < each ? data->n - at : each;
        bool stop;
        CHECK(learner_pass(run->learner, PASS_NOTE, samples, at, n, NULL, NULL));
        CHECK(run_agree_to_stop(run, &stop));
        if (stop) {
            log_progress_end();
            log_warn("a signal: the reference was not finished");
            FAIL(ST_CANCELLED, "told to end while the reference was computed");
        }
        if (at / each % MEASURED_SAID == MEASURED_SAID - 1)
            log_progress("reference: %d of %d pairs", at + n, data->n);
    }
    for (int i = 0; i < samples->n; i++)
        for (long t = samples->first[i]; t < samples->first[i + 1]; t++)
            data->reference[i] += samples->logprobs[t]; // 0 where another rank has it
    CHECK(comm_sum_host(learner_info(run->learner)->comm, data->reference, samples->n));
    log_progress_end();
out:
    samples_free(samples);
    return st;
}

static enum status open_reference(struct run *run)
{
    enum status st;
    const int64_t start = clock_now_ns();
    struct dataset_run *given = run->given;
    if (run->task->sides == 1) return ST_OK;
    CHECK(measure(run, &given->data));
    if (given->eval.n) CHECK(measure(run, &given->eval));
    log_info("the reference: log-probabilities by %s of %d pairs, computed once in %.1f s",
             run->config->model, given->data.n + given->eval.n, clock_ms_since(start) / 1e3);
out:
    return st;
}

static enum status dataset_open(struct run *run)
{
    const struct train_config *c = run->config;
    enum status st = ST_OK;
    char latest[PATH_ROOM] = "";
    bool replaced = false;
    run->given = calloc(1, sizeof *run->given);
    if (!run->given) return status_fail(ST_NO_MEMORY, "no memory for the examples");
    if (run->config->out) sweep_beside(run->config->out, false);
    CHECK(open_model(run));
    if (c->run_dir || !c->out)
        CHECK(run_open_folder(run, &replaced, latest));
    else
        log_info("no run folder: metrics and checkpoints are not kept (--run-dir DIR keeps them)");
    CHECK(open_data(run));
    CHECK(run_open_adapter(run));
    CHECK(run_find_base(run));
    if (run->mapped.adapter) // a new one, which changes nothing yet
        CHECK(adapter_init(run->mapped.adapter, bridge_device(run->mapped.bridge),
                           (uint64_t)c->seed));
    CHECK(open_learner(run));
    CHECK(open_reference(run));
    if (latest[0]) CHECK(run_resume(run, latest));
    st = run_begin(run, replaced, latest[0] != 0);
out:
    return st;
}

void dataset_close(struct run *run)
{
    if (!run->given) return;
    release_examples(&run->given->eval);
    release_examples(&run->given->data);
    run->data = run->eval_data = NULL;
    free(run->given);
}

// ---- an evaluation -----------------------------------------------------------------------------

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
