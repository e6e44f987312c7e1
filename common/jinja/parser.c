/* parser.c: statements. A statement's parser stands at its name and ends at its "%}"; bodies are
 * read up to a tag that ends them. Depth is bounded. Any thread, each on its own arena. */
#include "common/jinja/parser.h"
#include <stdarg.h>
#include <stdio.h>

// ---- tokens and nodes ---------------------------------------------------------------------------

enum status parse_fail(const struct parser *p, const char *format, ...)
{
    char words[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    return place_error(p->token->line, p->token->column, "%s", words);
}

enum status parse_unexpected(const struct parser *p, const char *wanted)
{
    const struct token *t = p->token;
    if (t->type == T_END) return parse_fail(p, "unexpected end of template, expected %s", wanted);
    if (t->type == T_NAME)
        return parse_fail(p, "expected %s, got '%.*s'", wanted,
                          (int)(t->value.string->n_bytes < 60 ? t->value.string->n_bytes : 60),
                          t->value.string->data);
    return parse_fail(p, "expected %s, got '%s'", wanted, token_words(t->type));
}

bool token_is(const struct parser *p, const char *name)
{
    return p->token->type == T_NAME && value_is(&p->token->value, name);
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

enum status parse_expect(struct parser *p, enum token_type type, struct token *ret)
{
    char wanted[80];
    snprintf(wanted, sizeof wanted, "'%s'", token_words(type));
    if (p->token->type != type) return parse_unexpected(p, wanted);
    if (ret) *ret = *p->token;
    p->token++;
    return ST_OK;
}

static enum status parse_expect_name(struct parser *p, const char *name)
{
    char wanted[80];
    snprintf(wanted, sizeof wanted, "'%s'", name);
    return skip_name(p, name) ? ST_OK : parse_unexpected(p, wanted);
}

enum status parse_deeper(struct parser *p)
{
    if (++p->depth > MAX_NESTING)
        return parse_fail(p, "nested deeper than %d levels, which is the limit", MAX_NESTING);
    return ST_OK;
}

struct node *node_new(struct parser *p, enum node_kind kind)
{
    struct node *node = arena_alloc(p->arena, sizeof *node);
    if (!node) return NULL;
    node->kind = kind;
    node->line = p->token->line;
    node->column = p->token->column;
    return node;
}

enum status node_add(struct parser *p, struct node_list *list, struct node *node)
{
    if (list->n == list->cap) {
        int cap = list->cap ? 2 * list->cap : 2;
        struct node **larger = arena_array(p->arena, (size_t)cap, sizeof *larger);
        if (!larger) return ST_NO_MEMORY;
        if (list->n > 0) memcpy(larger, list->nodes, (size_t)list->n * sizeof *larger);
        list->nodes = larger;
        list->cap = cap;
    }
    list->nodes[list->n++] = node;
    return ST_OK;
}

// ---- bodies -------------------------------------------------------------------------------------

static enum status parse_statement(struct parser *p, struct node **ret);

// One of the names in `ends` ("elif else endif").
static bool is_end(const struct parser *p, const char *ends)
{
    if (!ends || p->token->type != T_NAME) return false;
    const struct string *name = p->token->value.string;
    for (const char *at = ends; *at;) {
        size_t n = strcspn(at, " ");
        if (n == name->n_bytes && memcmp(at, name->data, n) == 0) return true;
        at += n + (at[n] == ' ');
    }
    return false;
}

static enum status add_output(struct parser *p, struct node_list *body)
{
    enum status st;
    bool data = p->token->type == T_DATA;
    struct node *node = node_new(p, data ? N_DATA : N_PRINT), *value;
    if (!node) return ST_NO_MEMORY;
    node->value = p->token->value;
    p->token++;
    if (!data) {
        CHECK(parse_tuple(p, TUPLE_OF_EXPRESSIONS, NULL, false, &value));
        CHECK(node_add(p, &node->items, value));
        CHECK(parse_expect(p, T_PRINT_END, NULL));
    }
    st = node_add(p, body, node);
out:
    return st;
}

// Up to one of `ends`, the current token then; NULL: to the end of the template.
static enum status parse_until(struct parser *p, const char *ends, struct node_list *ret)
{
    enum status st;
    const char *outer = p->ends;
    p->ends = ends;
    CHECK(parse_deeper(p));
    while (p->token->type != T_END) {
        struct node *node = NULL;
        if (p->token->type != T_BLOCK_BEGIN) {
            CHECK(add_output(p, ret));
            continue;
        }
        p->token++;
        if (is_end(p, ends)) break;
        CHECK(parse_statement(p, &node));
        CHECK(node_add(p, ret, node));
        CHECK(parse_expect(p, T_BLOCK_END, NULL));
    }
    if (ends && p->token->type == T_END)
        return parse_fail(p, "Unexpected end of template; one of these tags is missing: %s", ends);
    p->depth--;
    p->ends = outer;
out:
    return st;
}

// The body of a statement: behind the "%}" of its tag.
static enum status parse_body(struct parser *p, const char *ends, struct node_list *ret)
{
    enum status st;
    skip_token(p, T_COLON);
    CHECK(parse_expect(p, T_BLOCK_END, NULL));
    CHECK(parse_until(p, ends, ret));
out:
    return st;
}

// The same with one end, which is skipped.
static enum status parse_whole_body(struct parser *p, const char *end, struct node_list *ret)
{
    enum status st = parse_body(p, end, ret);
    if (st == ST_OK) p->token++;
    return st;
}

// ---- assignments --------------------------------------------------------------------------------

static enum status check_target(const struct parser *p, const struct node *target)
{
    if (target->kind == N_TUPLE) {
        for (int i = 0; i < target->items.n; i++) {
            enum status st = check_target(p, target->items.nodes[i]);
            if (st != ST_OK) return st;
        }
        return ST_OK;
    }
    if (target->kind != N_NAME && target->kind != N_NAMESPACE_NAME)
        return place_error(target->line, target->column, "can't assign to this");
    return ST_OK;
}

static enum status parse_target(struct parser *p, const char *end, bool namespaces,
                                struct node **ret)
{
    enum status st = parse_tuple(p, TUPLE_OF_TARGETS, end, namespaces, ret);
    return st == ST_OK ? check_target(p, *ret) : st;
}

static enum status parse_set(struct parser *p, struct node *node)
{
    enum status st;
    CHECK(parse_target(p, NULL, true, &node->a));
    if (skip_token(p, T_ASSIGN)) return parse_tuple(p, TUPLE_OF_EXPRESSIONS, NULL, false, &node->b);
    node->kind = N_SET_BLOCK;
    CHECK(parse_filters(p, NULL, false, &node->b));
    CHECK(parse_whole_body(p, "endset", &node->body));
out:
    return st;
}

static enum status parse_with(struct parser *p, struct node *node)
{
    enum status st = ST_OK;
    struct node *target, *value;
    while (p->token->type != T_BLOCK_END) {
        if (node->items.n > 0) CHECK(parse_expect(p, T_COMMA, NULL));
        CHECK(parse_target(p, NULL, false, &target));
        CHECK(parse_expect(p, T_ASSIGN, NULL));
        CHECK(parse_expression(p, &value));
        CHECK(node_add(p, &node->items, target));
        CHECK(node_add(p, &node->others, value));
    }
    CHECK(parse_whole_body(p, "endwith", &node->body));
out:
    return st;
}

// ---- branches and loops -------------------------------------------------------------------------

static enum status parse_if(struct parser *p, struct node *node)
{
    enum status st;
    const struct node *unknown = p->unknown;
    for (bool more = true, other = false; more;) {
        struct node *branch = node_new(p, N_BRANCH);
        if (!branch) return ST_NO_MEMORY;
        if (!other) CHECK(parse_tuple(p, TUPLE_WITHOUT_CONDITIONS, NULL, false, &branch->a));
        CHECK(parse_body(p, other ? "endif" : "elif else endif", &branch->body));
        CHECK(node_add(p, &node->items, branch));
        more = !token_is(p, "endif");
        other = token_is(p, "else");
        p->token++;
    }
    p->unknown = unknown; // what is never reached is never missed
out:
    return st;
}

// x.content, x["content"] or content, filtered or not.
static bool is_content(const struct node *node)
{
    while (node->kind == N_FILTER && node->a) node = node->a;
    const struct value *name =
        node->kind == N_ITEM && node->b->kind == N_CONST ? &node->b->value : &node->value;
    bool names = node->kind == N_ITEM || node->kind == N_ATTRIBUTE || node->kind == N_NAME;
    return names && value_is(name, "content");
}

// `loop` is the loop's own and cannot be a target.
static enum status check_loop_target(const struct parser *p, const struct node *target)
{
    enum status st = ST_OK;
    for (int i = 0; st == ST_OK && i < target->items.n; i++)
        st = check_loop_target(p, target->items.nodes[i]);
    if (target->kind == N_NAME && value_is(&target->value, "loop"))
        return place_error(target->line, target->column,
                           "Can't assign to special loop variable in for-loop target");
    return st;
}

static enum status parse_for(struct parser *p, struct node *node)
{
    enum status st;
    CHECK(parse_target(p, "in", false, &node->a));
    CHECK(check_loop_target(p, node->a));
    CHECK(parse_expect_name(p, "in"));
    CHECK(parse_tuple(p, TUPLE_WITHOUT_CONDITIONS, "recursive", false, &node->b));
    p->loops_over_content |= is_content(node->b);
    if (skip_name(p, "if")) CHECK(parse_expression(p, &node->c));
    node->op = skip_name(p, "recursive");
    p->n_loops++;
    CHECK(parse_body(p, "else endfor", &node->body));
    p->n_loops--;
    if (token_is(p, "else")) {
        p->token++;
        CHECK(parse_body(p, "endfor", &node->items));
    }
    p->token++; // endfor
out:
    return st;
}

static enum status parse_loop_control(struct parser *p, struct node *node)
{
    if (p->n_loops == 0)
        return place_error(node->line, node->column, "'%s' outside of a loop",
                           node->kind == N_BREAK ? "break" : "continue");
    return ST_OK;
}

// ---- macros -------------------------------------------------------------------------------------

static enum status add_parameter(struct parser *p, struct macro_node *macro)
{
    enum status st;
    struct token name = {.type = T_END};
    struct node *otherwise = NULL;
    CHECK(parse_expect(p, T_NAME, &name));
    if (skip_token(p, T_ASSIGN))
        CHECK(parse_expression(p, &otherwise));
    else if (macro->n > 0 && macro->parameters[macro->n - 1].otherwise)
        return parse_fail(p, "non-default argument follows default argument");
    for (int i = 0; i < macro->n; i++)
        if (string_equal(macro->parameters[i].name.string, name.value.string))
            return place_error(name.line, name.column, "two parameters have the same name");
    if (macro->n == macro->cap) {
        int cap = macro->cap ? 2 * macro->cap : 4;
        struct parameter *larger = arena_array(p->arena, (size_t)cap, sizeof *larger);
        if (!larger) return ST_NO_MEMORY;
        if (macro->n > 0) memcpy(larger, macro->parameters, (size_t)macro->n * sizeof *larger);
        macro->parameters = larger;
        macro->cap = cap;
    }
    macro->parameters[macro->n++] = (struct parameter){name.value, otherwise};
out:
    return st;
}

static enum status parse_parameters(struct parser *p, struct macro_node *macro)
{
    enum status st;
    CHECK(parse_expect(p, T_LPAREN, NULL));
    while (p->token->type != T_RPAREN) {
        if (macro->n > 0) CHECK(parse_expect(p, T_COMMA, NULL));
        CHECK(add_parameter(p, macro));
    }
    p->token++;
out:
    return st;
}

// Of a macro or a call block: loops around it do not reach into it.
static enum status parse_function_body(struct parser *p, const char *end, struct node *node)
{
    const int most = (int)(sizeof p->function / sizeof *p->function);
    int n_loops = p->n_loops;
    if (p->n_functions == most)
        return parse_fail(p, "macros are nested deeper than %d levels", most);
    p->function[p->n_functions++] = node->macro;
    p->n_loops = 0;
    enum status st = parse_whole_body(p, end, &node->body);
    p->n_loops = n_loops;
    p->n_functions--;
    for (int i = 0; i < node->macro->n; i++) {
        const struct value *name = &node->macro->parameters[i].name;
        if (value_is(name, "caller")) node->macro->uses_caller = false;
        if (value_is(name, "kwargs")) node->macro->uses_kwargs = false;
        if (value_is(name, "varargs")) node->macro->uses_varargs = false;
    }
    return st;
}

static enum status parse_macro(struct parser *p, struct node *node)
{
    enum status st;
    struct token name = {.type = T_END};
    CHECK(parse_expect(p, T_NAME, &name));
    node->value = name.value;
    node->macro = arena_alloc(p->arena, sizeof *node->macro);
    if (!node->macro) return ST_NO_MEMORY;
    CHECK(parse_parameters(p, node->macro));
    CHECK(parse_function_body(p, "endmacro", node));
out:
    return st;
}

static enum status parse_call_block(struct parser *p, struct node *node)
{
    enum status st;
    node->macro = arena_alloc(p->arena, sizeof *node->macro);
    if (!node->macro) return ST_NO_MEMORY;
    if (p->token->type == T_LPAREN) CHECK(parse_parameters(p, node->macro));
    CHECK(parse_expression(p, &node->a));
    if (node->a->kind != N_CALL) return place_error(node->line, node->column, "expected call");
    CHECK(parse_function_body(p, "endcall", node));
out:
    return st;
}

// ---- the rest -----------------------------------------------------------------------------------

static enum status parse_filter_block(struct parser *p, struct node *node)
{
    enum status st = parse_filters(p, NULL, true, &node->a);
    return st == ST_OK ? parse_whole_body(p, "endfilter", &node->body) : st;
}

static enum status parse_print(struct parser *p, struct node *node)
{
    enum status st = ST_OK;
    struct node *value;
    while (p->token->type != T_BLOCK_END) {
        if (node->items.n > 0) CHECK(parse_expect(p, T_COMMA, NULL));
        CHECK(parse_expression(p, &value));
        CHECK(node_add(p, &node->items, value));
    }
out:
    return st;
}

// transformers marks with it what the assistant says; the text is the same. It is a call of a macro
// made of its body.
static enum status parse_generation(struct parser *p, struct node *node)
{
    node->macro = arena_alloc(p->arena, sizeof *node->macro);
    if (!node->macro) return ST_NO_MEMORY;
    return parse_function_body(p, "endgeneration", node);
}

static enum status parse_block(struct parser *p, struct node *node)
{
    enum status st;
    struct token name = {.type = T_END};
    CHECK(parse_expect(p, T_NAME, &name));
    node->op = skip_name(p, "scoped");
    skip_name(p, "required");
    int n_loops = p->n_loops;
    p->n_loops = 0;
    CHECK(parse_whole_body(p, "endblock", &node->body));
    p->n_loops = n_loops;
    if (p->token->type == T_NAME && string_equal(p->token->value.string, name.value.string))
        p->token++;
out:
    return st;
}

// There is no other template that could be named: Jinja fails where such a tag is reached.
static enum status parse_other_template(struct parser *p, struct node *node)
{
    node->value = p->token[-1].value;
    while (p->token->type != T_BLOCK_END && p->token->type != T_END) p->token++;
    return ST_OK;
}

static const struct statement {
    const char *name;
    enum node_kind kind;
    enum status (*parse)(struct parser *p, struct node *node); // behind the name
} statements[] = {
    {"if", N_IF, parse_if},
    {"for", N_FOR, parse_for},
    {"set", N_SET, parse_set},
    {"macro", N_MACRO, parse_macro},
    {"call", N_CALL_BLOCK, parse_call_block},
    {"filter", N_FILTER_BLOCK, parse_filter_block},
    {"with", N_WITH, parse_with},
    {"print", N_PRINT, parse_print},
    {"generation", N_SCOPE, parse_generation},
    {"block", N_BLOCK, parse_block},
    {"break", N_BREAK, parse_loop_control},
    {"continue", N_CONTINUE, parse_loop_control},
    {"include", N_OTHER_TEMPLATE, parse_other_template},
    {"import", N_OTHER_TEMPLATE, parse_other_template},
    {"from", N_OTHER_TEMPLATE, parse_other_template},
    {"extends", N_OTHER_TEMPLATE, parse_other_template},
};

static enum status parse_statement(struct parser *p, struct node **ret)
{
    if (p->token->type != T_NAME) return parse_unexpected(p, "a tag name");
    if (token_is(p, "autoescape")) return parse_fail(p, "the tag 'autoescape' is not supported");
    for (size_t i = 0; i < sizeof statements / sizeof *statements; i++) {
        if (!token_is(p, statements[i].name)) continue;
        struct node *node = node_new(p, statements[i].kind);
        if (!node) return ST_NO_MEMORY;
        p->token++;
        *ret = node;
        return statements[i].parse(p, node);
    }
    const struct string *name = p->token->value.string;
    int n = name->n_bytes < 60 ? (int)name->n_bytes : 60;
    if (p->ends)
        return parse_fail(p,
                          "Encountered unknown tag '%.*s'; what may stand here besides "
                          "statements is %s",
                          n, name->data, p->ends);
    return parse_fail(p, "Encountered unknown tag '%.*s'", n, name->data);
}

enum status parser_run(struct arena *a, struct token_stream tokens, struct node_list *ret_body,
                       bool *ret_loops_over_content)
{
    struct parser p = {.arena = a, .token = tokens.tokens};
    enum status st = parse_until(&p, NULL, ret_body);
    if (st == ST_OK && p.unknown) {
        const struct string *name = p.unknown->value.string;
        return place_error(p.unknown->line, p.unknown->column, "No %s named '%.*s'.",
                           p.unknown->kind == N_FILTER ? "filter" : "test",
                           (int)(name->n_bytes < 100 ? name->n_bytes : 100), name->data);
    }
    *ret_loops_over_content = p.loops_over_content;
    return st;
}
