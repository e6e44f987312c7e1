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

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct difference { // of the server's and the trainer's log-probability of a token
    int sample, token;
    float server, trainer;
    uint64_t version; // that sampled it
};

struct sums { // of a rank's groups, in all iterations or in the first
    struct loss_stats loss;
    double entropy, first_loss, first_kl;
    long first_tokens;
    double delta_sum, delta_max, k3;
};

struct update { // what the loss function works on
    const struct update_config *config;
    const struct rollout *rollout;
    const float *advantages;
    float *old_logprobs;     // of all samples, by the trainer, before the first update
    long *first;             // (n_samples + 1) where each sample's begin
    int n_samples;           // that the means over sequences divide by
    long n_tokens, n_policy; // that count; of all, those that the policy wrote
    double weight;           // of those that count
    uint64_t version;
    bool first_iteration;
    int rank, n_ranks;
    struct sums sums;
    long differing;        // log-probabilities that are not the server's to the bit
    struct difference far; // one of the farthest
};

static bool counts(const struct update *u, const struct completion *s)
{
    return !(u->config->mask_truncated && s->truncated);
}

// The sampler's numbers of tokens that a frozen model wrote are not the policy's.
static void compare_with_daemon(struct update *u, int sample, const float *logprobs)
{
    const struct completion *s = &u->rollout->completions[sample];
    for (int t = 0; s->logprobs && t < s->n; t++) {
        if (!completion_is_policys(s, t)) continue;
        double delta = (double)logprobs[t] - s->logprobs[t];
        if (logprobs[t] != s->logprobs[t]) {
            double before = (double)u->far.trainer - u->far.server;
            if (u->differing++ == 0 || fabs(delta) > fabs(before))
                u->far = (struct difference){sample, t, s->logprobs[t], logprobs[t],
                                             s->versions ? s->versions[t] : 0};
        }
        u->sums.delta_sum += fabs(delta);
        u->sums.k3 += expm1(delta) - delta;
        if (!s->versions || s->versions[t] == u->version)
            u->sums.delta_max = fmax(u->sums.delta_max, fabs(delta));
    }
}

// Number in the rollout of a sample of this rank's groups.
static int sample_of(const struct update *u, int own)
{
    const int n = u->rollout->n_per_group;
    return (own / n * u->n_ranks + u->rank) * n + own % n;
}

