/* update.c: from a rollout and its advantages to published weights. The trainer's thread.
 *
 * The first iteration's log-probabilities, before any update, are kept: the importance ratio of all
 * iterations is taken against them, so it is exactly 1 in the first and moves with the updates
 * only. What lies between them and the server's (rounding of another batch shape, weights that
 * changed while a sample was in flight) is a weight of its own in the loss (loss.h, tis).
 * Where several ranks train, each knows the whole rollout and computes the loss and the gradients
 * of every size-th group, by the whole step's number of tokens; the optimizer sums the gradients,
 * and what is reported is summed at the end.
 *
 * Tokens that the present weights sampled show the error of one of the two, which is reported every
 * step.
 */
#include "trainer/learn/update.h"
#include "trainer/learn/measured.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct part { // of the rollout: what one update learns from
    int first_group, n_groups;
    int n_samples;             // that the means over sequences divide by
    double weight;             // of the tokens that count
    long n_chosen;             // by entropy
    struct pack_group *groups; // (n_own) of this rank; NULL: there are none
    int n_own, own_at;         // own_at: those of the parts before
    double entropy_sum, coef;  // of the chosen tokens; the bonus'
};

struct update { // what the loss function works on
    const struct update_config *config;
    const struct rollout *rollout;
    const float *advantages;
    struct measured measured;
    uint8_t *counts;  // (n_samples) whether it does for the loss
    bool is_measured; // before the first update
    int rank, n_ranks;
    struct part *part; // the present one
    struct update_stats stats;
};

// Number in the rollout of a sample of this rank's groups.
static int sample_of(const struct update *u, int own)
{
    const int n = u->rollout->n_per_group;
    return (own / n * u->n_ranks + u->rank) * n + own % n;
}

static bool chooses(const struct update *u)
{
    return u->config->entropy && u->config->entropy->top_quantile < 1;
}

static void note_sample(struct update *u, const struct learner_rows *rows, int number, int first)
{
    measured_note(&u->measured, number, rows->logprobs + first, rows->entropy + first, &u->stats);
}

// Of the pass before the first update, where there is one.
static void measure(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct update *u = context;
    (void)ret_dlogprobs;
    for (int s = 0; s < rows->mb->n_seqs; s++)
        note_sample(u, rows, sample_of(u, rows->mb->sample[s]), rows->mb->first[s]);
}

static void add_bonus(struct update *u, const struct learner_rows *rows, int first, int n,
                      const uint8_t *chosen)
{
    struct part *part = u->part;
    const double bonus = entropy_bonus(part->coef, part->n_chosen, n, rows->entropy + first, chosen,
                                       rows->dentropy + first);
    stats_add(&u->stats, STAT_LOSS, bonus);
    stats_add(&u->stats, STAT_EXTRA_LOSS, bonus);
    for (int t = 0; t < n; t++)
        if (chosen[t]) part->entropy_sum += rows->entropy[first + t];
}

static void policy_loss(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct update *u = context;
    const struct micro_batch *mb = rows->mb;
    for (int s = 0; s < mb->n_seqs; s++) {
        const int number = sample_of(u, u->part->own_at * u->rollout->n_per_group + mb->sample[s]);
        const struct completion *sample = &u->rollout->completions[number];
        int first = mb->first[s], n = sample->n;
        const uint8_t *chosen = u->measured.chosen + u->measured.first[number];
        if (!u->stats.again && !u->is_measured) note_sample(u, rows, number, first);
        // One sequence at a time: a masked one is an empty sequence.
        int bounds[2] = {0, u->counts[number] ? n : 0};
        struct loss_batch batch = {
            .n_seqs = 1,
            .first = bounds,
            .logprobs = rows->logprobs + first,
            .old_logprobs = u->measured.old_logprobs + u->measured.first[number],
            .sampler_logprobs =
                u->config->processed && sample->processed ? sample->processed : sample->logprobs,
            .ref_logprobs = rows->ref_logprobs ? rows->ref_logprobs + first : NULL,
            .advantages = &u->advantages[number],
            .step_seqs = u->part->n_samples,
            .step_tokens = u->part->weight,
            .by_policy = sample->by_policy,
            .token_advantages = sample->advantages,
            .chosen = chooses(u) ? chosen : NULL,
        };
        memset(ret_dlogprobs + first, 0, (size_t)n * sizeof *ret_dlogprobs);
        loss_compute(&u->config->loss, &batch, &u->stats, ret_dlogprobs + first);
        if (u->config->entropy) add_bonus(u, rows, first, n, chosen);
    }
}

