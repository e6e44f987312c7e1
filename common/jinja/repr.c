/* repr.c: str() and repr() of values, and HTML escapes. One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// ---- numbers ------------------------------------------------------------------------------------

// The shortest decimal that reads back as x; an exponent below 1e-4 and from 1e16 on.
void put_float(double x, struct bytes *to)
{
    char text[40];
    int digits = 1;
    if (isnan(x) || isinf(x)) {
        bytes_puts(to, isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
        return;
    }
    do {
        snprintf(text, sizeof text, "%.*e", digits - 1, x);
    } while (strtod(text, NULL) != x && ++digits <= 17);
    int exponent = atoi(strchr(text, 'e') + 1);
    if (exponent >= -4 && exponent < 16) {
        int decimals = digits - 1 - exponent;
        bytes_printf(to, "%.*f", decimals > 1 ? decimals : 1, x);
    } else {
        bytes_puts(to, text); // e-05, e+16: as Python writes them
    }
}

// ---- strings ------------------------------------------------------------------------------------

static void put_repr_char(const struct run *r, const char *s, int n, uint32_t c, char quote,
                          struct bytes *to)
{
    const char *escape = c == '\n' ? "\\n" : c == '\r' ? "\\r" : c == '\t' ? "\\t" : NULL;
    char code[16];
    if (c == '\\' || c == (unsigned char)quote) run_puts(r, to, "\\");
    if (escape) {
        run_puts(r, to, escape);
    } else if (text_is_printable(c)) {
        run_put(r, to, s, (size_t)n);
    } else {
        const char *format = c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x";
        snprintf(code, sizeof code, format, c);
        run_puts(r, to, code);
    }
}

static void put_string_repr(const struct run *r, const struct string *s, struct bytes *to)
{
    bool single = memchr(s->data, '\'', s->n_bytes), both = memchr(s->data, '"', s->n_bytes);
    char quote = single && !both ? '"' : '\'';
    int n;
    if (s->markup) run_puts(r, to, "Markup(");
    run_put(r, to, &quote, 1);
    for (size_t at = 0; at < s->n_bytes; at += (size_t)n) {
        uint32_t c = text_char(s->data + at, s->n_bytes - at, &n);
        put_repr_char(r, s->data + at, n, c, quote, to);
    }
    run_put(r, to, &quote, 1);
    if (s->markup) run_puts(r, to, ")");
}

static void put_escaped(const struct run *r, const struct string *s, struct bytes *to)
{
    static const char *const names[256] = {
        ['&'] = "&amp;", ['<'] = "&lt;", ['>'] = "&gt;", ['"'] = "&#34;", ['\''] = "&#39;"};
    size_t start = 0;
    for (size_t i = 0; i <= s->n_bytes; i++) {
        const char *name = i < s->n_bytes ? names[(unsigned char)s->data[i]] : "";
        if (!name) continue;
        run_put(r, to, s->data + start, i - start);
        run_puts(r, to, name);
        start = i + 1;
    }
}

enum status markup_of(struct run *r, const struct string *s, struct value *ret)
{
    struct string *markup = arena_alloc(&r->arena, sizeof *markup);
    if (!markup) return ST_NO_MEMORY;
    *markup = *s;
    markup->markup = true;
    *ret = value_string(markup);
    return ST_OK;
}

enum status value_escape(struct run *r, const struct value *v, struct value *ret)
{
    struct bytes text = BYTES_INIT;
    struct value plain;
    enum status st = value_str(r, v, &plain);
    if (st != ST_OK) return st;
    *ret = plain;
    if (plain.string->markup) return ST_OK;
    put_escaped(r, plain.string, &text);
    CHECK(run_take(r, ST_OK, &text, &plain));
    st = markup_of(r, plain.string, ret);
out:
    return st;
}

// ---- containers ---------------------------------------------------------------------------------

static enum status put_items(struct run *r, struct list items, const char *open, const char *close,
                             struct bytes *to)
{
    enum status st = ST_OK;
    run_puts(r, to, open);
    for (size_t i = 0; st == ST_OK && i < items.n; i++) {
        if (i > 0) run_puts(r, to, ", ");
        st = put_repr(r, &items.items[i], to);
    }
    run_puts(r, to, close);
    return st;
}

static enum status put_dict(struct run *r, const struct dict *d, struct bytes *to)
{
    enum status st = ST_OK;
    run_puts(r, to, "{");
    for (size_t i = 0; st == ST_OK && i < d->n; i++) {
        if (i > 0) run_puts(r, to, ", ");
        CHECK(put_repr(r, &d->entries[i].key, to));
        run_puts(r, to, ": ");
        CHECK(put_repr(r, &d->entries[i].value, to));
    }
    run_puts(r, to, "}");
out:
    return st;
}

static enum status put_view(struct run *r, const struct value *v, struct bytes *to)
{
    struct list items;
    enum status st = value_items(r, v, &items);
    run_puts(r, to, value_type(v));
    return st == ST_OK ? put_items(r, items, "([", "])", to) : st;
}

static void put_range(const struct range *range, struct bytes *to)
{
    bytes_printf(to, "range(%lld, %lld", (long long)range->start, (long long)range->stop);
    if (range->step != 1) bytes_printf(to, ", %lld", (long long)range->step);
    bytes_puts(to, ")");
}

static enum status put_loop(struct run *r, struct loop *loop, struct bytes *to)
{
    int64_t length;
    enum status st = loop_length(r, loop, &length);
    bytes_printf(to, "<LoopContext %lld/%lld>", (long long)loop_index(loop), (long long)length);
    return st;
}

static void put_macro(const struct run *r, const struct macro *macro, struct bytes *to)
{
    bool named = macro->node->kind == N_MACRO;
    run_puts(r, to, named ? "<Macro '" : "<Macro anonymous");
    if (named) run_put(r, to, macro->node->value.string->data, macro->node->value.string->n_bytes);
    run_puts(r, to, named ? "'>" : ">");
}

// Numbers and names of objects; false: it is something else.
static bool put_plain(const struct value *v, struct bytes *to)
{
    switch (v->kind) {
    case V_NONE:
        bytes_puts(to, "None");
        return true;
    case V_BOOL:
        bytes_puts(to, v->truth ? "True" : "False");
        return true;
    case V_INT:
        bytes_printf(to, "%lld", (long long)v->integer);
        return true;
    case V_FLOAT:
        put_float(v->real, to);
        return true;
    case V_RANGE:
        put_range(v->range, to);
        return true;
    case V_ITERATOR:
    case V_FUNCTION:
    case V_METHOD:
    case V_CYCLER:
    case V_JOINER:
        bytes_printf(to, "<%s object>", value_type(v));
        return true;
    default:
        return false;
    }
}

enum status put_repr(struct run *r, const struct value *v, struct bytes *to)
{
    enum status st;
    CHECK(run_deeper(r));
    if (v->kind == V_UNDEFINED || v->kind == V_MISSING) {
        run_puts(r, to, "Undefined");
    } else if (v->kind == V_STRING) {
        CHECK(run_steps(r, v->string->n_bytes >> 4));
        put_string_repr(r, v->string, to);
    } else if (v->kind == V_LIST) {
        st = put_items(r, *v->list, "[", "]", to);
    } else if (v->kind == V_TUPLE) {
        st = put_items(r, *v->list, "(", v->list->n == 1 ? ",)" : ")", to);
    } else if (v->kind == V_DICT) {
        st = put_dict(r, v->dict, to);
    } else if (v->kind == V_NAMESPACE) {
        run_puts(r, to, "<Namespace ");
        st = put_dict(r, v->dict, to);
        run_puts(r, to, ">");
    } else if (v->kind == V_VIEW) {
        st = put_view(r, v, to);
    } else if (v->kind == V_LOOP) {
        st = put_loop(r, v->loop, to);
    } else if (v->kind == V_MACRO) {
        put_macro(r, v->macro, to);
    } else {
        put_plain(v, to);
    }
    if (to->failed && st == ST_OK)
        st = status_fail(ST_NO_MEMORY, "a text grows beyond %zu MiB, which is the limit",
                         r->arena.limit >> 20);
    r->depth--;
out:
    return st;
}

enum status put_str(struct run *r, const struct value *v, struct bytes *to)
{
    if (v->kind == V_STRING) {
        run_put(r, to, v->string->data, v->string->n_bytes);
        return ST_OK;
    }
    return v->kind == V_UNDEFINED ? ST_OK : put_repr(r, v, to);
}

enum status value_str(struct run *r, const struct value *v, struct value *ret)
{
    struct bytes text = BYTES_INIT;
    if (v->kind == V_STRING) {
        *ret = *v;
        return ST_OK;
    }
    return run_take(r, put_str(r, v, &text), &text, ret);
}
