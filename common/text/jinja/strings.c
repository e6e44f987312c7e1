/* strings.c: str's methods, and the filters and tests that take a text: case, classes, search,
 * split, fill, HTML and URLs; and what is refused by name. One thread. */
#include "common/text/jinja/run.h"
#include "common/text/jinja/text.h"
#include <ctype.h>

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

// which: enum text_class; of TEXT_NAME_PART the first is TEXT_NAME_START
BUILTIN(consists_of)
{
    const struct string *s = c->v[0].string;
    enum text_class class = (enum text_class)c->function->which;
    bool all = s->n_bytes > 0 || class == TEXT_PRINTABLE || class == TEXT_ASCII;
    run_bytes(r, s->n_bytes);
    for (size_t at = 0; all && at < s->n_bytes;) {
        bool starts = class == TEXT_NAME_PART && at == 0;
        all = text_is(utf8_next(s->data, s->n_bytes, &at), starts ? TEXT_NAME_START : class);
    }
    return value_bool(all);
}

// ---- strip --------------------------------------------------------------------------------------

// `set` NULL: white space.
static bool is_stripped(struct run *r, const struct string *set, const char *c, size_t n)
{
    if (!set) return text_is(utf8_decode(c, (int)n), TEXT_SPACE);
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
    for (size_t next = 0; left && start < end; start = next) {
        utf8_next(s->data, end, &next);
        if (!is_stripped(r, set, s->data + start, next - start)) break;
    }
    for (size_t last = end; right && end > start; end = last) {
        utf8_before(s->data, &last);
        if (!is_stripped(r, set, s->data + last, end - last)) break;
    }
    return string_part(r, s, start, end);
}

// ---- search -------------------------------------------------------------------------------------

#define NOWHERE SIZE_MAX

// The place where `what` begins in bytes [start, end) of s, its first or its last time.
static size_t place_of(struct run *r, const struct string *s, size_t start, size_t end,
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
    size_t start, end, found = NOWHERE;
    if (window(c, &start, &end))
        found = place_of(r, s, start, end, what, c->function->which & FIND_LAST);
    if (found == NOWHERE && c->function->which & FIND_OR_FAIL) fail(r, "substring not found");
    return value_int(found == NOWHERE ? -1 : (int64_t)utf8_count(s->data, found));
}

