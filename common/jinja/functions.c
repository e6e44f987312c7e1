/* functions.c: the functions that a template finds without being given them. One thread. */
#include "common/jinja/filters.h"
#include <stdio.h>

BUILTIN(raise_exception)
{
    struct value text;
    (void)all, (void)ret;
    enum status st = value_str(r, &v[1], &text);
    if (st != ST_OK) return st;
    size_t n = text.string->n_bytes;
    return status_fail(ST_INVALID, "%.*s", (int)(n < 1500 ? n : 1500), text.string->data);
}

BUILTIN(range)
{
    int64_t bound[3] = {0, 0, 1};
    (void)all;
    for (int i = 0; i < 3; i++)
        if (given(&v[i + 1]) && !value_as_int(&v[i + 1], &bound[i]))
            return type_fail("range() wants whole numbers", &v[i + 1]);
    if (!given(&v[2])) return range_make(r, 0, bound[0], 1, ret);
    return range_make(r, bound[0], bound[1], bound[2], ret);
}

// What dict() takes: a dict or pairs, and names.
static enum status fill_dict(struct run *r, const struct arguments *all, struct dict *d)
{
    struct list pairs, pair;
    enum status st = ST_OK;
    if (all->n_positional > 1)
        return status_fail(ST_INVALID, "dict expected at most 1 argument, got %d",
                           all->n_positional);
    if (all->n_positional == 1) {
        struct value from = all->positional[0];
        if (from.kind == V_DICT)
            CHECK(call_method(r, &all->positional[0], "items", NULL, 0, &from));
        CHECK(value_items(r, &from, &pairs));
        for (size_t i = 0; i < pairs.n; i++) {
            CHECK(value_items(r, &pairs.items[i], &pair));
            if (pair.n != 2)
                return status_fail(ST_INVALID,
                                   "dictionary update sequence element #%zu has length "
                                   "%zu; 2 is required",
                                   i, pair.n);
            CHECK(dict_set(r, d, &pair.items[0], pair.items[1]));
        }
    }
    for (int i = 0; i < all->n_named; i++) {
        struct value name = value_string(all->named[i].name);
        CHECK(dict_set(r, d, &name, all->named[i].value));
    }
out:
    return st;
}

BUILTIN(dict)
{
    struct value d;
    (void)v;
    enum status st = dict_make(&r->arena, 4, &d);
    if (st == ST_OK) st = fill_dict(r, all, d.dict);
    *ret = d;
    return st;
}

BUILTIN(namespace)
{
    enum status st = dict(r, v, all, ret);
    for (size_t i = 0; st == ST_OK && i < ret->dict->n; i++) {
        const struct value *key = &ret->dict->entries[i].key;
        if (key->kind == V_STRING && key->string->n_bytes > 0 && key->string->data[0] == '_')
            st = status_fail(ST_INVALID, "Chat templates cannot store underscore-prefixed "
                                         "attributes on a namespace");
    }
    ret->kind = V_NAMESPACE;
    return st;
}

static enum status make_cycler(struct run *r, enum value_kind kind, struct list items,
                               struct value *ret)
{
    struct cycler *cycler = arena_alloc(&r->arena, sizeof *cycler);
    if (!cycler) return ST_NO_MEMORY;
    cycler->items = items;
    *ret = value_of(.kind = kind, .cycler = cycler);
    return ST_OK;
}

BUILTIN(cycler)
{
    (void)v;
    if (all->n_positional == 0)
        return status_fail(ST_INVALID, "at least one item has to be provided");
    if (all->n_named > 0) return status_fail(ST_INVALID, "cycler() takes no keyword arguments");
    return make_cycler(
        r, V_CYCLER, (struct list){.items = all->positional, .n = (size_t)all->n_positional}, ret);
}

BUILTIN(joiner)
{
    struct value separator, *items;
    enum status st;
    (void)all;
    CHECK(list_make(&r->arena, V_LIST, 1, &items, &separator));
    items[0] = v[1];
    if (!given(&v[1])) CHECK(string_puts(&r->arena, ", ", &items[0]));
    st = make_cycler(r, V_JOINER, *separator.list, ret);
out:
    return st;
}

BUILTIN(lipsum)
{
    (void)r, (void)v, (void)all, (void)ret;
    return status_fail(ST_UNSUPPORTED, "lipsum() is not supported");
}

// ---- the clock ----------------------------------------------------------------------------------

static void put_time(const struct run *r, const struct tm *tm, long microseconds, const char *item,
                     struct bytes *to)
{
    char text[300];
    char last = item[strlen(item) - 1];
    if (strcmp(item, "%f") == 0) {
        snprintf(text, sizeof text, "%06ld", microseconds);
        run_puts(r, to, text);
    } else if (last != 'z' && last != 'Z') { // a time without a zone
        size_t n = strftime(text, sizeof text, item, tm);
        run_put(r, to, text, n);
    }
}

// strftime item by item: "%", flags ("-", "_", "0", "^", "#"), a width, one letter.
static void put_strftime(const struct run *r, const struct string *format, const struct tm *tm,
                         long microseconds, struct bytes *to)
{
    const char *at = format->data, *end = at + format->n_bytes;
    while (at < end) {
        const char *mark = memchr(at, '%', (size_t)(end - at));
        run_put(r, to, at, (size_t)((mark ? mark : end) - at));
        if (!mark) return;
        char item[12];
        size_t n = 1;
        while (n < 8 && mark + n < end && strchr("-_0^#:EO123456789", mark[n]) && mark[n]) n++;
        n += mark + n < end;
        memcpy(item, mark, n);
        item[n] = 0;
        if (n > 1 && strlen(item) == n)
            put_time(r, tm, microseconds, item, to);
        else
            run_put(r, to, mark, n);
        at = mark + n;
    }
}

BUILTIN(strftime_now)
{
    const struct string *format;
    struct bytes text = BYTES_INIT;
    struct timespec now = {0, 0};
    struct tm tm;
    (void)all;
    enum status st = need_string(&v[1], "the format of strftime_now", &format);
    if (st != ST_OK) return st;
    if (r->now) {
        tm = *r->now;
    } else if (clock_gettime(CLOCK_REALTIME, &now) != 0 || !localtime_r(&now.tv_sec, &tm)) {
        return status_fail(ST_IO, "the clock cannot be read");
    }
    put_strftime(r, format, &tm, now.tv_nsec / 1000, &text);
    return run_take(r, ST_OK, &text, ret);
}

static const struct builtin functions[] = {
    {"raise_exception", raise_exception, "message", 1},
    {"strftime_now", strftime_now, "format", 1},
    {"range", range, "/start stop step", 1},
    {"dict", dict, NULL, 0},
    {"namespace", namespace, NULL, 0},
    {"cycler", cycler, NULL, 0},
    {"joiner", joiner, "sep", 0},
    {"lipsum", lipsum, NULL, 0},
};

const struct builtin *function_find(const struct string *name)
{
    return builtin_find(functions, sizeof functions / sizeof *functions, name);
}
