/* epoch_plan.c: puts the examples of each bucket behind those of the one before, in the data's
 * order, divides them into batches as equal as can be, and shuffles the batches. No state but the
 * caller's. */
#include "trainer/curriculum/epoch_plan.h"
#include "common/base/rng.h"

#include <math.h>
#include <stdlib.h>

#define BATCH_STREAM ((uint64_t)1 << 33) // apart from the data order's and the sampler's streams

enum status epoch_plan_init(struct epoch_plan *p, uint64_t seed, int n_examples, int batch_size)
{
    // each bucket's last batch may hold less
    const size_t max_batches = (size_t)(n_examples / batch_size) + BUCKETS_MAX + 1;
    p->examples = calloc((size_t)n_examples, sizeof *p->examples);
    p->batches = calloc(max_batches, sizeof *p->batches);
    if (!p->examples || !p->batches)
        return status_fail(ST_NO_MEMORY, "no memory for an epoch of %d examples", n_examples);
    return data_order_init(&p->order, seed, n_examples);
}

void epoch_plan_release(struct epoch_plan *p)
{
    data_order_release(&p->order);
    free(p->examples);
    free(p->batches);
}

// Puts one bucket's examples behind `first`, and their batches; where the next bucket's begin.
static int plan_bucket(struct epoch_plan *p, int64_t epoch, const struct epoch_buckets *buckets,
                       int bucket, int first)
{
    const int max = buckets->batch_size;
    int n = 0;
    for (int i = 0; i < p->order.n; i++) {
        int example = data_order_at(&p->order, epoch * p->order.n + i);
        if (buckets->of[example] == bucket) p->examples[first + n++] = example;
    }
    const int batches = n / max + (n % max != 0);
    for (int b = 0, done = 0; b < batches; b++) {
        int size = (n - done) / (batches - b);
        p->batches[p->n_batches++] =
            (struct prompt_batch){first + done, size, bucket, buckets->rollouts[bucket + 1]};
        done += size;
    }
    return first + n;
}

static void shuffle_batches(struct epoch_plan *p, int64_t epoch)
{
    struct rng rng;
    rng_init(&rng, p->order.seed, BATCH_STREAM + (uint64_t)epoch);
    for (int k = p->n_batches - 1; k > 0; k--) {
        int other = (int)rng_below(&rng, (uint32_t)k + 1);
        struct prompt_batch swap = p->batches[k];
        p->batches[k] = p->batches[other];
        p->batches[other] = swap;
    }
}

// Each batch gets the mean, rounded down or up.
static void spread_evenly(struct epoch_plan *p)
{
    double wanted = 0;
    for (int b = 0; b < p->n_batches; b++) {
        struct prompt_batch *batch = &p->batches[b];
        wanted += p->mean_rollouts * batch->n;
        double each = round(wanted / batch->n);
        each = fmin(fmax(each, floor(p->mean_rollouts)), ceil(p->mean_rollouts));
        batch->rollouts = (int)each;
        wanted -= each * batch->n;
    }
}

void epoch_plan_make(struct epoch_plan *p, int64_t epoch, const struct epoch_buckets *buckets)
{
    int64_t samples = 0;
    int first = 0;
    p->n_batches = 0;
    for (int bucket = UNSEEN; bucket < buckets->n; bucket++)
        first = plan_bucket(p, epoch, buckets, bucket, first);
    shuffle_batches(p, epoch);
    for (int b = 0; b < p->n_batches; b++)
        samples += (int64_t)p->batches[b].n * p->batches[b].rollouts;
    p->mean_rollouts = (double)samples / p->order.n;
    if (buckets->even) spread_evenly(p);
}
