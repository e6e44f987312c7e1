/* filters_order.c: filters that order, compare and group items by a key: sort, min, unique,
 * groupby. One thread. */
#include "common/jinja/filters.h"
#include "common/jinja/strings.h"

// What stands at `path` in an item, a string in lower case unless `sensitive`.
static struct value item_key(struct run *r, struct value item, struct value path,
                             struct value otherwise, bool sensitive)
{
    struct value key = get_path(r, item, path, otherwise);
    return key.kind == V_STRING && !sensitive ? string_lower(r, key.string) : key;
}

// A key for each item; `path` may name several ("a,b.c").
static struct value *keys_of(struct run *r, struct list items, struct value path,
                             struct value otherwise, bool sensitive, bool several)
{
    static const struct string comma = {",", 1, 1, false};
    struct value *keys = arena_array(&r->arena, items.n, sizeof *keys);
    several &= path.kind == V_STRING;
    struct list paths = {.items = &path, .n = 1};
    if (several) paths = split_string(r, path.string, &comma, -1);
    for (size_t i = 0; i < items.n; i++) {
        if (!several) {
            keys[i] = item_key(r, items.items[i], path, otherwise, sensitive);
            continue;
        }
        keys[i] = list_new(&r->arena, V_LIST, paths.n);
        for (size_t k = 0; k < paths.n; k++)
            keys[i].list->items[k] =
                item_key(r, items.items[i], paths.items[k], otherwise, sensitive);
    }
    return keys;
}

static BUILTIN(sort)
{
    struct list items = items_copy(c->run, c->v[0]);
    bool backwards = arg_truth(c, 1, false), sensitive = arg_truth(c, 2, false);
    items_sort(c->run, items, keys_of(c->run, items, c->v[3], MISSING, sensitive, true), backwards);
    return list_of(&c->run->arena, V_LIST, items);
}

static BUILTIN(dictsort)
{
    struct run *r = c->run;
    bool by_value = value_is(c->v[2], "value"), backwards = arg_truth(c, 3, false);
    if (c->v[0].kind != V_DICT) type_fail(r, "dictsort wants a mapping", c->v[0]);
    if (given(c->v[2]) && !by_value && !value_is(c->v[2], "key"))
        fail(r, "You can only sort by either \"key\" or \"value\"");
    struct list items = value_items(r, dict_view(r, c->v[0].dict, VIEW_ITEMS));
    struct value *keys =
        keys_of(r, items, value_int(by_value), MISSING, arg_truth(c, 1, false), false);
    items_sort(r, items, keys, backwards);
    return list_of(&r->arena, V_LIST, items);
}

// which: T_LT for the least, T_GT for the most
static BUILTIN(extreme)
{
    struct run *r = c->run;
    struct list items = value_items(r, c->v[0]);
    if (items.n == 0) return undefined_because(r, "No aggregated item, sequence was empty.");
    struct value *keys = keys_of(r, items, c->v[2], MISSING, arg_truth(c, 1, false), false);
    size_t best = 0;
    for (size_t i = 1; i < items.n; i++)
        if (value_compare(r, c->function->which, keys[i], keys[best])) best = i;
    return items.items[best];
}

static BUILTIN(unique)
{
    struct run *r = c->run;
    struct list items = items_copy(r, c->v[0]), kept = {.items = items.items};
    struct dict *seen = dict_new(&r->arena, 8).dict;
    bool sensitive = arg_truth(c, 1, false);
    for (size_t i = 0; i < items.n; i++) {
        struct value key = item_key(r, items.items[i], c->v[2], MISSING, sensitive);
        if (given(dict_find(r, seen, key))) continue;
        dict_append(&r->arena, seen, key, NONE);
        kept.items[kept.n++] = items.items[i];
    }
    return iterator_of(&r->arena, kept);
}

// Pairs of key and items; the key as the first item of its group has it.
static BUILTIN(groupby)
{
    struct run *r = c->run;
    struct list items = items_copy(r, c->v[0]);
    struct value *keys = keys_of(r, items, c->v[1], c->v[2], arg_truth(c, 3, false), false);
    items_sort(r, items, keys, false);
    struct list groups = {.items = arena_array(&r->arena, items.n, sizeof *groups.items)};
    for (size_t start = 0, end; start < items.n; start = end) {
        for (end = start + 1; end < items.n && value_equal(r, keys[start], keys[end]);) end++;
        struct list members = {.items = items.items + start, .n = end - start};
        struct list pair = {.items = arena_array(&r->arena, 2, sizeof *pair.items), 2, true};
        pair.items[0] = get_path(r, members.items[0], c->v[1], c->v[2]);
        pair.items[1] = list_of(&r->arena, V_LIST, members);
        groups.items[groups.n++] = list_of(&r->arena, V_TUPLE, pair);
    }
    return list_of(&r->arena, V_LIST, groups);
}

const struct builtin order_filters[] = {
    {"sort", sort, 0, "reverse case_sensitive attribute", 0},
    {"dictsort", dictsort, 0, "case_sensitive by reverse", 0},
    {"min", extreme, T_LT, "case_sensitive attribute", 0},
    {"max", extreme, T_GT, "case_sensitive attribute", 0},
    {"unique", unique, 0, "~case_sensitive attribute", 0},
    {"groupby", groupby, 0, "attribute default case_sensitive", 1},
    {.name = NULL},
};
