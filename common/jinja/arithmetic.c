/* arithmetic.c: the operators on numbers, texts and lists, with Python's meaning: // and % round
 * towards minus infinity, / gives a float, ** of whole numbers a whole number. Whole numbers have
 * 64 bits; what goes beyond is an error. One thread. */
#include "common/jinja/run.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static _Noreturn void no_operator(struct run *r, int op, struct value a, struct value b)
{
    if (a.kind == V_UNDEFINED) undefined_fail(r, a);
    if (b.kind == V_UNDEFINED) undefined_fail(r, b);
    if (op == T_ADD && a.kind == V_STRING)
        fail(r, "can only concatenate str (not \"%s\") to str", value_type(b));
    if (op == T_ADD && (a.kind == V_LIST || a.kind == V_TUPLE))
        fail(r, "can only concatenate %s (not \"%s\") to %s", value_type(a), value_type(b),
             value_type(a));
    fail(r, "unsupported operand type(s) for %s: '%s' and '%s'",
         op == T_POW ? "** or pow()" : token_words((enum token_type)op), value_type(a),
         value_type(b));
}

static _Noreturn void overflow(struct run *r)
{
    fail(r, "the result does not fit in 64 bits, which is the limit of whole numbers here");
}

// ---- whole numbers ------------------------------------------------------------------------------

static struct value integer_power(struct run *r, int64_t base, int64_t exponent)
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

static struct value integer_division(struct run *r, int op, int64_t a, int64_t b)
{
    if (b == 0) fail(r, op == T_DIV ? "division by zero" : "integer division or modulo by zero");
    if (op == T_DIV) return value_float((double)a / (double)b);
    if (b == -1 && op == T_MOD) return value_int(0);
    if (b == -1 && a == INT64_MIN) overflow(r);
    int64_t quotient = a / b, remainder = a % b;
    if (remainder != 0 && (remainder < 0) != (b < 0)) {
        quotient--;
        remainder += b;
    }
    return value_int(op == T_MOD ? remainder : quotient);
}

static struct value on_integers(struct run *r, int op, int64_t a, int64_t b)
{
    int64_t x = 0;
    bool over = false;
    if (op == T_ADD)
        over = __builtin_add_overflow(a, b, &x);
    else if (op == T_SUB)
        over = __builtin_sub_overflow(a, b, &x);
    else if (op == T_MUL)
        over = __builtin_mul_overflow(a, b, &x);
    else
        return op == T_POW ? integer_power(r, a, b) : integer_division(r, op, a, b);
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

static double float_power(struct run *r, double a, double b)
{
    if (a == 0 && b < 0) fail(r, "0.0 cannot be raised to a negative power");
    if (a < 0 && isfinite(b) && b != floor(b))
        fail(r, "a negative number to a broken power is complex, which is not supported");
    double result = pow(a, b);
    if (isinf(result) && isfinite(a) && isfinite(b))
        fail(r, "(34, 'Numerical result out of range')");
    return result;
}

static double on_floats(struct run *r, int op, double a, double b)
{
    if (b == 0 && op == T_DIV) fail(r, "float division by zero");
    if (b == 0 && op == T_MOD) fail(r, "float modulo");
    if (b == 0 && op == T_FLOORDIV) fail(r, "float floor division by zero");
    return op == T_ADD        ? a + b
           : op == T_SUB      ? a - b
           : op == T_MUL      ? a * b
           : op == T_DIV      ? a / b
           : op == T_FLOORDIV ? float_floor_division(a, b)
           : op == T_MOD      ? float_modulo(a, b)
                              : float_power(r, a, b);
}

// ---- texts and lists ----------------------------------------------------------------------------

// n and m bytes in one piece.
static char *concatenated(struct run *r, const void *a, size_t n, const void *b, size_t m)
{
    char *both = arena_alloc(&r->arena, n + m + 1);
    run_bytes(r, n + m);
    if (n > 0) memcpy(both, a, n);
    if (m > 0) memcpy(both + n, b, m);
    return both;
}

// Where one of the two is markup, the other is escaped.
static struct value add_strings(struct run *r, struct value a, struct value b)
{
    bool markup = a.string->markup || b.string->markup;
    if (markup) {
        a = value_escape(r, a);
        b = value_escape(r, b);
    }
    size_t n = a.string->n_bytes, m = b.string->n_bytes;
    return string_new(&r->arena, concatenated(r, a.string->data, n, b.string->data, m), n + m,
                      markup);
}

static struct value add_lists(struct run *r, struct value a, struct value b)
{
    const size_t each = sizeof(struct value);
    void *both = concatenated(r, a.list->items, a.list->n * each, b.list->items, b.list->n * each);
    return list_of(&r->arena, a.kind, (struct list){.items = both, .n = a.list->n + b.list->n});
}

struct value value_repeat(struct run *r, struct value v, int64_t times)
{
    bool text = v.kind == V_STRING;
    size_t each = text ? v.string->n_bytes : v.list->n * sizeof(struct value);
    const char *data = text ? v.string->data : (const char *)v.list->items;
    if (times < 0) times = 0;
    if (each > 0 && (uint64_t)times > SIZE_MAX / 4 / each)
        arena_fail(&r->arena, ST_NO_MEMORY, "a repetition of %lld times is too long",
                   (long long)times);
    size_t n = each * (size_t)times;
    run_bytes(r, n);
    char *all = arena_alloc(&r->arena, n + 1);
    for (size_t at = 0; at < n; at += each) memcpy(all + at, data, each);
    if (text) return string_new(&r->arena, all, n, v.string->markup);
    struct list items = {.items = (void *)all, .n = v.list->n * (size_t)times};
    return list_of(&r->arena, v.kind, items);
}

static bool is_sequence(struct value v)
{
    return v.kind == V_STRING || v.kind == V_LIST || v.kind == V_TUPLE;
}

struct value arithmetic(struct run *r, int op, struct value a, struct value b)
{
    int64_t x, y;
    if (value_as_int(a, &x) && value_as_int(b, &y)) return on_integers(r, op, x, y);
    if (value_is_number(a) && value_is_number(b))
        return value_float(on_floats(r, op, value_as_double(a), value_as_double(b)));
    if (op == T_MOD && a.kind == V_STRING) return format_percent(r, a.string, b);
    if (op == T_ADD && a.kind == V_STRING && b.kind == V_STRING) return add_strings(r, a, b);
    if (op == T_ADD && a.kind == b.kind && is_sequence(a)) return add_lists(r, a, b);
    if (op == T_MUL && is_sequence(a) && value_as_int(b, &y)) return value_repeat(r, a, y);
    if (op == T_MUL && is_sequence(b) && value_as_int(a, &x)) return value_repeat(r, b, x);
    no_operator(r, op, a, b);
}

struct value arithmetic_sign(struct run *r, struct value v, bool minus)
{
    int64_t x;
    if (v.kind == V_UNDEFINED) undefined_fail(r, v);
    if (v.kind == V_FLOAT) return value_float(minus ? -v.real : v.real);
    if (!value_as_int(v, &x))
        fail(r, "bad operand type for unary %s: '%s'", minus ? "-" : "+", value_type(v));
    if (minus && x == INT64_MIN) overflow(r);
    return value_int(minus ? -x : x);
}

// Python rounds halves to even, and to decimal places by the exact value of the float.
double round_to(double x, int64_t digits)
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
