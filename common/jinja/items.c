/* items.c: what can be gone over, and how long it is. One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"

#define MAX_RANGE 100000 // Jinja's sandbox allows no more

bool value_has_length(const struct value *v)
{
    return v->kind == V_UNDEFINED || v->kind == V_STRING || v->kind == V_LIST ||
           v->kind == V_TUPLE || v->kind == V_DICT || v->kind == V_VIEW || v->kind == V_RANGE ||
           v->kind == V_LOOP;
}

bool value_is_iterable(const struct value *v)
{
    return value_has_length(v) || v->kind == V_ITERATOR;
}

enum status value_length(struct run *r, const struct value *v, int64_t *ret)
{
    switch (v->kind) {
    case V_UNDEFINED:
        *ret = 0;
        return ST_OK;
    case V_STRING:
        *ret = (int64_t)v->string->n_chars;
        return ST_OK;
    case V_LIST:
    case V_TUPLE:
        *ret = (int64_t)v->list->n;
        return ST_OK;
    case V_DICT:
        *ret = (int64_t)v->dict->n;
        return ST_OK;
    case V_VIEW:
        *ret = (int64_t)v->view->dict->n;
        return ST_OK;
    case V_RANGE:
        *ret = (int64_t)v->range->n;
        return ST_OK;
    case V_LOOP:
        return loop_length(r, v->loop, ret);
    default:
        return status_fail(ST_INVALID, "object of type '%s' has no len()", value_type(v));
    }
}

static enum status characters(struct run *r, const struct string *s, struct list *ret)
{
    struct value list, *items;
    enum status st;
    CHECK(run_steps(r, s->n_chars));
    CHECK(list_make(&r->arena, V_LIST, s->n_chars, &items, &list));
    size_t at = 0;
    for (size_t i = 0; i < s->n_chars; i++) {
        int n;
        text_char(s->data + at, s->n_bytes - at, &n);
        CHECK(string_borrow(&r->arena, s->data + at, (size_t)n, &items[i]));
        at += (size_t)n;
    }
    *ret = *list.list;
out:
    return st;
}

static enum status entries(struct run *r, const struct dict *d, enum view_of of, struct list *ret)
{
    struct value list, *items, *pair;
    enum status st;
    CHECK(run_steps(r, d->n));
    CHECK(list_make(&r->arena, V_LIST, d->n, &items, &list));
    for (size_t i = 0; i < d->n; i++) {
        const struct dict_entry *e = &d->entries[i];
        items[i] = of == VIEW_VALUES ? e->value : e->key;
        if (of != VIEW_ITEMS) continue;
        CHECK(list_make(&r->arena, V_TUPLE, 2, &pair, &items[i]));
        pair[0] = e->key;
        pair[1] = e->value;
    }
    *ret = *list.list;
out:
    return st;
}

static enum status numbers(struct run *r, const struct range *range, struct list *ret)
{
    struct value list, *items;
    enum status st;
    CHECK(run_steps(r, range->n));
    CHECK(list_make(&r->arena, V_LIST, range->n, &items, &list));
    for (size_t i = 0; i < range->n; i++) items[i] = range_at(range, i);
    *ret = *list.list;
out:
    return st;
}

enum status value_items(struct run *r, const struct value *v, struct list *ret)
{
    switch (v->kind) {
    case V_UNDEFINED:
        *ret = (struct list){.items = NULL, .n = 0};
        return ST_OK;
    case V_STRING:
        return characters(r, v->string, ret);
    case V_LIST:
    case V_TUPLE:
        *ret = *v->list;
        return run_steps(r, ret->n);
    case V_DICT:
        return entries(r, v->dict, VIEW_KEYS, ret);
    case V_VIEW:
        return entries(r, v->view->dict, v->view->of, ret);
    case V_RANGE:
        return numbers(r, v->range, ret);
    case V_ITERATOR: {
        struct iterator *i = v->iterator;
        size_t n = i->items.n - i->at;
        *ret = (struct list){.items = n ? i->items.items + i->at : NULL, .n = n};
        i->at = i->items.n;
        if (i->failure) return status_fail(ST_INVALID, "%s", i->failure);
        return run_steps(r, n);
    }
    default:
        return status_fail(ST_INVALID, "'%s' object is not iterable", value_type(v));
    }
}

enum status list_of(struct run *r, struct list items, struct value *ret)
{
    struct list *list = arena_alloc(&r->arena, sizeof *list);
    if (!list) return ST_NO_MEMORY;
    *list = items;
    *ret = value_of(.kind = V_LIST, .list = list);
    return ST_OK;
}

// ---- ranges -------------------------------------------------------------------------------------

enum status range_make(struct run *r, int64_t start, int64_t stop, int64_t step, struct value *ret)
{
    if (step == 0) return status_fail(ST_INVALID, "range() arg 3 must not be zero");
    bool empty = step > 0 ? start >= stop : start <= stop;
    uint64_t span = step > 0 ? (uint64_t)stop - (uint64_t)start : (uint64_t)start - (uint64_t)stop;
    uint64_t stride = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;
    uint64_t n = empty ? 0 : (span - 1) / stride + 1;
    if (n > MAX_RANGE)
        return status_fail(ST_INVALID,
                           "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).",
                           MAX_RANGE);
    struct range *range = arena_alloc(&r->arena, sizeof *range);
    if (!range) return ST_NO_MEMORY;
    *range = (struct range){start, stop, step, (size_t)n};
    *ret = value_of(.kind = V_RANGE, .range = range);
    return ST_OK;
}

struct value range_at(const struct range *range, size_t i)
{
    return value_int((int64_t)((uint64_t)range->start + (uint64_t)range->step * i));
}
