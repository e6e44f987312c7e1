/* step.c: from samples to published weights. The trainer's thread.
 *
 * The first pass over samples keeps their log-probabilities, before any update: the importance
 * ratio of all iterations is taken against them, so it is exactly 1 in the first and moves with the
 * updates only. What lies between them and the server's (rounding of another batch shape, weights
 * that changed while a sample was in flight) is a weight of its own in the loss (loss.h, tis), and
 * is reported: tokens that the present weights sampled show the error of one of the two.
 * Where several ranks train, each knows all samples and computes the loss and the gradients of
 * every size-th group, by the whole step's scale; the optimizer sums the gradients, and
 * stats_merge() what is reported. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/step.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct pass { // over groups: what the loss function works on
    struct samples *samples;
    const struct step *step;
    struct update_stats *stats;
    struct pack_group *groups; // (n) this rank's
    int n;
    int *numbers; // (n_completions) of theirs, in the samples
    int n_completions;
    bool notes;               // the first pass over them
    double coef, entropy_sum; // of the entropy's bonus; of the chosen tokens
    double *kl;               // learner_kl(); NULL: nobody asks
};

static void pass_close(struct pass *p)
{
    free(p->groups);
    free(p->numbers);
}

// Groups [first, first + n) that are this rank's.
static enum status pass_open(struct learner *l, struct samples *s, int first, int n,
                             const struct step *step, struct update_stats *stats, struct pass *ret)
{
    const int rank = comm_rank(learner_info(l)->comm), size = comm_size(learner_info(l)->comm);
    struct pass p = {.samples = s, .step = step, .stats = stats};
    p.groups = calloc((size_t)n + 1, sizeof *p.groups);
    p.numbers = calloc((size_t)s->n + 1, sizeof *p.numbers);
    if (!p.groups || !p.numbers) {
        pass_close(&p);
        return status_fail(ST_NO_MEMORY, "no memory for %d samples", s->n);
    }
    for (int g = first; g < first + n; g++) {
        if (g % size != rank) continue;
        const struct pack_group *group = &s->groups[g];
        p.groups[p.n++] = *group;
        for (int c = 0; c < group->n; c++)
            p.numbers[p.n_completions++] = (int)(group->completions - s->completions) + c;
    }
    if (step && step->entropy) p.coef = entropy_coef(step->entropy, step->entropy_state);
    p.notes = !s->noted && !(stats && stats->again);
    *ret = p;
    return ST_OK;
}

// ---- notes --------------------------------------------------------------------------------------

// Where a data set gave the completions (the ranks of their tokens are then asked for), what is
// learned of them alone counts; of pairs the chosen one's tokens are to be likely.
static void note(struct pass *p, const struct learner_rows *rows, int seq)
{
    const int number = p->numbers[rows->mb->sample[seq]], at = rows->mb->first[seq],
              n = rows->mb->first[seq + 1] - at;
    const struct pack_completion *c = &p->samples->completions[number];
    const long first = p->samples->first[number];
    const bool rejected = p->step && losses[p->step->loss.type].pair && seq % 2 == 1;
    memcpy(p->samples->logprobs + first, rows->logprobs + at, (size_t)n * sizeof(float));
    memcpy(p->samples->entropies + first, rows->entropy + at, (size_t)n * sizeof(float));
    if (c->given) return; // nothing that was sampled
    for (int t = 0; t < n; t++) {
        const bool wrote = completion_wrote(c, t);
        if (p->kl && wrote)
            p->kl[number] += (double)rows->logprobs[at + t] - rows->ref_logprobs[at + t];
        if (!p->stats) continue;
        if (token_author(c->authors, t) == AUTHOR_OTHER || (rows->ranked && !wrote)) continue;
        stats_add(p->stats, STAT_ENTROPY, rows->entropy[at + t]);
        stats_add(p->stats, STAT_FROZEN, !wrote);
        if (rows->ranked && !rejected)
            stats_add(p->stats, STAT_LIKELIEST, rows->ranked[at + t].rank == 1);
        if (!c->server_logprobs || !wrote)
            continue; // of another's tokens these are not the policy's
        const double delta = (double)rows->logprobs[at + t] - c->server_logprobs[t];
        stats_add(p->stats, STAT_MISMATCH, fabs(delta));
        stats_add(p->stats, STAT_MISMATCH_K3, expm1(delta) - delta);
        if (!c->versions || c->versions[t] == p->step->version)
            stats_add(p->stats, STAT_MISMATCH_NOW, fabs(delta));
    }
}

static void note_rows(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    (void)ret_dlogprobs;
    for (int s = 0; s < rows->mb->n_seqs; s++) note(context, rows, s);
}

// --exact: the sentence names the farthest of those that differ.
static enum status check_exact(const struct pass *p)
{
    const struct pack_completion *far = NULL;
    long differing = 0;
    int token = 0;
    double largest = 0;
    float here = 0;
    for (int i = 0; i < p->n_completions; i++) {
        const struct pack_completion *c = &p->samples->completions[p->numbers[i]];
        const float *logprobs = p->samples->logprobs + p->samples->first[p->numbers[i]];
        for (int t = 0; c->server_logprobs && t < c->n; t++) {
            const double off = fabs((double)logprobs[t] - c->server_logprobs[t]);
            if (!completion_wrote(c, t) || logprobs[t] == c->server_logprobs[t]) continue;
            if (differing++ > 0 && !(off > largest)) continue;
            far = c, token = t, largest = off, here = logprobs[t];
        }
    }
    if (differing == 0) return ST_OK;
    return status_fail(ST_MISMATCH,
                       "--exact: %ld of %ld log-probabilities of this step differ from the "
                       "server's, most that of line %d, sample %d, token %d: %.9g there (weight "
                       "version %" PRIu64 "), %.9g here (version %" PRIu64
                       "); are both programs of one build, on one kind of processor? On a GPU "
                       "models of a few odd widths may differ, too (docs/use/limits.md)",
                       differing, p->samples->first[p->samples->n], far->line, far->number, token,
                       (double)far->server_logprobs[token],
                       far->versions ? far->versions[token] : 0, (double)here, p->step->version);
}

// ---- the loss -----------------------------------------------------------------------------------

struct loss_scale loss_scale_of(const struct loss_config *loss, const struct samples *s, int first,
                                int n)
{
    struct loss_scale scale = {0};
    const bool pairs = losses[loss->type].pair != NULL;
    for (int g = first; g < first + n; g++) {
        const struct pack_group *group = &s->groups[g];
        if (group->n > 0 && group->completions[0].given) {
            scale.given += group->completions[0].n;
            continue;
        }
        scale.seqs += pairs ? 1 : group->n;
        for (int i = 0; i < (pairs ? 1 : group->n); i++) {
            const struct pack_completion *c = &group->completions[i];
            const long number = c - s->completions;
            int by[AUTHOR_FROZEN + 1] = {0};
            for (int t = 0; t < c->n; t++) by[token_author(c->authors, t)]++;
            if (!c->masked)
                scale.tokens += by[AUTHOR_POLICY] + loss->frozen_weight * by[AUTHOR_FROZEN];
            for (long t = s->first[number]; t < s->first[number + 1]; t++)
                scale.chosen += s->chosen[t];
        }
    }
    return scale;
}

// A sequence's tokens that the policy wrote are held to the teacher, and given ones, by equal
// shares of each kind's part.
static void hold(const struct pass *p, const struct pack_completion *c,
                 const struct learner_rows *rows, int seq)
{
    const struct loss_config *loss = &p->step->loss;
    const struct loss_scale *scale = &p->step->scale;
    const double part = c->given ? 1 - loss->distill_lambda : loss->distill_lambda,
                 tokens = c->given ? scale->given : scale->tokens;
    const int at = rows->mb->first[seq], n = rows->mb->first[seq + 1] - at;
    if (!rows->ddivergence || (c->masked && !c->given)) return;
    for (int t = 0; t < n; t++)
        if (completion_wrote(c, t))
            rows->ddivergence[at + t] =
                (float)(loss->distill_weight * part / (tokens > 0 ? tokens : 1));
}

// One sequence at a time, or one pair.
static void add_losses(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct pass *p = context;
    const struct micro_batch *mb = rows->mb;
    const struct entropy_config *entropy = p->step->entropy;
    const int each = losses[p->step->loss.type].pair ? 2 : 1;
    for (int s = 0; s < mb->n_seqs; s += each) {
        const int number = p->numbers[mb->sample[s]];
        const long first = p->samples->first[number];
        const uint8_t *chosen = p->samples->chosen + first;
        struct loss_rows targets[2];
        for (int k = 0; k < each; k++) {
            const int at = mb->first[s + k];
            if (p->notes) note(p, rows, s + k);
            targets[k] = (struct loss_rows){
                .n = mb->first[s + k + 1] - at,
                .logprobs = rows->logprobs + at,
                .old = p->samples->logprobs + first,
                .ref = rows->ref_logprobs ? rows->ref_logprobs + at : NULL,
                .chosen = entropy && entropy->top_quantile < 1 ? chosen : NULL,
            };
        }
        loss_compute(&p->step->loss, &p->step->scale, &p->samples->completions[number], targets,
                     p->stats, ret_dlogprobs + mb->first[s]);
        hold(p, &p->samples->completions[number], rows, s);
        if (!entropy) continue;
        const int at = mb->first[s];
        const double bonus = entropy_bonus(p->coef, p->step->scale.chosen, targets[0].n,
                                           rows->entropy + at, chosen, rows->dentropy + at);
        stats_add(p->stats, STAT_LOSS, bonus);
        stats_add(p->stats, STAT_EXTRA_LOSS, bonus);
        for (int t = 0; t < targets[0].n; t++)
            if (chosen[t]) p->entropy_sum += rows->entropy[at + t];
    }
}

enum status learner_kl(struct learner *l, struct samples *samples, double *ret_kl)
{
    struct pass p;
    enum status st = pass_open(l, samples, 0, samples->n_groups, NULL, NULL, &p);
    if (st != ST_OK) return st;
    p.kl = ret_kl;
    memset(ret_kl, 0, (size_t)samples->n * sizeof *ret_kl);
    st = learner_run(l, PASS_NOTE, p.groups, p.n, note_rows, &p, NULL);
    pass_close(&p);
    return st == ST_OK ? comm_sum_host(learner_info(l)->comm, ret_kl, samples->n) : st;
}

enum status learner_pass(struct learner *l, enum pass_kind kind, struct samples *samples, int first,
                         int n, const struct step *step, struct update_stats *stats)
{
    const double routers = learner_info(l)->balance_coef;
    struct pass p;
    enum status st = pass_open(l, samples, first, n, step, stats, &p);
    if (st != ST_OK) return st;
    CHECK(
        learner_run(l, kind, p.groups, p.n, kind == PASS_NOTE ? note_rows : add_losses, &p, stats));
    if (kind == PASS_STEP && routers > 0) {
        const double loss = learner_info(l)->balance_loss;
        stats_add(stats, STAT_LOSS, routers * loss);
        stats_add(stats, STAT_EXTRA_LOSS, routers * loss);
        stats_add(stats, STAT_AUX_LOSS, loss);
    }
    if (kind == PASS_STEP && step->entropy && step->entropy->adaptive && step->scale.chosen > 0) {
        CHECK(comm_sum_host(learner_info(l)->comm, &p.entropy_sum, 1));
        entropy_observe(step->entropy, p.entropy_sum / (double)step->scale.chosen,
                        step->entropy_state);
    }
    if (p.notes && step && step->exact) st = check_exact(&p);
out:
    pass_close(&p);
    return st;
}

// ---- the step -----------------------------------------------------------------------------------

// ret_skip: the gradient was not finite.
static enum status clip(struct learner *l, double *ret_norm, bool *ret_skip)
{
    enum status st = optimizer_prepare(learner_info(l)->optimizer, ret_norm);
    phase_timers_lap(learner_info(l)->phases, PHASE_OPTIMIZER);
    *ret_skip = st == ST_INVALID;
    return *ret_skip ? ST_OK : st;
}

struct apply { // NULL: nothing to write there
    struct learner *policy, *draft;
    const struct step *step;
};

static enum status apply_update(void *context)
{
    struct apply *a = context;
    enum status st = ST_OK;
    if (a->policy) CHECK(optimizer_apply(learner_info(a->policy)->optimizer, a->step->lr));
    if (a->draft) CHECK(optimizer_apply(learner_info(a->draft)->optimizer, a->step->draft_lr));
out:
    return st;
}

static enum status publish(struct learner *l, const struct publish *to, struct apply *apply,
                           struct publish_times *sums)
{
    struct publish_times times = {0};
    if (!to->run) return apply_update(apply);
    enum status st = to->run(to->context, apply_update, apply, &times);
    phase_timers_lap(learner_info(l)->phases, PHASE_PUBLISH);
    phase_timers_move(learner_info(l)->phases, PHASE_PUBLISH, PHASE_OPTIMIZER,
                      times.write_ms / 1e3);
    sums->wait_ms += times.wait_ms;
    sums->write_ms += times.write_ms;
    sums->total_ms += times.total_ms;
    return st;
}

enum status learner_step(struct learner *l, struct samples *samples, int first, int n,
                         const struct step *step, struct update_stats *stats)
{
    struct apply apply = {.step = step};
    double norm = 0;
    bool skip;
    enum status st;
    stats->lr = step->lr;
    stats->n_updates += !stats->again;
    if (samples) CHECK(learner_pass(l, PASS_STEP, samples, first, n, step, stats));

    CHECK(clip(l, &norm, &skip));
    stats->gradient_wait_ms += optimizer_wait_ms(learner_info(l)->optimizer);
    if (!skip) apply.policy = l;
    if (!stats->again && stats->draft_targets > 0) {
        CHECK(clip(learner_info(l)->draft, &stats->draft_grad_norm, &stats->draft_skipped));
        if (!stats->draft_skipped) apply.draft = learner_info(l)->draft;
    }
    if (apply.policy || apply.draft) CHECK(publish(l, &step->publish, &apply, &stats->publish));

    stats->skipped += skip;
    stats->applied += !skip;
    if (!skip) stats->grad_norm = norm;
out:
    return st;
}

// ---- the updates by a step's samples ------------------------------------------------------------

enum status update_share_logprobs(struct learner *l, const struct samples *s, double *ret)
{
    for (long t = 0; t < s->first[s->n]; t++) ret[t] = s->logprobs[t];
    return comm_sum_host(learner_info(l)->comm, ret, s->first[s->n]);
}

// Of the chosen tokens, on all ranks, those of the highest entropy alone.
static enum status choose_highest(struct learner *l, struct samples *s, double top)
{
    const long n = s->first[s->n];
    double *all = malloc(2 * ((size_t)n + 1) * sizeof *all), *sorted = all + n + 1;
    long n_sorted = 0;
    if (!all) return status_fail(ST_NO_MEMORY, "no memory for %ld entropies", n);
    for (long t = 0; t < n; t++) all[t] = s->entropies[t];
    enum status st = comm_sum_host(learner_info(l)->comm, all, n); // 0 for those of others
    for (long t = 0; t < n; t++)
        if (s->chosen[t]) sorted[n_sorted++] = all[t];
    const double threshold = entropy_threshold(sorted, n_sorted, top);
    for (long t = 0; t < n; t++) s->chosen[t] = s->chosen[t] && all[t] >= threshold;
    free(all);
    return st;
}

enum status update_policy(struct learner *l, const struct update_config *config,
                          struct samples *samples, struct update_stats *ret)
{
    struct update_stats stats = {0};
    struct step step = config->step;
    const int64_t groups = samples->n_groups;
    const bool chooses = step.entropy && step.entropy->top_quantile < 1;
    int n = config->mini_batches > 1 ? config->mini_batches : 1;
    enum status st;
    if (n > groups) n = (int)groups;
    if (chooses || n > 1) { // its log-probabilities or entropies are wanted in a later pass
        CHECK(learner_pass(l, PASS_NOTE, samples, 0, samples->n_groups, &step, &stats));
        samples->noted = true;
    }
    if (chooses) CHECK(choose_highest(l, samples, step.entropy->top_quantile));
    for (int i = 0; i < config->num_iterations * n; i++) {
        const int first = (int)(groups * (i % n) / n), end = (int)(groups * (i % n + 1) / n);
        stats.again = i >= n;
        step.scale = loss_scale_of(&step.loss, samples, first, end - first);
        if (config->schedule) step.lr = schedule_at(config->schedule, config->first_update + i);
        CHECK(learner_step(l, samples, first, end - first, &step, &stats));
    }
    CHECK(stats_merge(learner_info(l)->comm, &stats));
    *ret = stats;
out:
    return st;
}
