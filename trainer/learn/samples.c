/* samples.c: memory of what is learned from. No state. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/samples.h"

#include <stdlib.h>

enum status samples_new(int n_groups, int n_per_group, struct samples **ret)
{
    struct samples *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for samples");
    s->n_groups = n_groups;
    s->n = n_groups * n_per_group;
    s->groups = calloc((size_t)n_groups + 1, sizeof *s->groups);
    s->completions = calloc((size_t)s->n + 1, sizeof *s->completions);
    if (!s->groups || !s->completions) {
        samples_free(s);
        return status_fail(ST_NO_MEMORY, "no memory for %d samples", n_groups * n_per_group);
    }
    for (int g = 0; g < n_groups; g++) {
        s->groups[g].completions = s->completions + (size_t)g * (size_t)n_per_group;
        s->groups[g].n = n_per_group;
    }
    *ret = s;
    return ST_OK;
}

enum status samples_begin(struct samples *s, struct samples **ret)
{
    enum status st = ST_OK;
    size_t targets = 1;
    s->first = calloc((size_t)s->n + 1, sizeof *s->first);
    if (!s->first) FAIL(ST_NO_MEMORY, "no memory for %d samples", s->n);
    for (int i = 0; i < s->n; i++) {
        const struct pack_completion *c = &s->completions[i];
        s->first[i + 1] = s->first[i] + (long)c->n * (c->targets ? c->targets_each : 1);
    }
    targets += (size_t)s->first[s->n];
    s->logprobs = calloc(targets, sizeof *s->logprobs);
    s->entropies = calloc(targets, sizeof *s->entropies);
    s->chosen = calloc(targets, sizeof *s->chosen);
    if (!s->logprobs || !s->entropies || !s->chosen)
        FAIL(ST_NO_MEMORY, "no memory for %zu log-probabilities", targets);
    for (int i = 0; i < s->n; i++)
        for (long t = s->first[i]; t < s->first[i + 1] && !s->completions[i].masked; t++)
            s->chosen[t] = completion_wrote(&s->completions[i], (int)(t - s->first[i]));
    *ret = s;
    s = NULL;
out:
    samples_free(s);
    return st;
}

void samples_free(struct samples *s)
{
    if (!s) return;
    free(s->groups);
    free(s->completions);
    free(s->first);
    free(s->logprobs);
    free(s->entropies);
    free(s->chosen);
    free(s);
}
