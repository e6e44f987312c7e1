/* config.c: the options table of `cw-trainer train`. Read once at start. */
#include "trainer/run/config.h"
#include "trainer/run/options_shared.h"

#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(struct train_config, field)

const struct option_spec train_options[] = {
    HEADING("What is trained, on what"),
    {"bridge", OPTION_STRING, AT(bridge), NULL, "PATH",
     "the daemon's bridge file (default: searched)", 0, 0, NULL},
    {"data", OPTION_STRING, AT(data), NULL, "FILE", "training prompts, JSONL", 0, 0, NULL},
    MAX_SAMPLES_OPTION,
    {"run-dir", OPTION_STRING, AT(run_dir), NULL, "DIR", "run folder (default: runs/DATE-TIME)", 0,
     0, NULL},
    {"resume", OPTION_FLAG, AT(resume), NULL, NULL,
     "go on from the run folder's last checkpoint, if it has one, with the options in its "
     "config.json where they are not given here",
     0, 0, NULL},
    {"start-from", OPTION_STRING, AT(start_from), "loaded", "loaded|current|DIR",
     "weights that a new run starts from: those of the folder the daemon loaded, as they are now, "
     "or "
     "those of a model folder; also the reference of --beta",
     0, 0, NULL},
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
    {"max-completion-length", OPTION_INT, AT(max_completion_length), "512", "TOKENS",
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
     "clip it above 1 + E; -1: as --epsilon. cispo: cap it at E itself; -1: 5", -1, 1e9, NULL},
    {"delta", OPTION_DOUBLE, AT(delta), "0", "D",
     "dual clip: cap the ratio at D where the advantage is negative too; 0: off", 0, 1e9, NULL},
    {"beta", OPTION_DOUBLE, AT(beta), "0", "B",
     "weight of the KL divergence from the weights the run started from (--start-from), of which "
     "it "
     "then keeps a copy in memory",
     0, 1e6, NULL},
    {"kl-estimator", OPTION_STRING, AT(kl_estimator), "k3", "NAME", "how that is estimated", 0, 0,
     "k1|k2|k3"},
    {"use-bias-correction-kl", OPTION_FLAG, AT(use_bias_correction_kl), "true", NULL,
     "multiply it by the ratio, for an unbiased gradient", 0, 0, NULL},
    {"scale-rewards", OPTION_STRING, AT(scale_rewards), "group", "HOW",
     "what advantages are divided by", 0, 0, "group|batch|none"},
    {"num-iterations", OPTION_INT, AT(num_iterations), "1", "N", "updates on each rollout", 1, 1000,
     NULL},
    {"importance-sampling-correction", OPTION_FLAG, AT(importance_sampling_correction), "true",
     NULL, "weigh the loss by the trainer's over the daemon's probabilities", 0, 0, NULL},
    {"importance-sampling-mode", OPTION_STRING, AT(importance_sampling_mode), "sequence_mask",
     "MODE", "weights of tokens or whole sequences; beyond the bounds they are cut, or 0", 0, 0,
     "token_truncate|token_mask|sequence_truncate|sequence_mask"},
    {"importance-sampling-clip-max", OPTION_DOUBLE, AT(importance_sampling_clip_max), "3", "C",
     "upper bound of these weights; 0: none", 0, 1e9, NULL},
    {"importance-sampling-clip-min", OPTION_DOUBLE, AT(importance_sampling_clip_min), "0", "C",
     "lower bound of these weights; 0: none", 0, 1e9, NULL},
    {"mask-truncated-completions", OPTION_FLAG, AT(mask_truncated_completions), NULL, NULL,
     "samples cut off at the token limit do not count", 0, 0, NULL},

    HEADING("Optimizer (AdamW)"),
    ADAMW_OPTIONS("1e-6"),
    {"max-steps", OPTION_INT, AT(max_steps), "-1", "N",
     "steps of the run, each a rollout with its --num-iterations updates; -1: by epochs", -1, 1e9,
     NULL},
    {"num-train-epochs", OPTION_DOUBLE, AT(num_train_epochs), "3", "N", "times through the data", 0,
     1e6, NULL},
    {"seed", OPTION_INT, AT(seed), "42", "N", "of the data order and of sampling", 0, 1e15, NULL},

    HEADING("Draft model"),
    {"train-draft", OPTION_FLAG, AT(train_draft), NULL, NULL,
     "train the daemon's draft model (cw-infer-server --draft) to answer as the policy does, on "
     "the "
     "same rollouts",
     0, 0, NULL},
    {"draft-learning-rate", OPTION_DOUBLE, AT(draft_learning_rate), "2e-5", "LR",
     "at its peak; schedule and AdamW as above", 0, 10, NULL},
    {"draft-loss-weight", OPTION_DOUBLE, AT(draft_loss_weight), "1", "W",
     "of the mean KL divergence of the draft from the policy", 0, 1e6, NULL},
    {"draft-max-grad-norm", OPTION_DOUBLE, AT(draft_max_grad_norm), "-1", "N",
     "gradient clipping of the draft; 0: off; -1: as --max-grad-norm", -1, 1e9, NULL},

    HEADING("Run"),
    {"logging-steps", OPTION_INT, AT(logging_steps), "10", "N",
     "steps between plain progress lines (metrics.jsonl has every step)", 1, 1e9, NULL},
    {"save-steps", OPTION_INT, AT(save_steps), "500", "N",
     "steps between checkpoints; 0: at the end", 0, 1e9, NULL},
    {"save-minutes", OPTION_DOUBLE, AT(save_minutes), "10", "N",
     "minutes after which a step gets a checkpoint that the next one replaces; 0: off", 0, 1e6,
     NULL},
    {"save-total-limit", OPTION_INT, AT(save_total_limit), "0", "N", "checkpoints kept; 0: all", 0,
     1e9, NULL},
    {"also-count", OPTION_STRING, AT(also_count), NULL, "BRIDGE,...",
     "bridge files of further daemons, whose speculative decoding is added to spec_decode/*", 0, 0,
     NULL},
    {"log-completions", OPTION_FLAG, AT(log_completions), NULL, NULL,
     "write the sampled text of each step into rollouts/", 0, 0, NULL},
    {"eval-data", OPTION_STRING, AT(eval_data), NULL, "FILE", "held-out prompts, JSONL", 0, 0,
     NULL},
    {"eval-strategy", OPTION_STRING, AT(eval_strategy), "steps", "HOW",
     "what evaluations go by; there is one before the first step and one at the end", 0, 0,
     "steps|epoch"},
    {"eval-steps", OPTION_INT, AT(eval_steps), "500", "N", "steps between evaluations", 1, 1e9,
     NULL},
    {"eval-epochs", OPTION_INT, AT(eval_epochs), "1", "N",
     "epochs between them, with --eval-strategy epoch", 1, 1e6, NULL},
    {"eval-limit", OPTION_INT, AT(eval_limit), "0", "N", "first N held-out prompts; 0: all", 0, 1e9,
     NULL},
    {"early-stop-patience", OPTION_INT, AT(early_stop_patience), "0", "N",
     "end after N evaluations in a row without a better one than before them; 0: off", 0, 1e9,
     NULL},
    {"load-best-model-at-end", OPTION_FLAG, AT(load_best_model_at_end), NULL, NULL,
     "serve the weights of the best evaluation once the run is over", 0, 0, NULL},

    LOG_LEVEL_OPTION,

    HEADING("Machine"),
    {"exact", OPTION_FLAG, AT(exact), NULL, NULL,
     "no bit may depend on timing: wants cw-infer-server --exact, and ends where one of its "
     "log-probabilities differs from the trainer's",
     0, 0, NULL},
    {"token-budget", OPTION_INT, AT(token_budget), "8192", "ROWS",
     "of one micro-batch: bounds the memory of activations", 2, 1e8, NULL},
    {"logits-chunk", OPTION_INT, AT(logits_chunk), "512", "ROWS",
     "whose vocabulary-wide logits exist at one time", 1, 1e6, NULL},
    MEMORY_OPTIONS,
    {"quiet-timeout", OPTION_DOUBLE, AT(quiet_timeout), "30", "SECONDS",
     "longest wait for the daemon's step boundary", 0.01, 1e6, NULL},
    {"rollout-timeout", OPTION_DOUBLE, AT(rollout_timeout), "1800", "SECONDS",
     "longest wait for a step's rollouts", 0.1, 1e6, NULL},
    {NULL, OPTION_FLAG, 0, NULL, NULL, NULL, 0, 0, NULL},
};

