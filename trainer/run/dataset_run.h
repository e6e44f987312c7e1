/* dataset_run.h: training on completions that are there already, without a server: `cw-trainer sft`
 * learns them, `cw-trainer dpo` prefers one of two. It is a run like any other (run.h) on weights
 * that this process owns, whose steps take their samples from a data set. One thread, the main one.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_DATASET_RUN_H
#define TRAINER_DATASET_RUN_H

#include "trainer/run/run.h"

struct samples;
struct dataset_examples {
    // (task->sides): the same lines with a completion each, and the same prompts
    struct dataset *sides[TASK_SIDES];
    int n;             // examples
    double *reference; // (n, sides) log-probability of each completion by the start; of pairs
};

struct recent { // since the last progress line, and in all
    double loss;
    int64_t steps, targets, start_ns, first_step;
};
struct dataset_run {
    struct dataset_examples data, eval; // eval.n 0: none
    int64_t longest, widest; // tokens of a prompt with a completion; with all of an example's
    struct recent recent;
};

extern const struct task_kind dataset_kind;

// dataset_open.c: takes up everything that the steps need. ST_INVALID names the option.
enum status dataset_check(struct run *run, struct option_set *set, struct train_config *config);
enum status dataset_open(struct run *run);
void dataset_close(struct run *run); // takes half-opened runs too
// dataset_run.c: n examples of `data`: those of items, or, NULL, the first ones. ret: begun; it
// borrows them.
enum status dataset_samples(const struct run *run, const struct dataset_examples *data,
                            const int *items, int n, struct samples **ret);

// Rows that both commands have, of a struct train_config.
#define DATASET_OPTIONS(data_help)                                                                 \
    OPT_TEXT("tokenizer", tokenizer, NULL, "DIR", "folder with the tokenizer (default: --model)"), \
        OPT_TEXT("data", data, NULL, "FILE", data_help, IS_COMMON), MAX_SAMPLES_OPTION,            \
        OPT_TEXT("out", out, NULL, "DIR",                                                          \
                 "model folder to write at the end, or with --lora-r the adapter's", IS_COMMON),   \
        RUN_DIR_OPTIONS("runs/DATE-TIME, or none where --out is given"),                           \
        OPT_FLAG("overwrite", overwrite, NULL,                                                     \
                 "replace --out where it is there, and without --resume the run in --run-dir"),    \
        OPT_CHOICE("dtype", dtype, "auto", dtype_option_names,                                     \
                   "of the folder --out; auto: as trained", WITHIN("out")),                        \
        OPT_TEXT("device", device, "auto", "auto|cpu|cuda:N", "where it is trained", IS_COMMON,    \
                 EXCLUDES_WHEN("!=auto", "gpus|several ranks",                                     \
                               "each rank is trained on its own GPU (--gpus), or on the CPU")),    \
        OPT_INT("rope-context", rope_context, "0", "TOKENS", 0, 1 << 24,                           \
                "of models with longrope: context by which its factors are chosen, as a server "   \
                "does by --max-context; 0: the longest example"),                                  \
        OPT_CONFIG, PROMPT_OPTIONS

#define DATASET_RUN_OPTIONS(rate)                                                                  \
    OPT_HEADING("Optimizer (AdamW)"),                                                              \
        OPT_INT("examples-per-step", curriculum.prompts_per_step, "8", "N", 1, 1e6,                \
                "examples in one step", IS_COMMON),                                                \
        EXPERTS_OPTION, ADAMW_OPTIONS(rate), LENGTH_OPTIONS("steps", "random weights"),            \
        OPT_HEADING("LoRA adapter"),                                                               \
        LORA_OPTIONS("train an adapter of this rank beside the frozen model; 0: the model "        \
                     "itself"),                                                                    \
        OPT_HEADING("Run"), SAVING_OPTIONS,                                                        \
        EVAL_OPTIONS("write the weights of the best evaluation to --out"), LOG_LEVEL_OPTION,       \
        OPT_HEADING("Several GPUs or hosts (docs/use/launch.md)"),                                 \
        RANK_OPTIONS("this host's GPUs, a rank each"),                                             \
        OPT_DERIVED("several ranks", several_ranks), OPT_HEADING("Machine"), MEMORY_OPTIONS

#endif
