/* config_resolve.c: what the options of `cw-trainer train` mean together: what goes with what, and
 * those that are words or fractions resolved. No state; the main thread, at start. */
#include "trainer/run/config.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

const char *train_config_idle_cost(const struct train_config *config)
{
    static const char *const names[] = {"cost-latency", "cost-tokens", "cost-kv", "gain-acceptance",
                                        "gain-cache"};
    if (config->cost) return NULL;
    if (config->latency_modelled) return "latency";
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
    enum status st = ST_OK;
    struct loss_config loss = config->loss;
    loss.max_completion_length = (int)config->sampling.max_tokens;
    if (config->importance_sampling_correction)
        loss.tis = (enum tis_mode)(config->importance_sampling_mode + 1);
    if (loss.epsilon_high < 0)
        loss.epsilon_high = loss.type == LOSS_CISPO ? CISPO_EPSILON_HIGH : loss.epsilon;
    if (loss.type == LOSS_LUSPO && !loss.sequence_level)
        FAIL(ST_INVALID, "--loss-type luspo needs --importance-sampling-level sequence");
    if (loss.type == LOSS_GMPO && loss.sequence_level)
        FAIL(ST_INVALID, "--importance-sampling-level sequence with --loss-type gmpo, whose ratio "
                         "is a sequence's by itself; leave one of the two out");
    if (loss.delta > 0 && loss.delta <= 1) {
        st = status_fail(ST_INVALID,
                         "--delta %g would cut the ratio of an unchanged policy, which is 1; take "
                         "one above 1 + --epsilon-high, or 0 for none",
                         loss.delta);
        goto out;
    }
    if (loss.tis_max > 0 && loss.tis_min >= loss.tis_max)
        FAIL(ST_INVALID,
             "--importance-sampling-clip-min %g is not below "
             "--importance-sampling-clip-max %g",
             loss.tis_min, loss.tis_max);
    bool truncates = loss.tis == TIS_TOKEN_TRUNCATE || loss.tis == TIS_SEQUENCE_TRUNCATE;
    if (truncates && loss.tis_min == 0 && loss.tis_max == 0)
        FAIL(ST_INVALID,
             "--importance-sampling-mode %s has no bound to truncate at: give "
             "--importance-sampling-clip-max or --importance-sampling-clip-min",
             tis_mode_names[loss.tis]);
    *ret = loss;
out:
    return st;
}

static enum status resolve_staleness(const struct train_config *config, struct train_resolved *ret)
{
    const int64_t ahead = config->rollout_ahead;
    if (config->async && ahead > 0)
        return status_fail(ST_INVALID,
                           "--async with --rollout-ahead %" PRId64
                           ", which is --async --max-staleness %" PRId64 "; give one of the two",
                           ahead, ahead * ret->updates_per_step);
    ret->async = config->async || ahead > 0;
    if (!ret->async) return ST_OK;
    ret->max_staleness = config->async ? config->max_staleness : ahead * ret->updates_per_step;
    ret->steps_ahead = (int)(ret->max_staleness / ret->updates_per_step);
    return ST_OK;
}

// ST_INVALID where --sync checkpoint is asked for what wants a server of shared weights, or any of
// its options without it.
static enum status resolve_sync(const struct train_config *c, struct train_resolved *ret)
{
    const struct {
        const char *option;
        bool given;
    } of_shared[] = {{"bridge", c->bridge},
                     {"async", ret->async},
                     {"lora-r", c->lora.r > 0},
                     {"train-draft", c->train_draft},
                     {"tandem", c->sampling.tandem.on},
                     {"exact", c->exact},
                     {"gpus", c->job.gpus},
                     {"ranks", c->job.ranks > 0}},
      of_checkpoint[] = {{"restart-interval", c->restart_interval > 1},
                         {"server-command", c->server_command},
                         {"server-port", c->server_port > 0},
                         {"server-url", c->server_url}};
    if (c->sync == SYNC_SHARED && c->model && !c->serves)
        return status_fail(ST_INVALID,
                           "--model is for --sync checkpoint, --gpus or --ranks; else "
                           "what is trained is the model that a server serves (--bridge)");
    if (c->sync == SYNC_SHARED) {
        for (size_t i = 0; i < sizeof of_checkpoint / sizeof *of_checkpoint; i++)
            if (of_checkpoint[i].given)
                return status_fail(ST_INVALID, "--%s is for --sync checkpoint; give that too",
                                   of_checkpoint[i].option);
        return ST_OK;
    }
    for (size_t i = 0; i < sizeof of_shared / sizeof *of_shared; i++)
        if (of_shared[i].given)
            return status_fail(ST_INVALID,
                               "--%s with --sync checkpoint: it wants the server that shares its "
                               "weights (--sync shared); leave one of the two out",
                               of_shared[i].option);
    if (!c->model)
        return status_fail(ST_INVALID, "--sync checkpoint needs --model, the folder to train");
    if (c->server_url && (c->server_command || c->server_port > 0))
        return status_fail(ST_INVALID,
                           "--server-url with --%s: a server elsewhere is not started here; leave "
                           "one of the two out",
                           c->server_command ? "server-command" : "server-port");
    if (c->server_url && strncmp(c->server_url, "http://", strlen("http://")) != 0)
        return status_fail(ST_INVALID, "--server-url %s: take http://HOST:PORT", c->server_url);
    ret->max_staleness = (c->restart_interval - 1) * ret->updates_per_step;
    return ST_OK;
}

