/* mixers_back.c: the gradients of latent attention and of linear attention.
 *
 * Of latent attention (common/model/blocks.c, as all here) keys and values of every head are made
 * of the latents again, and attention's own gradient does the rest; of the forward pass, which
 * computed the same scores in absorbed form, it takes the log-sum-exp and the result. Of linear
 * attention what the convolution, the norm and the gate give is computed again, and the states
 * along the sequence within the rule's own gradient. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/layer_back.h"

struct attn_shape backward_attn_shape(const struct model *m, int l)
{
    const struct layer_config *c = &m->config->layers[l];
    struct attn_shape shape = m->attn[l];
    if (c->latent.rank == 0) return shape;
    shape.n_kv_heads = c->n_heads;
    shape.head_dim = layer_expanded_dim(c);
    shape.latent = 0;
    return shape;
}

// y (rows, n) = the first n of every k entries of x (rows, k), or those first where y is wider.
static void copy_rows(struct model *m, void *y, int n, const void *x, int k, int64_t rows)
{
    const size_t e = dtype_size(m->dt), both = (size_t)(n < k ? n : k);
    device_copy_2d(m->dev, y, (size_t)n * e, x, (size_t)k * e, both * e, (size_t)rows);
}

// y (rows, n) = x (rows, k) and zeros behind.
static void pad_rows(struct model *m, void *y, int n, const void *x, int k, int64_t rows)
{
    if (n > k) device_fill(m->dev, y, 0, (size_t)rows * (size_t)n * dtype_size(m->dt));
    copy_rows(m, y, n, x, k, rows);
}

// From the gradient of the queries in g->dout; adds that of m->normed to b->dnormed.
static void queries_back(struct backward *b, int l, int rows, const struct layer_tape *tape)
{
    struct model *m = b->m;
    const struct layer_config *c = &m->config->layers[l];
    const struct latent_grads *s = &b->latent;
    const int q_rank = c->latent.q_rank;
    if (q_rank == 0) {
        matrix_back(b, b->dnormed, s->dout, m->normed, rows, ROLE_Q, l, true);
        return;
    }
    const struct norm_shape shape = model_latent_norm(m, rows, q_rank, q_rank);
    const struct norm_args norm =
        model_norm(m, ROLE_Q_A_NORM, l, tape->latent.q_a, tape->latent.rstd_q);
    m->ops->norm(m->dev, s->q_a, &norm, &shape);
    matrix_back(b, s->dq_a, s->dout, s->q_a, rows, ROLE_Q_B, l, false);
    norm_back(b, ROLE_Q_A_NORM, l, s->dq_a, s->dq_a, &norm, &shape, false);
    matrix_back(b, b->dnormed, s->dq_a, m->normed, rows, ROLE_Q_A, l, true);
}

// From the gradients of keys and values in g->kv and of their rotated part in g->dkeys; leaves that
// of m->normed in b->dnormed.
static void keys_back(struct backward *b, int l, int rows, const struct layer_tape *tape)
{
    struct model *m = b->m;
    const struct layer_config *c = &m->config->layers[l];
    const struct latent_grads *s = &b->latent;
    const struct latent_shape latent = model_latent_shape(m, l, rows);
    const int width = layer_latent_width(c);
    const struct norm_shape shape = model_latent_norm(m, rows, latent.rank, width);
    const struct norm_args norm =
        model_norm(m, ROLE_KV_A_NORM, l, tape->latent.kv_a, tape->latent.rstd_kv);
    matrix_back(b, s->dlatent, s->kv, s->latent, rows, ROLE_KV_B, l, false);
    copy_rows(m, s->dkeys, width, s->dlatent, latent.rank, rows);
    norm_back(b, ROLE_KV_A_NORM, l, s->dkeys, s->dkeys, &norm, &shape, false);
    matrix_back(b, b->dnormed, s->dkeys, m->normed, rows, ROLE_KV_A, l, false);
}

void latent_back(struct backward *b, int l, const struct batch_view *batch,
                 const struct layer_tape *tape)
{
    struct model *m = b->m;
    const struct layer_config *c = &m->config->layers[l];
    const struct latent_grads *s = &b->latent;
    const struct latent_shape shape = model_latent_shape(m, l, batch->n_tokens);
    const struct attn_shape attn = backward_attn_shape(m, l);
    const int rows = batch->n_tokens, dim = c->head_dim, width = layer_latent_width(c);
    const int64_t heads = (int64_t)rows * shape.n_heads;
    const size_t e = dtype_size(m->dt);

    copy_rows(m, s->latent, shape.rank, tape->latent.keys, width, rows);
    model_linear(m, s->kv, s->latent, rows, &(struct linear){ROLE_KV_B, l, .out = m->dt});
    m->ops->latent_expand(m->dev, s->qkv, tape->latent.q, s->kv, tape->latent.keys, &shape, false);
    pad_rows(m, s->out, attn.head_dim, tape->attn, shape.value, heads);
    pad_rows(m, s->dout, attn.head_dim, b->dattn, shape.value, heads);
    m->ops->attn_back(m->dev, b->dqkv, NULL, s->dout, s->out, tape->lse, s->qkv, batch, &attn);
    m->ops->latent_expand(m->dev, b->dqkv, s->dout, s->kv, s->dkeys, &shape, true);
    model_latent_rotate(m, l, (char *)s->dout + (size_t)shape.nope * e, shape.n_heads, dim, batch,
                        -1.0f);
    model_latent_rotate(m, l, (char *)s->dkeys + (size_t)shape.rank * e, 1, width, batch, -1.0f);
    keys_back(b, l, rows, tape);
    queries_back(b, l, rows, tape);
}

// ---- linear attention ---------------------------------------------------------------------------

// From the gradient of what one of linear attention's first matmuls gives.
static void first_back(struct backward *b, int l, const void *dy, int rows, enum tensor_role role,
                       bool add)
{
    struct model *m = b->m;
    if (m->config->block & DELTA_GROUPED) {
        model_arrange(m, m->grouped, dy, rows, role, m->dt, true);
        dy = m->grouped;
    }
    matrix_back(b, b->dnormed, dy, m->normed, rows, role, l, add);
}

// All but what the rule gives is computed again. The gradient of a part of the first matmul's rows
// is the same part of din.
void delta_back(struct backward *b, int l, const struct batch_view *batch,
                const struct layer_tape *tape, const void *dout)
{
    struct model *m = b->m;
    const struct ops *ops = m->ops;
    const struct layer_weights *g = &b->grads->layers[l];
    const struct delta_layer d =
        model_delta_layer(m, l, &(struct delta_batch){batch, NULL, l}, tape);
    const struct delta_shape *s = &d.shape;
    const bool is_conv = delta_is_conv(s);
    const int rows = batch->n_tokens;
    const char *in = d.in;
    char *din = b->dattn_in;
    void *dz = din + ((const char *)d.z - in);
    const struct delta_grads grads = {
        b->dqkv, s->is_scan ? din + ((const char *)d.rule.gates - in) : b->ddelta_gates,
        g->at[ROLE_DELTA_A_LOG], g->at[ROLE_DELTA_DT_BIAS], g->at[ROLE_DELTA_SKIP]};

    model_delta_convolve(m, &d);
    model_delta_finish(m, &d);
    matrix_back(b, b->dattn, dout, m->attn_out, rows, ROLE_DELTA_OUT, l, false);
    if (!s->is_scan) ops->act_back(m->dev, dz, b->dattn, NULL, b->dattn, d.z, &d.behind);
    if (!is_conv) norm_back(b, ROLE_DELTA_NORM, l, b->dattn, b->dattn, &d.norm, &d.heads, false);
    if (s->is_scan) ops->act_back(m->dev, dz, b->dattn, NULL, b->dattn, d.z, &d.behind);
    if (!is_conv) ops->delta_rule_back(m->dev, &grads, b->dattn, &d.rule, s);
    ops->short_conv_back(m->dev, is_conv ? b->dqkv : din + ((const char *)d.conv.x - in),
                         g->at[ROLE_DELTA_CONV], g->at[ROLE_DELTA_CONV_BIAS],
                         is_conv ? b->dattn : b->dqkv, &d.conv, s);
    if (is_conv)
        ops->act_back(m->dev, din, din + ((const char *)d.before.up - in), NULL, b->dqkv, in,
                      &d.before);
    first_back(b, l, din, rows, ROLE_DELTA_IN, false);
    if (d.gates) first_back(b, l, b->ddelta_gates, rows, ROLE_DELTA_GATES, true);
}
