/* processes.h: the ranks of this host as processes that one launcher starts, and that end together:
 * where one fails, the others are ended too, and the first that failed is named. Main thread, which
 * does nothing else meanwhile. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_RANKS_PROCESSES_H
#define COMMON_RANKS_PROCESSES_H

#include "common/base/bytes.h"
#include "common/base/status.h"

struct processes {
    int n, first;     // ranks first, first + 1, ...
    const char *name; // what one is called that is no rank, but starts n_ranks; NULL: "rank N"
    int n_ranks;
    const char *line; // of all, as a shell reads it
    // In this process, before a rank is started: puts what it is into the environment.
    enum status (*before)(void *context, int rank); // NULL: nothing to put
    void *context;
    int stop_signal; // what SIGINT, SIGTERM, SIGUSR1 and a first SIGHUP are handed on as
    int grace_ms;    // of the others, from SIGTERM to SIGKILL, once one has failed
    int end_ms;      // of the others, once one has ended well: then they count as failed
};

// This program (of that name) with its own command line, as a shell reads it; where they are to
// find one another by MPI as one line that starts so many ranks (0: itself alone).
enum status processes_line(const char *program, char **argv, int mpi_ranks, struct bytes *ret);

#define PROCESSES_END_MS                                                                           \
    120000 // for a server that a rank started to end, with what it has under way
// Returns when all have ended. Their output is this process's. ST_PEER_GONE where one failed:
// "rank 1 (pid 123) was ended by signal 9 (Killed), and the others with it".
enum status processes_run(const struct processes *p);

#endif
