/* added_tokens.c: added tokens and the search for them. At each position the longest token that
 * starts there is taken (leftmost-longest, as in the tokenizers library); a byte trie finds it.
 * There are two tries: of texts as they are, and of normalized texts. */
#include "common/model/added_tokens.h"
#include "common/model/unicode.h"
#include <stdlib.h>
#include <string.h>

struct node {
    int child, sibling; // -1: none
    int id;             // of the token that ends here, -1
    unsigned char byte;
};
struct trie {
    struct node *nodes; // nodes[0] .. nodes[255]: first bytes; empty while n == 0
    int n, cap;
};

struct added_tokens {
    struct token_map map;
    struct added_token *tokens;
    int n, cap;
    int *by_id; // index into tokens, -1; map.n_ids entries, after finish
    struct trie tries[2];
};

enum status added_tokens_new(struct added_tokens **ret)
{
    struct added_tokens *a = calloc(1, sizeof(*a));
    if (!a) return status_fail(ST_NO_MEMORY, "out of memory for added tokens");
    *ret = a;
    return ST_OK;
}

void added_tokens_free(struct added_tokens *a)
{
    if (!a) return;
    token_map_release(&a->map);
    free(a->tokens);
    free(a->by_id);
    free(a->tries[0].nodes);
    free(a->tries[1].nodes);
    free(a);
}

// Index into tokens, -1: none. Linear until finish builds the table.
static int find_index(const struct added_tokens *a, int id)
{
    if (id < 0 || id >= a->map.n_ids) return -1;
    if (a->by_id) return a->by_id[id];
    for (int i = 0; i < a->n; i++)
        if (a->tokens[i].id == id) return i;
    return -1;
}

enum status added_tokens_put(struct added_tokens *a, const char *text, size_t len,
                             const struct added_token *token)
{
    int there = token_map_id(&a->map, text, len);
    if (there == token->id) {
        a->tokens[find_index(a, there)] = *token;
        return ST_OK;
    }
    enum status st = token_map_add(&a->map, text, len, token->id);
    if (st != ST_OK) return st;
    if (a->n == a->cap) {
        int cap = a->cap ? 2 * a->cap : 32;
        struct added_token *tokens = realloc(a->tokens, (size_t)cap * sizeof(*tokens));
        if (!tokens) return status_fail(ST_NO_MEMORY, "out of memory for added tokens");
        a->tokens = tokens;
        a->cap = cap;
    }
    a->tokens[a->n++] = *token;
    return ST_OK;
}

static int trie_node(struct trie *t, unsigned char byte)
{
    if (t->n == t->cap) {
        int cap = t->cap ? 2 * t->cap : 512;
        struct node *nodes = realloc(t->nodes, (size_t)cap * sizeof(*nodes));
        if (!nodes) return -1;
        t->nodes = nodes;
        t->cap = cap;
    }
    t->nodes[t->n] = (struct node){-1, -1, -1, byte};
    return t->n++;
}

static bool trie_put(struct trie *t, const char *text, size_t len, int id)
{
    if (len == 0) return true;
    while (t->n < 256)
        if (trie_node(t, (unsigned char)t->n) < 0) return false;
    int at = (unsigned char)text[0];
    for (size_t i = 1; i < len; i++) {
        int next = t->nodes[at].child;
        while (next >= 0 && t->nodes[next].byte != (unsigned char)text[i])
            next = t->nodes[next].sibling;
        if (next < 0) {
            next = trie_node(t, (unsigned char)text[i]);
            if (next < 0) return false;
            t->nodes[next].sibling = t->nodes[at].child;
            t->nodes[at].child = next;
        }
        at = next;
    }
    if (t->nodes[at].id < 0) t->nodes[at].id = id; // two may normalize alike: the first one counts
    return true;
}

// Length of the longest token at the start of text, 0 if none.
static size_t trie_match(const struct trie *t, const char *text, size_t len, int *ret_id)
{
    size_t best = 0;
    int at = (unsigned char)text[0];
    for (size_t i = 1; at >= 0; i++) {
        if (t->nodes[at].id >= 0) {
            best = i;
            *ret_id = t->nodes[at].id;
        }
        if (i == len) break;
        at = t->nodes[at].child;
        while (at >= 0 && t->nodes[at].byte != (unsigned char)text[i]) at = t->nodes[at].sibling;
    }
    return best;
}

enum status added_tokens_finish(struct added_tokens *a, const struct normalizer *normalizer)
{
    struct bytes text = BYTES_INIT;
    enum status st = ST_OK;
    a->by_id = malloc(((size_t)a->map.n_ids + 1) * sizeof(*a->by_id));
    if (!a->by_id) return status_fail(ST_NO_MEMORY, "out of memory for added tokens");
    for (int i = 0; i < a->map.n_ids; i++) a->by_id[i] = -1;
    for (int i = 0; i < a->n; i++) {
        const struct added_token *token = &a->tokens[i];
        a->by_id[token->id] = i;
        size_t len;
        const char *raw = token_map_text(&a->map, token->id, &len);
        if (token->normalized) {
            CHECK(normalizer_apply(normalizer, raw, len, false, &text));
            raw = bytes_text(&text);
            len = text.len;
        }
        if (!trie_put(&a->tries[token->normalized], raw, len, token->id)) {
            st = status_fail(ST_NO_MEMORY, "out of memory for added tokens");
            goto out;
        }
    }
out:
    bytes_release(&text);
    return st;
}

const struct added_token *added_tokens_find(const struct added_tokens *a, int id)
{
    int index = find_index(a, id);
    return index < 0 ? NULL : &a->tokens[index];
}

const struct token_map *added_tokens_map(const struct added_tokens *a)
{
    return &a->map;
}

static bool touches_word(const char *text, size_t len, size_t start, size_t end)
{
    if (start > 0 && unicode_is_word(utf8_before(text, &start))) return true;
    return end < len && unicode_is_word(utf8_next(text, len, &end));
}

enum status added_tokens_split(const struct added_tokens *a, bool normalized, const char *text,
                               size_t len, struct piece_list *ret)
{
    const struct trie *trie = &a->tries[normalized];
    size_t done = 0; // everything before is in *ret
    bool ok = true;
    ret->n = 0;
    for (size_t at = 0; trie->n > 0 && at < len;) {
        int id = -1;
        size_t n = trie_match(trie, text + at, len - at, &id);
        if (n == 0) {
            at++;
            continue;
        }
        size_t start = at, end = at + n;
        at = end;
        const struct added_token *token = added_tokens_find(a, id);
        if (token->single_word && touches_word(text, len, start, end)) continue;
        for (size_t before = start; token->lstrip && start > done; start = before)
            if (!unicode_is_space(utf8_before(text, &before))) break;
        for (size_t next = end; token->rstrip && end < len; end = next)
            if (!unicode_is_space(utf8_next(text, len, &next))) break;
        if (done < start) ok &= piece_list_push(ret, done, start - done, -1);
        ok &= piece_list_push(ret, start, end - start, id);
        done = end;
    }
    if (done < len) ok &= piece_list_push(ret, done, len - done, -1);
    return ok ? ST_OK : status_fail(ST_NO_MEMORY, "out of memory for pieces of text");
}
