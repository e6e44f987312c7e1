/* filters_list.c: filters that go over items. Those that give a generator in Jinja give an iterator
 * here: true even when empty, without a length, gone over once. One thread. */
#include "common/jinja/filters.h"

static enum status iterator_of(struct run *r, struct list items, struct value *ret)
{
    return iterator_make(&r->arena, items, ret);
}

// A generator fails when it is gone over, not when it is made: the filter `make` with its failure
// kept for then. Limits are not kept.
static enum status lazily(builtin_call make, struct run *r, const struct value *v,
                          const struct arguments *all, struct value *ret)
{
    int depth = r->depth;
    const struct node *failed_at = r->failed_at;
    struct value message;
    enum status st = make(r, v, all, ret);
    if (st != ST_INVALID || r->steps <= 0) return st;
    r->depth = depth;
    r->failed_at = failed_at;
    st = string_make(&r->arena, status_message(), strlen(status_message()), &message);
    if (st == ST_OK) st = iterator_of(r, (struct list){.n = 0}, ret);
    if (st == ST_OK) ret->iterator->failure = message.string->data;
    return st;
}

#define LAZY(name, make)                                                                           \
    BUILTIN(name)                                                                                  \
    {                                                                                              \
        return lazily(make, r, v, all, ret);                                                       \
    }

// Strings count in lower case unless told otherwise.
static enum status without_case(struct run *r, const struct value *sensitive, struct value *key)
{
    bool keep = false;
    enum status st = value_truth(r, sensitive, &keep);
    if (st != ST_OK || keep || !given(key) || key->kind != V_STRING) return st;
    struct value text = *key;
    return call_method(r, &text, "lower", NULL, 0, key);
}

static enum status key_of(struct run *r, const struct value *item, const struct value *path,
                          const struct value *otherwise, const struct value *sensitive,
                          struct value *ret)
{
    enum status st = get_path(r, item, path, otherwise, ret);
    return st == ST_OK ? without_case(r, sensitive, ret) : st;
}

// A copy of the items, to be reordered.
static enum status copy_items(struct run *r, const struct value *v, struct value **ret, size_t *n)
{
    struct list items;
    enum status st = value_items(r, v, &items);
    if (st != ST_OK) return st;
    *ret = arena_array(&r->arena, items.n, sizeof **ret);
    if (!*ret) return ST_NO_MEMORY;
    if (items.n > 0) memcpy(*ret, items.items, items.n * sizeof **ret);
    *n = items.n;
    return ST_OK;
}

// ---- ends ---------------------------------------------------------------------------------------

BUILTIN(first)
{
    struct list items;
    (void)all;
    if (v[0].kind == V_ITERATOR) { // takes no more than the one
        struct iterator *i = v[0].iterator;
        if (i->at < i->items.n) {
            *ret = i->items.items[i->at++];
            return ST_OK;
        }
    }
    enum status st = value_items(r, &v[0], &items);
    if (st != ST_OK) return st;
    if (items.n == 0)
        return undefined_make(r, "No first item, sequence was empty.", NULL, MISSING, ret);
    *ret = items.items[0];
    return ST_OK;
}

BUILTIN(last)
{
    struct list items;
    (void)all;
    if (!value_has_length(&v[0]) || v[0].kind == V_LOOP)
        return status_fail(ST_INVALID, "'%s' object is not reversible", value_type(&v[0]));
    enum status st = value_items(r, &v[0], &items);
    if (st != ST_OK) return st;
    if (items.n == 0)
        return undefined_make(r, "No last item, sequence was empty.", NULL, MISSING, ret);
    *ret = items.items[items.n - 1];
    return ST_OK;
}

BUILTIN(length)
{
    int64_t n = 0;
    (void)all;
    enum status st = value_length(r, &v[0], &n);
    *ret = value_int(n);
    return st;
}

BUILTIN(list)
{
    struct list items;
    (void)all;
    enum status st = value_items(r, &v[0], &items);
    return st == ST_OK ? list_of(r, items, ret) : st;
}

