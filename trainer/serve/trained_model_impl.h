/* trained_model_impl.h: what the files of the model under training share: trained_model.c (opening,
 * publishing, learning) and trained_runs.c (training runs' beginning, loading, saving, snapshots).
 * The main thread. */
#ifndef TRAINER_SERVE_TRAINED_MODEL_IMPL_H
#define TRAINER_SERVE_TRAINED_MODEL_IMPL_H

#include "trainer/serve/trained_model.h"

struct http_client;

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
// An update that the server sees whole.
struct update {
    struct trained_model *model;
    const char *run;     // whose adapter; "": the model itself
    const char *restore; // the folder that the server restores them from if this is cut off
    bool is_base;        // it makes the model that of its folder
    enum status (*write)(void *context);
    void *context;
};
enum status trained_publish(struct update u);
// The run, which is known, or ST_MISMATCH; what follows is of it.
enum status trained_select(struct trained_model *m, const char *run, struct trainee **ret);
struct trainee *trained_find(const struct trained_model *m, const char *run); // NULL: it is not
// Removes it from the list, with its snapshots, and frees it.
void trained_put_away(struct trained_model *m, struct trainee *t, const char *why);
void trained_release_runs(struct trained_model *m); // at the end

// Before an update of it: where somebody has a snapshot of what it is now, that is kept.
void trainee_keep(struct trainee *t);

// ---- the server's adapters
// ----------------------------------------------------------------------- The adapters that the
// server holds, as `serve` has them made, copied, loaded and unloaded. Their names begin with
// ADAPTER_PREFIX, by which those that a dead process left are known.

#define ADAPTER_PREFIX "tinker:"

// One more, which can be sampled then (snapshots_add), of what `key` names (value's reference is
// taken): new by a PEFT "config" (which changes nothing yet), "copy_of" another's weights as they
// are now, or "lora_path", a PEFT folder. Where there is no room, snapshots go, those first that
// were not sampled for the longest, and for a run those whose clients are gone; a copy pushes no
// other run's out. ST_INVALID where that is not enough.
enum status server_adapters_add(struct trained_model *m, enum snapshot_kind kind, const char *name,
                                const char *adapter, const char *key, json_t *value);
void server_adapters_unload(struct trained_model *m, const char *adapter); // not mapped any more
// Unloads snapshots that nobody samples: those kept of a run, or (NULL) all that are no run's own.
void server_adapters_unload_spare(struct trained_model *m, const char *run);

#endif
