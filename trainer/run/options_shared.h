/* options_shared.h: what several of cw-trainer's option tables have in common: the structs that
 * they fill, and the rows, each of which names fields of the struct that the table fills
 * (OPTIONS_OF, options.h). */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_OPTIONS_SHARED_H
#define TRAINER_OPTIONS_SHARED_H

#include "common/base/options.h"
#include "trainer/learn/optimizer.h"
#include "trainer/learn/schedule.h"

#include <jansson.h>

struct learner_config;
struct learner_options { // called `learner` where the rows below are used
    const char *freeze;
    struct optimizer_config adamw;
    struct schedule schedule; // total_steps: not an option
    int64_t token_budget, logits_chunk;
    int recompute;      // enum recompute
    int gradient_dtype; // enum gradient_dtype
    double router_aux_loss_coef;
};

struct lora_options {
    int64_t r; // 0: none, all of the model is trained
    double alpha, dropout;
    const char *targets;
    const char *name; // by which a server knows it
    bool rslora;
};
// PEFT's adapter_config.json of a new adapter of that base.
enum status lora_config_json(const struct lora_options *options, const char *model, json_t **ret);

struct saving_options {
    int64_t logging_steps, save_steps, save_total_limit;
    double save_minutes;
};
// Whether a run's step is one of every so many, or its last.
static inline bool step_due(int64_t step, int64_t every, int64_t total)
{
    return step == total || (every > 0 && step % every == 0);
}

struct learner_shape { // of a run's steps, at most
    int64_t longest;   // tokens of a prompt with its completion
    int64_t tokens;    // of a step's prompts and completions
    int64_t seqs;      // prompts and completions
    int64_t targets;   // of the completions; 0: as many as tokens
};
// The learner's settings. ST_INVALID where a sequence is longer than --token-budget.
enum status learner_config_of(const struct learner_options *options,
                              const struct learner_shape *shape, double temperature,
                              struct learner_config *ret);

// For OPT_FOREIGN (foreign_names.c): names of TRL's, verl's and others' options, and what stands
// here for them.
extern const char *const common_foreign_names[];  // of every command that trains
extern const char *const train_foreign_names[];   // of `train` alone
extern const char *const dataset_foreign_names[]; // of `sft` and `dpo`
extern const char *const sft_foreign_names[], *const dpo_foreign_names[];

// How lines of data become prompts: a struct prompt_options called `prompts`.
#define PROMPT_OPTIONS                                                                             \
    OPT_TEXT("prompt-field", prompts.prompt_field, NULL, "NAME",                                   \
             "field of a line that holds the prompt (default: prompt, messages or question)"),     \
        OPT_FLAG("chat", prompts.chat, NULL,                                                       \
                 "put text prompts into the model's chat template, as a user's message"),          \
        OPT_TEXT("chat-template", prompts.chat_template.name, NULL, "NAME",                        \
                 "which of the folder's named chat templates (default: default, tool_use)"),       \
        OPT_TEXT("chat-template-file", prompts.chat_template.file, NULL, "FILE",                   \
                 "Jinja chat template to use instead of the folder's"),                            \
        OPT_TEXT("system-prompt", prompts.system_prompt, NULL, "TEXT",                             \
                 "system message before prompts put into the chat template"),                      \
        OPT_TEXT("prompt-template", prompts.prompt_template, "auto", "TEXT",                       \
                 "put around text prompts, {prompt} in it; none: as they are; auto: questions "    \
                 "for the reward gsm8k go into the chat template, if the model has one, with a "   \
                 "request for the form of answer it reads"),                                       \
        OPT_INT("max-prompt-length", prompts.max_prompt_length, "0", "TOKENS", 0, 1e9,             \
                "leave out longer prompts; 0: none")

#define ANSWER_FIELD_OPTION                                                                        \
    OPT_TEXT("answer-field", prompts.answer_field, NULL, "NAME",                                   \
             "field that holds the answer (default: answer or completion)")

// For --data: a part of it.
#define MAX_SAMPLES_OPTION                                                                         \
    OPT_INT("max-samples", prompts.max_samples, "0", "N", 0, 1e15,                                 \
            "first N lines of --data; 0: all")

