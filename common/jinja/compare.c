/* compare.c: truth, equality, order and membership, as Python has them, and dicts' look-up, which
 * is by equality. One thread. */
#include "common/jinja/run.h"
#include <math.h>

bool value_is_number(const struct value *v)
{
    return v->kind == V_BOOL || v->kind == V_INT || v->kind == V_FLOAT;
}

bool value_as_int(const struct value *v, int64_t *ret)
{
    if (v->kind != V_BOOL && v->kind != V_INT) return false;
    *ret = v->kind == V_BOOL ? v->truth : v->integer;
    return true;
}

double value_as_double(const struct value *v)
{
    int64_t integer;
    return value_as_int(v, &integer) ? (double)integer : v->real;
}

enum status value_truth(struct run *r, const struct value *v, bool *ret)
{
    int64_t n = 1;
    enum status st = ST_OK;
    switch (v->kind) {
    case V_MISSING:
    case V_UNDEFINED:
    case V_NONE:
        n = 0;
        break;
    case V_BOOL:
        n = v->truth;
        break;
    case V_INT:
        n = v->integer != 0;
        break;
    case V_FLOAT:
        n = v->real != 0;
        break;
    default:
        if (value_has_length(v)) st = value_length(r, v, &n);
    }
    *ret = n != 0;
    return st;
}

// ---- equality -----------------------------------------------------------------------------------

static enum status lists_equal(struct run *r, struct list a, struct list b, bool *ret)
{
    enum status st = ST_OK;
    bool equal = a.n == b.n;
    for (size_t i = 0; st == ST_OK && equal && i < a.n; i++)
        st = value_equal(r, &a.items[i], &b.items[i], &equal);
    *ret = equal;
    return st;
}

static enum status dicts_equal(struct run *r, const struct dict *a, const struct dict *b, bool *ret)
{
    enum status st = ST_OK;
    bool equal = a->n == b->n;
    for (size_t i = 0; st == ST_OK && equal && i < a->n; i++) {
        struct value other;
        st = dict_find(r, b, &a->entries[i].key, &other);
        equal = given(&other);
        if (st == ST_OK && equal) st = value_equal(r, &a->entries[i].value, &other, &equal);
    }
    *ret = equal;
    return st;
}

static bool numbers_equal(const struct value *a, const struct value *b)
{
    int64_t x, y;
    if (value_as_int(a, &x) && value_as_int(b, &y)) return x == y;
    return value_as_double(a) == value_as_double(b);
}

enum status value_equal(struct run *r, const struct value *a, const struct value *b, bool *ret)
{
    enum status st;
    CHECK(run_deeper(r));
    *ret = false;
    if (value_is_number(a) && value_is_number(b)) {
        *ret = numbers_equal(a, b);
    } else if (a->kind == b->kind) {
        switch (a->kind) {
        case V_UNDEFINED:
        case V_NONE:
            *ret = true;
            break;
        case V_STRING:
            CHECK(run_steps(r, a->string->n_bytes >> 8));
            *ret = string_equal(a->string, b->string);
            break;
        case V_LIST:
        case V_TUPLE:
            st = lists_equal(r, *a->list, *b->list, ret);
            break;
        case V_DICT:
            st = dicts_equal(r, a->dict, b->dict, ret);
            break;
        case V_RANGE:
            *ret = a->range->n == b->range->n &&
                   (a->range->n == 0 || (a->range->start == b->range->start &&
                                         (a->range->n == 1 || a->range->step == b->range->step)));
            break;
        default:
            *ret = a->list == b->list; // the same object
        }
    }
    r->depth--;
out:
    return st;
}

// ---- order --------------------------------------------------------------------------------------

static bool holds(int op, int order)
{
    return op == T_LT ? order < 0 : op == T_LE ? order <= 0 : op == T_GT ? order > 0 : order >= 0;
}

