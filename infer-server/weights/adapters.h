/* adapters.h: the LoRA adapters that a server holds beside its model: each in a shared arena of its
 * own, which a trainer may map and write as it does the model's (role "adapter:NAME" of the bridge
 * file). There is room for a fixed number, of ranks up to a maximum; a request's rows name one by
 * its slot. The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_ADAPTERS_H
#define INFER_SERVER_ADAPTERS_H

#include "common/base/status.h"
#include <stdbool.h>
#include <stdint.h>

struct adapter;
struct adapter_table;
struct control;
struct device;
struct shared_memory;
struct weights;

// A LoRA adapter that the server holds. index 0: none, the model itself; else its slot's number and
// one. id: no other adapter has or had it.
struct adapter_ref {
    int index;
    uint64_t id;
};
#define ADAPTER_NAME_BYTES 56 // the control page's roles have 64, "adapter:" among them
struct adapter_info {
    struct adapter_ref ref;
    char name[ADAPTER_NAME_BYTES]; // "": it is unloaded once the last sample with it has ended
    char folder[512];              // PEFT's, that it was loaded from; "": it was made new
    int rank;                      // the largest of its matrices
    int samples, running;          // that are waiting for it or computed with it; the latter alone
    uint64_t generated_tokens;     // of those that have ended
};
#define ADAPTERS_MAX 64

struct adapters;

// Takes the memory of that many, and gives an adapter's back when it is added. control: the page
// that says what each one's weights are; NULL on a follower, whose rank 0 has it.
enum status adapters_new(struct device *dev, struct control *control, const struct weights *base,
                         int max_adapters, int max_rank, struct adapters **ret);
void adapters_free(struct adapters *a);

// What the forward pass computes with; for every model that is to (its `adapters`).
const struct adapter_table *adapters_table(const struct adapters *a);

// One more, of a PEFT folder; or (config, PEFT's adapter_config.json as text) a new one that
// changes nothing until somebody writes it; or (copy_of, another's name) one with the weights that
// this one has now.
struct adapter_request {
    const char *name, *folder, *config, *copy_of; // one of the latter three
    bool in_place;                                // the name is there: its weights are replaced
};
// What is done to those of all ranks alike, one after another, so that each has its slot on all.
enum adapter_step {
    ADAPTERS_NEW,    // adapters_new()
    ADAPTERS_LOAD,   // one more, of a folder
    ADAPTERS_MAKE,   // of a config
    ADAPTERS_COPY,   // of another's weights
    ADAPTERS_RETIRE, // it has no name any more
    ADAPTERS_REMOVE,
    ADAPTERS_RELOAD,  // a folder's weights, which adapters_check_folder() takes
    ADAPTERS_RESTORE, // torn weights: from a trainer's checkpoint of one
    ADAPTERS_REVERT   // where none can be used: every adapter as its folder has it, or as new
};
struct adapter_change {
    enum adapter_step step;
    int slot,
        max_rank; // -1: that of the name, if there is one; of a new list their number and rank
    char name[ADAPTER_NAME_BYTES];
    const char *text; // a folder, a config, another's name
};
// A new one's arena is shared memory of that name, without the slot's number. ST_INVALID: more than
// there is room for.
enum status adapters_change(struct adapters *a, const struct adapter_change *c,
                            const char *segment);

// Whether an adapter is as that config (its text) says. ST_MISMATCH: it is not.
enum status adapters_check(const struct adapters *a, int slot, const char *config);
// Whether a folder is of the same config, and whole.
enum status adapters_check_folder(const struct adapters *a, int slot, const char *folder);
// Whether a checkpoint is of an adapter.
bool adapters_is_checkpoint(const char *folder);

int adapters_find(const struct adapters *a, const char *name); // slot; -1: none
int adapters_max(const struct adapters *a);
// NULL: nobody's slot. The arena's plan, bound; who it is.
const struct weights *adapters_weights(const struct adapters *a, int slot);
const struct adapter_info *adapters_info(const struct adapters *a, int slot);
struct shared_memory *adapters_memory(const struct adapters *a, int slot);
// The same adapter's plan on another rank, whose base this is.
enum status adapters_plan_on(const struct adapters *a, int slot, const struct weights *base,
                             struct adapter **ret);

#endif
