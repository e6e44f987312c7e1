/* trained_model.h: the model under training, on the server's own copy of the weights: what training
 * clients of the Tinker API do to it. One training run has the model itself (full fine-tuning), or
 * several have an adapter each beside it (LoRA), in arenas of their own. The main thread, which
 * owns the device. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SERVE_TRAINED_MODEL_H
#define TRAINER_SERVE_TRAINED_MODEL_H

#include "trainer/serve/datum.h"
#include "trainer/serve/snapshots.h"

struct http_client;
struct learner_options;
struct optimizer_config;

struct trained_model_options {
    const char *bridge;
    const struct learner_options *learner; // its AdamW's settings and schedule are the client's
    bool exact;                            // sums do not depend on how datums come together
    double quiesce_timeout;                // seconds
    double sample_timeout;  // of samples under way, before a saved model replaces theirs
    int64_t keep_snapshots; // older ones of each adapter
    const char *runs;       // absolute folder of training runs
    const char *loss_for;   // datum_limits.loss_for
};
struct trained_model;

// Attaches to the server, becomes its writer, and takes the memory of learning. options: borrowed.
enum status trained_open(const struct trained_model_options *options, struct trained_model **ret);
void trained_close(struct trained_model *m); // releases the lease; NULL is fine

struct trained_model_info { // what does not change while it is open; any thread
    struct control *control;
    const char *folder; // the model's, as the server loaded it
    const char *socket; // the server's
    struct datum_limits limits;
    int max_adapters; // of the server; 0: it holds none
    int max_context;  // the longest sequence that it samples
    const char *runs; // of the options, likewise
    double sample_timeout;
    struct snapshots *snapshots;
};

// A training run begins with this.
struct beginning {
    int64_t rank;            // of an adapter; 0: the model itself
    bool trains[RUN_TRAINS]; // whose matrices it is on
    int64_t seed;
    const char *folder;  // a checkpoint, which then says what of the above it is; NULL: new
    bool with_optimizer; // AdamW's state too
};
// Full fine-tuning puts all runs before it away, and is put away by whatever begins next.
// ST_INVALID where there is no room for another adapter.
enum status trained_begin(struct trained_model *m, const char *run, const struct beginning *b);
// Of a run that is there: its weights become those of the folder, and AdamW's state if wanted.
enum status trained_load(struct trained_model *m, const char *run, const struct beginning *b);
// Its client is gone; nothing is done where there is no such run.
void trained_end(struct trained_model *m, const char *run);
// Adds the gradients of a request's datums, unless it wants the log-probabilities alone. A failure
// in the middle clears all that were added since the last step, and says so.
enum status trained_forward_backward(struct trained_model *m, const char *run,
                                     const struct forward_backward *request,
                                     struct bytes *ret_response);
// One published AdamW step by the gradients, which are clear then.
enum status trained_optim_step(struct trained_model *m, const char *run, double lr,
                               const struct optimizer_config *adamw, double *ret_norm);
// A checkpoint (a Hugging Face folder, or PEFT's, and the optimizer's state), whole or not there;
// without with_optimizer the folder alone.
enum status trained_save(struct trained_model *m, const char *run, const char *folder,
                         bool with_optimizer);
// The run's present weights, as they can be sampled; by somebody who has no path of them, if
// `wanted`: then they are to be kept when they are older.
enum status trained_snapshot(struct trained_model *m, const char *run, bool wanted,
                             struct snapshot *ret);
// Loads what lies in a checkpoint's folder, to sample from: in use, as of snapshots_use(). An
// adapter goes to the server beside others; a whole model takes the place of what is there, and
// `which` has its version then. Training runs that this leaves no room are put away.
enum status trained_load_saved(struct trained_model *m, struct snapshot *which, const char *folder,
                               struct snapshot_use *ret);
bool trained_is_adapter(const char *folder); // a checkpoint's. Any thread

// ---- what its files share -----------------------------------------------------------------------
// These are trained_model.c (opening, adapters, publishing, learning) and trained_runs.c (training
// runs' beginning, loading, saving, snapshots).

struct trainee { // a training run
    struct trainee *next;
    struct trained_model *model;
    char run[RUN_NAME_ROOM];
    int64_t steps;           // since it began or was loaded
    bool unsaved;            // some of them
    bool wanted;             // somebody has a snapshot of the present weights
    bool warned;             // that there is no room to keep one
    char restore[PATH_ROOM]; // what the server restores should an update of it be torn
    char start[PATH_ROOM];   // of an adapter: the folder that it was published from last
    // one that trains an adapter; NULL: the model itself
    char adapter_name[ADAPTER_ROOM]; // on the server
    bool made;                       // the server has it
    struct bridge_arena *arena;
    struct adapter *adapter;
    struct optimizer *optimizer;
    json_t *base; // that the adapter is of
};

struct trained_model {
    const struct trained_model_options *options;
    struct trained_model_info info;
    char base[PATH_ROOM]; // what the server loaded, which it keeps while there is a writer
    struct bridge *bridge;
    struct device *device;
    struct model_config *model;
    struct weights *weights; // bound to the shared arena
    struct http_client *server;
    int max_rank;            // of its adapters (--max-lora-rank)
    struct learner *learner; // of the model itself, or, where `largest` is there, of adapters
    struct adapter *largest;
    struct trainee *trainees, *selected; // selected: the adapter that the learner is at
    int n_saved;                         // adapters of checkpoints so far
    int n_models;                        // whole models of checkpoints so far
};

// The run's name among what can be sampled.
const char *trainee_source(const struct trainee *t);
struct optimizer *trainee_optimizer(const struct trainee *t);
// Learns adapters from here on, or the model itself.
enum status trained_use_learner(struct trained_model *m, bool adapters);
// An update that the server sees whole: what write() writes or, where that is NULL, what lies in
// the folder.
struct update {
    struct trained_model *model;
    const char *run;         // whose adapter; "": the model itself
    struct adapter *adapter; // into which the folder is loaded where write is NULL; NULL: the model
    const char *restore;     // the folder that the server restores them from if this is cut off
    bool is_base;            // it makes the model that of its folder
    enum status (*write)(void *context);
    void *context;
};
enum status trained_publish(struct update u);
// The run, which is known, or ST_MISMATCH; what follows is of it.
enum status trained_select(struct trained_model *m, const char *run, struct trainee **ret);
struct trainee *trained_find(const struct trained_model *m, const char *run); // NULL: it is not
// Removes it from the list, with its snapshots, and frees it.
void trained_put_away(struct trained_model *m, struct trainee *t, const char *why);
// The model is about to be another one, or is given back: all runs end, and so do snapshots that
// are adapters, which are of the model beneath them.
void trained_end_all(struct trained_model *m, const char *why);

// Before an update of it: where somebody has a snapshot of what it is now, that is kept.
void trainee_keep(struct trainee *t);

// ---- the server's adapters ----------------------------------------------------------------------

// They are made, copied, loaded and unloaded by `serve`. Their names begin with ADAPTER_PREFIX, by
// which those that a dead process left are known.

#define ADAPTER_PREFIX "tinker:"

// One more, which can be sampled then (snapshots_add), of what `key` names (value's reference is
// taken): new by a PEFT "config" (which changes nothing yet), "copy_of" another's weights as they
// are now, or "lora_path", a PEFT folder. Where there is no room, snapshots go, those first that
// were not sampled for the longest (for a copy none of other runs), and then runs whose clients are
// gone. ST_INVALID where that is not enough.
enum status server_adapters_add(struct trained_model *m, enum snapshot_kind kind, const char *name,
                                const char *adapter, const char *key, json_t *value);
void server_adapters_unload(struct trained_model *m, const char *adapter); // not mapped any more
// Unloads snapshots that nobody samples: those kept of a run, or (NULL) all that are no run's own.
void server_adapters_unload_spare(struct trained_model *m, const char *run);

#endif
