/* layer_back.h: what the files of the one backward pass share, as common/model/model.h does for the
 * forward pass. Nobody else includes it but tests. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_LAYER_BACK_H
#define TRAINER_LAYER_BACK_H

#include "trainer/learn/backward.h"

// Scratch for T tokens, device; dim is a head's of the expanded form, D is rank + rope.
struct latent_grads {
    void *latent, *dlatent; // (T, rank) of the keys' first entries
    void *kv;               // (T, n_heads, nope + value), then its gradient
    void *qkv;              // (T, 3 * n_heads, dim)
    void *out;              // (T, n_heads, dim) what attention gave, with zeros behind each value
    void *dout;             // its gradient, then that of the queries
    void *dkeys;            // (T, D)
    void *q_a, *dq_a;       // (T, q_rank)
};

struct backward {
    struct model *m;
    const struct weights *grads;
    const struct adapter *adapter; // that is trained; NULL: none
    const struct weights *adapter_grads;
    int lowest; // layer that is trained, or has something below it that is
    int max_tokens, max_targets, chunk;
    enum gradient_dtype rounds; // backward_round()
    // device scratch
    void *dx, *dnormed; // (max_tokens, hidden)
    void *dproj;     // (max_tokens, hidden) of what a residual branch gives, before its post-norm
    void *dparallel; // (max_tokens, hidden) what a parallel block's MLP adds to dx
    void *dgate_up;  // (A, 2 * intermediate); A as in model.h
    void *dact;      // (A, intermediate)
    void *dexpert;   // (A, expert width) sorted by expert
    void *dlatent;   // (max_tokens, expert width) of what experts give or read as a latent vector
    void *drouter;   // (max_tokens, n_experts)
    float *dweight;  // (max_tokens, moe.top_k)
    void *dqkv, *dattn; // (max_tokens, qkv width), (max_tokens, attention width)
    void *dattn_in;     // (max_tokens, attention in width), where queries have gates, or linear
                        // attention's
    void *ddelta_gates; // (max_tokens, 2 * heads)
    void *heads_raw;    // (max_tokens, q width of all ranks) where norms go over all heads
    void *dkv;          // (max_tokens, 2 * kv width), and what layers that share these add up to
    void *dshared[MAX_SHARED_KV];
    void *dinputs;          // (max_tokens, n_layers * layer_input)
    void *down, *down_gate; // (max_tokens, layer_input) of what gates a layer's own inputs
    struct latent_grads latent;
    void *dlogits;      // (chunk, vocab)
    void *dlogits_part; // (chunk, vocab / ranks) this rank's columns; NULL with one rank
    void *dpair; // (max_tokens, 2 * hidden) of a layer that predicts further tokens, as the next
    float *mtp_rstd;                  // (max_tokens)
    float *dlogits_f32;               // the same before the soft cap's gradient, where there is one
    void *drows;                      // (max_targets, hidden)
    int32_t *targets;                 // (max_targets)
    float *row_weights;               // (max_targets) distilling
    float *logprob, *lse, *entropy;   // (max_targets); distilling: logprob holds the divergences,
                                      // entropy the overlaps
    float *dlogprob, *dentropy;       // (max_targets)
    struct token_logprob *ranked;     // (chunk)
    struct token_logprob *ret_ranked; // backward_rank()
    const struct constraint_row *constraints; // backward_constrain(); NULL: none
    int32_t *masked, *host_masked;            // (chunk) rows that have a mask
    struct constraint_row *wanted;            // (chunk) of which constraint
    uint32_t *masks, *host_masks;             // (chunk, MASK_WORDS(vocab))
    bool logits_kept; // the last backward_logprobs left all its logits in model.logits
};

// From the gradient dy (rows, n) of y = x . w^T + bias, of a role's matrix w (n, k): dx (rows, k) =
// (add ? dx : 0) + that of x, through the adapter too where there is one; and adds to those of w
// and bias, where they are trained.
void matrix_back(struct backward *b, void *dx, const void *dy, const void *x, int rows,
                 enum tensor_role role, int layer, bool add);

// dx = (add ? dx : 0) + dy taken back through a role's norm; adds to its own gradients, where it is
// trained.
void norm_back(struct backward *b, enum tensor_role role, int l, void *dx, const void *dy,
               const struct norm_args *norm, const struct norm_shape *shape, bool add);

// backward.c: dx is the gradient of the layer's output on entry, of x_mid on return. A parallel
// block's MLP reads the layer's input: its part goes to dparallel, as attention needs dx as it is.
void mlp_back(struct backward *b, int l, int rows, const struct layer_tape *tape,
              const struct backward_loss *loss);

// mixers_back.c: from the gradient of a layer's linear attention, projected, to that of m->normed
// (in dnormed), which it computes again.
void delta_back(struct backward *b, int l, const struct batch_view *batch,
                const struct layer_tape *tape, const void *dout);

// mixers_back.c: latent attention (common/model/blocks.c) in reverse: through the expanded form,
// whose gradient is that of ordinary attention. From b->dattn (T, n_heads * value) and m->normed,
// the gradients of the layer's latent attention; leaves that of m->normed in b->dnormed.
void latent_back(struct backward *b, int l, const struct batch_view *batch,
                 const struct layer_tape *tape);

#endif
