/* random_step.h: one step's groups of random prompts and completions, as trainer/learn/samples.h
 * and trainer/learn/learner.h take them. The same shape gives the same tokens. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_RANDOM_STEP_H
#define TESTS_SUPPORT_RANDOM_STEP_H

#include "trainer/learn/samples.h"
#include <stdint.h>

#define STEP_MAX_GROUPS  4
#define STEP_MAX_SAMPLES 12
#define STEP_MAX_TOKENS  12

struct step_shape {
    int n_groups, n_per_group;
    const int *prompts;     // (n_groups) tokens of each
    const int *completions; // (n_groups, n_per_group)
    int vocab;
    uint64_t seed;
};
struct random_step {
    int32_t prompts[STEP_MAX_GROUPS][STEP_MAX_TOKENS], ids[STEP_MAX_SAMPLES][STEP_MAX_TOKENS];
    struct pack_completion completions[STEP_MAX_SAMPLES];
    struct pack_group groups[STEP_MAX_GROUPS]; // point into this struct
};
void random_step_make(const struct step_shape *shape, struct random_step *ret);

#endif
