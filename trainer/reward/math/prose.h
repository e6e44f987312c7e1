/* prose.h: finding things in what a model wrote: regular expressions (PCRE2), marks, braces,
 * numbers, and the number that a text gives as its answer. Pure functions on text; any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_PROSE_H
#define TRAINER_PROSE_H

#include <stdbool.h>
#include <stddef.h>

// A regular expression, blanks and "#" comments in it aside; '.' is any character. Static storage:
// it is compiled at its first use and kept.
struct prose {
    const char *expression;
    void *code; // NULL until then
};
#define PROSE_GROUPS 10
struct prose_match { // of each group where it begins and ends, 0 the whole; NULL where it has no
                     // part
    const char *begin[PROSE_GROUPS], *end[PROSE_GROUPS];
};
// The first match that begins at or after `from` and ends by `end`. Looks back to `text`. False
// also where there is no memory, or the text is made to be searched for ever.
bool prose_find(struct prose *p, const char *text, const char *from, const char *end,
                struct prose_match *ret);

// Behind the last `mark`, in any case, that stands between begin and end; NULL: there is none.
const char *behind_last(const char *begin, const char *end, const char *mark);
#define PROSE_LONGEST 4000 // answer, in characters

// Behind the braces that open at `at`; NULL: they are not closed before `end`, nor within the
// longest answer.
const char *behind_braces(const char *at, const char *end);

// ---- numbers ------------------------------------------------------------------------------------

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
