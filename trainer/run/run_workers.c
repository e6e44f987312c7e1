/* run_workers.c: further servers that sample for the run (--workers). The main thread.
 *
 * A server owns the weights that it samples by, so a worker has a copy. Before each step's rollouts
 * the weights are written into RUN/workers and each worker is told to load them (POST /reload, or
 * /v1/load_lora_adapter where an adapter is trained): its
 * samples are of the weights that learn from them, as those of the trained server are. A worker
 * whose tokens claim any other version than that reload answered with (it was started anew, or
 * loaded something else) fails like one that died. At the first step every worker must be there;
 * later one that is not is left out until it is back. Of several ranks each has every size-th of
 * them beside its own server. */
#include "common/base/clock.h"
#include "bridge/attach.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/http/api_key.h"
#include "trainer/rollout/source.h"
#include "trainer/run/model_folder_write.h"
#include "trainer/run/run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROBE_MS 5000

struct workers {
    char *list; // of --workers, cut up at its commas
    int n;
    bool in_step; // all loaded the weights once
    double sync_s;
    struct worker {
        struct rollout_worker of_pull;
        const char *address;
        struct bridge_file *bridge; // NULL: it was named by its URL
        struct http_transfer *request;
        bool own;                     // it is this rank's to ask
        bool may;                     // be given work in this step
    } items[ROLLOUT_MAX_SERVERS - 1]; // (n)
};

static enum status add_worker(struct run *run, const char *name)
{
    struct rollout_servers *all = run->servers;
    struct workers *ws = run->workers;
    enum status st = ST_OK;
    if (!*name) FAIL(ST_INVALID, "an empty name before or behind a comma");
    if (ws->n == ROLLOUT_MAX_SERVERS - 1)
        FAIL(ST_INVALID, "at most %d workers are possible", ROLLOUT_MAX_SERVERS - 1);
    struct worker *w = &ws->items[ws->n++]; // freed with the rest, however far this comes
    w->own = (ws->n - 1) % run->job->ranks.size == run->job->ranks.rank;
    w->of_pull = (struct rollout_worker){.name = name, .down = true};
    w->address = name;
    if (strncmp(name, "http://", strlen("http://")) != 0) {
        if (strstr(name, "://"))
            FAIL(ST_INVALID, "%s: take a bridge file or http://HOST:PORT", name);
        CHECK(bridge_file_read(name, &w->bridge));
        w->address = w->bridge->socket;
    }
    if (run->config->sync == SYNC_SHARED &&
        strcmp(w->address, bridge_file_of(run->bridge)->socket) == 0)
        FAIL(ST_INVALID, "%s is of the server that is trained, which samples anyway; name others",
             name);
    for (int i = 0; i < ws->n - 1; i++)
        if (strcmp(ws->items[i].address, w->address) == 0)
            FAIL(ST_INVALID, "%s is of the same server as %s; name it once", name,
                 ws->items[i].of_pull.name);
    if (w->own)
        all->servers[all->n_servers++] =
            (struct rollout_server){w->address, bridge_control(run->bridge), &w->of_pull};
out:
    return st;
}

static enum status authorize(const struct run *run)
{
    char *key = NULL;
    enum status st = ST_OK;
    if (!run->config->workers_api_key_file) return ST_OK;
    CHECK(api_key_read("--workers-api-key-file", run->config->workers_api_key_file, &key));
    CHECK(http_client_authorize(run->http, key));
out:
    free(key);
    return st;
}

// ---- asking all of them at once -----------------------------------------------------------------

// One that cannot be given work in this step.
static enum status leave_out(struct run *run, struct worker *w, enum status st)
{
    w->may = false;
    if (!run->workers->in_step)
        return status_context(
            st,
            "--%s: %s cannot be used (mend it, or leave it out; --workers \"\" is "
            "a run without)",
            w->of_pull.name == run->config->server_url ? "server-url" : "workers", w->of_pull.name);
    log_progress_end();
    log_line(w->of_pull.down ? LOG_DEBUG : LOG_WARN,
             "worker %s is left out until it answers again before a step: %s", w->of_pull.name,
             status_message());
    w->of_pull.n_failures += !w->of_pull.down;
    w->of_pull.down = true;
    return ST_OK;
}

