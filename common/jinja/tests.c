/* tests.c: what may stand behind `is`. v[0] is what is asked about. One thread. */
#include "common/jinja/filters.h"
#include "common/jinja/text.h"

#define IS(name, condition)                                                                        \
    BUILTIN(name)                                                                                  \
    {                                                                                              \
        (void)r, (void)all;                                                                        \
        *ret = value_bool(condition);                                                              \
        return ST_OK;                                                                              \
    }

IS(is_defined, v[0].kind != V_UNDEFINED)
IS(is_undefined, v[0].kind == V_UNDEFINED)
IS(is_none, v[0].kind == V_NONE)
IS(is_boolean, v[0].kind == V_BOOL)
IS(is_true, v[0].kind == V_BOOL && v[0].truth)
IS(is_false, v[0].kind == V_BOOL && !v[0].truth)
IS(is_integer, v[0].kind == V_INT)
IS(is_float, v[0].kind == V_FLOAT)
IS(is_number, value_is_number(&v[0]))
IS(is_string, v[0].kind == V_STRING)
IS(is_mapping, v[0].kind == V_DICT)
IS(is_iterable, value_is_iterable(&v[0]))
IS(is_sequence, value_has_length(&v[0]) && v[0].kind != V_VIEW && v[0].kind != V_LOOP)
IS(is_escaped, v[0].kind == V_STRING && v[0].string->markup)
IS(is_callable, v[0].kind == V_MACRO || v[0].kind == V_FUNCTION || v[0].kind == V_METHOD ||
                    v[0].kind == V_JOINER || v[0].kind == V_LOOP || v[0].kind == V_UNDEFINED)

// The same object. Numbers and texts of one value count as one here, whatever Python does.
BUILTIN(is_same)
{
    const struct value *a = &v[0], *b = &v[1];
    (void)all;
    if (a->kind != b->kind) {
        *ret = value_bool(false);
        return ST_OK;
    }
    bool same = a->kind > V_STRING && a->list == b->list;
    enum status st = a->kind <= V_STRING ? value_equal(r, a, b, &same) : ST_OK;
    *ret = value_bool(same);
    return st;
}

static enum status has_case(struct run *r, const struct value *v, enum text_case which,
                            struct value *ret)
{
    struct value text;
    enum status st = value_str(r, &v[0], &text);
    if (st == ST_OK) st = run_steps(r, text.string->n_bytes >> 4);
    if (st == ST_OK)
        *ret = value_bool(text_has_case(text.string->data, text.string->n_bytes, which));
    return st;
}

BUILTIN(is_lower)
{
    (void)all;
    return has_case(r, v, CASE_LOWER, ret);
}

BUILTIN(is_upper)
{
    (void)all;
    return has_case(r, v, CASE_UPPER, ret);
}

// ---- numbers ------------------------------------------------------------------------------------

static enum status remainder_is(struct run *r, const struct value *v, int64_t by, int64_t want,
                                struct value *ret)
{
    struct value divisor = value_int(by), rest, wanted = value_int(want);
    bool equal = false;
    enum status st = arithmetic(r, T_MOD, &v[0], &divisor, &rest);
    if (st == ST_OK) st = value_equal(r, &rest, &wanted, &equal);
    *ret = value_bool(equal);
    return st;
}

BUILTIN(is_odd)
{
    (void)all;
    return remainder_is(r, v, 2, 1, ret);
}

BUILTIN(is_even)
{
    (void)all;
    return remainder_is(r, v, 2, 0, ret);
}

BUILTIN(is_divisible)
{
    struct value rest, zero = value_int(0);
    bool equal = false;
    (void)all;
    enum status st = arithmetic(r, T_MOD, &v[0], &v[1], &rest);
    if (st == ST_OK) st = value_equal(r, &rest, &zero, &equal);
    *ret = value_bool(equal);
    return st;
}

// ---- comparisons --------------------------------------------------------------------------------

