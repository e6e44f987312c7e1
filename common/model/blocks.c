/* blocks.c: what stands in a layer of some families where others have attention or one MLP: latent
 * attention, linear attention, experts. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/model.h"
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

// ---- latent attention ---------------------------------------------------------------------------
// Queries come from the residual stream, or in two steps with a norm between; the token's latent
// vector is normalised, its end rotated, and that is the token's key and value for all heads: the
// queries are multiplied into its space, and what attention gives out of it (latent_matmul).

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
    struct norm_shape shape = model_norms(m, rows, 1, width, stride);
    shape.eps = 1e-6f; // in published models, whatever their rms_norm_eps
    return shape;
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
    const int rows = batch->n_tokens, q_rank = c->latent.q_rank;
    if (q_rank > 0) {
        const struct norm_shape norm = model_latent_norm(m, rows, q_rank, q_rank);
        const struct norm_args of_q = model_norm(m, ROLE_Q_A_NORM, l, to->q_a, to->rstd_q);
        model_linear(m, to->q_a, m->normed, rows, &(struct linear){ROLE_Q_A, l, .out = m->dt});
        m->ops->norm(m->dev, m->q_a_normed, &of_q, &norm);
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
    const int rows = batch->n_tokens, rank = c->latent.rank, width = layer_latent_width(c);
    const struct norm_shape norm = model_latent_norm(m, rows, rank, width);
    const struct norm_args of_keys = model_norm(m, ROLE_KV_A_NORM, l, to->keys, to->rstd_kv);
    void *raw = to->kv_a ? to->kv_a : to->keys;
    model_linear(m, raw, m->normed, rows, &(struct linear){ROLE_KV_A, l, .out = m->dt});
    if (raw != to->keys)
        device_copy(m->dev, to->keys, raw, (size_t)rows * (size_t)width * dtype_size(m->dt));
    m->ops->norm(m->dev, to->keys, &of_keys, &norm);
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
    m->ops->latent_matmul(m->dev, m->qkv, rows->q, rows->keys, w, &shape);
    struct rope_args store = rope_of_batch(NULL, 0, batch, &m->attn[l], 1);
    store.kv = kv;
    store.layer = l;
    if (kv) m->ops->rope(m->dev, m->qkv, &store);
    m->ops->attn(m->dev, m->latent_out, lse, m->qkv, kv, l, batch, &m->attn[l]);
    m->ops->latent_matmul(m->dev, out, m->latent_out, NULL, w, &shape);
}

// ---- linear attention ---------------------------------------------------------------------------

struct delta_shape model_delta_shape(const struct model *m, int l)
{
    struct delta_shape shape = m->config->layers[l].delta;
    shape.dt = m->dt;
    return shape;
}

// Of the gated delta rule the values are normalised, each head's, and gated. Mamba-2 gates them
// before, and normalises those of each group. A short convolution alone stands between two gates:
// one matmul gives these and what is gated.
struct delta_layer model_delta_layer(const struct model *m, int l, const struct delta_batch *batch,
                                     const struct layer_tape *tape)
{
    const struct layer_config *layer = &m->config->layers[l];
    const struct layer_weights *w = &m->weights->layers[l];
    const struct delta_shape s = model_delta_shape(m, l);
    const bool is_conv = delta_is_conv(&s);
    const int rows = batch->view->n_tokens, width = delta_value_width(&s),
              stride = layer_delta_in_width(layer), n = s.is_scan ? s.n_key_heads : s.n_heads;
    const size_t e = dtype_size(m->dt), value = (size_t)width * e,
                 behind = s.is_scan ? 0 : (size_t)delta_conv_width(&s) * e;
    char *in = tape ? tape->delta_in : m->attn_in;
    void *out = tape ? tape->attn : m->attn_out;
    float *gates = tape ? tape->delta_gates : m->delta_gates;
    const void *steps = in + (size_t)(stride - s.n_heads) * e;
    const void *gated = is_conv ? m->qkv : s.is_scan ? out : m->gate;
    return (struct delta_layer){
        .shape = s,
        .in = in,
        .gates = layer_delta_gates_width(layer) > 0 ? gates : NULL,
        .out = out,
        .before = model_gate(m, ACT_LINEAR, rows, width, stride, in + 2 * value, stride),
        .conv = {is_conv ? m->gate : in + (s.is_scan ? value : 0), is_conv ? width : stride,
                 w->at[ROLE_DELTA_CONV], *batch, w->at[ROLE_DELTA_CONV_BIAS]},
        .rule = {m->qkv, s.is_scan ? steps : gates, w->at[ROLE_DELTA_A_LOG],
                 w->at[ROLE_DELTA_DT_BIAS], *batch, stride, w->at[ROLE_DELTA_SKIP]},
        .z = in + behind,
        .behind = model_gate(m, is_conv ? ACT_LINEAR : ACT_SILU, rows, width, stride, gated, width),
        .norm = model_norm(m, ROLE_DELTA_NORM, l, s.is_scan ? m->gate : out,
                           tape ? tape->rstd_delta : NULL),
        .heads = {NORM_RMS, rows * n, width / n, n, width, m->config->norm_eps, m->dt, s.is_scan}};
}

void model_delta_convolve(struct model *m, const struct delta_layer *d)
{
    if (delta_is_conv(&d->shape)) m->ops->act(m->dev, m->gate, d->in, &d->before);
    m->ops->short_conv(m->dev, m->qkv, &d->conv, &d->shape);
}

void model_delta_finish(struct model *m, const struct delta_layer *d)
{
    const bool is_scan = d->shape.is_scan;
    if (is_scan) m->ops->act(m->dev, m->gate, d->z, &d->behind);
    if (!delta_is_conv(&d->shape))
        m->ops->norm(m->dev, is_scan ? m->attn_out : m->gate, &d->norm, &d->heads);
    if (!is_scan) m->ops->act(m->dev, m->attn_out, d->z, &d->behind);
}

// Where the first matmuls of linear attention give each key head's parts in turn: the order of a
// row's entries with all heads' in place of it, part after part, and back. widths: of the parts of
// one head.
static enum status arrange(struct model *m, int heads, const int *widths, int n_parts,
                           struct arrangement *ret)
{
    int unit = widths[0], of_head = 0; // unit: the greatest common divisor of the widths
    for (int i = 0; i < n_parts; of_head += widths[i++])
        for (int b = widths[i], rest; b > 0; unit = b, b = rest) rest = unit % b;
    const int n = of_head / unit * heads;
    const size_t bytes = (size_t)m->max_tokens * (size_t)n * sizeof(int32_t);
    int32_t *first = malloc((size_t)n * sizeof *first), *order = malloc(bytes), *to = first;
    enum status st = ST_OK;
    if (!first || !order) FAIL(ST_NO_MEMORY, "no memory for the order of %d tokens", m->max_tokens);
    for (int i = 0, before = 0; i < n_parts; before += widths[i++])
        for (int head = 0; head < heads; head++)
            for (int k = 0; k < widths[i] / unit; k++) *to++ = (head * of_head + before) / unit + k;
    *ret = (struct arrangement){.unit = unit, .n = n};
    for (int back = 0; back < 2; back++) {
        for (int i = 0; i < m->max_tokens * n; i++)
            order[back ? i / n * n + first[i % n] : i] = i / n * n + (back ? i % n : first[i % n]);
        CHECK(device_alloc(m->dev, bytes, (void **)&ret->order[back]));
        device_copy_in(m->dev, ret->order[back], order, bytes);
        CHECK(device_sync(m->dev));
        m->scratch_bytes += bytes;
    }
out:
    free(first);
    free(order);
    return st;
}

enum status model_arrange_init(struct model *m)
{
    const struct layer_config *l = m->config->layers, *end = l + m->config->n_layers;
    enum status st;
    while (l < end && l->delta.n_heads == 0) l++; // all that have any have one shape
    if (l == end) return ST_OK;
    const int heads = l->delta.n_heads / l->delta.n_key_heads, values = heads * l->delta.head_dim;
    const int in[] = {l->delta.key_dim, l->delta.key_dim, values, values}, gates[] = {heads, heads};
    CHECK(arrange(m, l->delta.n_key_heads, in, 4, &m->arranged[0]));
    st = arrange(m, l->delta.n_key_heads, gates, 2, &m->arranged[1]);
out:
    return st;
}

void model_arrange(struct model *m, void *y, const void *x, int rows, enum tensor_role role,
                   enum dtype dt, bool back)
{
    const struct arrangement *a = &m->arranged[role == ROLE_DELTA_GATES];
    m->ops->gather_rows(
        m->dev, y, x, &(struct gather_args){a->order[back], rows * a->n, a->unit, 1.0f, dt, 0, 0});
}

// y of dt = one of the first matmuls, of m->normed.
static void delta_linear(struct model *m, int l, void *y, int rows, enum tensor_role role,
                         enum dtype dt)
{
    const bool grouped = m->config->block & DELTA_GROUPED;
    model_linear(m, grouped ? m->grouped : y, m->normed, rows,
                 &(struct linear){role, l, .out = dt});
    if (grouped) model_arrange(m, y, m->grouped, rows, role, dt, false);
}

// Linear attention by the gated delta rule (ops.h, delta_shape), as Qwen3.5 has it in three layers
// of four, from m->normed to m->attn_out: one matmul gives the convolution's input and the output's
// gate z, one the heads' gates b and a; convolution; the rule; RMSNorm of every head of its output,
// times silu(z). Of Mamba-2 one matmul gives z, the convolution's input and the heads' steps; LFM2
// has the convolution alone. Serving and training run the same operations, in which a row's sums
// have one order (delta_rule), so that it has the same bits in both.
void delta_attention(struct model *m, int l, const struct batch_view *batch,
                     const struct kv_view *kv, struct layer_tape *tape)
{
    const struct delta_layer d = model_delta_layer(m, l, &(struct delta_batch){batch, kv, l}, tape);
    const int rows = batch->n_tokens;
    delta_linear(m, l, d.in, rows, ROLE_DELTA_IN, m->dt);
    if (d.gates) delta_linear(m, l, d.gates, rows, ROLE_DELTA_GATES, DT_F32);
    model_delta_convolve(m, &d);
    if (!delta_is_conv(&d.shape)) m->ops->delta_rule(m->dev, d.out, &d.rule, &d.shape);
    model_delta_finish(m, &d);
}

// ---- experts ------------------------------------------------------------------------------------

struct moe_shape model_moe_shape(const struct model *m, int l, int rows)
{
    struct moe_shape shape = m->config->layers[l].moe;
    shape.rows = rows;
    shape.width = layer_expert_width(m->config, &m->config->layers[l]);
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

// y (m, n) += each row's expert's bias, where experts have any.
static void add_experts_bias(struct model *m, void *y, const void *bias, const struct matmul *shape)
{
    const struct expert_rows rows = {shape->m, shape->n_experts, shape->n, m->dt};
    if (bias) m->ops->experts_bias(m->dev, y, bias, shape->offsets, &rows);
}

void model_experts_matmul(struct model *m, int l, void *y, const void *x, const void *w,
                          const void *bias, const struct matmul *shape)
{
    const bool whole = layer_splits_experts(m->config, &m->config->layers[l]);
    const size_t n = (size_t)shape->m * (size_t)shape->n;
    if (whole) device_fill(m->dev, y, 0, n * dtype_size(m->dt));
    m->ops->matmul(m->dev, y, x, w, NULL, shape);
    add_experts_bias(m, y, bias, shape);
    if (whole) comm_all_reduce(m->comm, y, n, m->dt);
}

struct matmul model_experts_shape(const struct model *m, int l, const struct moe_routing *r, int a,
                                  const struct weight_matrix *w, bool back)
{
    const struct layer_config *layer = &m->config->layers[l];
    return (struct matmul){.m = a,
                           .n = back ? w->k : w->n,
                           .k = back ? w->n : w->k,
                           .trans_b = !back,
                           .in = m->dt,
                           .out = m->dt,
                           .early = !back,
                           .scales = w->scales,
                           .mx_scales = w->mx_scales,
                           .offsets = r->offsets + layer_first_expert(m->config, layer),
                           .n_experts = layer_own_experts(m->config, layer)};
}

const void *experts_input(struct model *m, int l, int rows)
{
    if (m->config->layers[l].expert_latent == 0) return m->normed;
    model_linear(m, m->latent_in, m->normed, rows,
                 &(struct linear){ROLE_EXPERTS_IN, l, .out = m->dt});
    return m->latent_in;
}

float model_router_scale(const struct model *m)
{
    return m->config->block & EXPERTS_BESIDE ? 1 / sqrtf((float)m->config->hidden) : 1;
}

struct act_shape model_expert_gate(const struct model *m, int l, const struct moe_routing *r,
                                   int rows)
{
    const int k = m->config->layers[l].moe.top_k;
    struct act_shape gate = model_gate(m, ACT_LINEAR, rows, k, k, r->weight, k);
    gate.dt = DT_F32;
    return gate;
}

float *model_expert_weights(struct model *m, int l, const struct moe_routing *r, int rows)
{
    const void *scale = m->weights->layers[l].at[ROLE_EXPERT_SCALE];
    const int a = rows * m->config->layers[l].moe.top_k;
    const struct act_shape gate = model_expert_gate(m, l, r, rows);
    float *scales = m->expert_scales, *weights = scales + a;
    if (!scale) return r->weight;
    m->ops->gather_rows(m->dev, weights, scale,
                        &(struct gather_args){r->expert, a, 1, 1.0f, m->dt, 0, 0});
    m->ops->convert(m->dev, scales, DT_F32, weights, m->dt, a);
    m->ops->act(m->dev, weights, m->expert_scales, &gate);
    return weights;
}

float *model_sort_by_expert(struct model *m, int l, const struct moe_routing *r, int rows)
{
    const int k = m->config->layers[l].moe.top_k, a = rows * k;
    const struct moe_shape one = {.rows = rows, .top_k = k, .width = 1, .dt = DT_F32};
    float *ones = m->expert_scales, *list = ones + a, *sorted = list + a;
    struct moe_routing by_list = *r;
    by_list.weight = list;
    device_fill(m->dev, ones, 0x7f, (size_t)rows * sizeof *ones); // large numbers, whose tanh is 1
    m->ops->softcap(m->dev, ones, rows, 1, 1);
    m->ops->moe_combine_back(m->dev, sorted, sorted + a, ones, list, &by_list, &one);
    return sorted;
}

void experts_block(struct model *m, int l, int rows, struct layer_tape *tape, const void *x,
                   void *x_out)
{
    const struct layer_config *layer = &m->config->layers[l];
    const struct layer_weights *w = &m->weights->layers[l];
    const struct moe_routing *routing = tape ? &tape->routing : &m->routing;
    const struct moe_shape shape = model_moe_shape(m, l, rows);
    const struct weight_matrix up = weights_matrix(m->weights, ROLE_EXPERTS_GATE_UP, l);
    const struct weight_matrix down = weights_matrix(m->weights, ROLE_EXPERTS_DOWN, l);
    int a = rows * shape.top_k, inner = layer->intermediate;
    float *logits = tape ? tape->router_logits : m->router_logits;
    void *gate_up = tape ? tape->gate_up : m->gate_up,
         *out = tape ? tape->expert_out : m->expert_out;
    struct matmul first = model_experts_shape(m, l, routing, a, &up, false),
                  second = model_experts_shape(m, l, routing, a, &down, false);
    const struct act_shape act = model_act_shape(m, a, inner);

    const struct norm_args of_router = model_branch_norm(m, ROLE_ROUTER_NORM, l, x, tape),
                           of_experts = model_branch_norm(m, ROLE_EXPERTS_NORM, l, x, tape);

    if (of_router.w) model_normalise(m, m->normed, rows, &of_router);
    model_linear(m, logits, m->normed, rows, &(struct linear){ROLE_ROUTER, l, .out = DT_F32});
    if (of_router.w)
        m->ops->softcap(m->dev, logits, (int64_t)rows * shape.n_experts, 0, model_router_scale(m));
    m->ops->moe_route(m->dev, routing, logits, w->at[ROLE_ROUTER_BIAS], &shape);
    if (of_experts.w) model_normalise(m, m->normed, rows, &of_experts);
    m->ops->gather_rows(m->dev, m->expert_in, experts_input(m, l, rows),
                        &(struct gather_args){routing->row, a, shape.width, 1.0f, m->dt, 0, 0});
    const void *in = model_rounded(m, m->expert_in, &up, &first);
    if (up.bias) {
        m->ops->matmul(m->dev, gate_up, in, up.w, NULL, &first);
        add_experts_bias(m, gate_up, up.bias, &first);
        m->ops->act(m->dev, m->act, gate_up, &act);
    } else {
        first.act = &act;
        first.x = gate_up;
        first.keep = tape != NULL;
        m->ops->matmul(m->dev, m->act, in, up.w, NULL, &first);
    }
    in = model_rounded(m, m->act, &down, &second);
    model_experts_matmul(m, l, out, in, down.w, model_begins_mlp(m, l) ? down.bias : NULL, &second);
    const bool latent = layer->expert_latent > 0;
    m->ops->moe_combine(m->dev, latent ? m->latent_sum : x_out, out, routing->place,
                        model_expert_weights(m, l, routing, rows), &shape, !latent);
    if (latent)
        model_linear(m, x_out, m->latent_sum, rows,
                     &(struct linear){ROLE_EXPERTS_OUT, l, .add = true, .out = m->dt});
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
