/* private_server.h: a cw-infer-server of a model folder for this process alone, on a socket and a
 * bridge file in a temporary folder, which end with it. The main thread. */
#ifndef TRAINER_PRIVATE_SERVER_H
#define TRAINER_PRIVATE_SERVER_H

#include "common/base/status.h"
#include <stdatomic.h>
#include <stdbool.h>

#define PRIVATE_ADAPTER "adapter"

struct private_server;
struct private_server_options {
    const char *model, *device;
    const char *adapter;           // PEFT folder, served as PRIVATE_ADAPTER; NULL: none
    const char *arguments;         // further ones, as a shell reads them; NULL: none
    double timeout_s;              // longest wait for its start
    const _Atomic bool *cancelled; // the start is given up: ST_CANCELLED
};
// Makes its folder and starts nothing yet; what the options name is borrowed.
enum status private_server_new(const struct private_server_options *options,
                               struct private_server **ret);
// Returns once it serves. Its folder, with its log, stays where it does not come to that.
enum status private_server_start(struct private_server *s);
const char *private_server_bridge(const struct private_server *s); // path of its bridge file
void private_server_stop(struct private_server *s);                // its folder goes; NULL is fine
// From any thread, right before the process ends, with which the server does: its folder goes.
void private_server_abandon(void *private_server);
void private_server_free(struct private_server *s); // stops it; NULL is fine

#endif
