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
// Returns once it serves. Its folder, with its log, stays where it does not come to that.
enum status private_server_new(const struct private_server_options *options,
                               struct private_server **ret);
const char *private_server_bridge(const struct private_server *s); // path of its bridge file
void private_server_free(struct private_server *s); // ends it, its folder goes; NULL is fine

#endif
