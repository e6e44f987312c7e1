/* compare.c: truth, equality, order and membership, as Python has them, and dicts' look-up, which
 * is by equality. One thread. */
#include "common/jinja/run.h"
#include <math.h>

bool value_is_number(struct value v)
{
    return v.kind == V_BOOL || v.kind == V_INT || v.kind == V_FLOAT;
}

bool value_as_int(struct value v, int64_t *ret)
{
    if (v.kind != V_BOOL && v.kind != V_INT) return false;
    *ret = v.kind == V_BOOL ? v.truth : v.integer;
    return true;
}

double value_as_double(struct value v)
{
    int64_t integer;
    return value_as_int(v, &integer) ? (double)integer : v.real;
}

bool value_truth(struct run *r, struct value v)
{
    if (v.kind <= V_NONE) return false; // missing, undefined, none
    if (value_is_number(v)) return value_as_double(v) != 0;
    return !value_has_length(v) || value_length(r, v) != 0;
}

// ---- equality -----------------------------------------------------------------------------------

static bool lists_equal(struct run *r, const struct list *a, const struct list *b)
{
    bool equal = a->n == b->n;
    for (size_t i = 0; equal && i < a->n; i++) equal = value_equal(r, a->items[i], b->items[i]);
    return equal;
}

static bool dicts_equal(struct run *r, const struct dict *a, const struct dict *b)
{
    bool equal = a->n == b->n;
    for (size_t i = 0; equal && i < a->n; i++) {
        struct value other = dict_find(r, b, a->entries[i].key);
        equal = given(other) && value_equal(r, a->entries[i].value, other);
    }
    return equal;
}

static bool equal_in_kind(struct run *r, struct value a, struct value b)
{
    switch (a.kind) {
    case V_UNDEFINED:
    case V_NONE:
        return true;
    case V_STRING:
        return run_same(r, a.string, b.string);
    case V_LIST:
    case V_TUPLE:
    case V_RANGE:
        return lists_equal(r, a.list, b.list);
    case V_DICT:
        return dicts_equal(r, a.dict, b.dict);
    default:
        return a.list == b.list; // the same object
    }
}

bool value_equal(struct run *r, struct value a, struct value b)
{
    int64_t x, y;
    bool equal = false;
    run_deeper(r);
    if (value_as_int(a, &x) && value_as_int(b, &y))
        equal = x == y;
    else if (value_is_number(a) && value_is_number(b))
        equal = value_as_double(a) == value_as_double(b);
    else if (a.kind == b.kind)
        equal = equal_in_kind(r, a, b);
    r->depth--;
    return equal;
}

// ---- order --------------------------------------------------------------------------------------

static bool holds(int op, int order)
{
    return op == T_LT ? order < 0 : op == T_LE ? order <= 0 : op == T_GT ? order > 0 : order >= 0;
}

// The first items that differ decide, or else the lengths.
static bool compare_lists(struct run *r, int op, const struct list *a, const struct list *b)
{
    for (size_t i = 0; i < a->n && i < b->n; i++)
        if (!value_equal(r, a->items[i], b->items[i]))
            return value_compare(r, op, a->items[i], b->items[i]);
    return holds(op, a->n < b->n ? -1 : a->n > b->n);
}

static int compare_strings(struct run *r, const struct string *a, const struct string *b)
{
    size_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes;
    run_bytes(r, n);
    int order = memcmp(a->data, b->data, n); // UTF-8 sorts as its code points do
    return order ? order : a->n_bytes < b->n_bytes ? -1 : a->n_bytes > b->n_bytes;
}

static bool compare_numbers(int op, struct value a, struct value b)
{
    int64_t x, y;
    if (value_as_int(a, &x) && value_as_int(b, &y)) return holds(op, x < y ? -1 : x > y);
    double p = value_as_double(a), q = value_as_double(b);
    return !isnan(p) && !isnan(q) && holds(op, p < q ? -1 : p > q);
}

static bool compare_order(struct run *r, int op, struct value a, struct value b)
{
    if (value_is_number(a) && value_is_number(b)) return compare_numbers(op, a, b);
    if (a.kind == V_STRING && b.kind == V_STRING)
        return holds(op, compare_strings(r, a.string, b.string));
    if (a.kind == b.kind && (a.kind == V_LIST || a.kind == V_TUPLE))
        return compare_lists(r, op, a.list, b.list);
    if (a.kind == V_UNDEFINED || b.kind == V_UNDEFINED)
        undefined_fail(r, a.kind == V_UNDEFINED ? a : b);
    fail(r, "'%s' not supported between instances of '%s' and '%s'",
         token_words((enum token_type)op), value_type(a), value_type(b));
}

// ---- membership ---------------------------------------------------------------------------------

struct dict_entry *entry_named(struct run *r, const struct dict *d, const struct string *name)
{
    for (size_t i = 0; i < d->n; i++)
        if (run_same(r, d->entries[i].key.string, name)) return &d->entries[i];
    return NULL;
}

static struct dict_entry *find_entry(struct run *r, const struct dict *d, struct value key)
{
    if (key.kind == V_LIST || key.kind == V_DICT) fail(r, "unhashable type: '%s'", value_type(key));
    for (struct dict_entry *e = d->entries; e < d->entries + d->n; e++) {
        bool strings = key.kind == V_STRING && e->key.kind == V_STRING;
        if (strings ? run_same(r, key.string, e->key.string) : value_equal(r, e->key, key))
            return e;
    }
    return NULL;
}

struct value dict_find(struct run *r, const struct dict *d, struct value key)
{
    const struct dict_entry *entry = find_entry(r, d, key);
    return entry ? entry->value : MISSING;
}

void dict_set(struct run *r, struct dict *d, struct value key, struct value value)
{
    struct dict_entry *entry = find_entry(r, d, key);
    if (entry)
        entry->value = value;
    else
        dict_append(&r->arena, d, key, value);
}

static bool in_string(struct run *r, struct value item, const struct string *s)
{
    if (item.kind != V_STRING)
        fail(r, "'in <string>' requires string as left operand, not %s", value_type(item));
    run_bytes(r, s->n_bytes);
    return memmem(s->data, s->n_bytes, item.string->data, item.string->n_bytes);
}

// Consumes up to what is found.
static bool in_iterator(struct run *r, struct value item, struct iterator *i)
{
    while (i->at < i->items.n)
        if (value_equal(r, i->items.items[i->at++], item)) return true;
    if (i->failure) fail(r, "%s", i->failure);
    return false;
}

static bool value_in(struct run *r, struct value item, struct value in)
{
    if (in.kind == V_STRING) return in_string(r, item, in.string);
    if (in.kind == V_DICT) return find_entry(r, in.dict, item);
    if (in.kind == V_ITERATOR) return in_iterator(r, item, in.iterator);
    if (!value_is_iterable(in)) fail(r, "argument of type '%s' is not iterable", value_type(in));
    struct list items = value_items(r, in);
    for (size_t i = 0; i < items.n; i++)
        if (value_equal(r, items.items[i], item)) return true;
    return false;
}

bool value_compare(struct run *r, int op, struct value a, struct value b)
{
    if (op == T_EQ || op == T_NE) return value_equal(r, a, b) == (op == T_EQ);
    if (op == OP_IN || op == OP_NOT_IN) return value_in(r, a, b) == (op == OP_IN);
    run_deeper(r);
    bool truth = compare_order(r, op, a, b);
    r->depth--;
    return truth;
}
