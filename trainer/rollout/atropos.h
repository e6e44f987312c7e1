/* atropos.h: the source `external`: batches of what Atropos' environments sampled and scored
 * (docs/atropos.md). Rank 0 polls; each rank has the whole batch. The main thread. */
#ifndef TRAINER_ATROPOS_H
#define TRAINER_ATROPOS_H

#include "trainer/rollout/atropos_batch.h"
#include "trainer/rollout/source.h"

struct atropos_options { // borrowed
    const char *url;     // of the API server
    struct atropos_bounds bounds;
    int64_t batch_size;          // sequences
    const _Atomic bool *stopped; // poll() is ST_CANCELLED once it is set
    // of the registration
    const char *run_folder;
    int64_t save_steps, step, total_steps;
};
// Registers. Evaluations go to `servers`, which ask `via`, and whose end this one is too.
enum status atropos_new(const struct atropos_options *options, const struct rollout_servers *via,
                        struct source *servers, struct source **ret);

#endif