const char *train_config_idle_cost(const struct train_config *config)
{
    static const char *const names[] = {"cost-latency", "cost-tokens", "cost-kv", "gain-acceptance",
                                        "gain-cache"};
    if (config->cost) return NULL;
    if (strcmp(config->latency, "measured") != 0) return "latency";
    for (const struct option_spec *o = train_options; o->name; o++)
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (strcmp(o->name, names[i]) == 0 &&
                *(const double *)((const char *)config + o->offset) != strtod(o->fallback, NULL))
                return o->name;
    return NULL;
}

#define CISPO_EPSILON_HIGH 5 // TRL's recommendation; --epsilon would cap every ratio below 1

static enum status resolve_loss(const struct train_config *config, struct loss_config *ret)
{
    enum status st;
    struct loss_config loss = {
        .sequence_level = strcmp(config->importance_sampling_level, "sequence") == 0,
        .epsilon = config->epsilon,
        .epsilon_high = config->epsilon_high,
        .delta = config->delta,
        .beta = config->beta,
        .bias_correction_kl = config->use_bias_correction_kl,
        .max_completion_length = (int)config->max_completion_length,
        .correction_min = config->importance_sampling_clip_min,
        .correction_max = config->importance_sampling_clip_max,
    };
    CHECK(loss_type_from_name(config->loss_type, &loss.type));
    CHECK(kl_estimator_from_name(config->kl_estimator, &loss.kl_estimator));
    CHECK(correction_mode_from_name(config->importance_sampling_mode, &loss.correction));
    if (config->epsilon_high < 0)
        loss.epsilon_high = loss.type == LOSS_CISPO ? CISPO_EPSILON_HIGH : config->epsilon;
    if (!config->importance_sampling_correction) loss.correction = CORRECTION_OFF;
    if (loss.delta > 0 && loss.delta <= 1) {
        st = status_fail(ST_INVALID,
                         "--delta %g would cut the ratio of an unchanged policy, which is 1; take "
                         "one above 1 + --epsilon-high, or 0 for none",
                         loss.delta);
        goto out;
    }
    if (loss.correction_max > 0 && loss.correction_min >= loss.correction_max) {
        st = status_fail(ST_INVALID,
                         "--importance-sampling-clip-min %g is not below "
                         "--importance-sampling-clip-max %g",
                         loss.correction_min, loss.correction_max);
        goto out;
    }
    bool truncates = loss.correction == CORRECTION_TOKEN_TRUNCATE ||
                     loss.correction == CORRECTION_SEQUENCE_TRUNCATE;
    if (truncates && loss.correction_min == 0 && loss.correction_max == 0) {
        st = status_fail(ST_INVALID,
                         "--importance-sampling-mode %s has no bound to truncate at: give "
                         "--importance-sampling-clip-max or --importance-sampling-clip-min",
                         config->importance_sampling_mode);
        goto out;
    }
    *ret = loss;
out:
    return st;
}

