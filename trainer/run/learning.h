/* learning.h: what `train` and `sft` have in common of what is learnt, and how: the options, and
 * the learner's settings that follow. Plain data. */
#ifndef TRAINER_LEARNING_H
#define TRAINER_LEARNING_H

#include "trainer/learn/learner.h"
#include "trainer/learn/schedule.h"

struct learning_options { // called `learning` where options_shared.h's rows are used
    const char *freeze;
    struct optimizer_config adamw;
    struct schedule schedule; // total_steps: not an option
    int64_t token_budget, logits_chunk;
    enum recompute recompute;
    double router_aux_loss_coef;
};

struct learning_shape { // of a run's steps, at most
    int64_t longest;    // tokens of a prompt with its completion
    int64_t tokens;     // of a step's prompts and completions
    int64_t seqs;       // prompts and completions
};
// Counts a step by whether its gradient was not finite: ST_INVALID at the third in a row. whose:
// "the"; way_out: "lower --learning-rate".
enum status learning_skipped(int *in_a_row, bool skipped, const char *whose, const char *way_out);

// ST_INVALID where a sequence is longer than --token-budget.
enum status learning_config(const struct learning_options *options,
                            const struct learning_shape *shape, double temperature,
                            struct learner_config *ret);

#endif
