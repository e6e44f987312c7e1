/* rank_group.h: the ranks of a job as forked processes, for tests of common/ranks. Each runs a
 * function, whose status and sentence the test reads once it has ended. Failures fail the running
 * test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_RANK_GROUP_H
#define TESTS_SUPPORT_RANK_GROUP_H

#include "common/ranks/rendezvous.h"
#include "tests/support/support.h"

#define RANK_GROUP_MAX 8

struct rank_process {
    pid_t pid;           // 0: none, or waited for
    const char *outcome; // the file that it leaves
};
// Zero-initialise; rank_group_end() may then be called at any time.
struct rank_group {
    struct rank_process list[RANK_GROUP_MAX];
    int n;
};

// What a rank does; no assertions in it. `options` has its number; context is the test's own.
typedef enum status (*rank_fn)(const struct rendezvous_options *options, void *context);

// Starts one more process; its place in the list. It is killed if this program dies.
int rank_group_add(struct rank_group *g, const struct rendezvous_options *options, int rank,
                   rank_fn fn, void *context);
// Waits for its end: its status, or ST_CANCELLED where it was killed. ret_sentence may be NULL.
enum status rank_group_outcome(struct rank_group *g, int i, char ret_sentence[2048]);
void rank_group_end(struct rank_group *g); // kills what runs

int test_free_port(void); // one that nobody listens on now

#endif
