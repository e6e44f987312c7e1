/* parser.c: tokens to a tree: expressions, of operators and what they stand between, then
 * statements. A statement's parser stands at its name and ends at its "%}"; bodies are read up to a
 * tag that ends them. Depth is bounded. Any thread, each on its own arena. */
#include "common/text/jinja/run.h"
#include <stdio.h>

#define MAX_NESTING 200 // of expressions and of statements

struct parser {
    struct arena *arena;
    struct token *token;       // the current one; the stream ends on T_END
    int depth;                 // of MAX_NESTING
    int n_loops;               // around, within the same function: for break and continue
    struct node *function[64]; // macros around, the innermost last
    int n_functions;
    const char *ends; // tags that may end the block being read, as errors name them; NULL: none
    const struct node *unknown; // a filter or test that is not there, outside of any condition
    bool loops_over_content;
    const struct builtin *const *builtins; // tables, up to a NULL
};

// At the current token.
#define parse_fail(p, ...) place_fail((p)->arena, (p)->token->line, (p)->token->column, __VA_ARGS__)

enum tuple_mode {
    TUPLE_OF_EXPRESSIONS,
    TUPLE_WITHOUT_CONDITIONS,
    TUPLE_IN_PARENTHESES,
    TUPLE_OF_TARGETS,
    TUPLE_OF_TARGETS_AND_NAMESPACES, // a.b is a target too
};

static struct node *parse_expression(struct parser *p);
static struct node *parse_primary(struct parser *p);
static struct node *parse_behind(struct parser *p, struct node *node, bool filtered);
static struct node *parse_tuple(struct parser *p, enum tuple_mode mode, const char *end);

// ---- tokens and nodes ---------------------------------------------------------------------------

static _Noreturn void parse_unexpected(const struct parser *p, const char *wanted)
{
    const struct token *t = p->token;
    if (t->type == T_END) parse_fail(p, "unexpected end of template, expected %s", wanted);
    if (t->type == T_NAME) parse_fail(p, "expected %s, got '%.*s'", wanted, SHOWN(t->value.string));
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
    if (!first) parse_expect(p, T_COMMA);
    return !trailing || p->token->type != end;
}

// The caller takes it back: p->depth--.
static void parse_deeper(struct parser *p)
{
    if (++p->depth > MAX_NESTING)
        parse_fail(p, "nested deeper than %d levels, which is the limit", MAX_NESTING);
}

static struct node *node_new(struct parser *p, enum node_kind kind)
{
    struct node *node = arena_alloc(p->arena, sizeof *node);
    node->kind = kind;
    node->line = p->token->line;
    node->column = p->token->column;
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
    node->line = a->line;
    node->column = a->column;
    return node;
}

static void node_add(struct parser *p, struct node_list *list, struct node *node)
{
    list->nodes = arena_room(p->arena, list->nodes, list->n, &list->cap, sizeof *list->nodes);
    list->nodes[list->n++] = node;
}

// A name, at the current token, and behind a "=" its value; no two have the same name.
static void named_add(struct parser *p, struct node_list *list)
{
    struct node *node = node_new(p, N_NAMED);
    node->value = parse_expect(p, T_NAME)->value;
    if (skip_token(p, T_ASSIGN)) node->a = parse_expression(p);
    for (size_t i = 0; i < list->n; i++)
        if (string_equal(list->nodes[i]->value.string, node->value.string))
            place_fail(p->arena, node->line, node->column, "the name '%.*s' is given twice",
                       SHOWN(node->value.string));
    node_add(p, list, node);
}

// ---- what expressions are made of: literals, names, and what may follow them --------------------

// ---- calls --------------------------------------------------------------------------------------

static void parse_argument(struct parser *p, struct node *call)
{
    bool closed = call->b || call->c;
    if (!closed && skip_token(p, T_MUL))
        call->b = parse_expression(p);
    else if (!call->c && skip_token(p, T_POW))
        call->c = parse_expression(p);
    else if (p->token->type == T_NAME && p->token[1].type == T_ASSIGN && !call->c)
        named_add(p, &call->others);
    else if (closed || call->others.n > 0)
        parse_fail(p, "invalid syntax for function call expression");
    else
        node_add(p, &call->items, parse_expression(p));
}

