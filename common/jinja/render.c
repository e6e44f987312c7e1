/* render.c: statements to text, and the entry: a rendering from its variables to its end. One
 * thread for each rendering; the parsed template is shared. */
#include "common/jinja/jinja.h"
#include "common/jinja/parser.h"
#include "common/jinja/run.h"
#include <stdio.h>
#include <stdlib.h>

#define PARSED_LIMIT  ((size_t)256 << 20)
#define DEFAULT_STEPS 20000000

struct jinja {
    char *where;
    struct arena arena;
    struct token_stream tokens;
    struct node_list body;
    bool loops_over_content;
};

// ---- output -------------------------------------------------------------------------------------

static enum status check_output(const struct run *r)
{
    if (r->out->failed)
        return status_fail(ST_NO_MEMORY, "a text grows beyond %zu MiB, which is the limit",
                           r->arena.limit >> 20);
    if (r->out->len > r->max_output)
        return status_fail(ST_INVALID, "the text grows beyond %zu bytes, which is the limit",
                           r->max_output);
    return ST_OK;
}

static enum status print(struct run *r, struct scope *scope, const struct node *node)
{
    enum status st = ST_OK;
    for (int i = 0; st == ST_OK && i < node->items.n; i++) {
        struct value v;
        st = jinja_evaluate(r, scope, node->items.nodes[i], &v);
        if (st == ST_OK) st = put_str(r, &v, r->out);
        if (st == ST_OK) st = check_output(r);
    }
    return st;
}

enum status jinja_render_captured(struct run *r, struct scope *scope, const struct node_list *body,
                                  struct value *ret)
{
    struct bytes text = BYTES_INIT, *out = r->out;
    r->out = &text;
    enum status st = jinja_render_body(r, scope, body);
    r->out = out;
    return run_take(r, st, &text, ret);
}

// A scope that may outlive the call: a macro keeps the one it was defined in.
static enum status scope_new(struct run *r, struct scope *outer, struct scope **ret)
{
    *ret = arena_alloc(&r->arena, sizeof **ret);
    if (!*ret) return ST_NO_MEMORY;
    (*ret)->outer = outer;
    return ST_OK;
}

// ---- assignments --------------------------------------------------------------------------------

static enum status unpack(struct run *r, struct scope *scope, const struct node *target,
                          struct value value)
{
    struct list items;
    size_t want = (size_t)target->items.n;
    if (!value_is_iterable(&value))
        return status_fail(ST_INVALID, "cannot unpack non-iterable %s object", value_type(&value));
    enum status st = value_items(r, &value, &items);
    if (st == ST_OK && items.n < want)
        st = status_fail(ST_INVALID, "not enough values to unpack (expected %zu, got %zu)", want,
                         items.n);
    if (st == ST_OK && items.n > want)
        st = status_fail(ST_INVALID, "too many values to unpack (expected %zu)", want);
    for (size_t i = 0; st == ST_OK && i < want; i++)
        st = scope_assign(r, scope, target->items.nodes[i], items.items[i]);
    return st;
}

enum status scope_assign(struct run *r, struct scope *scope, const struct node *target,
                         struct value value)
{
    if (target->kind == N_TUPLE) return unpack(r, scope, target, value);
    if (target->kind == N_NAME) return scope_set(r, scope, target->value.string, value);
    struct value space;
    enum status st = jinja_evaluate(r, scope, target->a, &space);
    if (st != ST_OK) return st;
    if (space.kind != V_NAMESPACE)
        return status_fail(ST_INVALID, "cannot assign attribute on non-namespace object");
    if (target->value.string->data[0] == '_')
        return status_fail(ST_INVALID, "Chat templates cannot store underscore-prefixed attributes "
                                       "on a namespace");
    return dict_set(r, space.dict, &target->value, value);
}

