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
#include "bridge/attach.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "kernels/comm.h"
#include "trainer/rollout/source.h"
#include "trainer/run/model_folder_write.h"
#include "trainer/run/run.h"
#include "trainer/run/same_run.h"
#include "trainer/launch/server_process.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_LOST      3   // times that the server may fail in a step
#define GRACE_MS      500 // for one that closed its connections to end, and have a status
#define FIRST_VERSION 2   // of a server of ours that was started on a folder, and of no other
#define LOAD_MS       60000

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

bool run_copies_draft(const struct run *run)
{
    return run->draft && run->config->sync == SYNC_CHECKPOINT;
}

static double weights_bytes(const struct run *run, const char *folder)
{
    const char *const files[] = {
        run->adapter ? "adapter_model.safetensors" : "model.safetensors",
        run_copies_draft(run) ? DRAFT_FOLDER "/model.safetensors" : "",
    };
    char path[PATH_ROOM];
    struct stat sb;
    double bytes = 0;
    for (int i = 0; i < 2; i++)
        if (files[i][0] && path_put(path, folder, "%s", files[i]) == ST_OK && stat(path, &sb) == 0)
            bytes += (double)sb.st_size;
    return bytes;
}

// What is trained: the adapter, as nobody's yet, or the model; and the draft in it.
static enum status write_folder(const struct run *run, const char *path)
{
    struct device *dev = bridge_device(run->bridge);
    const bool own = run->config->sync == SYNC_CHECKPOINT;
    const struct model_folder draft = {
        .weights = run->draft, .as = run->policy->dt, .source_folder = run->draft_folder};
    struct model_folder model = {.weights = run->policy,
                                 .as = run->policy->dt,
                                 .source_folder = own ? run->model_folder : NULL,
                                 .adapter = run->adapter,
                                 .draft = run_copies_draft(run) ? &draft : NULL};
    if (run->adapter && !(model.state = adapter_state(NULL, run->base)))
        return status_fail(ST_NO_MEMORY, "no memory for an adapter's state");
    const enum status st = model_folder_write(path, dev, &model);
    json_decref(model.state);
    return st;
}

