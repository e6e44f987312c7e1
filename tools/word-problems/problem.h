/* problem.h: a word problem of GSM8K's form, and what all of them are made of. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TOOLS_WORD_PROBLEMS_PROBLEM_H
#define TOOLS_WORD_PROBLEMS_PROBLEM_H

#include "common/base/bytes.h"
#include "common/base/rng.h"

#define PROBLEM_MAX_STEPS 8

struct problem_options {
    int64_t min_steps, max_steps; // 1 to PROBLEM_MAX_STEPS
    int64_t max_number;           // in a problem, 12 or more; results go up to five times that
    double asides;                // share of steps with a sentence before them that does not matter
};

struct problem { // all zero: empty; bytes_status() of the three tells of want of memory
    struct bytes question, answer; // answer: worked, ends on "#### N"
    struct bytes careless;         // the same by one who leaves out the last of several steps
    int n_steps;
};
// A new problem in place of the one there. False: no step fitted; ask again.
bool problem_tell(struct problem *p, struct rng *rng, const struct problem_options *options);
void problem_release(struct problem *p);

// Gives out every text whose words problems use, to its end or a |, with %-signs for what is put
// in; line_starts: only
// those that may begin a line, of which the first word then does.
void problem_texts(bool line_starts, void (*take)(void *context, const char *text), void *context);

// tokenizer.c: tokenizer.json and tokenizer_config.json into a folder that is there; says how many
// tokens it has.
enum status word_tokenizer_write(const char *folder);

#endif
