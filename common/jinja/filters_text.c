/* filters_text.c: filters that make a text of a text. One thread. */
#include "common/jinja/filters.h"
#include "common/jinja/text.h"
#include <ctype.h>
#include <stdio.h>

// ---- methods of str under the same name ---------------------------------------------------------

static enum status as_method(struct run *r, const struct value *v, const char *method, int n,
                             struct value *ret)
{
    struct value text;
    enum status st = value_str(r, &v[0], &text);
    return st == ST_OK ? call_method(r, &text, method, v + 1, n, ret) : st;
}

BUILTIN(upper)
{
    (void)all;
    return as_method(r, v, "upper", 0, ret);
}

BUILTIN(lower)
{
    (void)all;
    return as_method(r, v, "lower", 0, ret);
}

BUILTIN(capitalize)
{
    (void)all;
    return as_method(r, v, "capitalize", 0, ret);
}

BUILTIN(trim)
{
    (void)all;
    return as_method(r, v, "strip", given(&v[1]), ret);
}

BUILTIN(center)
{
    struct value arguments[2] = {v[0], given(&v[1]) ? v[1] : value_int(80)};
    (void)all;
    return as_method(r, arguments, "center", 1, ret);
}

// Words begin behind white space, hyphens and opening brackets.
BUILTIN(title)
{
    struct bytes text = BYTES_INIT;
    struct value in;
    bool inside = false;
    (void)all;
    enum status st = value_str(r, &v[0], &in);
    if (st == ST_OK) st = run_steps(r, in.string->n_bytes >> 4);
    if (st != ST_OK) return st;
    const char *s = in.string->data;
    size_t n = in.string->n_bytes, start = 0;
    int len;
    for (size_t at = 0; at <= n; at += (size_t)len) {
        uint32_t c = at < n ? text_char(s + at, n - at, &len) : ' ';
        bool between = text_is_space(c) || (c < 0x80 && c && strchr("-({[<", (int)c));
        if (inside && between) { // the word from start to here
            int first;
            text_char(s + start, n - start, &first);
            text_put_case(s + start, (size_t)first, CASE_UPPER, &text);
            text_put_case(s + start + first, at - start - (size_t)first, CASE_LOWER, &text);
        }
        if (at == n) break;
        if (between) run_put(r, &text, s + at, (size_t)len);
        if (!between && !inside) start = at;
        inside = !between;
    }
    return run_take(r, ST_OK, &text, ret);
}

BUILTIN(replace)
{
    struct value text[4] = {v[0], v[1], v[2], v[3]};
    enum status st = ST_OK;
    (void)all;
    for (int i = 0; st == ST_OK && i < 3; i++) {
        st = value_str(r, &v[i], &text[i]);
        if (st == ST_OK && text[i].string->markup) // str() of it
            st = string_borrow(&r->arena, text[i].string->data, text[i].string->n_bytes, &text[i]);
    }
    if (st != ST_OK) return st;
    int n = given(&v[3]) && v[3].kind != V_NONE ? 3 : 2;
    return call_method(r, &text[0], "replace", text + 1, n, ret);
}

// ---- lines --------------------------------------------------------------------------------------

BUILTIN(indent)
{
    struct value lines, spaces;
    struct bytes text = BYTES_INIT;
    int64_t width = 4;
    bool first = false, blank = false;
    enum status st;
    (void)all;
    if (v[0].kind != V_STRING) return type_fail("indent wants a text", &v[0]);
    CHECK(value_truth(r, &v[2], &first));
    CHECK(value_truth(r, &v[3], &blank));
    if (given(&v[1]) && v[1].kind == V_STRING) {
        spaces = v[1];
    } else {
        struct value one, times;
        CHECK(need_int(&v[1], "width", &width));
        CHECK(string_puts(&r->arena, " ", &one));
        times = value_int(width);
        CHECK(arithmetic(r, T_MUL, &one, &times, &spaces));
    }
    // a newline is put behind it first, so that a last empty line counts
    struct value newline, whole;
    CHECK(string_puts(&r->arena, "\n", &newline));
    CHECK(arithmetic(r, T_ADD, &v[0], &newline, &whole));
    CHECK(call_method(r, &whole, "splitlines", NULL, 0, &lines));
    for (size_t i = 0; i < lines.list->n; i++) {
        const struct string *line = lines.list->items[i].string;
        bool indented = i == 0 ? first : blank || line->n_bytes > 0;
        if (i > 0) run_puts(r, &text, "\n");
        if (indented) run_put(r, &text, spaces.string->data, spaces.string->n_bytes);
        run_put(r, &text, line->data, line->n_bytes);
    }
    return run_take(r, ST_OK, &text, ret);
out:
    return st;
}

