/* json.c: the text that Python's json.dumps gives. One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"
#include <math.h>
#include <stdio.h>

static void put_json_char(const struct run *r, const char *s, int n, uint32_t c, bool ascii,
                          struct bytes *to)
{
    static const char from[] = "\"\\\n\r\t\b\f", names[] = "\"\\nrtbf";
    const char *known = c < 0x80 && c != 0 ? strchr(from, (int)c) : NULL;
    char code[16];
    if (known)
        snprintf(code, sizeof code, "\\%c", names[known - from]);
    else if (c < 0x20 || (ascii && c > 0x7e && c < 0x10000))
        snprintf(code, sizeof code, "\\u%04x", c);
    else if (ascii && c > 0x7e)
        snprintf(code, sizeof code, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10),
                 0xdc00 + ((c - 0x10000) & 0x3ff));
    else {
        run_put(r, to, s, (size_t)n);
        return;
    }
    run_puts(r, to, code);
}

static void put_json_string(const struct run *r, const struct string *s, bool ascii,
                            struct bytes *to)
{
    int n;
    run_puts(r, to, "\"");
    for (size_t at = 0; at < s->n_bytes; at += (size_t)n) {
        uint32_t c = text_char(s->data + at, s->n_bytes - at, &n);
        put_json_char(r, s->data + at, n, c, ascii, to);
    }
    run_puts(r, to, "\"");
}

static void put_json_float(double x, struct bytes *to)
{
    if (isnan(x) || isinf(x))
        bytes_puts(to, isnan(x) ? "NaN" : x > 0 ? "Infinity" : "-Infinity");
    else
        put_float(x, to);
}

struct writer {
    struct run *run;
    const struct json_style *style;
    struct bytes *to;
    int level;
};

static enum status put_value(struct writer *w, const struct value *v);

static void new_line(struct writer *w)
{
    if (!w->style->lines) return;
    run_puts(w->run, w->to, "\n");
    for (int i = 0; i < w->level; i++) run_puts(w->run, w->to, w->style->indent);
}

static enum status put_array(struct writer *w, const struct list *list)
{
    enum status st = ST_OK;
    run_puts(w->run, w->to, "[");
    w->level++;
    for (size_t i = 0; st == ST_OK && i < list->n; i++) {
        if (i > 0) run_puts(w->run, w->to, w->style->item_separator);
        new_line(w);
        st = put_value(w, &list->items[i]);
    }
    w->level--;
    if (list->n > 0) new_line(w);
    run_puts(w->run, w->to, "]");
    return st;
}

static enum status put_key(struct writer *w, const struct value *key)
{
    if (key->kind == V_STRING) {
        put_json_string(w->run, key->string, w->style->ensure_ascii, w->to);
        return ST_OK;
    }
    if (key->kind != V_NONE && !value_is_number(key))
        return status_fail(ST_INVALID, "keys must be str, int, float, bool or None, not %s",
                           value_type(key));
    run_puts(w->run, w->to, "\"");
    enum status st = put_value(w, key);
    run_puts(w->run, w->to, "\"");
    return st;
}

// Entries in the order of their keys.
static enum status sorted_entries(struct run *r, const struct dict *d, struct dict *ret)
{
    struct value *keys = arena_array(&r->arena, d->n, sizeof *keys);
    struct value *places = arena_array(&r->arena, d->n, sizeof *places);
    struct dict_entry *entries = arena_array(&r->arena, d->n, sizeof *entries);
    if (!keys || !places || !entries) return ST_NO_MEMORY;
    for (size_t i = 0; i < d->n; i++) {
        keys[i] = d->entries[i].key;
        places[i] = value_int((int64_t)i);
    }
    enum status st = sort_by_keys(r, places, keys, d->n, false);
    for (size_t i = 0; st == ST_OK && i < d->n; i++) entries[i] = d->entries[places[i].integer];
    *ret = (struct dict){entries, d->n, d->n};
    return st;
}

static enum status put_object(struct writer *w, const struct dict *d)
{
    enum status st = ST_OK;
    struct dict sorted = *d;
    if (w->style->sort_keys) CHECK(sorted_entries(w->run, d, &sorted));
    run_puts(w->run, w->to, "{");
    w->level++;
    for (size_t i = 0; i < sorted.n; i++) {
        if (i > 0) run_puts(w->run, w->to, w->style->item_separator);
        new_line(w);
        CHECK(put_key(w, &sorted.entries[i].key));
        run_puts(w->run, w->to, w->style->key_separator);
        CHECK(put_value(w, &sorted.entries[i].value));
    }
    w->level--;
    if (sorted.n > 0) new_line(w);
    run_puts(w->run, w->to, "}");
out:
    return st;
}

static enum status put_value(struct writer *w, const struct value *v)
{
    enum status st;
    CHECK(run_deeper(w->run));
    switch (v->kind) {
    case V_NONE:
        run_puts(w->run, w->to, "null");
        break;
    case V_BOOL:
        run_puts(w->run, w->to, v->truth ? "true" : "false");
        break;
    case V_INT:
        bytes_printf(w->to, "%lld", (long long)v->integer);
        break;
    case V_FLOAT:
        put_json_float(v->real, w->to);
        break;
    case V_STRING:
        CHECK(run_steps(w->run, v->string->n_bytes >> 4));
        put_json_string(w->run, v->string, w->style->ensure_ascii, w->to);
        break;
    case V_LIST:
    case V_TUPLE:
        st = put_array(w, v->list);
        break;
    case V_DICT:
        st = put_object(w, v->dict);
        break;
    default:
        st = status_fail(ST_INVALID, "Object of type %s is not JSON serializable", value_type(v));
    }
    if (st == ST_OK && w->to->failed)
        st = status_fail(ST_NO_MEMORY, "a text grows beyond %zu MiB, which is the limit",
                         w->run->arena.limit >> 20);
    w->run->depth--;
out:
    return st;
}

enum status put_json(struct run *r, const struct value *v, const struct json_style *style,
                     struct bytes *to)
{
    struct writer w = {r, style, to, 0};
    return put_value(&w, v);
}
