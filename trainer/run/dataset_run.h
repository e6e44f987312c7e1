/* dataset_run.h: training on completions that are there already, without a server: `cw-trainer sft`
 * learns them, `cw-trainer dpo` prefers one of two. It is a run like any other (run.h) on weights
 * that this process owns, whose steps take their samples from a data set. One thread, the main one.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_DATASET_RUN_H
#define TRAINER_DATASET_RUN_H

#include "trainer/run/run.h"

struct dataset_examples {
    // (task->sides): the same lines with a completion each, and the same prompts
    struct dataset *sides[TASK_SIDES];
    int n;             // examples
    double *reference; // (n, sides) log-probability of each completion by the start; of pairs
};

struct recent { // since the last progress line, and in all
    double loss;
    int64_t steps, targets, start_ns, first_step;
};
struct dataset_run {
    struct dataset_examples data, eval; // eval.n 0: none
    int64_t longest, widest; // tokens of a prompt with a completion; with all of an example's
    struct recent recent;
};

extern const struct task_kind dataset_kind;

void dataset_close(struct run *run); // takes half-opened runs too

#endif
