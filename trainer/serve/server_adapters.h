/* server_adapters.h: the adapters that the server holds, as `serve` has them made, copied, loaded
 * and unloaded, over the server's socket. Their names begin with ADAPTER_PREFIX, by which those
 * that a dead process left are known. The main thread. */
#ifndef TRAINER_SERVE_SERVER_ADAPTERS_H
#define TRAINER_SERVE_SERVER_ADAPTERS_H

#include "common/base/status.h"
#include <jansson.h>

#define ADAPTER_PREFIX "tinker:"

struct server_adapters;
// socket: the server's. Unloads what a process before left; waits for a server that restores torn
// weights.
enum status server_adapters_open(const char *socket, struct server_adapters **ret);
void server_adapters_close(struct server_adapters *a); // NULL is fine

// What they are of: the model as it is now.
enum status server_adapters_base(struct server_adapters *a, json_t **ret);
int server_adapters_max(const struct server_adapters *a);               // --max-adapters
int server_adapters_max_rank(const struct server_adapters *a);          // --max-lora-rank
enum status server_adapters_count(struct server_adapters *a, int *ret); // that there are now

// One more: new by that config (which changes nothing yet), a copy of another's weights as they are
// now, or of a PEFT folder.
enum status server_adapters_make(struct server_adapters *a, const char *name, json_t *config);
enum status server_adapters_copy(struct server_adapters *a, const char *name, const char *of);
enum status server_adapters_load(struct server_adapters *a, const char *name, const char *folder);
// This process has it mapped no more.
enum status server_adapters_unload(struct server_adapters *a, const char *name);

#endif