// The first items that differ decide, or else the lengths.
static enum status compare_lists(struct run *r, int op, struct list a, struct list b, bool *ret)
{
    enum status st = ST_OK;
    bool equal = true;
    size_t i = 0;
    for (; i < a.n && i < b.n; i++) {
        st = value_equal(r, &a.items[i], &b.items[i], &equal);
        if (st != ST_OK || !equal) break;
    }
    if (st == ST_OK && !equal) return value_compare(r, op, &a.items[i], &b.items[i], ret);
    *ret = holds(op, a.n < b.n ? -1 : a.n > b.n);
    return st;
}

static int compare_strings(const struct string *a, const struct string *b)
{
    size_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes;
    int order = memcmp(a->data, b->data, n); // UTF-8 sorts as its code points do
    return order ? order : a->n_bytes < b->n_bytes ? -1 : a->n_bytes > b->n_bytes;
}

static bool compare_numbers(int op, const struct value *a, const struct value *b)
{
    int64_t x, y;
    if (value_as_int(a, &x) && value_as_int(b, &y)) return holds(op, x < y ? -1 : x > y);
    double p = value_as_double(a), q = value_as_double(b);
    if (isnan(p) || isnan(q)) return false;
    return holds(op, p < q ? -1 : p > q);
}

enum status value_compare(struct run *r, int op, const struct value *a, const struct value *b,
                          bool *ret)
{
    enum status st;
    CHECK(run_deeper(r));
    if (value_is_number(a) && value_is_number(b)) {
        *ret = compare_numbers(op, a, b);
    } else if (a->kind == V_STRING && b->kind == V_STRING) {
        CHECK(run_steps(r, a->string->n_bytes >> 8));
        *ret = holds(op, compare_strings(a->string, b->string));
    } else if (a->kind == b->kind && (a->kind == V_LIST || a->kind == V_TUPLE)) {
        CHECK(compare_lists(r, op, *a->list, *b->list, ret));
    } else if (a->kind == V_UNDEFINED || b->kind == V_UNDEFINED) {
        st = undefined_fail(a->kind == V_UNDEFINED ? a->undefined : b->undefined);
    } else {
        st = status_fail(ST_INVALID, "'%s' not supported between instances of '%s' and '%s'",
                         token_words((enum token_type)op), value_type(a), value_type(b));
    }
    r->depth--;
out:
    return st;
}

// Merge sort: `from` in two halves, each sorted into `to`'s place in turn.
struct sorting {
    struct run *run;
    const struct value *keys;
    bool reverse;
};

// b belongs before a, which stands to its left.
static enum status swapped(const struct sorting *s, size_t a, size_t b, bool *ret)
{
    return s->reverse ? value_compare(s->run, T_LT, &s->keys[a], &s->keys[b], ret)
                      : value_compare(s->run, T_LT, &s->keys[b], &s->keys[a], ret);
}

static enum status merge(const struct sorting *s, const size_t *from, size_t start, size_t middle,
                         size_t end, size_t *to)
{
    size_t left = start, right = middle;
    for (size_t i = start; i < end; i++) {
        bool take_right = left == middle;
        if (left < middle && right < end) {
            enum status st = swapped(s, from[left], from[right], &take_right);
            if (st != ST_OK) return st;
        }
        to[i] = take_right ? from[right++] : from[left++];
    }
    return ST_OK;
}

enum status sort_by_keys(struct run *r, struct value *items, struct value *keys, size_t n,
                         bool reverse)
{
    enum status st = ST_OK;
    struct sorting s = {r, keys, reverse};
    size_t *order = arena_array(&r->arena, n, sizeof *order);
    size_t *other = arena_array(&r->arena, n, sizeof *other);
    struct value *sorted = arena_array(&r->arena, n, sizeof *sorted);
    struct value *sorted_keys = arena_array(&r->arena, n, sizeof *sorted_keys);
    if (!order || !other || !sorted || !sorted_keys) return ST_NO_MEMORY;
    for (size_t i = 0; i < n; i++) order[i] = i;
    for (size_t width = 1; width < n; width *= 2) {
        for (size_t at = 0; at < n; at += 2 * width) {
            size_t middle = at + width < n ? at + width : n;
            size_t end = at + 2 * width < n ? at + 2 * width : n;
            CHECK(merge(&s, order, at, middle, end, other));
        }
        size_t *swap = order;
        order = other;
        other = swap;
    }
    for (size_t i = 0; i < n; i++) {
        sorted[i] = items[order[i]];
        sorted_keys[i] = keys[order[i]];
    }
    if (n > 0) {
        memcpy(items, sorted, n * sizeof *items);
        memcpy(keys, sorted_keys, n * sizeof *keys);
    }
out:
    return st;
}

