/* backward.h: the forward pass of common/model/model.h in reverse: from gradients of
 * log-probabilities, or from the distance to another model's distributions, to gradients of every
 * weight. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_BACKWARD_H
#define TRAINER_BACKWARD_H

#include "common/model/model.h"

struct backward; // scratch and the chunked head

// grads: a plan of the same config in DT_F32, bound to memory the caller cleared. NULL pointers in
// it are what is not trained; nothing is computed for them, nor below the lowest that is. chunk: of
// wanted rows, at most m->max_rows; where max_rows has room for a whole batch, its logits are
// computed once.
enum status backward_new(struct model *m, const struct weights *grads, int max_tokens,
                         int max_targets, int chunk, struct backward **ret);
// Also adds the gradients of an adapter to `grads`, its plan in DT_F32, bound and cleared. It is
// the first of the model's table, and every row of a batch names it.
void backward_use_adapter(struct backward *b, const struct adapter *a, const struct weights *grads);
// Gradients are rounded to this where they are multiplied with matrices that the forward pass
// multiplies with rows in e4m3. AUTO, as it begins: they are not.
void backward_round(struct backward *b, enum gradient_dtype dt);
void backward_free(struct backward *b);
size_t backward_bytes(const struct model *m, int max_tokens, int max_targets,
                      int chunk); // for the memory plan

// Layer l's attention as it is taken back: of latent attention the expanded form.
struct attn_shape backward_attn_shape(const struct model *m, int l);

// Log-probabilities of `targets` (host, n = batch_rows) at the batch's wanted rows, after
// model_forward gave x. other: by that model of the same shape, whose forward pass it was, in this
// one's scratch; NULL: by b's own. Results are host arrays (n), entropy may be NULL. Waits.
enum status backward_logprobs(struct backward *b, struct model *other, const struct batch *batch,
                              const void *x, const int32_t *targets, float temperature,
                              float *ret_logprobs, float *ret_entropy);
// Every backward_logprobs() by b's own from here on also ranks the targets, into a host array
// (max_targets) of the caller's: what it gave is there once it has returned. NULL: not any more.
void backward_rank(struct backward *b, struct token_logprob *ret_ranked);
// Every backward_logprobs() by b from here on, and the gradient behind it, is of what constraints
// leave: a host array (max_targets), one for each target, which the caller fills before the call.
// Takes backward_mask_bytes() of device memory.
struct constraint_row;
enum status backward_constrain(struct backward *b, const struct constraint_row *constraints);
size_t backward_mask_bytes(const struct model *m, int chunk);
// Distillation (Hinton et al. 2015; ops.h, distill): the wanted rows of `batch` are to be answered
// as another model answers them. The teacher may have a larger vocabulary, of which the first
// entries are shared.
struct distillation {
    struct model *teacher;     // has room for the logits of b's chunk
    const struct batch *batch; // which it read, of as many wanted rows; NULL: the student's
    const void *x;             // what its forward pass of that gave
    // Its own, whose last backward_logprobs() was of this batch, and whose logits are taken where
    // they are kept; NULL: there is none.
    struct backward *kept;
    float beta, scale;    // which divergence (ops.h), and its share in the loss
    const float *weights; // host, (n): besides, of each row; NULL: 1
    // host, (n): the divergence of each row; the acceptance rate of tokens sampled from b, if
    // verified by the teacher; 1 where both find the same token likeliest, else 0 (may be NULL)
    float *ret_divergence, *ret_overlap, *ret_agrees;
};
struct backward_loss { // n wanted rows
    float temperature; // of the distributions
    // Host, (n), of the rows and targets that backward_logprobs ran on last: by each
    // log-probability, and by each entropy (NULL: nothing), which it was then asked for. dlogprobs
    // NULL: of neither.
    const float *dlogprobs, *dentropy;
    const struct distillation *distillation; // besides; NULL: none
    // Routers lose balance_scale * sum over rows, layers with experts and experts of assignments *
    // probability: `assignments` (n_experts) device, counted in the batch's forward pass (struct
    // tape, `balance`). NULL: they do not.
    const float *assignments;
    float balance_scale;
    // While it runs, once it will add nothing more to the gradients of the elements from `first` of
    // the arena on: layer by layer, from the last to the first; not of an adapter. NULL: nobody
    // asks.
    void (*done)(void *context, int64_t first);
    void *context;
};
// Adds to the gradients what it causes. The tape must hold the batch's forward pass (layers that it
// does not keep are run again). Waits.
enum status backward_run(struct backward *b, const struct batch *batch, struct tape *tape,
                         const struct backward_loss *loss);

#endif
