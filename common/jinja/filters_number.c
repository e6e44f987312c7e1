/* filters_number.c: filters that make numbers, and change them. One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>

// ---- int and float ------------------------------------------------------------------------------

// A number as Python's int() and float() read it: blanks around, "_" between digits. False: it is
// none, or too long for one.
static bool plain_number(struct run *r, const struct string *s, char ret[400])
{
    run_bytes(r, s->n_bytes);
    size_t start = text_leading_spaces(s->data, s->n_bytes), n = 0;
    size_t end = text_without_trailing_spaces(s->data, s->n_bytes);
    for (size_t i = start; i < end; i++) {
        bool between = i > start && i + 1 < end && isalnum((unsigned char)s->data[i - 1]) &&
                       isalnum((unsigned char)s->data[i + 1]);
        if (s->data[i] == '_' && between) continue;
        if (n + 1 == 400 || !s->data[i] || s->data[i] == '_' || isspace((unsigned char)s->data[i]))
            return false;
        ret[n++] = s->data[i];
    }
    ret[n] = 0;
    return n > 0;
}

static bool parse_float(struct run *r, const struct string *s, double *ret)
{
    char text[400], *end;
    if (!plain_number(r, s, text) || strpbrk(text, "xXpP(")) return false;
    *ret = strtod(text, &end);
    return *end == 0;
}

// ret_over: it is a whole number, but of more than 64 bits.
static bool parse_int(struct run *r, const struct string *s, int64_t base, int64_t *ret,
                      bool *ret_over)
{
    char text[400], *end;
    if (!plain_number(r, s, text)) return false;
    const char *digits = text + (text[0] == '-' || text[0] == '+');
    char letter = digits[0] == '0' ? (char)tolower((unsigned char)digits[1]) : 0;
    int64_t prefix = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 0;
    if (prefix && (base == 0 || base == prefix)) {
        base = prefix;
        digits += 2;
    } else if (base == 0) {
        base = 10;
        if (digits[0] == '0' && strspn(digits, "0") != strlen(digits)) return false;
    }
    if (!isalnum((unsigned char)*digits)) return false;
    errno = 0;
    int64_t x = strtoll(digits, &end, (int)base);
    if (end == digits || *end || (base == 16 && strpbrk(digits, "xX"))) return false;
    *ret_over = errno == ERANGE;
    *ret = text[0] == '-' ? -x : x;
    return true;
}

BUILTIN(integer)
{
    struct value v = c->v[0];
    int64_t base = arg_int(c, 2, 10), x;
    double real;
    bool over = false;
    if (v.kind == V_UNDEFINED) undefined_fail(r, v);
    if (value_as_int(v, &x)) return value_int(x);
    if (v.kind == V_STRING && (base == 0 || (base >= 2 && base <= 36)) &&
        parse_int(r, v.string, base, &x, &over) && !over)
        return value_int(x);
    if (!over && v.kind == V_STRING && parse_float(r, v.string, &real)) v = value_float(real);
    if (over || (v.kind == V_FLOAT && isfinite(v.real) && !(fabs(v.real) < 0x1p63)))
        fail(r, "whole numbers beyond 64 bits are not supported");
    if (v.kind == V_FLOAT && isfinite(v.real)) return value_int((int64_t)v.real);
    return given(c->v[1]) ? c->v[1] : value_int(0);
}

BUILTIN(real)
{
    struct value v = c->v[0];
    double x;
    if (v.kind == V_UNDEFINED) undefined_fail(r, v);
    if (value_is_number(v)) return value_float(value_as_double(v));
    if (v.kind == V_STRING && parse_float(r, v.string, &x)) return value_float(x);
    return given(c->v[1]) ? c->v[1] : value_float(0);
}

// ---- arithmetic ---------------------------------------------------------------------------------

BUILTIN(absolute)
{
    struct value v = c->v[0];
    if (!value_is_number(v)) fail(r, "bad operand type for abs(): '%s'", value_type(v));
    bool negative = value_as_double(v) < 0 || (v.kind == V_FLOAT && signbit(v.real));
    return arithmetic_sign(r, v, negative);
}

BUILTIN(round_number)
{
    struct value v = c->v[0];
    int64_t digits = arg_int(c, 1, 0), x;
    run_steps(r, 256); // some 600 digits may be written and read
    bool common = !given(c->v[2]) || value_is(c->v[2], "common"), up = value_is(c->v[2], "ceil");
    if (!common && !up && !value_is(c->v[2], "floor"))
        fail(r, "method must be common, ceil or floor");
    if (!value_is_number(v)) fail(r, "type %s doesn't define __round__ method", value_type(v));
    if (!common) {
        double scale = pow(10, (double)digits), scaled = value_as_double(v) * scale;
        return value_float((up ? ceil(scaled) : floor(scaled)) / scale);
    }
    if (!value_as_int(v, &x)) return value_float(round_to(v.real, digits));
    return value_int(digits >= 0 ? x : (int64_t)round_to((double)x, digits));
}

BUILTIN(filesizeformat)
{
    static const char units[] = "kMGTPEZY";
    struct value v = c->v[0];
    bool two = arg_truth(c, 1, false);
    double base = two ? 1024 : 1000, unit = base * base, size;
    if (v.kind != V_STRING && !value_is_number(v)) type_fail(r, "filesizeformat wants a number", v);
    if (v.kind != V_STRING)
        size = value_as_double(v);
    else if (!parse_float(r, v.string, &size))
        fail(r, "could not convert string to float");
    if (size == 1) return string_of(&r->arena, "1 Byte");
    size_t text = text_begin(r);
    int i = 0;
    for (; i < 7 && size >= unit; i++) unit *= base;
    if (size < base)
        run_printf(r, "%.0f Bytes", trunc(size) + 0.0); // no -0
    else
        run_printf(r, "%.1f %c%sB", base * size / unit, two && i == 0 ? 'K' : units[i],
                   two ? "i" : "");
    return text_end(r, text, false);
}

const struct builtin number_builtins[] = {
    {FILTER, "int", integer, 0, "default base", 0},
    {FILTER, "float", real, 0, "default", 0},
    {FILTER, "abs", absolute, 0, "", 0},
    {FILTER, "round", round_number, 0, "precision method", 0},
    {FILTER, "filesizeformat", filesizeformat, 0, "binary", 0},
    {.name = NULL},
};
