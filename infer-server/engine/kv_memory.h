/* kv_memory.h: the device memory of a runner's KV block pool, and of the states that layers with a
 * recurrence carry along each sequence; how many of both there may be, and copies of one. The
 * engine's thread. */
// SPDX-License-Identifier: Apache-2.0
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
    int64_t n_scales; // of a pool in e4m3
    int n_states;     // slots of the states; 0: the model has none
};

// One block or, of_state, the states of one sequence become a copy of another's.
struct kv_copy {
    int32_t from, to;
    bool of_state;
};

struct kv_request {
    int64_t bytes;        // 0: percent of what the device has free
    double percent;       // 0: 30
    int block_size;       // tokens
    int max_batch;        // sequences
    bool keeps;           // states for the prefix cache too
    int max_context;      // tokens a sequence, requested
    bool context_is_firm; // the user named max_context: less is an error, else it shrinks to fit
    int64_t block_bytes;  // of a block, in all runners' pools together
    int64_t state_bytes;  // of a sequence's states, likewise; 0: no model has any
};
struct kv_plan {
    int n_blocks;
    int max_batch;   // sequences: as requested, or for how many there are states
    int n_kept;      // states beside these, for the prefix cache: as many as sequences, or as
                     // a sixteenth of the memory has room for
    int max_context; // the longest sequence that fits: as requested, or less where not firm
};

// How many blocks each pool gets (never more than max_batch sequences of max_context can use).
// States take half of the memory at most, and an eighth of that is not
// given to sequences where states are kept. ST_INVALID or ST_NO_MEMORY name what to change. Call it
// when all else is allocated.
enum status kv_memory_plan(struct device *dev, const struct kv_request *request,
                           struct kv_plan *ret);

// Bytes of one block: keys and values of all layers. dt: of the weights; the pool is of it, or in
// e4m3 as the config's kv_cache says.
int64_t kv_memory_block_bytes(const struct model_config *config, enum dtype dt, int block_size);
// Bytes of one sequence's states in all layers; 0: the model has none.
int64_t kv_memory_state_bytes(const struct model_config *config);
// Allocates a pool of so many blocks, and states for so many sequences where the model has any.
enum status kv_memory_alloc(struct kv_memory *m, struct device *dev,
                            const struct model_config *config, enum dtype dt, int block_size,
                            int n_blocks, int n_states);
void kv_memory_release(struct kv_memory *m);

// Enqueues a copy of a whole block, every layer's keys and values.
void kv_memory_copy_block(const struct kv_memory *m, int32_t from, int32_t to);
// The same of a sequence's states.
void kv_memory_copy_state(const struct kv_memory *m, int32_t from, int32_t to);

#endif
