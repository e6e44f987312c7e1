/* attribute.c: a.b, a["b"], a[1] and a[1:2], with Jinja's two orders of look-up: a dot looks for a
 * method first and then for an item, brackets the other way round. What the sandbox forbids is
 * undefined, and says so when it is used. One thread. */
#include "common/jinja/run.h"

// Methods that would change a list or a dict.
static bool is_forbidden(struct value of, const struct string *name)
{
    const char *forbidden = of.kind == V_LIST ? "append clear pop reverse insert sort extend remove"
                            : of.kind == V_DICT ? "clear pop popitem setdefault update"
                                                : "";
    return string_word(name, forbidden) >= 0;
}

static struct value macro_attribute(struct run *r, const struct macro *macro,
                                    const struct string *name)
{
    const struct macro_node *m = macro->node->macro;
    const struct named_list *parameters = &m->parameters;
    if (string_is(name, "name")) return macro->node->kind == N_MACRO ? macro->node->value : NONE;
    if (string_is(name, "caller")) return value_bool(m->uses[EXTRA_CALLER]);
    if (string_is(name, "catch_kwargs")) return value_bool(m->uses[EXTRA_KWARGS]);
    if (string_is(name, "catch_varargs")) return value_bool(m->uses[EXTRA_VARARGS]);
    if (!string_is(name, "arguments")) return MISSING;
    struct value names = list_new(&r->arena, V_TUPLE, parameters->n);
    for (size_t i = 0; i < parameters->n; i++) names.list->items[i] = parameters->items[i].name;
    return names;
}

static struct value own_attribute(struct run *r, struct value of, const struct string *name)
{
    int part;
    switch (of.kind) {
    case V_LOOP:
        return loop_attribute(of.loop, name);
    case V_MACRO:
        return macro_attribute(r, of.macro, name);
    case V_NAMESPACE:
        return dict_find(r, of.dict, value_string(name));
    case V_TUPLE:
        if (of.list->group && string_is(name, "grouper")) return of.list->items[0];
        if (of.list->group && string_is(name, "list")) return of.list->items[1];
        return MISSING;
    case V_CYCLER:
        if (string_is(name, "current")) return of.iterator->items.items[of.iterator->at];
        return MISSING;
    case V_RANGE:
        part = string_word(name, "start stop step");
        return part < 0 ? MISSING : value_int(of.list->range[part]);
    default:
        return MISSING;
    }
}

// V_MISSING: Python's getattr would fail.
static struct value python_attribute(struct run *r, struct value of, const struct string *name)
{
    const struct builtin *function = builtin_find(METHOD(of.kind), name);
    if (is_forbidden(of, name))
        return undefined_because(r, "access to attribute '%.*s' of '%s' object is unsafe.",
                                 (int)(name->n_bytes < 60 ? name->n_bytes : 60), name->data,
                                 value_type(of));
    if (!function) return own_attribute(r, of, name);
    struct method *method = arena_alloc(&r->arena, sizeof *method);
    *method = (struct method){of, function};
    return value_of(.kind = V_METHOD, .method = method);
}

struct value get_attribute(struct run *r, struct value of, const struct string *name)
{
    if (of.kind == V_UNDEFINED) undefined_fail(r, of);
    struct value key = value_string(name), v = python_attribute(r, of, name);
    if (!given(v) && of.kind == V_DICT) v = dict_find(r, of.dict, key);
    return given(v) ? v : undefined_item(r, of, key);
}

// ---- items --------------------------------------------------------------------------------------

static bool has_places(struct value v)
{
    return v.kind == V_STRING || v.kind == V_LIST || v.kind == V_TUPLE || v.kind == V_RANGE;
}

static struct value character_at(struct run *r, const struct string *s, size_t i)
{
    run_bytes(r, s->n_chars == s->n_bytes ? 1 : 4 * i);
    size_t start = string_offset(s, i), end = start + 1;
    while (end < s->n_bytes && ((unsigned char)s->data[end] & 0xc0) == 0x80) end++;
    return string_part(r, s, start, end);
}

