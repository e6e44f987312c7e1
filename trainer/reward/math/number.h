/* number.h: the number that a text gives as its answer. Pure functions on text. */
#ifndef TRAINER_NUMBER_H
#define TRAINER_NUMBER_H

#include <stdbool.h>

// Numbers are decimal, with thousands separators ("1,234.50", TeX's "1{,}234"), fractions of two
// numbers ("3/4", "\frac{3}{4}") and mixed ("1 1/2"), with a minus (also U+2212) and a currency
// sign "$" on either side of it. A minus between two operands ("7-5") is no sign, a fraction of
// anything else ("\frac{x}{2}") no number. They are doubles: whole numbers are exact up to 2^53.
// The first two functions are false, and leave *ret_value as it is, where there is none.

// The last number of the text.
bool number_last(const char *text, double *ret_value);

// The answer of a worked solution, by the first of these rules that applies:
//   1. the first number after the last "####" (GSM8K's mark); no number there: no answer
//   2. the first number after the last "the answer is" (any case), if there is one
//   3. the last number inside the last \boxed{...}
//   4. the last number of the text
// Where a \boxed{...} stands behind 1 or 2, it is what counts there. A Markdown heading ("#### Step
// 2: ...") is no mark for 1, nor are its numbers for 4.
bool number_answer(const char *text, double *ret_value);

// Equal but for the rounding of fractions: 1/3 and 0.3333333333.
bool number_same(double a, double b);

#endif
