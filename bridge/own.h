/* own.h: weights that this process itself owns and writes, without a server: the owner's side of
 * the bridge in a process whose other threads are the writer's side (attach.h, bridge_own()).
 * Private to bridge/. */
#ifndef BRIDGE_OWN_H
#define BRIDGE_OWN_H

#include "bridge/bridge_file.h"
#include "bridge/control.h"
#include "kernels/device.h"

struct own_weights;

// Takes role->bytes of the device's memory, which load() fills with the weights of role->model
// before the page's version becomes even, and starts the thread that lets the writer write.
enum status own_weights_new(struct device *dev, const struct bridge_role *role,
                            enum status (*load)(void *context, void *base), void *context,
                            struct own_weights **ret);
void own_weights_free(struct own_weights *o); // NULL is fine
// Also the writer's: of one process, they share the mapping.
struct control *own_weights_control(struct own_weights *o);
void *own_weights_base(struct own_weights *o);

#endif
