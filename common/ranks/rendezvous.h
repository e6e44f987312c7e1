/* rendezvous.h: all ranks of a job meet: rank 0 waits until every other has come, compares what
 * they say of themselves, and gives all of them its bytes (NCCL's id, say). What is amiss is told
 * to everyone in one sentence, with the ranks, hosts and pids that it concerns: who is missing, who
 * is of another version, layout or number of ranks, who is there twice. Main thread.
 *
 *     rank 0                                          rank r
 *     listens (address.c)                               connects, again and again until the
 * deadline {nonce, its hello}                 ->
 *                                            <-       {nonce, its hello}
 *     {missing: "2, 3"}, each second         ->       remembers it for its own time-out
 *     {welcome: bytes} or {refused: why}     ->
 *
 * Who has another token, or says that it is of another run, is sent away and not counted. The
 * connections stay open: liveness.h watches over them. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_RANKS_RENDEZVOUS_H
#define COMMON_RANKS_RENDEZVOUS_H

#include "common/ranks/ranks.h"
#include "common/ranks/conn.h"
#include <jansson.h>

// ---- hello ----------------------------------------------------------------------------------
// What each rank says of itself when all meet, and what must be the same for all. Pure functions,
// but for hello_of_this_process(); any thread.

struct hello {
    int rank, size;
    int64_t pid;
    char host[65];
    char version[32];          // of the program
    char run_id[RANKS_RUN_ID]; // "": it knows none
    char layout[72];           // of the weights; "": it has none to compare
};

void hello_of_this_process(const struct ranks *who, const char *version, const char *layout,
                           struct hello *ret);
json_t *hello_to_json(const struct hello *s); // new; NULL for want of memory
// ST_INVALID, ST_FORMAT naming the field.
enum status hello_parse(const json_t *object, struct hello *ret);

// "rank 2 (host, pid 123)"
#define HELLO_NAME 128
const char *hello_name(const struct hello *s, char ret[HELLO_NAME]);
// Appends a sentence for each thing in which `s` differs from what rank 0 says.
void hello_compare(const struct hello *zero, const struct hello *s, struct bytes *to);
// Of two jobs: both know their run, and it is not the same.
bool hello_other_run(const struct hello *a, const struct hello *b);

// ---- rendezvous ---------------------------------------------------------------------------------
struct rendezvous_options {
    const char *url;     // tcp://HOST:PORT or file://PATH
    const char *token;   // of tcp://, which needs one off loopback; NULL: none
    struct ranks who;    // of size > 1
    const char *version; // of the program
    const char *layout;  // of the weights, "" or NULL: nothing to compare
    double timeout_s;    // from the call until all are there
};

// The connections of a rank: those of rank 0 are to all others, another's is to rank 0.
struct peer {
    struct hello who;
    struct conn conn;
    int64_t heard_ns; // when something last came
    bool here;        // false: not come yet, or has left
};
struct peers {
    struct hello self;
    int n;
    struct peer list[];
};
void peers_free(struct peers *p); // closes; NULL is fine

// bytes: what rank 0 gives, replaced by it in the others. ST_TIMEOUT: not all came, and who is
// missing; ST_MISMATCH; ST_BUSY: the port is in use.
#define RENDEZVOUS_BYTES (16 << 10) // the most
enum status rendezvous(const struct rendezvous_options *options, struct bytes *bytes,
                       struct peers **ret);

#endif