static enum status set(struct run *r, struct scope *scope, const struct node *node)
{
    struct value value;
    enum status st = jinja_evaluate(r, scope, node->b, &value);
    return st == ST_OK ? scope_assign(r, scope, node->a, value) : st;
}

// The text of a body, through filters where there are any.
static enum status filtered(struct run *r, struct scope *outer, const struct node_list *body,
                            const struct node *filters, struct value *ret)
{
    struct scope *scope;
    struct value block = r->block;
    enum status st;
    CHECK(scope_new(r, outer, &scope));
    CHECK(jinja_render_captured(r, scope, body, ret));
    if (filters && r->flow == FLOW_ON) {
        r->block = *ret;
        st = jinja_evaluate(r, scope, filters, ret);
        r->block = block;
    }
out:
    return st;
}

static enum status set_block(struct run *r, struct scope *scope, const struct node *node)
{
    struct value text;
    enum status st = filtered(r, scope, &node->body, node->b, &text);
    return st == ST_OK && r->flow == FLOW_ON ? scope_assign(r, scope, node->a, text) : st;
}

static enum status filter_block(struct run *r, struct scope *scope, const struct node *node)
{
    struct value text;
    enum status st = filtered(r, scope, &node->body, node->a, &text);
    if (st == ST_OK && r->flow == FLOW_ON) st = put_str(r, &text, r->out);
    return st == ST_OK ? check_output(r) : st;
}

static enum status with(struct run *r, struct scope *outer, const struct node *node)
{
    struct scope *scope;
    enum status st;
    CHECK(scope_new(r, outer, &scope));
    for (int i = 0; i < node->items.n; i++) {
        struct value value;
        CHECK(jinja_evaluate(r, outer, node->others.nodes[i], &value));
        CHECK(scope_assign(r, scope, node->items.nodes[i], value));
    }
    st = jinja_render_body(r, scope, &node->body);
out:
    return st;
}

// ---- macros -------------------------------------------------------------------------------------

static enum status make_macro(struct run *r, struct scope *scope, const struct node *node,
                              struct value *ret)
{
    struct macro *macro = arena_alloc(&r->arena, sizeof *macro);
    if (!macro) return ST_NO_MEMORY;
    *macro = (struct macro){node, scope};
    *ret = value_of(.kind = V_MACRO, .macro = macro);
    return ST_OK;
}

static enum status define_macro(struct run *r, struct scope *scope, const struct node *node)
{
    struct value macro;
    enum status st = make_macro(r, scope, node, &macro);
    return st == ST_OK ? scope_set(r, scope, node->value.string, macro) : st;
}

static enum status call_block(struct run *r, struct scope *scope, const struct node *node)
{
    struct value caller, text;
    enum status st;
    CHECK(make_macro(r, scope, node, &caller));
    CHECK(jinja_evaluate_call(r, scope, node->a, &caller, &text));
    CHECK(put_str(r, &text, r->out));
    st = check_output(r);
out:
    return st;
}

// ---- statements ---------------------------------------------------------------------------------

static enum status render_if(struct run *r, struct scope *scope, const struct node *node)
{
    enum status st = ST_OK;
    for (int i = 0; i < node->items.n; i++) {
        const struct node *branch = node->items.nodes[i];
        bool taken = true;
        if (branch->a) {
            struct value test;
            CHECK(jinja_evaluate(r, scope, branch->a, &test));
            CHECK(value_truth(r, &test, &taken));
        }
        if (taken) return jinja_render_body(r, scope, &branch->body);
    }
out:
    return st;
}

// A recursive loop begins with a text of its own; the others write where they stand.
static enum status render_for(struct run *r, struct scope *scope, const struct node *node)
{
    struct value iterable;
    enum status st = jinja_evaluate(r, scope, node->b, &iterable);
    return st == ST_OK ? loop_render(r, scope, node, &iterable, 0) : st;
}

static enum status render_scope(struct run *r, struct scope *outer, const struct node *node)
{
    struct scope *scope;
    enum status st = scope_new(r, outer, &scope);
    return st == ST_OK ? jinja_render_body(r, scope, &node->body) : st;
}

