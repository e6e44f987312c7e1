/* interpret.c: expressions to values, statements to text, calls of macros, loops, and the entry: a
 * rendering from its variables to its end. One thread for each rendering; the parsed template is
 * shared.
 *
 * Recursion follows the tree and is bounded by run_deeper(). The place of the node being evaluated
 * is kept for a failure. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/object.h"
#include "common/text/jinja/jinja.h"
#include <stdlib.h>

#define PARSED_LIMIT   ((size_t)256 << 20)
#define MAX_NESTING    200 // of expressions and of statements, while parsing
#define MAX_DEPTH      800 // of evaluations within each other
#define DEFAULT_STEPS  20000000
#define DEFAULT_MEMORY ((size_t)256 << 20)
#define DEFAULT_OUTPUT ((size_t)64 << 20)

static const struct builtin *const builtins[] = {item_builtins, string_builtins, number_builtins,
                                                 format_builtins, NULL};

static struct value evaluate(struct render *r, struct scope *scope, const struct node *node);
static bool evaluate_truth(struct render *r, struct scope *scope, const struct node *node);
static void render_body(struct render *r, struct scope *scope, const struct node_list *body);

// ---- assignments --------------------------------------------------------------------------------

// A macro may keep it.
static struct scope *scope_new(struct render *r, const struct scope *outer)
{
    struct scope *scope = run_alloc(r, 1, sizeof *scope);
    scope->outer = outer;
    return scope;
}

static void set_name(struct render *r, struct scope *scope, const char *name, struct value value)
{
    dict_set(r, &scope->variables, string_of(r, name), value);
}

static void scope_assign(struct render *r, struct scope *scope, const struct node *target,
                         struct value value)
{
    if (target->kind == N_NAME) {
        dict_set(r, &scope->variables, target->value, value);
    } else if (target->kind == N_TUPLE) {
        size_t want = target->items.n;
        if (!of_kinds(value, ITERABLES))
            fail(r, "cannot unpack non-iterable %s object", value_type(value));
        struct list items = value_items(r, value);
        if (items.n < want)
            fail(r, "not enough values to unpack (expected %zu, got %zu)", want, items.n);
        if (items.n > want) fail(r, "too many values to unpack (expected %zu)", want);
        for (size_t i = 0; i < want; i++)
            scope_assign(r, scope, target->items.nodes[i], items.items[i]);
    } else {
        struct value space = evaluate(r, scope, target->a);
        if (space.kind != V_NAMESPACE) fail(r, "cannot assign attribute on non-namespace object");
        if (target->value.string->data[0] == '_')
            fail(r, "Chat templates cannot store underscore-prefixed attributes on a namespace");
        dict_set(r, space.dict, target->value, value);
    }
}

// The text of a body, kept from the output; a break or continue within leaves it.
static struct value render_captured(struct render *r, struct scope *scope,
                                    const struct node_list *body)
{
    size_t text = r->text.len;
    render_body(r, scope, body);
    return text_end(r, text, false);
}

// ---- calls of filters, tests, methods and functions ---------------------------------------------
// Arguments are bound to parameters and checked by the row's one line of them, and what a function
// has put becomes its result.

static bool has_sign(const struct builtin *f, char sign)
{
    return memchr(f->params, sign, strspn(f->params, BUILTIN_SIGNS));
}

struct call_of {
    struct render *run;
    struct value v[1 + MAX_PARAMS];
    struct call call;
    struct param { // its name, and behind that its type
        const char *name;
        size_t len;
    } params[MAX_PARAMS];
    int n_params;
    struct value result;
};

static void read_params(struct call_of *c, const char *params)
{
    for (params += strspn(params, BUILTIN_SIGNS); *params; params += strspn(params, " ")) {
        c->params[c->n_params++] = (struct param){params, strcspn(params, "$#? ")};
        params += strcspn(params, " ");
    }
}

// What a parameter makes of an argument. The texts that a row asks for are charged here: a function
// goes through them.
static struct value convert(struct render *r, const struct param *p, bool required, struct value v)
{
    const char *type = p->name + p->len;
    int64_t x;
    if (*type == '?') return value_bool(given(v) && value_truth(r, v));
    if (*type != '#' && *type != '$') return v;
    bool otherwise = *type == '#' && type[1] && type[1] != ' ';
    if (!given(v) && otherwise) return value_int(atoi(type + 1));
    if (!given(v) || (v.kind == V_NONE && !required && !otherwise)) return MISSING;
    if (v.kind == V_UNDEFINED) undefined_fail(r, v);
    if (*type == '#' && !value_as_int(v, &x))
        fail(r, "%.*s: '%s' object cannot be interpreted as an integer", (int)p->len, p->name,
             value_type(v));
    if (*type == '#') return value_int(x);
    if (v.kind != V_STRING)
        fail(r, "%.*s must be str, not %s", (int)p->len, p->name, value_type(v));
    run_bytes(r, v.string->n_bytes);
    return v;
}

static void bind(struct call_of *c, const struct arguments *a)
{
    struct render *r = c->run;
    const struct builtin *f = c->call.function;
    struct value *v = c->v + 1;
    if (a->positional.n > (size_t)c->n_params)
        fail(r, "%.*s() takes at most %d arguments (%zu given)", NAME(f), c->n_params,
             a->positional.n);
    if (has_sign(f, '/') && a->named.n > 0) fail(r, "%.*s() takes no keyword arguments", NAME(f));
    for (size_t i = 0; i < a->positional.n; i++) v[i] = a->positional.items[i];
    for (size_t i = 0; i < a->named.n; i++) {
        const struct string *name = a->named.entries[i].key.string;
        int at = 0;
        while (at < c->n_params && !(c->params[at].len == name->n_bytes &&
                                     memcmp(c->params[at].name, name->data, name->n_bytes) == 0))
            at++;
        if (at == c->n_params)
            fail(r, "%.*s() got an unexpected keyword argument '%s'", NAME(f), SHOWN(name));
        if (given(v[at]))
            fail(r, "%.*s() got multiple values for argument '%s'", NAME(f), SHOWN(name));
        v[at] = a->named.entries[i].value;
    }
    for (int i = 0; i < f->n_required; i++)
        if (!given(v[i]))
            fail(r, "%.*s() is missing a required argument (\"%.*s\")", NAME(f),
                 (int)c->params[i].len, c->params[i].name);
}

static void invoke(void *context)
{
    struct call_of *c = context;
    size_t text = c->run->text.len;
    for (int i = 0; i < c->n_params; i++)
        c->v[i + 1] = convert(c->run, &c->params[i], i < c->call.function->n_required, c->v[i + 1]);
    struct value v = c->call.function->call(c->run, c->v, &c->call);
    c->result = given(v) ? v : text_end(c->run, text, v.truth);
}

// A generator fails when somebody goes over it, not when it is made: its failure is kept for then.
// Limits are not kept.
static void invoke_generator(struct render *r, struct call_of *c)
{
    const struct render before = *r;
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

struct value builtin_invoke(struct render *r, const struct builtin *f, struct value self,
                            const struct arguments *arguments)
{
    struct call_of c = {.run = r, .call = {f, arguments}};
    run_deeper(r);
    c.v[0] = has_sign(f, '$') ? value_str(r, self) : self;
    if (c.v[0].kind == V_STRING && (has_sign(f, '$') || f->of & METHOD(V_STRING)))
        run_bytes(r, c.v[0].string->n_bytes);
    read_params(&c, f->params);
    if (!has_sign(f, '*')) bind(&c, arguments);
    if (has_sign(f, '~'))
        invoke_generator(r, &c);
    else
        invoke(&c);
    r->depth--;
    return c.result;
}

// ---- calls of macros ----------------------------------------------------------------------------

static struct value take_named(struct render *r, struct dict *named, struct value name)
{
    struct dict_entry *e = dict_look(r, named, name);
    if (!e) return MISSING;
    struct value value = e->value;
    memmove(e, e + 1, (size_t)(named->entries + named->n-- - e - 1) * sizeof *e);
    return value;
}

// A default may speak of the parameters before it.
static void bind_parameters(struct render *r, struct scope *scope, const struct node_list *list,
                            struct list positional, struct dict *named)
{
    struct value *bound = run_alloc(r, list->n, sizeof *bound);
    for (size_t i = 0; i < list->n; i++)
        bound[i] =
            i < positional.n ? positional.items[i] : take_named(r, named, list->nodes[i]->value);
    for (size_t i = 0; i < list->n; i++) {
        const struct node *p = list->nodes[i];
        if (!given(bound[i]) && p->a)
            bound[i] = evaluate(r, scope, p->a);
        else if (!given(bound[i]))
            bound[i] =
                undefined_because(r, "parameter '%s' was not provided", SHOWN(p->value.string));
        dict_set(r, &scope->variables, p->value, bound[i]);
    }
}

// What was given and nobody took.
static void check_remaining(struct render *r, const struct node *macro, struct list positional,
                            const struct dict *named)
{
    static const struct string anonymous = STRING("caller");
    const struct string *name = macro->kind == N_MACRO ? macro->value.string : &anonymous;
    if (named->n > 0 && value_is(named->entries[0].key, "caller"))
        fail(r,
             "macro '%s' was invoked with two values for the special caller argument. This "
             "is most likely a bug.",
             SHOWN(name));
    if (named->n > 0)
        fail(r, "macro '%s' takes no keyword argument '%s'", SHOWN(name),
             SHOWN(named->entries[0].key.string));
    if (!(macro->op & USES_VARARGS) && positional.n > macro->others.n)
        fail(r, "macro '%s' takes not more than %zu argument(s)", SHOWN(name), macro->others.n);
}

// Arguments are bound to parameters, and to the three that a body may ask for without naming them:
// caller, kwargs, varargs.
static struct value macro_call(struct render *r, const struct macro *macro,
                               const struct arguments *arguments)
{
    const struct node *node = macro->node;
    struct list positional = arguments->positional;
    struct dict named = arguments->named;             // those that nobody has taken yet
    struct scope *scope = scope_new(r, macro->scope); // a macro defined in it may keep it
    run_deeper(r);
    bind_parameters(r, scope, &node->others, positional, &named);
    if (node->op & USES_CALLER) {
        struct value caller = take_named(r, &named, string_of(r, "caller"));
        bool none = !given(caller) || caller.kind == V_NONE;
        set_name(r, scope, "caller", none ? undefined_because(r, "No caller defined") : caller);
    }
    if (node->op & USES_KWARGS) {
        struct value kwargs = dict_new(r, 0);
        *kwargs.dict = named;
        named.n = 0;
        set_name(r, scope, "kwargs", kwargs);
    }
    check_remaining(r, node, positional, &named);
    if (node->op & USES_VARARGS) {
        struct list more = LIST(NULL, 0);
        if (positional.n > node->others.n)
            more = LIST(positional.items + node->others.n, positional.n - node->others.n);
        set_name(r, scope, "varargs", list_of(r, V_TUPLE, more));
    }
    struct value text = render_captured(r, scope, &node->body);
    r->depth--;
    return text;
}

// ---- loops --------------------------------------------------------------------------------------

// A loop's test, "for x in y if z".
static bool passes(struct loop *l, struct value item)
{
    struct scope scope = {.outer = l->scope};
    scope_assign(l->run, &scope, l->node->a, item);
    return evaluate_truth(l->run, &scope, l->node->c);
}

static void loop_render(struct render *r, struct scope *scope, const struct node *node,
                        struct value iterable, int64_t depth0)
{
    bool completed = false, stop = false;
    struct loop *l = run_alloc(r, 1, sizeof *l);
    *l = (struct loop){.run = r,
                       .scope = scope,
                       .node = node,
                       .passes = node->c ? passes : NULL,
                       .index0 = -1,
                       .length = -1,
                       .depth0 = depth0};
    run_deeper(r);
    l->items = value_items(r, iterable);
    while (!stop && loop_advance(l)) {
        struct scope *each = scope_new(r, scope); // what one time round sets is gone with it
        set_name(r, each, "loop", value_of(.kind = V_LOOP, .loop = l));
        scope_assign(r, each, node->a, l->current);
        render_body(r, each, &node->body);
        stop = r->flow == FLOW_BREAK;
        completed |= r->flow == FLOW_ON;
        r->flow = FLOW_ON;
    }
    // no round went to its end, be it for a break: so it is in Jinja
    if (!completed) render_body(r, scope_new(r, scope), &node->items);
    r->depth--;
}

static struct value loop_call(struct render *r, struct loop *l, const struct arguments *arguments)
{
    size_t text = r->text.len;
    if (!l->node->op)
        fail(r, "The loop must have the 'recursive' marker to be called recursively.");
    if (arguments->positional.n != 1 || arguments->named.n > 0)
        fail(r, "a recursive loop is called with one list");
    loop_render(r, l->scope, l->node, arguments->positional.items[0], l->depth0 + 1);
    return text_end(r, text, false);
}

// ---- calls --------------------------------------------------------------------------------------

static struct value call_value(struct render *r, struct value function,
                               const struct arguments *arguments)
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
        return joiner->at++ > 0 ? joiner->items.items[0] : string_of(r, "");
    default:
        fail(r, "'%s' object is not callable", value_type(function));
    }
}

static struct value evaluate_nodes(struct render *r, struct scope *scope, enum value_kind kind,
                                   const struct node_list *nodes)
{
    struct value v = list_new(r, kind, nodes->n);
    for (size_t i = 0; i < nodes->n; i++) v.list->items[i] = evaluate(r, scope, nodes->nodes[i]);
    return v;
}

static void add_named(struct render *r, struct dict *named, struct value name, struct value value)
{
    if (name.kind != V_STRING) fail(r, "keywords must be strings");
    if (dict_look(r, named, name))
        fail(r, "got multiple values for keyword argument '%s'", SHOWN(name.string));
    dict_append(r, named, name, value);
}

// Of a call, a filter or a test. `caller`: of a call block, V_MISSING: none.
static struct arguments evaluate_arguments(struct render *r, struct scope *scope,
                                           const struct node *call, struct value caller)
{
    struct arguments arguments = {.named.n = 0};
    struct dict *named = &arguments.named;
    if (call->items.n > 0 || call->b) {
        struct value positional = evaluate_nodes(r, scope, V_LIST, &call->items), more;
        if (call->b) {
            more = list_of(r, V_LIST, value_items(r, evaluate(r, scope, call->b)));
            positional = value_concatenate(r, positional, more);
        }
        arguments.positional = *positional.list;
    }
    for (size_t i = 0; i < call->others.n; i++)
        add_named(r, named, call->others.nodes[i]->value,
                  evaluate(r, scope, call->others.nodes[i]->a));
    if (given(caller)) add_named(r, named, string_of(r, "caller"), caller);
    if (!call->c) return arguments;
    struct value more = evaluate(r, scope, call->c);
    if (more.kind != V_DICT) type_fail(r, "argument after ** must be a mapping", more);
    for (size_t i = 0; i < more.dict->n; i++)
        add_named(r, named, more.dict->entries[i].key, more.dict->entries[i].value);
    return arguments;
}

static struct value evaluate_call(struct render *r, struct scope *scope, const struct node *node,
                                  struct value caller)
{
    struct value function = evaluate(r, scope, node->a);
    struct arguments arguments = evaluate_arguments(r, scope, node, caller);
    return call_value(r, function, &arguments);
}

static struct value evaluate_filter_or_test(struct render *r, struct scope *scope,
                                            const struct node *node)
{
    struct value input = evaluate(r, scope, node->a);
    if (r->flow != FLOW_ON) return input;
    struct arguments arguments = evaluate_arguments(r, scope, node, MISSING);
    if (!node->function)
        fail(r, "No %s named '%s'.", node->kind == N_FILTER ? "filter" : "test",
             SHOWN(node->value.string));
    return builtin_invoke(r, node->function, input, &arguments);
}

// ---- expressions --------------------------------------------------------------------------------

static struct value evaluate_name(struct render *r, const struct scope *scope, struct value name)
{
    for (; scope; scope = scope->outer) {
        struct value v = dict_find(r, &scope->variables, name);
        if (given(v)) return v;
    }
    const struct builtin *function = builtin_find(r, FUNCTION, name.string);
    return function ? value_of(.kind = V_FUNCTION, .function = function)
                    : undefined_item(r, MISSING, name);
}

static bool evaluate_truth(struct render *r, struct scope *scope, const struct node *node)
{
    return value_truth(r, evaluate(r, scope, node));
}

// a < b < c: true if each holds; what follows one that does not is not evaluated.
static bool evaluate_compare(struct render *r, struct scope *scope, const struct node *node)
{
    struct value left = evaluate(r, scope, node->a);
    bool truth = true;
    for (size_t i = 0; truth && i < node->items.n; i++) {
        const struct node *operand = node->items.nodes[i];
        struct value right = evaluate(r, scope, operand->a);
        truth = value_compare(r, (enum token_type)operand->op, left, right);
        left = right;
    }
    return truth;
}

// Those that take several values, each by its own rule.
static struct value evaluate_several(struct render *r, struct scope *scope, const struct node *node)
{
    struct value v = NONE, part[3] = {NONE, NONE, NONE};
    size_t text = r->text.len, n = node->items.n;
    struct node *const *items = node->items.nodes;
    switch (node->kind) {
    case N_DICT:
        v = dict_new(r, n);
        for (size_t i = 0; i < n; i++) {
            struct value key = evaluate(r, scope, items[i]);
            dict_set(r, v.dict, key, evaluate(r, scope, node->others.nodes[i]));
        }
        return v;
    case N_SLICE:
        v = evaluate(r, scope, node->a);
        for (size_t i = 0; i < 3; i++)
            if (items[i]) part[i] = evaluate(r, scope, items[i]);
        return get_slice(r, v, part);
    case N_CONCAT:
        put_str(r, evaluate(r, scope, node->a));
        for (size_t i = 0; i < n; i++) put_str(r, evaluate(r, scope, items[i]->a));
        return text_end(r, text, false);
    case N_CONDITION:
        if (evaluate_truth(r, scope, node->a)) return evaluate(r, scope, node->b);
        if (node->c) return evaluate(r, scope, node->c);
        return undefined_because(r,
                                 "the inline if-expression on line %d evaluated to false and no "
                                 "else section was defined.",
                                 node->place.line);
    default:
        fail(r, "a statement stands where a value is wanted");
    }
}

static struct value evaluate_kind(struct render *r, struct scope *scope, const struct node *node)
{
    struct value a;
    switch (node->kind) {
    case N_CONST:
        return node->value;
    case N_NAME:
        return evaluate_name(r, scope, node->value);
    case N_LIST:
    case N_TUPLE:
        return evaluate_nodes(r, scope, node->kind == N_LIST ? V_LIST : V_TUPLE, &node->items);
    case N_ATTRIBUTE:
        return get_attribute(r, evaluate(r, scope, node->a), node->value);
    case N_ITEM:
        a = evaluate(r, scope, node->a);
        return get_item(r, a, evaluate(r, scope, node->b));
    case N_CALL:
        return evaluate_call(r, scope, node, MISSING);
    case N_FILTER:
    case N_TEST:
        return evaluate_filter_or_test(r, scope, node);
    case N_NOT:
        return value_bool(!evaluate_truth(r, scope, node->a));
    case N_SIGN:
        return arithmetic_sign(r, evaluate(r, scope, node->a), node->op == '-');
    case N_LOGIC: // the operand that decides
        a = evaluate(r, scope, node->a);
        return value_truth(r, a) == (node->op == OP_AND) ? evaluate(r, scope, node->b) : a;
    case N_BINARY:
        a = evaluate(r, scope, node->a);
        return arithmetic(r, (enum token_type)node->op, a, evaluate(r, scope, node->b));
    case N_COMPARE:
        return value_bool(evaluate_compare(r, scope, node));
    case N_CAPTURE:
        return render_captured(r, scope_new(r, scope), &node->body);
    default:
        return evaluate_several(r, scope, node);
    }
}

static struct value evaluate(struct render *r, struct scope *scope, const struct node *node)
{
    const struct position outer = r->at;
    r->at = node->place;
    run_deeper(r);
    struct value v = evaluate_kind(r, scope, node);
    r->depth--;
    r->at = outer;
    return v;
}

// ---- statements ---------------------------------------------------------------------------------

static void print(struct render *r, struct value v)
{
    put_str(r, v);
    if (r->text.len > r->max_output)
        fail(r, "the text grows beyond %zu bytes, which is the limit", r->max_output);
}

static struct value make_macro(struct render *r, struct scope *scope, const struct node *node)
{
    struct macro *macro = run_alloc(r, 1, sizeof *macro);
    *macro = (struct macro){node, scope};
    return value_of(.kind = V_MACRO, .macro = macro);
}

static void render_statement(struct render *r, struct scope *scope, const struct node *node)
{
    struct value value;  // of an expression; a break or continue in a block of it drops it
    struct scope *inner; // of a body
    const struct node_list *items = &node->items;
    switch (node->kind) {
    case N_DATA:
        print(r, node->value);
        break;
    case N_PRINT:
        for (size_t i = 0; i < items->n; i++) {
            value = evaluate(r, scope, items->nodes[i]);
            if (r->flow == FLOW_ON) print(r, value);
        }
        break;
    case N_IF:
        for (size_t i = 0; i < items->n; i++) {
            const struct node *branch = items->nodes[i];
            if (branch->a && !evaluate_truth(r, scope, branch->a)) continue;
            render_body(r, scope, &branch->body);
            break;
        }
        break;
    case N_FOR:
        loop_render(r, scope, node, evaluate(r, scope, node->b), 0);
        break;
    case N_SET:
        value = evaluate(r, scope, node->b);
        if (r->flow == FLOW_ON) scope_assign(r, scope, node->a, value);
        break;
    case N_MACRO:
        dict_set(r, &scope->variables, node->value, make_macro(r, scope, node));
        break;
    case N_CALL_BLOCK:
        print(r, evaluate_call(r, scope, node->a, make_macro(r, scope, node)));
        break;
    case N_WITH:
        inner = scope_new(r, scope);
        for (size_t i = 0; i < items->n; i++)
            scope_assign(r, inner, items->nodes[i], evaluate(r, scope, node->others.nodes[i]));
        render_body(r, inner, &node->body);
        break;
    case N_BLOCK: // sees what is set in the template itself; `scoped` ones all around them
        render_body(r, scope_new(r, node->op ? scope : r->top), &node->body);
        break;
    case N_BREAK:
    case N_CONTINUE:
        r->flow = node->kind == N_BREAK ? FLOW_BREAK : FLOW_CONTINUE;
        break;
    default:
        fail_as(r, ST_UNSUPPORTED,
                "no loader for this environment specified: there is no other template to take "
                "from");
    }
}

static void render_body(struct render *r, struct scope *scope, const struct node_list *body)
{
    const struct position outer = r->at;
    run_deeper(r);
    for (size_t i = 0; i < body->n && r->flow == FLOW_ON; i++) {
        r->at = body->nodes[i]->place;
        run_steps(r, 1);
        render_statement(r, scope, body->nodes[i]);
    }
    r->depth--;
    r->at = outer;
}

// ---- the entry ----------------------------------------------------------------------------------

struct jinja {
    char *where;
    struct render run; // the parser's, with all that it made
    const struct token *tokens;
    struct node_list body;
    bool loops_over_content;
};

struct task { // of run_try()
    struct jinja *template;
    const char *text; // to parse
    size_t len;
    struct render *run; // to render
    const json_t *variables;
};

static void parse(void *context)
{
    const struct task *task = context;
    struct jinja *t = task->template;
    t->tokens = lexer_run(&t->run, task->text, task->len);
    t->body = parser_run(&t->run, t->tokens, &t->loops_over_content);
}

enum status jinja_parse(const char *where, const char *text, size_t len, struct jinja **ret)
{
    struct jinja *t = calloc(1, sizeof *t);
    if (!t || !(t->where = strdup(where))) {
        free(t);
        return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    }
    t->run = (struct render){.fault = ST_FORMAT,
                             .limit = PARSED_LIMIT,
                             .steps = INT64_MAX,
                             .max_depth = MAX_NESTING,
                             .builtins = builtins};
    enum status st = run_try(&t->run, parse, &(struct task){t, text, len, NULL, NULL});
    if (st == ST_OK) {
        *ret = t;
        return ST_OK;
    }
    status_context(st, "%s: line %d, column %d", where, t->run.at.line, t->run.at.column);
    jinja_free(t);
    return st;
}

void jinja_free(struct jinja *t)
{
    if (!t) return;
    run_release(&t->run);
    free(t->where);
    free(t);
}

bool jinja_loops_over_content(const struct jinja *t)
{
    return t->loops_over_content;
}

bool jinja_mentions(const struct jinja *t, const char *name)
{
    for (const struct token *token = t->tokens; token->type != T_END; token++)
        if ((token->type == T_NAME || token->type == T_STRING) && value_is(token->value, name))
            return true;
    return false;
}

static void render(void *context)
{
    const struct task *task = context;
    struct render *r = task->run;
    struct scope *variables = scope_new(r, NULL);
    variables->variables = *value_from_json(r, task->variables, 0).dict;
    r->top = scope_new(r, variables);
    render_body(r, r->top, &task->template->body);
}

enum status jinja_render(const struct jinja *t, const json_t *variables, const struct tm *now,
                         const struct jinja_limits *limits, struct bytes *ret)
{
    static const struct jinja_limits none;
    if (!limits) limits = &none;
    struct render r = {.fault = ST_INVALID,
                       .limit = limits->memory ? limits->memory : DEFAULT_MEMORY,
                       .steps = limits->steps ? limits->steps : DEFAULT_STEPS,
                       .max_depth = MAX_DEPTH,
                       .max_output = limits->output ? limits->output : DEFAULT_OUTPUT,
                       .now = now,
                       .builtins = builtins};
    // only read: the template
    enum status st = run_try(&r, render, &(struct task){(struct jinja *)t, NULL, 0, &r, variables});
    if (st == ST_OK) {
        bytes_append(ret, bytes_text(&r.text), r.text.len);
        st = bytes_status(ret);
    }
    if (r.at.line > 0)
        status_context(st, "%s, line %d, column %d", t->where, r.at.line, r.at.column);
    else
        status_context(st, "%s", t->where);
    run_release(&r);
    return st;
}
