/* format.c: values as text: Python's str() and repr(), its json.dumps and its formats, "..." %
 * values and "...".format(values), and HTML escapes. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/object.h"
#include "common/base/unicode.h"
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const struct string blank = STRING(" "), zero = STRING("0"), bare_comma = STRING(","),
                           comma = STRING(", "), colon = STRING(": ");

// The shortest decimal that reads back as x; an exponent below 1e-4 and from 1e16 on.
static void put_float(struct render *r, double x, bool json)
{
    static const char *const names[][3] = {{"nan", "inf", "-inf"},
                                           {"NaN", "Infinity", "-Infinity"}};
    char text[40];
    int digits = 1;
    if (!isfinite(x)) {
        put_text(r, names[json][isnan(x) ? 0 : x > 0 ? 1 : 2]);
        return;
    }
    do {
        run_steps(r, 4);
        snprintf(text, sizeof text, "%.*e", digits - 1, x);
    } while (strtod(text, NULL) != x && ++digits <= 17);
    int exponent = atoi(strchr(text, 'e') + 1), decimals = digits - 1 - exponent;
    if (exponent >= -4 && exponent < 16)
        put_printf(r, "%.*f", decimals > 1 ? decimals : 1, x);
    else
        put_text(r, text); // e-05, e+16: as Python writes them
}

// ---- strings ------------------------------------------------------------------------------------

static void put_string_repr(struct render *r, const struct string *s)
{
    bool single = memchr(s->data, '\'', s->n_bytes), both = memchr(s->data, '"', s->n_bytes);
    unsigned char quote = single && !both ? '"' : '\'';
    put_printf(r, "%s%c", s->markup ? "Markup(" : "", quote);
    for (size_t at = 0; at < s->n_bytes;) {
        size_t start = at;
        uint32_t c = utf8_next(s->data, s->n_bytes, &at);
        const char *name = c == '\n' ? "\\n" : c == '\r' ? "\\r" : c == '\t' ? "\\t" : NULL;
        if (c == '\\' || c == quote) put_text(r, "\\");
        if (name)
            put_text(r, name);
        else if (unicode_is(c, STR_PRINTABLE))
            put_bytes(r, s->data + start, at - start);
        else
            put_printf(r, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
    }
    put_printf(r, "%c%s", quote, s->markup ? ")" : "");
}

static void put_json_string(struct render *r, const struct string *s, bool ascii)
{
    static const char from[] = "\"\\\n\r\t\b\f", names[] = "\"\\nrtbf";
    size_t start = 0; // of what stands for itself
    put_text(r, "\"");
    for (size_t at = 0; at < s->n_bytes;) {
        size_t before = at;
        uint32_t c = utf8_next(s->data, s->n_bytes, &at);
        const char *known = c < 0x80 && c != 0 ? strchr(from, (int)c) : NULL;
        if (!known && c >= 0x20 && (!ascii || c < 0x7f)) continue;
        put_bytes(r, s->data + start, before - start);
        start = at;
        if (known)
            put_printf(r, "\\%c", names[known - from]);
        else if (c < 0x10000)
            put_printf(r, "\\u%04x", c);
        else
            put_printf(r, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10),
                       0xdc00 + ((c - 0x10000) & 0x3ff));
    }
    put_bytes(r, s->data + start, s->n_bytes - start);
    put_text(r, "\"");
}

struct value string_as(struct render *r, const struct string *s, bool markup)
{
    run_bytes(r, s->n_bytes);
    return string_new(r, s->data, s->n_bytes, markup);
}

struct value value_escape(struct render *r, struct value v)
{
    static const char *const names[256] = {
        ['&'] = "&amp;", ['<'] = "&lt;", ['>'] = "&gt;", ['"'] = "&#34;", ['\''] = "&#39;"};
    struct value plain = value_str(r, v);
    const struct string *s = plain.string;
    if (s->markup) return plain;
    size_t text = r->text.len, start = 0;
    for (size_t i = 0; i < s->n_bytes; i++) {
        const char *name = names[(unsigned char)s->data[i]];
        if (!name) continue;
        put_bytes(r, s->data + start, i - start);
        put_text(r, name);
        start = i + 1;
    }
    put_bytes(r, s->data + start, s->n_bytes - start);
    return text_end(r, text, true);
}

// ---- any value ----------------------------------------------------------------------------------

// How a text of nested values is written: as repr() does, or as json.dumps.
struct writer {
    struct render *run;
    bool json, ensure_ascii, sort_keys;
    const struct string *item_separator, *key_separator;
    const struct string *indent; // one item a line, behind so many of these; NULL: not
    int level;
};

static void put_value(struct writer *w, struct value v);

static void new_line(struct writer *w)
{
    if (!w->indent) return;
    put_text(w->run, "\n");
    put_fill(w->run, w->indent, w->level);
}

static void put_key(struct writer *w, struct value key)
{
    const char *quote = w->json && key.kind != V_STRING ? "\"" : "";
    if (*quote && key.kind != V_NONE && !of_kinds(key, NUMBERS))
        fail(w->run, "keys must be str, int, float, bool or None, not %s", value_type(key));
    put_text(w->run, quote);
    put_value(w, key);
    put_text(w->run, quote);
    put_string(w->run, w->key_separator);
}

// What a list or a dict has, between brackets.
static void put_items(struct writer *w, const char *open, struct value v, const char *close)
{
    struct render *r = w->run;
    bool is_dict = !of_kinds(v, LISTS);
    struct dict d = is_dict ? *v.dict : (struct dict){.n = v.list->n};
    if (is_dict && w->sort_keys) {
        d.entries = run_alloc(r, d.n, sizeof *d.entries);
        if (d.n > 0) memcpy(d.entries, v.dict->entries, d.n * sizeof *d.entries);
        entries_sort(r, &d, false);
    }
    put_text(r, open);
    w->level++;
    for (size_t i = 0; i < d.n; i++) {
        if (i > 0) put_string(r, w->item_separator);
        new_line(w);
        if (is_dict) put_key(w, d.entries[i].key);
        put_value(w, is_dict ? d.entries[i].value : v.list->items[i]);
    }
    w->level--;
    if (d.n > 0) new_line(w);
    put_text(r, close);
}

// What JSON has no way to write.
static void put_object(struct writer *w, struct value v)
{
    struct render *r = w->run;
    if (w->json) fail(r, "Object of type %s is not JSON serializable", value_type(v));
    if (v.kind == V_MISSING || v.kind == V_UNDEFINED) {
        put_text(r, "Undefined");
    } else if (v.kind == V_NAMESPACE) {
        put_items(w, "<Namespace {", v, "}>");
    } else if (v.kind == V_RANGE) {
        const int64_t *range = v.list->range;
        put_printf(r, "range(%lld, %lld", (long long)range[0], (long long)range[1]);
        if (range[2] != 1) put_printf(r, ", %lld", (long long)range[2]);
        put_text(r, ")");
    } else if (of_kinds(v, LISTS)) {
        put_text(r, value_type(v));
        put_items(w, "([", v, "])");
    } else if (v.kind == V_LOOP) {
        int64_t length = loop_length(v.loop);
        put_printf(r, "<LoopContext %lld/%lld>", (long long)v.loop->index0 + 1, (long long)length);
    } else if (v.kind == V_MACRO && v.macro->node->kind == N_MACRO) {
        put_text(r, "<Macro '");
        put_string(r, v.macro->node->value.string);
        put_text(r, "'>");
    } else {
        put_printf(r, v.kind == V_MACRO ? "<%s anonymous>" : "<%s object>", value_type(v));
    }
}

static void put_value(struct writer *w, struct value v)
{
    struct render *r = w->run;
    bool json = w->json;
    run_deeper(r);
    if (v.kind == V_NONE)
        put_text(r, json ? "null" : "None");
    else if (v.kind == V_BOOL)
        put_text(r, v.truth ? json ? "true" : "True" : json ? "false" : "False");
    else if (v.kind == V_INT)
        put_printf(r, "%lld", (long long)v.integer);
    else if (v.kind == V_FLOAT)
        put_float(r, v.real, json);
    else if (v.kind == V_STRING && json)
        put_json_string(r, v.string, w->ensure_ascii);
    else if (v.kind == V_STRING)
        put_string_repr(r, v.string);
    else if (v.kind == V_LIST || (v.kind == V_TUPLE && json))
        put_items(w, "[", v, "]");
    else if (v.kind == V_TUPLE)
        put_items(w, "(", v, v.list->n == 1 ? ",)" : ")");
    else if (v.kind == V_DICT)
        put_items(w, "{", v, "}");
    else
        put_object(w, v);
    r->depth--;
}

static void put_repr(struct render *r, struct value v)
{
    put_value(&(struct writer){.run = r, .item_separator = &comma, .key_separator = &colon}, v);
}

void put_str(struct render *r, struct value v)
{
    if (v.kind == V_STRING)
        put_string(r, v.string);
    else if (v.kind != V_UNDEFINED)
        put_repr(r, v);
}

struct value value_str(struct render *r, struct value v)
{
    size_t text = r->text.len;
    if (v.kind == V_STRING) return v;
    put_str(r, v);
    return text_end(r, text, false);
}

static struct value value_repr(struct render *r, struct value v)
{
    size_t text = r->text.len;
    put_repr(r, v);
    return text_end(r, text, false);
}

BUILTIN(tojson)
{
    bool lines = given(v[2]) && v[2].kind != V_NONE;
    struct writer w = {.run = r,
                       .json = true,
                       .ensure_ascii = v[1].truth,
                       .sort_keys = v[4].truth,
                       .item_separator = lines ? &bare_comma : &comma,
                       .key_separator = &colon};
    int64_t width = 0;
    if (lines && v[2].kind == V_STRING) {
        w.indent = v[2].string;
    } else if (lines) {
        if (!value_as_int(v[2], &width)) type_fail(r, "indent wants a number or a text", v[2]);
        if (width > 1000) fail(r, "an indent of more than 1000 is refused");
        w.indent = value_repeat(r, value_string(&blank), width).string;
    }
    if (given(v[3]) && v[3].kind != V_NONE) {
        struct list two = value_pair(r, v[3], "separators");
        for (int i = 0; i < 2; i++)
            if (two.items[i].kind != V_STRING)
                type_fail(r, "separators must be texts", two.items[i]);
        w.item_separator = two.items[0].string;
        w.key_separator = two.items[1].string;
    }
    put_value(&w, v[0]);
    return TEXT(false);
}

// ---- a field of a format, which both kinds come down to -----------------------------------------

#define MAX_PRECISION 300
#define MAX_WIDTH     100000000

struct field {
    struct string fill;
    char align;     // < > ^ =; 0: by the value's type
    char sign;      // + - or blank; 0: -
    bool alternate; // #
    char group;     // , or _; 0: none
    int64_t width;
    int precision; // -1: none
    char type;     // 0: by the value's type
};

// `lead` bytes of text (a sign, "0x") stay in front where the padding goes behind them ('=').
static void put_aligned(struct render *r, const struct field *f, const char *text, size_t len,
                        size_t lead)
{
    int64_t pad = f->width - (int64_t)utf8_count(text, len);
    if (pad < 0) pad = 0;
    int64_t left = f->align == '>' ? pad : f->align == '^' ? pad / 2 : 0;
    put_fill(r, &f->fill, left);
    put_bytes(r, text, lead);
    if (f->align == '=') put_fill(r, &f->fill, pad);
    put_bytes(r, text + lead, len - lead);
    if (f->align != '=') put_fill(r, &f->fill, pad - left);
}

static void put_text_field(struct render *r, const struct field *f, const struct string *s)
{
    size_t n = s->n_bytes;
    run_bytes(r, n);
    if (f->precision >= 0 && (size_t)f->precision < s->n_chars)
        n = string_offset(s, (size_t)f->precision);
    put_aligned(r, f, s->data, n, 0);
}

// Digits with sign and prefix, a separator every three of the leading run of digits (four with "_"
// in other bases), then aligned.
static void put_number(struct render *r, const struct field *f, bool negative, const char *prefix,
                       const char *digits)
{
    bool decimal = f->group != '_' || !f->type || !strchr("boxX", f->type);
    size_t n = strspn(digits, decimal ? "0123456789" : "0123456789abcdefABCDEF");
    size_t every = decimal ? 3 : 4, text = r->text.len;
    if (negative)
        put_text(r, "-");
    else if (f->sign == '+' || f->sign == ' ')
        put_bytes(r, &f->sign, 1);
    put_text(r, prefix);
    size_t lead = r->text.len - text;
    for (size_t i = 0; i < n; i++) {
        if (f->group && i > 0 && (n - i) % every == 0) put_bytes(r, &f->group, 1);
        put_bytes(r, digits + i, 1);
    }
    put_text(r, digits + n);
    const struct string *s = text_end(r, text, false).string;
    put_aligned(r, f, s->data, s->n_bytes, lead);
}

static void put_integer_field(struct render *r, const struct field *f, int64_t x)
{
    char digits[80], *at = digits + sizeof digits - 1, prefix[3] = {'0', f->type, 0};
    unsigned base = f->type == 'b' ? 2 : f->type == 'o' ? 8 : (f->type | 0x20) == 'x' ? 16 : 10;
    const char *alphabet = f->type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
    *at = 0;
    for (uint64_t n = x < 0 ? 0 - (uint64_t)x : (uint64_t)x; n > 0; n /= base)
        *--at = alphabet[n % base];
    for (int n = (int)strlen(at); n < (f->precision > 1 ? f->precision : 1) && at > digits; n++)
        *--at = '0';
    put_number(r, f, x < 0, f->alternate && base != 10 ? prefix : "", at);
}

static void put_real_field(struct render *r, const struct field *f, double x)
{
    bool percent = f->type == '%', negative = signbit(x) && !isnan(x);
    char format[12], type = percent ? 'f' : f->type == 'n' ? 'g' : f->type;
    double size = percent ? fabs(x) * 100 : fabs(x);
    size_t text = r->text.len;
    if (!isfinite(x)) {
        put_text(r, isupper(type) ? isnan(x) ? "NAN" : "INF" : isnan(x) ? "nan" : "inf");
    } else if (!type && f->precision < 0) {
        put_float(r, size, false);
    } else {
        snprintf(format, sizeof format, "%%%s.*%c", f->alternate ? "#" : "", type ? type : 'g');
        put_printf(r, format, f->precision < 0 ? 6 : f->precision, size);
        if (!type && !strpbrk(r->text.data + text, ".e")) put_text(r, ".0");
    }
    if (percent) put_text(r, "%");
    put_number(r, f, negative, "", text_end(r, text, false).string->data);
}

static void put_character_field(struct render *r, const struct field *f, int64_t code)
{
    char encoded[4];
    if (code < 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        fail(r, "%%c arg not in range(0x110000)");
    int n = utf8_encode((uint32_t)code, encoded);
    put_aligned(r, f, encoded, (size_t)n, 0);
}

static char read_one(const char **at, const char *end, const char *set)
{
    return *at < end && **at && strchr(set, **at) ? *(*at)++ : 0;
}

static int64_t read_digits(const char **at, const char *end, int64_t max)
{
    int64_t x = 0;
    for (; *at < end && isdigit((unsigned char)**at); ++*at)
        if (x <= max) x = x * 10 + (**at - '0');
    return x;
}

static int checked_precision(struct render *r, int64_t precision)
{
    if (precision > MAX_PRECISION) fail(r, "precision too big (the limit is %d)", MAX_PRECISION);
    return precision < 0 ? 0 : (int)precision;
}

// ---- "..." % values -----------------------------------------------------------------------------

struct percent {
    struct render *run;
    const char *at, *end;
    struct value values;
    size_t n, next; // of a tuple; anything else is one
    bool markup, keyed;
};

static struct value next_value(struct percent *p)
{
    if (p->next >= p->n) fail(p->run, "not enough arguments for format string");
    size_t i = p->next++;
    return p->values.kind == V_TUPLE ? p->values.list->items[i] : p->values;
}

static struct value keyed_value(struct percent *p)
{
    const char *start = p->at;
    for (int open = 1; p->at < p->end; p->at++) {
        open += (*p->at == '(') - (*p->at == ')');
        if (open == 0) break;
    }
    if (p->at == p->end) fail(p->run, "incomplete format key");
    if (p->values.kind != V_DICT) fail(p->run, "format requires a mapping");
    p->keyed = true;
    struct value key = string_new(p->run, start, (size_t)(p->at++ - start), false);
    struct value v = dict_find(p->run, p->values.dict, key);
    if (!given(v)) fail(p->run, "KeyError: '%s'", SHOWN(key.string));
    return v;
}

// A number, or "*": the next value.
static int64_t read_size(struct percent *p)
{
    int64_t x;
    if (!read_one(&p->at, p->end, "*")) return read_digits(&p->at, p->end, MAX_WIDTH - 1);
    if (!value_as_int(next_value(p), &x)) fail(p->run, "* wants int");
    return x;
}

static struct field read_field(struct percent *p)
{
    struct field f = {.fill = blank, .align = '>', .precision = -1};
    for (char flag; (flag = read_one(&p->at, p->end, "-+ #0"));) {
        if (flag == '-') f.align = '<';
        if (flag == '+' || (flag == ' ' && f.sign != '+')) f.sign = flag;
        if (flag == '#') f.alternate = true;
        if (flag == '0' && f.align != '<') f.align = '=';
    }
    f.width = read_size(p);
    if (f.width < 0) {
        f.align = '<';
        f.width = f.width < -MAX_WIDTH ? MAX_WIDTH : -f.width;
    }
    if (read_one(&p->at, p->end, ".")) f.precision = checked_precision(p->run, read_size(p));
    while (read_one(&p->at, p->end, "hlL")) continue;
    if (p->at == p->end) fail(p->run, "incomplete format");
    f.type = *p->at++;
    return f;
}

static void put_percent_number(struct render *r, struct field *f, struct value v)
{
    int64_t x;
    if (v.kind == V_UNDEFINED) undefined_fail(r, v);
    if (f->align == '=') f->fill = zero;
    if (!of_kinds(v, NUMBERS))
        fail(r, "%%%c format: a real number is required, not %s", f->type, value_type(v));
    if (strchr("eEfFgG", f->type)) {
        put_real_field(r, f, value_as_double(v));
        return;
    }
    if (!value_as_int(v, &x)) {
        if (!strchr("diu", f->type))
            fail(r, "%%%c format: an integer is required, not %s", f->type, value_type(v));
        if (!(fabs(v.real) < 0x1p63)) fail(r, "cannot convert this float to integer");
        x = (int64_t)v.real;
    }
    put_integer_field(r, f, x);
}

static void put_percent(struct percent *p)
{
    struct render *r = p->run;
    int64_t code;
    struct value v = read_one(&p->at, p->end, "(") ? keyed_value(p) : MISSING;
    struct field f = read_field(p);
    if (f.type == '%') {
        put_text(r, "%");
        return;
    }
    if (!f.type || !strchr("sradiuoxXeEfFgGc", f.type))
        fail(r, "unsupported format character '%c' (0x%x)", f.type, (unsigned char)f.type);
    if (!given(v)) v = next_value(p);
    if (strchr("sra", f.type)) {
        if (f.align == '=') f.align = '>'; // "0" is for numbers
        v = f.type != 's' ? value_repr(r, v) : p->markup ? value_escape(r, v) : value_str(r, v);
        put_text_field(r, &f, v.string);
    } else if (f.type != 'c') {
        put_percent_number(r, &f, v);
    } else if (v.kind == V_STRING && v.string->n_chars == 1) {
        put_text_field(r, &f, v.string);
    } else if (value_as_int(v, &code)) {
        put_character_field(r, &f, code);
    } else {
        fail(r, "%%c requires int or char");
    }
}

struct value format_percent(struct render *r, const struct string *format, struct value values)
{
    struct percent p = {.run = r,
                        .at = format->data,
                        .end = format->data + format->n_bytes,
                        .values = values,
                        .n = values.kind == V_TUPLE ? values.list->n : 1,
                        .markup = format->markup};
    size_t text = r->text.len;
    while (p.at < p.end) {
        const char *mark = memchr(p.at, '%', (size_t)(p.end - p.at));
        put_bytes(r, p.at, (size_t)((mark ? mark : p.end) - p.at));
        p.at = mark ? mark + 1 : p.end;
        if (mark) put_percent(&p);
        run_steps(r, 1);
    }
    bool may_remain = p.keyed || of_kinds(values, KIND(V_DICT) | KIND(V_LIST) | KIND(V_UNDEFINED) |
                                                      KIND(V_RANGE));
    if (p.next < p.n && !may_remain)
        fail(r, "not all arguments converted during string formatting");
    return text_end(r, text, format->markup);
}

BUILTIN(format_filter)
{
    struct value values = list_of(r, V_TUPLE, c->all->positional);
    if (c->all->positional.n > 0 && c->all->named.n > 0)
        fail(r, "can't handle positional and keyword arguments at the same time");
    if (c->all->named.n > 0) {
        values = dict_new(r, 0);
        *values.dict = c->all->named;
    }
    return format_percent(r, v[0].string, values);
}

// ---- "...".format(values) -----------------------------------------------------------------------

struct braces {
    struct render *run;
    struct list positional;
    const struct dict *named;
    size_t next; // of the fields without a number
    bool by_number;
    bool markup;
};

// [[fill]align][sign][z][#][0][width][group][.precision][type]
static struct field read_spec(struct render *r, const char *at, const char *end)
{
    struct field f = {.fill = blank, .precision = -1};
    int first = at < end ? utf8_sequence(at, (size_t)(end - at)) : 0;
    const char *behind = at + (first > 0 ? first : 0);
    if (first > 0 && (f.align = read_one(&behind, end, "<>=^"))) {
        f.fill = (struct string){at, (size_t)first, 1, false};
        at = behind;
    } else {
        f.align = read_one(&at, end, "<>=^");
    }
    f.sign = read_one(&at, end, "+- ");
    read_one(&at, end, "z");
    f.alternate = read_one(&at, end, "#");
    if (read_one(&at, end, "0")) {
        if (f.fill.data == blank.data) f.fill = zero;
        if (!f.align) f.align = '=';
    }
    f.width = read_digits(&at, end, MAX_WIDTH - 1);
    f.group = read_one(&at, end, ",_");
    if (read_one(&at, end, ".")) {
        if (at == end || !isdigit((unsigned char)*at))
            fail(r, "Format specifier missing precision");
        f.precision = checked_precision(r, read_digits(&at, end, MAX_PRECISION));
    }
    if (at < end) f.type = *at++;
    if (at < end || (unsigned char)f.type > 0x7f) fail(r, "Invalid format specifier");
    return f;
}

static void put_braces_field(struct render *r, struct field f, struct value v)
{
    int64_t x = 0;
    bool text = v.kind == V_STRING, integer = value_as_int(v, &x);
    if (!text && !of_kinds(v, NUMBERS))
        fail(r, "unsupported format string passed to %s.__format__", value_type(v));
    if (!f.align) f.align = text || f.type == 'c' ? '<' : '>';
    if (f.type && !strchr(text ? "s" : integer ? "dboxXcneEfFgG%" : "eEfFgG%n", f.type))
        fail(r, "Unknown format code '%c' for object of type '%s'", f.type, value_type(v));
    bool real = !text && (!integer || (f.type && strchr("eEfFgG%", f.type)));
    if (integer && !real && f.precision >= 0)
        fail(r, "Precision not allowed in integer format specifier");
    if (text && f.align == '=' && f.fill.data[0] != '0')
        fail(r, "'=' alignment not allowed in string format specifier");
    if (text && f.align == '=') f.align = '<';
    if (text)
        put_text_field(r, &f, v.string);
    else if (real)
        put_real_field(r, &f, value_as_double(v));
    else if (f.type == 'c')
        put_character_field(r, &f, x);
    else
        put_integer_field(r, &f, x);
}

static struct value first_value(struct braces *b, const char *name, size_t n)
{
    char *end;
    size_t i = strtoul(name, &end, 10);
    if (n > 0 && (end != name + n || !isdigit((unsigned char)*name))) {
        struct value key = string_new(b->run, name, n, false);
        struct value v = dict_find(b->run, b->named, key);
        if (given(v)) return v;
        fail(b->run, "KeyError: '%s'", SHOWN(key.string));
    }
    if (n == 0 ? b->by_number : b->next > 0)
        fail(b->run, "numbered and unnumbered fields are mixed");
    b->by_number = n > 0;
    if (n == 0) i = b->next++;
    if (i >= b->positional.n)
        fail(b->run, "Replacement index %zu out of range for positional args tuple", i);
    return b->positional.items[i];
}

// name.attribute[key]
static struct value field_value(struct braces *b, const char *name, size_t n)
{
    size_t at = 0;
    while (at < n && name[at] != '.' && name[at] != '[') at++;
    struct value v = first_value(b, name, at);
    while (at < n) {
        bool dot = name[at++] == '.';
        size_t start = at;
        while (at < n && (dot ? name[at] != '.' && name[at] != '[' : name[at] != ']')) at++;
        if (!dot && at == n) fail(b->run, "Missing ']' in format string");
        struct value key = string_new(b->run, name + start, at - start, false);
        if (dot) {
            v = get_attribute(b->run, v, key);
            continue;
        }
        char *end;
        long number = strtol(name + start, &end, 10);
        if (end == name + at && at > start) key = value_int(number);
        v = get_item(b->run, v, key);
        at++; // "]"
    }
    return v;
}

// What stands between a pair of braces.
static void put_field(struct braces *b, const char *s, size_t n)
{
    struct render *r = b->run;
    size_t name = 0;
    while (name < n && s[name] != ':' && s[name] != '!')
        name += s[name] == '[' ? strcspn(s + name, "]") : 1;
    if (name > n) name = n;
    bool converted = name < n && s[name] == '!';
    char conversion = converted && name + 1 < n ? s[name + 1] : 0;
    size_t spec = name + (converted ? 2 : 0);
    if (spec < n && s[spec] != ':') fail(r, "expected ':' after conversion");
    struct value v = field_value(b, s, name);
    if (conversion == 'r' || conversion == 'a')
        v = value_repr(r, v);
    else if (conversion == 's')
        v = value_str(r, v);
    else if (conversion)
        fail(r, "Unknown conversion specifier %c", conversion);
    if (spec + 1 < n)
        put_braces_field(r, read_spec(r, s + spec + 1, s + n), v);
    else
        put_string(r, (b->markup ? value_escape : value_str)(r, v).string);
}

static struct value format_braces(struct render *r, const struct string *format,
                                  struct list positional, const struct dict *named)
{
    struct braces b = {r, positional, named, .markup = format->markup};
    const char *s = format->data;
    size_t n = format->n_bytes;
    for (size_t i = 0; i < n; i++) {
        if ((s[i] != '{' && s[i] != '}') || (i + 1 < n && s[i + 1] == s[i])) {
            put_bytes(r, &s[i], 1);
            i += s[i] == '{' || s[i] == '}';
            continue;
        }
        if (s[i] == '}') fail(r, "Single '}' encountered in format string");
        size_t start = ++i;
        for (int open = 1; i < n; i++) { // to its "}", with braces within it in pairs
            open += (s[i] == '{') - (s[i] == '}');
            if (open == 0) break;
        }
        if (i == n) fail(r, "expected '}' before end of string");
        if (memchr(s + start, '{', i - start)) fail(r, "fields within fields are not supported");
        put_field(&b, s + start, i - start);
    }
    return TEXT(format->markup);
}

BUILTIN(format)
{
    return format_braces(r, v[0].string, c->all->positional, &c->all->named);
}

BUILTIN(format_map)
{
    if (v[1].kind != V_DICT) type_fail(r, "format_map() wants a mapping", v[1]);
    return format_braces(r, v[0].string, LIST(NULL, 0), v[1].dict);
}

const struct builtin format_builtins[] = {
    {FILTER, "tojson", tojson, 0, "ensure_ascii? indent separators sort_keys?", 0},
    {FILTER, "format", format_filter, 0, "$*", 0},
    {METHOD(V_STRING), "format", format, 0, "*", 0},
    {METHOD(V_STRING), "format_map", format_map, 0, "/mapping", 1},
    {.name = NULL},
};
