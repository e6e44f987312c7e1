/* json.h: reading JSON fields with errors that name the file (or message) and the field.
 * `where` is that name ("config.json", "request"); the field is named by its key. */
#ifndef COMMON_BASE_JSON_H
#define COMMON_BASE_JSON_H

#include "common/base/bytes.h"
#include <jansson.h>
#include <stdint.h>

// Beyond the standard: a UTF-8 byte order mark at the start is skipped, and an integer of more than
// 64 bits is a real.
enum status json_read_file(const char *path, size_t max_bytes, json_t **ret); // caller: json_decref
enum status json_parse(const char *where, const char *text, size_t len, json_t **ret);
enum status json_write_file(const char *path, unsigned mode,
                            const json_t *value); // atomic, indented
// Appends it as one line, with jansson's flags beside JSON_COMPACT; takes the reference over (NULL:
// there was no memory for it, or a text is not UTF-8).
enum status json_put_line(struct bytes *to, json_t *line, size_t flags);

// A field that is absent or null leaves *ret_x as it is (set the default before the call); one of
// the wrong type or out of range is ST_INVALID. Integers accept 3.0 as 3.
enum status json_get_int(const char *where, const json_t *object, const char *key, int64_t min,
                         int64_t max, int64_t *ret_x);
enum status json_get_int32(const char *where, const json_t *object, const char *key, int min,
                           int max, int *ret_x);
enum status json_get_double(const char *where, const json_t *object, const char *key, double min,
                            double max, double *ret_x);
enum status json_get_bool(const char *where, const json_t *object, const char *key, bool *ret_x);
// Borrowed from `object`. A string that holds U+0000 is ST_INVALID; where it is meaningful, take
// json_string_value() and json_string_length().
enum status json_get_string(const char *where, const json_t *object, const char *key,
                            const char **ret_x);
bool json_has(const json_t *object, const char *key); // present and not null

// A list of numbers, read into an array.
struct number_list {
    const char *key; // its field, for errors
    enum number_type { NUMBER_I32, NUMBER_U8, NUMBER_U64, NUMBER_F32 } type; // whole but the last
    double min, max;                                                         // of each
    enum status status; // of one that is anything else, of which is said:
    const char *fault;
};
// n: of how many; -1: any. ret_array: pointer to the array's, which is the caller's to free.
// ST_FORMAT where it is no list, or of another length.
enum status json_read_numbers(const json_t *list, const struct number_list *how, int n,
                              void *ret_array);
json_t *json_ids(const int32_t *ids, int n); // a new list of them; NULL: no memory
json_t *json_reals(const double *x, int n);  // likewise

#endif
