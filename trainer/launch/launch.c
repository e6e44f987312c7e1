/* launch.c: what the options and the environment say together; the start of the ranks of this host;
 * their meeting; and the server of one rank: the one that runs on its GPU, be it under systemd or
 * started by hand, or one that is this process's child. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/launch/launch.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/http/listen.h"
#include "common/ranks/liveness.h"
#include "common/ranks/processes.h"
#include "bridge/bridge_file.h"
#include "trainer/launch/server_process.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define URL_ROOM (PATH_ROOM + 16) // of a URL
#define MEETING  "commonweight-ranks-"
#define OWN_RUN  "own-" // an id that is none of another launcher's; its end is the process
#define GRACE_MS 10000  // of ranks to end once one has failed, which they know by themselves

// "0,1": numbers, none twice.
static enum status read_gpus(const char *text, struct launch *j)
{
    enum status st = ST_OK;
    for (const char *at = text; at && *at;) {
        char *end;
        const long gpu = strtol(at, &end, 10);
        if (end == at || (*end && *end != ',') || gpu < 0 || gpu > 999 || (*end && !end[1]))
            FAIL(ST_INVALID, "--gpus %s: give numbers, as 0,1", text);
        if (j->n_gpus == LAUNCH_GPUS) FAIL(ST_INVALID, "--gpus: more than %d", LAUNCH_GPUS);
        for (int i = 0; i < j->n_gpus; i++)
            if (j->gpus[i] == gpu) FAIL(ST_INVALID, "--gpus %s: %ld is there twice", text, gpu);
        j->gpus[j->n_gpus++] = (int)gpu;
        at = *end ? end + 1 : end;
    }
    if (text && !j->n_gpus) st = status_fail(ST_INVALID, "--gpus is empty: give numbers, as 0,1");
out:
    return st;
}

// Of a process that somebody else has started as a rank. Ranks must be able to meet, whoever counts
// them: it may be a variable that was left over.
static enum status check_rank(const struct launch *j)
{
    const struct ranks *r = &j->ranks;
    const struct launch_options *o = j->options;
    const bool local = r->local_size == r->size && r->run_id[0];
    const char *variable = ranks_variable(r);
    enum status st = ST_OK;
    if (j->n_gpus && o->nnodes > 1 && o->nnodes * j->n_gpus != r->size)
        FAIL(ST_INVALID,
             "--gpus and --nnodes make %" PRId64 " ranks, but %s says that this is one of %d",
             o->nnodes * j->n_gpus, r->source, r->size);
    if (j->n_gpus && r->local_size && r->local_size != j->n_gpus)
        FAIL(ST_INVALID,
             "--gpus %s names %d GPUs, but %s has started %d processes on this host: start one for "
             "each",
             o->gpus, j->n_gpus, r->source, r->local_size);
    if (j->n_gpus && r->local_rank >= j->n_gpus)
        FAIL(ST_INVALID,
             "--gpus %s names %d GPUs, but %s says that this is process %d of its host, counted "
             "from 0",
             o->gpus, j->n_gpus, r->source, r->local_rank);
    if (r->size > 1 && !local && !o->rendezvous)
        FAIL(ST_INVALID,
             "--rendezvous tcp://HOST:PORT or file://PATH is needed: %s does not say that all %d "
             "ranks are of one job on this host%s%s%s",
             r->source, r->size, variable ? "; where this process is no rank, unset " : "",
             variable ? variable : "", variable ? " and what belongs to it" : "");
out:
    return st;
}

// Of one that is to start them. With one GPU of one host it is the rank itself.
static enum status plan_launch(struct launch *j)
{
    const struct launch_options *o = j->options;
    const int64_t total = j->n_gpus ? j->n_gpus * o->nnodes : o->ranks;
    enum status st = ST_OK;
    if (!j->n_gpus && o->nnodes > 1)
        FAIL(ST_INVALID, "--nnodes needs --gpus; ranks of several hosts that compute on the CPU "
                         "are started with mpirun");
    if (o->node_rank >= o->nnodes)
        FAIL(ST_INVALID,
             "--node-rank %" PRId64 " with --nnodes %" PRId64 ": hosts are counted from 0",
             o->node_rank, o->nnodes);
    if (o->ranks && o->ranks != total)
        FAIL(ST_INVALID, "--ranks %" PRId64 ", but --gpus and --nnodes make %" PRId64, o->ranks,
             total);
    if (total > RANKS_MAX) FAIL(ST_INVALID, "%" PRId64 " ranks are more than %d", total, RANKS_MAX);
    if (o->nnodes > 1 && !o->rendezvous)
        FAIL(ST_INVALID,
             "--nnodes %" PRId64 " needs --rendezvous, where the ranks of all hosts meet",
             o->nnodes);
    if (total <= 1) return ST_OK;
    j->launches = true;
    j->ranks.size = (int)total;
    j->ranks.local_size = j->n_gpus ? j->n_gpus : (int)total;
out:
    return st;
}

// Ranks that share a server are neighbours on one host.
static enum status check_shards(const struct launch *j)
{
    const struct ranks *r = &j->ranks;
    const int n = j->n_shards, here = j->n_gpus ? j->n_gpus : r->local_size;
    enum status st = ST_OK;
    if (n > 1 && !j->serves && !j->launches)
        FAIL(ST_INVALID, "--tensor-parallel-size is for servers that are started with --gpus or "
                         "--ranks; that of one that runs stands in its bridge file");
    if (r->size % n || (here && here % n))
        FAIL(ST_INVALID,
             "--tensor-parallel-size %d with %d ranks, %d on this host: so many ranks each have a "
             "server, on one host; give multiples of it",
             n, r->size, here);
    if (j->serves && r->rank % n != r->local_rank % n)
        FAIL(ST_INVALID,
             "--tensor-parallel-size %d: rank %d is process %d of its host, counted from 0; ranks "
             "of one server must be neighbours: have %s number hosts one after the other",
             n, r->rank, r->local_rank, r->source);
out:
    return st;
}

enum status launch_find(const struct launch_options *o, struct launch *ret)
{
    struct launch j = {.options = o, .n_shards = (int)o->shards};
    enum status st;
    CHECK(read_gpus(o->gpus, &j));
    CHECK(ranks_find((int)o->rank, (int)o->ranks, &j.ranks));
    CHECK(j.ranks.counted ? check_rank(&j) : plan_launch(&j));
    j.serves = !j.launches && (j.n_gpus || o->ranks > 0 || j.ranks.size > 1);
    CHECK(check_shards(&j));
    snprintf(j.log_name, sizeof j.log_name, "cw-trainer");
    if (j.ranks.counted && j.ranks.size > 1)
        snprintf(j.log_name, sizeof j.log_name, "cw-trainer[%d]", j.ranks.rank);
    *ret = j;
out:
    return st;
}

const char *launch_device(const struct launch *j, const char *given, char room[LAUNCH_DEVICE_ROOM])
{
    if (!j->n_gpus) return j->ranks.size > 1 ? "cpu" : given;
    snprintf(room, LAUNCH_DEVICE_ROOM, "cuda:%d", j->gpus[j->ranks.local_rank]);
    return room;
}

// ---- the start of the ranks ---------------------------------------------------------------------
// On GPUs each is a child of this process; on the CPU mpirun starts them, without which MPI's ranks
// do not find one another. Each runs this program's own command line, and knows by its environment
// that it is a rank.

static enum status become_rank(void *context, int rank)
{
    const struct launch *launch = context;
    struct ranks r = launch->ranks;
    r.rank = rank;
    r.local_rank = rank % launch->n_gpus;
    return ranks_export(&r);
}

enum status launch_ranks(struct launch *launch, char **argv)
{
    struct bytes line = BYTES_INIT;
    struct processes plan = {.n = launch->n_gpus,
                             .first = (int)launch->options->node_rank * launch->n_gpus,
                             .before = become_rank,
                             .context = launch,
                             .stop_signal = SIGTERM,
                             .grace_ms = GRACE_MS,
                             .end_ms = PROCESSES_END_MS};
    enum status st;
    if (!launch->n_gpus) { // mpirun, told to end, gives its ranks no time; SIGUSR1 it hands on
        plan.n = 1;
        plan.first = 0;
        plan.before = NULL;
        plan.name = "mpirun";
        plan.n_ranks = launch->ranks.size;
        plan.stop_signal = SIGUSR1;
    }
    // Of the ranks of one host; those of several hosts have no id in common but what the
    // environment says.
    if (launch->ranks.local_size == launch->ranks.size)
        snprintf(launch->ranks.run_id, sizeof launch->ranks.run_id, OWN_RUN "%" PRId64 "-%d",
                 clock_wall_s(), (int)getpid());
    CHECK(processes_line("cw-trainer", argv, launch->n_gpus ? 0 : launch->ranks.size, &line));
    plan.line = bytes_text(&line);
    log_info("%d ranks, %d of them started here%s", launch->ranks.size, launch->ranks.local_size,
             launch->n_gpus ? "" : ", with mpirun");
    st = processes_run(&plan);
out:
    bytes_release(&line);
    return st;
}

// ---- the meeting --------------------------------------------------------------------------------

// Where all ranks are on this host they need not be told: the id of their run is the file's name,
// which is this user's alone. url: room for it.
static enum status meeting_of(const struct launch *launch, char url[URL_ROOM],
                              struct rendezvous_options *ret)
{
    const struct launch_options *o = launch->options;
    const char *folder = getenv("TMPDIR");
    if (!folder || *folder != '/') folder = "/tmp";
    // Those of launchers that were killed go.
    if (!o->rendezvous) file_sweep_owned(folder, MEETING OWN_RUN, "");
    const int n = o->rendezvous ? snprintf(url, URL_ROOM, "%s", o->rendezvous)
                                : snprintf(url, URL_ROOM, "file://%s/" MEETING "%s", folder,
                                           launch->ranks.run_id);
    if (n >= URL_ROOM) return status_fail(ST_INVALID, "--rendezvous is too long");
    *ret = (struct rendezvous_options){.url = url,
                                       .who = launch->ranks,
                                       .version = COMMONWEIGHT_VERSION,
                                       .timeout_s = o->rendezvous_timeout};
    return ST_OK;
}

enum status launch_meet(const struct launch *launch, const char *layout, struct bytes *bytes,
                        struct liveness **ret)
{
    const char *token_file = launch->options->rendezvous_token_file;
    struct rendezvous_options options;
    char url[URL_ROOM], *token = NULL;
    struct peers *peers;
    enum status st = ST_OK;
    *ret = NULL;
    if (launch->ranks.size == 1) return ST_OK;
    CHECK(meeting_of(launch, url, &options));
    if (token_file) CHECK(api_key_read("--rendezvous-token-file", token_file, &token));
    options.token = token;
    options.layout = layout;
    CHECK(rendezvous(&options, bytes, &peers));
    CHECK(liveness_start(peers, LIVENESS_SILENCE_S, NULL, NULL, ret));
    if (launch->ranks.rank == 0) log_info("%d ranks have met", launch->ranks.size);
out:
    free(token);
    return st;
}

void launch_give_up(const struct launch *launch, enum status why)
{
    struct rendezvous_options options;
    char url[URL_ROOM];
    if (launch->launches || launch->ranks.size <= 1) return;
    if (meeting_of(launch, url, &options) == ST_OK) rendezvous_give_up(&options, why);
}

// ---- the server of a rank -----------------------------------------------------------------------

#define DRAIN_S   3 // for requests that no rank waits for any more
#define HEALTH_MS 2000
#define POLL_MS   200

// Of the ranks that have one server, the first, who starts it; counted on this host.
static int first_rank(const struct launch *launch)
{
    return launch->ranks.local_rank / launch->n_shards * launch->n_shards;
}

// The server of a folder must serve the model that is asked for, in as many shards.
static enum status check_model(const char *folder, const char *model, int n_shards)
{
    struct bridge_file *file = NULL;
    char path[PATH_ROOM], given[PATH_ROOM], served[PATH_ROOM];
    enum status st;
    CHECK(path_put(path, folder, "bridge.json"));
    CHECK(bridge_file_read(path, &file));
    if (model && realpath(model, given) && realpath(file->roles[0].model, served) &&
        strcmp(given, served) != 0)
        FAIL(ST_MISMATCH,
             "%s: the server there serves %s, not --model %s: stop it, or leave --model out", path,
             served, model);
    if (file->tp_degree != n_shards)
        FAIL(ST_MISMATCH,
             "%s: the server there has its model in %d shards, --tensor-parallel-size is %d: give "
             "the same, or stop it",
             path, file->tp_degree, n_shards);
out:
    bridge_file_free(file);
    return st;
}

// Whether one runs there; one that loads its model still is waited for.
static enum status check_runs(const char *folder, double timeout_s, bool *ret_runs)
{
    const int64_t deadline = clock_deadline_ns((int64_t)(timeout_s * 1e3));
    struct http_client *http = NULL;
    char socket[PATH_ROOM];
    enum status st;
    *ret_runs = false;
    CHECK(path_put(socket, folder, "server.sock"));
    if (!file_exists(socket)) goto out;
    CHECK(http_client_new(socket, &http));
    for (bool logged = false; (st = http_get(http, "/health", HEALTH_MS, NULL)) != ST_OK &&
                              st != ST_PEER_GONE && clock_ms_until(deadline) > 0;
         logged = true) {
        if (!logged) log_info("the server of %s is not ready yet, and is waited for", socket);
        clock_sleep_ms(POLL_MS);
    }
    *ret_runs = st == ST_OK;
    if (st == ST_PEER_GONE) st = ST_OK; // a dead one's socket
    st = status_context(st, "the server of %s was not ready within %g s (--server-timeout)", socket,
                        timeout_s);
out:
    http_client_free(http);
    return st;
}

// What stands before the command of a server in shards: it starts ranks of its own, on the GPUs of
// this rank and its neighbours. --gpus counts those that this process sees.
static enum status put_before(const struct launch *launch, struct bytes *ret)
{
    const char *seen = getenv("CUDA_VISIBLE_DEVICES");
    if (launch->n_shards == 1) return ST_OK;
    ranks_put_forgetting(ret);
    if (launch->n_gpus) bytes_puts(ret, "CUDA_VISIBLE_DEVICES=");
    for (int i = 0; launch->n_gpus && i < launch->n_shards; i++) {
        const int gpu = launch->gpus[first_rank(launch) + i];
        const char *name = seen;
        for (int k = 0; k < gpu && name; k++)
            if ((name = strchr(name, ','))) name++;
        if (seen && (!name || !*name))
            return status_fail(ST_INVALID,
                               "--gpus %s: CUDA_VISIBLE_DEVICES=%s has no GPU %d, counted from 0",
                               launch->options->gpus, seen, gpu);
        if (i) bytes_puts(ret, ",");
        if (seen) name += strspn(name, " ");
        if (seen)
            bytes_append(ret, name, strcspn(name, ", "));
        else
            bytes_printf(ret, "%d", gpu);
    }
    bytes_puts(ret, " ");
    return bytes_status(ret);
}

static enum status start(struct launch *launch, const char *model, double timeout_s)
{
    const char *args = launch->options->server_args;
    char room[LAUNCH_DEVICE_ROOM];
    const char *device = launch_device(launch, "cpu", room);
    struct bytes arguments = BYTES_INIT, before = BYTES_INIT;
    struct http_client *http = NULL;
    enum status st;
    if (launch->n_gpus && launch->n_shards > 1) device = "cuda";
    bytes_printf(&arguments, "--drain-timeout %d --tensor-parallel-size %d %s", DRAIN_S,
                 launch->n_shards, args ? args : "");
    CHECK(bytes_status(&arguments));
    CHECK(put_before(launch, &before));
    const struct server_options options = {.device = device,
                                           .arguments = bytes_text(&arguments),
                                           .before = bytes_text(&before),
                                           .shares = true,
                                           .folder = launch->folder,
                                           .timeout_s = timeout_s};
    CHECK(file_make_folders(launch->folder));
    CHECK(server_process_new(&options, &launch->server));
    CHECK(http_client_new(server_process_address(launch->server), &http));
    log_info("a server of %s is started on %s; its log is %s/server.log", model, device,
             launch->folder);
    CHECK(server_process_restart(launch->server, http, model, NULL));
out:
    http_client_free(http);
    bytes_release(&arguments);
    bytes_release(&before);
    return st;
}

// launch->folder: where the one that runs, or is to be started, has its socket and bridge file; in
// /run so has cw-infer-server@N.service.
static enum status find_server(struct launch *launch, double timeout_s, bool *ret_runs)
{
    const char *own = getenv("XDG_RUNTIME_DIR"), *runtimes[] = {"/run", own && *own ? own : "/run"};
    enum status st = ST_OK;
    *ret_runs = false;
    for (int i = 0; i < 2 && !*ret_runs; i++) {
        CHECK(path_put(launch->folder, runtimes[i], "commonweight/%s%d",
                       launch->n_gpus ? "" : "cpu-",
                       launch->n_gpus ? launch->gpus[first_rank(launch)] : first_rank(launch)));
        CHECK(check_runs(launch->folder, timeout_s, ret_runs));
    }
out:
    return st;
}

enum status launch_open_server(struct launch *launch, const char *model, double timeout_s)
{
    const int64_t deadline = clock_deadline_ns((int64_t)(timeout_s * 1e3));
    const bool starts = launch->ranks.local_rank == first_rank(launch);
    struct rendezvous_options meeting;
    char url[URL_ROOM];
    bool runs;
    enum status st;
    CHECK(meeting_of(launch, url, &meeting));
    CHECK(find_server(launch, timeout_s, &runs));
    while (!runs && !starts && model && clock_ms_until(deadline) > 0) {
        CHECK(rendezvous_check(&meeting));
        clock_sleep_ms(POLL_MS);
        CHECK(find_server(launch, timeout_s, &runs));
    }
    if (!runs && !starts && model)
        FAIL(ST_TIMEOUT,
             "the server that process %d of this host starts for this rank too, in %s, was not "
             "there within %g s (--server-timeout); that rank's error says why",
             first_rank(launch), launch->folder, timeout_s);
    if (!runs && !model)
        FAIL(ST_NOT_FOUND,
             "no server runs for this rank in %s: start it there, name the bridge file of "
             "another (--bridge), or give --model DIR, so that one is started",
             launch->folder);
    CHECK(path_put(launch->bridge, launch->folder, "bridge.json"));
    if (runs)
        log_info("the server of %s is %s", launch->bridge,
                 starts ? "there already" : "this rank's too");
    CHECK(runs ? check_model(launch->folder, model, launch->n_shards)
               : start(launch, model, timeout_s));
out:
    return st;
}
