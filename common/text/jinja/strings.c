/* strings.c: str's methods, and the filters and tests that take a text: case, classes, search,
 * split, fill, HTML and URLs; and what is refused by name. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/object.h"
#include "common/base/unicode.h"
#include <ctype.h>

enum { AT_START = 1, AT_END = 2 };

static const struct string blank = STRING(" "), zero = STRING("0"), newline = STRING("\n"),
                           dots = STRING("...");

// which: enum text_case
BUILTIN(change_case)
{
    unicode_put_case(v->string->data, v->string->n_bytes, (enum text_case)c->function->which,
                     &r->text);
    return TEXT(v->string->markup);
}

struct value string_lower(struct render *r, const struct string *s)
{
    size_t text = r->text.len;
    unicode_put_case(s->data, s->n_bytes, CASE_LOWER, &r->text);
    return text_end(r, text, s->markup);
}

// which: enum text_case
BUILTIN(has_case)
{
    return value_bool(
        unicode_has_case(v->string->data, v->string->n_bytes, (enum text_case)c->function->which));
}

// which: enum unicode_class; of STR_NAME_PART the first is STR_NAME_START
BUILTIN(consists_of)
{
    const struct string *s = v->string;
    enum unicode_class class = (enum unicode_class)c->function->which;
    bool all = s->n_bytes > 0 || class == STR_PRINTABLE || class == STR_ASCII;
    for (size_t at = 0; all && at < s->n_bytes;) {
        bool starts = class == STR_NAME_PART && at == 0;
        all = unicode_is(utf8_next(s->data, s->n_bytes, &at), starts ? STR_NAME_START : class);
    }
    return value_bool(all);
}

// `set` V_MISSING: white space.
static bool is_stripped(struct render *r, struct value set, const char *c, size_t n)
{
    if (!given(set)) return unicode_is(utf8_decode(c, (int)n), STR_SPACE);
    run_bytes(r, set.string->n_bytes);
    return memmem(set.string->data, set.string->n_bytes, c, n);
}

// chars; which: AT_START, AT_END or both
BUILTIN(strip)
{
    const struct string *s = v->string;
    size_t start = 0, end = s->n_bytes;
    for (size_t next = 0; c->function->which & AT_START && start < end; start = next) {
        utf8_next(s->data, end, &next);
        if (!is_stripped(r, v[1], s->data + start, next - start)) break;
    }
    for (size_t last = end; c->function->which & AT_END && end > start; end = last) {
        utf8_before(s->data, &last);
        if (!is_stripped(r, v[1], s->data + last, end - last)) break;
    }
    return string_part(r, s, start, end);
}

// ---- search -------------------------------------------------------------------------------------

#define NOWHERE SIZE_MAX

// The place where `what` begins in bytes [start, end) of s, its first or its last time.
static size_t place_of(struct render *r, const struct string *s, size_t start, size_t end,
                       const struct string *what, bool last)
{
    const char *found = NULL;
    if (!last) found = memmem(s->data + start, end - start, what->data, what->n_bytes);
    for (size_t at = end + 1; last && !found && at-- > start + what->n_bytes;) {
        run_bytes(r, 1 + what->n_bytes);
        const char *there = s->data + at - what->n_bytes;
        if (memcmp(there, what->data, what->n_bytes) == 0) found = there;
    }
    return found ? (size_t)(found - s->data) : NOWHERE;
}

// The part of the string that parameters 2 and 3, start and end in characters, leave: as bytes.
// False: the start lies beyond the end, where even "" is not found.
static bool window(const struct value *v, size_t *ret_start, size_t *ret_end)
{
    int64_t start, end;
    if (!window_of(v, (int64_t)v->string->n_chars, &start, &end)) return false;
    *ret_start = string_offset(v->string, (size_t)start);
    *ret_end = string_offset(v->string, (size_t)end);
    return true;
}

enum { FIND_LAST = 1, FIND_OR_FAIL = 2 };

// sub, start, end
BUILTIN(find)
{
    size_t start, end, found = NOWHERE;
    if (window(v, &start, &end))
        found = place_of(r, v->string, start, end, v[1].string, c->function->which & FIND_LAST);
    if (found == NOWHERE && c->function->which & FIND_OR_FAIL) fail(r, "substring not found");
    return value_int(found == NOWHERE ? -1 : (int64_t)utf8_count(v->string->data, found));
}

// sub, start, end
BUILTIN(count)
{
    const struct string *s = v->string, *what = v[1].string;
    int64_t n = 0;
    size_t at, end;
    if (!window(v, &at, &end)) return value_int(0);
    if (what->n_bytes == 0) return value_int((int64_t)utf8_count(s->data + at, end - at) + 1);
    for (size_t found; (found = place_of(r, s, at, end, what, false)) != NOWHERE; n++)
        at = found + what->n_bytes;
    return value_int(n);
}

static bool has(const char *s, size_t n, const struct string *affix, bool at_end)
{
    size_t m = affix->n_bytes;
    return n >= m && memcmp(at_end ? s + n - m : s, affix->data, m) == 0;
}

BUILTIN(remove_affix)
{
    const struct string *s = v->string;
    bool at_end = c->function->which == AT_END;
    size_t n = has(s->data, s->n_bytes, v[1].string, at_end) ? v[1].string->n_bytes : 0;
    return string_part(r, s, at_end ? 0 : n, s->n_bytes - (at_end ? n : 0));
}

// prefix or a tuple of them, start, end
BUILTIN(has_affix)
{
    bool found = false;
    size_t start = 0, end = 0;
    bool valid = window(v, &start, &end);
    struct list affixes = {.items = (struct value *)&v[1], .n = 1}; // only read
    if (v[1].kind == V_TUPLE) affixes = *v[1].list;
    for (size_t i = 0; i < affixes.n; i++) {
        struct value affix = affixes.items[i];
        if (affix.kind != V_STRING)
            fail(r, "%.*s first arg must be str or a tuple of str, not %s", NAME(c->function),
                 value_type(affix));
        run_bytes(r, 1 + affix.string->n_bytes);
        found |= valid && has(v->string->data + start, end - start, affix.string,
                              c->function->which == AT_END);
    }
    return value_bool(found);
}

// old, new, count; "" stands before every character and at the end
BUILTIN(replace)
{
    const struct string *s = v->string, *old = v[1].string, *with = v[2].string;
    int64_t max = v[3].integer;
    if (s->markup) with = value_escape(r, v[2]).string;
    size_t at = 0;
    for (; max != 0; max -= max > 0) {
        size_t copied = at;
        size_t match = old->n_bytes ? place_of(r, s, at, s->n_bytes, old, false) : at;
        if (match == NOWHERE) break;
        at = match + old->n_bytes;
        put_bytes(r, s->data + copied, match - copied);
        put_string(r, with);
        if (old->n_bytes > 0) continue;
        if (at == s->n_bytes) break;
        utf8_next(s->data, s->n_bytes, &at); // one character between two of ""
        put_bytes(r, s->data + copied, at - copied);
    }
    put_bytes(r, s->data + at, s->n_bytes - at);
    return TEXT(s->markup);
}

// Jinja's filter takes any values for texts, and markup for plain ones.
BUILTIN(replace_plain)
{
    struct value plain[4] = {[3] = given(v[3]) ? v[3] : value_int(-1)};
    for (int i = 0; i < 3; i++) plain[i] = string_as(r, value_str(r, v[i]).string, false);
    return replace(r, plain, c);
}

// ---- split --------------------------------------------------------------------------------------

struct parts { // a list that grows
    struct render *run;
    const struct string *of;
    struct list list;
    size_t cap;
};

static void add_part(struct parts *p, size_t start, size_t end)
{
    struct list *list = &p->list;
    run_steps(p->run, 1);
    list->items = run_room(p->run, list->items, list->n, &p->cap, sizeof *list->items);
    list->items[list->n++] = string_part(p->run, p->of, start, end);
}

static void split_at(struct parts *p, const struct string *by, int64_t max, bool from_end)
{
    size_t start = 0, end = p->of->n_bytes, found;
    while (max-- != 0 && (found = place_of(p->run, p->of, start, end, by, from_end)) != NOWHERE) {
        size_t behind = found + by->n_bytes;
        add_part(p, from_end ? behind : start, from_end ? end : found);
        if (from_end)
            end = found;
        else
            start = behind;
    }
    add_part(p, start, end);
    if (from_end) items_reverse(p->list);
}

static void split_at_spaces(struct parts *p, int64_t max)
{
    const struct string *s = p->of;
    size_t at = unicode_skip(s->data, 0, s->n_bytes, STR_SPACE);
    while (at < s->n_bytes) {
        size_t end = at, next = at;
        if (max-- == 0) end = s->n_bytes; // the last part: all that is left
        while (end < s->n_bytes && !unicode_is(utf8_next(s->data, s->n_bytes, &next), STR_SPACE))
            end = next;
        add_part(p, at, end);
        at = unicode_skip(s->data, end, s->n_bytes, STR_SPACE);
    }
}

// Those before the last `max` are one, with the white space between and before them.
static void join_first(struct parts *p, int64_t max)
{
    if (max < 0 || (size_t)max >= p->list.n) return;
    size_t one = p->list.n - (size_t)max - 1;
    const struct string *last = p->list.items[one].string;
    size_t end = (size_t)(last->data - p->of->data) + last->n_bytes;
    p->list.items[one] = string_part(p->run, p->of, 0, end);
    p->list.items += one;
    p->list.n -= one;
}

struct list split_string(struct render *r, const struct string *s, const struct string *by,
                         int64_t max, bool from_end)
{
    struct parts p = {.run = r, .of = s};
    run_bytes(r, s->n_bytes);
    if (by)
        split_at(&p, by, max, from_end);
    else
        split_at_spaces(&p, from_end ? -1 : max);
    if (!by && from_end) join_first(&p, max);
    return p.list;
}

// sep, maxsplit; which: AT_START or AT_END, where it begins
BUILTIN(split)
{
    const struct string *by = given(v[1]) ? v[1].string : NULL;
    int64_t max = v[2].integer < 0 ? -1 : v[2].integer;
    if (by && by->n_bytes == 0) fail(r, "empty separator");
    return list_of(r, V_LIST, split_string(r, v->string, by, max, c->function->which == AT_END));
}

static struct list split_lines(struct render *r, const struct string *s, bool keep_ends)
{
    struct parts p = {.run = r, .of = s};
    for (size_t start = 0, at = 0; at < s->n_bytes;) {
        size_t end = at;
        uint32_t character = utf8_next(s->data, s->n_bytes, &at);
        bool line_end = unicode_is(character, STR_LINE_END);
        if (character == '\r' && at < s->n_bytes && s->data[at] == '\n') at++;
        if (!line_end && at < s->n_bytes) continue;
        add_part(&p, start, keep_ends || !line_end ? at : end);
        start = at;
    }
    return p.list;
}

BUILTIN(splitlines)
{
    return list_of(r, V_LIST, split_lines(r, v->string, v[1].truth));
}

// sep; which: AT_START or AT_END
BUILTIN(partition)
{
    const struct string *s = v->string, *by = v[1].string;
    bool last = c->function->which == AT_END;
    if (by->n_bytes == 0) fail(r, "empty separator");
    size_t at = place_of(r, s, 0, s->n_bytes, by, last), behind = at + by->n_bytes;
    if (at == NOWHERE) at = behind = last ? 0 : s->n_bytes;
    struct value parts = list_new(r, V_TUPLE, 3);
    parts.list->items[0] = string_part(r, s, 0, at);
    parts.list->items[1] = string_part(r, s, at, behind);
    parts.list->items[2] = string_part(r, s, behind, s->n_bytes);
    return parts;
}

BUILTIN(join_texts)
{
    const struct string *s = v->string;
    struct list items = value_items(r, v[1]);
    for (size_t i = 0; i < items.n; i++) {
        struct value item = items.items[i];
        if (item.kind != V_STRING)
            fail(r, "sequence item %zu: expected str instance, %s found", i, value_type(item));
        if (i > 0) put_string(r, s);
        put_string(r, (s->markup ? value_escape(r, item) : item).string);
    }
    return TEXT(s->markup);
}

// ---- fill ---------------------------------------------------------------------------------------

enum { PAD_LEFT = 1, PAD_RIGHT = 2, PAD_ZEROS = 4 };

// width, fillchar; which: PAD_LEFT, PAD_RIGHT or both; PAD_ZEROS: behind a sign
BUILTIN(pad)
{
    const struct string *s = v->string;
    const int which = c->function->which;
    const struct string *fill = given(v[2]) ? v[2].string : which & PAD_ZEROS ? &zero : &blank;
    int64_t width = v[1].integer, n = (int64_t)s->n_chars, wanting = width > n ? width - n : 0;
    if (width > INT32_MAX) fail_as(r, ST_NO_MEMORY, "a width of that size is too much");
    if (fill->n_chars != 1) fail(r, "The fill character must be exactly one character long");
    int64_t left = which == (PAD_LEFT | PAD_RIGHT) ? wanting / 2 + (wanting & width & 1)
                   : which & PAD_LEFT              ? wanting
                                                   : 0;
    bool is_signed = s->n_bytes > 0 && (s->data[0] == '-' || s->data[0] == '+');
    size_t sign = is_signed && which & PAD_ZEROS;
    put_bytes(r, s->data, sign);
    put_fill(r, fill, left);
    put_bytes(r, s->data + sign, s->n_bytes - sign);
    put_fill(r, fill, wanting - left);
    return TEXT(s->markup);
}

BUILTIN(expandtabs)
{
    const struct string *s = v->string;
    int64_t size = v[1].integer > 1000 ? 1000 : v[1].integer, column = 0;
    for (size_t at = 0; at < s->n_bytes;) {
        size_t start = at;
        uint32_t character = utf8_next(s->data, s->n_bytes, &at);
        if (character == '\t') {
            int64_t spaces = size > 0 ? size - column % size : 0;
            put_fill(r, &blank, spaces);
            column += spaces;
        } else {
            put_bytes(r, s->data + start, at - start);
            column = character == '\n' || character == '\r' ? 0 : column + 1;
        }
    }
    return TEXT(s->markup);
}

// ---- filters that make a text of a text ---------------------------------------------------------

// White space, hyphens and opening brackets: words begin behind them.
static bool is_between(uint32_t c)
{
    return unicode_is(c, STR_SPACE) || (c && c < 0x80 && strchr("-({[<", (int)c));
}

BUILTIN(title)
{
    const char *s = v->string->data;
    size_t n = v->string->n_bytes;
    for (size_t at = 0, word = 0, next = 0; at < n; word = next = at) {
        bool between = is_between(utf8_next(s, n, &at));
        size_t second = next = at;
        while (!between && at < n && !is_between(utf8_next(s, n, &next))) at = next;
        unicode_put_case(s + word, second - word, CASE_UPPER, &r->text);
        unicode_put_case(s + second, at - second, CASE_LOWER, &r->text);
    }
    return TEXT(false);
}

// width, first, blank
BUILTIN(indent)
{
    int64_t width = 4;
    if (v->kind != V_STRING) type_fail(r, "indent wants a text", *v);
    if (given(v[1]) && v[1].kind != V_STRING && !value_as_int(v[1], &width))
        type_fail(r, "indent wants a number or a text", v[1]);
    struct value spaces =
        v[1].kind == V_STRING ? v[1] : value_repeat(r, value_string(&blank), width);
    // a newline is put behind it first, so that a last empty line counts
    struct value whole = arithmetic(r, '+', *v, value_string(&newline));
    struct list lines = split_lines(r, whole.string, false);
    for (size_t i = 0; i < lines.n; i++) {
        const struct string *line = lines.items[i].string;
        if (i > 0) put_string(r, &newline);
        if (i == 0 ? v[2].truth : v[3].truth || line->n_bytes > 0) put_string(r, spaces.string);
        put_string(r, line);
    }
    return TEXT(false);
}

// length, killwords, end, leeway
BUILTIN(truncate_text)
{
    int64_t n = value_length(r, *v), length = v[1].integer, leeway = given(v[4]) ? v[4].integer : 5;
    const struct string *end = given(v[3]) ? v[3].string : &dots, *s = v->string;
    if (length < (int64_t)end->n_chars || leeway < 0)
        fail(r, "expected length >= %zu, got %lld", end->n_chars, (long long)length);
    if (n <= length + leeway) return *v;
    if (v->kind != V_STRING) type_fail(r, "truncate wants a text", *v);
    run_bytes(r, s->n_bytes);
    size_t cut = string_offset(s, (size_t)length - end->n_chars);
    const char *space = v[2].truth ? NULL : memrchr(s->data, ' ', cut);
    put_bytes(r, s->data, space ? (size_t)(space - s->data) : cut);
    put_string(r, end);
    return TEXT(false);
}

BUILTIN(wordcount)
{
    int64_t words = 0;
    bool inside = false;
    for (size_t at = 0; at < v->string->n_bytes;) {
        bool word = unicode_is(utf8_next(v->string->data, v->string->n_bytes, &at), STR_WORD);
        words += word && !inside;
        inside = word;
    }
    return value_int(words);
}

BUILTIN(not_supported)
{
    fail_as(r, ST_UNSUPPORTED, "not supported: %s", c->function->name);
}

// ---- HTML and URLs ------------------------------------------------------------------------------

enum { ESCAPE, FORCE_ESCAPE, SAFE };

// which: ESCAPE, of what is no markup yet, FORCE_ESCAPE or SAFE
BUILTIN(mark)
{
    const int which = c->function->which;
    if (which == SAFE) return string_as(r, v->string, true);
    return value_escape(r, which == FORCE_ESCAPE ? string_as(r, v->string, false) : *v);
}

// Comments and tags go, and runs of white space become one blank.
BUILTIN(striptags)
{
    const char *s = v->string->data, *end = s + v->string->n_bytes;
    size_t text = r->text.len;
    while (s < end) {
        const char *open = memchr(s, '<', (size_t)(end - s)), *close = NULL;
        bool comment = open && end - open >= 4 && memcmp(open, "<!--", 4) == 0;
        if (comment) close = memmem(open, (size_t)(end - open), "-->", 3);
        if (comment && close) close += 2;
        if (open && !comment) close = memchr(open, '>', (size_t)(end - open));
        put_bytes(r, s, (size_t)((close ? open : end) - s));
        s = close ? close + 1 : end;
    }
    struct list words = split_string(r, text_end(r, text, false).string, NULL, -1, false);
    for (size_t i = 0; i < words.n; i++) {
        if (i > 0) put_string(r, &blank);
        put_string(r, words.items[i].string);
    }
    return TEXT(false);
}

// autospace
BUILTIN(xmlattr)
{
    if (v->kind != V_DICT) type_fail(r, "xmlattr wants a mapping", *v);
    bool space = !given(v[1]) || value_truth(r, v[1]);
    for (size_t i = 0; i < v->dict->n; i++) {
        const struct dict_entry *e = &v->dict->entries[i];
        if (e->value.kind == V_NONE || e->value.kind == V_UNDEFINED) continue;
        if (space) put_string(r, &blank);
        space = true;
        struct value key = value_str(r, e->key);
        for (size_t k = 0; k < key.string->n_bytes; k++)
            if (memchr(" \t\n\r\f\v/>=", key.string->data[k], 9))
                fail(r, "Invalid character in attribute name");
        put_string(r, value_escape(r, key).string);
        put_text(r, "=\"");
        put_string(r, value_escape(r, e->value).string);
        put_text(r, "\"");
    }
    return TEXT(false);
}

static void put_quoted(struct render *r, struct value v, bool query)
{
    const struct string *s = value_str(r, v).string;
    for (size_t i = 0; i < s->n_bytes; i++) {
        unsigned char b = (unsigned char)s->data[i];
        if ((b < 0x80 && isalnum(b)) || (b && strchr("_.-~", b)) || (b == '/' && !query))
            put_bytes(r, &s->data[i], 1);
        else if (b == ' ' && query)
            put_text(r, "+");
        else
            put_printf(r, "%%%02X", b);
    }
}

BUILTIN(urlencode)
{
    struct value pairs = v->kind == V_DICT ? dict_view(r, v->dict, V_ITEMS) : *v;
    if (v->kind == V_STRING || !of_kinds(*v, ITERABLES)) {
        put_quoted(r, *v, false);
        return TEXT(false);
    }
    struct list items = value_items(r, pairs);
    for (size_t i = 0; i < items.n; i++) {
        struct list pair = value_pair(r, items.items[i], "a parameter of an URL");
        put_text(r, i > 0 ? "&" : "");
        put_quoted(r, pair.items[0], true);
        put_text(r, "=");
        put_quoted(r, pair.items[1], true);
    }
    return TEXT(false);
}

#define STR METHOD(V_STRING)

const struct builtin string_builtins[] = {
    {STR | FILTER, "upper", change_case, CASE_UPPER, "$", 0},
    {STR | FILTER, "lower", change_case, CASE_LOWER, "$", 0},
    {STR | FILTER, "capitalize", change_case, CASE_CAPITALIZE, "$", 0},
    {STR, "casefold", change_case, CASE_FOLD, "", 0},
    {STR, "swapcase", change_case, CASE_SWAP, "", 0},
    {STR, "title", change_case, CASE_TITLE, "", 0},
    {STR, "isalnum", consists_of, STR_ALNUM, "", 0},
    {STR, "isalpha", consists_of, STR_ALPHA, "", 0},
    {STR, "isascii", consists_of, STR_ASCII, "", 0},
    {STR, "isdecimal", consists_of, STR_DECIMAL, "", 0},
    {STR, "isdigit", consists_of, STR_DIGIT, "", 0},
    {STR, "isnumeric", consists_of, STR_NUMERIC, "", 0},
    {STR, "isprintable", consists_of, STR_PRINTABLE, "", 0},
    {STR, "isspace", consists_of, STR_SPACE, "", 0},
    {STR, "isidentifier", consists_of, STR_NAME_PART, "", 0},
    {STR, "islower", has_case, CASE_LOWER, "", 0},
    {STR, "istitle", has_case, CASE_TITLE, "", 0},
    {STR, "isupper", has_case, CASE_UPPER, "", 0},
    {TEST, "lower", has_case, CASE_LOWER, "$", 0},
    {TEST, "upper", has_case, CASE_UPPER, "$", 0},
    {STR, "lstrip", strip, AT_START, "/chars$", 0},
    {STR, "rstrip", strip, AT_END, "/chars$", 0},
    {STR, "strip", strip, AT_START | AT_END, "/chars$", 0},
    {FILTER, "trim", strip, AT_START | AT_END, "$chars$", 0},
    {STR, "count", count, 0, "/sub$ start# end#", 1},
    {STR, "find", find, 0, "/sub$ start# end#", 1},
    {STR, "rfind", find, FIND_LAST, "/sub$ start# end#", 1},
    {STR, "index", find, FIND_OR_FAIL, "/sub$ start# end#", 1},
    {STR, "rindex", find, FIND_LAST | FIND_OR_FAIL, "/sub$ start# end#", 1},
    {STR, "startswith", has_affix, AT_START, "/prefix start# end#", 1},
    {STR, "endswith", has_affix, AT_END, "/suffix start# end#", 1},
    {STR, "removeprefix", remove_affix, AT_START, "/prefix$", 1},
    {STR, "removesuffix", remove_affix, AT_END, "/suffix$", 1},
    {STR, "replace", replace, 0, "/old$ new$ count#-1", 2},
    {FILTER, "replace", replace_plain, 0, "old new count#", 2},
    {STR, "split", split, AT_START, "sep$ maxsplit#-1", 0},
    {STR, "rsplit", split, AT_END, "sep$ maxsplit#-1", 0},
    {STR, "splitlines", splitlines, 0, "keepends?", 0},
    {STR, "partition", partition, AT_START, "/sep$", 1},
    {STR, "rpartition", partition, AT_END, "/sep$", 1},
    {STR, "join", join_texts, 0, "/iterable", 1},
    {STR, "center", pad, PAD_LEFT | PAD_RIGHT, "/width# fillchar$", 1},
    {FILTER, "center", pad, PAD_LEFT | PAD_RIGHT, "$width#80", 0},
    {STR, "ljust", pad, PAD_RIGHT, "/width# fillchar$", 1},
    {STR, "rjust", pad, PAD_LEFT, "/width# fillchar$", 1},
    {STR, "zfill", pad, PAD_LEFT | PAD_ZEROS, "/width#", 1},
    {STR, "expandtabs", expandtabs, 0, "tabsize#8", 0},
    {FILTER, "title", title, 0, "$", 0},
    {FILTER, "indent", indent, 0, "width first? blank?", 0},
    {FILTER, "truncate", truncate_text, 0, "length#255 killwords? end$ leeway#", 0},
    {FILTER, "wordcount", wordcount, 0, "$", 0},
    {FILTER, "pprint", not_supported, 0, "*", 0},
    {FILTER, "random", not_supported, 0, "*", 0},
    {FILTER, "urlize", not_supported, 0, "*", 0},
    {FILTER, "wordwrap", not_supported, 0, "*", 0},
    {FUNCTION, "lipsum", not_supported, 0, "*", 0},
    {STR, "encode", not_supported, 0, "*", 0},
    {STR, "maketrans", not_supported, 0, "*", 0},
    {STR, "translate", not_supported, 0, "*", 0},
    {FILTER, "escape e", mark, ESCAPE, "", 0},
    {FILTER, "forceescape", mark, FORCE_ESCAPE, "$", 0},
    {FILTER, "safe", mark, SAFE, "$", 0},
    {FILTER, "striptags", striptags, 0, "$", 0},
    {FILTER, "xmlattr", xmlattr, 0, "autospace", 0},
    {FILTER, "urlencode", urlencode, 0, "", 0},
    {.name = NULL},
};