static enum status render_statement(struct run *r, struct scope *scope, const struct node *node)
{
    switch (node->kind) {
    case N_DATA:
        run_put(r, r->out, node->value.string->data, node->value.string->n_bytes);
        return check_output(r);
    case N_PRINT:
        return print(r, scope, node);
    case N_IF:
        return render_if(r, scope, node);
    case N_FOR:
        return render_for(r, scope, node);
    case N_SET:
        return set(r, scope, node);
    case N_SET_BLOCK:
        return set_block(r, scope, node);
    case N_MACRO:
        return define_macro(r, scope, node);
    case N_CALL_BLOCK:
        return call_block(r, scope, node);
    case N_FILTER_BLOCK:
        return filter_block(r, scope, node);
    case N_WITH:
        return with(r, scope, node);
    case N_SCOPE:
        return render_scope(r, scope, node);
    case N_BLOCK: // sees what is set in the template itself; `scoped` ones all around them
        return render_scope(r, node->op ? scope : &r->top, node);
    case N_BREAK:
        r->flow = FLOW_BREAK;
        return ST_OK;
    case N_CONTINUE:
        r->flow = FLOW_CONTINUE;
        return ST_OK;
    default:
        return status_fail(ST_UNSUPPORTED, "no loader for this environment specified: there is no "
                                           "other template to take from");
    }
}

enum status jinja_render_body(struct run *r, struct scope *scope, const struct node_list *body)
{
    enum status st;
    CHECK(run_deeper(r));
    for (int i = 0; i < body->n && r->flow == FLOW_ON; i++) {
        st = run_steps(r, 1);
        if (st == ST_OK) st = render_statement(r, scope, body->nodes[i]);
        if (st != ST_OK && !r->failed_at) r->failed_at = body->nodes[i];
        if (st != ST_OK) return st;
    }
    r->depth--;
out:
    return st;
}

// ---- the entry ----------------------------------------------------------------------------------

enum status jinja_parse(const char *where, const char *text, size_t len, struct jinja **ret)
{
    enum status st;
    struct jinja *t = calloc(1, sizeof *t);
    if (!t || !(t->where = strdup(where))) {
        free(t);
        return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    }
    t->arena.limit = PARSED_LIMIT;
    st = lexer_run(&t->arena, text, len, &t->tokens);
    if (st == ST_OK) st = parser_run(&t->arena, t->tokens, &t->body, &t->loops_over_content);
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
        if ((token->type == T_NAME || token->type == T_STRING) && value_is(&token->value, name))
            return true;
    }
    return false;
}

enum status jinja_render(const struct jinja *t, const json_t *variables, const struct tm *now,
                         const struct jinja_limits *limits, struct bytes *ret)
{
    static const struct jinja_limits none;
    struct bytes text = BYTES_INIT;
    struct value given_variables;
    enum status st;
    if (!limits) limits = &none;
    struct run r = {
        .arena = {.limit = limits->memory ? limits->memory : (size_t)256 << 20},
        .steps = limits->steps ? limits->steps : DEFAULT_STEPS,
        .max_output = limits->output ? limits->output : (size_t)64 << 20,
        .now = now,
        .out = &text,
    };
    CHECK(value_from_json(&r.arena, variables, &given_variables));
    r.variables = given_variables.dict;
    CHECK(jinja_render_body(&r, &r.top, &t->body));
    CHECK(bytes_status(&text));
    bytes_append(ret, bytes_text(&text), text.len);
    st = bytes_status(ret);
out:
    if (st != ST_OK && r.failed_at)
        status_context(st, "%s, line %d, column %d", t->where, r.failed_at->line,
                       r.failed_at->column);
    else
        status_context(st, "%s", t->where);
    bytes_release(&text);
    arena_release(&r.arena);
    return st;
}
