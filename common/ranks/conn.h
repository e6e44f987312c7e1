/* conn.h: the connection between two ranks. A message is a JSON object in a frame of its own:
 *
 *     length of the object, 4 bytes, most significant first
 *     MAC, 32 bytes: HMAC-SHA256, keyed with the job's token, of the receiver's nonce and the
 * object the object
 *
 * so that only who has the token can speak, and nothing that was said on another connection counts
 * on this one; the token itself never travels. Each side gives its nonce with the first message
 * that it sends; until then it counts as zeros. What is said is not hidden from who listens in.
 *
 * Sockets do not block: what does not go out at once goes with the next conn_flush(). One thread.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_RANKS_CONN_H
#define COMMON_RANKS_CONN_H

#include "common/base/bytes.h"
#include <jansson.h>

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

#endif
