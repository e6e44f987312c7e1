/* run_ranks.c: several ranks that train one model together (docs/scaling.md). Each is a process
 * like the only one of a run: it has a server of its own, or with others one whose model they hold
 * in shards; it maps and writes that server's weights, or its shard, samples its share of every
 * step's prompts there, and goes through the same steps. What
 * must not be decided twice (when to stop, what a reward says, where the run's folder is) rank 0
 * decides for all; it also writes the run's folder, and logs. The main thread. */
#include "common/base/clock.h"
#include "bridge/attach.h"
#include "common/base/log.h"
#include "common/model/adapter.h"
#include "common/ranks/liveness.h"
#include "kernels/comm.h"
#include "trainer/rollout/rollout.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- before anything is opened -----------------------------------------------------------------

// --bridge with a server's number in it, where there are several.
static enum status put_bridge_path(struct run *run, int server)
{
    const char *given = run->config->bridge, *field = strstr(given, RANK_FIELD);
    const size_t size = sizeof run->bridge_path;
    if (!field) return server == 0 ? bridge_find(given, run->bridge_path, size) : ST_NOT_FOUND;
    int len = snprintf(run->bridge_path, size, "%.*s%d%s", (int)(field - given), given, server,
                       field + strlen(RANK_FIELD));
    if (len >= (int)size) return status_fail(ST_INVALID, "--bridge is too long");
    return ST_OK;
}

// How many shards the server of that number has, and whether it is this rank's.
static enum status try_server(struct run *run, int server, bool *ret_own)
{
    struct bridge_file *file = NULL;
    const struct ranks *r = &run->job->ranks;
    enum status st;
    CHECK(put_bridge_path(run, server));
    CHECK(bridge_file_read(run->bridge_path, &file));
    run->n_shards = file->tp_degree;
    run->shard = r->rank % run->n_shards;
    *ret_own = r->rank / run->n_shards == server && r->size % run->n_shards == 0 &&
               (strstr(run->config->bridge, RANK_FIELD) || r->size == run->n_shards);
out:
    bridge_file_free(file);
    return st;
}

// Ranks in order share the servers: each has as many as its model has shards, mostly one.
static enum status place_bridge(struct run *run)
{
    bool own = false;
    for (int server = run->job->ranks.rank; server >= 0 && !own; server--)
        if (try_server(run, server, &own) != ST_OK) own = false;
    if (own) return ST_OK;
    run->n_shards = 1;
    if (strstr(run->config->bridge, RANK_FIELD)) // attaching to it says what is amiss
        return put_bridge_path(run, run->job->ranks.rank);
    return status_fail(ST_INVALID,
                       "%d ranks need --bridge with " RANK_FIELD " in it, a bridge file of "
                       "each rank's own server, as run/" RANK_FIELD "/bridge.json; or that of one "
                       "server with --tensor-parallel-size %d",
                       run->job->ranks.size, run->job->ranks.size);
}

enum status run_find_ranks(struct run *run)
{
    enum status st = ST_OK;
    run->n_shards = run->job->n_shards;
    run->shard = run->job->ranks.rank % run->n_shards;
    if (run->job->ranks.size == 1) return ST_OK;
    if (run->job->launches) return ST_OK;
    if (run->config->bridge) CHECK(place_bridge(run));
    train_ranks_log(run->job, run->config->log_level);
out:
    return st;
}

const char *run_bridge(const struct run *run)
{
    if (run->bridge_path[0]) return run->bridge_path;
    return run->job->bridge[0] ? run->job->bridge : run->config->bridge;
}

enum status run_attach(struct run *run)
{
    if (run->n_shards == 1) return bridge_attach(run_bridge(run), NULL, &run->bridge);
    return bridge_attach_shard(run_bridge(run), run->shard, NULL, NULL, NULL, &run->bridge);
}

// ---- meeting -----------------------------------------------------------------------------------

static enum status meet_to_publish(void *run)
{
    return comm_barrier(((struct run *)run)->ranks.all);
}

enum status run_meet_ranks(struct run *run)
{
    const int size = run->job->ranks.size, n = run->n_shards;
    enum status st;
    CHECK(train_ranks_meet(&run->ranks, bridge_device(run->bridge),
                           bridge_file_of(run->bridge)->page_layout,
                           run->config->job.rank_timeout));
    if (size == 1) return ST_OK;
    bridge_publish_with(run->bridge, meet_to_publish, run);
    run->servers->comm = run->ranks.all;
    CHECK(train_ranks_divide(&run->ranks, n, run->shard));
    weights_use_comm(run->policy, run->ranks.shards);
    log_info("%d ranks train together, on %d server%s with %d shard%s of the model each", size,
             size / n, size == n ? "" : "s", n, n == 1 ? "" : "s");
out:
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
    bool differ = false; // the same on all ranks
    enum status st;
    CHECK(comm_gather_host(run->ranks.all, &version, all, sizeof version));
    for (int r = 0; r < comm_size(run->ranks.all); r++) {
        differ |= all[r] != version;
        if (all[r] > newest) newest = all[r];
    }
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
    enum status st;
    CHECK(train_ranks_compare(&run->ranks, dev, run->step, "policy", run->policy));
    if (run->adapter)
        CHECK(train_ranks_compare(&run->ranks, dev, run->step, "adapter", run->adapter->weights));
    if (run->draft)
        CHECK(train_ranks_compare(&run->ranks, dev, run->step, "draft model", run->draft));
out:
    return st;
}
