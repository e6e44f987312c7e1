/* rank_program.h: a small program in the place of cw-trainer, for tests of what starts ranks: it
 * takes the options of cw-trainer train, finds out who it is or starts the ranks, meets the others,
 * prints a line, and goes on until one of them is gone or its time is over. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_RANK_PROGRAM_H
#define TESTS_SUPPORT_RANK_PROGRAM_H

#include "tests/support/support.h"

// For the main() of a test whose first argument is "train": its exit status. $RANK_PROGRAM_MS: how
// long it goes on.
int rank_program(int argc, char **argv);
// Puts a folder in front of PATH in which cw-trainer is this very test program.
const char *rank_program_folder(void);
// The pid in the line of a rank, waited for in a log: "rank 1 of 4 on GPU 1, pid 123".
pid_t rank_program_pid(const char *log, const char *rank, int64_t ms);

#endif
