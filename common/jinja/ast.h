/* ast.h: the tree of a parsed template. One kind of node for all: `a`, `b`, `c`, `items` and
 * `others` mean what the table says. Nodes live in the template's arena and never change. */
#ifndef COMMON_JINJA_AST_H
#define COMMON_JINJA_AST_H

#include "common/jinja/lexer.h"

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
    N_CALL,      // a(call)
    N_FILTER,    // a|value(call)
    N_TEST,      // a is value(call)
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
    N_MACRO,      // value: its name; macro, body
    N_CALL_BLOCK, // a: the call; macro: of the body
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

struct named_node {
    struct value name;
    struct node *value; // of a macro's parameter: its default, NULL: none
};
struct named_list { // no two have the same name
    struct named_node *items;
    size_t n, cap;
};

struct call_node {
    struct node_list positional;
    struct named_list keywords;
    struct node *star, *star_star; // *a, **a; NULL: none
};

struct macro_node {
    struct named_list parameters;
    bool uses[3]; // which of MACRO_EXTRAS the body asks for that are not among its parameters
};
#define MACRO_EXTRAS "caller kwargs varargs"
enum { EXTRA_CALLER, EXTRA_KWARGS, EXTRA_VARARGS };

// Operators are token types, and these.
enum { OP_IN = T_SEMICOLON + 1, OP_NOT_IN, OP_AND, OP_OR };

struct node {
    enum node_kind kind;
    int op;
    int line, column;
    struct value value;
    struct node *a, *b, *c;
    struct node_list items, others, body;
    struct call_node *call;
    const struct builtin *function; // of N_FILTER, N_TEST; NULL: there is none of that name
    struct macro_node *macro;
};

#endif