static enum status check_atropos(const struct train_config *c, const struct train_resolved *r)
{
    const struct {
        const char *option;
        bool given;
        const char *why;
    } refused[] = {
        {"data", c->data, "prompts are the environments'"},
        {"sync", c->sync != SYNC_SHARED, "environments ask the server that shares its weights"},
        {"async", r->async, "environments run ahead by themselves"},
        {"workers", c->workers && *c->workers, "environments choose the servers that they ask"},
        {"curriculum", c->curriculum.mode != CURRICULUM_OFF, "prompts are the environments'"},
        {"cost", c->cost, "nobody tells what a sequence cost"},
        {"lora-r", c->lora.r > 0, "environments ask for the model, and not for an adapter of it"},
        {"tandem", c->sampling.tandem.on, "environments ask for one model's tokens"},
        {"exact", c->exact, "nobody tells which weights sampled a token"},
        {"eval-strategy", c->eval_by_epoch, "there are no epochs; take steps"},
    };
    if (!c->atropos) return ST_OK;
    if (strncmp(c->atropos, "http://", strlen("http://")) != 0)
        return status_fail(ST_INVALID, "--atropos %s: take http://HOST:PORT", c->atropos);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (refused[i].given)
            return status_fail(ST_INVALID, "--%s with --atropos: %s", refused[i].option,
                               refused[i].why);
    if (c->max_steps < 0)
        return status_fail(ST_INVALID, "--atropos needs --max-steps, since there are no epochs");
    return ST_OK;
}

static enum status check_rollouts(const struct train_config *c)
{
    const struct {
        const char *option;
        bool given;
        const char *why;
    } refused[] = {
        {"atropos", c->atropos != NULL, "both say where samples come from"},
        {"sync", c->sync != SYNC_SHARED,
         "environments sample from the server that shares its "
         "weights"},
        {"workers", c->workers && *c->workers,
         "turns of a sample go to one server, whose prefix "
         "cache has them"},
        {"tandem", c->sampling.tandem.on, "what two models wrote has a mask of its own"},
    };
    if (!c->rollouts) return ST_OK;
    if (strncmp(c->rollouts, ROLLOUTS_COMMAND, strlen(ROLLOUTS_COMMAND)) != 0)
        return status_fail(ST_INVALID, "--rollouts %s: take command:PROGRAM ARGS", c->rollouts);
    if (strspn(c->rollouts + strlen(ROLLOUTS_COMMAND), " ") ==
        strlen(c->rollouts) - strlen(ROLLOUTS_COMMAND))
        return status_fail(ST_INVALID, "--rollouts command: names no program");
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (refused[i].given)
            return status_fail(ST_INVALID, "--%s with --rollouts: %s; leave one of the two out",
                               refused[i].option, refused[i].why);
    return ST_OK;
}

static enum status check_workers(const struct train_config *config,
                                 const struct train_resolved *resolved)
{
    if (!config->workers || !*config->workers) return ST_OK;
    if (resolved->steps_ahead > 0)
        return status_fail(ST_INVALID,
                           "--workers with --async: workers load new weights between steps, and "
                           "with --async there is no time between them; leave one of the two out");
    if (config->lora.r > 0)
        return status_fail(ST_INVALID,
                           "--workers with --lora-r: workers load the model's weights and not the "
                           "adapter, which is what is trained; leave one of the two out");
    if (config->exact)
        return status_fail(ST_INVALID,
                           "--exact with --workers: which server samples a prompt depends on the "
                           "clock; leave one of the two out");
    return ST_OK;
}

