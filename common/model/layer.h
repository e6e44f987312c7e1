/* layer.h: what the files of the one forward pass share: model.c, and a file for each kind of layer
 * that needs more than a few lines. Nobody else includes it. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_LAYER_H
#define COMMON_MODEL_LAYER_H

#include "common/model/model.h"

// y (rows, n) = x (rows, k) . w (n, k)^T + bias [+ y], and what the rows' adapters add to the block
// of that role.
struct linear {
    enum tensor_role role;
    int layer;
    const void *w, *bias;
    int n, k;
    bool add;
    enum dtype out; // of y
};
void model_linear(struct model *m, void *y, const void *x, int rows, const struct linear *l);

// delta.c: from m->normed to what linear attention gives (m->attn_out).
void model_delta(struct model *m, int l, const struct batch_view *batch, const struct kv_view *kv,
                 struct layer_tape *tape);

#endif
