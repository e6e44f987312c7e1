/* tiny_tokenizer.h: writes a byte-level tokenizer into a model folder: one token a byte (its id is
 * the byte), a few merges, and ChatML's special tokens with its chat template. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TINY_TOKENIZER_H
#define TESTS_SUPPORT_TINY_TOKENIZER_H

#include "common/base/status.h"
#include <jansson.h>

#define TINY_TOKENIZER_IM_START 260
#define TINY_TOKENIZER_IM_END   261
#define TINY_TOKENIZER_VOCAB    263 // a model needs at least as many

// The content of the two files (json_decref).
enum status tiny_tokenizer_json(json_t **ret_tokenizer, json_t **ret_config);

// tokenizer.json and tokenizer_config.json; the folder must be there.
enum status tiny_tokenizer_write(const char *folder);
// tokenizer.json of 256 tokens alone, one a byte, without special ones: for small vocabularies.
enum status tiny_tokenizer_write_bytes(const char *folder);
// Of a model without a tokenizer: a folder of its files and that tokenizer, in which digits and
// signs are of every vocabulary.
const char *tiny_tokenizer_beside(const char *model);

#endif
