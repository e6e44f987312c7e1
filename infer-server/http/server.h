/* server.h: the server between its sockets and its engine: the libuv loop, the endpoints, start,
 * drain and stop. One thread, the caller's of server_run(). */
#ifndef INFER_SERVER_SERVER_H
#define INFER_SERVER_SERVER_H

#include "common/model/chat_template.h"
#include "infer-server/engine/engine.h"
#include <stdint.h>

struct server_options { // all borrowed
    struct engine_options engine;
    const char *model_name; // NULL: the folder's last part
    struct chat_template_choice chat_template;
    const char *api_key; // for the TCP listener; NULL: none
    const char *socket_path;
    bool accept_unknown;              // fields that the protocol does not know: logged, not refused
    int unix_fd, tcp_fd;              // listening; -1: none. Taken over
    const char *const *allowed_hosts; // of requests over TCP without a key; NULL-ended, or NULL
    int64_t max_body, max_buffered;   // bytes
    int max_connections, idle_timeout_s, request_timeout_s, drain_timeout_s;
};

// Serves until SIGTERM or SIGINT and everything in flight has ended (ST_OK), or the engine has
// failed.
enum status server_run(const struct server_options *options);

#endif
