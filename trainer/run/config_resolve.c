/* config_resolve.c: what the options of `cw-trainer train` mean together, beyond the rules of their
 * table: those that are words or fractions resolved. No state; the main thread, at start. */
#include "trainer/run/config.h"

#include <inttypes.h>
#include <string.h>

static enum status resolve_loss(const struct train_config *config, struct loss_config *ret)
{
    enum status st = ST_OK;
    struct loss_config loss = config->loss;
    loss.max_completion_length = (int)config->sampling.max_tokens;
    loss.off_policy_mask = loss.off_policy_threshold >= 0;
    if (config->importance_sampling_correction)
        loss.tis = (enum tis_mode)(config->importance_sampling_mode + 1);
    const double cap = losses[loss.type].epsilon_high;
    if (loss.epsilon_high < 0) loss.epsilon_high = cap > 0 ? cap : loss.epsilon;
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
    *ret = loss;
out:
    return st;
}

// How far samples may be ahead: --async, --rollout-ahead, --restart-interval.
static void resolve_staleness(const struct train_config *config, struct train_resolved *ret)
{
    const int64_t ahead = config->rollout_ahead;
    ret->async = config->async || ahead > 0;
    if (ret->async)
        ret->max_staleness = config->async ? config->max_staleness : ahead * ret->updates_per_step;
    ret->steps_ahead = (int)(ret->max_staleness / ret->updates_per_step);
    if (config->sync == SYNC_CHECKPOINT) // beside it: of the copies
        ret->max_staleness += (config->restart_interval - 1) * ret->updates_per_step;
}

static enum status check_url(const char *option, const char *url)
{
    if (!url || strncmp(url, "http://", strlen("http://")) == 0) return ST_OK;
    return status_fail(ST_INVALID, "--%s %s: take http://HOST:PORT", option, url);
}

static enum status check_rollouts(const char *rollouts)
{
    if (!rollouts) return ST_OK;
    if (strncmp(rollouts, ROLLOUTS_COMMAND, strlen(ROLLOUTS_COMMAND)) != 0)
        return status_fail(ST_INVALID, "--rollouts %s: take command:PROGRAM ARGS", rollouts);
    if (!rollouts[strlen(ROLLOUTS_COMMAND) + strspn(rollouts + strlen(ROLLOUTS_COMMAND), " ")])
        return status_fail(ST_INVALID, "--rollouts command: names no program");
    return ST_OK;
}

static enum status check_updates(const struct train_config *c, const struct train_resolved *r)
{
    if (c->steps_per_generation > c->curriculum.prompts_per_step && !c->atropos)
        return status_fail(ST_INVALID,
                           "--steps-per-generation %" PRId64 " with --prompts-per-step %" PRId64
                           ": an update learns from whole groups; lower the one or raise the other",
                           c->steps_per_generation, c->curriculum.prompts_per_step);
    if (c->count_updates && c->max_steps > 0 && c->max_steps % r->updates_per_step != 0)
        return status_fail(ST_INVALID,
                           "--max-steps %" PRId64 " with --count-steps updates is no multiple of "
                           "the %" PRId64 " updates of a rollout (--steps-per-generation times "
                           "--num-iterations)",
                           c->max_steps, r->updates_per_step);
    return ST_OK;
}

static enum status check_pass_k(const struct train_config *c)
{
    const bool whole = c->curriculum.mode == CURRICULUM_OFF;
    const int64_t fewest = whole ? c->curriculum.num_generations : c->curriculum.base;
    if (c->advantage.estimator == ADVANTAGE_PASS_AT_K && c->pass_k > fewest)
        return status_fail(ST_INVALID,
                           "--pass-k %" PRId64 " is above --%s %" PRId64
                           ", of which so many are sampled",
                           c->pass_k, whole ? "num-generations" : "rollout-base", fewest);
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

// What single options may not be, whatever the others are.
static enum status check_values(const struct train_config *c)
{
    const char *name = c->lora.name;
    if (!c->data && !c->atropos && c->resume)
        return status_fail(ST_INVALID,
                           "--resume: %s holds no run to go on with; a new one needs --data",
                           c->run_dir);
    if (!c->data && !c->atropos)
        return status_fail(ST_INVALID, "--data is missing: a JSONL file of prompts");
    if (c->run_dir && !c->run_dir[0])
        return status_fail(ST_INVALID, "--run-dir is empty; name a folder, or leave it out for "
                                       "runs/DATE-TIME");
    if (!c->start_from[0])
        return status_fail(ST_INVALID,
                           "--start-from is empty; take loaded, current or a model folder");
    if (c->curriculum.num_generations < 2)
        return status_fail(ST_INVALID,
                           "--num-generations 1: an advantage is relative to its group, "
                           "which needs 2 samples or more");
    if (c->lora.r && (!name[0] || strlen(name) > 50))
        return status_fail(ST_INVALID, "--lora-name \"%.60s\": give 1 to 50 bytes", name);
    return ST_OK;
}

enum status train_config_resolve(struct train_config *config, const struct option_set *set,
                                 struct train_resolved *ret)
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
    resolve_staleness(config, &r);
    config->stale = config->sync == SYNC_SHARED && r.max_staleness > 0;
    CHECK(options_check(set, config));
    CHECK(check_values(config));
    CHECK(prompts_check(&config->prompts));
    CHECK(schedule_check(&r.schedule));
    CHECK(check_updates(config, &r));
    CHECK(check_entropy(config));
    CHECK(check_pass_k(config));
    CHECK(check_url("atropos", config->atropos));
    CHECK(check_url("server-url", config->server_url));
    CHECK(check_rollouts(config->rollouts));
    CHECK(resolve_loss(config, &r.loss));
    r.draft_schedule = r.schedule;
    r.draft_schedule.peak = config->draft_learning_rate;
    *ret = r;
out:
    return st;
}
