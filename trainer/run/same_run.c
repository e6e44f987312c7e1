/* same_run.c: a run's own part of trainer_state.json, written and compared. No state. */
#include "trainer/run/same_run.h"
#include "common/base/options.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

const char *digest_text(const struct dataset *data, char ret[DIGEST_ROOM])
{
    snprintf(ret, DIGEST_ROOM, "%016" PRIx64, data->digest);
    return ret;
}

json_t *adapter_state(const char *name, json_t *base)
{
    return json_pack("{s:s*, s:O*}", ADAPTER_STATE, name, ADAPTER_BASE, base);
}

json_t *same_run_state(const struct same_run *run)
{
    char digest[DIGEST_ROOM];
    json_t *adapter = run->adapter ? adapter_state(run->adapter_name, run->base) : json_object();
    json_t *state =
        json_pack("{s:s*, s:I, s:s, s:s*, s:s, s:s}", "command", run->command, "seed",
                  (json_int_t)run->seed, "data_digest", digest_text(run->data, digest), "freeze",
                  run->freeze, "version", COMMONWEIGHT_VERSION, "device", device_name(run->dev));
    const bool ok = state && adapter && json_object_update(state, adapter) == 0;
    json_decref(adapter);
    if (ok) return state;
    json_decref(state);
    return NULL;
}

enum status same_run_check(const struct same_run *run, const char *folder, const json_t *state)
{
    char digest[DIGEST_ROOM];
    const char *command = json_string_value(json_object_get(state, "command"));
    if (strcmp(command ? command : "train", run->command ? run->command : "train") != 0)
        return status_fail(ST_MISMATCH,
                           "%s is of a run of cw-trainer %s, not of %s: go on with that, or begin "
                           "another run from it (%s)",
                           folder, command ? command : "train",
                           run->command ? run->command : "train",
                           run->command ? "--model" : "--start-from");
    const char *old_digest = json_string_value(json_object_get(state, "data_digest"));
    if (!old_digest || strcmp(digest_text(run->data, digest), old_digest) != 0)
        return status_fail(ST_MISMATCH,
                           "%s was made with another content of %s; take that one or another "
                           "--run-dir",
                           folder, run->data->path);
    json_int_t seed = json_integer_value(json_object_get(state, "seed"));
    if (seed != run->seed)
        return status_fail(ST_MISMATCH, "%s was made with --seed %" JSON_INTEGER_FORMAT, folder,
                           seed);
    const char *freeze = run->freeze,
               *old_freeze = json_string_value(json_object_get(state, "freeze"));
    if (strcmp(freeze ? freeze : "", old_freeze ? old_freeze : "") != 0)
        return status_fail(ST_MISMATCH,
                           "%s was made with --freeze \"%s\", and what is trained cannot change "
                           "within a run; take that, or begin another run from %s",
                           folder, old_freeze ? old_freeze : "", folder);
    const char *old_adapter = json_string_value(json_object_get(state, ADAPTER_STATE));
    if (!old_adapter != !run->adapter)
        return status_fail(ST_MISMATCH,
                           "%s was made %s --lora-r, and what is trained cannot change "
                           "within a run",
                           folder, old_adapter ? "with" : "without");
    const char *device = device_name(run->dev);
    const char *old_device = json_string_value(json_object_get(state, "device"));
    if (run->exact && old_device && strcmp(device, old_device) != 0)
        return status_fail(ST_MISMATCH,
                           "--exact: %s was made on \"%s\", and this is \"%s\", whose sums have "
                           "another order; set OMP_NUM_THREADS as it was, or leave --exact away",
                           folder, old_device, device);
    // here, so that what differs is named before the optimizer's tensors are
    if (!run->adapter) return ST_OK;
    enum status st = adapter_check(run->adapter, folder);
    return st == ST_OK ? adapter_base_check(folder, run->base) : st;
}
