/* filters_order.c: filters that order, compare and group items by a key: sort, min, unique,
 * groupby. One thread. */
#include "common/jinja/run.h"

// What items are compared by.
struct key {
    struct value path, otherwise;
    bool sensitive; // to case; else strings are compared in lower case
    bool several;   // the path may name several ("a,b.c")
};

static struct value item_key(struct run *r, struct value item, struct value path,
                             const struct key *by)
{
    struct value key = get_path(r, item, path, by->otherwise);
    return key.kind == V_STRING && !by->sensitive ? string_lower(r, key.string) : key;
}

// The items, each under its key.
static struct dict keyed(struct run *r, struct value of, const struct key *by)
{
    static const struct string comma = {",", 1, 1, false};
    struct list items = value_items(r, of), paths = {.n = 0};
    struct dict d = *dict_new(&r->arena, items.n).dict;
    bool several = by->several && by->path.kind == V_STRING;
    if (several) paths = split_string(r, by->path.string, &comma, -1);
    for (size_t i = 0; i < items.n; i++) {
        struct value key = several ? list_new(&r->arena, V_LIST, paths.n)
                                   : item_key(r, items.items[i], by->path, by);
        for (size_t k = 0; k < paths.n; k++)
            key.list->items[k] = item_key(r, items.items[i], paths.items[k], by);
        dict_append(&r->arena, &d, key, items.items[i]);
    }
    return d;
}

static struct value sorted(struct run *r, struct value of, const struct key *by, bool backwards)
{
    struct dict d = keyed(r, of, by);
    entries_sort(r, &d, backwards);
    return dict_view(r, &d, V_VALUES);
}

static struct value as_list(struct run *r, struct value view)
{
    return list_of(&r->arena, V_LIST, *view.list);
}

BUILTIN(sort)
{
    const struct key by = {c->v[3], MISSING, arg_truth(c, 2, false), true};
    return as_list(r, sorted(r, c->v[0], &by, arg_truth(c, 1, false)));
}

BUILTIN(dictsort)
{
    bool by_value = value_is(c->v[2], "value");
    const struct key by = {value_int(by_value), MISSING, arg_truth(c, 1, false), false};
    if (c->v[0].kind != V_DICT) type_fail(r, "dictsort wants a mapping", c->v[0]);
    if (given(c->v[2]) && !by_value && !value_is(c->v[2], "key"))
        fail(r, "You can only sort by either \"key\" or \"value\"");
    struct value items = dict_view(r, c->v[0].dict, V_ITEMS);
    return as_list(r, sorted(r, items, &by, arg_truth(c, 3, false)));
}

// which: T_LT for the least, T_GT for the most
BUILTIN(extreme)
{
    const struct key by = {c->v[2], MISSING, arg_truth(c, 1, false), false};
    struct dict d = keyed(r, c->v[0], &by);
    const struct dict_entry *best = d.entries;
    if (d.n == 0) return undefined_because(r, "No aggregated item, sequence was empty.");
    for (const struct dict_entry *e = d.entries; e < d.entries + d.n; e++)
        if (e != best && value_compare(r, c->function->which, e->key, best->key)) best = e;
    return best->value;
}

BUILTIN(unique)
{
    const struct key by = {c->v[2], MISSING, arg_truth(c, 1, false), false};
    struct dict d = keyed(r, c->v[0], &by), *seen = dict_new(&r->arena, 8).dict;
    for (size_t i = 0; i < d.n; i++)
        if (!given(dict_find(r, seen, d.entries[i].key)))
            dict_append(&r->arena, seen, d.entries[i].key, d.entries[i].value);
    return iterator_of(&r->arena, *dict_view(r, seen, V_VALUES).list);
}

// Pairs of key and items; the key as the first item of its group has it.
BUILTIN(groupby)
{
    const struct key by = {c->v[1], c->v[2], arg_truth(c, 3, false), false};
    struct dict d = keyed(r, c->v[0], &by);
    entries_sort(r, &d, false);
    struct value items = dict_view(r, &d, V_VALUES);
    struct list found = {.items = arena_array(&r->arena, d.n, sizeof *found.items)};
    for (size_t start = 0, end; start < d.n; start = end) {
        end = start + 1;
        while (end < d.n && value_equal(r, d.entries[start].key, d.entries[end].key)) end++;
        struct list members = {.items = items.list->items + start, .n = end - start};
        struct value pair = pair_of(&r->arena, get_path(r, members.items[0], c->v[1], c->v[2]),
                                    list_of(&r->arena, V_LIST, members));
        struct list group = {pair.list->items, 2, .group = true};
        found.items[found.n++] = list_of(&r->arena, V_TUPLE, group);
    }
    return list_of(&r->arena, V_LIST, found);
}

const struct builtin order_builtins[] = {
    {FILTER, "sort", sort, 0, "reverse case_sensitive attribute", 0},
    {FILTER, "dictsort", dictsort, 0, "case_sensitive by reverse", 0},
    {FILTER, "min", extreme, T_LT, "case_sensitive attribute", 0},
    {FILTER, "max", extreme, T_GT, "case_sensitive attribute", 0},
    {FILTER, "unique", unique, 0, "~case_sensitive attribute", 0},
    {FILTER, "groupby", groupby, 0, "attribute default case_sensitive", 1},
    {.name = NULL},
};
