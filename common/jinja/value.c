/* value.c: making values, and their names. JSON becomes values once, at the start of a rendering;
 * its strings are borrowed. One thread at a time. */
#include "common/jinja/value.h"
#include "common/base/bytes.h"

#define MAX_JSON_DEPTH 200

size_t utf8_count(const char *data, size_t n_bytes)
{
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) n += ((unsigned char)data[i] & 0xc0) != 0x80;
    return n;
}

enum status string_borrow(struct arena *a, const char *data, size_t n_bytes, struct value *ret)
{
    struct string *s = arena_alloc(a, sizeof *s);
    if (!s) return ST_NO_MEMORY;
    *s = (struct string){data, n_bytes, utf8_count(data, n_bytes), false};
    *ret = value_string(s);
    return ST_OK;
}

enum status string_make(struct arena *a, const char *data, size_t n_bytes, struct value *ret)
{
    char *copy = arena_alloc(a, n_bytes + 1);
    if (!copy) return ST_NO_MEMORY;
    if (n_bytes > 0) memcpy(copy, data, n_bytes);
    return string_borrow(a, copy, n_bytes, ret);
}

enum status string_puts(struct arena *a, const char *text, struct value *ret)
{
    return string_borrow(a, text, strlen(text), ret);
}

enum status list_make(struct arena *a, enum value_kind kind, size_t n, struct value **ret_items,
                      struct value *ret)
{
    struct list *list = arena_alloc(a, sizeof *list);
    struct value *items = list ? arena_array(a, n, sizeof *items) : NULL;
    if (!items) return ST_NO_MEMORY;
    *list = (struct list){.items = items, .n = n};
    *ret_items = items;
    *ret = value_of(.kind = kind, .list = list);
    return ST_OK;
}

enum status iterator_make(struct arena *a, struct list items, struct value *ret)
{
    struct iterator *iterator = arena_alloc(a, sizeof *iterator);
    if (!iterator) return ST_NO_MEMORY;
    iterator->items = items;
    *ret = value_of(.kind = V_ITERATOR, .iterator = iterator);
    return ST_OK;
}

enum status dict_make(struct arena *a, size_t cap, struct value *ret)
{
    struct dict *d = arena_alloc(a, sizeof *d);
    struct dict_entry *entries = d ? arena_array(a, cap, sizeof *entries) : NULL;
    if (!entries) return ST_NO_MEMORY;
    *d = (struct dict){entries, 0, cap};
    *ret = value_of(.kind = V_DICT, .dict = d);
    return ST_OK;
}

enum status dict_append(struct arena *a, struct dict *d, struct value key, struct value value)
{
    if (d->n == d->cap) {
        size_t cap = d->cap ? 2 * d->cap : 4;
        struct dict_entry *larger = arena_array(a, cap, sizeof *larger);
        if (!larger) return ST_NO_MEMORY;
        if (d->n > 0) memcpy(larger, d->entries, d->n * sizeof *larger);
        d->entries = larger;
        d->cap = cap;
    }
    d->entries[d->n++] = (struct dict_entry){key, value};
    return ST_OK;
}

// ---- from JSON ----------------------------------------------------------------------------------

static enum status from_json(struct arena *a, const json_t *json, int depth, struct value *ret);

static enum status from_array(struct arena *a, const json_t *json, int depth, struct value *ret)
{
    struct value *items;
    size_t n = json_array_size(json);
    enum status st = list_make(a, V_LIST, n, &items, ret);
    for (size_t i = 0; st == ST_OK && i < n; i++)
        st = from_json(a, json_array_get(json, i), depth + 1, &items[i]);
    return st;
}

