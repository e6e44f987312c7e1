/* json.h: reading JSON fields with errors that name the file (or message) and the field, and
 * writing. `where` is that name ("config.json", "request"); the field is named by its key. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_JSON_H
#define COMMON_BASE_JSON_H

#include "common/base/bytes.h"
#include <jansson.h>
#include <stdint.h>

// Beyond the standard: a UTF-8 byte order mark at the start is skipped, and an integer of more than
// 64 bits is a real; in files Infinity, as Python writes it, is the largest number.
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
// A field that may have one value, which absent means too; else ST_UNSUPPORTED, `way_out` behind
// the sentence.
enum status json_expect(const char *where, const json_t *object, const char *key, const char *want,
                        const char *way_out);

// ---- fields by a table --------------------------------------------------------------------------
// Names, types and ranges of an object's fields, where each goes in the struct that is filled, and
// what holds where it is absent or null.
struct json_field {
    const char *name; // NULL ends a table
    enum json_field_type { AS_TEXT, AS_JSON, AS_BOOL, AS_INT32, AS_INT, AS_F32, AS_REAL } type;
    size_t offset; // of a const char * (NULL: absent), const json_t *, bool, int, int64_t, ...
    int64_t min, max, otherwise; // of whole numbers
    double from, to, or_else;    // of others
};

// Rows of a table, after #define FIELDS_OF struct the_one_that_is_filled. Texts and JSON are
// borrowed from the object.
#define FIELD_(n, t, member, ...)                                                                  \
    {                                                                                              \
        .name = n, .type = t, .offset = offsetof(FIELDS_OF, member), __VA_ARGS__                   \
    }
#define FIELD_TEXT(name, member)            FIELD_(name, AS_TEXT, member, )
#define FIELD_JSON(name, member)            FIELD_(name, AS_JSON, member, )
#define FIELD_BOOL(name, member, otherwise) FIELD_(name, AS_BOOL, member, 0, 1, otherwise)
#define FIELD_INT32(name, member, ...)      FIELD_(name, AS_INT32, member, __VA_ARGS__)
#define FIELD_INT(name, member, ...)        FIELD_(name, AS_INT, member, __VA_ARGS__)
#define FIELD_REAL(name, member, ...)       FIELD_(name, AS_REAL, member, .from = __VA_ARGS__)
#define FIELD_F32(name, member, ...)        FIELD_(name, AS_F32, member, .from = __VA_ARGS__)

// One of them. Where it is absent or null what is there stays.
enum status json_read_field(const char *where, const json_t *object, const struct json_field *f,
                            void *ret);
// All of a table. needs: those that must be there, "model_id seq_id"; NULL: none.
enum status json_read_fields(const char *where, const json_t *object,
                             const struct json_field *fields, const char *needs, void *ret);

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
// The names in a folder, in their order (versionsort()); NULL: it cannot be read (errno says why).
json_t *json_folder(const char *folder);

// ---- text straight into a buffer ----------------------------------------------------------------
// For answers that hold thousands of numbers: building a tree of json_t first would cost more than
// the sampling. Commas are put in by themselves. The caller keeps brackets balanced; lack of memory
// sticks in the buffer (bytes.h).

struct json_out {
    struct bytes *to; // borrowed
    bool comma;       // the next value needs one before it
};

// `key` is the value's name, of plain ASCII; NULL: it stands in a list, or alone.
void json_out_open(struct json_out *o, const char *key, char bracket); // '{' or '['
void json_out_close(struct json_out *o, char bracket);
void json_out_int(struct json_out *o, const char *key, int64_t x);
void json_out_uint(struct json_out *o, const char *key, uint64_t x);
// The shortest text that reads back alike; null where it is not finite.
void json_out_real(struct json_out *o, const char *key, double x);
void json_out_float(struct json_out *o, const char *key, float x);
void json_out_bool(struct json_out *o, const char *key, bool x);
void json_out_null(struct json_out *o, const char *key);
void json_out_string(struct json_out *o, const char *key, const char *s, size_t len); // UTF-8
void json_out_text(struct json_out *o, const char *key, const char *s);               // NULL: null
void json_out_value(struct json_out *o, const char *key, const json_t *value);        // NULL: null

// A list; `put` is the call that writes element i, of from to n - 1.
#define JSON_OUT_LIST(o, key, i, from, n, put)                                                     \
    do {                                                                                           \
        json_out_open(o, key, '[');                                                                \
        for (int i = (from); i < (n); i++) put;                                                    \
        json_out_close(o, ']');                                                                    \
    } while (0)

// A string of any bytes (a path, what a client sent, cut anywhere) as a JSON string, which takes
// whole characters only: "?" stands for each byte that is part of none.
json_t *json_clean_string(const char *text);

// The log-probability as OpenAI-style APIs write it: minus infinity becomes -9999.
void json_out_logprob(struct json_out *o, const char *key, float logprob);

#endif
