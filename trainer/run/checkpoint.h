/* checkpoint.h: checkpoints/step-N/: a Hugging Face folder that any loader opens (config.json,
 * model.safetensors, tokenizer and generation files), with the trainer's own state in
 * step-N/trainer/ (trainer_state.json, optimizer.safetensors): vLLM and SGLang load every
 * *.safetensors of a folder without an index. A draft model that is trained too has the same in
 * step-N/draft/, and a reference that moves (--sync-ref-model) its weights in step-N/reference/. Of
 * a run that trains an adapter, step-N is a PEFT folder. Checkpoints of before, with the state
 * beside the model, are read as well. One thread.
 *
 * A folder is whole or not there (model_folder_write.h). The links checkpoints/best and
 * checkpoints/latest are swapped after it. A crash at any point leaves the one before. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_CHECKPOINT_H
#define TRAINER_CHECKPOINT_H

#include "trainer/run/model_folder_write.h"

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
