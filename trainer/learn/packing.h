/* packing.h: cuts a step's samples into micro-batches of at most token_budget rows, without
 * padding: a group's prompt once, its completions after it with the prompt as their shared prefix.
 * One thread.
 *
 * A completion of n tokens has n targets but only n - 1 rows: its first token is predicted by the
 * prompt's last row, and its last token predicts nothing that counts. What is predicted may be
 * given instead, several targets for each token: its row's logits then count for all of them. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_PACKING_H
#define TRAINER_PACKING_H

#include "common/model/batch.h"
#include "trainer/learn/samples.h"

struct pack_chunk { // consecutive completions of one group
    int group, first, n;
};
struct micro_batch {
    int n_chunks;
    struct pack_chunk *chunks;
    int n_seqs;   // completions, those without tokens included
    int *sample;  // (n_seqs) number of each over all groups, in their order
    int *first;   // (n_seqs + 1) where its targets start
    int n_tokens; // rows
    int64_t cost; // of the budget: rows, or what has more targets than rows
};
struct packing {
    int n;
    struct micro_batch *batches;
    struct pack_chunk *chunks; // of all of them, one after the other
    int *samples, *firsts;
};

// A prompt with one completion, or a whole group, that is over the budget is ST_INVALID and names
// --token-budget.
enum status packing_new(const struct pack_group *groups, int n_groups, int token_budget,
                        struct packing **ret);
void packing_free(struct packing *p);

// Puts a micro-batch into an empty `batch` (not yet committed) and its targets, first[n_seqs] of
// them, into ret_targets; row i of the batch's wanted rows predicts target i. adapter: whose all
// are computed with (model.h); -1: none.
enum status packing_fill(const struct micro_batch *mb, const struct pack_group *groups, int adapter,
                         struct batch *batch, int32_t *ret_targets);

// Of the rows that packing_fill() makes: whose they are, the same for a sample (or a group's
// prompt) however it is packed. Dropout goes by it.
void packing_samples(const struct micro_batch *mb, const struct pack_group *groups,
                     int32_t *ret_samples);

#endif