// ---- membership ---------------------------------------------------------------------------------

static enum status check_hashable(const struct value *key)
{
    if (key->kind == V_LIST || key->kind == V_DICT)
        return status_fail(ST_INVALID, "unhashable type: '%s'", value_type(key));
    return ST_OK;
}

static enum status find_entry(struct run *r, const struct dict *d, const struct value *key,
                              struct dict_entry **ret)
{
    enum status st = check_hashable(key);
    *ret = NULL;
    if (st == ST_OK) st = run_steps(r, d->n >> 3);
    for (size_t i = 0; st == ST_OK && i < d->n; i++) {
        const struct value *have = &d->entries[i].key;
        bool equal = false;
        if (key->kind == V_STRING && have->kind == V_STRING)
            equal = string_equal(key->string, have->string);
        else
            st = value_equal(r, have, key, &equal);
        if (equal) {
            *ret = &d->entries[i];
            break;
        }
    }
    return st;
}

enum status dict_find(struct run *r, const struct dict *d, const struct value *key,
                      struct value *ret)
{
    struct dict_entry *entry;
    enum status st = find_entry(r, d, key, &entry);
    *ret = st == ST_OK && entry ? entry->value : MISSING;
    return st;
}

enum status dict_set(struct run *r, struct dict *d, const struct value *key, struct value value)
{
    struct dict_entry *entry;
    enum status st = find_entry(r, d, key, &entry);
    if (st != ST_OK || !entry) return st == ST_OK ? dict_append(&r->arena, d, *key, value) : st;
    entry->value = value;
    return ST_OK;
}

static enum status in_string(struct run *r, const struct value *item, const struct string *s,
                             bool *ret)
{
    if (item->kind != V_STRING)
        return status_fail(ST_INVALID, "'in <string>' requires string as left operand, not %s",
                           value_type(item));
    enum status st = run_steps(r, s->n_bytes >> 6);
    *ret = memmem(s->data, s->n_bytes, item->string->data, item->string->n_bytes) != NULL;
    return st;
}

static enum status in_items(struct run *r, const struct value *item, struct list items, bool *ret)
{
    enum status st = ST_OK;
    *ret = false;
    for (size_t i = 0; st == ST_OK && !*ret && i < items.n; i++)
        st = value_equal(r, &items.items[i], item, ret);
    return st;
}

enum status value_in(struct run *r, const struct value *item, const struct value *in, bool *ret)
{
    struct list items;
    enum status st;
    if (in->kind == V_STRING) return in_string(r, item, in->string, ret);
    if (in->kind == V_DICT || (in->kind == V_VIEW && in->view->of == VIEW_KEYS)) {
        struct value found;
        st = dict_find(r, in->kind == V_DICT ? in->dict : in->view->dict, item, &found);
        *ret = given(&found);
        return st;
    }
    if (in->kind == V_ITERATOR) { // consumed up to what is found
        struct iterator *iterator = in->iterator;
        *ret = false;
        for (st = ST_OK; st == ST_OK && !*ret && iterator->at < iterator->items.n;)
            st = value_equal(r, &iterator->items.items[iterator->at++], item, ret);
        if (st == ST_OK && !*ret && iterator->failure)
            st = status_fail(ST_INVALID, "%s", iterator->failure);
        return st;
    }
    if (!value_is_iterable(in))
        return status_fail(ST_INVALID, "argument of type '%s' is not iterable", value_type(in));
    st = value_items(r, in, &items);
    return st == ST_OK ? in_items(r, item, items, ret) : st;
}
