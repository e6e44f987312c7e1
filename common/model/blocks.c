/* blocks.c: what stands in a layer of some families where others have attention or one MLP: latent
 * attention, linear attention, experts. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/model.h"
#include <stddef.h>
#include <string.h>

// ---- latent attention ---------------------------------------------------------------------------
// Queries come from the residual stream, or in two steps with a norm between; the token's latent
// vector is normalised, its end rotated, and that is the token's key and value for all heads: the
// queries are multiplied into its space (latent_query), and what attention gives out of it
// (latent_value).

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
                                 .early = true,
                                 .scales = weights_matrix(m->weights, ROLE_KV_B, l).scales};
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
    const int rows = batch->n_tokens, q_rank = c->latent.q_rank;
    if (q_rank > 0) {
        const struct norm_shape norm = model_latent_norm(m, rows, q_rank, q_rank);
        model_linear(m, to->q_a, m->normed, rows, &(struct linear){ROLE_Q_A, l, .out = m->dt});
        m->ops->norm(m->dev, m->q_a_normed,
                     &(struct norm_args){.x = to->q_a, .w = w->q_a_norm, .rstd = to->rstd_q},
                     &norm);
        model_linear(m, to->q, m->q_a_normed, rows, &(struct linear){ROLE_Q_B, l, .out = m->dt});
    } else {
        model_linear(m, to->q, m->normed, rows, &(struct linear){ROLE_Q, l, .out = m->dt});
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
    model_linear(m, raw, m->normed, rows, &(struct linear){ROLE_KV_A, l, .out = m->dt});
    if (raw != to->keys)
        device_copy(m->dev, to->keys, raw, (size_t)rows * (size_t)width * dtype_size(m->dt));
    m->ops->norm(m->dev, to->keys,
                 &(struct norm_args){.x = to->keys, .w = w->kv_a_norm, .rstd = to->rstd_kv}, &norm);
    model_latent_rotate(m, l, element(m, to->keys, rank), 1, width, batch, 1.0f);
    if (batch->packed) model_round_kv(m, to->keys, rows, 1, width, width);
}

void latent_attention(struct model *m, int l, const struct batch_view *batch,
                      const struct kv_view *kv, const struct latent_rows *rows, float *lse,
                      void *out)
{
    const void *w = weights_matrix(m->weights, ROLE_KV_B, l).w;
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

// ---- linear attention ---------------------------------------------------------------------------

struct delta_shape model_delta_shape(const struct model *m, int l)
{
    struct delta_shape shape = m->config->layers[l].delta;
    shape.dt = m->dt;
    return shape;
}

struct norm_shape model_delta_norm_shape(const struct model *m, int l, int rows)
{
    const struct delta_shape *s = &m->config->layers[l].delta;
    return (struct norm_shape){NORM_RMS,   rows * s->n_heads,    s->head_dim,
                               s->n_heads, delta_value_width(s), m->config->norm_eps,
                               m->dt};
}

struct gate_args model_delta_gate(const struct model *m, int l, const void *x, const void *in,
                                  int rows)
{
    const struct layer_config *layer = &m->config->layers[l];
    const size_t before = (size_t)delta_conv_width(&layer->delta) * dtype_size(m->dt);
    return (struct gate_args){x,
                              (const char *)in + before,
                              rows,
                              delta_value_width(&layer->delta),
                              layer_delta_in_width(layer),
                              GATE_SILU,
                              m->dt};
}

// Linear attention by the gated delta rule (ops.h, delta_shape), as Qwen3.5 has it in three layers
// of four, from m->normed to m->attn_out: one matmul gives the convolution's input and the output's
// gate z, one the heads' gates b and a; convolution; the rule; RMSNorm of every head of its output,
// times silu(z). Serving and training run the same operations, row after row, so that a row has the
// same bits in both.
void delta_attention(struct model *m, int l, const struct batch_view *batch,
                     const struct kv_view *kv, struct layer_tape *tape)
{
    const struct layer_config *layer = &m->config->layers[l];
    const struct layer_weights *w = &m->weights->layers[l];
    const struct delta_shape shape = model_delta_shape(m, l);
    const int rows = batch->n_tokens, width = layer_delta_in_width(layer);
    void *in = tape ? tape->delta_in : m->attn_in, *out = tape ? tape->attn : m->attn_out;
    float *gates = tape ? tape->delta_gates : m->delta_gates;
    const struct delta_batch order = {batch, kv, l};
    const struct conv_args conv = {in, width, w->delta_conv, order};
    const struct delta_args rule = {m->qkv, gates, w->delta_a_log, w->delta_dt_bias, order};
    const struct norm_shape norm = model_delta_norm_shape(m, l, rows);
    const struct norm_args normed = {
        .x = out, .w = w->delta_norm, .rstd = tape ? tape->rstd_delta : NULL};
    const struct gate_args gate = model_delta_gate(m, l, m->gate, in, rows);

    model_linear(m, in, m->normed, rows, &(struct linear){ROLE_DELTA_IN, l, .out = m->dt});
    model_linear(m, gates, m->normed, rows, &(struct linear){ROLE_DELTA_GATES, l, .out = DT_F32});
    m->ops->short_conv(m->dev, m->qkv, &conv, &shape);
    m->ops->delta_rule(m->dev, out, &rule, &shape);
    m->ops->norm(m->dev, m->gate, &normed, &norm);
    m->ops->gate(m->dev, m->attn_out, &gate);
}

// ---- experts ------------------------------------------------------------------------------------

struct moe_shape model_moe_shape(const struct model *m, int l, int rows)
{
    struct moe_shape shape = m->config->layers[l].moe;
    shape.rows = rows;
    shape.width = m->config->hidden;
    shape.dt = m->dt;
    return shape;
}

struct moe_shape model_shared_shape(const struct model *m, int rows)
{
    return (struct moe_shape){.rows = rows,
                              .n_experts = 1,
                              .top_k = 1,
                              .scoring = MOE_SIGMOID,
                              .scale = 1,
                              .width = m->config->hidden,
                              .dt = m->dt};
}

// y (a, width) += each row's expert's bias, where experts have any.
static void add_experts_bias(struct model *m, void *y, const void *bias,
                             const struct moe_routing *routing, int l, int a, int width)
{
    const struct expert_rows rows = {a, m->config->layers[l].moe.n_experts, width, m->dt};
    if (bias) m->ops->experts_bias(m->dev, y, bias, routing->offsets, &rows);
}

// y (a, n) = each row times its expert's matrix.
static struct matmul experts_shape(const struct model *m, int a, const struct weight_matrix *w)
{
    return (struct matmul){.m = a,
                           .n = w->n,
                           .k = w->k,
                           .trans_b = true,
                           .in = m->dt,
                           .out = m->dt,
                           .early = true,
                           .scales = w->scales};
}

void experts_block(struct model *m, int l, int rows, struct layer_tape *tape, void *x_out)
{
    const struct model_config *c = m->config;
    const struct layer_config *layer = &c->layers[l];
    const struct layer_weights *w = &m->weights->layers[l];
    const struct moe_routing *routing = tape ? &tape->routing : &m->routing;
    const struct moe_shape shape = model_moe_shape(m, l, rows);
    const struct weight_matrix up = weights_matrix(m->weights, ROLE_EXPERTS_GATE_UP, l);
    const struct weight_matrix down = weights_matrix(m->weights, ROLE_EXPERTS_DOWN, l);
    int a = rows * shape.top_k, inner = layer->intermediate;
    float *logits = tape ? tape->router_logits : m->router_logits;
    void *gate_up = tape ? tape->gate_up : m->gate_up,
         *out = tape ? tape->expert_out : m->expert_out;
    struct matmul first = experts_shape(m, a, &up), second = experts_shape(m, a, &down);
    const struct act_shape act = model_act_shape(m, a, inner);

    model_linear(m, logits, m->normed, rows, &(struct linear){ROLE_ROUTER, l, .out = DT_F32});
    m->ops->moe_route(m->dev, routing, logits, w->router_bias, &shape);
    m->ops->gather_rows(m->dev, m->expert_in, m->normed,
                        &(struct gather_args){routing->row, a, c->hidden, 1.0f, m->dt, 0, 0});
    const void *in = model_rounded(m, m->expert_in, &up, &first);
    if (w->gate_up_bias) {
        m->ops->matmul_experts(m->dev, gate_up, in, up.w, routing->offsets, shape.n_experts,
                               &first);
        add_experts_bias(m, gate_up, w->gate_up_bias, routing, l, a, up.n);
        m->ops->act(m->dev, m->act, gate_up, &act);
    } else {
        m->ops->matmul_experts_act(m->dev, m->act, gate_up, in, up.w, routing->offsets,
                                   shape.n_experts, &first, &act, tape != NULL);
    }
    in = model_rounded(m, m->act, &down, &second);
    m->ops->matmul_experts(m->dev, out, in, down.w, routing->offsets, shape.n_experts, &second);
    if (model_begins_sum(m)) add_experts_bias(m, out, w->down_bias, routing, l, a, c->hidden);
    m->ops->moe_combine(m->dev, x_out, out, routing->place, routing->weight, &shape, true);
}

void shared_block(struct model *m, int l, int rows, struct layer_tape *tape, void *x_out)
{
    const struct model_config *c = m->config;
    const struct layer_config *layer = &c->layers[l];
    const int inner = layer->shared_intermediate;
    const struct moe_shape one = model_shared_shape(m, rows);
    const struct moe_routing *routing = tape ? &tape->shared_routing : &m->shared_routing;
    void *gate_up = tape ? tape->shared_gate_up : m->gate_up;
    void *out = tape ? tape->shared_out : m->expert_out;
    float *logits = tape ? tape->shared_logits : m->router_logits;
    struct linear down = {ROLE_SHARED_DOWN, l, .add = true, .out = m->dt};

    model_linear_act(m, m->act, gate_up, m->normed, rows,
                     &(struct linear){ROLE_SHARED_GATE_UP, l, .out = m->dt}, inner, tape != NULL);
    if (!layer->shared_gate) {
        model_linear(m, x_out, m->act, rows, &down);
        return;
    }
    down.add = false;
    model_linear(m, out, m->act, rows, &down);
    model_linear(m, logits, m->normed, rows, &(struct linear){ROLE_SHARED_GATE, l, .out = DT_F32});
    m->ops->moe_route(m->dev, routing, logits, NULL, &one);
    m->ops->moe_combine(m->dev, x_out, out, routing->place, routing->weight, &one, true);
}
