/* format.c: values as text: Python's str() and repr(), its json.dumps and its formats, "..." %
 * values and "...".format(values), and HTML escapes. One thread. */
#include "common/text/jinja/run.h"
#include "common/text/jinja/text.h"
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// The shortest decimal that reads back as x; an exponent below 1e-4 and from 1e16 on.
static void put_float(struct run *r, double x, bool json)
{
    static const char *const names[][3] = {{"nan", "inf", "-inf"},
                                           {"NaN", "Infinity", "-Infinity"}};
    char text[40];
    int digits = 1;
    if (!isfinite(x)) {
        run_puts(r, names[json][isnan(x) ? 0 : x > 0 ? 1 : 2]);
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
    if (quoted && key.kind != V_NONE && !of_kinds(key, NUMBERS))
        fail(w->run, "keys must be str, int, float, bool or None, not %s", value_type(key));
    run_puts(w->run, quoted ? "\"" : "");
    put_value(w, key);
    run_puts(w->run, quoted ? "\"" : "");
    run_put_string(w->run, w->style->key_separator);
}

// What a list or a dict has, between brackets.
static void put_items(struct writer *w, const char *open, struct value v, const char *close)
{
    bool is_dict = !of_kinds(v, LISTS);
    struct dict d = is_dict ? *v.dict : (struct dict){.n = v.list->n};
    if (is_dict && w->style->sort_keys) {
        d.entries = arena_array(&w->run->arena, d.n, sizeof *d.entries);
        if (d.n > 0) memcpy(d.entries, v.dict->entries, d.n * sizeof *d.entries);
        entries_sort(w->run, &d, false);
    }
    run_puts(w->run, open);
    w->level++;
    for (size_t i = 0; i < d.n; i++) {
        if (i > 0) run_put_string(w->run, w->style->item_separator);
        new_line(w);
        if (is_dict) put_key(w, d.entries[i].key);
        put_value(w, is_dict ? d.entries[i].value : v.list->items[i]);
    }
    w->level--;
    if (d.n > 0) new_line(w);
    run_puts(w->run, close);
}

// What JSON has no way to write.
static void put_object(struct writer *w, struct value v)
{
    struct run *r = w->run;
    if (w->style->json) fail(r, "Object of type %s is not JSON serializable", value_type(v));
    if (v.kind == V_MISSING || v.kind == V_UNDEFINED) {
        run_puts(r, "Undefined");
    } else if (v.kind == V_NAMESPACE) {
        run_puts(r, "<Namespace ");
        put_items(w, "{", v, "}");
        run_puts(r, ">");
    } else if (v.kind == V_RANGE) {
        const int64_t *range = v.list->range;
        run_printf(r, "range(%lld, %lld", (long long)range[0], (long long)range[1]);
        if (range[2] != 1) run_printf(r, ", %lld", (long long)range[2]);
        run_puts(r, ")");
    } else if (of_kinds(v, LISTS)) {
        run_puts(r, value_type(v));
        put_items(w, "([", v, "])");
    } else if (v.kind == V_LOOP) {
        int64_t length = loop_length(v.loop);
        run_printf(r, "<LoopContext %lld/%lld>", (long long)v.loop->index0 + 1, (long long)length);
    } else if (v.kind == V_MACRO && v.macro->node->kind == N_MACRO) {
        run_puts(r, "<Macro '");
        run_put_string(r, v.macro->node->value.string);
        run_puts(r, "'>");
    } else if (v.kind == V_MACRO) {
        run_puts(r, "<Macro anonymous>");
    } else {
        run_printf(r, "<%s object>", value_type(v));
    }
}

static void put_value(struct writer *w, struct value v)
{
    struct run *r = w->run;
    bool json = w->style->json;
    run_deeper(r);
    if (v.kind == V_NONE)
        run_puts(r, json ? "null" : "None");
    else if (v.kind == V_BOOL && json)
        run_puts(r, v.truth ? "true" : "false");
    else if (v.kind == V_BOOL)
        run_puts(r, v.truth ? "True" : "False");
    else if (v.kind == V_INT)
        run_printf(r, "%lld", (long long)v.integer);
    else if (v.kind == V_FLOAT)
        put_float(r, v.real, json);
    else if (v.kind == V_STRING && json)
        put_json_string(r, v.string, w->style->ensure_ascii);
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

static const struct string comma = {", ", 2, 2, false}, colon = {": ", 2, 2, false};

BUILTIN(tojson)
{
    static const struct string bare = {",", 1, 1, false}, blank = {" ", 1, 1, false};
    struct style style = {.json = true,
                          .ensure_ascii = arg_truth(c, 1, false),
                          .sort_keys = arg_truth(c, 4, false),
                          .lines = arg_given(c, 2),
                          .item_separator = arg_given(c, 2) ? &bare : &comma,
                          .key_separator = &colon};
    if (style.lines && c->v[2].kind == V_STRING) {
        style.indent = c->v[2].string;
    } else if (style.lines) {
        int64_t width = arg_int(c, 2, 0);
        if (width > 1000) fail(r, "an indent of more than 1000 is refused");
        style.indent = value_repeat(r, value_string(&blank), width).string;
    }
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

static void put_repr(struct run *r, struct value v)
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

static struct value value_repr(struct run *r, struct value v)
{
    size_t text = text_begin(r);
    put_repr(r, v);
    return text_end(r, text, false);
}

// ---- a field of a format, which both kinds come down to -----------------------------------------

#define MAX_PRECISION 300
#define MAX_WIDTH     100000000

struct field {
    char fill[4];
    int n_fill;     // 0: a blank
    char align;     // < > ^ =
    char sign;      // + - or blank; 0: -
    bool alternate; // #
    char group;     // , or _; 0: none
    int64_t width;
    int precision; // -1: none
    char type;     // 0: by the value's type
};

// `lead` bytes of text (a sign, "0x") stay in front where the padding goes behind them ('=').
static void put_aligned(struct run *r, const struct field *f, const char *text, size_t len,
                        size_t lead)
{
    const char align = f->align, *fill = f->n_fill ? f->fill : " ";
    const size_t n_fill = f->n_fill ? (size_t)f->n_fill : 1;
    int64_t pad = f->width - (int64_t)utf8_count(text, len);
    if (pad < 0) pad = 0;
    int64_t left = align == '>' ? pad : align == '^' ? pad / 2 : 0;
    run_fill(r, fill, n_fill, left);
    run_put(r, text, lead);
    if (align == '=') run_fill(r, fill, n_fill, pad);
    run_put(r, text + lead, len - lead);
    if (align != '=') run_fill(r, fill, n_fill, pad - left);
}

static void put_text_field(struct run *r, const struct field *f, const struct string *s)
{
    size_t n = s->n_bytes;
    run_bytes(r, n);
    if (f->precision >= 0 && (size_t)f->precision < s->n_chars)
        n = string_offset(s, (size_t)f->precision);
    put_aligned(r, f, s->data, n, 0);
}

// Digits with sign and prefix, a separator every three of the leading run of digits (four with "_"
// in other bases), then aligned.
static void put_number(struct run *r, const struct field *f, bool negative, const char *prefix,
                       const char *digits)
{
    bool decimal = f->group != '_' || !f->type || !strchr("boxX", f->type);
    size_t n = strspn(digits, decimal ? "0123456789" : "0123456789abcdefABCDEF");
    size_t every = decimal ? 3 : 4, text = text_begin(r);
    if (negative)
        run_puts(r, "-");
    else if (f->sign == '+' || f->sign == ' ')
        run_put(r, &f->sign, 1);
    run_puts(r, prefix);
    size_t lead = text_begin(r) - text;
    for (size_t i = 0; i < n; i++) {
        if (f->group && i > 0 && (n - i) % every == 0) run_put(r, &f->group, 1);
        run_put(r, digits + i, 1);
    }
    run_puts(r, digits + n);
    const struct string *s = text_end(r, text, false).string;
    put_aligned(r, f, s->data, s->n_bytes, lead);
}

static void put_integer_field(struct run *r, const struct field *f, int64_t x)
{
    char digits[80], *at = digits + sizeof digits - 1;
    unsigned base = f->type == 'b' ? 2 : f->type == 'o' ? 8 : (f->type | 0x20) == 'x' ? 16 : 10;
    const char *alphabet = f->type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
    uint64_t remaining = x < 0 ? 0 - (uint64_t)x : (uint64_t)x;
    char prefix[3] = {'0', f->type, 0};
    if (!f->alternate || base == 10) prefix[0] = 0;
    *at = 0;
    do {
        *--at = alphabet[remaining % base];
        remaining /= base;
    } while (remaining > 0);
    for (int n = (int)strlen(at); n < f->precision && at > digits; n++) *--at = '0';
    put_number(r, f, x < 0, prefix, at);
}

static void put_real_field(struct run *r, const struct field *f, double x)
{
    bool percent = f->type == '%', negative = signbit(x) && !isnan(x);
    char format[12], type = percent ? 'f' : f->type == 'n' ? 'g' : f->type;
    double size = percent ? fabs(x) * 100 : fabs(x);
    size_t text = text_begin(r);
    if (isnan(x) || isinf(x)) {
        run_puts(r, isnan(x) ? (isupper(type) ? "NAN" : "nan") : (isupper(type) ? "INF" : "inf"));
    } else if (!type && f->precision < 0) {
        put_float(r, size, false);
    } else {
        snprintf(format, sizeof format, "%%%s.*%c", f->alternate ? "#" : "", type ? type : 'g');
        run_printf(r, format, f->precision < 0 ? 6 : f->precision, size);
        if (!type && !strpbrk(r->text.data + text, ".e")) run_puts(r, ".0");
    }
    if (percent) run_puts(r, "%");
    put_number(r, f, negative, "", text_end(r, text, false).string->data);
}

static void put_character_field(struct run *r, const struct field *f, int64_t code)
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

static void check_precision(struct run *r, int64_t precision)
{
    if (precision > MAX_PRECISION) fail(r, "precision too big (the limit is %d)", MAX_PRECISION);
}

// ---- "..." % values -----------------------------------------------------------------------------

struct percent {
    struct run *run;
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
    struct value key = string_new(&p->run->arena, start, (size_t)(p->at++ - start), false);
    struct value v = dict_find(p->run, p->values.dict, key);
    if (!given(v)) fail(p->run, "KeyError: '%.*s'", SHOWN(key.string));
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
    struct field f = {.align = '>', .precision = -1};
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
    if (read_one(&p->at, p->end, ".")) {
        int64_t precision = read_size(p);
        check_precision(p->run, precision);
        f.precision = precision < 0 ? 0 : (int)precision;
    }
    while (read_one(&p->at, p->end, "hlL")) continue;
    if (p->at == p->end) fail(p->run, "incomplete format");
    f.type = *p->at++;
    return f;
}

static void put_percent_number(struct percent *p, struct field *f, struct value v)
{
    int64_t x;
    if (v.kind == V_UNDEFINED) undefined_fail(p->run, v);
    if (f->align == '=') {
        f->fill[0] = '0';
        f->n_fill = 1;
    }
    if (!of_kinds(v, NUMBERS))
        fail(p->run, "%%%c format: a real number is required, not %s", f->type, value_type(v));
    if (strchr("eEfFgG", f->type)) {
        put_real_field(p->run, f, value_as_double(v));
        return;
    }
    if (!value_as_int(v, &x)) {
        if (!strchr("diu", f->type))
            fail(p->run, "%%%c format: an integer is required, not %s", f->type, value_type(v));
        if (!(fabs(v.real) < 0x1p63)) fail(p->run, "cannot convert this float to integer");
        x = (int64_t)v.real;
    }
    put_integer_field(p->run, f, x);
}

static void put_percent(struct percent *p)
{
    struct run *r = p->run;
    int64_t code;
    struct value v = read_one(&p->at, p->end, "(") ? keyed_value(p) : MISSING;
    struct field f = read_field(p);
    if (f.type == '%') {
        run_puts(r, "%");
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
        put_percent_number(p, &f, v);
    } else if (v.kind == V_STRING && v.string->n_chars == 1) {
        put_text_field(r, &f, v.string);
    } else if (value_as_int(v, &code)) {
        put_character_field(r, &f, code);
    } else {
        fail(r, "%%c requires int or char");
    }
}

struct value format_percent(struct run *r, const struct string *format, struct value values)
{
    struct percent p = {.run = r,
                        .at = format->data,
                        .end = format->data + format->n_bytes,
                        .values = values,
                        .n = values.kind == V_TUPLE ? values.list->n : 1,
                        .markup = format->markup};
    size_t text = text_begin(r);
    run_bytes(r, format->n_bytes);
    while (p.at < p.end) {
        const char *mark = memchr(p.at, '%', (size_t)(p.end - p.at));
        run_put(r, p.at, (size_t)((mark ? mark : p.end) - p.at));
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
    const struct arguments *all = c->all;
    if (all->positional.n > 0 && all->named.n > 0)
        fail(r, "can't handle positional and keyword arguments at the same time");
    struct value values = list_of(&r->arena, V_TUPLE, all->positional);
    if (all->named.n > 0) {
        values = dict_new(&r->arena, 0);
        *values.dict = all->named;
    }
    return format_percent(r, c->v[0].string, values);
}

// ---- "...".format(values) -----------------------------------------------------------------------

struct braces {
    struct run *run;
    const struct arguments *arguments;
    size_t next; // of the fields without a number
    bool by_number;
    bool markup;
};

// ---- [[fill]align][sign][z][#][0][width][group][.precision][type] -------------------------------

static struct field read_spec(struct run *r, const char *at, const char *end)
{
    struct field f = {.precision = -1};
    int first = at < end ? utf8_sequence(at, (size_t)(end - at)) : 0;
    const char *behind = at + (first > 0 ? first : 0);
    f.align = first > 0 ? read_one(&behind, end, "<>=^") : 0;
    if (f.align) {
        memcpy(f.fill, at, (size_t)first);
        f.n_fill = first;
        at = behind;
    } else {
        f.align = read_one(&at, end, "<>=^");
    }
    f.sign = read_one(&at, end, "+- ");
    read_one(&at, end, "z");
    f.alternate = read_one(&at, end, "#");
    if (read_one(&at, end, "0")) {
        if (!f.n_fill) f.fill[0] = '0';
        if (!f.n_fill) f.n_fill = 1;
        if (!f.align) f.align = '=';
    }
    f.width = read_digits(&at, end, MAX_WIDTH - 1);
    f.group = read_one(&at, end, ",_");
    if (read_one(&at, end, ".")) {
        if (at == end || !isdigit((unsigned char)*at))
            fail(r, "Format specifier missing precision");
        f.precision = (int)read_digits(&at, end, MAX_PRECISION);
        check_precision(r, f.precision);
    }
    if (at < end) f.type = *at++;
    if (at < end || (unsigned char)f.type > 0x7f) fail(r, "Invalid format specifier");
    return f;
}

static _Noreturn void bad_code(struct run *r, char type, struct value v)
{
    fail(r, "Unknown format code '%c' for object of type '%s'", type, value_type(v));
}

static void put_braces_text(struct run *r, struct field f, struct value v)
{
    if (f.type && f.type != 's') bad_code(r, f.type, v);
    if (f.align == '=' && f.fill[0] != '0')
        fail(r, "'=' alignment not allowed in string format specifier");
    if (!f.align || f.align == '=') f.align = '<';
    put_text_field(r, &f, v.string);
}

static void put_braces_number(struct run *r, struct field f, struct value v)
{
    int64_t x;
    bool real = f.type && strchr("eEfFgG%", f.type);
    if (!f.align) f.align = f.type == 'c' ? '<' : '>';
    if (real || !value_as_int(v, &x)) {
        if (f.type && !real && f.type != 'n') bad_code(r, f.type, v);
        put_real_field(r, &f, value_as_double(v));
        return;
    }
    if (f.type && !strchr("dboxXcn", f.type)) bad_code(r, f.type, v);
    if (f.precision >= 0) fail(r, "Precision not allowed in integer format specifier");
    if (f.type == 'c')
        put_character_field(r, &f, x);
    else
        put_integer_field(r, &f, x);
}

// ---- name.attribute[key] ------------------------------------------------------------------------

static struct value first_value(struct braces *b, const char *name, size_t n)
{
    const struct arguments *a = b->arguments;
    char *end;
    size_t i = strtoul(name, &end, 10);
    if (n > 0 && (end != name + n || !isdigit((unsigned char)*name))) {
        struct string key = {name, n, n, false};
        struct value v = dict_find(b->run, &a->named, value_string(&key));
        if (given(v)) return v;
        fail(b->run, "KeyError: '%.*s'", SHOWN(&key));
    }
    if (n == 0 ? b->by_number : b->next > 0)
        fail(b->run, "numbered and unnumbered fields are mixed");
    b->by_number = n > 0;
    if (n == 0) i = b->next++;
    if (i >= a->positional.n)
        fail(b->run, "Replacement index %zu out of range for positional args tuple", i);
    return a->positional.items[i];
}

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
        struct value key = string_new(&b->run->arena, name + start, at - start, false);
        if (dot) {
            v = get_attribute(b->run, v, key.string);
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

// ---- the whole ----------------------------------------------------------------------------------

// What stands between a pair of braces.
static void put_field(struct braces *b, const char *s, size_t n)
{
    size_t name = 0;
    char conversion = 0;
    while (name < n && s[name] != ':' && s[name] != '!')
        name += s[name] == '[' ? strcspn(s + name, "]") : 1;
    if (name > n) name = n;
    size_t spec = name;
    if (spec < n && s[spec] == '!') {
        conversion = spec + 1 < n ? s[spec + 1] : 0;
        spec += 2;
    }
    if (spec < n && s[spec] != ':') fail(b->run, "expected ':' after conversion");
    struct value v = field_value(b, s, name);
    if (conversion == 'r' || conversion == 'a')
        v = value_repr(b->run, v);
    else if (conversion == 's')
        v = value_str(b->run, v);
    else if (conversion)
        fail(b->run, "Unknown conversion specifier %c", conversion);
    if (spec + 1 >= n) {
        run_put_string(b->run, (b->markup ? value_escape : value_str)(b->run, v).string);
        return;
    }
    struct field f = read_spec(b->run, s + spec + 1, s + n);
    if (v.kind == V_STRING)
        put_braces_text(b->run, f, v);
    else if (of_kinds(v, NUMBERS))
        put_braces_number(b->run, f, v);
    else
        fail(b->run, "unsupported format string passed to %s.__format__", value_type(v));
}

static struct value format_braces(struct run *r, const struct string *format,
                                  const struct arguments *arguments)
{
    struct braces b = {.run = r, .arguments = arguments, .markup = format->markup};
    const char *s = format->data;
    size_t n = format->n_bytes, text = text_begin(r);
    run_bytes(r, n);
    for (size_t i = 0; i < n; i++) {
        if ((s[i] != '{' && s[i] != '}') || (i + 1 < n && s[i + 1] == s[i])) {
            run_put(r, &s[i], 1);
            i += s[i] == '{' || s[i] == '}';
        } else if (s[i] == '}') {
            fail(r, "Single '}' encountered in format string");
        } else {
            size_t start = ++i;
            for (int open = 1; i < n; i++) { // to its "}", with braces within it in pairs
                open += (s[i] == '{') - (s[i] == '}');
                if (open == 0) break;
            }
            if (i == n) fail(r, "expected '}' before end of string");
            if (memchr(s + start, '{', i - start))
                fail(r, "fields within fields are not supported");
            put_field(&b, s + start, i - start);
        }
    }
    return text_end(r, text, format->markup);
}

BUILTIN(format)
{
    return format_braces(r, c->v[0].string, c->all);
}

BUILTIN(format_map)
{
    if (c->v[1].kind != V_DICT) type_fail(r, "format_map() wants a mapping", c->v[1]);
    struct arguments arguments = {.named.n = 0};
    for (size_t i = 0; i < c->v[1].dict->n; i++) {
        const struct dict_entry *e = &c->v[1].dict->entries[i];
        if (e->key.kind == V_STRING) dict_append(&r->arena, &arguments.named, e->key, e->value);
    }
    return format_braces(r, c->v[0].string, &arguments);
}

const struct builtin format_builtins[] = {
    {FILTER, "tojson", tojson, 0, "ensure_ascii indent separators sort_keys", 0},
    {FILTER, "format", format_filter, 0, "$*", 0},
    {METHOD(V_STRING), "format", format, 0, "*", 0},
    {METHOD(V_STRING), "format_map", format_map, 0, "/mapping", 1},
    {.name = NULL},
};