static void parse_arguments(struct parser *p, struct node *call)
{
    parse_expect(p, T_LPAREN);
    for (bool first = true; parse_more(p, T_RPAREN, first, true); first = false)
        parse_argument(p, call);
    parse_expect(p, T_RPAREN);
}

static struct node *parse_call(struct parser *p, struct node *function)
{
    struct node *node = node_pair(p, N_CALL, 0, function, NULL);
    parse_arguments(p, node);
    return node;
}

// ---- filters and tests --------------------------------------------------------------------------

static struct value parse_filter_name(struct parser *p)
{
    struct value name = parse_expect(p, T_NAME)->value;
    if (p->token->type == T_DOT) parse_fail(p, "no filter or test has a dot in its name");
    return name;
}

// Filters from here on, of `input`. `first`: at a name, not at its "|".
static struct node *parse_filters(struct parser *p, struct node *input, bool first)
{
    for (; first || p->token->type == T_PIPE; first = false) {
        if (!first) p->token++;
        struct node *node = node_new(p, N_FILTER);
        node->a = input;
        node->value = parse_filter_name(p);
        node->function = builtin_find(p->builtins, FILTER, node->value.string);
        if (!node->function) p->unknown = node;
        if (p->token->type == T_LPAREN) parse_arguments(p, node);
        input = node;
    }
    return input;
}

static struct node *parse_test(struct parser *p, struct node *tested)
{
    p->token++; // "is"
    struct node *node = node_new(p, N_TEST);
    bool negated = skip_name(p, "not");
    node->a = tested;
    node->value = parse_filter_name(p);
    node->function = builtin_find(p->builtins, TEST, node->value.string);
    if (!node->function) p->unknown = node;
    enum token_type type = p->token->type;
    bool argument = type == T_STRING || type == T_INTEGER || type == T_FLOAT ||
                    type == T_LBRACKET || type == T_LBRACE; // "x is divisibleby 3"
    if (type == T_NAME)
        argument = !token_is(p, "else") && !token_is(p, "or") && !token_is(p, "and");
    if (type == T_LPAREN) {
        parse_arguments(p, node);
    } else if (argument) {
        if (token_is(p, "is")) parse_fail(p, "You cannot chain multiple tests with is");
        node_add(p, &node->items, parse_behind(p, parse_primary(p), false));
    }
    return negated ? node_pair(p, N_NOT, 0, node, NULL) : node;
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

// What may follow: .a [b] (c), or, `filtered`, |a(b), is c, (d).
static struct node *parse_behind(struct parser *p, struct node *node, bool filtered)
{
    for (;;) {
        enum token_type type = p->token->type;
        if (type == T_LPAREN)
            node = parse_call(p, node);
        else if (!filtered && type == T_DOT)
            node = parse_dot(p, node);
        else if (!filtered && type == T_LBRACKET)
            node = parse_brackets(p, node);
        else if (filtered && type == T_PIPE)
            node = parse_filters(p, node, false);
        else if (filtered && token_is(p, "is"))
            node = parse_test(p, node);
        else
            return node;
    }
}

// ---- literals and names -------------------------------------------------------------------------

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
        // macros around note what their bodies ask for beyond their parameters
        int extra = string_word(node->value.string, MACRO_EXTRAS);
        for (int i = 0; extra >= 0 && i < p->n_functions; i++) p->function[i]->op |= 1 << extra;
    }
    return node;
}

// Of an assignment.
static struct node *parse_target(struct parser *p, bool namespaces)
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

static struct node *parse_primary(struct parser *p)
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

// ---- operators ----------------------------------------------------------------------------------

// By one table of how tightly each binds (a Pratt parser). The order is that of Jinja's own parser,
// which is not quite Python's: "~" binds between "+" and "*", "**" to the left, a minus before
// filters.
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

static struct node *parse_expression(struct parser *p)
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

