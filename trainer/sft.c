/* sft.c: `cw-trainer sft`: learns completions by cross-entropy. The main thread.
 *
 * The same learner as GRPO's, on weights of its own instead of a daemon's: an example is a group of
 * one completion, and the loss is the mean over the step's completion tokens of -log p. Examples of
 * similar length need not meet, since nothing is padded.
 */
#include "trainer/run/options_shared.h"
#include "trainer/sft.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "trainer/run/checkpoint.h"
#include "trainer/learn/memory.h"
#include "trainer/rollout/data_order.h"
#include "trainer/rollout/prompts.h"
#include "trainer/run/runlog.h"
#include "trainer/learn/schedule.h"
#include "trainer/run/notices.h"
#include "trainer/run/stop.h"

#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SKIPPED 3

struct sft_config {
    const char *model, *init, *tokenizer, *data, *out, *config, *device;
    int dtype; // dtype_option_names
    enum schedule_type lr_scheduler_type;
    struct prompt_options prompts;
    int64_t examples_per_step, warmup_steps, max_steps, seed, logging_steps;
    int64_t token_budget, logits_chunk;
    const char *freeze;
    enum recompute recompute;
    enum moments_kind optim_moments;
    int all_turns; // 0 or 1
    int64_t rope_context;
    bool overwrite;
    double learning_rate, adam_beta1, adam_beta2, adam_epsilon, weight_decay, max_grad_norm;
    double num_train_epochs;
};

#define OPTIONS_OF struct sft_config

static const struct option_spec sft_options[] = {
    OPT_HEADING("What is trained, on what"),
    OPT_TEXT("model", model, NULL, "DIR", "model folder to start from"),
    OPT_TEXT("init", init, NULL, "FILE", "or: a config.json, for a new model with random weights"),
    OPT_TEXT("tokenizer", tokenizer, NULL, "DIR", "folder with the tokenizer (default: --model)"),
    OPT_TEXT("data", data, NULL, "FILE", "prompts and completions, JSONL"),
    MAX_SAMPLES_OPTION,
    OPT_CHOICE("train-on", all_turns, "last", OPTION_WORDS("last", "all"),
               "which turns of the assistant are learnt of a conversation"),
    OPT_INT("rope-context", rope_context, "0", "TOKENS", 0, 1 << 24,
            "of models with longrope: context by which its factors are chosen, as a daemon does by "
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
    ADAMW_OPTIONS("2e-5"),
    OPT_INT("max-steps", max_steps, "-1", "N", -1, 1e9, "steps; -1: by epochs"),
    OPT_DOUBLE("num-train-epochs", num_train_epochs, "3", "N", 0, 1e6, "times through the data"),
    OPT_INT("seed", seed, "42", "N", 0, 1e15, "of the data order and of random weights"),

    OPT_HEADING("Machine"),
    OPT_INT("logging-steps", logging_steps, "10", "N", 1, 1e9, "steps between progress lines"),
    OPT_INT("token-budget", token_budget, "8192", "ROWS", 2, 1e8,
            "of one micro-batch: bounds the memory of activations"),
    OPT_INT("logits-chunk", logits_chunk, "512", "ROWS", 1, 1e6,
            "whose vocabulary-wide logits exist at one time"),
    MEMORY_OPTIONS,
    OPT_END,
};

struct sft {
    const struct sft_config *config;
    struct device *dev;
    struct model_config *model;
    struct weights *weights;
    void *memory;
    struct dataset *data;
    int64_t longest; // tokens of an example
    struct data_order order;
    struct schedule schedule;
    struct learner *learner;
    struct pack_group *groups; // (examples_per_step)
    struct pack_completion *completions;
    const struct example **examples; // of the step, (examples_per_step) too
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
    char *config = path_join(c->out, "config.json");
    bool is_model = config && file_exists(config);
    free(config);
    if (is_model) return ST_OK;
    return status_fail(
        ST_INVALID,
        "--out %s is no model folder (it has no config.json), so --overwrite does not "
        "replace it; take another",
        c->out);
}

static enum status check_config(const struct sft_config *c)
{
    if (!c->model == !c->init)
        return status_fail(ST_INVALID, "one of --model DIR and --init CONFIG.json is needed");
    if (!c->data) return status_fail(ST_INVALID, "--data is missing: a JSONL file of examples");
    if (!c->model && !c->tokenizer)
        return status_fail(ST_INVALID, "--init needs --tokenizer, a folder with tokenizer.json");
    enum status st = check_out(c);
    return st == ST_OK ? prompts_check(&c->prompts) : st;
}

static const char *tokenizer_folder(const struct sft_config *c)
{
    return c->tokenizer ? c->tokenizer : c->model;
}

// A new model can still be given the rows that its tokenizer needs; of one that is there it is
// said.
static enum status check_tokenizer(const struct sft *s)
{
    struct tokenizer *t;
    const struct sft_config *c = s->config;
    enum status st = tokenizer_load(tokenizer_folder(c), &t);
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
            tokenizer_folder(c), n, rows);
    if (c->init && rows > n)
        log_info("--init %s: vocab_size is %d; %d of these rows have no token in %s", c->init, rows,
                 rows - n, c->tokenizer);
    if (!knows_eos)
        log_warn("the tokenizer in %s ends texts with token %d, which is none of the model's "
                 "eos_token_id: completions will end with %d",
                 tokenizer_folder(c), eos, s->model->eos_ids[0]);
    return ST_OK;
}

