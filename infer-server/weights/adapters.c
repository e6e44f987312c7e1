/* adapters.c: see adapters.h. Slots never move: rows of a batch, and the table in device memory, go
 * by their numbers. The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/weights/adapters.h"
#include "bridge/control.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/model/adapter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(ADAPTERS_MAX + 1 <= CONTROL_ROLES, "each has its account on the control page");

struct slot {
    struct adapter_info info;
    struct adapter *adapter; // NULL: free
    void *room;              // then it keeps memory for one; NULL where that was not to be had
    struct shared_memory *memory;
};

struct adapters {
    struct device *dev;
    struct control *control;
    const struct weights *base;
    int max, max_rank;
    size_t slot_bytes;
    uint64_t given; // ids so far; none is given twice
    struct adapter_table *table;
    struct slot *slots; // (max)
};

static enum status plan_of_json(const struct weights *base, const char *where, json_t *json,
                                struct adapter **ret)
{
    struct adapter_config *config;
    enum status st = adapter_config_from_json(where, json, &config);
    return st == ST_OK ? adapter_new(config, base, base->dt, ret) : st;
}

// An adapter of that config's JSON, and its plan.
static enum status plan_of(const struct adapters *a, const char *where, const char *text,
                           struct adapter **ret)
{
    enum status st;
    json_t *json = NULL;
    CHECK(json_parse(where, text, strlen(text), &json));
    st = plan_of_json(a->base, where, json, ret);
out:
    json_decref(json);
    return st;
}

static void role_of(const struct slot *s, char ret[CONTROL_ROLE_BYTES])
{
    snprintf(ret, CONTROL_ROLE_BYTES, "adapter:%s", s->info.name);
}

// Its weights are those of another, or of its folder, or ("") new.
static void note_loaded(const struct adapters *a, const struct slot *s, const struct slot *copied)
{
    char role[CONTROL_ROLE_BYTES], from[CONTROL_ROLE_BYTES];
    role_of(s, role);
    if (copied) role_of(copied, from);
    if (s->info.name[0] && a->control)
        control_owner_loaded(a->control, role, copied ? from : s->info.folder, false);
}

enum status adapters_new(struct device *dev, struct control *control, const struct weights *base,
                         int max_adapters, int max_rank, struct adapters **ret)
{
    enum status st;
    char text[128];
    struct adapter *largest = NULL;
    struct adapters *a = calloc(1, sizeof *a);
    if (!a) return status_fail(ST_NO_MEMORY, "no memory for adapters");
    a->dev = dev;
    a->control = control;
    a->base = base;
    a->max = max_adapters;
    a->max_rank = max_rank;
    a->slots = calloc((size_t)max_adapters, sizeof *a->slots);
    if (!a->slots) FAIL(ST_NO_MEMORY, "no memory for adapters");
    snprintf(text, sizeof text, "{\"target_modules\": \".*\", \"r\": %d}", max_rank);
    CHECK(plan_of(a, "--max-lora-rank", text, &largest));
    a->slot_bytes = largest->weights->bytes;
    for (int i = 0; i < max_adapters; i++)
        CHECK(device_alloc(dev, a->slot_bytes, &a->slots[i].room));
    CHECK(adapter_table_new(dev, base, max_adapters, max_rank, &a->table));
    *ret = TAKE_PTR(a);
out:
    adapter_free(largest);
    adapters_free(a);
    return st;
}

static void slot_release(struct device *dev, struct slot *s)
{
    adapter_free(s->adapter);
    shared_memory_free(s->memory);
    device_release(dev, s->room);
    *s = (struct slot){0};
}

void adapters_free(struct adapters *a)
{
    if (!a) return;
    for (int i = 0; a->slots && i < a->max; i++) slot_release(a->dev, &a->slots[i]);
    adapter_table_free(a->table);
    free(a->slots);
    free(a);
}

const struct adapter_table *adapters_table(const struct adapters *a)
{
    return a->table;
}
int adapters_max(const struct adapters *a)
{
    return a->max;
}

int adapters_find(const struct adapters *a, const char *name)
{
    for (int i = 0; i < a->max; i++)
        if (a->slots[i].adapter && strcmp(a->slots[i].info.name, name) == 0) return i;
    return -1;
}

const struct weights *adapters_weights(const struct adapters *a, int slot)
{
    return a->slots[slot].adapter ? a->slots[slot].adapter->weights : NULL;
}
const struct adapter_info *adapters_info(const struct adapters *a, int slot)
{
    return a->slots[slot].adapter ? &a->slots[slot].info : NULL;
}
struct shared_memory *adapters_memory(const struct adapters *a, int slot)
{
    return a->slots[slot].memory;
}

enum status adapters_plan_on(const struct adapters *a, int slot, const struct weights *base,
                             struct adapter **ret)
{
    const struct slot *s = &a->slots[slot];
    return plan_of_json(base, s->info.name, s->adapter->config->source, ret);
}

static enum status free_slot(const struct adapters *a, int *ret)
{
    for (int i = 0; i < a->max; i++)
        if (!a->slots[i].adapter) {
            *ret = i;
            return ST_OK;
        }
    return status_fail(ST_INVALID,
                       "there are %d adapters, and no room for more; unload one, or start the "
                       "server with a larger --max-adapters",
                       a->max);
}

static enum status plan_of_change(const struct adapters *a, const struct adapter_change *c,
                                  const struct adapter *copied, struct adapter **ret)
{
    struct adapter_config *config;
    if (copied) return plan_of_json(a->base, c->text, copied->config->source, ret);
    if (c->step == ADAPTERS_MAKE) return plan_of(a, "\"config\"", c->text, ret);
    enum status st = adapter_config_load(c->text, &config);
    return st == ST_OK ? adapter_new(config, a->base, a->base->dt, ret) : st;
}

static enum status add(struct adapters *a, const struct adapter_change *c, const char *segment)
{
    enum status st;
    int slot = 0;
    char name[128];
    struct slot s = {0};
    const bool copies = c->step == ADAPTERS_COPY, loads = c->step == ADAPTERS_LOAD;
    const int source = copies ? adapters_find(a, c->text) : -1;
    const struct adapter *copied = source >= 0 ? a->slots[source].adapter : NULL;
    if (copies && !copied) FAIL(ST_NOT_FOUND, "\"copy_of\": there is no adapter '%s'", c->text);
    CHECK(free_slot(a, &slot));
    CHECK(plan_of_change(a, c, copied, &s.adapter));
    if (s.adapter->max_rank > a->max_rank)
        FAIL(ST_INVALID,
             "the adapter has rank %d, over this server's %d; start it with --max-lora-rank %d",
             s.adapter->max_rank, a->max_rank, s.adapter->max_rank);
    snprintf(name, sizeof name, "%s%d", segment, slot);
    device_release(a->dev, a->slots[slot].room);
    a->slots[slot].room = NULL;
    CHECK(shared_memory_create(a->dev, name, s.adapter->weights->bytes, &s.memory));
    weights_bind(s.adapter->weights, shared_memory_data(s.memory));
    if (loads) CHECK(adapter_load(s.adapter, a->dev, c->text));
    if (copied) // else its memory is zeros
        device_copy(a->dev, s.adapter->weights->base, copied->weights->base,
                    s.adapter->weights->bytes);
    CHECK(device_sync(a->dev));
    snprintf(s.info.name, sizeof s.info.name, "%s", c->name);
    snprintf(s.info.folder, sizeof s.info.folder, "%s", loads ? c->text : "");
    s.info.ref = (struct adapter_ref){slot + 1, ++a->given};
    s.info.rank = s.adapter->max_rank;
    CHECK(adapter_table_set(a->table, slot, s.adapter));
    a->slots[slot] = s;
    note_loaded(a, &s, copied ? &a->slots[source] : NULL);
    s = (struct slot){0};
out:
    slot_release(a->dev, &s);
    return st;
}

static void retire(struct adapters *a, int slot)
{
    char role[CONTROL_ROLE_BYTES];
    role_of(&a->slots[slot], role);
    if (a->control) control_owner_removed(a->control, role);
    a->slots[slot].info.name[0] = 0;
}

static enum status release(struct adapters *a, int slot)
{
    enum status st = adapter_table_set(a->table, slot, NULL);
    retire(a, slot);
    if (st != ST_OK) return st;
    slot_release(a->dev, &a->slots[slot]);
    // Somebody else may have taken its memory meanwhile: it then has no room.
    if (device_alloc(a->dev, a->slot_bytes, &a->slots[slot].room) != ST_OK)
        a->slots[slot].room = NULL;
    return ST_OK;
}

enum status adapters_check(const struct adapters *a, int slot, const char *config)
{
    const struct slot *s = &a->slots[slot];
    struct adapter *other = NULL;
    enum status st = plan_of(a, "\"config\"", config, &other);
    if (st == ST_OK && !adapter_same(s->adapter, other))
        st = status_fail(ST_MISMATCH,
                         "the adapter '%s' that is loaded has other targets, ranks or scales; "
                         "unload it first (POST /v1/unload_lora_adapter), or take another name",
                         s->info.name);
    adapter_free(other);
    return st;
}

enum status adapters_check_folder(const struct adapters *a, int slot, const char *folder)
{
    return adapter_check(a->slots[slot].adapter, folder);
}

static enum status reload(struct adapters *a, int slot, const char *folder)
{
    struct slot *s = &a->slots[slot];
    enum status st = adapter_load(s->adapter, a->dev, folder);
    if (st != ST_OK) return st;
    snprintf(s->info.folder, sizeof s->info.folder, "%s", folder);
    note_loaded(a, s, NULL);
    return ST_OK;
}

bool adapters_is_checkpoint(const char *folder)
{
    return file_exists_in(folder, ADAPTER_CONFIG_FILE);
}

static enum status restore(struct adapters *a, const char *checkpoint)
{
    enum status st;
    json_t *state = NULL;
    const char *name = NULL;
    int slot;
    char path[PATH_ROOM];
    CHECK(path_put(path, checkpoint, ADAPTER_STATE_FILE));
    CHECK(json_read_file(path, 1 << 24, &state));
    CHECK(json_get_string(path, state, "adapter", &name));
    slot = name ? adapters_find(a, name) : -1;
    if (slot < 0)
        FAIL(ST_NOT_FOUND, "%s: its adapter \"%s\" is not loaded", path, name ? name : "");
    CHECK(adapters_check_folder(a, slot, checkpoint));
    CHECK(reload(a, slot, checkpoint));
out:
    json_decref(state);
    return st;
}

static enum status revert(struct adapters *a)
{
    enum status st = ST_OK;
    for (struct slot *s = a->slots; s < a->slots + a->max && st == ST_OK; s++) {
        if (!s->adapter) continue;
        if (!s->info.folder[0] || adapter_load(s->adapter, a->dev, s->info.folder) != ST_OK) {
            device_fill(a->dev, s->adapter->weights->base, 0, s->adapter->weights->bytes);
            st = device_sync(a->dev);
            s->info.folder[0] = 0;
        }
        note_loaded(a, s, NULL);
    }
    return st;
}

enum status adapters_change(struct adapters *a, const struct adapter_change *c, const char *segment)
{
    const int slot = c->slot >= 0 ? c->slot : adapters_find(a, c->name);
    switch (c->step) {
    case ADAPTERS_RETIRE:
        retire(a, slot);
        return ST_OK;
    case ADAPTERS_REMOVE:
        return slot < 0 ? ST_OK : release(a, slot);
    case ADAPTERS_RELOAD:
        return reload(a, slot, c->text);
    case ADAPTERS_RESTORE:
        return restore(a, c->text);
    case ADAPTERS_REVERT:
        return revert(a);
    default:
        return add(a, c, segment);
    }
}
