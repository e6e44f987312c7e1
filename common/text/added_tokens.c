/* added_tokens.c: token maps, and added tokens and the search for them.
 *
 * A map is open addressing over ids, its texts one after the other in one buffer, so that a
 * vocabulary of 150,000 tokens is three allocations. At each position of a text the longest added
 * token that starts there is taken (leftmost-longest, as in the tokenizers library): each length
 * that some token has is looked up, the longest first. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include "common/base/hash.h"
#include "common/base/unicode.h"
#include <stdlib.h>
#include <string.h>

// ---- token maps ---------------------------------------------------------------------------------

void token_map_release(struct token_map *m)
{
    bytes_release(&m->texts);
    free(m->tokens);
    free(m->slots);
    *m = (struct token_map){.texts = BYTES_INIT};
}

// The slot that holds the text, or the empty one where it would go.
static int find_slot(const struct token_map *m, const char *text, size_t len)
{
    int mask = m->n_slots - 1;
    int slot = (int)(hash_mix(hash_fnv1a(text, len)) & (uint64_t)mask);
    for (; m->slots[slot]; slot = (slot + 1) & mask) {
        const struct token_text *t = &m->tokens[m->slots[slot] - 1];
        if ((size_t)t->len == len && memcmp(m->texts.data + t->offset, text, len) == 0) break;
    }
    return slot;
}

static bool grow_slots(struct token_map *m)
{
    int n = m->n_slots ? 2 * m->n_slots : 1024;
    free(m->slots);
    m->slots = calloc((size_t)n, sizeof(*m->slots));
    m->n_slots = m->slots ? n : 0;
    for (int id = 0; m->slots && id < m->n_ids; id++)
        if (m->tokens[id].len >= 0)
            m->slots[find_slot(m, m->texts.data + m->tokens[id].offset,
                               (size_t)m->tokens[id].len)] = id + 1;
    return m->slots;
}

static bool grow_ids(struct token_map *m, int id)
{
    if (id >= m->cap_ids) {
        int cap = m->cap_ids ? m->cap_ids : 1024;
        while (cap <= id) cap *= 2;
        struct token_text *tokens = realloc(m->tokens, (size_t)cap * sizeof(*tokens));
        if (!tokens) return false;
        m->tokens = tokens;
        m->cap_ids = cap;
    }
    for (; m->n_ids <= id; m->n_ids++) m->tokens[m->n_ids] = (struct token_text){0, -1};
    return true;
}

enum status token_map_add(struct token_map *m, const char *text, size_t len, int id)
{
    int there = token_map_id(m, text, len);
    if (there == id) return ST_OK;
    if (there >= 0)
        return status_fail(ST_FORMAT, "token \"%s\" has the ids %d and %d", text, there, id);
    if (id < m->n_ids && m->tokens[id].len >= 0)
        return status_fail(ST_FORMAT, "id %d is given to the tokens \"%s\" and \"%s\"", id,
                           token_map_text(m, id, NULL), text);
    size_t offset = m->texts.len;
    bytes_append(&m->texts, text, len);
    bytes_append(&m->texts, "", 1);
    if (m->texts.failed || !grow_ids(m, id) ||
        (4 * m->n_tokens >= 3 * m->n_slots && !grow_slots(m)))
        return status_fail(ST_NO_MEMORY, "out of memory for %d tokens", m->n_tokens);
    m->slots[find_slot(m, text, len)] = id + 1;
    m->tokens[id] = (struct token_text){offset, (int)len};
    m->n_tokens++;
    return ST_OK;
}

int token_map_id(const struct token_map *m, const char *text, size_t len)
{
    return m->n_slots ? m->slots[find_slot(m, text, len)] - 1 : -1;
}

const char *token_map_text(const struct token_map *m, int id, size_t *ret_len)
{
    if (id < 0 || id >= m->n_ids || m->tokens[id].len < 0) return NULL;
    if (ret_len) *ret_len = (size_t)m->tokens[id].len;
    return m->texts.data + m->tokens[id].offset;
}

// ---- added tokens -------------------------------------------------------------------------------

static enum status no_memory(void)
{
    return status_fail(ST_NO_MEMORY, "out of memory for added tokens");
}

void added_tokens_release(struct added_tokens *a)
{
    for (int i = 0; i < 2; i++) {
        token_map_release(&a->searches[i].map);
        free(a->searches[i].lengths);
    }
    token_map_release(&a->map);
    free(a->tokens);
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

static enum status search_add(struct added_search *s, const char *text, size_t len, int id)
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
static size_t search_match(const struct added_search *s, const char *text, size_t len, int *ret_id)
{
    if (!s->begins[(unsigned char)text[0]]) return 0;
    for (size_t i = 0; i < s->n; i++) {
        *ret_id = s->lengths[i] <= len ? token_map_id(&s->map, text, s->lengths[i]) : -1;
        if (*ret_id >= 0) return s->lengths[i];
    }
    return 0;
}

enum status added_tokens_finish(struct added_tokens *a, const struct step_list *normalizer,
                                bool prepend)
{
    struct bytes text = BYTES_INIT;
    enum status st = ST_OK;
    for (int id = 0; id < a->n; id++) {
        const struct added_token *token = &a->tokens[id];
        size_t len;
        const char *raw = token_map_text(&a->map, id, &len);
        if (!raw) continue;
        if (token->normalized) {
            CHECK(normalizer_apply(normalizer, raw, len, prepend, &text));
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

static bool touches_word(const char *text, size_t len, size_t start, size_t end)
{
    if (start > 0 && unicode_is(utf8_before(text, &start), UNICODE_WORD)) return true;
    return end < len && unicode_is(utf8_next(text, len, &end), UNICODE_WORD);
}

enum status added_tokens_split(const struct added_tokens *a, bool normalized, const char *text,
                               size_t len, struct piece_list *ret)
{
    const struct added_search *search = &a->searches[normalized];
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
        if (token->lstrip) start = unicode_skip_back(text, done, start, UNICODE_SPACE);
        if (token->rstrip) end = unicode_skip(text, end, len, UNICODE_SPACE);
        if (done < start) CHECK(piece_list_push(ret, done, start - done, -1));
        CHECK(piece_list_push(ret, start, end - start, id));
        done = end;
    }
    if (done < len) st = piece_list_push(ret, done, len - done, -1);
out:
    return st;
}
