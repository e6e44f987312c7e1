/* filters_value.c: filters on single values: defaults, numbers, JSON, attributes. One thread. */
#include "common/jinja/filters.h"
#include "common/jinja/text.h"
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>

BUILTIN(default_value)
{
    bool replaced = v[0].kind == V_UNDEFINED, by_truth = false, truth = true;
    enum status st;
    (void)all;
    CHECK(value_truth(r, &v[2], &by_truth));
    CHECK(value_truth(r, &v[0], &truth));
    *ret = v[0];
    if (!replaced && (truth || !by_truth)) return ST_OK;
    *ret = v[1];
    if (!given(&v[1])) st = string_puts(&r->arena, "", ret);
out:
    return st;
}

BUILTIN(string)
{
    (void)all;
    return value_str(r, &v[0], ret);
}

BUILTIN(attr)
{
    const struct string *name;
    (void)all;
    enum status st = need_string(&v[1], "the name of an attribute", &name);
    if (st != ST_OK) return st;
    if (v[0].kind != V_DICT) return get_attribute(r, &v[0], name, ret);
    if (method_find(&v[0], name)) return get_attribute(r, &v[0], name, ret);
    return undefined_make(r, NULL, &v[0], v[1], ret); // an item is not an attribute
}

// ---- numbers ------------------------------------------------------------------------------------

// A number as Python's int() and float() read it: blanks around, "_" between digits. NULL: it is
// none, or too long for one.
static const char *plain_number(const struct string *s, char ret[400])
{
    size_t start = text_leading_spaces(s->data, s->n_bytes), n = 0;
    size_t end = text_without_trailing_spaces(s->data, s->n_bytes);
    for (size_t i = start; i < end; i++) {
        bool between = i > start && i + 1 < end && isalnum((unsigned char)s->data[i - 1]) &&
                       isalnum((unsigned char)s->data[i + 1]);
        if (s->data[i] == '_' && between) continue;
        if (n + 1 == 400 || !s->data[i] || s->data[i] == '_' || isspace((unsigned char)s->data[i]))
            return NULL;
        ret[n++] = s->data[i];
    }
    ret[n] = 0;
    return n > 0 ? ret : NULL;
}

static bool parse_float(const struct string *s, double *ret)
{
    char text[400], *end;
    if (!plain_number(s, text) || strpbrk(text, "xXpP(")) return false;
    *ret = strtod(text, &end);
    return *end == 0;
}

