/* http_client.h: HTTP/1.1 to the daemon over its Unix socket (libcurl). One thread a client; the
 * connection is kept. Every call has a deadline. A refused or broken connection is ST_PEER_GONE;
 * an answer other than 2xx is an error whose sentence is the server's own ("error": {"message"}),
 * with 429 and 503 as ST_BUSY, 4xx as ST_INVALID, others as ST_IO. */
#ifndef COMMON_HTTP_HTTP_CLIENT_H
#define COMMON_HTTP_HTTP_CLIENT_H

#include "common/base/bytes.h"
#include <jansson.h>

struct http_client;

enum status http_client_new(const char *socket_path, struct http_client **ret);
void http_client_free(struct http_client *c);
enum status http_get(struct http_client *c, const char *path, int timeout_ms,
                     struct bytes *ret_body);
enum status http_get_json(struct http_client *c, const char *path, int timeout_ms, json_t **ret);
enum status http_post_json(struct http_client *c, const char *path, const json_t *body,
                           int timeout_ms, json_t **ret); // body NULL: {}; ret may be NULL

// POSTs and hands over each line of an NDJSON answer as it arrives (without the newline). The line
// function's failure ends the transfer and is returned. idle_timeout_ms: longest gap between bytes;
// timeout_ms: whole call (0: none). alive(), if given, is asked every 100 ms or so, and its failure
// ends the call too (a daemon that was killed must be noticed within 2 s). Neither function may use
// the same client.
typedef enum status (*http_line_fn)(void *context, const char *line, size_t len);
enum status http_post_lines(struct http_client *c, const char *path, const json_t *body,
                            int timeout_ms, int idle_timeout_ms, http_line_fn on_line,
                            enum status (*alive)(void *context), void *context);

#endif
