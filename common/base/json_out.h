/* json_out.h: writes JSON text straight into a byte buffer, for answers that hold thousands of
 * numbers (building a tree of json_t first would cost more than the sampling). Commas are put in by
 * themselves. The caller keeps brackets balanced; lack of memory sticks in the buffer (bytes.h). */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_JSON_OUT_H
#define COMMON_BASE_JSON_OUT_H

#include "common/base/bytes.h"
#include <jansson.h>

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
