/* pattern.h: what tokenizer.json calls a pattern: {"String": literal} or {"Regex": expression}.
 * Used by the normalizer, the pre-tokenizer and the decoder of a tokenizer.
 * Immutable once made; any thread. */
#ifndef COMMON_MODEL_PATTERN_H
#define COMMON_MODEL_PATTERN_H

#include "common/base/bytes.h"
#include <jansson.h>

struct pattern;

struct span {
    size_t start, end; // bytes, end exclusive
};
struct span_list {
    struct span *items;
    size_t n, cap;
};
#define SPAN_LIST_INIT                                                                             \
    {                                                                                              \
        NULL, 0, 0                                                                                 \
    }
void span_list_release(struct span_list *list);
bool span_list_push(struct span_list *list, size_t start, size_t end); // false: out of memory

// `where` and `field` name the file and the field in errors.
enum status pattern_parse(const char *where, const char *field, const json_t *value,
                          struct pattern **ret);
enum status pattern_regex(const char *where, const char *field, const char *expression, size_t len,
                          struct pattern **ret);
void pattern_free(struct pattern *p);

// All matches from left to right, not overlapping, in well-formed UTF-8; *ret is emptied first.
enum status pattern_find_all(const struct pattern *p, const char *text, size_t len,
                             struct span_list *ret);

// `text` with every match replaced by `with` (taken literally), appended to *ret.
enum status pattern_replace(const struct pattern *p, const char *text, size_t len, const char *with,
                            size_t with_len, struct bytes *ret);

#endif
