/* run.c: limits of a rendering, text being built, and undefined values. One thread. */
#include "common/jinja/run.h"
#include <stdio.h>

enum status run_steps(struct run *r, size_t n)
{
    if ((uint64_t)r->steps < n) r->steps = 0;
    if (r->steps == 0)
        return status_fail(ST_INVALID, "the template takes more steps than the limit allows");
    r->steps -= (int64_t)n;
    return ST_OK;
}

enum status run_deeper(struct run *r)
{
    if (++r->depth > MAX_DEPTH)
        return status_fail(ST_INVALID, "nested deeper than %d levels, which is the limit",
                           MAX_DEPTH);
    return run_steps(r, 1);
}

void run_put(const struct run *r, struct bytes *to, const char *data, size_t n)
{
    if (n > r->arena.limit || to->len > r->arena.limit - n)
        to->failed = true;
    else
        bytes_append(to, data, n);
}

void run_puts(const struct run *r, struct bytes *to, const char *text)
{
    run_put(r, to, text, strlen(text));
}

enum status run_take(struct run *r, enum status st, struct bytes *built, struct value *ret)
{
    if (st == ST_OK && built->failed)
        st = status_fail(ST_NO_MEMORY, "a text grows beyond %zu MiB, which is the limit",
                         r->arena.limit >> 20);
    if (st == ST_OK) st = string_make(&r->arena, bytes_text(built), built->len, ret);
    bytes_release(built);
    return st;
}

// ---- undefined ----------------------------------------------------------------------------------

enum status undefined_make(struct run *r, const char *hint, const struct value *object,
                           struct value name, struct value *ret)
{
    struct undefined *u = arena_alloc(&r->arena, sizeof *u);
    if (!u) return ST_NO_MEMORY;
    *u = (struct undefined){hint, object ? value_object_type(object) : NULL, name};
    *ret = value_of(.kind = V_UNDEFINED, .undefined = u);
    return ST_OK;
}

enum status undefined_fail(const struct undefined *u)
{
    const struct value *name = &u->name;
    if (u->hint) return status_fail(ST_INVALID, "%s", u->hint);
    if (name->kind == V_INT)
        return status_fail(ST_INVALID, "%s has no element %lld", u->object,
                           (long long)name->integer);
    if (name->kind != V_STRING)
        return status_fail(ST_INVALID, "%s has no element of type %s", u->object, value_type(name));
    int n = name->string->n_bytes < 200 ? (int)name->string->n_bytes : 200;
    if (!u->object) return status_fail(ST_INVALID, "'%.*s' is undefined", n, name->string->data);
    return status_fail(ST_INVALID, "'%s' has no attribute '%.*s'", u->object, n,
                       name->string->data);
}

enum status type_fail(const char *what, const struct value *v)
{
    if (v->kind == V_UNDEFINED) return undefined_fail(v->undefined);
    return status_fail(ST_INVALID, "%s, got '%s'", what, value_type(v));
}
