/* methods.c: the methods of lists, dicts, ranges, numbers, loops, cyclers, and which value has
 * which. Those that would change a list or a dict are not here: Jinja's sandbox forbids them
 * (attribute.c). One thread. */
#include "common/jinja/methods_string.h"
#include <math.h>

// ---- lists, tuples, ranges ----------------------------------------------------------------------

METHOD(count)
{
    struct list items;
    int64_t n = 0;
    enum status st = value_items(r, &v[0], &items);
    (void)all;
    for (size_t i = 0; st == ST_OK && i < items.n; i++) {
        bool equal;
        st = value_equal(r, &items.items[i], &v[1], &equal);
        n += st == ST_OK && equal;
    }
    *ret = value_int(n);
    return st;
}

METHOD(index_of)
{
    struct list items;
    enum status st;
    int64_t n, start = 0, end = INT64_MAX;
    (void)all;
    CHECK(value_items(r, &v[0], &items));
    n = (int64_t)items.n;
    CHECK(need_int(&v[2], "start", &start));
    CHECK(need_int(&v[3], "stop", &end));
    if (start < 0) start = start + n < 0 ? 0 : start + n;
    if (end < 0) end += n;
    for (int64_t i = start; i < n && i < end; i++) {
        bool equal;
        CHECK(value_equal(r, &items.items[i], &v[1], &equal));
        *ret = value_int(i);
        if (equal) return ST_OK;
    }
    st = status_fail(ST_INVALID, "the value is not in the %s", value_type(&v[0]));
out:
    return st;
}

METHOD(copy)
{
    (void)r, (void)all;
    *ret = v[0]; // nothing changes either
    return ST_OK;
}

// ---- dicts --------------------------------------------------------------------------------------

METHOD(get)
{
    (void)all;
    enum status st = dict_find(r, v[0].dict, &v[1], ret);
    if (st == ST_OK && !given(ret)) *ret = given(&v[2]) ? v[2] : NONE;
    return st;
}

static enum status view(struct run *r, const struct value *v, enum view_of of, struct value *ret)
{
    struct view *view = arena_alloc(&r->arena, sizeof *view);
    if (!view) return ST_NO_MEMORY;
    *view = (struct view){of, v[0].dict};
    *ret = value_of(.kind = V_VIEW, .view = view);
    return ST_OK;
}

METHOD(items)
{
    (void)all;
    return view(r, v, VIEW_ITEMS, ret);
}

METHOD(keys)
{
    (void)all;
    return view(r, v, VIEW_KEYS, ret);
}

METHOD(values)
{
    (void)all;
    return view(r, v, VIEW_VALUES, ret);
}

// ---- the rest -----------------------------------------------------------------------------------

METHOD(is_integer)
{
    (void)r, (void)all;
    *ret = value_bool(isfinite(v[0].real) && floor(v[0].real) == v[0].real);
    return ST_OK;
}

METHOD(bit_length)
{
    int64_t x = 0, n = 0;
    (void)r, (void)all;
    value_as_int(&v[0], &x);
    for (uint64_t rest = x < 0 ? 0 - (uint64_t)x : (uint64_t)x; rest > 0; rest >>= 1) n++;
    *ret = value_int(n);
    return ST_OK;
}

METHOD(next)
{
    struct cycler *cycler = v[0].cycler;
    (void)r, (void)all;
    *ret = cycler->items.items[cycler->at];
    cycler->at = (cycler->at + 1) % cycler->items.n;
    return ST_OK;
}

METHOD(reset)
{
    (void)r, (void)all;
    v[0].cycler->at = 0;
    *ret = NONE;
    return ST_OK;
}

METHOD(cycle)
{
    (void)r;
    if (all->n_positional == 0) return status_fail(ST_INVALID, "no items for cycling given");
    *ret = all->positional[(loop_index(v[0].loop) - 1) % all->n_positional];
    return ST_OK;
}

METHOD(changed)
{
    return loop_changed(r, v[0].loop, all, ret);
}

static const struct builtin list_methods[] = {
    {"count", count, "/value", 1},
    {"index", index_of, "/value start stop", 1},
    {"copy", copy, "", 0}, // lists only
};
static const struct builtin dict_methods[] = {
    {"get", get, "/key default", 1}, {"items", items, "", 0}, {"keys", keys, "", 0},
    {"values", values, "", 0},       {"copy", copy, "", 0},
};
static const struct builtin float_methods[] = {{"is_integer", is_integer, "", 0}};
static const struct builtin int_methods[] = {{"bit_length", bit_length, "", 0}};
static const struct builtin cycler_methods[] = {{"next", next, "", 0}, {"reset", reset, "", 0}};
static const struct builtin loop_methods[] = {{"cycle", cycle, NULL, 0},
                                              {"changed", changed, NULL, 0}};

static const struct builtin *string_method(const struct string *name)
{
    const struct builtin *f = builtin_find(case_methods, n_case_methods, name);
    if (!f) f = builtin_find(search_methods, n_search_methods, name);
    return f ? f : builtin_find(split_methods, n_split_methods, name);
}

#define FIND(table) builtin_find(table, sizeof(table) / sizeof *(table), name)

const struct builtin *method_find(const struct value *of, const struct string *name)
{
    switch (of->kind) {
    case V_STRING:
        return string_method(name);
    case V_LIST:
        return FIND(list_methods);
    case V_TUPLE:
    case V_RANGE:
        return string_is(name, "copy") ? NULL : FIND(list_methods);
    case V_DICT:
        return FIND(dict_methods);
    case V_FLOAT:
        return FIND(float_methods);
    case V_INT:
    case V_BOOL:
        return FIND(int_methods);
    case V_CYCLER:
        return FIND(cycler_methods);
    case V_LOOP:
        return FIND(loop_methods);
    default:
        return NULL;
    }
}