// What a reward under --exact may not hold: all of it but the tokens follows the clock, or what
// else is served, or was served before.
static enum status check_exact(const struct train_config *config, int64_t max_staleness)
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
    if (config->exact && max_staleness > 0)
        return status_fail(ST_INVALID,
                           "--exact with --%s %" PRId64
                           ": which weights sample a token then depends on the clock; give --%s 0",
                           config->async ? "max-staleness" : "rollout-ahead",
                           config->async ? config->max_staleness : config->rollout_ahead,
                           config->async ? "max-staleness" : "rollout-ahead");
    if (!config->exact || !config->cost) return ST_OK;
    for (size_t i = 0; i < sizeof costs / sizeof *costs; i++)
        if (costs[i].weight != 0)
            return status_fail(
                ST_INVALID, "--exact with --cost and --%s %g (--latency %s): %s; give --%s 0",
                costs[i].option, costs[i].weight,
                config->latency_modelled ? "modelled" : "measured", costs[i].why, costs[i].option);
    return ST_OK;
}

static enum status check_lora(const struct train_config *config)
{
    const struct lora_options *o = &config->lora;
    const char *freeze = config->learning.freeze;
    if (!o->r) return ST_OK;
    if (!o->name[0] || strlen(o->name) > 50)
        return status_fail(ST_INVALID, "--lora-name \"%.60s\": give 1 to 50 bytes", o->name);
    if (freeze && freeze[0])
        return status_fail(ST_INVALID,
                           "--freeze with --lora-r: an adapter is trained whole, and "
                           "nothing of the model is; --lora-target says what it changes");
    if (config->train_draft)
        return status_fail(ST_INVALID,
                           "--train-draft with --lora-r: the server restores one or the "
                           "other after a fault; train them in two runs");
    return ST_OK;
}

static enum status check_updates(const struct train_config *c, const struct train_resolved *r)
{
    if (c->steps_per_generation > c->curriculum.prompts_per_step && !c->atropos)
        return status_fail(ST_INVALID,
                           "--steps-per-generation %" PRId64 " with --prompts-per-step %" PRId64
                           ": an update learns from whole groups; lower the one or raise the other",
                           c->steps_per_generation, c->curriculum.prompts_per_step);
    if (c->steps_per_generation > 1 && c->train_draft)
        return status_fail(ST_INVALID,
                           "--steps-per-generation with --train-draft, which learns from all of a "
                           "rollout at once; leave one of the two out");
    if (c->count_updates && c->max_steps > 0 && c->max_steps % r->updates_per_step != 0)
        return status_fail(ST_INVALID,
                           "--max-steps %" PRId64 " with --count-steps updates is no multiple of "
                           "the %" PRId64 " updates of a rollout (--steps-per-generation times "
                           "--num-iterations)",
                           c->max_steps, r->updates_per_step);
    return ST_OK;
}

static enum status check_advantage(const struct train_config *c)
{
    const struct advantage_config *a = &c->advantage;
    const char *name = advantage_estimator_names[a->estimator];
    if (a->estimator != ADVANTAGE_GRPO && c->normalise_terms)
        return status_fail(ST_INVALID,
                           "--reward-normalise terms with --advantage-estimator %s: it has an "
                           "estimate of its own; leave one of the two out",
                           name);
    if (a->estimator != ADVANTAGE_GRPO && c->atropos)
        return status_fail(ST_INVALID,
                           "--advantage-estimator %s with --atropos: groups are of any size there, "
                           "which only grpo's are; leave one of the two out",
                           name);
    const bool whole = c->curriculum.mode == CURRICULUM_OFF;
    const int64_t fewest = whole ? c->curriculum.num_generations : c->curriculum.base;
    if (a->estimator == ADVANTAGE_PASS_AT_K && c->pass_k > fewest)
        return status_fail(ST_INVALID,
                           "--pass-k %" PRId64 " is above --%s %" PRId64
                           ", of which so many are drawn",
                           c->pass_k, whole ? "num-generations" : "rollout-base", fewest);
    if (a->estimator != ADVANTAGE_PASS_AT_K && c->pass_k > 1)
        return status_fail(ST_INVALID,
                           "--pass-k with --advantage-estimator %s: it is for pass_at_k", name);
    return ST_OK;
}

static enum status check_filter(const struct train_config *c, const struct train_resolved *r)
{
    const struct {
        const char *option;
        bool given;
        const char *why;
    } refused[] = {
        {"async", r->steps_ahead > 0, "steps sampled ahead are not scored until their turn"},
        {"rollouts", c->rollouts != NULL, "an environment makes each prompt's samples once"},
        {"atropos", c->atropos != NULL, "prompts are the environments'"},
        {"curriculum", c->curriculum.mode != CURRICULUM_OFF, "it has each prompt once an epoch"},
        {"cost", c->cost, "with costs no two rewards are equal"},
        {"reward-normalise", c->normalise_terms, "terms may differ where their sums are equal"},
    };
    for (size_t i = 0; c->filter_groups > 0 && i < sizeof refused / sizeof *refused; i++)
        if (refused[i].given)
            return status_fail(ST_INVALID,
                               "--filter-groups with --%s: %s; leave one of the two out",
                               refused[i].option, refused[i].why);
    return ST_OK;
}

