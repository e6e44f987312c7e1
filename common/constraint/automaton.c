/* automaton.c: see automaton.h.
 *
 * A place is a node that reads a byte and the stack of nodes to go to where rules end. Stacks are
 * lists that share their tails, each list is there once (`stacks`), so that a number says it; so is
 * each set of places (`states`). Following a byte: the nodes behind those that read it are followed
 * until each stands before another byte (`follow`); a call in a rule's last place leaves nothing on
 * the stack, so that lists which are written as recursion do not grow it. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/automaton.h"
#include "common/base/bytes.h"
#include "common/base/hash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EMPTY_STACK 0
#define UNKNOWN     (-2)
#define MAX_STACKS  (1 << 20)
#define MAX_ROUNDS  100
#define MAX_PLACES  (1 << 22) // of all states

enum node_kind { NODE_END, NODE_BYTE, NODE_EITHER, NODE_CALL };

struct node {
    uint8_t kind, low, high; // EITHER, CALL: low is what automaton_set_run() was told
    int32_t next, other;     // BYTE: next; EITHER: both; CALL: next, the rule
};

struct stack {
    int32_t node, below;
};

struct place {
    int32_t node, stack;
};

struct state {
    int32_t *next;     // (256) once one was asked for; UNKNOWN, AUTOMATON_DEAD
    uint32_t first, n; // of `places`
    uint8_t run;
    bool may_end;
};

struct index { // a hash table of numbers, at most half full
    struct slot {
        int32_t number; // -1: free
        uint32_t hash;
    } * slots; // (n_slots) a power of two, or 0
    size_t n_slots, n;
};

struct automaton {
    struct node *nodes;
    int n_nodes;
    struct rule {
        int32_t start; // -1: not defined yet, or nothing
        bool is_defined, is_plain;
        char name[40]; // of a grammar, or ""
    } * rules;
    int n_rules;
    bool failed; // too many nodes, or no memory for them
    struct stack *stacks;
    int n_stacks;
    struct state *states;
    int n_states;
    struct place *places;
    size_t n_places;
    struct index stack_index, state_index;
    struct place *found; // (AUTOMATON_PLACES) of the state that is being made
    int n_found;
    uint8_t found_run;
    bool found_end;
    int64_t budget;     // nodes that may yet be followed
    struct place *work; // nodes to follow, and followed
    int n_work, work_room;
    struct index work_index;
};

// ---- tables -------------------------------------------------------------------------------------

static struct slot *slot_of(const struct index *t, uint32_t hash)
{
    return &t->slots[hash & (t->n_slots - 1)];
}

static struct slot *next_slot(const struct index *t, struct slot *slot)
{
    return slot + 1 < t->slots + t->n_slots ? slot + 1 : t->slots;
}

static void insert(struct index *t, uint32_t hash, int32_t number)
{
    struct slot *slot = slot_of(t, hash);
    while (slot->number >= 0) slot = next_slot(t, slot);
    *slot = (struct slot){number, hash};
    t->n++;
}

// Room for one more.
static enum status index_room(struct index *t)
{
    if (2 * t->n < t->n_slots) return ST_OK;
    struct index more = {.n_slots = t->n_slots ? 2 * t->n_slots : 256};
    more.slots = malloc(more.n_slots * sizeof *more.slots);
    if (!more.slots) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    memset(more.slots, 0xff, more.n_slots * sizeof *more.slots);
    for (size_t i = 0; i < t->n_slots; i++)
        if (t->slots[i].number >= 0) insert(&more, t->slots[i].hash, t->slots[i].number);
    free(t->slots);
    *t = more;
    return ST_OK;
}

static uint32_t hash_place(struct place p)
{
    return (uint32_t)hash_mix((uint64_t)(uint32_t)p.node << 32 | (uint32_t)p.stack);
}

enum status automaton_new(struct automaton **ret)
{
    struct automaton *a = calloc(1, sizeof *a);
    if (!a) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    a->found = malloc(AUTOMATON_PLACES * sizeof *a->found);
    a->nodes = calloc(1, sizeof *a->nodes); // AUTOMATON_END
    a->stacks = calloc(1, sizeof *a->stacks);
    a->n_nodes = a->n_stacks = 1;
    if (!a->found || !a->nodes || !a->stacks) {
        automaton_free(a);
        return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    }
    *ret = a;
    return ST_OK;
}

void automaton_free(struct automaton *a)
{
    if (!a) return;
    for (int i = 0; i < a->n_states; i++) free(a->states[i].next);
    free(a->nodes);
    free(a->rules);
    free(a->stacks);
    free(a->states);
    free(a->places);
    free(a->found);
    free(a->work);
    free(a->stack_index.slots);
    free(a->state_index.slots);
    free(a->work_index.slots);
    free(a);
}

// ---- building -----------------------------------------------------------------------------------

static int add_node(struct automaton *a, struct node node)
{
    struct node *nodes = a->n_nodes < AUTOMATON_NODES && !a->failed
                             ? array_room(a->nodes, (size_t)a->n_nodes, sizeof *nodes)
                             : NULL;
    if (!nodes) {
        a->failed = true;
        return -1;
    }
    a->nodes = nodes;
    nodes[a->n_nodes] = node;
    return a->n_nodes++;
}

int automaton_byte(struct automaton *a, int low, int high, int next)
{
    if (low > high || next < 0) return -1;
    return add_node(a, (struct node){NODE_BYTE, (uint8_t)low, (uint8_t)high, next, 0});
}

int automaton_text(struct automaton *a, const char *text, size_t len, int next)
{
    while (len-- > 0) next = automaton_byte(a, (uint8_t)text[len], (uint8_t)text[len], next);
    return next;
}

int automaton_either(struct automaton *a, int one, int other)
{
    if (one < 0 || other < 0) return one < 0 ? other : one;
    return add_node(a, (struct node){NODE_EITHER, 0, 0, one, other});
}

/* The ways to write the characters from low to high: n digits, the first of which is from that of
 * low to that of high, and any digit that is not bound by these from `least` to `greatest`. Codes
 * of a row are in the order of their digits. UTF-8's digits are bytes; a JSON string's escapes have
 * hexadecimal ones, and two \u where there are eight. */
