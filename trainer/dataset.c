/* dataset.c: `cw-trainer sft`, which learns completions by cross-entropy, and `cw-trainer dpo`,
 * which learns which of two is preferred (learn/losses.c). The main thread.
 *
 * The same learner as GRPO's, on weights of its own instead of a server's. An example of sft is a
 * group of one completion, and the loss the mean over the step's completion tokens of -log p;
 * examples of similar length need not meet, since nothing is padded. A pair is a group of two
 * completions behind one prompt; the loss is the mean over the step's pairs. The log-probabilities
 * by the reference, --model as it is, are computed once, before the first step, so that no second
 * model is held. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands.h"
#include "common/model/model.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/options_shared.h"

#define OPTIONS_OF struct train_config

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
        OPT_CHOICE("quantization", quantization, "none", quantization_names,                       \
                   "of what is multiplied, as a server with it does (docs/use/fp8.md); what is "   \
                   "written is the model's"),                                                      \
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

const struct option_spec sft_options[] = {
    OPT_HEADING("What is trained, on what"),
    OPT_TEXT("model", model, NULL, "DIR", "model folder to start from", IS_COMMON),
    OPT_TEXT("init", init, NULL, "FILE", "or: a config.json, for a new model with random weights",
             IS_COMMON, EXCLUDES("model", "both say what is trained"),
             NEEDS("tokenizer", "a folder with tokenizer.json"),
             EXCLUDES("lora-r", "an adapter of random weights is of no use")),
    OPT_CHOICE("train-on", all_turns, "last", OPTION_WORDS("last", "all"),
               "which turns of the assistant are learnt of a conversation"),
    DATASET_OPTIONS("prompts and completions, JSONL"),
    ANSWER_FIELD_OPTION,
    DATASET_RUN_OPTIONS("2e-5"),
    OPT_FOREIGN(sft_foreign_names),
    OPT_FOREIGN(dataset_foreign_names),
    OPT_FOREIGN(common_foreign_names),
    OPT_END,
};

int sft_main(int argc, char **argv)
{
    static const struct task task = {
        .command = "sft",
        .options = sft_options,
        .kind = &dataset_kind,
        .sides = 1,
        .loss = LOSS_CROSS_ENTROPY,
    };
    return run_main(&task,
                    "--model DIR | --init CONFIG.json --tokenizer DIR  --data FILE.jsonl "
                    "--out DIR | --run-dir DIR\n\n"
                    "Trains a model folder, or a LoRA adapter of it, on prompts and "
                    "completions, without a server.",
                    argc, argv);
}

const struct option_spec dpo_options[] = {
    OPT_HEADING("What is trained, on what"),
    OPT_TEXT("model", model, NULL, "DIR", "model folder to start from, and the reference (needed)",
             IS_COMMON),
    DATASET_OPTIONS("pairs, JSONL: prompt, chosen and rejected"),
    OPT_HEADING("Loss"),
    OPT_CHOICE("loss-type", preference, "sigmoid", preference_names, "sigmoid: DPO", IS_COMMON),
    OPT_DOUBLE("beta", loss.beta, "0.1", "B", 0, 1e6,
               "how closely the policy is held to the reference; more: closer", IS_COMMON),
    OPT_DOUBLE("label-smoothing", loss.label_smoothing, "0", "E", 0, 0.499,
               "of robust and exo_pair: share of pairs taken to be the wrong way round",
               WITHIN("loss-type=robust,exo_pair")),
    OPT_DOUBLE("discopop-tau", loss.discopop_tau, "0.05", "T", 1e-6, 1e6,
               "of discopop: how far from the reference the one loss gives way to the other",
               WITHIN("loss-type=discopop")),
    OPT_DOUBLE("sft-weight", loss.sft_weight, "0", "W", 0, 1e6,
               "of the chosen completions' cross-entropy beside it, which keeps them likely"),
    DATASET_RUN_OPTIONS("1e-6"),
    OPT_FOREIGN(dpo_foreign_names),
    OPT_FOREIGN(dataset_foreign_names),
    OPT_FOREIGN(common_foreign_names),
    OPT_END,
};

int dpo_main(int argc, char **argv)
{
    static const struct task task = {
        .command = "dpo",
        .options = dpo_options,
        .kind = &dataset_kind,
        .sides = 2,
        .side_fields = {"chosen", "rejected"},
        .loss = LOSS_SIGMOID,
    };
    return run_main(&task,
                    "--model DIR --data FILE.jsonl --out DIR | --run-dir DIR\n\n"
                    "Trains a model folder, or a LoRA adapter of it, on pairs of which one "
                    "completion is preferred (DPO), without a server.",
                    argc, argv);
}