// What a reward under --exact may not hold: all of it but the tokens follows the clock, or what
// else is served, or was served before.
static enum status check_exact(const struct train_config *config)
{
    const struct {
        const char *option;
        double weight;
        const char *why;
    } costs[] = {
        {"cost-latency", config->cost_weights.latency, "latency is a clock reading, modelled too"},
        {"cost-kv", config->cost_weights.kv, "blocks held depend on what else is served"},
        {"gain-acceptance", config->cost_weights.acceptance,
         "what is drafted depends on what else is served, and was before"},
        {"gain-cache", config->cost_weights.cache,
         "the prefix cache depends on what was served before"},
    };
    if (!config->exact || !config->cost) return ST_OK;
    for (size_t i = 0; i < sizeof costs / sizeof *costs; i++)
        if (costs[i].weight != 0)
            return status_fail(
                ST_INVALID, "--exact with --cost and --%s %g (--latency %s): %s; give --%s 0",
                costs[i].option, costs[i].weight, config->latency, costs[i].why, costs[i].option);
    return ST_OK;
}

enum status train_config_resolve(const struct train_config *config, struct train_resolved *ret)
{
    enum status st = ST_OK;
    struct train_resolved r = {
        .latency_modelled = strcmp(config->latency, "modelled") == 0,
        .normalise_terms = strcmp(config->reward_normalise, "terms") == 0,
        .eval_by_epoch = strcmp(config->eval_strategy, "epoch") == 0,
        .schedule = {.peak = config->learning_rate, .warmup_steps = config->warmup_steps},
        .draft_max_grad_norm =
            config->draft_max_grad_norm < 0 ? config->max_grad_norm : config->draft_max_grad_norm,
    };
    if (!config->data) {
        st = status_fail(ST_INVALID, "--data is missing: a JSONL file of prompts");
        goto out;
    }
    CHECK(prompts_check(&config->prompts));
    if (!config->eval_data && (config->early_stop_patience || config->load_best_model_at_end)) {
        st = status_fail(
            ST_INVALID, "--%s needs --eval-data, the held-out prompts that say what is better",
            config->early_stop_patience ? "early-stop-patience" : "load-best-model-at-end");
        goto out;
    }
    if (config->resume && !config->run_dir) {
        st = status_fail(ST_INVALID,
                         "--resume needs --run-dir, the folder of the run to go on with");
        goto out;
    }
    if (config->run_dir && !config->run_dir[0]) {
        st = status_fail(ST_INVALID, "--run-dir is empty; name a folder, or leave it out for "
                                     "runs/DATE-TIME");
        goto out;
    }
    if (!config->start_from[0]) {
        st = status_fail(ST_INVALID,
                         "--start-from is empty; take loaded, current or a model folder");
        goto out;
    }
    if (config->num_generations < 2) {
        st = status_fail(ST_INVALID, "--num-generations 1: an advantage is relative to its group, "
                                     "which needs 2 samples or more");
        goto out;
    }
    CHECK(check_exact(config));
    CHECK(curriculum_mode_from_name(config->curriculum, &r.curriculum));
    CHECK(recompute_from_name(config->recompute, &r.recompute));
    CHECK(moments_kind_from_name(config->optim_moments, &r.moments));
    CHECK(resolve_loss(config, &r.loss));
    CHECK(advantage_scale_from_name(config->scale_rewards, &r.scale));
    CHECK(schedule_type_from_name(config->lr_scheduler_type, &r.schedule.type));
    r.draft_schedule = r.schedule;
    r.draft_schedule.peak = config->draft_learning_rate;
    *ret = r;
out:
    return st;
}