// Of this rank; ret_groups has room for one more, so that there may be none.
static enum status make_groups(const struct update *u, struct pack_group **ret_groups,
                               struct pack_completion **ret_completions, int *ret_n)
{
    const struct rollout *r = u->rollout;
    int n = r->n_groups * r->n_per_group, own = 0;
    struct pack_group *groups = calloc((size_t)r->n_groups + 1, sizeof *groups);
    struct pack_completion *completions = calloc((size_t)n, sizeof *completions);
    if (!groups || !completions) {
        free(groups);
        free(completions);
        return status_fail(ST_NO_MEMORY, "no memory for %d samples", n);
    }
    for (int i = 0; i < n; i++)
        completions[i] =
            (struct pack_completion){.ids = r->completions[i].ids, .n = r->completions[i].n};
    for (int g = u->rank; g < r->n_groups; g += u->n_ranks)
        groups[own++] = (struct pack_group){
            .prompt = rollout_prompt(r, g)->ids,
            .n_prompt = rollout_prompt(r, g)->n,
            .completions = completions + (size_t)g * r->n_per_group,
            .n = r->n_per_group,
        };
    *ret_groups = groups;
    *ret_completions = completions;
    *ret_n = own;
    return ST_OK;
}

struct publishing {
    struct bridge *bridge;
    pthread_mutex_t *lock;
};

struct apply { // NULL: nothing to write there
    struct learner *policy, *draft;
    double lr, draft_lr;
};

static enum status apply_update(void *context)
{
    struct apply *a = context;
    enum status st = a->policy ? learner_apply(a->policy, a->lr) : ST_OK;
    return st == ST_OK && a->draft ? learner_apply(a->draft, a->draft_lr) : st;
}

static enum status publish(struct learner *l, struct apply *apply, const struct publishing *to,
                           const struct update_config *config, struct update_stats *stats)
{
    struct publish_times times = {0};
    pthread_mutex_lock(to->lock);
    enum status st =
        bridge_publish(to->bridge, config->quiesce_timeout_ms, apply_update, apply, &times);
    pthread_mutex_unlock(to->lock);
    spans_lap(learner_spans(l), SPAN_PUBLISH);
    spans_move(learner_spans(l), SPAN_PUBLISH, SPAN_OPTIMIZER, times.write_ms / 1e3);
    stats->publish.wait_ms += times.wait_ms;
    stats->publish.write_ms += times.write_ms;
    stats->publish.total_ms += times.total_ms;
    return status_context(st, "publishing the update");
}

// Gradients of one iteration; the draft's in the first, while the policy is what sampled them.
static enum status gradients(struct learner *l, struct update *u, const struct pack_group *groups,
                             int n)
{
    if (!u->stats.again && learner_draft(l))
        return learner_gradients_with_draft(l, groups, n, policy_loss, u, &u->stats.draft);
    return learner_gradients(l, groups, n, policy_loss, u);
}

// ret_skip: the gradient was not finite.
static enum status clip(struct learner *l, double *ret_norm, bool *ret_skip)
{
    enum status st = learner_clip(l, ret_norm);
    spans_lap(learner_spans(l), SPAN_OPTIMIZER);
    *ret_skip = st == ST_INVALID;
    return *ret_skip ? ST_OK : st;
}

// What counts of the rollout.
static enum status count_samples(struct update *u)
{
    u->counts = calloc((size_t)u->measured.n_samples + 1, sizeof *u->counts);
    if (!u->counts)
        return status_fail(ST_NO_MEMORY, "no memory for %d samples", u->measured.n_samples);
    for (int i = 0; i < u->measured.n_samples; i++) {
        const struct completion *s = &u->rollout->completions[i];
        u->counts[i] = !(u->config->mask_truncated && s->truncated);
    }
    return ST_OK;
}

