/* numbers.c: the operators on numbers, texts and lists, and filters that make and change numbers,
 * with Python's meaning: // and % round towards minus infinity, / gives a float, ** of whole
 * numbers a whole number. Whole numbers have 64 bits; what goes beyond is an error. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/object.h"
#include "common/base/unicode.h"
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static _Noreturn void overflow(struct render *r)
{
    fail(r, "the result does not fit in 64 bits, which is the limit of whole numbers here");
}

// ---- whole numbers ------------------------------------------------------------------------------

static struct value integer_power(struct render *r, int64_t base, int64_t exponent)
{
    int64_t result = 1;
    if (exponent < 0) {
        if (base == 0) fail(r, "0.0 cannot be raised to a negative power");
        return value_float(pow((double)base, (double)exponent));
    }
    while (exponent > 0) {
        if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) overflow(r);
        exponent >>= 1;
        if (exponent > 0 && __builtin_mul_overflow(base, base, &base)) overflow(r);
    }
    return value_int(result);
}

static struct value integer_division(struct render *r, enum token_type op, int64_t a, int64_t b)
{
    if (b == 0) fail(r, op == '/' ? "division by zero" : "integer division or modulo by zero");
    if (op == '/') return value_float((double)a / (double)b);
    if (b == -1 && op == '%') return value_int(0);
    if (b == -1 && a == INT64_MIN) overflow(r);
    int64_t quotient = a / b, remainder = a % b;
    bool down = remainder != 0 && (remainder < 0) != (b < 0);
    return value_int(op == '%' ? remainder + (down ? b : 0) : quotient - down);
}

static struct value on_integers(struct render *r, enum token_type op, int64_t a, int64_t b)
{
    int64_t x = 0;
    if (op == T_POW) return integer_power(r, a, b);
    if (op != '+' && op != '-' && op != '*') return integer_division(r, op, a, b);
    bool over = op == '+'   ? __builtin_add_overflow(a, b, &x)
                : op == '-' ? __builtin_sub_overflow(a, b, &x)
                            : __builtin_mul_overflow(a, b, &x);
    if (over) overflow(r);
    return value_int(x);
}

// ---- floats -------------------------------------------------------------------------------------

static double float_modulo(double a, double b)
{
    double remainder = fmod(a, b);
    if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
    return remainder == 0 ? copysign(0, b) : remainder;
}

static double float_floor_division(double a, double b)
{
    double quotient = (a - float_modulo(a, b)) / b, down = floor(quotient);
    if (quotient == 0) return copysign(0, a / b);
    return quotient - down > 0.5 ? down + 1 : down;
}

static double float_power(struct render *r, double a, double b)
{
    if (a == 0 && b < 0) fail(r, "0.0 cannot be raised to a negative power");
    if (a < 0 && isfinite(b) && b != floor(b))
        fail(r, "a negative number to a broken power is complex, which is not supported");
    double result = pow(a, b);
    if (isinf(result) && isfinite(a) && isfinite(b))
        fail(r, "(34, 'Numerical result out of range')");
    return result;
}

static double on_floats(struct render *r, enum token_type op, double a, double b)
{
    if (b == 0 && (op == '/' || op == '%' || op == T_FLOORDIV))
        fail(r, "float %s",
             op == '/'   ? "division by zero"
             : op == '%' ? "modulo"
                         : "floor division by zero");
    return op == '+'          ? a + b
           : op == '-'        ? a - b
           : op == '*'        ? a * b
           : op == '/'        ? a / b
           : op == T_FLOORDIV ? float_floor_division(a, b)
           : op == '%'        ? float_modulo(a, b)
                              : float_power(r, a, b);
}

// ---- operators ----------------------------------------------------------------------------------

struct value arithmetic(struct render *r, enum token_type op, struct value a, struct value b)
{
    int64_t x, y;
    bool a_int = value_as_int(a, &x), b_int = value_as_int(b, &y);
    if (a_int && b_int) return on_integers(r, op, x, y);
    if (of_kinds(a, NUMBERS) && of_kinds(b, NUMBERS))
        return value_float(on_floats(r, op, value_as_double(a), value_as_double(b)));
    if (op == '%' && a.kind == V_STRING) return format_percent(r, a.string, b);
    if (op == '+' && a.kind == b.kind && of_kinds(a, SEQUENCES)) {
        bool markup = a.kind == V_STRING && (a.string->markup || b.string->markup);
        return markup ? value_concatenate(r, value_escape(r, a), value_escape(r, b))
                      : value_concatenate(r, a, b);
    }
    if (op == '*' && of_kinds(a, SEQUENCES) && b_int) return value_repeat(r, a, y);
    if (op == '*' && of_kinds(b, SEQUENCES) && a_int) return value_repeat(r, b, x);
    if (a.kind == V_UNDEFINED) undefined_fail(r, a);
    if (b.kind == V_UNDEFINED) undefined_fail(r, b);
    if (op == '+' && of_kinds(a, SEQUENCES))
        fail(r, "can only concatenate %s (not \"%s\") to %s", value_type(a), value_type(b),
             value_type(a));
    fail(r, "unsupported operand type(s) for %s: '%s' and '%s'",
         op == T_POW ? "** or pow()" : token_words(op), value_type(a), value_type(b));
}

struct value arithmetic_sign(struct render *r, struct value v, bool minus)
{
    int64_t x;
    if (v.kind == V_UNDEFINED) undefined_fail(r, v);
    if (v.kind == V_FLOAT) return value_float(minus ? -v.real : v.real);
    if (!value_as_int(v, &x))
        fail(r, "bad operand type for unary %s: '%s'", minus ? "-" : "+", value_type(v));
    if (minus && x == INT64_MIN) overflow(r);
    return value_int(minus ? -x : x);
}

// ---- int and float ------------------------------------------------------------------------------

// A number as Python's int() and float() read it: blanks around, "_" between digits. False: it is
// none, or too long for one.
static bool plain_number(struct render *r, const struct string *s, char ret[400])
{
    run_bytes(r, s->n_bytes);
    size_t start = unicode_skip(s->data, 0, s->n_bytes, STR_SPACE), n = 0;
    size_t end = unicode_skip_back(s->data, start, s->n_bytes, STR_SPACE);
    for (size_t i = start; i < end; i++) {
        unsigned char c = (unsigned char)s->data[i];
        bool between = i > start && i + 1 < end && isalnum((unsigned char)s->data[i - 1]) &&
                       isalnum((unsigned char)s->data[i + 1]);
        if (c == '_' && between) continue;
        if (n + 1 == 400 || !c || c == '_' || isspace(c)) return false;
        ret[n++] = (char)c;
    }
    ret[n] = 0;
    return n > 0;
}

static bool parse_float(struct render *r, const struct string *s, double *ret)
{
    char text[400], *end;
    if (!plain_number(r, s, text) || strpbrk(text, "xXpP(")) return false;
    *ret = strtod(text, &end);
    return *end == 0;
}

// ret_over: it is a whole number, but of more than 64 bits.
static bool parse_int(struct render *r, const struct string *s, int64_t base, int64_t *ret,
                      bool *ret_over)
{
    char text[400], *end;
    if ((base != 0 && base < 2) || base > 36 || !plain_number(r, s, text)) return false;
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

// default, base
BUILTIN(integer)
{
    int64_t x, base = 10;
    double real = 0;
    bool over = false;
    if (v->kind == V_UNDEFINED) undefined_fail(r, *v);
    if (value_as_int(*v, &x)) return value_int(x);
    bool has_base = !given(v[2]) || value_as_int(v[2], &base);
    if (v->kind == V_STRING && has_base && parse_int(r, v->string, base, &x, &over) && !over)
        return value_int(x);
    bool is_real =
        v->kind == V_FLOAT || (!over && v->kind == V_STRING && parse_float(r, v->string, &real));
    if (v->kind == V_FLOAT) real = v->real;
    if (over || (is_real && isfinite(real) && !(fabs(real) < 0x1p63)))
        fail(r, "whole numbers beyond 64 bits are not supported");
    if (is_real && isfinite(real)) return value_int((int64_t)real);
    return given(v[1]) ? v[1] : value_int(0);
}

BUILTIN(real)
{
    double x;
    if (v->kind == V_UNDEFINED) undefined_fail(r, *v);
    if (of_kinds(*v, NUMBERS)) return value_float(value_as_double(*v));
    if (v->kind == V_STRING && parse_float(r, v->string, &x)) return value_float(x);
    return given(v[1]) ? v[1] : value_float(0);
}

// ---- filters ------------------------------------------------------------------------------------

BUILTIN(absolute)
{
    if (!of_kinds(*v, NUMBERS)) fail(r, "bad operand type for abs(): '%s'", value_type(*v));
    return arithmetic_sign(r, *v, signbit(value_as_double(*v)));
}

// Python rounds halves to even, and to decimal places by the exact value of the float.
static double round_to(double x, int64_t digits)
{
    char text[640];
    if (!isfinite(x) || digits > 300) return x;
    if (digits < -308) return copysign(0, x);
    if (digits < 0) {
        double scale = pow(10, (double)-digits);
        return nearbyint(x / scale) * scale;
    }
    snprintf(text, sizeof text, "%.*f", (int)digits, x);
    return strtod(text, NULL);
}

BUILTIN(round_number)
{
    int64_t digits = given(v[1]) ? v[1].integer : 0, x;
    run_steps(r, 256); // some 600 digits may be written and read
    bool common = !given(v[2]) || value_is(v[2], "common"), up = value_is(v[2], "ceil");
    if (!common && !up && !value_is(v[2], "floor")) fail(r, "method must be common, ceil or floor");
    if (!of_kinds(*v, NUMBERS)) fail(r, "type %s doesn't define __round__ method", value_type(*v));
    if (!common) {
        double scale = pow(10, (double)digits), scaled = value_as_double(*v) * scale;
        return value_float((up ? ceil(scaled) : floor(scaled)) / scale);
    }
    if (!value_as_int(*v, &x)) return value_float(round_to(v->real, digits));
    return value_int(digits >= 0 ? x : (int64_t)round_to((double)x, digits));
}

BUILTIN(filesizeformat)
{
    static const char units[] = "kMGTPEZY";
    double base = v[1].truth ? 1024 : 1000, unit = base * base, size = 0;
    int i = 0;
    if (v->kind == V_STRING ? !parse_float(r, v->string, &size) : !of_kinds(*v, NUMBERS))
        type_fail(r, "filesizeformat wants a number", *v);
    if (v->kind != V_STRING) size = value_as_double(*v);
    for (; i < 7 && size >= unit; i++) unit *= base;
    if (size == 1)
        put_text(r, "1 Byte");
    else if (size < base)
        put_printf(r, "%.0f Bytes", trunc(size) + 0.0); // no -0
    else
        put_printf(r, "%.1f %c%sB", base * size / unit, v[1].truth && i == 0 ? 'K' : units[i],
                   v[1].truth ? "i" : "");
    return TEXT(false);
}

const struct builtin number_builtins[] = {
    {FILTER, "int", integer, 0, "default base", 0},
    {FILTER, "float", real, 0, "default", 0},
    {FILTER, "abs", absolute, 0, "", 0},
    {FILTER, "round", round_number, 0, "precision# method", 0},
    {FILTER, "filesizeformat", filesizeformat, 0, "binary?", 0},
    {.name = NULL},
};
