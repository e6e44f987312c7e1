/* rank_server.c: the server of one rank: the one that runs on its GPU, be it under systemd or
 * started by hand, or one that is this process's child. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "trainer/launch/job.h"
#include "trainer/launch/server_process.h"

#include <stdlib.h>
#include <string.h>

#define DRAIN_S   3 // for requests that no rank waits for any more
#define HEALTH_MS 2000
#define POLL_MS   200

// Of the ranks that have one server, the first, who starts it; counted on this host.
static int first_rank(const struct job *job)
{
    return job->ranks.local_rank / job->n_shards * job->n_shards;
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
static enum status put_before(const struct job *job, struct bytes *ret)
{
    const char *seen = getenv("CUDA_VISIBLE_DEVICES");
    if (job->n_shards == 1) return ST_OK;
    ranks_put_forgetting(ret);
    if (job->n_gpus) bytes_puts(ret, "CUDA_VISIBLE_DEVICES=");
    for (int i = 0; job->n_gpus && i < job->n_shards; i++) {
        const int gpu = job->gpus[first_rank(job) + i];
        const char *name = seen;
        for (int k = 0; k < gpu && name; k++)
            if ((name = strchr(name, ','))) name++;
        if (seen && (!name || !*name))
            return status_fail(ST_INVALID,
                               "--gpus %s: CUDA_VISIBLE_DEVICES=%s has no GPU %d, counted from 0",
                               job->options->gpus, seen, gpu);
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

static enum status start(struct job *job, const char *model, double timeout_s)
{
    const char *args = job->options->server_args;
    char room[JOB_DEVICE_ROOM];
    const char *device = job_device(job, "cpu", room);
    struct bytes arguments = BYTES_INIT, before = BYTES_INIT;
    struct http_client *http = NULL;
    enum status st;
    if (job->n_gpus && job->n_shards > 1) device = "cuda";
    bytes_printf(&arguments, "--drain-timeout %d --tensor-parallel-size %d %s", DRAIN_S,
                 job->n_shards, args ? args : "");
    CHECK(bytes_status(&arguments));
    CHECK(put_before(job, &before));
    const struct server_options options = {.device = device,
                                           .arguments = bytes_text(&arguments),
                                           .before = bytes_text(&before),
                                           .shares = true,
                                           .folder = job->folder,
                                           .timeout_s = timeout_s};
    CHECK(file_make_folders(job->folder));
    CHECK(server_process_new(&options, &job->server));
    CHECK(http_client_new(server_process_address(job->server), &http));
    log_info("a server of %s is started on %s; its log is %s/server.log", model, device,
             job->folder);
    CHECK(server_process_restart(job->server, http, model, NULL));
out:
    http_client_free(http);
    bytes_release(&arguments);
    bytes_release(&before);
    return st;
}

// job->folder: where the one that runs, or is to be started, has its socket and bridge file; in
// /run so has cw-infer-server@N.service.
static enum status find_server(struct job *job, double timeout_s, bool *ret_runs)
{
    const char *own = getenv("XDG_RUNTIME_DIR"), *runtimes[] = {"/run", own && *own ? own : "/run"};
    enum status st = ST_OK;
    *ret_runs = false;
    for (int i = 0; i < 2 && !*ret_runs; i++) {
        CHECK(path_put(job->folder, runtimes[i], "commonweight/%s%d", job->n_gpus ? "" : "cpu-",
                       job->n_gpus ? job->gpus[first_rank(job)] : first_rank(job)));
        CHECK(check_runs(job->folder, timeout_s, ret_runs));
    }
out:
    return st;
}

enum status job_open_server(struct job *job, const char *model, double timeout_s)
{
    const int64_t deadline = clock_deadline_ns((int64_t)(timeout_s * 1e3));
    const bool starts = job->ranks.local_rank == first_rank(job);
    bool runs;
    enum status st;
    CHECK(find_server(job, timeout_s, &runs));
    while (!runs && !starts && model && clock_ms_until(deadline) > 0) {
        clock_sleep_ms(POLL_MS);
        CHECK(find_server(job, timeout_s, &runs));
    }
    if (!runs && !starts && model)
        FAIL(ST_TIMEOUT,
             "the server that process %d of this host starts for this rank too, in %s, was not "
             "there within %g s (--server-timeout); that rank's error says why",
             first_rank(job), job->folder, timeout_s);
    if (!runs && !model)
        FAIL(ST_NOT_FOUND,
             "no server runs for this rank in %s: start it there, or give --model "
             "DIR, so that one is started",
             job->folder);
    CHECK(path_put(job->bridge, job->folder, "bridge.json"));
    if (runs)
        log_info("the server of %s is %s", job->bridge,
                 starts ? "there already" : "this rank's too");
    CHECK(runs ? check_model(job->folder, model, job->n_shards) : start(job, model, timeout_s));
out:
    return st;
}

void job_close_server(struct job *job)
{
    server_process_free(job->server);
    job->server = NULL;
}