static enum status check_reference(const struct train_config *c, const struct train_resolved *r)
{
    const struct {
        const char *option;
        bool given;
        const char *why;
    } of_kl[] = {
        {"rollouts", c->rollouts != NULL, "environments may give rewards of turns"},
        {"atropos", c->atropos != NULL, "environments there give advantages too"},
        {"reward-normalise", c->normalise_terms, "it has terms of its own"},
    };
    for (size_t i = 0; c->kl_reward_coef > 0 && i < sizeof of_kl / sizeof *of_kl; i++)
        if (of_kl[i].given)
            return status_fail(ST_INVALID,
                               "--kl-reward-coef with --%s: %s; take --beta, which puts the KL "
                               "divergence into the loss",
                               of_kl[i].option, of_kl[i].why);
    if (!c->sync_ref_model) return ST_OK;
    if (!r->has_reference)
        return status_fail(ST_INVALID, "--sync-ref-model needs a reference: --beta or "
                                       "--kl-reward-coef above 0");
    if (c->lora.r > 0)
        return status_fail(ST_INVALID, "--sync-ref-model with --lora-r: the reference is the model "
                                       "itself, beside the adapter; leave one of the two out");
    return ST_OK;
}

static enum status check_entropy(const struct train_config *c)
{
    const struct entropy_config *e = &c->entropy;
    if (e->coef_min > e->coef_max)
        return status_fail(ST_INVALID, "--entropy-coef-min %g is above --entropy-coef-max %g",
                           e->coef_min, e->coef_max);
    if (e->adaptive && (e->coef < e->coef_min || e->coef > e->coef_max))
        return status_fail(ST_INVALID,
                           "--entropy-coef %g, where --use-adaptive-entropy begins, is not within "
                           "--entropy-coef-min %g and --entropy-coef-max %g",
                           e->coef, e->coef_min, e->coef_max);
    return ST_OK;
}

enum status train_config_resolve(const struct train_config *config, struct train_resolved *ret)
{
    enum status st = ST_OK;
    struct train_resolved r = {
        .schedule = config->learning.schedule,
        .draft_max_grad_norm = config->draft_max_grad_norm < 0
                                   ? config->learning.adamw.max_grad_norm
                                   : config->draft_max_grad_norm,
        .updates_per_step = config->num_iterations * config->steps_per_generation,
        .schedule_per_step = 1,
        .has_reference = config->loss.beta > 0 || config->kl_reward_coef > 0,
    };
    if (config->count_updates) r.schedule_per_step = r.updates_per_step;
    if (config->resume && !config->run_dir)
        FAIL(ST_INVALID, "--resume needs --run-dir, the folder of the run to go on with");
    if (!config->data && !config->atropos && config->resume)
        FAIL(ST_INVALID, "--resume: %s holds no run to go on with; a new one needs --data",
             config->run_dir);
    if (!config->data && !config->atropos)
        FAIL(ST_INVALID, "--data is missing: a JSONL file of prompts");
    CHECK(prompts_check(&config->prompts));
    if (!config->eval_data && (config->early_stop_patience || config->load_best_model_at_end))
        FAIL(ST_INVALID, "--%s needs --eval-data, the held-out prompts that say what is better",
             config->early_stop_patience ? "early-stop-patience" : "load-best-model-at-end");
    if (config->num_generations_eval > 1 && config->eval_temperature == 0)
        FAIL(ST_INVALID, "--num-generations-eval with --eval-temperature 0: greedy samples of a "
                         "prompt are all the same; give a temperature");
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
    if (config->curriculum.num_generations < 2)
        FAIL(ST_INVALID, "--num-generations 1: an advantage is relative to its group, "
                         "which needs 2 samples or more");
    CHECK(schedule_check(&r.schedule));
    CHECK(check_updates(config, &r));
    CHECK(check_entropy(config));
    CHECK(check_advantage(config));
    CHECK(check_reference(config, &r));
    CHECK(check_lora(config));
    CHECK(resolve_staleness(config, &r));
    CHECK(resolve_sync(config, &r));
    CHECK(check_exact(config, r.max_staleness));
    CHECK(check_atropos(config, &r));
    CHECK(check_rollouts(config));
    CHECK(check_workers(config, &r));
    CHECK(check_filter(config, &r));
    CHECK(resolve_loss(config, &r.loss));
    // of what an environment wrote between turns
    if (config->atropos || config->rollouts) r.loss.frozen_weight = 0;
    r.draft_schedule = r.schedule;
    r.draft_schedule.peak = config->draft_learning_rate;
    *ret = r;
out:
    return st;
}
