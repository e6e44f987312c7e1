/* foreign_options.h: names of other programs' options, for the rows of cw-trainer's commands: who
 * comes from TRL or verl and types one is told what stands here for it. docs/recipes.md has the
 * same as a table. */
#ifndef TRAINER_FOREIGN_OPTIONS_H
#define TRAINER_FOREIGN_OPTIONS_H

#include "common/base/options.h"

// Of every command that trains.
#define COMMON_FOREIGN_OPTIONS                                                                     \
    OPT_FOREIGN("gradient-accumulation-steps",                                                     \
                "--token-budget cuts a step into micro-batches by itself"),                        \
        OPT_FOREIGN("dataset-name", "--data takes a JSONL file"),                                  \
        OPT_FOREIGN("gradient-checkpointing", "--recompute layer"),                                \
        OPT_FOREIGN("optim", "--optim-moments says how AdamW's moments are kept"),                 \
        OPT_FOREIGN("use-peft", "--lora-r above 0"),                                               \
        OPT_FOREIGN("lora-target-modules", "--lora-target"),                                       \
        OPT_FOREIGN("warmup-ratio", "--warmup-steps below 1 is a share of the run's steps"),       \
        OPT_FOREIGN("lr-scheduler-kwargs", "--min-lr-ratio, --num-decay-steps and --decay-type"),  \
        OPT_FOREIGN("min-lr-rate", "--min-lr-ratio")

// Of `train`.
#define FOREIGN_OPTIONS                                                                            \
    COMMON_FOREIGN_OPTIONS,                                                                        \
        OPT_FOREIGN("per-device-train-batch-size",                                                 \
                    "--prompts-per-step prompts times --num-generations samples are a step"),      \
        OPT_FOREIGN("generation-batch-size",                                                       \
                    "--prompts-per-step prompts times --num-generations samples are a step"),      \
        OPT_FOREIGN("multi-objective-aggregation",                                                 \
                    "--reward-normalise terms is normalise_then_sum"),                             \
        OPT_FOREIGN("reward-funcs", "--reward names the scorers"),                                 \
        OPT_FOREIGN("model-name-or-path",                                                          \
                    "--bridge finds the server of the model, or --gpus with --model starts one"),  \
        OPT_FOREIGN("output-dir", "--run-dir"),                                                    \
        OPT_FOREIGN("resume-from-checkpoint", "--resume, with --run-dir"),                         \
        OPT_FOREIGN("use-vllm",                                                                    \
                    "--bridge finds the server, which samples by the weights that are trained"),   \
        OPT_FOREIGN("vllm-importance-sampling-correction", "--importance-sampling-correction"),    \
        OPT_FOREIGN("vllm-importance-sampling-mode", "--importance-sampling-mode"),                \
        OPT_FOREIGN("vllm-importance-sampling-cap", "--importance-sampling-clip-max"),             \
        OPT_FOREIGN("vllm-importance-sampling-clip-max", "--importance-sampling-clip-max"),        \
        OPT_FOREIGN("vllm-importance-sampling-clip-min", "--importance-sampling-clip-min"),        \
        OPT_FOREIGN("train-batch-size", "--prompts-per-step"),                                     \
        OPT_FOREIGN("ppo-mini-batch-size",                                                         \
                    "--steps-per-generation is train_batch_size / ppo_mini_batch_size"),           \
        OPT_FOREIGN("ppo-micro-batch-size-per-gpu",                                                \
                    "--token-budget cuts a step into micro-batches by itself"),                    \
        OPT_FOREIGN("ppo-max-token-len-per-gpu", "--token-budget"),                                \
        OPT_FOREIGN("ppo-epochs", "--num-iterations"), OPT_FOREIGN("n", "--num-generations"),      \
        OPT_FOREIGN("max-response-length", "--max-completion-length"),                             \
        OPT_FOREIGN("train-files", "--data takes a JSONL file"),                                   \
        OPT_FOREIGN("val-files", "--eval-data takes a JSONL file"),                                \
        OPT_FOREIGN("clip-ratio", "--epsilon"), OPT_FOREIGN("clip-ratio-low", "--epsilon"),        \
        OPT_FOREIGN("clip-ratio-high", "--epsilon-high"),                                          \
        OPT_FOREIGN("clip-ratio-c", "--delta, which is 0, off, by default"),                       \
        OPT_FOREIGN("kl-loss-coef", "--beta"), OPT_FOREIGN("kl-loss-type", "--kl-estimator"),      \
        OPT_FOREIGN("kl-coef", "--kl-reward-coef"),                                                \
        OPT_FOREIGN("use-kl-in-reward", "--kl-reward-coef above 0"),                               \
        OPT_FOREIGN("entropy-coeff", "--entropy-coef"),                                            \
        OPT_FOREIGN("adv-estimator", "--advantage-estimator"),                                     \
        OPT_FOREIGN("norm-adv-by-std-in-grpo", "--scale-rewards group or none"),                   \
        OPT_FOREIGN("loss-agg-mode", "--loss-type: dapo is token-mean, grpo seq-mean-token-mean, " \
                                     "dr_grpo seq-mean-token-sum-norm"),                           \
        OPT_FOREIGN(                                                                               \
            "loss-mode",                                                                           \
            "--loss-type sapo, gmpo or cispo; gspo is --importance-sampling-level sequence"),      \
        OPT_FOREIGN("tau-pos", "--sapo-temperature-pos"),                                          \
        OPT_FOREIGN("tau-neg", "--sapo-temperature-neg"), OPT_FOREIGN("lr", "--learning-rate"),    \
        OPT_FOREIGN("lr-warmup-steps", "--warmup-steps"),                                          \
        OPT_FOREIGN("lr-warmup-steps-ratio",                                                       \
                    "--warmup-steps below 1 is a share of the run's steps"),                       \
        OPT_FOREIGN("grad-clip", "--max-grad-norm"),                                               \
        OPT_FOREIGN("total-epochs", "--num-train-epochs"),                                         \
        OPT_FOREIGN("total-training-steps", "--max-steps"),                                        \
        OPT_FOREIGN("save-freq", "--save-steps"), OPT_FOREIGN("test-freq", "--eval-steps"),        \
        OPT_FOREIGN("default-local-dir", "--run-dir"),                                             \
        OPT_FOREIGN("max-num-gen-batches",                                                         \
                    "--filter-groups takes how often flat groups are drawn anew"),                 \
        OPT_FOREIGN("overlong-buffer-cfg", "--reward overlong with --overlong-buffer")

