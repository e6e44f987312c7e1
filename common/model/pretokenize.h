/* pretokenize.h: the "pre_tokenizer" section of tokenizer.json: cuts normalized text into the words
 * that the BPE model encodes one by one. Loaded once, then read-only (any thread). */
#ifndef COMMON_MODEL_PRETOKENIZE_H
#define COMMON_MODEL_PRETOKENIZE_H

#include "common/model/added_tokens.h"
#include <jansson.h>

struct pretokenizer;

// A null section gives one that leaves the text as one word.
enum status pretokenizer_parse(const char *where, const json_t *section, struct pretokenizer **ret);
void pretokenizer_free(struct pretokenizer *p);

// The words of a text: pieces of *ret_text, in order. at_start: the text is the start of the whole
// input (a Metaspace stage with prepend_scheme "first" asks). Both outputs are emptied first.
enum status pretokenizer_apply(const struct pretokenizer *p, const char *text, size_t len,
                               bool at_start, struct bytes *ret_text, struct piece_list *ret_words);

// GPT-2's alphabet: every byte has a printable character. UTF-8 of byte b, 1 or 2 bytes.
int byte_level_char(unsigned char byte, char ret[4]);
int byte_level_byte(uint32_t character); // -1: not of the alphabet

#endif
