/* run_learn.c: one step's update, and what becomes of a gradient that is not finite. The main
 * thread.
 */
#include "common/base/log.h"
#include "trainer/learn/memory.h"
#include "trainer/run/run.h"

#include <inttypes.h>

// A draft whose gradient is not finite is left as it is; the policy goes on.
static enum status note_draft(struct run *run, const struct update_stats *update)
{
    if (update->draft_skipped)
        log_warn("step %" PRId64
                 ": the draft model's gradient is not finite; its update is skipped",
                 run->step + 1);
    return learning_skipped(&run->draft_skips_in_a_row, update->draft_skipped, "the draft model's",
                            "lower --draft-learning-rate or go back to a checkpoint");
}

// --kl-reward-coef: of each sample's reward, and the advantages anew.
static enum status price_kl(struct run *run, struct rollout_step *s)
{
    struct scores *scores = &s->scores;
    enum status st;
    double *kl = calloc((size_t)scores->n + 1, sizeof *kl);
    if (!kl) return status_fail(ST_NO_MEMORY, "no memory for %d divergences", scores->n);
    CHECK(update_measure_kl(run->learner, s->rollout, kl));
    for (int i = 0; i < scores->n; i++) scores->rewards[i] -= run->config->kl_reward_coef * kl[i];
    mean_std(kl, scores->n, &s->kl, NULL);
    st = scoring_again(&run->scoring, s->rollout, scores);
out:
    free(kl);
    return st;
}

// --sync-ref-model, behind an update.
static enum status move_reference(struct run *run)
{
    const struct train_config *c = run->config;
    if (!c->sync_ref_model || (run->step + 1) % c->ref_model_sync_steps != 0) return ST_OK;
    log_debug("step %" PRId64 ": the reference moves by %g towards the policy", run->step + 1,
              c->ref_model_mixup_alpha);
    return learner_mix_reference(run->learner, c->ref_model_mixup_alpha);
}

double run_draft_rate(const struct run *run, int64_t step)
{
    return schedule_at(&run->resolved.draft_schedule, step * run->resolved.schedule_per_step);
}

enum status run_learn(struct run *run, struct rollout_step *s, double lr, struct update_stats *ret)
{
    const struct train_config *c = run->config;
    struct update_config config = {
        .loss = run->resolved.loss,
        .num_iterations = (int)c->num_iterations,
        .mask_truncated = c->mask_truncated_completions,
        .processed = c->processed_logprobs,
        .exact = c->exact && c->lora.dropout == 0, // the sampler drops nothing
        .quiesce_timeout_ms = (int64_t)(c->quiesce_timeout * 1e3),
        .draft_lr = run_draft_rate(run, run->step),
        .mini_batches = (int)c->steps_per_generation,
        .schedule = c->count_updates ? &run->resolved.schedule : NULL,
        .first_update = run->step * run->resolved.updates_per_step,
        .entropy = entropy_is_used(&c->entropy) ? &c->entropy : NULL,
        .entropy_state = &run->entropy,
    };
    enum status st = c->kl_reward_coef != 0 ? price_kl(run, s) : ST_OK;
    if (st == ST_OK && c->log_completions && c->log_logprobs) {
        config.ret_logprobs = s->logprobs =
            calloc((size_t)s->rollout->n_tokens + 1, sizeof *s->logprobs);
        if (!s->logprobs) st = status_fail(ST_NO_MEMORY, "no memory for --log-logprobs");
    }
    if (st == ST_OK)
        st = update_policy(run->learner, run->bridge, &config, s->rollout, s->scores.advantages, lr,
                           stop_publish_lock(run->stop), ret);
    if (st == ST_OK) st = run_compare_weights(run);
    if (st == ST_OK) st = move_reference(run);
    if (st != ST_OK) return st;
    if (!run->said_memory) memory_say_taken(run->learner);
    run->said_memory = true;
    run->skipped += ret->skipped;
    if (ret->skipped)
        log_warn("step %" PRId64 ": the gradient is not finite; %d of %d updates skipped",
                 run->step + 1, ret->skipped, (int)run->resolved.updates_per_step);
    st = learning_skipped(&run->skipped_in_a_row, !ret->applied, "the",
                          "lower --learning-rate or go back to a checkpoint");
    return st == ST_OK ? note_draft(run, ret) : st;
}
