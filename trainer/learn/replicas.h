/* replicas.h: what several ranks hold alike of a sharded model (common/model/shard.h), in training:
 * its gradients must be the same on all of them, and it counts once in the gradients' norm. NULL is
 * a model that is not sharded, for which every call does nothing. The trainer's thread. */
#ifndef TRAINER_REPLICAS_H
#define TRAINER_REPLICAS_H

#include "kernels/comm.h"
#include "trainer/learn/param_range.h"

struct replicas;

// comm: the model's ranks; NULL gives NULL. gradients (device, f32): of the ranges, one after the
// other. All are borrowed.
enum status replicas_new(struct device *dev, struct comm *comm, const struct param_ranges *trained,
                         float *gradients, struct replicas **ret);
void replicas_free(struct replicas *r);
// Sums the gradients of which each rank computed a part, that of its own heads: norms of queries
// and keys, and keys and values that ranks share. Others are the same on all ranks already. Once,
// behind the step's last backward pass; enqueues.
void replicas_sum(struct replicas *r);
// From the sum of squares of this rank's gradients that of the whole model's, which has the same
// bits on all ranks. Waits.
enum status replicas_sum_squares(struct replicas *r, double *sum);

#endif
