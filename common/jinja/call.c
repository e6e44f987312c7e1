/* call.c: calling things: arguments bound to the parameters of this program's functions, and what
 * else can be called. One thread. */
#include "common/jinja/run.h"

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
        method_builtins, loop_builtins,  case_builtins,     search_builtins, split_builtins,
        text_builtins,   value_builtins, function_builtins, list_builtins,   order_builtins,
        number_builtins, repr_builtins,  percent_builtins,  braces_builtins, test_builtins,
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

// ---- what can be called -------------------------------------------------------------------------

struct value call_value(struct run *r, struct value function, const struct arguments *arguments)
{
    struct iterator *joiner = function.iterator;
    switch (function.kind) {
    case V_UNDEFINED:
        undefined_fail(r, function);
    case V_MACRO:
        return macro_call(r, function.macro, arguments);
    case V_FUNCTION:
        return builtin_invoke(r, function.function, MISSING, arguments);
    case V_METHOD:
        return builtin_invoke(r, function.method->function, function.method->self, arguments);
    case V_LOOP:
        return loop_call(r, function.loop, arguments);
    case V_JOINER:
        // nothing the first time, its separator from then on
        return joiner->at++ > 0 ? joiner->items.items[0] : string_of(&r->arena, "");
    default:
        fail(r, "'%s' object is not callable", value_type(function));
    }
}
