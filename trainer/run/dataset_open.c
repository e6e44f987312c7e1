/* dataset_open.c: what a run without a server needs: its folder, the model, on a device of its own,
 * the examples, the learner. The main thread; logs what is assumed on the user's behalf.
 *
 * The reference of pairs is what --model gives, before a checkpoint's weights replace it: a run
 * that goes on computes the same numbers again. */
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/clock.h"
#include "common/base/options.h"
#include "common/model/tokenizer.h"
#include "kernels/comm.h"
#include "trainer/data/data.h"
#include "trainer/learn/step.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/notices.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/runlog.h"

#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_empty(const char *folder)
{
    DIR *dir = opendir(folder);
    int n = 0;
    while (dir && n <= 2 && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n == 2; // . and ..
}

// Before anything is trained: a folder that is there is replaced on request only, and only if it is
// a model's, or an adapter's.
static enum status check_out(const struct train_config *c)
{
    char config[PATH_ROOM], adapter[PATH_ROOM];
    enum status st;
    if (!c->out || !file_exists(c->out) || is_empty(c->out)) return ST_OK;
    CHECK(path_put(config, c->out, "config.json"));
    CHECK(path_put(adapter, c->out, ADAPTER_CONFIG_FILE));
    if (!c->overwrite)
        FAIL(ST_INVALID,
             "--out %s is there already; take another folder, or say --overwrite to replace it "
             "whole",
             c->out);
    if (!file_exists(config) && !file_exists(adapter))
        FAIL(ST_INVALID,
             "--out %s is no model folder (it has no config.json), so --overwrite does not "
             "replace it; take another",
             c->out);
out:
    return st;
}

// What of it is learned, in the mean over tokens, or over pairs.
static struct loss_config loss_of(const struct task *task, const struct train_config *c)
{
    struct loss_config loss = c->loss;
    loss.type = (enum loss_type)(task->loss + (task->sides > 1 ? c->preference : 0));
    return loss;
}

// What the options of train are that these commands do not have.
static void set_fixed(const struct task *task, struct train_config *c)
{
    c->sync = SYNC_CHECKPOINT;
    c->lora.name = task->command; // no server asks for it
    c->sampling.temperature = 1;
    c->curriculum.num_generations = task->sides;
    c->num_iterations = c->steps_per_generation = 1;
    c->entropy.top_quantile = 1;
    c->quiesce_timeout = 30; // of nobody
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
    set_fixed(task, c);
    run->resolved = (struct train_resolved){.loss = loss_of(task, c),
                                            .schedule = c->learning.schedule,
                                            .updates_per_step = 1,
                                            .schedule_per_step = 1};
    if (task->sides > 1) CHECK(loss_check_pairs(&run->resolved.loss));
    CHECK(schedule_check(&c->learning.schedule));
    if (run->job->ranks.rank == 0) CHECK(check_out(c));
    st = prompts_check(&c->prompts);
out:
    return st;
}

const char *dataset_tokenizer_folder(const struct train_config *c)
{
    return c->tokenizer ? c->tokenizer : c->model;
}

// A new model can still be given the rows that its tokenizer needs; of one that is there it is
// said.
static enum status check_tokenizer(const struct run *run)
{
    struct tokenizer *t;
    const struct train_config *c = run->config;
    enum status st = tokenizer_load(dataset_tokenizer_folder(c), &t);
    if (st != ST_OK) return st;
    const int n = tokenizer_vocab_size(t), rows = run->mapped.model->vocab_size,
              eos = tokenizer_eos(t);
    bool knows_eos = eos < 0 || run->mapped.model->n_eos == 0;
    for (int i = 0; i < run->mapped.model->n_eos; i++)
        knows_eos |= run->mapped.model->eos_ids[i] == eos;
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
            dataset_tokenizer_folder(c), n, rows);
    if (c->init && rows > n)
        log_info("--init %s: vocab_size is %d; %d of these rows have no token in %s", c->init, rows,
                 rows - n, c->tokenizer);
    if (!knows_eos)
        log_warn("the tokenizer in %s ends texts with token %d, which is none of the model's "
                 "eos_token_id: completions will end with %d",
                 dataset_tokenizer_folder(c), eos, run->mapped.model->eos_ids[0]);
    return ST_OK;
}

