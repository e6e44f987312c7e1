/* tandem.h: who writes the next token of a sample that the policy and a frozen model write
 * together. The author is chosen before the token is sampled, from what stands in front of it and
 * from a random stream of its own: neither the batch, nor preemption, nor what either model would
 * have said has a part in it, and each author's tokens follow that author's distribution.
 *
 * Pure functions; any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_TANDEM_H
#define INFER_SERVER_TANDEM_H

#include "common/model/tandem_selector.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TANDEM_CHUNK_TOKENS 16 // where a request does not say

struct tandem_choice { // of a request
    bool on;           // false: the policy writes all
    int selector;      // enum tandem_selector
    double p;          // probability of the policy; alternating: its share
    int chunk;         // tokens, >= 1
    bool shared;       // authors are drawn from `seed` and the place in the completion alone, the
                       // same for all samples of that seed; else each sample has its own
    uint64_t seed;
};

struct tandem_author { // of a sample's next token; all 0: the policy
    bool frozen;
};

// What a token's text ends, as far as it shows: bits of one entry of engine_options.token_ends.
enum { TOKEN_ENDS_SENTENCE = 1, TOKEN_ENDS_WORD = 2 };
// A sentence ends with ., ! or ? (closing quotes, brackets and spaces may follow), or with a line.
// A word begins or ends where there is something else than letters, digits and apostrophes: in
// vocabularies whose tokens begin with the space, pieces that continue a word thus go with the
// next.
uint8_t token_ends_of(const char *text, size_t len);

// The author of token number `index` of a completion, given that of the one before, whose text has
// `ended` that. stream: the sample's.
void tandem_choose(const struct tandem_choice *choice, uint64_t stream, int index, uint8_t ended,
                   struct tandem_author *author);

#endif
