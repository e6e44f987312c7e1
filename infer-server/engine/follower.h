/* follower.h: a rank of a tensor-parallel server other than 0 (group.h): holds its shard of the
 * weights and of the KV cache, and does what rank 0 orders. It has no sockets of its own. */
#ifndef INFER_SERVER_FOLLOWER_H
#define INFER_SERVER_FOLLOWER_H

#include "infer-server/engine/engine.h"

// Until rank 0 ends, which is ST_OK. Main thread.
enum status follower_run(const struct engine_options *options);

#endif
