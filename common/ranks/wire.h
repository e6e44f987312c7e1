/* wire.h: the connection between two ranks. A message is a JSON object in a frame of its own:
 *
 *     length of the object, 4 bytes, most significant first
 *     seal, 32 bytes: HMAC-SHA256, keyed with the job's token, of the receiver's nonce and the
 * object the object
 *
 * so that only who has the token can speak, and nothing that was said on another connection counts
 * on this one; the token itself never travels. Each side gives its nonce with the first message
 * that it sends; until then it counts as zeros. What is said is not hidden from who listens in.
 *
 * Sockets do not block: what does not go out at once goes with the next wire_flush(). One thread.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_RANKS_WIRE_H
#define COMMON_RANKS_WIRE_H

#include "common/base/bytes.h"
#include <jansson.h>

#define WIRE_NONCE       16
#define WIRE_TOKEN_BYTES 256
#define WIRE_MESSAGE_MAX (64 << 10) // bytes of an object

struct wire {
    int fd; // -1: closed
    char token[WIRE_TOKEN_BYTES];
    unsigned char own_nonce[WIRE_NONCE], peer_nonce[WIRE_NONCE];
    struct bytes in, out;
    bool introduced;
};

void wire_open(struct wire *w, int fd, const char *token); // takes fd over; token: "" for none
void wire_close(struct wire *w);                           // also one that is closed

// Takes the reference over (NULL: there was no memory for it). ST_PEER_GONE where the other side
// has closed. The first message has the nonce put into it.
enum status wire_send(struct wire *w, json_t *message);
enum status wire_flush(struct wire *w); // as much as the socket takes now
// All of it: ST_TIMEOUT where it did not go by then.
enum status wire_drain(struct wire *w, int64_t deadline_ns);
// The same, and then waits until the other side has closed, having read it; what that sends
// meanwhile is not wanted.
void wire_finish(struct wire *w, int64_t deadline_ns);

// The next message, for json_decref(), or NULL where it has not come yet. ST_PEER_GONE where the
// other side has closed, ST_MISMATCH where the seal is not of this token, ST_FORMAT.
enum status wire_receive(struct wire *w, json_t **ret);
// The same, of what has been read already.
enum status wire_next(struct wire *w, json_t **ret);
// Waits for it; ST_TIMEOUT.
enum status wire_await(struct wire *w, int64_t deadline_ns, json_t **ret);

#endif
