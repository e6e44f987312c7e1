/* json_out.c: JSON text into a byte buffer. No state but the comma; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json_out.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void before_value(struct json_out *o, const char *key)
{
    if (o->comma) bytes_append(o->to, ",", 1);
    if (key) bytes_printf(o->to, "\"%s\":", key);
    o->comma = true;
}

void json_out_open(struct json_out *o, const char *key, char bracket)
{
    before_value(o, key);
    bytes_append(o->to, &bracket, 1);
    o->comma = false;
}

void json_out_close(struct json_out *o, char bracket)
{
    bytes_append(o->to, &bracket, 1);
    o->comma = true;
}

void json_out_int(struct json_out *o, const char *key, int64_t x)
{
    before_value(o, key);
    bytes_printf(o->to, "%" PRId64, x);
}

void json_out_uint(struct json_out *o, const char *key, uint64_t x)
{
    before_value(o, key);
    bytes_printf(o->to, "%" PRIu64, x);
}

void json_out_real(struct json_out *o, const char *key, double x)
{
    before_value(o, key);
    if (!isfinite(x)) {
        bytes_puts(o->to, "null");
        return;
    }
    char text[40];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    bytes_puts(o->to, text);
}

void json_out_float(struct json_out *o, const char *key, float x)
{
    before_value(o, key);
    if (isfinite(x))
        bytes_printf(o->to, "%.9g", x); // 9 digits give every f32 back
    else
        bytes_puts(o->to, "null");
}

void json_out_bool(struct json_out *o, const char *key, bool x)
{
    before_value(o, key);
    bytes_puts(o->to, x ? "true" : "false");
}

void json_out_null(struct json_out *o, const char *key)
{
    before_value(o, key);
    bytes_puts(o->to, "null");
}

void json_out_string(struct json_out *o, const char *key, const char *s, size_t len)
{
    before_value(o, key);
    bytes_append(o->to, "\"", 1);
    size_t from = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\' && c != 0x7f) continue;
        bytes_append(o->to, s + from, i - from);
        from = i + 1;
        if (c == '\n')
            bytes_puts(o->to, "\\n");
        else if (c == '"' || c == '\\')
            bytes_printf(o->to, "\\%c", c);
        else
            bytes_printf(o->to, "\\u%04x", c);
    }
    bytes_append(o->to, s + from, len - from);
    bytes_append(o->to, "\"", 1);
}

void json_out_text(struct json_out *o, const char *key, const char *s)
{
    if (s)
        json_out_string(o, key, s, strlen(s));
    else
        json_out_null(o, key);
}

void json_out_value(struct json_out *o, const char *key, const json_t *value)
{
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    before_value(o, key);
    bytes_puts(o->to, text ? text : "null");
    free(text);
}

void json_out_logprob(struct json_out *o, const char *key, float logprob)
{
    json_out_float(o, key, isinf(logprob) ? -9999.0f : logprob);
}

json_t *json_clean_string(const char *sentence)
{
    struct bytes text = BYTES_INIT;
    size_t len = strlen(sentence);
    for (size_t i = 0; i < len;) {
        int n = utf8_sequence(sentence + i, len - i);
        bytes_append(&text, n > 0 ? sentence + i : "?", n > 0 ? (size_t)n : 1);
        i += n > 0 ? (size_t)n : 1;
    }
    json_t *string = json_stringn(bytes_text(&text), text.len);
    bytes_release(&text);
    return string;
}
