/* train_ranks.h: the ranks that train one model together (docs/use/scaling.md), of every command:
 * they meet, decide together what must not be decided twice, and hold the same weights. Rank 0
 * writes the run's folder, and logs. Of one rank all of it does nothing. The main thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_TRAIN_RANKS_H
#define TRAINER_TRAIN_RANKS_H

#include "common/base/log.h"
#include "trainer/launch/job.h"

struct mapped;
struct train_ranks {
    const struct job *job;
    struct liveness *liveness; // of the other ranks
    // all; those who hold copies of the same weights; those who hold a server's model together.
    // NULL: this rank alone
    struct comm *all, *copies, *shards;
};

// They meet, once each has its bridge, and are divided by the shards of their servers.
enum status train_ranks_meet(struct train_ranks *r, struct mapped *mapped, double timeout_s);
// Brings the servers to one weight version, where theirs differ.
enum status train_ranks_align_versions(const struct train_ranks *r, struct mapped *mapped,
                                       int64_t quiesce_ms);
// ST_MISMATCH where what the ranks have mapped differs in a bit, after that step.
enum status train_ranks_compare(const struct train_ranks *r, const struct mapped *mapped,
                                int64_t step);
// Says farewell to the others, or what this one failed by, before what they wait for is closed.
void train_ranks_leave(struct train_ranks *r, enum status outcome);
void train_ranks_free(struct train_ranks *r);

bool train_ranks_lead(const struct train_ranks *r);                                   // rank 0
enum status train_ranks_agree(const struct train_ranks *r, void *data, size_t bytes); // rank 0's
enum status train_ranks_any(const struct train_ranks *r, bool *flag); // set where any rank's is

#endif
