/* parse.h: request bodies parsed in libuv's thread pool: megabytes of JSON and text take seconds,
 * in which the loop has others to serve. */
#ifndef INFER_SERVER_PARSE_H
#define INFER_SERVER_PARSE_H

#include "infer-server/http/api.h"
#include "infer-server/http/http.h"

// Parses the body, which it takes over, and calls done() on the loop's thread, later, exactly once:
// the request is done()'s; where st is not ST_OK its sentence is recorded and there is none. On
// failure done() is not called.
//
// The model's facts are copied; what they point to must not change or go until done() was called:
// the pool's thread reads the tokenizer and the chat template while others do.
typedef void (*parse_done)(void *context, enum status st, struct api_request *request);
enum status parse_body(uv_loop_t *loop, enum api_kind kind, const struct api_model *model,
                       struct http_body *body, parse_done done, void *context);

#endif
