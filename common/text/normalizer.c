/* normalizer.c: a flat list of steps (a Sequence within a Sequence is the same list). The Unicode
 * forms are utf8proc's; a text of ASCII alone is its own normal form and skips them. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/text/tokenizer_parts.h"
#include "common/base/unicode.h"
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum step_kind { STEP_FORM, STEP_LOWERCASE, STEP_PREPEND, STEP_REPLACE, STEP_STRIP };

struct step {
    enum step_kind kind;
    utf8proc_option_t form;     // STEP_FORM
    struct replacement replace; // STEP_REPLACE; what a STEP_PREPEND prepends is `with`
    bool left, right;           // STEP_STRIP
};

struct normalizer {
    struct step *steps;
    size_t n;
    bool prepend_once;
};

void normalizer_free(struct normalizer *n)
{
    if (!n) return;
    for (size_t i = 0; i < n->n; i++) replacement_release(&n->steps[i].replace);
    free(n->steps);
    free(n);
}

static enum status parse_step(void *context, const char *where, const char *type,
                              const json_t *section)
{
    static const struct {
        const char *type;
        enum step_kind kind;
        utf8proc_option_t form;
    } kinds[] = {
        {"NFC", STEP_FORM, UTF8PROC_STABLE | UTF8PROC_COMPOSE},
        {"NFD", STEP_FORM, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE},
        {"NFKC", STEP_FORM, UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
        {"NFKD", STEP_FORM, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT},
        {"Lowercase", STEP_LOWERCASE, 0},
        {"Prepend", STEP_PREPEND, 0},
        {"Replace", STEP_REPLACE, 0},
        {"Strip", STEP_STRIP, 0},
    };
    struct normalizer *n = context;
    const size_t n_kinds = sizeof(kinds) / sizeof(kinds[0]);
    size_t i = 0;
    while (i < n_kinds && strcmp(type, kinds[i].type) != 0) i++;
    if (i == n_kinds)
        return status_fail(ST_UNSUPPORTED, "%s: normalizer.type \"%s\" is not supported", where,
                           type);
    struct step *steps = array_room(n->steps, n->n, sizeof(*steps));
    if (!steps) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    n->steps = steps;
    struct step *step = &steps[n->n++];
    *step = (struct step){kinds[i].kind, kinds[i].form, {NULL, BYTES_INIT}, true, true};
    enum status st = ST_OK;
    if (step->kind == STEP_PREPEND) {
        const json_t *text = json_object_get(section, "prepend");
        if (!json_is_string(text))
            return status_fail(ST_FORMAT, "%s: normalizer.prepend is not a string", where);
        bytes_append(&step->replace.with, json_string_value(text), json_string_length(text));
        CHECK(bytes_status(&step->replace.with));
    }
    if (step->kind == STEP_REPLACE)
        CHECK(replacement_parse(where, "normalizer", section, &step->replace));
    if (step->kind == STEP_STRIP) {
        CHECK(json_get_bool(where, section, "strip_left", &step->left));
        CHECK(json_get_bool(where, section, "strip_right", &step->right));
    }
out:
    return st;
}

enum status normalizer_parse(const char *where, const json_t *section, struct normalizer **ret)
{
    struct normalizer *n = calloc(1, sizeof(*n));
    if (!n) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    enum status st = section_each(where, "normalizer", "normalizers", section, parse_step, n);
    if (st != ST_OK)
        normalizer_free(n);
    else
        *ret = n;
    return st;
}

void normalizer_prepend_once(struct normalizer *n)
{
    n->prepend_once = true;
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
    utf8proc_ssize_t n =
        utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)len, &out, step->form);
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
    size_t start = step->left ? unicode_skip(text, 0, len, unicode_is_space) : 0;
    size_t end = step->right ? unicode_skip_back(text, start, len, unicode_is_space) : len;
    bytes_append(ret, text + start, end - start);
    return bytes_status(ret);
}

static enum status apply_step(const struct step *step, const char *text, size_t len, bool prepend,
                              struct bytes *ret)
{
    switch (step->kind) {
    case STEP_FORM:
        return apply_form(step, text, len, ret);
    case STEP_LOWERCASE:
        return apply_lowercase(text, len, ret);
    case STEP_STRIP:
        return apply_strip(step, text, len, ret);
    case STEP_REPLACE:
        return pattern_replace(step->replace.pattern, text, len, bytes_text(&step->replace.with),
                               step->replace.with.len, ret);
    case STEP_PREPEND:
        if (len > 0 && prepend)
            bytes_append(ret, bytes_text(&step->replace.with), step->replace.with.len);
        bytes_append(ret, text, len);
        break;
    }
    return bytes_status(ret);
}

enum status normalizer_apply(const struct normalizer *n, const char *text, size_t len,
                             bool at_start, struct bytes *ret)
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
        CHECK(apply_step(&n->steps[i], text, len, at_start || !n->prepend_once, ret));
    }
    st = bytes_status(ret);
out:
    bytes_release(&other);
    return st;
}
