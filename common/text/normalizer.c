/* normalizer.c: a flat list of steps (a Sequence within a Sequence is the same list). The Unicode
 * forms are utf8proc's; a text of ASCII alone is its own normal form and skips them. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/text/tokenizer_parts.h"
#include "common/base/unicode.h"
#include <stdlib.h>
#include <utf8proc.h>

enum { FORM, LOWERCASE, PREPEND, REPLACE, STRIP };

static enum status parse_prepend(const char *where, const char *name, struct step *s)
{
    const json_t *text = json_object_get(s->json, "prepend");
    if (!json_is_string(text))
        return status_fail(ST_FORMAT, "%s: %s.prepend is not a string", where, name);
    bytes_append(&s->with, json_string_value(text), json_string_length(text));
    return bytes_status(&s->with);
}

static enum status parse_strip(const char *where, const char *name, struct step *s)
{
    (void)name;
    s->left = s->right = true;
    enum status st = json_get_bool(where, s->json, "strip_left", &s->left);
    return st == ST_OK ? json_get_bool(where, s->json, "strip_right", &s->right) : st;
}

static const struct step_type types[] = {
    {"NFC", FORM, UTF8PROC_STABLE | UTF8PROC_COMPOSE, NULL},
    {"NFD", FORM, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, NULL},
    {"NFKC", FORM, UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT, NULL},
    {"NFKD", FORM, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT, NULL},
    {"Lowercase", LOWERCASE, 0, NULL},
    {"Prepend", PREPEND, 0, parse_prepend},
    {"Replace", REPLACE, 0, step_parse_replace},
    {"Strip", STRIP, 0, parse_strip},
    {NULL, 0, 0, NULL},
};

enum status normalizer_parse(const char *where, const json_t *section, struct step_list *ret)
{
    return step_list_parse(where, "normalizer", "normalizers", section, types, ret);
}

static bool is_ascii(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)text[i] >= 0x80) return false;
    return true;
}

static enum status put_form(const struct step *step, const char *text, size_t len,
                            struct bytes *ret)
{
    if (is_ascii(text, len)) {
        bytes_append(ret, text, len);
        return bytes_status(ret);
    }
    utf8proc_uint8_t *out = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)len, &out,
                                      (utf8proc_option_t)step->type->form);
    if (n < 0)
        return status_fail(n == UTF8PROC_ERROR_NOMEM ? ST_NO_MEMORY : ST_INVALID,
                           "text cannot be normalized: %s", utf8proc_errmsg(n));
    bytes_append(ret, out, (size_t)n);
    free(out);
    return bytes_status(ret);
}

// Characters newer than the normal form stay as they are, and nothing is reordered across them.
static enum status apply_form(const struct step *step, const char *text, size_t len,
                              struct bytes *ret)
{
    size_t done = 0;
    for (size_t start = 0, at = 0; at < len; start = at) {
        if (!unicode_normalizes_since_9(utf8_next(text, len, &at))) continue;
        enum status st = put_form(step, text + done, start - done, ret);
        if (st != ST_OK) return st;
        bytes_append(ret, text + start, at - start);
        done = at;
    }
    return put_form(step, text + done, len - done, ret);
}

static enum status apply_lowercase(const char *text, size_t len, struct bytes *ret)
{
    for (size_t at = 0; at < len;) {
        uint32_t c = utf8_next(text, len, &at);
        char out[4];
        if (c == 0x130) // the one capital whose lower case is two characters
            bytes_puts(ret, "i\xcc\x87");
        else
            bytes_append(ret, out,
                         (size_t)utf8_encode((uint32_t)utf8proc_tolower((utf8proc_int32_t)c), out));
    }
    return bytes_status(ret);
}

static enum status apply_strip(const struct step *step, const char *text, size_t len,
                               struct bytes *ret)
{
    size_t start = step->left ? unicode_skip(text, 0, len, UNICODE_SPACE) : 0;
    size_t end = step->right ? unicode_skip_back(text, start, len, UNICODE_SPACE) : len;
    bytes_append(ret, text + start, end - start);
    return bytes_status(ret);
}

static enum status apply_step(const struct step *step, const char *text, size_t len, bool prepend,
                              struct bytes *ret)
{
    switch (step->type->kind) {
    case FORM:
        return apply_form(step, text, len, ret);
    case LOWERCASE:
        return apply_lowercase(text, len, ret);
    case STRIP:
        return apply_strip(step, text, len, ret);
    case REPLACE:
        return pattern_replace(step->pattern, text, len, bytes_text(&step->with), step->with.len,
                               ret);
    case PREPEND:
        if (len > 0 && prepend) bytes_append(ret, bytes_text(&step->with), step->with.len);
        bytes_append(ret, text, len);
        break;
    }
    return bytes_status(ret);
}

enum status normalizer_apply(const struct step_list *n, const char *text, size_t len, bool prepend,
                             struct bytes *ret)
{
    struct bytes other = BYTES_INIT;
    enum status st = ST_OK;
    bytes_clear(ret);
    if (n->n == 0) bytes_append(ret, text, len);
    for (size_t i = 0; i < n->n; i++) {
        if (i > 0) { // the result so far is the next step's input
            struct bytes swap = other;
            other = *ret;
            *ret = swap;
            bytes_clear(ret);
            text = bytes_text(&other);
            len = other.len;
        }
        CHECK(apply_step(&n->items[i], text, len, prepend, ret));
    }
    st = bytes_status(ret);
out:
    bytes_release(&other);
    return st;
}
