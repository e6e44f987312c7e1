/* evaluate.c: expressions to values. One thread.
 *
 * Recursion follows the tree and is bounded by run_deeper(). The node being evaluated is kept for
 * the place of a failure. */
#include "common/jinja/run.h"

// ---- names and literals -------------------------------------------------------------------------

static struct value evaluate_name(struct run *r, const struct scope *scope, struct value name)
{
    for (; scope; scope = scope->outer) {
        const struct variable *v = scope_find(r, scope, name.string);
        if (v) return v->value;
    }
    const struct dict_entry *variable = entry_named(r, r->variables, name.string);
    if (variable) return variable->value;
    const struct builtin *function = builtin_find(FUNCTION, name.string);
    return function ? value_of(.kind = V_FUNCTION, .function = function)
                    : undefined_item(r, MISSING, name);
}

static struct value evaluate_nodes(struct run *r, struct scope *scope, enum value_kind kind,
                                   const struct node_list *nodes)
{
    struct value v = list_new(&r->arena, kind, nodes->n);
    for (size_t i = 0; i < nodes->n; i++)
        v.list->items[i] = jinja_evaluate(r, scope, nodes->nodes[i]);
    return v;
}

static struct value evaluate_dict(struct run *r, struct scope *scope, const struct node *node)
{
    struct value v = dict_new(&r->arena, node->items.n);
    for (size_t i = 0; i < node->items.n; i++) {
        struct value key = jinja_evaluate(r, scope, node->items.nodes[i]);
        dict_set(r, v.dict, key, jinja_evaluate(r, scope, node->others.nodes[i]));
    }
    return v;
}

// ---- operators ----------------------------------------------------------------------------------

bool jinja_evaluate_truth(struct run *r, struct scope *scope, const struct node *node)
{
    return value_truth(r, jinja_evaluate(r, scope, node));
}

// `and` and `or` give the operand that decides.
static struct value evaluate_logic(struct run *r, struct scope *scope, const struct node *node)
{
    struct value v = jinja_evaluate(r, scope, node->a);
    return value_truth(r, v) == (node->op == OP_AND) ? jinja_evaluate(r, scope, node->b) : v;
}

static struct value evaluate_binary(struct run *r, struct scope *scope, const struct node *node)
{
    struct value a = jinja_evaluate(r, scope, node->a);
    return arithmetic(r, node->op, a, jinja_evaluate(r, scope, node->b));
}

static struct value evaluate_concat(struct run *r, struct scope *scope, const struct node *node)
{
    size_t text = text_begin(r);
    put_str(r, jinja_evaluate(r, scope, node->a));
    for (size_t i = 0; i < node->items.n; i++)
        put_str(r, jinja_evaluate(r, scope, node->items.nodes[i]->a));
    return text_end(r, text, false);
}

// a < b < c: true if each holds; what follows one that does not is not evaluated.
static bool evaluate_compare(struct run *r, struct scope *scope, const struct node *node)
{
    struct value left = jinja_evaluate(r, scope, node->a);
    bool truth = true;
    for (size_t i = 0; truth && i < node->items.n; i++) {
        const struct node *operand = node->items.nodes[i];
        struct value right = jinja_evaluate(r, scope, operand->a);
        truth = value_compare(r, operand->op, left, right);
        left = right;
    }
    return truth;
}

static struct value evaluate_condition(struct run *r, struct scope *scope, const struct node *node)
{
    bool truth = jinja_evaluate_truth(r, scope, node->a);
    if (truth || node->c) return jinja_evaluate(r, scope, truth ? node->b : node->c);
    return undefined_because(r,
                             "the inline if-expression on line %d evaluated to false and no else "
                             "section was defined.",
                             node->line);
}

static struct value evaluate_slice(struct run *r, struct scope *scope, const struct node *node)
{
    struct value of = jinja_evaluate(r, scope, node->a), part[3] = {NONE, NONE, NONE};
    for (int i = 0; i < 3; i++)
        if (node->items.nodes[i]) part[i] = jinja_evaluate(r, scope, node->items.nodes[i]);
    return get_slice(r, of, part);
}

// ---- calls --------------------------------------------------------------------------------------

static void add_named(struct run *r, struct dict *named, struct value name, struct value value)
{
    if (entry_named(r, named, name.string))
        fail(r, "got multiple values for keyword argument '%.*s'", SHOWN(name.string));
    dict_append(&r->arena, named, name, value);
}

