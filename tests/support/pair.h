/* pair.h: two ranks, each with a server of its own, that train one model together: on the CPU under
 * mpirun, or on cuda:0 and cuda:1 where COMMONWEIGHT_TEST_DEVICE says cuda. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_PAIR_H
#define TESTS_SUPPORT_PAIR_H

#include "tests/support/mpirun.h"
#include "tests/support/training.h"

struct pair {
    struct scene s; // rank 0's server
    struct daemon other;
    const char *bridges; // with {rank} in it
};

#define PAIR_STEPS   6 // over the end of an epoch, which is one of 4
#define PAIR_HALF    "3"
#define PAIR_WHOLE   "6"
#define PAIR_NUMBERS "--prompts-per-step 5 --learning-rate 1e-4 --beta 0.05 --temperature 1.2"

void pair_open(struct pair *p);
// The second server, beside p->s; options (NULL-ended) of it.
void pair_open_other(struct pair *p, const char *const options[]);
void pair_close(struct pair *p);
// A trainer's command for one rank on p->s, as one for both.
const char *const *pair_command(const struct pair *p, const char *const one[]);
// cw-trainer train on both ranks; `more` (NULL-ended) as of trainer_command().
void pair_start(struct pair *p, struct test_child *child, const char *run,
                const char *const more[]);
// And to its end: its exit status.
int pair_run(struct pair *p, const char *run, const char *const more[]);
void pair_train(struct pair *p, const char *run, const char *steps);
// Both servers hold the run's last checkpoint, at one version.
void pair_holds(const struct pair *p, const char *run);
// The same run on one rank, "one", and on two, "two", whose servers have these options
// (NULL-ended): their losses are the same within 1e-5.
void pair_learns_as_one(struct pair *p, const char *model, const char *const server[],
                        const char *const run[]);

#endif
