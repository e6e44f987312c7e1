/* bpe.h: the BPE model of a tokenizer: a vocabulary and ranked merges, over words (pieces of text)
 * that the pre-tokenizer made. Loaded once, then read-only (any thread). */
#ifndef COMMON_MODEL_BPE_H
#define COMMON_MODEL_BPE_H

#include "common/model/token_map.h"
#include "common/model/tokenizer.h"
#include <jansson.h>

struct bpe;
struct bpe_scratch; // working memory of one encoding, reused from word to word

enum status bpe_parse(const char *where, const json_t *model, struct bpe **ret);
void bpe_free(struct bpe *b);
const struct token_map *bpe_vocab(const struct bpe *b);

struct bpe_scratch *bpe_scratch_new(void); // NULL: out of memory
void bpe_scratch_free(struct bpe_scratch *s);

// Ids of one word (well-formed UTF-8), appended. Time is O(n log n) in the word's length.
enum status bpe_encode(const struct bpe *b, struct bpe_scratch *s, const char *word, size_t len,
                       struct token_list *ret);

#endif
