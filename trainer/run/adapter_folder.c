/* adapter_folder.c: writes the PEFT folder that a run starts from. No state. */
#include "trainer/run/adapter_folder.h"
#include "common/base/json.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/model_folder_write.h"

struct written {
    const struct adapter *adapter;
    struct device *dev; // that its memory is of
    enum dtype as;
    const char *name;
};

static enum status fill(void *context, const char *folder)
{
    const struct written *w = context;
    enum status st;
    char path[PATH_ROOM];
    json_t *state = NULL;
    CHECK(adapter_save(w->adapter, w->dev, folder, w->as));
    if (!w->name) goto out;
    if (!(state = json_pack("{s:s}", ADAPTER_STATE, w->name)))
        FAIL(ST_NO_MEMORY, "no memory for a run's start");
    CHECK(path_put(path, folder, CHECKPOINT_TRAINER));
    CHECK(file_make_folders(path));
    CHECK(path_put(path, folder, CHECKPOINT_TRAINER "/trainer_state.json"));
    CHECK(json_write_file(path, 0644, state));
out:
    json_decref(state);
    return st;
}

enum status adapter_folder_write(const char *folder, const struct adapter *a, struct device *dev,
                                 enum dtype as, const char *name)
{
    struct written w = {a, dev, as, name};
    return folder_write(folder, fill, &w);
}

enum status adapter_folder_start(const char *folder, const struct adapter *a, const char *from,
                                 uint64_t seed, const char *name)
{
    enum status st;
    struct adapter_config *config;
    struct adapter *made = NULL;
    struct device *host = NULL;
    void *memory = NULL;
    CHECK(device_open("cpu", &host));
    CHECK(adapter_config_from_json("adapter", a->config->source, &config));
    CHECK(adapter_new(config, a->base, a->weights->dt, &made));
    CHECK(device_alloc(host, made->weights->bytes, &memory));
    weights_bind(made->weights, memory);
    if (from) CHECK(adapter_check(made, from));
    CHECK(from ? adapter_load(made, host, from) : adapter_init(made, host, seed));
    st = adapter_folder_write(folder, made, host, made->weights->dt, name);
out:
    if (host) device_release(host, memory);
    device_free(host);
    adapter_free(made);
    return st;
}
