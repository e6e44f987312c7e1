/* attribute.c: a.b, a["b"], a[1] and a[1:2], with Jinja's two orders of look-up: a dot looks for a
 * method first and then for an item, brackets the other way round. What the sandbox forbids is
 * undefined, and says so when it is used. One thread. */
#include "common/jinja/run.h"
#include <stdio.h>

// Methods that would change a list or a dict.
static bool is_forbidden(const struct value *of, const struct string *name)
{
    static const char *const of_list[] = {"append", "clear", "pop",    "reverse",
                                          "insert", "sort",  "extend", "remove"};
    static const char *const of_dict[] = {"clear", "pop", "popitem", "setdefault", "update"};
    for (size_t i = 0; of->kind == V_LIST && i < sizeof of_list / sizeof *of_list; i++)
        if (string_is(name, of_list[i])) return true;
    for (size_t i = 0; of->kind == V_DICT && i < sizeof of_dict / sizeof *of_dict; i++)
        if (string_is(name, of_dict[i])) return true;
    return false;
}

static enum status forbidden(struct run *r, const struct value *of, const struct string *name,
                             struct value *ret)
{
    char hint[200];
    snprintf(hint, sizeof hint, "access to attribute '%.60s' of '%s' object is unsafe.", name->data,
             value_type(of));
    struct value text;
    enum status st = string_make(&r->arena, hint, strlen(hint), &text);
    return st == ST_OK ? undefined_make(r, text.string->data, of, value_string(name), ret) : st;
}

static enum status macro_attribute(struct run *r, const struct macro *macro,
                                   const struct string *name, struct value *ret)
{
    const struct macro_node *m = macro->node->macro;
    struct value *items;
    enum status st = ST_OK;
    if (string_is(name, "name")) {
        *ret = macro->node->kind == N_MACRO ? macro->node->value : NONE;
    } else if (string_is(name, "arguments")) {
        st = list_make(&r->arena, V_TUPLE, (size_t)m->n, &items, ret);
        for (int i = 0; st == ST_OK && i < m->n; i++) items[i] = m->parameters[i].name;
    } else if (string_is(name, "caller")) {
        *ret = value_bool(m->uses_caller);
    } else if (string_is(name, "catch_kwargs")) {
        *ret = value_bool(m->uses_kwargs);
    } else if (string_is(name, "catch_varargs")) {
        *ret = value_bool(m->uses_varargs);
    }
    return st;
}

static enum status own_attribute(struct run *r, const struct value *of, const struct string *name,
                                 struct value *ret)
{
    *ret = MISSING;
    switch (of->kind) {
    case V_LOOP:
        return loop_attribute(r, of->loop, name, ret);
    case V_MACRO:
        return macro_attribute(r, of->macro, name, ret);
    case V_NAMESPACE: {
        struct value key = value_string(name);
        return dict_find(r, of->dict, &key, ret);
    }
    case V_TUPLE:
        if (of->list->group && string_is(name, "grouper")) *ret = of->list->items[0];
        if (of->list->group && string_is(name, "list")) *ret = of->list->items[1];
        return ST_OK;
    case V_CYCLER:
        if (string_is(name, "current")) *ret = of->cycler->items.items[of->cycler->at];
        return ST_OK;
    case V_RANGE:
        if (string_is(name, "start")) *ret = value_int(of->range->start);
        if (string_is(name, "stop")) *ret = value_int(of->range->stop);
        if (string_is(name, "step")) *ret = value_int(of->range->step);
        return ST_OK;
    default:
        return ST_OK;
    }
}

// V_MISSING: Python's getattr would fail.
static enum status python_attribute(struct run *r, const struct value *of,
                                    const struct string *name, struct value *ret)
{
    const struct builtin *function = method_find(of, name);
    if (is_forbidden(of, name)) return forbidden(r, of, name, ret);
    if (!function) return own_attribute(r, of, name, ret);
    struct method *method = arena_alloc(&r->arena, sizeof *method);
    if (!method) return ST_NO_MEMORY;
    *method = (struct method){*of, function};
    *ret = value_of(.kind = V_METHOD, .method = method);
    return ST_OK;
}

