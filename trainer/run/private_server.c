/* private_server.c: the folder of a server_process of its own. The main thread. */
#include "trainer/run/private_server.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/model/adapter.h"
#include "trainer/run/server_process.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOAD_MS 60000

struct private_server {
    char folder[PATH_ROOM], bridge[PATH_ROOM];
    struct server_process *process;
};

static enum status make_folder(struct private_server *s)
{
    const char *given = getenv("TMPDIR");
    enum status st;
    CHECK(path_put(s->folder, given && *given == '/' ? given : "/tmp", "commonweight-XXXXXX"));
    if (!mkdtemp(s->folder))
        FAIL(ST_IO, "%s: a folder for the server's socket: %s", s->folder, strerror(errno));
    st = path_put(s->bridge, s->folder, "bridge.json");
out:
    if (st != ST_OK) s->folder[0] = 0;
    return st;
}

static void end(struct private_server *s, bool keep_folder)
{
    server_process_free(s->process);
    if (s->folder[0] && !keep_folder && file_remove_tree(s->folder) != ST_OK)
        log_warn("%s", status_message());
    free(s);
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

static enum status put_arguments(const struct private_server_options *o, struct bytes *ret)
{
    enum status st = ST_OK;
    int rank;
    if (o->adapter) {
        CHECK(adapter_rank(o, &rank));
        bytes_printf(ret, "--max-adapters 1 --max-lora-rank %d ", rank);
    }
    bytes_puts(ret, o->arguments ? o->arguments : "");
    st = bytes_status(ret);
out:
    return st;
}

static enum status load_adapter(struct http_client *http, const char *folder)
{
    enum status st = ST_OK;
    json_t *body = NULL;
    char *absolute = realpath(folder, NULL); // the server may stand in another folder
    if (!absolute) FAIL(ST_IO, "%s: %s", folder, strerror(errno));
    if (!(body = json_pack("{s:s, s:s}", "lora_name", PRIVATE_ADAPTER, "lora_path", absolute)))
        FAIL(ST_INVALID, "%s: its path is no UTF-8, or memory is short", absolute);
    const struct http_call call = {
        .path = "/v1/load_lora_adapter", .post = true, .body = body, .timeout_ms = LOAD_MS};
    st = http_perform(http, &call, NULL);
out:
    json_decref(body);
    free(absolute);
    return st;
}

enum status private_server_new(const struct private_server_options *o, struct private_server **ret)
{
    enum status st;
    struct http_client *http = NULL;
    struct bytes arguments = BYTES_INIT;
    struct private_server *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for a server");
    CHECK(put_arguments(o, &arguments));
    CHECK(make_folder(s));
    const struct server_options options = {.device = o->device,
                                           .arguments = bytes_text(&arguments),
                                           .shares = true,
                                           .folder = s->folder,
                                           .timeout_s = o->timeout_s,
                                           .cancelled = o->cancelled};
    CHECK(server_process_new(&options, &s->process));
    CHECK(http_client_new(server_process_address(s->process), &http));
    log_info("a server of %s is started for this run alone; its log is %s/server.log", o->model,
             s->folder);
    CHECK(server_process_restart(s->process, http, o->model));
    if (o->adapter) CHECK(load_adapter(http, o->adapter));
    *ret = s;
out:
    http_client_free(http);
    bytes_release(&arguments);
    if (st != ST_OK) end(s, st != ST_CANCELLED); // its error names the log
    return st;
}

const char *private_server_bridge(const struct private_server *s)
{
    return s->bridge;
}

void private_server_free(struct private_server *s)
{
    if (s) end(s, false);
}
