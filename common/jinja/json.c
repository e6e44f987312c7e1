/* json.c: the text that Python's json.dumps gives. One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"
#include <math.h>
#include <stdio.h>

struct writer {
    struct run *run;
    const struct json_style *style;
    int level;
};

static void put_value(struct writer *w, struct value v);

static void put_json_string(struct run *r, const struct string *s, bool ascii)
{
    static const char from[] = "\"\\\n\r\t\b\f", names[] = "\"\\nrtbf";
    run_steps(r, s->n_bytes >> 4);
    run_puts(r, "\"");
    for (size_t at = 0; at < s->n_bytes;) {
        size_t start = at;
        uint32_t c = utf8_next(s->data, s->n_bytes, &at);
        const char *known = c < 0x80 && c != 0 ? strchr(from, (int)c) : NULL;
        if (known)
            run_printf(r, "\\%c", names[known - from]);
        else if (c < 0x20 || (ascii && c > 0x7e && c < 0x10000))
            run_printf(r, "\\u%04x", c);
        else if (ascii && c > 0x7e)
            run_printf(r, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10),
                       0xdc00 + ((c - 0x10000) & 0x3ff));
        else
            run_put(r, s->data + start, at - start);
    }
    run_puts(r, "\"");
}

static void put_json_float(struct run *r, double x)
{
    if (isnan(x) || isinf(x))
        run_puts(r, isnan(x) ? "NaN" : x > 0 ? "Infinity" : "-Infinity");
    else
        put_float(r, x);
}

static void new_line(struct writer *w)
{
    if (!w->style->lines) return;
    run_puts(w->run, "\n");
    for (int i = 0; i < w->level; i++) run_put_string(w->run, w->style->indent);
}

static void put_key(struct writer *w, struct value key)
{
    if (key.kind != V_STRING && key.kind != V_NONE && !value_is_number(key))
        fail(w->run, "keys must be str, int, float, bool or None, not %s", value_type(key));
    if (key.kind != V_STRING) run_puts(w->run, "\"");
    put_value(w, key);
    run_puts(w->run, key.kind != V_STRING ? "\"" : "");
    run_put_string(w->run, w->style->key_separator);
}

// Between brackets: n values, with keys where there are any.
static void put_items(struct writer *w, const char *brackets, const struct value *keys,
                      const struct value *values, size_t n)
{
    run_put(w->run, brackets, 1);
    w->level++;
    for (size_t i = 0; i < n; i++) {
        if (i > 0) run_put_string(w->run, w->style->item_separator);
        new_line(w);
        if (keys) put_key(w, keys[i]);
        put_value(w, values[i]);
    }
    w->level--;
    if (n > 0) new_line(w);
    run_put(w->run, brackets + 1, 1);
}

static void put_object(struct writer *w, const struct dict *d)
{
    struct value *keys = arena_array(&w->run->arena, d->n, sizeof *keys);
    struct value *values = arena_array(&w->run->arena, d->n, sizeof *values);
    for (size_t i = 0; i < d->n; i++) {
        keys[i] = d->entries[i].key;
        values[i] = d->entries[i].value;
    }
    if (w->style->sort_keys)
        items_sort(w->run, (struct list){.items = values, .n = d->n}, keys, false);
    put_items(w, "{}", keys, values, d->n);
}

static void put_value(struct writer *w, struct value v)
{
    run_deeper(w->run);
    if (v.kind == V_NONE)
        run_puts(w->run, "null");
    else if (v.kind == V_BOOL)
        run_puts(w->run, v.truth ? "true" : "false");
    else if (v.kind == V_INT)
        put_repr(w->run, v);
    else if (v.kind == V_FLOAT)
        put_json_float(w->run, v.real);
    else if (v.kind == V_STRING)
        put_json_string(w->run, v.string, w->style->ensure_ascii);
    else if (v.kind == V_LIST || v.kind == V_TUPLE)
        put_items(w, "[]", NULL, v.list->items, v.list->n);
    else if (v.kind == V_DICT)
        put_object(w, v.dict);
    else
        fail(w->run, "Object of type %s is not JSON serializable", value_type(v));
    w->run->depth--;
}

void put_json(struct run *r, struct value v, const struct json_style *style)
{
    struct writer w = {r, style, 0};
    put_value(&w, v);
}
