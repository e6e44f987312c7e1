/* pattern.h: what tokenizer.json calls a pattern: {"String": literal} or {"Regex": expression}.
 * Used by the normalizer, the pre-tokenizer and the decoder of a tokenizer.
 * Immutable once made; any thread. */
#ifndef COMMON_MODEL_PATTERN_H
#define COMMON_MODEL_PATTERN_H

#include "common/base/bytes.h"
#include "common/model/piece.h"
#include <jansson.h>

struct pattern;

// `where` and `field` name the file and the field in errors.
enum status pattern_parse(const char *where, const char *field, const json_t *value,
                          struct pattern **ret);
enum status pattern_regex(const char *where, const char *field, const char *expression, size_t len,
                          struct pattern **ret);
enum status pattern_literal(const char *where, const char *field, const char *text, size_t len,
                            struct pattern **ret); // len > 0
void pattern_free(struct pattern *p);

// Well-formed UTF-8 as pieces, in order: matches, from left to right and not overlapping (id 1),
// and what stands between them (id 0). *ret is emptied first.
enum status pattern_cut(const struct pattern *p, const char *text, size_t len,
                        struct piece_list *ret);

// `text` with every match replaced by `with` (taken literally), appended to *ret.
enum status pattern_replace(const struct pattern *p, const char *text, size_t len, const char *with,
                            size_t with_len, struct bytes *ret);

#endif
