/* config.c: the options table of `cw-trainer train`. Read once at start. */
#include "trainer/config.h"
#include "trainer/options_shared.h"

#include <string.h>

#define AT(field) offsetof(struct train_config, field)

const struct option_spec train_options[] = {
    HEADING("What is trained, on what"),
    {"bridge", OPTION_STRING, AT(bridge), NULL, "PATH",
     "the daemon's bridge file (default: searched)", 0, 0, NULL},
    {"data", OPTION_STRING, AT(data), NULL, "FILE", "training prompts, JSONL", 0, 0, NULL},
    {"run-dir", OPTION_STRING, AT(run_dir), NULL, "DIR", "run folder (default: runs/DATE-TIME)", 0,
     0, NULL},
    {"resume", OPTION_FLAG, AT(resume), NULL, NULL,
     "go on from the run folder's last checkpoint, if it has one", 0, 0, NULL},
    {"config", OPTION_STRING, AT(config), NULL, "FILE", "these options as JSON, with _ for -", 0, 0,
     NULL},
    PROMPT_OPTIONS,

    HEADING("Reward"),
    REWARD_OPTIONS,
    {"reward-normalise", OPTION_STRING, AT(reward_normalise), "none", "HOW",
     "terms: z-score each term per group, weigh, sum, normalise over the batch (--scale-rewards "
     "then has no effect)",
     0, 0, "none|terms"},

    HEADING("Cost of inference in the reward"),
    {"cost", OPTION_FLAG, AT(cost), NULL, NULL,
     "reward = task - latency - tokens - KV memory + acceptance + cache reuse, as weighted below",
     0, 0, NULL},
    {"cost-latency", OPTION_DOUBLE, AT(cost_weights.latency), "0.001", "A", "taken off for each ms",
     0, 1e9, NULL},
    {"cost-tokens", OPTION_DOUBLE, AT(cost_weights.tokens), "0.001", "B",
     "taken off for each generated token", 0, 1e9, NULL},
    {"cost-kv", OPTION_DOUBLE, AT(cost_weights.kv), "0.01", "C",
     "taken off for each MB (2^20 bytes) of KV cache at its peak", 0, 1e9, NULL},
    {"gain-acceptance", OPTION_DOUBLE, AT(cost_weights.acceptance), "1", "D",
     "added for all draft tokens accepted; a share counts in proportion", 0, 1e9, NULL},
    {"gain-cache", OPTION_DOUBLE, AT(cost_weights.cache), "0.5", "E",
     "added for a prompt wholly from the prefix cache", 0, 1e9, NULL},
    {"latency", OPTION_STRING, AT(latency), "measured", "WHICH",
     "modelled: from the sample's own tokens, by a fit to all latencies of this run", 0, 0,
     "measured|modelled"},

    HEADING("Rollouts"),
    {"prompts-per-step", OPTION_INT, AT(prompts_per_step), "8", "N", "groups in one step", 1, 1e6,
     NULL},
    {"num-generations", OPTION_INT, AT(num_generations), "8", "N",
     "samples of each prompt, without a curriculum", 1, 4096, NULL},
    {"max-completion-length", OPTION_INT, AT(max_completion_length), "256", "TOKENS",
     "of one sample", 1, 1e7, NULL},
    {"temperature", OPTION_DOUBLE, AT(temperature), "1", "T", "of sampling and of the loss", 1e-3,
     100, NULL},
    {"top-p", OPTION_DOUBLE, AT(top_p), "1", "P", "nucleus sampling; 1: off", 1e-6, 1, NULL},
    {"top-k", OPTION_INT, AT(top_k), "0", "K", "sample among the K likeliest; 0: off", 0, 1e9,
     NULL},
    {"min-p", OPTION_DOUBLE, AT(min_p), "0", "P", "least share of the likeliest; 0: off", 0, 1,
     NULL},
    {"stop", OPTION_STRING, AT(stop), NULL, "TEXT", "text that ends a sample", 0, 0, NULL},
    {"ignore-eos", OPTION_FLAG, AT(ignore_eos), NULL, NULL, "sample on past the end token", 0, 0,
     NULL},

    HEADING("Curriculum"),
    {"curriculum", OPTION_STRING, AT(curriculum), "off", "NAME",
     "kde: more samples of prompts whose rewards are low, by valleys in their density; uniform: "
     "its control, as many samples spread evenly",
     0, 0, "off|uniform|kde"},
    {"n-buckets", OPTION_INT, AT(n_buckets), "3", "N", "into which prompts are sorted, at most", 1,
     BUCKETS_MAX, NULL},
    {"min-bucket-size", OPTION_INT, AT(min_bucket_size), "0", "N",
     "prompts; a smaller bucket goes to a neighbour; 0: as --prompts-per-step", 0, 1e9, NULL},
    {"rollout-base", OPTION_INT, AT(rollout_base), "4", "N",
     "samples of a prompt of the highest rewards; in place of --num-generations", 2, 4096, NULL},
    {"rollout-alpha", OPTION_DOUBLE, AT(rollout_alpha), "1.5", "A",
     "the lowest get 1 + A times as many", 0, 1000, NULL},
    {"curriculum-ema", OPTION_DOUBLE, AT(curriculum_ema), "0.7", "W",
     "weight of a prompt's average reward so far beside its new one", 0, 0.999999, NULL},

    HEADING("Loss"),
    {"loss-type", OPTION_STRING, AT(loss_type), "dapo", "NAME", "how tokens are averaged", 0, 0,
     "grpo|bnpo|dapo|dr_grpo|cispo"},
    {"importance-sampling-level", OPTION_STRING, AT(importance_sampling_level), "token", "LEVEL",
     "sequence: GSPO", 0, 0, "token|sequence"},
    {"epsilon", OPTION_DOUBLE, AT(epsilon), "0.2", "E", "clip the ratio below 1 - E", 0, 1, NULL},
    {"epsilon-high", OPTION_DOUBLE, AT(epsilon_high), "-1", "E",
     "clip it above 1 + E; -1: as --epsilon", -1, 1e9, NULL},
    {"beta", OPTION_DOUBLE, AT(beta), "0", "B",
     "weight of the KL divergence from the starting model, which then takes memory", 0, 1e6, NULL},
    {"scale-rewards", OPTION_STRING, AT(scale_rewards), "group", "HOW",
     "what advantages are divided by", 0, 0, "group|batch|none"},
    {"num-iterations", OPTION_INT, AT(num_iterations), "1", "N", "updates on each rollout", 1, 1000,
     NULL},
    {"mask-truncated-completions", OPTION_FLAG, AT(mask_truncated_completions), NULL, NULL,
     "samples cut off at the token limit do not count", 0, 0, NULL},

    HEADING("Optimizer (AdamW)"),
    ADAMW_OPTIONS("1e-6"),
    {"max-steps", OPTION_INT, AT(max_steps), "-1", "N", "steps of the run; -1: by epochs", -1, 1e9,
     NULL},
    {"num-train-epochs", OPTION_DOUBLE, AT(num_train_epochs), "3", "N", "times through the data", 0,
     1e6, NULL},
    {"seed", OPTION_INT, AT(seed), "42", "N", "of the data order and of sampling", 0, 1e15, NULL},

    HEADING("Run"),
    {"logging-steps", OPTION_INT, AT(logging_steps), "10", "N",
     "steps between plain progress lines (metrics.jsonl has every step)", 1, 1e9, NULL},
    {"save-steps", OPTION_INT, AT(save_steps), "500", "N",
     "steps between checkpoints; 0: at the end", 0, 1e9, NULL},
    {"save-total-limit", OPTION_INT, AT(save_total_limit), "0", "N", "checkpoints kept; 0: all", 0,
     1e9, NULL},
    {"log-completions", OPTION_FLAG, AT(log_completions), NULL, NULL,
     "write the sampled text of each step into rollouts/", 0, 0, NULL},
    {"eval-data", OPTION_STRING, AT(eval_data), NULL, "FILE", "held-out prompts, JSONL", 0, 0,
     NULL},
    {"eval-steps", OPTION_INT, AT(eval_steps), "500", "N",
     "steps between evaluations; there is one before the first step and one at the end", 1, 1e9,
     NULL},
    {"eval-limit", OPTION_INT, AT(eval_limit), "0", "N", "first N held-out prompts; 0: all", 0, 1e9,
     NULL},

    HEADING("Machine"),
    {"token-budget", OPTION_INT, AT(token_budget), "8192", "ROWS",
     "of one micro-batch: bounds the memory of activations", 2, 1e8, NULL},
    {"head-rows", OPTION_INT, AT(head_rows), "512", "ROWS",
     "whose vocabulary-wide logits exist at one time", 1, 1e6, NULL},
    {"quiet-timeout", OPTION_DOUBLE, AT(quiet_timeout), "30", "SECONDS",
     "longest wait for the daemon's step boundary", 0.01, 1e6, NULL},
    {"rollout-timeout", OPTION_DOUBLE, AT(rollout_timeout), "1800", "SECONDS",
     "longest wait for a step's rollouts", 0.1, 1e6, NULL},
    {NULL, OPTION_FLAG, 0, NULL, NULL, NULL, 0, 0, NULL},
};

