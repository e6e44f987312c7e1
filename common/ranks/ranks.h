/* ranks.h: who is this process among those that train one model together? Options say so, or the
 * environment that mpirun, srun, torchrun or cw-trainer's own launcher gives each process that it
 * starts. Reads the environment; no state. Main thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_RANKS_RANKS_H
#define COMMON_RANKS_RANKS_H

#include "common/base/bytes.h"
#include "common/base/status.h"

#define RANKS_MAX    4096
#define RANKS_RUN_ID 80

struct ranks {
    int rank, size;            // 0 <= rank < size
    bool counted;              // somebody says so; false: this process was started alone, and with
                               // a size over 1 has the others still to start
    int local_rank;            // among those of this host
    int local_size;            // of this host; 0: nobody says
    char run_id[RANKS_RUN_ID]; // what the processes of one job have in common; "": nobody says
    int64_t since_ms; // what failed before (clock_wall_ms()) is of an earlier try: one job may have
                      // several of one id
    const char *source; // "mpirun", "--rank"...; static
};
// rank: of --rank, or -1; size: of --ranks, or 0. A process that nobody counts is rank 0 of 1.
// ST_INVALID where what is said contradicts itself, naming both sides, or is no number.
enum status ranks_find(int rank, int size, struct ranks *ret);

// The variable of the environment by which their source says it: "RANK"; NULL: it is an option.
const char *ranks_variable(const struct ranks *ranks);

// Puts them into the environment of children in place of what launchers left there.
enum status ranks_export(const struct ranks *ranks);
// Appends "env -u NAME ... ", as a shell reads it, of all that launchers have put into the
// environment: the program behind it is nobody's rank, and may start ranks of its own.
void ranks_put_forgetting(struct bytes *line);

#endif
