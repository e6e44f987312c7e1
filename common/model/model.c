/* model.c: the forward pass, once, for prefill, decode, verification and training.
 *
 * A layer is: norm, qkv matmul, (q/k norm), rope, attention, output matmul, added to the residual
 * stream; norm, (gate and) up matmul, activation, down matmul, added to the residual stream. What
 * families vary (config.h) is asked where it matters: a parallel block's MLP reads attention's
 * input, a post-norm stands before an addition, experts stand in for the one MLP. In training
 * every tensor a backward pass needs is written straight into the tape instead of into scratch; the
 * arithmetic is the same.
 *
 * Order. Nothing here writes weights, a matmul of weights never comes first (a look-up of rows or a
 * norm does), and between routing and the experts' matmul stands a look-up: so every one of them
 * may begin with its weights, and a decode step's attention with the batch's lists, while the
 * operation before ends (`early`, ops.h).
 *
 * One thread, the owner of the device. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/model.h"
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

// ---- a model ------------------------------------------------------------------------------------
// Lists of buffers return how many they are.
int model_routing_parts(int n_experts, size_t a, size_t base, struct device_part *ret)
{
    size_t i32 = sizeof(int32_t);
    ret[0] = (struct device_part){base + offsetof(struct moe_routing, expert), a * i32};
    ret[1] = (struct device_part){base + offsetof(struct moe_routing, weight), a * sizeof(float)};
    ret[2] = (struct device_part){base + offsetof(struct moe_routing, row), a * i32};
    ret[3] = (struct device_part){base + offsetof(struct moe_routing, place), a * i32};
    ret[4] = (struct device_part){base + offsetof(struct moe_routing, offsets),
                                  n_experts > 0 ? ((size_t)n_experts + 1) * i32 : 0};
    return 5;
}

#define MAX_SCRATCH 54
#define SCRATCH(name, size)                                                                        \
    {                                                                                              \
        offsetof(struct model, name), (size)                                                       \
    }

static size_t logits_bytes(const struct model_config *c, size_t rows)
{
    const size_t bytes = rows * (size_t)c->vocab_size * sizeof(float), page = COMM_SHARED_PAGE;
    return c->shard.size > 1 ? (bytes + page - 1) / page * page : bytes;
}

// Elements of what the layer's matmuls read, where that is rounded to e4m3.
static size_t layer_codes(const struct model *m, const struct layer_config *l)
{
    const struct model_config *c = m->config;
    const size_t t = (size_t)m->max_tokens;
    const size_t rows[] = {layer_mlp_rows(l, t) * (size_t)c->hidden, layer_mlp_elements(l, t),
                           t * (size_t)layer_attn_width(l), t * (size_t)l->latent.q_rank};
    size_t most = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i] > most) most = rows[i];
    return c->quantization == QUANTIZATION_FP8 ? most : 0;
}

size_t model_codes(const struct model *m)
{
    size_t most = 0;
    for (int l = 0; l < m->config->n_layers; l++) {
        const size_t n = layer_codes(m, &m->config->layers[l]);
        if (n > most) most = n;
    }
    return most;
}

// What one layer, and the head, want.
static int layer_scratch(const struct model *m, const struct layer_config *l,
                         struct device_part ret[MAX_SCRATCH])
{
    const struct model_config *c = m->config;
    size_t e = dtype_size(m->dt), t = (size_t)m->max_tokens, r = (size_t)m->max_rows,
           h = (size_t)c->hidden, head = (size_t)(c->shard.size * config_head_rows(c));
    size_t a = layer_mlp_rows(l, t), inner = layer_mlp_elements(l, t),
           expert = layer_expert_elements(c, l, t) * e;
    const int absorbed = (l->n_heads + 1) * layer_latent_width(l);
    const size_t qkv =
        (size_t)(l->latent.rank > 0 ? absorbed : layer_qkv_width(l) + delta_conv_width(&l->delta));
    const size_t gates = (size_t)layer_delta_gates_width(l) * sizeof(float),
                 delta_in = (size_t)layer_delta_in_width(l) * e,
                 grouped = delta_in > gates ? delta_in : gates;
    const int gated = c->block & ATTN_GATE ? layer_q_width(l) : 0;
    const struct device_part parts[] = {
        SCRATCH(x, t * h * e),
        SCRATCH(normed, t * h * e),
        SCRATCH(hidden_in, c->mtp ? t * h * e : 0),
        SCRATCH(mtp_in, c->mtp ? 2 * t * h * e : 0),
        SCRATCH(qkv, t * qkv * e),
        SCRATCH(attn_out, t * (size_t)layer_attn_width(l) * e),
        SCRATCH(attn_in, t * (size_t)layer_before_attn_width(c, l) * e),
        SCRATCH(all_heads, t * (size_t)layer_all_heads_width(c, l) * e),
        SCRATCH(heads_parts, t * (size_t)layer_all_heads_width(c, l) * e),
        SCRATCH(kv[0], l->kv_shared == 0 ? 2 * t * (size_t)layer_kv_width(l) * e : 0),
        SCRATCH(kv[1], l->kv_shared == 1 ? 2 * t * (size_t)layer_kv_width(l) * e : 0),
        SCRATCH(inputs, t * (size_t)config_layer_inputs(c) * e),
        SCRATCH(inputs_in, t * (size_t)config_layer_inputs(c) * e),
        SCRATCH(own_gate, t * (size_t)c->layer_input * e),
        SCRATCH(own_act, t * (size_t)c->layer_input * e),
        SCRATCH(gate, t * (size_t)(gated + delta_value_width(&l->delta)) * e),
        SCRATCH(delta_gates, t * gates),
        SCRATCH(grouped, c->block & DELTA_GROUPED ? t * grouped : 0),
        SCRATCH(q_a_normed, t * (size_t)l->latent.q_rank * e),
        SCRATCH(latent_out, t * (size_t)(l->n_heads * l->latent.rank) * e),
        SCRATCH(gate_up, inner * 2 * e),
        SCRATCH(act, inner * e),
        SCRATCH(block, config_scales_branches(c) ? t * h * e : 0),
        SCRATCH(beside, c->block & EXPERTS_BESIDE ? t * h * e : 0),
        SCRATCH(expert_scales, c->block & EXPERTS_BESIDE ? 4 * a * sizeof(float) : 0),
        SCRATCH(expert_in, expert),
        SCRATCH(expert_out, expert),
        SCRATCH(latent_in, t * (size_t)l->expert_latent * e),
        SCRATCH(latent_sum, t * (size_t)l->expert_latent * e),
        SCRATCH(router_logits, t * (size_t)l->moe.n_experts * sizeof(float)),
        SCRATCH(row_x, r * h * e),
        SCRATCH(row_normed, r * h * e),
        SCRATCH(row_rstd, 2 * r * sizeof(float)), // and row_mean
        SCRATCH(logits, logits_bytes(c, r)),
        SCRATCH(logit_parts, c->shard.size > 1 ? r * head * sizeof(float) : 0),
        SCRATCH(logits_of_all, head > (size_t)c->vocab_size ? r * head * sizeof(float) : 0),
        SCRATCH(codes, layer_codes(m, l)),
        SCRATCH(code_scales, layer_codes(m, l) > 0 ? a : 0),
    };
    int n = sizeof parts / sizeof *parts;
    memcpy(ret, parts, sizeof parts);
    n += latent_rows_parts(l, m->dt, t, offsetof(struct model, latent), false, ret + n);
    n += model_routing_parts(l->moe.n_experts, t * (size_t)l->moe.top_k,
                             offsetof(struct model, routing), ret + n);
    return n + model_routing_parts(l->shared_gate, l->shared_gate ? t : 0,
                                   offsetof(struct model, shared_routing), ret + n);
}

static int scratch_parts(const struct model *m, struct device_part ret[MAX_SCRATCH])
{
    struct device_part one[MAX_SCRATCH];
    const int n = layer_scratch(m, &m->config->layers[0], ret);
    for (int l = 1; l < m->config->n_layers; l++) {
        layer_scratch(m, &m->config->layers[l], one);
        device_parts_widen(ret, one, n);
    }
    return n;
}

static enum status alloc_scratch(struct model *m)
{
    struct device_part parts[MAX_SCRATCH];
    const int n = scratch_parts(m, parts);
    enum status st = device_alloc_parts(m->dev, m, parts, n);
    if (st != ST_OK)
        return status_context(st, "model scratch for %d tokens and %d rows of logits",
                              m->max_tokens, m->max_rows);
    m->scratch_bytes = device_parts_bytes(parts, n);
    m->row_mean = m->row_rstd + m->max_rows;
    if (m->hidden_in)
        device_fill(m->dev, m->hidden_in, 0,
                    (size_t)m->max_tokens * (size_t)m->config->hidden * dtype_size(m->dt));
    return ST_OK;
}

static enum status upload_rope(struct model *m, int i)
{
    const struct rope_config *rope = &m->config->ropes[i];
    size_t bytes = (size_t)m->max_context * (size_t)(rope->dim / 2) * 2 * sizeof(float);
    float *table = rope_table(m->config, i, m->max_context);
    enum status st = ST_OK;
    if (!table)
        return status_fail(ST_NO_MEMORY, "no memory for the rope table of %d positions",
                           m->max_context);
    CHECK(device_alloc(m->dev, bytes, (void **)&m->ropes[i]));
    device_copy_in(m->dev, m->ropes[i], table, bytes);
    st = device_sync(m->dev);
    m->scratch_bytes += bytes;
out:
    free(table);
    return st;
}

enum status model_new(struct device *dev, const struct model_config *config,
                      const struct weights *w, int max_tokens, int max_rows, int max_context,
                      struct model **ret)
{
    struct model *m = calloc(1, sizeof *m);
    enum status st = ST_OK;
    if (!m) return status_fail(ST_NO_MEMORY, "no memory for a model");
    m->dev = dev;
    m->ops = device_ops(dev);
    m->config = config;
    m->weights = w;
    m->dt = w->dt;
    m->max_tokens = max_tokens;
    m->max_rows = max_rows;
    m->max_context = max_context;
    if (!device_computes_in(dev, w->dt))
        FAIL(ST_UNSUPPORTED, "%s does not compute in %s; use --dtype f32", device_spec(dev),
             dtype_name(w->dt));
    if (w->twin && !device_computes_in(dev, DT_E4M3))
        FAIL(ST_UNSUPPORTED, "%s does not multiply weights in e4m3", device_spec(dev));
    m->attn = calloc((size_t)config->n_layers, sizeof *m->attn);
    if (!m->attn) FAIL(ST_NO_MEMORY, "no memory for a model");
    for (int i = 0; i < config->n_layers; i++) {
        const struct layer_config *l = &config->layers[i];
        m->attn[i] = (struct attn_shape){.n_heads = l->n_heads,
                                         .n_kv_heads = l->n_kv_heads,
                                         .head_dim = l->head_dim,
                                         .scale = l->attn_scale,
                                         .softcap = l->attn_softcap,
                                         .window = l->window,
                                         .dt = m->dt,
                                         .early = true};
        if (l->latent.rank > 0) {
            m->attn[i].n_kv_heads = 1;
            m->attn[i].head_dim = layer_latent_width(l);
            m->attn[i].latent = l->latent.rank;
        }
    }
    CHECK(alloc_scratch(m));
    for (int i = 0; i < config->n_ropes; i++) CHECK(upload_rope(m, i));
    if (config->block & DELTA_GROUPED) CHECK(model_arrange_init(m));
    *ret = TAKE_PTR(m);
out:
    model_free(m);
    return st;
}

void model_free(struct model *m)
{
    if (!m) return;
    struct device_part parts[MAX_SCRATCH];
    const int n = scratch_parts(m, parts);
    if (m->shares_logits && comm_shares(m->comm, m->logits)) m->logits = NULL;
    device_release_parts(m->dev, m, parts, n);
    for (int i = 0; i < MAX_ROPES; i++) device_release(m->dev, m->ropes[i]);
    for (int i = 0; i < 4; i++) device_release(m->dev, m->arranged[i / 2].order[i % 2]);
    free(m->attn);
    free(m);
}

enum status model_share_logits(struct model *m, char *ret_why, size_t size)
{
    m->shares_logits = true;
    return comm_share(m->comm, m->logits, logits_bytes(m->config, (size_t)m->max_rows), ret_why,
                      size);
}

// ---- shapes -------------------------------------------------------------------------------------
struct norm_shape model_norms(const struct model *m, int rows, int n, int width, int stride)
{
    const struct model_config *c = m->config;
    return (struct norm_shape){c->norm, rows * n, width, n, stride, c->norm_eps, m->dt, false};
}

struct norm_shape model_norm_shape(const struct model *m, int rows)
{
    return model_norms(m, rows, 1, m->config->hidden, m->config->hidden);
}

struct norm_shape model_heads_shape(const struct model *m, int l, int rows, int n)
{
    const struct model_config *c = m->config;
    const struct layer_config *layer = &c->layers[l];
    return model_norms(m, rows, layer_qk_norms(c, n), layer_qk_norm_width(c, layer, n),
                       layer_qkv_width(layer));
}

struct act_shape model_gate(const struct model *m, enum act_kind kind, int rows, int width,
                            int64_t gate_stride, const void *up, int64_t up_stride)
{
    return (struct act_shape){.rows = rows,
                              .width = width,
                              .kind = kind,
                              .gated = true,
                              .dt = m->dt,
                              .up = up,
                              .gate_stride = gate_stride,
                              .up_stride = up_stride};
}

struct act_shape model_attn_gate(const struct model *m, int l, const void *x, int rows)
{
    const int width = layer_q_width(&m->config->layers[l]);
    return model_gate(m, ACT_SIGMOID, rows, width, width, x, width);
}

struct act_shape model_act_shape(const struct model *m, int rows, int inner)
{
    const struct model_config *c = m->config;
    return (struct act_shape){.rows = rows,
                              .width = inner,
                              .kind = c->act,
                              .gated = !(c->block & PLAIN_MLP),
                              .dt = m->dt,
                              .alpha = c->act_alpha,
                              .limit = c->act_limit};
}

struct norm_shape model_inputs_norm(const struct model *m, int rows)
{
    const struct model_config *c = m->config;
    struct norm_shape shape =
        model_norms(m, rows, c->n_layers, c->layer_input, config_layer_inputs(c));
    // what is normalised is meant divided by sqrt(hidden): by eps it is
    shape.eps *= (float)c->hidden;
    return shape;
}

struct act_shape model_own_act(const struct model *m, int rows)
{
    struct act_shape shape = model_act_shape(m, rows, m->config->layer_input);
    shape.gated = false;
    return shape;
}

struct act_shape model_own_gate(const struct model *m, int rows)
{
    const int width = m->config->layer_input;
    return model_gate(m, ACT_LINEAR, rows, width, config_layer_inputs(m->config), m->own_act,
                      width);
}

const void *model_own_inputs(const struct model *m, int l, const void *inputs)
{
    return (const char *)inputs + (size_t)(l * m->config->layer_input) * dtype_size(m->dt);
}

struct head_args model_head_args(const struct model *m, int first, const int32_t *targets, int n,
                                 float temperature)
{
    const float *logits = model_head_rows(m, first).logits;
    return (struct head_args){logits, targets, n, m->config->vocab_size, temperature};
}

bool model_begins_sum(const struct model *m)
{
    return m->config->shard.rank == 0;
}

void model_sum_ranks(struct model *m, void *x, int rows)
{
    comm_all_reduce(m->comm, x, (size_t)rows * (size_t)m->config->hidden, m->dt);
}

bool model_begins_mlp(const struct model *m, int l)
{
    return layer_splits_experts(m->config, &m->config->layers[l]) || model_begins_sum(m);
}

void model_sum_mlp(struct model *m, int l, void *x, size_t n, enum dtype dt)
{
    if (!layer_splits_experts(m->config, &m->config->layers[l])) comm_all_reduce(m->comm, x, n, dt);
}

// ---- the forward pass ---------------------------------------------------------------------------
// The matrix, and the shape of its matmul.
static struct weight_matrix linear_matrix(const struct model *m, int rows, const struct linear *l,
                                          struct matmul *ret)
{
    struct weight_matrix w = weights_matrix(m->weights, l->role, l->layer);
    if (l->no_bias) w.bias = NULL;
    *ret = (struct matmul){.m = rows,
                           .n = w.n,
                           .k = w.k,
                           .trans_b = true,
                           .beta = l->add,
                           .in = m->dt,
                           .out = l->out,
                           .early = true,
                           .scales = w.scales};
    return w;
}

const void *model_rounded(struct model *m, const void *x, const struct weight_matrix *w,
                          struct matmul *shape)
{
    if (!w->rounds) return x;
    m->ops->quantise(m->dev, m->codes, m->code_scales, x, shape->m, shape->k, m->dt, NULL, 0);
    shape->a_scales = m->code_scales;
    return m->codes;
}

// The same of a matrix whose x may be there already.
static const void *left_rows(struct model *m, const void *x, const struct linear *l,
                             const struct weight_matrix *w, struct matmul *shape)
{
    if (!l->rounded || !w->rounds) return model_rounded(m, x, w, shape);
    shape->a_scales = m->code_scales;
    return m->codes;
}

static bool is_adapted(const struct model *m, int rows, const struct linear *l,
                       struct lora_args *ret)
{
    return m->adapters &&
           adapter_table_args(m->adapters, l->role, l->layer, rows, m->row_adapter, ret);
}

// of: which rows of the batch x's are (device); NULL: all, in order. parts: y (rows, ranks * n) is
// put together of the ranks' parts there; NULL: y is this rank's own.
static void linear_of(struct model *m, void *y, const void *x, int rows, const int32_t *of,
                      const struct linear *l, void *parts)
{
    struct matmul shape;
    const struct weight_matrix w = linear_matrix(m, rows, l, &shape);
    const void *a = left_rows(m, x, l, &w, &shape);
    struct lora_args adapters;
    if (!is_adapted(m, rows, l, &adapters)) {
        shape.columns = parts ? m->comm : NULL;
        shape.parts = parts;
        m->ops->matmul(m->dev, y, a, w.w, w.bias, &shape);
        return;
    }
    const size_t width = (size_t)w.n * dtype_size(l->out), part = (size_t)rows * width;
    void *own = parts ? (char *)parts + (size_t)comm_rank(m->comm) * part : y;
    m->ops->matmul(m->dev, own, a, w.w, w.bias, &shape);
    adapters.row = of;
    adapters.out = l->out;
    m->ops->lora(m->dev, own, x, &adapters);
    if (parts) comm_gather_columns(m->comm, y, parts, (size_t)rows, width);
}

void model_linear(struct model *m, void *y, const void *x, int rows, const struct linear *l)
{
    linear_of(m, y, x, rows, NULL, l, NULL);
}

void model_linear_act(struct model *m, void *y, void *gate_up, const void *x, int rows,
                      const struct linear *l, int inner, bool keep)
{
    struct matmul shape;
    const struct weight_matrix w = linear_matrix(m, rows, l, &shape);
    const struct act_shape act = model_act_shape(m, rows, inner);
    struct lora_args adapters;
    if (is_adapted(m, rows, l, &adapters)) {
        model_linear(m, gate_up, x, rows, l);
        m->ops->act(m->dev, y, gate_up, &act);
        return;
    }
    const void *a = left_rows(m, x, l, &w, &shape);
    shape.act = &act;
    shape.x = gate_up;
    shape.keep = keep;
    m->ops->matmul(m->dev, y, a, w.w, w.bias, &shape);
}

static void copy_rows(struct model *m, void *to, const void *from, int rows, int width)
{
    if (to != from) device_copy(m->dev, to, from, (size_t)rows * (size_t)width * dtype_size(m->dt));
}

void model_normalise(struct model *m, void *y, int rows, const struct norm_args *args)
{
    const struct norm_shape shape = model_norm_shape(m, rows);
    if (args->w)
        m->ops->norm(m->dev, y, args, &shape);
    else
        copy_rows(m, y, args->x, rows, m->config->hidden);
}

struct norm_args model_norm(const struct model *m, enum tensor_role role, int l, const void *x,
                            float *rstd)
{
    const struct weight_matrix w = weights_matrix(m->weights, role, l);
    return (struct norm_args){.x = x, .w = w.w, .b = w.bias, .rstd = rstd};
}

struct norm_args model_branch_norm(const struct model *m, enum tensor_role role, int l,
                                   const void *x, const struct layer_tape *tape)
{
    const bool first = role == ROLE_ATTN_NORM;
    struct norm_args args = model_norm(m, role, l, x, NULL);
    if (!tape) return args;
    args.rstd = first ? tape->rstd1 : tape->rstd2;
    args.mean = first ? tape->mean1 : tape->mean2;
    return args;
}

// m->normed, for a matrix of layer l: where that wants rows in e4m3 these are in m->codes as well,
// until the next matmul. args has room for them.
static bool normalise_for(struct model *m, enum tensor_role role, int l, int rows,
                          struct norm_args args)
{
    const bool rounds = args.w && weights_matrix(m->weights, role, l).rounds;
    args.early = true;
    if (rounds) {
        args.codes = m->codes;
        args.scales = m->code_scales;
    }
    model_normalise(m, m->normed, rows, &args);
    return rounds;
}

struct norm_shape model_all_heads(struct model *m, void *all, const void *x, const struct heads *h)
{
    const struct model_config *c = m->config;
    const struct layer_config *own = &c->layers[h->l], *whole = &c->whole[h->l];
    const size_t e = dtype_size(m->dt), rows = (size_t)h->rows;
    const size_t part = (size_t)((h->keys ? own->n_kv_heads : own->n_heads) * own->head_dim) * e;
    const int width = (h->keys ? whole->n_kv_heads : whole->n_heads) * own->head_dim;
    // neighbours hold the same heads of keys where there are fewer of these than ranks
    const size_t parts = (size_t)width * e / part, same = (size_t)c->shard.size / parts;
    char *gathered = m->heads_parts, *mine = gathered + (size_t)c->shard.rank * rows * part;
    device_copy_2d(m->dev, mine, part, x, (size_t)layer_qkv_width(own) * e, part, rows);
    comm_all_gather(m->comm, mine, gathered, rows * part);
    for (size_t i = 0; i < parts; i++) {
        char *from = gathered + i * same * rows * part;
        for (size_t k = 1; k < same && h->parts; k++)
            m->ops->add(m->dev, from, from + k * rows * part, (int64_t)(rows * part / e), 1.0f,
                        m->dt);
        device_copy_2d(m->dev, (char *)all + i * part, (size_t)width * e, from, part, part, rows);
    }
    return model_norms(m, h->rows, 1, width, width);
}

void model_own_heads(struct model *m, void *x, void *all, const struct heads *h)
{
    const struct model_config *c = m->config;
    const struct layer_config *own = &c->layers[h->l], *whole = &c->whole[h->l];
    const size_t e = dtype_size(m->dt), head = (size_t)own->head_dim * e;
    const int n = h->keys ? own->n_kv_heads : own->n_heads,
              of = h->keys ? whole->n_kv_heads : whole->n_heads;
    if (h->parts && c->shard.rank % (c->shard.size * n / of) != 0)
        device_fill(m->dev, all, 0, (size_t)h->rows * (size_t)of * head);
    device_copy_2d(m->dev, x, (size_t)layer_qkv_width(own) * e,
                   (const char *)all + (size_t)shard_first(c->shard, of, n) * head,
                   (size_t)of * head, (size_t)n * head, (size_t)h->rows);
}

// The norm of a row's whole queries, or keys, of which ranks hold parts, in place of theirs.
static void normalise_all_heads(struct model *m, void *x, const struct norm_args *own,
                                const struct heads *h)
{
    const struct norm_shape shape = model_all_heads(m, m->all_heads, x, h);
    struct norm_args args = *own;
    args.x = m->all_heads;
    m->ops->norm(m->dev, m->all_heads, &args, &shape);
    model_own_heads(m, x, m->all_heads, h);
}

// The norms of queries, keys and values, in place.
static void normalise_heads(struct model *m, int l, void *qkv, const struct layer_tape *tape,
                            int rows)
{
    const struct layer_config *layer = &m->config->layers[l];
    const struct norm_shape q = model_heads_shape(m, l, rows, layer->n_heads);
    const struct norm_shape k = model_heads_shape(m, l, rows, layer->n_kv_heads);
    void *keys = (char *)qkv + (size_t)layer_q_width(layer) * dtype_size(m->dt);
    const struct norm_args of_q = model_norm(m, ROLE_Q_NORM, l, qkv, tape ? tape->rstd_q : NULL);
    const struct norm_args of_k = model_norm(m, ROLE_K_NORM, l, keys, tape ? tape->rstd_k : NULL);
    if (m->all_heads) {
        normalise_all_heads(m, qkv, &of_q, &(struct heads){l, rows, false, false});
        normalise_all_heads(m, keys, &of_k, &(struct heads){l, rows, true, false});
        return;
    }
    m->ops->norm(m->dev, qkv, &of_q, &q);
    if (layer->kv_from >= 0) return;
    m->ops->norm(m->dev, keys, &of_k, &k);
    if (!(m->config->block & V_NORM)) return;
    void *values = (char *)keys + (size_t)layer_kv_width(layer) * dtype_size(m->dt);
    m->ops->norm(m->dev, values,
                 &(struct norm_args){.x = values, .rstd = tape ? tape->rstd_v : NULL}, &k);
}

// The end of a residual branch: x_to = x_from + in . w^T + bias, normalised first where there is a
// post-norm. `in` and the matrix may be a rank's part of them. `proj` and `rstd` keep what is not
// yet normalised for the backward pass; NULL outside training. whole: each rank has all of both.
struct branch {
    enum tensor_role role;
    int layer;
    const void *in, *norm;
    void *proj;
    float *rstd;
    bool whole;
};

// Where that is more than added: from what it gives, not yet normalised, which may be in m->block.
static void add_projected(struct model *m, int rows, const struct branch *b, const void *proj,
                          const void *x_from, void *x_to)
{
    const int hidden = m->config->hidden;
    copy_rows(m, x_to, x_from, rows, hidden);
    model_normalise(m, m->block, rows,
                    &(struct norm_args){.x = proj, .w = b->norm, .rstd = b->rstd});
    m->ops->add(m->dev, x_to, m->block, (int64_t)rows * hidden, m->config->residual_scale, m->dt);
}

static void add_branch(struct model *m, int rows, const struct branch *b, const void *x_from,
                       void *x_to)
{
    const int hidden = m->config->hidden;
    const bool begins = model_begins_sum(m);
    struct linear out = {b->role, b->layer, begins, m->dt, .no_bias = !begins};
    if (!config_scales_branches(m->config)) {
        if (begins) copy_rows(m, x_to, x_from, rows, hidden);
        model_linear(m, x_to, b->in, rows, &out);
        model_sum_ranks(m, x_to, rows);
        return;
    }
    void *proj = b->proj ? b->proj : m->block;
    out.add = false;
    model_linear(m, proj, b->in, rows, &out);
    if (!b->whole) model_sum_ranks(m, proj, rows);
    add_projected(m, rows, b, proj, x_from, x_to);
}

void model_rotate(struct model *m, int l, void *qkv, const struct batch_view *batch, float sign)
{
    const struct layer_config *layer = &m->config->layers[l];
    if (layer->rope < 0) return;
    const struct rope_config *config = &m->config->ropes[layer->rope];
    struct rope_args rope =
        rope_of_batch(m->ropes[layer->rope], config->dim, batch, &m->attn[l], sign);
    rope.interleaved = config->interleaved;
    if (layer->kv_from >= 0) rope.n = layer->n_heads;
    if (m->config->query_rope) {
        struct rope_args queries = rope;
        queries.table = m->ropes[m->config->query_rope];
        queries.n = layer->n_heads;
        m->ops->rope(m->dev, qkv, &queries);
        rope.n = layer->n_kv_heads;
        qkv = (char *)qkv + (size_t)layer_q_width(layer) * dtype_size(m->dt);
    }
    m->ops->rope(m->dev, qkv, &rope);
}

// Rotates queries and keys and normalises them, where the config says so, in its order. `raw` is
// where they lie, and keeps on the tape what the norms read; qkv is where they go.
static void encode_heads(struct model *m, int l, void *qkv, void *raw,
                         const struct layer_tape *tape, const struct batch_view *batch)
{
    const struct model_config *c = m->config;
    const int rows = batch->n_tokens;
    if (c->block & QK_NORM_LATE) model_rotate(m, l, raw, batch, 1.0f);
    copy_rows(m, qkv, raw, rows, layer_qkv_width(&c->layers[l]));
    if (c->block & QK_NORM) normalise_heads(m, l, qkv, tape, rows);
    if (!(c->block & QK_NORM_LATE)) model_rotate(m, l, qkv, batch, 1.0f);
}

void model_round_kv(struct model *m, void *x, int rows, int n, int head_dim, int stride)
{
    if (m->config->kv_cache == KV_CACHE_AUTO) return;
    const struct rope_args args = {
        .rows = rows, .n = n, .head_dim = head_dim, .stride = stride, .dt = m->dt, .rounds = true};
    m->ops->rope(m->dev, x, &args);
}

// qkv from m->attn_in, which has no values, or neither keys nor values: keys are values too, while
// another layer's stay out.
static void spread_qkv(struct model *m, const struct layer_config *layer, void *qkv, int rows)
{
    const size_t e = dtype_size(m->dt), q = (size_t)layer_q_width(layer) * e,
                 kv = (size_t)layer_kv_width(layer) * e, width = (size_t)layer_qkv_width(layer) * e,
                 from = (size_t)layer_attn_in_width(m->config, layer) * e;
    device_copy_2d(m->dev, qkv, width, m->attn_in, from, from, (size_t)rows);
    if (layer->k_is_v)
        device_copy_2d(m->dev, (char *)qkv + q + kv, width, (char *)m->attn_in + q, from, kv,
                       (size_t)rows);
}

// From m->normed to queries, keys and values, and the queries' gates where they have any. rounded:
// struct linear, as of the next two.
static void project_qkv(struct model *m, int l, void *qkv, void *gate, int rows, bool rounded)
{
    const struct layer_config *layer = &m->config->layers[l];
    const bool differs = layer_attn_in_differs(m->config, layer);
    const struct linear in = {ROLE_QKV, l, .out = m->dt, .rounded = rounded};
    model_linear(m, differs ? m->attn_in : qkv, m->normed, rows, &in);
    if (m->config->block & ATTN_GATE)
        m->ops->split_gate(m->dev, qkv, gate, m->attn_in, rows, &m->attn[l], false);
    else if (differs)
        spread_qkv(m, layer, qkv, rows);
}

// Of rows of qkv: keys and values to where later layers find them, or from there.
static void share_kv(struct model *m, int l, void *qkv, const struct layer_tape *tape, int rows)
{
    const struct layer_config *layer = &m->config->layers[l];
    const int from = layer->kv_from < 0 ? l : layer->kv_from,
              slot = m->config->layers[from].kv_shared;
    if (slot < 0) return;
    const size_t e = dtype_size(m->dt), width = (size_t)layer_qkv_width(layer) * e,
                 kv = 2 * (size_t)layer_kv_width(layer) * e;
    void *own = (char *)qkv + (size_t)layer_q_width(layer) * e,
         *kept = tape ? tape[from - l].kv : m->kv[slot];
    if (from == l)
        device_copy_2d(m->dev, kept, kv, own, width, kv, (size_t)rows);
    else
        device_copy_2d(m->dev, own, width, kept, kv, kv, (size_t)rows);
}

// From m->normed to m->qkv, rotated, its keys and values in the pool.
static void paged_qkv(struct model *m, int l, const struct batch_view *batch,
                      const struct kv_view *kv, bool rounded)
{
    const struct model_config *c = m->config;
    const int rope = c->layers[l].rope;
    // what the operation that stores keys does not do
    const bool own = c->layers[l].kv_from < 0;
    const bool apart = !own || rope < 0 || c->query_rope || (c->block & QK_NORM_LATE) ||
                       c->ropes[rope].interleaved;
    struct rope_args store = rope_of_batch(apart ? NULL : m->ropes[rope],
                                           apart ? 0 : c->ropes[rope].dim, batch, &m->attn[l], 1);
    store.kv = kv;
    store.layer = l;
    project_qkv(m, l, m->qkv, m->gate, batch->n_tokens, rounded);
    if (apart)
        encode_heads(m, l, m->qkv, m->qkv, NULL, batch);
    else if (c->block & QK_NORM)
        normalise_heads(m, l, m->qkv, NULL, batch->n_tokens);
    if (own) m->ops->rope(m->dev, m->qkv, &store);
}

// From m->normed to what attention gives, which is returned.
static void *attend(struct model *m, int l, const struct batch_view *batch,
                    const struct kv_view *kv, struct layer_tape *tape, bool rounded)
{
    const struct model_config *c = m->config;
    const struct layer_config *layer = &c->layers[l];
    const struct ops *ops = m->ops;
    int rows = batch->n_tokens;
    void *qkv = tape ? tape->qkv : m->qkv, *out = tape ? tape->attn : m->attn_out;
    void *raw = tape && tape->qkv_raw ? tape->qkv_raw : qkv;
    void *gate = tape ? tape->gate : m->gate;
    float *lse = tape ? tape->lse : NULL;

    if (layer->latent.rank > 0) {
        latent_attention(m, l, batch, kv, tape ? &tape->latent : &m->latent, lse, out);
    } else if (kv) {
        paged_qkv(m, l, batch, kv, rounded);
    } else {
        project_qkv(m, l, raw, gate, rows, rounded);
        encode_heads(m, l, qkv, raw, tape, batch);
        if (layer->kv_from < 0)
            model_round_kv(m, (char *)qkv + (size_t)layer_q_width(layer) * dtype_size(m->dt), rows,
                           2 * layer->n_kv_heads, layer->head_dim, layer_qkv_width(layer));
        share_kv(m, l, qkv, tape, rows);
    }
    if (layer->latent.rank == 0 && (!tape || !tape->again))
        ops->attn(m->dev, out, lse, qkv, kv, layer->kv_from < 0 ? l : layer->kv_from, batch,
                  &m->attn[l]);
    if (!(c->block & ATTN_GATE)) return out;
    const struct act_shape open = model_attn_gate(m, l, out, rows);
    ops->act(m->dev, m->attn_out, gate, &open);
    return m->attn_out;
}

// Leaves the normalised input in m->normed. The residual stream after attention goes to x_mid,
// which is x outside of training.
static void attention_block(struct model *m, int l, const struct batch_view *batch,
                            const struct kv_view *kv, struct layer_tape *tape, const void *x,
                            void *x_mid)
{
    const struct layer_config *layer = &m->config->layers[l];
    const struct layer_weights *w = &m->weights->layers[l];
    const bool delta = layer->delta.n_heads > 0;
    const int rows = batch->n_tokens;

    const bool rounded =
        normalise_for(m, ROLE_QKV, l, rows, model_branch_norm(m, ROLE_ATTN_NORM, l, x, tape));
    if (delta) delta_attention(m, l, batch, kv, tape);
    struct branch o = {delta ? ROLE_DELTA_OUT : ROLE_O,
                       l,
                       delta ? m->attn_out : attend(m, l, batch, kv, tape, rounded),
                       w->at[ROLE_POST_ATTN_NORM],
                       tape ? tape->attn_proj : NULL,
                       tape ? tape->rstd_post1 : NULL,
                       .whole = false};
    add_branch(m, rows, &o, x, x_mid);
}

// Experts beside the MLP: norms behind each, and the branch's end from their sum. m->normed is the
// MLP's input.
static void beside_block(struct model *m, int l, int rows, struct layer_tape *tape, const void *mid,
                         void *x_out)
{
    const struct layer_weights *w = &m->weights->layers[l];
    const int64_t n = (int64_t)rows * m->config->hidden;
    const size_t bytes = (size_t)n * dtype_size(m->dt);
    void *own = tape ? tape->shared_out : m->beside, *theirs = tape ? tape->experts_sum : m->block,
         *sum = tape ? tape->mlp_proj : m->beside;
    const struct norm_args of_own = model_norm(m, ROLE_POST_SHARED_NORM, l, own,
                                               tape ? tape->rstd_shared : NULL),
                           of_theirs = model_norm(m, ROLE_POST_EXPERTS_NORM, l, theirs,
                                                  tape ? tape->rstd_experts : NULL);
    const struct branch end = {
        .norm = w->at[ROLE_POST_MLP_NORM], .rstd = tape ? tape->rstd_post2 : NULL, .whole = true};
    device_fill(m->dev, own, 0, bytes);
    shared_block(m, l, rows, tape, own);
    model_sum_mlp(m, l, own, (size_t)n, m->dt);
    device_fill(m->dev, theirs, 0, bytes);
    experts_block(m, l, rows, tape, mid, theirs);
    model_sum_mlp(m, l, theirs, (size_t)n, m->dt);
    model_normalise(m, sum, rows, &of_own);
    model_normalise(m, m->block, rows, &of_theirs);
    m->ops->add(m->dev, sum, m->block, n, 1.0f, m->dt);
    add_projected(m, rows, &end, sum, mid, x_out);
}

void mlp_block(struct model *m, int l, int rows, struct layer_tape *tape, const void *mid,
               void *x_out)
{
    const struct model_config *c = m->config;
    const struct layer_config *layer = &c->layers[l];
    const struct layer_weights *w = &m->weights->layers[l];
    int inner = layer->intermediate;
    void *gate_up = tape ? tape->gate_up : m->gate_up;
    struct linear in = {ROLE_GATE_UP, l, .out = m->dt};

    if (!(c->block & PARALLEL_BLOCK))
        in.rounded = normalise_for(m, ROLE_GATE_UP, l, rows,
                                   model_branch_norm(m, ROLE_MLP_NORM, l, mid, tape));
    if (c->block & EXPERTS_BESIDE) {
        beside_block(m, l, rows, tape, mid, x_out);
        return;
    }
    if (layer->moe.n_experts > 0) {
        if (model_begins_mlp(m, l))
            copy_rows(m, x_out, mid, rows, c->hidden);
        else
            device_fill(m->dev, x_out, 0, (size_t)rows * (size_t)c->hidden * dtype_size(m->dt));
        experts_block(m, l, rows, tape, mid, x_out);
        if (layer->shared_intermediate > 0) shared_block(m, l, rows, tape, x_out);
        model_sum_mlp(m, l, x_out, (size_t)rows * (size_t)c->hidden, m->dt);
        return;
    }
    model_linear_act(m, m->act, gate_up, m->normed, rows, &in, inner, tape != NULL);
    if (tape && tape->again && !(c->block & POST_NORM)) return;
    struct branch down = {ROLE_DOWN,
                          l,
                          m->act,
                          w->at[ROLE_POST_MLP_NORM],
                          tape ? tape->mlp_proj : NULL,
                          tape ? tape->rstd_post2 : NULL,
                          .whole = false};
    add_branch(m, rows, &down, mid, x_out);
}

// A third branch, of a layer's own inputs (config.h, layer_input): they gate what a small MLP makes
// of the residual stream.
static void own_block(struct model *m, int l, int rows, const struct tape *tape, const void *x,
                      void *x_out)
{
    const struct layer_tape *lt = tape ? &tape->layers[l] : NULL;
    const struct act_shape act = model_own_act(m, rows), gate = model_own_gate(m, rows);
    const void *inputs = model_own_inputs(m, l, tape ? tape->layers[0].inputs : m->inputs);
    void *before = lt ? lt->own_gate : m->own_gate;
    model_linear(m, before, x, rows, &(struct linear){ROLE_LAYER_GATE, l, .out = m->dt});
    m->ops->act(m->dev, m->own_act, before, &act);
    m->ops->act(m->dev, m->own_act, inputs, &gate);
    const struct branch out = {ROLE_LAYER_OUT,
                               l,
                               m->own_act,
                               m->weights->layers[l].at[ROLE_POST_LAYER_NORM],
                               lt ? lt->own_proj : NULL,
                               lt ? lt->rstd_own : NULL,
                               .whole = true};
    add_branch(m, rows, &out, x, x_out);
}

// Layer l, from the residual stream at its entry (in m->x, or on the tape) to that at its end.
static void *run_layer(struct model *m, int l, const struct batch_view *batch,
                       const struct kv_view *kv, struct tape *tape)
{
    struct layer_tape *lt = tape ? &tape->layers[l] : NULL;
    const struct layer_config *layer = &m->config->layers[l];
    void *x = tape ? lt->x : m->x;
    void *x_out = !tape ? x : l + 1 < m->config->n_layers ? lt[1].x : tape->x_final;
    void *x_mid = !layer_has_mlp(layer) ? x_out : tape ? lt->x_mid : x;
    m->row_adapter = batch->adapter;
    m->attn[l].sinks = m->weights->layers[l].at[ROLE_SINKS];
    const bool own = m->config->layer_input > 0;
    void *x_own = own && tape ? lt->x_own : x_out;
    if (layer_mixes(layer)) attention_block(m, l, batch, kv, lt, x, x_mid);
    if (tape) tape->held = l;
    if (layer_has_mlp(layer)) mlp_block(m, l, batch->n_tokens, lt, x_mid, x_own);
    if (own) own_block(m, l, batch->n_tokens, tape, x_own, x_out);
    if (m->config->block & LAYER_SCALE)
        m->ops->multiply(m->dev, x_out, m->weights->layers[l].at[ROLE_LAYER_SCALE],
                         (int64_t)batch->n_tokens * m->config->hidden, m->dt);
    return x_out;
}

// The inputs that all layers have of their own: what a table of theirs has of the tokens, and what
// a matrix makes of the embeddings x, normalised.
static void layer_inputs(struct model *m, const void *x, const struct batch_view *batch,
                         const struct tape *tape)
{
    const struct model_config *c = m->config;
    const struct layer_tape *first = tape ? &tape->layers[0] : NULL;
    const int rows = batch->n_tokens, width = config_layer_inputs(c),
              held = config_layer_vocab_rows(c);
    const int64_t n = (int64_t)rows * width;
    void *to = first ? first->inputs : m->inputs, *raw = first ? first->inputs_raw : m->inputs_in;
    const struct norm_args norm =
        model_norm(m, ROLE_LAYER_INPUT_NORM, 0, raw, first ? first->rstd_inputs : NULL);
    const struct norm_shape shape = model_inputs_norm(m, rows);
    m->ops->gather_rows(m->dev, to, m->weights->at[ROLE_LAYER_EMBED],
                        &(struct gather_args){batch->tokens, rows, width, model_inputs_scale(m),
                                              m->dt, c->shard.rank * held, held});
    comm_all_reduce(m->comm, to, (size_t)n, m->dt);
    model_linear(m, raw, x, rows, &(struct linear){ROLE_LAYER_INPUT, 0, .out = m->dt});
    m->ops->norm(m->dev, m->inputs_in, &norm, &shape);
    m->ops->add(m->dev, to, m->inputs_in, n, (float)INPUTS_SHARE, m->dt);
}

void model_embed(struct model *m, void *x, const struct batch_view *batch)
{
    const struct model_config *c = m->config;
    m->ops->gather_rows(m->dev, x, m->weights->at[ROLE_EMBED],
                        &(struct gather_args){batch->tokens, batch->n_tokens, c->hidden,
                                              model_embed_scale(m), m->dt,
                                              config_first_vocab_row(c),
                                              c->shard.size > 1 ? config_vocab_rows(c) : 0});
    model_sum_ranks(m, x, batch->n_tokens);
}

// What a layer that predicts further tokens begins with (DeepSeek-AI 2024, DeepSeek-V3, section
// 2.2): x = W [norm(embedding of the token); norm(hidden state of the one before)]. Over x, which
// has the embeddings.
static void mtp_input(struct model *m, void *x, int rows)
{
    const size_t width = (size_t)m->config->hidden * dtype_size(m->dt);
    const struct norm_args halves[] = {model_norm(m, ROLE_MTP_EMBED_NORM, 0, x, NULL),
                                       model_norm(m, ROLE_MTP_HIDDEN_NORM, 0, m->hidden_in, NULL)};
    for (int i = 0; i < 2; i++) {
        model_normalise(m, m->normed, rows, &halves[i]);
        device_copy_2d(m->dev, (char *)m->mtp_in + (size_t)i * width, 2 * width, m->normed, width,
                       width, (size_t)rows);
    }
    model_linear(m, x, m->mtp_in, rows, &(struct linear){ROLE_MTP_PROJ, 0, .out = m->dt});
}

void model_forward(struct model *m, const struct batch_view *batch, const struct kv_view *kv,
                   struct tape *tape, void **ret_x)
{
    const struct model_config *c = m->config;
    void *x = tape ? tape->layers[0].x : m->x;
    model_embed(m, x, batch);
    if (c->mtp) mtp_input(m, x, batch->n_tokens);
    m->row_adapter = batch->adapter;
    if (c->layer_input > 0) layer_inputs(m, x, batch, tape);
    if (tape && tape->balance)
        device_fill(m->dev, tape->balance, 0, 2 * (size_t)config_experts(c) * sizeof(float));
    for (int l = 0; l < c->n_layers; l++) {
        x = run_layer(m, l, batch, kv, tape);
        if (!tape || !tape->balance || c->layers[l].moe.n_experts == 0) continue;
        // what the layer's router did is added to the tape's sums
        const struct moe_shape shape = model_moe_shape(m, l, batch->n_tokens);
        const struct layer_tape *lt = &tape->layers[l];
        float *probs = m->router_logits; // those of this pass are on the tape
        m->ops->moe_balance(m->dev, probs, tape->balance, lt->router_logits, &lt->routing, &shape);
        m->ops->column_sum(m->dev, tape->balance + shape.n_experts, probs, NULL,
                           &(struct expert_rows){batch->n_tokens, 1, shape.n_experts, DT_F32});
    }
    *ret_x = x;
}

const struct layer_tape *tape_layer(struct tape *tape, struct model *m, int l,
                                    const struct batch_view *batch)
{
    struct layer_tape *layer = &tape->layers[l];
    if (tape->recompute == RECOMPUTE_LAYER && tape->held != l) {
        layer->again = true;
        run_layer(m, l, batch, NULL, tape);
        layer->again = false;
    }
    return layer;
}

static float rounded_scale(const struct model *m, float scale)
{
    return m->dt == DT_BF16 && m->config->embed_scale_rounded ? f32_from_bf16(bf16_from_f32(scale))
                                                              : scale;
}

float model_embed_scale(const struct model *m)
{
    return rounded_scale(m, m->config->embed_scale);
}

float model_inputs_scale(const struct model *m)
{
    return rounded_scale(m, sqrtf((float)m->config->layer_input)) * (float)INPUTS_SHARE;
}

struct head_rows model_head_rows(const struct model *m, int first)
{
    const size_t at = (size_t)first * (size_t)m->config->hidden * dtype_size(m->dt);
    return (struct head_rows){.x = (char *)m->row_x + at,
                              .normed = (char *)m->row_normed + at,
                              .rstd = m->row_rstd + first,
                              .mean = m->row_mean + first,
                              .logits = m->logits + (size_t)first * (size_t)m->config->vocab_size};
}

void model_head(struct model *m, const void *x, const int32_t *rows, int first, int n)
{
    const struct model_config *c = m->config;
    const struct head_rows to = model_head_rows(m, first);
    m->ops->gather_rows(m->dev, to.x, x,
                        &(struct gather_args){rows, n, c->hidden, 1.0f, m->dt, 0, 0});
    struct norm_args norm = model_norm(m, ROLE_FINAL_NORM, 0, to.x, to.rstd);
    if (c->norm == NORM_LAYER) norm.mean = to.mean;
    model_normalise(m, to.normed, n, &norm);
    const struct linear head = {ROLE_HEAD, 0, .out = DT_F32};
    const size_t width = (size_t)c->vocab_size * sizeof(float);
    void *all = m->logits_of_all ? m->logits_of_all : to.logits;
    linear_of(m, all, to.normed, n, rows, &head, m->logit_parts);
    if (all != to.logits)
        device_copy_2d(m->dev, to.logits, width, all,
                       (size_t)(c->shard.size * config_head_rows(c)) * sizeof(float), width,
                       (size_t)n);
    if (config_bends_logits(c))
        m->ops->softcap(m->dev, to.logits, (int64_t)n * c->vocab_size, c->logit_softcap,
                        c->logit_scale);
}
