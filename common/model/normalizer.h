/* normalizer.h: the "normalizer" section of tokenizer.json: what is done to text before it is
 * split. Loaded once, then read-only (any thread). */
#ifndef COMMON_MODEL_NORMALIZER_H
#define COMMON_MODEL_NORMALIZER_H

#include "common/base/bytes.h"
#include <jansson.h>

struct normalizer;

// A null section gives a normalizer that changes nothing.
enum status normalizer_parse(const char *where, const json_t *section, struct normalizer **ret);
void normalizer_free(struct normalizer *n);

// From now on Prepend steps act at the start of the whole input only.
void normalizer_prepend_once(struct normalizer *n);

// Well-formed UTF-8 in and out; *ret is emptied first. `ret` must not hold `text`. at_start: the
// text is the start of the whole input.
enum status normalizer_apply(const struct normalizer *n, const char *text, size_t len,
                             bool at_start, struct bytes *ret);

#endif
