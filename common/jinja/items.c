/* items.c: what can be gone over, how long it is, and its order. One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"

#define MAX_RANGE 100000 // Jinja's sandbox allows no more

bool value_has_length(struct value v)
{
    return v.kind == V_UNDEFINED || v.kind == V_STRING || v.kind == V_LIST || v.kind == V_TUPLE ||
           v.kind == V_DICT || v.kind == V_VIEW || v.kind == V_RANGE || v.kind == V_LOOP;
}

bool value_is_iterable(struct value v)
{
    return value_has_length(v) || v.kind == V_ITERATOR;
}

int64_t value_length(struct run *r, struct value v)
{
    switch (v.kind) {
    case V_UNDEFINED:
        return 0;
    case V_STRING:
        return (int64_t)v.string->n_chars;
    case V_LIST:
    case V_TUPLE:
        return (int64_t)v.list->n;
    case V_DICT:
        return (int64_t)v.dict->n;
    case V_VIEW:
        return (int64_t)v.view->dict->n;
    case V_RANGE:
        return (int64_t)v.range->n;
    case V_LOOP:
        return loop_length(v.loop);
    default:
        fail(r, "object of type '%s' has no len()", value_type(v));
    }
}

static struct value entry_as(struct run *r, const struct dict_entry *e, enum view_of of)
{
    if (of != VIEW_ITEMS) return of == VIEW_VALUES ? e->value : e->key;
    struct value pair = list_new(&r->arena, V_TUPLE, 2);
    pair.list->items[0] = e->key;
    pair.list->items[1] = e->value;
    return pair;
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

struct list value_items(struct run *r, struct value v)
{
    if (v.kind == V_ITERATOR) return drain(r, v.iterator);
    if (!value_has_length(v) || v.kind == V_LOOP)
        fail(r, "'%s' object is not iterable", value_type(v));
    struct list items = {.n = (size_t)value_length(r, v)};
    run_steps(r, items.n);
    if (v.kind == V_LIST || v.kind == V_TUPLE) return *v.list;
    items.items = arena_array(&r->arena, items.n, sizeof *items.items);
    for (size_t i = 0, at = 0; i < items.n; i++) {
        size_t start = at;
        if (v.kind == V_STRING) {
            utf8_next(v.string->data, v.string->n_bytes, &at);
            items.items[i] = string_new(&r->arena, v.string->data + start, at - start, false);
        } else if (v.kind == V_RANGE) {
            items.items[i] = range_at(v.range, i);
        } else if (v.kind == V_DICT) {
            items.items[i] = v.dict->entries[i].key;
        } else {
            items.items[i] = entry_as(r, &v.view->dict->entries[i], v.view->of);
        }
    }
    return items;
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
    struct range *range = arena_alloc(&r->arena, sizeof *range);
    *range = (struct range){start, stop, step, (size_t)n};
    return value_of(.kind = V_RANGE, .range = range);
}

struct value range_at(const struct range *range, size_t i)
{
    return value_int((int64_t)((uint64_t)range->start + (uint64_t)range->step * i));
}

// ---- order --------------------------------------------------------------------------------------

// A step of a merge sort: the sorted runs [start, middle) and [middle, end) of the places `from`.
static void merge(struct run *r, const struct value *keys, bool reverse, const size_t *from,
                  size_t start, size_t middle, size_t end, size_t *to)
{
    size_t left = start, right = middle;
    for (size_t i = start; i < end; i++) {
        bool take_right = left == middle;
        if (left < middle && right < end) {
            struct value a = keys[from[left]], b = keys[from[right]];
            take_right = reverse ? value_compare(r, T_LT, a, b) : value_compare(r, T_LT, b, a);
        }
        to[i] = take_right ? from[right++] : from[left++];
    }
}

// values[i] becomes what values[order[i]] was.
static void reorder(struct run *r, struct value *values, const size_t *order, size_t n)
{
    struct value *old = arena_array(&r->arena, n, sizeof *old);
    if (n > 0) memcpy(old, values, n * sizeof *old);
    for (size_t i = 0; i < n; i++) values[i] = old[order[i]];
}

void items_sort(struct run *r, struct list items, struct value *keys, bool reverse)
{
    size_t n = items.n;
    size_t *order = arena_array(&r->arena, n, sizeof *order);
    size_t *other = arena_array(&r->arena, n, sizeof *other);
    for (size_t i = 0; i < n; i++) order[i] = i;
    for (size_t width = 1; width < n; width *= 2) {
        for (size_t at = 0; at < n; at += 2 * width) {
            size_t middle = at + width < n ? at + width : n;
            size_t end = at + 2 * width < n ? at + 2 * width : n;
            merge(r, keys, reverse, order, at, middle, end, other);
        }
        size_t *swap = order;
        order = other;
        other = swap;
    }
    reorder(r, items.items, order, n);
    reorder(r, keys, order, n);
}
