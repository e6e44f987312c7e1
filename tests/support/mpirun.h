/* mpirun.h: how tests start ranks on the CPU. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_MPIRUN_H
#define TESTS_SUPPORT_MPIRUN_H

// The words that start a command as `n` ranks of this machine, before those of the command. How
// many there are. Ranks that die do not take the others along. Skips the test where there is no
// mpirun, or this was built without MPI.
#define MPIRUN_WORDS 8
int mpirun_put(int n, const char *ret_argv[MPIRUN_WORDS]);

#endif
