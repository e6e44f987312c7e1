/* math_expr.h: a mathematical expression in LaTeX, or as people type it, as a tree. Pure functions
 * on text. */
#ifndef TRAINER_MATH_EXPR_H
#define TRAINER_MATH_EXPR_H

#include <stdbool.h>
#include <stddef.h>

enum math_kind {
    MATH_NUMBER,   // name: its digits, with a '.' where it is a decimal
    MATH_SYMBOL,   // name: a letter, a Greek one, with its subscript ("a_3"); pi, e and i too
    MATH_TEXT,     // name: words of \text{...}
    MATH_CALL,     // name(args)
    MATH_SUM,      // args
    MATH_PRODUCT,  // args
    MATH_QUOTIENT, // of two
    MATH_POWER,    // of two
    MATH_NEGATIVE, // of one
    MATH_EITHER,   // + or -: of one; of two: their sum or difference
    MATH_PERCENT,  // of one
    MATH_RELATION, // of two; name: = < > <= >= != ~ in; a chain is a MATH_CHAIN of relations
    MATH_CHAIN,
    MATH_LIST, // args; open and close: ( [ { and their like, or 0 where it stands bare
    MATH_UNION,
    MATH_INTERSECTION,
    MATH_DIFFERENCE, // of two sets
    MATH_MATRIX,     // args: rows, MATH_LISTs
    MATH_INFINITY,
    MATH_EMPTY, // the empty set
};

#define MATH_NAME 64
struct math_node {
    enum math_kind kind;
    char name[MATH_NAME];
    char open, close;
    int n;
    struct math_node *first, *last, *next; // args, and the next of the parent's
};

struct math_arena; // of all nodes of a tree

// NULL where the text is no expression, or is deeper or longer than any answer is. The tree lives
// until math_arena_free(), which takes NULL.
struct math_arena *math_arena_new(void);
void math_arena_free(struct math_arena *arena);
const struct math_node *math_parse(struct math_arena *arena, const char *text, size_t len);

#endif
