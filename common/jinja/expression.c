/* expression.c: operators, by one table of how tightly each binds (a Pratt parser). The order is
 * that of Jinja's own parser, which is not quite Python's: "~" binds between "+" and "*", "**" to
 * the left, a minus before filters. Depth is bounded. */
#include "common/jinja/parser.h"

enum level {
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
    enum token_type type;
    const char *name; // of a T_NAME
    enum level level;
    enum node_kind kind;
    int op; // 0: the token's type
} binaries[] = {
    {T_NAME, "or", LEVEL_OR, N_LOGIC, OP_OR},
    {T_NAME, "and", LEVEL_AND, N_LOGIC, OP_AND},
    {T_NAME, "in", LEVEL_COMPARE, N_COMPARE, OP_IN},
    {T_NAME, "not", LEVEL_COMPARE, N_COMPARE, OP_NOT_IN}, // before "in"
    {T_EQ, NULL, LEVEL_COMPARE, N_COMPARE, 0},
    {T_NE, NULL, LEVEL_COMPARE, N_COMPARE, 0},
    {T_GT, NULL, LEVEL_COMPARE, N_COMPARE, 0},
    {T_GE, NULL, LEVEL_COMPARE, N_COMPARE, 0},
    {T_LT, NULL, LEVEL_COMPARE, N_COMPARE, 0},
    {T_LE, NULL, LEVEL_COMPARE, N_COMPARE, 0},
    {T_ADD, NULL, LEVEL_SUM, N_BINARY, 0},
    {T_SUB, NULL, LEVEL_SUM, N_BINARY, 0},
    {T_TILDE, NULL, LEVEL_CONCAT, N_CONCAT, 0},
    {T_MUL, NULL, LEVEL_PRODUCT, N_BINARY, 0},
    {T_DIV, NULL, LEVEL_PRODUCT, N_BINARY, 0},
    {T_FLOORDIV, NULL, LEVEL_PRODUCT, N_BINARY, 0},
    {T_MOD, NULL, LEVEL_PRODUCT, N_BINARY, 0},
    {T_POW, NULL, LEVEL_POWER, N_BINARY, 0},
};

// The operator that the current token is or begins; NULL: none.
static const struct binary *binary_here(const struct parser *p)
{
    const struct token *next = p->token + 1;
    for (const struct binary *b = binaries; b < binaries + sizeof binaries / sizeof *b; b++) {
        if (b->type != p->token->type || (b->name && !token_is(p, b->name))) continue;
        if (b->op != OP_NOT_IN || (next->type == T_NAME && value_is(next->value, "in"))) return b;
    }
    return NULL;
}

static struct node *parse_unary(struct parser *p, bool with_filters)
{
    struct node *node;
    enum token_type sign = p->token->type;
    parse_deeper(p);
    if (sign == T_SUB || sign == T_ADD) {
        node = node_new(p, N_SIGN);
        node->op = sign;
        p->token++;
        node->a = parse_unary(p, false);
    } else {
        node = parse_primary(p);
    }
    p->depth--;
    node = parse_postfix(p, node);
    return with_filters ? parse_filters_and_tests(p, node) : node;
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
        p->depth--;
    } else {
        left = parse_unary(p, true);
    }
    for (const struct binary *b; (b = binary_here(p)) && b->level >= level;) {
        int op = b->op ? b->op : (int)b->type;
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

struct node *parse_expression(struct parser *p)
{
    const struct node *unknown = p->unknown;
    bool conditional = false;
    parse_deeper(p);
    struct node *node = parse_binary(p, LEVEL_OR);
    while (skip_name(p, "if")) {
        conditional = true;
        node = node_pair(p, N_CONDITION, 0, parse_binary(p, LEVEL_OR), node);
        if (skip_name(p, "else")) node->c = parse_expression(p);
    }
    p->depth--;
    if (conditional) p->unknown = unknown; // what is never reached is never missed
    return node;
}

// ---- tuples -------------------------------------------------------------------------------------

static bool ends_tuple(const struct parser *p, const char *end)
{
    enum token_type type = p->token->type;
    return type == T_PRINT_END || type == T_BLOCK_END || type == T_RPAREN ||
           (end && token_is(p, end));
}

static struct node *parse_item(struct parser *p, enum tuple_mode mode)
{
    if (mode == TUPLE_OF_TARGETS || mode == TUPLE_OF_TARGETS_AND_NAMESPACES)
        return parse_target(p, mode == TUPLE_OF_TARGETS_AND_NAMESPACES);
    return mode == TUPLE_WITHOUT_CONDITIONS ? parse_binary(p, LEVEL_OR) : parse_expression(p);
}

struct node *parse_tuple(struct parser *p, enum tuple_mode mode, const char *end)
{
    bool tuple = false;
    struct node *node = node_new(p, N_TUPLE);
    parse_deeper(p);
    while (!ends_tuple(p, end)) {
        node_add(p, &node->items, parse_item(p, mode));
        if (!skip_token(p, T_COMMA)) break;
        tuple = true;
    }
    p->depth--;
    if (tuple) return node;
    if (node->items.n > 0) return node->items.nodes[0];
    if (mode != TUPLE_IN_PARENTHESES) parse_unexpected(p, "an expression");
    return node;
}
