/* token_map.h: token text <-> id, the hash table under a tokenizer's vocabulary and added tokens.
 * Texts may hold any bytes; each is kept with a NUL behind it. Grows while loading (one thread),
 * read-only afterwards (any thread). */
#ifndef COMMON_MODEL_TOKEN_MAP_H
#define COMMON_MODEL_TOKEN_MAP_H

#include "common/base/bytes.h"

struct token_text {
    size_t offset; // into token_map.texts
    int len;       // -1: this id has no token
};
struct token_map {
    struct bytes texts;
    struct token_text *tokens; // by id, n_ids of them
    int n_ids, cap_ids;
    int n_tokens;
    int32_t *slots; // id + 1, 0 where empty; a power of two
    int n_slots;
};

void token_map_release(struct token_map *m);
// ST_FORMAT where the text or the id is already there with another partner.
enum status token_map_add(struct token_map *m, const char *text, size_t len, int id);
int token_map_id(const struct token_map *m, const char *text, size_t len); // -1: none
// NULL: no such id. *ret_len may be NULL.
const char *token_map_text(const struct token_map *m, int id, size_t *ret_len);

#endif