// What one of them responded; its failure is its own. NULL: nothing that is looked at.
typedef enum status (*take_fn)(const struct run *run, struct worker *w, const json_t *response);

static enum status take_response(struct run *run, struct worker *w, const char *path, take_fn take)
{
    struct bytes body = BYTES_INIT;
    json_t *response = NULL;
    struct http_transfer *request = w->request;
    enum status st;
    w->request = NULL;
    CHECK(http_finish(request, &body));
    if (!take) goto out; // words for a person
    CHECK(json_parse(path, bytes_text(&body), body.len, &response));
    CHECK(take(run, w, response));
out:
    json_decref(response);
    bytes_release(&body);
    return st;
}

// Sends a request to all that may be given work. body: of a POST; NULL: a GET.
static enum status ask(struct run *run, const char *path, const json_t *body, int timeout_ms,
                       take_fn take)
{
    enum status st = ST_OK;
    struct workers *ws = run->workers;
    struct http_call call = {.path = path, .post = body, .body = body, .timeout_ms = timeout_ms};
    for (struct worker *w = ws->items; w < ws->items + ws->n; w++) {
        call.server = w->address;
        if (w->may) CHECK(http_submit(run->http, &call, &w->request));
    }
    for (struct worker *w = ws->items; w < ws->items + ws->n; w++) {
        if (!w->request) continue;
        enum status its = take_response(run, w, path, take);
        if (its != ST_OK) CHECK(leave_out(run, w, its));
    }
out:
    return st;
}

static enum status take_info(const struct run *run, struct worker *w, const json_t *info)
{
    const struct bridge_role *policy = bridge_file_role(bridge_file_of(run->bridge), "policy");
    const char *status = json_string_value(json_object_get(info, "status"));
    const int64_t n = json_integer_value(json_object_get(info, "num_parameters"));
    if (!status || strcmp(status, "ok") != 0)
        return status_fail(ST_BUSY, "%s: its status is \"%s\"; see its /health", w->address,
                           status ? status : "");
    if (json_is_true(json_object_get(info, "paused")))
        return status_fail(ST_BUSY, "%s: it is paused; POST /bridge/resume", w->address);
    if (n != policy->n_parameters)
        return status_fail(ST_MISMATCH,
                           "%s: it serves a model of %lld parameters, and that which is trained "
                           "has %lld; start it with --model %s",
                           w->address, (long long)n, (long long)policy->n_parameters,
                           run->model_folder);
    return ST_OK;
}

// In the response to /reload, or behind an adapter's loading in /bridge/info.
static enum status take_version(const struct run *run, struct worker *w, const json_t *response)
{
    int64_t version = 0;
    enum status st = json_get_int(w->address, response, "weight_version", 2, INT64_MAX, &version);
    if (st == ST_OK && version < 2)
        st = status_fail(ST_FORMAT, "%s: \"weight_version\" is missing", w->address);
    if (st != ST_OK) return st;
    if (w->of_pull.down && run->workers->in_step) log_info("worker %s is back", w->of_pull.name);
    w->of_pull.down = false;
    w->of_pull.version = (uint64_t)version;
    w->of_pull.copy_of = control_version(bridge_control(run->bridge));
    return ST_OK;
}

// ---- a step -------------------------------------------------------------------------------------

