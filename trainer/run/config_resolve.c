/* config_resolve.c: what options mean together, beyond the rules of their table: those that are
 * words or fractions resolved, and the learner's settings that follow. No state; the main thread,
 * at start. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/config.h"
#include "common/model/adapter.h"
#include "trainer/learn/learner.h"

#include <inttypes.h>
#include <string.h>

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
    if (c->curriculum.num_generations < 2)
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
    resolve_staleness(config, &r);
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
        .max_context = (int)shape->longest,
        .recompute = options->recompute,
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