BUILTIN(truncate)
{
    int64_t length = 255, leeway = 5, n;
    bool kill = false;
    const struct string *end = NULL;
    struct value dots, part[3] = {NONE, NONE, NONE}, cut;
    enum status st;
    (void)all;
    CHECK(value_length(r, &v[0], &n));
    CHECK(need_int(&v[1], "length", &length));
    CHECK(value_truth(r, &v[2], &kill));
    CHECK(string_puts(&r->arena, "...", &dots));
    if (given(&v[3])) dots = v[3];
    CHECK(need_string(&dots, "end", &end));
    CHECK(need_int(&v[4], "leeway", &leeway));
    if (length < (int64_t)end->n_chars || leeway < 0)
        return status_fail(ST_INVALID, "expected length >= %zu, got %lld", end->n_chars,
                           (long long)length);
    *ret = v[0];
    if (n <= length + leeway) return ST_OK;
    if (v[0].kind != V_STRING) return type_fail("truncate wants a text", &v[0]);
    part[1] = value_int(length - (int64_t)end->n_chars);
    CHECK(get_slice(r, &v[0], part, &cut));
    const char *space = kill ? NULL : memrchr(cut.string->data, ' ', cut.string->n_bytes);
    struct bytes text = BYTES_INIT;
    run_put(r, &text, cut.string->data,
            space ? (size_t)(space - cut.string->data) : cut.string->n_bytes);
    run_put(r, &text, end->data, end->n_bytes);
    return run_take(r, ST_OK, &text, ret);
out:
    return st;
}

BUILTIN(wordcount)
{
    struct value in;
    int64_t words = 0;
    bool inside = false;
    int n;
    (void)all;
    enum status st = value_str(r, &v[0], &in);
    for (size_t at = 0; st == ST_OK && at < in.string->n_bytes; at += (size_t)n) {
        bool word = text_is_word(text_char(in.string->data + at, in.string->n_bytes - at, &n));
        words += word && !inside;
        inside = word;
    }
    *ret = value_int(words);
    return st == ST_OK ? run_steps(r, in.string->n_bytes >> 4) : st;
}

// ---- HTML and URLs ------------------------------------------------------------------------------

BUILTIN(escape_html)
{
    (void)all;
    return value_escape(r, &v[0], ret);
}

BUILTIN(force_escape)
{
    struct value plain;
    (void)all;
    enum status st = value_str(r, &v[0], &plain);
    if (st == ST_OK)
        st = string_borrow(&r->arena, plain.string->data, plain.string->n_bytes, &plain);
    return st == ST_OK ? value_escape(r, &plain, ret) : st;
}

BUILTIN(safe)
{
    struct value text;
    (void)all;
    enum status st = value_str(r, &v[0], &text);
    return st == ST_OK ? markup_of(r, text.string, ret) : st;
}

// Comments and tags go, and runs of white space become one blank.
BUILTIN(striptags)
{
    struct bytes text = BYTES_INIT;
    struct value in, plain, words, blank;
    (void)all;
    enum status st = value_str(r, &v[0], &in);
    if (st != ST_OK) return st;
    const char *s = in.string->data, *end = s + in.string->n_bytes;
    while (s < end) {
        const char *open = memchr(s, '<', (size_t)(end - s)), *close = NULL;
        bool comment = open && end - open >= 4 && memcmp(open, "<!--", 4) == 0;
        if (comment) close = memmem(open, (size_t)(end - open), "-->", 3);
        if (comment && close) close += 2;
        if (open && !comment) close = memchr(open, '>', (size_t)(end - open));
        run_put(r, &text, s, (size_t)((close ? open : end) - s));
        s = close ? close + 1 : end;
    }
    CHECK(run_take(r, ST_OK, &text, &plain));
    CHECK(call_method(r, &plain, "split", NULL, 0, &words));
    CHECK(string_puts(&r->arena, " ", &blank));
    st = call_method(r, &blank, "join", &words, 1, ret);
out:
    return st;
}

