/* filters_list.c: filters that go over items: their ends, sums and slices, map and select. Those
 * that give a generator in Jinja give an iterator here: true even when empty, without a length,
 * gone over once. One thread. */
#include "common/jinja/run.h"

// ---- ends ---------------------------------------------------------------------------------------

BUILTIN(first)
{
    struct iterator *i = c->v[0].kind == V_ITERATOR ? c->v[0].iterator : NULL;
    if (i && i->at < i->items.n) return i->items.items[i->at++]; // takes no more than the one
    struct list items = value_items(r, c->v[0]);
    return items.n ? items.items[0] : undefined_because(r, "No first item, sequence was empty.");
}

BUILTIN(last)
{
    if (!value_has_length(c->v[0]) || c->v[0].kind == V_LOOP)
        fail(r, "'%s' object is not reversible", value_type(c->v[0]));
    struct list items = value_items(r, c->v[0]);
    return items.n ? items.items[items.n - 1]
                   : undefined_because(r, "No last item, sequence was empty.");
}

BUILTIN(length)
{
    return value_int(value_length(r, c->v[0]));
}

BUILTIN(list)
{
    return list_of(&r->arena, V_LIST, value_items(r, c->v[0]));
}

BUILTIN(reverse)
{
    const struct value backwards[3] = {NONE, NONE, value_int(-1)};
    if (c->v[0].kind == V_STRING) return get_slice(r, c->v[0], backwards);
    if (!value_is_iterable(c->v[0])) type_fail(r, "argument must be iterable", c->v[0]);
    struct list items = items_copy(r, c->v[0]);
    items_reverse(items);
    return c->v[0].kind == V_ITERATOR ? list_of(&r->arena, V_LIST, items)
                                      : iterator_of(&r->arena, items);
}

BUILTIN(join)
{
    struct list items = value_items(r, c->v[0]);
    struct value between = given(c->v[1]) ? value_str(r, c->v[1]) : MISSING;
    size_t text = text_begin(r);
    for (size_t i = 0; i < items.n; i++) {
        struct value item = get_path(r, items.items[i], c->v[2], MISSING);
        if (i > 0 && given(between)) run_put_string(r, between.string);
        put_str(r, item);
    }
    return text_end(r, text, false);
}

BUILTIN(sum)
{
    struct list items = value_items(r, c->v[0]);
    struct value total = given(c->v[2]) ? c->v[2] : value_int(0);
    if (total.kind == V_STRING) fail(r, "sum() can't sum strings [use ''.join(seq) instead]");
    for (size_t i = 0; i < items.n; i++)
        total = arithmetic(r, T_ADD, total, get_path(r, items.items[i], c->v[1], MISSING));
    return total;
}

BUILTIN(items)
{
    struct value v = c->v[0];
    if (v.kind == V_UNDEFINED) return iterator_of(&r->arena, (struct list){.n = 0});
    if (v.kind != V_DICT) fail(r, "Can only get item pairs from a mapping.");
    return iterator_of(&r->arena, *dict_view(r, v.dict, V_ITEMS).list);
}

// ---- slices -------------------------------------------------------------------------------------

// Items [start, end) as a list, and behind them `fill` times parameter 2.
static struct value slice_of(const struct call *c, struct list items, size_t start, size_t end,
                             size_t fill)
{
    struct value slice = list_new(&c->run->arena, V_LIST, end - start + fill);
    for (size_t i = 0; i < slice.list->n; i++)
        slice.list->items[i] = start + i < end ? items.items[start + i] : c->v[2];
    return slice;
}

static struct list room_for(struct run *r, size_t n)
{
    return (struct list){.items = arena_array(&r->arena, n, sizeof(struct value))};
}

BUILTIN(batch)
{
    struct list items = value_items(r, c->v[0]);
    int64_t size = 0;
    if (!value_as_int(c->v[1], &size) && c->v[1].kind != V_FLOAT)
        type_fail(r, "batch wants a number", c->v[1]);
    if (size <= 0) size = items.n ? (int64_t)items.n : 1; // never full
    size_t each = (size_t)size;
    struct list batches = room_for(r, items.n / each + 1);
    for (size_t at = 0; at < items.n; at += each) {
        size_t end = items.n - at < each ? items.n : at + each;
        size_t fill = arg_given(c, 2) ? each - (end - at) : 0;
        batches.items[batches.n++] = slice_of(c, items, at, end, fill);
    }
    return iterator_of(&r->arena, batches);
}

