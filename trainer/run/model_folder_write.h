/* model_folder_write.h: writes a Hugging Face folder that any loader opens, or PEFT's folder of an
 * adapter, and in it what training goes on by: the one writer of checkpoints, of what a run starts
 * from, of weights for servers to load, and of --out. Whole or not at all: under a temporary name,
 * synced, and renamed. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_MODEL_FOLDER_WRITE_H
#define TRAINER_MODEL_FOLDER_WRITE_H

#include "common/base/file.h"
#include "common/model/adapter.h"
#include "trainer/learn/optimizer.h"

#define TRAINER_FOLDER   "trainer" // in the folder: the state and the optimizer's moments
#define DRAFT_FOLDER     "draft"
#define REFERENCE_FOLDER "reference"
#define STATE_FILE       "trainer_state.json"
#define OPTIMIZER_FILE   "optimizer.safetensors"
#define STATE_FORMAT     1         // of the state; what 0.1.0 wrote has none, and the same fields
#define ADAPTER_STATE    "adapter" // in the state: its name, by which a server restores it

struct model_folder {
    const struct weights *weights; // the model
    enum dtype as;                 // of the tensors that are written
    const char *source_folder;     // its tokenizer and generation files are copied; NULL: none
    const struct adapter *adapter; // whose folder it is, in place of the model's; NULL: none
    const char *adapter_name;      // by which a server restores it; NULL: by none
    json_t *adapter_base;          // that it is trained on (adapter_base()); borrowed
    struct optimizer *optimizer;   // NULL: without moments
    json_t *state;                 // borrowed, without what is said above; NULL: none
    const struct model_folder *draft, *reference; // folders in this one; NULL: none
};
// Replaces a folder that is there. dev: that the memory is of.
enum status model_folder_write(const char *folder, struct device *dev,
                               const struct model_folder *m);
// The PEFT folder that a run which trains an adapter starts from, of a new one like `a`, which need
// not be bound: from a PEFT folder, or (NULL) by `seed`. Whatever a run starts from is written
// first and published from there, so that the first update has a snapshot like any other.
enum status adapter_folder_start(const char *folder, const struct adapter *a, const char *from,
                                 uint64_t seed, const char *name, json_t *base);

// "a/b" -> "a/.b.PID.new": beside it, so that a rename stays within one file system.
enum status path_beside(const char *path, char ret[PATH_ROOM]);
// Removes those of processes that were killed. all: whatever they were to be, of a folder that is
// the project's own.
void sweep_beside(const char *path, bool all);

#endif
