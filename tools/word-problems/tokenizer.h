/* tokenizer.h: the tokenizer of word problems. */
#ifndef TOOLS_WORD_PROBLEMS_TOKENIZER_H
#define TOOLS_WORD_PROBLEMS_TOKENIZER_H

#include "common/base/status.h"

// tokenizer.json and tokenizer_config.json into a folder that is there; says how many tokens it
// has.
enum status word_tokenizer_write(const char *folder);

#endif