// The i-th of n parts, as equal as can be; groups: this rank's of the whole rollout.
static struct part part_of(const struct update *u, int i, int n, struct pack_group *groups,
                           int n_own)
{
    const int all = u->rollout->n_groups, each = u->rollout->n_per_group;
    struct part part = {.first_group = (int)((int64_t)all * i / n)};
    const int end = (int)((int64_t)all * (i + 1) / n);
    part.n_groups = end - part.first_group;
    part.n_samples = part.n_groups * each;
    for (int own = 0; own < n_own; own++) {
        const int group = own * u->n_ranks + u->rank;
        if (group < part.first_group) part.own_at++;
        if (group >= part.first_group && group < end) part.n_own++;
    }
    part.groups = groups + part.own_at;
    for (int k = part.first_group * each; k < end * each; k++) {
        const struct completion *s = &u->rollout->completions[k];
        int n_policy = 0;
        for (int t = 0; t < s->n; t++) n_policy += completion_is_policys(s, t);
        if (u->counts[k])
            part.weight += n_policy + u->config->loss.frozen_weight * (s->n - n_policy);
    }
    part.n_chosen = measured_chosen(&u->measured, part.first_group * each, part.n_samples);
    return part;
}

// The pass before the first update, where its log-probabilities or entropies are wanted in a later
// one; and which tokens are chosen.
static enum status look_ahead(struct learner *l, struct update *u, struct pack_group *groups,
                              int n_own)
{
    enum status st = ST_OK;
    u->is_measured = chooses(u) || u->config->mini_batches > 1;
    if (u->is_measured) {
        CHECK(learner_evaluate(l, groups, n_own, measure, u));
        if (u->config->exact) CHECK(measured_check_exact(&u->measured));
    }
    st = measured_choose(&u->measured, u->counts, chooses(u) ? u->config->entropy->top_quantile : 1,
                         learner_comm(l));
out:
    return st;
}

static void add_balance(const struct learner *l, struct update *u)
{
    const double loss = learner_balance_loss(l), part = learner_balance_coef(l) * loss;
    stats_add(&u->stats, STAT_LOSS, part);
    stats_add(&u->stats, STAT_EXTRA_LOSS, part);
    stats_add(&u->stats, STAT_AUX_LOSS, loss);
}

// Before the weights of an update are written.
static enum status end_of_gradients(struct learner *l, struct update *u, bool last_part)
{
    enum status st = ST_OK;
    const struct update_config *config = u->config;
    if (learner_balance_coef(l) > 0) add_balance(l, u);
    if (!u->stats.again && last_part && !u->is_measured && config->exact)
        CHECK(measured_check_exact(&u->measured));
    if (config->entropy && config->entropy->adaptive && u->part->n_chosen > 0) {
        CHECK(comm_sum_host(learner_comm(l), &u->part->entropy_sum, 1));
        entropy_observe(config->entropy, u->part->entropy_sum / (double)u->part->n_chosen,
                        config->entropy_state);
    }
out:
    return st;
}

// One update by one part; number: of those before.
static enum status update_part(struct learner *l, struct update *u, struct part *part, int number,
                               bool last_part, double lr, const struct publishing *to)
{
    struct update_stats *stats = &u->stats;
    const struct update_config *config = u->config;
    struct apply apply = {.policy = l, .lr = lr, .draft_lr = config->draft_lr};
    double norm = 0;
    bool skip;
    enum status st;
    u->part = part;
    part->entropy_sum = 0;
    part->coef = config->entropy ? entropy_coef(config->entropy, config->entropy_state) : 0;
    if (config->schedule) apply.lr = schedule_at(config->schedule, config->first_update + number);
    stats->lr = apply.lr;
    CHECK(gradients(l, u, part->groups, part->n_own));
    CHECK(end_of_gradients(l, u, last_part));
    CHECK(clip(l, &norm, &skip));
    stats->gradient_wait_ms += optimizer_wait_ms(learner_optimizer(l));
    if (skip) {
        stats->skipped++;
        apply.policy = NULL;
    }
    if (!stats->again && stats->draft.targets > 0) {
        CHECK(clip(learner_draft(l), &stats->draft_grad_norm, &stats->draft_skipped));
        if (!stats->draft_skipped) apply.draft = learner_draft(l);
    }
    if (!apply.policy && !apply.draft) return ST_OK;
    CHECK(publish(l, &apply, to, config, stats));
    if (skip) return ST_OK;
    stats->grad_norm = norm;
    stats->applied++;
out:
    return st;
}

