/* parser.h: tokens to a tree. parser.c has statements, parse_expression.c expressions. */
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

enum status parser_run(struct arena *a, struct token_stream tokens, struct node_list *ret_body,
                       bool *ret_loops_over_content);

// ---- what both files use ------------------------------------------------------------------------

enum status parse_fail(const struct parser *p, const char *format, ...)
    __attribute__((format(printf, 2, 3))); // at the current token
enum status parse_unexpected(const struct parser *p, const char *wanted);
bool token_is(const struct parser *p, const char *name); // the current one is this name
bool skip_name(struct parser *p, const char *name);      // and beyond it if so
bool skip_token(struct parser *p, enum token_type type);
enum status parse_expect(struct parser *p, enum token_type type,
                         struct token *ret); // ret may be NULL
enum status parse_deeper(struct parser *p);  // one deeper; the caller takes it back: p->depth--

// NULL where there is no memory for it; at the current token.
struct node *node_new(struct parser *p, enum node_kind kind);
enum status node_add(struct parser *p, struct node_list *list, struct node *node);

enum tuple_mode {
    TUPLE_OF_EXPRESSIONS,
    TUPLE_WITHOUT_CONDITIONS,
    TUPLE_IN_PARENTHESES,
    TUPLE_OF_TARGETS
};
// Ends before a name `end` too (NULL: none). `namespaces`: a.b is taken as a target.
enum status parse_tuple(struct parser *p, enum tuple_mode mode, const char *end, bool namespaces,
                        struct node **ret);
enum status parse_expression(struct parser *p, struct node **ret);
// Filters from here on, of `input` (NULL: the block around). `first`: at a name, not at its "|".
enum status parse_filters(struct parser *p, struct node *input, bool first, struct node **ret);

#endif
