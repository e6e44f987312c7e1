/* macro.c: calls of macros: arguments bound to parameters, and the three that a body may ask for
 * without naming them: caller, kwargs, varargs. One thread. */
#include "common/jinja/run.h"

struct macro_call {
    struct run *run;
    const struct macro *macro;
    struct list positional;
    struct dict named;   // those that nobody has taken yet
    struct scope *scope; // of the call; a macro defined in it may keep it
};

static struct value take_named(struct macro_call *c, const struct string *name)
{
    struct dict_entry *e = entry_named(c->run, &c->named, name);
    if (!e) return MISSING;
    struct value value = e->value;
    memmove(e, e + 1, (size_t)(c->named.entries + c->named.n-- - e - 1) * sizeof *e);
    return value;
}

static void set(struct macro_call *c, const char *name, struct value value)
{
    scope_set(c->run, c->scope, string_of(&c->run->arena, name).string, value);
}

// What a parameter is where it was not given; a default may speak of the parameters before it.
static struct value default_of(struct macro_call *c, const struct named_node *p)
{
    if (p->value) return jinja_evaluate(c->run, c->scope, p->value);
    return undefined_because(c->run, "parameter '%.*s' was not provided", SHOWN(p->name.string));
}

static void bind_parameters(struct macro_call *c)
{
    const struct named_list *list = &c->macro->node->macro->parameters;
    struct value *bound = arena_array(&c->run->arena, list->n, sizeof *bound);
    for (size_t i = 0; i < list->n; i++)
        bound[i] = i < c->positional.n ? c->positional.items[i]
                                       : take_named(c, list->items[i].name.string);
    for (size_t i = 0; i < list->n; i++) {
        const struct named_node *p = &list->items[i];
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
    struct value kwargs = dict_new(&c->run->arena, 0);
    *kwargs.dict = c->named;
    c->named.n = 0;
    set(c, "kwargs", kwargs);
}

static void bind_varargs(struct macro_call *c)
{
    size_t n = c->macro->node->macro->parameters.n;
    struct list more = {.n = 0};
    if (c->positional.n > n)
        more = (struct list){.items = c->positional.items + n, .n = c->positional.n - n};
    set(c, "varargs", list_of(&c->run->arena, V_TUPLE, more));
}

// What was given and nobody took.
static void check_remaining(const struct macro_call *c)
{
    static const struct string anonymous = {"caller", 6, 6, false};
    const struct node *node = c->macro->node;
    const struct macro_node *m = node->macro;
    const struct string *name = node->kind == N_MACRO ? node->value.string : &anonymous;
    if (c->named.n > 0 && value_is(c->named.entries[0].key, "caller"))
        fail(c->run,
             "macro '%.*s' was invoked with two values for the special caller argument. This "
             "is most likely a bug.",
             SHOWN(name));
    if (c->named.n > 0)
        fail(c->run, "macro '%.*s' takes no keyword argument '%.*s'", SHOWN(name),
             SHOWN(c->named.entries[0].key.string));
    if (!m->uses[EXTRA_VARARGS] && c->positional.n > m->parameters.n)
        fail(c->run, "macro '%.*s' takes not more than %zu argument(s)", SHOWN(name),
             m->parameters.n);
}

struct value macro_call(struct run *r, const struct macro *macro, const struct arguments *arguments)
{
    const struct macro_node *m = macro->node->macro;
    struct macro_call c = {
        .run = r,
        .macro = macro,
        .positional = arguments->positional,
        .named = arguments->named, // of this call alone
        .scope = scope_new(r, macro->scope),
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