// V_MISSING: there is no such place.
static struct value item_at(struct run *r, struct value of, int64_t i)
{
    int64_t n = value_length(r, of);
    if (i < 0) i += n;
    if (i < 0 || i >= n) return MISSING;
    return of.kind == V_STRING ? character_at(r, of.string, (size_t)i) : of.list->items[i];
}

struct value get_item(struct run *r, struct value of, struct value index)
{
    int64_t i;
    struct value v = MISSING;
    if (of.kind == V_UNDEFINED) undefined_fail(r, of);
    if (of.kind == V_DICT && index.kind != V_LIST && index.kind != V_DICT)
        v = dict_find(r, of.dict, index);
    else if (has_places(of) && value_as_int(index, &i))
        v = item_at(r, of, i);
    if (!given(v) && index.kind == V_STRING) v = python_attribute(r, of, index.string);
    return given(v) ? v : undefined_item(r, of, index);
}

// ---- slices -------------------------------------------------------------------------------------

// Python's slice.indices(), and how many they are; `step` may be negative.
struct bounds {
    int64_t start, stop, step;
    size_t count;
};

static struct bounds slice_bounds(struct run *r, const struct value part[3], int64_t n)
{
    int64_t bound[3] = {0, n, 1};
    for (int i = 0; i < 3; i++)
        if (part[i].kind != V_NONE && !value_as_int(part[i], &bound[i]))
            fail(r, "slice indices must be integers or None or have an __index__ method");
    int64_t step = bound[2], low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    if (step == 0) fail(r, "slice step cannot be zero");
    if (part[0].kind == V_NONE) bound[0] = step < 0 ? high : low;
    if (part[1].kind == V_NONE) bound[1] = step < 0 ? low : high;
    for (int i = 0; i < 2; i++) {
        if (part[i].kind == V_NONE) continue;
        if (bound[i] < 0) bound[i] += n;
        if (bound[i] < low) bound[i] = low;
        if (bound[i] > high) bound[i] = high;
    }
    return (struct bounds){bound[0], bound[1], step, range_count(bound[0], bound[1], step)};
}

static struct value slice_string(struct run *r, const struct string *s, const struct bounds *b)
{
    if (b->step == 1) {
        run_bytes(r, s->n_bytes);
        size_t from = b->count ? string_offset(s, (size_t)b->start) : 0;
        size_t to = b->count ? string_offset(s, (size_t)b->start + b->count) : 0;
        return string_part(r, s, from, to);
    }
    size_t text = text_begin(r);
    run_steps(r, b->count);
    for (size_t i = 0; i < b->count; i++)
        run_put_string(r, character_at(r, s, (size_t)(b->start + (int64_t)i * b->step)).string);
    return text_end(r, text, s->markup);
}

struct value get_slice(struct run *r, struct value of, const struct value part[3])
{
    if (of.kind == V_UNDEFINED) undefined_fail(r, of);
    if (of.kind == V_DICT) fail(r, "unhashable type: 'slice'");
    if (!has_places(of)) fail(r, "'%s' object is not subscriptable", value_type(of));
    struct bounds b = slice_bounds(r, part, value_length(r, of));
    if (of.kind == V_STRING) return slice_string(r, of.string, &b);
    if (of.kind == V_RANGE) {
        int64_t start = of.list->range[0], step = of.list->range[2];
        return range_make(r, start + b.start * step, start + b.stop * step, step * b.step);
    }
    run_steps(r, b.count);
    struct value v = list_new(&r->arena, of.kind, b.count);
    for (size_t i = 0; i < b.count; i++)
        v.list->items[i] = of.list->items[b.start + (int64_t)i * b.step];
    return v;
}

// ---- paths --------------------------------------------------------------------------------------

// A part of a path: a place where it is all digits.
static struct value path_key(struct run *r, const char *part, size_t n)
{
    int64_t number = 0;
    size_t i = 0;
    for (; i < n && n < 18 && part[i] >= '0' && part[i] <= '9'; i++)
        number = number * 10 + (part[i] - '0');
    return n > 0 && i == n ? value_int(number) : string_new(&r->arena, part, n, false);
}

struct value get_path(struct run *r, struct value of, struct value path, struct value otherwise)
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
