/* parse_expression.c: recursive descent over expressions, in the order of Jinja's own parser, whose
 * precedence is not quite Python's: "~" binds between "+" and "*", "**" to the left, a minus before
 * filters. Depth is bounded. */
#include "common/jinja/parser.h"
#include "common/jinja/run.h"

static enum status parse_or(struct parser *p, struct node **ret);
static enum status parse_unary(struct parser *p, bool with_filters, struct node **ret);

static enum status pair(struct parser *p, enum node_kind kind, int op, struct node *a,
                        struct node *b, struct node **ret)
{
    struct node *node = node_new(p, kind);
    if (!node) return ST_NO_MEMORY;
    node->op = op;
    node->a = a;
    node->b = b;
    node->line = a->line;
    node->column = a->column;
    *ret = node;
    return ST_OK;
}

// ---- calls, filters, tests ----------------------------------------------------------------------

static enum status add_keyword(struct parser *p, struct call_node *call)
{
    enum status st;
    struct value name = p->token->value;
    struct node *value;
    p->token += 2;
    CHECK(parse_expression(p, &value));
    for (int i = 0; i < call->n_keywords; i++)
        if (string_equal(call->keywords[i].name.string, name.string))
            return parse_fail(p, "keyword argument repeated: %.*s",
                              (int)(name.string->n_bytes < 100 ? name.string->n_bytes : 100),
                              name.string->data);
    if (call->n_keywords == call->cap_keywords) {
        int cap = call->cap_keywords ? 2 * call->cap_keywords : 4;
        struct keyword *larger = arena_array(p->arena, (size_t)cap, sizeof *larger);
        if (!larger) return ST_NO_MEMORY;
        if (call->n_keywords > 0)
            memcpy(larger, call->keywords, (size_t)call->n_keywords * sizeof *larger);
        call->keywords = larger;
        call->cap_keywords = cap;
    }
    call->keywords[call->n_keywords++] = (struct keyword){name, value};
out:
    return st;
}

static enum status parse_argument(struct parser *p, struct call_node *call)
{
    enum status st;
    struct node *value;
    bool closed = call->star || call->star_star;
    if (p->token->type == T_MUL && !closed) {
        p->token++;
        return parse_expression(p, &call->star);
    }
    if (p->token->type == T_POW && !call->star_star) {
        p->token++;
        return parse_expression(p, &call->star_star);
    }
    if (p->token->type == T_NAME && p->token[1].type == T_ASSIGN && !call->star_star)
        return add_keyword(p, call);
    if (closed || call->n_keywords > 0)
        return parse_fail(p, "invalid syntax for function call expression");
    CHECK(parse_expression(p, &value));
    CHECK(node_add(p, &call->positional, value));
out:
    return st;
}

static enum status parse_call_arguments(struct parser *p, struct call_node **ret)
{
    enum status st;
    struct call_node *call = arena_alloc(p->arena, sizeof *call);
    if (!call) return ST_NO_MEMORY;
    CHECK(parse_expect(p, T_LPAREN, NULL));
    for (bool more = false; p->token->type != T_RPAREN; more = true) {
        if (more) {
            CHECK(parse_expect(p, T_COMMA, NULL));
            if (p->token->type == T_RPAREN) break;
        }
        CHECK(parse_argument(p, call));
    }
    CHECK(parse_expect(p, T_RPAREN, NULL));
    *ret = call;
out:
    return st;
}

static enum status parse_call(struct parser *p, struct node *function, struct node **ret)
{
    struct node *node = node_new(p, N_CALL);
    if (!node) return ST_NO_MEMORY;
    node->a = function;
    node->line = function->line;
    node->column = function->column;
    *ret = node;
    return parse_call_arguments(p, &node->call);
}

// "name" or "name.name", of a filter or a test.
static enum status parse_dotted(struct parser *p, struct value *ret)
{
    struct token token = {.type = T_END};
    enum status st = parse_expect(p, T_NAME, &token);
    *ret = token.value;
    if (st == ST_OK && p->token->type == T_DOT)
        return parse_fail(p, "no filter or test has a dot in its name");
    return st;
}

