/* sft_open.c: the options of `cw-trainer sft`, and what a supervised run needs: the model, on a
 * device of its own, the examples, the learner. The main thread; logs what is assumed on the user's
 * behalf.
 */
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "trainer/learn/memory.h"
#include "trainer/run/notices.h"
#include "trainer/run/options_shared.h"
#include "trainer/run/sft_run.h"

#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define OPTIONS_OF struct sft_config

const struct option_spec sft_options[] = {
    OPT_HEADING("What is trained, on what"),
    OPT_TEXT("model", model, NULL, "DIR", "model folder to start from"),
    OPT_TEXT("init", init, NULL, "FILE", "or: a config.json, for a new model with random weights"),
    OPT_TEXT("tokenizer", tokenizer, NULL, "DIR", "folder with the tokenizer (default: --model)"),
    OPT_TEXT("data", data, NULL, "FILE", "prompts and completions, JSONL"),
    MAX_SAMPLES_OPTION,
    OPT_CHOICE("train-on", all_turns, "last", OPTION_WORDS("last", "all"),
               "which turns of the assistant are learnt of a conversation"),
    OPT_INT("rope-context", rope_context, "0", "TOKENS", 0, 1 << 24,
            "of models with longrope: context by which its factors are chosen, as a server does by "
            "--max-context; 0: the longest example"),
    OPT_TEXT("out", out, NULL, "DIR", "model folder to write"),
    OPT_FLAG("overwrite", overwrite, NULL, "replace --out where it is there"),
    OPT_CHOICE("dtype", dtype, "auto", dtype_option_names,
               "of the folder written; auto: as trained"),
    OPT_TEXT("device", device, "auto", "DEVICE", "auto, cpu, cuda:N"),
    OPT_CONFIG,
    PROMPT_OPTIONS,

    OPT_HEADING("Optimizer (AdamW)"),
    OPT_INT("examples-per-step", examples_per_step, "8", "N", 1, 1e6, "examples in one step"),
    EXPERTS_OPTION,
    ADAMW_OPTIONS("2e-5"),
    OPT_INT("max-steps", max_steps, "-1", "N", -1, 1e9, "steps; -1: by epochs"),
    OPT_DOUBLE("num-train-epochs", num_train_epochs, "3", "N", 0, 1e6, "times through the data"),
    OPT_INT("seed", seed, "42", "N", 0, 1e15, "of the data order and of random weights"),

    OPT_HEADING("Machine"),
    OPT_INT("logging-steps", logging_steps, "10", "N", 1, 1e9, "steps between progress lines"),
    MEMORY_OPTIONS,
    OPT_END,
};

static bool is_empty(const char *folder)
{
    DIR *dir = opendir(folder);
    int n = 0;
    while (dir && n <= 2 && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n == 2; // . and ..
}

// Before anything is trained: a folder that is there is replaced on request only, and only if it is
// a model's.
static enum status check_out(const struct sft_config *c)
{
    if (!c->out) return status_fail(ST_INVALID, "--out is missing: the model folder to write");
    if (!file_exists(c->out) || is_empty(c->out)) return ST_OK;
    if (!c->overwrite)
        return status_fail(ST_INVALID,
                           "--out %s is there already; take another folder, or say --overwrite to "
                           "replace it whole",
                           c->out);
    char config[PATH_ROOM];
    enum status st = path_put(config, c->out, "config.json");
    if (st != ST_OK || file_exists(config)) return st;
    return status_fail(
        ST_INVALID,
        "--out %s is no model folder (it has no config.json), so --overwrite does not "
        "replace it; take another",
        c->out);
}

enum status sft_check(const struct sft_config *c)
{
    if (!c->model == !c->init)
        return status_fail(ST_INVALID, "one of --model DIR and --init CONFIG.json is needed");
    if (!c->data) return status_fail(ST_INVALID, "--data is missing: a JSONL file of examples");
    if (!c->model && !c->tokenizer)
        return status_fail(ST_INVALID, "--init needs --tokenizer, a folder with tokenizer.json");
    enum status st = schedule_check(&c->learning.schedule);
    if (st == ST_OK) st = check_out(c);
    return st == ST_OK ? prompts_check(&c->prompts) : st;
}

const char *sft_tokenizer_folder(const struct sft_config *c)
{
    return c->tokenizer ? c->tokenizer : c->model;
}

// A new model can still be given the rows that its tokenizer needs; of one that is there it is
// said.
static enum status check_tokenizer(const struct sft *s)
{
    struct tokenizer *t;
    const struct sft_config *c = s->config;
    enum status st = tokenizer_load(sft_tokenizer_folder(c), &t);
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
            sft_tokenizer_folder(c), n, rows);
    if (c->init && rows > n)
        log_info("--init %s: vocab_size is %d; %d of these rows have no token in %s", c->init, rows,
                 rows - n, c->tokenizer);
    if (!knows_eos)
        log_warn("the tokenizer in %s ends texts with token %d, which is none of the model's "
                 "eos_token_id: completions will end with %d",
                 sft_tokenizer_folder(c), eos, s->model->eos_ids[0]);
    return ST_OK;
}

