/* added_tokens.c: added tokens and the search for them. At each position the longest token that
 * starts there is taken (leftmost-longest, as in the tokenizers library): each length that some
 * token has is looked up, the longest first. There are two searches: of texts as they are, and of
 * normalized texts. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include "common/base/unicode.h"
#include <stdlib.h>
#include <string.h>

struct search {
    struct token_map map;
    size_t *lengths; // that its texts have, from the longest
    size_t n;
    bool begins[256]; // a text begins with this byte
};

struct added_tokens {
    struct token_map map;
    struct added_token *tokens; // by id, -1 where there is none; n of them
    int n;
    struct search searches[2];
};

static enum status no_memory(void)
{
    return status_fail(ST_NO_MEMORY, "out of memory for added tokens");
}

enum status added_tokens_new(struct added_tokens **ret)
{
    struct added_tokens *a = calloc(1, sizeof(*a));
    if (!a) return no_memory();
    *ret = a;
    return ST_OK;
}

void added_tokens_free(struct added_tokens *a)
{
    if (!a) return;
    for (int i = 0; i < 2; i++) {
        token_map_release(&a->searches[i].map);
        free(a->searches[i].lengths);
    }
    token_map_release(&a->map);
    free(a->tokens);
    free(a);
}

enum status added_tokens_put(struct added_tokens *a, const char *text, size_t len,
                             const struct added_token *token)
{
    enum status st = token_map_add(&a->map, text, len, token->id);
    if (st != ST_OK) return st;
    if (token->id >= a->n) {
        int n = 2 * token->id + 32;
        struct added_token *tokens = reallocarray(a->tokens, (size_t)n, sizeof(*tokens));
        if (!tokens) return no_memory();
        a->tokens = tokens;
        for (; a->n < n; a->n++) tokens[a->n] = (struct added_token){.id = -1};
    }
    a->tokens[token->id] = *token;
    return ST_OK;
}

static enum status search_add(struct search *s, const char *text, size_t len, int id)
{
    // two may normalize alike: the first one counts
    if (len == 0 || token_map_id(&s->map, text, len) >= 0) return ST_OK;
    size_t at = 0, *lengths = array_room(s->lengths, s->n, sizeof(*lengths));
    if (!lengths) return no_memory();
    s->lengths = lengths;
    while (at < s->n && lengths[at] > len) at++;
    if (at == s->n || lengths[at] != len) {
        memmove(lengths + at + 1, lengths + at, (s->n++ - at) * sizeof(*lengths));
        lengths[at] = len;
    }
    s->begins[(unsigned char)text[0]] = true;
    return token_map_add(&s->map, text, len, id);
}

// Length of the longest token at the start of text, 0 if none.
static size_t search_match(const struct search *s, const char *text, size_t len, int *ret_id)
{
    if (!s->begins[(unsigned char)text[0]]) return 0;
    for (size_t i = 0; i < s->n; i++) {
        *ret_id = s->lengths[i] <= len ? token_map_id(&s->map, text, s->lengths[i]) : -1;
        if (*ret_id >= 0) return s->lengths[i];
    }
    return 0;
}

enum status added_tokens_finish(struct added_tokens *a, const struct normalizer *normalizer)
{
    struct bytes text = BYTES_INIT;
    enum status st = ST_OK;
    for (int id = 0; id < a->n; id++) {
        const struct added_token *token = &a->tokens[id];
        size_t len;
        const char *raw = token_map_text(&a->map, id, &len);
        if (!raw) continue;
        if (token->normalized) {
            CHECK(normalizer_apply(normalizer, raw, len, false, &text));
            raw = bytes_text(&text);
            len = text.len;
        }
        CHECK(search_add(&a->searches[token->normalized], raw, len, id));
    }
out:
    bytes_release(&text);
    return st;
}

const struct added_token *added_tokens_find(const struct added_tokens *a, int id)
{
    return id >= 0 && id < a->n && a->tokens[id].id >= 0 ? &a->tokens[id] : NULL;
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
    const struct search *search = &a->searches[normalized];
    size_t done = 0; // everything before is in *ret
    enum status st = ST_OK;
    ret->n = 0;
    for (size_t at = 0; at < len;) {
        int id = -1;
        size_t n = search_match(search, text + at, len - at, &id);
        if (n == 0) {
            at++;
            continue;
        }
        size_t start = at, end = at + n;
        at = end;
        const struct added_token *token = added_tokens_find(a, id);
        if (token->single_word && touches_word(text, len, start, end)) continue;
        if (token->lstrip) start = unicode_skip_back(text, done, start, unicode_is_space);
        if (token->rstrip) end = unicode_skip(text, end, len, unicode_is_space);
        if (done < start) CHECK(piece_list_push(ret, done, start - done, -1));
        CHECK(piece_list_push(ret, start, end - start, id));
        done = end;
    }
    if (done < len) st = piece_list_push(ret, done, len - done, -1);
out:
    return st;
}