static enum status compared(struct run *r, const struct value *v, int op, struct value *ret)
{
    bool truth = false;
    enum status st = value_compare(r, op, &v[0], &v[1], &truth);
    *ret = value_bool(truth);
    return st;
}

BUILTIN(is_greater)
{
    (void)all;
    return compared(r, v, T_GT, ret);
}

BUILTIN(is_greater_or_equal)
{
    (void)all;
    return compared(r, v, T_GE, ret);
}

BUILTIN(is_less)
{
    (void)all;
    return compared(r, v, T_LT, ret);
}

BUILTIN(is_less_or_equal)
{
    (void)all;
    return compared(r, v, T_LE, ret);
}

BUILTIN(is_equal)
{
    bool equal = false;
    (void)all;
    enum status st = value_equal(r, &v[0], &v[1], &equal);
    *ret = value_bool(equal);
    return st;
}

BUILTIN(is_unequal)
{
    enum status st = is_equal(r, v, all, ret);
    *ret = value_bool(!ret->truth);
    return st;
}

BUILTIN(is_in)
{
    bool in = false;
    (void)all;
    enum status st = value_in(r, &v[0], &v[1], &in);
    *ret = value_bool(in);
    return st;
}

// ---- names --------------------------------------------------------------------------------------

IS(is_filter, v[0].kind == V_STRING && filter_find(v[0].string) != NULL)
IS(is_test, v[0].kind == V_STRING && test_find(v[0].string) != NULL)

static const struct builtin tests[] = {
    {"defined", is_defined, "", 0},
    {"undefined", is_undefined, "", 0},
    {"none", is_none, "", 0},
    {"boolean", is_boolean, "", 0},
    {"true", is_true, "", 0},
    {"false", is_false, "", 0},
    {"integer", is_integer, "", 0},
    {"float", is_float, "", 0},
    {"number", is_number, "", 0},
    {"string", is_string, "", 0},
    {"mapping", is_mapping, "", 0},
    {"iterable", is_iterable, "", 0},
    {"sequence", is_sequence, "", 0},
    {"escaped", is_escaped, "", 0},
    {"callable", is_callable, "", 0},
    {"sameas", is_same, "other", 1},
    {"lower", is_lower, "", 0},
    {"upper", is_upper, "", 0},
    {"odd", is_odd, "", 0},
    {"even", is_even, "", 0},
    {"divisibleby", is_divisible, "num", 1},
    {"eq", is_equal, "/other", 1},
    {"equalto", is_equal, "/other", 1},
    {"==", is_equal, "/other", 1},
    {"ne", is_unequal, "/other", 1},
    {"!=", is_unequal, "/other", 1},
    {"gt", is_greater, "/other", 1},
    {"greaterthan", is_greater, "/other", 1},
    {">", is_greater, "/other", 1},
    {"ge", is_greater_or_equal, "/other", 1},
    {">=", is_greater_or_equal, "/other", 1},
    {"lt", is_less, "/other", 1},
    {"lessthan", is_less, "/other", 1},
    {"<", is_less, "/other", 1},
    {"le", is_less_or_equal, "/other", 1},
    {"<=", is_less_or_equal, "/other", 1},
    {"in", is_in, "seq", 1},
    {"filter", is_filter, "", 0},
    {"test", is_test, "", 0},
};

const struct builtin *test_find(const struct string *name)
{
    return builtin_find(tests, sizeof tests / sizeof *tests, name);
}

enum status test_apply(struct run *r, const struct string *name, const struct value *input,
                       const struct arguments *arguments, bool *ret)
{
    const struct builtin *f = test_find(name);
    struct value result;
    if (!f)
        return status_fail(ST_INVALID, "No test named '%.*s'.",
                           (int)(name->n_bytes < 100 ? name->n_bytes : 100), name->data);
    enum status st = builtin_invoke(r, f, input, arguments, &result);
    if (st == ST_OK) *ret = result.truth;
    return st;
}
