/* sft.c: `cw-trainer sft`: learns completions by cross-entropy. The main thread.
 *
 * The same learner as GRPO's, on weights of its own instead of a daemon's: an example is a group of
 * one completion, and the loss is the mean over the step's completion tokens of -log p. Examples of
 * similar length need not meet, since nothing is padded.
 */
#include "trainer/run/options_shared.h"
#include "trainer/sft.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "trainer/run/checkpoint.h"
#include "trainer/learn/memory.h"
#include "trainer/rollout/prompts.h"
#include "trainer/run/runlog.h"
#include "trainer/learn/schedule.h"
#include "trainer/run/notices.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SKIPPED 3

struct sft_config {
    const char *model, *init, *tokenizer, *data, *out, *config, *device, *dtype;
    const char *lr_scheduler_type;
    struct prompt_options prompts;
    int64_t examples_per_step, warmup_steps, max_steps, seed, logging_steps;
    int64_t token_budget, head_rows;
    const char *recompute, *optim_moments;
    double learning_rate, adam_beta1, adam_beta2, adam_epsilon, weight_decay, max_grad_norm;
    double num_train_epochs;
};

#define AT(field) offsetof(struct sft_config, field)

static const struct option_spec sft_options[] = {
    HEADING("What is trained, on what"),
    {"model", OPTION_STRING, AT(model), NULL, "DIR", "model folder to start from", 0, 0, NULL},
    {"init", OPTION_STRING, AT(init), NULL, "FILE",
     "or: a config.json, for a new model with random weights", 0, 0, NULL},
    {"tokenizer", OPTION_STRING, AT(tokenizer), NULL, "DIR",
     "folder with the tokenizer (default: --model)", 0, 0, NULL},
    {"data", OPTION_STRING, AT(data), NULL, "FILE", "prompts and completions, JSONL", 0, 0, NULL},
    MAX_SAMPLES_OPTION,
    {"out", OPTION_STRING, AT(out), NULL, "DIR", "model folder to write", 0, 0, NULL},
    {"dtype", OPTION_STRING, AT(dtype), "auto", "DTYPE", "of the folder written; auto: as trained",
     0, 0, "auto|f32|bf16"},
    {"device", OPTION_STRING, AT(device), "auto", "DEVICE", "auto, cpu, cuda:N", 0, 0, NULL},
    {"config", OPTION_STRING, AT(config), NULL, "FILE", "these options as JSON, with _ for -", 0, 0,
     NULL},
    PROMPT_OPTIONS,

    HEADING("Optimizer (AdamW)"),
    {"examples-per-step", OPTION_INT, AT(examples_per_step), "8", "N", "examples in one step", 1,
     1e6, NULL},
    ADAMW_OPTIONS("2e-5"),
    {"max-steps", OPTION_INT, AT(max_steps), "-1", "N", "steps; -1: by epochs", -1, 1e9, NULL},
    {"num-train-epochs", OPTION_DOUBLE, AT(num_train_epochs), "3", "N", "times through the data", 0,
     1e6, NULL},
    {"seed", OPTION_INT, AT(seed), "42", "N", "of the data order and of random weights", 0, 1e15,
     NULL},

    HEADING("Machine"),
    {"logging-steps", OPTION_INT, AT(logging_steps), "10", "N", "steps between progress lines", 1,
     1e9, NULL},
    {"token-budget", OPTION_INT, AT(token_budget), "8192", "ROWS",
     "of one micro-batch: bounds the memory of activations", 2, 1e8, NULL},
    {"head-rows", OPTION_INT, AT(head_rows), "512", "ROWS",
     "whose vocabulary-wide logits exist at one time", 1, 1e6, NULL},
    MEMORY_OPTIONS,
    {NULL, OPTION_FLAG, 0, NULL, NULL, NULL, 0, 0, NULL},
};

struct sft {
    const struct sft_config *config;
    struct device *dev;
    struct model_config *model;
    struct weights *weights;
    void *memory;
    struct dataset *data;
    struct data_order order;
    struct schedule schedule;
    struct learner *learner;
    struct pack_group *groups; // (examples_per_step)
    struct pack_completion *completions;
};

