/* http.h: HTTP/1.1 for handlers that answer later: libmicrohttpd run from the libuv loop. All on
 * the loop's thread.
 *
 * A handler is called once the whole body is there. It answers at once (http_reply...), or
 * later from any other callback of the loop, or opens a stream whose text a producer hands over
 * piece by piece as the client takes it: nothing is queued for a client that does not read. While
 * nothing is to be said the connection sleeps; that the client has left is noticed within 100 ms.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_HTTP_HTTP_H
#define COMMON_HTTP_HTTP_H

#include "common/base/bytes.h"
#include <jansson.h>
#include <pthread.h>
#include <uv.h>

struct http;
struct http_request; // gone after on_close

typedef void (*http_handler)(void *context, struct http_request *q);
// Who may ask, over TCP; on the Unix socket everybody may.
enum http_access {
    HTTP_NEEDS_KEY, // the API key, where there is one
    HTTP_OPEN,      // anybody
    HTTP_ADMIN      // changes the server or shows its insides: only with an API key
};
struct http_route {
    const char *method, *path; // "GET" also serves HEAD; path NULL ends the table; "/a/*": all
                               // below /a/ (http_path_tail)
    http_handler handle;
    enum http_access access;
    int which; // of the requests that the handler serves
};

struct http_options { // all borrowed
    const struct http_route *routes;
    const char *page; // that lists them
    void *context;
    const char *api_key;              // for TCP; NULL: none
    const char *const *allowed_hosts; // beside loopback's, without a key; NULL-ended, or NULL
    int64_t max_body, max_buffered;   // bytes: of one request, of all under way
    int64_t max_connections;
    int64_t idle_timeout_s;    // no byte from or to the client (sweep.c: every phase has an end)
    int64_t request_timeout_s; // from the whole request to the end of its answer
};

// uv_loop_init() with a sentence; nothing may be done with a loop that has none.
enum status http_loop_init(uv_loop_t *loop);
void http_loop_close(uv_loop_t *loop); // once all of its handles are closed, which this does
enum status http_new(uv_loop_t *loop, const struct http_options *options, struct http **ret);
// Takes a listening socket over. At most two.
enum status http_listen(struct http *h, int fd, bool tcp);
int http_open_requests(const struct http *h);
void http_close(struct http *h); // ends every connection; memory goes when the loop has run once
                                 // more, and with the last body that was taken

// ---- one request ------------------------------------------------------------------------------
// The body, for work that may outlive the request, which has none any more. It may be read by
// another thread; it is released on the loop's. All zero: none.
struct http_body {
    struct http *http;
    struct bytes bytes;
};
void http_take_body(struct http_request *q, struct http_body *ret);
void http_body_release(struct http_body *body);
int http_which(const struct http_request *q);                           // its route's
const char *http_query(const struct http_request *q, const char *name); // NULL: not given
// Whether the URL has no other parameter than these (NULL-ended); else the request has its answer.
bool http_takes_only(struct http_request *q, const char *const *names);
const char *http_path_tail(const struct http_request *q); // of the path, behind a route's "/a/"
const char *http_header_of(const struct http_request *q, const char *name); // NULL: not given
// X-Request-Id as the client sent it, or one made up; it stands in the response's header.
const char *http_request_id(const struct http_request *q);
// What the handler wants to find again; on_close runs exactly once, when the answer is out or the
// client has left (answered: false).
void http_attach(struct http_request *q, void *attached,
                 void (*on_close)(void *attached, bool answered));
bool http_replied(const struct http_request *q);
bool http_expired(const struct http_request *q); // request_timeout has passed: streams must end

void http_header(struct http_request *q, const char *name, const char *value); // before the reply
void http_reply(struct http_request *q, unsigned code, const char *content_type,
                struct bytes *body); // takes the body's memory
void http_reply_json(struct http_request *q, unsigned code, json_t *value); // takes the reference
// OpenAI's error object, whose "param" is the first quoted word of the sentence. Its type goes with
// the code: 404 is a "not_found_error"...
void http_fail(struct http_request *q, unsigned code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// `name` is OpenAI's word for the fault, where clients look for one; NULL: "code" is the status.
void http_fail_as(struct http_request *q, unsigned code, const char *name, const char *type,
                  const char *sentence);
// The last error of this thread (status.h) as the HTTP status that fits: ST_INVALID 400, ST_BUSY
// 429...
void http_fail_status(struct http_request *q, enum status st);
void http_error_object(struct bytes *to, unsigned code, const char *name, const char *type,
                       const char *sentence);

// FAIL: the connection is cut, so that the client does not take what it has for the whole.
enum stream_state { STREAM_MORE, STREAM_WAIT, STREAM_END, STREAM_FAIL };
// Appends some text: more may follow at once, or later (http_wake), or never.
typedef enum stream_state (*stream_producer)(void *attached, struct http_request *q,
                                             struct bytes *to);
// n_bytes: in all, which the client is told; a slow one has a second more for each 64 KiB. -1:
// nobody knows.
void http_stream(struct http_request *q, const char *content_type, int64_t n_bytes,
                 stream_producer produce);
void http_wake(struct http_request *q); // the producer has something

// ---- messages from other threads ----------------------------------------------------------------
// A locked list and a uv_async_t. Posting never blocks for longer than the list's lock is held (a
// few instructions). What may lie in it is bounded by what the server has admitted: a message is
// one step's tokens, or the end of a command.

// One message; embed it first in a malloc'ed struct. deliver() runs on the loop's thread and owns
// the memory from then on.
struct inbox_message {
    struct inbox_message *next;
    void (*deliver)(struct inbox_message *message);
};

struct inbox {
    uv_async_t async;
    pthread_mutex_t lock;
    struct inbox_message *first, **last;
};
enum status inbox_init(struct inbox *box, uv_loop_t *loop);
void inbox_post(struct inbox *box, struct inbox_message *message); // any thread
// Delivers what is left and closes the handle, for which the loop has to run once more. One that
// was never made is fine.
void inbox_close(struct inbox *box);

#endif
