/* run_ranks.c: several ranks that train one model together, data parallel (docs/scaling.md). Each
 * is a process like the only one of a run: it has a server of its own, whose weights it maps and
 * writes, samples its share of every step's prompts there, and goes through the same steps. What
 * must not be decided twice (when to stop, what a reward says, where the run's folder is) rank 0
 * decides for all; it also writes the run's folder, and logs. The main thread. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RANK_FIELD "{rank}"
#define MEET_S     600.0
#define LEAVE_S    10.0 // of what is still waited for while this process ends

bool run_leads(const struct run *run)
{
    return run->ranks.rank == 0;
}

// ---- before anything is opened -----------------------------------------------------------------

// What is one process's alone as yet.
static enum status check_options(const struct run *run)
{
    const struct train_config *c = run->config;
    const struct {
        const char *option;
        bool given;
    } alone[] = {
        {"async", c->async},
        {"rollout-ahead", c->rollout_ahead > 0},
        {"atropos", c->atropos},
        {"rollouts", c->rollouts},
        {"workers", c->workers},
        {"lora-r", c->lora.r > 0},
        {"train-draft", c->train_draft},
        {"sync checkpoint", c->sync == SYNC_CHECKPOINT},
    };
    for (size_t i = 0; i < sizeof alone / sizeof *alone; i++)
        if (alone[i].given)
            return status_fail(ST_UNSUPPORTED,
                               "--%s with %d ranks: only one rank does that as yet; leave it out, "
                               "or start one",
                               alone[i].option, run->ranks.size);
    if (c->run_dir) return ST_OK;
    return status_fail(ST_INVALID, "%d ranks need --run-dir, a folder that all of them see",
                       run->ranks.size);
}

// --bridge with this rank's number in it.
static enum status place_bridge(struct run *run)
{
    const char *given = run->config->bridge, *field = given ? strstr(given, RANK_FIELD) : NULL;
    if (!field)
        return status_fail(ST_INVALID,
                           "%d ranks need --bridge with " RANK_FIELD " in it, a bridge file of "
                           "each rank's own server, as run/" RANK_FIELD "/bridge.json",
                           run->ranks.size);
    int len = snprintf(run->bridge_path, sizeof run->bridge_path, "%.*s%d%s", (int)(field - given),
                       given, run->ranks.rank, field + strlen(RANK_FIELD));
    if (len >= (int)sizeof run->bridge_path) return status_fail(ST_INVALID, "--bridge is too long");
    return ST_OK;
}

enum status run_find_ranks(struct run *run)
{
    static char name[48];
    enum status st;
    CHECK(ranks_find(-1, 0, &run->ranks));
    if (run->ranks.size == 1) return ST_OK;
    CHECK(check_options(run));
    CHECK(place_bridge(run));
    snprintf(name, sizeof name, "cw-trainer[%d]", run->ranks.rank);
    const enum log_level level = run->config->log_level;
    log_open(name, run_leads(run) || level < LOG_WARN || level == LOG_DEBUG ? level : LOG_WARN);
out:
    return st;
}

const char *run_bridge_path(const struct run *run)
{
    return run->bridge_path[0] ? run->bridge_path : run->config->bridge;
}

// ---- meeting -----------------------------------------------------------------------------------

static enum status is_anyone_gone(void *liveness)
{
    return liveness_check(liveness, 0);
}

// Of one host, where the job has a name.
static enum status meeting_place(const struct run *run, char *ret, size_t size)
{
    const struct ranks *r = &run->ranks;
    if (!r->run_id[0])
        return status_fail(ST_INVALID,
                           "%s does not say which job the ranks are of; start them "
                           "with mpirun",
                           r->source);
    snprintf(ret, size, "file:///tmp/commonweight-ranks-%d-%s", (int)getuid(), r->run_id);
    for (char *c = ret + strlen("file:///tmp/"); *c; c++)
        if (*c == '/') *c = '_';
    return ST_OK;
}

static enum status meet(struct run *run, struct bytes *id)
{
    char url[256];
    struct peers *peers;
    const struct rendezvous_options options = {
        .url = url,
        .who = run->ranks,
        .version = COMMONWEIGHT_VERSION,
        .layout = bridge_file_of(run->bridge)->roles[0].layout_hash,
        .timeout_s = MEET_S,
    };
    enum status st;
    CHECK(meeting_place(run, url, sizeof url));
    CHECK(rendezvous(&options, id, &peers));
    st = liveness_start(peers, LIVENESS_SILENCE_S, NULL, NULL, &run->liveness);
out:
    return st;
}

static enum status meet_to_publish(void *run)
{
    return comm_barrier(((struct run *)run)->comm);
}

enum status run_meet_ranks(struct run *run)
{
    unsigned char id[COMM_ID_BYTES];
    struct bytes shared = BYTES_INIT;
    struct device *dev = bridge_device(run->bridge);
    enum status st = ST_OK;
    if (run->ranks.size == 1) return ST_OK;
    if (run_leads(run)) {
        CHECK(comm_new_id(device_kind(dev), id));
        bytes_append(&shared, id, sizeof id);
    }
    CHECK(meet(run, &shared));
    if (shared.len != sizeof id) FAIL(ST_FORMAT, "rank 0 gave %zu bytes as id", shared.len);
    CHECK(comm_open(dev, (const unsigned char *)shared.data, run->ranks.rank, run->ranks.size,
                    run->config->rank_timeout, &run->comm));
    comm_watch(run->comm, is_anyone_gone, run->liveness);
    bridge_publish_with(run->bridge, meet_to_publish, run);
    run->source.comm = run->comm;
    log_info("%d ranks train together, each with its own server", run->ranks.size);
out:
    bytes_release(&shared);
    return st;
}

void run_leave_ranks(struct run *run, enum status outcome)
{
    comm_watch(run->comm, NULL, NULL);
    comm_set_deadline(run->comm, LEAVE_S);
    liveness_end(run->liveness, outcome);
    run->liveness = NULL;
}

// ---- what is decided together ------------------------------------------------------------------

enum status run_agree(const struct run *run, void *data, size_t bytes)
{
    return comm_broadcast_host(run->comm, data, bytes, 0);
}

enum status run_any(const struct run *run, bool *flag)
{
    bool all[COMM_MAX_RANKS];
    enum status st = comm_gather_host(run->comm, flag, all, sizeof *flag);
    for (int r = 0; st == ST_OK && r < comm_size(run->comm); r++) *flag |= all[r];
    return st;
}

// ---- the same weights everywhere ---------------------------------------------------------------

static enum status set_version(void *context)
{
    const struct run *run = context;
    control_set_version(bridge_control(run->bridge), run->next_version);
    return ST_OK;
}

enum status run_align_versions(struct run *run)
{
    struct control *control = bridge_control(run->bridge);
    uint64_t version = control_version(control), all[COMM_MAX_RANKS], newest = version;
    bool differ = false;
    enum status st;
    CHECK(comm_gather_host(run->comm, &version, all, sizeof version));
    for (int r = 0; r < comm_size(run->comm); r++) {
        differ |= all[r] != version;
        if (all[r] > newest) newest = all[r];
    }
    if (!differ) CHECK(run_any(run, &differ));
    if (!differ) return ST_OK;
    run->next_version = newest + 2;
    log_info("the servers' weight versions differ; all go on from %" PRIu64, run->next_version);
    st = bridge_publish(run->bridge, (int64_t)(run->config->quiesce_timeout * 1e3), set_version,
                        run, NULL);
out:
    return st;
}

enum status run_compare_weights(const struct run *run)
{
    struct device *dev = bridge_device(run->bridge);
    const struct weights *w = run->policy;
    const uint64_t offset = 0, bytes = (uint64_t)w->n_elements * dtype_size(w->dt);
    uint64_t sum = 0, all[COMM_MAX_RANKS];
    enum status st;
    if (!run->comm) return ST_OK;
    device_ops(dev)->checksum(dev, &sum, w->base, &offset, &bytes, 1);
    CHECK(device_sync(dev));
    CHECK(comm_gather_host(run->comm, &sum, all, sizeof sum));
    for (int r = 1; r < comm_size(run->comm); r++)
        if (all[r] != all[0])
            FAIL(ST_MISMATCH,
                 "after step %" PRId64 " the weights of rank %d's server are not those of rank 0's "
                 "(checksums %016" PRIx64 " and %016" PRIx64 "); %s",
                 run->step, r, all[r], all[0],
                 run->step ? "go on from the last checkpoint with --resume"
                           : "start all servers from one folder");
out:
    return st;
}
