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

static struct value undefined(struct run *r, const char *hint, struct value of, struct value name)
{
    struct undefined *u = arena_alloc(&r->arena, sizeof *u);
    *u = (struct undefined){hint, of, name};
    return value_of(.kind = V_UNDEFINED, .undefined = u);
}

struct value undefined_because(struct run *r, const char *format, ...)
{
    char hint[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(hint, sizeof hint, format, arguments);
    va_end(arguments);
    struct value kept = string_copy(&r->arena, hint, strlen(hint), false);
    return undefined(r, kept.string->data, MISSING, MISSING);
}

struct value undefined_item(struct run *r, struct value of, struct value name)
{
    return undefined(r, NULL, of, name);
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

// ---- arguments ----------------------------------------------------------------------------------

const struct string *need_string(struct run *r, struct value v, const char *what)
{
    if (v.kind == V_UNDEFINED) undefined_fail(r, v);
    if (v.kind != V_STRING) fail(r, "%s must be str, not %s", what, value_type(v));
    return v.string;
}

#define SIGNS "$~/*"

static const char *param_names(const struct builtin *f)
{
    return f->params + strspn(f->params, SIGNS);
}

static bool has_sign(const struct builtin *f, char sign)
{
    return memchr(f->params, sign, strspn(f->params, SIGNS));
}

// The name of parameter i, counted from 1.
static const char *param_name(const struct call *c, int i)
{
    const char *at = param_names(c->function);
    for (; i > 1; i--) at += strcspn(at, " ") + 1;
    return string_copy(&c->run->arena, at, strcspn(at, " "), false).string->data;
}

const struct string *arg_string(const struct call *c, int i)
{
    if (c->v[i].kind == V_STRING) return c->v[i].string;
    return need_string(c->run, c->v[i], param_name(c, i));
}

int64_t arg_int(const struct call *c, int i, int64_t otherwise)
{
    int64_t x = otherwise;
    if (!arg_given(c, i) || value_as_int(c->v[i], &x)) return x;
    if (c->v[i].kind == V_UNDEFINED) undefined_fail(c->run, c->v[i]);
    fail(c->run, "%s: '%s' object cannot be interpreted as an integer", param_name(c, i),
         value_type(c->v[i]));
}

bool arg_truth(const struct call *c, int i, bool otherwise)
{
    return given(c->v[i]) ? value_truth(c->run, c->v[i]) : otherwise;
}

bool arg_window(const struct call *c, int64_t n, int64_t *ret_start, int64_t *ret_end)
{
    int64_t start = arg_int(c, 2, 0), end = arg_int(c, 3, n);
    if (start < 0) start = start + n < 0 ? 0 : start + n;
    if (end < 0) end = end + n < 0 ? 0 : end + n;
    *ret_start = start;
    *ret_end = end < n ? end : n;
    return start <= *ret_end;
}

bool arg_given(const struct call *c, int i)
{
    return given(c->v[i]) && c->v[i].kind != V_NONE;
}

// ---- functions of this program ------------------------------------------------------------------

const struct builtin *builtin_find(int of, const struct string *name)
{
    static const struct builtin *const tables[] = {
        value_builtins, string_builtins, number_builtins, format_builtins, loop_builtins,
    };
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        for (const struct builtin *b = tables[i]; b->name; b++)
            if (b->of & of && string_word(name, b->name) >= 0) return b;
    return NULL;
}

static size_t param_count(const char *params)
{
    size_t n = *params != 0;
    for (; *params; params++) n += *params == ' ';
    return n;
}

static void bind(struct run *r, const struct builtin *f, const struct arguments *a, struct value *v)
{
    const char *params = param_names(f);
    size_t n = param_count(params);
    if (a->positional.n > n)
        fail(r, "%.*s() takes at most %zu arguments (%zu given)", NAME(f), n, a->positional.n);
    if (has_sign(f, '/') && a->named.n > 0) fail(r, "%.*s() takes no keyword arguments", NAME(f));
    for (size_t i = 0; i < a->positional.n; i++) v[i] = a->positional.items[i];
    for (size_t i = 0; i < a->named.n; i++) {
        const struct string *name = a->named.entries[i].key.string;
        int at = string_word(name, params);
        if (at < 0)
            fail(r, "%.*s() got an unexpected keyword argument '%.*s'", NAME(f), SHOWN(name));
        if (given(v[at]))
            fail(r, "%.*s() got multiple values for argument '%.*s'", NAME(f), SHOWN(name));
        v[at] = a->named.entries[i].value;
    }
    for (int i = 0; i < f->n_required; i++)
        if (!given(v[i]))
            fail(r, "%.*s() is missing a required argument (\"%s\")", NAME(f), params);
}

struct generation {
    const struct call *call;
    struct value made;
};

static void generate(void *context)
{
    struct generation *g = context;
    g->made = g->call->function->call(g->call->run, g->call);
}

// A generator fails when somebody goes over it, not when it is made: its failure is kept for then.
// Limits are not kept.
static struct value call_generator(struct run *r, const struct call *c)
{
    struct generation g = {.call = c};
    struct run before = *r;
    enum status st = arena_try(&r->arena, generate, &g);
    if (st == ST_OK) return g.made;
    if (st != ST_INVALID || r->steps <= 0) arena_fail(&r->arena, st, "%s", status_message());
    r->depth = before.depth;
    r->at = before.at;
    r->text.len = before.text.len;
    const char *message = status_message();
    struct value failure = string_copy(&r->arena, message, strlen(message), false);
    struct value v = iterator_of(&r->arena, (struct list){.n = 0});
    v.iterator->failure = failure.string->data;
    return v;
}

struct value builtin_invoke(struct run *r, const struct builtin *f, struct value self,
                            const struct arguments *arguments)
{
    struct call c = {.run = r, .function = f, .all = arguments};
    run_deeper(r);
    c.v[0] = has_sign(f, '$') ? value_str(r, self) : self;
    if (!has_sign(f, '*')) bind(r, f, arguments, c.v + 1);
    struct value v = has_sign(f, '~') ? call_generator(r, &c) : f->call(r, &c);
    r->depth--;
    return v;
}