// What scores completions (reward.h).
#define REWARD_OPTIONS                                                                             \
    OPT_TEXT("reward", reward.names, "exact", "NAME,...", "terms of the score (listed above)",     \
             IS_COMMON),                                                                           \
        OPT_TEXT("reward-weights", reward.weights, NULL, "W,...", "their weights (default: 1)"),   \
        OPT_DOUBLE("length-target", reward.length_target, "20", "CHARS", 1, 1e9,                   \
                   "of the reward \"length\"", WITHIN("reward~length")),                           \
        OPT_INT("overlong-buffer", reward.overlong_buffer, "0", "TOKENS", 0, 1e9,                  \
                "of the reward \"overlong\": the last of --max-completion-length",                 \
                WITHIN("reward~overlong")),                                                        \
        OPT_INT("repetition-ngram", reward.repetition_ngram, "3", "TOKENS", 1, 1000,               \
                "of the reward \"repetition\"", WITHIN("reward~repetition")),                      \
        OPT_TEXT("reward-pattern", reward.pattern, NULL, "REGEX",                                  \
                 "of the reward \"regex\", for lines without a \"pattern\"",                       \
                 WITHIN("reward~regex")),                                                          \
        OPT_DOUBLE("reward-timeout", reward.timeout_s, "30", "SECONDS", 0.01, 1e6,                 \
                   "longest wait for the next reply of the reward \"command\"",                    \
                   WITHIN("reward~command:")),                                                     \
        OPT_FLAG(                                                                                  \
            "reward-groups", reward.whole_groups, NULL,                                            \
            "a reward \"command\" is given all of a prompt's samples one after another, with "     \
            "their \"group\" and \"group_size\", and may reply once it has them all",              \
            WITHIN("reward~command:")),                                                            \
        OPT_FLAG("reward-batches", reward.whole_batches, NULL,                                     \
                 "the same of all samples that are scored at once, a step's, with their "          \
                 "\"batch_size\"",                                                                 \
                 WITHIN("reward~command:")),                                                       \
        OPT_INT("reward-processes", reward.processes, "1", "N", 1, 256,                            \
                "processes of each reward \"command\", among which a step's samples are divided",  \
                WITHIN("reward~command:"))

#define LOG_LEVEL_OPTION                                                                           \
    OPT_CHOICE("log-level", log_level, "info", log_level_names, "what is logged")

// A part of the loss. A struct learner_options called `learner`.
#define EXPERTS_OPTION                                                                             \
    OPT_DOUBLE("router-aux-loss-coef", learner.router_aux_loss_coef, "-1", "C", -1, 1e6,           \
               "of the routers' load-balancing loss, of a mixture of experts; -1: what the "       \
               "model's config.json says, of families that train with one; 0: off")

// A struct learner_options called `learner`: what is trained, AdamW and its learning
// rate.
#define FREEZE_OPTION(...)                                                                         \
    OPT_TEXT("freeze", learner.freeze, NULL, "PATTERN,...",                                        \
             "tensors that are not trained: globs of their names, the last that matches decides; " \
             "!PATTERN excepts",                                                                   \
             __VA_ARGS__)
#define ADAMW_OPTIONS(rate)                                                                        \
    FREEZE_OPTION(EXCLUDES("lora-r", "an adapter is trained whole, and nothing of the model is; "  \
                                     "--lora-target says what it changes")),                       \
        OPT_DOUBLE("learning-rate", learner.schedule.peak, rate, "LR", 0, 10, "at its peak",       \
                   IS_COMMON),                                                                     \
        OPT_CHOICE("lr-scheduler-type", learner.schedule.type, "linear", schedule_type_names,      \
                   "after the warm-up"),                                                           \
        OPT_DOUBLE("warmup-steps", learner.schedule.warmup_steps, "0", "N", 0, 1e9,                \
                   "steps from 0 to the peak; below 1: that share of the run's steps"),            \
        OPT_DOUBLE("min-lr-ratio", learner.schedule.min_ratio, "0", "R", 0, 1,                     \
                   "share of the peak that cosine_with_min_lr and warmup_stable_decay end at"),    \
        OPT_DOUBLE("num-decay-steps", learner.schedule.decay_steps, "0", "N", 0, 1e9,              \
                   "last steps, in which warmup_stable_decay comes down; below 1: that share of "  \
                   "the run's"),                                                                   \
        OPT_CHOICE("decay-type", learner.schedule.decay, "cosine", decay_type_names,               \
                   "how it comes down"),                                                           \
        OPT_DOUBLE("adam-beta1", learner.adamw.beta1, "0.9", "B", 0, 0.999999,                     \
                   "decay of the first moment"),                                                   \
        OPT_DOUBLE("adam-beta2", learner.adamw.beta2, "0.999", "B", 0, 0.9999999,                  \
                   "decay of the second moment"),                                                  \
        OPT_DOUBLE("adam-epsilon", learner.adamw.eps, "1e-8", "E", 0, 1, "beside the root"),       \
        OPT_DOUBLE("weight-decay", learner.adamw.weight_decay, "0", "W", 0, 10,                    \
                   "decoupled; of every parameter"),                                               \
        OPT_FLAG("weight-decay-matrices", learner.adamw.decay_matrices, NULL,                      \
                 "of matrices alone, and not of norms and biases, as TRL"),                        \
        OPT_DOUBLE("max-grad-norm", learner.adamw.max_grad_norm, "1", "N", 0, 1e9,                 \
                   "gradient clipping; 0: off")

