/* body_work.h: what has to be done with a request's body, in libuv's thread pool where it is large:
 * megabytes of JSON and text take seconds, in which the loop has others to serve. */
#ifndef INFER_SERVER_BODY_WORK_H
#define INFER_SERVER_BODY_WORK_H

#include "infer-server/http/http.h"

// Takes the body out of the request and calls run() with it, on any thread, then done() on the
// loop's, exactly once each; where the body is small both before this returns. The exchange may
// have gone before done().
//
// run() owns what `context` points to meanwhile, and reads beside it only what nobody changes as
// long as the server lives: the tokenizer, the chat template. It touches neither request nor
// server.
struct body_work {
    void (*run)(void *context, const char *text, size_t len);
    void (*done)(void *context);
    void *context;
};
// On failure neither is called.
enum status body_work_start(uv_loop_t *loop, struct http_request *q, const struct body_work *work);

#endif
