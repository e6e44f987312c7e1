/* math_value.h: what an expression is worth where its letters have given values. Rational
 * arithmetic is exact, as a residue modulo a prime of 61 bits (equal fractions have equal residues,
 * others almost never); everything is also a complex double. Pure functions. */
#ifndef TRAINER_MATH_VALUE_H
#define TRAINER_MATH_VALUE_H

#include "trainer/reward/math/math_expr.h"

#include <complex.h>
#include <stdint.h>

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
// Of a matrix, or sums and products of such: its size; false where it is none, or a product of more
// than a few. And what the entry in row i and column j is worth.
bool math_matrix_size(const struct math_node *n, int *ret_rows, int *ret_cols);
bool math_matrix_entry(const struct math_node *n, int i, int j, const struct math_point *point,
                       struct math_value *ret);
bool math_value_same(const struct math_value *a, const struct math_value *b);
bool math_is_imaginary(const struct math_node *n); // the letter i
bool math_is_letter(const struct math_node *n);    // but i, e and pi
bool math_any_node(const struct math_node *n, bool (*is)(const struct math_node *));

#endif
