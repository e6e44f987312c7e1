/* math_same.h: whether two expressions are the same answer, by the rules that math-verify's
 * published test cases show (docs/rewards.md). Pure functions. */
#ifndef TRAINER_MATH_SAME_H
#define TRAINER_MATH_SAME_H

#include "trainer/reward/math/math_expr.h"

// Not symmetric: "x = 5" answers 5, and 5 answers "x = 5".
bool math_same(const struct math_node *wanted, const struct math_node *got);

#endif