// A struct lora_options called `lora`. how: what --lora-r does.
#define LORA_OPTIONS(how)                                                                          \
    OPT_INT("lora-r", lora.r, "0", "R", 0, ADAPTER_MAX_RANK, how, IS_COMMON),                      \
        OPT_DOUBLE("lora-alpha", lora.alpha, "16", "A", 0, 1e6, "its scale is A / R",              \
                   WITHIN("lora-r")),                                                              \
        OPT_DOUBLE("lora-dropout", lora.dropout, "0", "P", 0, 0.99,                                \
                   "share of an adapted matrix' inputs that an update leaves out",                 \
                   WITHIN("lora-r")),                                                              \
        OPT_FLAG("use-rslora", lora.rslora, NULL, "its scale is A / sqrt(R)", WITHIN("lora-r")),   \
        OPT_TEXT("lora-target", lora.targets, "all-linear", "NAME,...|all-linear",                 \
                 "modules that it changes (q_proj,v_proj,lm_head)", WITHIN("lora-r"))

// Progress and checkpoints: a struct saving_options called `saving`.
#define SAVING_OPTIONS                                                                             \
    OPT_INT("logging-steps", saving.logging_steps, "10", "N", 1, 1e9,                              \
            "steps between plain progress lines (metrics.jsonl has every step)"),                  \
        OPT_INT("save-steps", saving.save_steps, "500", "N", 0, 1e9,                               \
                "steps between checkpoints; 0: at the end", WITHIN("run-dir|out=")),               \
        OPT_DOUBLE("save-minutes", saving.save_minutes, "10", "N", 0, 1e6,                         \
                   "minutes after which a step gets a checkpoint that the next one replaces; 0: "  \
                   "off",                                                                          \
                   WITHIN("run-dir|out=")),                                                        \
        OPT_INT("save-total-limit", saving.save_total_limit, "0", "N", 0, 1e9,                     \
                "checkpoints kept; 0: all", WITHIN("run-dir|out="))

// How long a run is. seeds: of what the seed is beside the data order.
#define LENGTH_OPTIONS(steps, seeds)                                                               \
    OPT_INT("max-steps", max_steps, "-1", "N", -1, 1e9, steps "; -1: by epochs", IS_COMMON),       \
        OPT_DOUBLE("num-train-epochs", num_train_epochs, "3", "N", 0, 1e6,                         \
                   "times through the data", IS_COMMON),                                           \
        OPT_INT("seed", seed, "42", "N", 0, 1e15, "of the data order and of " seeds)

// Its folder, and going on with it.
#define RUN_DIR_OPTIONS(default_text)                                                              \
    OPT_TEXT("run-dir", run_dir, NULL, "DIR",                                                      \
             "run folder, for metrics and checkpoints (default: " default_text ")", IS_COMMON),    \
        OPT_FLAG("resume", resume, NULL,                                                           \
                 "go on from the run folder's last checkpoint, if it has one, with the options "   \
                 "in its config.json where they are not given here",                               \
                 IS_COMMON, NEEDS("run-dir", "the folder of the run to go on with"))

// Evaluations on held-out data, and what they decide. best_help: of --load-best-model-at-end.
#define EVAL_OPTIONS(best_help)                                                                    \
    OPT_TEXT("eval-data", eval_data, NULL, "FILE", "held-out lines, JSONL", IS_COMMON),            \
        OPT_INT("eval-steps", eval_steps, "500", "N", 1, 1e9,                                      \
                "steps between evaluations; there is one before the first step and one at the "    \
                "end",                                                                             \
                WITHIN("eval-data")),                                                              \
        OPT_INT("eval-limit", eval_limit, "0", "N", 0, 1e9, "first N held-out lines; 0: all",      \
                WITHIN("eval-data")),                                                              \
        OPT_INT("early-stop-patience", early_stop_patience, "0", "N", 0, 1e9,                      \
                "end after N evaluations in a row without a better one than before them; 0: off",  \
                NEEDS("eval-data", "the held-out lines that say what is better")),                 \
        OPT_FLAG("load-best-model-at-end", load_best_model_at_end, NULL, best_help,                \
                 NEEDS("eval-data", "the held-out lines that say what is better"))

// Of the same: what memory training takes.
#define MEMORY_OPTIONS                                                                             \
    OPT_INT("token-budget", learner.token_budget, "8192", "ROWS", 2, 1e8,                          \
            "of one micro-batch: bounds the memory of activations"),                               \
        OPT_INT("logits-chunk", learner.logits_chunk, "0", "ROWS", 0, 1e6,                         \
                "whose vocabulary-wide gradient of logits exists at one time; 0: 512, on a GPU "   \
                "2048"),                                                                           \
        OPT_CHOICE(                                                                                \
            "recompute", learner.recompute, "none", recompute_names,                               \
            "layer: keep each layer's input and what its attention gives, and compute the rest "   \
            "again before its backward"),                                                          \
        OPT_CHOICE("gradient-dtype", learner.gradient_dtype, "auto", gradient_dtype_names,         \
                   "of what a layer's matrices take back, of a model with --quantization fp8; "    \
                   "gradients of weights stay as they are (docs/use/fp8.md)"),                     \
        OPT_CHOICE("optim-moments", learner.adamw.moments, "f32", moments_kind_names,              \
                   "of AdamW's moments: 8, 4 or 2.1 bytes a parameter")

#endif
