/* optimizer.h: AdamW over ranges of arenas (param_range.h): their gradients, moments (f32, bf16 or
 * 8 bits) and the 16-bit residual of the exact fp32 master (docs/internals/numerics.md). Nothing is
 * kept for what is not trained. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_OPTIMIZER_H
#define TRAINER_OPTIMIZER_H

#include "kernels/ops.h"

struct comm;
struct optimizer;
struct param_ranges;
struct weights;
struct optimizer_config {
    double beta1, beta2, eps, weight_decay;
    double max_grad_norm; // 0: no clipping
    enum moments_kind moments;
    bool decay_matrices; // weight_decay is of these alone: no tensor of one dimension
};
extern const char *const moments_kind_names[];

// The arenas are bound, shared (or, in sft, the trainer's own); ranges of one arena stand together.
// bf16 weights: the residual starts at 0, the master is then exactly the weight. comm: the ranks
// that train these together, each an arena of its own; borrowed. NULL: this one alone. All ranks
// then call all of these functions in the same order but for optimizer_load() and the two of
// saving.
enum status optimizer_new(struct device *dev, const struct param_ranges *trained, struct comm *comm,
                          const struct optimizer_config *config, struct optimizer **ret);
// The same where one whole arena is trained, by one rank.
enum status optimizer_new_whole(struct device *dev, const struct weights *weights,
                                const struct optimizer_config *config, struct optimizer **ret);
// What is trained is a shard of a model, whose others `comm`'s ranks
// hold: the norm is then that of the whole model's gradients. Each of them may be one of several
// ranks of optimizer_new()'s. Waits for all. NULL: nothing else is to be done.
enum status optimizer_use_shards(struct optimizer *o, struct comm *comm);
void optimizer_free(struct optimizer *o);
// Gradients are added here: those of the i-th arena that is trained, f32, bound to what is trained
// of it; NULL pointers are the rest. base and bytes are there where all of it is trained.
const struct weights *optimizer_grads(const struct optimizer *o, int i);
void optimizer_clear_grads(struct optimizer *o);
// Nothing will be added any more to the gradients of the elements from `first` of their arena on:
// they are summed over the ranks, beside what the device is given next. optimizer_prepare() does
// it for the rest. Not with several arenas.
void optimizer_sum_grads(struct optimizer *o, int64_t first);
// Gradient norm over all that is trained; sets the clipping factor min(1, max_grad_norm / (norm +
// 1e-6)) as torch's clip_grad_norm_. Waits. A norm that is not finite is ST_INVALID: the step must
// be skipped.
enum status optimizer_prepare(struct optimizer *o, double *ret_norm);
// How long the last optimizer_prepare() waited for sums over the ranks that the backward pass had
// not hidden.
double optimizer_wait_ms(const struct optimizer *o);
// One AdamW step in place with the prepared factor; enqueues only: this is what runs between odd
// and even (bridge_publish syncs). Counts the step.
enum status optimizer_apply(struct optimizer *o, double lr);
int64_t optimizer_steps(const struct optimizer *o);
// Of the steps from here on; the moments' kind stays what it is.
void optimizer_configure(struct optimizer *o, const struct optimizer_config *config);
enum status optimizer_reset(struct optimizer *o); // as it was when it was new: no step, no state

// Bytes that one of n_ranks takes; ret_grads: with their norm and its factor.
void optimizer_memory(const struct param_ranges *trained, int n_ranks, enum moments_kind moments,
                      size_t *ret_residual, size_t *ret_moments, size_t *ret_grads);

// State for checkpoints: one safetensors file with residual, m, v (as they are kept) and the step
// count. ST_MISMATCH where the file's moments are of another kind than this optimizer's, or of
// other tensors. Of several ranks the first writes the file, which is as if there were one rank,
// while the others, with a path of NULL, give it their parts; each loads its own. Gradients are
// lost where there are several.
enum status optimizer_save(struct optimizer *o, const char *path);
enum status optimizer_load(struct optimizer *o, const char *path);

#endif