// Has those that may be given work load the folder.
static enum status load(struct run *run, const char *folder)
{
    const int timeout_ms = run->servers->timeout_ms;
    const bool has_draft = run_copies_draft(run);
    char draft[PATH_ROOM];
    json_t *body = NULL, *adapter = NULL;
    enum status st;
    CHECK(path_put(draft, folder, DRAFT_FOLDER));
    body = json_pack("{s:s*, s:s*}", "model", run->adapter ? NULL : folder, "draft",
                     has_draft ? draft : NULL);
    if (run->adapter) adapter = run_adapter_body(run, folder);
    if (!body || (run->adapter && !adapter))
        FAIL(ST_INVALID, "%s: a worker cannot be told of this folder, whose name is not UTF-8",
             folder);
    if (!run->adapter || has_draft) CHECK(ask(run, "/reload", body, timeout_ms, take_version));
    if (run->adapter) {
        CHECK(ask(run, "/v1/load_lora_adapter", adapter, timeout_ms, NULL));
        st = ask(run, "/bridge/info", NULL, PROBE_MS, take_version);
    }
out:
    json_decref(body);
    json_decref(adapter);
    return st;
}

enum status run_sync_workers(struct run *run, bool due)
{
    enum status st = ST_OK;
    struct workers *ws = run->workers;
    const char *folder;
    const int64_t start = clock_now_ns();
    int n = 0;
    if (!ws) return ST_OK;
    for (int i = 0; i < ws->n; i++) {
        ws->items[i].may = ws->items[i].own && (due || ws->items[i].of_pull.down);
        ws->items[i].of_pull.n_samples = 0;
    }
    CHECK(ask(run, "/bridge/info", NULL, PROBE_MS, take_info));
    for (int i = 0; i < ws->n; i++) n += ws->items[i].may;
    bool any = n > 0;
    CHECK(train_ranks_any(&run->ranks, &any));
    if (any) CHECK(run_write_weights(run, &folder));
    if (n > 0) CHECK(load(run, folder));
    ws->in_step = true;
    ws->sync_s = clock_ms_since(start) / 1e3;
out:
    return st;
}

void run_count_workers(const struct run *run, struct source_counts *counts)
{
    const struct workers *ws = run->workers;
    double up = 0;
    if (!ws) return;
    for (int i = 0; i < ws->n; i++) {
        const struct rollout_worker *w = &ws->items[i].of_pull;
        const bool own = ws->items[i].own;
        source_count(counts, "workers/%d/samples", i + 1)->sum = own ? w->n_samples : 0;
        source_count(counts, "workers/%d/failures", i + 1)->sum = own ? w->n_failures : 0;
        up += own && !w->down;
    }
    source_count(counts, "workers/up")->sum = up;
    source_count(counts, "workers/sync_s")->sum = ws->sync_s;
    source_count(counts, "workers/sync_s")->of = 1;
}

enum status run_open_workers(struct run *run)
{
    enum status st = ST_OK;
    const char *list = run->config->workers, *first = run->config->server_url;
    char *remaining, *name;
    if (list && !*list) list = NULL;
    if (!list && !first) return ST_OK;
    struct workers *ws = run->workers = calloc(1, sizeof *ws);
    if (!ws || (list && !(ws->list = strdup(list))))
        FAIL(ST_NO_MEMORY, "no memory for a list of workers");
    CHECK(authorize(run));
    if (first) CHECK(status_context(add_worker(run, first), "--server-url"));
    remaining = ws->list;
    while ((name = strsep(&remaining, ",")))
        CHECK(status_context(add_worker(run, name), "--workers"));
    for (int i = 0; i < ws->n; i++) ws->items[i].may = ws->items[i].own;
    CHECK(ask(run, "/bridge/info", NULL, PROBE_MS, take_info));
    log_info("--%s: %d further servers sample; before each step they load the weights from "
             "the folder \"workers\" of the run, which they must find under the same path",
             first ? "server-url" : "workers", ws->n);
out:
    return st;
}

void run_close_workers(struct run *run)
{
    struct workers *ws = run->workers;
    if (!ws) return;
    for (int i = 0; i < ws->n; i++) bridge_file_free(ws->items[i].bridge);
    free(ws->list);
    free(ws);
}