static enum status open_model(struct sft *s)
{
    enum status st;
    char words[256];
    const struct sft_config *c = s->config;
    CHECK(device_open(c->device, &s->dev));
    if (c->model)
        CHECK(model_config_load(c->model, &s->model));
    else
        CHECK(model_config_load_file(c->init, &s->model));
    CHECK(check_tokenizer(s));
    CHECK(weights_plan(s->model, device_default_dtype(s->dev), &s->weights));
    CHECK(device_alloc(s->dev, s->weights->bytes, &s->memory));
    device_fill(s->dev, s->memory, 0, s->weights->bytes);
    weights_bind(s->weights, s->memory);
    if (c->model)
        CHECK(weights_load(s->weights, s->dev, c->model));
    else
        CHECK(weights_init_random(s->weights, s->dev, (uint64_t)c->seed));
    if (c->model && left_out_describe(s->model, words, sizeof words))
        log_info("%s: %s", c->model, words);
out:
    return st;
}

static void say_turns(const struct dataset *d, const struct sft_config *c)
{
    if (d->turns.several == 0) return;
    if (!c->all_turns)
        log_info("%s: %" PRId64 " conversations have several turns of the assistant, of which the "
                 "last alone is learnt; --train-on all learns every one",
                 c->data, d->turns.several);
    else
        log_info("%s: of %" PRId64 " conversations every turn of the assistant is learnt", c->data,
                 d->turns.several);
    if (c->all_turns && d->turns.learnt < d->turns.earlier)
        log_warn("%s: but for %" PRId64 " of %" PRId64 " turns before the last, which the chat "
                 "template renders otherwise once others follow; they are not learnt",
                 c->data, d->turns.earlier - d->turns.learnt, d->turns.earlier);
}

// Tokens of the longest example, prompt and completion.
static int64_t longest_example(const struct dataset *d)
{
    int longest = 0;
    for (int i = 0; i < d->n; i++) {
        int n = d->examples[i].prompt_ids.n + d->examples[i].completion_ids.n;
        if (n > longest) longest = n;
    }
    return longest;
}

// What a server chooses by --max-context.
static enum status choose_rope(struct sft *s)
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
        log_info("%s%s; a server chooses by its --max-context, sft by --rope-context", words,
                 context > 0 ? "" : ", as the longest example says");
    return ST_OK;
}

static enum status open_data(struct sft *s)
{
    enum status st;
    const struct sft_config *c = s->config;
    int left_out;
    struct prompt_options options = c->prompts;
    options.completions = true;
    options.all_turns = c->all_turns;
    options.end_id = s->model->n_eos ? s->model->eos_ids[0] : -1;
    CHECK(prompts_load(c->data, sft_tokenizer_folder(c), s->model->vocab_size, &options, &s->data,
                       &left_out));
    notice_data(s->data, left_out);
    say_turns(s->data, c);
    s->longest = longest_example(s->data);
    if (s->longest > s->model->max_positions) {
        st = status_fail(ST_INVALID,
                         "%s: the longest example, prompt and completion, has %" PRId64
                         " tokens; the model's context is %d",
                         c->data, s->longest, s->model->max_positions);
        goto out;
    }
    CHECK(choose_rope(s));
    CHECK(data_order_init(&s->order, (uint64_t)c->seed, s->data->n));
    s->schedule = c->learning.schedule;
    s->schedule.total_steps =
        c->max_steps >= 0
            ? c->max_steps
            : (int64_t)ceil(c->num_train_epochs * s->data->n / (double)c->examples_per_step);
    st = schedule_check(&s->schedule);
out:
    return st;
}

static enum status open_learner(struct sft *s)
{
    enum status st;
    const struct sft_config *c = s->config;
    size_t n = (size_t)c->examples_per_step;
    struct learner_config options;
    const struct learning_shape shape = {
        .longest = s->longest,
        .tokens = c->examples_per_step * s->longest,
        .seqs = 2 * c->examples_per_step,
    };
    CHECK(learning_config(&c->learning, &shape, 1, &options));
    s->groups = calloc(n, sizeof *s->groups);
    s->completions = calloc(n, sizeof *s->completions);
    s->examples = calloc(n, sizeof(struct example *));
    if (!s->groups || !s->completions || !s->examples)
        return status_fail(ST_NO_MEMORY, "no memory for %zu examples", n);
    CHECK(learner_new(s->dev, s->model, s->weights, false, &options, &s->learner));
    log_info("%" PRId64 " parameters on %s", s->weights->n_parameters, device_name(s->dev));
    notice_model(s->model, learner_balance_coef(s->learner));
    memory_say(s->learner, "of its own, beside what follows", c->learning.freeze);
    CHECK(learner_prepare(s->learner));
out:
    return st;
}

enum status sft_open(struct sft *s)
{
    enum status st;
    CHECK(open_model(s));
    CHECK(open_data(s));
    CHECK(open_learner(s));
out:
    return st;
}

void sft_release(struct sft *s)
{
    learner_free(s->learner);
    free(s->groups);
    free(s->completions);
    free(s->examples);
    data_order_release(&s->order);
    dataset_free(s->data);
    weights_free(s->weights);
    model_config_free(s->model);
    if (s->dev) device_release(s->dev, s->memory);
    device_free(s->dev);
}
