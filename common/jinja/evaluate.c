/* evaluate.c: expressions to values. One thread.
 *
 * Recursion follows the tree and is bounded by run_deeper(). The node at which a failure begins is
 * kept for its place. */
#include "common/jinja/run.h"
#include <stdio.h>

static struct value scope_get(struct run *r, const struct scope *scope, const struct string *name)
{
    for (; scope; scope = scope->outer)
        for (const struct variable *v = scope->variables; v; v = v->next)
            if (string_equal(v->name, name)) return v->value;
    for (size_t i = 0; i < r->variables->n; i++)
        if (string_equal(r->variables->entries[i].key.string, name))
            return r->variables->entries[i].value;
    const struct builtin *function = function_find(name);
    return function ? value_of(.kind = V_FUNCTION, .function = function) : MISSING;
}

enum status scope_set(struct run *r, struct scope *scope, const struct string *name,
                      struct value value)
{
    for (struct variable *v = scope->variables; v; v = v->next)
        if (string_equal(v->name, name)) {
            v->value = value;
            return ST_OK;
        }
    struct variable *v = arena_alloc(&r->arena, sizeof *v);
    if (!v) return ST_NO_MEMORY;
    *v = (struct variable){name, value, scope->variables};
    scope->variables = v;
    return ST_OK;
}

// ---- literals -----------------------------------------------------------------------------------

static enum status evaluate_list(struct run *r, struct scope *scope, const struct node *node,
                                 struct value *ret)
{
    struct value *items;
    enum status st = list_make(&r->arena, node->kind == N_LIST ? V_LIST : V_TUPLE,
                               (size_t)node->items.n, &items, ret);
    for (int i = 0; st == ST_OK && i < node->items.n; i++)
        st = jinja_evaluate(r, scope, node->items.nodes[i], &items[i]);
    return st;
}

static enum status evaluate_dict(struct run *r, struct scope *scope, const struct node *node,
                                 struct value *ret)
{
    struct value dict;
    enum status st = dict_make(&r->arena, (size_t)node->items.n, &dict);
    for (int i = 0; st == ST_OK && i < node->items.n; i++) {
        struct value key, value;
        CHECK(jinja_evaluate(r, scope, node->items.nodes[i], &key));
        CHECK(jinja_evaluate(r, scope, node->others.nodes[i], &value));
        CHECK(dict_set(r, dict.dict, &key, value));
    }
    *ret = dict;
out:
    return st;
}

static enum status evaluate_name(struct run *r, struct scope *scope, const struct node *node,
                                 struct value *ret)
{
    *ret = scope_get(r, scope, node->value.string);
    if (given(ret)) return ST_OK;
    return undefined_make(r, NULL, NULL, node->value, ret);
}

// ---- operators ----------------------------------------------------------------------------------

static enum status evaluate_truth(struct run *r, struct scope *scope, const struct node *node,
                                  bool *ret)
{
    struct value v;
    enum status st = jinja_evaluate(r, scope, node, &v);
    return st == ST_OK ? value_truth(r, &v, ret) : st;
}

// `and` and `or` give the operand that decides.
static enum status evaluate_logic(struct run *r, struct scope *scope, const struct node *node,
                                  struct value *ret)
{
    bool truth;
    enum status st;
    CHECK(jinja_evaluate(r, scope, node->a, ret));
    CHECK(value_truth(r, ret, &truth));
    if (truth == (node->kind == N_AND)) st = jinja_evaluate(r, scope, node->b, ret);
out:
    return st;
}

static enum status evaluate_binary(struct run *r, struct scope *scope, const struct node *node,
                                   struct value *ret)
{
    struct value a, b;
    enum status st;
    CHECK(jinja_evaluate(r, scope, node->a, &a));
    CHECK(jinja_evaluate(r, scope, node->b, &b));
    st = arithmetic(r, node->op, &a, &b, ret);
out:
    return st;
}

static enum status evaluate_concat(struct run *r, struct scope *scope, const struct node *node,
                                   struct value *ret)
{
    struct bytes text = BYTES_INIT;
    enum status st = ST_OK;
    for (int i = 0; st == ST_OK && i < node->items.n; i++) {
        struct value v;
        st = jinja_evaluate(r, scope, node->items.nodes[i], &v);
        if (st == ST_OK) st = put_str(r, &v, &text);
    }
    return run_take(r, st, &text, ret);
}

static enum status compare(struct run *r, int op, const struct value *a, const struct value *b,
                           bool *ret)
{
    enum status st;
    if (op == T_EQ || op == T_NE)
        st = value_equal(r, a, b, ret);
    else if (op == OP_IN || op == OP_NOT_IN)
        st = value_in(r, a, b, ret);
    else
        return value_compare(r, op, a, b, ret);
    if (op == T_NE || op == OP_NOT_IN) *ret = !*ret;
    return st;
}

