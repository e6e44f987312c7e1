/* reward_scorer.h: what a scorer is. Private to reward.c and the reward_*.c files that define them.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_REWARD_SCORER_H
#define TRAINER_REWARD_SCORER_H

#include "trainer/reward/reward.h"

struct scorer {
    const char *name;
    bool binary, needs_answer; // binary: 0 or 1
    bool takes_argument;       // written NAME:ARGUMENT
    const char *help;
    const char *prompt_template; // reward_info; NULL: none
    // What the options and a line's answer must be; NULL: anything. unread: what is wrong with one
    // that is not read.
    enum status (*check_options)(const struct reward_options *options);
    bool (*reads)(const char *answer);
    const char *unread;
    // Of those that have a state of their own, which else is the options. Any may be NULL: nothing
    // to free; every line will do; `name`; it is ready as it is. check: before the first sample.
    enum status (*open)(const struct reward_options *options, const char *argument,
                        void **ret_state);
    void (*close)(void *state); // takes NULL
    enum status (*check_row)(void *state, const json_t *row);
    const char *(*label)(const void *state); // its name in metrics
    enum status (*check)(void *state);
    // One of the three: of one sample, for what needs no state and cannot fail; of one sample; of n
    // at a time (ret_failed: the sample that could not be).
    double (*value)(const struct reward_input *input);
    enum status (*score)(void *state, const struct reward_input *input, double *ret_score);
    enum status (*score_all)(void *state, const struct reward_input *inputs, int n,
                             double *ret_scores, int *ret_failed);
};

extern const struct scorer *const scorers[]; // NULL-ended
extern const struct scorer scorer_plugin, scorer_command, scorer_math;

#endif
