/* suffix.c: drafts what followed the same last tokens in completions of the same prompt, by
 * siblings of the group or by earlier requests; where nothing is known, as ngram.
 *
 * The memory is a hash table a prompt. An entry is either a context (the hash of the last m
 * tokens), with its most frequent next token and how often that came, or a context together with
 * one next token, with that pair's count: so the most frequent one is found by one look-up and kept
 * up by two, and nothing is ever sorted. This is a suffix trie of depth SUFFIX_DEPTH whose edges
 * are found by hash; siblings share its nodes, which is what makes it small for a group.
 *
 * A context that was seen once is a leaf: the longer ones that end in it were seen once too, with
 * the same next token, so one entry with the tail it was seen behind stands for all of them. Only
 * when it is seen again does the leaf move a token deeper. Most contexts are leaves, and a token
 * costs a few look-ups in place of two for each length.
 *
 * Tables double as they fill; one that has reached MAX_ENTRIES takes no new entries but goes on
 * counting. Prompts are found through chains of a fixed array of heads, and stand in a list in the
 * order of their last use. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/hash.h"
#include "infer-server/speculative/method.h"
#include <stdlib.h>
#include <string.h>

#define HEADS         16384      // chains of a prompt or two, of as many as fit into the memory
#define FIRST_ENTRIES 64         // of a prompt: what a short completion takes
#define MAX_ENTRIES   (1u << 17) // 2 MB a prompt, and its leaves
#define LEAF          (1u << 31) // a bit that no count reaches
#define NO_TOKEN      (-1)       // no id is negative

struct entry {
    uint64_t key; // 0: free
    int32_t token;
    uint32_t count; // of a leaf: LEAF and the number of its tail
};
struct tail { // the tokens before a leaf's, the latest first; NO_TOKEN where there was none
    int32_t tokens[SUFFIX_DEPTH];
};
struct prompt_memory {
    uint64_t key;
    uint32_t n, cap; // entries; cap is a power of two
    uint32_t n_tails, tail_cap;
    struct entry *entries;
    struct tail *tails;
    struct prompt_memory *next;          // in its chain
    struct prompt_memory *newer, *older; // in the list by use
};
struct suffix_memory {
    size_t max_bytes, bytes;
    int n_prompts;
    struct prompt_memory *newest, *oldest;
    struct prompt_memory *heads[HEADS];
};

enum status suffix_memory_new(size_t max_bytes, struct suffix_memory **ret)
{
    struct suffix_memory *m = calloc(1, sizeof *m);
    if (!m) return status_fail(ST_NO_MEMORY, "no memory for the suffix drafter");
    m->max_bytes = max_bytes;
    *ret = m;
    return ST_OK;
}

static size_t bytes_of(const struct prompt_memory *p)
{
    return sizeof *p + p->cap * sizeof *p->entries + p->tail_cap * sizeof *p->tails;
}

static void leave_list(struct suffix_memory *m, struct prompt_memory *p)
{
    *(p->newer ? &p->newer->older : &m->newest) = p->older;
    *(p->older ? &p->older->newer : &m->oldest) = p->newer;
}

static void lead_list(struct suffix_memory *m, struct prompt_memory *p)
{
    p->newer = NULL;
    p->older = m->newest;
    *(m->newest ? &m->newest->newer : &m->oldest) = p;
    m->newest = p;
}

static void forget(struct suffix_memory *m, struct prompt_memory *p)
{
    struct prompt_memory **at = &m->heads[hash_mix(p->key) % HEADS];
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    leave_list(m, p);
    m->bytes -= bytes_of(p);
    m->n_prompts--;
    free(p->entries);
    free(p->tails);
    free(p);
}

void suffix_memory_free(struct suffix_memory *m)
{
    if (!m) return;
    while (m->oldest) forget(m, m->oldest);
    free(m);
}

size_t suffix_memory_bytes(const struct suffix_memory *m)
{
    return m->bytes;
}
int suffix_memory_prompts(const struct suffix_memory *m)
{
    return m->n_prompts;
}

static uint64_t extend(uint64_t hash, int32_t token)
{
    const uint64_t h = hash_mix((hash + (uint32_t)token + 1) * HASH_SPREAD);
    return h ? h : 1; // 0 is a free entry's
}

// Where the key stands, or the free entry where it would.
static struct entry *find(const struct prompt_memory *p, uint64_t key)
{
    uint32_t i = (uint32_t)key & (p->cap - 1);
    while (p->entries[i].key && p->entries[i].key != key) i = (i + 1) & (p->cap - 1);
    return &p->entries[i];
}

// Makes room by forgetting others, the least recently used first. The newest is in use.
static void keep_within(struct suffix_memory *m)
{
    while (m->bytes > m->max_bytes && m->n_prompts > 1) forget(m, m->oldest);
}

static bool grow(struct suffix_memory *m, struct prompt_memory *p)
{
    if ((p->n + 1) * 4 <= p->cap * 3) return true;
    if (p->cap >= MAX_ENTRIES || 2 * bytes_of(p) > m->max_bytes) return false;
    struct prompt_memory larger = *p;
    larger.cap = p->cap * 2;
    larger.entries = calloc(larger.cap, sizeof *larger.entries);
    if (!larger.entries) return false;
    for (uint32_t i = 0; i < p->cap; i++)
        if (p->entries[i].key) *find(&larger, p->entries[i].key) = p->entries[i];
    m->bytes += (larger.cap - p->cap) * sizeof *p->entries;
    free(p->entries);
    *p = larger;
    keep_within(m);
    return true;
}

static struct prompt_memory *find_prompt(struct suffix_memory *m, uint64_t key)
{
    struct prompt_memory *p = m->heads[hash_mix(key) % HEADS];
    while (p && p->key != key) p = p->next;
    if (p && p != m->newest) {
        leave_list(m, p);
        lead_list(m, p);
    }
    return p;
}

static struct prompt_memory *new_prompt(struct suffix_memory *m, uint64_t key)
{
    struct prompt_memory *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->entries = calloc(FIRST_ENTRIES, sizeof *p->entries);
    if (!p->entries) {
        free(p);
        return NULL;
    }
    p->cap = FIRST_ENTRIES;
    p->key = key;
    lead_list(m, p);
    p->next = m->heads[hash_mix(key) % HEADS];
    m->heads[hash_mix(key) % HEADS] = p;
    m->n_prompts++;
    m->bytes += bytes_of(p);
    keep_within(m);
    return p;
}

// The key's entry, made where it is not there; NULL where the table is full.
static struct entry *claim(struct suffix_memory *m, struct prompt_memory *p, uint64_t key)
{
    struct entry *e = find(p, key);
    if (e->key) return e;
    if (!grow(m, p)) return NULL;
    e = find(p, key);
    e->key = key;
    p->n++;
    return e;
}

// The number of a new tail; LEAF where there is no room for it.
static uint32_t add_tail(struct suffix_memory *m, struct prompt_memory *p, const int32_t *tail,
                         int n)
{
    if (p->n_tails == p->tail_cap) {
        const uint32_t cap = p->tail_cap ? p->tail_cap * 2 : FIRST_ENTRIES / 2;
        const size_t more = (cap - p->tail_cap) * sizeof *p->tails;
        if (cap > MAX_ENTRIES || bytes_of(p) + more > m->max_bytes) return LEAF;
        struct tail *tails = realloc(p->tails, cap * sizeof *tails);
        if (!tails) return LEAF;
        p->tails = tails;
        p->tail_cap = cap;
        m->bytes += more;
        keep_within(m);
    }
    for (int i = 0; i < SUFFIX_DEPTH; i++)
        p->tails[p->n_tails].tokens[i] = i < n ? tail[n - 1 - i] : NO_TOKEN;
    return p->n_tails++;
}

static uint64_t pair_key(uint64_t context, int32_t next)
{
    return extend(context ^ 0x5bf0a8b1457695b3u, next);
}

// Seen again: the leaf's one occurrence is counted as a pair, and goes on as a leaf one token
// deeper.
static bool open_leaf(struct suffix_memory *m, struct prompt_memory *p, uint64_t context,
                      int length)
{
    struct entry *leaf = find(p, context);
    const int32_t token = leaf->token;
    const uint32_t tail = leaf->count;
    struct entry *pair = claim(m, p, pair_key(context, token)); // the table may move
    if (!pair) return false;
    pair->count = 1;
    find(p, context)->count = 1;
    if (length == SUFFIX_DEPTH) return true;
    const int32_t before = p->tails[tail & ~LEAF].tokens[length];
    struct entry *deeper = before == NO_TOKEN ? NULL : claim(m, p, extend(context, before));
    if (!deeper) return before == NO_TOKEN;
    deeper->token = token;
    deeper->count = tail;
    return true;
}

void suffix_memory_add(struct suffix_memory *m, uint64_t prompt_key, const int32_t *tail, int n,
                       int32_t next)
{
    struct prompt_memory *p = find_prompt(m, prompt_key);
    if (!p) p = new_prompt(m, prompt_key);
    uint64_t context = 0;
    for (int length = 1; p && length <= n; length++) {
        context = extend(context, tail[n - length]);
        const struct entry *known = find(p, context);
        if (!known->key) {
            const uint32_t number = add_tail(m, p, tail, n);
            struct entry *leaf = number == LEAF ? NULL : claim(m, p, context);
            if (!leaf) return;
            leaf->token = next;
            leaf->count = LEAF | number;
            return;
        }
        if (known->count & LEAF && !open_leaf(m, p, context, length)) return;
        struct entry *pair = claim(m, p, pair_key(context, next));
        if (!pair) return;
        const uint32_t count = ++pair->count;
        struct entry *best = find(p, context); // the table may have moved
        if (best->token != next && count < best->count) continue;
        best->token = next;
        best->count = count;
    }
}

int suffix_memory_next(struct suffix_memory *m, uint64_t prompt_key, const int32_t *tail, int n,
                       int32_t *ret_next)
{
    const struct prompt_memory *p = find_prompt(m, prompt_key);
    uint64_t context = 0;
    int known = 0;
    for (int length = 1; p && length <= n; length++) { // a longer one is known only if this one is
        context = extend(context, tail[n - length]);
        const struct entry *e = find(p, context);
        if (!e->key) break;
        *ret_next = e->token;
        known = length;
        if (!(e->count & LEAF)) continue;
        const struct tail *seen = &p->tails[e->count & ~LEAF];
        while (known < n && seen->tokens[known] == tail[n - 1 - known]) known++;
        break;
    }
    return known;
}

// ---- the method --------------------------------------------------------------------------------

#define MEMORY_BYTES ((size_t)64 << 20) // some thousand prompts of a GRPO epoch

static enum status new_memory(void **ret)
{
    return suffix_memory_new(MEMORY_BYTES, (struct suffix_memory **)ret);
}

static void free_memory(void *memory)
{
    suffix_memory_free(memory);
}

// The last tokens before `end`, oldest first; how many.
static int tail_of(const struct history *h, int end, int32_t *ret)
{
    const int n = end < SUFFIX_DEPTH ? end : SUFFIX_DEPTH;
    for (int i = 0; i < n; i++) ret[i] = history_token(h, end - n + i);
    return n;
}

static void propose(void *memory, const struct history *h, int max, struct draft *ret)
{
    int32_t tail[SUFFIX_DEPTH + SPECULATIVE_MAX];
    int n = tail_of(h, h->n_prompt + h->n_generated, tail);
    for (ret->n = 0; ret->n < max; ret->n++) {
        const int known = n < SUFFIX_DEPTH ? n : SUFFIX_DEPTH;
        const int matched =
            suffix_memory_next(memory, h->prompt_key, tail + n - known, known, &tail[n]);
        if (matched == 0) break;
        if (ret->n == 0) ret->matched = matched;
        ret->tokens[ret->n] = tail[n++];
    }
    if (ret->n == 0) method_ngram.propose(NULL, h, max, ret);
}

static void learn(void *memory, const struct history *h)
{
    int32_t tail[SUFFIX_DEPTH];
    const int before = h->n_prompt + h->n_generated - 1, n = tail_of(h, before, tail);
    suffix_memory_add(memory, h->prompt_key, tail, n, history_token(h, before));
}

const struct draft_method method_suffix = {.name = "suffix",
                                           .k = 8,
                                           .guess = 0.5,
                                           .new_memory = new_memory,
                                           .free_memory = free_memory,
                                           .learn = learn,
                                           .propose = propose};
