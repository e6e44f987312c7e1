/* math_answer.h: where in a text its mathematical answer stands. Pure functions on text. */
#ifndef TRAINER_MATH_ANSWER_H
#define TRAINER_MATH_ANSWER_H

#include "common/base/bytes.h"

#include <stdbool.h>

#define MATH_ANSWERS 8

// Fills ret (zero-initialised; the caller releases all) with what may be the answer, the likeliest
// first, as an expression for math_parse(): what stands in the last \boxed{}, several near ones as
// a list; behind "final answer is"; behind "answer"; the last formula ($...$, \(...\), \[...\]) or
// number. How many.
int math_answers(const char *text, struct bytes ret[MATH_ANSWERS]);

#endif
