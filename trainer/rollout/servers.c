/* servers.c: the servers that sample, and the weights that are brought to those of them which have
 * copies. The main thread; what is pulled meanwhile, by other threads, looks at `down` alone.
 *
 * A server owns the weights that it samples by. Before a step's rollouts the present ones are
 * written into a folder, and each worker is told to load it (POST /reload, or /v1/load_lora_adapter
 * where an adapter is trained), or the server that is started here is started anew on it: a copy's
 * samples are of the weights that learn from them, as those of a server that shares them are. A
 * worker whose tokens claim any other version than that reload answered with (it was started anew,
 * or loaded something else) fails like one that died. At the first step every worker must be there;
 * later one that is not is left out until it is back. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/http/listen.h"
#include "bridge/bridge_file.h"
#include "trainer/launch/server_process.h"
#include "trainer/rollout/source.h"

#include <stdlib.h>
#include <string.h>

#define PROBE_MS      5000
#define MAX_LOST      3           // times that the server may fail in a step
#define GRACE_MS      500         // for one that closed its connections to end, and have a status
#define WARNING       "Warning: " // in the response to /v1/load_lora_adapter
#define FIRST_VERSION 2 // of a server of ours that was started on a folder, and of no other

struct worker {
    struct rollout_worker of_pull;
    const char *address;
    struct bridge_file *bridge; // NULL: it was named by its URL
    struct http_transfer *request;
    bool own; // it is this rank's to ask
    bool may; // be given work in this step
};

struct servers {
    struct source source;
    struct copies_options options;
    struct rollout_servers *servers;
    // what was written last
    char folder[PATH_ROOM]; // absolute; "": nothing yet
    uint64_t written;       // version of the weights
    // the server that is started
    struct rollout_worker started;
    bool has_started;
    int n_lost; // times that it failed since a step was sampled
    // workers
    char *list; // of their names, cut up at its commas
    int n;
    bool in_step; // all loaded the weights once
    double sync_s;
    struct worker items[ROLLOUT_MAX_SERVERS - 1]; // (n)
};

static uint64_t present_version(const struct servers *c)
{
    return control_version(c->servers->servers[0].control);
}

static enum status write_weights(struct servers *c)
{
    const uint64_t version = present_version(c);
    if (c->written == version) return ST_OK;
    enum status st = c->options.write(c->options.context, c->folder);
    if (st == ST_OK) c->written = version;
    return st;
}

// ---- the server that is started -----------------------------------------------------------------

// With an adapter on the folder that it is of, and then with it, which a server without a key takes
// on its socket alone. Where it was lost between those steps that are due for new weights it is
// given the old ones again: all ranks write together or none does.
static enum status restart(struct servers *c, bool due)
{
    const struct copies_options *o = &c->options;
    char draft[PATH_ROOM];
    enum status st;
    if (due || !c->written) CHECK(write_weights(c));
    CHECK(path_put(draft, c->folder, "%s", o->draft ? o->draft : ""));
    CHECK(server_process_restart(o->server, c->servers->http,
                                 o->adapter ? o->model_folder : c->folder,
                                 o->draft ? draft : o->other_draft));
    if (o->adapter)
        CHECK(server_load_adapter(c->servers->http, o->socket, o->adapter, c->folder, NULL));
    c->started.down = false;
    c->started.version = FIRST_VERSION;
    c->started.copy_of = c->written;
    if (!c->has_started) CHECK(o->started(o->context));
    c->has_started = true;
out:
    return st;
}

// A failure of the server, which is started anew unless it was the third of one step.
static bool may_try_again(struct servers *c, enum status st)
{
    struct status_kept why = {0};
    if (!c->started.down || (st != ST_PEER_GONE && st != ST_TIMEOUT)) return false;
    status_keep(&why, st);
    const bool rank_gone = comm_check(c->servers->comm) != ST_OK;
    status_recall(&why);
    if (rank_gone) return false;
    if (++c->n_lost < MAX_LOST) return true;
    status_fail(st, "the server was lost %d times in one step, the last time so: %s", MAX_LOST,
                why.message);
    return false;
}

static enum status sync_server(struct servers *c, bool due)
{
    struct rollout_worker *server = &c->started;
    const bool ran = server->copy_of > 0;
    enum status st = ST_OK;
    if (!c->options.server) return ST_OK;
    server->n_samples = 0;
    const bool ended =
        ran && server_process_check(c->options.server, server->down ? GRACE_MS : 0) != ST_OK;
    if (ended || (ran && server->down)) {
        log_progress_end();
        log_warn("the server is started anew%s%s", ended ? ": " : "",
                 ended ? status_message() : ", since it failed");
        server->down = true;
    }
    if (!server->down && !(due && server->copy_of != present_version(c))) return ST_OK;
    server->down = true; // until it is ready; one that never was ends the run at once
    while ((st = restart(c, due)) != ST_OK && ran && may_try_again(c, st))
        log_warn("the server is started anew: %s", status_message());
    return status_context(st, "--sync checkpoint");
}

// ---- workers ------------------------------------------------------------------------------------

static enum status add_worker(struct servers *c, const char *name)
{
    enum status st = ST_OK;
    if (!*name) FAIL(ST_INVALID, "an empty name before or behind a comma");
    if (c->n == ROLLOUT_MAX_SERVERS - 1)
        FAIL(ST_INVALID, "at most %d workers are possible", ROLLOUT_MAX_SERVERS - 1);
    struct worker *w = &c->items[c->n++]; // freed with the rest, however far this comes
    w->own = (c->n - 1) % c->options.n_ranks == c->options.rank;
    w->of_pull = (struct rollout_worker){.name = name, .down = true};
    w->address = name;
    if (strncmp(name, "http://", strlen("http://")) != 0) {
        if (strstr(name, "://"))
            FAIL(ST_INVALID, "%s: take a bridge file or http://HOST:PORT", name);
        CHECK(bridge_file_read(name, &w->bridge));
        w->address = w->bridge->socket;
    }
    if (c->options.shared && strcmp(w->address, c->options.shared) == 0)
        FAIL(ST_INVALID, "%s is of the server that is trained, which samples anyway; name others",
             name);
    for (int i = 0; i < c->n - 1; i++)
        if (strcmp(c->items[i].address, w->address) == 0)
            FAIL(ST_INVALID, "%s is of the same server as %s; name it once", name,
                 c->items[i].of_pull.name);
    if (w->own)
        c->servers->servers[c->servers->n_servers++] =
            (struct rollout_server){w->address, c->servers->servers[0].control, &w->of_pull};
out:
    return st;
}

// One that cannot be given work in this step.
static enum status leave_out(struct servers *c, struct worker *w, enum status st)
{
    w->may = false;
    if (!c->in_step && w->of_pull.name == c->options.server_url)
        return status_context(st, "--server-url: %s cannot be used", w->of_pull.name);
    if (!c->in_step)
        return status_context(st,
                              "--workers: %s cannot be used (mend it, or leave it out; "
                              "--workers \"\" is a run without)",
                              w->of_pull.name);
    log_progress_end();
    log_line(w->of_pull.down ? LOG_DEBUG : LOG_WARN,
             "worker %s is left out until it answers again before a step: %s", w->of_pull.name,
             status_message());
    w->of_pull.n_failures += !w->of_pull.down;
    w->of_pull.down = true;
    return ST_OK;
}

// What one of them responded; its failure is its own. NULL: nothing that is looked at.
typedef enum status (*take_fn)(const struct servers *c, struct worker *w, const json_t *response);

static enum status take_response(struct servers *c, struct worker *w, const char *path,
                                 take_fn take)
{
    struct bytes body = BYTES_INIT;
    json_t *response = NULL;
    struct http_transfer *request = w->request;
    enum status st;
    w->request = NULL;
    CHECK(http_finish(request, &body));
    if (!take) { // words for a person, which warn where the adapter is of another base than its own
        const char *warning = strstr(bytes_text(&body), WARNING);
        if (warning)
            st = status_fail(ST_MISMATCH,
                             "%s: %s; have it load the base that is trained on (POST /reload "
                             "{\"model\": FOLDER})",
                             w->address, warning + strlen(WARNING));
        goto out;
    }
    CHECK(json_parse(path, bytes_text(&body), body.len, &response));
    CHECK(take(c, w, response));
out:
    json_decref(response);
    bytes_release(&body);
    return st;
}

// Sends a request to all that may be given work. body: of a POST; NULL: a GET.
static enum status ask(struct servers *c, const char *path, const json_t *body, int timeout_ms,
                       take_fn take)
{
    enum status st = ST_OK;
    struct http_call call = {.path = path, .body = body, .timeout_ms = timeout_ms};
    for (struct worker *w = c->items; w < c->items + c->n; w++) {
        call.server = w->address;
        if (w->may) CHECK(http_submit(c->servers->http, &call, &w->request));
    }
    for (struct worker *w = c->items; w < c->items + c->n; w++) {
        if (!w->request) continue;
        enum status its = take_response(c, w, path, take);
        if (its != ST_OK) CHECK(leave_out(c, w, its));
    }
out:
    return st;
}

// What a server computes with, which changes what its tokens' log-probabilities are. plain: of one
// that does not say, of before there was a choice.
static enum status take_numbers(const struct worker *w, const json_t *info, const char *key,
                                const char *option, const char *own, const char *plain)
{
    const char *theirs = json_string_value(json_object_get(info, key));
    if (!theirs) theirs = plain;
    if (strcmp(theirs, own) == 0) return ST_OK;
    return status_fail(ST_MISMATCH,
                       "%s: it serves with --%s %s, and what is trained has %s; start it with --%s "
                       "%s",
                       w->address, option, theirs, own, option, own);
}

static enum status take_info(const struct servers *c, struct worker *w, const json_t *info)
{
    const struct bridge_role *policy = c->options.policy;
    const char *status = json_string_value(json_object_get(info, "status"));
    const int64_t n = json_integer_value(json_object_get(info, "num_parameters"));
    enum status st;
    if (!status || strcmp(status, "ok") != 0)
        return status_fail(ST_BUSY, "%s: its status is \"%s\"; see its /health", w->address,
                           status ? status : "");
    if (json_is_true(json_object_get(info, "paused")))
        return status_fail(ST_BUSY, "%s: it is paused; POST /bridge/resume", w->address);
    if (n != c->options.n_parameters)
        return status_fail(ST_MISMATCH,
                           "%s: it serves a model of %lld parameters, and that which is trained "
                           "has %lld; start it with --model %s",
                           w->address, (long long)n, (long long)c->options.n_parameters,
                           c->options.model_folder);
    st = take_numbers(w, info, "quantization", "quantization",
                      quantization_names[policy->quantization], quantization_names[0]);
    if (st == ST_OK)
        st = take_numbers(w, info, "kv_cache_dtype", "kv-cache-dtype",
                          kv_cache_names[policy->kv_cache], kv_cache_names[0]);
    return st;
}

// In the response to /reload, or behind an adapter's loading in /bridge/info.
static enum status take_version(const struct servers *c, struct worker *w, const json_t *response)
{
    int64_t version = 0;
    enum status st = json_get_int(w->address, response, "weight_version", 2, INT64_MAX, &version);
    if (st == ST_OK && version < 2)
        st = status_fail(ST_FORMAT, "%s: \"weight_version\" is missing", w->address);
    if (st != ST_OK) return st;
    if (w->of_pull.down && c->in_step) log_info("worker %s is back", w->of_pull.name);
    w->of_pull.down = false;
    w->of_pull.version = (uint64_t)version;
    w->of_pull.copy_of = present_version(c);
    return ST_OK;
}

// Has those that may be given work load what was written.
static enum status load(struct servers *c)
{
    const char *adapter = c->options.adapter, *in = c->options.draft;
    const int timeout_ms = c->servers->timeout_ms;
    char draft[PATH_ROOM];
    json_t *body = NULL;
    enum status st = ST_OK;
    CHECK(path_put(draft, c->folder, "%s", in ? in : ""));
    if (!adapter || in) {
        body = json_pack("{s:s*, s:s*}", "model", adapter ? NULL : c->folder, "draft",
                         in ? draft : NULL);
        if (!body)
            FAIL(ST_INVALID, "%s: a server cannot be told of this folder, whose name is not UTF-8",
                 c->folder);
        CHECK(ask(c, "/reload", body, timeout_ms, take_version));
    }
    if (!adapter) goto out;
    json_decref(body);
    CHECK(adapter_load_body(adapter, c->folder, &body));
    CHECK(ask(c, "/v1/load_lora_adapter", body, timeout_ms, NULL));
    st = ask(c, "/bridge/info", NULL, PROBE_MS, take_version);
out:
    json_decref(body);
    return st;
}

static enum status sync_workers(struct servers *c, bool due)
{
    enum status st = ST_OK;
    const int64_t start = clock_now_ns();
    double n = 0, all;
    if (c->n == 0) return ST_OK;
    for (int i = 0; i < c->n; i++) {
        c->items[i].may = c->items[i].own && (due || c->items[i].of_pull.down);
        c->items[i].of_pull.n_samples = 0;
    }
    CHECK(ask(c, "/bridge/info", NULL, PROBE_MS, take_info));
    for (int i = 0; i < c->n; i++) n += c->items[i].may;
    all = n;
    CHECK(comm_sum_host(c->servers->comm, &all, 1));
    if (all > 0) CHECK(write_weights(c));
    if (n > 0) CHECK(load(c));
    c->in_step = true;
    c->sync_s = clock_ms_since(start) / 1e3;
out:
    return st;
}

// What is counted over all ranks, and where several orders end in one step the mean over these.
static void count_all(const struct servers *c, struct source_count *to, double sum)
{
    to->sum = sum;
    to->of = c->options.rank == 0;
}

static void count_workers(const struct servers *c, struct source_counts *counts)
{
    double up = 0;
    if (c->n == 0) return;
    for (int i = 0; i < c->n; i++) {
        const struct rollout_worker *w = &c->items[i].of_pull;
        const bool own = c->items[i].own;
        count_all(c, source_count(counts, "workers/%d/samples", i + 1), own ? w->n_samples : 0);
        count_all(c, source_count(counts, "workers/%d/failures", i + 1), own ? w->n_failures : 0);
        up += own && !w->down;
    }
    count_all(c, source_count(counts, "workers/up"), up);
    source_count(counts, "workers/sync_s")->sum = c->sync_s;
    source_count(counts, "workers/sync_s")->of = 1;
}

// ---- the source ---------------------------------------------------------------------------------

// A server that was lost in the step is given the weights that it had, by this rank alone.
static enum status order_servers(struct source *source, struct rollout_step *step)
{
    struct servers *c = (struct servers *)source;
    enum status st = ST_OK;
    if (c->started.down && !step->ahead && !step->evaluation) CHECK(sync_server(c, false));
    step->via = *c->servers;
    if (step->evaluation) step->via.n_servers = 1; // others' weights are those of a step before
    if (step->ahead) CHECK(http_client_another(c->servers->http, &step->http));
    if (step->ahead) step->via.http = step->http;
out:
    return st;
}

static enum status poll_servers(struct source *source, struct rollout_step *step)
{
    struct servers *c = (struct servers *)source;
    struct source *by = step->puller;
    enum status st =
        by ? by->pull(by, step) : rollout_pull(&step->via, &step->sampling, step->rollout);
    http_client_free(step->http);
    step->http = NULL;
    count_workers(c, &step->counts);
    if (!c->options.server || step->evaluation) return st;
    if (st == ST_OK) c->n_lost = 0;
    step->again = may_try_again(c, st) && !step->ahead;
    return st;
}

static enum status settle_servers(struct source *source, uint64_t version, bool evaluation)
{
    struct servers *c = (struct servers *)source;
    const int64_t start = clock_now_ns();
    enum status st = ST_OK;
    if (evaluation && c->options.shared) return ST_OK; // by the weights that learn
    CHECK(sync_server(c, version > 0));
    CHECK(sync_workers(c, version > 0));
    log_debug("copies of the weights: sync %.3f s", clock_ms_since(start) / 1e3);
out:
    return st;
}

static void close_servers(struct source *source)
{
    struct servers *c = (struct servers *)source;
    for (int i = 0; i < c->n; i++) bridge_file_free(c->items[i].bridge);
    free(c->list);
    free(c);
}

static enum status open_workers(struct servers *c)
{
    const struct copies_options *o = &c->options;
    enum status st = ST_OK;
    char *key = NULL, *remaining, *name;
    if (o->workers && *o->workers && !(c->list = strdup(o->workers)))
        FAIL(ST_NO_MEMORY, "no memory for a list of workers");
    if (!c->list && !o->server_url) return ST_OK;
    if (o->api_key_file) {
        CHECK(api_key_read("--workers-api-key-file", o->api_key_file, &key));
        CHECK(http_client_authorize(c->servers->http, key));
    }
    if (o->server_url) CHECK(status_context(add_worker(c, o->server_url), "--server-url"));
    remaining = c->list;
    while ((name = strsep(&remaining, ",")))
        CHECK(status_context(add_worker(c, name), "--workers"));
    for (int i = 0; i < c->n; i++) c->items[i].may = c->items[i].own;
    CHECK(ask(c, "/bridge/info", NULL, PROBE_MS, take_info));
    log_info("--%s: %d further servers sample; before each step they load the weights from "
             "the folder \"workers\" of the run, which they must find under the same path",
             o->server_url ? "server-url" : "workers", c->n);
out:
    free(key);
    return st;
}

enum status servers_new(const struct copies_options *options, struct rollout_servers *servers,
                        struct source **ret)
{
    struct rollout_server *first = &servers->servers[0];
    struct servers *c = calloc(1, sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "no memory for a source of samples");
    c->source =
        (struct source){.order = order_servers, .poll = poll_servers, .close = close_servers};
    c->options = *options;
    c->servers = servers;
    if (options->server) {
        c->started =
            (struct rollout_worker){.name = server_process_address(options->server),
                                    .completions_of = options->completions ? c->folder : NULL,
                                    .down = true};
        *first = (struct rollout_server){c->started.name, first->control, &c->started};
    }
    if (options->server_url) servers->n_servers = 0; // it is the first worker
    enum status st = open_workers(c);
    if (options->server || c->n > 0) c->source.settle = settle_servers;
    if (st == ST_OK)
        *ret = &c->source;
    else
        close_servers(&c->source);
    return st;
}
