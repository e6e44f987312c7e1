/* parser.c: statements. A statement's parser stands at its name and ends at its "%}"; bodies are
 * read up to a tag that ends them. Depth is bounded. Any thread, each on its own arena. */
#include "common/jinja/parser.h"
#include <stdio.h>

// ---- tokens and nodes ---------------------------------------------------------------------------

void parse_unexpected(const struct parser *p, const char *wanted)
{
    const struct token *t = p->token;
    if (t->type == T_END) parse_fail(p, "unexpected end of template, expected %s", wanted);
    if (t->type == T_NAME) parse_fail(p, "expected %s, got '%.*s'", wanted, SHOWN(t->value.string));
    parse_fail(p, "expected %s, got '%s'", wanted, token_words(t->type));
}

bool token_is(const struct parser *p, const char *name)
{
    return p->token->type == T_NAME && value_is(p->token->value, name);
}

bool skip_name(struct parser *p, const char *name)
{
    bool is = token_is(p, name);
    p->token += is;
    return is;
}

bool skip_token(struct parser *p, enum token_type type)
{
    bool is = p->token->type == type;
    p->token += is;
    return is;
}

const struct token *parse_expect(struct parser *p, enum token_type type)
{
    char wanted[80];
    snprintf(wanted, sizeof wanted, "'%s'", token_words(type));
    if (p->token->type != type) parse_unexpected(p, wanted);
    return p->token++;
}

bool parse_more(struct parser *p, enum token_type end, bool first, bool trailing)
{
    if (p->token->type == end) return false;
    if (!first) parse_expect(p, T_COMMA);
    return !trailing || p->token->type != end;
}

void parse_deeper(struct parser *p)
{
    if (++p->depth > MAX_NESTING)
        parse_fail(p, "nested deeper than %d levels, which is the limit", MAX_NESTING);
}

struct node *node_new(struct parser *p, enum node_kind kind)
{
    struct node *node = arena_alloc(p->arena, sizeof *node);
    node->kind = kind;
    node->line = p->token->line;
    node->column = p->token->column;
    return node;
}

