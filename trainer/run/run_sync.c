/* run_sync.c: bringing new weights to samplers that have copies of them, and runs that own their
 * weights themselves (--sync checkpoint). The main thread.
 *
 * With --sync shared the trained server samples by the weights that are written in place, and only
 * workers (run_workers.c) have copies. With --sync checkpoint there is no such server: this process
 * owns the weights (bridge_own()), writes them out every --restart-interval steps, and either
 * starts a server of its own anew on them or has one elsewhere load them, which is a worker. All
 * the rest of a run is the same, since a worker's tokens are given the version that its copy is of.
 */
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "trainer/run/adapter_folder.h"
#include "trainer/run/model_folder_write.h"
#include "trainer/run/run.h"
#include "trainer/launch/server_process.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_LOST      3   // times that the server may fail in a step
#define GRACE_MS      500 // for one that closed its connections to end, and have a status
#define FIRST_VERSION 2   // of a server of ours that was started on a folder, and of no other

struct sync {
    struct source source;
    struct run *run;
    struct server_process *server; // NULL: none is started here
    struct rollout_worker of_pull; // the same
    bool asked_context;            // of it
    char own_folder[PATH_ROOM];    // where it has its log: the run's, of further ranks one in it
    int n_lost;                    // times that it failed since a step was sampled
    // the folder of weights
    char folder[PATH_ROOM]; // absolute; "": not written yet
    uint64_t written;       // their version
};

// ---- the folder ---------------------------------------------------------------------------------

static double weights_bytes(const struct run *run, const char *folder)
{
    char path[PATH_ROOM];
    struct stat sb;
    const char *file = run->adapter ? "adapter_model.safetensors" : "model.safetensors";
    if (path_put(path, folder, "%s", file) != ST_OK || stat(path, &sb) != 0) return 0;
    return (double)sb.st_size;
}

// What is trained: the adapter, as nobody's yet, or the model.
static enum status write_folder(const struct run *run, const char *path)
{
    struct device *dev = bridge_device(run->bridge);
    const bool own = run->config->sync == SYNC_CHECKPOINT;
    if (run->adapter) return adapter_folder_write(path, run->adapter, dev, NULL, run->base);
    const struct model_folder model = {.weights = run->policy,
                                       .as = run->policy->dt,
                                       .source_folder = own ? run->model_folder : NULL};
    return model_folder_write(path, dev, &model);
}

enum status run_write_weights(struct run *run, const char **ret_folder)
{
    struct sync *y = run->sync;
    const uint64_t version = control_version(bridge_control(run->bridge));
    char path[PATH_ROOM], *absolute = NULL;
    enum status st = ST_OK;
    if (y->written != version) {
        CHECK(path_put(path, run->folder, "workers"));
        if (run_leads(run)) CHECK(write_folder(run, path));
        CHECK(comm_barrier(run->comm));
        if (!(absolute = realpath(path, NULL))) FAIL(ST_IO, "%s: it cannot be found again", path);
        CHECK(path_put(y->folder, "", "%s", absolute));
        y->written = version;
        run->written_bytes += weights_bytes(run, y->folder);
    }
    *ret_folder = y->folder;
out:
    free(absolute);
    return st;
}

// ---- the server started here --------------------------------------------------------------------

bool run_serves(const struct run *run)
{
    return !run->sync->server || !run->sync->of_pull.down;
}

static enum status find_own_folder(const struct run *run)
{
    struct sync *y = run->sync;
    if (y->own_folder[0]) return ST_OK;
    if (run_leads(run)) return path_put(y->own_folder, "", "%s", run->folder);
    enum status st = path_put(y->own_folder, run->folder, "rank-%d", run->job->ranks.rank);
    return st == ST_OK ? file_make_folders(y->own_folder) : st;
}

