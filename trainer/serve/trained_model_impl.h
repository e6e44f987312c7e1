/* trained_model_impl.h: what the files of the model under training share: trained_model.c (opening,
 * publishing, learning) and trained_runs.c (training runs' beginning, loading, saving, snapshots).
 * The main thread. */
#ifndef TRAINER_SERVE_TRAINED_MODEL_IMPL_H
#define TRAINER_SERVE_TRAINED_MODEL_IMPL_H

#include "trainer/serve/trained_model.h"

// server_adapters.c: the adapters that the server holds, as `serve` has them made, copied, loaded
// and unloaded, over the server's socket. Their names begin with ADAPTER_PREFIX, by which those
// that a dead process left are known.
#define ADAPTER_PREFIX "tinker:"

struct http_client;

struct server_adapters {
    struct http_client *http;
    int max, max_rank; // --max-adapters, --max-lora-rank
};
// socket: the server's. Unloads what a process before left; waits for a server that restores torn
// weights.
enum status server_adapters_open(const char *socket, struct server_adapters *ret);
enum status server_adapters_count(struct server_adapters *a, int *ret); // that there are now
// One more, of what `key` names (value's reference is taken): new by a PEFT "config" (which changes
// nothing yet), "copy_of" another's weights as they are now, or "lora_path", a PEFT folder.
enum status server_adapters_load(struct server_adapters *a, const char *name, const char *key,
                                 json_t *value);
// This process has it mapped no more.
enum status server_adapters_unload(struct server_adapters *a, const char *name);

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
    struct server_adapters server;
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
// An update that the server sees whole: of a run's adapter, or ("") of the model. restore: the
// folder that it restores them from if this is cut off. is_base: it makes the model that of its
// folder.
enum status trained_publish(struct trained_model *m, const char *run, const char *restore,
                            bool is_base, enum status (*write)(void *), void *context);
// The run, which is known, or ST_MISMATCH; what follows is of it.
enum status trained_select(struct trained_model *m, const char *run, struct trainee **ret);
void trained_release_runs(struct trained_model *m); // at the end

// Before an update of it: where somebody has a snapshot of what it is now, that is kept.
void trainee_keep(struct trainee *t);

#endif