static const struct encoding {
    uint32_t low, high;
    int n;
    bool is_escape;
    uint8_t least[8], greatest[8];
} encodings[] = {
    {0, 0x7f, 1, false, {0}, {0}},
    {0x80, 0x7ff, 2, false, {0, 0x80}, {0, 0xbf}},
    {0x800, 0xd7ff, 3, false, {0, 0x80, 0x80}, {0, 0xbf, 0xbf}},
    {0xe000, 0xffff, 3, false, {0, 0x80, 0x80}, {0, 0xbf, 0xbf}},
    {0x10000, 0x10ffff, 4, false, {0, 0x80, 0x80, 0x80}, {0, 0xbf, 0xbf, 0xbf}},
    {0, 0xd7ff, 4, true, {0}, {0, 15, 15, 15}},
    {0xe000, 0xffff, 4, true, {0}, {0, 15, 15, 15}},
    {0x10000, 0x10ffff, 8, true, {13, 8, 0, 0, 13, 12, 0, 0}, {13, 11, 15, 15, 13, 15, 15, 15}}};
enum { ENCODINGS = sizeof encodings / sizeof *encodings };

static void encode(const struct encoding *e, uint32_t point, uint8_t ret[8])
{
    const uint32_t pair = (0xd800 + ((point - 0x10000) >> 10)) << 16 | (0xdc00 + (point & 0x3ff));
    if (!e->is_escape) utf8_encode(point, (char *)ret);
    for (int i = 0; i < e->n && e->is_escape; i++)
        ret[i] = (e->n == 8 ? pair : point) >> 4 * (e->n - 1 - i) & 15;
}

static int digit(struct automaton *a, const struct encoding *e, int i, int low, int high, int next)
{
    static const struct {
        int low, high, first;
    } hex[] = {{0, 9, '0'}, {10, 15, 'a'}, {10, 15, 'A'}};
    int made = -1;
    if (!e->is_escape) return automaton_byte(a, low, high, next);
    for (int k = 0; k < 3; k++) {
        const int from = low > hex[k].low ? low : hex[k].low;
        const int to = high < hex[k].high ? high : hex[k].high;
        made = automaton_either(a, made,
                                automaton_byte(a, hex[k].first + from - hex[k].low,
                                               hex[k].first + to - hex[k].low, next));
    }
    return i % 4 ? made : automaton_text(a, "\\u", 2, made);
}

