/* tests.c: what may stand behind `is`. One thread. */
#include "common/jinja/run.h"

// which: a set of kinds
#define KIND(k) (1 << (k))

BUILTIN(is_of_kind)
{
    return value_bool(c->function->which >> c->v[0].kind & 1);
}

BUILTIN(is_defined)
{
    return value_bool(c->v[0].kind != V_UNDEFINED);
}

// which: true or false
BUILTIN(is_truth)
{
    return value_bool(c->v[0].kind == V_BOOL && c->v[0].truth == c->function->which);
}

BUILTIN(is_escaped)
{
    return value_bool(c->v[0].kind == V_STRING && c->v[0].string->markup);
}

// The same object. Numbers and texts of one value count as one here, whatever Python does.
BUILTIN(is_same)
{
    struct value a = c->v[0], b = c->v[1];
    if (a.kind != b.kind) return value_bool(false);
    return value_bool(a.kind <= V_STRING ? value_equal(r, a, b) : a.list == b.list);
}

static bool remainder_is(const struct call *c, struct value by, int64_t want)
{
    return value_equal(c->run, arithmetic(c->run, T_MOD, c->v[0], by), value_int(want));
}

// which: the remainder by two
BUILTIN(is_odd_or_even)
{
    return value_bool(remainder_is(c, value_int(2), c->function->which));
}

BUILTIN(is_divisible)
{
    return value_bool(remainder_is(c, c->v[1], 0));
}

// which: the operator
BUILTIN(is_compared)
{
    return value_bool(value_compare(r, c->function->which, c->v[0], c->v[1]));
}

BUILTIN(is_filter)
{
    return value_bool(c->v[0].kind == V_STRING && builtin_find(FILTER, c->v[0].string));
}

BUILTIN(is_test)
{
    return value_bool(c->v[0].kind == V_STRING && builtin_find(TEST, c->v[0].string));
}

#define NUMBERS (KIND(V_BOOL) | KIND(V_INT) | KIND(V_FLOAT))
#define SEQUENCES                                                                                  \
    (KIND(V_UNDEFINED) | KIND(V_STRING) | KIND(V_LIST) | KIND(V_TUPLE) | KIND(V_DICT) |            \
     KIND(V_RANGE))
#define ITERABLES                                                                                  \
    (SEQUENCES | KIND(V_KEYS) | KIND(V_VALUES) | KIND(V_ITEMS) | KIND(V_LOOP) | KIND(V_ITERATOR))
#define CALLABLES                                                                                  \
    (KIND(V_MACRO) | KIND(V_FUNCTION) | KIND(V_METHOD) | KIND(V_JOINER) | KIND(V_LOOP) |           \
     KIND(V_UNDEFINED))

const struct builtin test_builtins[] = {
    {TEST, "defined", is_defined, 0, "", 0},
    {TEST, "undefined", is_of_kind, KIND(V_UNDEFINED), "", 0},
    {TEST, "none", is_of_kind, KIND(V_NONE), "", 0},
    {TEST, "boolean", is_of_kind, KIND(V_BOOL), "", 0},
    {TEST, "true", is_truth, true, "", 0},
    {TEST, "false", is_truth, false, "", 0},
    {TEST, "integer", is_of_kind, KIND(V_INT), "", 0},
    {TEST, "float", is_of_kind, KIND(V_FLOAT), "", 0},
    {TEST, "number", is_of_kind, NUMBERS, "", 0},
    {TEST, "string", is_of_kind, KIND(V_STRING), "", 0},
    {TEST, "mapping", is_of_kind, KIND(V_DICT), "", 0},
    {TEST, "iterable", is_of_kind, ITERABLES, "", 0},
    {TEST, "sequence", is_of_kind, SEQUENCES, "", 0},
    {TEST, "escaped", is_escaped, 0, "", 0},
    {TEST, "callable", is_of_kind, CALLABLES, "", 0},
    {TEST, "sameas", is_same, 0, "other", 1},
    {TEST, "odd", is_odd_or_even, 1, "", 0},
    {TEST, "even", is_odd_or_even, 0, "", 0},
    {TEST, "divisibleby", is_divisible, 0, "num", 1},
    {TEST, "eq equalto ==", is_compared, T_EQ, "/other", 1},
    {TEST, "ne !=", is_compared, T_NE, "/other", 1},
    {TEST, "gt greaterthan >", is_compared, T_GT, "/other", 1},
    {TEST, "ge >=", is_compared, T_GE, "/other", 1},
    {TEST, "lt lessthan <", is_compared, T_LT, "/other", 1},
    {TEST, "le <=", is_compared, T_LE, "/other", 1},
    {TEST, "in", is_compared, OP_IN, "seq", 1},
    {TEST, "filter", is_filter, 0, "", 0},
    {TEST, "test", is_test, 0, "", 0},
    {.name = NULL},
};