struct node *node_pair(struct parser *p, enum node_kind kind, int op, struct node *a,
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

void node_add(struct parser *p, struct node_list *list, struct node *node)
{
    list->nodes = arena_room(p->arena, list->nodes, list->n, &list->cap, sizeof *list->nodes);
    list->nodes[list->n++] = node;
}

void named_add(struct parser *p, struct named_list *list)
{
    const struct token *name = parse_expect(p, T_NAME);
    struct node *value = skip_token(p, T_ASSIGN) ? parse_expression(p) : NULL;
    for (size_t i = 0; i < list->n; i++)
        if (string_equal(list->items[i].name.string, name->value.string))
            place_fail(p->arena, name->line, name->column, "the name '%.*s' is given twice",
                       SHOWN(name->value.string));
    list->items = arena_room(p->arena, list->items, list->n, &list->cap, sizeof *list->items);
    list->items[list->n++] = (struct named_node){name->value, value};
}

// ---- bodies -------------------------------------------------------------------------------------

static struct node *parse_statement(struct parser *p);

static struct node *parse_output(struct parser *p)
{
    bool data = p->token->type == T_DATA;
    struct node *node = node_new(p, data ? N_DATA : N_PRINT);
    node->value = p->token++->value;
    if (!data) {
        node_add(p, &node->items, parse_tuple(p, TUPLE_OF_EXPRESSIONS, NULL));
        parse_expect(p, T_PRINT_END);
    }
    return node;
}

// Up to one of `ends`, the current token then; NULL: to the end of the template.
static struct node_list parse_until(struct parser *p, const char *ends)
{
    struct node_list body = {NULL, 0, 0};
    const char *outer = p->ends;
    p->ends = ends;
    parse_deeper(p);
    while (p->token->type != T_END) {
        if (p->token->type != T_BLOCK_BEGIN) {
            node_add(p, &body, parse_output(p));
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

static void check_target(const struct parser *p, const struct node *target)
{
    for (size_t i = 0; target->kind == N_TUPLE && i < target->items.n; i++)
        check_target(p, target->items.nodes[i]);
    if (target->kind != N_TUPLE && target->kind != N_NAME && target->kind != N_NAMESPACE_NAME)
        place_fail(p->arena, target->line, target->column, "can't assign to this");
}

static struct node *parse_targets(struct parser *p, enum tuple_mode mode, const char *end)
{
    struct node *target = parse_tuple(p, mode, end);
    check_target(p, target);
    return target;
}

static void parse_set(struct parser *p, struct node *node)
{
    node->a = parse_targets(p, TUPLE_OF_TARGETS_AND_NAMESPACES, NULL);
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
        node_add(p, &node->items, parse_targets(p, TUPLE_OF_TARGETS, NULL));
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

// `loop` is the loop's own and cannot be a target.
static void check_loop_target(const struct parser *p, const struct node *target)
{
    for (size_t i = 0; i < target->items.n; i++) check_loop_target(p, target->items.nodes[i]);
    if (target->kind == N_NAME && value_is(target->value, "loop"))
        place_fail(p->arena, target->line, target->column,
                   "Can't assign to special loop variable in for-loop target");
}

static void parse_for(struct parser *p, struct node *node)
{
    node->a = parse_targets(p, TUPLE_OF_TARGETS, "in");
    check_loop_target(p, node->a);
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

static void add_parameter(struct parser *p, struct named_list *list)
{
    named_add(p, list);
    if (list->n > 1 && !list->items[list->n - 1].value && list->items[list->n - 2].value)
        parse_fail(p, "non-default argument follows default argument");
}

static void parse_parameters(struct parser *p, struct macro_node *macro)
{
    parse_expect(p, T_LPAREN);
    while (parse_more(p, T_RPAREN, macro->parameters.n == 0, false))
        add_parameter(p, &macro->parameters);
    p->token++;
}

// Of a macro or a call block: loops around it do not reach into it.
static void parse_function_body(struct parser *p, const char *end, struct node *node)
{
    const int max = (int)(sizeof p->function / sizeof *p->function);
    int n_loops = p->n_loops;
    if (p->n_functions == max) parse_fail(p, "macros are nested deeper than %d levels", max);
    p->function[p->n_functions++] = node->macro;
    p->n_loops = 0;
    parse_whole_body(p, end, node);
    p->n_loops = n_loops;
    p->n_functions--;
    for (size_t i = 0; i < node->macro->parameters.n; i++) {
        int extra = string_word(node->macro->parameters.items[i].name.string, MACRO_EXTRAS);
        if (extra >= 0) node->macro->uses[extra] = false;
    }
}

static void parse_macro(struct parser *p, struct node *node)
{
    node->value = parse_expect(p, T_NAME)->value;
    node->macro = arena_alloc(p->arena, sizeof *node->macro);
    parse_parameters(p, node->macro);
    parse_function_body(p, "endmacro", node);
}

static void parse_call_block(struct parser *p, struct node *node)
{
    node->macro = arena_alloc(p->arena, sizeof *node->macro);
    if (p->token->type == T_LPAREN) parse_parameters(p, node->macro);
    node->a = parse_expression(p);
    if (node->a->kind != N_CALL) place_fail(p->arena, node->line, node->column, "expected call");
    parse_function_body(p, "endcall", node);
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

// transformers marks with it what the assistant says; the text is the same. It is a call of a macro
// made of its body.
static void parse_generation(struct parser *p, struct node *node)
{
    node->macro = arena_alloc(p->arena, sizeof *node->macro);
    parse_function_body(p, "endgeneration", node);
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
    {"call", N_CALL_BLOCK, parse_call_block},
    {"filter", N_PRINT, parse_filter_block},
    {"with", N_WITH, parse_with},
    {"print", N_PRINT, parse_print},
    {"generation", N_WITH, parse_generation},
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
                            bool *ret_loops_over_content)
{
    struct parser p = {.arena = a, .token = tokens.tokens};
    struct node_list body = parse_until(&p, NULL);
    if (p.unknown)
        place_fail(a, p.unknown->line, p.unknown->column, "No %s named '%.*s'.",
                   p.unknown->kind == N_FILTER ? "filter" : "test", SHOWN(p.unknown->value.string));
    *ret_loops_over_content = p.loops_over_content;
    return body;
}
