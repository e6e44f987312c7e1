/* items.c: filters that go over items, the methods of lists, dicts, numbers and cyclers, tests, and
 * the functions that a template finds without being given them. Filters that give a generator in
 * Jinja give an iterator here: true even when empty, without a length, gone over once. Methods that
 * would change a list or a dict are not here: Jinja's sandbox forbids them (object.c). One
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/object.h"
#include <math.h>

// ---- ends, sums and slices ----------------------------------------------------------------------

// which: whether it is the last
BUILTIN(end_of)
{
    bool last = c->function->which;
    struct iterator *i = v->kind == V_ITERATOR ? v->iterator : NULL;
    if (last && (i || v->kind == V_LOOP || !of_kinds(*v, SIZED)))
        fail(r, "'%s' object is not reversible", value_type(*v));
    if (i && i->at < i->items.n) return i->items.items[i->at++]; // takes no more than the one
    struct list items = value_items(r, *v);
    if (items.n > 0) return items.items[last ? items.n - 1 : 0];
    return undefined_because(r, "No %s item, sequence was empty.", last ? "last" : "first");
}

BUILTIN(length)
{
    return value_int(value_length(r, *v));
}

BUILTIN(list)
{
    return list_of(r, V_LIST, value_items(r, *v));
}

BUILTIN(reverse)
{
    const struct value backwards[3] = {NONE, NONE, value_int(-1)};
    if (v->kind == V_STRING) return get_slice(r, *v, backwards);
    if (!of_kinds(*v, ITERABLES)) type_fail(r, "argument must be iterable", *v);
    struct list items = items_copy(r, *v);
    items_reverse(items);
    return v->kind == V_ITERATOR ? list_of(r, V_LIST, items) : iterator_of(r, items);
}

// d, attribute
BUILTIN(join)
{
    struct list items = value_items(r, *v);
    struct value between = given(v[1]) ? value_str(r, v[1]) : string_of(r, "");
    for (size_t i = 0; i < items.n; i++) {
        struct value item = get_path(r, items.items[i], v[2], MISSING);
        if (i > 0) put_string(r, between.string);
        put_str(r, item);
    }
    return TEXT(false);
}

// attribute, start
BUILTIN(sum)
{
    struct list items = value_items(r, *v);
    struct value total = given(v[2]) ? v[2] : value_int(0);
    if (total.kind == V_STRING) fail(r, "sum() can't sum strings [use ''.join(seq) instead]");
    for (size_t i = 0; i < items.n; i++)
        total = arithmetic(r, '+', total, get_path(r, items.items[i], v[1], MISSING));
    return total;
}

BUILTIN(items)
{
    if (v->kind == V_UNDEFINED) return iterator_of(r, LIST(NULL, 0));
    if (v->kind != V_DICT) fail(r, "Can only get item pairs from a mapping.");
    return iterator_of(r, *dict_view(r, v->dict, V_ITEMS).list);
}

// Items [start, end) as a list, and behind them `fill` times a value.
static struct value slice_of(struct render *r, struct list items, size_t start, size_t end,
                             size_t fill, struct value with)
{
    struct value slice = list_new(r, V_LIST, end - start + fill);
    for (size_t i = 0; i < slice.list->n; i++)
        slice.list->items[i] = start + i < end ? items.items[start + i] : with;
    return slice;
}

// linecount, fill_with
BUILTIN(batch)
{
    struct list items = value_items(r, *v);
    int64_t size = 0;
    if (!value_as_int(v[1], &size) && v[1].kind != V_FLOAT)
        type_fail(r, "batch wants a number", v[1]);
    if (size <= 0) size = items.n ? (int64_t)items.n : 1; // never full
    size_t each = (size_t)size;
    struct list batches = LIST(run_alloc(r, items.n / each + 1, sizeof(struct value)), 0);
    for (size_t at = 0; at < items.n; at += each) {
        size_t end = items.n - at < each ? items.n : at + each;
        size_t fill = v[2].kind > V_NONE ? each - (end - at) : 0;
        batches.items[batches.n++] = slice_of(r, items, at, end, fill, v[2]);
    }
    return iterator_of(r, batches);
}

// slices, fill_with
BUILTIN(slice)
{
    struct list items = value_items(r, *v);
    if (v[1].integer == 0) fail(r, "integer division or modulo by zero");
    size_t n = v[1].integer < 0 ? 0 : (size_t)v[1].integer, at = 0;
    run_steps(r, n);
    struct list slices = LIST(run_alloc(r, n, sizeof(struct value)), 0);
    while (slices.n < n) {
        bool longer = slices.n < items.n % n;
        size_t end = at + items.n / n + longer;
        slices.items[slices.n++] = slice_of(r, items, at, end, v[2].kind > V_NONE && !longer, v[2]);
        at = end;
    }
    return iterator_of(r, slices);
}

// ---- map, select and the like -------------------------------------------------------------------

// A filter or a test of an item: argument n is its name, those behind it are its own.
static struct value apply_named(struct render *r, const struct arguments *all, size_t n,
                                bool is_test, struct value item)
{
    const char *kind = is_test ? "test" : "filter";
    struct value name = all->positional.items[n];
    struct arguments behind = {LIST(all->positional.items + n + 1, all->positional.n - n - 1),
                               all->named};
    if (name.kind != V_STRING) type_fail(r, "the name of a filter or test must be a text", name);
    const struct builtin *f = builtin_find(r, is_test ? TEST : FILTER, name.string);
    if (!f) fail(r, "No %s named '%s'.", kind, SHOWN(name.string));
    return builtin_invoke(r, f, item, &behind);
}

// A filter, or attribute and default by name.
static struct value map_item(struct render *r, const struct arguments *all, struct value item)
{
    struct value by[2] = {MISSING, MISSING};
    if (all->positional.n > 0) return apply_named(r, all, 0, false, item);
    for (size_t i = 0; i < all->named.n; i++) {
        const struct string *name = all->named.entries[i].key.string;
        int which = string_word(name, "attribute default");
        if (which < 0) fail(r, "Unexpected keyword argument '%s'", SHOWN(name));
        by[which] = all->named.entries[i].value;
    }
    if (!given(by[0])) fail(r, "map requires a filter argument");
    return get_path(r, item, by[0], by[1]);
}

BUILTIN(map)
{
    struct list mapped = LIST(NULL, 0);
    if (value_truth(r, *v)) mapped = items_copy(r, *v);
    for (size_t i = 0; i < mapped.n; i++) mapped.items[i] = map_item(r, c->all, mapped.items[i]);
    return iterator_of(r, mapped);
}

enum { REJECT = 1, BY_ATTRIBUTE = 2 };

// which: REJECT, BY_ATTRIBUTE
BUILTIN(select_items)
{
    const struct list *named = &c->all->positional;
    bool by_attribute = c->function->which & BY_ATTRIBUTE, reject = c->function->which & REJECT;
    struct list items = LIST(NULL, 0);
    if (value_truth(r, *v)) {
        if (by_attribute && named->n == 0) fail(r, "Missing parameter for attribute name");
        items = items_copy(r, *v);
    }
    struct list kept = {.items = items.items};
    for (size_t i = 0; i < items.n; i++) {
        struct value item = items.items[i];
        if (by_attribute) item = get_path(r, item, named->items[0], MISSING);
        if (named->n > by_attribute) item = apply_named(r, c->all, by_attribute, true, item);
        if (value_truth(r, item) != reject) kept.items[kept.n++] = items.items[i];
    }
    return iterator_of(r, kept);
}

// ---- order: filters that order, compare and group items by a key --------------------------------

static struct value item_key(struct render *r, struct value item, struct value path,
                             struct value otherwise, bool sensitive)
{
    struct value key = get_path(r, item, path, otherwise);
    return key.kind == V_STRING && !sensitive ? string_lower(r, key.string) : key;
}

// The items, each under its key: what `path` leads to, or `otherwise`; in lower case unless
// `sensitive`.
static struct dict keyed(struct render *r, struct value of, struct value path,
                         struct value otherwise, bool sensitive)
{
    struct list items = value_items(r, of);
    struct dict d = *dict_new(r, items.n).dict;
    for (size_t i = 0; i < items.n; i++)
        dict_append(r, &d, item_key(r, items.items[i], path, otherwise, sensitive), items.items[i]);
    return d;
}

static struct value sorted(struct render *r, struct dict d, bool backwards)
{
    entries_sort(r, &d, backwards);
    return list_of(r, V_LIST, *dict_view(r, &d, V_VALUES).list);
}

// reverse, case_sensitive, attribute: one, or several ("a,b.c")
BUILTIN(sort)
{
    static const struct string comma = STRING(",");
    struct dict d = keyed(r, *v, MISSING, MISSING, true);
    struct list paths = LIST((struct value *)&v[3], 1); // only read
    bool several = v[3].kind == V_STRING;
    if (several) paths = split_string(r, v[3].string, &comma, -1, false);
    for (size_t i = 0; i < d.n; i++) {
        struct value keys = list_new(r, V_LIST, paths.n);
        for (size_t k = 0; k < paths.n; k++)
            keys.list->items[k] =
                item_key(r, d.entries[i].value, paths.items[k], MISSING, v[2].truth);
        d.entries[i].key = several ? keys : keys.list->items[0];
    }
    return sorted(r, d, v[1].integer != 0);
}

// case_sensitive, by, reverse
BUILTIN(dictsort)
{
    bool by_value = value_is(v[2], "value");
    if (v->kind != V_DICT) type_fail(r, "dictsort wants a mapping", *v);
    if (given(v[2]) && !by_value && !value_is(v[2], "key"))
        fail(r, "You can only sort by either \"key\" or \"value\"");
    struct value pairs = dict_view(r, v->dict, V_ITEMS);
    return sorted(r, keyed(r, pairs, value_int(by_value), MISSING, v[1].truth), v[3].integer != 0);
}

// case_sensitive, attribute; which: '<' for the least, '>' for the most
BUILTIN(extreme)
{
    struct dict d = keyed(r, *v, v[2], MISSING, v[1].truth);
    const struct dict_entry *best = d.entries;
    if (d.n == 0) return undefined_because(r, "No aggregated item, sequence was empty.");
    for (const struct dict_entry *e = d.entries + 1; e < d.entries + d.n; e++)
        if (value_compare(r, (enum token_type)c->function->which, e->key, best->key)) best = e;
    return best->value;
}

// case_sensitive, attribute
BUILTIN(unique)
{
    struct dict d = keyed(r, *v, v[2], MISSING, v[1].truth), *seen = dict_new(r, 8).dict;
    for (size_t i = 0; i < d.n; i++)
        if (!dict_look(r, seen, d.entries[i].key))
            dict_append(r, seen, d.entries[i].key, d.entries[i].value);
    return iterator_of(r, *dict_view(r, seen, V_VALUES).list);
}

// attribute, default, case_sensitive. Pairs of key and items; the key as the first item of its
// group has it.
BUILTIN(groupby)
{
    struct dict d = keyed(r, *v, v[1], v[2], v[3].truth);
    struct value items = sorted(r, d, false);
    struct list found = LIST(run_alloc(r, d.n, sizeof *found.items), 0);
    for (size_t start = 0, end; start < d.n; start = end) {
        end = start + 1;
        while (end < d.n && value_equal(r, d.entries[start].key, d.entries[end].key)) end++;
        struct list members = LIST(items.list->items + start, end - start);
        struct value pair =
            pair_of(r, get_path(r, members.items[0], v[1], v[2]), list_of(r, V_LIST, members));
        found.items[found.n++] =
            list_of(r, V_TUPLE, (struct list){pair.list->items, 2, .group = true});
    }
    return list_of(r, V_LIST, found);
}

// ---- methods ------------------------------------------------------------------------------------

BUILTIN(count)
{
    struct list items = value_items(r, *v);
    int64_t n = 0;
    for (size_t i = 0; i < items.n; i++) n += value_equal(r, items.items[i], v[1]);
    return value_int(n);
}

// value, start, stop
BUILTIN(index_of)
{
    struct list items = value_items(r, *v);
    int64_t start, end;
    window_of(v, (int64_t)items.n, &start, &end);
    for (int64_t i = start; i < end; i++)
        if (value_equal(r, items.items[i], v[1])) return value_int(i);
    fail(r, "the value is not in the %s", value_type(*v));
}

// A copy, as nothing changes either; or the text that it was made.
BUILTIN(itself)
{
    return *v;
}

// key, default
BUILTIN(get)
{
    struct value item = dict_find(r, v->dict, v[1]);
    return given(item) ? item : given(v[2]) ? v[2] : NONE;
}

BUILTIN(view)
{
    return dict_view(r, v->dict, (enum value_kind)c->function->which);
}

BUILTIN(is_integer)
{
    return value_bool(isfinite(v->real) && floor(v->real) == v->real);
}

BUILTIN(bit_length)
{
    int64_t x = 0, n = 0;
    value_as_int(*v, &x);
    for (uint64_t size = x < 0 ? 0 - (uint64_t)x : (uint64_t)x; size > 0; size >>= 1) n++;
    return value_int(n);
}

BUILTIN(next)
{
    struct iterator *cycler = v->iterator;
    struct value item = cycler->items.items[cycler->at];
    cycler->at = (cycler->at + 1) % cycler->items.n;
    return item;
}

BUILTIN(reset)
{
    v->iterator->at = 0;
    return NONE;
}

BUILTIN(loop_changed)
{
    struct value now = list_of(r, V_TUPLE, c->all->positional);
    bool same = given(v->loop->last_changed) && value_equal(r, v->loop->last_changed, now);
    v->loop->last_changed = now;
    return value_bool(!same);
}

BUILTIN(loop_cycle)
{
    size_t n = c->all->positional.n;
    if (n == 0) fail(r, "no items for cycling given");
    return c->all->positional.items[(size_t)v->loop->index0 % n];
}

// ---- tests: what may stand behind `is` ----------------------------------------------------------

// which: a set of kinds
BUILTIN(is_of_kind)
{
    return value_bool(c->function->which >> v->kind & 1);
}

// which: true or false
BUILTIN(is_truth)
{
    return value_bool(v->kind == V_BOOL && v->truth == c->function->which);
}

BUILTIN(is_escaped)
{
    return value_bool(v->kind == V_STRING && v->string->markup);
}

// The same object. Numbers and texts of one value count as one here, whatever Python does.
BUILTIN(is_same)
{
    if (v->kind != v[1].kind) return value_bool(false);
    return value_bool(v->kind <= V_STRING ? value_equal(r, *v, v[1]) : v->list == v[1].list);
}

// num; which: the remainder, by that or by two
BUILTIN(has_remainder)
{
    struct value by = given(v[1]) ? v[1] : value_int(2);
    return value_bool(value_equal(r, arithmetic(r, '%', *v, by), value_int(c->function->which)));
}

// which: the operator
BUILTIN(is_compared)
{
    return value_bool(value_compare(r, (enum token_type)c->function->which, *v, v[1]));
}

// which: FILTER or TEST
BUILTIN(is_known)
{
    return value_bool(v->kind == V_STRING && builtin_find(r, c->function->which, v->string));
}

// ---- functions ----------------------------------------------------------------------------------

BUILTIN(raise_exception)
{
    const struct string *text = value_str(r, v[1]).string;
    fail(r, "%s", text_cut(text->data, text->n_bytes, 1500, (char[1504]){0}));
}

// start, stop, step
BUILTIN(range)
{
    int64_t bound[3] = {0, 0, 1};
    for (int i = 0; i < 3; i++)
        if (given(v[i + 1]) && !value_as_int(v[i + 1], &bound[i]))
            type_fail(r, "range() wants whole numbers", v[i + 1]);
    if (!given(v[2])) return range_make(r, 0, bound[0], 1);
    return range_make(r, bound[0], bound[1], bound[2]);
}

BUILTIN(dict)
{
    const struct arguments *all = c->all;
    struct value d = dict_new(r, 4);
    if (all->positional.n > 1)
        fail(r, "dict expected at most 1 argument, got %zu", all->positional.n);
    struct value from = all->positional.n == 1 ? all->positional.items[0] : d; // a dict or pairs
    if (from.kind == V_DICT) from = dict_view(r, from.dict, V_ITEMS);
    struct list pairs = value_items(r, from);
    for (size_t i = 0; i < pairs.n; i++) {
        struct list pair = value_pair(r, pairs.items[i], "dictionary update sequence element");
        dict_set(r, d.dict, pair.items[0], pair.items[1]);
    }
    for (size_t i = 0; i < all->named.n; i++)
        dict_set(r, d.dict, all->named.entries[i].key, all->named.entries[i].value);
    return d;
}

BUILTIN(namespace)
{
    struct value space = dict(r, v, c);
    for (size_t i = 0; i < space.dict->n; i++) {
        struct value key = space.dict->entries[i].key;
        if (key.kind == V_STRING && key.string->n_bytes > 0 && key.string->data[0] == '_')
            fail(r, "Chat templates cannot store underscore-prefixed attributes on a namespace");
    }
    space.kind = V_NAMESPACE;
    return space;
}

BUILTIN(cycler)
{
    if (c->all->positional.n == 0) fail(r, "at least one item has to be provided");
    if (c->all->named.n > 0) fail(r, "cycler() takes no keyword arguments");
    struct value made = iterator_of(r, c->all->positional);
    made.kind = V_CYCLER;
    return made;
}

// sep
BUILTIN(joiner)
{
    struct value separator = list_new(r, V_LIST, 1);
    separator.list->items[0] = given(v[1]) ? v[1] : string_of(r, ", ");
    struct value made = iterator_of(r, *separator.list);
    made.kind = V_JOINER;
    return made;
}

// One item of strftime's: "%", flags ("-", "_", "0", "^", "#"), a width, one letter. Its end.
static const char *put_time(struct render *r, const char *mark, const char *end,
                            const struct tm *tm, long microseconds)
{
    char text[300], item[12];
    size_t n = 1;
    while (n < 8 && mark + n < end && strchr("-_0^#:EO123456789", mark[n]) && mark[n]) n++;
    n += mark + n < end;
    memcpy(item, mark, n);
    item[n] = 0;
    bool whole = n > 1 && strlen(item) == n;
    if (whole) run_steps(r, 8);
    if (!whole)
        put_bytes(r, mark, n);
    else if (strcmp(item, "%f") == 0)
        put_printf(r, "%06ld", microseconds);
    else if (item[n - 1] != 'z' && item[n - 1] != 'Z') // a time without a zone
        put_bytes(r, text, strftime(text, sizeof text, item, tm));
    return mark + n;
}

// format
BUILTIN(strftime_now)
{
    const char *at = v[1].string->data, *end = at + v[1].string->n_bytes;
    struct timespec now = {0, 0};
    struct tm tm;
    if (r->now)
        tm = *r->now;
    else if (clock_gettime(CLOCK_REALTIME, &now) != 0 || !localtime_r(&now.tv_sec, &tm))
        fail_as(r, ST_IO, "the clock cannot be read");
    while (at < end) {
        const char *mark = memchr(at, '%', (size_t)(end - at));
        put_bytes(r, at, (size_t)((mark ? mark : end) - at));
        at = mark ? put_time(r, mark, end, &tm, now.tv_nsec / 1000) : end;
    }
    return TEXT(false);
}

// ---- any value ----------------------------------------------------------------------------------

// default_value, boolean
BUILTIN(default_value)
{
    bool truth = value_truth(r, *v);
    if (v->kind != V_UNDEFINED && (truth || !v[2].truth)) return *v;
    return given(v[1]) ? v[1] : string_of(r, "");
}

// name
BUILTIN(attr)
{
    if (v->kind != V_DICT || builtin_find(r, METHOD(V_DICT), v[1].string))
        return get_attribute(r, *v, v[1]);
    return undefined_item(r, *v, v[1]); // an item is not an attribute
}

#define CALLABLES                                                                                  \
    (KIND(V_MACRO) | KIND(V_FUNCTION) | KIND(V_METHOD) | KIND(V_JOINER) | KIND(V_LOOP) |           \
     KIND(V_UNDEFINED))

const struct builtin item_builtins[] = {
    {FILTER, "default d", default_value, 0, "default_value boolean?", 0},
    {FILTER, "attr", attr, 0, "name$", 1},
    {FILTER, "first", end_of, false, "", 0},
    {FILTER, "last", end_of, true, "", 0},
    {FILTER, "length count", length, 0, "", 0},
    {FILTER, "list", list, 0, "", 0},
    {FILTER, "reverse", reverse, 0, "", 0},
    {FILTER, "join", join, 0, "d attribute", 0},
    {FILTER, "sum", sum, 0, "attribute start", 0},
    {FILTER, "items", items, 0, "~", 0},
    {FILTER, "batch", batch, 0, "~linecount fill_with", 1},
    {FILTER, "slice", slice, 0, "~slices# fill_with", 1},
    {FILTER, "map", map, 0, "~*", 0},
    {FILTER, "select", select_items, 0, "~*", 0},
    {FILTER, "reject", select_items, REJECT, "~*", 0},
    {FILTER, "selectattr", select_items, BY_ATTRIBUTE, "~*", 0},
    {FILTER, "rejectattr", select_items, BY_ATTRIBUTE | REJECT, "~*", 0},
    {FILTER, "sort", sort, 0, "reverse#0 case_sensitive? attribute", 0},
    {FILTER, "dictsort", dictsort, 0, "case_sensitive? by reverse#0", 0},
    {FILTER, "min", extreme, '<', "case_sensitive? attribute", 0},
    {FILTER, "max", extreme, '>', "case_sensitive? attribute", 0},
    {FILTER, "unique", unique, 0, "~case_sensitive? attribute", 0},
    {FILTER, "groupby", groupby, 0, "attribute default case_sensitive?", 1},
    {METHODS(PLACES & ~KIND(V_STRING)), "count", count, 0, "/value", 1},
    {METHODS(PLACES & ~KIND(V_STRING)), "index", index_of, 0, "/value start# stop#", 1},
    {METHODS(KIND(V_LIST) | KIND(V_DICT)), "copy", itself, 0, "", 0},
    {FILTER, "string", itself, 0, "$", 0},
    {METHOD(V_DICT), "get", get, 0, "/key default", 1},
    {METHOD(V_DICT), "items", view, V_ITEMS, "", 0},
    {METHOD(V_DICT), "keys", view, V_KEYS, "", 0},
    {METHOD(V_DICT), "values", view, V_VALUES, "", 0},
    {METHOD(V_FLOAT), "is_integer", is_integer, 0, "", 0},
    {METHODS(KIND(V_INT) | KIND(V_BOOL)), "bit_length", bit_length, 0, "", 0},
    {METHOD(V_CYCLER), "next", next, 0, "", 0},
    {METHOD(V_CYCLER), "reset", reset, 0, "", 0},
    {TEST, "defined", is_of_kind, (int)~KIND(V_UNDEFINED), "", 0},
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
    {TEST, "sequence", is_of_kind, PLACES | KIND(V_UNDEFINED) | KIND(V_DICT), "", 0},
    {TEST, "escaped", is_escaped, 0, "", 0},
    {TEST, "callable", is_of_kind, CALLABLES, "", 0},
    {TEST, "sameas", is_same, 0, "other", 1},
    {TEST, "odd", has_remainder, 1, "", 0},
    {TEST, "even", has_remainder, 0, "", 0},
    {TEST, "divisibleby", has_remainder, 0, "num", 1},
    {TEST, "eq equalto ==", is_compared, T_EQ, "/other", 1},
    {TEST, "ne !=", is_compared, T_NE, "/other", 1},
    {TEST, "gt greaterthan >", is_compared, '>', "/other", 1},
    {TEST, "ge >=", is_compared, T_GE, "/other", 1},
    {TEST, "lt lessthan <", is_compared, '<', "/other", 1},
    {TEST, "le <=", is_compared, T_LE, "/other", 1},
    {TEST, "in", is_compared, OP_IN, "seq", 1},
    {TEST, "filter", is_known, FILTER, "", 0},
    {TEST, "test", is_known, TEST, "", 0},
    {FUNCTION, "raise_exception", raise_exception, 0, "message", 1},
    {FUNCTION, "strftime_now", strftime_now, 0, "format$", 1},
    {FUNCTION, "range", range, 0, "/start stop step", 1},
    {FUNCTION, "dict", dict, 0, "*", 0},
    {FUNCTION, "namespace", namespace, 0, "*", 0},
    {FUNCTION, "cycler", cycler, 0, "*", 0},
    {FUNCTION, "joiner", joiner, 0, "sep", 0},
    {METHOD(V_LOOP), "cycle", loop_cycle, 0, "*", 0},
    {METHOD(V_LOOP), "changed", loop_changed, 0, "*", 0},
    {.name = NULL},
};
