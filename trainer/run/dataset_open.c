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
#include "trainer/learn/step.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/notices.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/runlog.h"
#include "trainer/run/same_run.h"

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
static enum status check_out(const struct dataset_config *c)
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
static struct loss_config dataset_run_loss(const struct dataset_task *task,
                                           const struct dataset_config *c)
{
    struct loss_config loss = c->loss;
    loss.type = (enum loss_type)(task->loss + (task->sides > 1 ? c->preference : 0));
    return loss;
}

enum status dataset_run_check(const struct dataset_task *task, struct option_set *set,
                              struct dataset_config *c, struct job *ret_job)
{
    enum status st;
    c->job.shards = 1;
    CHECK(job_find(&c->job, ret_job));
    c->several_ranks = ret_job->ranks.size > 1;
    if (c->resume && c->run_dir) CHECK(folder_take_options(set, c->run_dir, NULL, c));
    log_open(ret_job->log_name, c->log_level);
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
    const struct loss_config loss = dataset_run_loss(task, c);
    if (task->sides > 1) CHECK(loss_check_pairs(&loss));
    CHECK(schedule_check(&c->learning.schedule));
    if (ret_job->ranks.rank == 0) CHECK(check_out(c));
    CHECK(prompts_check(&c->prompts));
    if (!c->resume) notice_idle(set, c);
    train_ranks_log(ret_job, c->log_level);
out:
    return st;
}

const char *dataset_tokenizer_folder(const struct dataset_config *c)
{
    return c->tokenizer ? c->tokenizer : c->model;
}

// A new model can still be given the rows that its tokenizer needs; of one that is there it is
// said.
static enum status check_tokenizer(const struct dataset_run *s)
{
    struct tokenizer *t;
    const struct dataset_config *c = s->config;
    enum status st = tokenizer_load(dataset_tokenizer_folder(c), &t);
    if (st != ST_OK) return st;
    const int n = tokenizer_vocab_size(t), rows = s->model->vocab_size, eos = tokenizer_eos(t);
    bool knows_eos = eos < 0 || s->model->n_eos == 0;
    for (int i = 0; i < s->model->n_eos; i++) knows_eos |= s->model->eos_ids[i] == eos;
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
                 dataset_tokenizer_folder(c), eos, s->model->eos_ids[0]);
    return ST_OK;
}

static enum status open_model(struct dataset_run *s)
{
    enum status st;
    char words[256], device[JOB_DEVICE_ROOM];
    const struct dataset_config *c = s->config;
    CHECK(device_open(job_device(s->ranks.job, c->device, device), &s->dev));
    if (c->model)
        CHECK(model_config_load(c->model, &s->model));
    else
        CHECK(model_config_load_file(c->init, &s->model));
    CHECK(check_tokenizer(s));
    CHECK(weights_plan(s->model, device_default_dtype(s->dev), &s->weights));
    CHECK(weights_alloc(s->weights, s->dev));
    if (c->model)
        CHECK(weights_load(s->weights, s->dev, c->model));
    else
        CHECK(weights_init_random(s->weights, s->dev, (uint64_t)c->seed));
    if (c->model && left_out_describe(s->model, words, sizeof words))
        log_info("%s: %s", c->model, words);
out:
    return st;
}

// What a server chooses by --max-context.
static enum status choose_rope(struct dataset_run *s)
{
    char words[128];
    int64_t context = s->config->rope_context;
    if (context > 0 && context < s->longest)
        return status_fail(ST_INVALID,
                           "--rope-context %" PRId64 " is below the longest example (%" PRId64
                           " tokens)",
                           context, s->longest);
    s->model->rope_context = (int)(context > 0 ? context : s->longest);
    if (rope_describe(s->model, words, sizeof words))
        log_info("%s%s; a server chooses by its --max-context, %s by --rope-context", words,
                 context > 0 ? "" : ", as the longest example says", s->task->command);
    return ST_OK;
}

// What the held-out loss depends on beside the weights. New reference; NULL: no memory.
static json_t *evaluation_of(const struct dataset_run *s)
{
    char digest[DIGEST_ROOM];
    return json_pack("{s:s, s:I}", "data_digest", digest_text(s->eval.sides[0], digest), "limit",
                     (json_int_t)s->config->eval_limit);
}

