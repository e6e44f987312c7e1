/* string_case.c: str's methods on single characters: case, classes, strip. One thread. */
#include "common/jinja/strings.h"
#include "common/jinja/text.h"

static struct value cased(struct run *r, const struct string *s, enum text_case to)
{
    size_t text = text_begin(r);
    run_steps(r, s->n_bytes >> 4);
    text_put_case(s->data, s->n_bytes, to, &r->text);
    return text_end(r, text, s->markup);
}

BUILTIN(string_cased)
{
    return cased(c->run, c->v[0].string, (enum text_case)c->function->which);
}

struct value string_lower(struct run *r, const struct string *s)
{
    return cased(r, s, CASE_LOWER);
}

BUILTIN(string_has_case)
{
    const struct string *s = c->v[0].string;
    run_steps(c->run, s->n_bytes >> 4);
    return value_bool(text_has_case(s->data, s->n_bytes, (enum text_case)c->function->which));
}

BUILTIN(string_consists_of)
{
    const struct string *s = c->v[0].string;
    enum text_class class = (enum text_class)c->function->which;
    bool all = s->n_bytes > 0 || class == TEXT_PRINTABLE || class == TEXT_ASCII;
    run_steps(c->run, s->n_bytes >> 4);
    for (size_t at = 0; all && at < s->n_bytes;)
        all = text_is(utf8_next(s->data, s->n_bytes, &at), class);
    return value_bool(all);
}

BUILTIN(string_is_identifier)
{
    const struct string *s = c->v[0].string;
    size_t at = 0;
    run_steps(c->run, s->n_bytes >> 4);
    bool all = s->n_bytes > 0 && text_is(utf8_next(s->data, s->n_bytes, &at), TEXT_NAME_START);
    while (all && at < s->n_bytes)
        all = text_is(utf8_next(s->data, s->n_bytes, &at), TEXT_NAME_PART);
    return value_bool(all);
}

// ---- strip --------------------------------------------------------------------------------------

static bool in_set(const struct string *set, const char *c, size_t n)
{
    return memmem(set->data, set->n_bytes, c, n);
}

BUILTIN(string_strip)
{
    const struct string *s = c->v[0].string, *set = arg_given(c, 1) ? arg_string(c, 1) : NULL;
    bool left = c->function->which & STRIP_LEFT, right = c->function->which & STRIP_RIGHT;
    size_t start = 0, end = s->n_bytes;
    if (!set && right) end = text_without_trailing_spaces(s->data, end);
    if (!set && left) start = text_leading_spaces(s->data, end);
    for (size_t next = 0; set && left && start < end; start = next) {
        utf8_next(s->data, end, &next);
        if (!in_set(set, s->data + start, next - start)) break;
    }
    for (size_t last = end; set && right && end > start; end = last) {
        utf8_before(s->data, &last);
        if (!in_set(set, s->data + last, end - last)) break;
    }
    run_steps(c->run, ((s->n_bytes - (end - start)) * (set ? set->n_bytes : 1)) >> 4);
    return string_part(c->run, s, start, end);
}