enum status parse_filters(struct parser *p, struct node *input, bool first, struct node **ret)
{
    enum status st = ST_OK;
    while (first || p->token->type == T_PIPE) {
        if (!first) p->token++;
        struct node *node = node_new(p, N_FILTER);
        if (!node) return ST_NO_MEMORY;
        node->a = input;
        CHECK(parse_dotted(p, &node->value));
        if (!filter_find(node->value.string)) p->unknown = node;
        if (p->token->type == T_LPAREN) CHECK(parse_call_arguments(p, &node->call));
        input = node;
        first = false;
    }
    *ret = input;
out:
    return st;
}

static enum status parse_postfix(struct parser *p, struct node *node, struct node **ret);
static enum status parse_primary(struct parser *p, bool namespaces, struct node **ret);

// An argument without parentheses: "x is divisibleby 3".
static bool begins_argument(const struct parser *p)
{
    switch (p->token->type) {
    case T_STRING:
    case T_INTEGER:
    case T_FLOAT:
    case T_LBRACKET:
    case T_LBRACE:
        return true;
    case T_NAME:
        return !token_is(p, "else") && !token_is(p, "or") && !token_is(p, "and");
    default:
        return false;
    }
}

static enum status parse_test(struct parser *p, struct node *tested, struct node **ret)
{
    enum status st;
    p->token++; // "is"
    struct node *node = node_new(p, N_TEST);
    if (!node) return ST_NO_MEMORY;
    bool negated = skip_name(p, "not");
    node->a = tested;
    CHECK(parse_dotted(p, &node->value));
    if (!test_find(node->value.string)) p->unknown = node;
    if (p->token->type == T_LPAREN) {
        CHECK(parse_call_arguments(p, &node->call));
    } else if (begins_argument(p)) {
        if (token_is(p, "is")) return parse_fail(p, "You cannot chain multiple tests with is");
        struct node *argument;
        node->call = arena_alloc(p->arena, sizeof *node->call);
        if (!node->call) return ST_NO_MEMORY;
        CHECK(parse_primary(p, false, &argument));
        CHECK(parse_postfix(p, argument, &argument));
        CHECK(node_add(p, &node->call->positional, argument));
    }
    *ret = node;
    if (negated) st = pair(p, N_NOT, 0, node, NULL, ret);
out:
    return st;
}

// ---- subscripts ---------------------------------------------------------------------------------

static enum status parse_slice_part(struct parser *p, struct node **ret)
{
    enum token_type type = p->token->type;
    if (type == T_COLON || type == T_RBRACKET || type == T_COMMA) return ST_OK;
    return parse_expression(p, ret);
}

// What stands in brackets behind `of`: one expression, or a slice.
static enum status parse_brackets(struct parser *p, struct node *of, struct node **ret)
{
    enum status st;
    struct node *node = node_new(p, N_ITEM), *part[3] = {NULL, NULL, NULL};
    if (!node) return ST_NO_MEMORY;
    node->a = of;
    p->token++;
    CHECK(parse_slice_part(p, &part[0]));
    if (p->token->type == T_COLON) {
        node->kind = N_SLICE;
        p->token++;
        CHECK(parse_slice_part(p, &part[1]));
        if (skip_token(p, T_COLON)) CHECK(parse_slice_part(p, &part[2]));
        for (int i = 0; i < 3; i++) CHECK(node_add(p, &node->items, part[i]));
    } else if (!part[0]) {
        return parse_unexpected(p, "an index");
    }
    if (p->token->type == T_COMMA)
        return parse_fail(p, "several indices in one pair of brackets are not supported");
    node->b = part[0];
    CHECK(parse_expect(p, T_RBRACKET, NULL));
    *ret = node;
out:
    return st;
}

static enum status parse_dot(struct parser *p, struct node *of, struct node **ret)
{
    struct node *node = node_new(p, N_ATTRIBUTE);
    if (!node) return ST_NO_MEMORY;
    const struct token *name = ++p->token;
    node->a = of;
    node->value = name->value;
    *ret = node;
    if (name->type == T_INTEGER) { // a.0 is a[0]
        node->kind = N_ITEM;
        node->b = node_new(p, N_CONST);
        if (!node->b) return ST_NO_MEMORY;
        node->b->value = name->value;
    } else if (name->type != T_NAME) {
        return parse_fail(p, "expected name or number");
    }
    p->token++;
    return ST_OK;
}

