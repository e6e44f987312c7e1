/* sources.h: what the server can sample for clients: the model itself, the adapter of each training
 * run, and snapshots: adapters that are copies of a run's as it was, or of a checkpoint on disk;
 * and, where the server's frozen model is of the model's folder, the model as that has it.
 *
 * A run's weights are known by the weight version from which they are what they are; publishing
 * another run's moves the version on and leaves them alone. A list under a lock: the main thread
 * changes it, the loop's thread looks things up. */
#ifndef TRAINER_SERVE_SOURCES_H
#define TRAINER_SERVE_SOURCES_H

#include "common/base/bytes.h"
#include "common/base/file.h"
#include "trainer/serve/runs.h"
#include <stdint.h>

#define SOURCE_ROOM 56 // bytes of an adapter's name on the server, with its end

struct snapshot {             // weights that a client may sample
    char run[RUN_NAME_ROOM];  // whose; "": the model's own, and those of a run that trains it whole
    uint64_t version;         // from which they were these; 0: of `path` alone
    char path[RUN_PATH_ROOM]; // that they were saved as; "": none
    bool base;                // they are those of the model's folder
};
struct source_use {            // of a request under way
    char adapter[SOURCE_ROOM]; // that answers it, or the frozen model; "": the model itself
    bool live;                 // whose weights may change meanwhile
};

struct sources;
// version: of the model's present weights; is_base: they are those of the model folder.
enum status sources_new(uint64_t version, bool is_base, struct sources **ret);
void sources_free(struct sources *s); // NULL is fine

// ---- the loop's thread --------------------------------------------------------------------------

// What answers for a snapshot, in use from now on; newer: whatever its run's weights are by now.
// False where nothing does: then it is stale, or its path is to be loaded; and while the model is
// held.
bool sources_take(struct sources *s, const struct snapshot *of, bool newer, struct source_use *ret);
void sources_give(struct sources *s, const struct source_use *use); // back
bool sources_has(struct sources *s, const struct snapshot *of, bool newer);
// Whether tokens of these versions, which `use` gave, are of the snapshot.
bool sources_gave(struct sources *s, const struct snapshot *of, const struct source_use *use,
                  uint64_t oldest, uint64_t newest);
// The version of the run's present weights ("": the model's own); 0: there is no such run.
uint64_t sources_version(struct sources *s, const char *run);
uint64_t
sources_base(struct sources *s); // the same of the model folder's weights; 0: they are gone
// Whether a run's client is gone, so that its place may be taken.
void sources_abandon(struct sources *s, const char *run, bool gone);
bool sources_needs(struct sources *s, const char *folder); // a torn run is restored from it
// Versions of the run's snapshots that are kept: "4, 8", or "none".
void sources_kept(struct sources *s, const char *run, struct bytes *to);
// What is saved as that path is something else from now on, or gone. NULL: all that is no run's
// own.
void sources_forget(struct sources *s, const char *path);

// ---- the main thread ----------------------------------------------------------------------------

enum status sources_add_run(struct sources *s, const char *run, const char *adapter);
// A copy of the run's present weights; a checkpoint's.
enum status sources_add_kept(struct sources *s, const char *run, const char *adapter);
enum status sources_add_saved(struct sources *s, const char *path, const char *adapter);
// The frozen model, by the server's name for it: for good.
enum status sources_add_frozen(struct sources *s, const char *name);
void sources_remove(struct sources *s, const char *adapter);
// The model is about to be another one: until it is given free again, nothing is sampled of what is
// there, so that those who do come to an end. How many there are, but for the frozen model.
void sources_hold(struct sources *s, bool held);
int sources_users(struct sources *s);
// Of an update that is being written, before it is: the run's weights are others from `version` on.
void sources_update(struct sources *s, const char *run, uint64_t version, bool is_base);
void sources_set_restore(struct sources *s, const char *run, const char *folder);
// A snapshot that nobody is sampling, least lately used, of those that are kept of a run (NULL: of
// any), or, if `saved`, that were loaded from a path.
bool sources_spare(struct sources *s, const char *run, bool saved, char ret_adapter[SOURCE_ROOM]);
int sources_count_kept(struct sources *s, const char *run);
bool sources_abandoned(struct sources *s, char ret_run[RUN_NAME_ROOM]);

#endif