// Digits from the i-th on, from those of low to those of high.
static int span(struct automaton *a, const struct encoding *e, const uint8_t *low,
                const uint8_t *high, int i, int next)
{
    if (i == e->n) return next;
    if (low[i] == high[i])
        return digit(a, e, i, low[i], high[i], span(a, e, low, high, i + 1, next));
    const size_t rest = (size_t)(e->n - i - 1);
    const bool whole_low = memcmp(low + i + 1, e->least + i + 1, rest) == 0;
    const bool whole_high = memcmp(high + i + 1, e->greatest + i + 1, rest) == 0;
    const int first = low[i] + !whole_low, last = high[i] - !whole_high;
    int made = -1;
    if (first <= last)
        made = digit(a, e, i, first, last, span(a, e, e->least, e->greatest, i + 1, next));
    if (!whole_low)
        made = automaton_either(
            a, made, digit(a, e, i, low[i], low[i], span(a, e, low, e->greatest, i + 1, next)));
    if (!whole_high)
        made = automaton_either(
            a, made, digit(a, e, i, high[i], high[i], span(a, e, e->least, high, i + 1, next)));
    return made;
}

static int encoded(struct automaton *a, bool escapes, uint32_t low, uint32_t high, int next)
{
    uint8_t from[8], to[8];
    int made = -1;
    for (int i = 0; i < ENCODINGS; i++) {
        const struct encoding *e = &encodings[i];
        if (e->is_escape != escapes || high < e->low || low > e->high || low > high) continue;
        encode(e, low > e->low ? low : e->low, from);
        encode(e, high < e->high ? high : e->high, to);
        made = automaton_either(a, made, span(a, e, from, to, 0, next));
    }
    return made;
}

int automaton_character(struct automaton *a, uint32_t low, uint32_t high, bool in_string, int next)
{
    static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    static const uint32_t plain[][2] = {{0x20, 0x21}, {0x23, 0x5b}, {0x5d, 0x10ffff}};
    if (!in_string) return encoded(a, false, low, high, next);
    int made = encoded(a, true, low, high, next);
    for (int i = 0; i < 3; i++)
        made = automaton_either(a, made,
                                encoded(a, false, low > plain[i][0] ? low : plain[i][0],
                                        high < plain[i][1] ? high : plain[i][1], next));
    for (int i = 0; letters[i]; i++)
        if ((uint32_t)meant[i] >= low && (uint32_t)meant[i] <= high)
            made = automaton_either(a, made,
                                    automaton_text(a, (const char[]){'\\', letters[i]}, 2, next));
    return made;
}

int automaton_open(struct automaton *a)
{
    return add_node(a, (struct node){NODE_EITHER, 0, 0, -1, -1});
}

void automaton_close(struct automaton *a, int open, int one, int other)
{
    if (open < 0) return;
    a->nodes[open].next = one;
    a->nodes[open].other = other;
}

int automaton_rule(struct automaton *a)
{
    struct rule *rules = a->n_rules < AUTOMATON_NODES && !a->failed
                             ? array_room(a->rules, (size_t)a->n_rules, sizeof *rules)
                             : NULL;
    if (!rules) {
        a->failed = true;
        return -1;
    }
    a->rules = rules;
    rules[a->n_rules] = (struct rule){.start = -1};
    return a->n_rules++;
}

void automaton_define(struct automaton *a, int rule, int start)
{
    if (rule < 0) return;
    a->rules[rule].start = start;
    a->rules[rule].is_defined = true;
}

bool automaton_is_defined(const struct automaton *a, int rule)
{
    return rule >= 0 && a->rules[rule].is_defined;
}

void automaton_set_plain(struct automaton *a, int rule)
{
    if (rule >= 0) a->rules[rule].is_plain = true;
}

bool automaton_is_plain(uint32_t point)
{
    return point >= ' ' && point != '"' && point != '\\' && point != '<' && point != 0x7f &&
           point != 0x2028 && point != 0x2029;
}

