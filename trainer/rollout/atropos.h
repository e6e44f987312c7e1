/* atropos.h: the source `external`: batches of what Atropos' environments sampled and scored
 * (docs/atropos.md). Rank 0 polls; each rank has the whole batch. The main thread. */
#ifndef TRAINER_ATROPOS_H
#define TRAINER_ATROPOS_H

#include "trainer/rollout/source.h"

struct atropos_bounds {
    int vocab_size;
    int max_tokens;      // of a sequence
    double temperature;  // of the loss: sequences of another one are refused
    bool needs_logprobs; // of the sampler: for truncated importance sampling
    enum advantage_scale scale;
};

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

// atropos_batch.c: a batch as a rollout with its scores, every number checked before it is
// believed. A group (atroposlib's ScoredData) has a list entry a sequence: "tokens", prompt and
// completion in one; "masks", -100 where a token is not trained, else the token; "scores".
// docs/atropos.md tells what else is read, and what is refused. batch: the list of groups. Each
// sequence's prompt is what comes before its first trained token. Where groups are of one size and
// their sequences of one prompt, each is one of the rollout's; else each sequence is a group of its
// own, and the advantages are of the environments' groups all the same. `where` names the batch in
// errors, which name the group, the sequence and the field.
enum status atropos_read_batch(const char *where, const json_t *batch,
                               const struct atropos_bounds *bounds, struct rollout **ret_rollout,
                               struct scores *ret_scores);

#endif
