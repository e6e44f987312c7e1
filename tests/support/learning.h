/* learning.h: learners on the weights of model folders, in the test's own process. They are closed
 * with the test. Failures fail the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_LEARNING_H
#define TESTS_SUPPORT_LEARNING_H

#include "tests/support/reference.h"
#include "trainer/learn/learner.h"

struct learning {
    struct reference policy, draft; // the learner works on these weights
    struct learner *learner;
};
struct learning_setting {
    const char *folder, *draft;     // model folders; draft: NULL: none
    const char *teacher;            // a model folder; NULL: none
    const char *device;             // NULL: the CPU
    enum quantization quantization; // of the policy
    float beta;                     // of the divergence from it
    bool reference;                 // a copy of the policy stays beside it
    float draft_weight;             // of the draft's loss
    struct learner_config config;   // 0: betas of 0.9 and 0.999, an eps of 1e-8, temperature 1
};
struct learning *learning_of(const struct learning_setting *setting);
void learning_end(struct learning *l); // at once

struct optimizer *learning_optimizer(const struct learning *l);
const float *learning_gradients(const struct learning *l); // of the policy's arena
// The optimizer's step from the gradients there are; their norm.
double learning_step(const struct learning *l, double lr);
// Gradients of two arenas of n elements differ by no more than that part of the largest.
void assert_same_gradients(const float *a, const float *b, int64_t n, double max);
// A loss that is nothing, whatever the tokens.
void learning_no_loss(void *context, const struct learner_rows *rows, float *ret_dlogprobs);

#endif
