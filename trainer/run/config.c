/* config.c: the options table of `cw-trainer train`. Read once at start. */
#include "trainer/run/config.h"
#include "trainer/rollout/environment.h"
#include "trainer/run/foreign_options.h"
#include "trainer/run/options_shared.h"

#define OPTIONS_OF struct train_config
#define MAX_AHEAD  64

const char *const sync_way_names[] = {"shared", "checkpoint", NULL};

const struct option_spec train_options[] = {
    OPT_HEADING("What is trained, on what"),
    OPT_TEXT("bridge", bridge, NULL, "PATH",
             "the server's bridge file (default: searched); of several ranks with {rank} in it"),
    OPT_TEXT("data", data, NULL, "FILE", "training prompts, JSONL"),
    MAX_SAMPLES_OPTION,
    OPT_TEXT("atropos", atropos, NULL, "http://HOST:PORT",
             "Atropos' API server: in place of --data, groups that its environments have sampled "
             "and scored (docs/atropos.md)"),
    OPT_TEXT("run-dir", run_dir, NULL, "DIR", "run folder (default: runs/DATE-TIME)"),
    OPT_FLAG("resume", resume, NULL,
             "go on from the run folder's last checkpoint, if it has one, with the options in its "
             "config.json where they are not given here"),
    OPT_TEXT("start-from", start_from, "loaded", "loaded|current|DIR",
             "weights that a new run starts from: those of the folder the server loaded, as they "
             "are now, or those of a model folder; also the reference of --beta"),
    OPT_CONFIG,
    PROMPT_OPTIONS,
    ANSWER_FIELD_OPTION,

    OPT_HEADING("How the sampler comes by new weights (docs/sync.md)"),
    OPT_CHOICE("sync", sync, "shared", sync_way_names,
               "shared: --bridge's server holds the one copy, and each update is written there in "
               "place; checkpoint: this program holds them, and writes them out for a server that "
               "it restarts"),
    OPT_TEXT("model", model, NULL, "DIR",
             "with --sync checkpoint, --gpus or --ranks: the model that is trained, where no "
             "server of it "
             "runs"),
    OPT_TEXT("device", device, "auto", "auto|cpu|cuda:N",
             "with --sync checkpoint: where it is trained"),
    OPT_INT("restart-interval", restart_interval, "1", "STEPS", 1, MAX_AHEAD,
            "steps between checkpoints for the server; samples are up to so many steps less one "
            "old"),
    OPT_TEXT("server-command", server_command, NULL, "COMMAND",
             "that serves the folder {model} on {port} of 127.0.0.1, asked for POST "
             "/v1/completions (default: this build's cw-infer-server)"),
    OPT_INT("server-port", server_port, "0", "PORT", 0, 65535, "that port; 0: a free one"),
    OPT_TEXT("server-url", server_url, NULL, "http://HOST:PORT",
             "a cw-infer-server that is not started here, but told to load the checkpoint (POST "
             "/reload) out of RUN/workers"),
    OPT_DOUBLE("server-timeout", server_timeout, "600", "SECONDS", 0.1, 1e6,
               "longest wait for the server to start"),

    OPT_HEADING("Reward"),
    REWARD_OPTIONS,
    OPT_CHOICE("reward-normalise", normalise_terms, "none", OPTION_WORDS("none", "terms"),
               "terms: z-score each term per group, weigh, sum, normalise over the batch "
               "(--scale-rewards then has no effect)"),

    OPT_HEADING("Cost of inference in the reward"),
    OPT_FLAG("cost", cost, NULL,
             "reward = task - latency - tokens - KV memory + acceptance + cache reuse, as weighted "
             "below"),
    OPT_DOUBLE("cost-latency", cost_weights.latency, "0.001", "A", 0, 1e9, "taken off for each ms"),
    OPT_DOUBLE("cost-tokens", cost_weights.tokens, "0.001", "B", 0, 1e9,
               "taken off for each generated token"),
    OPT_DOUBLE("cost-kv", cost_weights.kv, "0.01", "C", 0, 1e9,
               "taken off for each MB (2^20 bytes) of KV cache at its peak"),
    OPT_DOUBLE("gain-acceptance", cost_weights.acceptance, "1", "D", 0, 1e9,
               "added for all draft tokens accepted; a share counts in proportion"),
    OPT_DOUBLE("gain-cache", cost_weights.cache, "0.5", "E", 0, 1e9,
               "added for a prompt wholly from the prefix cache"),
    OPT_CHOICE("latency", latency_modelled, "measured", OPTION_WORDS("measured", "modelled"),
               "modelled: from the sample's own tokens, by a fit to all latencies of this run"),

    OPT_HEADING("Rollouts"),
    OPT_INT("prompts-per-step", curriculum.prompts_per_step, "8", "N", 1, 1e6,
            "groups in one step"),
    OPT_INT("num-generations", curriculum.num_generations, "8", "N", 1, 4096,
            "samples of each prompt, without a curriculum"),
    OPT_INT("filter-groups", filter_groups, "0", "N", 0, 1000,
            "dynamic sampling (DAPO): groups whose rewards are all equal are dropped and other "
            "prompts drawn for them, at most N times a step; 0: off"),
    OPT_TEXT("rollouts", rollouts, NULL, "command:PROGRAM ARGS",
             "environments: child processes that make a trajectory of a line of --data and of what "
             "they have the policy sample, turn by turn, and give its reward "
             "(docs/environments.md)"),
    OPT_INT("rollout-processes", rollout_processes, "1", "N", 1, ENVIRONMENT_MAX_PROCESSES,
            "such processes"),
    OPT_DOUBLE("rollout-process-timeout", rollout_process_timeout, "300", "SECONDS", 0.01, 1e6,
               "longest wait for what one of them does next about a sample"),
    OPT_FLAG("async", async, NULL,
             "sample the next steps while learning from one, by weights of up to --max-staleness "
             "updates before"),
    OPT_INT("max-staleness", max_staleness, "1", "UPDATES", 0, MAX_AHEAD,
            "a sample that would be learned from later than this is generated again; 0: the plain "
            "loop"),
    OPT_INT("rollout-ahead", rollout_ahead, "0", "STEPS", 0, MAX_AHEAD,
            "the same counted in steps: --async --max-staleness STEPS x --num-iterations"),
    OPT_TEXT("workers", workers, NULL, "BRIDGE_OR_URL,...",
             "further servers of the same model that sample too; before each step they load the "
             "weights from RUN/workers"),
    OPT_TEXT("workers-api-key-file", workers_api_key_file, NULL, "FILE",
             "their key, for those named by http://HOST:PORT, and that of --server-url"),
    OPT_INT("max-completion-length", sampling.max_tokens, "512", "TOKENS", 1, 1e7, "of one sample"),
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
    OPT_CHOICE(
        "tandem-selector", sampling.tandem.selector, "bernoulli", tandem_selector_names,
        "what an author is drawn for: each token, --tandem-chunk tokens, a sentence, a word; "
        "alternating: nothing is drawn, the policy's tokens are spread evenly"),
    OPT_DOUBLE("tandem-p", sampling.tandem.p, "0.5", "P", 0, 1,
               "probability that the policy writes"),
    OPT_INT("tandem-chunk", sampling.tandem.chunk, "16", "TOKENS", 1, 1e6,
            "of --tandem-selector "
            "chunk"),
    OPT_FLAG("tandem-shared", sampling.tandem.shared, "true",
             "all samples of a step have the same authors at the same places, which costs less; "
             "else each draws its own"),
    OPT_DOUBLE("tandem-frozen-weight", loss.frozen_weight, "0.2", "W", 0, 1e6,
               "of the frozen model's tokens in the loss, the policy's have 1"),

    OPT_HEADING("Curriculum"),
    OPT_CHOICE("curriculum", curriculum.mode, "off", curriculum_mode_names,
               "kde: more samples of prompts whose rewards are low, by valleys in their density; "
               "uniform: its control, as many samples spread evenly"),
    OPT_INT("n-buckets", curriculum.n_buckets, "3", "N", 1, BUCKETS_MAX,
            "into which prompts are sorted, at most"),
    OPT_INT("min-bucket-size", curriculum.min_bucket_size, "0", "N", 0, 1e9,
            "prompts; a smaller bucket goes to a neighbour; 0: as --prompts-per-step"),
    OPT_INT("rollout-base", curriculum.base, "4", "N", 2, 4096,
            "samples of a prompt of the highest rewards; in place of --num-generations"),
    OPT_DOUBLE("rollout-alpha", curriculum.alpha, "1.5", "A", 0, 1000,
               "the lowest get 1 + A times as many"),
    OPT_DOUBLE("curriculum-ema", curriculum.ema, "0.7", "W", 0, 0.999999,
               "weight of a prompt's average reward so far beside its new one"),

    OPT_HEADING("Loss"),
    OPT_CHOICE("loss-type", loss.type, "dapo", loss_type_names, "how tokens are averaged"),
    OPT_CHOICE("importance-sampling-level", loss.sequence_level, "token",
               OPTION_WORDS("token", "sequence"), "sequence: GSPO"),
    OPT_DOUBLE("epsilon", loss.epsilon, "0.2", "E", 0, 1, "clip the ratio below 1 - E"),
    OPT_DOUBLE("epsilon-high", loss.epsilon_high, "-1", "E", -1, 1e9,
               "clip it above 1 + E; -1: as --epsilon. cispo: cap it at E itself; -1: 5. gmpo: "
               "clip its logarithm"),
    OPT_DOUBLE("delta", loss.delta, "0", "D", 0, 1e9,
               "dual clip: cap the ratio at D where the advantage is negative too; 0: off"),
    OPT_DOUBLE("beta", loss.beta, "0", "B", 0, 1e6,
               "weight of the KL divergence from the weights the run started from (--start-from), "
               "of which it then keeps a copy in memory"),
    OPT_DOUBLE("kl-reward-coef", kl_reward_coef, "0", "B", 0, 1e6,
               "taken off a sample's reward for its KL divergence from these weights, summed over "
               "its tokens"),
    OPT_FLAG("sync-ref-model", sync_ref_model, NULL,
             "move the weights that are the reference of both towards the policy's"),
    OPT_DOUBLE("ref-model-mixup-alpha", ref_model_mixup_alpha, "0.6", "A", 0, 1,
               "to A x the policy's + (1 - A) x their own"),
    OPT_INT("ref-model-sync-steps", ref_model_sync_steps, "512", "STEPS", 1, 1e9,
            "every so many steps"),
    OPT_CHOICE("kl-estimator", loss.kl_estimator, "k3", kl_estimator_names,
               "how that is estimated"),
    OPT_FLAG("use-bias-correction-kl", loss.bias_correction_kl, "true",
             "multiply it by the ratio, for an unbiased gradient"),
    OPT_CHOICE("advantage-estimator", advantage.estimator, "grpo", advantage_estimator_names,
               "how rewards become advantages (docs/recipes.md)"),
    OPT_CHOICE("scale-rewards", advantage.scale, "group", advantage_scale_names,
               "what advantages are divided by; of grpo and grpo_passk"),
    OPT_INT("pass-k", pass_k, "1", "K", 1, 4096, "of --advantage-estimator pass_at_k"),
    OPT_INT("num-iterations", num_iterations, "1", "N", 1, 1000,
            "times through each rollout, with --steps-per-generation updates each time"),
    OPT_INT("steps-per-generation", steps_per_generation, "1", "N", 1, 4096,
            "parts of a rollout, whole groups, each with an update of its own"),
    OPT_CHOICE("count-steps", count_updates, "rollouts", OPTION_WORDS("rollouts", "updates"),
               "what --max-steps and the learning rate's schedule count; updates: as TRL"),
    OPT_FLAG("importance-sampling-correction", importance_sampling_correction, "true",
             "weigh the loss by the trainer's over the server's probabilities"),
    OPT_CHOICE("importance-sampling-mode", importance_sampling_mode, "sequence_mask",
               tis_mode_names + 1,
               "weights of tokens or whole sequences; beyond the bounds they are cut, or 0"),
    OPT_DOUBLE("importance-sampling-clip-max", loss.tis_max, "3", "C", 0, 1e9,
               "upper bound of these weights; 0: none"),
    OPT_DOUBLE("importance-sampling-clip-min", loss.tis_min, "0", "C", 0, 1e9,
               "lower bound of these weights; 0: none"),
    OPT_FLAG("processed-logprobs", processed_logprobs, "true",
             "with --top-p, --top-k or --min-p the server's probabilities in these weights are "
             "those of the filtered distribution, which was sampled from"),
    OPT_DOUBLE("sapo-temperature-neg", loss.sapo_temperature_neg, "1.05", "T", 1e-3, 1e3,
               "sharpness of sapo's gate where the advantage is not above 0"),
    OPT_DOUBLE("sapo-temperature-pos", loss.sapo_temperature_pos, "1", "T", 1e-3, 1e3,
               "and where it is"),
    OPT_DOUBLE("off-policy-mask-threshold", loss.off_policy_threshold, "0", "D", 0, 1e9,
               "samples of negative advantage do not count where the mean log-ratio of the "
               "sampler's to the policy's probabilities is above D; 0: off"),
    OPT_FLAG("clamp-log-ratios", loss.clamp_log_ratios, NULL,
             "as verl: log-ratios of tokens to -20..20, of sequences to 10, k3 to 10"),
    OPT_DOUBLE("top-entropy-quantile", entropy.top_quantile, "1", "SHARE", 0, 1,
               "of a step's tokens, those of highest entropy, whose policy term counts; 1: all"),
    OPT_DOUBLE("entropy-coef", entropy.coef, "0", "C", -1e3, 1e3,
               "bonus in the loss for the mean entropy of a token"),
    OPT_FLAG("use-adaptive-entropy", entropy.adaptive, NULL,
             "that coefficient grows while the entropy is at most --entropy-target, else it falls "
             "and has no effect"),
    OPT_DOUBLE("entropy-coef-min", entropy.coef_min, "0", "C", -1e3, 1e3, "at least"),
    OPT_DOUBLE("entropy-coef-max", entropy.coef_max, "1", "C", -1e3, 1e3, "at most"),
    OPT_DOUBLE("entropy-coef-delta", entropy.coef_delta, "0.005", "C", 0, 1e3, "by each update"),
    OPT_DOUBLE("entropy-target", entropy.target, "0.2", "NATS", 0, 1e3, "of a token"),
    EXPERTS_OPTION,
    OPT_FLAG("mask-truncated-completions", mask_truncated_completions, NULL,
             "samples cut off at the token limit do not count"),

    OPT_HEADING("Optimizer (AdamW)"),
    ADAMW_OPTIONS("1e-6"),
    OPT_INT("max-steps", max_steps, "-1", "N", -1, 1e9,
            "steps of the run, each a rollout with its updates (--count-steps); -1: by epochs"),
    OPT_DOUBLE("num-train-epochs", num_train_epochs, "3", "N", 0, 1e6, "times through the data"),
    OPT_INT("seed", seed, "42", "N", 0, 1e15, "of the data order and of sampling"),

    OPT_HEADING("LoRA adapter"),
    LORA_OPTIONS("train an adapter of this rank beside the frozen model (cw-infer-server "
                 "--max-adapters); 0: the model itself"),
    OPT_TEXT("lora-name", lora.name, "policy", "NAME",
             "by which the server knows it, and requests name it"),

    OPT_HEADING("Draft model"),
    OPT_FLAG("train-draft", train_draft, NULL,
             "train the server's draft model (cw-infer-server --draft) to answer as the policy "
             "does, on the same rollouts"),
    OPT_DOUBLE("draft-learning-rate", draft_learning_rate, "2e-5", "LR", 0, 10,
               "at its peak; schedule and AdamW as above"),
    OPT_DOUBLE("draft-loss-weight", draft_loss_weight, "1", "W", 0, 1e6,
               "of the mean KL divergence of the draft from the policy"),
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
             "with it each token's log-probability by the server and by the trainer"),
    OPT_TEXT("eval-data", eval_data, NULL, "FILE", "held-out prompts, JSONL"),
    OPT_CHOICE("eval-strategy", eval_by_epoch, "steps", OPTION_WORDS("steps", "epoch"),
               "what evaluations go by; there is one before the first step and one at the end"),
    OPT_INT("eval-steps", eval_steps, "500", "N", 1, 1e9, "steps between evaluations"),
    OPT_INT("eval-epochs", eval_epochs, "1", "N", 1, 1e6,
            "epochs between them, with --eval-strategy epoch"),
    OPT_INT("eval-limit", eval_limit, "0", "N", 0, 1e9, "first N held-out prompts; 0: all"),
    OPT_INT("num-generations-eval", num_generations_eval, "1", "N", 1, 2048,
            "samples of each held-out prompt, for pass@k and maj@N"),
    OPT_DOUBLE("eval-temperature", eval_temperature, "0", "T", 0, 100, "of these; 0: greedy"),
    OPT_INT("early-stop-patience", early_stop_patience, "0", "N", 0, 1e9,
            "end after N evaluations in a row without a better one than before them; 0: off"),
    OPT_FLAG("load-best-model-at-end", load_best_model_at_end, NULL,
             "serve the weights of the best evaluation once the run is over"),

    LOG_LEVEL_OPTION,

    OPT_HEADING("Several GPUs or hosts (docs/launch.md)"),
    JOB_OPTIONS,

    OPT_HEADING("Machine"),
    OPT_FLAG("exact", exact, NULL,
             "no bit may depend on timing: wants cw-infer-server --exact, and ends where one of "
             "its log-probabilities differs from the trainer's"),
    MEMORY_OPTIONS,
    OPT_DOUBLE("quiesce-timeout", quiesce_timeout, "30", "SECONDS", 0.01, 1e6,
               "longest wait for the server's step boundary"),
    OPT_DOUBLE("rollout-timeout", rollout_timeout, "1800", "SECONDS", 0.1, 1e6,
               "longest wait for a step's rollouts"),
    OPT_DOUBLE(
        "rank-timeout", rank_timeout, "3600", "SECONDS", 0.1, 1e6,
        "longest wait of a rank for the others, where several train together: as long as one "
        "may be ahead of another (docs/scaling.md)"),
    FOREIGN_OPTIONS,
    OPT_END,
};
