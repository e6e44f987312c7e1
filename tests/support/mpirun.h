/* mpirun.h: how tests start ranks on the CPU. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_MPIRUN_H
#define TESTS_SUPPORT_MPIRUN_H

#include "tests/support/support.h"

// The words that start a command as `n` ranks of this machine, before those of the command, as
// args() gives them. Ranks that die do not take the others along. Skips the test where there is no
// mpirun, or this was built without MPI.
const char *const *mpirun_words(int n);
// The process of that name under the child; of several ranks that of one of them. 0: there is none.
pid_t rank_process(const struct test_child *child, const char *name, int ranks, int rank);

#endif