// Ends before a name `end` too (NULL: none).
static struct node *parse_tuple(struct parser *p, enum tuple_mode mode, const char *end)
{
    bool tuple = false;
    struct node *node = node_new(p, N_TUPLE);
    parse_deeper(p);
    while (!ends_tuple(p, end)) {
        bool targets = mode == TUPLE_OF_TARGETS || mode == TUPLE_OF_TARGETS_AND_NAMESPACES;
        struct node *item = targets ? parse_target(p, mode == TUPLE_OF_TARGETS_AND_NAMESPACES)
                            : mode == TUPLE_WITHOUT_CONDITIONS ? parse_binary(p, LEVEL_OR)
                                                               : parse_expression(p);
        node_add(p, &node->items, item);
        if (!skip_token(p, T_COMMA)) break;
        tuple = true;
    }
    p->depth--;
    if (tuple) return node;
    if (node->items.n > 0) return node->items.nodes[0];
    if (mode != TUPLE_IN_PARENTHESES) parse_unexpected(p, "an expression");
    return node;
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
    while (p->token->type != T_END) {
        if (p->token->type != T_BLOCK_BEGIN) {
            bool data = p->token->type == T_DATA;
            struct node *node = node_new(p, data ? N_DATA : N_PRINT);
            node->value = p->token++->value;
            node_add(p, &body, node);
            if (data) continue;
            node_add(p, &node->items, parse_tuple(p, TUPLE_OF_EXPRESSIONS, NULL));
            parse_expect(p, T_PRINT_END);
            continue;
        }
        p->token++;
        if (ends && p->token->type == T_NAME && string_word(p->token->value.string, ends) >= 0)
            break;
        node_add(p, &body, parse_statement(p));
        parse_expect(p, T_BLOCK_END);
    }
    if (ends && p->token->type == T_END)
        parse_fail(p, "Unexpected end of template; one of these tags is missing: %s", ends);
    p->depth--;
    p->ends = outer;
    return body;
}

// The body of a statement: behind the "%}" of its tag.
static struct node_list parse_body(struct parser *p, const char *ends)
{
    skip_token(p, T_COLON);
    parse_expect(p, T_BLOCK_END);
    return parse_until(p, ends);
}

// The same with one end, which is skipped.
static void parse_whole_body(struct parser *p, const char *end, struct node *node)
{
    node->body = parse_body(p, end);
    p->token++;
}

// ---- assignments --------------------------------------------------------------------------------

// `of_loop`: `loop` is the loop's own and cannot be a target.
static void check_target(const struct parser *p, const struct node *target, bool of_loop)
{
    for (size_t i = 0; target->kind == N_TUPLE && i < target->items.n; i++)
        check_target(p, target->items.nodes[i], of_loop);
    if (target->kind != N_TUPLE && target->kind != N_NAME && target->kind != N_NAMESPACE_NAME)
        place_fail(p->arena, target->line, target->column, "can't assign to this");
    if (of_loop && target->kind == N_NAME && value_is(target->value, "loop"))
        place_fail(p->arena, target->line, target->column,
                   "Can't assign to special loop variable in for-loop target");
}

static struct node *parse_targets(struct parser *p, enum tuple_mode mode, bool of_loop)
{
    struct node *target = parse_tuple(p, mode, of_loop ? "in" : NULL);
    check_target(p, target, of_loop);
    return target;
}

static void parse_set(struct parser *p, struct node *node)
{
    node->a = parse_targets(p, TUPLE_OF_TARGETS_AND_NAMESPACES, false);
    if (skip_token(p, T_ASSIGN)) {
        node->b = parse_tuple(p, TUPLE_OF_EXPRESSIONS, NULL);
        return;
    }
    struct node *text = node_new(p, N_CAPTURE);
    node->b = parse_filters(p, text, false);
    parse_whole_body(p, "endset", text);
}

static void parse_with(struct parser *p, struct node *node)
{
    while (parse_more(p, T_BLOCK_END, node->items.n == 0, false)) {
        node_add(p, &node->items, parse_targets(p, TUPLE_OF_TARGETS, false));
        parse_expect(p, T_ASSIGN);
        node_add(p, &node->others, parse_expression(p));
    }
    parse_whole_body(p, "endwith", node);
}

// ---- branches and loops -------------------------------------------------------------------------