static enum status open_data(struct dataset_run *s)
{
    enum status st;
    const struct dataset_config *c = s->config;
    CHECK(dataset_examples_load(s, c->data, c->prompts.max_samples, &s->data));
    if (c->eval_data) CHECK(dataset_examples_load(s, c->eval_data, c->eval_limit, &s->eval));
    if (s->longest > s->model->max_positions)
        FAIL(ST_INVALID,
             "%s%s%s: the longest example, prompt and completion, has %" PRId64
             " tokens; the model's context is %d",
             c->data, c->eval_data ? ", " : "", c->eval_data ? c->eval_data : "", s->longest,
             s->model->max_positions);
    CHECK(choose_rope(s));
    if (c->eval_data && !(s->best_of = evaluation_of(s)))
        FAIL(ST_NO_MEMORY, "no memory for the evaluations");
    CHECK(data_order_init(&s->order, (uint64_t)c->seed, s->data.n));
    s->schedule = c->learning.schedule;
    s->schedule.total_steps =
        c->max_steps >= 0
            ? c->max_steps
            : (int64_t)ceil(c->num_train_epochs * s->data.n / (double)c->examples_per_step);
    st = schedule_check(&s->schedule);
out:
    return st;
}

static enum status open_adapter(struct dataset_run *s)
{
    enum status st;
    json_t *json = NULL;
    struct adapter_config *config;
    if (s->config->lora.r == 0) return ST_OK;
    CHECK(lora_config_json(&s->config->lora, s->config->model, &json));
    CHECK(adapter_config_from_json("--lora-target", json, &config));
    CHECK(adapter_new(config, s->weights, s->weights->dt, &s->adapter));
    CHECK(weights_alloc(s->adapter->weights, s->dev));
    CHECK(adapter_init(s->adapter, s->dev, (uint64_t)s->config->seed));
    CHECK(adapter_base_of(s->weights, s->dev, s->config->model, &s->base));
    notice_adapter(s->adapter);
out:
    json_decref(json);
    return st;
}

static enum status check_budget(const struct dataset_run *s)
{
    const int64_t budget = s->config->learning.token_budget, needed = s->widest - s->task->sides;
    if (s->task->sides == 1 || needed <= budget) return ST_OK;
    return status_fail(ST_INVALID,
                       "--token-budget %" PRId64 " is below the longest pair, a prompt with its "
                       "two completions (%" PRId64 " rows); raise it to that or more",
                       budget, needed);
}

static enum status open_learner(struct dataset_run *s)
{
    enum status st;
    const struct dataset_config *c = s->config;
    const size_t n = (size_t)c->examples_per_step;
    struct learner_config options;
    const struct learning_shape shape = {
        .longest = s->longest,
        .tokens = c->examples_per_step * s->widest,
        .seqs = (1 + s->task->sides) * c->examples_per_step,
    };
    CHECK(check_budget(s));
    CHECK(learning_config(&c->learning, &shape, 1, &options));
    options.ranks = true;
    options.comm = s->ranks.copies;
    options.adapter = s->adapter;
    options.lora_dropout = (float)c->lora.dropout;
    options.seed = (uint64_t)c->seed;
    s->items = calloc(n, sizeof *s->items);
    if (!s->items) FAIL(ST_NO_MEMORY, "no memory for %zu examples", n);
    CHECK(learner_new(s->dev, s->model, s->weights, false, &options, &s->learner));
    log_info("%" PRId64 " parameters on %s", s->weights->n_parameters, device_name(s->dev));
    notice_model(s->model, learner_balance_coef(s->learner));
    memory_log(s->learner, "of its own, beside what follows", c->learning.freeze);
    CHECK(learner_prepare(s->learner));
out:
    return st;
}

static enum status open_reference(struct dataset_run *s)
{
    enum status st;
    const int64_t start = clock_now_ns();
    if (s->task->sides == 1) return ST_OK;
    CHECK(dataset_run_measure(s, &s->data));
    if (s->eval.n) CHECK(dataset_run_measure(s, &s->eval));
    log_info("the reference: log-probabilities by %s of %d pairs, computed once in %.1f s",
             s->config->model, s->data.n + s->eval.n, clock_ms_since(start) / 1e3);
out:
    return st;
}

// Whether the path is the folder or something in it; both must be there for that.
static bool is_within(const char *path, const char *folder)
{
    char *of = realpath(path, NULL), *in = realpath(folder, NULL);
    const size_t len = in ? strlen(in) : 0;
    const bool within = of && in && strncmp(of, in, len) == 0 && (!of[len] || of[len] == '/');
    free(of);
    free(in);
    return within;
}

// What is read here must not be of the run that goes.
static enum status outlives(const struct dataset_run *s, const char *option, const char *path)
{
    char checkpoints[PATH_ROOM];
    enum status st;
    CHECK(path_put(checkpoints, s->folder, "checkpoints"));
    if (path && is_within(path, checkpoints))
        FAIL(ST_INVALID,
             "--%s %s is of the run that --overwrite replaces; copy it elsewhere first, or take "
             "another --run-dir",
             option, path);
out:
    return st;
}

