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

static int n_parts(const struct pack_completion *c)
{
    return c->parts ? c->n_parts : 1;
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

// ---- trees --------------------------------------------------------------------------------------

// Nodes of one micro-batch in the order in which they were made, with links to go down by.
struct trees {
    struct pack_node *nodes;
    struct links {
        int child, next; // the first, and its parent's next; -1: none
    } * links;
    int n, root; // root: the first that has no parent
};

struct sequence { // of one of a completion's parts
    const struct pack_group *groups;
    int group, completion, n_prompt;
    const int32_t *ids; // behind the prompt: its context, and then its n tokens
    int n_context, n;
    int end; // rows, its prompt's included
};

static struct sequence sequence_of(const struct pack_group *groups, int g, int c, int k)
{
    const struct pack_completion *of = &groups[g].completions[c];
    struct sequence s = {groups, g, c, groups[g].n_prompt, of->ids, 0, of->n, 0};
    if (of->parts) {
        const struct pack_part *part = &of->parts[k];
        s.ids = of->sequences + part->begin;
        s.n_context = part->n_context;
        s.n = (k + 1 < of->n_parts ? part[1].first : of->n) - part->first;
    }
    s.end = s.n_prompt + s.n_context + (s.n > 1 ? s.n - 1 : 0);
    return s;
}

// Its rows from `position` on that lie together, as a node.
static struct pack_node run_at(const struct sequence *s, int position)
{
    struct pack_node run = {
        .parent = -1, .group = s->group, .completion = s->completion, .position = position};
    if (position < s->n_prompt) {
        run.completion = -1;
        run.ids = s->groups[s->group].prompt + position;
        run.n = s->n_prompt - position;
    } else {
        run.ids = s->ids + (position - s->n_prompt);
        run.n = s->end - position;
    }
    return run;
}

// How many of a node's rows a sequence begins with from the node's position on.
static int common_rows(const struct pack_node *node, const struct sequence *s)
{
    int n = 0;
    while (n < node->n && node->position + n < s->end) {
        const struct pack_node run = run_at(s, node->position + n);
        int i = 0;
        while (i < run.n && n + i < node->n && run.ids[i] == node->ids[n + i]) i++;
        n += i;
        if (i < run.n) break;
    }
    return n;
}

// Where a sequence leaves the trees: behind n rows of a node (-1: it shares nothing).
struct place {
    int node, n, position;
};

// How many rows a sequence goes on along that node; 0 where it is not worth it. Its group's prompt
// always is; and a node that others have left does not have to be split.
static int worth(const struct trees *t, int i, const struct sequence *s, int min_shared)
{
    const struct pack_node *node = &t->nodes[i];
    const bool is_prompt = node->completion < 0 && node->group == s->group,
               is_split = node->position > 0 && t->links[i].child >= 0;
    if (!is_prompt && !is_split && node->n < min_shared) return 0;
    const int n = common_rows(node, s);
    return n >= min_shared || (n == node->n && (is_prompt || is_split)) ? n : 0;
}

static struct place find_place(const struct trees *t, const struct sequence *s, int min_shared)
{
    struct place place = {.node = -1};
    for (int next = t->root; next >= 0;) {
        int best = -1, most = 0;
        for (int i = next; i >= 0; i = t->links[i].next) {
            const int n = worth(t, i, s, min_shared);
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
    node->ids += n;
    node->position += n;
    node->n -= n;
    return above;
}

// Puts a sequence there; returns the node with its last row.
static int add_sequence(struct trees *t, const struct sequence *s, struct place place)
{
    int leaf = place.node, position = place.position;
    if (leaf >= 0 && place.n < t->nodes[leaf].n) leaf = split_node(t, leaf, place.n);
    while (position < s->end) {
        const struct pack_node run = run_at(s, position);
        leaf = add_node(t, &run, leaf);
        position += run.n;
    }
    return leaf;
}

// ---- micro-batches of a step --------------------------------------------------------------------

// Each sequence begins at most its own, its prompt's and that which it splits off.
#define MAX_NODES(sequences) (3 * ((size_t)(sequences) + 1))

// Room for as many micro-batches as there are completions, of which each may be alone.
static enum status packing_alloc(int completions, int sequences, struct packing **ret)
{
    const size_t n = (size_t)completions + 1;
    struct packing *p = calloc(1, sizeof *p);
    if (p) {
        p->batches = calloc(n, sizeof *p->batches);
        p->seqs = calloc(n, sizeof *p->seqs);
        p->nodes = calloc(MAX_NODES(sequences), sizeof *p->nodes);
        p->samples = calloc(n, sizeof *p->samples);
        p->firsts = calloc(2 * n, sizeof *p->firsts);
        p->leaves = calloc((size_t)sequences + 1, sizeof *p->leaves);
    }
    *ret = p;
    return p && p->batches && p->seqs && p->nodes && p->samples && p->firsts && p->leaves
               ? ST_OK
               : status_fail(ST_NO_MEMORY, "no memory to pack a step");
}

static enum status trees_alloc(int sequences, struct trees *ret)
{
    const size_t n = MAX_NODES(sequences);
    *ret = (struct trees){
        .nodes = calloc(n, sizeof *ret->nodes), .links = calloc(n, sizeof *ret->links), .root = -1};
    return ret->nodes && ret->links ? ST_OK : status_fail(ST_NO_MEMORY, "no memory to pack a step");
}

static void trees_release(struct trees *t)
{
    free(t->nodes);
    free(t->links);
}

static void trees_copy(struct trees *to, const struct trees *from)
{
    memcpy(to->nodes, from->nodes, (size_t)from->n * sizeof *to->nodes);
    memcpy(to->links, from->links, (size_t)from->n * sizeof *to->links);
    to->n = from->n;
    to->root = from->root;
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
    for (const struct pack_seq *seq = mb->seqs; seq < mb->seqs + mb->n_seqs; seq++)
        for (int k = 0; k < seq->n_parts; k++) seq->leaves[k] = t->links[seq->leaves[k]].child;
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

// The rows of a completion alone, its prompt apart.
static enum status rows_alone(const struct pack_group *group, const struct pack_completion *c,
                              int min_shared, int64_t *ret)
{
    const struct pack_group alone = {
        .prompt = group->prompt, .n_prompt = group->n_prompt, .completions = c, .n = 1};
    struct packing *p;
    enum status st = packing_new(&alone, 1, INT_MAX, min_shared, &p);
    if (st != ST_OK) return st;
    *ret = p->batches->n_tokens - group->n_prompt;
    packing_free(p);
    return ST_OK;
}

enum status packing_parts(const struct pack_group *group, int completion, int token_budget,
                          int min_shared, int *ret)
{
    struct pack_completion c = group->completions[completion];
    enum status st = ST_OK;
    for (int64_t rows; st == ST_OK && c.n_parts > 0; c.n = c.parts[--c.n_parts].first) {
        st = rows_alone(group, &c, min_shared, &rows);
        if (prompt_cost(group) + rows + c.n_parts <= token_budget) break; // a target more each
    }
    *ret = c.n_parts;
    return st;
}

// What a completion adds to a micro-batch's cost, its prompt apart: where a teacher reads other
// prompts, its rows, if it shares no more than these, have room too.
static enum status own_cost(const struct pack_group *group, int c, int min_shared, bool taught,
                            int64_t *ret)
{
    int64_t rows = 0;
    enum status st = ST_OK;
    if (taught && group->completions[c].parts)
        st = rows_alone(group, &group->completions[c], min_shared, &rows);
    *ret = rows > cost_of(&group->completions[c]) ? rows : cost_of(&group->completions[c]);
    return st;
}

// What has to stand in one micro-batch with a completion whose own cost that is.
static int64_t min_cost(const struct pack_group *group, int c, int64_t own)
{
    int64_t cost = prompt_cost(group) + own;
    for (int i = 0; group->whole && i < group->n; i++)
        if (i != c) cost += cost_of(&group->completions[i]);
    return cost;
}

// Whether there is room for a completion's first part, or for the whole group from its first on.
static bool fits(const struct micro_batch *mb, const struct sequence *s, struct place place,
                 int64_t cost, int token_budget)
{
    const struct pack_group *group = &s->groups[s->group];
    int64_t rows = s->end - place.position;
    for (int i = 1; group->whole && s->completion == 0 && i < group->n; i++) {
        rows += sequence_of(s->groups, s->group, i, 0).end - s->n_prompt;
        cost += cost_of(&group->completions[i]);
    }
    return mb->n_tokens + rows <= token_budget && mb->cost + cost <= token_budget;
}

// Puts a completion, whose first part's place that is, into the last micro-batch. False: there is
// no room, and nothing of it is there; `kept` is where the trees are kept meanwhile.
static bool put(struct packing *p, struct trees *t, struct trees *kept,
                const struct sequence *first, struct place place, int min_shared, int token_budget)
{
    const struct pack_completion *c = &first->groups[first->group].completions[first->completion];
    struct micro_batch *mb = &p->batches[p->n - 1];
    struct pack_seq seq = {first->group, first->completion, n_parts(c), p->leaves + p->n_leaves};
    const int before = mb->n_tokens;
    if (kept && seq.n_parts > 1) trees_copy(kept, t);
    for (int k = 0; k < seq.n_parts; k++) {
        const struct sequence s = sequence_of(first->groups, seq.group, seq.completion, k);
        if (k > 0) place = find_place(t, &s, min_shared);
        if (s.end - place.position > token_budget - mb->n_tokens) {
            if (k > 0) trees_copy(t, kept);
            mb->n_tokens = before;
            return false;
        }
        mb->n_tokens += s.end - place.position;
        seq.leaves[k] = add_sequence(t, &s, place);
    }
    p->n_leaves += seq.n_parts;
    mb->seqs[mb->n_seqs++] = seq;
    mb->first[mb->n_seqs] = mb->first[mb->n_seqs - 1] + (int)targets_of(c);
    return true;
}

enum status packing_new(const struct pack_group *groups, int n_groups, int token_budget,
                        int min_shared, struct packing **ret)
{
    enum status st;
    struct micro_batch *mb = NULL;
    struct packing *p = NULL;
    struct trees trees = {0}, kept = {0};
    bool taught = false;
    int sample = 0, n = 0, sequences = 0;
    for (int g = 0; g < n_groups; g++) {
        n += groups[g].n;
        for (int c = 0; c < groups[g].n; c++) sequences += n_parts(&groups[g].completions[c]);
        taught = taught || groups[g].n_teacher_prompt > 0;
    }
    CHECK(packing_alloc(n, sequences, &p));
    CHECK(trees_alloc(sequences, &trees));
    CHECK(trees_alloc(sequences, &kept));
    for (int g = 0; g < n_groups; g++) {
        const struct pack_group *group = &groups[g];
        for (int c = 0; c < group->n; c++, sample++) {
            const struct sequence s = sequence_of(groups, g, c, 0);
            struct place place = find_place(&trees, &s, min_shared);
            // a teacher's prompt, which a micro-batch has once for a group
            int64_t own, prompts = taught && c == 0 ? prompt_cost(group) : 0;
            CHECK(own_cost(group, c, min_shared, taught, &own));
            if (min_cost(group, c, own) > token_budget) CHECK(over_budget(group, c, token_budget));
            if (!mb || !fits(mb, &s, place, own + prompts, token_budget) ||
                !put(p, &trees, &kept, &s, place, min_shared, token_budget)) {
                if (mb) close_batch(&trees, mb);
                mb = next_batch(p);
                place = (struct place){.node = -1};
                prompts = taught ? prompt_cost(group) : 0;
                if (!put(p, &trees, &kept, &s, place, min_shared, token_budget))
                    CHECK(over_budget(group, c, token_budget));
            }
            mb->sample[mb->n_seqs - 1] = sample;
            mb->cost += own + prompts;
        }
    }
    if (mb) close_batch(&trees, mb);
    *ret = p;
out:
    trees_release(&kept);
    trees_release(&trees);
    if (st != ST_OK) packing_free(p);
    return st;
}

enum status packing_again(const struct micro_batch *mb, const struct pack_group *groups,
                          int min_shared, struct packing **ret)
{
    enum status st;
    struct packing *p = NULL;
    struct trees trees = {0};
    int sequences = 0;
    for (int s = 0; s < mb->n_seqs; s++) sequences += mb->seqs[s].n_parts;
    CHECK(packing_alloc(mb->n_seqs, sequences, &p));
    CHECK(trees_alloc(sequences, &trees));
    next_batch(p);
    for (const struct pack_seq *seq = mb->seqs; seq < mb->seqs + mb->n_seqs; seq++) {
        const struct sequence s = sequence_of(groups, seq->group, seq->completion, 0);
        put(p, &trees, NULL, &s, find_place(&trees, &s, min_shared), min_shared, INT_MAX);
    }
    close_batch(&trees, p->batches);
    *ret = p;
out:
    trees_release(&trees);
    if (st != ST_OK) packing_free(p);
    return st;
}

void packing_free(struct packing *p)
{
    if (!p) return;
    free(p->leaves);
    free(p->firsts);
    free(p->samples);
    free(p->nodes);
    free(p->seqs);
    free(p->batches);
    free(p);
}

#define GROUP_SAMPLES 8192 // numbers of a group: its prompt's, and those of its completions

// Of the token at that position of the sequence with that leaf.
static int row_at(const struct micro_batch *mb, int leaf, int position)
{
    const struct pack_node *node = &mb->nodes[leaf];
    while (node->position > position) node = &mb->nodes[node->parent];
    return node->row + position - node->position;
}

void packing_before(const struct micro_batch *mb, const struct micro_batch *behind,
                    int32_t *ret_rows)
{
    for (int s = 0; s < mb->n_seqs; s++)
        for (int k = 0; k < mb->seqs[s].n_parts; k++)
            for (int i = behind->seqs[s].leaves[k]; i >= 0; i = behind->nodes[i].parent) {
                const struct pack_node *node = &behind->nodes[i];
                for (int t = 0; t < node->n; t++)
                    ret_rows[node->row + t] = row_at(mb, mb->seqs[s].leaves[k], node->position + t);
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
    for (int k = 0; k < seq->n_parts; k++) {
        const struct sequence s = sequence_of(groups, seq->group, seq->completion, k);
        const int before = s.n_prompt + s.n_context - 1;
        for (int t = 0; t < s.n; t++)
            for (int i = 0; i < targets_each(c); i++) {
                const enum status st =
                    batch_want_row(batch, row_at(mb, seq->leaves[k], before + t));
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
        CHECK(batch_add_packed(batch, node->ids, node->n, node->parent, adapter, NULL));
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
