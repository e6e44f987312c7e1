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

enum status run_learn(struct run *run, const struct rollout_step *s, double lr,
                      struct update_stats *ret)
{
    const struct train_config *c = run->config;
    struct update_config config = {
        .loss = run->resolved.loss,
        .num_iterations = (int)c->num_iterations,
        .mask_truncated = c->mask_truncated_completions,
        .exact = c->exact && c->lora.dropout == 0, // the sampler drops nothing
        .quiesce_timeout_ms = (int64_t)(c->quiesce_timeout * 1e3),
        .draft_lr = schedule_at(&run->resolved.draft_schedule, run->step),
        .mini_batches = (int)c->steps_per_generation,
        .schedule = c->count_updates ? &run->resolved.schedule : NULL,
        .first_update = run->step * run->resolved.updates_per_step,
        .entropy = entropy_is_used(&c->entropy) ? &c->entropy : NULL,
        .entropy_state = &run->entropy,
    };
    enum status st = update_policy(run->learner, run->bridge, &config, s->rollout,
                                   s->scores.advantages, lr, stop_publish_lock(run->stop), ret);
    if (st == ST_OK) st = run_compare_weights(run);
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
