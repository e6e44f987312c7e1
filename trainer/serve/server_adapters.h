/* server_adapters.h: the adapters that the server holds, as `serve` has them made, copied, loaded
 * and unloaded, over the server's socket. Their names begin with ADAPTER_PREFIX, by which those
 * that a dead process left are known. The main thread. */
#ifndef TRAINER_SERVE_SERVER_ADAPTERS_H
#define TRAINER_SERVE_SERVER_ADAPTERS_H

#include "common/base/status.h"
#include <jansson.h>

#define ADAPTER_PREFIX "tinker:"

struct http_client;

struct server_adapters {
    struct http_client *http;
    int max, max_rank; // --max-adapters, --max-lora-rank
};
// socket: the server's. Unloads what a process before left; waits for a server that restores torn
// weights.
enum status server_adapters_open(const char *socket, struct server_adapters *ret);
enum status server_adapters_count(struct server_adapters *a, int *ret); // that there are now
// One more, of what `key` names (value's reference is taken): new by a PEFT "config" (which changes
// nothing yet), "copy_of" another's weights as they are now, or "lora_path", a PEFT folder.
enum status server_adapters_load(struct server_adapters *a, const char *name, const char *key,
                                 json_t *value);
// This process has it mapped no more.
enum status server_adapters_unload(struct server_adapters *a, const char *name);

#endif
