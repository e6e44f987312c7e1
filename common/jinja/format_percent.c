/* format_percent.c: "..." % values. One thread. */
#include "common/jinja/format.h"
#include <math.h>

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
    struct field f = {.precision = -1};
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

static void put_text(struct percent *p, struct field *f, struct value v)
{
    if (f->align == '=') f->align = 0; // "0" is for numbers
    v = f->type != 's' ? value_repr(p->run, v)
        : p->markup    ? value_escape(p->run, v)
                       : value_str(p->run, v);
    put_text_field(p->run, f, '>', v.string);
}

static void put_number(struct percent *p, struct field *f, struct value v)
{
    int64_t x;
    if (v.kind == V_UNDEFINED) undefined_fail(p->run, v);
    if (f->align == '=') {
        f->fill[0] = '0';
        f->n_fill = 1;
    }
    if (!value_is_number(v))
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

static void put_character(struct percent *p, const struct field *f, struct value v)
{
    int64_t code = 0;
    if (v.kind == V_STRING && v.string->n_chars == 1)
        put_text_field(p->run, f, '>', v.string);
    else if (!value_as_int(v, &code))
        fail(p->run, "%%c requires int or char");
    else
        put_character_field(p->run, f, '>', code);
}

static void put_percent(struct percent *p)
{
    struct value v = read_one(&p->at, p->end, "(") ? keyed_value(p) : MISSING;
    struct field f = read_field(p);
    if (f.type == '%') {
        run_puts(p->run, "%");
        return;
    }
    if (!f.type || !strchr("sradiuoxXeEfFgGc", f.type))
        fail(p->run, "unsupported format character '%c' (0x%x)", f.type, (unsigned char)f.type);
    if (!given(v)) v = next_value(p);
    if (strchr("sra", f.type))
        put_text(p, &f, v);
    else if (f.type == 'c')
        put_character(p, &f, v);
    else
        put_number(p, &f, v);
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
    bool may_remain = p.keyed || values.kind == V_DICT || values.kind == V_LIST ||
                      values.kind == V_UNDEFINED || values.kind == V_RANGE;
    if (p.next < p.n && !may_remain)
        fail(r, "not all arguments converted during string formatting");
    return text_end(r, text, format->markup);
}

BUILTIN(format)
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

const struct builtin percent_builtins[] = {
    {FILTER, "format", format, 0, "$*", 0},
    {.name = NULL},
};
