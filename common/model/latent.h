/* latent.h: latent attention (DeepSeek-V2, 2024; kernels/ops.h, struct latent_shape) as a kind of
 * layer: what it keeps of T tokens, and its way from the normalised input to what the output matmul
 * takes. The device owner's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_LATENT_H
#define COMMON_MODEL_LATENT_H

#include "common/model/config.h"
#include "kernels/device.h"

// Scratch of the forward pass, or on the tape. D is rank + rope.
struct latent_rows {
    void *q_a;     // (T, q_rank) before its norm, where queries are made in two steps
    float *rstd_q; // (T) of that norm; on the tape, as rstd_kv
    void *q;       // (T, n_heads, head_dim), rotated
    void *keys;    // (T, D) what the cache holds
    void *kv_a;    // (T, D) the same before the norm of its first rank entries and the rotation of
                   // the others; on the tape
    float *rstd_kv;
};
#define N_LATENT_ROWS 6
// Their bytes for t tokens of a layer (0 where its attention is not latent), in a struct that has
// them at offset `base`. Returns how many there are.
int latent_rows_parts(const struct layer_config *l, enum dtype dt, size_t t, size_t base, bool tape,
                      struct device_part ret[N_LATENT_ROWS]);

struct model;
struct batch_view;
struct kv_view;
// From m->normed to out (T, n_heads * value), through the pool (kv) or the batch itself; lse as of
// attn_packed. Both forms are absorbed ones, so that a row has the same bits in both.
void latent_attention(struct model *m, int l, const struct batch_view *batch,
                      const struct kv_view *kv, const struct latent_rows *rows, float *lse,
                      void *out);
// The shape of layer l's calls for so many rows.
struct latent_shape model_latent_shape(const struct model *m, int l, int rows);
// Rotates what is rotated of n heads of `width` entries, `rotated` being where the first begins.
void model_latent_rotate(struct model *m, int l, void *rotated, int n, int width,
                         const struct batch_view *batch, float sign);
// Of the norms of q_a and of kv_a.
struct norm_shape model_latent_norm(const struct model *m, int rows, int width, int stride);

#endif
