/* foreign_names.c: names of other programs' options, for the tables of cw-trainer's commands: who
 * comes from TRL or verl and types one is told what stands here for it. docs/use/names.md is
 * written of them. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/options_shared.h"

const char *const common_foreign_names[] = {
    "gradient-accumulation-steps ppo-micro-batch-size-per-gpu ppo-micro-batch-size "
    "log-prob-micro-batch-size log-prob-micro-batch-size-per-gpu: --token-budget cuts a step into "
    "micro-batches by itself",
    "dataset-name dataset-config train-files: --data takes a JSONL file",
    "gradient-checkpointing gradient-checkpointing-kwargs activation-checkpointing "
    "enable-gradient-checkpointing: --recompute layer",
    "max-length filter-overlong-prompts: --max-prompt-length leaves longer prompts out",
    "save-strategy save-freq: --save-steps and --save-minutes",
    "deepspeed fsdp fsdp-size n-gpus-per-node: --gpus trains on each GPU",
    "resume-from-checkpoint resume-mode resume-from-path: --resume, with --run-dir",
    "optim: --optim-moments says how AdamW's moments are kept",
    "use-peft lora-rank: --lora-r above 0",
    "lora-target-modules target-modules: --lora-target",
    "warmup-ratio: --warmup-steps below 1 is a share of the run's steps",
    "lr-scheduler-kwargs: --min-lr-ratio, --num-decay-steps and --decay-type",
    "min-lr-rate: --min-lr-ratio",
    "total-epochs num-epochs epochs: --num-train-epochs",
    NULL,
};

const char *const train_foreign_names[] = {
    "per-device-train-batch-size generation-batch-size: --prompts-per-step prompts times "
    "--num-generations samples are a step",
    "multi-objective-aggregation: --reward-normalise terms is normalise_then_sum",
    "reward-funcs reward-manager: --reward names the scorers: accuracy_reward is math",
    "model-name-or-path: --bridge finds the server of the model, or --gpus with --model starts one",
    "output-dir default-local-dir run-name logging-dir project-name experiment-name: --run-dir",
    "use-vllm vllm-mode: --bridge finds the server, which samples by the weights that are trained",
    "vllm-importance-sampling-correction: --importance-sampling-correction",
    "vllm-importance-sampling-mode: --importance-sampling-mode",
    "vllm-importance-sampling-cap vllm-importance-sampling-clip-max rollout-is-threshold: "
    "--importance-sampling-clip-max",
    "vllm-importance-sampling-clip-min: --importance-sampling-clip-min",
    "train-batch-size gen-batch-size batch-size examples-per-step: --prompts-per-step",
    "ppo-mini-batch-size: --steps-per-generation is train_batch_size / ppo_mini_batch_size",
    "ppo-max-token-len-per-gpu log-prob-max-token-len-per-gpu use-dynamic-bsz "
    "log-prob-use-dynamic-bsz use-remove-padding: --token-budget packs micro-batches always",
    "ppo-epochs: --num-iterations",
    "n: --num-generations",
    "max-response-length response-length: --max-completion-length",
    "val-files: --eval-data takes a JSONL file",
    "clip-ratio clip-ratio-low epsilon-low: --epsilon",
    "clip-ratio-high: --epsilon-high",
    "clip-ratio-c: --delta, which is 0, off, by default",
    "kl-loss-coef use-kl-loss: --beta, which is 0, off, by default",
    "kl-loss-type: --kl-estimator",
    "kl-coef use-kl-in-reward: --kl-reward-coef, which is 0, off, by default",
    "entropy-coeff: --entropy-coef",
    "adv-estimator: --advantage-estimator",
    "norm-adv-by-std-in-grpo: --scale-rewards group or none",
    "loss-agg-mode: --loss-type: dapo is token-mean, grpo seq-mean-token-mean, dr_grpo "
    "seq-mean-token-sum-norm",
    "loss-mode: --loss-type sapo, gmpo or cispo; gspo is --importance-sampling-level sequence",
    "tau-pos tau-neg: --sapo-temperature-pos, --sapo-temperature-neg",
    "lr: --learning-rate",
    "lr-warmup-steps lr-warmup-steps-ratio: --warmup-steps, below 1 a share of the run's steps",
    "grad-clip clip-grad: --max-grad-norm",
    "total-training-steps: --max-steps",
    "test-freq: --eval-steps",
    "max-num-gen-batches: --filter-groups takes how often flat groups are drawn anew",
    "overlong-buffer-cfg: --reward overlong with --overlong-buffer",
    "per-device-eval-batch-size val-batch-size: the server batches evaluations by itself; "
    "--num-generations-eval is how many samples a prompt gets, --eval-limit how many prompts there "
    "are",
    "generation-kwargs: --temperature, --top-p, --top-k and --min-p",
    "repetition-penalty: --reward repetition lowers the reward instead",
    "shuffle-dataset shuffle data-seed: --seed shuffles the data",
    "log-unique-prompts num-completions-to-print rollout-data-dir: --log-completions writes them "
    "all",
    "report-to logger: --run-dir has metrics.jsonl and TensorBoard's file (docs/use/tracking.md)",
    "logging-strategy: --logging-steps",
    "eval-on-start val-before-train: --eval-data is looked at before the first step",
    "vllm-server-host vllm-server-port vllm-server-base-url: --bridge finds the server; "
    "--server-url is of one that is started anew",
    "vllm-gpu-memory-utilization gpu-memory-utilization: cw-infer-server --kv-memory, in percent",
    "vllm-max-model-length max-model-len: cw-infer-server --max-context",
    "vllm-tensor-parallel-size tensor-model-parallel-size: --tensor-parallel-size",
    "expert-model-parallel-size expert-parallel-size expert-parallel enable-expert-parallel: "
    "cw-infer-server --expert-parallel, which --server-args hands to a server that is started",
    "vllm-enable-sleep-mode free-cache-engine: nothing: server and trainer share the weights",
    "bf16 fp16 torch-dtype dtype: cw-infer-server --dtype is the model's dtype: bf16 or f32",
    "full-determinism: --exact, and cw-infer-server --exact",
    "cast-lm-head-to-fp32 use-liger-kernel: nothing: logits are f32, --logits-chunk rows at a time",
    "attn-implementation: nothing: there is one",
    "disable-dropout: nothing: only --lora-dropout drops anything",
    "remove-unused-columns: nothing: a line's other fields go to the reward",
    "dataloader-num-workers: nothing: the data is read once",
    "push-to-hub: nothing: checkpoints in --run-dir are folders that any loader opens",
    "train-max-samples val-max-samples: --max-samples, --eval-limit",
    "prompt-key: --prompt-field",
    "kl-penalty: --kl-reward-coef takes k1, which is verl's kl",
    "rollout-is: --importance-sampling-correction with --importance-sampling-mode token_truncate "
    "or sequence_truncate",
    "rollout-rs: --importance-sampling-mode token_mask or sequence_mask",
    "rollout-rs-threshold: --importance-sampling-clip-max and --importance-sampling-clip-min",
    "logprobs-mode: --processed-logprobs, which is on",
    "loss-scale-factor: --loss-type dr_grpo divides by --max-completion-length",
    "gamma lam: nothing: --advantage-estimator has none with a critic",
    "metric: --filter-groups goes by the reward",
    "betas: --adam-beta1 and --adam-beta2",
    "warmup-style: --lr-scheduler-type",
    "param-offload optimizer-offload: nothing: --optim-moments makes the moments small",
    "max-num-seqs max-num-batched-tokens: cw-infer-server --max-batch, cw-infer-server "
    "--prefill-chunk",
    "enable-prefix-caching: cw-infer-server --prefix-cache",
    "enforce-eager torch-compile: nothing: decode steps are captured as they come",
    "do-sample: --eval-temperature above 0",
    "max-assistant-turns max-user-turns: --rollouts names an environment, which counts its turns",
    "tool-config-path: --rollouts names an environment, which has the tools",
    "max-actor-ckpt-to-keep: --save-total-limit",
    "val-only: cw-trainer eval with --data and --reward",
    "log-val-generations: cw-trainer eval --output; --log-completions writes those of training",
    "balance-batch: nothing: ranks take groups in turn",
    NULL,
};

const char *const dataset_foreign_names[] = {
    "per-device-train-batch-size batch-size: --examples-per-step is all of a step",
    "per-device-eval-batch-size: --examples-per-step goes through at a time",
    "model-name-or-path start-from: --model takes a folder",
    "output-dir: --run-dir for metrics and checkpoints, --out for the model alone",
    "overwrite-output-dir: --overwrite",
    "eval-strategy: --eval-data is evaluated every --eval-steps",
    "prompts-per-step: --examples-per-step",
    "metric-for-best-model: --load-best-model-at-end goes by the held-out loss",
    NULL,
};

const char *const sft_foreign_names[] = {
    "assistant-only-loss: --train-on all",
    "completion-only-loss: --train-on says which turns are learnt; prompts never are",
    "packing: --token-budget packs sequences whole; nothing is padded",
    "dataset-text-field: --prompt-field and --answer-field name the two parts of a line",
    NULL,
};

const char *const dpo_foreign_names[] = {
    "precompute-ref-log-probs: --model's log-probabilities are computed once, before all steps",
    "precompute-ref-batch-size: --examples-per-step goes through at a time",
    "ref-model-name-or-path ref-model: --model is the reference too",
    "loss-weights rpo-alpha: --sft-weight is that of the loss sft beside --loss-type",
    NULL,
};