static void parse_if(struct parser *p, struct node *node)
{
    const struct node *unknown = p->unknown;
    for (bool more = true, other = false; more; p->token++) {
        struct node *branch = node_new(p, N_BRANCH);
        if (!other) branch->a = parse_tuple(p, TUPLE_WITHOUT_CONDITIONS, NULL);
        branch->body = parse_body(p, other ? "endif" : "elif else endif");
        node_add(p, &node->items, branch);
        more = !token_is(p, "endif");
        other = token_is(p, "else");
    }
    p->unknown = unknown; // what is never reached is never missed
}

// x.content, x["content"] or content, filtered or not.
static bool is_content(const struct node *node)
{
    while (node->kind == N_FILTER) node = node->a;
    struct value name =
        node->kind == N_ITEM && node->b->kind == N_CONST ? node->b->value : node->value;
    bool names = node->kind == N_ITEM || node->kind == N_ATTRIBUTE || node->kind == N_NAME;
    return names && value_is(name, "content");
}

static void parse_for(struct parser *p, struct node *node)
{
    node->a = parse_targets(p, TUPLE_OF_TARGETS, true);
    if (!skip_name(p, "in")) parse_unexpected(p, "'in'");
    node->b = parse_tuple(p, TUPLE_WITHOUT_CONDITIONS, "recursive");
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
        place_fail(p->arena, node->line, node->column, "'%s' outside of a loop",
                   node->kind == N_BREAK ? "break" : "continue");
}

// ---- macros -------------------------------------------------------------------------------------

static void parse_parameters(struct parser *p, struct node_list *list)
{
    parse_expect(p, T_LPAREN);
    while (parse_more(p, T_RPAREN, list->n == 0, false)) {
        named_add(p, list);
        if (list->n > 1 && !list->nodes[list->n - 1]->a && list->nodes[list->n - 2]->a)
            parse_fail(p, "non-default argument follows default argument");
    }
    p->token++;
}

// A macro, a call block or `generation`, with which transformers marks what the assistant says: the
// text is the same. Loops around it do not reach into it.
static void parse_macro(struct parser *p, struct node *node)
{
    const int max = (int)(sizeof p->function / sizeof *p->function), n_loops = p->n_loops;
    const char *end = "endgeneration";
    if (node->kind == N_MACRO) {
        end = "endmacro";
        node->value = parse_expect(p, T_NAME)->value;
        parse_parameters(p, &node->others);
    } else if (node->kind == N_CALL_BLOCK) {
        end = "endcall";
        if (p->token->type == T_LPAREN) parse_parameters(p, &node->others);
        node->a = parse_expression(p);
        if (node->a->kind != N_CALL)
            place_fail(p->arena, node->line, node->column, "expected call");
    }
    if (p->n_functions == max) parse_fail(p, "macros are nested deeper than %d levels", max);
    p->function[p->n_functions++] = node;
    p->n_loops = 0;
    parse_whole_body(p, end, node);
    p->n_loops = n_loops;
    p->n_functions--;
    for (size_t i = 0; i < node->others.n; i++) {
        int extra = string_word(node->others.nodes[i]->value.string, MACRO_EXTRAS);
        if (extra >= 0) node->op &= ~(1 << extra);
    }
}

// ---- other statements ---------------------------------------------------------------------------

static void parse_filter_block(struct parser *p, struct node *node)
{
    struct node *text = node_new(p, N_CAPTURE);
    node_add(p, &node->items, parse_filters(p, text, true));
    parse_whole_body(p, "endfilter", text);
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
    int n_loops = p->n_loops;
    p->n_loops = 0;
    parse_whole_body(p, "endblock", node);
    p->n_loops = n_loops;
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
    parse_fail(p, "Encountered unknown tag '%.*s'%s%s", SHOWN(p->token->value.string),
               p->ends ? "; what may stand here besides statements is " : "",
               p->ends ? p->ends : "");
}

struct node_list parser_run(struct arena *a, struct token_stream tokens,
                            const struct builtin *const *builtins, bool *ret_loops_over_content)
{
    struct parser p = {.arena = a, .token = tokens.tokens, .builtins = builtins};
    struct node_list body = parse_until(&p, NULL);
    if (p.unknown)
        place_fail(a, p.unknown->line, p.unknown->column, "No %s named '%.*s'.",
                   p.unknown->kind == N_FILTER ? "filter" : "test", SHOWN(p.unknown->value.string));
    *ret_loops_over_content = p.loops_over_content;
    return body;
}
