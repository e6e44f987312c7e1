/* request_fields.h: the one table of the fields that requests may have: those that are read, those
 * that are taken with the value that changes nothing, and those that mean nothing here whatever
 * their value. No field is ignored unsaid: what is not in the table is refused by its name. Pure
 * functions; any thread. */
#ifndef INFER_SERVER_REQUEST_FIELDS_H
#define INFER_SERVER_REQUEST_FIELDS_H

#include "common/base/status.h"
#include <jansson.h>

// The objects that have fields: bodies by endpoint, and objects within them.
enum field_place {
    PLACE_COMPLETIONS = 1 << 0,
    PLACE_CHAT = 1 << 1,
    PLACE_GENERATE = 1 << 2,
    PLACE_INFERENCE = 1 << 3, // POST /inference/v1/generate
    PLACE_ROLLOUTS = 1 << 4,
    PLACE_SAMPLING = 1 << 5, // "sampling" of rollouts, "sampling_params" of /inference/v1/generate
    PLACE_GROUP = 1 << 6,    // one of "groups"
    PLACE_STREAM_OPTIONS = 1 << 7,
    PLACE_TOKENIZE = 1 << 8,
    PLACE_DETOKENIZE = 1 << 9,
    PLACE_PROMPT = 1 << 10, // an object as "prompt" of /generate
    PLACE_TANDEM = 1 << 11,
};

// What is done about a field that the table does not have.
struct unknown_fields {
    bool accept; // --unknown-fields warn: each name is logged once, and the field has no effect
    char logged[32][64];
    int n_logged;
};

// ST_UNSUPPORTED: a field whose value asks for what nothing here does. ST_INVALID: an unknown one.
// `unknown` may be NULL: refuse.
enum status request_fields_check(const json_t *object, enum field_place place,
                                 struct unknown_fields *unknown);

// Row i of the table for tests and documentation; false past its end. ret_accepts is NULL for a
// field that is read, "*" for one that means nothing here, else a JSON array of the values taken.
bool request_fields_row(int i, const char **ret_name, unsigned *ret_places,
                        const char **ret_accepts);

#endif
