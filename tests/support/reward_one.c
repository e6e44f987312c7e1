/* reward_one.c: reward_score_all() of one. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reward_one.h"

enum status reward_score(struct reward *r, const struct reward_input *input, double *ret_terms,
                         double *ret_sum)
{
    double terms[REWARD_MAX_TERMS];
    int failed;
    return reward_score_all(r, input, 1, ret_terms ? ret_terms : terms, ret_sum, &failed);
}
