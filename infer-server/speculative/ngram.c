/* ngram.c: prompt look-up (Saxena 2023): the longest of the sample's last few tokens that stands
 * earlier in its prompt or completion; what followed there is the draft. Of equally long ones the
 * latest. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/speculative/method.h"

#define LONGEST 4    // tokens matched: a longer match names the same place nearly always
#define REACH   8192 // tokens looked back, so that a look-up takes microseconds in any context

// A match so late that fewer than max tokens follow goes on into the drafts themselves, as a
// repetition would.
static void propose(void *memory, const struct history *h, int max, struct draft *ret)
{
    (void)memory;
    const int length = h->n_prompt + h->n_generated, last = length - 1;
    const int first = last > REACH ? last - REACH : 0;
    int best = 0, best_end = -1;
    for (int end = last - 1; end >= first && best < LONGEST; end--) {
        int n = 0;
        while (n < LONGEST && end - n >= first &&
               history_token(h, end - n) == history_token(h, last - n))
            n++;
        if (n <= best) continue;
        best = n;
        best_end = end;
    }
    ret->matched = best;
    ret->n = best ? max : 0;
    for (int i = 0; i < ret->n; i++) {
        const int from = best_end + 1 + i;
        ret->tokens[i] = from < length ? history_token(h, from) : ret->tokens[from - length];
    }
}

const struct draft_method method_ngram = {
    .name = "ngram", .k = 5, .guess = 0.5, .propose = propose};