static enum status put_attribute(struct run *r, const struct dict_entry *e, struct bytes *to)
{
    struct value key, value;
    enum status st;
    if (e->value.kind == V_NONE || e->value.kind == V_UNDEFINED) return ST_OK;
    CHECK(value_str(r, &e->key, &key));
    for (size_t i = 0; i < key.string->n_bytes; i++)
        if (strchr(" \t\n\r\f\v/>=", key.string->data[i]) && key.string->data[i])
            return status_fail(ST_INVALID, "Invalid character in attribute name");
    CHECK(value_escape(r, &key, &key));
    CHECK(value_escape(r, &e->value, &value));
    run_puts(r, to, " ");
    run_put(r, to, key.string->data, key.string->n_bytes);
    run_puts(r, to, "=\"");
    run_put(r, to, value.string->data, value.string->n_bytes);
    run_puts(r, to, "\"");
out:
    return st;
}

BUILTIN(xmlattr)
{
    struct bytes text = BYTES_INIT;
    bool space = true;
    enum status st = ST_OK;
    (void)all;
    if (v[0].kind != V_DICT) return type_fail("xmlattr wants a mapping", &v[0]);
    if (given(&v[1])) st = value_truth(r, &v[1], &space);
    for (size_t i = 0; st == ST_OK && i < v[0].dict->n; i++)
        st = put_attribute(r, &v[0].dict->entries[i], &text);
    if (st == ST_OK && !space && text.len > 0) {
        st = string_make(&r->arena, text.data + 1, text.len - 1, ret);
        bytes_release(&text);
        return st;
    }
    return run_take(r, st, &text, ret);
}

static void put_quoted(const struct run *r, const struct string *s, bool query, struct bytes *to)
{
    for (size_t i = 0; i < s->n_bytes; i++) {
        unsigned char c = (unsigned char)s->data[i];
        char code[4];
        if ((c < 0x80 && isalnum(c)) || (c && strchr("_.-~", c)) || (c == '/' && !query)) {
            run_put(r, to, &s->data[i], 1);
        } else if (c == ' ' && query) {
            run_puts(r, to, "+");
        } else {
            snprintf(code, sizeof code, "%%%02X", c);
            run_puts(r, to, code);
        }
    }
}

static enum status put_query(struct run *r, struct list pairs, struct bytes *to)
{
    enum status st = ST_OK;
    for (size_t i = 0; i < pairs.n; i++) {
        struct list pair;
        struct value key, value;
        CHECK(value_items(r, &pairs.items[i], &pair));
        if (pair.n != 2) return status_fail(ST_INVALID, "urlencode wants pairs of two");
        CHECK(value_str(r, &pair.items[0], &key));
        CHECK(value_str(r, &pair.items[1], &value));
        if (i > 0) run_puts(r, to, "&");
        put_quoted(r, key.string, true, to);
        run_puts(r, to, "=");
        put_quoted(r, value.string, true, to);
    }
out:
    return st;
}

BUILTIN(urlencode)
{
    struct bytes text = BYTES_INIT;
    struct value in = v[0], pairs = v[0];
    struct list items;
    (void)all;
    enum status st = ST_OK;
    if (in.kind == V_STRING || !value_is_iterable(&in)) {
        st = value_str(r, &v[0], &in);
        if (st == ST_OK) put_quoted(r, in.string, false, &text);
        return run_take(r, st, &text, ret);
    }
    if (in.kind == V_DICT) st = call_method(r, &in, "items", NULL, 0, &pairs);
    if (st == ST_OK) st = value_items(r, &pairs, &items);
    if (st == ST_OK) st = put_query(r, items, &text);
    return run_take(r, st, &text, ret);
}

