/* latent.c: the forward pass of latent attention.
 *
 * Queries come from the residual stream, or in two steps with a norm between; the token's latent
 * vector is normalised, its end rotated, and that is the token's key and value for all heads: the
 * queries are multiplied into its space (latent_query), and what attention gives out of it
 * (latent_value). One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/model.h"
#include <stddef.h>
#include <string.h>

int latent_rows_parts(const struct layer_config *l, enum dtype dt, size_t t, size_t base, bool tape,
                      struct device_part ret[N_LATENT_ROWS])
{
    const size_t e = dtype_size(dt), n = l->latent.rank > 0 ? t : 0, stat = tape ? n * 4 : 0;
    const size_t width = n * (size_t)layer_latent_width(l) * e, q_rank = (size_t)l->latent.q_rank;
    const struct device_part parts[N_LATENT_ROWS] = {
        {base + offsetof(struct latent_rows, q_a), n * q_rank * e},
        {base + offsetof(struct latent_rows, rstd_q), q_rank > 0 ? stat : 0},
        {base + offsetof(struct latent_rows, q), n * (size_t)layer_q_width(l) * e},
        {base + offsetof(struct latent_rows, kv_a), tape ? width : 0},
        {base + offsetof(struct latent_rows, rstd_kv), stat},
        {base + offsetof(struct latent_rows, keys), width},
    };
    memcpy(ret, parts, sizeof parts);
    return N_LATENT_ROWS;
}

struct latent_shape model_latent_shape(const struct model *m, int l, int rows)
{
    const struct layer_config *c = &m->config->layers[l];
    return (struct latent_shape){.rows = rows,
                                 .n_heads = c->n_heads,
                                 .nope = c->head_dim - c->latent.rope,
                                 .rope = c->latent.rope,
                                 .rank = c->latent.rank,
                                 .value = c->latent.value,
                                 .dt = m->dt,
                                 .early = true};
}

struct norm_shape model_latent_norm(const struct model *m, int rows, int width, int stride)
{
    // published models take this eps here, whatever their rms_norm_eps
    return (struct norm_shape){m->config->norm, rows, width, 1, stride, 1e-6f, m->dt};
}

void model_latent_rotate(struct model *m, int l, void *rotated, int n, int width,
                         const struct batch_view *batch, float sign)
{
    const int index = m->config->layers[l].rope;
    const struct rope_config *rope = &m->config->ropes[index];
    const struct rope_args args = {.table = m->ropes[index],
                                   .positions = batch->positions,
                                   .rows = batch->n_tokens,
                                   .n = n,
                                   .head_dim = width,
                                   .rot_dim = rope->dim,
                                   .stride = (int64_t)n * width,
                                   .sign = sign,
                                   .interleaved = rope->interleaved,
                                   .dt = m->dt};
    m->ops->rope(m->dev, rotated, &args);
}

static void *element(const struct model *m, void *x, int i)
{
    return (char *)x + (size_t)i * dtype_size(m->dt);
}

static void latent_queries(struct model *m, int l, const struct batch_view *batch,
                           const struct latent_rows *to)
{
    const struct layer_config *c = &m->config->layers[l];
    const struct layer_weights *w = &m->weights->layers[l];
    const int rows = batch->n_tokens, q_rank = c->latent.q_rank, hidden = m->config->hidden;
    const int width = layer_q_width(c);
    if (q_rank > 0) {
        const struct norm_shape norm = model_latent_norm(m, rows, q_rank, q_rank);
        model_linear(m, to->q_a, m->normed, rows,
                     &(struct linear){ROLE_Q_A, l, w->q_a, NULL, q_rank, hidden, false, m->dt});
        m->ops->norm(m->dev, m->q_a_normed,
                     &(struct norm_args){.x = to->q_a, .w = w->q_a_norm, .rstd = to->rstd_q},
                     &norm);
        model_linear(m, to->q, m->q_a_normed, rows,
                     &(struct linear){ROLE_Q_B, l, w->q_b, NULL, width, q_rank, false, m->dt});
    } else {
        model_linear(m, to->q, m->normed, rows,
                     &(struct linear){ROLE_Q, l, w->q, NULL, width, hidden, false, m->dt});
    }
    model_latent_rotate(m, l, element(m, to->q, c->head_dim - c->latent.rope), c->n_heads,
                        c->head_dim, batch, 1.0f);
}

static void latent_keys(struct model *m, int l, const struct batch_view *batch,
                        const struct latent_rows *to)
{
    const struct layer_config *c = &m->config->layers[l];
    const struct layer_weights *w = &m->weights->layers[l];
    const int rows = batch->n_tokens, rank = c->latent.rank, width = layer_latent_width(c);
    const struct norm_shape norm = model_latent_norm(m, rows, rank, width);
    void *raw = to->kv_a ? to->kv_a : to->keys;
    model_linear(
        m, raw, m->normed, rows,
        &(struct linear){ROLE_KV_A, l, w->kv_a, NULL, width, m->config->hidden, false, m->dt});
    if (raw != to->keys)
        device_copy(m->dev, to->keys, raw, (size_t)rows * (size_t)width * dtype_size(m->dt));
    m->ops->norm(m->dev, to->keys,
                 &(struct norm_args){.x = to->keys, .w = w->kv_a_norm, .rstd = to->rstd_kv}, &norm);
    model_latent_rotate(m, l, element(m, to->keys, rank), 1, width, batch, 1.0f);
}

void latent_attention(struct model *m, int l, const struct batch_view *batch,
                      const struct kv_view *kv, const struct latent_rows *rows, float *lse,
                      void *out)
{
    const void *w = m->weights->layers[l].kv_b;
    const struct latent_shape shape = model_latent_shape(m, l, batch->n_tokens);
    latent_queries(m, l, batch, rows);
    latent_keys(m, l, batch, rows);
    m->ops->latent_query(m->dev, m->qkv, rows->q, rows->keys, w, &shape);
    if (kv) {
        m->ops->kv_store(m->dev, kv, l, m->qkv, batch, &m->attn[l]);
        m->ops->attn_paged(m->dev, m->latent_out, m->qkv, kv, l, batch, &m->attn[l]);
    } else {
        m->ops->attn_packed(m->dev, m->latent_out, lse, m->qkv, batch, &m->attn[l]);
    }
    m->ops->latent_value(m->dev, out, m->latent_out, w, &shape);
}
