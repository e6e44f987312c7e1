/* token_map.c: open addressing over ids, texts one after the other in one buffer, so that a
 * vocabulary of 150,000 tokens is three allocations. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include "common/base/hash.h"
#include <stdlib.h>
#include <string.h>

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