static enum status parse_postfix(struct parser *p, struct node *node, struct node **ret)
{
    enum status st = ST_OK;
    while (st == ST_OK) {
        if (p->token->type == T_DOT)
            st = parse_dot(p, node, &node);
        else if (p->token->type == T_LBRACKET)
            st = parse_brackets(p, node, &node);
        else if (p->token->type == T_LPAREN)
            st = parse_call(p, node, &node);
        else
            break;
    }
    *ret = node;
    return st;
}

static enum status parse_filters_and_tests(struct parser *p, struct node *node, struct node **ret)
{
    enum status st = ST_OK;
    while (st == ST_OK) {
        if (p->token->type == T_PIPE)
            st = parse_filters(p, node, false, &node);
        else if (token_is(p, "is"))
            st = parse_test(p, node, &node);
        else if (p->token->type == T_LPAREN)
            st = parse_call(p, node, &node);
        else
            break;
    }
    *ret = node;
    return st;
}

// ---- literals and names -------------------------------------------------------------------------

// Macros around note what their bodies ask for beyond their parameters.
static void note_use(struct parser *p, const struct value *name)
{
    for (int i = 0; i < p->n_functions; i++) {
        struct macro_node *f = p->function[i];
        f->uses_caller |= value_is(name, "caller");
        f->uses_kwargs |= value_is(name, "kwargs");
        f->uses_varargs |= value_is(name, "varargs");
    }
}

static enum status parse_name(struct parser *p, bool namespaces, struct node **ret)
{
    static const struct {
        const char *name;
        struct value value;
    } constants[] = {
        {"true", {.kind = V_BOOL, .truth = true}},
        {"True", {.kind = V_BOOL, .truth = true}},
        {"false", {.kind = V_BOOL, .truth = false}},
        {"False", {.kind = V_BOOL, .truth = false}},
        {"none", {.kind = V_NONE}},
        {"None", {.kind = V_NONE}},
    };
    struct node *node = node_new(p, N_NAME);
    if (!node) return ST_NO_MEMORY;
    node->value = p->token->value;
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (token_is(p, constants[i].name)) {
            node->kind = N_CONST;
            node->value = constants[i].value;
        }
    p->token++;
    *ret = node;
    if (node->kind == N_NAME) note_use(p, &node->value);
    if (node->kind == N_NAME && namespaces && p->token->type == T_DOT) {
        struct token attribute = {.type = T_END};
        p->token++;
        enum status st = parse_expect(p, T_NAME, &attribute);
        if (st == ST_OK) st = pair(p, N_NAMESPACE_NAME, 0, node, NULL, ret);
        if (st == ST_OK) (*ret)->value = attribute.value;
        return st;
    }
    return ST_OK;
}

// Strings that follow each other are one.
static enum status parse_string(struct parser *p, struct node **ret)
{
    struct node *node = node_new(p, N_CONST);
    const struct token *first = p->token;
    size_t n = 0, at = 0;
    if (!node) return ST_NO_MEMORY;
    *ret = node;
    node->value = first->value;
    for (; p->token->type == T_STRING; p->token++) n += p->token->value.string->n_bytes;
    if (p->token == first + 1) return ST_OK;
    char *all = arena_alloc(p->arena, n + 1);
    if (!all) return ST_NO_MEMORY;
    for (const struct token *t = first; t < p->token; t++) {
        if (t->value.string->n_bytes > 0)
            memcpy(all + at, t->value.string->data, t->value.string->n_bytes);
        at += t->value.string->n_bytes;
    }
    return string_borrow(p->arena, all, n, &node->value);
}

static enum status parse_list(struct parser *p, struct node **ret)
{
    enum status st = ST_OK;
    struct node *node = node_new(p, N_LIST), *item;
    if (!node) return ST_NO_MEMORY;
    p->token++;
    while (p->token->type != T_RBRACKET) {
        if (node->items.n > 0) CHECK(parse_expect(p, T_COMMA, NULL));
        if (p->token->type == T_RBRACKET) break;
        CHECK(parse_expression(p, &item));
        CHECK(node_add(p, &node->items, item));
    }
    p->token++;
    *ret = node;
out:
    return st;
}

