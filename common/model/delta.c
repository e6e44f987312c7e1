/* delta.c: a layer of linear attention by the gated delta rule (ops.h, delta_shape), as Qwen3.5 has
 * it in three layers of four: one matmul gives the convolution's input and the output's gate z, one
 * the heads' gates b and a; convolution; the rule; RMSNorm of every head of its output, times
 * silu(z). Serving and training run the same operations, row after row, so that a row has the same
 * bits in both. One thread, the owner of the device. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/layer.h"

void model_delta(struct model *m, int l, const struct batch_view *batch, const struct kv_view *kv,
                 struct layer_tape *tape)
{
    const struct layer_config *layer = &m->config->layers[l];
    const struct layer_weights *w = &m->weights->layers[l];
    const struct delta_shape shape = model_delta_shape(m, l);
    const int rows = batch->n_tokens, hidden = m->config->hidden,
              width = layer_delta_in_width(layer);
    void *in = tape ? tape->delta_in : m->attn_in, *out = tape ? tape->attn : m->attn_out;
    float *gates = tape ? tape->delta_gates : m->delta_gates;
    const struct delta_batch order = {batch, kv, l};
    const struct conv_args conv = {in, width, w->delta_conv, order};
    const struct delta_args rule = {m->qkv, gates, w->delta_a_log, w->delta_dt_bias, order};
    const struct norm_shape norm = model_delta_norm_shape(m, l, rows);
    const struct norm_args normed = {
        .x = out, .w = w->delta_norm, .rstd = tape ? tape->rstd_delta : NULL};
    const struct gate_args gate = model_delta_gate(m, l, m->gate, in, rows);

    model_linear(
        m, in, m->normed, rows,
        &(struct linear){ROLE_DELTA_IN, l, w->delta_in, NULL, width, hidden, false, m->dt});
    model_linear(m, gates, m->normed, rows,
                 &(struct linear){ROLE_DELTA_GATES, l, w->delta_gates, NULL, 2 * shape.n_heads,
                                  hidden, false, DT_F32});
    m->ops->short_conv(m->dev, m->qkv, &conv, &shape);
    m->ops->delta_rule(m->dev, out, &rule, &shape);
    m->ops->norm(m->dev, m->gate, &normed, &norm);
    m->ops->gate(m->dev, m->attn_out, &gate);
}