void automaton_set_run(struct automaton *a, int node, int64_t n)
{
    if (node > 0)
        a->nodes[node].low = n < 0 || n > AUTOMATON_MAX_RUN ? AUTOMATON_MAX_RUN : (uint8_t)n;
}

void automaton_name(struct automaton *a, int rule, const char *name, size_t n)
{
    if (rule >= 0) snprintf(a->rules[rule].name, sizeof a->rules->name, "%.*s", (int)n, name);
}

int automaton_call(struct automaton *a, int rule, int next)
{
    if (rule < 0 || next < 0) return -1;
    return add_node(a, (struct node){NODE_CALL, 0, 0, next, rule});
}

// A call of what is repeated, which may come n times from here on.
static int call_one(struct automaton *a, int rule, bool is_plain, int64_t n, int next)
{
    const int made = automaton_call(a, rule, next);
    if (is_plain) automaton_set_run(a, made, n);
    return made;
}

int automaton_repeat(struct automaton *a, int first, int further, int64_t min, int64_t max,
                     int next)
{
    const bool is_plain =
        first >= 0 && further >= 0 && a->rules[first].is_plain && a->rules[further].is_plain;
    const int64_t bounded = max < 0 ? min : max;
    int after = next;
    if (max < 0) {
        after = automaton_open(a);
        automaton_close(a, after, call_one(a, further, is_plain, -1, after), next);
    }
    for (int64_t i = bounded - 1; i > 0 && !a->failed; i--)
        after = automaton_either(a, call_one(a, further, is_plain, max < 0 ? -1 : max - i, after),
                                 i < min ? -1 : next);
    const int some = max == 0 ? -1 : call_one(a, first, is_plain, max, after);
    return min > 0 ? some : automaton_either(a, some, next);
}

bool automaton_failed(const struct automaton *a)
{
    return a->failed;
}

// ---- states -------------------------------------------------------------------------------------

static enum status push(struct automaton *a, int32_t node, int32_t below, int32_t *ret)
{
    const uint32_t hash = hash_place((struct place){node, below});
    enum status st = index_room(&a->stack_index);
    if (st != ST_OK) return st;
    for (struct slot *i = slot_of(&a->stack_index, hash); i->number >= 0;
         i = next_slot(&a->stack_index, i))
        if (a->stacks[i->number].node == node && a->stacks[i->number].below == below) {
            *ret = i->number;
            return ST_OK;
        }
    if (a->n_stacks == MAX_STACKS)
        return status_fail(ST_TOO_LONG, "a constraint comes to more than %d stacks", MAX_STACKS);
    struct stack *stacks = array_room(a->stacks, (size_t)a->n_stacks, sizeof *stacks);
    if (!stacks) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    a->stacks = stacks;
    stacks[a->n_stacks] = (struct stack){node, below};
    insert(&a->stack_index, hash, a->n_stacks);
    *ret = a->n_stacks++;
    return ST_OK;
}

// Adds a node to those that are followed, once.
static enum status add_work(struct automaton *a, struct place p)
{
    const uint32_t hash = hash_place(p);
    if (p.node < 0) return ST_OK; // nothing is there
    enum status st = index_room(&a->work_index);
    if (st != ST_OK) return st;
    for (struct slot *i = slot_of(&a->work_index, hash); i->number >= 0;
         i = next_slot(&a->work_index, i))
        if (a->work[i->number].node == p.node && a->work[i->number].stack == p.stack) return ST_OK;
    if (a->budget-- <= 0)
        return status_fail(ST_TOO_LONG, "a constraint's mask follows more than %d nodes",
                           AUTOMATON_BUDGET);
    if (a->n_work == a->work_room) {
        const int room = a->work_room ? 2 * a->work_room : 64;
        struct place *work = realloc(a->work, (size_t)room * sizeof *work);
        if (!work) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
        a->work = work;
        a->work_room = room;
    }
    insert(&a->work_index, hash, a->n_work);
    a->work[a->n_work++] = p;
    return ST_OK;
}

