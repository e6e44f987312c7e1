/* samples.c: memory of what is learned from, and its micro-batches. No state.
 *
 * Completions are taken in their order and cut only where the budget ends (whole groups not at
 * all), so that what they share is computed once in all but the few that straddle two
 * micro-batches. Each is put into the trees of its micro-batch where it leaves them; a node is
 * split for that. Order, cuts and trees depend on lengths and tokens alone: the same step gives the
 * same micro-batches, and the same sums, in every run. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/samples.h"
#include "common/model/batch.h"

#include <stdlib.h>
#include <string.h>

enum status samples_new(int n_groups, int n_per_group, bool given, struct samples **ret)
{
    struct samples *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for samples");
    const int each = given ? 2 : 1, n_sampled = n_groups * n_per_group;
    s->n_groups = each * n_groups;
    s->n = n_sampled + (given ? n_groups : 0);
    s->groups = calloc((size_t)s->n_groups + 1, sizeof *s->groups);
    s->completions = calloc((size_t)s->n + 1, sizeof *s->completions);
    if (!s->groups || !s->completions) {
        samples_free(s);
        return status_fail(ST_NO_MEMORY, "no memory for %d samples", n_groups * n_per_group);
    }
    for (int g = 0; g < s->n_groups; g++) {
        const bool sampled = g % each == 0;
        s->groups[g].completions =
            s->completions + (sampled ? g / each * n_per_group : n_sampled + g / each);
        s->groups[g].n = sampled ? n_per_group : 1;
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

// What it takes of the budget, its prompt apart: its rows, but for what has more targets than rows.
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

// Rows of its own.
static int rows_of(const struct pack_completion *c)
{
    return c->n > 1 ? c->n - 1 : 0;
}

// ---- trees --------------------------------------------------------------------------------------

// Nodes of one micro-batch in the order in which they were made, with links to go down by.
struct trees {
    struct pack_node *nodes;
    struct links {
        int child, next; // the first, and its parent's next; -1: none
    } * links;
    int n, root; // root: the first that has no parent
};

static const int32_t *node_ids(const struct pack_node *node, const struct pack_group *groups)
{
    const struct pack_group *group = &groups[node->group];
    return (node->completion < 0 ? group->prompt : group->completions[node->completion].ids) +
           node->first;
}

// A sequence's rows from `position` on that lie together, as a node.
static struct pack_node run_at(const struct pack_group *groups, int g, int c, int position)
{
    const int prompt = groups[g].n_prompt;
    struct pack_node run = {
        .parent = -1, .group = g, .completion = -1, .first = position, .position = position};
    run.n = prompt - position;
    if (position < prompt) return run;
    run.completion = c;
    run.first = position - prompt;
    run.n = rows_of(&groups[g].completions[c]) - run.first;
    return run;
}

// How many of a node's rows a sequence begins with from the node's position on.
static int common_rows(const struct pack_group *groups, const struct pack_node *node, int g, int c)
{
    const int32_t *ids = node_ids(node, groups);
    int n = 0;
    while (n < node->n) {
        const struct pack_node run = run_at(groups, g, c, node->position + n);
        const int32_t *own = node_ids(&run, groups);
        int i = 0;
        while (i < run.n && n + i < node->n && own[i] == ids[n + i]) i++;
        n += i;
        if (i < run.n || run.completion >= 0) break;
    }
    return n;
}

// Where a sequence leaves the trees: behind n rows of a node (-1: it shares nothing).
struct place {
    int node, n, position;
};

// How many rows a sequence goes on along that node; 0 where it is not worth it. Its group's prompt
// always is; and a node that others have left does not have to be split.
static int worth(const struct trees *t, const struct pack_group *groups, int i, int g, int c,
                 int min_shared)
{
    const struct pack_node *node = &t->nodes[i];
    const bool is_prompt = node->completion < 0 && node->group == g,
               is_split = node->position > 0 && t->links[i].child >= 0;
    if (!is_prompt && !is_split && node->n < min_shared) return 0;
    const int n = common_rows(groups, node, g, c);
    return n >= min_shared || (n == node->n && (is_prompt || is_split)) ? n : 0;
}

static struct place find_place(const struct trees *t, const struct pack_group *groups, int g, int c,
                               int min_shared)
{
    struct place place = {.node = -1};
    for (int next = t->root; next >= 0;) {
        int best = -1, most = 0;
        for (int i = next; i >= 0; i = t->links[i].next) {
            const int n = worth(t, groups, i, g, c, min_shared);
            if (n > most) best = i, most = n;
        }
        if (best < 0) break;
        place = (struct place){best, most, place.position + most};
        next = most == t->nodes[best].n ? t->links[best].child : -1;
    }
    return place;
}

// Appends a node to its parent's children.
static int add_node(struct trees *t, const struct pack_node *node, int parent)
{
    const int added = t->n++;
    int *at = parent < 0 ? &t->root : &t->links[parent].child;
    while (*at >= 0) at = &t->links[*at].next;
    *at = added;
    t->nodes[added] = *node;
    t->nodes[added].parent = parent;
    t->links[added] = (struct links){-1, -1};
    return added;
}

// Makes the first n rows of a node a node of their own, its parent. Returns it.
static int split_node(struct trees *t, int i, int n)
{
    struct pack_node *node = &t->nodes[i];
    const int above = t->n++;
    int *at = node->parent < 0 ? &t->root : &t->links[node->parent].child;
    while (*at != i) at = &t->links[*at].next;
    *at = above;
    t->links[above] = (struct links){i, t->links[i].next};
    t->links[i].next = -1;
    t->nodes[above] = *node;
    t->nodes[above].n = n;
    node->parent = above;
    node->first += n;
    node->position += n;
    node->n -= n;
    return above;
}

// Puts a sequence there; returns the node with its last row.
static int add_sequence(struct trees *t, const struct pack_group *groups, int g, int c,
                        struct place place)
{
    int leaf = place.node, position = place.position;
    if (leaf >= 0 && place.n < t->nodes[leaf].n) leaf = split_node(t, leaf, place.n);
    const int end = groups[g].n_prompt + rows_of(&groups[g].completions[c]);
    while (position < end) {
        const struct pack_node run = run_at(groups, g, c, position);
        leaf = add_node(t, &run, leaf);
        position += run.n;
    }
    return leaf;
}

// ---- micro-batches of a step --------------------------------------------------------------------

// Room for as many micro-batches as there are completions, of which each may be alone; and nodes:
// each begins at most its own, its prompt's and that which it splits off.
static enum status packing_alloc(int completions, struct packing **ret)
{
    const size_t n = (size_t)completions + 1;
    struct packing *p = calloc(1, sizeof *p);
    if (p) {
        p->batches = calloc(n, sizeof *p->batches);
        p->seqs = calloc(n, sizeof *p->seqs);
        p->nodes = calloc(3 * n, sizeof *p->nodes);
        p->samples = calloc(n, sizeof *p->samples);
        p->firsts = calloc(2 * n, sizeof *p->firsts);
    }
    *ret = p;
    return p && p->batches && p->seqs && p->nodes && p->samples && p->firsts
               ? ST_OK
               : status_fail(ST_NO_MEMORY, "no memory to pack a step");
}

static enum status trees_alloc(int completions, struct trees *ret)
{
    const size_t n = 3 * ((size_t)completions + 1);
    *ret = (struct trees){
        .nodes = calloc(n, sizeof *ret->nodes), .links = calloc(n, sizeof *ret->links), .root = -1};
    return ret->nodes && ret->links ? ST_OK : status_fail(ST_NO_MEMORY, "no memory to pack a step");
}

// Moves the trees into the micro-batch, depth first, which then has all its sequences.
static void close_batch(struct trees *t, struct micro_batch *mb)
{
    int row = 0;
    for (int i = t->root; i >= 0;) {
        struct pack_node *node = &t->nodes[i];
        const int next = t->links[i].child, parent = node->parent;
        node->row = row;
        row += node->n;
        mb->nodes[mb->n_nodes] = *node;
        mb->nodes[mb->n_nodes].parent = parent < 0 ? -1 : t->links[parent].child;
        t->links[i].child = mb->n_nodes++; // where it is now
        if (next >= 0) {
            i = next;
            continue;
        }
        while (i >= 0 && t->links[i].next < 0) i = t->nodes[i].parent;
        if (i >= 0) i = t->links[i].next;
    }
    for (int s = 0; s < mb->n_seqs; s++) mb->seqs[s].leaf = t->links[mb->seqs[s].leaf].child;
    t->n = 0;
    t->root = -1;
}

static struct micro_batch *next_batch(struct packing *p)
{
    const struct micro_batch *last = p->n > 0 ? &p->batches[p->n - 1] : NULL;
    struct micro_batch *mb = &p->batches[p->n++];
    mb->seqs = last ? last->seqs + last->n_seqs : p->seqs;
    mb->nodes = last ? last->nodes + last->n_nodes : p->nodes;
    mb->sample = last ? last->sample + last->n_seqs : p->samples;
    mb->first = last ? last->first + last->n_seqs + 1 : p->firsts;
    return mb;
}

// What a completion adds to a micro-batch's cost: where a teacher reads other prompts, its rows, if
// it shares no more than these, have room too.
static int64_t more_cost(const struct micro_batch *mb, const struct pack_group *groups, int g,
                         int c, bool taught)
{
    const bool begins = mb->n_seqs == 0 || mb->seqs[mb->n_seqs - 1].group != g;
    return cost_of(&groups[g].completions[c]) + (taught && begins ? prompt_cost(&groups[g]) : 0);
}

// Whether there is room for a completion at that place, or for the whole group from its first on.
static bool fits(const struct micro_batch *mb, const struct pack_group *groups, int g, int c,
                 struct place place, int token_budget, bool taught)
{
    const struct pack_group *group = &groups[g];
    int64_t rows = group->n_prompt + rows_of(&group->completions[c]) - place.position,
            cost = more_cost(mb, groups, g, c, taught);
    for (int i = 1; group->whole && c == 0 && i < group->n; i++) {
        rows += rows_of(&group->completions[i]);
        cost += cost_of(&group->completions[i]);
    }
    return mb->n_tokens + rows <= token_budget && mb->cost + cost <= token_budget;
}

static void put(struct trees *t, struct micro_batch *mb, const struct pack_group *groups, int g,
                int c, struct place place)
{
    const struct pack_completion *added = &groups[g].completions[c];
    mb->seqs[mb->n_seqs++] = (struct pack_seq){g, c, add_sequence(t, groups, g, c, place)};
    mb->first[mb->n_seqs] = mb->first[mb->n_seqs - 1] + (int)targets_of(added);
    mb->n_tokens += groups[g].n_prompt + rows_of(added) - place.position;
}

enum status packing_new(const struct pack_group *groups, int n_groups, int token_budget,
                        int min_shared, struct packing **ret)
{
    enum status st;
    struct micro_batch *mb = NULL;
    struct packing *p = NULL;
    struct trees trees = {0};
    bool taught = false;
    int sample = 0, n = 0;
    for (int g = 0; g < n_groups; g++) {
        n += groups[g].n;
        taught = taught || groups[g].n_teacher_prompt > 0;
    }
    CHECK(packing_alloc(n, &p));
    CHECK(trees_alloc(n, &trees));
    for (int g = 0; g < n_groups; g++) {
        const struct pack_group *group = &groups[g];
        for (int c = 0; c < group->n; c++, sample++) {
            if (min_cost(group, c) > token_budget) CHECK(over_budget(group, c, token_budget));
            struct place place = find_place(&trees, groups, g, c, min_shared);
            if (!mb || !fits(mb, groups, g, c, place, token_budget, taught)) {
                if (mb) close_batch(&trees, mb);
                mb = next_batch(p);
                place = (struct place){.node = -1};
            }
            mb->sample[mb->n_seqs] = sample;
            mb->cost += more_cost(mb, groups, g, c, taught);
            put(&trees, mb, groups, g, c, place);
        }
    }
    if (mb) close_batch(&trees, mb);
    *ret = p;
out:
    free(trees.nodes);
    free(trees.links);
    if (st != ST_OK) packing_free(p);
    return st;
}

enum status packing_again(const struct micro_batch *mb, const struct pack_group *groups,
                          int min_shared, struct packing **ret)
{
    enum status st;
    struct packing *p = NULL;
    struct trees trees = {0};
    CHECK(packing_alloc(mb->n_seqs, &p));
    CHECK(trees_alloc(mb->n_seqs, &trees));
    next_batch(p);
    for (const struct pack_seq *s = mb->seqs; s < mb->seqs + mb->n_seqs; s++)
        put(&trees, p->batches, groups, s->group, s->completion,
            find_place(&trees, groups, s->group, s->completion, min_shared));
    close_batch(&trees, p->batches);
    *ret = p;
out:
    free(trees.nodes);
    free(trees.links);
    if (st != ST_OK) packing_free(p);
    return st;
}

void packing_free(struct packing *p)
{
    if (!p) return;
    free(p->firsts);
    free(p->samples);
    free(p->nodes);
    free(p->seqs);
    free(p->batches);
    free(p);
}

#define GROUP_SAMPLES 8192 // numbers of a group: its prompt's, and those of its completions

// Of a sequence's token at that position.
static int row_at(const struct micro_batch *mb, const struct pack_seq *seq, int position)
{
    const struct pack_node *node = &mb->nodes[seq->leaf];
    while (node->position > position) node = &mb->nodes[node->parent];
    return node->row + position - node->position;
}

void packing_before(const struct micro_batch *mb, const struct micro_batch *behind,
                    int32_t *ret_rows)
{
    for (int s = 0; s < mb->n_seqs; s++)
        for (int i = behind->seqs[s].leaf; i >= 0; i = behind->nodes[i].parent) {
            const struct pack_node *node = &behind->nodes[i];
            for (int t = 0; t < node->n; t++)
                ret_rows[node->row + t] = row_at(mb, &mb->seqs[s], node->position + t);
        }
}

void packing_samples(const struct micro_batch *mb, int32_t *ret_samples)
{
    for (const struct pack_node *node = mb->nodes; node < mb->nodes + mb->n_nodes; node++)
        for (int i = 0; i < node->n; i++)
            ret_samples[node->row + i] =
                (int32_t)((uint32_t)node->group * GROUP_SAMPLES + (uint32_t)(node->completion + 1));
}

enum status packing_constraints(const struct micro_batch *mb, const struct pack_group *groups,
                                struct constraint_row *ret)
{
    for (const struct pack_seq *seq = mb->seqs; seq < mb->seqs + mb->n_seqs; seq++) {
        struct constraint *constraint = groups[seq->group].constraint;
        const struct pack_completion *completion = packed_completion(seq, groups);
        int state = CONSTRAINT_START;
        for (int64_t t = 0; t < targets_of(completion); t++) {
            *ret++ = (struct constraint_row){constraint, state, -1};
            const enum status st =
                constraint ? constraint_next(constraint, state, completion->ids[t], &state) : ST_OK;
            if (st != ST_OK) return st;
            if (state < 0)
                return status_fail(ST_MISMATCH,
                                   "line %d, sample %d: token %d is none that its "
                                   "response_format allows there; was it sampled under another?",
                                   completion->line, completion->number, (int)t);
        }
    }
    return ST_OK;
}

// Asks for the rows that a completion's targets are predicted by.
static enum status want_rows(struct batch *batch, const struct micro_batch *mb,
                             const struct pack_seq *seq, const struct pack_group *groups)
{
    const struct pack_completion *c = packed_completion(seq, groups);
    for (int t = 0; t < c->n; t++) {
        const int position = groups[seq->group].n_prompt - 1 + t;
        const struct pack_node *node = &mb->nodes[seq->leaf];
        while (node->position > position) node = &mb->nodes[node->parent];
        for (int i = 0; i < targets_each(c); i++) {
            const enum status st = batch_want_row(batch, node->row + position - node->position);
            if (st != ST_OK) return st;
        }
    }
    return ST_OK;
}

enum status packing_fill(const struct micro_batch *mb, const struct pack_group *groups, int adapter,
                         struct batch *batch, int32_t *ret_targets)
{
    enum status st = ST_OK;
    for (const struct pack_node *node = mb->nodes; node < mb->nodes + mb->n_nodes; node++)
        CHECK(
            batch_add_packed(batch, node_ids(node, groups), node->n, node->parent, adapter, NULL));
    for (const struct pack_seq *seq = mb->seqs; seq < mb->seqs + mb->n_seqs; seq++) {
        const struct pack_completion *completion = packed_completion(seq, groups);
        const int64_t n = targets_of(completion);
        if (n == 0) continue;
        CHECK(want_rows(batch, mb, seq, groups));
        memcpy(ret_targets, completion->targets ? completion->targets : completion->ids,
               (size_t)n * sizeof *ret_targets);
        ret_targets += n;
    }
out:
    return st;
}
