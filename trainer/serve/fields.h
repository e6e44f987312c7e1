/* fields.h: a request's JSON fields, read by a table of their names, types, ranges, and what holds
 * where one is absent or null. No state; any thread. */
#ifndef TRAINER_SERVE_FIELDS_H
#define TRAINER_SERVE_FIELDS_H

#include "common/base/json.h"

struct field {
    const char *name; // NULL ends a table
    enum { AS_TEXT, AS_JSON, AS_BOOL, AS_INT, AS_REAL } type;
    size_t offset;               // of a const char * (NULL: absent), const json_t *, bool...
    int64_t min, max, otherwise; // of an int64_t
    double from, to, or_else;    // of a double
};

// Rows of a table, after #define FIELDS_OF struct the_one_that_is_filled. Texts and JSON are
// borrowed from the request.
#define FIELD_(n, t, member, ...)                                                                  \
    {                                                                                              \
        .name = n, .type = t, .offset = offsetof(FIELDS_OF, member), __VA_ARGS__                   \
    }
#define FIELD_TEXT(name, member)            FIELD_(name, AS_TEXT, member, )
#define FIELD_JSON(name, member)            FIELD_(name, AS_JSON, member, )
#define FIELD_BOOL(name, member, otherwise) FIELD_(name, AS_BOOL, member, 0, 1, otherwise)
#define FIELD_INT(name, member, ...)        FIELD_(name, AS_INT, member, __VA_ARGS__)
#define FIELD_REAL(name, member, ...)       FIELD_(name, AS_REAL, member, .from = __VA_ARGS__)

// `where` names the object in errors ("request"); ST_INVALID names the field. needs: the fields
// that must be there, "model_id seq_id"; NULL: none.
enum status fields_read(const char *where, const json_t *object, const struct field *fields,
                        const char *needs, void *ret);

#endif
