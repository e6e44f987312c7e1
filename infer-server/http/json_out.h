/* json_out.h: writes JSON text straight into a byte buffer, for answers that hold thousands of
 * numbers (building a tree of json_t first would cost more than the sampling). Commas are put in by
 * themselves. The caller keeps brackets balanced; lack of memory sticks in the buffer (bytes.h). */
#ifndef INFER_SERVER_JSON_OUT_H
#define INFER_SERVER_JSON_OUT_H

#include "common/base/bytes.h"
#include <jansson.h>

struct json_out {
    struct bytes *to; // borrowed
    bool comma;       // the next value needs one before it
};

void json_out_open(struct json_out *o, char bracket); // '{' or '['
void json_out_close(struct json_out *o, char bracket);
void json_out_key(struct json_out *o, const char *key); // plain ASCII
void json_out_int(struct json_out *o, int64_t x);
void json_out_uint(struct json_out *o, uint64_t x);
void json_out_real(struct json_out *o,
                   double x); // shortest that reads back alike; not finite: null
void json_out_float(struct json_out *o, float x); // the same for f32
void json_out_bool(struct json_out *o, bool x);
void json_out_null(struct json_out *o);
void json_out_string(struct json_out *o, const char *s, size_t len); // well-formed UTF-8
void json_out_text(struct json_out *o, const char *s);               // NULL: null
void json_out_value(struct json_out *o, const json_t *value);        // NULL: null

// A string of any bytes (a path, what a client sent, cut anywhere) as a JSON string, which takes
// whole characters only: "?" stands for each byte that is part of none.
json_t *json_clean_string(const char *text);

// The log-probability as OpenAI-style APIs write it: minus infinity becomes -9999.
void json_out_logprob(struct json_out *o, float logprob);

#endif
