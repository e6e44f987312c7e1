/* server_adapters.c: requests about adapters to the server. */
#include "trainer/serve/trained_model_impl.h"
#include "common/base/log.h"
#include "common/http/http_client.h"
#include "trainer/run/run.h"

#include <string.h>
#include <unistd.h>

#define RESPONSE_MS 60000

// Takes the body's reference.
static enum status post(struct server_adapters *a, const char *path, json_t *body)
{
    const struct http_call call = {
        .path = path, .post = true, .body = body, .timeout_ms = RESPONSE_MS};
    enum status st = body ? http_perform(a->http, &call, NULL)
                          : status_fail(ST_NO_MEMORY, "no memory to ask for an adapter");
    json_decref(body);
    return st;
}

static enum status read_status(struct server_adapters *a, json_t **ret)
{
    return http_get_json(a->http, "/lora/status", RESPONSE_MS, ret);
}

static enum status unload_left(void *context)
{
    struct server_adapters *a = context;
    enum status st;
    json_t *status = NULL, *name;
    size_t i;
    int n = 0;
    CHECK(read_status(a, &status));
    a->max = (int)json_integer_value(json_object_get(status, "max_adapters"));
    a->max_rank = (int)json_integer_value(json_object_get(status, "max_lora_rank"));
    json_array_foreach (json_object_get(status, "available_adapters"), i, name) {
        const char *text = json_string_value(name);
        if (strncmp(text, ADAPTER_PREFIX, strlen(ADAPTER_PREFIX)) != 0) continue;
        CHECK(server_adapters_unload(a, text));
        n++;
    }
    if (n > 0)
        log_info("%d adapter%s, which a cw-trainer serve before this one left on the server, %s "
                 "unloaded",
                 n, n == 1 ? "" : "s", n == 1 ? "is" : "are");
out:
    json_decref(status);
    return st;
}

enum status server_adapters_open(const char *socket, struct server_adapters *ret)
{
    enum status st = http_client_new(socket, &ret->http);
    return st == ST_OK ? run_retry(ST_BUSY, unload_left, ret) : st;
}

enum status server_adapters_count(struct server_adapters *a, int *ret)
{
    json_t *status = NULL;
    enum status st = read_status(a, &status);
    if (st == ST_OK) *ret = (int)json_array_size(json_object_get(status, "available_adapters"));
    json_decref(status);
    return st;
}

enum status server_adapters_load(struct server_adapters *a, const char *name, const char *key,
                                 json_t *value)
{
    return post(a, "/v1/load_lora_adapter", json_pack("{s:s, s:o}", "lora_name", name, key, value));
}

enum status server_adapters_unload(struct server_adapters *a, const char *name)
{
    return post(a, "/v1/unload_lora_adapter",
                json_pack("{s:s, s:i}", "lora_name", name, "writer_pid", (int)getpid()));
}