static void clear_work(struct automaton *a)
{
    struct index *t = &a->work_index;
    for (int i = 0; i < a->n_work; i++)
        for (struct slot *slot = slot_of(t, hash_place(a->work[i])); slot->number >= 0;
             slot = next_slot(t, slot))
            slot->number = -1;
    a->n_work = 0;
    t->n = 0;
}

static enum status follow_one(struct automaton *a, struct place p)
{
    const struct node *node = &a->nodes[p.node];
    enum status st;
    if (node->kind != NODE_BYTE && node->low > a->found_run) a->found_run = node->low;
    switch (node->kind) {
    case NODE_BYTE:
        if (node->next < 0) return ST_OK;
        if (a->n_found == AUTOMATON_PLACES)
            return status_fail(ST_TOO_LONG, "a constraint has more than %d ways to go on",
                               AUTOMATON_PLACES);
        a->found[a->n_found++] = p;
        return ST_OK;
    case NODE_EITHER:
        st = add_work(a, (struct place){node->next, p.stack});
        return st ? st : add_work(a, (struct place){node->other, p.stack});
    case NODE_CALL:
        st = ST_OK;
        if (node->next != AUTOMATON_END) st = push(a, node->next, p.stack, &p.stack);
        return st ? st : add_work(a, (struct place){a->rules[node->other].start, p.stack});
    default:
        if (p.stack == EMPTY_STACK) a->found_end = true;
        return p.stack == EMPTY_STACK
                   ? ST_OK
                   : add_work(a, (struct place){a->stacks[p.stack].node, a->stacks[p.stack].below});
    }
}

// The places that the nodes to follow come to: `found`.
static enum status follow(struct automaton *a)
{
    enum status st = ST_OK;
    a->n_found = 0;
    a->found_run = 0;
    a->found_end = false;
    for (int i = 0; i < a->n_work && st == ST_OK; i++) st = follow_one(a, a->work[i]);
    clear_work(a);
    return st;
}

static int by_place(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    return x->node != y->node ? (x->node > y->node) - (x->node < y->node)
                              : (x->stack > y->stack) - (x->stack < y->stack);
}

static bool is_found(const struct automaton *a, const struct state *s)
{
    return s->n == (uint32_t)a->n_found && s->may_end == a->found_end && s->run == a->found_run &&
           memcmp(a->places + s->first, a->found, s->n * sizeof *a->found) == 0;
}

// A state of the places that were found.
static enum status add_state(struct automaton *a, uint32_t hash, int *ret)
{
    if (a->n_states == AUTOMATON_STATES)
        return status_fail(ST_TOO_LONG, "a constraint comes to more than %d states",
                           AUTOMATON_STATES);
    if (a->n_places + (size_t)a->n_found > MAX_PLACES)
        return status_fail(ST_TOO_LONG, "a constraint's states have more than %d ways to go on",
                           MAX_PLACES);
    struct state *states = array_room(a->states, (size_t)a->n_states, sizeof *states);
    if (!states) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    a->states = states;
    const struct state made = {.first = (uint32_t)a->n_places,
                               .n = (uint32_t)a->n_found,
                               .run = a->found_run,
                               .may_end = a->found_end};
    for (int i = 0; i < a->n_found; i++) {
        struct place *places = array_room(a->places, a->n_places, sizeof *places);
        if (!places) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
        a->places = places;
        places[a->n_places++] = a->found[i];
    }
    states[a->n_states] = made;
    insert(&a->state_index, hash, a->n_states);
    *ret = a->n_states++;
    return ST_OK;
}

// The number of the state of the places that were found.
static enum status find_state(struct automaton *a, int *ret)
{
    const size_t n = (size_t)a->n_found;
    if (n == 0 && !a->found_end) {
        *ret = AUTOMATON_DEAD;
        return ST_OK;
    }
    qsort(a->found, n, sizeof *a->found, by_place);
    const uint32_t hash = (uint32_t)hash_mix(hash_fnv1a(a->found, n * sizeof *a->found));
    enum status st = index_room(&a->state_index);
    if (st != ST_OK) return st;
    for (struct slot *i = slot_of(&a->state_index, hash); i->number >= 0;
         i = next_slot(&a->state_index, i))
        if (i->hash == hash && is_found(a, &a->states[i->number])) {
            *ret = i->number;
            return ST_OK;
        }
    return add_state(a, hash, ret);
}