BUILTIN(reverse)
{
    struct value part[3] = {NONE, NONE, value_int(-1)}, *items;
    size_t n;
    (void)all;
    if (v[0].kind == V_STRING) return get_slice(r, &v[0], part, ret);
    if (!value_is_iterable(&v[0])) return type_fail("argument must be iterable", &v[0]);
    enum status st = copy_items(r, &v[0], &items, &n);
    if (st != ST_OK) return st;
    for (size_t i = 0; i < n / 2; i++) {
        struct value swap = items[i];
        items[i] = items[n - 1 - i];
        items[n - 1 - i] = swap;
    }
    struct list reversed = {.items = items, .n = n};
    return v[0].kind == V_ITERATOR ? list_of(r, reversed, ret) : iterator_of(r, reversed, ret);
}

BUILTIN(join)
{
    struct bytes text = BYTES_INIT;
    struct list items;
    struct value item, between;
    enum status st;
    (void)all;
    CHECK(value_items(r, &v[0], &items));
    CHECK(string_puts(&r->arena, "", &between));
    if (given(&v[1])) CHECK(value_str(r, &v[1], &between));
    for (size_t i = 0; st == ST_OK && i < items.n; i++) {
        st = get_path(r, &items.items[i], &v[2], NULL, &item);
        if (i > 0) run_put(r, &text, between.string->data, between.string->n_bytes);
        if (st == ST_OK) st = put_str(r, &item, &text);
    }
    return run_take(r, st, &text, ret);
out:
    return st;
}

// ---- order --------------------------------------------------------------------------------------

// Items with the keys that decide, one each; `attribute` may name several ("a,b.c").
static enum status sort_key(struct run *r, const struct value *item, const struct value *attribute,
                            const struct value *sensitive, struct value *ret)
{
    struct value comma, paths, *keys;
    enum status st;
    if (attribute->kind != V_STRING) return key_of(r, item, attribute, NULL, sensitive, ret);
    CHECK(string_puts(&r->arena, ",", &comma));
    CHECK(call_method(r, attribute, "split", &comma, 1, &paths));
    CHECK(list_make(&r->arena, V_LIST, paths.list->n, &keys, ret));
    for (size_t i = 0; i < paths.list->n; i++)
        CHECK(key_of(r, item, &paths.list->items[i], NULL, sensitive, &keys[i]));
out:
    return st;
}

BUILTIN(sort)
{
    struct value *items, *keys;
    size_t n;
    bool backwards = false;
    enum status st;
    (void)all;
    CHECK(copy_items(r, &v[0], &items, &n));
    CHECK(value_truth(r, &v[1], &backwards));
    keys = arena_array(&r->arena, n, sizeof *keys);
    if (!keys) return ST_NO_MEMORY;
    for (size_t i = 0; i < n; i++) CHECK(sort_key(r, &items[i], &v[3], &v[2], &keys[i]));
    CHECK(sort_by_keys(r, items, keys, n, backwards));
    st = list_of(r, (struct list){.items = items, .n = n}, ret);
out:
    return st;
}

BUILTIN(dictsort)
{
    struct value pairs, *items, *keys;
    size_t n;
    bool backwards = false, by_value = given(&v[2]) && value_is(&v[2], "value");
    enum status st;
    (void)all;
    if (v[0].kind != V_DICT) return type_fail("dictsort wants a mapping", &v[0]);
    if (given(&v[2]) && !by_value && !value_is(&v[2], "key"))
        return status_fail(ST_INVALID, "You can only sort by either \"key\" or \"value\"");
    CHECK(call_method(r, &v[0], "items", NULL, 0, &pairs));
    CHECK(copy_items(r, &pairs, &items, &n));
    CHECK(value_truth(r, &v[3], &backwards));
    keys = arena_array(&r->arena, n, sizeof *keys);
    if (!keys) return ST_NO_MEMORY;
    for (size_t i = 0; i < n; i++) {
        keys[i] = items[i].list->items[by_value];
        CHECK(without_case(r, &v[1], &keys[i]));
    }
    CHECK(sort_by_keys(r, items, keys, n, backwards));
    st = list_of(r, (struct list){.items = items, .n = n}, ret);
out:
    return st;
}

