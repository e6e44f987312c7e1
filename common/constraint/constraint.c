/* constraint.c: see constraint.h.
 *
 * A mask is made by following the vocabulary's trie from the state: where a byte may not come, what
 * is below it is passed over; so are tokens of plain characters alone, where the state takes a run
 * of those (automaton.h). Masks are kept by state, up to MASK_BYTES. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/constraint.h"
#include "common/constraint/spec.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MASK_BYTES (16 << 20) // of one constraint's masks; of many, MAX_KEPT times it for all
#define MAX_KEPT   32         // that nobody holds, for requests to come
#define MAX_BYTES  1023       // of a token that is offered

struct word { // a token's bytes, in `text`; n == 0: it has none
    uint32_t at, n;
};

/* A byte of the words that begin alike, behind that before it; what is below it follows. */
struct branch {
    int32_t token;  // that ends here; -1: none
    uint32_t past;  // the index behind all that is below
    uint16_t depth; // bytes before it
    uint8_t byte;
    uint8_t longest; // plain characters of the tokens from here on; NOT_PLAIN: others are there
};
#define NOT_PLAIN 255

struct constraints {
    pthread_mutex_t lock;
    const struct tokenizer *tokenizer;
    int vocab_size, n_ends;
    int *ends;
    struct word *words; // (vocab_size) once a constraint was wanted
    struct bytes text;
    struct branch *trie;
    uint32_t n_trie;
    int32_t *twins;  // (vocab_size) the next token of the same bytes; -1: none
    uint32_t *plain; // (AUTOMATON_MAX_RUN masks) tokens of at most so many plain characters and 1
    const char **names; // of the special tokens
    int n_names;
    struct constraint **compiled; // (n_compiled) the last one used first
    _Atomic int n_compiled;       // changed under the lock
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
    uint32_t *nothing;          // the mask of states whose own cannot be made
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
    free(all->words);
    free(all->trie);
    free(all->twins);
    free(all->plain);
    free(all->names);
    all->words = NULL;
    all->trie = NULL;
    all->twins = NULL;
    all->plain = NULL;
    all->names = NULL;
    all->n_names = 0;
    all->n_trie = 0;
    bytes_clear(&all->text);
}

