/* constraint.c: see constraint.h.
 *
 * A mask is made by following every token's bytes from the state, tokens in the order of their
 * bytes: what a token shares with the one before it is not followed again, and where a byte may not
 * come, all tokens that share it are passed over. Masks are kept by state, up to MASK_BYTES. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/constraint.h"
#include "common/constraint/spec.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MASK_BYTES   (16 << 20) // of one constraint's masks
#define MAX_COMPILED 32         // that are kept for requests to come
#define MAX_BYTES    1023       // of a token that is offered

struct word { // a token that has text
    int32_t id;
    uint32_t at;          // its bytes, in `text`
    uint16_t n, n_shared; // and how many of them it shares with the word before it
};

struct constraints {
    pthread_mutex_t lock;
    const struct tokenizer *tokenizer;
    int vocab_size, n_ends;
    int *ends;
    struct word *words; // in the order of their bytes, once one was wanted
    int n_words;
    int32_t *word_of; // (vocab_size) -1: the token has no text
    struct bytes text;
    const char **names; // of the special tokens
    int n_names;
    struct constraint *compiled[MAX_COMPILED]; // the last one used first
    int n_compiled;
};

struct constraint {
    pthread_mutex_t lock;
    const struct constraints *all;
    _Atomic int n_references; // from 0 on under the lock of all
    char *spec;
    struct automaton *a;
    uint32_t **masks; // (n_masks) by state
    int n_masks;
    size_t mask_bytes;
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

static void destroy(struct constraint *c)
{
    for (int i = 0; i < c->n_masks; i++) free(c->masks[i]);
    free(c->masks);
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
    bytes_release(&all->text);
    free(all->ends);
    free(all->words);
    free(all->word_of);
    free(all->names);
    free(all);
}

static int by_bytes(const void *a, const void *b, void *context)
{
    const struct word *x = a, *y = b;
    const char *text = context;
    const int order = memcmp(text + x->at, text + y->at, x->n < y->n ? x->n : y->n);
    return order          ? order
           : x->n != y->n ? (x->n > y->n) - (x->n < y->n)
                          : (x->id > y->id) - (x->id < y->id);
}

static void sort_words(struct constraints *all)
{
    char *text = all->text.data;
    qsort_r(all->words, (size_t)all->n_words, sizeof *all->words, by_bytes, text);
    for (int i = 0; i < all->n_words; i++) {
        struct word *w = &all->words[i];
        const struct word *before = i > 0 ? w - 1 : NULL;
        while (before && w->n_shared < w->n && w->n_shared < before->n &&
               text[w->at + w->n_shared] == text[before->at + w->n_shared])
            w->n_shared++;
        all->word_of[w->id] = i;
    }
}

// Under the lock.
static enum status read_words(struct constraints *all)
{
    const int n = tokenizer_vocab_size(all->tokenizer) < all->vocab_size
                      ? tokenizer_vocab_size(all->tokenizer)
                      : all->vocab_size;
    enum status st = ST_OK;
    if (all->words) return ST_OK;
    bytes_clear(&all->text);
    all->n_words = 0;
    struct word *words = malloc(((size_t)n + 1) * sizeof *words);
    free(all->word_of);
    all->word_of = malloc((size_t)all->vocab_size * sizeof *all->word_of);
    free(all->names);
    all->names = malloc(((size_t)n + 1) * sizeof *all->names);
    all->n_names = 0;
    if (!words || !all->word_of || !all->names)
        FAIL(ST_NO_MEMORY, "no memory for the vocabulary's texts");
    for (int id = 0; id < all->vocab_size; id++) all->word_of[id] = -1;
    for (int id = 0; id < n; id++) {
        const size_t at = all->text.len;
        const char *name = tokenizer_token(all->tokenizer, id);
        if (!name || !*name) continue;
        if (tokenizer_is_special(all->tokenizer, id)) {
            all->names[all->n_names++] = name;
            bytes_append(&all->text, (const char[]){(char)SPEC_SPECIAL}, 1);
            bytes_puts(&all->text, name);
        } else
            CHECK(tokenizer_token_bytes(all->tokenizer, id, &all->text));
        const size_t len = all->text.len - at;
        if (len == 0 || len > MAX_BYTES) continue;
        words[all->n_words++] = (struct word){id, (uint32_t)at, (uint16_t)len, 0};
    }
    CHECK(bytes_status(&all->text));
    all->words = words;
    words = NULL;
    sort_words(all);
out:
    free(words);
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

// The place of a new one, which is that of the last one of those that nobody holds. Under the lock.
static void make_room(struct constraints *all)
{
    int i = all->n_compiled - 1;
    if (all->n_compiled < MAX_COMPILED) return;
    while (i >= 0 && all->compiled[i]->n_references > 0) i--;
    if (i < 0) return;
    destroy(all->compiled[i]);
    memmove(&all->compiled[i], &all->compiled[i + 1],
            (size_t)(--all->n_compiled - i) * sizeof *all->compiled);
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
    char *text = json_dumps(spec, JSON_COMPACT);
    struct constraint *c = NULL;
    enum status st = ST_OK;
    if (!text) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    pthread_mutex_lock(&all->lock);
    for (int i = 0; i < all->n_compiled && !c; i++)
        if (strcmp(all->compiled[i]->spec, text) == 0 && has_room(all->compiled[i])) {
            c = all->compiled[i];
            put_first(all, c, i);
        }
    if (!c) {
        CHECK(read_words(all));
        make_room(all);
        if (all->n_compiled == MAX_COMPILED)
            FAIL(ST_BUSY, "%d constraints are in use, which are as many as there can be",
                 MAX_COMPILED);
        CHECK(compile(all, spec, text, &c));
        text = NULL;
        put_first(all, c, all->n_compiled++);
    }
    CHECK(constraint_prepare(c, CONSTRAINT_START));
    c->n_references++;
    *ret = c;
out:
    pthread_mutex_unlock(&all->lock);
    free(text);
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

// ---- masks --------------------------------------------------------------------------------------

int constraint_words(const struct constraint *c)
{
    return (c->all->vocab_size + 31) / 32;
}

static void allow(uint32_t *mask, int32_t token)
{
    mask[token / 32] |= 1u << token % 32;
}

static enum status fill_mask(struct constraint *c, int state, uint32_t *mask)
{
    const struct constraints *all = c->all;
    const uint8_t *text = (const uint8_t *)bytes_text(&all->text);
    int states[MAX_BYTES + 1] = {state}; // behind so many bytes of the word
    int dead = MAX_BYTES + 1;            // the byte that may not come; words that share it neither
    for (int i = 0; i < all->n_words; i++) {
        const struct word *w = &all->words[i];
        if (w->n_shared > dead) continue;
        int n = w->n_shared;
        for (; n < w->n; n++) {
            const enum status st =
                automaton_step(c->a, states[n], text[w->at + (uint32_t)n], &states[n + 1]);
            if (st != ST_OK) return st;
            if (states[n + 1] == AUTOMATON_DEAD) break;
        }
        dead = n < w->n ? n : MAX_BYTES + 1;
        if (n == w->n) allow(mask, w->id);
    }
    for (int i = 0; i < all->n_ends && automaton_may_end(c->a, state); i++)
        allow(mask, all->ends[i]);
    return ST_OK;
}

static void drop_masks(struct constraint *c)
{
    for (int i = 0; i < c->n_masks; i++) {
        free(c->masks[i]);
        c->masks[i] = NULL;
    }
    c->mask_bytes = 0;
}

// Room for the mask of a state. Under the lock.
static enum status mask_room(struct constraint *c, int state, size_t bytes)
{
    if (c->mask_bytes + bytes > MASK_BYTES) drop_masks(c);
    if (state >= c->n_masks) {
        const int n = automaton_states(c->a) + 64;
        uint32_t **masks = realloc(c->masks, (size_t)n * sizeof *masks);
        if (!masks) return status_fail(ST_NO_MEMORY, "no memory for a mask");
        memset(masks + c->n_masks, 0, (size_t)(n - c->n_masks) * sizeof *masks);
        c->masks = masks;
        c->n_masks = n;
    }
    return ST_OK;
}

static bool is_empty(const uint32_t *mask, int words)
{
    int i = 0;
    while (i < words && !mask[i]) i++;
    return i == words;
}

// The mask of a state, kept. Under the lock.
static enum status find_mask(struct constraint *c, int state, const uint32_t **ret)
{
    const size_t bytes = (size_t)constraint_words(c) * sizeof **ret;
    uint32_t *made = NULL;
    enum status st = ST_OK;
    if (state >= c->n_masks || !c->masks[state]) {
        CHECK(mask_room(c, state, bytes));
        made = calloc(1, bytes);
        if (!made) FAIL(ST_NO_MEMORY, "no memory for a mask");
        CHECK(fill_mask(c, state, made));
        if (automaton_may_go_on(c->a, state) && is_empty(made, constraint_words(c)))
            FAIL(ST_UNSUPPORTED, "the vocabulary has no token that a constraint goes on with");
        c->masks[state] = made;
        c->mask_bytes += bytes;
        made = NULL;
    }
    *ret = c->masks[state];
out:
    free(made);
    return st;
}

enum status constraint_mask(struct constraint *c, int state, uint32_t *ret)
{
    const uint32_t *mask;
    pthread_mutex_lock(&c->lock);
    const enum status st = find_mask(c, state, &mask);
    if (st == ST_OK) memcpy(ret, mask, (size_t)constraint_words(c) * sizeof *ret);
    pthread_mutex_unlock(&c->lock);
    return st;
}

enum status constraint_prepare(struct constraint *c, int state)
{
    const uint32_t *mask;
    pthread_mutex_lock(&c->lock);
    const enum status st = state < 0 ? ST_OK : find_mask(c, state, &mask);
    pthread_mutex_unlock(&c->lock);
    return st;
}

enum status constraint_next(struct constraint *c, int state, int32_t token, int *ret)
{
    const struct constraints *all = c->all;
    const int32_t word = token >= 0 && token < all->vocab_size ? all->word_of[token] : -1;
    enum status st = ST_OK;
    pthread_mutex_lock(&c->lock);
    *ret = AUTOMATON_DEAD;
    for (int i = 0; i < all->n_ends; i++)
        if (all->ends[i] == token && automaton_may_end(c->a, state)) *ret = state;
    if (*ret == AUTOMATON_DEAD && word >= 0) {
        const struct word *w = &all->words[word];
        const uint8_t *text = (const uint8_t *)bytes_text(&all->text) + w->at;
        *ret = state;
        for (int i = 0; i < w->n && st == ST_OK; i++) st = automaton_step(c->a, *ret, text[i], ret);
    }
    pthread_mutex_unlock(&c->lock);
    return st;
}

bool constraint_is_over(struct constraint *c, int state)
{
    pthread_mutex_lock(&c->lock);
    const bool over = automaton_may_end(c->a, state) && !automaton_may_go_on(c->a, state);
    pthread_mutex_unlock(&c->lock);
    return over;
}
