/* same_run.h: what must not change while a run goes on, as its checkpoints hold it: the data, the
 * seed, what is trained, and with --exact the device. No state. */
#ifndef TRAINER_SAME_RUN_H
#define TRAINER_SAME_RUN_H

#include "common/model/adapter.h"
#include "trainer/data/data.h"

struct same_run {        // borrowed
    const char *command; // "sft"; NULL: "train", which states leave out
    const struct dataset *data;
    int64_t seed;
    const char *freeze;            // NULL: nothing
    const struct adapter *adapter; // that is trained; NULL: none
    const char *adapter_name;
    json_t *base; // of the adapter
    struct device *dev;
    bool exact;
};
#define ADAPTER_STATE "adapter" // in trainer_state.json: its name, by which the server restores it

// Part of trainer_state.json (checkpoint.h). New reference; NULL: no memory.
json_t *same_run_state(const struct same_run *run);
// ST_MISMATCH names what `state`, of the checkpoint in `folder`, has otherwise.
enum status same_run_check(const struct same_run *run, const char *folder, const json_t *state);

// The same of an adapter that is no run's: by which name a server restores it (NULL: by none), and
// its base (adapter_base()).
json_t *adapter_state(const char *name, json_t *base);

// The digest goes as text: JSON numbers do not hold 64 bits everywhere.
#define DIGEST_ROOM 24 // bytes of it
const char *digest_text(const struct dataset *data, char ret[DIGEST_ROOM]);

#endif
