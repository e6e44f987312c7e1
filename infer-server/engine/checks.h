/* checks.h: what an engine is started with and asked for, checked before anything is done about it.
 * No state; any thread. */
#ifndef INFER_SERVER_CHECKS_H
#define INFER_SERVER_CHECKS_H

#include "common/model/config.h"
#include "infer-server/engine/engine.h"

// Fills in the defaults. ST_INVALID names the option.
enum status checks_options(struct engine_options *options);
// ST_INVALID names the field: what a model and an engine like these can never do.
enum status checks_request(const struct engine_options *options, const struct model_config *config,
                           const struct request *r);

#endif
