/* run.c: limits of a rendering, text being built, undefined values, and calls of the functions that
 * this program has for templates. One thread. */
#include "common/jinja/run.h"
#include <stdarg.h>
#include <stdio.h>

void run_steps(struct run *r, size_t n)
{
    if ((uint64_t)r->steps < n) r->steps = 0;
    if (r->steps == 0) fail(r, "the template takes more steps than the limit allows");
    r->steps -= (int64_t)n;
}

void run_bytes(struct run *r, size_t n)
{
    r->bytes += n;
    if (r->bytes >= 16) run_steps(r, r->bytes >> 4);
    r->bytes &= 15;
}

bool run_same(struct run *r, const struct string *a, const struct string *b)
{
    run_bytes(r, 1 + (a->n_bytes == b->n_bytes ? a->n_bytes : 0));
    return string_equal(a, b);
}

void run_deeper(struct run *r)
{
    if (++r->depth > MAX_DEPTH)
        fail(r, "nested deeper than %d levels, which is the limit", MAX_DEPTH);
    run_steps(r, 1);
}

// ---- text ---------------------------------------------------------------------------------------

static void check_text(struct run *r, size_t more)
{
    size_t limit = r->arena.limit;
    if (r->text.failed || more > limit || r->text.len > limit - more)
        arena_fail(&r->arena, ST_NO_MEMORY, "a text grows beyond %zu MiB, which is the limit",
                   limit >> 20);
}

void run_put(struct run *r, const char *data, size_t n)
{
    check_text(r, n);
    run_bytes(r, n + 1);
    bytes_append(&r->text, data, n);
}

void run_fill(struct run *r, const char *data, size_t n, int64_t times)
{
    for (int64_t i = 0; i < times; i++) run_put(r, data, n);
}

void run_puts(struct run *r, const char *text)
{
    run_put(r, text, strlen(text));
}

void run_put_string(struct run *r, const struct string *s)
{
    run_put(r, s->data, s->n_bytes);
}

void run_printf(struct run *r, const char *format, ...)
{
    char text[800];
    va_list arguments;
    run_steps(r, 1);
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    run_puts(r, text);
}

size_t text_begin(const struct run *r)
{
    return r->text.len;
}

struct value text_end(struct run *r, size_t begin, bool markup)
{
    check_text(r, 0);
    size_t n = r->text.len - begin;
    run_bytes(r, n);
    struct value text = string_copy(&r->arena, bytes_text(&r->text) + begin, n, markup);
    r->text.len = begin;
    return text;
}

struct value string_part(struct run *r, const struct string *of, size_t start, size_t end)
{
    run_bytes(r, end - start);
    return string_new(&r->arena, of->data + start, end - start, of->markup);
}

struct value string_as(struct run *r, const struct string *s, bool markup)
{
    run_bytes(r, s->n_bytes);
    return string_new(&r->arena, s->data, s->n_bytes, markup);
}

// ---- undefined ----------------------------------------------------------------------------------

struct value undefined_because(struct run *r, const char *format, ...)
{
    char hint[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(hint, sizeof hint, format, arguments);
    va_end(arguments);
    struct value v = undefined_item(r, MISSING, MISSING);
    v.undefined->hint = string_copy(&r->arena, hint, strlen(hint), false).string->data;
    return v;
}

struct value undefined_item(struct run *r, struct value of, struct value name)
{
    struct undefined *u = arena_alloc(&r->arena, sizeof *u);
    *u = (struct undefined){NULL, of, name};
    return value_of(.kind = V_UNDEFINED, .undefined = u);
}

void undefined_fail(struct run *r, struct value v)
{
    const struct undefined *u = v.undefined;
    struct value name = u->name, of = u->of;
    if (u->hint) fail(r, "%s", u->hint);
    if (!given(of)) fail(r, "'%.*s' is undefined", SHOWN(name.string));
    const char *type = of.kind == V_NONE ? "None" : value_type(of);
    const char *object = of.kind >= V_BOOL && of.kind <= V_RANGE ? " object" : "";
    if (name.kind == V_STRING)
        fail(r, "'%s%s' has no attribute '%.*s'", type, object, SHOWN(name.string));
    if (name.kind == V_INT)
        fail(r, "%s%s has no element %lld", type, object, (long long)name.integer);
    fail(r, "%s%s has no element of type %s", type, object, value_type(name));
}

void type_fail(struct run *r, const char *what, struct value v)
{
    if (v.kind == V_UNDEFINED) undefined_fail(r, v);
    fail(r, "%s, got '%s'", what, value_type(v));
}

// ---- functions for templates --------------------------------------------------------------------

const struct builtin *builtin_find(const struct builtin *const *tables, int of,
                                   const struct string *name)
{
    for (; *tables; tables++)
        for (const struct builtin *b = *tables; b->name; b++)
            if (b->of & of && string_word(name, b->name) >= 0) return b;
    return NULL;
}

const char *builtin_params(const struct builtin *f)
{
    return f->params + strspn(f->params, BUILTIN_SIGNS);
}
