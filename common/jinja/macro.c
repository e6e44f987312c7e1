/* macro.c: calls of macros: arguments bound to parameters, and the three that a body may ask for
 * without naming them: caller, kwargs, varargs. One thread. */
#include "common/jinja/run.h"

struct macro_call {
    struct run *run;
    const struct macro *macro;
    const struct arguments *arguments;
    bool *used;          // of arguments->named
    struct scope *scope; // of the call; a macro defined in it may keep it
};

static struct value take_named(struct macro_call *c, const struct string *name)
{
    for (size_t i = 0; i < c->arguments->n_named; i++)
        if (!c->used[i] && string_equal(c->arguments->named[i].name, name)) {
            c->used[i] = true;
            return c->arguments->named[i].value;
        }
    return MISSING;
}

static void set(struct macro_call *c, const char *name, struct value value)
{
    scope_set(c->run, c->scope, string_of(&c->run->arena, name).string, value);
}

// What a parameter is where it was not given; a default may speak of the parameters before it.
static struct value default_of(struct macro_call *c, const struct parameter *p)
{
    if (p->otherwise) return jinja_evaluate(c->run, c->scope, p->otherwise);
    struct value hint =
        string_printf(&c->run->arena, "parameter '%.*s' was not provided", SHOWN(p->name.string));
    return undefined_because(c->run, hint.string->data);
}

static void bind_parameters(struct macro_call *c)
{
    const struct macro_node *m = c->macro->node->macro;
    const struct arguments *a = c->arguments;
    struct value *bound = arena_array(&c->run->arena, m->n, sizeof *bound);
    for (size_t i = 0; i < m->n; i++)
        bound[i] =
            i < a->n_positional ? a->positional[i] : take_named(c, m->parameters[i].name.string);
    for (size_t i = 0; i < m->n; i++) {
        const struct parameter *p = &m->parameters[i];
        if (!given(bound[i])) bound[i] = default_of(c, p);
        scope_set(c->run, c->scope, p->name.string, bound[i]);
    }
}

static void bind_caller(struct macro_call *c)
{
    struct value caller = take_named(c, string_of(&c->run->arena, "caller").string);
    if (!given(caller) || caller.kind == V_NONE)
        caller = undefined_because(c->run, "No caller defined");
    set(c, "caller", caller);
}

static void bind_kwargs(struct macro_call *c)
{
    const struct arguments *a = c->arguments;
    struct value kwargs = dict_new(&c->run->arena, a->n_named);
    for (size_t i = 0; i < a->n_named; i++)
        if (!c->used[i])
            dict_append(&c->run->arena, kwargs.dict, value_string(a->named[i].name),
                        a->named[i].value);
    set(c, "kwargs", kwargs);
}

static void bind_varargs(struct macro_call *c)
{
    const struct arguments *a = c->arguments;
    size_t n = c->macro->node->macro->n, more = a->n_positional > n ? a->n_positional - n : 0;
    struct value varargs = list_new(&c->run->arena, V_TUPLE, more);
    for (size_t i = 0; i < more; i++) varargs.list->items[i] = a->positional[n + i];
    set(c, "varargs", varargs);
}

// What was given and nobody took.
static void check_remaining(const struct macro_call *c)
{
    static const struct string anonymous = {"caller", 6, 6, false};
    const struct node *node = c->macro->node;
    const struct macro_node *m = node->macro;
    const struct arguments *a = c->arguments;
    const struct string *name = node->kind == N_MACRO ? node->value.string : &anonymous;
    for (size_t i = 0; !m->uses[EXTRA_KWARGS] && i < a->n_named; i++) {
        if (c->used[i]) continue;
        if (string_is(a->named[i].name, "caller"))
            fail(c->run,
                 "macro '%.*s' was invoked with two values for the special caller argument. This "
                 "is most likely a bug.",
                 SHOWN(name));
        fail(c->run, "macro '%.*s' takes no keyword argument '%.*s'", SHOWN(name),
             SHOWN(a->named[i].name));
    }
    if (!m->uses[EXTRA_VARARGS] && a->n_positional > m->n)
        fail(c->run, "macro '%.*s' takes not more than %zu argument(s)", SHOWN(name), m->n);
}

struct value macro_call(struct run *r, const struct macro *macro, const struct arguments *arguments)
{
    const struct macro_node *m = macro->node->macro;
    struct macro_call c = {
        .run = r,
        .macro = macro,
        .arguments = arguments,
        .scope = scope_new(r, macro->scope),
        .used = arena_alloc(&r->arena, arguments->n_named),
    };
    run_deeper(r);
    bind_parameters(&c);
    if (m->uses[EXTRA_CALLER]) bind_caller(&c);
    if (m->uses[EXTRA_KWARGS]) bind_kwargs(&c);
    check_remaining(&c);
    if (m->uses[EXTRA_VARARGS]) bind_varargs(&c);
    struct value text = jinja_render_captured(r, c.scope, &macro->node->body);
    r->depth--;
    return text;
}
