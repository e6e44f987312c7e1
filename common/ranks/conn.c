/* conn.c: frames, their MACs, and the socket. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/rendezvous.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/json.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAC_BYTES  HASH_SHA256_BYTES
#define HEAD_BYTES (4 + MAC_BYTES)

void conn_open(struct conn *w, int fd, const char *token)
{
    *w = (struct conn){.fd = fd};
    snprintf(w->token, sizeof w->token, "%s", token);
}

void conn_close(struct conn *w)
{
    if (w->fd >= 0) close(w->fd);
    bytes_release(&w->in);
    bytes_release(&w->out);
    *w = (struct conn){.fd = -1};
}

static void mac(const char *token, const unsigned char nonce[CONN_NONCE], const char *text,
                size_t len, unsigned char ret[MAC_BYTES])
{
    struct bytes sealed = BYTES_INIT;
    bytes_append(&sealed, nonce, CONN_NONCE);
    bytes_append(&sealed, text, len);
    // without memory a MAC that nobody accepts
    if (sealed.failed || !HMAC(EVP_sha256(), token, (int)strlen(token),
                               (const unsigned char *)sealed.data, sealed.len, ret, NULL))
        memset(ret, 0, MAC_BYTES);
    bytes_release(&sealed);
}

// ---- sending ------------------------------------------------------------------------------------

static enum status introduce(struct conn *w, json_t *message)
{
    char hex[2 * CONN_NONCE + 1];
    if (getrandom(w->own_nonce, CONN_NONCE, 0) != CONN_NONCE)
        return status_fail(ST_IO, "no random numbers for a nonce: %s", strerror(errno));
    for (size_t i = 0; i < CONN_NONCE; i++) snprintf(hex + 2 * i, 3, "%02x", w->own_nonce[i]);
    w->introduced = true;
    return json_object_set_new(message, "nonce", json_string(hex)) == 0
               ? ST_OK
               : status_fail(ST_NO_MEMORY, "no memory for a message");
}

enum status conn_send(struct conn *w, json_t *message)
{
    struct bytes text = BYTES_INIT;
    unsigned char head[HEAD_BYTES];
    enum status st;
    if (w->fd < 0) FAIL(ST_PEER_GONE, "the connection is closed");
    if (message && !w->introduced) CHECK(introduce(w, message));
    CHECK(json_put_line(&text, json_incref(message), 0));
    if (text.len > CONN_MESSAGE_MAX)
        FAIL(ST_TOO_LONG, "a message between ranks of %zu bytes; %d is the most", text.len,
             CONN_MESSAGE_MAX);
    for (int i = 0; i < 4; i++) head[i] = (unsigned char)(text.len >> (24 - 8 * i));
    mac(w->token, w->peer_nonce, text.data, text.len, head + 4);
    bytes_append(&w->out, head, sizeof head);
    bytes_append(&w->out, text.data, text.len);
    CHECK(bytes_status(&w->out));
    st = conn_flush(w);
out:
    json_decref(message);
    bytes_release(&text);
    return st;
}

enum status conn_flush(struct conn *w)
{
    size_t sent = 0;
    enum status st = ST_OK;
    while (w->fd >= 0 && sent < w->out.len) {
        const ssize_t n = send(w->fd, w->out.data + sent, w->out.len - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) FAIL(ST_PEER_GONE, "the connection broke: %s", strerror(errno));
        sent += (size_t)n;
    }
out:
    if (sent > 0) {
        memmove(w->out.data, w->out.data + sent, w->out.len - sent);
        w->out.len -= sent;
    }
    return st;
}

enum status conn_drain(struct conn *w, int64_t deadline_ns)
{
    enum status st;
    CHECK(conn_flush(w));
    while (w->out.len > 0) {
        struct pollfd p = {.fd = w->fd, .events = POLLOUT};
        const int ms = clock_ms_until(deadline_ns);
        if (ms == 0) FAIL(ST_TIMEOUT, "the other side does not read");
        poll(&p, 1, ms);
        CHECK(conn_flush(w));
    }
out:
    return st;
}

// ---- receiving ----------------------------------------------------------------------------------

static enum status learn_nonce(struct conn *w, const json_t *message)
{
    const char *hex = NULL;
    enum status st;
    CHECK(json_get_string("a rank's message", message, "nonce", &hex));
    if (!hex) return ST_OK;
    if (strlen(hex) != 2 * CONN_NONCE) FAIL(ST_FORMAT, "a rank's message has a broken nonce");
    for (size_t i = 0; i < CONN_NONCE; i++) {
        unsigned byte;
        if (sscanf(hex + 2 * i, "%2x", &byte) != 1)
            FAIL(ST_FORMAT, "a rank's message has a broken nonce");
        w->peer_nonce[i] = (unsigned char)byte;
    }
out:
    return st;
}

enum status conn_next(struct conn *w, json_t **ret)
{
    const unsigned char *head = (const unsigned char *)w->in.data;
    unsigned char right[MAC_BYTES];
    json_t *message = NULL;
    size_t len = 0;
    enum status st = ST_OK;
    *ret = NULL;
    if (w->in.len < HEAD_BYTES) return ST_OK;
    for (int i = 0; i < 4; i++) len = len << 8 | head[i];
    if (len > CONN_MESSAGE_MAX)
        FAIL(ST_FORMAT, "what answers there speaks no language of ranks (a message of %zu bytes)",
             len);
    if (w->in.len < HEAD_BYTES + len) return ST_OK;
    mac(w->token, w->own_nonce, w->in.data + HEAD_BYTES, len, right);
    if (CRYPTO_memcmp(right, head + 4, MAC_BYTES) != 0)
        FAIL(ST_MISMATCH, "it has another token than this rank");
    CHECK(json_parse("a rank's message", w->in.data + HEAD_BYTES, len, &message));
    if (!json_is_object(message)) FAIL(ST_FORMAT, "a rank's message is no JSON object");
    CHECK(learn_nonce(w, message));
    w->in.len -= HEAD_BYTES + len;
    memmove(w->in.data, w->in.data + HEAD_BYTES + len, w->in.len);
    *ret = TAKE_PTR(message);
out:
    json_decref(message);
    return st;
}

enum status conn_receive(struct conn *w, json_t **ret)
{
    char part[4096];
    *ret = NULL;
    enum status st = conn_next(w, ret);
    if (st != ST_OK || *ret) return st;
    const ssize_t n = w->fd < 0 ? 0 : recv(w->fd, part, sizeof part, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return ST_OK;
    if (n < 0) return status_fail(ST_PEER_GONE, "the connection broke: %s", strerror(errno));
    if (n == 0) return status_fail(ST_PEER_GONE, "the connection was closed");
    bytes_append(&w->in, part, (size_t)n);
    st = bytes_status(&w->in);
    return st == ST_OK ? conn_next(w, ret) : st;
}

enum status conn_await(struct conn *w, int64_t deadline_ns, json_t **ret)
{
    for (;;) {
        enum status st = conn_receive(w, ret);
        if (st != ST_OK || *ret) return st;
        struct pollfd p = {.fd = w->fd, .events = POLLIN};
        const int ms = clock_ms_until(deadline_ns);
        if (ms == 0) return status_fail(ST_TIMEOUT, "nothing is heard on the connection");
        poll(&p, 1, ms);
    }
}

// Closing with something unread would take back what is under way.
void conn_finish(struct conn *w, int64_t deadline_ns)
{
    json_t *message = NULL;
    enum status st = conn_drain(w, deadline_ns);
    if (st == ST_OK) shutdown(w->fd, SHUT_WR);
    while (st == ST_OK) {
        st = conn_await(w, deadline_ns, &message);
        json_decref(message);
    }
}