static enum status from_object(struct arena *a, const json_t *json, int depth, struct value *ret)
{
    enum status st = dict_make(a, json_object_size(json), ret);
    if (st != ST_OK) return st;
    void *at = json_object_iter((json_t *)json); // only read
    for (; st == ST_OK && at; at = json_object_iter_next((json_t *)json, at)) {
        struct value key, value;
        st = string_puts(a, json_object_iter_key(at), &key);
        if (st == ST_OK) st = from_json(a, json_object_iter_value(at), depth + 1, &value);
        if (st == ST_OK) st = dict_append(a, ret->dict, key, value);
    }
    return st;
}

static enum status from_json(struct arena *a, const json_t *json, int depth, struct value *ret)
{
    if (depth > MAX_JSON_DEPTH)
        return status_fail(ST_INVALID, "the messages are nested deeper than %d levels",
                           MAX_JSON_DEPTH);
    switch (json_typeof(json)) {
    case JSON_OBJECT:
        return from_object(a, json, depth, ret);
    case JSON_ARRAY:
        return from_array(a, json, depth, ret);
    case JSON_STRING:
        return string_borrow(a, json_string_value(json), json_string_length(json), ret);
    case JSON_INTEGER:
        *ret = value_int(json_integer_value(json));
        return ST_OK;
    case JSON_REAL:
        *ret = value_float(json_real_value(json));
        return ST_OK;
    case JSON_TRUE:
    case JSON_FALSE:
        *ret = value_bool(json_is_true(json));
        return ST_OK;
    case JSON_NULL:
        break;
    }
    *ret = NONE;
    return ST_OK;
}

enum status value_from_json(struct arena *a, const json_t *json, struct value *ret)
{
    return from_json(a, json, 0, ret);
}

// ---- strings ------------------------------------------------------------------------------------

bool string_equal(const struct string *a, const struct string *b)
{
    return a->n_bytes == b->n_bytes && memcmp(a->data, b->data, a->n_bytes) == 0;
}

bool string_is(const struct string *s, const char *text)
{
    return s->n_bytes == strlen(text) && memcmp(s->data, text, s->n_bytes) == 0;
}

bool value_is(const struct value *v, const char *text)
{
    return v->kind == V_STRING && string_is(v->string, text);
}

size_t string_offset(const struct string *s, size_t i)
{
    if (s->n_chars == s->n_bytes) return i;
    size_t at = 0;
    for (; i > 0 && at < s->n_bytes; i--) {
        at++;
        while (at < s->n_bytes && ((unsigned char)s->data[at] & 0xc0) == 0x80) at++;
    }
    return at;
}

// ---- names --------------------------------------------------------------------------------------

const char *value_type(const struct value *v)
{
    static const char *const names[] = {
        [V_MISSING] = "missing",
        [V_UNDEFINED] = "Undefined",
        [V_NONE] = "NoneType",
        [V_BOOL] = "bool",
        [V_INT] = "int",
        [V_FLOAT] = "float",
        [V_LIST] = "list",
        [V_TUPLE] = "tuple",
        [V_DICT] = "dict",
        [V_RANGE] = "range",
        [V_ITERATOR] = "generator",
        [V_NAMESPACE] = "Namespace",
        [V_MACRO] = "Macro",
        [V_FUNCTION] = "function",
        [V_METHOD] = "method",
        [V_LOOP] = "LoopContext",
        [V_CYCLER] = "Cycler",
        [V_JOINER] = "Joiner",
    };
    static const char *const views[] = {"dict_keys", "dict_values", "dict_items"};
    if (v->kind == V_STRING) return v->string->markup ? "Markup" : "str";
    if (v->kind == V_VIEW) return views[v->view->of];
    return names[v->kind];
}

const char *value_object_type(const struct value *v)
{
    static const char *const names[] = {
        [V_NONE] = "None",          [V_BOOL] = "bool object",  [V_INT] = "int object",
        [V_FLOAT] = "float object", [V_STRING] = "str object", [V_LIST] = "list object",
        [V_TUPLE] = "tuple object", [V_DICT] = "dict object",  [V_RANGE] = "range object",
    };
    if (v->kind < sizeof names / sizeof *names && names[v->kind]) return names[v->kind];
    return value_type(v);
}
