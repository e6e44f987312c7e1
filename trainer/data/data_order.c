/* data_order.c: the permutation of an epoch. No state but the caller's. */
#include "trainer/data/data_order.h"
#include "common/base/rng.h"

#include <stdlib.h>

enum status data_order_init(struct data_order *o, uint64_t seed, int n)
{
    *o = (struct data_order){.seed = seed, .n = n, .epoch = -1};
    o->permutation = malloc((size_t)n * sizeof *o->permutation);
    return o->permutation ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for the data order");
}

void data_order_release(struct data_order *o)
{
    free(o->permutation);
    o->permutation = NULL;
}

int data_order_at(struct data_order *o, int64_t i)
{
    int64_t epoch = i / o->n;
    if (epoch != o->epoch) { // Fisher and Yates
        struct rng rng;
        rng_init(&rng, o->seed, (uint64_t)epoch);
        for (int k = 0; k < o->n; k++) o->permutation[k] = k;
        for (int k = o->n - 1; k > 0; k--) {
            int other = (int)rng_below(&rng, (uint32_t)k + 1), swap = o->permutation[k];
            o->permutation[k] = o->permutation[other];
            o->permutation[other] = swap;
        }
        o->epoch = epoch;
    }
    return o->permutation[i % o->n];
}