// ret_over: it is a whole number, but of more than 64 bits.
static bool parse_int(const struct string *s, int64_t base, int64_t *ret, bool *ret_over)
{
    char text[400], *end;
    const char *digits = text;
    if (!plain_number(s, text)) return false;
    bool sign = *digits == '-' || *digits == '+';
    digits += sign;
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

static enum status too_large(void)
{
    return status_fail(ST_INVALID, "whole numbers beyond 64 bits are not supported");
}

static enum status truncated(double x, const struct value *otherwise, struct value *ret)
{
    if (!isfinite(x)) {
        *ret = *otherwise;
        return ST_OK;
    }
    if (!(fabs(x) < 0x1p63)) return too_large();
    *ret = value_int((int64_t)x);
    return ST_OK;
}

BUILTIN(integer)
{
    struct value otherwise = given(&v[1]) ? v[1] : value_int(0);
    int64_t base = 10, x;
    double real;
    bool over = false;
    (void)all, (void)r;
    if (v[0].kind == V_UNDEFINED) return undefined_fail(v[0].undefined);
    enum status st = need_int(&v[2], "base", &base);
    if (st != ST_OK) return st;
    *ret = otherwise;
    if (base != 0 && (base < 2 || base > 36)) base = 37; // int() refuses it; float() may do
    if (value_as_int(&v[0], &x)) {
        *ret = value_int(x);
    } else if (v[0].kind == V_FLOAT) {
        return truncated(v[0].real, &otherwise, ret);
    } else if (v[0].kind == V_STRING) {
        if (base != 37 && parse_int(v[0].string, base, &x, &over)) {
            if (over) return too_large();
            *ret = value_int(x);
        } else if (parse_float(v[0].string, &real)) {
            return truncated(real, &otherwise, ret);
        }
    }
    return ST_OK;
}

BUILTIN(real)
{
    double x;
    (void)all, (void)r;
    if (v[0].kind == V_UNDEFINED) return undefined_fail(v[0].undefined);
    *ret = given(&v[1]) ? v[1] : value_float(0);
    if (value_is_number(&v[0])) *ret = value_float(value_as_double(&v[0]));
    if (v[0].kind == V_STRING && parse_float(v[0].string, &x)) *ret = value_float(x);
    return ST_OK;
}

BUILTIN(absolute)
{
    (void)all;
    if (!value_is_number(&v[0]))
        return status_fail(ST_INVALID, "bad operand type for abs(): '%s'", value_type(&v[0]));
    bool negative = value_as_double(&v[0]) < 0 || (v[0].kind == V_FLOAT && signbit(v[0].real));
    return arithmetic_sign(r, &v[0], negative, ret);
}

static double round_up_or_down(double x, int64_t digits, bool up)
{
    double scale = pow(10, (double)digits);
    return (up ? ceil(x * scale) : floor(x * scale)) / scale;
}

BUILTIN(round_number)
{
    int64_t digits = 0, x;
    bool common = !given(&v[2]) || value_is(&v[2], "common");
    bool up = given(&v[2]) && value_is(&v[2], "ceil");
    (void)all, (void)r;
    if (!common && !up && !value_is(&v[2], "floor"))
        return status_fail(ST_INVALID, "method must be common, ceil or floor");
    if (!value_is_number(&v[0]))
        return status_fail(ST_INVALID, "type %s doesn't define __round__ method",
                           value_type(&v[0]));
    enum status st = need_int(&v[1], "precision", &digits);
    if (st != ST_OK) return st;
    if (!common) {
        *ret = value_float(round_up_or_down(value_as_double(&v[0]), digits, up));
    } else if (value_as_int(&v[0], &x) && (digits >= 0 || v[1].kind == V_NONE)) {
        *ret = value_int(x);
    } else if (value_as_int(&v[0], &x)) {
        *ret = value_int((int64_t)round_to((double)x, digits));
    } else {
        *ret = value_float(round_to(v[0].real, digits));
    }
    return ST_OK;
}

// ---- JSON ---------------------------------------------------------------------------------------

// A copy that ends on NUL: a string may be a part of another.
static enum status text_with_end(struct run *r, const struct value *v, const char *what,
                                 const char **ret)
{
    const struct string *s;
    struct value copy;
    enum status st;
    CHECK(need_string(v, what, &s));
    CHECK(string_make(&r->arena, s->data, s->n_bytes, &copy));
    *ret = copy.string->data;
out:
    return st;
}

static enum status read_indent(struct run *r, const struct value *v, struct json_style *style)
{
    struct value one, text;
    int64_t width = 0;
    enum status st;
    if (!given(v) || v->kind == V_NONE) return ST_OK;
    style->lines = true;
    style->item_separator = ",";
    if (v->kind == V_STRING) return text_with_end(r, v, "indent", &style->indent);
    CHECK(need_int(v, "indent", &width));
    if (width > 1000) return status_fail(ST_INVALID, "an indent of more than 1000 is refused");
    struct value times = value_int(width);
    CHECK(string_puts(&r->arena, " ", &one));
    CHECK(arithmetic(r, T_MUL, &one, &times, &text));
    style->indent = text.string->data;
out:
    return st;
}

static enum status read_separators(struct run *r, const struct value *v, struct json_style *style)
{
    struct list items;
    enum status st;
    if (!given(v) || v->kind == V_NONE) return ST_OK;
    CHECK(value_items(r, v, &items));
    if (items.n != 2)
        return status_fail(ST_INVALID, "separators: two texts are wanted, there are %zu", items.n);
    CHECK(text_with_end(r, &items.items[0], "separators", &style->item_separator));
    CHECK(text_with_end(r, &items.items[1], "separators", &style->key_separator));
out:
    return st;
}

BUILTIN(tojson)
{
    struct bytes text = BYTES_INIT;
    struct json_style style = {.item_separator = ", ", .key_separator = ": "};
    enum status st;
    (void)all;
    CHECK(value_truth(r, &v[1], &style.ensure_ascii));
    CHECK(read_indent(r, &v[2], &style));
    CHECK(read_separators(r, &v[3], &style));
    CHECK(value_truth(r, &v[4], &style.sort_keys));
    return run_take(r, put_json(r, &v[0], &style, &text), &text, ret);
out:
    return st;
}

const struct builtin value_filters[] = {
    {"default", default_value, "default_value boolean", 0},
    {"d", default_value, "default_value boolean", 0},
    {"string", string, "", 0},
    {"attr", attr, "name", 1},
    {"int", integer, "default base", 0},
    {"float", real, "default", 0},
    {"abs", absolute, "", 0},
    {"round", round_number, "precision method", 0},
    {"tojson", tojson, "ensure_ascii indent separators sort_keys", 0},
};
const size_t n_value_filters = sizeof value_filters / sizeof *value_filters;