static enum status check_config(const struct sft_config *c)
{
    if (!c->model == !c->init)
        return status_fail(ST_INVALID, "one of --model DIR and --init CONFIG.json is needed");
    if (!c->data) return status_fail(ST_INVALID, "--data is missing: a JSONL file of examples");
    if (!c->out) return status_fail(ST_INVALID, "--out is missing: the model folder to write");
    if (!c->model && !c->tokenizer)
        return status_fail(ST_INVALID, "--init needs --tokenizer, a folder with tokenizer.json");
    return prompts_check(&c->prompts);
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

static enum status open_data(struct sft *s)
{
    enum status st;
    const struct sft_config *c = s->config;
    int left_out;
    struct prompt_options options = c->prompts;
    options.completions = true;
    options.end_id = s->model->n_eos ? s->model->eos_ids[0] : -1;
    CHECK(prompts_load(c->data, c->tokenizer ? c->tokenizer : c->model, s->model->vocab_size,
                       &options, &s->data, &left_out));
    if (left_out)
        log_warn("%s: %d prompts are longer than --max-prompt-length and left out", c->data,
                 left_out);
    if (s->data->max_prompt + s->data->max_completion > s->model->max_positions) {
        st = status_fail(ST_INVALID,
                         "%s: a prompt of %d tokens and a completion of %d are over the model's "
                         "context of %d",
                         c->data, s->data->max_prompt, s->data->max_completion,
                         s->model->max_positions);
        goto out;
    }
    CHECK(data_order_init(&s->order, (uint64_t)c->seed, s->data->n));
    CHECK(schedule_type_from_name(c->lr_scheduler_type, &s->schedule.type));
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
    int64_t longest = s->data->max_prompt + s->data->max_completion;
    int64_t most = c->examples_per_step * longest;
    size_t n = (size_t)c->examples_per_step;
    struct learner_config options = {
        .optimizer =
            {
                .beta1 = c->adam_beta1,
                .beta2 = c->adam_beta2,
                .eps = c->adam_epsilon,
                .weight_decay = c->weight_decay,
                .max_grad_norm = c->max_grad_norm,
            },
        .temperature = 1,
        .token_budget = (int)(most < c->token_budget ? most : c->token_budget),
        .head_rows = (int)c->head_rows,
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
    if (!s->groups || !s->completions)
        return status_fail(ST_NO_MEMORY, "no memory for %zu examples", n);
    CHECK(recompute_from_name(c->recompute, &options.recompute));
    CHECK(moments_kind_from_name(c->optim_moments, &options.optimizer.moments));
    CHECK(learner_new(s->dev, s->model, s->weights, NULL, &options, &s->learner));
    log_info("%" PRId64 " parameters on %s", s->weights->n_parameters, device_name(s->dev));
    notice_router(s->model);
    memory_say(s->learner, "of its own, beside what follows");
    CHECK(learner_prepare(s->learner));
out:
    return st;
}

struct cross_entropy {
    long n_tokens; // of the step
    double loss;
};

static void cross_entropy(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct cross_entropy *ce = context;
    int n = rows->mb->first[rows->mb->n_seqs];
    for (int i = 0; i < n; i++) {
        ce->loss -= rows->logprobs[i] / (double)ce->n_tokens;
        ret_dlogprobs[i] = (float)(-1.0 / (double)ce->n_tokens);
    }
}

// ret_skipped: the gradient was not finite, nothing was changed.
static enum status sft_step(struct sft *s, int64_t step, double *ret_loss, long *ret_tokens,
                            bool *ret_skipped)
{
    enum status st;
    int n = (int)s->config->examples_per_step;
    struct cross_entropy ce = {0};
    double norm;
    for (int i = 0; i < n; i++) {
        const struct example *e = &s->data->examples[data_order_at(&s->order, step * n + i)];
        s->completions[i] = (struct pack_completion){e->completion_ids.ids, e->completion_ids.n};
        s->groups[i] =
            (struct pack_group){e->prompt_ids.ids, e->prompt_ids.n, &s->completions[i], 1};
        ce.n_tokens += e->completion_ids.n;
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
    enum dtype as =
        strcmp(c->dtype, "auto") == 0 ? s->weights->dt : (enum dtype)dtype_from_name(c->dtype);
    CHECK(model_folder_write(c->out, s->dev, s->weights, as, c->tokenizer ? c->tokenizer : c->model,
                             NULL, NULL));
    log_info("wrote %s", c->out);
out:
    return st;
}

static void sft_release(struct sft *s)
{
    learner_free(s->learner);
    free(s->groups);
    free(s->completions);
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
