/* epoch_plan.h: the steps of an epoch whose examples lie in buckets: a permutation of the examples,
 * and batches over it, each of one bucket. A function of the seed, the epoch and each example's
 * bucket, so it is never saved. One thread. */
#ifndef TRAINER_EPOCH_PLAN_H
#define TRAINER_EPOCH_PLAN_H

#include "trainer/curriculum/buckets.h"
#include "trainer/data/data_order.h"
#include <stdbool.h>

#define UNSEEN (-1) // bucket of an example without a reward

struct prompt_batch {
    int first, n; // of `examples`
    int bucket, rollouts;
};
struct epoch_plan { // zeroed: not planned
    struct data_order order;
    int *examples;                // (order.n)
    struct prompt_batch *batches; // (n_batches)
    int n_batches;
    double mean_rollouts; // over the epoch's examples
};

enum status epoch_plan_init(struct epoch_plan *p, uint64_t seed, int n_examples, int batch_size);
void epoch_plan_release(struct epoch_plan *p);

struct epoch_buckets {
    const int8_t *of;              // (order.n) bucket of each example, from UNSEEN on
    int n;                         // of buckets, UNSEEN aside
    int rollouts[BUCKETS_MAX + 1]; // of each prompt of a bucket; those of UNSEEN first
    int batch_size;                // prompts, at most
    bool even; // spread over all prompts: the same sum, as near as whole numbers allow
};
void epoch_plan_make(struct epoch_plan *p, int64_t epoch, const struct epoch_buckets *buckets);

#endif
