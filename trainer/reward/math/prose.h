/* prose.h: finding things in what a model wrote: regular expressions (PCRE2), marks, braces. Pure
 * functions on text; any thread. */
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

#endif
