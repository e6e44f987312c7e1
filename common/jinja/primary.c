/* primary.c: what expressions are made of: literals, names, and what may follow them: attributes,
 * subscripts, calls, filters and tests. */
#include "common/jinja/parser.h"
#include "common/jinja/run.h"

// ---- calls --------------------------------------------------------------------------------------

static void parse_argument(struct parser *p, struct call_node *call)
{
    bool closed = call->star || call->star_star;
    if (!closed && skip_token(p, T_MUL))
        call->star = parse_expression(p);
    else if (!call->star_star && skip_token(p, T_POW))
        call->star_star = parse_expression(p);
    else if (p->token->type == T_NAME && p->token[1].type == T_ASSIGN && !call->star_star)
        named_add(p, &call->keywords);
    else if (closed || call->keywords.n > 0)
        parse_fail(p, "invalid syntax for function call expression");
    else
        node_add(p, &call->positional, parse_expression(p));
}

static struct call_node *parse_arguments(struct parser *p)
{
    struct call_node *call = arena_alloc(p->arena, sizeof *call);
    parse_expect(p, T_LPAREN);
    for (bool first = true; parse_more(p, T_RPAREN, first, true); first = false)
        parse_argument(p, call);
    parse_expect(p, T_RPAREN);
    return call;
}

static struct node *parse_call(struct parser *p, struct node *function)
{
    struct node *node = node_pair(p, N_CALL, 0, function, NULL);
    node->call = parse_arguments(p);
    return node;
}

// ---- filters and tests --------------------------------------------------------------------------

static struct value parse_filter_name(struct parser *p)
{
    struct value name = parse_expect(p, T_NAME)->value;
    if (p->token->type == T_DOT) parse_fail(p, "no filter or test has a dot in its name");
    return name;
}

struct node *parse_filters(struct parser *p, struct node *input, bool first)
{
    for (; first || p->token->type == T_PIPE; first = false) {
        if (!first) p->token++;
        struct node *node = node_new(p, N_FILTER);
        node->a = input;
        node->value = parse_filter_name(p);
        node->function = builtin_find(FILTER, node->value.string);
        if (!node->function) p->unknown = node;
        if (p->token->type == T_LPAREN) node->call = parse_arguments(p);
        input = node;
    }
    return input;
}

// An argument without parentheses: "x is divisibleby 3".
static bool begins_argument(const struct parser *p)
{
    enum token_type type = p->token->type;
    if (type == T_NAME) return !token_is(p, "else") && !token_is(p, "or") && !token_is(p, "and");
    return type == T_STRING || type == T_INTEGER || type == T_FLOAT || type == T_LBRACKET ||
           type == T_LBRACE;
}

static struct node *parse_test(struct parser *p, struct node *tested)
{
    p->token++; // "is"
    struct node *node = node_new(p, N_TEST);
    bool negated = skip_name(p, "not");
    node->a = tested;
    node->value = parse_filter_name(p);
    node->function = builtin_find(TEST, node->value.string);
    if (!node->function) p->unknown = node;
    if (p->token->type == T_LPAREN) {
        node->call = parse_arguments(p);
    } else if (begins_argument(p)) {
        if (token_is(p, "is")) parse_fail(p, "You cannot chain multiple tests with is");
        node->call = arena_alloc(p->arena, sizeof *node->call);
        node_add(p, &node->call->positional, parse_postfix(p, parse_primary(p)));
    }
    return negated ? node_pair(p, N_NOT, 0, node, NULL) : node;
}

struct node *parse_filters_and_tests(struct parser *p, struct node *node)
{
    for (;;) {
        if (p->token->type == T_PIPE)
            node = parse_filters(p, node, false);
        else if (token_is(p, "is"))
            node = parse_test(p, node);
        else if (p->token->type == T_LPAREN)
            node = parse_call(p, node);
        else
            return node;
    }
}

// ---- subscripts ---------------------------------------------------------------------------------

// NULL: there is none.
static struct node *parse_slice_part(struct parser *p)
{
    enum token_type type = p->token->type;
    bool none = type == T_COLON || type == T_RBRACKET || type == T_COMMA;
    return none ? NULL : parse_expression(p);
}

// What stands in brackets behind `of`: one expression, or a slice.
static struct node *parse_brackets(struct parser *p, struct node *of)
{
    struct node *node = node_new(p, N_ITEM);
    p->token++;
    node->a = of;
    node->b = parse_slice_part(p);
    if (skip_token(p, T_COLON)) {
        node->kind = N_SLICE;
        node_add(p, &node->items, node->b);
        node_add(p, &node->items, parse_slice_part(p));
        node_add(p, &node->items, skip_token(p, T_COLON) ? parse_slice_part(p) : NULL);
    } else if (!node->b) {
        parse_unexpected(p, "an index");
    }
    if (p->token->type == T_COMMA)
        parse_fail(p, "several indices in one pair of brackets are not supported");
    parse_expect(p, T_RBRACKET);
    return node;
}

