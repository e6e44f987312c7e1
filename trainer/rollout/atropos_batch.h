/* atropos_batch.h: the groups that Atropos' environments put into a batch, as a rollout with its
 * scores. Every number is checked before it is believed. One thread.
 *
 * A group (atroposlib's ScoredData) has a list entry a sequence: "tokens", prompt and completion in
 * one; "masks", -100 where a token is not trained, else the token; "scores". docs/atropos.md tells
 * what else is read, and what is refused. */
#ifndef TRAINER_ATROPOS_BATCH_H
#define TRAINER_ATROPOS_BATCH_H

#include "trainer/rollout/scoring.h"

struct atropos_bounds {
    int vocab_size;
    int max_tokens;      // of a sequence
    double temperature;  // of the loss: sequences of another one are refused
    bool needs_logprobs; // of the sampler: for truncated importance sampling
    enum advantage_scale scale;
};

// batch: the list of groups. Each sequence's prompt is what comes before its first trained token.
// Where groups are of one size and their sequences of one prompt, each is one of the rollout's;
// else each sequence is a group of its own, and the advantages are of the environments' groups all
// the same. `where` names the batch in errors, which name the group, the sequence and the field.
enum status atropos_read_batch(const char *where, const json_t *batch,
                               const struct atropos_bounds *bounds, struct rollout **ret_rollout,
                               struct scores *ret_scores);

#endif
