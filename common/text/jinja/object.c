/* object.c: what values do. Jinja has two orders of look-up: a dot looks for a method first and
 * then for an item, brackets the other way round. What the sandbox forbids (methods that would
 * change a list or a dict) is undefined, and says so when it is used. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/object.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#define MAX_RANGE 100000 // Jinja's sandbox allows no more

const struct builtin *builtin_find(const struct render *r, int of, const struct string *name)
{
    for (const struct builtin *const *table = r->builtins; *table; table++)
        for (const struct builtin *b = *table; b->name; b++)
            if (b->of & of && string_word(name, b->name) >= 0) return b;
    return NULL;
}

// ---- undefined ----------------------------------------------------------------------------------

struct value undefined_because(struct render *r, const char *format, ...)
{
    size_t text = r->text.len;
    va_list arguments;
    va_start(arguments, format);
    bytes_vprintf(&r->text, format, arguments);
    va_end(arguments);
    struct value v = undefined_item(r, MISSING, MISSING);
    v.undefined->hint = text_end(r, text, false).string->data;
    return v;
}

struct value undefined_item(struct render *r, struct value of, struct value name)
{
    struct undefined *u = run_alloc(r, 1, sizeof *u);
    *u = (struct undefined){NULL, of, name};
    return value_of(.kind = V_UNDEFINED, .undefined = u);
}

void undefined_fail(struct render *r, struct value v)
{
    struct value name = v.undefined->name, of = v.undefined->of;
    if (v.undefined->hint) fail(r, "%s", v.undefined->hint);
    if (!given(of)) fail(r, "'%s' is undefined", SHOWN(name.string));
    const char *type = of.kind == V_NONE ? "None" : value_type(of);
    const char *object = of.kind >= V_BOOL && of.kind <= V_RANGE ? " object" : "";
    if (name.kind == V_STRING)
        fail(r, "'%s%s' has no attribute '%s'", type, object, SHOWN(name.string));
    if (name.kind == V_INT)
        fail(r, "%s%s has no element %lld", type, object, (long long)name.integer);
    fail(r, "%s%s has no element of type %s", type, object, value_type(name));
}

void type_fail(struct render *r, const char *what, struct value v)
{
    if (v.kind == V_UNDEFINED) undefined_fail(r, v);
    fail(r, "%s, got '%s'", what, value_type(v));
}

// ---- loops --------------------------------------------------------------------------------------

// V_MISSING: there is none.
static struct value take(struct loop *l)
{
    while (l->at < l->items.n) {
        struct value item = l->items.items[l->at++];
        run_steps(l->run, 1);
        if (!l->passes || l->passes(l, item)) return item;
    }
    return MISSING;
}

static struct value look_ahead(struct loop *l)
{
    if (!given(l->after)) l->after = take(l);
    return l->after;
}

bool loop_advance(struct loop *l)
{
    struct value item = look_ahead(l);
    l->after = MISSING;
    if (!given(item)) return false;
    l->index0++;
    l->previous = l->current;
    l->current = item;
    return true;
}

// With a test, what remains is asked now.
int64_t loop_length(struct loop *l)
{
    if (l->length >= 0) return l->length;
    l->length = (int64_t)l->items.n;
    if (l->passes) {
        struct list kept = LIST(run_alloc(l->run, l->items.n - l->at, sizeof *kept.items), 0);
        for (struct value item; given(item = take(l));) kept.items[kept.n++] = item;
        l->length = (int64_t)kept.n + l->index0 + 1 + given(l->after);
        l->items = kept;
        l->at = 0;
        l->passes = NULL;
    }
    return l->length;
}

static struct value loop_attribute(struct loop *l, struct value name)
{
    if (value_is(name, "index")) return value_int(l->index0 + 1);
    if (value_is(name, "index0")) return value_int(l->index0);
    if (value_is(name, "first")) return value_bool(l->index0 == 0);
    if (value_is(name, "last")) return value_bool(!given(look_ahead(l)));
    if (value_is(name, "length")) return value_int(loop_length(l));
    if (value_is(name, "revindex")) return value_int(loop_length(l) - l->index0);
    if (value_is(name, "revindex0")) return value_int(loop_length(l) - l->index0 - 1);
    if (value_is(name, "depth")) return value_int(l->depth0 + 1);
    if (value_is(name, "depth0")) return value_int(l->depth0);
    bool before = value_is(name, "previtem");
    if (!before && !value_is(name, "nextitem")) return MISSING;
    struct value item = before ? l->previous : look_ahead(l);
    if (given(item)) return item;
    return undefined_because(l->run, "there is no %s item", before ? "previous" : "next");
}

// ---- what can be gone over ----------------------------------------------------------------------

int64_t value_length(struct render *r, struct value v)
{
    if (!of_kinds(v, SIZED)) fail(r, "object of type '%s' has no len()", value_type(v));
    return v.kind == V_UNDEFINED ? 0
           : v.kind == V_STRING  ? (int64_t)v.string->n_chars
           : v.kind == V_DICT    ? (int64_t)v.dict->n
           : v.kind == V_LOOP    ? loop_length(v.loop)
                                 : (int64_t)v.list->n;
}

static struct list characters(struct render *r, const struct string *s)
{
    struct list items = LIST(run_alloc(r, s->n_chars, sizeof *items.items), 0);
    run_bytes(r, s->n_bytes);
    for (size_t start = 0, at = 0; at < s->n_bytes; start = at) {
        utf8_next(s->data, s->n_bytes, &at);
        items.items[items.n++] = string_new(r, s->data + start, at - start, false);
    }
    return items;
}

// An iterator is at its end then.
struct list value_items(struct render *r, struct value v)
{
    struct list items = LIST(NULL, 0);
    if (v.kind == V_ITERATOR) {
        struct iterator *i = v.iterator;
        items.n = i->items.n - i->at;
        if (items.n > 0) items.items = i->items.items + i->at;
        i->at = i->items.n;
        if (i->failure) fail(r, "%s", i->failure);
    } else if (v.kind == V_STRING) {
        items = characters(r, v.string);
    } else if (v.kind == V_DICT) {
        items = *dict_view(r, v.dict, V_KEYS).list;
    } else if (of_kinds(v, LISTS)) {
        items = *v.list;
    } else if (v.kind != V_UNDEFINED) {
        fail(r, "'%s' object is not iterable", value_type(v));
    }
    run_steps(r, items.n);
    return items;
}

struct list value_pair(struct render *r, struct value v, const char *what)
{
    struct list pair = value_items(r, v);
    if (pair.n != 2) fail(r, "%s has length %zu; 2 is required", what, pair.n);
    return pair;
}

struct value dict_view(struct render *r, const struct dict *d, enum value_kind kind)
{
    struct value view = list_new(r, kind, d->n);
    for (size_t i = 0; i < d->n; i++) {
        const struct dict_entry *e = &d->entries[i];
        view.list->items[i] = kind == V_KEYS     ? e->key
                              : kind == V_VALUES ? e->value
                                                 : pair_of(r, e->key, e->value);
    }
    return view;
}

struct list items_copy(struct render *r, struct value v)
{
    struct list items = value_items(r, v);
    struct list copy = LIST(run_alloc(r, items.n, sizeof *copy.items), items.n);
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

// The bytes of a string or list; one like it of other bytes.
static const char *sequence_data(struct value v, size_t *ret_n)
{
    *ret_n = v.kind == V_STRING ? v.string->n_bytes : v.list->n * sizeof *v.list->items;
    return v.kind == V_STRING ? v.string->data : (const char *)v.list->items;
}

static struct value sequence_new(struct render *r, struct value like, char *data, size_t n)
{
    if (like.kind == V_STRING) return string_new(r, data, n, like.string->markup);
    return list_of(r, like.kind, LIST((struct value *)(void *)data, n / sizeof(struct value)));
}

struct value value_repeat(struct render *r, struct value v, int64_t times)
{
    size_t each, n;
    const char *data = sequence_data(v, &each);
    if (times < 0) times = 0;
    if (__builtin_mul_overflow(each, (size_t)times, &n)) n = SIZE_MAX;
    char *all = run_alloc(r, n, 1);
    run_bytes(r, n);
    for (size_t at = 0; at < n; at += each) memcpy(all + at, data, each);
    return sequence_new(r, v, all, n);
}

struct value value_concatenate(struct render *r, struct value a, struct value b)
{
    size_t n, m;
    const char *first = sequence_data(a, &n), *second = sequence_data(b, &m);
    char *both = run_alloc(r, n + m, 1);
    run_bytes(r, n + m);
    if (n > 0) memcpy(both, first, n);
    if (m > 0) memcpy(both + n, second, m);
    return sequence_new(r, a, both, n + m);
}

// How many there are from start to before stop by step, which may be negative.
static uint64_t range_count(int64_t start, int64_t stop, int64_t step)
{
    if (step > 0 ? start >= stop : start <= stop) return 0;
    uint64_t span = step > 0 ? (uint64_t)stop - (uint64_t)start : (uint64_t)start - (uint64_t)stop;
    return (span - 1) / (step > 0 ? (uint64_t)step : 0 - (uint64_t)step) + 1;
}

struct value range_make(struct render *r, int64_t start, int64_t stop, int64_t step)
{
    if (step == 0) fail(r, "range() arg 3 must not be zero");
    uint64_t n = range_count(start, stop, step);
    if (n > MAX_RANGE)
        fail(r, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", MAX_RANGE);
    run_steps(r, n);
    int64_t *range = run_alloc(r, 3, sizeof *range);
    memcpy(range, (int64_t[]){start, stop, step}, 3 * sizeof *range);
    struct list list = {run_alloc(r, n, sizeof *list.items), n, .range = range};
    for (uint64_t i = 0; i < n; i++)
        list.items[i] = value_int((int64_t)((uint64_t)start + (uint64_t)step * i));
    return list_of(r, V_RANGE, list);
}

// ---- numbers, truth and equality ----------------------------------------------------------------

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

bool value_truth(struct render *r, struct value v)
{
    if (v.kind <= V_NONE) return false; // missing, undefined, none
    if (of_kinds(v, NUMBERS)) return value_as_double(v) != 0;
    return !of_kinds(v, SIZED) || value_length(r, v) != 0;
}

// Charged: a byte for looking, and what there is to compare.
static bool same_text(struct render *r, const struct string *a, const struct string *b)
{
    run_bytes(r, 1 + (a->n_bytes == b->n_bytes ? a->n_bytes : 0));
    return string_equal(a, b);
}

static bool equal_in_kind(struct render *r, struct value a, struct value b)
{
    bool equal;
    switch (a.kind) {
    case V_UNDEFINED:
    case V_NONE:
        return true;
    case V_STRING:
        return same_text(r, a.string, b.string);
    case V_LIST:
    case V_TUPLE:
    case V_RANGE:
        equal = a.list->n == b.list->n;
        for (size_t i = 0; equal && i < a.list->n; i++)
            equal = value_equal(r, a.list->items[i], b.list->items[i]);
        return equal;
    case V_DICT:
        equal = a.dict->n == b.dict->n;
        for (size_t i = 0; equal && i < a.dict->n; i++) {
            struct value other = dict_find(r, b.dict, a.dict->entries[i].key);
            equal = given(other) && value_equal(r, a.dict->entries[i].value, other);
        }
        return equal;
    default:
        return a.list == b.list; // the same object
    }
}

bool value_equal(struct render *r, struct value a, struct value b)
{
    int64_t x, y;
    bool equal = false;
    run_deeper(r);
    if (value_as_int(a, &x) && value_as_int(b, &y))
        equal = x == y;
    else if (of_kinds(a, NUMBERS) && of_kinds(b, NUMBERS))
        equal = value_as_double(a) == value_as_double(b);
    else if (a.kind == b.kind)
        equal = equal_in_kind(r, a, b);
    r->depth--;
    return equal;
}

// ---- order --------------------------------------------------------------------------------------

static bool holds(enum token_type op, int order)
{
    return op == '<' ? order < 0 : op == T_LE ? order <= 0 : op == '>' ? order > 0 : order >= 0;
}

static bool compare_order(struct render *r, enum token_type op, struct value a, struct value b)
{
    int64_t x, y;
    if (value_as_int(a, &x) && value_as_int(b, &y)) return holds(op, x < y ? -1 : x > y);
    if (of_kinds(a, NUMBERS) && of_kinds(b, NUMBERS)) {
        double p = value_as_double(a), q = value_as_double(b);
        return !isnan(p) && !isnan(q) && holds(op, p < q ? -1 : p > q);
    }
    if (a.kind == V_STRING && b.kind == V_STRING) {
        size_t n = a.string->n_bytes, m = b.string->n_bytes, both = n < m ? n : m;
        run_bytes(r, both);
        // UTF-8 sorts as its code points do
        int order = memcmp(a.string->data, b.string->data, both);
        return holds(op, order ? order : n < m ? -1 : n > m);
    }
    if (a.kind == b.kind && (a.kind == V_LIST || a.kind == V_TUPLE)) {
        // the first items that differ decide, or else the lengths
        size_t n = a.list->n, m = b.list->n;
        for (size_t i = 0; i < n && i < m; i++)
            if (!value_equal(r, a.list->items[i], b.list->items[i]))
                return value_compare(r, op, a.list->items[i], b.list->items[i]);
        return holds(op, n < m ? -1 : n > m);
    }
    if (a.kind == V_UNDEFINED || b.kind == V_UNDEFINED)
        undefined_fail(r, a.kind == V_UNDEFINED ? a : b);
    fail(r, "'%s' not supported between instances of '%s' and '%s'", token_words(op), value_type(a),
         value_type(b));
}

// Merges the sorted halves; `left` has room for the first.
static void sort(struct render *r, struct dict_entry *e, size_t n, bool reverse,
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
            right = reverse ? value_compare(r, '<', left[i].key, e[k].key)
                            : value_compare(r, '<', e[k].key, left[i].key);
        e[at] = right ? e[k++] : left[i++];
    }
}

void entries_sort(struct render *r, struct dict *d, bool reverse)
{
    sort(r, d->entries, d->n, reverse, run_alloc(r, d->n, sizeof *d->entries));
}

// ---- membership ---------------------------------------------------------------------------------

struct dict_entry *dict_look(struct render *r, const struct dict *d, struct value key)
{
    if (key.kind == V_LIST || key.kind == V_DICT) fail(r, "unhashable type: '%s'", value_type(key));
    run_bytes(r, 1);
    for (size_t i = 0; i < d->n; i++) {
        struct dict_entry *e = &d->entries[i];
        bool strings = key.kind == V_STRING && e->key.kind == V_STRING;
        if (strings ? same_text(r, key.string, e->key.string) : value_equal(r, e->key, key))
            return e;
    }
    return NULL;
}

struct value dict_find(struct render *r, const struct dict *d, struct value key)
{
    const struct dict_entry *entry = dict_look(r, d, key);
    return entry ? entry->value : MISSING;
}

void dict_set(struct render *r, struct dict *d, struct value key, struct value value)
{
    struct dict_entry *entry = dict_look(r, d, key);
    if (entry)
        entry->value = value;
    else
        dict_append(r, d, key, value);
}

static bool value_in(struct render *r, struct value item, struct value in)
{
    if (in.kind == V_DICT) return dict_look(r, in.dict, item);
    if (in.kind == V_STRING) {
        const struct string *s = in.string, *part = item.string;
        if (item.kind != V_STRING)
            fail(r, "'in <string>' requires string as left operand, not %s", value_type(item));
        run_bytes(r, s->n_bytes);
        return memmem(s->data, s->n_bytes, part->data, part->n_bytes);
    }
    if (in.kind == V_ITERATOR) { // consumes up to what is found
        struct iterator *i = in.iterator;
        while (i->at < i->items.n)
            if (value_equal(r, i->items.items[i->at++], item)) return true;
    }
    if (!of_kinds(in, ITERABLES)) fail(r, "argument of type '%s' is not iterable", value_type(in));
    struct list items = value_items(r, in);
    for (size_t i = 0; i < items.n; i++)
        if (value_equal(r, items.items[i], item)) return true;
    return false;
}

bool value_compare(struct render *r, enum token_type op, struct value a, struct value b)
{
    if (op == T_EQ || op == T_NE) return value_equal(r, a, b) == (op == T_EQ);
    if (op == OP_IN || op == OP_NOT_IN) return value_in(r, a, b) == (op == OP_IN);
    run_deeper(r);
    bool truth = compare_order(r, op, a, b);
    r->depth--;
    return truth;
}

// ---- attributes ---------------------------------------------------------------------------------

static struct value macro_attribute(struct render *r, const struct node *macro, struct value name)
{
    const struct node_list *parameters = &macro->others;
    if (value_is(name, "name")) return macro->kind == N_MACRO ? macro->value : NONE;
    if (value_is(name, "caller")) return value_bool(macro->op & USES_CALLER);
    if (value_is(name, "catch_kwargs")) return value_bool(macro->op & USES_KWARGS);
    if (value_is(name, "catch_varargs")) return value_bool(macro->op & USES_VARARGS);
    if (!value_is(name, "arguments")) return MISSING;
    struct value names = list_new(r, V_TUPLE, parameters->n);
    for (size_t i = 0; i < parameters->n; i++) names.list->items[i] = parameters->nodes[i]->value;
    return names;
}

static struct value own_attribute(struct render *r, struct value of, struct value name)
{
    int part;
    switch (of.kind) {
    case V_LOOP:
        return loop_attribute(of.loop, name);
    case V_MACRO:
        return macro_attribute(r, of.macro->node, name);
    case V_NAMESPACE:
        return dict_find(r, of.dict, name);
    case V_TUPLE:
        part = of.list->group ? string_word(name.string, "grouper list") : -1;
        return part < 0 ? MISSING : of.list->items[part];
    case V_CYCLER:
        return value_is(name, "current") ? of.iterator->items.items[of.iterator->at] : MISSING;
    case V_RANGE:
        part = string_word(name.string, "start stop step");
        return part < 0 ? MISSING : value_int(of.list->range[part]);
    default:
        return MISSING;
    }
}

// V_MISSING: Python's getattr would fail.
static struct value python_attribute(struct render *r, struct value of, struct value name)
{
    const struct builtin *function = builtin_find(r, METHOD(of.kind), name.string);
    const char *changing = of.kind == V_LIST ? "append clear pop reverse insert sort extend remove"
                           : of.kind == V_DICT ? "clear pop popitem setdefault update"
                                               : "";
    if (string_word(name.string, changing) >= 0)
        return undefined_because(r, "access to attribute '%s' of '%s' object is unsafe.",
                                 SHOWN(name.string), value_type(of));
    if (!function) return own_attribute(r, of, name);
    struct method *method = run_alloc(r, 1, sizeof *method);
    *method = (struct method){of, function};
    return value_of(.kind = V_METHOD, .method = method);
}

struct value get_attribute(struct render *r, struct value of, struct value name)
{
    if (of.kind == V_UNDEFINED) undefined_fail(r, of);
    struct value v = python_attribute(r, of, name);
    if (!given(v) && of.kind == V_DICT) v = dict_find(r, of.dict, name);
    return given(v) ? v : undefined_item(r, of, name);
}

// ---- items and slices ---------------------------------------------------------------------------

static struct value item_at(struct render *r, struct value of, int64_t i)
{
    if (of.kind != V_STRING) return of.list->items[i];
    const struct string *s = of.string;
    run_bytes(r, s->n_chars == s->n_bytes ? 1 : 4 * (size_t)i);
    size_t start = string_offset(s, (size_t)i), end = start;
    utf8_next(s->data, s->n_bytes, &end);
    return string_part(r, s, start, end);
}

struct value get_item(struct render *r, struct value of, struct value index)
{
    int64_t i;
    struct value v = MISSING;
    if (of.kind == V_UNDEFINED) undefined_fail(r, of);
    if (of.kind == V_DICT && index.kind != V_LIST && index.kind != V_DICT) {
        v = dict_find(r, of.dict, index);
    } else if (of_kinds(of, PLACES) && value_as_int(index, &i)) {
        int64_t n = value_length(r, of);
        if (i < 0) i += n;
        if (i >= 0 && i < n) v = item_at(r, of, i);
    }
    if (!given(v) && index.kind == V_STRING) v = python_attribute(r, of, index);
    return given(v) ? v : undefined_item(r, of, index);
}

// Python's slice.indices(), and how many they are; `step` may be negative.
struct bounds {
    int64_t start, stop, step;
    size_t count;
};

static struct bounds slice_bounds(struct render *r, const struct value part[3], int64_t n)
{
    int64_t bound[3] = {0, n, 1};
    for (int i = 0; i < 3; i++)
        if (part[i].kind != V_NONE && !value_as_int(part[i], &bound[i]))
            fail(r, "slice indices must be integers or None or have an __index__ method");
    int64_t step = bound[2], low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    if (step == 0) fail(r, "slice step cannot be zero");
    for (int i = 0; i < 2; i++) {
        if (part[i].kind == V_NONE) bound[i] = (step < 0) == (i == 0) ? high : low;
        if (part[i].kind != V_NONE && bound[i] < 0) bound[i] += n;
        if (bound[i] < low) bound[i] = low;
        if (bound[i] > high) bound[i] = high;
    }
    return (struct bounds){bound[0], bound[1], step, range_count(bound[0], bound[1], step)};
}

struct value get_slice(struct render *r, struct value of, const struct value part[3])
{
    if (of.kind == V_UNDEFINED) undefined_fail(r, of);
    if (of.kind == V_DICT) fail(r, "unhashable type: 'slice'");
    if (!of_kinds(of, PLACES)) fail(r, "'%s' object is not subscriptable", value_type(of));
    struct bounds b = slice_bounds(r, part, value_length(r, of));
    if (of.kind == V_RANGE) {
        int64_t start = of.list->range[0], step = of.list->range[2];
        return range_make(r, start + b.start * step, start + b.stop * step, step * b.step);
    }
    run_steps(r, b.count);
    if (of.kind == V_STRING && b.step == 1) {
        const struct string *s = of.string;
        run_bytes(r, s->n_bytes);
        size_t start = b.count ? string_offset(s, (size_t)b.start) : 0;
        size_t end = b.count ? string_offset(s, (size_t)b.start + b.count) : 0;
        return string_part(r, s, start, end);
    }
    size_t text = r->text.len;
    struct value v = of.kind == V_STRING ? of : list_new(r, of.kind, b.count);
    for (size_t i = 0; i < b.count; i++) {
        struct value item = item_at(r, of, b.start + (int64_t)i * b.step);
        if (of.kind == V_STRING)
            put_string(r, item.string);
        else
            v.list->items[i] = item;
    }
    return of.kind == V_STRING ? text_end(r, text, of.string->markup) : v;
}

bool window_of(const struct value *v, int64_t n, int64_t *ret_start, int64_t *ret_end)
{
    int64_t start = given(v[2]) ? v[2].integer : 0, end = given(v[3]) ? v[3].integer : n;
    if (start < 0) start = start + n < 0 ? 0 : start + n;
    if (end < 0) end = end + n < 0 ? 0 : end + n;
    *ret_start = start;
    *ret_end = end < n ? end : n;
    return start <= *ret_end;
}

// ---- paths --------------------------------------------------------------------------------------

// A part of a path: an index where it is all digits.
static struct value path_key(struct render *r, const char *part, size_t n)
{
    int64_t number = 0;
    size_t i = 0;
    for (; i < n && n < 18 && part[i] >= '0' && part[i] <= '9'; i++)
        number = number * 10 + (part[i] - '0');
    return n > 0 && i == n ? value_int(number) : string_new(r, part, n, false);
}

struct value get_path(struct render *r, struct value of, struct value path, struct value otherwise)
{
    bool has_default = given(otherwise) && otherwise.kind != V_NONE;
    if (!given(path) || path.kind == V_NONE) return of;
    if (path.kind != V_STRING) {
        of = get_item(r, of, path);
        return of.kind == V_UNDEFINED && has_default ? otherwise : of;
    }
    const char *part = path.string->data, *end = part + path.string->n_bytes;
    run_bytes(r, path.string->n_bytes);
    for (;;) {
        run_steps(r, 1);
        const char *dot = memchr(part, '.', (size_t)(end - part));
        of = get_item(r, of, path_key(r, part, (size_t)((dot ? dot : end) - part)));
        if (of.kind == V_UNDEFINED && has_default) of = otherwise;
        if (!dot) return of;
        part = dot + 1;
    }
}
