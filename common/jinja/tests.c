/* tests.c: what may stand behind `is`. One thread. */
#include "common/jinja/strings.h"
#include "common/jinja/text.h"

// which: a set of kinds
#define KIND(k) (1 << (k))

static BUILTIN(is_of_kind)
{
    return value_bool(c->function->which >> c->v[0].kind & 1);
}

static BUILTIN(is_defined)
{
    return value_bool(c->v[0].kind != V_UNDEFINED);
}

// which: true or false
static BUILTIN(is_truth)
{
    return value_bool(c->v[0].kind == V_BOOL && c->v[0].truth == c->function->which);
}

static BUILTIN(is_escaped)
{
    return value_bool(c->v[0].kind == V_STRING && c->v[0].string->markup);
}

// The same object. Numbers and texts of one value count as one here, whatever Python does.
static BUILTIN(is_same)
{
    struct value a = c->v[0], b = c->v[1];
    if (a.kind != b.kind) return value_bool(false);
    return value_bool(a.kind <= V_STRING ? value_equal(c->run, a, b) : a.list == b.list);
}

static bool remainder_is(const struct call *c, struct value by, int64_t want)
{
    return value_equal(c->run, arithmetic(c->run, T_MOD, c->v[0], by), value_int(want));
}

// which: the remainder by two
static BUILTIN(is_odd_or_even)
{
    return value_bool(remainder_is(c, value_int(2), c->function->which));
}

static BUILTIN(is_divisible)
{
    return value_bool(remainder_is(c, c->v[1], 0));
}

// which: the operator
static BUILTIN(is_compared)
{
    return value_bool(value_compare(c->run, c->function->which, c->v[0], c->v[1]));
}

static BUILTIN(is_filter)
{
    return value_bool(c->v[0].kind == V_STRING && filter_find(c->v[0].string));
}

static BUILTIN(is_test)
{
    return value_bool(c->v[0].kind == V_STRING && test_find(c->v[0].string));
}

#define NUMBERS (KIND(V_BOOL) | KIND(V_INT) | KIND(V_FLOAT))
#define SEQUENCES                                                                                  \
    (KIND(V_UNDEFINED) | KIND(V_STRING) | KIND(V_LIST) | KIND(V_TUPLE) | KIND(V_DICT) |            \
     KIND(V_RANGE))
#define ITERABLES (SEQUENCES | KIND(V_VIEW) | KIND(V_LOOP) | KIND(V_ITERATOR))
#define CALLABLES                                                                                  \
    (KIND(V_MACRO) | KIND(V_FUNCTION) | KIND(V_METHOD) | KIND(V_JOINER) | KIND(V_LOOP) |           \
     KIND(V_UNDEFINED))

static const struct builtin tests[] = {
    {"defined", is_defined, 0, "", 0},
    {"undefined", is_of_kind, KIND(V_UNDEFINED), "", 0},
    {"none", is_of_kind, KIND(V_NONE), "", 0},
    {"boolean", is_of_kind, KIND(V_BOOL), "", 0},
    {"true", is_truth, true, "", 0},
    {"false", is_truth, false, "", 0},
    {"integer", is_of_kind, KIND(V_INT), "", 0},
    {"float", is_of_kind, KIND(V_FLOAT), "", 0},
    {"number", is_of_kind, NUMBERS, "", 0},
    {"string", is_of_kind, KIND(V_STRING), "", 0},
    {"mapping", is_of_kind, KIND(V_DICT), "", 0},
    {"iterable", is_of_kind, ITERABLES, "", 0},
    {"sequence", is_of_kind, SEQUENCES, "", 0},
    {"escaped", is_escaped, 0, "", 0},
    {"callable", is_of_kind, CALLABLES, "", 0},
    {"sameas", is_same, 0, "other", 1},
    {"lower", string_has_case, CASE_LOWER, "$", 0},
    {"upper", string_has_case, CASE_UPPER, "$", 0},
    {"odd", is_odd_or_even, 1, "", 0},
    {"even", is_odd_or_even, 0, "", 0},
    {"divisibleby", is_divisible, 0, "num", 1},
    {"eq", is_compared, T_EQ, "/other", 1},
    {"equalto", is_compared, T_EQ, "/other", 1},
    {"==", is_compared, T_EQ, "/other", 1},
    {"ne", is_compared, T_NE, "/other", 1},
    {"!=", is_compared, T_NE, "/other", 1},
    {"gt", is_compared, T_GT, "/other", 1},
    {"greaterthan", is_compared, T_GT, "/other", 1},
    {">", is_compared, T_GT, "/other", 1},
    {"ge", is_compared, T_GE, "/other", 1},
    {">=", is_compared, T_GE, "/other", 1},
    {"lt", is_compared, T_LT, "/other", 1},
    {"lessthan", is_compared, T_LT, "/other", 1},
    {"<", is_compared, T_LT, "/other", 1},
    {"le", is_compared, T_LE, "/other", 1},
    {"<=", is_compared, T_LE, "/other", 1},
    {"in", is_compared, OP_IN, "seq", 1},
    {"filter", is_filter, 0, "", 0},
    {"test", is_test, 0, "", 0},
    {.name = NULL},
};

const struct builtin *test_find(const struct string *name)
{
    return builtin_find(tests, name);
}
