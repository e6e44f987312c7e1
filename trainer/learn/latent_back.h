/* latent_back.h: latent attention (common/model/latent.h) in reverse: through the expanded form,
 * whose gradient is that of ordinary attention. One thread. */
#ifndef TRAINER_LATENT_BACK_H
#define TRAINER_LATENT_BACK_H

#include "common/model/model.h"

// Scratch for T tokens, device; dim is head_dim, D is rank + rope.
struct latent_grads {
    void *latent, *dlatent; // (T, rank) of the keys' first entries
    void *kv;               // (T, n_heads, nope + value), then its gradient
    void *qkv;              // (T, 3 * n_heads, dim)
    void *out;              // (T, n_heads, dim) what attention gave, with zeros behind each value
    void *dout;             // its gradient, then that of the queries
    void *dkeys;            // (T, D)
    void *q_a, *dq_a;       // (T, q_rank)
};
#define N_LATENT_GRADS 9
// Their bytes, in a struct that has them at offset `base`.
void latent_grads_parts(const struct layer_config *l, enum dtype dt, size_t t, size_t base,
                        struct device_part ret[N_LATENT_GRADS]);
// Of layer l's expanded form.
struct attn_shape latent_attn_shape(const struct model *m, int l);

struct backward;
// From b->dattn (T, n_heads * value) and m->normed, the gradients of the layer's latent attention;
// leaves that of m->normed in b->dnormed.
void latent_back(struct backward *b, int l, const struct batch_view *batch,
                 const struct layer_tape *tape);

#endif