// Where it was lost between those steps that are due for new weights it is given the old ones
// again: all ranks write together or none does.
static enum status restart(struct run *run, bool due)
{
    struct sync *y = run->sync;
    const char *folder = y->folder;
    enum status st;
    CHECK(find_own_folder(run));
    if (due || !y->written) CHECK(run_write_weights(run, &folder));
    CHECK(server_process_restart(y->server, run->http, folder));
    y->of_pull.down = false;
    y->of_pull.version = FIRST_VERSION;
    y->of_pull.copy_of = y->written;
    if (!y->asked_context) CHECK(run_check_context(run));
    y->asked_context = true;
out:
    return st;
}

// A failure of the server, which is started anew unless it was the third of one step.
static bool may_try_again(struct run *run, enum status st)
{
    struct sync *y = run->sync;
    struct status_kept why = {0};
    if (!y->of_pull.down || (st != ST_PEER_GONE && st != ST_TIMEOUT)) return false;
    status_keep(&why, st);
    const bool rank_gone = comm_check(run->comm) != ST_OK;
    status_recall(&why);
    if (rank_gone) return false;
    if (++y->n_lost < MAX_LOST) return true;
    status_fail(st, "the server was lost %d times in one step, the last time so: %s", MAX_LOST,
                why.message);
    return false;
}

static enum status sync_server(struct run *run, bool due)
{
    struct sync *y = run->sync;
    const uint64_t version = control_version(bridge_control(run->bridge));
    const bool ran = y->of_pull.copy_of > 0;
    enum status st = ST_OK;
    if (!y->server) return ST_OK;
    y->of_pull.n_samples = 0;
    const bool ended =
        ran && server_process_check(y->server, y->of_pull.down ? GRACE_MS : 0) != ST_OK;
    if (ended || (ran && y->of_pull.down)) {
        log_progress_end();
        log_warn("the server is started anew%s%s", ended ? ": " : "",
                 ended ? status_message() : ", since it failed");
        y->of_pull.down = true;
    }
    if (!y->of_pull.down && !(due && y->of_pull.copy_of != version)) return ST_OK;
    y->of_pull.down = true; // until it is ready; one that never was ends the run at once
    while ((st = restart(run, due)) != ST_OK && ran && may_try_again(run, st))
        log_warn("the server is started anew: %s", status_message());
    return status_context(st, "--sync checkpoint");
}

// ---- the source ---------------------------------------------------------------------------------

// A server that was lost in the step is given the weights that it had, by this rank alone.
static enum status order_copies(struct source *source, struct rollout_step *step)
{
    struct sync *y = (struct sync *)source;
    enum status st = ST_OK;
    if (!run_serves(y->run) && !step->ahead && !step->evaluation) CHECK(sync_server(y->run, false));
    st = served_order(&y->run->servers, step);
out:
    return st;
}

static enum status poll_copies(struct source *source, struct rollout_step *step)
{
    struct sync *y = (struct sync *)source;
    enum status st = served_poll(step);
    run_count_workers(y->run, &step->counts);
    if (!y->server || step->evaluation) return st;
    if (st == ST_OK) y->n_lost = 0;
    step->again = may_try_again(y->run, st) && !step->ahead;
    return st;
}

static enum status settle_copies(struct source *source, uint64_t version, bool evaluation)
{
    struct run *run = ((struct sync *)source)->run;
    const int64_t start = clock_now_ns();
    enum status st = ST_OK;
    if (evaluation && run->config->sync == SYNC_SHARED) return ST_OK; // by the weights that learn
    CHECK(sync_server(run, version > 0));
    CHECK(run_sync_workers(run, version > 0));
    log_debug("copies of the weights: sync %.3f s, %.0f bytes written", clock_ms_since(start) / 1e3,
              run->written_bytes);
out:
    return st;
}

static void close_copies(struct source *source)
{
    (void)source; // the run's
}

enum status run_open_source(struct run *run)
{
    struct sync *y = run->sync;
    if (!y->server && !run->workers) return served_new(&run->servers, &run->source);
    y->source =
        (struct source){order_copies, poll_copies, settle_copies, close_copies, .settles = true};
    y->run = run;
    run->source = &y->source;
    return ST_OK;
}

// ---- weights of this process --------------------------------------------------------------------