enum status get_attribute(struct run *r, const struct value *of, const struct string *name,
                          struct value *ret)
{
    if (of->kind == V_UNDEFINED) return undefined_fail(of->undefined);
    struct value key = value_string(name);
    enum status st = python_attribute(r, of, name, ret);
    if (st == ST_OK && !given(ret) && of->kind == V_DICT) st = dict_find(r, of->dict, &key, ret);
    if (st == ST_OK && !given(ret)) st = undefined_make(r, NULL, of, key, ret);
    return st;
}

static bool place_of(int64_t index, size_t n, size_t *ret)
{
    if (index < 0) index += (int64_t)n;
    *ret = (size_t)index;
    return index >= 0 && index < (int64_t)n;
}

static enum status character_at(struct run *r, const struct string *s, size_t i, struct value *ret)
{
    size_t start = string_offset(s, i), end = start + 1;
    while (end < s->n_bytes && ((unsigned char)s->data[end] & 0xc0) == 0x80) end++;
    enum status st = run_steps(r, s->n_chars == s->n_bytes ? 0 : start >> 6);
    return st == ST_OK ? string_like(r, s, s->data + start, end - start, ret) : st;
}

enum status get_item(struct run *r, const struct value *of, const struct value *index,
                     struct value *ret)
{
    int64_t number;
    size_t at;
    int64_t n = 0;
    enum status st = ST_OK;
    *ret = MISSING;
    if (of->kind == V_UNDEFINED) return undefined_fail(of->undefined);
    if (of->kind == V_DICT) {
        bool hashable = index->kind != V_LIST && index->kind != V_DICT;
        if (hashable) st = dict_find(r, of->dict, index, ret);
    } else if (value_as_int(index, &number) && of->kind != V_VIEW && of->kind != V_LOOP &&
               value_has_length(of)) {
        CHECK(value_length(r, of, &n));
        if (!place_of(number, (size_t)n, &at))
            *ret = MISSING;
        else if (of->kind == V_STRING)
            st = character_at(r, of->string, at, ret);
        else
            *ret = of->kind == V_RANGE ? range_at(of->range, at) : of->list->items[at];
    }
    if (st == ST_OK && !given(ret) && index->kind == V_STRING)
        st = python_attribute(r, of, index->string, ret);
    if (st == ST_OK && !given(ret)) st = undefined_make(r, NULL, of, *index, ret);
out:
    return st;
}

// ---- slices -------------------------------------------------------------------------------------

// Python's slice.indices(), and how many they are; `step` may be negative.
struct bounds {
    int64_t start, stop, step;
    size_t count;
};

static enum status slice_bounds(const struct value part[3], int64_t n, struct bounds *ret)
{
    int64_t bound[3] = {0, n, 1};
    for (int i = 0; i < 3; i++)
        if (part[i].kind != V_NONE && !value_as_int(&part[i], &bound[i]))
            return status_fail(
                ST_INVALID, "slice indices must be integers or None or have an __index__ method");
    int64_t step = bound[2];
    if (step == 0) return status_fail(ST_INVALID, "slice step cannot be zero");
    int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    if (part[0].kind == V_NONE) bound[0] = step < 0 ? high : low;
    if (part[1].kind == V_NONE) bound[1] = step < 0 ? low : high;
    for (int i = 0; i < 2; i++) {
        if (part[i].kind == V_NONE) continue;
        if (bound[i] < 0) bound[i] += n;
        if (bound[i] < low) bound[i] = low;
        if (bound[i] > high) bound[i] = high;
    }
    uint64_t span = step > 0 ? (uint64_t)(bound[1] - bound[0]) : (uint64_t)(bound[0] - bound[1]);
    uint64_t stride = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;
    bool empty = step > 0 ? bound[0] >= bound[1] : bound[0] <= bound[1];
    *ret = (struct bounds){bound[0], bound[1], step, empty ? 0 : (size_t)((span - 1) / stride + 1)};
    return ST_OK;
}

