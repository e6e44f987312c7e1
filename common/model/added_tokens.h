/* added_tokens.h: the tokens that stand outside the model's vocabulary or beside it ("<|im_end|>",
 * "<think>"): found in a text before anything else is done to it, each with its own white-space
 * rules. Filled while loading, then read-only (any thread). */
#ifndef COMMON_MODEL_ADDED_TOKENS_H
#define COMMON_MODEL_ADDED_TOKENS_H

#include "common/model/normalizer.h"
#include "common/model/piece.h"
#include "common/model/token_map.h"

struct added_token {
    int id;
    bool special;        // left out by skip_special
    bool normalized;     // looked for in the normalized text, not in the raw one
    bool lstrip, rstrip; // takes the white space before or behind with it
    bool single_word;    // only where no word character touches it
};

struct added_tokens;

enum status added_tokens_new(struct added_tokens **ret);
void added_tokens_free(struct added_tokens *a);

// Adds a token, or replaces the flags of the one with this text.
enum status added_tokens_put(struct added_tokens *a, const char *text, size_t len,
                             const struct added_token *token);
// Builds the search tables; after the last put.
enum status added_tokens_finish(struct added_tokens *a, const struct normalizer *normalizer);

const struct added_token *added_tokens_find(const struct added_tokens *a, int id); // NULL: none
const struct token_map *added_tokens_map(const struct added_tokens *a);

// Cuts a text into runs of plain text (id -1) and added tokens, in order; *ret is emptied first.
// `normalized` picks the tokens that are looked for in normalized text.
enum status added_tokens_split(const struct added_tokens *a, bool normalized, const char *text,
                               size_t len, struct piece_list *ret);

#endif
