/* string_case.c: str's methods on single characters, and the filters and tests of the same name:
 * case, classes, strip. One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"

static struct value cased(struct run *r, const struct string *s, enum text_case to)
{
    size_t text = text_begin(r);
    run_bytes(r, 4 * s->n_bytes); // utf8proc's tables
    text_put_case(s->data, s->n_bytes, to, &r->text);
    return text_end(r, text, s->markup);
}

// which: enum text_case
BUILTIN(change_case)
{
    return cased(r, c->v[0].string, (enum text_case)c->function->which);
}

struct value string_lower(struct run *r, const struct string *s)
{
    return cased(r, s, CASE_LOWER);
}

// which: enum text_case
BUILTIN(has_case)
{
    const struct string *s = c->v[0].string;
    run_bytes(r, 4 * s->n_bytes);
    return value_bool(text_has_case(s->data, s->n_bytes, (enum text_case)c->function->which));
}

// which: enum text_class
BUILTIN(consists_of)
{
    const struct string *s = c->v[0].string;
    enum text_class class = (enum text_class)c->function->which;
    bool all = s->n_bytes > 0 || class == TEXT_PRINTABLE || class == TEXT_ASCII;
    run_bytes(r, s->n_bytes);
    for (size_t at = 0; all && at < s->n_bytes;)
        all = text_is(utf8_next(s->data, s->n_bytes, &at), class);
    return value_bool(all);
}

BUILTIN(is_identifier)
{
    const struct string *s = c->v[0].string;
    size_t at = 0;
    run_bytes(r, s->n_bytes);
    bool all = s->n_bytes > 0 && text_is(utf8_next(s->data, s->n_bytes, &at), TEXT_NAME_START);
    while (all && at < s->n_bytes)
        all = text_is(utf8_next(s->data, s->n_bytes, &at), TEXT_NAME_PART);
    return value_bool(all);
}

// ---- strip --------------------------------------------------------------------------------------

static bool in_set(struct run *r, const struct string *set, const char *c, size_t n)
{
    run_bytes(r, set->n_bytes);
    return memmem(set->data, set->n_bytes, c, n);
}

enum { STRIP_LEFT = 1, STRIP_RIGHT = 2 };

// chars; which: STRIP_LEFT, STRIP_RIGHT or both
BUILTIN(strip)
{
    const struct string *s = c->v[0].string, *set = arg_given(c, 1) ? arg_string(c, 1) : NULL;
    bool left = c->function->which & STRIP_LEFT, right = c->function->which & STRIP_RIGHT;
    size_t start = 0, end = s->n_bytes;
    run_bytes(r, s->n_bytes);
    if (!set && right) end = text_without_trailing_spaces(s->data, end);
    if (!set && left) start = text_leading_spaces(s->data, end);
    for (size_t next = 0; set && left && start < end; start = next) {
        utf8_next(s->data, end, &next);
        if (!in_set(r, set, s->data + start, next - start)) break;
    }
    for (size_t last = end; set && right && end > start; end = last) {
        utf8_before(s->data, &last);
        if (!in_set(r, set, s->data + last, end - last)) break;
    }
    return string_part(r, s, start, end);
}

#define STRING METHOD(V_STRING)

const struct builtin case_builtins[] = {
    {STRING | FILTER, "upper", change_case, CASE_UPPER, "$", 0},
    {STRING | FILTER, "lower", change_case, CASE_LOWER, "$", 0},
    {STRING | FILTER, "capitalize", change_case, CASE_CAPITALIZE, "$", 0},
    {STRING, "casefold", change_case, CASE_FOLD, "", 0},
    {STRING, "swapcase", change_case, CASE_SWAP, "", 0},
    {STRING, "title", change_case, CASE_TITLE, "", 0},
    {STRING, "isalnum", consists_of, TEXT_ALNUM, "", 0},
    {STRING, "isalpha", consists_of, TEXT_ALPHA, "", 0},
    {STRING, "isascii", consists_of, TEXT_ASCII, "", 0},
    {STRING, "isdecimal", consists_of, TEXT_DECIMAL, "", 0},
    {STRING, "isdigit", consists_of, TEXT_DIGIT, "", 0},
    {STRING, "isnumeric", consists_of, TEXT_NUMERIC, "", 0},
    {STRING, "isprintable", consists_of, TEXT_PRINTABLE, "", 0},
    {STRING, "isspace", consists_of, TEXT_SPACE, "", 0},
    {STRING, "isidentifier", is_identifier, 0, "", 0},
    {STRING, "islower", has_case, CASE_LOWER, "", 0},
    {STRING, "istitle", has_case, CASE_TITLE, "", 0},
    {STRING, "isupper", has_case, CASE_UPPER, "", 0},
    {TEST, "lower", has_case, CASE_LOWER, "$", 0},
    {TEST, "upper", has_case, CASE_UPPER, "$", 0},
    {STRING, "lstrip", strip, STRIP_LEFT, "/chars", 0},
    {STRING, "rstrip", strip, STRIP_RIGHT, "/chars", 0},
    {STRING, "strip", strip, STRIP_LEFT | STRIP_RIGHT, "/chars", 0},
    {FILTER, "trim", strip, STRIP_LEFT | STRIP_RIGHT, "$chars", 0},
    {.name = NULL},
};
