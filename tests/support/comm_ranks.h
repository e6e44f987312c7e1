/* comm_ranks.h: a test that is several ranks of a communicator. The program starts itself once for
 * each rank: under mpirun on the CPU, and on GPUs (COMMONWEIGHT_TEST_DEVICE=cuda: rank i on cuda:i)
 * by itself. Each rank writes what it found into a file. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_COMM_RANKS_H
#define TESTS_COMM_RANKS_H

#include "kernels/comm.h"
#include "tests/support/support.h"

struct comm_rank {
    int rank, size;
    const char *mode, *folder;
    unsigned char id[COMM_ID_BYTES];
    struct device *dev;
    struct comm *comm; // opened by the test; freed at the end
    void *memory;      // (room) bytes on the device
    void *host;        // as many
    size_t room;
};

// What a rank does; its sentence, or "right", becomes its file.
typedef enum status comm_rank_fn(struct comm_rank *r);
// True: this process is a rank, and has been it.
bool comm_rank_main(int argc, char **argv, comm_rank_fn *run);
void comm_rank_report(const struct comm_rank *r, const char *text);
// Compares; not right: ST_MISMATCH, naming the rank, what, and i.
enum status comm_rank_expect(bool right, const struct comm_rank *r, const char *what, size_t i);
// Maps the ranks' memory into one another. ST_UNSUPPORTED where that is not possible, of which
// comm_ranks_run() makes a skipped test.
enum status comm_rank_map_peers(struct comm_rank *r);

// Every rank wrote a text with `wanted` in it; the last one nothing where it is `without_last`.
void comm_ranks_run(const char *mode, int size, const char *wanted, bool without_last);

#endif
