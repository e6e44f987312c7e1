/* delta_back.c: common/model/delta.c in reverse. What the convolution, the norm and the gate give
 * is computed again; the states along the sequence too, within the rule's own gradient. One thread.
 */
#include "trainer/learn/layer_back.h"

void delta_back(struct backward *b, int l, const struct batch_view *batch,
                const struct layer_tape *tape, const void *dout)
{
    struct model *m = b->m;
    const struct ops *ops = m->ops;
    const struct layer_config *layer = &m->config->layers[l];
    const struct layer_weights *w = &m->weights->layers[l], *g = &b->grads->layers[l];
    const struct delta_shape shape = model_delta_shape(m, l);
    const int rows = batch->n_tokens, hidden = m->config->hidden;
    const int value = delta_value_width(&shape), width = layer_delta_in_width(layer);
    const struct delta_batch order = {batch, NULL, l};
    const struct conv_args conv = {tape->delta_in, width, w->delta_conv, order};
    const struct delta_args rule = {m->qkv, tape->delta_gates, w->delta_a_log, w->delta_dt_bias,
                                    order};
    const struct delta_grads grads = {b->dqkv, b->ddelta_gates, g->delta_a_log, g->delta_dt_bias};
    const struct norm_shape norm = model_delta_norm_shape(m, l, rows);
    const struct norm_args normed = {.x = tape->attn, .w = w->delta_norm, .rstd = tape->rstd_delta};
    const struct gate_args gate = model_delta_gate(m, l, m->gate, tape->delta_in, rows);
    void *dgate = (char *)b->dattn_in + (size_t)delta_conv_width(&shape) * dtype_size(m->dt);

    ops->norm(m->dev, m->gate, &normed, &norm);
    ops->gate(m->dev, m->attn_out, &gate);
    matrix_back(b, b->dattn, dout, m->attn_out, rows,
                &(struct matrix){ROLE_DELTA_OUT, l, w->delta_out, g->delta_out, NULL, hidden, value,
                                 false});
    ops->gate_back(m->dev, b->dattn, dgate, b->dattn, &gate);
    ops->norm_back(m->dev, b->dattn, g->delta_norm, NULL, b->dattn, &normed, &norm, false);
    ops->short_conv(m->dev, m->qkv, &conv, &shape);
    ops->delta_rule_back(m->dev, &grads, b->dattn, &rule, &shape);
    ops->short_conv_back(m->dev, b->dattn_in, g->delta_conv, b->dqkv, &conv, &shape);
    matrix_back(
        b, b->dnormed, b->dattn_in, m->normed, rows,
        &(struct matrix){ROLE_DELTA_IN, l, w->delta_in, g->delta_in, NULL, width, hidden, false});
    matrix_back(b, b->dnormed, b->ddelta_gates, m->normed, rows,
                &(struct matrix){ROLE_DELTA_GATES, l, w->delta_gates, g->delta_gates, NULL,
                                 2 * shape.n_heads, hidden, true});
}
