/* adapters.h: the LoRA adapters that a server holds beside its model: each in a shared arena of its
 * own, which a trainer may map and write as it does the model's (role "adapter:NAME" of the bridge
 * file). There is room for a fixed number, of ranks up to a maximum; a request's rows name one by
 * its slot. The engine's thread. */
#ifndef INFER_SERVER_ADAPTERS_H
#define INFER_SERVER_ADAPTERS_H

#include "bridge/control.h"
#include "common/model/adapter_table.h"
#include "infer-server/engine/engine_info.h"

struct adapters;
_Static_assert(ADAPTERS_MOST + 1 <= CONTROL_ROLES, "each has its account on the control page");

// Takes the memory of that many, and gives an adapter's back when it is added. control: the page
// that says what each one's weights are.
enum status adapters_new(struct device *dev, struct control *control, const struct weights *base,
                         int max_adapters, int max_rank, struct adapters **ret);
void adapters_free(struct adapters *a);

// What the forward pass computes with; for every model that is to (model_use_adapters()).
const struct adapter_table *adapters_table(const struct adapters *a);

// One more, of a PEFT folder; or (config, PEFT's adapter_config.json as text) a new one that
// changes nothing until somebody writes it; or (copy_of, another's name) one with the weights that
// this one has now. Its arena is shared memory of that name, without the slot's number. ST_INVALID:
// a name that is there already, or more than there is room for.
struct adapter_order {
    const char *name, *folder, *config, *copy_of; // one of the latter three
    bool in_place;                                // the name is there: its weights are replaced
};
enum status adapters_add(struct adapters *a, const struct adapter_order *order,
                         const char *segment);
void adapters_retire(struct adapters *a, int slot); // it has no name any more
enum status adapters_remove(struct adapters *a, int slot);
// Whether an adapter is as that config (its text) says. ST_MISMATCH: it is not.
enum status adapters_check(const struct adapters *a, int slot, const char *config);
// Whether a folder is of the same config, and whole; then its weights.
enum status adapters_check_folder(const struct adapters *a, int slot, const char *folder);
enum status adapters_reload(struct adapters *a, int slot, const char *folder);
// Torn weights: from a trainer's checkpoint of one.
enum status adapters_restore(struct adapters *a, const char *checkpoint);
// Where there is none that can be used: every adapter as its folder has it, or as new.
enum status adapters_revert(struct adapters *a);
// Whether a checkpoint is of an adapter.
bool adapters_is_checkpoint(const char *folder);

int adapters_find(const struct adapters *a, const char *name); // slot; -1: none
int adapters_max(const struct adapters *a);
// NULL: nobody's slot. The arena's plan, bound; who it is.
const struct weights *adapters_weights(const struct adapters *a, int slot);
const struct adapter_info *adapters_info(const struct adapters *a, int slot);
const char *adapters_handle(const struct adapters *a, int slot); // of its shared memory

#endif