// Of `sft` and `dpo`, and of each alone.
#define OFFLINE_FOREIGN_OPTIONS                                                                    \
    COMMON_FOREIGN_OPTIONS,                                                                        \
        OPT_FOREIGN("per-device-train-batch-size", "--examples-per-step is all of a step"),        \
        OPT_FOREIGN("per-device-eval-batch-size",                                                  \
                    "--examples-per-step goes through at a time, which changes no figure"),        \
        OPT_FOREIGN("model-name-or-path", "--model takes a folder"),                               \
        OPT_FOREIGN("output-dir",                                                                  \
                    "--run-dir for metrics and checkpoints, --out for the model alone"),           \
        OPT_FOREIGN("overwrite-output-dir", "--overwrite"),                                        \
        OPT_FOREIGN("resume-from-checkpoint", "--resume, with --run-dir"),                         \
        OPT_FOREIGN("eval-strategy", "--eval-data is evaluated every --eval-steps"),               \
        OPT_FOREIGN("save-strategy", "--save-steps and --save-minutes"),                           \
        OPT_FOREIGN("max-length",                                                                  \
                    "--max-prompt-length leaves longer prompts out; nothing is truncated")

#define SFT_FOREIGN_OPTIONS                                                                        \
    OPT_FOREIGN("assistant-only-loss", "--train-on all"),                                          \
        OPT_FOREIGN("completion-only-loss",                                                        \
                    "--train-on says which turns are learnt; prompts never are"),                  \
        OPT_FOREIGN("packing", "--token-budget packs sequences whole; nothing is padded"),         \
        OPT_FOREIGN("dataset-text-field",                                                          \
                    "--prompt-field and --answer-field name the two parts of a line")

#define DPO_FOREIGN_OPTIONS                                                                        \
    OPT_FOREIGN("precompute-ref-log-probs",                                                        \
                "--model's log-probabilities are always computed once, before the first step"),    \
        OPT_FOREIGN("precompute-ref-batch-size", "--examples-per-step goes through at a time"),    \
        OPT_FOREIGN("ref-model-name-or-path", "--model is the reference too"),                     \
        OPT_FOREIGN("loss-weights", "--sft-weight is that of the loss sft beside --loss-type"),    \
        OPT_FOREIGN("rpo-alpha", "--sft-weight"),                                                  \
        OPT_FOREIGN("ref-model", "--model is the reference too")

#endif
