/* config.c: the options table of `cw-trainer train`, and what its options mean together, beyond the
 * rules of the table: those that are words or fractions resolved, and the learner's settings that
 * follow. Read once at start; the main thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/config.h"
#include "trainer/curriculum/curriculum.h"
#include "common/model/model.h"
#include "trainer/rollout/source.h"
#include "trainer/run/options_shared.h"
#include "common/model/adapter.h"
#include "trainer/learn/learner.h"

#include <inttypes.h>
#include <string.h>

#define OPTIONS_OF struct train_config
#define MAX_AHEAD  64
#define TAKE_BETA  "take --beta, which puts the KL divergence into the loss"

const char *const sync_way_names[] = {"shared", "checkpoint", NULL};

const struct option_spec train_options[] = {
    OPT_HEADING("What is trained, on what"),
    OPT_TEXT("bridge", bridge, NULL, "PATH",
             "the server's bridge file (default: searched); of several ranks with {rank} in it",
             IS_COMMON),
    OPT_TEXT("data", data, NULL, "FILE", "training prompts, JSONL", IS_COMMON),
    MAX_SAMPLES_OPTION,
    OPT_TEXT("atropos", atropos, NULL, "http://HOST:PORT",
             "Atropos' API server: in place of --data, groups that its environments have sampled "
             "and scored (docs/use/atropos.md)",
             EXCLUDES("data|curriculum", "prompts are the environments'"),
             EXCLUDES("async|rollout-ahead", "environments run ahead by themselves"),
             EXCLUDES("cost", "nobody tells what a sequence cost"),
             EXCLUDES("tandem", "environments ask for one model's tokens"),
             EXCLUDES("exact", "nobody tells which weights sampled a token"),
             EXCLUDES("eval-strategy", "there are no epochs; take steps"),
             EXCLUDES("advantage-estimator", "groups are of any size there, which only grpo's are"),
             NEEDS("max-steps>-1", "there are no epochs")),
    RUN_DIR_OPTIONS("runs/DATE-TIME"),
    OPT_TEXT("start-from", start_from, "loaded", "loaded|current|DIR",
             "weights that a new run starts from: those of the folder the server loaded, as they "
             "are now, or those of a model folder; also the reference of --beta. With --lora-r: a "
             "new adapter of that folder, the adapter as it is now, or a PEFT folder's"),
    OPT_CONFIG,
    PROMPT_OPTIONS,
    ANSWER_FIELD_OPTION,

    OPT_HEADING("How the sampler comes by new weights (docs/use/sync.md)"),
    OPT_CHOICE(
        "sync", sync, "shared", sync_way_names,
        "shared: --bridge's server holds the one copy, and each update is written there in place; "
        "checkpoint: this program holds them, and writes them out for a server that it restarts",
        EXCLUDES("bridge|exact|tensor-parallel-size>1",
                 "it wants the server that shares its weights (--sync shared)"),
        NEEDS("model", "the folder to train")),
    OPT_TEXT("model", model, NULL, "DIR", "the model that is trained, where no server of it runs",
             NEEDS("sync=checkpoint|servers that are started (--gpus, --ranks)",
                   "else what is trained is the model that a server serves (--bridge)"),
             EXCLUDES("bridge", "it is of a server that is started, --bridge names one that runs")),
    OPT_TEXT("draft", draft, NULL, "DIR",
             "a smaller model of the same tokenizer, with which the server that is started drafts "
             "(--speculative draft_model:5, unless --server-args say otherwise)",
             NEEDS("sync=checkpoint", "else it is the server's of --bridge")),
    OPT_TEXT("device", device, "auto", "auto|cpu|cuda:N",
             "with --sync checkpoint: where it is trained",
             EXCLUDES_WHEN("!=auto", "gpus|several ranks",
                           "each rank is trained on its own GPU (--gpus), or on the CPU")),
    OPT_CHOICE("quantization", quantization, "none", quantization_names,
               "of what is multiplied, by this program and the server that it starts "
               "(cw-infer-server's; docs/use/fp8.md)",
               NEEDS_WHEN("!=none", "sync=checkpoint",
                          "else --bridge's server says (with --gpus or --ranks: --server-args)")),
    OPT_INT(
        "restart-interval", restart_interval, "1", "STEPS", 1, MAX_AHEAD,
        "steps between checkpoints for the server; samples are up to so many steps less one old",
        NEEDS_WHEN(">1", "sync=checkpoint", NULL)),
    OPT_TEXT("server-command", server_command, NULL, "COMMAND",
             "that serves the folder {model} on {port} of 127.0.0.1, asked for POST "
             "/v1/completions (default: this build's cw-infer-server)",
             NEEDS("sync=checkpoint", NULL),
             EXCLUDES("lora-r|train-draft|tandem|draft|server-args",
                      "it is asked for what every server has, and this is our server's")),
    OPT_INT("server-port", server_port, "0", "PORT", 0, 65535, "that port; 0: a free one",
            NEEDS("sync=checkpoint", NULL)),
    OPT_TEXT("server-url", server_url, NULL, "http://HOST:PORT",
             "a cw-infer-server that is not started here, but told to load the checkpoint (POST "
             "/reload) out of RUN/workers",
             NEEDS("sync=checkpoint", NULL),
             EXCLUDES("server-command|server-port|server-args",
                      "a server elsewhere is not started here"),
             EXCLUDES("several ranks", "each of them samples by a server of its own")),
    OPT_DOUBLE("server-timeout", server_timeout, "600", "SECONDS", 0.1, 1e6,
               "longest wait for the server to start"),

    OPT_HEADING("Reward"),
    REWARD_OPTIONS,
    OPT_CHOICE("reward-normalise", normalise_terms, "none", OPTION_WORDS("none", "terms"),
               "terms: z-score each term per group, weigh, sum, normalise over the batch "
               "(--scale-rewards then has no effect)",
               EXCLUDES("advantage-estimator", "it has an estimate of its own")),

    OPT_HEADING("Cost of inference in the reward"),
    OPT_FLAG(
        "cost", cost, NULL,
        "reward = task - latency - tokens - KV memory + acceptance + cache reuse, as weighted "
        "below",
        EXCLUDES("exact&cost-latency",
                 "latency is a clock reading, modelled too; give --cost-latency 0"),
        EXCLUDES("exact&cost-kv", "blocks held depend on what else is served; give --cost-kv 0"),
        EXCLUDES("exact&gain-acceptance", "what is drafted depends on what else is served, and was "
                                          "before; give --gain-acceptance 0"),
        EXCLUDES("exact&gain-cache",
                 "the prefix cache depends on what was served before; give --gain-cache 0")),
    OPT_DOUBLE("cost-latency", cost_weights[COST_LATENCY], "0.001", "A", 0, 1e9,
               "taken off for each ms", WITHIN("cost")),
    OPT_DOUBLE("cost-tokens", cost_weights[COST_TOKENS], "0.001", "B", 0, 1e9,
               "taken off for each generated token", WITHIN("cost")),
    OPT_DOUBLE("cost-kv", cost_weights[COST_KV], "0.01", "C", 0, 1e9,
               "taken off for each MB (2^20 bytes) of KV cache at its peak", WITHIN("cost")),
    OPT_DOUBLE("gain-acceptance", cost_weights[COST_ACCEPTANCE], "1", "D", 0, 1e9,
               "added for all draft tokens accepted; a share counts in proportion", WITHIN("cost")),
    OPT_DOUBLE("gain-cache", cost_weights[COST_CACHE], "0.5", "E", 0, 1e9,
               "added for a prompt wholly from the prefix cache", WITHIN("cost")),
    OPT_CHOICE("latency", latency_modelled, "measured", OPTION_WORDS("measured", "modelled"),
               "modelled: from the sample's own tokens, by a fit to all latencies of this run",
               WITHIN("cost")),

    OPT_HEADING("Rollouts"),
    OPT_INT("prompts-per-step", curriculum.prompts_per_step, "8", "N", 1, 1e6, "groups in one step",
            IS_COMMON),
    OPT_INT("num-generations", curriculum.num_generations, "8", "N", 1, 4096,
            "samples of each prompt, without a curriculum", IS_COMMON, WITHIN("curriculum=off")),
    OPT_INT("filter-groups", filter_groups, "0", "N", 0, 1000,
            "dynamic sampling (DAPO): groups whose rewards are all equal are dropped and other "
            "prompts drawn for them, at most N times a step; 0: off",
            EXCLUDES("atropos", "prompts are the environments'"),
            EXCLUDES("curriculum", "it has each prompt once an epoch"),
            EXCLUDES("cost", "with costs no two rewards are equal"),
            EXCLUDES("reward-normalise", "terms may differ where their sums are equal")),
    OPT_TEXT(
        "rollouts", rollouts, NULL, "command:PROGRAM ARGS",
        "environments: child processes that make a trajectory of a line of --data and of what they "
        "have the policy sample, turn by turn, and give its reward (docs/use/environments.md)",
        EXCLUDES("atropos", "both say where samples come from"),
        EXCLUDES("server-command",
                 "environments ask for POST /v1/rollouts, which only our server has")),
    OPT_INT("rollout-processes", rollout_processes, "1", "N", 1, ENVIRONMENT_MAX_PROCESSES,
            "such processes", WITHIN("rollouts")),
    OPT_DOUBLE("rollout-process-timeout", rollout_process_timeout, "300", "SECONDS", 0.01, 1e6,
               "longest wait for what one of them does next about a sample", WITHIN("rollouts")),
    OPT_FLAG("async", async, NULL,
             "sample the next steps while learning from one, by weights of up to --max-staleness "
             "updates before",
             EXCLUDES("rollout-ahead",
                      "that is --async --max-staleness with the updates of so many steps")),
    OPT_INT(
        "max-staleness", max_staleness, "1", "UPDATES", 0, MAX_AHEAD,
        "a sample that would be learned from later than this is generated again; 0: the plain loop",
        WITHIN("async")),
    OPT_INT("rollout-ahead", rollout_ahead, "0", "STEPS", 0, MAX_AHEAD,
            "the same counted in steps: --async --max-staleness STEPS x --num-iterations"),
    OPT_DOUBLE(
        "rollout-budget", rollout_budget, "1", "SHARE", 1e-6, 1,
        "a step closes once this share of the groups whose turn it is are whole: the others go on "
        "into the next steps, at most half of what --max-staleness allows, and whole groups of the "
        "steps behind take their places; 1: steps are learned from as they were ordered",
        NEEDS_WHEN("<1", "async|rollout-ahead", "the places are those of steps sampled ahead"),
        EXCLUDES_WHEN("<1", "curriculum", "a step there is of one bucket's prompts")),
    OPT_TEXT("workers", workers, NULL, "BRIDGE_OR_URL,...",
             "further servers of the same model that sample too; before each step they load the "
             "weights from RUN/workers"),
    OPT_TEXT("workers-api-key-file", workers_api_key_file, NULL, "FILE",
             "their key, for those named by http://HOST:PORT, and that of --server-url"),
    OPT_INT("max-completion-length", sampling.max_tokens, "512", "TOKENS", 1, 1e7, "of one sample",
            IS_COMMON),
    OPT_DOUBLE("temperature", sampling.temperature, "1", "T", 1e-3, 100,
               "of sampling and of the loss"),
    OPT_DOUBLE("top-p", sampling.top_p, "1", "P", 1e-6, 1, "nucleus sampling; 1: off"),
    OPT_INT("top-k", sampling.top_k, "0", "K", 0, 1e9, "sample among the K likeliest; 0: off"),
    OPT_DOUBLE("min-p", sampling.min_p, "0", "P", 0, 1, "least share of the likeliest; 0: off"),
    OPT_TEXT("stop", sampling.stop, NULL, "TEXT", "text that ends a sample"),
    OPT_FLAG("ignore-eos", sampling.ignore_eos, NULL, "sample on past the end token"),

    OPT_HEADING("Tandem"),
    OPT_FLAG("tandem", sampling.tandem.on, NULL,
             "the server's frozen model (cw-infer-server --tandem-model) writes each sample "
             "together with the policy"),
    OPT_CHOICE("tandem-selector", sampling.tandem.selector, "bernoulli", tandem_selector_names,
               "what an author is drawn for: each token, --tandem-chunk tokens, a sentence, a "
               "word; alternating: nothing is drawn, the policy's tokens are spread evenly",
               WITHIN("tandem")),
    OPT_DOUBLE("tandem-p", sampling.tandem.p, "0.5", "P", 0, 1,
               "probability that the policy writes", WITHIN("tandem")),
    OPT_INT("tandem-chunk", sampling.tandem.chunk, "16", "TOKENS", 1, 1e6,
            "of --tandem-selector chunk", WITHIN("tandem-selector=chunk")),
    OPT_FLAG("tandem-shared", sampling.tandem.shared, "true",
             "all samples of a step have the same authors at the same places, which costs less; "
             "else each draws its own",
             WITHIN("tandem")),
    OPT_DOUBLE("tandem-frozen-weight", loss.frozen_weight, "0.2", "W", 0, 1e6,
               "of the frozen model's tokens in the loss, the policy's have 1", WITHIN("tandem")),

    OPT_HEADING("Curriculum"),
    OPT_CHOICE("curriculum", curriculum.mode, "off", curriculum_mode_names,
               "kde: more samples of prompts whose rewards are low, by valleys in their density; "
               "uniform: its control, as many samples spread evenly"),
    OPT_INT("n-buckets", curriculum.n_buckets, "3", "N", 1, BUCKETS_MAX,
            "into which prompts are sorted, at most", WITHIN("curriculum")),
    OPT_INT("min-bucket-size", curriculum.min_bucket_size, "0", "N", 0, 1e9,
            "prompts; a smaller bucket goes to a neighbour; 0: as --prompts-per-step",
            WITHIN("curriculum")),
    OPT_INT("rollout-base", curriculum.base, "4", "N", 2, 4096,
            "samples of a prompt of the highest rewards; in place of --num-generations",
            WITHIN("curriculum")),
    OPT_DOUBLE("rollout-alpha", curriculum.alpha, "1.5", "A", 0, 1000,
               "the lowest get 1 + A times as many", WITHIN("curriculum")),
    OPT_DOUBLE("curriculum-ema", curriculum.ema, "0.7", "W", 0, 0.999999,
               "weight of a prompt's average reward so far beside its new one",
               WITHIN("curriculum")),

    OPT_HEADING("Loss"),
    OPT_CHOICE("loss-type", loss.type, "dapo", loss_type_names,
               "how tokens are averaged, and their ratios bounded", IS_COMMON,
               NEEDS_WHEN("=luspo", "importance-sampling-level=sequence", NULL),
               EXCLUDES_WHEN("=gmpo", "importance-sampling-level=sequence",
                             "its ratio is a sequence's by itself")),
    OPT_CHOICE("importance-sampling-level", loss.sequence_level, "token",
               OPTION_WORDS("token", "sequence"), "sequence: GSPO"),
    OPT_DOUBLE("epsilon", loss.epsilon, "0.2", "E", 0, 1, "clip the ratio below 1 - E",
               WITHIN("loss-type!=sapo,cispo")),
    OPT_DOUBLE("epsilon-high", loss.epsilon_high, "-1", "E", -1, 1e9,
               "clip it above 1 + E; -1: as --epsilon. cispo: cap it at E itself; -1: 5. gmpo: "
               "clip its logarithm",
               WITHIN("loss-type!=sapo")),
    OPT_DOUBLE("delta", loss.delta, "0", "D", 0, 1e9,
               "dual clip: cap the ratio at D where the advantage is negative too; 0: off",
               WITHIN("loss-type!=sapo,cispo,gmpo")),
    OPT_DOUBLE("beta", loss.beta, "0", "B", 0, 1e6,
               "weight of the KL divergence from the weights the run started from (--start-from), "
               "of which it then keeps a copy in memory",
               IS_COMMON),
    OPT_DOUBLE(
        "kl-reward-coef", kl_reward_coef, "0", "B", 0, 1e6,
        "taken off a sample's reward for its KL divergence from these weights, summed over its "
        "tokens",
        EXCLUDES("rollouts", "environments may give rewards of turns; " TAKE_BETA),
        EXCLUDES("atropos", "environments there give advantages too; " TAKE_BETA),
        EXCLUDES("reward-normalise", "it has terms of its own; " TAKE_BETA)),
    OPT_FLAG("sync-ref-model", sync_ref_model, NULL,
             "move the weights that are the reference of both towards the policy's",
             NEEDS("beta|kl-reward-coef", "they have the reference"),
             EXCLUDES("lora-r", "the reference is the model itself, beside the adapter")),
    OPT_DOUBLE("ref-model-mixup-alpha", ref_model_mixup_alpha, "0.6", "A", 0, 1,
               "to A x the policy's + (1 - A) x their own", WITHIN("sync-ref-model")),
    OPT_INT("ref-model-sync-steps", ref_model_sync_steps, "512", "STEPS", 1, 1e9,
            "every so many steps", WITHIN("sync-ref-model")),
    OPT_CHOICE("kl-estimator", loss.kl_estimator, "k3", kl_estimator_names,
               "how that of --beta is estimated", WITHIN("beta")),
    OPT_FLAG("use-bias-correction-kl", loss.bias_correction_kl, "true",
             "multiply it by the ratio, for an unbiased gradient", WITHIN("beta")),
    OPT_CHOICE("advantage-estimator", advantage.estimator, "grpo", advantage_estimator_names,
               "how rewards become advantages (docs/use/recipes.md)"),
    OPT_CHOICE("scale-rewards", advantage.scale, "group", advantage_scale_names,
               "what advantages are divided by; of grpo and grpo_passk",
               WITHIN("advantage-estimator=grpo,grpo_passk"), WITHIN("reward-normalise=none")),
    OPT_INT("pass-k", pass_k, "1", "K", 1, 4096, "of --advantage-estimator pass_at_k",
            NEEDS_WHEN(">1", "advantage-estimator=pass_at_k", NULL)),
    OPT_INT("num-iterations", num_iterations, "1", "N", 1, 1000,
            "times through each rollout, with --steps-per-generation updates each time"),
    OPT_INT("steps-per-generation", steps_per_generation, "1", "N", 1, 4096,
            "parts of a rollout, whole groups, each with an update of its own",
            EXCLUDES_WHEN(">1", "train-draft", "the draft learns from all of a rollout at once")),
    OPT_CHOICE("count-steps", count_updates, "rollouts", OPTION_WORDS("rollouts", "updates"),
               "what --max-steps and the learning rate's schedule count; updates: as TRL"),
    OPT_FLAG("importance-sampling-correction", importance_sampling_correction, "true",
             "weigh the loss by the trainer's over the server's probabilities"),
    OPT_CHOICE("importance-sampling-mode", importance_sampling_mode, "sequence_mask",
               tis_mode_names + 1,
               "weights of tokens or whole sequences; beyond the bounds they are cut, or 0",
               NEEDS_WHEN("=token_truncate,sequence_truncate",
                          "importance-sampling-clip-max|importance-sampling-clip-min|importance-"
                          "sampling-correction=false",
                          "there is no bound to truncate at")),
    OPT_DOUBLE("importance-sampling-clip-max", loss.tis_max, "3", "C", 0, 1e9,
               "upper bound of these weights; 0: none"),
    OPT_DOUBLE("importance-sampling-clip-min", loss.tis_min, "0", "C", 0, 1e9,
               "lower bound of these weights; 0: none"),
    OPT_FLAG("processed-logprobs", processed_logprobs, "true",
             "with --top-p, --top-k or --min-p the server's probabilities in these weights are "
             "those of the filtered distribution, which was sampled from"),
    OPT_FLAG("constrained-loss", constrained_loss, NULL,
             "of samples whose line has a \"response_format\" the loss is of what that leaves of "
             "the distribution, which was sampled from",
             EXCLUDES("rollouts|atropos", "who samples there says what a turn may be"),
             EXCLUDES("top-k|top-p<1|min-p", "samples come from what that leaves besides"),
             EXCLUDES("server-command", "its servers do not tell what they sampled from")),
    OPT_DOUBLE("sapo-temperature-neg", loss.sapo_temperature_neg, "1.05", "T", 1e-3, 1e3,
               "sharpness of sapo's gate where the advantage is not above 0",
               WITHIN("loss-type=sapo")),
    OPT_DOUBLE("sapo-temperature-pos", loss.sapo_temperature_pos, "1", "T", 1e-3, 1e3,
               "and where it is", WITHIN("loss-type=sapo")),
    OPT_DOUBLE("off-policy-mask-threshold", loss.off_policy_threshold, "-1", "D", -1, 1e9,
               "samples of negative advantage do not count where the mean log-ratio of the "
               "sampler's to the policy's probabilities is above D, as TRL; -1: off"),
    OPT_FLAG("clamp-log-ratios", loss.clamp_log_ratios, NULL,
             "as verl: log-ratios of tokens to -20..20, of sequences to 10, k3 to 10"),
    OPT_DOUBLE("top-entropy-quantile", entropy.top_quantile, "1", "SHARE", 0, 1,
               "of a step's tokens, those of highest entropy, whose policy term counts; 1: all"),
    OPT_DOUBLE("entropy-coef", entropy.coef, "0", "C", -1e3, 1e3,
               "bonus in the loss for the mean entropy of a token"),
    OPT_FLAG("use-adaptive-entropy", entropy.adaptive, NULL,
             "that coefficient grows while the entropy is at most --entropy-target, else it falls "
             "and has no effect"),
    OPT_DOUBLE("entropy-coef-min", entropy.coef_min, "0", "C", -1e3, 1e3, "at least",
               WITHIN("use-adaptive-entropy")),
    OPT_DOUBLE("entropy-coef-max", entropy.coef_max, "1", "C", -1e3, 1e3, "at most",
               WITHIN("use-adaptive-entropy")),
    OPT_DOUBLE("entropy-coef-delta", entropy.coef_delta, "0.005", "C", 0, 1e3, "by each update",
               WITHIN("use-adaptive-entropy")),
    OPT_DOUBLE("entropy-target", entropy.target, "0.2", "NATS", 0, 1e3, "of a token",
               WITHIN("use-adaptive-entropy")),
    EXPERTS_OPTION,
    OPT_FLAG("mask-truncated-completions", mask_truncated_completions, NULL,
             "samples cut off at the token limit do not count"),

    OPT_HEADING("Optimizer (AdamW)"),
    ADAMW_OPTIONS("1e-6"),
    LENGTH_OPTIONS("steps of the run, each a rollout with its updates (--count-steps)", "sampling"),

    OPT_HEADING("LoRA adapter"),
    LORA_OPTIONS("train an adapter of this rank beside the frozen model (cw-infer-server "
                 "--max-adapters); 0: the model itself"),
    OPT_TEXT("lora-name", lora.name, "policy", "NAME",
             "by which the server knows it, and requests name it"),

    OPT_HEADING("Distillation"),
    OPT_TEXT(
        "teacher", teacher, NULL, "DIR|policy|base",
        "hold the policy to this model's distributions at each token that it samples; without "
        "--reward to nothing else. \"policy\" is itself, behind the data's \"teacher_prompt\"; "
        "\"base\" the model whose adapter --lora-r trains"),
    OPT_CHOICE("teacher-quantization", teacher_quantization, "none", quantization_names,
               "of what is multiplied of a teacher's folder, which is held so alone",
               WITHIN("teacher")),
    OPT_DOUBLE("distill-weight", loss.distill_weight, "1", "W", 0, 1e6,
               "of the mean divergence from the teacher, beside the reward's loss",
               WITHIN("teacher")),
    OPT_DOUBLE("distill-lambda", loss.distill_lambda, "1", "L", 0, 1,
               "the share of the policy's own samples in it (GKD's); the rest is the mean over the "
               "data's completions, of the same prompts",
               WITHIN("teacher"), EXCLUDES_WHEN("<1", "atropos", "prompts are the environments'")),
    OPT_DOUBLE("distill-beta", distill_beta, "1", "B", 0, 1,
               "the divergence: 0 forward KL, 1 reverse KL, between them the generalised "
               "Jensen-Shannon divergence",
               WITHIN("teacher")),

    OPT_HEADING("Draft model"),
    OPT_FLAG(
        "train-draft", train_draft, NULL,
        "train the server's draft model (cw-infer-server --draft), or its layer that predicts "
        "further tokens (--speculative mtp), to answer as the policy does, on the same rollouts",
        NEEDS("sync=shared|draft", "the server that is started drafts with it")),
    OPT_DOUBLE("draft-learning-rate", draft_learning_rate, "2e-5", "LR", 0, 10,
               "at its peak; schedule and AdamW as above"),
    OPT_DOUBLE("draft-loss-weight", draft_loss_weight, "1", "W", 0, 1e6,
               "of the mean KL divergence of the draft from the policy"),
    OPT_INT("draft-depths", draft_depths, "1", "N", 1, 16,
            "of --speculative mtp: further tokens that are trained, each behind the one before",
            WITHIN("train-draft")),
    OPT_DOUBLE("draft-max-grad-norm", draft_max_grad_norm, "-1", "N", -1, 1e9,
               "gradient clipping of the draft; 0: off; -1: as --max-grad-norm"),

    OPT_HEADING("Run"),
    SAVING_OPTIONS,
    OPT_TEXT(
        "also-count", also_count, NULL, "BRIDGE,...",
        "bridge files of further servers, whose speculative decoding is added to spec_decode/*"),
    OPT_FLAG("log-completions", log_completions, NULL,
             "write the sampled text of each step into rollouts/"),
    OPT_FLAG("log-logprobs", log_logprobs, NULL,
             "with it each token's log-probability by the server and by the trainer",
             WITHIN("log-completions")),
    EVAL_OPTIONS("serve the weights of the best evaluation once the run is over"),
    OPT_TEXT("metric-for-best-model", best_metric, NULL, "reward|accuracy|pass@K|maj@N",
             "of evaluations, the best is where it is highest (default: reward, which is what is "
             "optimised; a run that goes on keeps its own)",
             NEEDS("eval-data", "the held-out lines that it is of")),
    OPT_CHOICE("eval-strategy", eval_by_epoch, "steps", OPTION_WORDS("steps", "epoch"),
               "what evaluations go by"),
    OPT_INT("eval-epochs", eval_epochs, "1", "N", 1, 1e6,
            "epochs between them, with --eval-strategy epoch", WITHIN("eval-strategy=epoch")),
    OPT_INT("num-generations-eval", num_generations_eval, "1", "N", 1, 2048,
            "samples of each held-out prompt, for pass@k and maj@N", WITHIN("eval-data"),
            NEEDS_WHEN(">1", "eval-temperature",
                       "greedy samples of a prompt are all the same; give a temperature")),
    OPT_DOUBLE("eval-temperature", eval_temperature, "0", "T", 0, 100, "of these; 0: greedy",
               WITHIN("eval-data")),

    LOG_LEVEL_OPTION,

    OPT_HEADING("Several GPUs or hosts (docs/use/launch.md)"),
    LAUNCH_OPTIONS,

    OPT_HEADING("Machine"),
    OPT_FLAG("exact", exact, NULL,
             "no bit may depend on timing: wants cw-infer-server --exact, and ends where one of "
             "its log-probabilities differs from the trainer's",
             EXCLUDES("samples of older weights (--max-staleness, --rollout-ahead above 0)",
                      "which weights sample a token then depends on the clock"),
             EXCLUDES("workers", "which server samples a prompt depends on the clock")),
    MEMORY_OPTIONS,
    OPT_DOUBLE("quiesce-timeout", quiesce_timeout, "30", "SECONDS", 0.01, 1e6,
               "longest wait for the server's step boundary"),
    OPT_DOUBLE("rollout-timeout", rollout_timeout, "1800", "SECONDS", 0.1, 1e6,
               "longest wait for a step's rollouts"),
    OPT_DERIVED("several ranks", several_ranks),
    OPT_DERIVED("servers that are started (--gpus, --ranks)", serves),
    OPT_DERIVED("samples of older weights (--max-staleness, --rollout-ahead above 0)", stale),
    OPT_FOREIGN(train_foreign_names),
    OPT_FOREIGN(common_foreign_names),
    OPT_END,
};

// ---- what they mean together --------------------------------------------------------------------

static enum status check_url(const char *option, const char *url)
{
    if (!url || strncmp(url, "http://", strlen("http://")) == 0) return ST_OK;
    return status_fail(ST_INVALID, "--%s %s: take http://HOST:PORT", option, url);
}

// What single options may not be, whatever the others are.
static enum status check_values(const struct train_config *c)
{
    const char *lora = c->lora.name, *rollouts = c->rollouts;
    const size_t command = strlen(ROLLOUTS_COMMAND);
    enum status st = ST_OK;
    if (!c->data && !c->atropos && c->resume)
        FAIL(ST_INVALID, "--resume: %s holds no run to go on with; a new one needs --data",
             c->run_dir);
    if (!c->data && !c->atropos) FAIL(ST_INVALID, "--data is missing: a JSONL file of prompts");
    if (c->run_dir && !c->run_dir[0])
        FAIL(ST_INVALID, "--run-dir is empty; name a folder, or leave it out for runs/DATE-TIME");
    if (!c->start_from[0])
        FAIL(ST_INVALID, "--start-from is empty; take loaded, current or a model folder");
    if (c->curriculum.num_generations < 2 && !c->reward.none)
        FAIL(ST_INVALID, "--num-generations 1: an advantage is relative to its group, which needs "
                         "2 samples or more");
    if (c->lora.r && (!lora[0] || strlen(lora) > 50))
        FAIL(ST_INVALID, "--lora-name \"%s\": give 1 to 50 bytes", CUT(lora, 60));
    if (rollouts && strncmp(rollouts, ROLLOUTS_COMMAND, command) != 0)
        FAIL(ST_INVALID, "--rollouts %s: take command:PROGRAM ARGS", rollouts);
    if (rollouts && !rollouts[command + strspn(rollouts + command, " ")])
        FAIL(ST_INVALID, "--rollouts command: names no program");
    CHECK(check_url("atropos", c->atropos));
    CHECK(check_url("server-url", c->server_url));
    st = prompts_check(&c->prompts);
out:
    return st;
}

// Of numbers, what they may not be beside others.
static enum status check_numbers(const struct train_config *c, const struct train_resolved *r)
{
    const struct entropy_config *e = &c->entropy;
    const struct loss_config *loss = &c->loss;
    const bool even = c->curriculum.mode == CURRICULUM_OFF;
    const int64_t fewest = even ? c->curriculum.num_generations : c->curriculum.base;
    enum status st = ST_OK;
    if (c->steps_per_generation > c->curriculum.prompts_per_step && !c->atropos)
        FAIL(ST_INVALID,
             "--steps-per-generation %" PRId64 " with --prompts-per-step %" PRId64
             ": an update learns from whole groups; lower the one or raise the other",
             c->steps_per_generation, c->curriculum.prompts_per_step);
    if (c->count_updates && c->max_steps > 0 && c->max_steps % r->updates_per_step != 0)
        FAIL(ST_INVALID,
             "--max-steps %" PRId64 " with --count-steps updates is no multiple of the %" PRId64
             " updates of a rollout (--steps-per-generation times --num-iterations)",
             c->max_steps, r->updates_per_step);
    if (r->async && c->rollout_budget < 1 && r->steps_carried == 0)
        FAIL(ST_INVALID,
             "--rollout-budget %g: a group that goes on into the next step is then of weights two "
             "steps before; give --max-staleness %" PRId64
             " or more (--rollout-ahead 2), or leave it out",
             c->rollout_budget, 2 * r->updates_per_step);
    if (e->coef_min > e->coef_max)
        FAIL(ST_INVALID, "--entropy-coef-min %g is above --entropy-coef-max %g", e->coef_min,
             e->coef_max);
    if (e->adaptive && (e->coef < e->coef_min || e->coef > e->coef_max))
        FAIL(ST_INVALID,
             "--entropy-coef %g, where --use-adaptive-entropy begins, is not within "
             "--entropy-coef-min %g and --entropy-coef-max %g",
             e->coef, e->coef_min, e->coef_max);
    if (c->advantage.estimator == ADVANTAGE_PASS_AT_K && c->pass_k > fewest)
        FAIL(ST_INVALID,
             "--pass-k %" PRId64 " is above --%s %" PRId64 ", of which so many are sampled",
             c->pass_k, even ? "num-generations" : "rollout-base", fewest);
    if (loss->delta > 0 && loss->delta <= 1)
        FAIL(ST_INVALID,
             "--delta %g would cut the ratio of an unchanged policy, which is 1; take one above 1 "
             "+ --epsilon-high, or 0 for none",
             loss->delta);
    if (loss->tis_max > 0 && loss->tis_min >= loss->tis_max)
        FAIL(ST_INVALID,
             "--importance-sampling-clip-min %g is not below --importance-sampling-clip-max %g",
             loss->tis_min, loss->tis_max);
    st = schedule_check(&r->schedule);
out:
    return st;
}

enum status train_config_resolve(struct train_config *config, const struct option_set *set,
                                 struct train_resolved *ret)
{
    enum status st;
    const double cap = losses[config->loss.type].epsilon_high;
    struct train_resolved r = {
        .loss = config->loss,
        .schedule = config->learner.schedule,
        .draft_schedule = config->learner.schedule,
        .draft_max_grad_norm = config->draft_max_grad_norm < 0 ? config->learner.adamw.max_grad_norm
                                                               : config->draft_max_grad_norm,
        .updates_per_step = config->num_iterations * config->steps_per_generation,
        .schedule_per_step = 1,
        .has_reference = config->loss.beta > 0 || config->kl_reward_coef > 0,
    };
    config->curriculum.seed = (uint64_t)config->seed;
    if (config->count_updates) r.schedule_per_step = r.updates_per_step;
    r.draft_schedule.peak = config->draft_learning_rate;
    r.loss.max_completion_length = (int)config->sampling.max_tokens;
    r.loss.off_policy_mask = r.loss.off_policy_threshold >= 0;
    if (config->importance_sampling_correction)
        r.loss.tis = (enum tis_mode)(config->importance_sampling_mode + 1);
    if (r.loss.epsilon_high < 0) r.loss.epsilon_high = cap > 0 ? cap : r.loss.epsilon;
    // how far samples may be ahead
    const int64_t ahead = config->rollout_ahead;
    r.async = config->async || ahead > 0;
    if (r.async)
        r.max_staleness = config->async ? config->max_staleness : ahead * r.updates_per_step;
    r.steps_ahead = (int)(r.max_staleness / r.updates_per_step);
    if (r.async && config->rollout_budget < 1) {
        r.steps_carried = r.steps_ahead / 2;
        r.steps_ahead -= r.steps_carried;
    }
    if (config->sync == SYNC_CHECKPOINT) // beside it: of the copies
        r.max_staleness += (config->restart_interval - 1) * r.updates_per_step;
    config->stale = config->sync == SYNC_SHARED && r.max_staleness > 0;
    CHECK(options_check(set, config));
    CHECK(check_values(config));
    CHECK(check_numbers(config, &r));
    *ret = r;
out:
    return st;
}

enum status learner_config_of(const struct learner_options *options,
                              const struct learner_shape *shape, double temperature,
                              struct learner_config *ret)
{
    const int64_t budget = options->token_budget;
    if (shape->longest - 1 > budget)
        return status_fail(ST_INVALID,
                           "--token-budget %" PRId64
                           " is below the longest sequence, a prompt with "
                           "its completion (%" PRId64 " tokens); raise it to %" PRId64 " or more",
                           budget, shape->longest, shape->longest);
    *ret = (struct learner_config){
        .optimizer = options->adamw,
        .freeze = options->freeze,
        .temperature = (float)temperature,
        .router_aux_loss_coef = options->router_aux_loss_coef,
        .token_budget = (int)(shape->tokens < budget ? shape->tokens : budget),
        .logits_chunk = (int)options->logits_chunk,
        .max_seqs = (int)shape->seqs,
        .max_targets = shape->targets,
        .max_context = (int)shape->longest,
        .recompute = options->recompute,
        .gradient_dtype = options->gradient_dtype,
    };
    return ST_OK;
}

enum status lora_config_json(const struct lora_options *o, const char *model, json_t **ret)
{
    enum status st =
        adapter_config_json((int)o->r, o->alpha, o->dropout, o->rslora, o->targets, ret);
    if (st == ST_OK) json_object_set_new(*ret, "base_model_name_or_path", json_string(model));
    return st;
}
