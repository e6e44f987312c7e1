/* syntax.h: a template's text to tokens (lexer.c), and tokens to a tree (parser.c). A fault leaves
 * with fail(), run.at being its place. Any thread, each on its own run; a tree never changes. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_TEXT_JINJA_SYNTAX_H
#define COMMON_TEXT_JINJA_SYNTAX_H

#include "common/text/jinja/run.h"

// A token of one character is that character; these are the others. Name, what errors call it.
#define TOKEN_TABLE(X)                                                                             \
    X(T_DATA, "template data")                                                                     \
    X(T_PRINT_BEGIN, "begin of print statement")                                                   \
    X(T_PRINT_END, "end of print statement")                                                       \
    X(T_BLOCK_BEGIN, "begin of statement block")                                                   \
    X(T_BLOCK_END, "end of statement block")                                                       \
    X(T_NAME, "name")                                                                              \
    X(T_STRING, "string")                                                                          \
    X(T_INTEGER, "integer")                                                                        \
    X(T_FLOAT, "float")                                                                            \
    X(T_FLOORDIV, "//")                                                                            \
    X(T_POW, "**")                                                                                 \
    X(T_EQ, "==")                                                                                  \
    X(T_NE, "!=")                                                                                  \
    X(T_GE, ">=")                                                                                  \
    X(T_LE, "<=")                                                                                  \
    /* operators that are names, and so no tokens */                                               \
    X(OP_IN, "in")                                                                                 \
    X(OP_NOT_IN, "not in")                                                                         \
    X(OP_AND, "and")                                                                               \
    X(OP_OR, "or")

enum token_type {
    T_END,
    T_CHARACTERS = 255, // the last of those
#define X(name, words) name,
    TOKEN_TABLE(X)
#undef X
};

struct token {
    enum token_type type;
    struct position place; // of its first character
    struct value value;    // text of T_DATA, T_NAME and T_STRING; the number of the others
};

const char *token_words(enum token_type type);

// Tokens up to a T_END, in the run's memory.
struct token *lexer_run(struct render *r, const char *text, size_t len);

// ---- the tree -----------------------------------------------------------------------------------

// One kind of node for all: `a`, `b`, `c`, `items` and `others` mean what the table says.
enum node_kind {
    // expressions
    N_CONST,     // value
    N_NAME,      // value: its text
    N_LIST,      // items
    N_TUPLE,     // items
    N_DICT,      // items: keys, others: values
    N_ATTRIBUTE, // a.value
    N_ITEM,      // a[b]
    N_SLICE,     // a[items[0]:items[1]:items[2]], each may be NULL
    N_CALL,      // a(items, others: N_NAMED, *b, **c); b and c may be NULL
    N_FILTER,    // a|value(the same)
    N_TEST,      // a is value(the same)
    N_NAMED,     // value: its name; a, NULL: of a parameter without a default
    N_NOT,       // a
    N_SIGN,      // op a: T_ADD, T_SUB
    N_LOGIC,     // a op b: OP_AND, OP_OR
    N_BINARY,    // a op b
    N_CONCAT,    // a, then items: N_OPERAND
    N_COMPARE,   // a, then items: N_OPERAND
    N_OPERAND,   // op a
    N_CONDITION, // b if a else c; c may be NULL
    N_CAPTURE,   // the text of body
    // targets of assignments: N_NAME, N_TUPLE and
    N_NAMESPACE_NAME, // a (N_NAME).value
    // statements
    N_DATA,       // value: the text
    N_PRINT,      // items
    N_IF,         // items: N_BRANCH
    N_BRANCH,     // a: its test, NULL for else; body
    N_FOR,        // for a in b if c; body, items: the else branch; op: recursive
    N_SET,        // a = b
    N_MACRO,      // value: its name; others: parameters, N_NAMED; op: what body uses; body
    N_CALL_BLOCK, // a: the call; others, op, body: of the macro that it makes
    N_WITH,       // items = others, body; without items a scope alone
    N_BLOCK,      // body, which sees the template's own variables only
    N_BREAK,
    N_CONTINUE,
    N_OTHER_TEMPLATE, // include, import, ...: an error where it is reached
};

struct node_list {
    struct node **nodes;
    size_t n, cap;
};

// What a macro's body may ask for beyond its parameters, and bits of those that it does ask for.
#define MACRO_EXTRAS "caller kwargs varargs"
enum { USES_CALLER = 1, USES_KWARGS = 2, USES_VARARGS = 4 };

struct node {
    enum node_kind kind;
    int op;
    struct position place;
    struct value value;
    struct node *a, *b, *c;
    struct node_list items, others, body;
    const struct builtin *function; // of N_FILTER, N_TEST; NULL: there is none of that name
};

struct node_list parser_run(struct render *r, const struct token *tokens,
                            bool *ret_loops_over_content);

#endif