// a < b < c: true if each holds; the rest is not evaluated once one does not.
static enum status evaluate_compare(struct run *r, struct scope *scope, const struct node *node,
                                    struct value *ret)
{
    struct value left, right;
    bool truth = true;
    enum status st = jinja_evaluate(r, scope, node->a, &left);
    for (int i = 0; st == ST_OK && truth && i < node->items.n; i++) {
        const struct node *operand = node->items.nodes[i];
        st = jinja_evaluate(r, scope, operand->a, &right);
        if (st == ST_OK) st = compare(r, operand->op, &left, &right, &truth);
        left = right;
    }
    *ret = value_bool(truth);
    return st;
}

static enum status evaluate_condition(struct run *r, struct scope *scope, const struct node *node,
                                      struct value *ret)
{
    bool truth;
    enum status st = evaluate_truth(r, scope, node->a, &truth);
    if (st != ST_OK) return st;
    if (truth || node->c) return jinja_evaluate(r, scope, truth ? node->b : node->c, ret);
    char hint[120];
    struct value text;
    snprintf(hint, sizeof hint,
             "the inline if-expression on line %d evaluated to false and no else section was "
             "defined.",
             node->line);
    st = string_make(&r->arena, hint, strlen(hint), &text);
    return st == ST_OK ? undefined_make(r, text.string->data, NULL, MISSING, ret) : st;
}

static enum status evaluate_unary(struct run *r, struct scope *scope, const struct node *node,
                                  struct value *ret)
{
    struct value v;
    bool truth;
    enum status st;
    CHECK(jinja_evaluate(r, scope, node->a, &v));
    if (node->kind != N_NOT) return arithmetic_sign(r, &v, node->kind == N_NEGATIVE, ret);
    CHECK(value_truth(r, &v, &truth));
    *ret = value_bool(!truth);
out:
    return st;
}

// ---- a.b, a[b], a[b:c] --------------------------------------------------------------------------

static enum status evaluate_item(struct run *r, struct scope *scope, const struct node *node,
                                 struct value *ret)
{
    struct value of, part[3] = {NONE, NONE, NONE};
    enum status st;
    CHECK(jinja_evaluate(r, scope, node->a, &of));
    if (node->kind == N_ATTRIBUTE) return get_attribute(r, &of, node->value.string, ret);
    if (node->kind == N_ITEM) {
        CHECK(jinja_evaluate(r, scope, node->b, &part[0]));
        return get_item(r, &of, &part[0], ret);
    }
    for (int i = 0; i < 3; i++)
        if (node->items.nodes[i]) CHECK(jinja_evaluate(r, scope, node->items.nodes[i], &part[i]));
    st = get_slice(r, &of, part, ret);
out:
    return st;
}

// ---- calls --------------------------------------------------------------------------------------

static enum status add_star(struct run *r, struct scope *scope, const struct node *node,
                            struct value **positional, int *n)
{
    struct value v;
    struct list more;
    enum status st;
    CHECK(jinja_evaluate(r, scope, node, &v));
    CHECK(value_items(r, &v, &more));
    struct value *all = arena_array(&r->arena, (size_t)*n + more.n, sizeof *all);
    if (!all) return ST_NO_MEMORY;
    if (*n > 0) memcpy(all, *positional, (size_t)*n * sizeof *all);
    if (more.n > 0) memcpy(all + *n, more.items, more.n * sizeof *all);
    *positional = all;
    *n += (int)more.n;
out:
    return st;
}

static enum status add_named(struct named_value *named, int *n, const struct string *name,
                             struct value value)
{
    for (int i = 0; i < *n; i++)
        if (string_equal(named[i].name, name))
            return status_fail(ST_INVALID, "got multiple values for keyword argument '%.*s'",
                               (int)(name->n_bytes < 100 ? name->n_bytes : 100), name->data);
    named[(*n)++] = (struct named_value){name, value};
    return ST_OK;
}

static enum status evaluate_named(struct run *r, struct scope *scope, const struct call_node *call,
                                  const struct value *caller, struct arguments *ret)
{
    struct value v, dict = MISSING, name;
    enum status st = ST_OK;
    size_t n = (size_t)call->n_keywords + (caller != NULL);
    if (call->star_star) {
        CHECK(jinja_evaluate(r, scope, call->star_star, &dict));
        if (dict.kind != V_DICT) return type_fail("argument after ** must be a mapping", &dict);
        n += dict.dict->n;
    }
    struct named_value *named = arena_array(&r->arena, n, sizeof *named);
    if (!named) return ST_NO_MEMORY;
    ret->named = named;
    for (int i = 0; i < call->n_keywords; i++) {
        CHECK(jinja_evaluate(r, scope, call->keywords[i].value, &v));
        CHECK(add_named(named, &ret->n_named, call->keywords[i].name.string, v));
    }
    if (caller) {
        CHECK(string_puts(&r->arena, "caller", &name));
        CHECK(add_named(named, &ret->n_named, name.string, *caller));
    }
    for (size_t i = 0; given(&dict) && i < dict.dict->n; i++) {
        if (dict.dict->entries[i].key.kind != V_STRING)
            return status_fail(ST_INVALID, "keywords must be strings");
        CHECK(run_steps(r, (size_t)ret->n_named >> 3));
        CHECK(add_named(named, &ret->n_named, dict.dict->entries[i].key.string,
                        dict.dict->entries[i].value));
    }
out:
    return st;
}

