/* own.h: weights that this process itself owns and writes, without a server: the owner's side of
 * the bridge in a process whose other threads are the writer's side (attach.h, bridge_own()).
 * Private to bridge/. */
// SPDX-License-Identifier: Apache-2.0
#ifndef BRIDGE_OWN_H
#define BRIDGE_OWN_H

#include "bridge/attach.h"

struct own_weights;

// Takes the (n) roles' bytes of the device's memory, zeros, which load() fills before the page's
// version becomes even, and starts the thread that lets the writer write. roles: borrowed for its
// life.
enum status own_weights_new(struct device *dev, const struct bridge_role *roles, int n,
                            bridge_load_fn load, void *context, struct own_weights **ret);
void own_weights_free(struct own_weights *o); // NULL is fine
// Also the writer's: of one process, they share the mapping.
struct control *own_weights_control(struct own_weights *o);
void *own_weights_base(struct own_weights *o, int role);

#endif
