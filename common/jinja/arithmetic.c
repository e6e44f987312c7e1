/* arithmetic.c: the operators on numbers, texts and lists, with Python's meaning: // and % round
 * towards minus infinity, / gives a float, ** of whole numbers a whole number. Whole numbers have
 * 64 bits; what goes beyond is an error. One thread. */
#include "common/jinja/run.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static enum status no_operator(int op, const struct value *a, const struct value *b)
{
    if (a->kind == V_UNDEFINED) return undefined_fail(a->undefined);
    if (b->kind == V_UNDEFINED) return undefined_fail(b->undefined);
    if (op == T_ADD && a->kind == V_STRING)
        return status_fail(ST_INVALID, "can only concatenate str (not \"%s\") to str",
                           value_type(b));
    if (op == T_ADD && (a->kind == V_LIST || a->kind == V_TUPLE))
        return status_fail(ST_INVALID, "can only concatenate %s (not \"%s\") to %s", value_type(a),
                           value_type(b), value_type(a));
    return status_fail(ST_INVALID, "unsupported operand type(s) for %s: '%s' and '%s'",
                       op == T_POW ? "** or pow()" : token_words((enum token_type)op),
                       value_type(a), value_type(b));
}

static enum status overflow(void)
{
    return status_fail(ST_INVALID,
                       "the result does not fit in 64 bits, which is the limit of whole "
                       "numbers here");
}

// ---- whole numbers ------------------------------------------------------------------------------

static enum status integer_power(int64_t base, int64_t exponent, struct value *ret)
{
    int64_t result = 1;
    if (exponent < 0) {
        if (base == 0) return status_fail(ST_INVALID, "0.0 cannot be raised to a negative power");
        *ret = value_float(pow((double)base, (double)exponent));
        return ST_OK;
    }
    while (exponent > 0) {
        if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) return overflow();
        exponent >>= 1;
        if (exponent > 0 && __builtin_mul_overflow(base, base, &base)) return overflow();
    }
    *ret = value_int(result);
    return ST_OK;
}

static enum status integer_division(int op, int64_t a, int64_t b, struct value *ret)
{
    if (b == 0)
        return status_fail(ST_INVALID,
                           op == T_DIV ? "division by zero" : "integer division or modulo by zero");
    if (op == T_DIV) {
        *ret = value_float((double)a / (double)b);
        return ST_OK;
    }
    if (b == -1) { // INT64_MIN / -1
        if (op == T_MOD) {
            *ret = value_int(0);
            return ST_OK;
        }
        if (a == INT64_MIN) return overflow();
    }
    int64_t quotient = a / b, rest = a % b;
    if (rest != 0 && (rest < 0) != (b < 0)) {
        quotient--;
        rest += b;
    }
    *ret = value_int(op == T_MOD ? rest : quotient);
    return ST_OK;
}

static enum status on_integers(int op, int64_t a, int64_t b, struct value *ret)
{
    int64_t result;
    bool over;
    switch (op) {
    case T_ADD:
        over = __builtin_add_overflow(a, b, &result);
        break;
    case T_SUB:
        over = __builtin_sub_overflow(a, b, &result);
        break;
    case T_MUL:
        over = __builtin_mul_overflow(a, b, &result);
        break;
    case T_POW:
        return integer_power(a, b, ret);
    default:
        return integer_division(op, a, b, ret);
    }
    if (over) return overflow();
    *ret = value_int(result);
    return ST_OK;
}

// ---- floats -------------------------------------------------------------------------------------

static double float_modulo(double a, double b)
{
    double rest = fmod(a, b);
    if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
    return rest == 0 ? copysign(0, b) : rest;
}

static double float_floor_division(double a, double b)
{
    double quotient = (a - float_modulo(a, b)) / b, down = floor(quotient);
    if (quotient == 0) return copysign(0, a / b);
    return quotient - down > 0.5 ? down + 1 : down;
}

static enum status float_power(double a, double b, struct value *ret)
{
    if (a == 0 && b < 0) return status_fail(ST_INVALID, "0.0 cannot be raised to a negative power");
    if (a < 0 && isfinite(b) && b != floor(b))
        return status_fail(ST_INVALID, "a negative number to a broken power is complex, which is "
                                       "not supported");
    double result = pow(a, b);
    if (isinf(result) && isfinite(a) && isfinite(b))
        return status_fail(ST_INVALID, "(34, 'Numerical result out of range')");
    *ret = value_float(result);
    return ST_OK;
}

static enum status on_floats(int op, double a, double b, struct value *ret)
{
    bool divides = op == T_DIV || op == T_FLOORDIV || op == T_MOD;
    if (divides && b == 0)
        return status_fail(ST_INVALID, op == T_DIV   ? "float division by zero"
                                       : op == T_MOD ? "float modulo"
                                                     : "float floor division by zero");
    if (op == T_POW) return float_power(a, b, ret);
    *ret = value_float(op == T_ADD        ? a + b
                       : op == T_SUB      ? a - b
                       : op == T_MUL      ? a * b
                       : op == T_DIV      ? a / b
                       : op == T_FLOORDIV ? float_floor_division(a, b)
                                          : float_modulo(a, b));
    return ST_OK;
}

