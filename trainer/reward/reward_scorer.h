/* reward_scorer.h: what a scorer is. Private to reward.c and the reward_*.c files that define them.
 */
#ifndef TRAINER_REWARD_SCORER_H
#define TRAINER_REWARD_SCORER_H

#include "trainer/reward/reward.h"

struct scorer {
    const char *name;
    bool binary, needs_answer; // binary: 0 or 1
    bool takes_argument;       // written NAME:ARGUMENT
    const char *help;
    const char *prompt_template; // reward_prompt_template(); NULL: none
    // Any of the next five may be NULL: its state is the options; nothing to free; every line will
    // do; `name`; it is ready as it is. check: before the first sample.
    enum status (*open)(const struct reward_options *options, const char *argument,
                        void **ret_state); // may leave *ret_state: the options
    void (*close)(void *state);            // takes NULL
    enum status (*check_row)(void *state, const char *answer, const json_t *row);
    const char *(*label)(const void *state); // its name in metrics
    enum status (*check)(void *state);
    // One of the three: of one sample, for what needs no more than the options and cannot fail; of
    // one sample; of n at a time (ret_failed: the sample that could not be).
    double (*value)(const struct reward_options *options, const struct reward_input *input);
    enum status (*score)(void *state, const struct reward_input *input, double *ret_score);
    enum status (*score_all)(void *state, const struct reward_input *inputs, int n,
                             double *ret_scores, int *ret_failed);
};

extern const struct scorer *const scorers[]; // NULL-ended
extern const struct scorer scorer_regex, scorer_plugin, scorer_command, scorer_math;

#endif