// The state behind a byte, and behind those around it, from *low to *high, which the same places
// read.
static enum status find_next(struct automaton *a, const struct state *s, uint8_t byte, int *low,
                             int *high, int *ret)
{
    enum status st = ST_OK;
    *low = 0;
    *high = 255;
    for (uint32_t i = 0; i < s->n && st == ST_OK; i++) {
        const struct place p = a->places[s->first + i];
        const struct node *node = &a->nodes[p.node];
        const bool reads = byte >= node->low && byte <= node->high;
        const int from = reads ? node->low : byte > node->high ? node->high + 1 : 0;
        const int to = reads ? node->high : byte < node->low ? node->low - 1 : 255;
        if (from > *low) *low = from;
        if (to < *high) *high = to;
        if (reads) st = add_work(a, (struct place){node->next, p.stack});
    }
    const enum status followed = follow(a);
    if (st == ST_OK) st = followed;
    return st ? st : find_state(a, ret);
}

enum status automaton_step(struct automaton *a, int state, uint8_t byte, int *ret)
{
    if (state < 0) {
        *ret = AUTOMATON_DEAD;
        return ST_OK;
    }
    struct state *s = &a->states[state];
    if (!s->next) {
        s->next = malloc(256 * sizeof *s->next);
        if (!s->next) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
        for (int i = 0; i < 256; i++) s->next[i] = UNKNOWN;
    }
    int32_t *next = s->next; // find_next() may move the states
    if (next[byte] == UNKNOWN) {
        int found, low, high;
        const enum status st = find_next(a, s, byte, &low, &high, &found);
        if (st != ST_OK) return st;
        for (int i = low; i <= high; i++) next[i] = found;
    }
    *ret = next[byte];
    return ST_OK;
}

bool automaton_may_end(const struct automaton *a, int state)
{
    return state >= 0 && a->states[state].may_end;
}

bool automaton_may_go_on(const struct automaton *a, int state)
{
    return state >= 0 && a->states[state].n > 0;
}

int automaton_run(const struct automaton *a, int state)
{
    return a->states[state].run;
}

void automaton_allow(struct automaton *a)
{
    a->budget = AUTOMATON_BUDGET;
}

int automaton_states(const struct automaton *a)
{
    return a->n_states;
}

// ---- the end of building ------------------------------------------------------------------------

// What is known of the nodes while they are looked at.
struct search {
    struct automaton *a;
    uint8_t *ends;  // (n_nodes) whether one leads to the end of its rule
    uint8_t *empty; // (n_nodes) without reading
    int32_t *first; // (n_nodes) links to the nodes that may lead on once this one does: 1 + twice
                    // such a node, or 1 more; 0: none
    int32_t *links; // (2 n_nodes) behind each link
    int32_t *todo;  // (n_nodes)
    uint32_t *seen; // (n_nodes) by which search
    uint32_t round;
    int n_todo;
};

static void add_link(struct search *s, int32_t node, int32_t link)
{
    if (node < 0) return;
    s->links[link] = s->first[node];
    s->first[node] = link + 1;
}

static void link_nodes(struct search *s)
{
    for (int i = 0; i < s->a->n_nodes; i++) {
        const struct node *node = &s->a->nodes[i];
        add_link(s, node->next, 2 * i);
        if (node->kind == NODE_EITHER) add_link(s, node->other, 2 * i + 1);
        if (node->kind == NODE_CALL) add_link(s, s->a->rules[node->other].start, 2 * i + 1);
    }
}

// Whether a node leads to the end of its rule, as far as is known: over bytes, or without reading.
static bool leads_on(const struct automaton *a, const uint8_t *ends, const struct node *node,
                     bool over_bytes)
{
    const bool next = node->next >= 0 && ends[node->next];
    switch (node->kind) {
    case NODE_BYTE:
        return over_bytes && next;
    case NODE_EITHER:
        return next || (node->other >= 0 && ends[node->other]);
    case NODE_CALL:
        return next && a->rules[node->other].start >= 0 && ends[a->rules[node->other].start];
    default:
        return true;
    }
}

