/* server_process.h: a server that this process starts, stops and starts again: ours, or any command
 * that serves a model folder over HTTP on a port of 127.0.0.1. One thread, which must be the one
 * that lives as long as the process: the server dies with it. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SERVER_PROCESS_H
#define TRAINER_SERVER_PROCESS_H

#include "common/base/status.h"
#include "common/http/http_client.h"

#include <stdbool.h>

struct server_process;

struct server_options {
    const char *command;   // with {model} and {port} in it; NULL: cw-infer-server of this build
    const char *device;    // of the latter
    const char *arguments; // further ones of the latter, as a shell reads them; NULL: none
    const char *before;    // what a shell reads in front of the latter: "env ..."; NULL: nothing
    bool shares; // the latter shares its weights with this process, which asks it by its socket
    int port;    // of others; 0: a free one
    // where the log and, of ours, socket and bridge file go; borrowed, and needed from the first
    // start on (by one that shares at once)
    const char *folder;
    double timeout_s;              // longest wait for its start
    const _Atomic bool *cancelled; // set while it is waited for: ST_CANCELLED; NULL: never
};
// Starts nothing yet. ST_INVALID where the command does not say where {model} and {port} go.
enum status server_process_new(const struct server_options *options, struct server_process **ret);
void server_process_free(struct server_process *s);                 // stops it; NULL is fine
const char *server_process_address(const struct server_process *s); // http://..., or its socket

// Stops the one that runs, if any, and starts it on a model folder, and on that of a draft model
// where its arguments have {draft}; returns once its /health says 200. Where it ends before that,
// or does not come to it in time, the error has the last lines of its log.
enum status server_process_restart(struct server_process *s, struct http_client *http,
                                   const char *model, const char *draft);
// POST /v1/load_lora_adapter: a server (its address; NULL: http's own) loads the folder's adapter
// under that name, in place of one that it has. alive: as of struct http_call.
enum status server_load_adapter(struct http_client *http, const char *server, const char *name,
                                const char *folder, enum status (*alive)(void *context));
// The request's body. ST_INVALID where the folder's name is not UTF-8, which JSON cannot hold.
enum status adapter_load_body(const char *name, const char *folder, json_t **ret);
// ST_PEER_GONE, with its status and the last lines of its log, where it has ended by itself, or
// does within `ms`.
enum status server_process_check(const struct server_process *s, int ms);

#endif
