/* long_run.h: the folder of a run as cw-trainer train leaves it, of any length, made in a moment.
 * Failures fail the running test. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_LONG_RUN_H
#define TESTS_SUPPORT_LONG_RUN_H

#include <stdbool.h>

struct long_run {
    int first, last;  // steps
    int keys;         // metrics in each line, of which "reward" is the first
    int samples;      // of each step, groups of five; 0: no rollouts/
    int words;        // of a sample, each a token
    bool with_tokens; // log-probabilities, drafts and places of tokens too
};
// Adds these steps to FOLDER/metrics.jsonl and FOLDER/rollouts. Of step s reward is s / 1000 but
// for step 500, where it is 77; line s % 100 of the data is asked, of each prompt sample 4 gets 1
// and the others 0.
void long_run_write(const char *folder, const struct long_run *run);

#endif
