/* bridge_tensors.h: the tensors of one role in the bridge file. Private to bridge_file.c. */
#ifndef BRIDGE_BRIDGE_TENSORS_H
#define BRIDGE_BRIDGE_TENSORS_H

#include "bridge/bridge_file.h"
#include <jansson.h>

// Adds the keys to `object`. ST_INVALID where a tensor's bytes do not fit its shape.
enum status bridge_tensors_put(json_t *object, const struct bridge_file *file,
                               const struct bridge_role *role);
// Reads them into role->tensors, role's other fields being read already.
enum status bridge_tensors_read(const char *where, const json_t *object,
                                const struct bridge_file *file, struct bridge_role *role);

#endif
