/* bridge_json.h: what the readers and the writer of the bridge file share: fields of a JSON object
 * that must be there (`where` names the object in errors, which are ST_FORMAT), and a role's
 * tensors. Private to bridge_file.c and bridge_tensors.c. Pure functions. */
// SPDX-License-Identifier: Apache-2.0
#ifndef BRIDGE_BRIDGE_JSON_H
#define BRIDGE_BRIDGE_JSON_H

#include "bridge/bridge_file.h"
#include <jansson.h>

#define BRIDGE_MAX_TENSORS  1000000 // of a role
#define BRIDGE_CANARY_BYTES 16      // the checker's word and the server's answer, 64 bits each

// N of "cuda:N"; -1 for the CPU and for anything else.
int bridge_device_number(const char *device);
// 1 to size - 1 characters.
enum status bridge_need_string(const char *where, const json_t *object, const char *key, char *ret,
                               size_t size);
enum status bridge_need_int(const char *where, const json_t *object, const char *key, int64_t min,
                            int64_t max, int64_t *ret);
// words: what it must be, "a list".
enum status bridge_need_value(const char *where, const json_t *object, const char *key,
                              json_type type, const char *words, const json_t **ret);
// "dtype", as torch writes it.
enum status bridge_need_dtype(const char *where, const json_t *object, enum dtype *ret);

// The device that a role's arena is on: the file's, but for other ranks' shards.
bool bridge_is_shard(const struct bridge_role *role);
const char *bridge_role_device(const struct bridge_file *file, const struct bridge_role *role);

// The tensors of one role.
// Adds the keys to `object`. ST_INVALID where a tensor's bytes do not fit its shape.
enum status bridge_tensors_put(json_t *object, const struct bridge_file *file,
                               const struct bridge_role *role);
// Reads them into role->tensors, role's other fields being read already.
enum status bridge_tensors_read(const char *where, const json_t *object,
                                const struct bridge_file *file, struct bridge_role *role);

#endif
