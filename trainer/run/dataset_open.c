/* dataset_open.c: what a run without a server needs: its folder, the model, on a device of its own,
 * the examples, the learner. The main thread; logs what is assumed on the user's behalf, and what
 * is left out.
 *
 * A pair is one file read twice, each time with another completion behind the same prompt. Its two
 * completions are one group, so that the prompt is computed once, and stay in one micro-batch,
 * since the loss compares them. The reference of pairs is what --model gives, before a checkpoint's
 * weights replace it: a run that goes on computes the same numbers again. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/model/adapter.h"
#include "common/text/tokenizer.h"
#include "kernels/comm.h"
#include "trainer/data/data.h"
#include "trainer/learn/step.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/warnings.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MEASURED_SAID 1000 // passes between two lines of progress

// ---- options -----------------------------------------------------------------------------------

// Before anything is trained: a folder that is there is replaced on request only, and only if it is
// a model's, or an adapter's.
static enum status check_out(const struct train_config *c)
{
    enum status st = ST_OK;
    DIR *dir = c->out && file_exists(c->out) ? opendir(c->out) : NULL;
    int n = 0;
    while (dir && n <= 2 && readdir(dir)) n++;
    if (dir) closedir(dir);
    if (!c->out || !file_exists(c->out) || n == 2) return ST_OK; // . and ..
    if (!c->overwrite)
        FAIL(ST_INVALID,
             "--out %s is there already; take another folder, or say --overwrite to replace it "
             "whole",
             c->out);
    if (!file_exists_in(c->out, "config.json") && !file_exists_in(c->out, ADAPTER_CONFIG_FILE))
        FAIL(ST_INVALID,
             "--out %s is no model folder (it has no config.json), so --overwrite does not "
             "replace it; take another",
             c->out);
out:
    return st;
}

enum status dataset_check(struct run *run, struct option_set *set, struct train_config *c)
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
    if (run->launch->ranks.rank == 0) CHECK(check_out(c));
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

static enum status check_pairs(const struct dataset *a, const struct dataset *b)
{
    for (int i = 0; i < a->n && i < b->n; i++) {
        const struct token_list *x = &a->examples[i].prompt_ids, *y = &b->examples[i].prompt_ids;
        if (x->n != y->n || memcmp(x->ids, y->ids, (size_t)x->n * sizeof *x->ids) != 0)
            return status_fail(ST_FORMAT,
                               "%s, line %d: the conversations \"chosen\" and \"rejected\" differ "
                               "before their last message; give a \"prompt\" that both follow",
                               a->path, a->examples[i].line);
    }
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
             " tokens; the model's context is %d",
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

enum status dataset_open(struct run *run)
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