static enum status extreme(struct run *r, const struct value *v, int op, struct value *ret)
{
    struct list items;
    struct value best, key;
    bool better;
    enum status st;
    CHECK(value_items(r, &v[0], &items));
    if (items.n == 0)
        return undefined_make(r, "No aggregated item, sequence was empty.", NULL, MISSING, ret);
    for (size_t i = 0; i < items.n; i++) {
        CHECK(key_of(r, &items.items[i], &v[2], NULL, &v[1], &key));
        if (i > 0) CHECK(value_compare(r, op, &key, &best, &better));
        if (i > 0 && !better) continue;
        best = key;
        *ret = items.items[i];
    }
out:
    return st;
}

BUILTIN(least)
{
    (void)all;
    return extreme(r, v, T_LT, ret);
}

BUILTIN(most)
{
    (void)all;
    return extreme(r, v, T_GT, ret);
}

BUILTIN(unique_items)
{
    struct list items;
    struct value *kept, key, seen;
    size_t n = 0;
    enum status st;
    (void)all;
    CHECK(value_items(r, &v[0], &items));
    CHECK(dict_make(&r->arena, 8, &seen));
    kept = arena_array(&r->arena, items.n, sizeof *kept);
    if (!kept) return ST_NO_MEMORY;
    for (size_t i = 0; i < items.n; i++) {
        struct value before;
        CHECK(key_of(r, &items.items[i], &v[2], NULL, &v[1], &key));
        CHECK(dict_find(r, seen.dict, &key, &before));
        if (given(&before)) continue;
        CHECK(dict_append(&r->arena, seen.dict, key, NONE));
        kept[n++] = items.items[i];
    }
    st = iterator_of(r, (struct list){.items = kept, .n = n}, ret);
out:
    return st;
}

// ---- groups -------------------------------------------------------------------------------------

static enum status slice_of(struct run *r, const struct value *items, size_t start, size_t end,
                            size_t fill, const struct value *with, struct value *ret)
{
    struct value *copy;
    enum status st = list_make(&r->arena, V_LIST, end - start + fill, &copy, ret);
    if (st != ST_OK) return st;
    for (size_t i = start; i < end; i++) copy[i - start] = items[i];
    for (size_t i = 0; i < fill; i++) copy[end - start + i] = *with;
    return ST_OK;
}

static bool has_fill(const struct value *v)
{
    return given(v) && v->kind != V_NONE;
}

BUILTIN(batch_items)
{
    struct list items;
    struct value list, *batches;
    int64_t size = 0;
    size_t n = 0;
    enum status st;
    (void)all;
    CHECK(value_items(r, &v[0], &items));
    if (!value_as_int(&v[1], &size) && v[1].kind != V_FLOAT)
        return type_fail("batch wants a number", &v[1]);
    if (size <= 0) size = items.n ? (int64_t)items.n : 1; // never full
    size_t each = (size_t)size;
    CHECK(list_make(&r->arena, V_LIST, items.n / each + 1, &batches, &list));
    for (size_t at = 0; at < items.n; at += each, n++) {
        size_t end = items.n - at < each ? items.n : at + each;
        size_t fill = has_fill(&v[2]) ? each - (end - at) : 0;
        CHECK(slice_of(r, items.items, at, end, fill, &v[2], &batches[n]));
    }
    st = iterator_of(r, (struct list){.items = batches, .n = n}, ret);
out:
    return st;
}

BUILTIN(slice_items)
{
    struct list items;
    struct value list, *slices;
    int64_t number = 0;
    enum status st;
    (void)all;
    CHECK(value_items(r, &v[0], &items));
    if (!value_as_int(&v[1], &number)) return type_fail("slice wants a whole number", &v[1]);
    if (number == 0) return status_fail(ST_INVALID, "integer division or modulo by zero");
    size_t n = number < 0 ? 0 : (size_t)number, at = 0;
    CHECK(run_steps(r, n));
    CHECK(list_make(&r->arena, V_LIST, n, &slices, &list));
    for (size_t i = 0; i < n; i++) {
        bool longer = i < items.n % n;
        size_t end = at + items.n / n + longer;
        CHECK(slice_of(r, items.items, at, end, has_fill(&v[2]) && !longer, &v[2], &slices[i]));
        at = end;
    }
    st = iterator_of(r, (struct list){.items = slices, .n = n}, ret);
out:
    return st;
}

static enum status name_group(struct run *r, struct value *group)
{
    struct list *list = arena_alloc(&r->arena, sizeof *list);
    if (!list) return ST_NO_MEMORY;
    *list = *group->list;
    list->group = true;
    group->list = list;
    return ST_OK;
}

