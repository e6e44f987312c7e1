/* constraint.c: see constraint.h.
 *
 * The tokens that a state takes are found by following the vocabulary's trie from it: where a byte
 * may not come, what is below it is passed over. Where units of a slice may come (automaton.h), the
 * tokens that are nothing else are known as bits, by how many units they are; and of those that end
 * otherwise what is behind their units is a trie, too, which is followed from the state behind the
 * units, the same however many there were. So the states of a string, one for each length, share
 * nearly all that there is to find. What was found is kept by state, up to LIST_BYTES. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/constraint.h"
#include "common/constraint/spec.h"

#include <limits.h>
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define LIST_BYTES (16 << 20)  // of what one constraint found
#define ALL_LISTS  (512 << 20) // of what all of them did
#define MAX_KEPT   512         // those that nobody holds go, for requests to come, where there are
#define KEPT_BYTES (512 << 20) // so many, or automata of so many bytes
#define MAX_BYTES  1023        // of a token that is offered
#define ROWS_EACH  4           // whose masks, or next states, are worth a thread
#define MAX_RUNS   4           // of a state that are followed apart from what else it takes

struct word { // a token's bytes, in `text`; n == 0: it has none
    uint32_t at, n;
};

struct entry { // a token of which a trie has a word: what is behind its first units
    int32_t token;
    uint32_t units;
};

/* A byte of the words that begin alike, behind that before it; what is below it follows. */
struct branch {
    uint32_t past;  // the index behind all that is below
    uint32_t first; // of `entries`: those of the word that ends here, up to the next branch's
    uint16_t depth; // bytes before it
    uint8_t byte;
    uint16_t units[AUTOMATON_SLICES]; // of the tokens from here on; OTHERS: not all are units
};
#define OTHERS UINT16_MAX

struct trie {
    struct branch *branches; // (n) and one more
    struct entry *entries;   // in the order of their words
    uint32_t n;
};
#define WORDS AUTOMATON_SLICES // of `tries`: of whole tokens; before it, of what is behind units

struct constraints {
    pthread_mutex_t lock;
    const struct tokenizer *tokenizer;
    int vocab_size, n_ends;
    int *ends;
    struct word *words; // (vocab_size) once a constraint was wanted
    struct bytes text;
    struct trie tries[AUTOMATON_SLICES + 1];
    // (max_units masks) tokens that are at most 1, 2, ... units, the last of which may be cut off
    uint32_t *units[AUTOMATON_SLICES];
    int max_units[AUTOMATON_SLICES];
    const char **names; // of the special tokens
    int n_names;
    struct constraint **compiled; // (n_compiled) the last one used first
    _Atomic int n_compiled;       // changed under the lock
};

struct list {
    uint32_t n;
    struct entry entries[];
};

struct found {                                // of a state
    struct list *lists[AUTOMATON_SLICES + 1]; // of each trie what it takes; NULL: not known yet
    struct automaton_run run;
    bool has_run, is_beyond; // run is known; no mask can be made
};

struct constraint {
    pthread_mutex_t lock;
    const struct constraints *all;
    _Atomic int n_references; // from 0 on under the lock of all
    char *spec;
    struct automaton *a;
    struct found *found; // (n_found) by state
    int n_found;
    size_t list_bytes;
    struct status_kept failure; // why, of the last one
};

// ---- the vocabulary -----------------------------------------------------------------------------

enum status constraints_new(const struct tokenizer *tokenizer, int vocab_size, const int *ends,
                            int n_ends, struct constraints **ret)
{
    struct constraints *all = calloc(1, sizeof *all);
    if (!all) return status_fail(ST_NO_MEMORY, "no memory for constraints");
    pthread_mutex_init(&all->lock, NULL);
    all->tokenizer = tokenizer;
    all->vocab_size = vocab_size;
    all->ends = malloc(((size_t)n_ends + 1) * sizeof *ends);
    if (!all->ends) {
        constraints_free(all);
        return status_fail(ST_NO_MEMORY, "no memory for constraints");
    }
    for (int i = 0; i < n_ends; i++)
        if (ends[i] >= 0 && ends[i] < vocab_size) all->ends[all->n_ends++] = ends[i];
    *ret = all;
    return ST_OK;
}

