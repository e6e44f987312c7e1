/* samples.c: memory of what is learned from, and its micro-batches. No state.
 *
 * Groups are taken in their order and cut only where the budget ends (whole ones not at all), so
 * that a prompt is computed once in all but the few groups that straddle two micro-batches. Order
 * and cuts depend on lengths alone: the same step gives the same micro-batches, and the same sums,
 * in every run. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/samples.h"
#include "common/model/batch.h"

#include <stdlib.h>
#include <string.h>

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
    *ret = TAKE_PTR(s);
out:
    samples_free(s);
    return st;
}

void samples_free(struct samples *s)
{
    if (!s) return;
    for (int g = 0; s->groups && g < s->n_groups; g++) constraint_release(s->groups[g].constraint);
    free(s->groups);
    free(s->completions);
    free(s->first);
    free(s->logprobs);
    free(s->entropies);
    free(s->chosen);
    free(s);
}

// ---- micro-batches ------------------------------------------------------------------------------

// How many of each token's own row are asked for.
static int targets_each(const struct pack_completion *c)
{
    return c->targets ? c->targets_each : 1;
}

static int64_t targets_of(const struct pack_completion *c)
{
    return (int64_t)c->n * targets_each(c);
}

// What it takes of the budget: its rows, but for what has more targets than rows.
static int64_t cost_of(const struct pack_completion *c)
{
    return targets_of(c) > 1 ? targets_of(c) - 1 : 0;
}

static int prompt_cost(const struct pack_group *group)
{
    return group->n_teacher_prompt > group->n_prompt ? group->n_teacher_prompt : group->n_prompt;
}

// What has to stand in one micro-batch from completion c on.
static int64_t min_cost(const struct pack_group *group, int c)
{
    int64_t cost = prompt_cost(group);
    for (int i = group->whole ? 0 : c; i < (group->whole ? group->n : c + 1); i++)
        cost += cost_of(&group->completions[i]);
    return cost;
}

static enum status over_budget(const struct pack_group *group, int c, int token_budget)
{
    if (group->whole)
        return status_fail(ST_INVALID,
                           "a prompt of %d tokens with its %d completions, which have to stand in "
                           "one micro-batch, is over the token budget of %d; raise --token-budget",
                           prompt_cost(group), group->n, token_budget);
    return status_fail(ST_INVALID,
                       "a prompt of %d tokens with a completion of %d%s is over the token "
                       "budget of %d; raise --token-budget",
                       prompt_cost(group), group->completions[c].n,
                       group->completions[c].targets ? " and its targets" : "", token_budget);
}

// Room for as many micro-batches and chunks as there are completions, of which each may be alone.
static enum status packing_alloc(int completions, struct packing **ret)
{
    const size_t n = (size_t)completions + 1;
    struct packing *p = calloc(1, sizeof *p);
    if (p) {
        p->batches = calloc(n, sizeof *p->batches);
        p->chunks = calloc(n, sizeof *p->chunks);
        p->samples = calloc(n, sizeof *p->samples);
        p->firsts = calloc(2 * n, sizeof *p->firsts);
    }
    *ret = p;
    return p && p->batches && p->chunks && p->samples && p->firsts
               ? ST_OK
               : status_fail(ST_NO_MEMORY, "no memory to pack a step");
}

enum status packing_new(const struct pack_group *groups, int n_groups, int token_budget,
                        struct packing **ret)
{
    enum status st;
    struct micro_batch *mb = NULL;
    struct packing *p;
    int sample = 0, n = 0;
    for (int g = 0; g < n_groups; g++) n += groups[g].n;
    CHECK(packing_alloc(n, &p));
    for (int g = 0; g < n_groups; g++) {
        const struct pack_group *group = &groups[g];
        bool in_chunk = false;
        for (int c = 0; c < group->n; c++, sample++) {
            const int64_t more = in_chunk ? cost_of(&group->completions[c]) : min_cost(group, c);
            if (min_cost(group, c) > token_budget) CHECK(over_budget(group, c, token_budget));
            if (!mb || mb->cost + more > token_budget) {
                const struct micro_batch *last = mb; // which is full
                mb = &p->batches[p->n++];
                mb->chunks = last ? last->chunks + last->n_chunks : p->chunks;
                mb->sample = last ? last->sample + last->n_seqs : p->samples;
                mb->first = last ? last->first + last->n_seqs + 1 : p->firsts;
                in_chunk = false;
            }
            if (!in_chunk) {
                mb->chunks[mb->n_chunks++] = (struct pack_chunk){.group = g, .first = c};
                mb->n_tokens += group->n_prompt;
                mb->cost += prompt_cost(group);
            }
            in_chunk = true;
            const struct pack_completion *added = &group->completions[c];
            mb->sample[mb->n_seqs++] = sample;
            mb->first[mb->n_seqs] = mb->first[mb->n_seqs - 1] + (int)targets_of(added);
            mb->chunks[mb->n_chunks - 1].n++;
            mb->n_tokens += added->n > 1 ? added->n - 1 : 0;
            mb->cost += cost_of(added);
        }
    }
    *ret = p;
out:
    if (st != ST_OK) packing_free(p);
    return st;
}

void packing_free(struct packing *p)
{
    if (!p) return;
    free(p->firsts);
    free(p->samples);
    free(p->chunks);
    free(p->batches);
    free(p);
}

#define GROUP_SAMPLES 8192 // numbers of a group: its prompt's, and those of its completions

// Nothing where n is -1, of an empty completion.
static int32_t *fill(int32_t *to, int n, int32_t value)
{
    for (int i = 0; i < n; i++) *to++ = value;
    return to;
}

void packing_samples(const struct micro_batch *mb, const struct pack_group *groups,
                     int32_t *ret_samples)
{
    for (int i = 0; i < mb->n_chunks; i++) {
        const struct pack_chunk *chunk = &mb->chunks[i];
        const struct pack_group *group = &groups[chunk->group];
        const int32_t first = (int32_t)((uint32_t)chunk->group * GROUP_SAMPLES);
        ret_samples = fill(ret_samples, group->n_prompt, first);
        for (int c = chunk->first; c < chunk->first + chunk->n; c++)
            ret_samples = fill(ret_samples, group->completions[c].n - 1, first + 1 + c);
    }
}

enum status packing_constraints(const struct micro_batch *mb, const struct pack_group *groups,
                                struct constraint_row *ret)
{
    for (int i = 0; i < mb->n_chunks; i++) {
        const struct pack_chunk *chunk = &mb->chunks[i];
        struct constraint *constraint = groups[chunk->group].constraint;
        for (int c = chunk->first; c < chunk->first + chunk->n; c++) {
            const struct pack_completion *completion = &groups[chunk->group].completions[c];
            int state = CONSTRAINT_START;
            for (int64_t t = 0; t < targets_of(completion); t++) {
                *ret++ = (struct constraint_row){constraint, state, -1};
                const enum status st =
                    constraint ? constraint_next(constraint, state, completion->ids[t], &state)
                               : ST_OK;
                if (st != ST_OK) return st;
                if (state < 0)
                    return status_fail(
                        ST_MISMATCH,
                        "line %d, sample %d: token %d is none that its "
                        "response_format allows there; was it sampled under another?",
                        completion->line, completion->number, (int)t);
            }
        }
    }
    return ST_OK;
}

// Adds a completion behind its prompt, and asks for the rows that its targets are predicted by.
static enum status want_rows(struct batch *batch, const struct pack_completion *c, int prompt,
                             int prompt_last, int adapter)
{
    enum status st = ST_OK;
    int row = prompt_last;
    for (int t = 0; t < c->n; t++) {
        for (int i = 0; i < targets_each(c); i++) CHECK(batch_want_row(batch, row));
        if (t > 0 || c->n == 1) {
            row++;
            continue;
        }
        int seq;
        CHECK(batch_add_packed(batch, c->ids, c->n - 1, prompt, adapter, &seq));
        row = batch_first_row(batch, seq);
    }
out:
    return st;
}

enum status packing_fill(const struct micro_batch *mb, const struct pack_group *groups, int adapter,
                         struct batch *batch, int32_t *ret_targets)
{
    enum status st = ST_OK;
    for (int i = 0; i < mb->n_chunks; i++) {
        const struct pack_chunk *chunk = &mb->chunks[i];
        const struct pack_group *group = &groups[chunk->group];
        int prompt;
        CHECK(batch_add_packed(batch, group->prompt, group->n_prompt, -1, adapter, &prompt));
        int prompt_last = batch_first_row(batch, prompt) + group->n_prompt - 1;
        for (int c = 0; c < chunk->n; c++) {
            const struct pack_completion *completion = &group->completions[chunk->first + c];
            const int64_t n = targets_of(completion);
            if (n == 0) continue;
            CHECK(want_rows(batch, completion, prompt, prompt_last, adapter));
            memcpy(ret_targets, completion->targets ? completion->targets : completion->ids,
                   (size_t)n * sizeof *ret_targets);
            ret_targets += n;
        }
    }
out:
    return st;
}