// Which nodes lead to the end of their rule; ends: zeros.
static void find_ends(struct search *s, uint8_t *ends, bool over_bytes)
{
    ends[AUTOMATON_END] = true;
    s->todo[0] = AUTOMATON_END;
    for (int n = 1; n > 0;)
        for (int32_t link = s->first[s->todo[--n]]; link > 0; link = s->links[link - 1]) {
            const int32_t i = (link - 1) / 2;
            if (ends[i] || !leads_on(s->a, ends, &s->a->nodes[i], over_bytes)) continue;
            ends[i] = true;
            s->todo[n++] = i;
        }
}

// Cuts off what leads to no end, so that a text which may begin may be ended.
static void prune(struct automaton *a, const uint8_t *ends)
{
    for (int i = 0; i < a->n_nodes; i++) {
        struct node *node = &a->nodes[i];
        if (node->next >= 0 && !ends[node->next]) node->next = -1;
        if (node->kind == NODE_EITHER && node->other >= 0 && !ends[node->other]) node->other = -1;
        if (!ends[i] && node->kind != NODE_EITHER) node->next = -1;
        if (!ends[i] && node->kind == NODE_CALL) node->kind = NODE_EITHER, node->other = -1;
    }
}

static void push_todo(struct search *s, int32_t node)
{
    if (node < 0 || s->seen[node] == s->round) return;
    s->seen[node] = s->round;
    s->todo[s->n_todo++] = node;
    s->a->budget--;
}

// Whether a rule comes to a call of itself before it reads anything: it would be followed for ever.
static bool calls_itself(struct search *s, int rule)
{
    s->round++;
    s->n_todo = 0;
    push_todo(s, s->a->rules[rule].start);
    while (s->n_todo > 0) {
        const struct node *node = &s->a->nodes[s->todo[--s->n_todo]];
        if (node->kind == NODE_CALL && node->other == rule) return true;
        const int32_t called = node->kind == NODE_CALL ? s->a->rules[node->other].start : -1;
        if (node->kind == NODE_EITHER || (called >= 0 && s->empty[called]))
            push_todo(s, node->next);
        push_todo(s, node->kind == NODE_EITHER ? node->other : called);
    }
    return false;
}

static enum status check_rules(struct automaton *a, struct search *s)
{
    automaton_allow(a);
    for (int r = 0; r < a->n_rules; r++) {
        if (calls_itself(s, r))
            return status_fail(ST_INVALID,
                               "%s%s calls itself before it reads anything (left recursion): write "
                               "it so that it reads first",
                               *a->rules[r].name ? "the grammar's rule " : "a rule",
                               a->rules[r].name);
        if (a->budget <= 0)
            return status_fail(ST_TOO_LONG, "a constraint's rules take more than %d steps to check",
                               AUTOMATON_BUDGET);
    }
    return ST_OK;
}

enum status automaton_finish(struct automaton *a, int start)
{
    const size_t n = (size_t)a->n_nodes;
    int first;
    enum status st = ST_OK;
    if (a->failed)
        return status_fail(ST_TOO_LONG, "a constraint takes more than %d nodes", AUTOMATON_NODES);
    if (start < 0) return status_fail(ST_INVALID, "no text meets the constraint");
    uint8_t *flags = calloc(n, 2);
    int32_t *numbers = calloc(n, 5 * sizeof *numbers);
    if (!flags || !numbers) FAIL(ST_NO_MEMORY, "no memory for a constraint");
    struct search s = {.a = a, .ends = flags, .empty = flags + n, .first = numbers};
    s.links = numbers + n;
    s.todo = numbers + 3 * n;
    s.seen = (uint32_t *)numbers + 4 * n;
    link_nodes(&s);
    find_ends(&s, s.ends, true);
    find_ends(&s, s.empty, false);
    prune(a, s.ends);
    CHECK(check_rules(a, &s));
    if (!s.ends[start]) FAIL(ST_INVALID, "no text meets the constraint");
    automaton_allow(a);
    CHECK(add_work(a, (struct place){start, EMPTY_STACK}));
    CHECK(follow(a));
    st = find_state(a, &first);
out:
    free(flags);
    free(numbers);
    return st;
}
