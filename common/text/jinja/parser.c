/* parser.c: tokens to a tree: expressions, of operators and what they stand between, then
 * statements. A statement's parser stands at its name and ends at its "%}"; bodies are read up to a
 * tag that ends them. Depth is bounded. Any thread, each on its own run. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/object.h"
#include "common/text/jinja/syntax.h"
#include <stdio.h>

struct function { // a macro that is being read
    struct node *node;
    struct function *outer;
};

struct parser {
    struct render *run;
    const struct token *token;  // the current one; the stream ends on T_END
    struct function *function;  // the innermost; NULL: none
    int n_loops;                // around, within the same function: for break and continue
    const char *ends;           // tags that may end the block being read, for errors; NULL: none
    const struct node *unknown; // a filter or test that is not there, outside of any condition
    bool loops_over_content;
};

// At the current token.
#define parse_fail(p, ...) fail_at((p)->run, (p)->token->place, __VA_ARGS__)

static struct node *parse_expression(struct parser *p);
static struct node *parse_primary(struct parser *p);
static struct node *parse_behind(struct parser *p, struct node *node, bool filtered);

// ---- tokens and nodes ---------------------------------------------------------------------------

static _Noreturn void parse_unexpected(const struct parser *p, const char *wanted)
{
    const struct token *t = p->token;
    if (t->type == T_END) parse_fail(p, "unexpected end of template, expected %s", wanted);
    if (t->type == T_NAME) parse_fail(p, "expected %s, got '%s'", wanted, SHOWN(t->value.string));
    parse_fail(p, "expected %s, got '%s'", wanted, token_words(t->type));
}

static bool token_is(const struct parser *p, const char *name)
{
    return p->token->type == T_NAME && value_is(p->token->value, name);
}

static bool skip_name(struct parser *p, const char *name)
{
    bool is = token_is(p, name);
    p->token += is;
    return is;
}

static bool skip_token(struct parser *p, enum token_type type)
{
    bool is = p->token->type == type;
    p->token += is;
    return is;
}

static const struct token *parse_expect(struct parser *p, enum token_type type)
{
    char wanted[80];
    snprintf(wanted, sizeof wanted, "'%s'", token_words(type));
    if (p->token->type != type) parse_unexpected(p, wanted);
    return p->token++;
}

// Between commas, up to `end`: whether there is one more item, which is not the first. `trailing`:
// a comma may stand before the end.
static bool parse_more(struct parser *p, enum token_type end, bool first, bool trailing)
{
    if (p->token->type == end) return false;
    if (!first) parse_expect(p, ',');
    return !trailing || p->token->type != end;
}

// The caller takes it back: p->run->depth--.
static void parse_deeper(struct parser *p)
{
    p->run->at = p->token->place;
    run_deeper(p->run);
}

static struct node *node_new(struct parser *p, enum node_kind kind)
{
    struct node *node = run_alloc(p->run, 1, sizeof *node);
    node->kind = kind;
    node->place = p->token->place;
    return node;
}

// `a` and `b` under one node, which begins where a does.
static struct node *node_pair(struct parser *p, enum node_kind kind, int op, struct node *a,
                              struct node *b)
{
    struct node *node = node_new(p, kind);
    node->op = op;
    node->a = a;
    node->b = b;
    node->place = a->place;
    return node;
}

// The current token's value.
static struct node *parse_value(struct parser *p, enum node_kind kind)
{
    struct node *node = node_new(p, kind);
    node->value = p->token++->value;
    return node;
}

static struct node *node_add(struct parser *p, struct node_list *list, struct node *node)
{
    list->nodes = run_room(p->run, list->nodes, list->n, &list->cap, sizeof *list->nodes);
    list->nodes[list->n++] = node;
    return node;
}

// A name, at the current token, and behind a "=" its value; no two have the same name.
static void parse_named(struct parser *p, struct node_list *list)
{
    struct node *node = node_new(p, N_NAMED);
    node->value = parse_expect(p, T_NAME)->value;
    if (skip_token(p, '=')) node->a = parse_expression(p);
    for (size_t i = 0; i < list->n; i++)
        if (string_equal(list->nodes[i]->value.string, node->value.string))
            fail_at(p->run, node->place, "the name '%s' is given twice", SHOWN(node->value.string));
    node_add(p, list, node);
}

// ---- what may follow a value --------------------------------------------------------------------

static void parse_argument(struct parser *p, struct node *call)
{
    bool closed = call->b || call->c;
    if (!closed && skip_token(p, '*'))
        call->b = parse_expression(p);
    else if (!call->c && skip_token(p, T_POW))
        call->c = parse_expression(p);
    else if (p->token->type == T_NAME && p->token[1].type == '=' && !call->c)
        parse_named(p, &call->others);
    else if (closed || call->others.n > 0)
        parse_fail(p, "invalid syntax for function call expression");
    else
        node_add(p, &call->items, parse_expression(p));
}

static struct node *parse_arguments(struct parser *p, struct node *call)
{
    parse_expect(p, '(');
    for (bool first = true; parse_more(p, ')', first, true); first = false) parse_argument(p, call);
    parse_expect(p, ')');
    return call;
}

// The name of a filter or a test, applied to `a`.
static struct node *parse_builtin(struct parser *p, struct node *node, int of, struct node *a)
{
    node->a = a;
    node->value = parse_expect(p, T_NAME)->value;
    if (p->token->type == '.') parse_fail(p, "no filter or test has a dot in its name");
    node->function = builtin_find(p->run, of, node->value.string);
    if (!node->function) p->unknown = node;
    return node;
}

// Filters from here on, of `input`. `first`: at a name, not at its "|".
static struct node *parse_filters(struct parser *p, struct node *input, bool first)
{
    for (; first || skip_token(p, '|'); first = false) {
        input = parse_builtin(p, node_new(p, N_FILTER), FILTER, input);
        if (p->token->type == '(') parse_arguments(p, input);
    }
    return input;
}

static struct node *parse_test(struct parser *p, struct node *tested)
{
    p->token++; // "is"
    struct node *node = node_new(p, N_TEST);
    bool negated = skip_name(p, "not");
    parse_builtin(p, node, TEST, tested);
    enum token_type type = p->token->type;
    bool argument = type == T_STRING || type == T_INTEGER || type == T_FLOAT || type == '[' ||
                    type == '{'; // "x is divisibleby 3"
    if (type == T_NAME) argument = string_word(p->token->value.string, "else or and") < 0;
    if (type == '(') {
        parse_arguments(p, node);
    } else if (argument) {
        if (token_is(p, "is")) parse_fail(p, "You cannot chain multiple tests with is");
        node_add(p, &node->items, parse_behind(p, parse_primary(p), false));
    }
    return negated ? node_pair(p, N_NOT, 0, node, NULL) : node;
}

// NULL: there is none.
static struct node *parse_slice_part(struct parser *p)
{
    enum token_type type = p->token->type;
    bool none = type == ':' || type == ']' || type == ',';
    return none ? NULL : parse_expression(p);
}

// What stands in brackets behind `of`: one expression, or a slice.
static struct node *parse_brackets(struct parser *p, struct node *of)
{
    struct node *node = node_new(p, N_ITEM);
    p->token++;
    node->a = of;
    node->b = parse_slice_part(p);
    if (skip_token(p, ':')) {
        node->kind = N_SLICE;
        node_add(p, &node->items, node->b);
        node_add(p, &node->items, parse_slice_part(p));
        node_add(p, &node->items, skip_token(p, ':') ? parse_slice_part(p) : NULL);
    } else if (!node->b) {
        parse_unexpected(p, "an index");
    }
    if (p->token->type == ',')
        parse_fail(p, "several indices in one pair of brackets are not supported");
    parse_expect(p, ']');
    return node;
}

static struct node *parse_dot(struct parser *p, struct node *of)
{
    struct node *node = node_new(p, N_ATTRIBUTE);
    enum token_type type = (++p->token)->type;
    if (type != T_INTEGER && type != T_NAME) parse_fail(p, "expected name or number");
    node->a = of;
    node->value = p->token->value;
    if (type == T_INTEGER) { // a.0 is a[0]
        node->kind = N_ITEM;
        node->b = node_new(p, N_CONST);
        node->b->value = node->value;
    }
    p->token++;
    return node;
}

// What may follow: .a [b] (c), or, `filtered`, |a(b), is c, (d).
static struct node *parse_behind(struct parser *p, struct node *node, bool filtered)
{
    for (;;) {
        enum token_type type = p->token->type;
        if (type == '(')
            node = parse_arguments(p, node_pair(p, N_CALL, 0, node, NULL));
        else if (!filtered && type == '.')
            node = parse_dot(p, node);
        else if (!filtered && type == '[')
            node = parse_brackets(p, node);
        else if (filtered && type == '|')
            node = parse_filters(p, node, false);
        else if (filtered && token_is(p, "is"))
            node = parse_test(p, node);
        else
            return node;
    }
}

// ---- literals, names and tuples -----------------------------------------------------------------

static struct node *parse_name(struct parser *p)
{
    static const struct value constants[] = {
        {.kind = V_BOOL, .truth = true}, {.kind = V_BOOL, .truth = false}, {.kind = V_NONE}};
    struct node *node = parse_value(p, N_NAME);
    int constant = string_word(node->value.string, "true false none True False None");
    // macros around note what their bodies ask for beyond their parameters
    int extra = string_word(node->value.string, MACRO_EXTRAS);
    for (struct function *f = extra >= 0 ? p->function : NULL; f; f = f->outer)
        f->node->op |= 1 << extra;
    if (constant < 0) return node;
    node->kind = N_CONST;
    node->value = constants[constant % 3];
    return node;
}

// Strings that follow each other are one.
static struct node *parse_string(struct parser *p)
{
    struct node *node = parse_value(p, N_CONST);
    if (p->token->type != T_STRING) return node;
    put_string(p->run, node->value.string);
    while (p->token->type == T_STRING) put_string(p->run, p->token++->value.string);
    node->value = text_end(p->run, 0, false);
    return node;
}

static struct node *parse_items(struct parser *p, enum node_kind kind, enum token_type end)
{
    struct node *node = node_new(p, kind);
    p->token++;
    while (parse_more(p, end, node->items.n == 0, true)) {
        node_add(p, &node->items, parse_expression(p));
        if (kind != N_DICT) continue;
        parse_expect(p, ':');
        node_add(p, &node->others, parse_expression(p));
    }
    p->token++;
    return node;
}

// Of items that `parse` reads, up to what ends an expression or to a name `end` too (NULL: none);
// one without a comma is itself.
static struct node *parse_tuple(struct parser *p, struct node *(*parse)(struct parser *p),
                                bool may_be_empty, const char *end)
{
    bool tuple = false;
    struct node *node = node_new(p, N_TUPLE);
    parse_deeper(p);
    for (;;) {
        enum token_type type = p->token->type;
        if (type == T_PRINT_END || type == T_BLOCK_END || type == ')') break;
        if (end && token_is(p, end)) break;
        node_add(p, &node->items, parse(p));
        if (!skip_token(p, ',')) break;
        tuple = true;
    }
    p->run->depth--;
    if (tuple || (node->items.n == 0 && may_be_empty)) return node;
    if (node->items.n == 0) parse_unexpected(p, "an expression");
    return node->items.nodes[0];
}

static struct node *parse_primary(struct parser *p)
{
    enum token_type type = p->token->type;
    if (type == T_NAME) return parse_name(p);
    if (type == T_STRING) return parse_string(p);
    if (type == T_INTEGER || type == T_FLOAT) return parse_value(p, N_CONST);
    if (type == '[') return parse_items(p, N_LIST, ']');
    if (type == '{') return parse_items(p, N_DICT, '}');
    if (!skip_token(p, '(')) parse_unexpected(p, "an expression");
    struct node *node = parse_tuple(p, parse_expression, true, NULL);
    parse_expect(p, ')');
    return node;
}

// ---- operators ----------------------------------------------------------------------------------

// By one table of how tightly each binds (a Pratt parser). The order is that of Jinja's own parser,
// which is not quite Python's: "~" binds between "+" and "*", "**" to the left, a minus before
// filters.
enum level {
    LEVEL_NONE,
    LEVEL_OR,
    LEVEL_AND,
    LEVEL_NOT,
    LEVEL_COMPARE,
    LEVEL_SUM,
    LEVEL_CONCAT,
    LEVEL_PRODUCT,
    LEVEL_POWER
};

static const struct binary {
    enum level level;
    enum node_kind kind;
} binaries[] = {
    [OP_OR] = {LEVEL_OR, N_LOGIC},        [OP_AND] = {LEVEL_AND, N_LOGIC},
    [OP_IN] = {LEVEL_COMPARE, N_COMPARE}, [OP_NOT_IN] = {LEVEL_COMPARE, N_COMPARE},
    [T_EQ] = {LEVEL_COMPARE, N_COMPARE},  [T_NE] = {LEVEL_COMPARE, N_COMPARE},
    ['>'] = {LEVEL_COMPARE, N_COMPARE},   [T_GE] = {LEVEL_COMPARE, N_COMPARE},
    ['<'] = {LEVEL_COMPARE, N_COMPARE},   [T_LE] = {LEVEL_COMPARE, N_COMPARE},
    ['+'] = {LEVEL_SUM, N_BINARY},        ['-'] = {LEVEL_SUM, N_BINARY},
    ['~'] = {LEVEL_CONCAT, N_CONCAT},     ['*'] = {LEVEL_PRODUCT, N_BINARY},
    ['/'] = {LEVEL_PRODUCT, N_BINARY},    [T_FLOORDIV] = {LEVEL_PRODUCT, N_BINARY},
    ['%'] = {LEVEL_PRODUCT, N_BINARY},    [T_POW] = {LEVEL_POWER, N_BINARY},
};

// The operator that the current token is or, with "not" and "in", begins; none has LEVEL_NONE.
static enum token_type operator_here(const struct parser *p)
{
    const struct token *t = p->token;
    if (t->type != T_NAME) return t->type;
    if (token_is(p, "not") && t[1].type == T_NAME && value_is(t[1].value, "in")) return OP_NOT_IN;
    int word = string_word(t->value.string, "in and or");
    return word < 0 ? T_NAME : (enum token_type[]){OP_IN, OP_AND, OP_OR}[word];
}

static struct node *parse_unary(struct parser *p, bool with_filters)
{
    struct node *node;
    enum token_type sign = p->token->type;
    parse_deeper(p);
    if (sign == '-' || sign == '+') {
        node = node_new(p, N_SIGN);
        node->op = sign;
        p->token++;
        node->a = parse_unary(p, false);
    } else {
        node = parse_primary(p);
    }
    p->run->depth--;
    node = parse_behind(p, node, false);
    return with_filters ? parse_behind(p, node, true) : node;
}

// Operators that bind as `level` does or more tightly. a < b < c and a ~ b ~ c are one node each.
static struct node *parse_binary(struct parser *p, enum level level)
{
    struct node *left, *chain = NULL;
    if (level <= LEVEL_NOT && token_is(p, "not")) {
        left = node_new(p, N_NOT);
        p->token++;
        parse_deeper(p);
        left->a = parse_binary(p, LEVEL_NOT);
        p->run->depth--;
    } else {
        left = parse_unary(p, true);
    }
    for (enum token_type op; binaries[op = operator_here(p)].level >= level;) {
        const struct binary *b = &binaries[op];
        p->token += op == OP_NOT_IN ? 2 : 1;
        struct node *right = parse_binary(p, b->level + 1);
        if (b->kind != N_COMPARE && b->kind != N_CONCAT) {
            left = node_pair(p, b->kind, op, left, right);
            continue;
        }
        if (left != chain || chain->kind != b->kind)
            left = chain = node_pair(p, b->kind, 0, left, NULL);
        node_add(p, &chain->items, node_pair(p, N_OPERAND, op, right, NULL));
    }
    return left;
}

// An expression without "if".
static struct node *parse_or(struct parser *p)
{
    return parse_binary(p, LEVEL_OR);
}

static struct node *parse_expression(struct parser *p)
{
    const struct node *unknown = p->unknown;
    parse_deeper(p);
    struct node *node = parse_or(p);
    bool conditional = token_is(p, "if");
    while (skip_name(p, "if")) {
        node = node_pair(p, N_CONDITION, 0, parse_or(p), node);
        if (skip_name(p, "else")) node->c = parse_expression(p);
    }
    p->run->depth--;
    if (conditional) p->unknown = unknown; // what is never reached is never missed
    return node;
}

static struct node *parse_expressions(struct parser *p)
{
    return parse_tuple(p, parse_expression, false, NULL);
}

// ---- bodies -------------------------------------------------------------------------------------

static struct node *parse_statement(struct parser *p);

// Up to one of `ends`, the current token then; NULL: to the end of the template.
static struct node_list parse_until(struct parser *p, const char *ends)
{
    struct node_list body = {NULL, 0, 0};
    const char *outer = p->ends;
    p->ends = ends;
    parse_deeper(p);
    for (;;) {
        if (p->token->type == T_END && ends)
            parse_fail(p, "Unexpected end of template; one of these tags is missing: %s", ends);
        if (p->token->type == T_END) break;
        if (p->token->type == T_DATA) {
            node_add(p, &body, parse_value(p, N_DATA));
        } else if (p->token->type == T_PRINT_BEGIN) {
            struct node *node = node_add(p, &body, parse_value(p, N_PRINT));
            node_add(p, &node->items, parse_expressions(p));
            parse_expect(p, T_PRINT_END);
        } else {
            p->token++;
            bool name = p->token->type == T_NAME;
            if (ends && name && string_word(p->token->value.string, ends) >= 0) break;
            node_add(p, &body, parse_statement(p));
            parse_expect(p, T_BLOCK_END);
        }
    }
    p->run->depth--;
    p->ends = outer;
    return body;
}

// The body of a statement: behind the "%}" of its tag.
static struct node_list parse_body(struct parser *p, const char *ends)
{
    skip_token(p, ':');
    parse_expect(p, T_BLOCK_END);
    return parse_until(p, ends);
}

// The same with one end, which is skipped. `apart`: loops around it do not reach into it.
static void parse_whole_body(struct parser *p, const char *end, struct node *node, bool apart)
{
    int n_loops = p->n_loops;
    if (apart) p->n_loops = 0;
    node->body = parse_body(p, end);
    p->n_loops = n_loops;
    p->token++;
}

// ---- assignments --------------------------------------------------------------------------------

// Of `set`, where a.b is a target too.
static struct node *parse_set_target(struct parser *p)
{
    bool is_name = p->token->type == T_NAME;
    struct node *node = parse_primary(p);
    if (!is_name || node->kind != N_NAME || !skip_token(p, '.')) return node;
    node = node_pair(p, N_NAMESPACE_NAME, 0, node, NULL);
    node->value = parse_expect(p, T_NAME)->value;
    return node;
}

// `of_loop`: `loop` is the loop's own and cannot be a target.
static void check_target(const struct parser *p, const struct node *target, bool of_loop)
{
    for (size_t i = 0; target->kind == N_TUPLE && i < target->items.n; i++)
        check_target(p, target->items.nodes[i], of_loop);
    if (target->kind != N_TUPLE && target->kind != N_NAME && target->kind != N_NAMESPACE_NAME)
        fail_at(p->run, target->place, "can't assign to this");
    if (of_loop && target->kind == N_NAME && value_is(target->value, "loop"))
        fail_at(p->run, target->place, "Can't assign to special loop variable in for-loop target");
}

static struct node *parse_targets(struct parser *p, struct node *(*parse)(struct parser *p),
                                  const char *end)
{
    struct node *target = parse_tuple(p, parse, false, end);
    check_target(p, target, end != NULL);
    return target;
}

static void parse_set(struct parser *p, struct node *node)
{
    node->a = parse_targets(p, parse_set_target, NULL);
    if (skip_token(p, '=')) {
        node->b = parse_expressions(p);
        return;
    }
    struct node *text = node_new(p, N_CAPTURE);
    node->b = parse_filters(p, text, false);
    parse_whole_body(p, "endset", text, false);
}

static void parse_with(struct parser *p, struct node *node)
{
    while (parse_more(p, T_BLOCK_END, node->items.n == 0, false)) {
        node_add(p, &node->items, parse_targets(p, parse_primary, NULL));
        parse_expect(p, '=');
        node_add(p, &node->others, parse_expression(p));
    }
    parse_whole_body(p, "endwith", node, false);
}

// ---- branches and loops -------------------------------------------------------------------------

static void parse_if(struct parser *p, struct node *node)
{
    const struct node *unknown = p->unknown;
    for (bool more = true, other = false; more; p->token++) {
        struct node *branch = node_add(p, &node->items, node_new(p, N_BRANCH));
        if (!other) branch->a = parse_tuple(p, parse_or, false, NULL);
        branch->body = parse_body(p, other ? "endif" : "elif else endif");
        more = !token_is(p, "endif");
        other = token_is(p, "else");
    }
    p->unknown = unknown; // what is never reached is never missed
}

// x.content, x["content"] or content, filtered or not.
static bool is_content(const struct node *node)
{
    while (node->kind == N_FILTER) node = node->a;
    if (node->kind == N_ITEM)
        return node->b->kind == N_CONST && value_is(node->b->value, "content");
    return (node->kind == N_ATTRIBUTE || node->kind == N_NAME) && value_is(node->value, "content");
}

static void parse_for(struct parser *p, struct node *node)
{
    node->a = parse_targets(p, parse_primary, "in");
    if (!skip_name(p, "in")) parse_unexpected(p, "'in'");
    node->b = parse_tuple(p, parse_or, false, "recursive");
    p->loops_over_content |= is_content(node->b);
    if (skip_name(p, "if")) node->c = parse_expression(p);
    node->op = skip_name(p, "recursive");
    p->n_loops++;
    node->body = parse_body(p, "else endfor");
    p->n_loops--;
    if (skip_name(p, "else")) node->items = parse_body(p, "endfor");
    p->token++; // endfor
}

static void parse_loop_control(struct parser *p, struct node *node)
{
    if (p->n_loops == 0)
        fail_at(p->run, node->place, "'%s' outside of a loop",
                node->kind == N_BREAK ? "break" : "continue");
}

// ---- macros and other statements ----------------------------------------------------------------

static void parse_parameters(struct parser *p, struct node_list *list)
{
    parse_expect(p, '(');
    while (parse_more(p, ')', list->n == 0, false)) {
        parse_named(p, list);
        if (list->n > 1 && !list->nodes[list->n - 1]->a && list->nodes[list->n - 2]->a)
            parse_fail(p, "non-default argument follows default argument");
    }
    p->token++;
}

// A macro, a call block or `generation`, with which transformers marks what the assistant says: the
// text is the same.
static void parse_macro(struct parser *p, struct node *node)
{
    struct function function = {node, p->function};
    if (node->kind == N_MACRO) node->value = parse_expect(p, T_NAME)->value;
    if (node->kind == N_MACRO || (node->kind == N_CALL_BLOCK && p->token->type == '('))
        parse_parameters(p, &node->others);
    if (node->kind == N_CALL_BLOCK && (node->a = parse_expression(p))->kind != N_CALL)
        fail_at(p->run, node->place, "expected call");
    p->function = &function;
    parse_whole_body(p,
                     node->kind == N_MACRO        ? "endmacro"
                     : node->kind == N_CALL_BLOCK ? "endcall"
                                                  : "endgeneration",
                     node, true);
    p->function = function.outer;
    for (size_t i = 0; i < node->others.n; i++) {
        int extra = string_word(node->others.nodes[i]->value.string, MACRO_EXTRAS);
        if (extra >= 0) node->op &= ~(1 << extra);
    }
}

static void parse_filter_block(struct parser *p, struct node *node)
{
    struct node *text = node_new(p, N_CAPTURE);
    node_add(p, &node->items, parse_filters(p, text, true));
    parse_whole_body(p, "endfilter", text, false);
}

static void parse_print(struct parser *p, struct node *node)
{
    while (parse_more(p, T_BLOCK_END, node->items.n == 0, false))
        node_add(p, &node->items, parse_expression(p));
}

static void parse_block(struct parser *p, struct node *node)
{
    const struct string *name = parse_expect(p, T_NAME)->value.string;
    node->op = skip_name(p, "scoped");
    skip_name(p, "required");
    parse_whole_body(p, "endblock", node, true);
    if (p->token->type == T_NAME && string_equal(p->token->value.string, name)) p->token++;
}

// There is no other template that could be named: Jinja fails where such a tag is reached.
static void parse_other_template(struct parser *p, struct node *node)
{
    (void)node;
    while (p->token->type != T_BLOCK_END && p->token->type != T_END) p->token++;
}

static const struct statement {
    const char *name;
    enum node_kind kind;
    void (*parse)(struct parser *p, struct node *node); // behind the name
} statements[] = {
    {"if", N_IF, parse_if},
    {"for", N_FOR, parse_for},
    {"set", N_SET, parse_set},
    {"macro", N_MACRO, parse_macro},
    {"call", N_CALL_BLOCK, parse_macro},
    {"filter", N_PRINT, parse_filter_block},
    {"with", N_WITH, parse_with},
    {"print", N_PRINT, parse_print},
    {"generation", N_WITH, parse_macro},
    {"block", N_BLOCK, parse_block},
    {"break", N_BREAK, parse_loop_control},
    {"continue", N_CONTINUE, parse_loop_control},
    {"include", N_OTHER_TEMPLATE, parse_other_template},
    {"import", N_OTHER_TEMPLATE, parse_other_template},
    {"from", N_OTHER_TEMPLATE, parse_other_template},
    {"extends", N_OTHER_TEMPLATE, parse_other_template},
};

static struct node *parse_statement(struct parser *p)
{
    if (p->token->type != T_NAME) parse_unexpected(p, "a tag name");
    if (token_is(p, "autoescape")) parse_fail(p, "the tag 'autoescape' is not supported");
    for (size_t i = 0; i < sizeof statements / sizeof *statements; i++) {
        if (!token_is(p, statements[i].name)) continue;
        struct node *node = node_new(p, statements[i].kind);
        p->token++;
        statements[i].parse(p, node);
        return node;
    }
    parse_fail(p, "Encountered unknown tag '%s'%s%s", SHOWN(p->token->value.string),
               p->ends ? "; what may stand here besides statements is " : "",
               p->ends ? p->ends : "");
}

struct node_list parser_run(struct render *r, const struct token *tokens,
                            bool *ret_loops_over_content)
{
    struct parser p = {.run = r, .token = tokens};
    struct node_list body = parse_until(&p, NULL);
    if (p.unknown)
        fail_at(r, p.unknown->place, "No %s named '%s'.",
                p.unknown->kind == N_FILTER ? "filter" : "test", SHOWN(p.unknown->value.string));
    *ret_loops_over_content = p.loops_over_content;
    return body;
}