static enum status parse_dict(struct parser *p, struct node **ret)
{
    enum status st = ST_OK;
    struct node *node = node_new(p, N_DICT), *key, *value;
    if (!node) return ST_NO_MEMORY;
    p->token++;
    while (p->token->type != T_RBRACE) {
        if (node->items.n > 0) CHECK(parse_expect(p, T_COMMA, NULL));
        if (p->token->type == T_RBRACE) break;
        CHECK(parse_expression(p, &key));
        CHECK(parse_expect(p, T_COLON, NULL));
        CHECK(parse_expression(p, &value));
        CHECK(node_add(p, &node->items, key));
        CHECK(node_add(p, &node->others, value));
    }
    p->token++;
    *ret = node;
out:
    return st;
}

static enum status parse_primary(struct parser *p, bool namespaces, struct node **ret)
{
    enum status st;
    switch (p->token->type) {
    case T_NAME:
        return parse_name(p, namespaces, ret);
    case T_STRING:
        return parse_string(p, ret);
    case T_INTEGER:
    case T_FLOAT: {
        struct node *node = node_new(p, N_CONST);
        if (!node) return ST_NO_MEMORY;
        node->value = p->token++->value;
        *ret = node;
        return ST_OK;
    }
    case T_LPAREN:
        p->token++;
        CHECK(parse_tuple(p, TUPLE_IN_PARENTHESES, NULL, false, ret));
        return parse_expect(p, T_RPAREN, NULL);
    case T_LBRACKET:
        return parse_list(p, ret);
    case T_LBRACE:
        return parse_dict(p, ret);
    default:
        return parse_unexpected(p, "an expression");
    }
out:
    return st;
}

// ---- operators, the tightest first --------------------------------------------------------------

static enum status parse_unary(struct parser *p, bool with_filters, struct node **ret)
{
    enum status st;
    struct node *node, *operand;
    enum token_type sign = p->token->type;
    CHECK(parse_deeper(p));
    if (sign == T_SUB || sign == T_ADD) {
        node = node_new(p, sign == T_SUB ? N_NEGATIVE : N_POSITIVE);
        if (!node) return ST_NO_MEMORY;
        p->token++;
        CHECK(parse_unary(p, false, &operand));
        node->a = operand;
    } else {
        CHECK(parse_primary(p, false, &node));
    }
    p->depth--;
    CHECK(parse_postfix(p, node, &node));
    if (with_filters) CHECK(parse_filters_and_tests(p, node, &node));
    *ret = node;
out:
    return st;
}

static enum status parse_power(struct parser *p, struct node **ret)
{
    enum status st;
    struct node *left, *right;
    CHECK(parse_unary(p, true, &left));
    while (skip_token(p, T_POW)) {
        CHECK(parse_unary(p, true, &right));
        CHECK(pair(p, N_BINARY, T_POW, left, right, &left));
    }
    *ret = left;
out:
    return st;
}

static enum status parse_product(struct parser *p, struct node **ret)
{
    enum status st;
    struct node *left, *right;
    CHECK(parse_power(p, &left));
    for (;;) {
        enum token_type op = p->token->type;
        if (op != T_MUL && op != T_DIV && op != T_FLOORDIV && op != T_MOD) break;
        p->token++;
        CHECK(parse_power(p, &right));
        CHECK(pair(p, N_BINARY, (int)op, left, right, &left));
    }
    *ret = left;
out:
    return st;
}

static enum status parse_concat(struct parser *p, struct node **ret)
{
    enum status st;
    struct node *first, *more, *node;
    CHECK(parse_product(p, &first));
    *ret = first;
    if (p->token->type != T_TILDE) return ST_OK;
    node = node_new(p, N_CONCAT);
    if (!node) return ST_NO_MEMORY;
    CHECK(node_add(p, &node->items, first));
    while (skip_token(p, T_TILDE)) {
        CHECK(parse_product(p, &more));
        CHECK(node_add(p, &node->items, more));
    }
    *ret = node;
out:
    return st;
}

static enum status parse_sum(struct parser *p, struct node **ret)
{
    enum status st;
    struct node *left, *right;
    CHECK(parse_concat(p, &left));
    while (p->token->type == T_ADD || p->token->type == T_SUB) {
        int op = (int)p->token++->type;
        CHECK(parse_concat(p, &right));
        CHECK(pair(p, N_BINARY, op, left, right, &left));
    }
    *ret = left;
out:
    return st;
}