#define SHARED_AT_ONCE 65536 // numbers

// Each rank has those of its groups, and 0 for the others'.
static enum status share_logprobs(struct learner *l, const struct measured *m, double *ret)
{
    const long n = m->first[m->n_samples];
    for (long t = 0; t < n; t++) ret[t] = m->old_logprobs[t];
    enum status st = ST_OK; // in pieces: those of all ranks lie on the device together
    for (long at = 0; at < n && st == ST_OK; at += SHARED_AT_ONCE)
        st = comm_sum_host(learner_comm(l), ret + at,
                           (int)(n - at < SHARED_AT_ONCE ? n - at : SHARED_AT_ONCE));
    return st;
}

enum status update_policy(struct learner *l, struct bridge *bridge,
                          const struct update_config *config, const struct rollout *rollout,
                          const float *advantages, double lr, pthread_mutex_t *publish_lock,
                          struct update_stats *ret)
{
    struct pack_group *groups = NULL;
    struct pack_completion *completions = NULL;
    const struct publishing to = {bridge, publish_lock};
    struct update u = {.config = config,
                       .rollout = rollout,
                       .advantages = advantages,
                       .rank = comm_rank(learner_comm(l)),
                       .n_ranks = comm_size(learner_comm(l))};
    enum status st;
    int n_own = 0, n_parts = config->mini_batches > 1 ? config->mini_batches : 1;
    if (n_parts > rollout->n_groups) n_parts = rollout->n_groups;
    CHECK(measured_init(&u.measured, rollout, control_version(bridge_control(bridge))));
    CHECK(count_samples(&u));
    CHECK(make_groups(&u, &groups, &completions, &n_own));
    CHECK(look_ahead(l, &u, groups, n_own));
    for (int i = 0; i < config->num_iterations * n_parts; i++) {
        struct part part = part_of(&u, i % n_parts, n_parts, groups, n_own);
        u.stats.again = i >= n_parts;
        CHECK(update_part(l, &u, &part, i, (i + 1) % n_parts == 0, lr, &to));
    }
    u.stats.n_updates = n_parts;
    CHECK(stats_merge(learner_comm(l), &u.stats));
    if (config->ret_logprobs) CHECK(share_logprobs(l, &u.measured, config->ret_logprobs));
    *ret = u.stats;
out:
    measured_release(&u.measured);
    free(u.counts);
    free(groups);
    free(completions);
    return st;
}

struct kl_sums {
    const struct update *update;
    double *kl; // (n_samples)
};

static void sum_kl(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct kl_sums *sums = context;
    const struct micro_batch *mb = rows->mb;
    (void)ret_dlogprobs;
    for (int s = 0; s < mb->n_seqs; s++) {
        const int number = sample_of(sums->update, mb->sample[s]);
        const struct completion *sample = &sums->update->rollout->completions[number];
        for (int t = 0; t < sample->n; t++)
            if (completion_is_policys(sample, t))
                sums->kl[number] +=
                    (double)rows->logprobs[mb->first[s] + t] - rows->ref_logprobs[mb->first[s] + t];
    }
}

enum status update_measure_kl(struct learner *l, const struct rollout *rollout, double *ret_kl)
{
    struct pack_group *groups = NULL;
    struct pack_completion *completions = NULL;
    const struct update u = {.rollout = rollout,
                             .rank = comm_rank(learner_comm(l)),
                             .n_ranks = comm_size(learner_comm(l))};
    const int n = rollout->n_groups * rollout->n_per_group;
    struct kl_sums sums = {&u, ret_kl};
    int n_own;
    enum status st;
    memset(ret_kl, 0, (size_t)n * sizeof *ret_kl);
    CHECK(make_groups(&u, &groups, &completions, &n_own));
    CHECK(learner_evaluate(l, groups, n_own, sum_kl, &sums));
    st = comm_sum_host(learner_comm(l), ret_kl, n);
out:
    free(groups);
    free(completions);
    return st;
}
