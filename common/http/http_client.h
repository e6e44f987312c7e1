/* http_client.h: HTTP/1.1 to servers over Unix sockets and TCP (libcurl), any number of requests in
 * flight. One thread a client; connections are kept and used again.
 *
 * An error names its request. A refused or broken connection is ST_PEER_GONE; a response other than
 * 2xx is an error whose sentence is the server's own ("error": {"message"}), with 429 and 503 as
 * ST_BUSY, 4xx as ST_INVALID, others as ST_IO. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_HTTP_HTTP_CLIENT_H
#define COMMON_HTTP_HTTP_CLIENT_H

#include "common/base/bytes.h"
#include <jansson.h>
#include <poll.h>

struct http_client;
struct http_transfer; // in flight, or ended and not yet finished

// server: a Unix socket's path, or "http://HOST:PORT". ST_INVALID: longer than a socket's can be.
enum status http_client_new(const char *server, struct http_client **ret);
void http_client_free(struct http_client *c); // cancels what is in flight
// Sends "Authorization: Bearer KEY" with every request over TCP from here on. Once a client.
enum status http_client_authorize(struct http_client *c, const char *key);
// Another of the same server and key, for another thread.
enum status http_client_another(const struct http_client *c, struct http_client **ret);

// One line of an NDJSON response, as it arrives and without its newline. Its failure ends the
// request and is its result. Neither it nor alive() may use the same client.
typedef enum status (*http_line_fn)(void *context, const char *line, size_t len);

struct http_call { // all borrowed until http_submit() returns, the context until the request ends
    const char *server; // NULL: the client's
    const char *path;
    const json_t *body;                  // of a POST; NULL: it is a GET, or {}
    bool post;                           // also without a body
    int timeout_ms;                      // of the whole; 0: none
    int idle_timeout_ms;                 // longest gap between bytes; 0: none
    http_line_fn on_line;                // NULL: the whole body is http_finish()'s
    enum status (*alive)(void *context); // asked every 100 ms; its failure ends the request
    void *context;
};

// Puts a request in flight. What happens to it then happens inside http_poll() and http_finish().
enum status http_submit(struct http_client *c, const struct http_call *call,
                        struct http_transfer **ret);
// Drives everything in flight until one request ends, or for `ms`.
void http_poll(struct http_client *c, int ms);
// For a thread that waits for other descriptors too, at most HTTP_MAX_FDS: returns once anything
// moved, one of these is ready, or after `ms`, at most 100.
#define HTTP_MAX_FDS 512
void http_poll_with(struct http_client *c, const struct pollfd *fds, int n, int ms);
bool http_ended(const struct http_transfer *r);
// Drives until this one has ended, gives its result, and frees it. ret_body: NULL, or an
// initialised buffer whose content the body replaces.
enum status http_finish(struct http_transfer *r, struct bytes *ret_body);
// Frees it, ended or not; one that is not over closes its connection. NULL is fine.
void http_cancel(struct http_transfer *r);

// One request from beginning to end.
enum status http_perform(struct http_client *c, const struct http_call *call,
                         struct bytes *ret_body);
enum status http_get(struct http_client *c, const char *path, int timeout_ms,
                     struct bytes *ret_body);
// A POST of a body whose reference it takes; NULL: there was no memory for it.
enum status http_post(struct http_client *c, const char *path, json_t *body, int timeout_ms);
// Likewise, of a response that is JSON.
enum status http_perform_json(struct http_client *c, const struct http_call *call, json_t **ret);
enum status http_get_json(struct http_client *c, const char *path, int timeout_ms, json_t **ret);

#endif
