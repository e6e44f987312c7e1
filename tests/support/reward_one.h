/* reward_one.h: a reward of a single sample. Stateless. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_REWARD_ONE_H
#define TESTS_SUPPORT_REWARD_ONE_H

#include "trainer/reward/reward.h"

// As reward_score_all(). ret_terms may be NULL.
enum status reward_score(struct reward *r, const struct reward_input *input, double *ret_terms,
                         double *ret_sum);

#endif