static struct node *parse_dot(struct parser *p, struct node *of)
{
    struct node *node = node_new(p, N_ATTRIBUTE);
    const struct token *name = ++p->token;
    node->a = of;
    node->value = name->value;
    if (name->type == T_INTEGER) { // a.0 is a[0]
        node->kind = N_ITEM;
        node->b = node_new(p, N_CONST);
        node->b->value = name->value;
    } else if (name->type != T_NAME) {
        parse_fail(p, "expected name or number");
    }
    p->token++;
    return node;
}

struct node *parse_postfix(struct parser *p, struct node *node)
{
    for (;;) {
        if (p->token->type == T_DOT)
            node = parse_dot(p, node);
        else if (p->token->type == T_LBRACKET)
            node = parse_brackets(p, node);
        else if (p->token->type == T_LPAREN)
            node = parse_call(p, node);
        else
            return node;
    }
}

// ---- literals and names -------------------------------------------------------------------------

// Macros around note what their bodies ask for beyond their parameters.
static void note_use(struct parser *p, struct value name)
{
    int extra = string_word(name.string, MACRO_EXTRAS);
    for (int i = 0; extra >= 0 && i < p->n_functions; i++) p->function[i]->uses[extra] = true;
}

static struct node *parse_name(struct parser *p)
{
    static const struct value constants[] = {
        {.kind = V_BOOL, .truth = true}, {.kind = V_BOOL, .truth = false}, {.kind = V_NONE}};
    struct node *node = node_new(p, N_NAME);
    node->value = p->token++->value;
    int constant = string_word(node->value.string, "true false none True False None");
    if (constant >= 0) {
        node->kind = N_CONST;
        node->value = constants[constant % 3];
    } else {
        note_use(p, node->value);
    }
    return node;
}

struct node *parse_target(struct parser *p, bool namespaces)
{
    bool is_name = p->token->type == T_NAME;
    struct node *node = parse_primary(p);
    if (!namespaces || !is_name || node->kind != N_NAME || !skip_token(p, T_DOT)) return node;
    struct value attribute = parse_expect(p, T_NAME)->value;
    node = node_pair(p, N_NAMESPACE_NAME, 0, node, NULL);
    node->value = attribute;
    return node;
}

static struct node *parse_constant(struct parser *p)
{
    struct node *node = node_new(p, N_CONST);
    node->value = p->token++->value;
    return node;
}

// Strings that follow each other are one.
static struct node *parse_string(struct parser *p)
{
    const struct token *first = p->token;
    struct node *node = parse_constant(p);
    size_t n = first->value.string->n_bytes, at = 0;
    for (; p->token->type == T_STRING; p->token++) n += p->token->value.string->n_bytes;
    if (p->token == first + 1) return node;
    char *all = arena_alloc(p->arena, n + 1);
    for (const struct token *t = first; t < p->token; t++) {
        memcpy(all + at, t->value.string->data, t->value.string->n_bytes);
        at += t->value.string->n_bytes;
    }
    node->value = string_new(p->arena, all, n, false);
    return node;
}

static struct node *parse_items(struct parser *p, enum node_kind kind, enum token_type end)
{
    struct node *node = node_new(p, kind);
    p->token++;
    while (parse_more(p, end, node->items.n == 0, true)) {
        node_add(p, &node->items, parse_expression(p));
        if (kind != N_DICT) continue;
        parse_expect(p, T_COLON);
        node_add(p, &node->others, parse_expression(p));
    }
    p->token++;
    return node;
}

struct node *parse_primary(struct parser *p)
{
    enum token_type type = p->token->type;
    if (type == T_NAME) return parse_name(p);
    if (type == T_STRING) return parse_string(p);
    if (type == T_INTEGER || type == T_FLOAT) return parse_constant(p);
    if (type == T_LBRACKET) return parse_items(p, N_LIST, T_RBRACKET);
    if (type == T_LBRACE) return parse_items(p, N_DICT, T_RBRACE);
    if (type != T_LPAREN) parse_unexpected(p, "an expression");
    p->token++;
    struct node *node = parse_tuple(p, TUPLE_IN_PARENTHESES, NULL);
    parse_expect(p, T_RPAREN);
    return node;
}
