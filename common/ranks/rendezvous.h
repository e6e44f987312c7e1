/* rendezvous.h: all ranks of a job meet: rank 0 waits until every other has come, compares what
 * they say of themselves, and gives all of them its bytes (NCCL's id, say). What is amiss is told
 * to everyone in one sentence, with the ranks, hosts and pids that it concerns: who is missing, who
 * is of another version, layout or number of ranks, who is there twice. Main thread.
 *
 *     rank 0                                          rank r
 *     listens (address.c)                             connects until the deadline
 *     {nonce, its hello}                     ->
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
#include <jansson.h>

// ---- connections -------------------------------------------------------------------------------
// The connection between two ranks. A message is a JSON object in a frame of its own:
//
//     length of the object: 4 bytes, most significant first
//     MAC: 32 bytes, HMAC-SHA256 of the receiver's nonce and the object, by the job's token
//     the object
//
// so that only who has the token can speak, and nothing that was said on another connection counts
// on this one; the token itself never travels. Each side gives its nonce with the first message
// that it sends; until then it counts as zeros. What is said is not hidden from who listens in.
//
// Sockets do not block: what does not go out at once goes with the next conn_flush(). One thread.

#define CONN_NONCE       16
#define CONN_TOKEN_BYTES 256
#define CONN_MESSAGE_MAX (64 << 10) // bytes of an object

struct conn {
    int fd; // -1: closed
    char token[CONN_TOKEN_BYTES];
    unsigned char own_nonce[CONN_NONCE], peer_nonce[CONN_NONCE];
    struct bytes in, out;
    bool introduced;
};

void conn_open(struct conn *w, int fd, const char *token); // takes fd over; token: "" for none
void conn_close(struct conn *w);                           // also one that is closed

// Takes the reference over (NULL: there was no memory for it). ST_PEER_GONE where the other side
// has closed. The first message has the nonce put into it.
enum status conn_send(struct conn *w, json_t *message);
enum status conn_flush(struct conn *w); // as much as the socket takes now
// All of it: ST_TIMEOUT where it did not go by then.
enum status conn_drain(struct conn *w, int64_t deadline_ns);
// The same, and then waits until the other side has closed, having read it; what that sends
// meanwhile is not wanted.
void conn_finish(struct conn *w, int64_t deadline_ns);

// The next message, for json_decref(), or NULL where it has not come yet. ST_PEER_GONE where the
// other side has closed, ST_MISMATCH where the MAC is not of this token, ST_FORMAT.
enum status conn_receive(struct conn *w, json_t **ret);
// The same, of what has been read already.
enum status conn_next(struct conn *w, json_t **ret);
// Waits for it; ST_TIMEOUT.
enum status conn_await(struct conn *w, int64_t deadline_ns, json_t **ret);

// ---- hello ----------------------------------------------------------------------------------
// What each rank says of itself when all meet, and what must be the same for all. Pure functions;
// any thread.

struct hello {
    int rank, size;
    int64_t pid;
    char host[65];
    char version[32];          // of the program
    char run_id[RANKS_RUN_ID]; // "": it knows none
    char layout[72];           // of the weights; "": it has none to compare
};

// ST_INVALID, ST_FORMAT naming the field.
enum status hello_parse(const json_t *object, struct hello *ret);

// "rank 2 (host, pid 123)"
#define HELLO_NAME 128
const char *hello_name(const struct hello *s, char ret[HELLO_NAME]);
// Appends a sentence for each thing in which `s` differs from what rank 0 says.
void hello_compare(const struct hello *zero, const struct hello *s, struct bytes *to);

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
// Of a rank that fails before: where all meet in a file, and know their run, those that are there,
// or come, end at once with ST_PEER_GONE, "rank 1 (host, pid 123) has failed: " and why. This
// thread's sentence stays.
void rendezvous_give_up(const struct rendezvous_options *options, enum status why);
// That, for who waits for something else.
enum status rendezvous_check(const struct rendezvous_options *options);

#endif
