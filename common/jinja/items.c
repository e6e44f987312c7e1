/* items.c: what can be gone over, how long it is, and its order. One thread. */
#include "common/jinja/run.h"

#define MAX_RANGE 100000 // Jinja's sandbox allows no more

bool value_is_list(struct value v)
{
    return v.kind == V_LIST || v.kind == V_TUPLE || v.kind == V_KEYS || v.kind == V_VALUES ||
           v.kind == V_ITEMS || v.kind == V_RANGE;
}

bool value_has_length(struct value v)
{
    return value_is_list(v) || v.kind == V_UNDEFINED || v.kind == V_STRING || v.kind == V_DICT ||
           v.kind == V_LOOP;
}

bool value_is_iterable(struct value v)
{
    return value_has_length(v) || v.kind == V_ITERATOR;
}

int64_t value_length(struct run *r, struct value v)
{
    if (!value_has_length(v)) fail(r, "object of type '%s' has no len()", value_type(v));
    return v.kind == V_UNDEFINED ? 0
           : v.kind == V_STRING  ? (int64_t)v.string->n_chars
           : v.kind == V_DICT    ? (int64_t)v.dict->n
           : v.kind == V_LOOP    ? loop_length(v.loop)
                                 : (int64_t)v.list->n;
}

// What an iterator has left; it is at its end then.
static struct list drain(struct run *r, struct iterator *i)
{
    size_t n = i->items.n - i->at;
    struct list items = {.items = n ? i->items.items + i->at : NULL, .n = n};
    i->at = i->items.n;
    if (i->failure) fail(r, "%s", i->failure);
    run_steps(r, n);
    return items;
}

static struct list characters(struct run *r, const struct string *s)
{
    run_bytes(r, s->n_bytes);
    struct list items = {.items = arena_array(&r->arena, s->n_chars, sizeof *items.items)};
    for (size_t start = 0, at = 0; at < s->n_bytes; start = at) {
        utf8_next(s->data, s->n_bytes, &at);
        items.items[items.n++] = string_new(&r->arena, s->data + start, at - start, false);
    }
    return items;
}

struct list value_items(struct run *r, struct value v)
{
    if (v.kind == V_ITERATOR) return drain(r, v.iterator);
    if (!value_has_length(v) || v.kind == V_LOOP)
        fail(r, "'%s' object is not iterable", value_type(v));
    run_steps(r, (size_t)value_length(r, v));
    if (v.kind == V_UNDEFINED) return (struct list){.n = 0};
    if (v.kind == V_STRING) return characters(r, v.string);
    return v.kind == V_DICT ? *dict_view(r, v.dict, V_KEYS).list : *v.list;
}

struct value dict_view(struct run *r, const struct dict *d, enum value_kind kind)
{
    struct value view = list_new(&r->arena, kind, d->n);
    for (size_t i = 0; i < d->n; i++) {
        const struct dict_entry *e = &d->entries[i];
        view.list->items[i] = kind == V_KEYS     ? e->key
                              : kind == V_VALUES ? e->value
                                                 : pair_of(&r->arena, e->key, e->value);
    }
    return view;
}

struct list items_copy(struct run *r, struct value v)
{
    struct list items = value_items(r, v), copy = {.n = items.n};
    copy.items = arena_array(&r->arena, items.n, sizeof *copy.items);
    if (items.n > 0) memcpy(copy.items, items.items, items.n * sizeof *copy.items);
    return copy;
}

void items_reverse(struct list items)
{
    for (size_t i = 0; i < items.n / 2; i++) {
        struct value swap = items.items[i];
        items.items[i] = items.items[items.n - 1 - i];
        items.items[items.n - 1 - i] = swap;
    }
}

// ---- ranges -------------------------------------------------------------------------------------

uint64_t range_count(int64_t start, int64_t stop, int64_t step)
{
    if (step > 0 ? start >= stop : start <= stop) return 0;
    uint64_t span = step > 0 ? (uint64_t)stop - (uint64_t)start : (uint64_t)start - (uint64_t)stop;
    return (span - 1) / (step > 0 ? (uint64_t)step : 0 - (uint64_t)step) + 1;
}

struct value range_make(struct run *r, int64_t start, int64_t stop, int64_t step)
{
    if (step == 0) fail(r, "range() arg 3 must not be zero");
    uint64_t n = range_count(start, stop, step);
    if (n > MAX_RANGE)
        fail(r, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", MAX_RANGE);
    run_steps(r, n);
    int64_t *range = arena_array(&r->arena, 3, sizeof *range);
    memcpy(range, (int64_t[]){start, stop, step}, 3 * sizeof *range);
    struct list list = {arena_array(&r->arena, n, sizeof *list.items), n, .range = range};
    for (uint64_t i = 0; i < n; i++)
        list.items[i] = value_int((int64_t)((uint64_t)start + (uint64_t)step * i));
    return list_of(&r->arena, V_RANGE, list);
}

// ---- order --------------------------------------------------------------------------------------

// Merges the sorted halves; `left` has room for the first.
static void sort(struct run *r, struct dict_entry *e, size_t n, bool reverse,
                 struct dict_entry *left)
{
    if (n < 2) return;
    size_t half = (n + 1) / 2, i = 0, k = half;
    sort(r, e, half, reverse, left);
    sort(r, e + half, n - half, reverse, left);
    memcpy(left, e, half * sizeof *e);
    for (size_t at = 0; i < half; at++) {
        bool right = false;
        if (k < n)
            right = reverse ? value_compare(r, T_LT, left[i].key, e[k].key)
                            : value_compare(r, T_LT, e[k].key, left[i].key);
        e[at] = right ? e[k++] : left[i++];
    }
}

void entries_sort(struct run *r, struct dict *d, bool reverse)
{
    sort(r, d->entries, d->n, reverse, arena_array(&r->arena, d->n, sizeof *d->entries));
}
