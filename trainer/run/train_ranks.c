/* train_ranks.c: meeting, agreement and comparison of the ranks of a run. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/train_ranks.h"
#include "common/model/adapter.h"
#include "common/ranks/liveness.h"
#include "bridge/attach.h"
#include "kernels/comm.h"
#include "trainer/run/mapped.h"

#include <inttypes.h>

#define LEAVE_S 10.0 // of what is still waited for while this process ends

bool train_ranks_lead(const struct train_ranks *r)
{
    return r->job->ranks.rank == 0;
}

// All of them, on a communicator of the device.
static enum status open_all(struct train_ranks *r, const struct mapped *m, double timeout_s)
{
    struct device *dev = bridge_device(m->bridge);
    unsigned char id[COMM_ID_BYTES];
    struct bytes shared = BYTES_INIT;
    enum status st = ST_OK;
    if (train_ranks_lead(r)) {
        CHECK(comm_new_id(device_kind(dev), id));
        bytes_append(&shared, id, sizeof id);
    }
    CHECK(job_meet(r->job, bridge_file_of(m->bridge)->page_layout, &shared, &r->liveness));
    if (shared.len != sizeof id) FAIL(ST_FORMAT, "rank 0 gave %zu bytes as id", shared.len);
    CHECK(comm_open(dev, (const unsigned char *)shared.data, r->job->ranks.rank, r->job->ranks.size,
                    timeout_s, liveness_watch, r->liveness, &r->all));
    r->copies = r->all;
out:
    bytes_release(&shared);
    return st;
}

static enum status meet_to_publish(void *ranks)
{
    return comm_barrier(((struct train_ranks *)ranks)->all);
}

enum status train_ranks_meet(struct train_ranks *r, struct mapped *m, double timeout_s)
{
    const int size = r->job->ranks.size, n = m->n_shards;
    enum status st;
    if (size == 1) return ST_OK;
    CHECK(open_all(r, m, timeout_s));
    bridge_publish_with(m->bridge, meet_to_publish, r);
    if (n > 1) { // neighbours hold a model together, and those of one shard copies of it
        r->copies = NULL;
        if (n == size) r->shards = r->all;
        if (n < size) CHECK(comm_split(r->all, m->shard, &r->copies));
        if (n < size) CHECK(comm_split(r->all, r->job->ranks.rank / n, &r->shards));
    }
    weights_use_comm(m->policy, r->shards);
    if (bridge_file_of(m->bridge)->socket[0])
        log_info("%d ranks train together, on %d server%s with %d shard%s of the model each", size,
                 size / n, size == n ? "" : "s", n, n == 1 ? "" : "s");
out:
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

static enum status set_version(void *context)
{
    const struct mapped *m = context;
    control_set_version(mapped_control(m), m->next_version);
    return ST_OK;
}

enum status train_ranks_align_versions(const struct train_ranks *r, struct mapped *m,
                                       int64_t quiesce_ms)
{
    uint64_t version = mapped_version(m), all[COMM_MAX_RANKS], newest = version;
    bool differ = false; // the same on all ranks
    enum status st;
    CHECK(comm_gather_host(r->all, &version, all, sizeof version));
    for (int i = 0; i < comm_size(r->all); i++) {
        differ |= all[i] != version;
        if (all[i] > newest) newest = all[i];
    }
    if (!differ) return ST_OK;
    m->next_version = newest + 2;
    log_info("the servers' weight versions differ; all go on from %" PRIu64, m->next_version);
    st = bridge_publish(m->bridge, quiesce_ms, set_version, m, NULL);
out:
    return st;
}

enum status train_ranks_compare(const struct train_ranks *r, const struct mapped *m, int64_t step)
{
    const struct {
        const char *name;
        const struct weights *weights;
    } roles[] = {{"policy", m->policy},
                 {"adapter", m->adapter ? m->adapter->weights : NULL},
                 {"draft model", m->draft}};
    uint64_t sum = 0, all[COMM_MAX_RANKS];
    enum status st = ST_OK;
    for (size_t k = 0; r->all && k < sizeof roles / sizeof *roles; k++) {
        if (!roles[k].weights) continue;
        CHECK(weights_checksum(roles[k].weights, bridge_device(m->bridge), &sum));
        CHECK(comm_gather_host(r->copies, &sum, all, sizeof sum));
        for (int i = 1; i < comm_size(r->copies); i++)
            if (all[i] != all[0])
                FAIL(ST_MISMATCH,
                     "after step %" PRId64 " the %s of rank %d's server is not that of rank 0's "
                     "(checksums %016" PRIx64 " and %016" PRIx64 "); %s",
                     step, roles[k].name, i, all[i], all[0],
                     step ? "go on from the last checkpoint with --resume"
                          : "start all servers from one folder");
    }
out:
    return st;
}
