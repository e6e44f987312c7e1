/* policy.h: the weights that are trained, on the server's own copy: what a training client of the
 * Tinker API does to them. There is one policy, of one training run at a time. The main thread,
 * which owns the device. */
#ifndef TRAINER_SERVE_POLICY_H
#define TRAINER_SERVE_POLICY_H

#include "bridge/attach.h"
#include "trainer/run/learning.h"
#include "trainer/serve/datum.h"

struct policy_options {
    const char *bridge;
    struct learning_options learning; // its AdamW's settings and schedule are the client's
    bool exact;                       // sums do not depend on how datums come together
    double quiesce_timeout;           // seconds
};
struct policy;

// Attaches to the server, takes the writer's lease and all memory. options: borrowed.
enum status policy_open(const struct policy_options *options, struct policy **ret);
void policy_close(struct policy *p); // releases the lease; NULL is fine

struct control *policy_control(struct policy *p);
const char *policy_folder(const struct policy *p); // the model's, as the server loaded it
const char *policy_socket(const struct policy *p); // the server's
const struct model_config *policy_model(const struct policy *p);
struct datum_limits policy_limits(const struct policy *p);

// Begins a training run: a run before it has the policy no more. From the model folder, or from the
// checkpoint `folder`; with_optimizer: its AdamW's state too.
enum status policy_begin(struct policy *p, const char *run, const char *folder,
                         bool with_optimizer);
// What follows is of that run: ST_MISMATCH where another has the policy.
enum status policy_check(const struct policy *p, const char *run);
enum status policy_load(struct policy *p, const char *run, const char *folder, bool with_optimizer);
// Adds the gradients of a request's datums, unless it wants the log-probabilities alone. A failure
// in the middle clears all that were added since the last step, and says so.
enum status policy_forward_backward(struct policy *p, const char *run,
                                    const struct forward_backward *request,
                                    struct bytes *ret_answer);
// One published AdamW step by the gradients, which are clear then.
enum status policy_optim_step(struct policy *p, const char *run, double lr,
                              const struct optimizer_config *adamw, double *ret_norm);
// A checkpoint (a Hugging Face folder and the optimizer's state), whole or not there; without
// with_optimizer the model alone.
enum status policy_save(struct policy *p, const char *run, const char *folder, bool with_optimizer);

#endif
