/* canned_server.h: an HTTP server of a test's own making, on a Unix socket and on a TCP port of
 * 127.0.0.1: a child process accepts, and a child of that serves each connection. Failures fail the
 * running test; in a child they end it. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_CANNED_SERVER_H
#define TESTS_SUPPORT_CANNED_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct canned_server {
    const char *socket; // path
    char url[32];       // "http://127.0.0.1:PORT"
    pid_t pid;
};

// serve: one connection, until it returns; in a process of its own.
void canned_server_start(struct canned_server *s, void (*serve)(int fd));
void canned_server_stop(struct canned_server *s); // kills it, with its connections

// Reads one request with its body; false at the end of the connection.
bool canned_request(int fd, char *request, size_t size);
bool canned_is(const char *request, const char *path); // its path begins so
const char *canned_body(const char *request);
void canned_text(int fd, const char *text); // as it is
void canned_response(int fd, const char *status, const char *body);
void canned_chunked(int fd); // the head of a response in chunks
void canned_chunk(int fd, const char *body);
void canned_end(int fd); // of the chunks

#endif
