/* repr.c: values as text: Python's str() and repr(), its json.dumps, and HTML escapes. One
 * thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// The shortest decimal that reads back as x; an exponent below 1e-4 and from 1e16 on.
void put_float(struct run *r, double x)
{
    char text[40];
    int digits = 1;
    if (isnan(x) || isinf(x)) {
        run_puts(r, isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
        return;
    }
    do {
        run_steps(r, 4);
        snprintf(text, sizeof text, "%.*e", digits - 1, x);
    } while (strtod(text, NULL) != x && ++digits <= 17);
    int exponent = atoi(strchr(text, 'e') + 1);
    if (exponent >= -4 && exponent < 16) {
        int decimals = digits - 1 - exponent;
        run_printf(r, "%.*f", decimals > 1 ? decimals : 1, x);
    } else {
        run_puts(r, text); // e-05, e+16: as Python writes them
    }
}

// ---- strings ------------------------------------------------------------------------------------

static void put_string_repr(struct run *r, const struct string *s)
{
    bool single = memchr(s->data, '\'', s->n_bytes), both = memchr(s->data, '"', s->n_bytes);
    unsigned char quote = single && !both ? '"' : '\'';
    run_bytes(r, s->n_bytes);
    run_printf(r, "%s%c", s->markup ? "Markup(" : "", quote);
    for (size_t at = 0; at < s->n_bytes;) {
        size_t start = at;
        uint32_t c = utf8_next(s->data, s->n_bytes, &at);
        const char *name = c == '\n' ? "\\n" : c == '\r' ? "\\r" : c == '\t' ? "\\t" : NULL;
        if (c == '\\' || c == quote) run_puts(r, "\\");
        if (name)
            run_puts(r, name);
        else if (text_is(c, TEXT_PRINTABLE))
            run_put(r, s->data + start, at - start);
        else
            run_printf(r, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
    }
    run_printf(r, "%c%s", quote, s->markup ? ")" : "");
}

struct value value_escape(struct run *r, struct value v)
{
    static const char *const names[256] = {
        ['&'] = "&amp;", ['<'] = "&lt;", ['>'] = "&gt;", ['"'] = "&#34;", ['\''] = "&#39;"};
    struct value plain = value_str(r, v);
    const struct string *s = plain.string;
    if (s->markup) return plain;
    size_t text = text_begin(r), start = 0;
    run_bytes(r, s->n_bytes);
    for (size_t i = 0; i < s->n_bytes; i++) {
        const char *name = names[(unsigned char)s->data[i]];
        if (!name) continue;
        run_put(r, s->data + start, i - start);
        run_puts(r, name);
        start = i + 1;
    }
    run_put(r, s->data + start, s->n_bytes - start);
    return text_end(r, text, true);
}

// ---- containers ---------------------------------------------------------------------------------

// How a text of nested values is written: as repr() does, or as json.dumps.
struct style {
    bool json;
    bool ensure_ascii, sort_keys, lines; // of JSON; lines: one an item, indented
    const struct string *indent, *item_separator, *key_separator;
};
struct writer {
    struct run *run;
    const struct style *style;
    int level;
};

static void put_value(struct writer *w, struct value v);

static void new_line(struct writer *w)
{
    if (!w->style->lines) return;
    run_puts(w->run, "\n");
    run_bytes(w->run, (size_t)w->level);
    for (int i = 0; i < w->level; i++) run_put_string(w->run, w->style->indent);
}

static void put_key(struct writer *w, struct value key)
{
    bool quoted = w->style->json && key.kind != V_STRING;
    if (quoted && key.kind != V_NONE && !value_is_number(key))
        fail(w->run, "keys must be str, int, float, bool or None, not %s", value_type(key));
    run_puts(w->run, quoted ? "\"" : "");
    put_value(w, key);
    run_puts(w->run, quoted ? "\"" : "");
    run_put_string(w->run, w->style->key_separator);
}

// Between brackets: n values, or entries where there are any.
static void put_items(struct writer *w, const char *open, const char *close,
                      const struct value *items, const struct dict_entry *entries, size_t n)
{
    run_puts(w->run, open);
    w->level++;
    for (size_t i = 0; i < n; i++) {
        if (i > 0) run_put_string(w->run, w->style->item_separator);
        new_line(w);
        if (entries) put_key(w, entries[i].key);
        put_value(w, entries ? entries[i].value : items[i]);
    }
    w->level--;
    if (n > 0) new_line(w);
    run_puts(w->run, close);
}

static void put_list(struct writer *w, const char *open, const char *close, const struct list *l)
{
    put_items(w, open, close, l->items, NULL, l->n);
}

static void put_dict(struct writer *w, const struct dict *d)
{
    struct dict sorted = {.n = d->n};
    if (w->style->sort_keys) {
        sorted.entries = arena_array(&w->run->arena, d->n, sizeof *sorted.entries);
        if (d->n > 0) memcpy(sorted.entries, d->entries, d->n * sizeof *sorted.entries);
        entries_sort(w->run, &sorted, false);
        d = &sorted;
    }
    put_items(w, "{", "}", NULL, d->entries, d->n);
}

// ---- repr ---------------------------------------------------------------------------------------

static void put_range(struct run *r, const int64_t *range)
{
    run_printf(r, "range(%lld, %lld", (long long)range[0], (long long)range[1]);
    if (range[2] != 1) run_printf(r, ", %lld", (long long)range[2]);
    run_puts(r, ")");
}

static void put_macro(struct run *r, const struct node *node)
{
    bool named = node->kind == N_MACRO;
    run_puts(r, named ? "<Macro '" : "<Macro anonymous");
    if (named) run_put_string(r, node->value.string);
    run_puts(r, named ? "'>" : ">");
}

static void put_python(struct writer *w, struct value v)
{
    struct run *r = w->run;
    if (v.kind == V_MISSING || v.kind == V_UNDEFINED) {
        run_puts(r, "Undefined");
    } else if (v.kind == V_NONE) {
        run_puts(r, "None");
    } else if (v.kind == V_BOOL) {
        run_puts(r, v.truth ? "True" : "False");
    } else if (v.kind == V_INT) {
        run_printf(r, "%lld", (long long)v.integer);
    } else if (v.kind == V_FLOAT) {
        put_float(r, v.real);
    } else if (v.kind == V_STRING) {
        put_string_repr(r, v.string);
    } else if (v.kind == V_LIST) {
        put_list(w, "[", "]", v.list);
    } else if (v.kind == V_TUPLE) {
        put_list(w, "(", v.list->n == 1 ? ",)" : ")", v.list);
    } else if (v.kind == V_DICT) {
        put_dict(w, v.dict);
    } else if (v.kind == V_NAMESPACE) {
        run_puts(r, "<Namespace ");
        put_dict(w, v.dict);
        run_puts(r, ">");
    } else if (v.kind == V_RANGE) {
        put_range(r, v.list->range);
    } else if (value_is_list(v)) {
        run_puts(r, value_type(v));
        put_list(w, "([", "])", v.list);
    } else if (v.kind == V_LOOP) {
        static const struct string index = {"index", 5, 5, false};
        run_printf(r, "<LoopContext %lld/%lld>", (long long)loop_attribute(v.loop, &index).integer,
                   (long long)loop_length(v.loop));
    } else if (v.kind == V_MACRO) {
        put_macro(r, v.macro->node);
    } else {
        run_printf(r, "<%s object>", value_type(v));
    }
}

// ---- JSON ---------------------------------------------------------------------------------------

static void put_json_string(struct run *r, const struct string *s, bool ascii)
{
    static const char from[] = "\"\\\n\r\t\b\f", names[] = "\"\\nrtbf";
    run_bytes(r, s->n_bytes);
    run_puts(r, "\"");
    for (size_t at = 0; at < s->n_bytes;) {
        size_t start = at;
        uint32_t c = utf8_next(s->data, s->n_bytes, &at);
        const char *known = c < 0x80 && c != 0 ? strchr(from, (int)c) : NULL;
        if (known)
            run_printf(r, "\\%c", names[known - from]);
        else if (c < 0x20 || (ascii && c > 0x7e && c < 0x10000))
            run_printf(r, "\\u%04x", c);
        else if (ascii && c > 0x7e)
            run_printf(r, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10),
                       0xdc00 + ((c - 0x10000) & 0x3ff));
        else
            run_put(r, s->data + start, at - start);
    }
    run_puts(r, "\"");
}

static void put_json(struct writer *w, struct value v)
{
    struct run *r = w->run;
    if (v.kind == V_NONE)
        run_puts(r, "null");
    else if (v.kind == V_BOOL)
        run_puts(r, v.truth ? "true" : "false");
    else if (v.kind == V_FLOAT && !isfinite(v.real))
        run_puts(r, isnan(v.real) ? "NaN" : v.real > 0 ? "Infinity" : "-Infinity");
    else if (v.kind == V_INT || v.kind == V_FLOAT)
        put_python(w, v);
    else if (v.kind == V_STRING)
        put_json_string(r, v.string, w->style->ensure_ascii);
    else if (v.kind == V_LIST || v.kind == V_TUPLE)
        put_list(w, "[", "]", v.list);
    else if (v.kind == V_DICT)
        put_dict(w, v.dict);
    else
        fail(r, "Object of type %s is not JSON serializable", value_type(v));
}

static void put_value(struct writer *w, struct value v)
{
    run_deeper(w->run);
    (w->style->json ? put_json : put_python)(w, v);
    w->run->depth--;
}

static const struct string comma = {", ", 2, 2, false}, colon = {": ", 2, 2, false};

static void read_indent(const struct call *c, struct style *style)
{
    static const struct string bare = {",", 1, 1, false}, blank = {" ", 1, 1, false};
    if (!arg_given(c, 2)) return;
    style->lines = true;
    style->item_separator = &bare;
    if (c->v[2].kind == V_STRING) {
        style->indent = c->v[2].string;
        return;
    }
    int64_t width = arg_int(c, 2, 0);
    if (width > 1000) fail(c->run, "an indent of more than 1000 is refused");
    style->indent = value_repeat(c->run, value_string(&blank), width).string;
}

BUILTIN(tojson)
{
    struct style style = {.json = true,
                          .ensure_ascii = arg_truth(c, 1, false),
                          .sort_keys = arg_truth(c, 4, false),
                          .item_separator = &comma,
                          .key_separator = &colon};
    read_indent(c, &style);
    if (arg_given(c, 3)) {
        struct list items = value_items(r, c->v[3]);
        if (items.n != 2) fail(r, "separators: two texts are wanted, there are %zu", items.n);
        style.item_separator = need_string(r, items.items[0], "separators");
        style.key_separator = need_string(r, items.items[1], "separators");
    }
    size_t text = text_begin(r);
    put_value(&(struct writer){r, &style, 0}, c->v[0]);
    return text_end(r, text, false);
}

// ---- str ----------------------------------------------------------------------------------------

void put_repr(struct run *r, struct value v)
{
    static const struct style style = {.item_separator = &comma, .key_separator = &colon};
    put_value(&(struct writer){r, &style, 0}, v);
}

void put_str(struct run *r, struct value v)
{
    if (v.kind == V_STRING)
        run_put_string(r, v.string);
    else if (v.kind != V_UNDEFINED)
        put_repr(r, v);
}

struct value value_str(struct run *r, struct value v)
{
    if (v.kind == V_STRING) return v;
    size_t text = text_begin(r);
    put_str(r, v);
    return text_end(r, text, false);
}

struct value value_plain_str(struct run *r, struct value v)
{
    v = value_str(r, v);
    return v.string->markup ? string_as(r, v.string, false) : v;
}

struct value value_repr(struct run *r, struct value v)
{
    size_t text = text_begin(r);
    put_repr(r, v);
    return text_end(r, text, false);
}

BUILTIN(string)
{
    return c->v[0]; // made a str already
}

const struct builtin repr_builtins[] = {
    {FILTER, "string", string, 0, "$", 0},
    {FILTER, "tojson", tojson, 0, "ensure_ascii indent separators sort_keys", 0},
    {.name = NULL},
};
