/* kv_memory.h: the device memory of a runner's KV block pool, how many blocks the pools may have,
 * and copies of a block. The engine's thread. */
#ifndef INFER_SERVER_KV_MEMORY_H
#define INFER_SERVER_KV_MEMORY_H

#include "common/model/config.h"
#include "kernels/batch_view.h"
#include "kernels/device.h"

struct kv_memory {
    struct device *dev;
    struct kv_view view;
    struct kv_layer *layers; // (n_layers) of the view
    int n_layers;
};

struct kv_request {
    int64_t bytes;        // 0: percent of what the device has free
    double percent;       // 0: 30
    int block_size;       // tokens
    int max_batch;        // sequences
    int max_context;      // tokens a sequence, requested
    bool context_is_firm; // the user named max_context: less is an error, else it shrinks to fit
    int64_t block_bytes;  // of a block, in all runners' pools together
};

// How many blocks each pool gets (never more than max_batch sequences of max_context can use).
// *ret_context is the longest sequence that fits: max_context, or less where that is not firm.
// ST_INVALID or ST_NO_MEMORY name what to change. Call it when all else is allocated.
enum status kv_memory_plan(struct device *dev, const struct kv_request *request, int *ret_blocks,
                           int *ret_context);

// Bytes of one block: keys and values of all layers.
int64_t kv_memory_block_bytes(const struct model_config *config, enum dtype dt, int block_size);
// Allocates a pool of so many blocks.
enum status kv_memory_alloc(struct kv_memory *m, struct device *dev,
                            const struct model_config *config, enum dtype dt, int block_size,
                            int n_blocks);
void kv_memory_release(struct kv_memory *m);

// Enqueues a copy of a whole block, every layer's keys and values.
void kv_memory_copy_block(const struct kv_memory *m, int32_t from, int32_t to);

#endif
