/* checkpoint.h: the one writer of model folders, and a run's checkpoints, which are such.
 *
 * checkpoints/step-N/ is a Hugging Face folder that any loader opens (config.json,
 * model.safetensors, tokenizer and generation files), with the trainer's own state in
 * step-N/trainer/ (trainer_state.json, optimizer.safetensors): vLLM and SGLang load every
 * *.safetensors of a folder without an index. A draft model that is trained too has the same in
 * step-N/draft/, and a reference that moves (--sync-ref-model) its weights in step-N/reference/. Of
 * a run that trains an adapter, step-N is a PEFT folder. Checkpoints of before, with the state
 * beside the model, are read as well. One thread.
 *
 * A folder, also of what a run starts from, of weights for servers to load and of --out, is whole
 * or not there: it is filled under a temporary name, synced, and renamed. The links
 * checkpoints/best and checkpoints/latest are swapped after it. A crash at any point leaves the one
 * before. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_CHECKPOINT_H
#define TRAINER_CHECKPOINT_H

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
    // Whether the matrices of the weights' twin are written as it has them, and the quantization
    // that the folder is for (fp8_config_new())
    enum quantization to;
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

// Removes what processes that were killed left beside it, half written. all: whatever it was to be,
// of a folder that is the project's own.
void sweep_beside(const char *path, bool all);

// What is read of trainer_state.json, whoever trained: a count that is not there is 0.
struct checkpoint {
    int64_t step;                                   // steps done
    int64_t data_index;                             // examples taken (curriculum.h)
    int64_t num_tokens, skipped_updates;            // so far
    int64_t optimizer_steps, draft_optimizer_steps; // -1: there is no draft
    json_t *state;                                  // all of it
};

struct checkpoint_others {        // which stay and which go, once a checkpoint is there
    const int64_t *best_step;     // the best one's, this or an earlier one; NULL: none is
    const int64_t *replaced_step; // whose checkpoint goes; NULL: none
    bool keep_start;              // that of step 0 is never removed
    int keep;                     // the newest so many, and the best; 0: all
};
// RUN/checkpoints/step-N of m, whose state says of which step it is, then `best` and `latest`.
// ret_folder: its absolute path; may be NULL.
enum status checkpoint_write(const char *run_folder, struct device *dev,
                             const struct model_folder *m, const struct checkpoint_others *others,
                             char ret_folder[PATH_ROOM]);
// The folder that the link of that name points to, "latest" or "best"; "" where there is none yet.
// ST_NOT_FOUND where "latest" points to one that was removed; "best" then counts as none.
enum status checkpoint_find(const char *run_folder, const char *name, char ret_folder[PATH_ROOM]);
// The caller's to json_decref() the state. ST_UNSUPPORTED: a later version wrote it.
enum status checkpoint_read(const char *folder, struct checkpoint *ret);
// The optimizer's state of a checkpoint, or of the draft in it (folder/draft), into a new
// optimizer. The weights: weights_load() of the same folder.
enum status checkpoint_load_optimizer(const char *folder, int64_t steps,
                                      struct optimizer *optimizer);

#endif
