/* measured.c: notes of the first passes over a rollout. The trainer's thread.
 *
 * The comparison with the server is of tokens that the policy wrote: the sampler's numbers of those
 * that a frozen model wrote are not the policy's. */
#include "trainer/learn/measured.h"
#include "trainer/learn/entropy.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum status measured_init(struct measured *m, const struct rollout *rollout, uint64_t version)
{
    const size_t samples = (size_t)rollout->n_groups * (size_t)rollout->n_per_group,
                 tokens = (size_t)rollout->n_tokens;
    m->rollout = rollout;
    m->version = version;
    m->n_samples = (int)samples;
    m->first = calloc(samples + 1, sizeof *m->first);
    m->old_logprobs = calloc(tokens + 1, sizeof *m->old_logprobs);
    m->entropies = calloc(tokens + 1, sizeof *m->entropies);
    m->chosen = calloc(tokens + 1, sizeof *m->chosen);
    if (!m->first || !m->old_logprobs || !m->entropies || !m->chosen)
        return status_fail(ST_NO_MEMORY, "no memory for %zu log-probabilities", tokens);
    for (size_t i = 0; i < samples; i++) m->first[i + 1] = m->first[i] + rollout->completions[i].n;
    return ST_OK;
}

void measured_release(struct measured *m)
{
    free(m->first);
    free(m->old_logprobs);
    free(m->entropies);
    free(m->chosen);
}

static void compare_with_server(struct measured *m, int sample, const float *logprobs,
                                struct update_stats *stats)
{
    const struct completion *s = &m->rollout->completions[sample];
    for (int t = 0; s->logprobs && t < s->n; t++) {
        if (!completion_is_policys(s, t)) continue;
        double delta = (double)logprobs[t] - s->logprobs[t];
        if (logprobs[t] != s->logprobs[t]) {
            double before = (double)m->far.trainer - m->far.server;
            if (m->differing++ == 0 || fabs(delta) > fabs(before))
                m->far = (struct difference){sample, t, s->logprobs[t], logprobs[t],
                                             s->versions ? s->versions[t] : 0};
        }
        stats_add(stats, STAT_MISMATCH, fabs(delta));
        stats_add(stats, STAT_MISMATCH_K3, expm1(delta) - delta);
        if (!s->versions || s->versions[t] == m->version)
            stats_add(stats, STAT_MISMATCH_NOW, fabs(delta));
    }
}

void measured_note(struct measured *m, int sample, const float *logprobs, const float *entropies,
                   struct update_stats *stats)
{
    const int n = m->rollout->completions[sample].n;
    memcpy(m->old_logprobs + m->first[sample], logprobs, (size_t)n * sizeof *logprobs);
    compare_with_server(m, sample, logprobs, stats);
    for (int t = 0; t < n; t++) {
        m->entropies[m->first[sample] + t] = entropies[t];
        stats_add(stats, STAT_ENTROPY, entropies[t]);
        stats_add(stats, STAT_FROZEN, !completion_is_policys(&m->rollout->completions[sample], t));
    }
}

enum status measured_check_exact(const struct measured *m)
{
    const struct difference *far = &m->far;
    const int n = m->rollout->n_per_group;
    if (m->differing == 0) return ST_OK;
    return status_fail(ST_MISMATCH,
                       "--exact: %ld of %ld log-probabilities of this step differ from the "
                       "server's, most that of line %d, sample %d, token %d: %.9g there (weight "
                       "version %" PRIu64 "), %.9g here (version %" PRIu64
                       "); are both programs of one build, on one kind of processor?",
                       m->differing, m->rollout->n_tokens,
                       m->rollout->examples[far->sample / n]->line, far->sample % n, far->token,
                       (double)far->server, far->version, (double)far->trainer, m->version);
}

// Of the chosen tokens, those of the highest entropy alone.
static enum status keep_highest(struct measured *m, double top)
{
    const long n = m->first[m->n_samples];
    double *sorted = malloc(((size_t)n + 1) * sizeof *sorted);
    long n_sorted = 0;
    if (!sorted) return status_fail(ST_NO_MEMORY, "no memory for %ld entropies", n);
    for (long t = 0; t < n; t++)
        if (m->chosen[t]) sorted[n_sorted++] = m->entropies[t];
    const double least = entropy_threshold(sorted, n_sorted, top);
    for (long t = 0; t < n; t++) m->chosen[t] = m->chosen[t] && m->entropies[t] >= least;
    free(sorted);
    return ST_OK;
}

enum status measured_choose(struct measured *m, const uint8_t *counts, double top,
                            struct comm *comm)
{
    for (int i = 0; i < m->n_samples; i++)
        for (long t = m->first[i]; t < m->first[i + 1]; t++)
            m->chosen[t] = counts[i] && completion_is_policys(&m->rollout->completions[i],
                                                              (int)(t - m->first[i]));
    if (top >= 1) return ST_OK;
    enum status st = comm_sum_host(comm, m->entropies, (int)m->first[m->n_samples]);
    return st == ST_OK ? keep_highest(m, top) : st;
}

long measured_chosen(const struct measured *m, int first_sample, int n_samples)
{
    long n = 0;
    for (long t = m->first[first_sample]; t < m->first[first_sample + n_samples]; t++)
        n += m->chosen[t];
    return n;
}
