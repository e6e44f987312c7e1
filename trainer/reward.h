/* reward.h: scores of finished samples: a weighted sum of terms out of one table of scorers. Pure
 * functions on text and counts; no device, no daemon. */
#ifndef TRAINER_REWARD_H
#define TRAINER_REWARD_H

#include "common/base/status.h"
#include <jansson.h>

struct reward;

// One sample as a scorer sees it. All borrowed.
struct reward_input {
    const char *text;        // of the completion, special tokens left out
    const char *answer;      // of the data set; NULL where it has none
    int n_tokens;            // of the completion
    bool truncated;          // it ended at the token limit
    const json_t *telemetry; // of this sample (DESIGN, "Telemetry of one sample"); may be NULL
};

// names: "gsm8k" or "exact,length"; weights: "1,0.1", NULL or "": all 1. length_target: characters,
// of the scorer `length`.
enum status reward_new(const char *names, const char *weights, double length_target,
                       struct reward **ret);
void reward_free(struct reward *r);
int reward_terms(const struct reward *r);
const char *reward_term_name(const struct reward *r, int term);
bool reward_needs_answer(const struct reward *r);
// The first term that is 0 or 1 (its mean is the accuracy); -1: none is.
int reward_accuracy_term(const struct reward *r);
// The weighted sum; ret_terms (reward_terms) the unweighted scores, may be NULL.
double reward_score(const struct reward *r, const struct reward_input *input, double *ret_terms);

// The i-th scorer of the table and one line about it, for --help; NULL past the last.
const char *reward_describe(int i, const char **ret_help);

// The number a text ends on, with thousands separators and a leading "$" taken away: after its last
// "####" (GSM8K) if that is wanted and there is one, else its last number. false: there is none.
bool reward_last_number(const char *text, bool after_marker, double *ret);

#endif
