/* methods.c: the methods of lists, dicts, numbers and cyclers; those of strings stand in
 * string_*.c. Those that would change a list or a dict are not here: Jinja's sandbox forbids them
 * (attribute.c). One thread. */
#include "common/jinja/run.h"
#include <math.h>

BUILTIN(count)
{
    struct list items = value_items(r, c->v[0]);
    int64_t n = 0;
    for (size_t i = 0; i < items.n; i++) n += value_equal(r, items.items[i], c->v[1]);
    return value_int(n);
}

BUILTIN(index_of)
{
    struct list items = value_items(r, c->v[0]);
    int64_t start, end;
    arg_window(c, (int64_t)items.n, &start, &end);
    for (int64_t i = start; i < end; i++)
        if (value_equal(r, items.items[i], c->v[1])) return value_int(i);
    fail(r, "the value is not in the %s", value_type(c->v[0]));
}

BUILTIN(copy)
{
    return c->v[0]; // nothing changes either
}

BUILTIN(get)
{
    struct value v = dict_find(r, c->v[0].dict, c->v[1]);
    return given(v) ? v : given(c->v[2]) ? c->v[2] : NONE;
}

BUILTIN(view)
{
    return dict_view(r, c->v[0].dict, (enum value_kind)c->function->which);
}

BUILTIN(is_integer)
{
    return value_bool(isfinite(c->v[0].real) && floor(c->v[0].real) == c->v[0].real);
}

BUILTIN(bit_length)
{
    int64_t x = 0, n = 0;
    value_as_int(c->v[0], &x);
    for (uint64_t size = x < 0 ? 0 - (uint64_t)x : (uint64_t)x; size > 0; size >>= 1) n++;
    return value_int(n);
}

BUILTIN(next)
{
    struct iterator *cycler = c->v[0].iterator;
    struct value v = cycler->items.items[cycler->at];
    cycler->at = (cycler->at + 1) % cycler->items.n;
    return v;
}

BUILTIN(reset)
{
    c->v[0].iterator->at = 0;
    return NONE;
}

#define LISTS (METHOD(V_LIST) | METHOD(V_TUPLE) | METHOD(V_RANGE))

const struct builtin method_builtins[] = {
    {LISTS, "count", count, 0, "/value", 1},
    {LISTS, "index", index_of, 0, "/value start stop", 1},
    {METHOD(V_LIST) | METHOD(V_DICT), "copy", copy, 0, "", 0},
    {METHOD(V_DICT), "get", get, 0, "/key default", 1},
    {METHOD(V_DICT), "items", view, V_ITEMS, "", 0},
    {METHOD(V_DICT), "keys", view, V_KEYS, "", 0},
    {METHOD(V_DICT), "values", view, V_VALUES, "", 0},
    {METHOD(V_FLOAT), "is_integer", is_integer, 0, "", 0},
    {METHOD(V_INT) | METHOD(V_BOOL), "bit_length", bit_length, 0, "", 0},
    {METHOD(V_CYCLER), "next", next, 0, "", 0},
    {METHOD(V_CYCLER), "reset", reset, 0, "", 0},
    {.name = NULL},
};
