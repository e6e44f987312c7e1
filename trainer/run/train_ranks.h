/* train_ranks.h: the ranks that train one model together (docs/scaling.md), of every command: they
 * meet, decide together what must not be decided twice, and hold the same weights. Rank 0 writes
 * the run's folder, and logs. Of one rank all of it does nothing. The main thread. */
#ifndef TRAINER_TRAIN_RANKS_H
#define TRAINER_TRAIN_RANKS_H

#include "common/base/log.h"
#include "common/model/weights.h"
#include "trainer/launch/job.h"

struct train_ranks {
    const struct job *job;
    struct liveness *liveness; // of the other ranks
    // all; those who hold copies of the same weights; those who hold a server's model together.
    // NULL: this rank alone
    struct comm *all, *copies, *shards;
};

// What only one of several ranks logs is logged by rank 0.
void train_ranks_log(const struct job *job, enum log_level level);
// They meet. layout: as of job_meet().
enum status train_ranks_meet(struct train_ranks *r, struct device *dev, const char *layout,
                             double timeout_s);
// Of n_shards neighbours, whose shard of one model this rank's is: divides them.
enum status train_ranks_divide(struct train_ranks *r, int n_shards, int shard);
// Says farewell to the others, or what this one failed by, before what they wait for is closed.
void train_ranks_leave(struct train_ranks *r, enum status outcome);
void train_ranks_free(struct train_ranks *r);

bool train_ranks_lead(const struct train_ranks *r);                                   // rank 0
enum status train_ranks_agree(const struct train_ranks *r, void *data, size_t bytes); // rank 0's
enum status train_ranks_any(const struct train_ranks *r, bool *flag); // set where any rank's is
// ST_MISMATCH where copies of weights differ in a bit after that step; which: "policy".
enum status train_ranks_compare(const struct train_ranks *r, struct device *dev, int64_t step,
                                const char *which, const struct weights *w);

#endif
