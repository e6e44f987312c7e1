/* functions.c: the functions that a template finds without being given them. One thread. */
#include "common/jinja/run.h"

BUILTIN(raise_exception)
{
    const struct string *text = value_str(r, c->v[1]).string;
    size_t n = text->n_bytes;
    fail(r, "%.*s", (int)(n < 1500 ? n : 1500), text->data);
}

BUILTIN(range)
{
    int64_t bound[3] = {0, 0, 1};
    for (int i = 0; i < 3; i++)
        if (given(c->v[i + 1]) && !value_as_int(c->v[i + 1], &bound[i]))
            type_fail(r, "range() wants whole numbers", c->v[i + 1]);
    if (!given(c->v[2])) return range_make(r, 0, bound[0], 1);
    return range_make(r, bound[0], bound[1], bound[2]);
}

// What dict() takes first: a dict or pairs.
static void add_pairs(struct run *r, struct value from, struct dict *d)
{
    if (from.kind == V_DICT) from = dict_view(r, from.dict, V_ITEMS);
    struct list pairs = value_items(r, from);
    for (size_t i = 0; i < pairs.n; i++) {
        struct list pair = value_items(r, pairs.items[i]);
        if (pair.n != 2)
            fail(r, "dictionary update sequence element #%zu has length %zu; 2 is required", i,
                 pair.n);
        dict_set(r, d, pair.items[0], pair.items[1]);
    }
}

BUILTIN(dict)
{
    const struct arguments *all = c->all;
    struct value d = dict_new(&r->arena, 4);
    if (all->positional.n > 1)
        fail(r, "dict expected at most 1 argument, got %zu", all->positional.n);
    if (all->positional.n == 1) add_pairs(r, all->positional.items[0], d.dict);
    for (size_t i = 0; i < all->named.n; i++)
        dict_set(r, d.dict, all->named.entries[i].key, all->named.entries[i].value);
    return d;
}

BUILTIN(namespace)
{
    struct value space = dict(r, c);
    for (size_t i = 0; i < space.dict->n; i++) {
        struct value key = space.dict->entries[i].key;
        if (key.kind == V_STRING && key.string->n_bytes > 0 && key.string->data[0] == '_')
            fail(r, "Chat templates cannot store underscore-prefixed attributes on a namespace");
    }
    space.kind = V_NAMESPACE;
    return space;
}

BUILTIN(cycler)
{
    const struct arguments *all = c->all;
    if (all->positional.n == 0) fail(r, "at least one item has to be provided");
    if (all->named.n > 0) fail(r, "cycler() takes no keyword arguments");
    struct value v = iterator_of(&r->arena, all->positional);
    v.kind = V_CYCLER;
    return v;
}

BUILTIN(joiner)
{
    struct value separator = list_new(&r->arena, V_LIST, 1);
    separator.list->items[0] = given(c->v[1]) ? c->v[1] : string_of(&r->arena, ", ");
    struct value v = iterator_of(&r->arena, *separator.list);
    v.kind = V_JOINER;
    return v;
}

// ---- the clock ----------------------------------------------------------------------------------

static void put_time(struct run *r, const struct tm *tm, long microseconds, const char *item)
{
    run_steps(r, 8);
    char text[300], last = item[strlen(item) - 1];
    if (strcmp(item, "%f") == 0)
        run_printf(r, "%06ld", microseconds);
    else if (last != 'z' && last != 'Z') // a time without a zone
        run_put(r, text, strftime(text, sizeof text, item, tm));
}

// strftime item by item: "%", flags ("-", "_", "0", "^", "#"), a width, one letter.
static void put_strftime(struct run *r, const struct string *format, const struct tm *tm,
                         long microseconds)
{
    const char *at = format->data, *end = at + format->n_bytes;
    while (at < end) {
        const char *mark = memchr(at, '%', (size_t)(end - at));
        run_put(r, at, (size_t)((mark ? mark : end) - at));
        if (!mark) return;
        char item[12];
        size_t n = 1;
        while (n < 8 && mark + n < end && strchr("-_0^#:EO123456789", mark[n]) && mark[n]) n++;
        n += mark + n < end;
        memcpy(item, mark, n);
        item[n] = 0;
        if (n > 1 && strlen(item) == n)
            put_time(r, tm, microseconds, item);
        else
            run_put(r, mark, n);
        at = mark + n;
    }
}

BUILTIN(strftime_now)
{
    const struct string *format = arg_string(c, 1);
    struct timespec now = {0, 0};
    struct tm tm;
    if (r->now)
        tm = *r->now;
    else if (clock_gettime(CLOCK_REALTIME, &now) != 0 || !localtime_r(&now.tv_sec, &tm))
        arena_fail(&r->arena, ST_IO, "the clock cannot be read");
    size_t text = text_begin(r);
    put_strftime(r, format, &tm, now.tv_nsec / 1000);
    return text_end(r, text, false);
}

const struct builtin function_builtins[] = {
    {FUNCTION, "raise_exception", raise_exception, 0, "message", 1},
    {FUNCTION, "strftime_now", strftime_now, 0, "format", 1},
    {FUNCTION, "range", range, 0, "/start stop step", 1},
    {FUNCTION, "dict", dict, 0, "*", 0},
    {FUNCTION, "namespace", namespace, 0, "*", 0},
    {FUNCTION, "cycler", cycler, 0, "*", 0},
    {FUNCTION, "joiner", joiner, 0, "sep", 0},
    {.name = NULL},
};