BUILTIN(slice)
{
    struct list items = value_items(r, c->v[0]);
    int64_t number = 0;
    if (!value_as_int(c->v[1], &number)) type_fail(r, "slice wants a whole number", c->v[1]);
    if (number == 0) fail(r, "integer division or modulo by zero");
    size_t n = number < 0 ? 0 : (size_t)number, at = 0;
    run_steps(r, n);
    struct list slices = room_for(r, n);
    while (slices.n < n) {
        bool longer = slices.n < items.n % n;
        size_t end = at + items.n / n + longer;
        slices.items[slices.n++] = slice_of(c, items, at, end, arg_given(c, 2) && !longer);
        at = end;
    }
    return iterator_of(&r->arena, slices);
}

// ---- map, select and the like -------------------------------------------------------------------

static struct value named(const struct call *c, const char *name)
{
    struct string key = {name, strlen(name), strlen(name), false};
    const struct dict_entry *e = entry_named(c->run, &c->all->named, &key);
    return e ? e->value : MISSING;
}

// A filter or a test of an item: argument n is its name, those behind it are its own.
static struct value apply_named(const struct call *c, size_t n, bool is_test, struct value item)
{
    const struct arguments *all = c->all;
    const char *kind = is_test ? "test" : "filter";
    const struct string *name = need_string(c->run, all->positional.items[n], kind);
    const struct builtin *f = builtin_find(is_test ? TEST : FILTER, name);
    struct arguments behind = {
        {.items = all->positional.items + n + 1, .n = all->positional.n - n - 1}, all->named};
    if (!f) fail(c->run, "No %s named '%.*s'.", kind, SHOWN(name));
    return builtin_invoke(c->run, f, item, &behind);
}

static struct value map_item(const struct call *c, struct value item)
{
    const struct arguments *all = c->all;
    struct value attribute = named(c, "attribute");
    if (all->positional.n > 0) return apply_named(c, 0, false, item);
    if (!given(attribute)) fail(c->run, "map requires a filter argument");
    for (size_t i = 0; i < all->named.n; i++)
        if (string_word(all->named.entries[i].key.string, "attribute default") < 0)
            fail(c->run, "Unexpected keyword argument '%.*s'",
                 SHOWN(all->named.entries[i].key.string));
    return get_path(c->run, item, attribute, named(c, "default"));
}

BUILTIN(map)
{
    struct list mapped = {.n = 0};
    if (value_truth(r, c->v[0])) mapped = items_copy(r, c->v[0]);
    for (size_t i = 0; i < mapped.n; i++) mapped.items[i] = map_item(c, mapped.items[i]);
    return iterator_of(&r->arena, mapped);
}

enum { REJECT = 1, BY_ATTRIBUTE = 2 };

static bool is_selected(const struct call *c, struct value item)
{
    size_t n = 0;
    if (c->function->which & BY_ATTRIBUTE)
        item = get_path(c->run, item, c->all->positional.items[n++], MISSING);
    if (c->all->positional.n == n) return value_truth(c->run, item);
    return apply_named(c, n, true, item).truth;
}

// which: REJECT, BY_ATTRIBUTE
BUILTIN(select_items)
{
    struct list items = {.n = 0};
    if (value_truth(r, c->v[0])) {
        if (c->function->which & BY_ATTRIBUTE && c->all->positional.n == 0)
            fail(r, "Missing parameter for attribute name");
        items = items_copy(r, c->v[0]);
    }
    struct list kept = {.items = items.items};
    for (size_t i = 0; i < items.n; i++)
        if (is_selected(c, items.items[i]) != (c->function->which & REJECT))
            kept.items[kept.n++] = items.items[i];
    return iterator_of(&r->arena, kept);
}

const struct builtin list_builtins[] = {
    {FILTER, "first", first, 0, "", 0},
    {FILTER, "last", last, 0, "", 0},
    {FILTER, "length count", length, 0, "", 0},
    {FILTER, "list", list, 0, "", 0},
    {FILTER, "reverse", reverse, 0, "", 0},
    {FILTER, "join", join, 0, "d attribute", 0},
    {FILTER, "sum", sum, 0, "attribute start", 0},
    {FILTER, "items", items, 0, "~", 0},
    {FILTER, "batch", batch, 0, "~linecount fill_with", 1},
    {FILTER, "slice", slice, 0, "~slices fill_with", 1},
    {FILTER, "map", map, 0, "~*", 0},
    {FILTER, "select", select_items, 0, "~*", 0},
    {FILTER, "reject", select_items, REJECT, "~*", 0},
    {FILTER, "selectattr", select_items, BY_ATTRIBUTE, "~*", 0},
    {FILTER, "rejectattr", select_items, BY_ATTRIBUTE | REJECT, "~*", 0},
    {.name = NULL},
};