// sub, start, end
BUILTIN(count)
{
    const struct string *s = c->v[0].string, *what = arg_string(c, 1);
    int64_t n = 0;
    size_t at, end;
    if (!window(c, &at, &end)) return value_int(0);
    if (what->n_bytes == 0) return value_int((int64_t)utf8_count(s->data + at, end - at) + 1);
    for (size_t found; (found = place_of(r, s, at, end, what, false)) != NOWHERE; n++)
        at = found + what->n_bytes;
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

// old, new, count; "" stands before every character and at the end
BUILTIN(replace)
{
    const struct string *s = c->v[0].string, *old = arg_string(c, 1), *with = arg_string(c, 2);
    int64_t max = arg_int(c, 3, -1);
    if (s->markup) with = value_escape(r, c->v[2]).string;
    run_bytes(r, s->n_bytes);
    size_t text = text_begin(r), at = 0;
    for (; max != 0; max -= max > 0) {
        size_t copied = at;
        size_t match = old->n_bytes ? place_of(r, s, at, s->n_bytes, old, false) : at;
        if (match == NOWHERE) break;
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
    for (int i = 0; i < 3; i++) {
        struct value v = value_str(r, c->v[i]);
        plain.v[i] = v.string->markup ? string_as(r, v.string, false) : v;
    }
    return replace(r, &plain);
}

// ---- split --------------------------------------------------------------------------------------

struct parts { // a list that grows
    struct run *run;
    const struct string *of;
    struct list list;
    size_t cap;
};

static void add_part(struct parts *p, size_t start, size_t end)
{
    struct list *list = &p->list;
    run_steps(p->run, 1);
    list->items = arena_room(&p->run->arena, list->items, list->n, &p->cap, sizeof *list->items);
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
    size_t at = text_leading_spaces(s->data, s->n_bytes);
    while (at < s->n_bytes) {
        size_t end = at, next = at;
        if (max-- == 0) end = s->n_bytes; // the last part: all that is left
        while (end < s->n_bytes && !text_is(utf8_next(s->data, s->n_bytes, &next), TEXT_SPACE))
            end = next;
        add_part(p, at, end);
        at = end + text_leading_spaces(s->data + end, s->n_bytes - end);
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

struct list split_string(struct run *r, const struct string *s, const struct string *by,
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

static const struct string *separator(const struct call *c)
{
    const struct string *by = arg_string(c, 1);
    if (by->n_bytes == 0) fail(c->run, "empty separator");
    return by;
}

// sep, maxsplit; which: AT_START or AT_END, where it begins
BUILTIN(split)
{
    const struct string *by = arg_given(c, 1) ? separator(c) : NULL;
    int64_t max = arg_int(c, 2, -1);
    bool from_end = c->function->which == AT_END;
    struct list parts = split_string(r, c->v[0].string, by, max < 0 ? -1 : max, from_end);
    return list_of(&r->arena, V_LIST, parts);
}

static struct list split_lines(struct run *r, const struct string *s, bool keep_ends)
{
    struct parts p = {.run = r, .of = s};
    run_bytes(r, s->n_bytes);
    for (size_t start = 0, at = 0; at < s->n_bytes;) {
        size_t end = at;
        uint32_t c = utf8_next(s->data, s->n_bytes, &at);
        bool line_end = text_is(c, TEXT_LINE_END);
        if (c == '\r' && at < s->n_bytes && s->data[at] == '\n') at++;
        if (!line_end && at < s->n_bytes) continue;
        add_part(&p, start, keep_ends || !line_end ? at : end);
        start = at;
    }
    return p.list;
}

BUILTIN(splitlines)
{
    return list_of(&r->arena, V_LIST, split_lines(r, c->v[0].string, arg_truth(c, 1, false)));
}

// sep; which: AT_START or AT_END
BUILTIN(partition)
{
    const struct string *s = c->v[0].string, *by = separator(c);
    bool last = c->function->which == AT_END;
    run_bytes(r, s->n_bytes);
    size_t at = place_of(r, s, 0, s->n_bytes, by, last), behind = at + by->n_bytes;
    if (at == NOWHERE) at = behind = last ? 0 : s->n_bytes;
    struct value v = list_new(&r->arena, V_TUPLE, 3);
    v.list->items[0] = string_part(r, s, 0, at);
    v.list->items[1] = string_part(r, s, at, behind);
    v.list->items[2] = string_part(r, s, behind, s->n_bytes);
    return v;
}

BUILTIN(join_texts)
{
    const struct string *s = c->v[0].string;
    struct list items = value_items(r, c->v[1]);
    size_t text = text_begin(r);
    for (size_t i = 0; i < items.n; i++) {
        struct value item = items.items[i];
        if (item.kind != V_STRING)
            fail(r, "sequence item %zu: expected str instance, %s found", i, value_type(item));
        if (s->markup) item = value_escape(r, item);
        if (i > 0) run_put_string(r, s);
        run_put_string(r, item.string);
    }
    return text_end(r, text, s->markup);
}

// ---- fill ---------------------------------------------------------------------------------------

enum { PAD_LEFT = 1, PAD_RIGHT = 2, PAD_ZEROS = 4 };

// width, fillchar; which: PAD_LEFT, PAD_RIGHT or both; PAD_ZEROS: behind a sign
BUILTIN(pad)
{
    static const struct string blank = {" ", 1, 1, false}, zero = {"0", 1, 1, false};
    const struct string *s = c->v[0].string,
                        *fill = c->function->which & PAD_ZEROS ? &zero : &blank;
    if (given(c->v[2])) fill = arg_string(c, 2);
    int64_t width = given(c->v[1]) ? arg_int(c, 1, 0) : 80; // the filter's default
    if (width > INT32_MAX) arena_fail(&r->arena, ST_NO_MEMORY, "a width of that size is too much");
    if (fill->n_chars != 1) fail(r, "The fill character must be exactly one character long");
    int64_t n = (int64_t)s->n_chars, wanting = width > n ? width - n : 0, left = 0;
    if (c->function->which & PAD_LEFT) left = wanting;
    if (c->function->which == (PAD_LEFT | PAD_RIGHT)) left = wanting / 2 + (wanting & width & 1);
    bool is_signed = s->n_bytes > 0 && (s->data[0] == '-' || s->data[0] == '+');
    size_t sign = is_signed && c->function->which & PAD_ZEROS, text = text_begin(r);
    run_put(r, s->data, sign);
    run_fill(r, fill->data, fill->n_bytes, left);
    run_put(r, s->data + sign, s->n_bytes - sign);
    run_fill(r, fill->data, fill->n_bytes, wanting - left);
    return text_end(r, text, s->markup);
}

BUILTIN(expandtabs)
{
    const struct string *s = c->v[0].string;
    int64_t size = arg_int(c, 1, 8), column = 0;
    size_t text = text_begin(r);
    if (size > 1000) size = 1000;
    run_bytes(r, s->n_bytes);
    for (size_t at = 0; at < s->n_bytes;) {
        size_t start = at;
        uint32_t character = utf8_next(s->data, s->n_bytes, &at);
        if (character == '\t') {
            int64_t spaces = size > 0 ? size - column % size : 0;
            run_fill(r, " ", 1, spaces);
            column += spaces;
        } else {
            run_put(r, s->data + start, at - start);
            column = character == '\n' || character == '\r' ? 0 : column + 1;
        }
    }
    return text_end(r, text, s->markup);
}

// ---- filters that make a text of a text ---------------------------------------------------------

// Words begin behind white space, hyphens and opening brackets.
BUILTIN(title)
{
    const struct string *s = c->v[0].string;
    size_t text = text_begin(r);
    bool inside = false;
    run_bytes(r, 4 * s->n_bytes);
    for (size_t at = 0, word = 0; at <= s->n_bytes;) {
        size_t start = at;
        uint32_t character = at < s->n_bytes ? utf8_next(s->data, s->n_bytes, &at) : ' ';
        bool between = text_is(character, TEXT_SPACE) ||
                       (character < 0x80 && character && strchr("-({[<", (int)character));
        if (inside && between) { // the word from there to here
            size_t second = word;
            utf8_next(s->data, s->n_bytes, &second);
            text_put_case(s->data + word, second - word, CASE_UPPER, &r->text);
            text_put_case(s->data + second, start - second, CASE_LOWER, &r->text);
        }
        if (start == s->n_bytes) break;
        if (between) run_put(r, s->data + start, at - start);
        if (!between && !inside) word = start;
        inside = !between;
    }
    return text_end(r, text, false);
}

BUILTIN(indent)
{
    static const struct string blank = {" ", 1, 1, false}, newline = {"\n", 1, 1, false};
    bool first = arg_truth(c, 2, false), empty = arg_truth(c, 3, false);
    if (c->v[0].kind != V_STRING) type_fail(r, "indent wants a text", c->v[0]);
    const struct string *spaces =
        c->v[1].kind == V_STRING ? c->v[1].string
                                 : value_repeat(r, value_string(&blank), arg_int(c, 1, 4)).string;
    // a newline is put behind it first, so that a last empty line counts
    struct value whole = arithmetic(r, T_ADD, c->v[0], value_string(&newline));
    struct list lines = split_lines(r, whole.string, false);
    size_t text = text_begin(r);
    for (size_t i = 0; i < lines.n; i++) {
        const struct string *line = lines.items[i].string;
        if (i > 0) run_puts(r, "\n");
        if (i == 0 ? first : empty || line->n_bytes > 0) run_put_string(r, spaces);
        run_put_string(r, line);
    }
    return text_end(r, text, false);
}

BUILTIN(truncate_text)
{
    static const struct string dots = {"...", 3, 3, false};
    int64_t n = value_length(r, c->v[0]), length = arg_int(c, 1, 255), leeway = arg_int(c, 4, 5);
    const struct string *end = given(c->v[3]) ? arg_string(c, 3) : &dots;
    bool kill = arg_truth(c, 2, false);
    if (length < (int64_t)end->n_chars || leeway < 0)
        fail(r, "expected length >= %zu, got %lld", end->n_chars, (long long)length);
    if (n <= length + leeway) return c->v[0];
    if (c->v[0].kind != V_STRING) type_fail(r, "truncate wants a text", c->v[0]);
    const struct string *s = c->v[0].string;
    run_bytes(r, s->n_bytes);
    size_t cut = string_offset(s, (size_t)length - end->n_chars), text = text_begin(r);
    const char *space = kill ? NULL : memrchr(s->data, ' ', cut);
    run_put(r, s->data, space ? (size_t)(space - s->data) : cut);
    run_put_string(r, end);
    return text_end(r, text, false);
}

BUILTIN(wordcount)
{
    const struct string *s = c->v[0].string;
    int64_t words = 0;
    bool inside = false;
    run_bytes(r, s->n_bytes);
    for (size_t at = 0; at < s->n_bytes;) {
        bool word = text_is(utf8_next(s->data, s->n_bytes, &at), TEXT_WORD);
        words += word && !inside;
        inside = word;
    }
    return value_int(words);
}

BUILTIN(not_supported)
{
    arena_fail(&r->arena, ST_UNSUPPORTED, "not supported: %s", c->function->name);
}

// ---- HTML ---------------------------------------------------------------------------------------

BUILTIN(escape)
{
    return value_escape(r, c->v[0]);
}

BUILTIN(force_escape)
{
    return value_escape(r, string_as(r, c->v[0].string, false));
}

BUILTIN(safe)
{
    return string_as(r, c->v[0].string, true);
}

// Comments and tags go, and runs of white space become one blank.
BUILTIN(striptags)
{
    const char *s = c->v[0].string->data, *end = s + c->v[0].string->n_bytes;
    size_t text = text_begin(r);
    run_bytes(r, c->v[0].string->n_bytes);
    while (s < end) {
        const char *open = memchr(s, '<', (size_t)(end - s)), *close = NULL;
        bool comment = open && end - open >= 4 && memcmp(open, "<!--", 4) == 0;
        if (comment) close = memmem(open, (size_t)(end - open), "-->", 3);
        if (comment && close) close += 2;
        if (open && !comment) close = memchr(open, '>', (size_t)(end - open));
        run_put(r, s, (size_t)((close ? open : end) - s));
        s = close ? close + 1 : end;
    }
    struct list words = split_string(r, text_end(r, text, false).string, NULL, -1, false);
    for (size_t i = 0; i < words.n; i++) {
        if (i > 0) run_puts(r, " ");
        run_put_string(r, words.items[i].string);
    }
    return text_end(r, text, false);
}

static void put_attribute(struct run *r, const struct dict_entry *e)
{
    const struct string *key = value_str(r, e->key).string;
    for (size_t i = 0; i < key->n_bytes; i++)
        if (strchr(" \t\n\r\f\v/>=", key->data[i]) && key->data[i])
            fail(r, "Invalid character in attribute name");
    run_put_string(r, value_escape(r, value_string(key)).string);
    run_puts(r, "=\"");
    run_put_string(r, value_escape(r, e->value).string);
    run_puts(r, "\"");
}

BUILTIN(xmlattr)
{
    bool space = arg_truth(c, 1, true);
    if (c->v[0].kind != V_DICT) type_fail(r, "xmlattr wants a mapping", c->v[0]);
    const struct dict *d = c->v[0].dict;
    size_t text = text_begin(r);
    for (size_t i = 0; i < d->n; i++) {
        struct value v = d->entries[i].value;
        if (v.kind == V_NONE || v.kind == V_UNDEFINED) continue;
        if (space || text_begin(r) > text) run_puts(r, " ");
        put_attribute(r, &d->entries[i]);
    }
    return text_end(r, text, false);
}

// ---- URLs ---------------------------------------------------------------------------------------

static void put_quoted(struct run *r, const struct string *s, bool query)
{
    for (size_t i = 0; i < s->n_bytes; i++) {
        unsigned char b = (unsigned char)s->data[i];
        if ((b < 0x80 && isalnum(b)) || (b && strchr("_.-~", b)) || (b == '/' && !query))
            run_put(r, &s->data[i], 1);
        else if (b == ' ' && query)
            run_puts(r, "+");
        else
            run_printf(r, "%%%02X", b);
    }
}

BUILTIN(urlencode)
{
    struct value v = c->v[0];
    size_t text = text_begin(r);
    if (v.kind == V_DICT) v = dict_view(r, v.dict, V_ITEMS);
    if (v.kind == V_STRING || !of_kinds(v, ITERABLES)) {
        put_quoted(r, value_str(r, v).string, false);
        return text_end(r, text, false);
    }
    struct list pairs = value_items(r, v);
    for (size_t i = 0; i < pairs.n; i++) {
        struct list pair = value_items(r, pairs.items[i]);
        if (pair.n != 2) fail(r, "urlencode wants pairs of two");
        if (i > 0) run_puts(r, "&");
        put_quoted(r, value_str(r, pair.items[0]).string, true);
        run_puts(r, "=");
        put_quoted(r, value_str(r, pair.items[1]).string, true);
    }
    return text_end(r, text, false);
}

#define STRING METHOD(V_STRING)

const struct builtin string_builtins[] = {
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
    {STRING, "isidentifier", consists_of, TEXT_NAME_PART, "", 0},
    {STRING, "islower", has_case, CASE_LOWER, "", 0},
    {STRING, "istitle", has_case, CASE_TITLE, "", 0},
    {STRING, "isupper", has_case, CASE_UPPER, "", 0},
    {TEST, "lower", has_case, CASE_LOWER, "$", 0},
    {TEST, "upper", has_case, CASE_UPPER, "$", 0},
    {STRING, "lstrip", strip, STRIP_LEFT, "/chars", 0},
    {STRING, "rstrip", strip, STRIP_RIGHT, "/chars", 0},
    {STRING, "strip", strip, STRIP_LEFT | STRIP_RIGHT, "/chars", 0},
    {FILTER, "trim", strip, STRIP_LEFT | STRIP_RIGHT, "$chars", 0},
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
    {STRING, "split", split, AT_START, "sep maxsplit", 0},
    {STRING, "rsplit", split, AT_END, "sep maxsplit", 0},
    {STRING, "splitlines", splitlines, 0, "keepends", 0},
    {STRING, "partition", partition, AT_START, "/sep", 1},
    {STRING, "rpartition", partition, AT_END, "/sep", 1},
    {STRING, "join", join_texts, 0, "/iterable", 1},
    {STRING, "center", pad, PAD_LEFT | PAD_RIGHT, "/width fillchar", 1},
    {FILTER, "center", pad, PAD_LEFT | PAD_RIGHT, "$width", 0},
    {STRING, "ljust", pad, PAD_RIGHT, "/width fillchar", 1},
    {STRING, "rjust", pad, PAD_LEFT, "/width fillchar", 1},
    {STRING, "zfill", pad, PAD_LEFT | PAD_ZEROS, "/width", 1},
    {STRING, "expandtabs", expandtabs, 0, "tabsize", 0},
    {FILTER, "title", title, 0, "$", 0},
    {FILTER, "indent", indent, 0, "width first blank", 0},
    {FILTER, "truncate", truncate_text, 0, "length killwords end leeway", 0},
    {FILTER, "wordcount", wordcount, 0, "$", 0},
    {FILTER, "pprint random urlize wordwrap", not_supported, 0, "*", 0},
    {FUNCTION, "lipsum", not_supported, 0, "*", 0},
    {METHOD(V_STRING), "encode maketrans translate", not_supported, 0, "*", 0},
    {FILTER, "escape e", escape, 0, "", 0},
    {FILTER, "forceescape", force_escape, 0, "$", 0},
    {FILTER, "safe", safe, 0, "$", 0},
    {FILTER, "striptags", striptags, 0, "$", 0},
    {FILTER, "xmlattr", xmlattr, 0, "autospace", 0},
    {FILTER, "urlencode", urlencode, 0, "", 0},
    {.name = NULL},
};
