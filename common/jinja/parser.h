/* parser.h: tokens to a tree. parser.c has statements, expression.c expressions, primary.c what
 * expressions are made of. A fault leaves with arena_fail(), its sentence beginning with the
 * place. */
#ifndef COMMON_JINJA_PARSER_H
#define COMMON_JINJA_PARSER_H

#include "common/jinja/ast.h"

#define MAX_NESTING 200 // of expressions and of statements

struct parser {
    struct arena *arena;
    struct token *token;             // the current one; the stream ends on T_END
    int depth;                       // of MAX_NESTING
    int n_loops;                     // around, within the same function: for break and continue
    struct macro_node *function[64]; // around, the innermost last
    int n_functions;
    const char *ends; // tags that may end the block being read, as errors name them; NULL: none
    const struct node *unknown; // a filter or test that is not there, outside of any condition
    bool loops_over_content;
};

struct node_list parser_run(struct arena *a, struct token_stream tokens,
                            bool *ret_loops_over_content);

// ---- tokens and nodes (parser.c) ----------------------------------------------------------------

// At the current token.
#define parse_fail(p, ...) place_fail((p)->arena, (p)->token->line, (p)->token->column, __VA_ARGS__)
_Noreturn void parse_unexpected(const struct parser *p, const char *wanted);
bool token_is(const struct parser *p, const char *name); // the current one is this name
bool skip_name(struct parser *p, const char *name);      // and beyond it if so
bool skip_token(struct parser *p, enum token_type type);
const struct token *parse_expect(struct parser *p, enum token_type type);
// Between commas, up to `end`: whether there is one more item, which is not the first. `trailing`:
// a comma may stand before the end.
bool parse_more(struct parser *p, enum token_type end, bool first, bool trailing);
void parse_deeper(struct parser *p); // one deeper; the caller takes it back: p->depth--

struct node *node_new(struct parser *p, enum node_kind kind); // at the current token
// `a` and `b` under one node, which begins where a does.
struct node *node_pair(struct parser *p, enum node_kind kind, int op, struct node *a,
                       struct node *b);
void node_add(struct parser *p, struct node_list *list, struct node *node);
// A name, at the current token, and behind a "=" its value.
void named_add(struct parser *p, struct named_list *list);

// ---- expression.c -------------------------------------------------------------------------------

enum tuple_mode {
    TUPLE_OF_EXPRESSIONS,
    TUPLE_WITHOUT_CONDITIONS,
    TUPLE_IN_PARENTHESES,
    TUPLE_OF_TARGETS,
    TUPLE_OF_TARGETS_AND_NAMESPACES, // a.b is a target too
};
// Ends before a name `end` too (NULL: none).
struct node *parse_tuple(struct parser *p, enum tuple_mode mode, const char *end);
struct node *parse_expression(struct parser *p);

// ---- primary.c ----------------------------------------------------------------------------------

// A literal, a name, or what stands in parentheses.
struct node *parse_primary(struct parser *p);
struct node *parse_target(struct parser *p, bool namespaces);              // of an assignment
struct node *parse_postfix(struct parser *p, struct node *node);           // .a [b] (c)
struct node *parse_filters_and_tests(struct parser *p, struct node *node); // |a(b), is c, (d)
// Filters from here on, of `input`. `first`: at a name, not at its "|".
struct node *parse_filters(struct parser *p, struct node *input, bool first);

#endif
