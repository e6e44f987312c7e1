/* run_learn.c: one step's update, and what becomes of a gradient that is not finite. The main
 * thread.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/log.h"
#include "trainer/learn/step.h"
#include "trainer/rollout/source.h"
#include "trainer/run/run.h"
#include "trainer/run/stop.h"

#include <inttypes.h>

#define MAX_SKIPPED 3 // steps in a row

// Counts a step by whether its gradient was not finite: ST_INVALID at the third in a row.
static enum status count_skipped(int *in_a_row, bool skipped, const char *whose,
                                 const char *way_out)
{
    *in_a_row = skipped ? *in_a_row + 1 : 0;
    if (*in_a_row < MAX_SKIPPED) return ST_OK;
    return status_fail(ST_INVALID, "%s gradient was not finite in %d steps in a row; %s", whose,
                       MAX_SKIPPED, way_out);
}

// --kl-reward-coef: of each sample's reward, and the advantages anew.
static enum status price_kl(struct run *run, struct rollout_step *s)
{
    struct scores *scores = &s->scores;
    struct samples *samples = NULL;
    enum status st;
    double *kl = calloc((size_t)scores->n + 1, sizeof *kl);
    if (!kl) return status_fail(ST_NO_MEMORY, "no memory for %d divergences", scores->n);
    const struct rollout_learning how = {.advantages = scores->advantages,
                                         .learner = learner_info(run->learner),
                                         .constraints = run->constraints};
    CHECK(rollout_samples(s->rollout, &how, &samples));
    CHECK(learner_kl(run->learner, samples, kl));
    for (int i = 0; i < scores->n; i++) scores->rewards[i] -= run->config->kl_reward_coef * kl[i];
    mean_std(kl, scores->n, &s->kl, NULL);
    st = scoring_again(run->scoring, s->rollout, scores);
out:
    samples_free(samples);
    free(kl);
    return st;
}

double run_draft_rate(const struct run *run, int64_t step)
{
    return schedule_at(&run->resolved.draft_schedule, step * run->resolved.schedule_per_step);
}

static enum status publish(void *context, enum status (*write)(void *), void *update,
                           struct publish_times *ret_times)
{
    struct run *run = context;
    pthread_mutex_t *lock = stop_publish_lock(run->stop);
    pthread_mutex_lock(lock);
    enum status st =
        bridge_publish(run->mapped.bridge, (int64_t)(run->config->quiesce_timeout * 1e3), write,
                       update, ret_times);
    pthread_mutex_unlock(lock);
    return status_context(st, "publishing the update");
}

enum status run_update(struct run *run, struct samples *samples, double lr,
                       struct update_stats *ret)
{
    const struct train_config *c = run->config;
    const bool of_entropy = entropy_has_bonus(&c->entropy) || c->entropy.top_quantile < 1;
    const struct update_config config = {
        .step = {.loss = run->resolved.loss,
                 .entropy = of_entropy ? &c->entropy : NULL,
                 .entropy_state = &run->entropy,
                 .version = mapped_version(&run->mapped),
                 .exact = c->exact && c->lora.dropout == 0, // the sampler drops nothing
                 .lr = lr,
                 .draft_lr = run_draft_rate(run, run->step),
                 .publish = {publish, run}},
        .num_iterations = (int)c->num_iterations,
        .mini_batches = (int)c->steps_per_generation,
        .schedule = c->count_updates ? &run->resolved.schedule : NULL,
        .first_update = run->step * run->resolved.updates_per_step,
    };
    const int64_t step = run->step + 1;
    enum status st;
    CHECK(update_policy(run->learner, &config, samples, ret));
    CHECK(train_ranks_compare(&run->ranks, &run->mapped, run->step));
    if (c->sync_ref_model && step % c->ref_model_sync_steps == 0) {
        log_debug("step %" PRId64 ": the reference moves by %g towards the policy", step,
                  c->ref_model_mixup_alpha);
        CHECK(learner_mix_reference(run->learner, c->ref_model_mixup_alpha));
    }
    if (!run->said_memory) memory_log_taken(run->learner);
    run->said_memory = true;
    run->skipped += ret->skipped;
    if (ret->skipped)
        log_warn("step %" PRId64 ": the gradient is not finite; %d of %d updates skipped", step,
                 ret->skipped, (int)run->resolved.updates_per_step);
    CHECK(count_skipped(&run->skipped_in_a_row, !ret->applied, "the",
                        "lower --learning-rate or go back to a checkpoint"));
    if (ret->draft_skipped) // it is left as it is; the policy goes on
        log_warn("step %" PRId64
                 ": the draft model's gradient is not finite; its update is skipped",
                 step);
    st = count_skipped(&run->draft_skips_in_a_row, ret->draft_skipped, "the draft model's",
                       "lower --draft-learning-rate or go back to a checkpoint");
out:
    return st;
}

enum status run_learn(struct run *run, struct rollout_step *s, double lr, struct update_stats *ret)
{
    const struct train_config *c = run->config;
    struct samples *samples = NULL;
    enum status st = c->kl_reward_coef != 0 ? price_kl(run, s) : ST_OK;
    if (st != ST_OK) return st;
    const struct rollout_learning how = {.advantages = s->scores.advantages,
                                         .processed = c->processed_logprobs,
                                         .mask_truncated = c->mask_truncated_completions,
                                         .given = run_gives(run),
                                         .learner = learner_info(run->learner),
                                         .constraints = run->constraints};
    CHECK(rollout_samples(s->rollout, &how, &samples));
    CHECK(run_update(run, samples, lr, ret));
    if (c->log_completions && c->log_logprobs) {
        s->logprobs = calloc((size_t)s->rollout->n_tokens + 1, sizeof *s->logprobs);
        if (!s->logprobs) FAIL(ST_NO_MEMORY, "no memory for --log-logprobs");
        st = update_share_logprobs(run->learner, samples, s->logprobs);
    }
out:
    samples_free(samples);
    return st;
}