static void evaluate_named(struct run *r, struct scope *scope, const struct call_node *call,
                           struct value caller, struct dict *named)
{
    for (size_t i = 0; i < call->keywords.n; i++)
        add_named(r, named, call->keywords.items[i].name,
                  jinja_evaluate(r, scope, call->keywords.items[i].value));
    if (given(caller)) add_named(r, named, string_of(&r->arena, "caller"), caller);
    if (!call->star_star) return;
    struct value more = jinja_evaluate(r, scope, call->star_star);
    if (more.kind != V_DICT) type_fail(r, "argument after ** must be a mapping", more);
    for (size_t i = 0; i < more.dict->n; i++) {
        if (more.dict->entries[i].key.kind != V_STRING) fail(r, "keywords must be strings");
        add_named(r, named, more.dict->entries[i].key, more.dict->entries[i].value);
    }
}

// `call` NULL: no arguments. `caller`: of a call block, V_MISSING: none.
static struct arguments evaluate_arguments(struct run *r, struct scope *scope,
                                           const struct call_node *call, struct value caller)
{
    struct arguments arguments = {.named.n = 0};
    if (!call) return arguments;
    struct value given_ones = evaluate_nodes(r, scope, V_LIST, &call->positional);
    arguments.positional = *given_ones.list;
    if (call->star) {
        struct list more = value_items(r, jinja_evaluate(r, scope, call->star));
        struct value rest = list_of(&r->arena, V_LIST, more);
        arguments.positional = *arithmetic(r, T_ADD, given_ones, rest).list;
    }
    evaluate_named(r, scope, call, caller, &arguments.named);
    return arguments;
}

struct value jinja_evaluate_call(struct run *r, struct scope *scope, const struct node *node,
                                 struct value caller)
{
    struct value function = jinja_evaluate(r, scope, node->a);
    struct arguments arguments = evaluate_arguments(r, scope, node->call, caller);
    return call_value(r, function, &arguments);
}

// A filter or a test, of `input`.
static struct value evaluate_builtin(struct run *r, struct scope *scope, const struct node *node,
                                     struct value input)
{
    struct arguments arguments = evaluate_arguments(r, scope, node->call, MISSING);
    if (!node->function)
        fail(r, "No %s named '%.*s'.", node->kind == N_FILTER ? "filter" : "test",
             SHOWN(node->value.string));
    return builtin_invoke(r, node->function, input, &arguments);
}

// ---- all of them --------------------------------------------------------------------------------

static struct value evaluate_kind(struct run *r, struct scope *scope, const struct node *node)
{
    struct value of;
    switch (node->kind) {
    case N_CONST:
        return node->value;
    case N_NAME:
        return evaluate_name(r, scope, node->value);
    case N_LIST:
    case N_TUPLE:
        return evaluate_nodes(r, scope, node->kind == N_LIST ? V_LIST : V_TUPLE, &node->items);
    case N_DICT:
        return evaluate_dict(r, scope, node);
    case N_ATTRIBUTE:
        return get_attribute(r, jinja_evaluate(r, scope, node->a), node->value.string);
    case N_ITEM:
        of = jinja_evaluate(r, scope, node->a);
        return get_item(r, of, jinja_evaluate(r, scope, node->b));
    case N_SLICE:
        return evaluate_slice(r, scope, node);
    case N_CALL:
        return jinja_evaluate_call(r, scope, node, MISSING);
    case N_FILTER:
        of = jinja_evaluate(r, scope, node->a);
        return r->flow == FLOW_ON ? evaluate_builtin(r, scope, node, of) : of;
    case N_TEST:
        return evaluate_builtin(r, scope, node, jinja_evaluate(r, scope, node->a));
    case N_NOT:
        return value_bool(!jinja_evaluate_truth(r, scope, node->a));
    case N_SIGN:
        return arithmetic_sign(r, jinja_evaluate(r, scope, node->a), node->op == T_SUB);
    case N_LOGIC:
        return evaluate_logic(r, scope, node);
    case N_BINARY:
        return evaluate_binary(r, scope, node);
    case N_CONCAT:
        return evaluate_concat(r, scope, node);
    case N_COMPARE:
        return value_bool(evaluate_compare(r, scope, node));
    case N_CONDITION:
        return evaluate_condition(r, scope, node);
    case N_CAPTURE:
        return jinja_render_captured(r, scope_new(r, scope), &node->body);
    default:
        fail(r, "a statement stands where a value is wanted");
    }
}

struct value jinja_evaluate(struct run *r, struct scope *scope, const struct node *node)
{
    const struct node *outer = r->at;
    r->at = node;
    run_deeper(r);
    struct value v = evaluate_kind(r, scope, node);
    r->depth--;
    r->at = outer;
    return v;
}