// Pairs of key and items; the key as the first item of its group has it.
BUILTIN(groupby)
{
    struct value list, *items, *keys, *groups, *pair;
    size_t n, n_groups = 0;
    enum status st;
    (void)all;
    CHECK(copy_items(r, &v[0], &items, &n));
    keys = arena_array(&r->arena, n, sizeof *keys);
    if (!keys) return ST_NO_MEMORY;
    for (size_t i = 0; i < n; i++) CHECK(key_of(r, &items[i], &v[1], &v[2], &v[3], &keys[i]));
    CHECK(sort_by_keys(r, items, keys, n, false));
    CHECK(list_make(&r->arena, V_LIST, n, &groups, &list));
    for (size_t start = 0, end; start < n; start = end) {
        bool equal = true;
        for (end = start + 1; end < n; end++) {
            CHECK(value_equal(r, &keys[start], &keys[end], &equal));
            if (!equal) break;
        }
        CHECK(list_make(&r->arena, V_TUPLE, 2, &pair, &groups[n_groups]));
        CHECK(get_path(r, &items[start], &v[1], &v[2], &pair[0]));
        CHECK(slice_of(r, items, start, end, 0, NULL, &pair[1]));
        CHECK(name_group(r, &groups[n_groups++]));
    }
    st = list_of(r, (struct list){.items = groups, .n = n_groups}, ret);
out:
    return st;
}

BUILTIN(sum)
{
    struct list items;
    struct value item, total = given(&v[2]) ? v[2] : value_int(0);
    enum status st;
    (void)all;
    CHECK(value_items(r, &v[0], &items));
    if (total.kind == V_STRING)
        return status_fail(ST_INVALID, "sum() can't sum strings [use ''.join(seq) instead]");
    for (size_t i = 0; i < items.n; i++) {
        struct value before = total;
        CHECK(get_path(r, &items.items[i], &v[1], NULL, &item));
        CHECK(arithmetic(r, T_ADD, &before, &item, &total));
    }
    *ret = total;
out:
    return st;
}

// ---- map, select and the like -------------------------------------------------------------------

static enum status no_such_argument(const struct arguments *all)
{
    for (int i = 0; i < all->n_named; i++) {
        const struct string *name = all->named[i].name;
        if (!string_is(name, "attribute") && !string_is(name, "default"))
            return status_fail(ST_INVALID, "Unexpected keyword argument '%.*s'",
                               (int)(name->n_bytes < 100 ? name->n_bytes : 100), name->data);
    }
    return ST_OK;
}

static struct value named(const struct arguments *all, const char *name)
{
    for (int i = 0; i < all->n_named; i++)
        if (string_is(all->named[i].name, name)) return all->named[i].value;
    return MISSING;
}

// What remains behind the first `n` arguments.
static struct arguments behind(const struct arguments *all, int n)
{
    return (struct arguments){all->positional + n, all->n_positional - n, all->named, all->n_named};
}

static enum status map_item(struct run *r, const struct value *item, const struct arguments *all,
                            struct value *ret)
{
    struct value attribute = named(all, "attribute"), otherwise = named(all, "default");
    const struct string *filter;
    if (all->n_positional == 0 && given(&attribute)) {
        enum status st = no_such_argument(all);
        return st == ST_OK ? get_path(r, item, &attribute, &otherwise, ret) : st;
    }
    if (all->n_positional == 0) return status_fail(ST_INVALID, "map requires a filter argument");
    enum status st = need_string(&all->positional[0], "the name of a filter", &filter);
    struct arguments rest = behind(all, 1);
    return st == ST_OK ? filter_apply(r, filter, item, &rest, ret) : st;
}

BUILTIN(map_items)
{
    struct list items, none = {.n = 0};
    struct value *mapped;
    bool any;
    enum status st;
    CHECK(value_truth(r, &v[0], &any));
    if (!any) return iterator_of(r, none, ret);
    CHECK(value_items(r, &v[0], &items));
    mapped = arena_array(&r->arena, items.n, sizeof *mapped);
    if (!mapped) return ST_NO_MEMORY;
    for (size_t i = 0; i < items.n; i++) CHECK(map_item(r, &items.items[i], all, &mapped[i]));
    st = iterator_of(r, (struct list){.items = mapped, .n = items.n}, ret);
out:
    return st;
}

