/* call.c: calls of filters, tests, methods and functions: arguments are bound to parameters and
 * checked by the row's one line of them, and what a function has put becomes its result. One
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/call.h"
#include <stdlib.h>

static bool has_sign(const struct builtin *f, char sign)
{
    return memchr(f->params, sign, strspn(f->params, BUILTIN_SIGNS));
}

// What parameter `name` (behind it its type) makes of an argument. The texts that a row asks for
// are charged here: a function goes through them.
static struct value convert(struct run *r, const char *name, size_t n, bool required,
                            struct value v)
{
    char type = name[n];
    int64_t x;
    if (type == '?') return value_bool(given(v) && value_truth(r, v));
    if (type != '#' && type != '$') return v;
    bool otherwise = type == '#' && name[n + 1] && name[n + 1] != ' ';
    if (!given(v) && otherwise) return value_int(atoi(name + n + 1));
    if (!given(v) || (v.kind == V_NONE && !required && !otherwise)) return MISSING;
    if (v.kind == V_UNDEFINED) undefined_fail(r, v);
    if (type == '#' && !value_as_int(v, &x))
        fail(r, "%.*s: '%s' object cannot be interpreted as an integer", (int)n, name,
             value_type(v));
    if (type == '#') return value_int(x);
    if (v.kind != V_STRING) fail(r, "%.*s must be str, not %s", (int)n, name, value_type(v));
    run_bytes(r, v.string->n_bytes);
    return v;
}

// Which of the parameters in `params` has that name, -1: none; how many there are where it is NULL.
static int param_index(const char *params, const struct string *key)
{
    int i = 0;
    for (; *params; i++) {
        size_t n = strcspn(params, "$#? ");
        if (key && key->n_bytes == n && memcmp(key->data, params, n) == 0) return i;
        params += strcspn(params, " ");
        params += *params == ' ';
    }
    return key ? -1 : i;
}

static void bind(struct run *r, const struct builtin *f, const struct arguments *a, struct value *v)
{
    const char *params = f->params + strspn(f->params, BUILTIN_SIGNS);
    int n = param_index(params, NULL);
    if (a->positional.n > (size_t)n)
        fail(r, "%.*s() takes at most %d arguments (%zu given)", NAME(f), n, a->positional.n);
    if (has_sign(f, '/') && a->named.n > 0) fail(r, "%.*s() takes no keyword arguments", NAME(f));
    for (size_t i = 0; i < a->positional.n; i++) v[i] = a->positional.items[i];
    for (size_t i = 0; i < a->named.n; i++) {
        const struct string *name = a->named.entries[i].key.string;
        int at = param_index(params, name);
        if (at < 0) fail(r, "%.*s() got an unexpected keyword argument '%s'", NAME(f), SHOWN(name));
        if (given(v[at]))
            fail(r, "%.*s() got multiple values for argument '%s'", NAME(f), SHOWN(name));
        v[at] = a->named.entries[i].value;
    }
    for (int i = 0; i < f->n_required; i++) {
        if (!given(v[i]))
            fail(r, "%.*s() is missing a required argument (\"%.*s\")", NAME(f),
                 (int)strcspn(params, "$#? "), params);
        params += strcspn(params, " ") + (i + 1 < n);
    }
}

static void convert_all(struct run *r, const struct builtin *f, struct value *v)
{
    const char *params = f->params + strspn(f->params, BUILTIN_SIGNS);
    for (int i = 0; *params; i++) {
        v[i] = convert(r, params, strcspn(params, "$#? "), i < f->n_required, v[i]);
        params += strcspn(params, " ");
        params += *params == ' ';
    }
}

struct call_of {
    struct run *run;
    struct value v[1 + MAX_PARAMS];
    struct call call;
    struct value result;
};

static void invoke(void *context)
{
    struct call_of *c = context;
    size_t text = c->run->text.len;
    convert_all(c->run, c->call.function, c->v + 1);
    struct value v = c->call.function->call(c->run, c->v, &c->call);
    c->result = given(v) ? v : text_end(c->run, text, v.truth);
}

// A generator fails when somebody goes over it, not when it is made: its failure is kept for then.
// Limits are not kept.
static void invoke_generator(struct run *r, struct call_of *c)
{
    const struct run before = *r;
    enum status st = run_try(r, invoke, c);
    if (st == ST_OK) return;
    if (st != r->fault || r->steps <= 0) fail_as(r, st, "%s", status_message());
    r->depth = before.depth;
    r->at = before.at;
    r->text.len = before.text.len;
    put_text(r, status_message());
    c->result = iterator_of(r, LIST(NULL, 0));
    c->result.iterator->failure = text_end(r, before.text.len, false).string->data;
}

struct value builtin_invoke(struct run *r, const struct builtin *f, struct value self,
                            const struct arguments *arguments)
{
    struct call_of c = {.run = r, .call = {f, arguments}};
    run_deeper(r);
    c.v[0] = has_sign(f, '$') ? value_str(r, self) : self;
    if (c.v[0].kind == V_STRING && (has_sign(f, '$') || f->of & METHOD(V_STRING)))
        run_bytes(r, c.v[0].string->n_bytes);
    if (!has_sign(f, '*')) bind(r, f, arguments, c.v + 1);
    if (has_sign(f, '~'))
        invoke_generator(r, &c);
    else
        invoke(&c);
    r->depth--;
    return c.result;
}

bool window_of(const struct value *v, int64_t n, int64_t *ret_start, int64_t *ret_end)
{
    int64_t start = given(v[2]) ? v[2].integer : 0, end = given(v[3]) ? v[3].integer : n;
    if (start < 0) start = start + n < 0 ? 0 : start + n;
    if (end < 0) end = end + n < 0 ? 0 : end + n;
    *ret_start = start;
    *ret_end = end < n ? end : n;
    return start <= *ret_end;
}
