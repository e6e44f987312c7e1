/* snapshots.h: the registry of weights that clients can name: what the server can sample (the model
 * itself; the adapter of each training run; copies of one as it was, and of a checkpoint on disk;
 * the frozen model, where that is of the model's folder), and of which weights each saved path is.
 *
 * A run's weights are known by the weight version from which they are what they are; publishing
 * another run's moves the version on and leaves them alone. A list under a lock: the main thread
 * changes it, the loop's thread looks things up. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SERVE_SNAPSHOTS_H
#define TRAINER_SERVE_SNAPSHOTS_H

#include "common/base/bytes.h"
#include "trainer/serve/runs.h"
#include <stdint.h>

#define ADAPTER_ROOM 56 // bytes of an adapter's name on the server, with its end

struct model_name;
struct snapshot {             // weights that a client may sample
    char run[RUN_NAME_ROOM];  // whose; "": the model's own, and those of a run that trains it whole
    uint64_t version;         // from which they were these; 0: of `path` alone
    char path[RUN_PATH_ROOM]; // that they were saved as; "": none
    int64_t saves;            // of that path until then: what is saved there later is another
    bool base;                // they are those of the model's folder
    bool inflight;            // the run's newer weights answer for them too
    const struct model_name *elsewhere; // a model of another server, and nothing of this one's
};
struct snapshot_use {           // of a request under way
    char adapter[ADAPTER_ROOM]; // that answers it, or the frozen model; "": the model itself
    bool live;                  // whose weights may change meanwhile
    const struct model_name *elsewhere; // not this server
};
// LIVE is the model or a run's adapter; KEPT a copy of one as it was; LOADED one that was loaded of
// a path; FROZEN the model as its folder has it, by the server's name for it; PATH says what a path
// was saved from, or loaded as, by this process.
enum snapshot_kind { LIVE, KEPT, LOADED, FROZEN, PATH };

struct snapshots;
// version: of the model's present weights; is_base: they are those of the model folder.
enum status snapshots_new(uint64_t version, bool is_base, struct snapshots **ret);
void snapshots_free(struct snapshots *s); // NULL is fine

// ---- the loop's thread --------------------------------------------------------------------------

// Finds what answers for a snapshot, in use from now on. False where nothing does: then it is
// stale, or its path is to be loaded; and while the model is held. ret NULL: whether anything does,
// held or not.
bool snapshots_use(struct snapshots *s, const struct snapshot *which, struct snapshot_use *ret);
void snapshots_end_use(struct snapshots *s, const struct snapshot_use *use);
// Tells whether tokens of these versions, which `use` gave, are of the snapshot.
bool snapshots_gave(struct snapshots *s, const struct snapshot *which,
                    const struct snapshot_use *use, uint64_t oldest, uint64_t newest);
// The version of the run's present weights ("": the model's own); 0: there is no such run.
uint64_t snapshots_version(struct snapshots *s, const char *run);
// The version of the model folder's weights; 0: they are gone.
uint64_t snapshots_base(struct snapshots *s);
// Notes whether a run's client is gone, so that its slot may be given to another.
void snapshots_abandon(struct snapshots *s, const char *run, bool gone);
bool snapshots_need(struct snapshots *s, const char *folder); // a torn run is restored from it
// How many of the run's snapshots are kept; to (NULL: nothing): their versions, "4, 8", or "none".
int snapshots_kept(struct snapshots *s, const char *run, struct bytes *to);
// Whatever is saved as that path is something else from now on, or gone. NULL: all that is no run's
// own.
void snapshots_forget(struct snapshots *s, const char *path);
// The path is of that snapshot's weights, which were saved as it, or loaded from it.
void snapshots_set_path(struct snapshots *s, const char *path, const struct snapshot *weights,
                        bool saved);
// Gives what is known of the path: its weights where this process saved or loaded them.
void snapshots_of_path(struct snapshots *s, const char *path, struct snapshot *ret);

// ---- the main thread ----------------------------------------------------------------------------

// name: the run of LIVE and KEPT, which is a copy of its present weights; the path of LOADED.
enum status snapshots_add(struct snapshots *s, enum snapshot_kind kind, const char *name,
                          const char *adapter);
void snapshots_remove(struct snapshots *s, const char *adapter);
// The model is about to be another one: until it is given free again, nothing is sampled of what is
// there, so that those who do come to an end. How many there are, but for the frozen model.
int snapshots_hold(struct snapshots *s, bool held);
// Comes before an update is written: the run's weights are others from `version` on.
void snapshots_update(struct snapshots *s, const char *run, uint64_t version, bool is_base);
void snapshots_set_restore(struct snapshots *s, const char *run, const char *folder);
// A snapshot that nobody is sampling, least lately used, of those that are kept of a run (NULL: of
// any), or, if `loaded`, that were loaded from a path.
bool snapshots_spare(struct snapshots *s, const char *run, bool loaded,
                     char ret_adapter[ADAPTER_ROOM]);
// A run whose client is gone, but not `but` (NULL: any).
bool snapshots_abandoned(struct snapshots *s, const char *but, char ret_run[RUN_NAME_ROOM]);

#endif
