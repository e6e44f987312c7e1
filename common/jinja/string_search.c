/* string_search.c: str's methods that look for a text, and replace it, and the filter `replace`.
 * One thread. */
#include "common/jinja/run.h"

const char *string_find_last(struct run *r, const char *s, size_t n, const struct string *what)
{
    for (size_t at = n + 1; at-- > what->n_bytes;) {
        run_bytes(r, 1 + what->n_bytes);
        if (memcmp(s + at - what->n_bytes, what->data, what->n_bytes) == 0)
            return s + at - what->n_bytes;
    }
    return NULL;
}

// The part of the string that parameters 2 and 3, start and end in characters, leave: as bytes.
// False: the start lies beyond the end, where even "" is not found.
static bool window(const struct call *c, size_t *ret_start, size_t *ret_end)
{
    const struct string *s = c->v[0].string;
    int64_t start, end;
    if (!arg_window(c, (int64_t)s->n_chars, &start, &end)) return false;
    run_bytes(c->run, s->n_bytes);
    *ret_start = string_offset(s, (size_t)start);
    *ret_end = string_offset(s, (size_t)end);
    return true;
}

enum { FIND_LAST = 1, FIND_OR_FAIL = 2 };

// sub, start, end
BUILTIN(find)
{
    const struct string *s = c->v[0].string, *what = arg_string(c, 1);
    const char *found = NULL;
    size_t start, end;
    if (window(c, &start, &end))
        found = c->function->which & FIND_LAST
                    ? string_find_last(r, s->data + start, end - start, what)
                    : memmem(s->data + start, end - start, what->data, what->n_bytes);
    if (!found && c->function->which & FIND_OR_FAIL) fail(r, "substring not found");
    return value_int(found ? (int64_t)utf8_count(s->data, (size_t)(found - s->data)) : -1);
}

// sub, start, end
BUILTIN(count)
{
    const struct string *s = c->v[0].string, *what = arg_string(c, 1);
    int64_t n = 0;
    size_t at, end;
    if (!window(c, &at, &end)) return value_int(0);
    if (what->n_bytes == 0) return value_int((int64_t)utf8_count(s->data + at, end - at) + 1);
    for (const char *found; (found = memmem(s->data + at, end - at, what->data, what->n_bytes));
         n++)
        at = (size_t)(found - s->data) + what->n_bytes;
    return value_int(n);
}

// ---- at the start or the end --------------------------------------------------------------------

static bool has(const char *s, size_t n, const struct string *affix, bool at_end)
{
    size_t m = affix->n_bytes;
    return n >= m && memcmp(at_end ? s + n - m : s, affix->data, m) == 0;
}

enum { AT_START, AT_END };

BUILTIN(remove_affix)
{
    const struct string *s = c->v[0].string, *affix = arg_string(c, 1);
    bool at_end = c->function->which == AT_END;
    run_bytes(r, affix->n_bytes);
    size_t n = has(s->data, s->n_bytes, affix, at_end) ? affix->n_bytes : 0;
    return string_part(r, s, at_end ? 0 : n, at_end ? s->n_bytes - n : s->n_bytes);
}

// prefix or a tuple of them, start, end
BUILTIN(has_affix)
{
    const char *s = c->v[0].string->data;
    bool at_end = c->function->which == AT_END, found = false;
    size_t start = 0, end = 0;
    bool valid = window(c, &start, &end);
    struct list affixes = {.items = (struct value *)&c->v[1], .n = 1}; // only read
    if (c->v[1].kind == V_TUPLE) affixes = *c->v[1].list;
    for (size_t i = 0; i < affixes.n; i++) {
        struct value affix = affixes.items[i];
        if (affix.kind != V_STRING)
            fail(r, "%.*s first arg must be str or a tuple of str, not %s", NAME(c->function),
                 value_type(affix));
        run_bytes(r, 1 + affix.string->n_bytes);
        found |= valid && has(s + start, end - start, affix.string, at_end);
    }
    return value_bool(found);
}

// ---- replace ------------------------------------------------------------------------------------

// "" stands before every character and at the end.
static size_t next_match(const struct string *s, size_t at, const struct string *old)
{
    if (old->n_bytes == 0) return at;
    const char *found = memmem(s->data + at, s->n_bytes - at, old->data, old->n_bytes);
    return found ? (size_t)(found - s->data) : s->n_bytes + 1;
}

// old, new, count
BUILTIN(replace)
{
    const struct string *s = c->v[0].string, *old = arg_string(c, 1), *with = arg_string(c, 2);
    int64_t max = arg_int(c, 3, -1);
    if (s->markup) with = value_escape(r, c->v[2]).string;
    run_bytes(r, s->n_bytes);
    size_t text = text_begin(r), at = 0;
    for (; max != 0; max -= max > 0) {
        size_t match = next_match(s, at, old), copied = at;
        if (match > s->n_bytes) break;
        at = match + old->n_bytes;
        run_put(r, s->data + copied, match - copied);
        run_put_string(r, with);
        if (old->n_bytes > 0) continue;
        if (at == s->n_bytes) break;
        utf8_next(s->data, s->n_bytes, &at); // one character between two of ""
        run_put(r, s->data + copied, at - copied);
    }
    run_put(r, s->data + at, s->n_bytes - at);
    return text_end(r, text, s->markup);
}

// Jinja's filter takes any values for texts, and markup for plain ones.
BUILTIN(replace_plain)
{
    struct call plain = *c;
    for (int i = 0; i < 3; i++) plain.v[i] = value_plain_str(r, c->v[i]);
    return replace(r, &plain);
}

#define STRING METHOD(V_STRING)

const struct builtin search_builtins[] = {
    {STRING, "count", count, 0, "/sub start end", 1},
    {STRING, "find", find, 0, "/sub start end", 1},
    {STRING, "rfind", find, FIND_LAST, "/sub start end", 1},
    {STRING, "index", find, FIND_OR_FAIL, "/sub start end", 1},
    {STRING, "rindex", find, FIND_LAST | FIND_OR_FAIL, "/sub start end", 1},
    {STRING, "startswith", has_affix, AT_START, "/prefix start end", 1},
    {STRING, "endswith", has_affix, AT_END, "/suffix start end", 1},
    {STRING, "removeprefix", remove_affix, AT_START, "/prefix", 1},
    {STRING, "removesuffix", remove_affix, AT_END, "/suffix", 1},
    {STRING, "replace", replace, 0, "/old new count", 2},
    {FILTER, "replace", replace_plain, 0, "old new count", 2},
    {.name = NULL},
};
