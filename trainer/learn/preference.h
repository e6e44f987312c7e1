/* preference.h: what a pair of completions loses, of which one is preferred to the other: DPO
 * (Rafailov et al. 2023) and its relatives, as TRL names and defines them. On a pair's summed
 * log-probabilities, in double, as in loss.h, which has the losses of rewarded samples. Pure
 * functions. */
#ifndef TRAINER_PREFERENCE_H
#define TRAINER_PREFERENCE_H

#include "common/base/status.h"

#include <stdbool.h>

extern const char *const preference_names[]; // of the losses; NULL-ended

struct preference_config {
    int type; // place in preference_names
    double beta, label_smoothing;
};
// The policy's log-probability of each completion, summed over its tokens, minus the reference's.
struct preference_pair {
    double chosen, rejected;
    int n_chosen, n_rejected; // tokens
};
struct preference_loss {
    double loss, by_chosen, by_rejected; // its derivatives by the two
};

// ST_INVALID names an option that the loss needs otherwise.
enum status preference_check(const struct preference_config *config);
bool preference_smooths(const struct preference_config *config); // label_smoothing has an effect
struct preference_loss preference_loss(const struct preference_config *config,
                                       const struct preference_pair *pair);

#endif
