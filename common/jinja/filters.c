/* filters.c: filters on single values: defaults, attributes, HTML and URLs. One thread. */
#include "common/jinja/run.h"
#include <ctype.h>

BUILTIN(default_value)
{
    bool by_truth = arg_truth(c, 2, false), truth = value_truth(r, c->v[0]);
    if (c->v[0].kind != V_UNDEFINED && (truth || !by_truth)) return c->v[0];
    return given(c->v[1]) ? c->v[1] : string_of(&r->arena, "");
}

BUILTIN(attr)
{
    const struct string *name = arg_string(c, 1);
    if (c->v[0].kind != V_DICT || builtin_find(METHOD(V_DICT), name))
        return get_attribute(r, c->v[0], name);
    return undefined_item(r, c->v[0], c->v[1]); // an item is not an attribute
}

// ---- HTML ---------------------------------------------------------------------------------------

BUILTIN(escape)
{
    return value_escape(r, c->v[0]);
}

BUILTIN(force_escape)
{
    return value_escape(r, string_as(r, c->v[0].string, false));
}

BUILTIN(safe)
{
    return string_as(r, c->v[0].string, true);
}

// Comments and tags go, and runs of white space become one blank.
BUILTIN(striptags)
{
    const char *s = c->v[0].string->data, *end = s + c->v[0].string->n_bytes;
    size_t text = text_begin(r);
    run_bytes(r, c->v[0].string->n_bytes);
    while (s < end) {
        const char *open = memchr(s, '<', (size_t)(end - s)), *close = NULL;
        bool comment = open && end - open >= 4 && memcmp(open, "<!--", 4) == 0;
        if (comment) close = memmem(open, (size_t)(end - open), "-->", 3);
        if (comment && close) close += 2;
        if (open && !comment) close = memchr(open, '>', (size_t)(end - open));
        run_put(r, s, (size_t)((close ? open : end) - s));
        s = close ? close + 1 : end;
    }
    struct list words = split_string(r, text_end(r, text, false).string, NULL, -1);
    for (size_t i = 0; i < words.n; i++) {
        if (i > 0) run_puts(r, " ");
        run_put_string(r, words.items[i].string);
    }
    return text_end(r, text, false);
}

static void put_attribute(struct run *r, const struct dict_entry *e)
{
    const struct string *key = value_str(r, e->key).string;
    for (size_t i = 0; i < key->n_bytes; i++)
        if (strchr(" \t\n\r\f\v/>=", key->data[i]) && key->data[i])
            fail(r, "Invalid character in attribute name");
    run_put_string(r, value_escape(r, value_string(key)).string);
    run_puts(r, "=\"");
    run_put_string(r, value_escape(r, e->value).string);
    run_puts(r, "\"");
}

BUILTIN(xmlattr)
{
    bool space = arg_truth(c, 1, true);
    if (c->v[0].kind != V_DICT) type_fail(r, "xmlattr wants a mapping", c->v[0]);
    const struct dict *d = c->v[0].dict;
    size_t text = text_begin(r);
    for (size_t i = 0; i < d->n; i++) {
        struct value v = d->entries[i].value;
        if (v.kind == V_NONE || v.kind == V_UNDEFINED) continue;
        if (space || text_begin(r) > text) run_puts(r, " ");
        put_attribute(r, &d->entries[i]);
    }
    return text_end(r, text, false);
}

// ---- URLs ---------------------------------------------------------------------------------------

static void put_quoted(struct run *r, const struct string *s, bool query)
{
    for (size_t i = 0; i < s->n_bytes; i++) {
        unsigned char b = (unsigned char)s->data[i];
        if ((b < 0x80 && isalnum(b)) || (b && strchr("_.-~", b)) || (b == '/' && !query))
            run_put(r, &s->data[i], 1);
        else if (b == ' ' && query)
            run_puts(r, "+");
        else
            run_printf(r, "%%%02X", b);
    }
}

static void put_query(struct run *r, struct list pairs)
{
    for (size_t i = 0; i < pairs.n; i++) {
        struct list pair = value_items(r, pairs.items[i]);
        if (pair.n != 2) fail(r, "urlencode wants pairs of two");
        if (i > 0) run_puts(r, "&");
        put_quoted(r, value_str(r, pair.items[0]).string, true);
        run_puts(r, "=");
        put_quoted(r, value_str(r, pair.items[1]).string, true);
    }
}

BUILTIN(urlencode)
{
    struct value v = c->v[0];
    size_t text = text_begin(r);
    if (v.kind == V_DICT) v = dict_view(r, v.dict, V_ITEMS);
    if (v.kind == V_STRING || !value_is_iterable(v))
        put_quoted(r, value_str(r, v).string, false);
    else
        put_query(r, value_items(r, v));
    return text_end(r, text, false);
}

const struct builtin value_builtins[] = {
    {FILTER, "default d", default_value, 0, "default_value boolean", 0},
    {FILTER, "attr", attr, 0, "name", 1},
    {FILTER, "escape e", escape, 0, "", 0},
    {FILTER, "forceescape", force_escape, 0, "$", 0},
    {FILTER, "safe", safe, 0, "$", 0},
    {FILTER, "striptags", striptags, 0, "$", 0},
    {FILTER, "xmlattr", xmlattr, 0, "autospace", 0},
    {FILTER, "urlencode", urlencode, 0, "", 0},
    {.name = NULL},
};