static enum status load_own(void *context, void *base)
{
    struct run *run = context;
    weights_bind(run->policy, base);
    return weights_load(run->policy, run->own_device, run->config->model);
}

static enum status describe_own(const struct run *run, struct bridge_role *ret)
{
    enum status st = ST_OK;
    struct bridge_role role = {.role = "policy",
                               .bytes = run->policy->bytes,
                               .dt = run->policy->dt,
                               .n_parameters = run->policy->n_parameters,
                               .rope_context = run->model->rope_context};
    char *absolute = realpath(run->config->model, NULL);
    weights_layout_hash(run->policy, role.layout_hash);
    if (!absolute || strlen(absolute) >= sizeof role.model)
        FAIL(ST_INVALID, "--model %s: its path is too long, or cannot be found",
             run->config->model);
    snprintf(role.model, sizeof role.model, "%s", absolute);
    *ret = role;
out:
    free(absolute);
    return st;
}

static enum status own_weights(struct run *run, const char *server)
{
    enum status st;
    struct bridge_role role;
    char words[128], device[JOB_DEVICE_ROOM];
    CHECK(device_open(job_device(run->job, run->config->device, device), &run->own_device));
    CHECK(model_config_load(run->config->model, &run->model));
    run->model->rope_context = run->model->max_positions;
    if (rope_describe(run->model, words, sizeof words))
        log_info("%s: %s, as a server of its whole context chooses", run->config->model, words);
    CHECK(weights_plan(run->model, device_default_dtype(run->own_device), &run->policy));
    CHECK(describe_own(run, &role));
    CHECK(bridge_own(run->own_device, &role, server, load_own, run, &run->bridge));
    run->own_device = NULL; // the bridge's
    run->model_folder = bridge_file_of(run->bridge)->roles[0].model;
out:
    return st;
}

static enum status open_server(struct run *run)
{
    const struct train_config *c = run->config;
    struct sync *y = run->sync;
    char device[JOB_DEVICE_ROOM];
    const struct server_options options = {
        .command = c->server_command,
        .device = job_device(run->job, c->device, device),
        .port = c->server_port ? (int)c->server_port + run->job->ranks.rank : 0,
        .folder = y->own_folder,
        .timeout_s = c->server_timeout};
    enum status st = server_process_new(&options, &y->server);
    if (st != ST_OK) return st;
    y->of_pull = (struct rollout_worker){.name = server_process_address(y->server), .down = true};
    log_info("--sync checkpoint: every %" PRId64 " steps %s is started anew on %s with the weights "
             "of then; its log is server.log in the run's folder",
             c->restart_interval, c->server_command ? c->server_command : "cw-infer-server",
             y->of_pull.name);
    return ST_OK;
}

enum status run_open_own(struct run *run)
{
    const struct train_config *c = run->config;
    struct sync *y = run->sync;
    enum status st = ST_OK;
    if (!c->server_url) CHECK(open_server(run));
    const char *server = c->server_url ? c->server_url : y->of_pull.name;
    CHECK(own_weights(run, server));
    CHECK(http_client_new(server, &run->http));
    run->servers = rollout_servers_of(run->http, bridge_control(run->bridge),
                                      run->model->vocab_size, c->rollout_timeout);
    run->servers.servers[0].worker = &y->of_pull;
    run->servers.servers[0].address = server;
    if (c->server_command) y->of_pull.completions_of = y->folder;
    if (c->server_url) run->servers.n_servers = 0; // it is the first worker
    if (run->resolved.max_staleness > 0 && !c->importance_sampling_correction)
        log_warn("--restart-interval %" PRId64 " without --importance-sampling-correction: nothing "
                 "corrects for the age of the samples",
                 c->restart_interval);
out:
    return st;
}

enum status run_open_sync(struct run *run)
{
    run->sync = calloc(1, sizeof *run->sync);
    return run->sync ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for a run");
}

void run_close_sync(struct run *run)
{
    if (!run->sync) return;
    server_process_free(run->sync->server);
    device_free(run->own_device);
    free(run->sync);
}
