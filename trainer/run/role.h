/* role.h: the model of one role of the bridge ("policy", "draft"), as a trainer works on it. */
#ifndef TRAINER_ROLE_H
#define TRAINER_ROLE_H

#include "bridge/attach.h"
#include "common/model/weights.h"

// Reads the role's model folder, checks that both sides lay its weights out alike, and binds them
// to the role's mapped arena. What is there of both is the caller's to free, also on failure.
enum status role_open(struct bridge *bridge, const struct bridge_role *role,
                      struct model_config **ret_model, struct weights **ret_weights);

#endif
