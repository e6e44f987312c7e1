/* call.c: calling things: arguments bound to parameters, functions of this program, and macros.
 * One thread. */
#include "common/jinja/run.h"
#include <stdio.h>

enum status need_string(const struct value *v, const char *what, const struct string **ret)
{
    if (v->kind == V_UNDEFINED) return undefined_fail(v->undefined);
    if (v->kind != V_STRING)
        return status_fail(ST_INVALID, "%s must be str, not %s", what, value_type(v));
    *ret = v->string;
    return ST_OK;
}

enum status need_int(const struct value *v, const char *what, int64_t *ret)
{
    if (!given(v) || v->kind == V_NONE || value_as_int(v, ret)) return ST_OK;
    if (v->kind == V_UNDEFINED) return undefined_fail(v->undefined);
    return status_fail(ST_INVALID, "%s: '%s' object cannot be interpreted as an integer", what,
                       value_type(v));
}

// ---- functions of this program ------------------------------------------------------------------

const struct builtin *builtin_find(const struct builtin *table, size_t n, const struct string *name)
{
    for (size_t i = 0; i < n; i++)
        if (string_is(name, table[i].name)) return &table[i];
    return NULL;
}

// Which parameter (from 0) is called `name`; -1: none.
static int param_index(const char *params, const struct string *name)
{
    int i = 0;
    for (const char *at = params; *at; i++) {
        size_t n = strcspn(at, " ");
        if (n == name->n_bytes && memcmp(at, name->data, n) == 0) return i;
        at += n + (at[n] == ' ');
    }
    return -1;
}

static int param_count(const char *params)
{
    int n = *params != 0;
    for (; *params; params++) n += *params == ' ';
    return n;
}

static int name_len(const struct string *name)
{
    return name->n_bytes < 100 ? (int)name->n_bytes : 100;
}

static enum status bind(const struct builtin *f, const struct arguments *a, struct value *v)
{
    bool by_place = f->params[0] == '/';
    const char *params = f->params + by_place;
    int n = param_count(params);
    if (a->n_positional > n)
        return status_fail(ST_INVALID, "%s() takes at most %d arguments (%d given)", f->name, n,
                           a->n_positional);
    if (by_place && a->n_named > 0)
        return status_fail(ST_INVALID, "%s() takes no keyword arguments", f->name);
    for (int i = 0; i < a->n_positional; i++) v[i] = a->positional[i];
    for (int i = 0; i < a->n_named; i++) {
        const struct string *name = a->named[i].name;
        int at = param_index(params, name);
        if (at < 0)
            return status_fail(ST_INVALID, "%s() got an unexpected keyword argument '%.*s'",
                               f->name, name_len(name), name->data);
        if (given(&v[at]))
            return status_fail(ST_INVALID, "%s() got multiple values for argument '%.*s'", f->name,
                               name_len(name), name->data);
        v[at] = a->named[i].value;
    }
    for (int i = 0; i < f->n_required; i++)
        if (!given(&v[i]))
            return status_fail(ST_INVALID, "%s() is missing a required argument (\"%s\")", f->name,
                               params);
    return ST_OK;
}

enum status builtin_invoke(struct run *r, const struct builtin *f, const struct value *self,
                           const struct arguments *arguments, struct value *ret)
{
    struct value v[1 + MAX_PARAMS] = {{0}}; // V_MISSING
    enum status st;
    CHECK(run_deeper(r));
    v[0] = *self;
    if (f->params) CHECK(bind(f, arguments, v + 1));
    st = f->call(r, v, arguments, ret);
    r->depth--;
out:
    return st;
}

// ---- macros -------------------------------------------------------------------------------------

struct macro_call {
    struct run *run;
    const struct macro *macro;
    const struct arguments *arguments;
    bool *used;          // of arguments->named
    struct scope *scope; // of the call; a macro defined in it may keep it
};

static struct value take_named(struct macro_call *c, const struct string *name)
{
    for (int i = 0; i < c->arguments->n_named; i++)
        if (!c->used[i] && string_equal(c->arguments->named[i].name, name)) {
            c->used[i] = true;
            return c->arguments->named[i].value;
        }
    return MISSING;
}

static enum status set_text_name(struct macro_call *c, const char *name, struct value value)
{
    struct value text;
    enum status st = string_puts(&c->run->arena, name, &text);
    return st == ST_OK ? scope_set(c->run, c->scope, text.string, value) : st;
}

static enum status bind_parameters(struct macro_call *c, bool *ret_caller)
{
    const struct macro_node *m = c->macro->node->macro;
    struct run *r = c->run;
    enum status st = ST_OK;
    struct value *bound = arena_array(&r->arena, (size_t)m->n, sizeof *bound);
    if (!bound) return ST_NO_MEMORY;
    for (int i = 0; i < m->n; i++) {
        const struct string *name = m->parameters[i].name.string;
        bound[i] =
            i < c->arguments->n_positional ? c->arguments->positional[i] : take_named(c, name);
        *ret_caller |= string_is(name, "caller");
    }
    for (int i = 0; i < m->n; i++) { // a default may speak of the parameters before it
        const struct parameter *p = &m->parameters[i];
        char hint[160];
        struct value text;
        if (!given(&bound[i]) && p->otherwise) {
            CHECK(jinja_evaluate(r, c->scope, p->otherwise, &bound[i]));
        } else if (!given(&bound[i])) {
            snprintf(hint, sizeof hint, "parameter '%.*s' was not provided",
                     name_len(p->name.string), p->name.string->data);
            CHECK(string_make(&r->arena, hint, strlen(hint), &text));
            CHECK(undefined_make(r, text.string->data, NULL, p->name, &bound[i]));
        }
        CHECK(scope_set(r, c->scope, p->name.string, bound[i]));
    }
out:
    return st;
}

