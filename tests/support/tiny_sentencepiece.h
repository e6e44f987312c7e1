/* tiny_sentencepiece.h: writes a SentencePiece-style tokenizer into a model folder, as Llama 2's is
 * saved: words begin with U+2581, unknown characters become byte tokens, decoding strips the first
 * space. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TINY_SENTENCEPIECE_H
#define TESTS_SUPPORT_TINY_SENTENCEPIECE_H

#include "common/base/status.h"

#define TINY_SENTENCEPIECE_BOS   1
#define TINY_SENTENCEPIECE_BYTES 3   // the token of byte b is this + b
#define TINY_SENTENCEPIECE_TIME  299 // " time"
#define TINY_SENTENCEPIECE_VOCAB 300

// tokenizer.json and tokenizer_config.json; the folder must be there.
enum status tiny_sentencepiece_write(const char *folder);

#endif