static enum status open_model(struct run *run)
{
    enum status st;
    char words[256];
    const struct train_config *c = run->config;
    CHECK(run_open_own(run));
    run->mapped.model_folder = c->model;
    run->mapped.files_folder = dataset_tokenizer_folder(c);
    CHECK(check_tokenizer(run));
    if (c->model && left_out_describe(run->mapped.model, words, sizeof words))
        log_info("%s: %s", c->model, words);
    CHECK(train_ranks_meet(&run->ranks, &run->mapped, c->job.rank_timeout));
    CHECK(run_catch_signals(run));
    CHECK(run_become_writer(run->mapped.bridge));
    control_set_role(mapped_control(&run->mapped), run->mapped.role);
out:
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

// That of rank 0 is not known elsewhere, on whose hosts a file of that name may be another.
static enum status compare_data(const struct run *run)
{
    const uint64_t digests[] = {run->data->digest, run->eval_data ? run->eval_data->digest : 0};
    uint64_t all[COMM_MAX_RANKS][2];
    enum status st = comm_gather_host(run->ranks.all, digests, all, sizeof digests);
    for (int r = 1; st == ST_OK && r < comm_size(run->ranks.all); r++)
        if (memcmp(all[r], all[0], sizeof digests) != 0)
            st = status_fail(ST_MISMATCH,
                             "rank %d reads another content of --data or --eval-data "
                             "than rank 0",
                             r);
    return st;
}

static enum status open_data(struct run *run)
{
    enum status st;
    const struct train_config *c = run->config;
    struct dataset_run *given = run->given;
    CHECK(dataset_examples_load(run, c->data, c->prompts.max_samples, &given->data));
    if (c->eval_data) CHECK(dataset_examples_load(run, c->eval_data, c->eval_limit, &given->eval));
    run->data = given->data.sides[0];
    run->eval_data = given->eval.sides[0];
    if (given->longest > run->mapped.model->max_positions)
        FAIL(ST_INVALID,
             "%s%s%s: the longest example, prompt and completion, has %" PRId64
             " tokens; the model's context is %d",
             c->data, c->eval_data ? ", " : "", c->eval_data ? c->eval_data : "", given->longest,
             run->mapped.model->max_positions);
    CHECK(choose_rope(run));
    CHECK(compare_data(run));
    struct curriculum_options order = c->curriculum;
    order.seed = (uint64_t)c->seed;
    st = curriculum_new(&order, run->data->n, &run->curriculum);
out:
    return st;
}

// A new adapter, which changes nothing yet.
static enum status open_adapter(struct run *run)
{
    enum status st;
    CHECK(run_open_adapter(run));
    CHECK(run_find_base(run));
    if (run->mapped.adapter)
        st = adapter_init(run->mapped.adapter, bridge_device(run->mapped.bridge),
                          (uint64_t)run->config->seed);
out:
    return st;
}

static enum status open_learner(struct run *run)
{
    const int sides = run->task->sides;
    const int64_t budget = run->config->learning.token_budget,
                  n = run->config->curriculum.prompts_per_step, needed = run->given->widest - sides;
    const struct learning_shape shape = {
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

static enum status open_reference(struct run *run)
{
    enum status st;
    const int64_t start = clock_now_ns();
    struct dataset_run *given = run->given;
    if (run->task->sides == 1) return ST_OK;
    CHECK(dataset_measure(run, &given->data));
    if (given->eval.n) CHECK(dataset_measure(run, &given->eval));
    log_info("the reference: log-probabilities by %s of %d pairs, computed once in %.1f s",
             run->config->model, given->data.n + given->eval.n, clock_ms_since(start) / 1e3);
out:
    return st;
}

enum status dataset_open(struct run *run)
{
    enum status st = ST_OK;
    char *latest = NULL;
    bool replaced = false;
    run->given = calloc(1, sizeof *run->given);
    if (!run->given) return status_fail(ST_NO_MEMORY, "no memory for the examples");
    CHECK(open_model(run));
    if (run->config->run_dir || !run->config->out)
        CHECK(run_open_folder(run, &replaced, &latest));
    else
        log_info("no run folder: metrics and checkpoints are not kept (--run-dir DIR keeps them)");
    CHECK(open_data(run));
    CHECK(open_adapter(run));
    CHECK(open_learner(run));
    CHECK(open_reference(run));
    if (latest) CHECK(run_resume(run, latest));
    CHECK(train_ranks_compare(&run->ranks, &run->mapped, run->step));
    run->step_version = mapped_version(&run->mapped);
    if (replaced) CHECK(run_remove(run));
    CHECK(run_folder_describe(run, latest != NULL));
    CHECK(runlog_new(run->folder[0] && train_ranks_lead(&run->ranks) ? run->folder : NULL,
                     run->step, run->total_steps, run->config->saving.logging_steps, &run->log));
    run_plan_steps(run);
    st = schedule_check(&run->resolved.schedule);
out:
    free(latest);
    return st;
}

void dataset_close(struct run *run)
{
    if (!run->given) return;
    dataset_examples_release(&run->given->eval);
    dataset_examples_release(&run->given->data);
    run->data = run->eval_data = NULL;
    free(run->given);
}