static enum status bind_caller(struct macro_call *c)
{
    struct value name, caller;
    enum status st = string_puts(&c->run->arena, "caller", &name);
    if (st != ST_OK) return st;
    caller = take_named(c, name.string);
    if (!given(&caller) || caller.kind == V_NONE)
        st = undefined_make(c->run, "No caller defined", NULL, name, &caller);
    return st == ST_OK ? scope_set(c->run, c->scope, name.string, caller) : st;
}

static enum status bind_kwargs(struct macro_call *c)
{
    const struct arguments *a = c->arguments;
    struct value kwargs;
    enum status st = dict_make(&c->run->arena, (size_t)a->n_named, &kwargs);
    for (int i = 0; st == ST_OK && i < a->n_named; i++)
        if (!c->used[i])
            st = dict_append(&c->run->arena, kwargs.dict, value_string(a->named[i].name),
                             a->named[i].value);
    return st == ST_OK ? set_text_name(c, "kwargs", kwargs) : st;
}

static enum status bind_varargs(struct macro_call *c)
{
    const struct arguments *a = c->arguments;
    int n = c->macro->node->macro->n, rest = a->n_positional > n ? a->n_positional - n : 0;
    struct value varargs, *items;
    enum status st = list_make(&c->run->arena, V_TUPLE, (size_t)rest, &items, &varargs);
    if (st != ST_OK) return st;
    for (int i = 0; i < rest; i++) items[i] = a->positional[n + i];
    return set_text_name(c, "varargs", varargs);
}

// What was given and nobody took.
static enum status check_rest(const struct macro_call *c)
{
    const struct node *node = c->macro->node;
    const struct macro_node *m = node->macro;
    const struct arguments *a = c->arguments;
    const char *name = node->kind == N_MACRO ? node->value.string->data : "caller";
    int len = node->kind == N_MACRO ? name_len(node->value.string) : 6;
    for (int i = 0; !m->uses_kwargs && i < a->n_named; i++) {
        if (c->used[i]) continue;
        if (string_is(a->named[i].name, "caller"))
            return status_fail(ST_INVALID,
                               "macro '%.*s' was invoked with two values for the special caller "
                               "argument. This is most likely a bug.",
                               len, name);
        return status_fail(ST_INVALID, "macro '%.*s' takes no keyword argument '%.*s'", len, name,
                           name_len(a->named[i].name), a->named[i].name->data);
    }
    if (!m->uses_varargs && a->n_positional > m->n)
        return status_fail(ST_INVALID, "macro '%.*s' takes not more than %d argument(s)", len, name,
                           m->n);
    return ST_OK;
}

static enum status call_macro(struct run *r, const struct macro *macro,
                              const struct arguments *arguments, struct value *ret)
{
    const struct macro_node *m = macro->node->macro;
    struct macro_call c = {
        .run = r,
        .macro = macro,
        .arguments = arguments,
        .scope = arena_alloc(&r->arena, sizeof *c.scope),
        .used = arena_alloc(&r->arena, (size_t)arguments->n_named),
    };
    bool caller_bound = false;
    enum status st;
    if (!c.scope || !c.used) return ST_NO_MEMORY;
    c.scope->outer = macro->scope;
    CHECK(run_deeper(r));
    CHECK(bind_parameters(&c, &caller_bound));
    if (m->uses_caller && !caller_bound) CHECK(bind_caller(&c));
    if (m->uses_kwargs) CHECK(bind_kwargs(&c));
    CHECK(check_rest(&c));
    if (m->uses_varargs) CHECK(bind_varargs(&c));
    CHECK(jinja_render_captured(r, c.scope, &macro->node->body, ret));
    r->depth--;
out:
    return st;
}

enum status call_value(struct run *r, const struct value *function,
                       const struct arguments *arguments, struct value *ret)
{
    switch (function->kind) {
    case V_UNDEFINED:
        return undefined_fail(function->undefined);
    case V_MACRO:
        return call_macro(r, function->macro, arguments, ret);
    case V_FUNCTION:
        return builtin_invoke(r, function->function, &MISSING, arguments, ret);
    case V_METHOD:
        return builtin_invoke(r, function->method->function, &function->method->self, arguments,
                              ret);
    case V_LOOP:
        return loop_call(r, function->loop, arguments, ret);
    case V_JOINER: { // nothing the first time
        struct cycler *joiner = function->cycler;
        if (joiner->at++ > 0) {
            joiner->at = 1;
            *ret = joiner->items.items[0];
            return ST_OK;
        }
        return string_puts(&r->arena, "", ret);
    }
    default:
        return status_fail(ST_INVALID, "'%s' object is not callable", value_type(function));
    }
}
