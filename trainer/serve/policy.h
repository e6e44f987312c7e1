/* policy.h: the weights that are trained, on the server's own copy: what training clients of the
 * Tinker API do to them. One training run has the model itself (full fine-tuning), or several have
 * an adapter each beside it (LoRA), in arenas of their own. The main thread, which owns the device.
 */
#ifndef TRAINER_SERVE_POLICY_H
#define TRAINER_SERVE_POLICY_H

#include "bridge/attach.h"
#include "trainer/run/learning.h"
#include "trainer/serve/datum.h"
#include "trainer/serve/sources.h"

struct policy_options {
    const char *bridge;
    struct learning_options learning; // its AdamW's settings and schedule are the client's
    bool exact;                       // sums do not depend on how datums come together
    double quiesce_timeout;           // seconds
    double sample_timeout;            // of samples under way, before a saved model replaces theirs
    int64_t keep_snapshots;           // older ones of each adapter
    const char *runs;                 // absolute folder of training runs
};
struct policy;

// Attaches to the server, takes the writer's lease and the memory of learning. options: borrowed.
enum status policy_open(const struct policy_options *options, struct policy **ret);
void policy_close(struct policy *p); // releases the lease; NULL is fine

struct control *policy_control(struct policy *p);
const char *policy_folder(const struct policy *p); // the model's, as the server loaded it
const char *policy_socket(const struct policy *p); // the server's
struct datum_limits policy_limits(const struct policy *p);
int policy_max_adapters(const struct policy *p); // of the server; 0: it holds none
struct sources *policy_sources(struct policy *p);

// What a training run begins with.
struct beginning {
    int rank;                     // of an adapter; 0: the model itself
    bool attention, mlp, unembed; // whose matrices it is on; the last is the head
    uint64_t seed;
    const char *folder;  // a checkpoint, which then says what of the above it is; NULL: new
    bool with_optimizer; // AdamW's state too
};
// Full fine-tuning puts all runs before it away, and is put away by whatever begins next.
// ST_INVALID where there is no room for another adapter.
enum status policy_begin(struct policy *p, const char *run, const struct beginning *b);
enum status policy_load(struct policy *p, const char *run, const char *folder, bool with_optimizer);
void policy_end(struct policy *p,
                const char *run); // its client is gone; nothing where there is none
// Adds the gradients of a request's datums, unless it wants the log-probabilities alone. A failure
// in the middle clears all that were added since the last step, and says so.
enum status policy_forward_backward(struct policy *p, const char *run,
                                    const struct forward_backward *request,
                                    struct bytes *ret_answer);
// One published AdamW step by the gradients, which are clear then.
enum status policy_optim_step(struct policy *p, const char *run, double lr,
                              const struct optimizer_config *adamw, double *ret_norm);
// A checkpoint (a Hugging Face folder, or PEFT's, and the optimizer's state), whole or not there;
// without with_optimizer the folder alone.
enum status policy_save(struct policy *p, const char *run, const char *folder, bool with_optimizer);
// The run's present weights, as they can be sampled; by somebody who has no path of them, if
// `wanted`: then they are to be kept when they are older.
enum status policy_snapshot(struct policy *p, const char *run, bool wanted, struct snapshot *ret);
// What lies in a checkpoint's folder, to sample from: in use, as of sources_take(). An adapter goes
// to the server beside others; a whole model takes the place of what is there, and `of` has its
// version then. Training runs that this leaves no place are put away.
enum status policy_load_saved(struct policy *p, struct snapshot *of, const char *folder,
                              struct source_use *ret);
bool policy_is_adapter(const char *folder); // a checkpoint's. Any thread

#endif
