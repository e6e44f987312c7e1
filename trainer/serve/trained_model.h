/* trained_model.h: the model under training, on the server's own copy of the weights: what training
 * clients of the Tinker API do to it. One training run has the model itself (full fine-tuning), or
 * several have an adapter each beside it (LoRA), in arenas of their own. The main thread, which
 * owns the device. */
#ifndef TRAINER_SERVE_TRAINED_MODEL_H
#define TRAINER_SERVE_TRAINED_MODEL_H

#include "trainer/serve/datum.h"
#include "trainer/serve/snapshots.h"

struct learning_options;
struct optimizer_config;

struct trained_model_options {
    const char *bridge;
    const struct learning_options *learning; // its AdamW's settings and schedule are the client's
    bool exact;                              // sums do not depend on how datums come together
    double quiesce_timeout;                  // seconds
    double sample_timeout;  // of samples under way, before a saved model replaces theirs
    int64_t keep_snapshots; // older ones of each adapter
    const char *runs;       // absolute folder of training runs
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
const struct trained_model_info *trained_info(const struct trained_model *m);

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

#endif