static void forget_words(struct constraints *all)
{
    for (int i = 0; i <= WORDS; i++) {
        free(all->tries[i].branches);
        free(all->tries[i].entries);
        all->tries[i] = (struct trie){NULL, NULL, 0};
    }
    for (int i = 0; i < AUTOMATON_SLICES; i++) {
        free(all->units[i]);
        all->units[i] = NULL;
    }
    free(all->words);
    free(all->names);
    all->words = NULL;
    all->names = NULL;
    all->n_names = 0;
    bytes_clear(&all->text);
}

static void drop_lists(struct constraint *c)
{
    for (int i = 0; i < c->n_found; i++)
        for (int k = 0; k <= WORDS; k++) {
            free(c->found[i].lists[k]);
            c->found[i].lists[k] = NULL;
        }
    c->list_bytes = 0;
}

static void destroy(struct constraint *c)
{
    drop_lists(c);
    free(c->found);
    free(c->spec);
    automaton_free(c->a);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

void constraints_free(struct constraints *all)
{
    if (!all) return;
    for (int i = 0; i < all->n_compiled; i++) destroy(all->compiled[i]);
    pthread_mutex_destroy(&all->lock);
    forget_words(all);
    free(all->compiled);
    bytes_release(&all->text);
    free(all->ends);
    free(all);
}

struct item { // of a trie that is to be made: its word is `n` bytes of `text`
    struct entry entry;
    uint32_t at, n;
};

static int by_bytes(const void *a, const void *b, void *text)
{
    const struct item *x = a, *y = b;
    const char *bytes = text;
    const int order = memcmp(bytes + x->at, bytes + y->at, x->n < y->n ? x->n : y->n);
    return order ? order : (x->n > y->n) - (x->n < y->n);
}

static void allow(uint32_t *mask, int32_t token)
{
    mask[token / 32] |= 1u << token % 32;
}

// The way to the last branch, the index of each, back to one that is `depth` bytes deep: what is
// behind that has nothing below it any more.
static uint32_t close_branches(struct trie *t, const uint32_t *open, uint32_t n_open,
                               uint32_t depth)
{
    while (n_open > depth) {
        struct branch *b = &t->branches[open[--n_open]],
                      *above = n_open > 0 ? &t->branches[open[n_open - 1]] : b;
        b->past = t->n;
        for (int k = 0; k < AUTOMATON_SLICES; k++)
            if (b->units[k] > above->units[k]) above->units[k] = b->units[k];
    }
    return n_open;
}

// Units: of whole tokens, by slice and token (vocab_size).
static enum status grow_trie(const struct constraints *all, struct item *items, int n,
                             const uint16_t *units, struct trie *ret)
{
    char *text = all->text.data;
    uint32_t open[MAX_BYTES], n_open = 0;
    size_t n_bytes = 1;
    qsort_r(items, (size_t)n, sizeof *items, by_bytes, text);
    for (int i = 0; i < n; i++) n_bytes += items[i].n;
    ret->branches = malloc(n_bytes * sizeof *ret->branches);
    ret->entries = malloc(((size_t)n + 1) * sizeof *ret->entries);
    if (!ret->branches || !ret->entries)
        return status_fail(ST_NO_MEMORY, "no memory for the vocabulary's texts");
    for (int i = 0; i < n; i++) {
        const struct item w = items[i];
        uint32_t shared = 0;
        while (shared < n_open && shared < w.n &&
               ret->branches[open[shared]].byte == (uint8_t)text[w.at + shared])
            shared++;
        for (n_open = close_branches(ret, open, n_open, shared); n_open < w.n; n_open++) {
            open[n_open] = ret->n;
            ret->branches[ret->n++] = (struct branch){.first = (uint32_t)i,
                                                      .depth = (uint16_t)n_open,
                                                      .byte = (uint8_t)text[w.at + n_open]};
        }
        struct branch *last = &ret->branches[open[w.n - 1]];
        for (int k = 0; k < AUTOMATON_SLICES; k++) {
            const uint16_t its = units[k * all->vocab_size + w.entry.token];
            if (its > last->units[k]) last->units[k] = its;
        }
        ret->entries[i] = w.entry;
    }
    close_branches(ret, open, n_open, 0);
    ret->branches[ret->n].first = (uint32_t)n;
    return ST_OK;
}

// How many units of a slice each token is, cut-off ones among them; OTHERS: that is not all.
// *ret_n: of the items, which are what is behind the units of those that begin with some.
static enum status read_units(const struct constraints *all, enum automaton_slice slice,
                              uint16_t *units, struct item *items, int *ret_n)
{
    struct automaton *a = NULL;
    enum status st;
    *ret_n = 0;
    CHECK(automaton_new(&a));
    const int rule = automaton_rule_of(a, automaton_unit(a, slice, AUTOMATON_END), slice);
    CHECK(automaton_finish(a, automaton_repeat(a, rule, 0, -1, AUTOMATON_END)));
    for (int id = 0; id < all->vocab_size; id++) {
        const struct word w = all->words[id];
        struct item behind = {{id, 0}, w.at, w.n};
        int state = w.n > 0 ? 0 : AUTOMATON_DEAD;
        automaton_allow(a);
        for (uint32_t i = 0; i < w.n && state >= 0; i++) {
            CHECK(automaton_step(a, state, (uint8_t)all->text.data[w.at + i], &state));
            if (!automaton_may_end(a, state)) continue; // within a unit
            behind = (struct item){{id, behind.entry.units + 1}, w.at + i + 1, w.n - i - 1};
        }
        units[id] =
            state < 0 ? OTHERS : (uint16_t)(behind.entry.units + !automaton_may_end(a, state));
        if (state < 0 && behind.entry.units > 0) items[(*ret_n)++] = behind;
    }
out:
    automaton_free(a);
    return st;
}

static enum status read_slice(struct constraints *all, enum automaton_slice slice, uint16_t *units,
                              struct item *items, int *ret_n)
{
    const size_t words = ((size_t)all->vocab_size + 31) / 32;
    int max = 0;
    const enum status st = read_units(all, slice, units, items, ret_n);
    if (st != ST_OK) return st;
    for (int id = 0; id < all->vocab_size; id++)
        if (units[id] != OTHERS && units[id] > max) max = units[id];
    uint32_t *masks = calloc((size_t)max + 1, words * sizeof *masks);
    if (!masks) return status_fail(ST_NO_MEMORY, "no memory for the vocabulary's texts");
    for (int id = 0; id < all->vocab_size; id++)
        if (units[id] != OTHERS) allow(masks + (units[id] - 1u) * words, id);
    for (size_t i = words; i < (size_t)max * words; i++) masks[i] |= masks[i - words];
    all->units[slice] = masks;
    all->max_units[slice] = max;
    return ST_OK;
}

static enum status read_word(struct constraints *all, int id)
{
    const size_t at = all->text.len;
    const char *name = tokenizer_token(all->tokenizer, id);
    enum status st = ST_OK;
    if (!name || !*name) return ST_OK;
    if (tokenizer_is_special(all->tokenizer, id)) {
        all->names[all->n_names++] = name;
        bytes_append(&all->text, (const char[]){(char)SPEC_SPECIAL}, 1);
        bytes_puts(&all->text, name);
    } else
        st = tokenizer_token_bytes(all->tokenizer, id, &all->text);
    const size_t n = all->text.len - at;
    // the mark of special tokens is a byte of no text: a token that spells it never comes
    const bool spells = n > 0 && !tokenizer_is_special(all->tokenizer, id) &&
                        memchr(all->text.data + at, SPEC_SPECIAL, n);
    if (n <= MAX_BYTES && !spells) all->words[id] = (struct word){(uint32_t)at, (uint32_t)n};
    return st;
}

// Under the lock.
static enum status read_words(struct constraints *all)
{
    const int n_tokens = tokenizer_vocab_size(all->tokenizer),
              n = n_tokens < all->vocab_size ? n_tokens : all->vocab_size;
    const size_t vocab = (size_t)all->vocab_size;
    enum status st = ST_OK;
    int n_items = 0;
    if (all->words) return ST_OK;
    struct item *items = malloc((vocab + 1) * sizeof *items);
    uint16_t *units = calloc(AUTOMATON_SLICES * vocab + 1, sizeof *units);
    all->words = calloc(vocab + 1, sizeof *all->words);
    all->names = malloc((vocab + 1) * sizeof *all->names);
    if (!items || !units || !all->words || !all->names)
        FAIL(ST_NO_MEMORY, "no memory for the vocabulary's texts");
    for (int id = 0; id < n; id++) CHECK(read_word(all, id));
    CHECK(bytes_status(&all->text));
    for (int k = 0; k < AUTOMATON_SLICES; k++) {
        CHECK(read_slice(all, (enum automaton_slice)k, units + (size_t)k * vocab, items, &n_items));
        CHECK(grow_trie(all, items, n_items, units, &all->tries[k]));
    }
    n_items = 0;
    for (int id = 0; id < n; id++) {
        const struct word w = all->words[id];
        if (w.n > 0) items[n_items++] = (struct item){{id, 0}, w.at, w.n};
    }
    CHECK(grow_trie(all, items, n_items, units, &all->tries[WORDS]));
out:
    if (st != ST_OK) forget_words(all);
    free(items);
    free(units);
    return st;
}

// ---- masks --------------------------------------------------------------------------------------

int constraint_words(const struct constraint *c)
{
    return (c->all->vocab_size + 31) / 32;
}

// What is known of a state. Under the lock, as all that follows.
static enum status find_state(struct constraint *c, int state, struct found **ret)
{
    enum status st = ST_OK;
    if (state >= c->n_found) {
        const int n = automaton_states(c->a) + 64;
        struct found *found = realloc(c->found, (size_t)n * sizeof *found);
        if (!found) return status_fail(ST_NO_MEMORY, "no memory for a mask");
        memset(found + c->n_found, 0, (size_t)(n - c->n_found) * sizeof *found);
        c->found = found;
        c->n_found = n;
    }
    struct found *f = &c->found[state];
    if (!f->has_run) {
        automaton_allow(c->a);
        CHECK(automaton_run(c->a, state, &f->run));
        f->has_run = true;
    }
    *ret = f;
out:
    return st;
}

// What of a trie's words a state takes, but for those that are units alone, which its run has.
static enum status follow_trie(struct constraint *c, const struct trie *t, int state,
                               const struct automaton_run *run, struct entry **ret, uint32_t *ret_n)
{
    int states[MAX_BYTES + 1] = {state}; // behind so many bytes
    automaton_allow(c->a);
    for (uint32_t i = 0; i < t->n;) {
        const struct branch *b = &t->branches[i];
        int *next = &states[b->depth + 1];
        const uint16_t units = run->slice < AUTOMATON_SLICES ? b->units[run->slice] : OTHERS;
        const bool known = units != OTHERS && units <= run->max;
        if (!known) {
            const enum status st = automaton_step(c->a, states[b->depth], b->byte, next);
            if (st != ST_OK) return st;
        }
        if (known || *next == AUTOMATON_DEAD) {
            i = b->past;
            continue;
        }
        for (uint32_t e = b->first; e < b[1].first; e++) {
            struct entry *more = array_room(*ret, *ret_n, sizeof *more);
            if (!more) return status_fail(ST_NO_MEMORY, "no memory for a mask");
            *ret = more;
            more[(*ret_n)++] = t->entries[e];
        }
        i++;
    }
    return ST_OK;
}

static enum status find_list(struct constraint *c, int state, int trie, const struct list **ret)
{
    static const struct automaton_run none = {.slice = AUTOMATON_SLICES};
    const size_t each = ALL_LISTS / (size_t)c->all->n_compiled,
                 most = each < LIST_BYTES ? each : LIST_BYTES;
    struct entry *entries = NULL;
    struct found *f;
    uint32_t n = 0;
    enum status st;
    CHECK(find_state(c, state, &f));
    if (!f->lists[trie]) {
        CHECK(follow_trie(c, &c->all->tries[trie], state, trie == WORDS ? &f->run : &none, &entries,
                          &n));
        const size_t bytes = sizeof **ret + n * sizeof *entries;
        struct list *made = malloc(bytes);
        if (!made) FAIL(ST_NO_MEMORY, "no memory for a mask");
        made->n = n;
        if (n > 0) memcpy(made->entries, entries, n * sizeof *entries);
        if (c->list_bytes + bytes > most) drop_lists(c);
        f->lists[trie] = made;
        c->list_bytes += bytes;
    }
    *ret = f->lists[trie];
out:
    free(entries);
    return st;
}

// Allows what of a state's list is behind as many units as a run has; whether there is any.
static enum status allow_list(struct constraint *c, int state, int trie,
                              const struct automaton_run *run, uint32_t *mask, bool *any)
{
    const struct list *list;
    const enum status st = find_list(c, state, trie, &list);
    for (uint32_t i = 0; st == ST_OK && i < list->n; i++) {
        const struct entry e = list->entries[i];
        if ((int)e.units < run->min || (int)e.units > run->max) continue;
        allow(mask, e.token);
        *any = true;
    }
    return st;
}

// Allows at most so many units of a slice; whether there is any. First: of a mask that is nothing
// yet.
static void allow_units(const struct constraint *c, const struct automaton_run *run, bool first,
                        uint32_t *mask, bool *any)
{
    const size_t words = (size_t)constraint_words(c);
    const int max = c->all->max_units[run->slice], n = run->max < max ? run->max : max;
    if (n == 0) return; // no token is of such units alone
    const uint32_t *units = c->all->units[run->slice] + (size_t)(n - 1) * words;
    if (first) memcpy(mask, units, words * sizeof *mask);
    for (size_t i = 0; !first && i < words; i++) mask[i] |= units[i];
    *any = true;
}

static enum status fill_mask(struct constraint *c, int state, uint32_t *mask)
{
    static const struct automaton_run whole = {.min = 0, .max = INT_MAX};
    struct automaton_run run = {.splits = true, .rest = state};
    struct found *f;
    bool any = false;
    enum status st = ST_OK;
    memset(mask, 0, (size_t)constraint_words(c) * sizeof *mask);
    for (int i = 0; run.splits && run.rest >= 0; i++) {
        const int rest = run.rest;
        CHECK(find_state(c, rest, &f));
        run = f->run;
        run.splits &= i < MAX_RUNS;
        if (run.slice < AUTOMATON_SLICES) allow_units(c, &run, i == 0, mask, &any);
        if (run.splits)
            CHECK(allow_list(c, run.behind, (int)run.slice, &run, mask, &any));
        else
            CHECK(allow_list(c, rest, WORDS, &whole, mask, &any));
    }
    for (int i = 0; i < c->all->n_ends && automaton_may_end(c->a, state); i++)
        allow(mask, c->all->ends[i]);
    if (!any && automaton_may_go_on(c->a, state))
        FAIL(ST_UNSUPPORTED, "the vocabulary has no token that a constraint goes on with");
out:
    return st;
}

// ---- compiling ----------------------------------------------------------------------------------

static enum status compile(struct constraints *all, const json_t *spec, char *text,
                           struct constraint **ret)
{
    int start;
    enum status st;
    struct constraint *c = calloc(1, sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    pthread_mutex_init(&c->lock, NULL);
    c->all = all;
    CHECK(automaton_new(&c->a));
    CHECK(spec_build(c->a, all->names, all->n_names, spec, &start));
    CHECK(automaton_finish(c->a, start));
    c->spec = text;
    *ret = c;
    c = NULL;
out:
    if (c) destroy(c);
    return st;
}

static size_t bytes_of(struct constraint *c)
{
    pthread_mutex_lock(&c->lock);
    const size_t bytes = automaton_bytes(c->a);
    pthread_mutex_unlock(&c->lock);
    return bytes;
}

// Room for a new one; of those that nobody holds the last ones go. Under the lock.
static enum status make_room(struct constraints *all)
{
    size_t bytes = 0;
    for (int i = 0; i < all->n_compiled; i++) bytes += bytes_of(all->compiled[i]);
    for (int i = all->n_compiled - 1; i >= 0; i--) {
        if (all->n_compiled < MAX_KEPT && bytes < KEPT_BYTES) break;
        if (all->compiled[i]->n_references > 0) continue;
        bytes -= bytes_of(all->compiled[i]);
        destroy(all->compiled[i]);
        memmove(&all->compiled[i], &all->compiled[i + 1],
                (size_t)(--all->n_compiled - i) * sizeof *all->compiled);
    }
    struct constraint **larger =
        array_room(all->compiled, (size_t)all->n_compiled, sizeof *all->compiled);
    if (!larger) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    all->compiled = larger;
    return ST_OK;
}

static void put_first(struct constraints *all, struct constraint *c, int from)
{
    memmove(&all->compiled[1], &all->compiled[0], (size_t)from * sizeof *all->compiled);
    all->compiled[0] = c;
}

// Whether it is far from its bounds: texts without end bring ever more states.
static bool has_room(struct constraint *c)
{
    pthread_mutex_lock(&c->lock);
    const bool room = automaton_states(c->a) < AUTOMATON_STATES / 2;
    pthread_mutex_unlock(&c->lock);
    return room;
}

enum status constraints_get(struct constraints *all, const json_t *spec, struct constraint **ret)
{
    char *text = json_dumps(spec, JSON_ENCODE_ANY | JSON_COMPACT);
    struct constraint *c = NULL;
    uint32_t *mask = malloc(((size_t)all->vocab_size / 32 + 1) * sizeof *mask);
    enum status st = ST_OK;
    pthread_mutex_lock(&all->lock);
    if (!text || !mask) FAIL(ST_NO_MEMORY, "no memory for a constraint");
    for (int i = 0; i < all->n_compiled && !c; i++)
        if (strcmp(all->compiled[i]->spec, text) == 0 && has_room(all->compiled[i])) {
            c = all->compiled[i];
            put_first(all, c, i);
        }
    if (!c) {
        CHECK(read_words(all));
        CHECK(make_room(all));
        CHECK(compile(all, spec, text, &c));
        text = NULL;
        put_first(all, c, all->n_compiled++);
    }
    CHECK(constraint_mask(c, CONSTRAINT_START, mask)); // what fails there fails here
    c->n_references++;
    *ret = c;
out:
    pthread_mutex_unlock(&all->lock);
    free(text);
    free(mask);
    return st;
}

struct constraint *constraint_hold(struct constraint *c)
{
    if (!c) return NULL;
    c->n_references++;
    return c;
}

void constraint_release(struct constraint *c)
{
    if (c) c->n_references--;
}

enum status constraint_meets(const json_t *spec, const char *text, size_t len, bool *ret)
{
    struct automaton *a = NULL;
    enum status st;
    int state = CONSTRAINT_START, start;
    CHECK(automaton_new(&a));
    CHECK(spec_build(a, NULL, 0, spec, &start));
    CHECK(automaton_finish(a, start));
    for (size_t i = 0; i < len && state != AUTOMATON_DEAD; i++) {
        automaton_allow(a);
        CHECK(automaton_step(a, state, (uint8_t)text[i], &state));
    }
    *ret = state != AUTOMATON_DEAD && automaton_may_end(a, state);
out:
    automaton_free(a);
    return st;
}

// ---- running ----------------------------------------------------------------------------------

// Whether the state's mask could not be made. Under the lock.
static bool is_beyond(const struct constraint *c, int state)
{
    return state >= 0 && state < c->n_found && c->found[state].is_beyond;
}

enum status constraint_mask(struct constraint *c, int state, uint32_t *ret)
{
    pthread_mutex_lock(&c->lock);
    enum status st = is_beyond(c, state) ? status_recall(&c->failure) : fill_mask(c, state, ret);
    if (st == ST_TOO_LONG || st == ST_UNSUPPORTED) {
        status_keep(&c->failure, st);
        c->found[state].is_beyond = true;
        memset(ret, 0, (size_t)constraint_words(c) * sizeof *ret);
    }
    pthread_mutex_unlock(&c->lock);
    return st;
}

static int threads_for(int n_rows)
{
    const int max = omp_get_max_threads();
    return n_rows / ROWS_EACH < max ? n_rows / ROWS_EACH : max;
}

static enum status mask_behind(const struct constraint_row *row, uint32_t *ret)
{
    int state = row->state;
    const enum status st =
        row->token < 0 ? ST_OK : constraint_next(row->constraint, state, row->token, &state);
    if (st == ST_OK && state >= 0) return constraint_mask(row->constraint, state, ret);
    memset(ret, 0, (size_t)constraint_words(row->constraint) * sizeof *ret);
    return st;
}

enum status constraint_masks(const struct constraint_row *rows, int n, uint32_t *ret)
{
    const int threads = threads_for(n);
    struct status_kept kept = {.code = ST_OK};
    (void)threads; // built without OpenMP
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int i = 0; i < n; i++) {
        const size_t words = (size_t)constraint_words(rows[i].constraint);
        const enum status st = mask_behind(&rows[i], ret + (size_t)i * words);
        if (st == ST_OK) continue;
#pragma omp critical(constraint_failure)
        if (kept.code != ST_NO_MEMORY) status_keep(&kept, st);
    }
    return kept.code == ST_OK ? ST_OK : status_recall(&kept);
}

enum status constraint_next(struct constraint *c, int state, int32_t token, int *ret)
{
    const struct constraints *all = c->all;
    const struct word w =
        token >= 0 && token < all->vocab_size ? all->words[token] : (struct word){0, 0};
    const uint8_t *text = (const uint8_t *)bytes_text(&all->text) + w.at;
    enum status st = ST_OK;
    pthread_mutex_lock(&c->lock);
    *ret = AUTOMATON_DEAD;
    automaton_allow(c->a);
    if (is_beyond(c, state)) st = status_recall(&c->failure);
    for (int i = 0; i < all->n_ends; i++)
        if (all->ends[i] == token && automaton_may_end(c->a, state)) *ret = state;
    if (*ret == AUTOMATON_DEAD && w.n > 0 && st == ST_OK) {
        *ret = state;
        for (uint32_t i = 0; i < w.n && st == ST_OK; i++)
            st = automaton_step(c->a, *ret, text[i], ret);
    }
    pthread_mutex_unlock(&c->lock);
    return st;
}

void constraint_follow(const struct constraint_row *rows, int n)
{
    const int threads = threads_for(n);
    (void)threads; // built without OpenMP
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int i = 0; i < n; i++) {
        int behind; // kept, as all that was followed once; what fails does so again
        (void)constraint_next(rows[i].constraint, rows[i].state, rows[i].token, &behind);
    }
}

bool constraint_is_over(struct constraint *c, int state)
{
    pthread_mutex_lock(&c->lock);
    const bool over = automaton_may_end(c->a, state) && !automaton_may_go_on(c->a, state);
    pthread_mutex_unlock(&c->lock);
    return over;
}