enum status run_write_weights(struct run *run, const char **ret_folder)
{
    struct sync *y = run->sync;
    const uint64_t version = control_version(bridge_control(run->bridge));
    char path[PATH_ROOM], *absolute = NULL;
    enum status st = ST_OK;
    if (y->written != version) {
        CHECK(path_put(path, run->folder, "workers"));
        if (train_ranks_lead(&run->ranks)) CHECK(write_folder(run, path));
        CHECK(comm_barrier(run->ranks.all));
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
    if (train_ranks_lead(&run->ranks)) return path_put(y->own_folder, "", "%s", run->folder);
    enum status st = path_put(y->own_folder, run->folder, "rank-%d", run->job->ranks.rank);
    return st == ST_OK ? file_make_folders(y->own_folder) : st;
}

json_t *run_adapter_body(const struct run *run, const char *folder)
{
    return json_pack("{s:s, s:s, s:b}", "lora_name", run->config->lora.name, "lora_path", folder,
                     "load_inplace", 1);
}

// With an adapter on the folder that it is of, and then with it, which a server without a key takes
// on its socket alone.
static enum status start_server(struct run *run, const char *folder)
{
    struct http_call call = {.path = "/v1/load_lora_adapter", .post = true, .timeout_ms = LOAD_MS};
    char draft[PATH_ROOM], socket[PATH_ROOM];
    enum status st;
    json_t *body = NULL;
    CHECK(path_put(draft, folder, DRAFT_FOLDER));
    CHECK(path_put(socket, run->sync->own_folder, "server.sock"));
    call.server = socket;
    CHECK(server_process_restart(run->sync->server, run->http,
                                 run->adapter ? run->model_folder : folder,
                                 run->draft ? draft : run->config->draft));
    if (!run->adapter) goto out;
    if (!(call.body = body = run_adapter_body(run, folder)))
        FAIL(ST_INVALID, "%s: a server cannot be told of this folder, whose name is not UTF-8",
             folder);
    st = http_perform(run->http, &call, NULL);
out:
    json_decref(body);
    return st;
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
    CHECK(start_server(run, folder));
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
    const bool rank_gone = comm_check(run->ranks.all) != ST_OK;
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
    st = served_order(y->run->servers, step);
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
    if (!y->server && !run->workers) return served_new(run->servers, &run->source);
    y->source =
        (struct source){order_copies, poll_copies, settle_copies, close_copies, .settles = true};
    y->run = run;
    run->source = &y->source;
    return ST_OK;
}

// ---- weights of this process --------------------------------------------------------------------

struct plan { // of a role's weights
    struct model_config *model;
    struct weights *base;
    struct adapter *adapter; // of these; NULL: they are meant
};

static void release_plan(struct plan *p)
{
    adapter_free(p->adapter);
    weights_free(p->base);
    model_config_free(p->model);
}

// As a server of the folder's whole context has them, and beside them an adapter.
static enum status make_plan(const struct run *run, const char *folder, bool adapter,
                             struct plan *ret)
{
    enum status st;
    json_t *json = NULL;
    struct adapter_config *config;
    const enum dtype dt = device_default_dtype(run->own_device);
    CHECK(model_config_load(folder, &ret->model));
    ret->model->rope_context = ret->model->max_positions;
    CHECK(weights_plan(ret->model, dt, &ret->base));
    if (!adapter) goto out;
    CHECK(lora_config_json(&run->config->lora, folder, &json));
    CHECK(adapter_config_from_json("--lora-target", json, &config));
    st = adapter_new(config, ret->base, dt, &ret->adapter);
out:
    json_decref(json);
    return st;
}

static enum status load_own(void *context, const struct bridge_role *role, void *base)
{
    const struct run *run = context;
    struct plan p = {0};
    enum status st;
    if (!role->model[0]) return ST_OK; // a new adapter
    CHECK(make_plan(run, role->model, false, &p));
    weights_bind(p.base, base);
    st = weights_load(p.base, run->own_device, role->model);
out:
    release_plan(&p);
    return st;
}

static enum status describe_own(const struct run *run, const char *name, const char *folder,
                                struct bridge_role *ret)
{
    enum status st = ST_OK;
    struct plan p = {0};
    const bool adapter = strncmp(name, "adapter:", strlen("adapter:")) == 0;
    char *absolute = realpath(folder, NULL);
    if (!absolute || strlen(absolute) >= sizeof ret->model)
        FAIL(ST_INVALID, "%s: its path is too long, or cannot be found", folder);
    CHECK(make_plan(run, folder, adapter, &p));
    const struct weights *w = adapter ? p.adapter->weights : p.base;
    *ret = (struct bridge_role){.bytes = w->bytes,
                                .dt = w->dt,
                                .n_parameters = w->n_parameters,
                                .rope_context = p.model->rope_context};
    weights_layout_hash(w, ret->layout_hash);
    snprintf(ret->role, sizeof ret->role, "%s", name);
    snprintf(ret->model, sizeof ret->model, "%s", adapter ? "" : absolute);
out:
    release_plan(&p);
    free(absolute);
    return st;
}

static enum status own_weights(struct run *run, const char *server)
{
    const struct train_config *c = run->config;
    enum status st;
    struct bridge_role roles[3];
    char device[JOB_DEVICE_ROOM];
    int n = 0;
    CHECK(device_open(job_device(run->job, c->device, device), &run->own_device));
    CHECK(status_context(describe_own(run, "policy", c->model, &roles[n++]), "--model"));
    if (c->lora.r) CHECK(describe_own(run, run->role, c->model, &roles[n++]));
    if (c->train_draft)
        CHECK(status_context(describe_own(run, "draft", c->draft, &roles[n++]), "--draft"));
    CHECK(bridge_own(run->own_device, roles, n, server, load_own, run, &run->bridge));
    run->own_device = NULL; // the bridge's
out:
    return st;
}

static enum status put_arguments(const struct train_config *c, struct bytes *ret)
{
    if (c->lora.r) bytes_printf(ret, "--max-adapters 1 --max-lora-rank %" PRId64 " ", c->lora.r);
    if (c->draft) bytes_puts(ret, "--draft {draft} --speculative draft_model:5 ");
    bytes_puts(ret, c->job.server_args ? c->job.server_args : "");
    return bytes_status(ret);
}

static enum status open_server(struct run *run)
{
    const struct train_config *c = run->config;
    struct sync *y = run->sync;
    struct bytes arguments = BYTES_INIT;
    char device[JOB_DEVICE_ROOM];
    enum status st;
    CHECK(put_arguments(c, &arguments));
    const struct server_options options = {
        .command = c->server_command,
        .device = job_device(run->job, c->device, device),
        .arguments = bytes_text(&arguments),
        .port = c->server_port ? (int)c->server_port + run->job->ranks.rank : 0,
        .folder = y->own_folder,
        .timeout_s = c->server_timeout};
    CHECK(server_process_new(&options, &y->server));
    y->of_pull = (struct rollout_worker){.name = server_process_address(y->server), .down = true};
    log_info("--sync checkpoint: every %" PRId64 " steps %s is started anew on %s with the weights "
             "of then; its log is server.log in the run's folder",
             c->restart_interval, c->server_command ? c->server_command : "cw-infer-server",
             y->of_pull.name);
out:
    bytes_release(&arguments);
    return st;
}

enum status run_open_own(struct run *run)
{
    const struct train_config *c = run->config;
    struct sync *y = run->sync;
    enum status st = ST_OK;
    if (!c->server_url) CHECK(open_server(run));
    CHECK(own_weights(run, c->server_url ? c->server_url : y->of_pull.name));
    if (run->resolved.max_staleness > 0 && !c->importance_sampling_correction)
        log_warn("--restart-interval %" PRId64 " without --importance-sampling-correction: nothing "
                 "corrects for the age of the samples",
                 c->restart_interval);
out:
    return st;
}

void run_sample_by_copy(struct run *run)
{
    const struct train_config *c = run->config;
    struct sync *y = run->sync;
    if (c->sync == SYNC_SHARED) return;
    run->servers->servers[0].worker = &y->of_pull;
    run->servers->servers[0].address = bridge_file_of(run->bridge)->socket;
    if (c->server_command) y->of_pull.completions_of = y->folder;
    if (c->server_url) run->servers->n_servers = 0; // it is the first worker
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
