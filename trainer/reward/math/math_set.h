/* math_set.h: sets of real numbers: intervals, their unions, and what relations of one letter
 * describe. Pure functions. */
#ifndef TRAINER_MATH_SET_H
#define TRAINER_MATH_SET_H

#include "trainer/reward/math/math_expr.h"

// A number without letters, or an infinity.
bool math_real_of(const struct math_node *n, double *ret);
bool math_is_ordered(const struct math_node *n); // a list in ( or [
bool math_is_interval(const struct math_node *n);
bool math_is_set(const struct math_node *n); // an interval, or made of such
// The same numbers are in both; wanted may be a relation.
bool math_same_sets(const struct math_node *wanted, const struct math_node *got);

#endif