// ---- texts and lists ----------------------------------------------------------------------------

enum status string_like(struct run *r, const struct string *self, const char *data, size_t n,
                        struct value *ret)
{
    struct value plain;
    enum status st = string_borrow(&r->arena, data, n, &plain);
    *ret = plain;
    return st == ST_OK && self->markup ? markup_of(r, plain.string, ret) : st;
}

// Where one of the two is markup, the other is escaped.
static enum status add_strings(struct run *r, struct value a, struct value b, struct value *ret)
{
    enum status st = ST_OK;
    bool markup = a.string->markup || b.string->markup;
    if (markup) CHECK(value_escape(r, &a, &a));
    if (markup) CHECK(value_escape(r, &b, &b));
    size_t n = a.string->n_bytes, m = b.string->n_bytes;
    CHECK(run_steps(r, (n + m) >> 10));
    char *both = arena_alloc(&r->arena, n + m + 1);
    if (!both) return ST_NO_MEMORY;
    if (n > 0) memcpy(both, a.string->data, n);
    if (m > 0) memcpy(both + n, b.string->data, m);
    st = string_like(r, a.string, both, n + m, ret);
out:
    return st;
}

static enum status add_lists(struct run *r, const struct value *a, const struct value *b,
                             struct value *ret)
{
    size_t n = a->list->n, m = b->list->n;
    struct value *items;
    enum status st = run_steps(r, (n + m) >> 4);
    if (st == ST_OK) st = list_make(&r->arena, a->kind, n + m, &items, ret);
    if (st != ST_OK) return st;
    if (n > 0) memcpy(items, a->list->items, n * sizeof *items);
    if (m > 0) memcpy(items + n, b->list->items, m * sizeof *items);
    return ST_OK;
}

static enum status repeat(struct run *r, const struct value *v, int64_t times, struct value *ret)
{
    bool text = v->kind == V_STRING;
    size_t each = text ? v->string->n_bytes : v->list->n * sizeof(struct value), n = 0;
    const char *data = text ? v->string->data : (const char *)v->list->items;
    if (times < 0) times = 0;
    if (each > 0 && (uint64_t)times > SIZE_MAX / 4 / each)
        return status_fail(ST_NO_MEMORY, "a repetition of %lld times is too long",
                           (long long)times);
    n = each * (size_t)times;
    enum status st = run_steps(r, n >> 10);
    if (st != ST_OK) return st;
    char *all = arena_alloc(&r->arena, n + 1);
    if (!all) return ST_NO_MEMORY;
    for (size_t at = 0; at < n; at += each) memcpy(all + at, data, each);
    if (text) return string_like(r, v->string, all, n, ret);
    struct list items = {.items = (struct value *)(void *)all, .n = v->list->n * (size_t)times};
    st = list_of(r, items, ret);
    ret->kind = v->kind;
    return st;
}

static bool is_sequence(const struct value *v)
{
    return v->kind == V_STRING || v->kind == V_LIST || v->kind == V_TUPLE;
}

enum status arithmetic(struct run *r, int op, const struct value *a, const struct value *b,
                       struct value *ret)
{
    int64_t x, y;
    bool integers = value_as_int(a, &x) && value_as_int(b, &y);
    if (integers) return on_integers(op, x, y, ret);
    if (value_is_number(a) && value_is_number(b))
        return on_floats(op, value_as_double(a), value_as_double(b), ret);
    if (op == T_MOD && a->kind == V_STRING) return format_percent(r, a->string, b, ret);
    if (op == T_ADD && a->kind == V_STRING && b->kind == V_STRING)
        return add_strings(r, *a, *b, ret);
    if (op == T_ADD && a->kind == b->kind && is_sequence(a)) return add_lists(r, a, b, ret);
    if (op == T_MUL && is_sequence(a) && value_as_int(b, &y)) return repeat(r, a, y, ret);
    if (op == T_MUL && is_sequence(b) && value_as_int(a, &x)) return repeat(r, b, x, ret);
    return no_operator(op, a, b);
}

enum status arithmetic_sign(struct run *r, const struct value *v, bool minus, struct value *ret)
{
    int64_t x;
    (void)r;
    if (v->kind == V_UNDEFINED) return undefined_fail(v->undefined);
    if (v->kind == V_FLOAT) {
        *ret = value_float(minus ? -v->real : v->real);
        return ST_OK;
    }
    if (!value_as_int(v, &x))
        return status_fail(ST_INVALID, "bad operand type for unary %s: '%s'", minus ? "-" : "+",
                           value_type(v));
    if (minus && x == INT64_MIN) return overflow();
    *ret = value_int(minus ? -x : x);
    return ST_OK;
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
