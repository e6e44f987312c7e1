/* train_ranks.c: meeting, agreement and comparison of the ranks of a run. */
#include "trainer/run/train_ranks.h"
#include "common/ranks/liveness.h"
#include "kernels/comm.h"

#include <inttypes.h>

#define LEAVE_S 10.0 // of what is still waited for while this process ends

void train_ranks_log(const struct job *job, enum log_level level)
{
    if (job->ranks.size > 1 && job->ranks.rank > 0 && level == LOG_INFO)
        log_open(job->log_name, LOG_WARN);
}

bool train_ranks_lead(const struct train_ranks *r)
{
    return r->job->ranks.rank == 0;
}

enum status train_ranks_meet(struct train_ranks *r, struct device *dev, const char *layout,
                             double timeout_s)
{
    unsigned char id[COMM_ID_BYTES];
    struct bytes shared = BYTES_INIT;
    enum status st = ST_OK;
    if (r->job->ranks.size == 1) return ST_OK;
    if (train_ranks_lead(r)) {
        CHECK(comm_new_id(device_kind(dev), id));
        bytes_append(&shared, id, sizeof id);
    }
    CHECK(job_meet(r->job, layout, &shared, &r->liveness));
    if (shared.len != sizeof id) FAIL(ST_FORMAT, "rank 0 gave %zu bytes as id", shared.len);
    CHECK(comm_open(dev, (const unsigned char *)shared.data, r->job->ranks.rank, r->job->ranks.size,
                    timeout_s, liveness_watch, r->liveness, &r->all));
    r->copies = r->all;
out:
    bytes_release(&shared);
    return st;
}

enum status train_ranks_divide(struct train_ranks *r, int n_shards, int shard)
{
    const int size = r->job->ranks.size;
    struct comm *copies = NULL;
    enum status st = ST_OK;
    if (n_shards == 1 || size == 1) return ST_OK;
    if (n_shards < size) {
        CHECK(comm_split(r->all, shard, &copies));
        CHECK(comm_split(r->all, r->job->ranks.rank / n_shards, &r->shards));
    } else {
        r->shards = r->all;
    }
out:
    r->copies = copies;
    return st;
}

void train_ranks_leave(struct train_ranks *r, enum status outcome)
{
    comm_watch(r->all, NULL, NULL);
    comm_set_deadline(r->all, LEAVE_S);
    liveness_end(r->liveness, outcome);
    r->liveness = NULL;
}

void train_ranks_free(struct train_ranks *r)
{
    if (r->copies != r->all) comm_free(r->copies);
    if (r->shards != r->all) comm_free(r->shards);
    comm_free(r->all);
}

enum status train_ranks_agree(const struct train_ranks *r, void *data, size_t bytes)
{
    return comm_broadcast_host(r->all, data, bytes, 0);
}

enum status train_ranks_any(const struct train_ranks *r, bool *flag)
{
    bool all[COMM_MAX_RANKS];
    enum status st = comm_gather_host(r->all, flag, all, sizeof *flag);
    for (int i = 0; st == ST_OK && i < comm_size(r->all); i++) *flag |= all[i];
    return st;
}

enum status train_ranks_compare(const struct train_ranks *r, struct device *dev, int64_t step,
                                const char *which, const struct weights *w)
{
    uint64_t sum = 0, all[COMM_MAX_RANKS];
    enum status st = ST_OK;
    if (!r->all) return ST_OK;
    CHECK(weights_checksum(w, dev, &sum));
    CHECK(comm_gather_host(r->copies, &sum, all, sizeof sum));
    for (int i = 1; i < comm_size(r->copies); i++)
        if (all[i] != all[0])
            FAIL(ST_MISMATCH,
                 "after step %" PRId64 " the %s of rank %d's server is not that of rank 0's "
                 "(checksums %016" PRIx64 " and %016" PRIx64 "); %s",
                 step, which, i, all[i], all[0],
                 step ? "go on from the last checkpoint with --resume"
                      : "start all servers from one folder");
out:
    return st;
}