static enum status open_model(struct sft *s)
{
    enum status st;
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

// What a daemon chooses by --max-context.
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
        log_info("%s%s; a daemon chooses by its --max-context, sft by --rope-context", words,
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
    CHECK(prompts_load(c->data, tokenizer_folder(c), s->model->vocab_size, &options, &s->data,
                       &left_out));
    if (s->data->chat_source) log_info("chat template: %s", s->data->chat_source);
    if (s->data->ignored) log_warn("%s", s->data->ignored);
    if (left_out)
        log_warn("%s: %d prompts are longer than --max-prompt-length and left out", c->data,
                 left_out);
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
    s->schedule.type = c->lr_scheduler_type;
    s->schedule.peak = c->learning_rate;
    s->schedule.warmup_steps = c->warmup_steps;
    s->schedule.total_steps =
        c->max_steps >= 0
            ? c->max_steps
            : (int64_t)ceil(c->num_train_epochs * s->data->n / (double)c->examples_per_step);
out:
    return st;
}

static enum status open_learner(struct sft *s)
{
    enum status st;
    const struct sft_config *c = s->config;
    int64_t longest = s->longest, most = c->examples_per_step * longest;
    size_t n = (size_t)c->examples_per_step;
    struct learner_config options = {
        .optimizer =
            {
                .beta1 = c->adam_beta1,
                .beta2 = c->adam_beta2,
                .eps = c->adam_epsilon,
                .weight_decay = c->weight_decay,
                .max_grad_norm = c->max_grad_norm,
                .moments = c->optim_moments,
            },
        .freeze = c->freeze,
        .recompute = c->recompute,
        .temperature = 1,
        .token_budget = (int)(most < c->token_budget ? most : c->token_budget),
        .logits_chunk = (int)c->logits_chunk,
        .max_seqs = (int)(2 * c->examples_per_step),
        .max_context = (int)longest,
    };
    if (longest - 1 > c->token_budget)
        return status_fail(ST_INVALID,
                           "--token-budget %" PRId64 " is below the longest example; raise it to "
                           "%" PRId64 " or more",
                           c->token_budget, longest);
    s->groups = calloc(n, sizeof *s->groups);
    s->completions = calloc(n, sizeof *s->completions);
    s->examples = calloc(n, sizeof(struct example *));
    if (!s->groups || !s->completions || !s->examples)
        return status_fail(ST_NO_MEMORY, "no memory for %zu examples", n);
    CHECK(learner_new(s->dev, s->model, s->weights, false, &options, &s->learner));
    log_info("%" PRId64 " parameters on %s", s->weights->n_parameters, device_name(s->dev));
    notice_router(s->model);
    memory_say(s->learner, "of its own, beside what follows", c->freeze);
    CHECK(learner_prepare(s->learner));
out:
    return st;
}

struct cross_entropy {
    const struct example *const *examples; // of the step
    long n_tokens;                         // that are learnt
    double loss;
};

static void cross_entropy(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct cross_entropy *ce = context;
    const struct micro_batch *mb = rows->mb;
    for (int seq = 0; seq < mb->n_seqs; seq++) {
        const uint8_t *learnt = ce->examples[mb->sample[seq]]->learnt;
        for (int i = mb->first[seq]; i < mb->first[seq + 1]; i++) {
            ret_dlogprobs[i] = 0;
            if (learnt && !learnt[i - mb->first[seq]]) continue;
            ce->loss -= rows->logprobs[i] / (double)ce->n_tokens;
            ret_dlogprobs[i] = (float)(-1.0 / (double)ce->n_tokens);
        }
    }
}

// ret_skipped: the gradient was not finite, nothing was changed.
static enum status sft_step(struct sft *s, int64_t step, double *ret_loss, long *ret_tokens,
                            bool *ret_skipped)
{
    enum status st;
    int n = (int)s->config->examples_per_step;
    struct cross_entropy ce = {.examples = s->examples};
    double norm;
    for (int i = 0; i < n; i++) {
        const struct example *e = &s->data->examples[data_order_at(&s->order, step * n + i)];
        s->examples[i] = e;
        s->completions[i] = (struct pack_completion){e->completion_ids.ids, e->completion_ids.n};
        s->groups[i] =
            (struct pack_group){e->prompt_ids.ids, e->prompt_ids.n, &s->completions[i], 1};
        for (int t = 0; t < e->completion_ids.n; t++) ce.n_tokens += !e->learnt || e->learnt[t];
    }
    CHECK(learner_gradients(s->learner, s->groups, n, cross_entropy, &ce));
    st = learner_clip(s->learner, &norm);
    *ret_skipped = st == ST_INVALID;
    if (*ret_skipped) return ST_OK;
    if (st != ST_OK) goto out;
    CHECK(learner_apply(s->learner, schedule_at(&s->schedule, step)));
    CHECK(device_sync(s->dev));
    *ret_loss = ce.loss;
    *ret_tokens = ce.n_tokens;
out:
    return st;
}

static enum status train_steps_all(struct sft *s)
{
    int64_t total = s->schedule.total_steps, start = clock_now_ns();
    int skipped = 0;
    double recent = 0; // loss, over the last logging_steps
    long tokens = 0;
    int64_t n_recent = 0, step = 0;
    char left[DURATION_ROOM];
    for (; step < total && !stop_requested(); step++) {
        double loss;
        long step_tokens;
        bool skip;
        enum status st = sft_step(s, step, &loss, &step_tokens, &skip);
        if (st != ST_OK) return st;
        if (step == 0) memory_say_taken(s->learner);
        if (skip) {
            log_warn("step %" PRId64 ": %s", step + 1, status_message());
            if (++skipped == MAX_SKIPPED)
                return status_fail(ST_INVALID,
                                   "the gradient was not finite in %d steps in a row; "
                                   "lower --learning-rate",
                                   MAX_SKIPPED);
            continue;
        }
        skipped = 0;
        recent += loss;
        n_recent++;
        tokens += step_tokens;
        if ((step + 1) % s->config->logging_steps == 0 || step + 1 == total) {
            double seconds = clock_ms_since(start) / 1e3;
            double left_s = seconds / (double)(step + 1) * (double)(total - step - 1);
            log_progress("step %" PRId64 "/%" PRId64 "  loss %.4f  %.0f tokens/s  %s left",
                         step + 1, total, recent / (double)n_recent, (double)tokens / seconds,
                         duration_text(left_s, left));
            recent = 0;
            n_recent = 0;
        }
    }
    log_progress_end();
    if (step < total) log_warn("stopped at step %" PRId64 " of %" PRId64, step, total);
    return ST_OK;
}

static enum status run_sft(struct sft *s)
{
    enum status st;
    const struct sft_config *c = s->config;
    CHECK(open_model(s));
    CHECK(open_data(s));
    CHECK(open_learner(s));
    CHECK(train_steps_all(s));
    enum dtype as = c->dtype ? (enum dtype)(c->dtype - 1) : s->weights->dt;
    CHECK(model_folder_write(c->out, s->dev, s->weights, as, tokenizer_folder(c), NULL, NULL));
    log_info("wrote %s", c->out);
out:
    return st;
}

static void sft_release(struct sft *s)
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

int sft_main(int argc, char **argv)
{
    struct sft_config config = {0};
    struct sft sft = {.config = &config};
    struct option_set *set = NULL;
    log_open("cw-trainer", LOG_INFO);
    enum option_result parsed = options_parse(
        sft_options, "cw-trainer sft",
        "--model DIR | --init CONFIG.json --tokenizer DIR  --data FILE.jsonl --out DIR\n\n"
        "Trains a model folder on prompts and completions, without a daemon.",
        argc, argv, 0, &config, NULL, &set);
    if (parsed == OPTIONS_DONE) return 0;
    int exit_status = 0;
    if (parsed == OPTIONS_BAD || check_config(&config) != ST_OK) {
        log_error("%s", status_message());
        exit_status = 2;
    } else {
        stop_catch_signals();
        if (run_sft(&sft) != ST_OK) {
            log_error("%s", status_message());
            exit_status = 1;
        }
        sft_release(&sft);
    }
    options_free(set);
    return exit_status;
}