// `call` NULL: no arguments. `caller`: of a call block, NULL: none.
static enum status evaluate_arguments(struct run *r, struct scope *scope,
                                      const struct call_node *call, const struct value *caller,
                                      struct arguments *ret)
{
    enum status st = ST_OK;
    *ret = (struct arguments){NULL, 0, NULL, 0};
    if (!call) return ST_OK;
    int n = call->positional.n;
    struct value *positional = arena_array(&r->arena, (size_t)n, sizeof *positional);
    if (!positional) return ST_NO_MEMORY;
    for (int i = 0; i < n; i++)
        CHECK(jinja_evaluate(r, scope, call->positional.nodes[i], &positional[i]));
    if (call->star) CHECK(add_star(r, scope, call->star, &positional, &n));
    CHECK(evaluate_named(r, scope, call, caller, ret));
    ret->positional = positional;
    ret->n_positional = n;
out:
    return st;
}

enum status jinja_evaluate_call(struct run *r, struct scope *scope, const struct node *node,
                                const struct value *caller, struct value *ret)
{
    struct value function;
    struct arguments arguments;
    enum status st;
    CHECK(jinja_evaluate(r, scope, node->a, &function));
    CHECK(evaluate_arguments(r, scope, node->call, caller, &arguments));
    st = call_value(r, &function, &arguments, ret);
out:
    return st;
}

static enum status evaluate_filter(struct run *r, struct scope *scope, const struct node *node,
                                   struct value *ret)
{
    struct value input = r->block;
    struct arguments arguments;
    enum status st = ST_OK;
    if (node->a) CHECK(jinja_evaluate(r, scope, node->a, &input));
    CHECK(evaluate_arguments(r, scope, node->call, NULL, &arguments));
    st = filter_apply(r, node->value.string, &input, &arguments, ret);
out:
    return st;
}

static enum status evaluate_test(struct run *r, struct scope *scope, const struct node *node,
                                 struct value *ret)
{
    struct value input;
    struct arguments arguments;
    bool truth = false;
    enum status st;
    CHECK(jinja_evaluate(r, scope, node->a, &input));
    CHECK(evaluate_arguments(r, scope, node->call, NULL, &arguments));
    CHECK(test_apply(r, node->value.string, &input, &arguments, &truth));
    *ret = value_bool(truth);
out:
    return st;
}

// ---- all of them --------------------------------------------------------------------------------

static enum status evaluate_kind(struct run *r, struct scope *scope, const struct node *node,
                                 struct value *ret)
{
    switch (node->kind) {
    case N_CONST:
        *ret = node->value;
        return ST_OK;
    case N_NAME:
        return evaluate_name(r, scope, node, ret);
    case N_LIST:
    case N_TUPLE:
        return evaluate_list(r, scope, node, ret);
    case N_DICT:
        return evaluate_dict(r, scope, node, ret);
    case N_ATTRIBUTE:
    case N_ITEM:
    case N_SLICE:
        return evaluate_item(r, scope, node, ret);
    case N_CALL:
        return jinja_evaluate_call(r, scope, node, NULL, ret);
    case N_FILTER:
        return evaluate_filter(r, scope, node, ret);
    case N_TEST:
        return evaluate_test(r, scope, node, ret);
    case N_NOT:
    case N_NEGATIVE:
    case N_POSITIVE:
        return evaluate_unary(r, scope, node, ret);
    case N_AND:
    case N_OR:
        return evaluate_logic(r, scope, node, ret);
    case N_BINARY:
        return evaluate_binary(r, scope, node, ret);
    case N_CONCAT:
        return evaluate_concat(r, scope, node, ret);
    case N_COMPARE:
        return evaluate_compare(r, scope, node, ret);
    case N_CONDITION:
        return evaluate_condition(r, scope, node, ret);
    default:
        return status_fail(ST_INVALID, "a statement stands where a value is wanted");
    }
}

enum status jinja_evaluate(struct run *r, struct scope *scope, const struct node *node,
                           struct value *ret)
{
    enum status st;
    struct value value = MISSING;
    CHECK(run_deeper(r));
    CHECK(evaluate_kind(r, scope, node, &value));
    r->depth--;
    *ret = value;
out:
    if (st != ST_OK && !r->failed_at) r->failed_at = node;
    return st;
}
