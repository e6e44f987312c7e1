/* checkpoint.h: checkpoints/step-N/: a Hugging Face folder that any loader opens (config.json,
 * model.safetensors, tokenizer and generation files), with the trainer's own state in
 * step-N/trainer/ (trainer_state.json, optimizer.safetensors): vLLM and SGLang load every
 * *.safetensors of a folder without an index. A draft model that is trained too has the same in
 * step-N/draft/, and a reference that moves (--sync-ref-model) its weights in step-N/reference/. Of
 * a run that trains an adapter, step-N is a PEFT folder. Checkpoints of before, with the state
 * beside the model, are read as well. One thread.
 *
 * A folder is written under a temporary name, synced, and renamed: step-N is whole or not there.
 * The links checkpoints/best and checkpoints/latest are swapped after it. A crash at any point
 * leaves the one before. */
#ifndef TRAINER_CHECKPOINT_H
#define TRAINER_CHECKPOINT_H

#include "common/model/adapter.h"
#include "trainer/learn/optimizer.h"
#include <jansson.h>

struct checkpoint {
    int64_t step;       // steps done
    int64_t data_index; // examples taken (curriculum.h)
    json_t *state;      // what trainer_state.json holds beyond these; borrowed on write
    // On write: the step whose checkpoint is the best, this one or an earlier one; NULL: none is.
    const int64_t *best_step;
    const int64_t *replaced_step; // on write: whose checkpoint goes once this one is there, or NULL
    bool keep_start;              // on write: that of step 0 is never removed
    const struct weights *reference; // on write: a reference that moves; NULL: it stays the start's
};

#define CHECKPOINT_DRAFT     "draft" // the folders' names
#define CHECKPOINT_TRAINER   "trainer"
#define CHECKPOINT_REFERENCE "reference"

struct checkpoint_model { // one model of a checkpoint
    const struct weights *weights;
    struct optimizer *optimizer;
    const char *source_folder; // of its tokenizer and generation files
    // What is trained of it where that is an adapter: the folder is then PEFT's. NULL: the weights.
    const struct adapter *adapter;
};
// RUN/checkpoints/step-N, then `best` and `latest`; keeps the newest `keep` (0: all) and the best.
// draft: NULL where none is trained. ret_folder: its absolute path, the caller's to free; may be
// NULL.
enum status checkpoint_write(const char *run_folder, const struct checkpoint *c, struct device *dev,
                             const struct checkpoint_model *policy,
                             const struct checkpoint_model *draft, int keep, char **ret_folder);
// One checkpoint of a policy alone, of any name, with no links to it.
enum status checkpoint_write_folder(const char *folder, const struct checkpoint *c,
                                    struct device *dev, const struct checkpoint_model *policy);
// The folder that `latest` points to, or `best`; NULL where there is none yet. The caller's to
// free. ST_NOT_FOUND where `latest` points to one that was removed; `best` then counts as none.
enum status checkpoint_latest(const char *run_folder, char **ret_folder);
enum status checkpoint_best(const char *run_folder, char **ret_folder);
// trainer_state.json; ret->state is the caller's.
enum status checkpoint_read(const char *folder, struct checkpoint *ret);
// The optimizer's state of a checkpoint into a new optimizer; checkpoint_load_draft_optimizer: that
// of its draft model. The weights: weights_load() of the folder, and of folder/draft.
enum status checkpoint_load_optimizer(const char *folder, const struct checkpoint *c,
                                      struct optimizer *optimizer);
bool checkpoint_has_draft(const struct checkpoint *c);
enum status checkpoint_load_draft_optimizer(const char *folder, const struct checkpoint *c,
                                            struct optimizer *optimizer);

#endif
