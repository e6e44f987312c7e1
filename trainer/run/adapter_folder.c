/* adapter_folder.c: writes the PEFT folder that a run starts from, and looks after what an adapter
 * is of. No state. */
#include "trainer/run/adapter_folder.h"
#include "common/base/log.h"
#include "trainer/run/model_folder_write.h"

#define ASK_MS 300000 // the server sums a whole model, on the CPU some 10 GB a second

json_t *adapter_state(const char *name, json_t *base)
{
    return json_pack("{s:s*, s:O*}", ADAPTER_STATE, name, ADAPTER_BASE, base);
}

enum status adapter_folder_write(const char *folder, const struct adapter *a, struct device *dev,
                                 const char *name, json_t *base)
{
    struct model_folder m = {
        .as = a->weights->dt, .adapter = a, .state = adapter_state(name, base)};
    enum status st = m.state ? model_folder_write(folder, dev, &m)
                             : status_fail(ST_NO_MEMORY, "no memory for an adapter's state");
    json_decref(m.state);
    return st;
}

enum status adapter_folder_start(const char *folder, const struct adapter *a, const char *from,
                                 uint64_t seed, const char *name, json_t *base)
{
    enum status st;
    struct adapter_config *config;
    struct adapter *made = NULL;
    struct device *host = NULL;
    CHECK(device_open("cpu", &host));
    CHECK(adapter_config_from_json("adapter", a->config->source, &config));
    CHECK(adapter_new(config, a->base, a->weights->dt, &made));
    CHECK(weights_alloc(made->weights, host));
    if (from) CHECK(adapter_check(made, from));
    CHECK(from ? adapter_load(made, host, from) : adapter_init(made, host, seed));
    st = adapter_folder_write(folder, made, host, name, base);
out:
    adapter_free(made);
    device_free(host);
    return st;
}

enum status adapter_base_ask(struct http_client *http, json_t **ret)
{
    json_t *info = NULL;
    enum status st = http_get_json(http, "/bridge/info?checksums=1", ASK_MS, &info);
    if (st == ST_OK) *ret = json_incref(json_object_get(info, ADAPTER_BASE));
    json_decref(info);
    return st;
}

enum status adapter_base_notice(const char *folder, const json_t *base, bool exact)
{
    const enum status st = adapter_base_check(folder, base);
    if (st != ST_MISMATCH || exact) return status_context(st, "--exact");
    log_warn("%s", status_message());
    return ST_OK;
}
