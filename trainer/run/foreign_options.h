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
        OPT_FOREIGN("reward-funcs", "--reward names the scorers: accuracy_reward is math"),        \
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
        OPT_FOREIGN("overlong-buffer-cfg", "--reward overlong with --overlong-buffer"),            \
        OPT_FOREIGN("per-device-eval-batch-size",                                                  \
                    "the server batches evaluations by itself; --num-generations-eval is how "     \
                    "many samples a prompt gets"),                                                 \
        OPT_FOREIGN("generation-kwargs", "--temperature, --top-p, --top-k and --min-p"),           \
        OPT_FOREIGN("repetition-penalty", "--reward repetition lowers the reward instead; "        \
                                          "samples come from the model as it is"),                 \
        OPT_FOREIGN("shuffle-dataset", "--seed shuffles the data"),                                \
        OPT_FOREIGN("data-seed", "--seed"),                                                        \
        OPT_FOREIGN("log-unique-prompts", "--log-completions writes every sample"),                \
        OPT_FOREIGN("num-completions-to-print", "--log-completions writes every sample"),          \
        OPT_FOREIGN("report-to",                                                                   \
                    "--run-dir has metrics.jsonl and TensorBoard's file (docs/tracking.md)"),      \
        OPT_FOREIGN("run-name", "--run-dir"), OPT_FOREIGN("logging-dir", "--run-dir"),             \
        OPT_FOREIGN("logging-strategy", "--logging-steps"),                                        \
        OPT_FOREIGN("save-strategy", "--save-steps"),                                              \
        OPT_FOREIGN("eval-on-start", "--eval-data is looked at before the first step"),            \
        OPT_FOREIGN(                                                                               \
            "metric-for-best-model",                                                               \
            "--load-best-model-at-end goes by the accuracy, or the reward where there is none"),   \
        OPT_FOREIGN("gradient-checkpointing-kwargs", "--recompute layer"),                         \
        OPT_FOREIGN("activation-checkpointing", "--recompute layer"),                              \
        OPT_FOREIGN("deepspeed", "--gpus starts a server and a trainer on each GPU"),              \
        OPT_FOREIGN("fsdp", "--gpus starts a server and a trainer on each GPU"),                   \
        OPT_FOREIGN("vllm-mode",                                                                   \
                    "--bridge finds the server, which samples by the weights that are trained"),   \
        OPT_FOREIGN("vllm-server-host", "--bridge finds the server"),                              \
        OPT_FOREIGN("vllm-server-port", "--bridge finds the server"),                              \
        OPT_FOREIGN("vllm-server-base-url",                                                        \
                    "--bridge finds the server; --server-url is of one that is started anew"),     \
        OPT_FOREIGN("vllm-gpu-memory-utilization",                                                 \
                    "cw-infer-server --kv-memory, a size or a percentage"),                        \
        OPT_FOREIGN("vllm-max-model-length", "cw-infer-server --max-context"),                     \
        OPT_FOREIGN("vllm-tensor-parallel-size",                                                   \
                    "--tensor-parallel-size, with --gpus or --ranks"),                             \
        OPT_FOREIGN("vllm-enable-sleep-mode",                                                      \
                    "nothing: server and trainer have one copy of the weights"),                   \
        OPT_FOREIGN("bf16", "cw-infer-server --dtype is the model's dtype"),                       \
        OPT_FOREIGN("fp16", "cw-infer-server --dtype is the model's dtype: bf16 or f32"),          \
        OPT_FOREIGN("torch-dtype", "cw-infer-server --dtype"),                                     \
        OPT_FOREIGN("dtype", "cw-infer-server --dtype"),                                           \
        OPT_FOREIGN("dataset-config", "--data takes a JSONL file"),                                \
        OPT_FOREIGN("full-determinism", "--exact, and cw-infer-server --exact"),                   \
        OPT_FOREIGN("cast-lm-head-to-fp32", "nothing: logits are f32"),                            \
        OPT_FOREIGN("use-liger-kernel",                                                            \
                    "nothing: the logits exist --logits-chunk rows at a time"),                    \
        OPT_FOREIGN("torch-compile", "nothing: there is nothing to compile"),                      \
        OPT_FOREIGN("attn-implementation", "nothing: there is one"),                               \
        OPT_FOREIGN("disable-dropout", "nothing: only --lora-dropout drops anything"),             \
        OPT_FOREIGN("remove-unused-columns", "nothing: a line's other fields go to the reward"),   \
        OPT_FOREIGN("dataloader-num-workers", "nothing: the data is read once"),                   \
        OPT_FOREIGN("push-to-hub",                                                                 \
                    "nothing: checkpoints in --run-dir are folders that any loader opens"),        \
        OPT_FOREIGN("ppo-micro-batch-size",                                                        \
                    "--token-budget cuts a step into micro-batches by itself"),                    \
        OPT_FOREIGN("log-prob-micro-batch-size",                                                   \
                    "--token-budget cuts a step into micro-batches by itself"),                    \
        OPT_FOREIGN("log-prob-micro-batch-size-per-gpu",                                           \
                    "--token-budget cuts a step into micro-batches by itself"),                    \
        OPT_FOREIGN("log-prob-max-token-len-per-gpu", "--token-budget"),                           \
        OPT_FOREIGN("use-dynamic-bsz", "--token-budget packs micro-batches always"),               \
        OPT_FOREIGN("log-prob-use-dynamic-bsz", "--token-budget packs micro-batches always"),      \
        OPT_FOREIGN("use-remove-padding", "nothing: nothing is padded"),                           \
        OPT_FOREIGN("gen-batch-size", "--prompts-per-step"),                                       \
        OPT_FOREIGN(                                                                               \
            "val-batch-size",                                                                      \
            "the server batches evaluations by itself; --eval-limit takes the first prompts"),     \
        OPT_FOREIGN("response-length", "--max-completion-length"),                                 \
        OPT_FOREIGN("train-max-samples", "--max-samples"),                                         \
        OPT_FOREIGN("val-max-samples", "--eval-limit"),                                            \
        OPT_FOREIGN("prompt-key", "--prompt-field"),                                               \
        OPT_FOREIGN("filter-overlong-prompts", "--max-prompt-length leaves longer prompts out"),   \
        OPT_FOREIGN("shuffle", "--seed shuffles the data"),                                        \
        OPT_FOREIGN("use-kl-loss", "--beta above 0"),                                              \
        OPT_FOREIGN("kl-penalty", "--kl-reward-coef takes k1, which is verl's kl"),                \
        OPT_FOREIGN("rollout-is",                                                                  \
                    "--importance-sampling-correction with --importance-sampling-mode "            \
                    "token_truncate or sequence_truncate"),                                        \
        OPT_FOREIGN("rollout-is-threshold", "--importance-sampling-clip-max"),                     \
        OPT_FOREIGN("rollout-rs", "--importance-sampling-mode token_mask or sequence_mask"),       \
        OPT_FOREIGN("rollout-rs-threshold",                                                        \
                    "--importance-sampling-clip-max and --importance-sampling-clip-min"),          \
        OPT_FOREIGN("logprobs-mode", "--processed-logprobs, which is on"),                         \
        OPT_FOREIGN("loss-scale-factor",                                                           \
                    "--loss-type dr_grpo divides by --max-completion-length"),                     \
        OPT_FOREIGN("gamma", "nothing: --advantage-estimator has none with a critic"),             \
        OPT_FOREIGN("lam", "nothing: --advantage-estimator has none with a critic"),               \
        OPT_FOREIGN("metric", "--filter-groups goes by the reward"),                               \
        OPT_FOREIGN("betas", "--adam-beta1 and --adam-beta2"),                                     \
        OPT_FOREIGN("clip-grad", "--max-grad-norm"),                                               \
        OPT_FOREIGN("warmup-style", "--lr-scheduler-type"),                                        \
        OPT_FOREIGN("enable-gradient-checkpointing", "--recompute layer"),                         \
        OPT_FOREIGN("param-offload", "nothing: --optim-moments makes the moments small"),          \
        OPT_FOREIGN("optimizer-offload", "nothing: --optim-moments makes the moments small"),      \
        OPT_FOREIGN("fsdp-size", "--gpus starts a server and a trainer on each GPU"),              \
        OPT_FOREIGN("n-gpus-per-node", "--gpus starts a server and a trainer on each GPU"),        \
        OPT_FOREIGN("tensor-model-parallel-size",                                                  \
                    "--tensor-parallel-size, with --gpus or --ranks"),                             \
        OPT_FOREIGN("gpu-memory-utilization",                                                      \
                    "cw-infer-server --kv-memory, a size or a percentage"),                        \
        OPT_FOREIGN("max-model-len", "cw-infer-server --max-context"),                             \
        OPT_FOREIGN("max-num-seqs", "cw-infer-server --max-batch"),                                \
        OPT_FOREIGN("max-num-batched-tokens", "cw-infer-server --prefill-chunk"),                  \
        OPT_FOREIGN("enable-prefix-caching", "cw-infer-server --prefix-cache"),                    \
        OPT_FOREIGN("enforce-eager", "nothing: decode steps are captured as they come"),           \
        OPT_FOREIGN("free-cache-engine",                                                           \
                    "nothing: server and trainer have one copy of the weights"),                   \
        OPT_FOREIGN("do-sample", "--eval-temperature above 0"),                                    \
        OPT_FOREIGN("lora-rank", "--lora-r"), OPT_FOREIGN("target-modules", "--lora-target"),      \
        OPT_FOREIGN("max-assistant-turns",                                                         \
                    "--rollouts names an environment, which counts its turns"),                    \
        OPT_FOREIGN("max-user-turns", "--rollouts names an environment, which counts its turns"),  \
        OPT_FOREIGN("tool-config-path", "--rollouts names an environment, which has the tools"),   \
        OPT_FOREIGN("reward-manager", "--reward names the scorers"),                               \
        OPT_FOREIGN("logger",                                                                      \
                    "--run-dir has metrics.jsonl and TensorBoard's file (docs/tracking.md)"),      \
        OPT_FOREIGN("project-name", "--run-dir"), OPT_FOREIGN("experiment-name", "--run-dir"),     \
        OPT_FOREIGN("resume-mode", "--resume, with --run-dir"),                                    \
        OPT_FOREIGN("resume-from-path", "--resume, with --run-dir"),                               \
        OPT_FOREIGN("max-actor-ckpt-to-keep", "--save-total-limit"),                               \
        OPT_FOREIGN("val-before-train", "--eval-data is looked at before the first step"),         \
        OPT_FOREIGN("val-only", "cw-trainer eval with --data and --reward"),                       \
        OPT_FOREIGN("rollout-data-dir", "--log-completions"),                                      \
        OPT_FOREIGN("log-val-generations",                                                         \
                    "cw-trainer eval --output; --log-completions writes those of training"),       \
        OPT_FOREIGN("balance-batch", "nothing: ranks take groups in turn")

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