static enum status slice_string(struct run *r, const struct string *s, const struct bounds *b,
                                struct value *ret)
{
    struct bytes text = BYTES_INIT;
    if (b->step == 1) {
        size_t from = b->count ? string_offset(s, (size_t)b->start) : 0;
        size_t to = b->count ? string_offset(s, (size_t)b->start + b->count) : 0;
        return string_like(r, s, s->data + from, to - from, ret);
    }
    enum status st = run_steps(r, b->count);
    for (size_t i = 0; st == ST_OK && i < b->count; i++) {
        struct value c;
        st = character_at(r, s, (size_t)(b->start + (int64_t)i * b->step), &c);
        if (st == ST_OK) run_put(r, &text, c.string->data, c.string->n_bytes);
    }
    struct value plain;
    st = run_take(r, st, &text, &plain);
    return st == ST_OK ? string_like(r, s, plain.string->data, plain.string->n_bytes, ret) : st;
}

static enum status slice_range(struct run *r, const struct range *range, const struct bounds *b,
                               struct value *ret)
{
    return range_make(r, range->start + b->start * range->step,
                      range->start + b->stop * range->step, range->step * b->step, ret);
}

enum status get_slice(struct run *r, const struct value *of, const struct value part[3],
                      struct value *ret)
{
    int64_t n;
    struct bounds b = {0, 0, 1, 0};
    enum status st;
    struct value *items;
    if (of->kind == V_UNDEFINED) return undefined_fail(of->undefined);
    if (of->kind == V_DICT) return status_fail(ST_INVALID, "unhashable type: 'slice'");
    if (of->kind == V_VIEW || of->kind == V_LOOP || !value_has_length(of))
        return status_fail(ST_INVALID, "'%s' object is not subscriptable", value_type(of));
    CHECK(value_length(r, of, &n));
    CHECK(slice_bounds(part, n, &b));
    if (of->kind == V_STRING) return slice_string(r, of->string, &b, ret);
    if (of->kind == V_RANGE) return slice_range(r, of->range, &b, ret);
    CHECK(run_steps(r, b.count));
    CHECK(list_make(&r->arena, of->kind, b.count, &items, ret));
    for (size_t i = 0; i < b.count; i++) items[i] = of->list->items[b.start + (int64_t)i * b.step];
out:
    return st;
}

// ---- paths --------------------------------------------------------------------------------------

static enum status follow(struct run *r, const char *part, size_t n, struct value *at)
{
    struct value key;
    enum status st;
    bool digits = n > 0 && n < 18;
    int64_t number = 0;
    for (size_t i = 0; digits && i < n; i++) {
        digits = part[i] >= '0' && part[i] <= '9';
        number = number * 10 + (part[i] - '0');
    }
    if (digits) {
        key = value_int(number);
    } else {
        CHECK(string_borrow(&r->arena, part, n, &key));
    }
    struct value of = *at;
    st = get_item(r, &of, &key, at);
out:
    return st;
}

enum status get_path(struct run *r, const struct value *of, const struct value *path,
                     const struct value *otherwise, struct value *ret)
{
    enum status st = ST_OK;
    struct value at = *of;
    bool has_default = otherwise && given(otherwise) && otherwise->kind != V_NONE;
    *ret = at;
    if (!given(path) || path->kind == V_NONE) return ST_OK;
    if (path->kind != V_STRING) {
        st = get_item(r, of, path, ret);
        if (st == ST_OK && ret->kind == V_UNDEFINED && has_default) *ret = *otherwise;
        return st;
    }
    const char *part = path->string->data, *end = part + path->string->n_bytes;
    while (st == ST_OK) {
        const char *dot = memchr(part, '.', (size_t)(end - part));
        st = follow(r, part, (size_t)((dot ? dot : end) - part), &at);
        if (st == ST_OK && at.kind == V_UNDEFINED && has_default) at = *otherwise;
        if (!dot) break;
        part = dot + 1;
    }
    *ret = at;
    return st;
}
