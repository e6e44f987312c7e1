/* math.h: mathematical answers: where one stands in a text, its expression in LaTeX, or as people
 * type it, as a tree, and whether two are the same. Pure functions on text. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_MATH_H
#define TRAINER_MATH_H

#include "common/base/bytes.h"

#include <complex.h>
#include <stdbool.h>
#include <stdint.h>

// ---- where an answer stands (math_answer.c) -----------------------------------------------------

#define MATH_ANSWERS 8

// Fills ret (zero-initialised; the caller releases all) with what may be the answer, the likeliest
// first, as an expression for math_parse(): what stands in the last \boxed{}, several near ones as
// a list; behind "final answer is"; behind "answer"; the last formula ($...$, \(...\), \[...\]) or
// number. How many.
int math_answers(const char *text, struct bytes ret[MATH_ANSWERS]);

// ---- its expression (math_parse.c) --------------------------------------------------------------

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
    MATH_RELATION, // of one, the side behind its sign; name: = < > <= >= != ~ in
    MATH_CHAIN,    // a side and the relations behind it: a < b = c
    MATH_LIST,     // args; open and close: ( [ { and their like, or 0 where it stands bare
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

// NULL where the text is no expression, or is deeper or longer than any answer is. The tree is one
// block, which the caller frees with free().
struct math_node *math_parse(const char *text, size_t len);

// ---- what it is worth (math_value.c) ------------------------------------------------------------

// Rational arithmetic is exact, as a residue modulo a prime of 61 bits (equal fractions have equal
// residues, others almost never); everything is also a complex double.
struct math_value {
    double complex x;
    uint64_t residue;
    bool exact;   // the residue is good: only rational arithmetic came before
    bool decimal; // a decimal number by itself, or a percentage of one
};

// Where letters have values: a letter has another at every point, and negative ones at odd points.
// sign: what \pm stands for.
struct math_point {
    int number;
    int sign;           // 1 or -1
    const char *letter; // or unknown function, that has the value `at`; NULL: none
    double at;
};

// False where it has no value: a list, a division by 0, words.
bool math_eval(const struct math_node *n, const struct math_point *point, struct math_value *ret);
// Of matrices, of their sums and products, also with numbers, each entry; of a number that. False
// where it has none.
#define MATH_ENTRIES 100
struct math_matrix {
    bool number; // it is none
    int rows, cols;
    struct math_value entries[MATH_ENTRIES]; // (rows, cols)
};
bool math_eval_matrix(const struct math_node *n, const struct math_point *point,
                      struct math_matrix *ret);
bool math_value_same(const struct math_value *a, const struct math_value *b);
bool math_is_letter(const struct math_node *n); // but i, e and pi

// ---- whether two are the same (math_same.c) -----------------------------------------------------

// By the rules that math-verify's published test cases show (docs/use/rewards.md). Not symmetric:
// "x = 5" answers 5, and 5 answers "x = 5".
bool math_same(const struct math_node *wanted, const struct math_node *got);

#endif