// ret_replaced: there is a run, which goes once this one can begin. ret_latest: the checkpoint to
// go on from; NULL: none. The caller's to free.
static enum status open_folder(struct dataset_run *s, bool *ret_replaced, char **ret_latest)
{
    const struct dataset_config *c = s->config;
    char *latest = NULL;
    enum status st;
    if (!c->run_dir && c->out) {
        log_info("no run folder: metrics and checkpoints are not kept (--run-dir DIR keeps them)");
        return ST_OK;
    }
    CHECK(folder_open(c->run_dir, s->folder, &s->folder_lock)); // rank 0's, for all
    if (c->out && is_within(s->folder, c->out))
        FAIL(ST_INVALID,
             "--out %s holds the run folder %s, which the model would replace; take another",
             c->out, s->folder);
    CHECK(checkpoint_latest(s->folder, &latest));
    const bool there = latest || runlog_has_steps(s->folder);
    if (there && !c->resume && !c->overwrite)
        FAIL(ST_INVALID,
             "%s holds a run already: go on with it (--resume), replace it (--overwrite), or take "
             "another --run-dir",
             s->folder);
    if (there && !c->resume) {
        CHECK(outlives(s, "model", c->model));
        CHECK(outlives(s, "tokenizer", c->tokenizer));
        *ret_replaced = true;
    }
    if (there && c->resume && !latest)
        log_warn("%s has no checkpoint to go on from: its run is begun anew", s->folder);
    if (c->resume) {
        *ret_latest = latest;
        latest = NULL;
    }
out:
    free(latest);
    return st;
}

static enum status remove_run(const struct dataset_run *s)
{
    static const char *const parts[] = {"checkpoints", "rollouts"};
    char path[PATH_ROOM];
    enum status st = ST_OK;
    log_info("%s: the run there is replaced (--overwrite)", s->folder);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        CHECK(path_put(path, s->folder, "%s", parts[i]));
        if (file_exists(path)) CHECK(file_remove_tree(path));
    }
out:
    return st;
}

// The ranks meet once each has its model, and hear what rank 0 goes on with.
static enum status meet(struct dataset_run *s, char **latest)
{
    enum status st;
    char layout[65];
    weights_layout_hash(s->weights, layout);
    CHECK(train_ranks_meet(&s->ranks, s->dev, layout, s->config->job.rank_timeout));
    CHECK(folder_agree(&s->ranks, s->folder, latest));
out:
    return st;
}

// That of rank 0 is not known elsewhere, on whose hosts a file of that name may be another.
static enum status compare_data(const struct dataset_run *s)
{
    const uint64_t digests[] = {s->data.sides[0]->digest, s->eval.n ? s->eval.sides[0]->digest : 0};
    uint64_t all[COMM_MAX_RANKS][2];
    enum status st = comm_gather_host(s->ranks.all, digests, all, sizeof digests);
    for (int r = 1; st == ST_OK && r < comm_size(s->ranks.all); r++)
        if (memcmp(all[r], all[0], sizeof digests) != 0)
            st = status_fail(ST_MISMATCH,
                             "rank %d reads another content of --data or --eval-data "
                             "than rank 0",
                             r);
    return st;
}

enum status dataset_run_compare_weights(const struct dataset_run *s)
{
    return train_ranks_compare(&s->ranks, s->dev, s->step, s->adapter ? "adapter" : "model",
                               s->adapter ? s->adapter->weights : s->weights);
}

enum status dataset_run_open(struct dataset_run *s)
{
    const bool leads = train_ranks_lead(&s->ranks);
    enum status st = ST_OK;
    char *latest = NULL;
    bool replaced = false;
    saver_init(&s->saver, &s->config->saving);
    s->best = BEST_NONE;
    s->loss = dataset_run_loss(s->task, s->config);
    if (leads) CHECK(open_folder(s, &replaced, &latest));
    CHECK(open_model(s));
    CHECK(meet(s, &latest));
    CHECK(open_data(s));
    CHECK(compare_data(s));
    CHECK(open_adapter(s));
    CHECK(open_learner(s));
    CHECK(open_reference(s));
    if (latest) CHECK(dataset_run_resume(s, latest));
    CHECK(dataset_run_compare_weights(s));
    if (replaced) CHECK(remove_run(s));
    CHECK(dataset_run_describe(s, latest != NULL));
    if (s->folder[0])
        CHECK(runlog_new(leads ? s->folder : NULL, s->step, s->schedule.total_steps,
                         s->config->saving.logging_steps, &s->log));
out:
    free(latest);
    return st;
}

void dataset_run_release(struct dataset_run *s, enum status outcome)
{
    train_ranks_leave(&s->ranks, outcome);
    runlog_free(s->log);
    learner_free(s->learner);
    train_ranks_free(&s->ranks);
    free(s->items);
    data_order_release(&s->order);
    dataset_examples_release(&s->eval);
    dataset_examples_release(&s->data);
    adapter_free(s->adapter);
    json_decref(s->base);
    json_decref(s->best_of);
    weights_free(s->weights);
    model_config_free(s->model);
    device_free(s->dev);
    if (s->folder_lock >= 0) close(s->folder_lock);
}
