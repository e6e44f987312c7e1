/* repr.c: str() and repr() of values, and HTML escapes. One thread. */
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
    run_steps(r, s->n_bytes >> 4);
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

static void put_items(struct run *r, struct list items, const char *open, const char *close)
{
    run_puts(r, open);
    for (size_t i = 0; i < items.n; i++) {
        if (i > 0) run_puts(r, ", ");
        put_repr(r, items.items[i]);
    }
    run_puts(r, close);
}

static void put_dict(struct run *r, const struct dict *d)
{
    run_puts(r, "{");
    for (size_t i = 0; i < d->n; i++) {
        if (i > 0) run_puts(r, ", ");
        put_repr(r, d->entries[i].key);
        run_puts(r, ": ");
        put_repr(r, d->entries[i].value);
    }
    run_puts(r, "}");
}

static void put_range(struct run *r, const struct range *range)
{
    run_printf(r, "range(%lld, %lld", (long long)range->start, (long long)range->stop);
    if (range->step != 1) run_printf(r, ", %lld", (long long)range->step);
    run_puts(r, ")");
}

static void put_loop(struct run *r, struct loop *loop)
{
    long long length = loop_length(loop);
    run_printf(r, "<LoopContext %lld/%lld>", (long long)loop_index(loop), length);
}

static void put_macro(struct run *r, const struct node *node)
{
    bool named = node->kind == N_MACRO;
    run_puts(r, named ? "<Macro '" : "<Macro anonymous");
    if (named) run_put_string(r, node->value.string);
    run_puts(r, named ? "'>" : ">");
}

static void put_kind(struct run *r, struct value v)
{
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
        put_items(r, *v.list, "[", "]");
    } else if (v.kind == V_TUPLE) {
        put_items(r, *v.list, "(", v.list->n == 1 ? ",)" : ")");
    } else if (v.kind == V_DICT) {
        put_dict(r, v.dict);
    } else if (v.kind == V_NAMESPACE) {
        run_puts(r, "<Namespace ");
        put_dict(r, v.dict);
        run_puts(r, ">");
    } else if (v.kind == V_VIEW) {
        run_puts(r, value_type(v));
        put_items(r, value_items(r, v), "([", "])");
    } else if (v.kind == V_RANGE) {
        put_range(r, v.range);
    } else if (v.kind == V_LOOP) {
        put_loop(r, v.loop);
    } else if (v.kind == V_MACRO) {
        put_macro(r, v.macro->node);
    } else {
        run_printf(r, "<%s object>", value_type(v));
    }
}

void put_repr(struct run *r, struct value v)
{
    run_deeper(r);
    put_kind(r, v);
    r->depth--;
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
