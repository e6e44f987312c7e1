/* update.c: the updates by a step's samples. The trainer's thread. */
#include "trainer/learn/update.h"

#include <stdlib.h>

#define SHARED_AT_ONCE 65536 // numbers: those of all ranks lie on the device together

enum status update_sum(struct learner *l, double *x, long n)
{
    enum status st = ST_OK;
    for (long at = 0; at < n && st == ST_OK; at += SHARED_AT_ONCE)
        st = comm_sum_host(learner_comm(l), x + at,
                           (int)(n - at < SHARED_AT_ONCE ? n - at : SHARED_AT_ONCE));
    return st;
}

enum status update_share_logprobs(struct learner *l, const struct samples *s, double *ret)
{
    for (long t = 0; t < s->first[s->n]; t++) ret[t] = s->logprobs[t];
    return update_sum(l, ret, s->first[s->n]);
}

// Of the chosen tokens, on all ranks, those of the highest entropy alone.
static enum status choose_highest(struct learner *l, struct samples *s, double top)
{
    const long n = s->first[s->n];
    double *all = malloc(2 * ((size_t)n + 1) * sizeof *all), *sorted = all + n + 1;
    long n_sorted = 0;
    if (!all) return status_fail(ST_NO_MEMORY, "no memory for %ld entropies", n);
    for (long t = 0; t < n; t++) all[t] = s->entropies[t];
    enum status st = update_sum(l, all, n); // 0 for those of others
    for (long t = 0; t < n; t++)
        if (s->chosen[t]) sorted[n_sorted++] = all[t];
    const double least = entropy_threshold(sorted, n_sorted, top);
    for (long t = 0; t < n; t++) s->chosen[t] = s->chosen[t] && all[t] >= least;
    free(all);
    return st;
}

// The pass before the first update, where its log-probabilities or entropies are wanted in a later
// one.
static enum status look_ahead(struct learner *l, const struct step *step, struct samples *samples,
                              int mini_batches, struct update_stats *stats)
{
    const bool chooses = step->entropy && step->entropy->top_quantile < 1;
    if (!chooses && mini_batches == 1) return ST_OK;
    enum status st = learner_pass(l, PASS_NOTE, samples, 0, samples->n_groups, step, stats);
    samples->noted = true;
    if (st != ST_OK || !chooses) return st;
    return choose_highest(l, samples, step->entropy->top_quantile);
}

enum status update_policy(struct learner *l, const struct update_config *config,
                          struct samples *samples, struct update_stats *ret)
{
    struct update_stats stats = {0};
    struct step step = config->step;
    const int64_t groups = samples->n_groups;
    int n = config->mini_batches > 1 ? config->mini_batches : 1;
    enum status st;
    if (n > groups) n = (int)groups;
    CHECK(look_ahead(l, &step, samples, n, &stats));
    for (int i = 0; i < config->num_iterations * n; i++) {
        const int first = (int)(groups * (i % n) / n), end = (int)(groups * (i % n + 1) / n);
        stats.again = i >= n;
        step.scale = loss_scale_of(&step.loss, samples, first, end - first);
        if (config->schedule) step.lr = schedule_at(config->schedule, config->first_update + i);
        CHECK(learner_step(l, samples, first, end - first, &step, &stats));
    }
    CHECK(stats_merge(learner_comm(l), &stats));
    *ret = stats;
out:
    return st;
}
