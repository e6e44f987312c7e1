/* server.h: the server between its sockets and its engine: the libuv loop, the endpoints, start,
 * drain and stop. One thread, the caller's of server_run(). */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_SERVER_H
#define INFER_SERVER_SERVER_H

#include "common/text/chat_template.h"
#include "infer-server/engine/engine.h"
#include "common/http/http.h"

struct server_options { // all borrowed
    struct engine_options engine;
    struct http_options http; // but for its routes and context
    const char *model_name;   // NULL: the folder's last part
    struct chat_template_choice chat_template;
    int tool_parser;     // of tool_parser_names
    int accept_unknown;  // 1: fields that the protocol does not know are logged, not refused
    int unix_fd, tcp_fd; // listening; -1: none. Taken over
    int64_t drain_timeout_s;
};

// Serves until SIGTERM, SIGINT or SIGHUP and everything in flight has ended (ST_OK), or the engine
// has failed.
enum status server_run(const struct server_options *options);

#endif
