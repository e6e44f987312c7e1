/* render.c: statements to text, and the entry: a rendering from its variables to its end. One
 * thread for each rendering; the parsed template is shared. */
#include "common/jinja/jinja.h"
#include "common/jinja/run.h"
#include <stdlib.h>

#define PARSED_LIMIT   ((size_t)256 << 20)
#define DEFAULT_STEPS  20000000
#define DEFAULT_MEMORY ((size_t)256 << 20)
#define DEFAULT_OUTPUT ((size_t)64 << 20)

struct jinja {
    char *where;
    struct arena arena;
    struct token_stream tokens;
    struct node_list body;
    bool loops_over_content;
};

// ---- output -------------------------------------------------------------------------------------

static void print(struct run *r, struct value v)
{
    put_str(r, v);
    if (r->text.len > r->max_output)
        fail(r, "the text grows beyond %zu bytes, which is the limit", r->max_output);
}

struct value jinja_render_captured(struct run *r, struct scope *scope, const struct node_list *body)
{
    size_t text = text_begin(r);
    jinja_render_body(r, scope, body);
    return text_end(r, text, false);
}

// ---- assignments --------------------------------------------------------------------------------

struct scope *scope_new(struct run *r, const struct scope *outer)
{
    struct scope *scope = arena_alloc(&r->arena, sizeof *scope);
    scope->outer = outer;
    return scope;
}

struct variable *scope_find(struct run *r, const struct scope *scope, const struct string *name)
{
    struct variable *v = scope->variables;
    run_bytes(r, 1);
    while (v && !run_same(r, v->name, name)) v = v->next;
    return v;
}

void scope_set(struct run *r, struct scope *scope, const struct string *name, struct value value)
{
    struct variable *v = scope_find(r, scope, name);
    if (!v) {
        v = arena_alloc(&r->arena, sizeof *v);
        v->name = name;
        v->next = scope->variables;
        scope->variables = v;
    }
    v->value = value;
}

static void unpack(struct run *r, struct scope *scope, const struct node *target,
                   struct value value)
{
    size_t want = target->items.n;
    if (!value_is_iterable(value))
        fail(r, "cannot unpack non-iterable %s object", value_type(value));
    struct list items = value_items(r, value);
    if (items.n < want)
        fail(r, "not enough values to unpack (expected %zu, got %zu)", want, items.n);
    if (items.n > want) fail(r, "too many values to unpack (expected %zu)", want);
    for (size_t i = 0; i < want; i++)
        scope_assign(r, scope, target->items.nodes[i], items.items[i]);
}

void scope_assign(struct run *r, struct scope *scope, const struct node *target, struct value value)
{
    if (target->kind == N_TUPLE) {
        unpack(r, scope, target, value);
    } else if (target->kind == N_NAME) {
        scope_set(r, scope, target->value.string, value);
    } else {
        struct value space = jinja_evaluate(r, scope, target->a);
        if (space.kind != V_NAMESPACE) fail(r, "cannot assign attribute on non-namespace object");
        if (target->value.string->data[0] == '_')
            fail(r, "Chat templates cannot store underscore-prefixed attributes on a namespace");
        dict_set(r, space.dict, target->value, value);
    }
}

static void with(struct run *r, struct scope *outer, const struct node *node)
{
    struct scope *scope = scope_new(r, outer);
    for (size_t i = 0; i < node->items.n; i++)
        scope_assign(r, scope, node->items.nodes[i],
                     jinja_evaluate(r, outer, node->others.nodes[i]));
    jinja_render_body(r, scope, &node->body);
}

// ---- statements ---------------------------------------------------------------------------------

static struct value make_macro(struct run *r, struct scope *scope, const struct node *node)
{
    struct macro *macro = arena_alloc(&r->arena, sizeof *macro);
    *macro = (struct macro){node, scope};
    return value_of(.kind = V_MACRO, .macro = macro);
}

static void render_if(struct run *r, struct scope *scope, const struct node *node)
{
    for (size_t i = 0; i < node->items.n; i++) {
        const struct node *branch = node->items.nodes[i];
        if (branch->a && !jinja_evaluate_truth(r, scope, branch->a)) continue;
        jinja_render_body(r, scope, &branch->body);
        return;
    }
}