enum status train_config_resolve(const struct train_config *config, struct train_resolved *ret)
{
    enum status st = ST_OK;
    struct train_resolved r = {
        .loss =
            {
                .sequence_level = strcmp(config->importance_sampling_level, "sequence") == 0,
                .epsilon = config->epsilon,
                .epsilon_high = config->epsilon_high < 0 ? config->epsilon : config->epsilon_high,
                .beta = config->beta,
                .max_completion_length = (int)config->max_completion_length,
            },
        .latency_modelled = strcmp(config->latency, "modelled") == 0,
        .normalise_terms = strcmp(config->reward_normalise, "terms") == 0,
        .schedule = {.peak = config->learning_rate, .warmup_steps = config->warmup_steps},
    };
    if (!config->data) {
        st = status_fail(ST_INVALID, "--data is missing: a JSONL file of prompts");
        goto out;
    }
    if (config->resume && !config->run_dir) {
        st = status_fail(ST_INVALID,
                         "--resume needs --run-dir, the folder of the run to go on with");
        goto out;
    }
    if (config->num_generations < 2) {
        st = status_fail(ST_INVALID, "--num-generations 1: an advantage is relative to its group, "
                                     "which needs 2 samples or more");
        goto out;
    }
    CHECK(curriculum_mode_from_name(config->curriculum, &r.curriculum));
    CHECK(loss_type_from_name(config->loss_type, &r.loss.type));
    CHECK(advantage_scale_from_name(config->scale_rewards, &r.scale));
    CHECK(schedule_type_from_name(config->lr_scheduler_type, &r.schedule.type));
    *ret = r;
out:
    return st;
}
