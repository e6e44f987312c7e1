/* replicas.h: what several ranks hold alike of a sharded model (common/model/shard.h), in training:
 * its gradients must be the same on all of them, and it counts once in the gradients' norm. NULL is
 * a model that is not sharded, for which every call does nothing. The trainer's thread. */
#ifndef TRAINER_REPLICAS_H
#define TRAINER_REPLICAS_H

#include "kernels/comm.h"
#include "trainer/learn/param_range.h"

struct replicas;

// Gradients that this rank keeps: all of them, or a part where ranks divide the optimizer's work
// (param_range.h). shared: all of those keep them.
struct gradient_run {
    float *at;
    int64_t n;
    bool shared;
};

// comm: the model's ranks; NULL gives NULL. gradients (device, f32): of the ranges, one after the
// other. kept: in no order; read here only. The rest is borrowed.
enum status replicas_new(struct device *dev, struct comm *comm, const struct param_ranges *trained,
                         float *gradients, const struct gradient_run *kept, int n_kept,
                         struct replicas **ret);
void replicas_free(struct replicas *r);
// Sums the gradients of which each rank computed a part, that of its own heads: norms of queries
// and keys, and keys and values that ranks share. Others are the same on all ranks already. Once,
// behind the step's last backward pass; enqueues.
void replicas_sum(struct replicas *r);
// From sums of squares of the gradients that this rank keeps alone, and of the shared ones, takes
// what other shards' ranks count. Waits.
enum status replicas_discount(struct replicas *r, double *alone, double *shared);
// Adds up what each shard's rank has counted: the same bits on all of them. Waits.
enum status replicas_add_shards(struct replicas *r, double *sum);

#endif