static void destroy(struct constraint *c)
{
    for (int i = 0; i < c->n_masks; i++)
        if (c->masks[i] != c->nothing) free(c->masks[i]);
    free(c->masks);
    free(c->nothing);
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

struct order { // to sort tokens by their bytes
    const char *text;
    const struct word *words;
};

static int by_bytes(const void *a, const void *b, void *context)
{
    const struct order *o = context;
    const struct word x = o->words[*(const int32_t *)a], y = o->words[*(const int32_t *)b];
    const int order = memcmp(o->text + x.at, o->text + y.at, x.n < y.n ? x.n : y.n);
    return order ? order : (x.n > y.n) - (x.n < y.n);
}

// Characters of a word that are all plain, at most AUTOMATON_MAX_RUN; else NOT_PLAIN.
static uint8_t plain_length(const char *text, size_t n)
{
    int length = 0;
    for (size_t i = 0; i < n; length++) {
        const int bytes = utf8_sequence(text + i, n - i);
        if (bytes <= 0 || !automaton_is_plain(utf8_decode(text + i, bytes))) return NOT_PLAIN;
        i += (size_t)bytes;
    }
    return length <= AUTOMATON_MAX_RUN ? (uint8_t)length : NOT_PLAIN;
}

static void allow(uint32_t *mask, int32_t token)
{
    mask[token / 32] |= 1u << token % 32;
}

// The trie of the n tokens in the order of their bytes; open: branches on the way to the last one.
static void grow_trie(struct constraints *all, const int32_t *order, int n)
{
    const size_t mask_words = ((size_t)all->vocab_size + 31) / 32;
    const char *text = bytes_text(&all->text);
    uint32_t open[MAX_BYTES], n_open = 0;
    for (int i = 0; i <= n; i++) { // one more closes them all
        const struct word w = i < n ? all->words[order[i]] : (struct word){0, 0};
        uint32_t shared = 0;
        while (shared < n_open && shared < w.n &&
               all->trie[open[shared]].byte == (uint8_t)text[w.at + shared])
            shared++;
        while (n_open > shared) {
            struct branch *b = &all->trie[open[--n_open]],
                          *above = n_open > 0 ? &all->trie[open[n_open - 1]] : b;
            b->past = all->n_trie;
            if (b->longest > above->longest) above->longest = b->longest;
        }
        for (; n_open < w.n; n_open++) {
            open[n_open] = all->n_trie;
            all->trie[all->n_trie++] =
                (struct branch){-1, 0, (uint16_t)n_open, (uint8_t)text[w.at + n_open], 0};
        }
        if (i == n) break;
        struct branch *last = &all->trie[open[w.n - 1]];
        all->twins[order[i]] = last->token;
        last->token = order[i];
        last->longest = plain_length(text + w.at, w.n);
        for (size_t k = last->longest; k > 0 && k <= AUTOMATON_MAX_RUN; k++)
            allow(all->plain + (k - 1) * mask_words, order[i]);
    }
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
    int n_words = 0;
    if (all->trie) return ST_OK;
    int32_t *order = malloc((vocab + 1) * sizeof *order);
    all->words = calloc(vocab + 1, sizeof *all->words);
    all->twins = malloc((vocab + 1) * sizeof *all->twins);
    all->plain = calloc(AUTOMATON_MAX_RUN * ((vocab + 31) / 32), sizeof *all->plain);
    all->names = malloc((vocab + 1) * sizeof *all->names);
    if (!order || !all->words || !all->twins || !all->plain || !all->names)
        FAIL(ST_NO_MEMORY, "no memory for the vocabulary's texts");
    for (int id = 0; id < n; id++) {
        CHECK(read_word(all, id));
        if (all->words[id].n > 0) order[n_words++] = id;
    }
    CHECK(bytes_status(&all->text));
    all->trie = malloc((all->text.len + 1) * sizeof *all->trie);
    if (!all->trie) FAIL(ST_NO_MEMORY, "no memory for the vocabulary's texts");
    struct order context = {bytes_text(&all->text), all->words};
    qsort_r(order, (size_t)n_words, sizeof *order, by_bytes, &context);
    grow_trie(all, order, n_words);
out:
    if (st != ST_OK) forget_words(all);
    free(order);
    return st;
}

// ---- masks --------------------------------------------------------------------------------------

int constraint_words(const struct constraint *c)
{
    return (c->all->vocab_size + 31) / 32;
}

// Mask: zeros.
static enum status fill_mask(struct constraint *c, int state, uint32_t *mask)
{
    const struct constraints *all = c->all;
    const int run = automaton_run(c->a, state);
    const size_t words = (size_t)constraint_words(c);
    int states[MAX_BYTES + 1] = {state}; // behind so many bytes
    automaton_allow(c->a);
    if (run > 0) memcpy(mask, all->plain + (size_t)(run - 1) * words, words * sizeof *mask);
    for (uint32_t i = 0; i < all->n_trie;) {
        const struct branch b = all->trie[i];
        int *next = &states[b.depth + 1];
        if (b.longest > run) {
            const enum status st = automaton_step(c->a, states[b.depth], b.byte, next);
            if (st != ST_OK) return st;
        }
        if (b.longest <= run || *next == AUTOMATON_DEAD) {
            i = b.past;
            continue;
        }
        for (int32_t token = b.token; token >= 0; token = all->twins[token]) allow(mask, token);
        i++;
    }
    for (int i = 0; i < all->n_ends && automaton_may_end(c->a, state); i++)
        allow(mask, all->ends[i]);
    return ST_OK;
}

static void drop_masks(struct constraint *c)
{
    for (int i = 0; i < c->n_masks; i++) {
        if (c->masks[i] == c->nothing) continue;
        free(c->masks[i]);
        c->masks[i] = NULL;
    }
    c->mask_bytes = 0;
}

// Room for the mask of a state. Under the lock.
static enum status mask_room(struct constraint *c, int state, size_t bytes)
{
    const size_t most = MASK_BYTES / (size_t)(1 + c->all->n_compiled / (MAX_KEPT + 1));
    if (c->mask_bytes + bytes > most) drop_masks(c);
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
        if (automaton_may_go_on(c->a, state) && memcmp(made, c->nothing, bytes) == 0)
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
    c->nothing = calloc((size_t)constraint_words(c), sizeof *c->nothing);
    if (!c->nothing) FAIL(ST_NO_MEMORY, "no memory for a constraint");
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

// Room for a new one; of those that nobody holds the last goes. Under the lock.
static enum status make_room(struct constraints *all)
{
    int i = all->n_compiled < MAX_KEPT ? -1 : all->n_compiled - 1;
    while (i >= 0 && all->compiled[i]->n_references > 0) i--;
    if (i >= 0) {
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
    char *text = json_dumps(spec, JSON_COMPACT);
    struct constraint *c = NULL;
    const uint32_t *mask;
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
        CHECK(make_room(all));
        CHECK(compile(all, spec, text, &c));
        text = NULL;
        put_first(all, c, all->n_compiled++);
    }
    pthread_mutex_lock(&c->lock);
    st = find_mask(c, CONSTRAINT_START, &mask); // what fails there fails here
    pthread_mutex_unlock(&c->lock);
    if (st != ST_OK) goto out;
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

enum status constraint_of_format(const json_t *format, json_t **ret)
{
    const char *type = json_string_value(json_object_get(format, "type"));
    const json_t *schema = json_object_get(json_object_get(format, "json_schema"), "schema");
    *ret = NULL;
    if (!format || json_is_null(format)) return ST_OK;
    if (!type) return status_fail(ST_INVALID, "it must be an object with a \"type\"");
    if (strcmp(type, "text") == 0) return ST_OK;
    if (strcmp(type, "json_object") == 0) {
        *ret = json_pack("{s:b}", "json_object", 1);
    } else if (strcmp(type, "json_schema") == 0) {
        if (!schema)
            return status_fail(ST_INVALID, "the type json_schema needs \"json_schema\": "
                                           "{\"schema\": ...}");
        *ret = json_pack("{s:O}", "json_schema", schema);
    } else {
        return status_fail(ST_UNSUPPORTED,
                           "the type \"%s\" is not supported; text, json_object and json_schema "
                           "are",
                           CUT(type, 40));
    }
    return *ret ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for a constraint");
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
    return state >= 0 && state < c->n_masks && c->masks[state] == c->nothing;
}

enum status constraint_mask(struct constraint *c, int state, uint32_t *ret)
{
    const uint32_t *mask;
    pthread_mutex_lock(&c->lock);
    const enum status st =
        is_beyond(c, state) ? status_recall(&c->failure) : find_mask(c, state, &mask);
    if (st == ST_TOO_LONG || st == ST_UNSUPPORTED) {
        status_keep(&c->failure, st);
        mask = c->masks[state] = c->nothing;
    }
    if (st != ST_NO_MEMORY) memcpy(ret, mask, (size_t)constraint_words(c) * sizeof *ret);
    pthread_mutex_unlock(&c->lock);
    return st;
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

bool constraint_is_over(struct constraint *c, int state)
{
    pthread_mutex_lock(&c->lock);
    const bool over = automaton_may_end(c->a, state) && !automaton_may_go_on(c->a, state);
    pthread_mutex_unlock(&c->lock);
    return over;
}