static void render_statement(struct run *r, struct scope *scope, const struct node *node)
{
    struct value value; // of an expression; a break or continue in a block of it drops it
    switch (node->kind) {
    case N_DATA:
        print(r, node->value);
        break;
    case N_PRINT:
        for (size_t i = 0; i < node->items.n; i++) {
            value = jinja_evaluate(r, scope, node->items.nodes[i]);
            if (r->flow == FLOW_ON) print(r, value);
        }
        break;
    case N_IF:
        render_if(r, scope, node);
        break;
    case N_FOR:
        loop_render(r, scope, node, jinja_evaluate(r, scope, node->b), 0);
        break;
    case N_SET:
        value = jinja_evaluate(r, scope, node->b);
        if (r->flow == FLOW_ON) scope_assign(r, scope, node->a, value);
        break;
    case N_MACRO:
        scope_set(r, scope, node->value.string, make_macro(r, scope, node));
        break;
    case N_CALL_BLOCK:
        print(r, jinja_evaluate_call(r, scope, node->a, make_macro(r, scope, node)));
        break;
    case N_WITH:
        with(r, scope, node);
        break;
    case N_BLOCK: // sees what is set in the template itself; `scoped` ones all around them
        jinja_render_body(r, scope_new(r, node->op ? scope : &r->top), &node->body);
        break;
    case N_BREAK:
        r->flow = FLOW_BREAK;
        break;
    case N_CONTINUE:
        r->flow = FLOW_CONTINUE;
        break;
    default:
        arena_fail(&r->arena, ST_UNSUPPORTED,
                   "no loader for this environment specified: there is no other template to take "
                   "from");
    }
}

void jinja_render_body(struct run *r, struct scope *scope, const struct node_list *body)
{
    const struct node *outer = r->at;
    run_deeper(r);
    for (size_t i = 0; i < body->n && r->flow == FLOW_ON; i++) {
        r->at = body->nodes[i];
        run_steps(r, 1);
        render_statement(r, scope, body->nodes[i]);
    }
    r->depth--;
    r->at = outer;
}

// ---- the entry ----------------------------------------------------------------------------------

struct parsing {
    struct jinja *template;
    const char *text;
    size_t len;
};

static void parse(void *context)
{
    const struct parsing *p = context;
    struct jinja *t = p->template;
    t->tokens = lexer_run(&t->arena, p->text, p->len);
    t->body = parser_run(&t->arena, t->tokens, &t->loops_over_content);
}

enum status jinja_parse(const char *where, const char *text, size_t len, struct jinja **ret)
{
    struct jinja *t = calloc(1, sizeof *t);
    if (!t || !(t->where = strdup(where))) {
        free(t);
        return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    }
    t->arena.limit = PARSED_LIMIT;
    enum status st = arena_try(&t->arena, parse, &(struct parsing){t, text, len});
    if (st == ST_OK) {
        *ret = t;
        return ST_OK;
    }
    status_context(st, "%s", where);
    jinja_free(t);
    return st;
}

void jinja_free(struct jinja *t)
{
    if (!t) return;
    arena_release(&t->arena);
    free(t->where);
    free(t);
}

bool jinja_loops_over_content(const struct jinja *t)
{
    return t->loops_over_content;
}

bool jinja_mentions(const struct jinja *t, const char *name)
{
    for (size_t i = 0; i < t->tokens.n; i++) {
        const struct token *token = &t->tokens.tokens[i];
        if ((token->type == T_NAME || token->type == T_STRING) && value_is(token->value, name))
            return true;
    }
    return false;
}

struct rendering {
    struct run run;
    const struct jinja *template;
    const json_t *variables;
};

static void render(void *context)
{
    struct rendering *rendering = context;
    struct run *r = &rendering->run;
    r->variables = value_from_json(&r->arena, rendering->variables).dict;
    jinja_render_body(r, &r->top, &rendering->template->body);
}

enum status jinja_render(const struct jinja *t, const json_t *variables, const struct tm *now,
                         const struct jinja_limits *limits, struct bytes *ret)
{
    static const struct jinja_limits none;
    if (!limits) limits = &none;
    struct rendering rendering = {
        .run = {.arena = {.limit = limits->memory ? limits->memory : DEFAULT_MEMORY},
                .steps = limits->steps ? limits->steps : DEFAULT_STEPS,
                .max_output = limits->output ? limits->output : DEFAULT_OUTPUT,
                .now = now},
        .template = t,
        .variables = variables,
    };
    struct run *r = &rendering.run;
    enum status st = arena_try(&r->arena, render, &rendering);
    if (st == ST_OK) {
        bytes_append(ret, bytes_text(&r->text), r->text.len);
        st = bytes_status(ret);
    }
    if (r->at)
        status_context(st, "%s, line %d, column %d", t->where, r->at->line, r->at->column);
    else
        status_context(st, "%s", t->where);
    bytes_release(&r->text);
    arena_release(&r->arena);
    return st;
}
