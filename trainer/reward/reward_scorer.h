/* reward_scorer.h: what a scorer is. Private to reward.c, whose table holds them all, and the
 * reward_*.c files, which define those that keep a state. */
#ifndef TRAINER_REWARD_SCORER_H
#define TRAINER_REWARD_SCORER_H

#include "trainer/reward/reward.h"

struct scorer {
    const char *name;
    bool binary, needs_answer; // binary: 0 or 1
    bool takes_argument;       // written NAME:ARGUMENT
    const char *help;
    const char *prompt_template; // reward_prompt_template(); NULL: none
    // Any of the next five may be NULL: no state; nothing to free; every line will do; `name`; it
    // is ready as it is. check: before the first sample.
    enum status (*open)(const struct reward_options *options, const char *argument,
                        void **ret_state);
    void (*close)(void *state); // takes NULL
    enum status (*check_row)(void *state, const char *answer, const json_t *row);
    const char *(*label)(const void *state); // its name in metrics
    enum status (*check)(void *state);
    // One of the two: of one sample, or of n at a time (ret_failed: the sample that could not be).
    enum status (*score)(void *state, const struct reward_input *input, double *ret_score);
    enum status (*score_all)(void *state, const struct reward_input *inputs, int n,
                             double *ret_scores, int *ret_failed);
};

extern const struct scorer scorer_exact, scorer_numeric, scorer_gsm8k, scorer_regex, scorer_length,
    scorer_constant, scorer_plugin, scorer_command, scorer_environment, scorer_overlong,
    scorer_think_format, scorer_repetition, scorer_json, scorer_math;

#endif