static enum status is_selected(struct run *r, const struct value *item, const struct arguments *all,
                               int off, bool *ret)
{
    const struct string *test;
    if (all->n_positional <= off) return value_truth(r, item, ret);
    enum status st = need_string(&all->positional[off], "the name of a test", &test);
    struct arguments rest = behind(all, off + 1);
    return st == ST_OK ? test_apply(r, test, item, &rest, ret) : st;
}

static enum status select_items(struct run *r, const struct value *v, const struct arguments *all,
                                bool by_attribute, bool wanted, struct value *ret)
{
    struct list items, none = {.n = 0};
    struct value *kept, of;
    size_t n = 0;
    bool any;
    enum status st;
    CHECK(value_truth(r, &v[0], &any));
    if (!any) return iterator_of(r, none, ret);
    if (by_attribute && all->n_positional == 0)
        return status_fail(ST_INVALID, "Missing parameter for attribute name");
    CHECK(value_items(r, &v[0], &items));
    kept = arena_array(&r->arena, items.n, sizeof *kept);
    if (!kept) return ST_NO_MEMORY;
    for (size_t i = 0; i < items.n; i++) {
        bool selected = false;
        of = items.items[i];
        if (by_attribute) CHECK(get_path(r, &items.items[i], &all->positional[0], NULL, &of));
        CHECK(is_selected(r, &of, all, by_attribute, &selected));
        if (selected == wanted) kept[n++] = items.items[i];
    }
    st = iterator_of(r, (struct list){.items = kept, .n = n}, ret);
out:
    return st;
}

BUILTIN(select_items_passing)
{
    return select_items(r, v, all, false, true, ret);
}

BUILTIN(reject_items)
{
    return select_items(r, v, all, false, false, ret);
}

BUILTIN(select_by_attribute)
{
    return select_items(r, v, all, true, true, ret);
}

BUILTIN(reject_by_attribute)
{
    return select_items(r, v, all, true, false, ret);
}

BUILTIN(dict_items)
{
    struct value view;
    struct list pairs = {.n = 0};
    enum status st = ST_OK;
    (void)all;
    if (v[0].kind != V_UNDEFINED && v[0].kind != V_DICT)
        return status_fail(ST_INVALID, "Can only get item pairs from a mapping.");
    if (v[0].kind == V_DICT) CHECK(call_method(r, &v[0], "items", NULL, 0, &view));
    if (v[0].kind == V_DICT) CHECK(value_items(r, &view, &pairs));
    st = iterator_of(r, pairs, ret);
out:
    return st;
}

LAZY(unique, unique_items)
LAZY(batch, batch_items)
LAZY(slice, slice_items)
LAZY(map, map_items)
LAZY(select_passing, select_items_passing)
LAZY(reject, reject_items)
LAZY(selectattr, select_by_attribute)
LAZY(rejectattr, reject_by_attribute)
LAZY(items, dict_items)

const struct builtin list_filters[] = {
    {"first", first, "", 0},
    {"last", last, "", 0},
    {"length", length, "", 0},
    {"count", length, "", 0},
    {"list", list, "", 0},
    {"reverse", reverse, "", 0},
    {"join", join, "d attribute", 0},
    {"sort", sort, "reverse case_sensitive attribute", 0},
    {"dictsort", dictsort, "case_sensitive by reverse", 0},
    {"min", least, "case_sensitive attribute", 0},
    {"max", most, "case_sensitive attribute", 0},
    {"unique", unique, "case_sensitive attribute", 0},
    {"batch", batch, "linecount fill_with", 1},
    {"slice", slice, "slices fill_with", 1},
    {"groupby", groupby, "attribute default case_sensitive", 1},
    {"sum", sum, "attribute start", 0},
    {"map", map, NULL, 0},
    {"select", select_passing, NULL, 0},
    {"reject", reject, NULL, 0},
    {"selectattr", selectattr, NULL, 0},
    {"rejectattr", rejectattr, NULL, 0},
    {"items", items, "", 0},
};
const size_t n_list_filters = sizeof list_filters / sizeof *list_filters;