static void policy_loss(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct update *u = context;
    const struct micro_batch *mb = rows->mb;
    for (int s = 0; s < mb->n_seqs; s++) {
        const int number = sample_of(u, mb->sample[s]);
        const struct completion *sample = &u->rollout->completions[number];
        int first = mb->first[s], n = sample->n;
        float *old = u->old_logprobs + u->first[number];
        if (u->first_iteration) {
            memcpy(old, rows->logprobs + first, (size_t)n * sizeof *old);
            compare_with_daemon(u, number, rows->logprobs + first);
            for (int t = 0; t < n; t++) u->sums.entropy += rows->entropy[first + t];
        }
        // One sequence at a time: a masked one is an empty sequence.
        int bounds[2] = {0, counts(u, sample) ? n : 0};
        struct loss_batch batch = {
            .n_seqs = 1,
            .first = bounds,
            .logprobs = rows->logprobs + first,
            .old_logprobs = old,
            .sampler_logprobs = sample->logprobs,
            .ref_logprobs = rows->ref_logprobs ? rows->ref_logprobs + first : NULL,
            .advantages = &u->advantages[number],
            .step_seqs = u->n_samples,
            .step_tokens = u->weight,
            .by_policy = sample->by_policy,
            .token_advantages = sample->advantages,
        };
        memset(ret_dlogprobs + first, 0, (size_t)n * sizeof *ret_dlogprobs);
        loss_compute(&u->config->loss, &batch, &u->sums.loss, ret_dlogprobs + first);
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

static enum status publish(struct apply *apply, struct bridge *bridge,
                           const struct update_config *config, pthread_mutex_t *publish_lock,
                           struct update_stats *stats)
{
    struct publish_times times = {0};
    pthread_mutex_lock(publish_lock);
    enum status st =
        bridge_publish(bridge, config->quiesce_timeout_ms, apply_update, apply, &times);
    pthread_mutex_unlock(publish_lock);
    stats->publish.wait_ms += times.wait_ms;
    stats->publish.write_ms += times.write_ms;
    stats->publish.total_ms += times.total_ms;
    return status_context(st, "publishing the update");
}

// Gradients of one iteration; the draft's in the first, while the policy is what sampled them.
static enum status gradients(struct learner *l, struct update *u, const struct pack_group *groups,
                             int n, struct update_stats *stats)
{
    if (u->first_iteration && learner_draft(l))
        return learner_gradients_with_draft(l, groups, n, policy_loss, u, &stats->draft);
    return learner_gradients(l, groups, n, policy_loss, u);
}

// ret_skip: the gradient was not finite.
static enum status clip(struct learner *l, double *ret_norm, bool *ret_skip)
{
    enum status st = learner_clip(l, ret_norm);
    *ret_skip = st == ST_INVALID;
    return *ret_skip ? ST_OK : st;
}

// Over all ranks, in their order.
static enum status add_sums(struct comm *comm, struct sums *sums)
{
    const int n = comm_size(comm);
    struct sums *all = calloc((size_t)n, sizeof *all);
    if (!all) return status_fail(ST_NO_MEMORY, "no memory for the sums of %d ranks", n);
    enum status st = comm_gather_host(comm, sums, all, sizeof *all);
    for (int r = 1; st == ST_OK && r < n; r++) {
        loss_stats_add(&all->loss, &all[r].loss);
        all->entropy += all[r].entropy;
        all->first_loss += all[r].first_loss;
        all->first_kl += all[r].first_kl;
        all->first_tokens += all[r].first_tokens;
        all->delta_sum += all[r].delta_sum;
        all->delta_max = fmax(all->delta_max, all[r].delta_max);
        all->k3 += all[r].k3;
    }
    *sums = *all;
    free(all);
    return st;
}

static void fill_stats(const struct update *u, struct update_stats *stats)
{
    double all = u->rollout->n_tokens > 0 ? (double)u->rollout->n_tokens : 1;
    double compared = u->n_policy > 0 ? (double)u->n_policy : 1;
    const struct sums *s = &u->sums;
    stats->loss = s->first_loss;
    stats->kl = s->first_tokens > 0 ? s->first_kl / (double)s->first_tokens : 0;
    stats->entropy = s->entropy / all;
    stats->all = s->loss;
    stats->mismatch_mean = s->delta_sum / compared;
    stats->mismatch_max = s->delta_max;
    stats->mismatch_k3 = s->k3 / compared;
    stats->tokens = u->n_tokens;
    stats->frozen_tokens = u->rollout->n_tokens - u->n_policy;
}

static enum status check_exact(const struct update *u)
{
    const struct difference *far = &u->far;
    if (!u->config->exact || u->differing == 0) return ST_OK;
    return status_fail(ST_MISMATCH,
                       "--exact: %ld of %ld log-probabilities of this step differ from the "
                       "server's, most that of line %d, sample %d, token %d: %.9g there (weight "
                       "version %" PRIu64 "), %.9g here (version %" PRIu64
                       "); are both programs of one build, on one kind of processor?",
                       u->differing, u->rollout->n_tokens,
                       u->rollout->examples[far->sample / u->rollout->n_per_group]->line,
                       far->sample % u->rollout->n_per_group, far->token, (double)far->server,
                       far->version, (double)far->trainer, u->version);
}

static enum status place_old_logprobs(struct update *u)
{
    size_t samples = (size_t)u->n_samples, tokens = (size_t)u->rollout->n_tokens;
    u->first = calloc(samples + 1, sizeof *u->first);
    u->old_logprobs = calloc(tokens + 1, sizeof *u->old_logprobs);
    if (!u->first || !u->old_logprobs)
        return status_fail(ST_NO_MEMORY, "no memory for %zu log-probabilities", tokens);
    for (int i = 0; i < u->n_samples; i++)
        u->first[i + 1] = u->first[i] + u->rollout->completions[i].n;
    return ST_OK;
}

static void count_tokens(struct update *u)
{
    for (int i = 0; i < u->n_samples; i++) {
        const struct completion *s = &u->rollout->completions[i];
        int n_policy = 0;
        for (int t = 0; t < s->n; t++) n_policy += completion_is_policys(s, t);
        u->n_policy += n_policy;
        if (!counts(u, s)) continue;
        u->n_tokens += s->n;
        u->weight += n_policy + u->config->loss.frozen_weight * (s->n - n_policy);
    }
}

enum status update_policy(struct learner *l, struct bridge *bridge,
                          const struct update_config *config, const struct rollout *rollout,
                          const float *advantages, double lr, pthread_mutex_t *publish_lock,
                          struct update_stats *ret)
{
    struct pack_group *groups = NULL;
    struct pack_completion *completions = NULL;
    struct update_stats stats = {0};
    struct update u = {.config = config,
                       .rollout = rollout,
                       .advantages = advantages,
                       .rank = comm_rank(learner_comm(l)),
                       .n_ranks = comm_size(learner_comm(l))};
    enum status st;
    int n_groups = 0;
    u.n_samples = rollout->n_groups * rollout->n_per_group;
    u.version = control_version(bridge_control(bridge));
    count_tokens(&u);
    CHECK(place_old_logprobs(&u));
    CHECK(make_groups(&u, &groups, &completions, &n_groups));
    for (int i = 0; i < config->num_iterations; i++) {
        u.first_iteration = i == 0;
        struct apply apply = {.policy = l, .lr = lr, .draft_lr = config->draft_lr};
        bool skip;
        CHECK(gradients(l, &u, groups, n_groups, &stats));
        if (u.first_iteration) {
            CHECK(check_exact(&u));
            u.sums.first_loss = u.sums.loss.loss;
            u.sums.first_kl = u.sums.loss.kl;
            u.sums.first_tokens = u.sums.loss.tokens;
        }
        double norm = 0;
        CHECK(clip(l, &norm, &skip));
        stats.gradient_wait_ms += optimizer_wait_ms(learner_optimizer(l));
        if (skip) {
            stats.skipped++;
            apply.policy = NULL;
        }
        if (u.first_iteration && stats.draft.targets > 0) {
            CHECK(clip(learner_draft(l), &stats.draft_grad_norm, &stats.draft_skipped));
            if (!stats.draft_skipped) apply.draft = learner_draft(l);
        }
        if (!apply.policy && !apply.draft) continue;
        CHECK(publish(&apply, bridge, config, publish_lock, &stats));
        if (skip) continue;
        stats.grad_norm = norm;
        stats.applied++;
    }
    CHECK(add_sums(learner_comm(l), &u.sums));
    fill_stats(&u, &stats);
    *ret = stats;
out:
    free(u.old_logprobs);
    free(u.first);
    free(groups);
    free(completions);
    return st;
}
