/* shard_join.h: whole Hugging Face tensors out of the slices that ranks hold, for checkpoints, and
 * a rank's slice out of a whole tensor. Host memory. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_SHARD_JOIN_H
#define COMMON_MODEL_SHARD_JOIN_H

#include "common/model/weights.h"
#include "kernels/comm.h"

struct shard_join; // NULL: one rank holds all

// comm: the ranks that hold the shards of w's model; NULL gives NULL. Both are borrowed.
enum status shard_join_new(const struct weights *w, struct device *dev, struct comm *comm,
                           struct shard_join **ret);
void shard_join_free(struct shard_join *j);
// Tensor i of all ranks into rank 0's `whole` (others give NULL), entries of `element` bytes; every
// rank calls it for the same tensors. Waits.
enum status shard_join_tensor(struct shard_join *j, int i, const void *own, size_t element,
                              void *whole);

// What is held of a whole tensor.
void shard_take(const struct weight_tensor *t, const void *whole, size_t element, void *ret_own);
int64_t shard_whole_elements(const struct weight_tensor *t);

#endif
