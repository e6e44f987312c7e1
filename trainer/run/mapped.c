/* mapped.c: which bridge is this process's, the models that it maps there, and the ranks that do.
 * The main thread.
 *
 * Each of several ranks (docs/use/scaling.md) is a process like the only one of a run: it has a
 * server of its own, or with others one whose model they hold in shards; it maps and writes that
 * server's weights, or its shard, samples its share of every step's prompts there, and goes through
 * the same steps. What must not be decided twice rank 0 decides for all. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/mapped.h"
#include "bridge/attach.h"
#include "bridge/bridge_file.h"
#include "common/base/log.h"
#include "common/http/http_client.h"
#include "common/model/adapter.h"
#include "trainer/launch/launch.h"
#include "trainer/run/checkpoint.h"
#include "common/ranks/liveness.h"
#include "kernels/comm.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define ASK_MS 300000 // the server sums a whole model, on the CPU some 10 GB a second

// ---- which bridge -------------------------------------------------------------------------------

// --bridge with a server's number in it, where there are several.
static enum status put_bridge_path(struct mapped *m, int server)
{
    const char *given = m->given, *field = strstr(given, RANK_FIELD);
    const size_t size = sizeof m->bridge_path;
    if (!field) return server == 0 ? bridge_find(given, m->bridge_path, size) : ST_NOT_FOUND;
    int len = snprintf(m->bridge_path, size, "%.*s%d%s", (int)(field - given), given, server,
                       field + strlen(RANK_FIELD));
    if (len >= (int)size) return status_fail(ST_INVALID, "--bridge is too long");
    return ST_OK;
}

// How many shards the server of that number has, and whether it is this rank's.
static bool is_own(struct mapped *m, int server)
{
    struct bridge_file *file = NULL;
    const struct ranks *r = &m->launch->ranks;
    if (put_bridge_path(m, server) != ST_OK) return false;
    if (bridge_file_read(m->bridge_path, &file) != ST_OK) return false;
    m->n_shards = file->tp_degree;
    m->shard = r->rank % m->n_shards;
    bridge_file_free(file);
    return r->rank / m->n_shards == server && r->size % m->n_shards == 0 &&
           (strstr(m->given, RANK_FIELD) || r->size == m->n_shards);
}

enum status mapped_find(struct mapped *m, const struct launch *launch, const char *given)
{
    const int rank = launch->ranks.rank, size = launch->ranks.size;
    m->launch = launch;
    m->given = given;
    m->n_shards = launch->n_shards;
    m->shard = rank % m->n_shards;
    if (size == 1 || launch->launches || !given) return ST_OK;
    // Ranks in order share the servers: each has as many as its model has shards, mostly one.
    for (int server = rank; server >= 0; server--)
        if (is_own(m, server)) return ST_OK;
    m->n_shards = 1;
    if (strstr(given, RANK_FIELD)) return put_bridge_path(m, rank); // attaching says what is amiss
    return status_fail(ST_INVALID,
                       "%d ranks need --bridge with " RANK_FIELD " in it, a bridge file of each "
                       "rank's own server, as run/" RANK_FIELD "/bridge.json; or that of one "
                       "server with --tensor-parallel-size %d",
                       size, size);
}

const char *mapped_path(const struct mapped *m)
{
    if (m->bridge_path[0]) return m->bridge_path;
    return m->launch->bridge[0] ? m->launch->bridge : m->given;
}

enum status mapped_attach(struct mapped *m)
{
    const char *path = mapped_path(m);
    if (m->n_shards == 1) return bridge_attach(path, NULL, &m->bridge);
    return bridge_attach_shard(path, m->shard, NULL, NULL, NULL, &m->bridge);
}

// ---- a role's model -----------------------------------------------------------------------------

// Server and trainer must rotate alike, however long the trainer's own sequences are.
static enum status take_rope(const struct bridge *bridge, const struct bridge_role *role,
                             struct model_config *model)
{
    char words[128];
    model->rope_context = role->rope_context;
    if (!rope_describe(model, words, sizeof words)) return ST_OK;
    if (role->rope_context == 0)
        return status_fail(ST_MISMATCH,
                           "%s: role %s has no \"rope_context\", by which the server chose the "
                           "factors of longrope; server and trainer must be of one version",
                           bridge_file_of(bridge)->path, role->role);
    log_info("%s: %s, as the server chose", role->model, words);
    return ST_OK;
}

enum status role_open(struct bridge *bridge, const struct bridge_role *role,
                      struct model_config **ret_model, struct weights **ret_weights)
{
    const struct bridge_file *file = bridge_file_of(bridge);
    enum status st;
    char hash[65];
    CHECK(model_config_load(role->model, ret_model));
    if (strcmp(role->role, MTP_ROLE) == 0) CHECK(model_config_take_mtp(role->model, *ret_model));
    CHECK(take_rope(bridge, role, *ret_model));
    CHECK(model_config_quantise(*ret_model, role->quantization, false));
    (*ret_model)->kv_cache = role->kv_cache;
    (*ret_model)->expert_parallel = file->expert_parallel && config_experts(*ret_model) > 0;
    CHECK(model_config_shard(*ret_model, (struct shard){file->shard, file->tp_degree}));
    CHECK(weights_plan(*ret_model, role->dt, ret_weights));
    weights_layout_hash(*ret_weights, hash);
    if (strcmp(hash, role->layout_hash) != 0 || (*ret_weights)->bytes > role->bytes)
        FAIL(ST_MISMATCH,
             "%s: the server's layout of the weights differs from what %s gives here; server and "
             "trainer must be of one version, and the folder unchanged",
             file->path, role->model);
    weights_bind(*ret_weights, bridge_base(bridge, role->role));
out:
    return st;
}

struct model_folder mapped_folder(const struct mapped *m)
{
    return (struct model_folder){.weights = m->policy,
                                 .as = m->policy->dt,
                                 .source_folder = m->files_folder,
                                 .adapter = m->adapter,
                                 .adapter_base = m->base};
}

enum status adapter_base_ask(struct http_client *http, json_t **ret)
{
    json_t *info = NULL;
    enum status st = http_get_json(http, "/bridge/info?checksums=1", ASK_MS, &info);
    if (st == ST_OK) *ret = json_incref(json_object_get(info, ADAPTER_BASE));
    json_decref(info);
    return st;
}

struct control *mapped_control(const struct mapped *m)
{
    return bridge_control(m->bridge);
}

uint64_t mapped_version(const struct mapped *m)
{
    return control_version(mapped_control(m));
}

void mapped_release(struct mapped *m)
{
    weights_free(m->draft);
    model_config_free(m->draft_model);
    adapter_free(m->adapter);
    weights_free(m->policy);
    model_config_free(m->model);
    bridge_detach(m->bridge);
    json_decref(m->base);
}

// ---- the ranks ----------------------------------------------------------------------------------

#define LEAVE_S 10.0 // of what is still waited for while this process ends

bool train_ranks_lead(const struct train_ranks *r)
{
    return r->launch->ranks.rank == 0;
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
    CHECK(launch_meet(r->launch, bridge_file_of(m->bridge)->page_layout, &shared, &r->liveness));
    if (shared.len != sizeof id) FAIL(ST_FORMAT, "rank 0 gave %zu bytes as id", shared.len);
    CHECK(comm_open(dev, (const unsigned char *)shared.data, r->launch->ranks.rank,
                    r->launch->ranks.size, timeout_s, liveness_watch, r->liveness, &r->all));
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
    const int size = r->launch->ranks.size, n = m->n_shards;
    enum status st;
    if (size == 1) return ST_OK;
    CHECK(open_all(r, m, timeout_s));
    bridge_publish_with(m->bridge, meet_to_publish, r);
    if (n > 1) { // neighbours hold a model together, and those of one shard copies of it
        r->copies = NULL;
        if (n == size) r->shards = r->all;
        if (n < size) CHECK(comm_split(r->all, m->shard, &r->copies));
        if (n < size) CHECK(comm_split(r->all, r->launch->ranks.rank / n, &r->shards));
    }
    m->policy->comm = r->shards;
    if (m->adapter) m->adapter->weights->comm = r->shards;
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
