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

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EMPTY_STACK 0
#define UNKNOWN     (-2)
#define MAX_STACKS  (1 << 20)
#define MAX_WORK    (1 << 16)
#define MAX_SPLIT   512       // places of a state whose runs are followed apart
#define MAX_PLACES  (1 << 22) // of all states

enum node_kind { NODE_END, NODE_BYTE, NODE_EITHER, NODE_CALL, NODE_REPEAT };

struct node {
    uint8_t kind;
    int32_t low, high;   // BYTE: what it reads; REPEAT: how often, high < 0: without a bound
    int32_t next, other; // BYTE: next; EITHER: both; CALL, REPEAT: next, the rule
};

struct stack {
    int32_t node, below;
    int32_t count; // node is a REPEAT: its calls, up to `low` where there is no bound
};

struct place {
    int32_t node, stack;
};

struct state {
    int16_t *next;     // (256) once one was asked for; UNKNOWN, AUTOMATON_DEAD
    uint32_t first, n; // of `places`
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
        int slice;     // AUTOMATON_SLICES: its texts are not those of one
        bool is_defined;
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
    bool found_end;
    int64_t budget;     // nodes that may yet be followed
    struct place *work; // (MAX_WORK) nodes to follow, and followed
    int n_work;
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

// The number whose thing is the same as the key, or -1; then there is room to insert it.
static enum status look_up(const struct automaton *a, struct index *t, uint32_t hash,
                           bool (*is_same)(const struct automaton *a, int32_t number,
                                           const void *key),
                           const void *key, int32_t *ret)
{
    const enum status st = index_room(t);
    if (st != ST_OK) return st;
    struct slot *slot = slot_of(t, hash);
    while (slot->number >= 0 && !(slot->hash == hash && is_same(a, slot->number, key)))
        slot = next_slot(t, slot);
    *ret = slot->number;
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
    a->work = malloc(MAX_WORK * sizeof *a->work);
    a->nodes = calloc(1, sizeof *a->nodes); // AUTOMATON_END
    a->stacks = calloc(1, sizeof *a->stacks);
    a->n_nodes = a->n_stacks = 1;
    if (!a->found || !a->work || !a->nodes || !a->stacks) {
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
    if ((a->failed = !nodes)) return -1;
    a->nodes = nodes;
    nodes[a->n_nodes] = node;
    return a->n_nodes++;
}

int automaton_byte(struct automaton *a, int low, int high, int next)
{
    if (low > high || next < 0) return -1;
    return add_node(a, (struct node){NODE_BYTE, low, high, next, 0});
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
    if (next < 0) return -1;
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

// ---- slices -------------------------------------------------------------------------------------

static const struct {
    bool in_string, is_exact;
    int n;
    struct automaton_range ranges[8];
} slices[AUTOMATON_SLICES] = {
    [SLICE_STRING] = {true, true, 1, {{0, 0x10ffff}}},
    [SLICE_BLANK] = {false, true, 3, {{'\t', '\n'}, {'\r', '\r'}, {' ', ' '}}},
    [SLICE_PLAIN] = {false,
                     false,
                     7,
                     {{' ', '!'},
                      {'#', ';'},
                      {'=', '['},
                      {']', '~'},
                      {0x80, 0x2027},
                      {0x202a, 0xd7ff},
                      {0xe000, 0x10ffff}}}};

int automaton_unit(struct automaton *a, enum automaton_slice slice, int next)
{
    int made = -1;
    for (int i = 0; i < slices[slice].n; i++)
        made = automaton_either(a, made,
                                automaton_character(a, slices[slice].ranges[i].low,
                                                    slices[slice].ranges[i].high,
                                                    slices[slice].in_string, next));
    return made;
}

bool automaton_is_unit(enum automaton_slice slice, uint32_t point)
{
    bool is = false;
    for (int i = 0; i < slices[slice].n; i++)
        is |= point >= slices[slice].ranges[i].low && point <= slices[slice].ranges[i].high;
    return is;
}

enum automaton_slice automaton_slice_of(const struct automaton_range *ranges, int n, bool in_string)
{
    int slice = 0;
    for (; slice < AUTOMATON_SLICES; slice++) {
        const bool same = n == slices[slice].n && in_string == slices[slice].in_string &&
                          memcmp(ranges, slices[slice].ranges, (size_t)n * sizeof *ranges) == 0;
        bool covers = !slices[slice].is_exact;
        for (int i = 0, k = 0; i < slices[slice].n && covers; i++) {
            while (k < n && ranges[k].high < slices[slice].ranges[i].high) k++;
            covers = k < n && ranges[k].low <= slices[slice].ranges[i].low;
        }
        if (same || covers) break;
    }
    return (enum automaton_slice)slice;
}

// ---- rules --------------------------------------------------------------------------------------

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
    if ((a->failed = !rules)) return -1;
    a->rules = rules;
    rules[a->n_rules] = (struct rule){.start = -1, .slice = AUTOMATON_SLICES};
    return a->n_rules++;
}

void automaton_define(struct automaton *a, int rule, int start)
{
    if (rule < 0) return;
    a->rules[rule].start = start;
    a->rules[rule].is_defined = true;
}

int automaton_rule_of(struct automaton *a, int start, enum automaton_slice slice)
{
    const int rule = start < 0 ? -1 : automaton_rule(a);
    automaton_define(a, rule, start);
    automaton_set_slice(a, rule, slice);
    return rule;
}

bool automaton_is_defined(const struct automaton *a, int rule)
{
    return rule >= 0 && a->rules[rule].is_defined;
}

void automaton_set_slice(struct automaton *a, int rule, enum automaton_slice slice)
{
    if (rule >= 0) a->rules[rule].slice = (int)slice;
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

int automaton_repeat(struct automaton *a, int rule, int64_t min, int64_t max, int next)
{
    if (next < 0 || rule < 0 || max == 0) return min <= 0 ? next : -1;
    return add_node(a, (struct node){NODE_REPEAT, (int32_t)min, (int32_t)max, next, rule});
}

bool automaton_failed(const struct automaton *a)
{
    return a->failed;
}

// ---- states -------------------------------------------------------------------------------------

static bool is_stack(const struct automaton *a, int32_t number, const void *key)
{
    const struct stack *x = &a->stacks[number], *y = key;
    return x->node == y->node && x->below == y->below && x->count == y->count;
}

static enum status push(struct automaton *a, struct stack top, int32_t *ret)
{
    const uint32_t hash =
        hash_place((struct place){top.node, top.below}) + (uint32_t)hash_mix((uint64_t)top.count);
    const enum status st = look_up(a, &a->stack_index, hash, is_stack, &top, ret);
    if (st != ST_OK || *ret >= 0) return st;
    if (a->n_stacks == MAX_STACKS)
        return status_fail(ST_TOO_LONG, "a constraint comes to more than %d stacks", MAX_STACKS);
    struct stack *stacks = array_room(a->stacks, (size_t)a->n_stacks, sizeof *stacks);
    if (!stacks) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    a->stacks = stacks;
    stacks[a->n_stacks] = top;
    insert(&a->stack_index, hash, a->n_stacks);
    *ret = a->n_stacks++;
    return ST_OK;
}

static bool is_work(const struct automaton *a, int32_t number, const void *key)
{
    return memcmp(&a->work[number], key, sizeof *a->work) == 0;
}

// Adds a node to those that are followed, once.
static enum status add_work(struct automaton *a, struct place p)
{
    const uint32_t hash = hash_place(p);
    int32_t known;
    if (p.node < 0) return ST_OK; // nothing is there
    const enum status st = look_up(a, &a->work_index, hash, is_work, &p, &known);
    if (st != ST_OK || known >= 0) return st;
    if (a->n_work == MAX_WORK || a->budget-- <= 0)
        return status_fail(ST_TOO_LONG,
                           "a constraint's mask follows more than %d nodes, or %d for one byte",
                           AUTOMATON_BUDGET, MAX_WORK);
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

// A REPEAT's node after so many calls.
static enum status repeat_from(struct automaton *a, int32_t repeat, int32_t below, int32_t count)
{
    const struct node *node = &a->nodes[repeat];
    struct stack top = {repeat, below, count + 1};
    int32_t stack;
    enum status st = ST_OK;
    if (count >= node->low) st = add_work(a, (struct place){node->next, below});
    if (st != ST_OK || (node->high >= 0 && count >= node->high)) return st;
    if (node->high < 0 && top.count > node->low) top.count = node->low;
    st = push(a, top, &stack);
    return st ? st : add_work(a, (struct place){a->rules[node->other].start, stack});
}

// Where a rule ends that was called from there.
static enum status go_back(struct automaton *a, struct stack top)
{
    if (a->nodes[top.node].kind == NODE_REPEAT)
        return repeat_from(a, top.node, top.below, top.count);
    return add_work(a, (struct place){top.node, top.below});
}

static enum status follow_one(struct automaton *a, struct place p)
{
    const struct node *node = &a->nodes[p.node];
    enum status st;
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
        if (node->next != AUTOMATON_END)
            st = push(a, (struct stack){node->next, p.stack, 0}, &p.stack);
        return st ? st : add_work(a, (struct place){a->rules[node->other].start, p.stack});
    case NODE_REPEAT:
        return repeat_from(a, p.node, p.stack, 0);
    default:
        if (p.stack != EMPTY_STACK) return go_back(a, a->stacks[p.stack]);
        a->found_end = true;
        return ST_OK;
    }
}

// The places that the nodes to follow come to: `found`.
static enum status follow(struct automaton *a)
{
    enum status st = ST_OK;
    a->n_found = 0;
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

// Most are few.
static void sort_found(struct automaton *a)
{
    if (a->n_found > 64) qsort(a->found, (size_t)a->n_found, sizeof *a->found, by_place);
    for (int i = 1; i < a->n_found && a->n_found <= 64; i++) {
        const struct place p = a->found[i];
        int k = i;
        for (; k > 0 && by_place(&a->found[k - 1], &p) > 0; k--) a->found[k] = a->found[k - 1];
        a->found[k] = p;
    }
}

static bool is_found(const struct automaton *a, int32_t number, const void *key)
{
    const struct state *s = &a->states[number];
    (void)key; // a->found
    return s->n == (uint32_t)a->n_found && s->may_end == a->found_end &&
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
    const struct state made = {
        .first = (uint32_t)a->n_places, .n = (uint32_t)a->n_found, .may_end = a->found_end};
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
    uint32_t hash = (uint32_t)n;
    sort_found(a);
    for (size_t i = 0; i < n; i++) hash += hash_place(a->found[i]);
    const enum status st = look_up(a, &a->state_index, hash, is_found, a->found, ret);
    return st != ST_OK || *ret >= 0 ? st : add_state(a, hash, ret);
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

// Which bytes a state reads at all: no other leads anywhere.
static enum status add_table(struct automaton *a, struct state *s)
{
    s->next = malloc(256 * sizeof *s->next);
    if (!s->next) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    memset(s->next, AUTOMATON_DEAD, 256 * sizeof *s->next);
    for (uint32_t i = 0; i < s->n; i++) {
        const struct node *node = &a->nodes[a->places[s->first + i].node];
        for (int c = node->low; c <= node->high; c++) s->next[c] = UNKNOWN;
    }
    return ST_OK;
}

enum status automaton_step(struct automaton *a, int state, uint8_t byte, int *ret)
{
    if (state < 0) {
        *ret = AUTOMATON_DEAD;
        return ST_OK;
    }
    struct state *s = &a->states[state];
    enum status st = s->next ? ST_OK : add_table(a, s);
    if (st != ST_OK) return st;
    int16_t *next = s->next; // find_next() may move the states
    if (next[byte] == UNKNOWN) {
        int found, low, high;
        st = find_next(a, s, byte, &low, &high, &found);
        if (st != ST_OK) return st;
        for (int i = low; i <= high; i++) next[i] = (int16_t)found;
    }
    *ret = next[byte];
    return ST_OK;
}

// ---- runs ---------------------------------------------------------------------------------------

// The stack of the units that a state may be about to read: one whose rule is of the first slice of
// those there are. EMPTY_STACK: none.
static int32_t run_of(const struct automaton *a, const struct state *s)
{
    int32_t found = EMPTY_STACK, slice = AUTOMATON_SLICES;
    for (uint32_t i = 0; i < s->n; i++) {
        const int32_t stack = a->places[s->first + i].stack;
        const struct node *node = &a->nodes[a->stacks[stack].node];
        if (stack == found || node->kind != NODE_REPEAT) continue;
        const int32_t its = a->rules[node->other].slice;
        if (its < slice) found = stack, slice = its;
    }
    return found;
}

// Whether all places are there where a unit begins, and no others of that stack: *ret_alone. Leaves
// in `found` what the state has besides.
static enum status without_run(struct automaton *a, const struct state *s, int32_t stack, int rule,
                               bool *ret_begins, bool *ret_alone)
{
    enum status st;
    CHECK(add_work(a, (struct place){a->rules[rule].start, stack}));
    CHECK(follow(a));
    const int n = a->n_found;
    int met = 0, of_stack = 0;
    sort_found(a);
    for (uint32_t i = 0; i < s->n; i++) { // both are in order
        const struct place p = a->places[s->first + i];
        of_stack += p.stack == stack;
        met += p.stack == stack && met < n && a->found[met].node == p.node;
    }
    *ret_begins = met == n;
    *ret_alone = met == n && of_stack == n;
    a->n_found = 0;
    a->found_end = s->may_end;
    for (uint32_t i = 0; i < s->n; i++)
        if (a->places[s->first + i].stack != stack)
            a->found[a->n_found++] = a->places[s->first + i];
out:
    return st;
}

// Whether a byte that begins a unit is one that the other state reads, too.
static bool overlaps(const struct automaton *a, const struct state *s, int32_t stack,
                     const struct state *other)
{
    bool reads[256] = {false};
    for (uint32_t i = 0; i < s->n; i++) {
        const struct place p = a->places[s->first + i];
        for (int c = a->nodes[p.node].low; p.stack == stack && c <= a->nodes[p.node].high; c++)
            reads[c] = true;
    }
    for (uint32_t i = 0; i < other->n; i++) {
        const struct node *node = &a->nodes[a->places[other->first + i].node];
        for (int c = node->low; c <= node->high; c++)
            if (reads[c]) return true;
    }
    return false;
}

enum status automaton_run(struct automaton *a, int state, struct automaton_run *ret)
{
    const struct state s = a->states[state];
    const int32_t stack = run_of(a, &s);
    const struct stack top = a->stacks[stack];
    const struct node *node = &a->nodes[top.node];
    struct automaton_run run = {.slice = AUTOMATON_SLICES};
    bool begins, alone;
    enum status st = ST_OK;
    *ret = run;
    if (stack == EMPTY_STACK) return st;
    CHECK(without_run(a, &s, stack, node->other, &begins, &alone));
    if (!begins) return st;
    run.slice = (enum automaton_slice)a->rules[node->other].slice;
    run.min = node->low - top.count + 1;
    run.max = node->high < 0 ? INT_MAX : node->high - top.count + 1;
    if (alone && slices[run.slice].is_exact && s.n <= MAX_SPLIT) {
        CHECK(find_state(a, &run.rest));
        CHECK(add_work(a, (struct place){node->next, top.below}));
        CHECK(follow(a));
        CHECK(find_state(a, &run.behind));
        run.splits = run.behind >= 0 && !overlaps(a, &s, stack, &a->states[run.behind]);
    }
    *ret = run;
out:
    return st;
}

bool automaton_may_end(const struct automaton *a, int state)
{
    return state >= 0 && a->states[state].may_end;
}

bool automaton_may_go_on(const struct automaton *a, int state)
{
    return state >= 0 && a->states[state].n > 0;
}

void automaton_allow(struct automaton *a)
{
    a->budget = AUTOMATON_BUDGET;
}

int automaton_states(const struct automaton *a)
{
    return a->n_states;
}

size_t automaton_bytes(const struct automaton *a)
{
    return (size_t)a->n_nodes * sizeof *a->nodes + (size_t)a->n_stacks * sizeof *a->stacks +
           (size_t)a->n_states * (sizeof *a->states + 256 * sizeof *a->states->next) +
           a->n_places * sizeof *a->places + AUTOMATON_PLACES * sizeof *a->found +
           MAX_WORK * sizeof *a->work;
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
        if (node->kind >= NODE_CALL) add_link(s, s->a->rules[node->other].start, 2 * i + 1);
    }
}

// Whether the rule that a node calls has an end, as far as is known.
static bool returns(const struct automaton *a, const uint8_t *ends, const struct node *node)
{
    const int32_t start = a->rules[node->other].start;
    return start >= 0 && ends[start];
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
        return next && returns(a, ends, node);
    case NODE_REPEAT:
        return next && (node->low <= 0 || returns(a, ends, node));
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
        if (!ends[i] && node->kind >= NODE_CALL) node->kind = NODE_EITHER, node->other = -1;
        if (node->kind == NODE_REPEAT && !returns(a, ends, node)) node->high = 0;
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
        if (node->kind >= NODE_CALL && node->other == rule) return true;
        if (node->kind == NODE_EITHER || (node->kind == NODE_REPEAT && node->low <= 0) ||
            (node->kind >= NODE_CALL && returns(s->a, s->empty, node)))
            push_todo(s, node->next);
        if (node->kind == NODE_EITHER) push_todo(s, node->other);
        if (node->kind >= NODE_CALL) push_todo(s, s->a->rules[node->other].start);
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
