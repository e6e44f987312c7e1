/* private_server.c: the folder of a server_process of its own. The main thread. */
#include "trainer/run/private_server.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/model/adapter.h"
#include "trainer/launch/server_process.h"
#include "trainer/run/adapter_folder.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOAD_MS  60000
#define REMOVALS 100 // of its folder, tried

struct private_server {
    struct private_server_options options;
    struct bytes arguments;
    struct server_process *process;
    struct http_client *http;
    char folder[PATH_ROOM], bridge[PATH_ROOM];
    bool has_folder;
};

// By its whole path, since the server and its clients may stand elsewhere.
static enum status make_folder(struct private_server *s)
{
    const char *given = getenv("TMPDIR");
    if (!given || !*given) given = "/tmp";
    char *in = realpath(given, NULL);
    enum status st;
    CHECK(path_put(s->folder, in ? in : given, "commonweight-XXXXXX"));
    if (!in || !mkdtemp(s->folder))
        FAIL(ST_IO,
             "TMPDIR is %s, and a folder for the server's socket cannot be made in it: %s; name "
             "another one",
             given, strerror(errno));
    s->has_folder = true;
    st = path_put(s->bridge, s->folder, "bridge.json");
out:
    free(in);
    return st;
}

// The largest rank of the adapter, by which the server takes memory for it.
static enum status adapter_rank(const struct private_server_options *o, int *ret)
{
    enum status st;
    struct model_config *model = NULL;
    struct weights *base = NULL;
    struct adapter_config *config;
    struct adapter *adapter = NULL;
    CHECK(model_config_load(o->model, &model));
    CHECK(weights_plan(model, DT_F32, &base));
    CHECK(adapter_config_load(o->adapter, &config));
    CHECK(adapter_new(config, base, DT_F32, &adapter));
    CHECK(adapter_check(adapter, o->adapter));
    *ret = adapter->max_rank;
out:
    adapter_free(adapter);
    weights_free(base);
    model_config_free(model);
    return st;
}

static enum status put_arguments(struct private_server *s)
{
    const struct private_server_options *o = &s->options;
    enum status st = ST_OK;
    int rank;
    if (o->adapter) {
        CHECK(adapter_rank(o, &rank));
        bytes_printf(&s->arguments, "--max-adapters 1 --max-lora-rank %d ", rank);
    }
    bytes_puts(&s->arguments, o->arguments ? o->arguments : "");
    st = bytes_status(&s->arguments);
out:
    return st;
}

static enum status still_wanted(void *context)
{
    const struct private_server *s = context;
    if (!s->options.cancelled || !*s->options.cancelled) return ST_OK;
    return status_fail(ST_CANCELLED, "the adapter is no longer wanted");
}

static enum status load_adapter(struct private_server *s)
{
    enum status st = ST_OK;
    json_t *body = NULL;
    json_t *base = NULL;
    const char *folder = s->options.adapter;
    char *absolute = realpath(folder, NULL); // the server may stand in another folder
    if (!absolute) FAIL(ST_IO, "%s: %s", folder, strerror(errno));
    if (!(body = json_pack("{s:s, s:s}", "lora_name", PRIVATE_ADAPTER, "lora_path", absolute)))
        FAIL(ST_INVALID, "%s: its path is no UTF-8, or memory is short", absolute);
    const struct http_call call = {.path = "/v1/load_lora_adapter",
                                   .post = true,
                                   .body = body,
                                   .timeout_ms = LOAD_MS,
                                   .alive = still_wanted,
                                   .context = s};
    CHECK(adapter_base_ask(s->http, &base));
    CHECK(adapter_base_notice(folder, base, false));
    st = http_perform(s->http, &call, NULL);
out:
    json_decref(base);
    json_decref(body);
    free(absolute);
    return st;
}

static enum status open_process(struct private_server *s)
{
    enum status st;
    const struct server_options options = {.device = s->options.device,
                                           .arguments = bytes_text(&s->arguments),
                                           .shares = true,
                                           .folder = s->folder,
                                           .timeout_s = s->options.timeout_s,
                                           .cancelled = s->options.cancelled};
    CHECK(server_process_new(&options, &s->process));
    st = http_client_new(server_process_address(s->process), &s->http);
    if (st == ST_INVALID)
        FAIL(st, "%s; let TMPDIR name a folder of a shorter path", status_message());
out:
    return st;
}

enum status private_server_new(const struct private_server_options *o, struct private_server **ret)
{
    enum status st;
    struct private_server *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for a server");
    s->options = *o;
    CHECK(put_arguments(s));
    CHECK(make_folder(s));
    CHECK(open_process(s));
    *ret = s;
out:
    if (st != ST_OK) private_server_free(s);
    return st;
}

enum status private_server_start(struct private_server *s)
{
    enum status st;
    log_info("a server of %s is started for this run alone; its log is %s/server.log",
             s->options.model, s->folder);
    CHECK(server_process_restart(s->process, s->http, s->options.model, NULL));
    if (s->options.adapter) CHECK(load_adapter(s));
out:
    if (st != ST_OK && st != ST_CANCELLED) s->has_folder = false; // its error names the log
    return st;
}

const char *private_server_bridge(const struct private_server *s)
{
    return s->bridge;
}

void private_server_stop(struct private_server *s)
{
    if (!s) return;
    http_client_free(s->http);
    s->http = NULL;
    server_process_free(s->process);
    s->process = NULL;
    if (s->has_folder && file_remove_tree(s->folder) != ST_OK) log_warn("%s", status_message());
    s->has_folder = false;
}

void private_server_abandon(void *context)
{
    const struct private_server *s = context;
    // the server may be writing there
    for (int i = 0; i < REMOVALS && file_remove_tree(s->folder) != ST_OK; i++) clock_sleep_ms(1);
}

void private_server_free(struct private_server *s)
{
    if (!s) return;
    private_server_stop(s);
    bytes_release(&s->arguments);
    free(s);
}