// 0: none; the tokens of one are skipped.
static int skip_comparison(struct parser *p)
{
    enum token_type type = p->token->type;
    if (type >= T_EQ && type <= T_LE) {
        p->token++;
        return (int)type;
    }
    if (skip_name(p, "in")) return OP_IN;
    const struct token *next = p->token + 1;
    if (token_is(p, "not") && next->type == T_NAME && value_is(&next->value, "in")) {
        p->token += 2;
        return OP_NOT_IN;
    }
    return 0;
}

static enum status parse_comparison(struct parser *p, struct node **ret)
{
    enum status st;
    struct node *first, *compare = NULL, *operand;
    CHECK(parse_sum(p, &first));
    *ret = first;
    for (int op; (op = skip_comparison(p)) != 0;) {
        if (!compare) CHECK(pair(p, N_COMPARE, 0, first, NULL, &compare));
        CHECK(parse_sum(p, &operand));
        CHECK(pair(p, N_OPERAND, op, operand, NULL, &operand));
        CHECK(node_add(p, &compare->items, operand));
        *ret = compare;
    }
out:
    return st;
}

static enum status parse_not(struct parser *p, struct node **ret)
{
    enum status st;
    struct node *node, *operand;
    if (!token_is(p, "not")) return parse_comparison(p, ret);
    node = node_new(p, N_NOT);
    if (!node) return ST_NO_MEMORY;
    p->token++;
    CHECK(parse_deeper(p));
    CHECK(parse_not(p, &operand));
    p->depth--;
    node->a = operand;
    *ret = node;
out:
    return st;
}

static enum status parse_and(struct parser *p, struct node **ret)
{
    enum status st;
    struct node *left, *right;
    CHECK(parse_not(p, &left));
    while (skip_name(p, "and")) {
        CHECK(parse_not(p, &right));
        CHECK(pair(p, N_AND, 0, left, right, &left));
    }
    *ret = left;
out:
    return st;
}

static enum status parse_or(struct parser *p, struct node **ret)
{
    enum status st;
    struct node *left, *right;
    CHECK(parse_and(p, &left));
    while (skip_name(p, "or")) {
        CHECK(parse_and(p, &right));
        CHECK(pair(p, N_OR, 0, left, right, &left));
    }
    *ret = left;
out:
    return st;
}

enum status parse_expression(struct parser *p, struct node **ret)
{
    enum status st;
    struct node *node, *test;
    const struct node *unknown = p->unknown;
    bool conditional = false;
    CHECK(parse_deeper(p));
    CHECK(parse_or(p, &node));
    while (skip_name(p, "if")) {
        conditional = true;
        struct node *then = node;
        CHECK(parse_or(p, &test));
        CHECK(pair(p, N_CONDITION, 0, test, then, &node));
        if (skip_name(p, "else")) CHECK(parse_expression(p, &node->c));
    }
    p->depth--;
    if (conditional) p->unknown = unknown; // what is never reached is never missed
    *ret = node;
out:
    return st;
}

// ---- tuples -------------------------------------------------------------------------------------

static bool ends_tuple(const struct parser *p, const char *end)
{
    enum token_type type = p->token->type;
    return type == T_PRINT_END || type == T_BLOCK_END || type == T_RPAREN ||
           (end && token_is(p, end));
}

enum status parse_tuple(struct parser *p, enum tuple_mode mode, const char *end, bool namespaces,
                        struct node **ret)
{
    enum status st = ST_OK;
    bool tuple = false;
    struct node *node = node_new(p, N_TUPLE), *item;
    if (!node) return ST_NO_MEMORY;
    CHECK(parse_deeper(p));
    while (!ends_tuple(p, end)) {
        if (mode == TUPLE_OF_TARGETS)
            CHECK(parse_primary(p, namespaces, &item));
        else if (mode == TUPLE_WITHOUT_CONDITIONS)
            CHECK(parse_or(p, &item));
        else
            CHECK(parse_expression(p, &item));
        CHECK(node_add(p, &node->items, item));
        if (!skip_token(p, T_COMMA)) break;
        tuple = true;
    }
    p->depth--;
    *ret = node;
    if (tuple) return ST_OK;
    if (node->items.n > 0)
        *ret = node->items.nodes[0];
    else if (mode != TUPLE_IN_PARENTHESES)
        return parse_unexpected(p, "an expression");
out:
    return st;
}