// ---- formats ------------------------------------------------------------------------------------

BUILTIN(format)
{
    struct value text, values, *items;
    enum status st;
    CHECK(value_str(r, &v[0], &text));
    if (all->n_positional > 0 && all->n_named > 0)
        return status_fail(ST_INVALID, "can't handle positional and keyword arguments at the same "
                                       "time");
    if (all->n_named > 0) {
        CHECK(dict_make(&r->arena, (size_t)all->n_named, &values));
        for (int i = 0; i < all->n_named; i++)
            CHECK(dict_append(&r->arena, values.dict, value_string(all->named[i].name),
                              all->named[i].value));
    } else {
        CHECK(list_make(&r->arena, V_TUPLE, (size_t)all->n_positional, &items, &values));
        for (int i = 0; i < all->n_positional; i++) items[i] = all->positional[i];
    }
    st = format_percent(r, text.string, &values, ret);
out:
    return st;
}

BUILTIN(filesizeformat)
{
    static const char *const decimal[] = {"kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"};
    static const char *const binary[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"};
    char text[80];
    bool two = false;
    (void)all;
    double bytes, base, unit;
    if (!value_is_number(&v[0]) && v[0].kind != V_STRING)
        return type_fail("filesizeformat wants a number", &v[0]);
    enum status st = given(&v[1]) ? value_truth(r, &v[1], &two) : ST_OK;
    if (st != ST_OK) return st;
    struct value number = v[0], name, none = NONE;
    struct arguments failing = {&none, 1, NULL, 0};
    st = string_puts(&r->arena, "float", &name);
    if (st == ST_OK) st = filter_apply(r, name.string, &v[0], &failing, &number);
    if (st != ST_OK) return st;
    if (number.kind == V_NONE) return status_fail(ST_INVALID, "could not convert string to float");
    bytes = value_as_double(&number);
    base = unit = two ? 1024 : 1000;
    if (bytes == 1 || bytes < base) {
        snprintf(text, sizeof text, bytes == 1 ? "1 Byte" : "%.0f Bytes",
                 bytes < 0 ? -(double)(int64_t)-bytes : (double)(int64_t)bytes);
    } else {
        int i = 0;
        for (unit *= base; i < 7 && bytes >= unit; i++) unit *= base;
        snprintf(text, sizeof text, "%.1f %s", base * bytes / unit, two ? binary[i] : decimal[i]);
    }
    return string_make(&r->arena, text, strlen(text), ret);
}

BUILTIN(not_supported)
{
    (void)r, (void)v, (void)all, (void)ret;
    return status_fail(ST_UNSUPPORTED,
                       "the filters pprint, random, urlize and wordwrap are not supported");
}

const struct builtin text_filters[] = {
    {"upper", upper, "", 0},
    {"lower", lower, "", 0},
    {"capitalize", capitalize, "", 0},
    {"title", title, "", 0},
    {"trim", trim, "chars", 0},
    {"center", center, "width", 0},
    {"replace", replace, "old new count", 2},
    {"indent", indent, "width first blank", 0},
    {"truncate", truncate, "length killwords end leeway", 0},
    {"wordcount", wordcount, "", 0},
    {"e", escape_html, "", 0},
    {"escape", escape_html, "", 0},
    {"forceescape", force_escape, "", 0},
    {"safe", safe, "", 0},
    {"striptags", striptags, "", 0},
    {"xmlattr", xmlattr, "autospace", 0},
    {"urlencode", urlencode, "", 0},
    {"format", format, NULL, 0},
    {"filesizeformat", filesizeformat, "binary", 0},
    {"pprint", not_supported, NULL, 0},
    {"random", not_supported, NULL, 0},
    {"urlize", not_supported, NULL, 0},
    {"wordwrap", not_supported, NULL, 0},
};
const size_t n_text_filters = sizeof text_filters / sizeof *text_filters;
