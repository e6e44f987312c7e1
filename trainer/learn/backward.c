/* backward.c: the forward pass in reverse. One thread.
 *
 * The head comes first, in chunks of rows, whose gradient of logits exists at one time. Where the
 * model has no room for the logits of a whole batch, they too exist a chunk at a time, and are
 * computed a second time; the numbers are the same. What is cheap to compute again (normalised
 * inputs, activations) is not on the tape and is computed again. Weight gradients are added in f32;
 * the gradient of the residual stream, dx, has the weights' dtype.
 *
 * Of a shard (model.h) dx is whole on every rank; what a rank's part of a matrix gives to it is
 * summed over the ranks where the gradient of a norm begins: once in the head and twice in a layer.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/layer_back.h"
#include "trainer/learn/samples.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define N_PARTS 44
#define PART(name, size)                                                                           \
    {                                                                                              \
        offsetof(struct backward, name), (size)                                                    \
    }

// What the layers, each in its turn, and the head want.
static void list_parts(const struct model *m, int max_tokens, int max_targets, int chunk,
                       struct device_part ret[N_PARTS])
{
    const struct model_config *c = m->config;
    const size_t e = dtype_size(m->dt), t = (size_t)max_tokens, n = (size_t)max_targets,
                 h = (size_t)c->hidden, logits = (size_t)chunk * (size_t)c->vocab_size;
    for (const struct layer_config *l = c->layers; l < c->layers + c->n_layers; l++) {
        const struct latent_config *latent = &l->latent;
        const size_t expanded = latent->rank > 0 ? t * e : 0; // of latent attention
        const size_t wide = (size_t)(l->n_heads * layer_expanded_dim(l)), heads = expanded * wide;
        const size_t kv = (size_t)(l->n_heads * (l->head_dim - latent->rope + latent->value));
        const size_t qkv = (size_t)(layer_qkv_width(l) + delta_conv_width(&l->delta));
        const size_t kv_width = 2 * (size_t)layer_kv_width(l);
        const bool shares_kv = l->k_is_v || l->kv_from >= 0 || l->kv_shared >= 0; // one, or others'
        const struct device_part parts[N_PARTS] = {
            PART(dx, t * h * e),
            PART(dnormed, t * h * e),
            PART(dproj, config_scales_branches(c) ? t * h * e : 0),
            PART(dparallel, c->block & (PARALLEL_BLOCK | EXPERTS_BESIDE) ? t * h * e : 0),
            PART(dgate_up, layer_mlp_elements(l, t) * (c->block & PLAIN_MLP ? 1 : 2) * e),
            PART(dact, layer_mlp_elements(l, t) * e),
            PART(dexpert, layer_expert_elements(c, l, t) * e),
            PART(dlatent, t * (size_t)l->expert_latent * e),
            PART(drouter, t * (size_t)l->moe.n_experts * e),
            PART(dweight, t * (size_t)l->moe.top_k * sizeof(float)),
            PART(dqkv, t * (latent->rank > 0 ? 3 * wide : qkv) * e),
            PART(heads_raw, t * (size_t)layer_all_heads_width(c, l) * e),
            PART(dkv, shares_kv ? t * kv_width * e : 0),
            PART(dshared[0], l->kv_shared == 0 ? t * kv_width * e : 0),
            PART(dshared[1], l->kv_shared == 1 ? t * kv_width * e : 0),
            PART(dinputs, t * (size_t)config_layer_inputs(c) * e),
            PART(down, t * (size_t)c->layer_input * e),
            PART(down_gate, t * (size_t)c->layer_input * e),
            PART(dattn, t * (size_t)layer_attn_width(l) * e),
            PART(dattn_in, t * (size_t)layer_before_attn_width(c, l) * e),
            PART(ddelta_gates, t * (size_t)layer_delta_gates_width(l) * e),
            PART(dpair, c->mtp ? 2 * t * h * e : 0),
            PART(mtp_rstd, c->mtp ? t * sizeof(float) : 0),
            PART(dlogits, logits * e),
            PART(dlogits_part, c->shard.size > 1 ? logits / (size_t)c->shard.size * e : 0),
            PART(dlogits_f32, config_bends_logits(c) ? logits * sizeof(float) : 0),
            PART(drows, n * h * e),
            PART(targets, n * sizeof(int32_t)),
            PART(logprob, n * sizeof(float)),
            PART(lse, n * sizeof(float)),
            PART(entropy, n * sizeof(float)),
            PART(dlogprob, n * sizeof(float)),
            PART(dentropy, n * sizeof(float)),
            PART(row_weights, n * sizeof(float)),
            PART(ranked, (size_t)chunk * sizeof(struct token_logprob)),
            PART(latent.latent, expanded * (size_t)latent->rank),
            PART(latent.dlatent, expanded * (size_t)latent->rank),
            PART(latent.kv, expanded * kv),
            PART(latent.qkv, 3 * heads),
            PART(latent.out, heads),
            PART(latent.dout, heads),
            PART(latent.dkeys, expanded * (size_t)layer_latent_width(l)),
            PART(latent.q_a, expanded * (size_t)latent->q_rank),
            PART(latent.dq_a, expanded * (size_t)latent->q_rank),
        };
        if (l == c->layers) memcpy(ret, parts, sizeof parts);
        device_parts_widen(ret, parts, N_PARTS);
    }
}

size_t backward_bytes(const struct model *m, int max_tokens, int max_targets, int chunk)
{
    struct device_part parts[N_PARTS];
    list_parts(m, max_tokens, max_targets, chunk, parts);
    return device_parts_bytes(parts, N_PARTS);
}

enum status backward_new(struct model *m, const struct weights *grads, int max_tokens,
                         int max_targets, int chunk, struct backward **ret)
{
    static const struct layer_weights none;
    struct device_part parts[N_PARTS];
    enum status st = ST_OK;
    struct backward *b = calloc(1, sizeof *b);
    if (!b) return status_fail(ST_NO_MEMORY, "no memory for the backward pass");
    b->m = m;
    b->grads = grads;
    while (!grads->at[ROLE_EMBED] && !grads->at[ROLE_LAYER_EMBED] &&
           b->lowest < grads->config->n_layers &&
           memcmp(&grads->layers[b->lowest], &none, sizeof none) == 0)
        b->lowest++;
    b->max_tokens = max_tokens;
    b->max_targets = max_targets;
    b->chunk = chunk;
    list_parts(m, max_tokens, max_targets, chunk, parts);
    CHECK(status_context(device_alloc_parts(m->dev, b, parts, N_PARTS),
                         "backward scratch for %d tokens", max_tokens));
    *ret = TAKE_PTR(b);
out:
    backward_free(b);
    return st;
}

void backward_use_adapter(struct backward *b, const struct adapter *a, const struct weights *grads)
{
    b->adapter = a;
    b->adapter_grads = grads;
    // the head's matrix is the last
    if (a->list[0].role != ROLE_HEAD && a->list[0].layer < b->lowest) b->lowest = a->list[0].layer;
}

void backward_round(struct backward *b, enum gradient_dtype dt)
{
    b->rounds = dt;
}

void backward_free(struct backward *b)
{
    struct device_part parts[N_PARTS];
    if (!b) return;
    list_parts(b->m, b->max_tokens, b->max_targets, b->chunk, parts);
    device_release_parts(b->m->dev, b, parts, N_PARTS);
    device_release(b->m->dev, b->masked);
    device_release(b->m->dev, b->masks);
    free(b->host_masked);
    free(b->wanted);
    free(b->host_masks);
    free(b);
}

// ---- the head -----------------------------------------------------------------------------------
static int chunk_rows(const struct backward *b, int n, int at)
{
    return n - at < b->chunk ? n - at : b->chunk;
}

static enum status check_fits(const struct backward *b, const struct batch *batch)
{
    int tokens = batch_view(batch)->n_tokens, n = batch_rows(batch);
    if (tokens > b->max_tokens || n > b->max_targets)
        return status_fail(ST_INVALID,
                           "a micro-batch of %d tokens and %d targets; there is room for %d and %d",
                           tokens, n, b->max_tokens, b->max_targets);
    return ST_OK;
}

void backward_rank(struct backward *b, struct token_logprob *ret_ranked)
{
    b->ret_ranked = ret_ranked;
}

size_t backward_mask_bytes(const struct model *m, int chunk)
{
    return (size_t)chunk * (1 + MASK_WORDS((size_t)m->config->vocab_size)) * sizeof(uint32_t);
}

enum status backward_constrain(struct backward *b, const struct constraint_row *constraints)
{
    const size_t rows = (size_t)b->chunk * sizeof *b->masked,
                 words = backward_mask_bytes(b->m, b->chunk) - rows;
    enum status st = ST_OK;
    b->host_masked = malloc(rows);
    b->host_masks = malloc(words);
    b->wanted = malloc((size_t)b->chunk * sizeof *b->wanted);
    if (!b->host_masked || !b->host_masks || !b->wanted)
        FAIL(ST_NO_MEMORY, "no memory for the masks of %d rows", b->chunk);
    CHECK(device_alloc(b->m->dev, rows, (void **)&b->masked));
    CHECK(device_alloc(b->m->dev, words, (void **)&b->masks));
    b->constraints = constraints;
out:
    return st;
}

// The logits of `rows` wanted rows from `at` on, in m->logits from row `first` on; what their
// constraints do not allow is ruled out.
static enum status chunk_logits(struct backward *b, struct model *m, const struct batch *batch,
                                const void *x, int at, int rows, int first)
{
    const int vocab = m->config->vocab_size;
    const size_t words = MASK_WORDS((size_t)vocab);
    int n = 0;
    model_head(m, x, batch_rows_device(batch) + at, first, rows);
    for (int i = 0; b->constraints && i < rows; i++) {
        const struct constraint_row *c = &b->constraints[at + i];
        if (!c->constraint) continue;
        b->wanted[n] = *c;
        b->host_masked[n++] = i;
    }
    if (n == 0) return ST_OK;
    const enum status st = constraint_masks(b->wanted, n, b->host_masks);
    if (st != ST_OK) return st;
    device_copy_in(m->dev, b->masked, b->host_masked, (size_t)n * sizeof *b->masked);
    device_copy_in(m->dev, b->masks, b->host_masks, (size_t)n * words * sizeof *b->masks);
    m->ops->mask_logits(m->dev, model_head_rows(m, first).logits, b->masked, b->masks, n, vocab);
    return ST_OK;
}

enum status backward_logprobs(struct backward *b, struct model *other, const struct batch *batch,
                              const void *x, const int32_t *targets, float temperature,
                              float *ret_logprobs, float *ret_entropy)
{
    struct model *m = other ? other : b->m;
    const int n = batch_rows(batch);
    const bool all = n <= m->max_rows;
    enum status st = check_fits(b, batch);
    if (st != ST_OK) return st;
    device_copy_in(m->dev, b->targets, targets, (size_t)n * sizeof *targets);
    for (int at = 0; at < n; at += b->chunk) {
        const int rows = chunk_rows(b, n, at), first = all ? at : 0;
        if ((st = chunk_logits(b, m, batch, x, at, rows, first)) != ST_OK) return st;
        const struct head_args head = model_head_args(m, first, b->targets + at, rows, temperature);
        m->ops->logprob(m->dev, b->logprob + at, b->lse + at, ret_entropy ? b->entropy + at : NULL,
                        &head);
        if (other || !b->ret_ranked) continue;
        m->ops->top_logprobs(m->dev, b->ranked, 0, &head);
        device_copy_out(m->dev, b->ret_ranked + at, b->ranked, (size_t)rows * sizeof *b->ranked);
    }
    b->logits_kept = !other && all;
    device_copy_out(m->dev, ret_logprobs, b->logprob, (size_t)n * sizeof(float));
    if (ret_entropy) device_copy_out(m->dev, ret_entropy, b->entropy, (size_t)n * sizeof(float));
    return device_sync(m->dev);
}

// In what a gradient is multiplied with that matrix.
static enum gradient_dtype rounding(const struct backward *b, const struct weight_matrix *w)
{
    return w->rounds ? b->rounds : GRADIENT_AUTO;
}

// dx (rows, k) = (add ? dx : 0) + dy (rows, n) . w (n, k)
static void input_back(struct backward *b, void *dx, const void *dy, const struct weight_matrix *w,
                       int rows, bool add)
{
    struct model *m = b->m;
    const struct matmul shape = {.m = rows,
                                 .n = w->k,
                                 .k = w->n,
                                 .beta = add,
                                 .in = m->dt,
                                 .out = m->dt,
                                 .scales = w->scales,
                                 .rounds = rounding(b, w)};
    m->ops->matmul(m->dev, dx, dy, w->w, NULL, &shape);
}

// Of a matrix (n, k) and its bias (n), each where it is trained: the gradients += dy (rows, n)^T .
// x (rows, k), and += column sums of dy. of: a matmul of experts, whose rows these are: of each
// expert's; NULL: of the one.
static void back_to_weight(struct model *m, const struct weight_matrix *g, const void *dy,
                           const void *x, int rows, const struct matmul *of)
{
    const struct expert_rows sums = {rows, of ? of->n_experts : 1, g->n, m->dt};
    struct matmul shape = {
        .m = g->n, .n = g->k, .k = rows, .trans_a = true, .beta = 1, .in = m->dt, .out = DT_F32};
    if (of) {
        shape.offsets = of->offsets;
        shape.n_experts = of->n_experts;
    }
    if (g->w) m->ops->matmul(m->dev, g->w, dy, x, NULL, &shape);
    if (g->bias) m->ops->column_sum(m->dev, g->bias, dy, shape.offsets, &sums);
}

// matrix_back() of some rows of the batch (index, device); NULL: of all, in order.
static void rows_back(struct backward *b, void *dx, const void *dy, const void *x, int rows,
                      const int32_t *index, enum tensor_role role, int layer, bool add)
{
    struct model *m = b->m;
    const struct weight_matrix w = weights_matrix(m->weights, role, layer),
                               g = weights_matrix(b->grads, role, layer);
    struct lora_args args;
    back_to_weight(m, &g, dy, x, rows, NULL);
    input_back(b, dx, dy, &w, rows, add);
    if (!b->adapter || !adapter_table_args(m->adapters, role, layer, rows, NULL, &args)) return;
    adapter_grads(b->adapter, b->adapter_grads, role, layer, args.grads);
    args.row = index;
    args.dy = dy;
    m->ops->lora(m->dev, dx, x, &args);
}

void matrix_back(struct backward *b, void *dx, const void *dy, const void *x, int rows,
                 enum tensor_role role, int layer, bool add)
{
    rows_back(b, dx, dy, x, rows, NULL, role, layer, add);
}

void norm_back(struct backward *b, enum tensor_role role, int l, void *dx, const void *dy,
               const struct norm_args *norm, const struct norm_shape *shape, bool add)
{
    const struct weight_matrix g = weights_matrix(b->grads, role, l);
    b->m->ops->norm_back(b->m->dev, dx, g.w, g.bias, dy, norm, shape, add);
}

// The logits of a chunk of wanted rows; gives the row of model.logits where they begin.
static enum status head_chunk(struct backward *b, const struct batch *batch, const void *x, int at,
                              int rows, int *ret_first)
{
    *ret_first = b->logits_kept ? at : 0;
    return b->logits_kept ? ST_OK : chunk_logits(b, b->m, batch, x, at, rows, 0);
}

// dlogits of `rows` rows from `at` on, through the soft cap where there is one; first:
// head_chunk().
static enum status logits_back(struct backward *b, const struct batch *batch,
                               const struct backward_loss *loss, int at, int rows, int first)
{
    struct model *m = b->m;
    int vocab = m->config->vocab_size;
    int64_t n = (int64_t)rows * vocab;
    bool capped = b->dlogits_f32 != NULL;
    void *dlogits = capped ? b->dlogits_f32 : b->dlogits;
    enum dtype dt = capped ? DT_F32 : m->dt;
    const struct distillation *d = loss->distillation;
    const float *logits = model_head_rows(m, first).logits;
    if (loss->dlogprobs) {
        const struct head_args head =
            model_head_args(m, first, b->targets + at, rows, loss->temperature);
        const struct head_grads grads = {.dlogprob = b->dlogprob + at,
                                         .lse = b->lse + at,
                                         .dentropy = loss->dentropy ? b->dentropy + at : NULL,
                                         .entropy = b->entropy + at};
        m->ops->logprob_back(m->dev, dlogits, &grads, &head, dt);
    }
    if (d) {
        int of_teacher = 0;
        const struct batch *read = d->batch ? d->batch : batch;
        const enum status st = d->kept ? head_chunk(d->kept, read, d->x, at, rows, &of_teacher)
                                       : chunk_logits(b, d->teacher, read, d->x, at, rows, 0);
        if (st != ST_OK) return st;
        // What the rows' own gradients were made of is done with: the results' place.
        const struct distill_args args = {.student = logits,
                                          .teacher = model_head_rows(d->teacher, of_teacher).logits,
                                          .n = rows,
                                          .vocab = vocab,
                                          .teacher_vocab = d->teacher->config->vocab_size,
                                          .temperature = loss->temperature,
                                          .beta = d->beta,
                                          .scale = d->scale,
                                          .weights = d->weights ? b->row_weights + at : NULL,
                                          .add = loss->dlogprobs != NULL,
                                          .agrees = b->dlogprob + at};
        m->ops->distill(m->dev, b->logprob + at, b->entropy + at, dlogits, &args, dt);
    }
    if (!capped) return ST_OK;
    m->ops->softcap_back(m->dev, b->dlogits_f32, logits, n, m->config->logit_softcap,
                         m->config->logit_scale);
    m->ops->convert(m->dev, b->dlogits, m->dt, b->dlogits_f32, DT_F32, n);
    return ST_OK;
}

// The columns of dlogits that are this rank's part of the vocabulary.
static const void *own_dlogits(struct backward *b, int rows)
{
    const struct model_config *c = b->m->config;
    const size_t e = dtype_size(b->m->dt), width = (size_t)config_vocab_rows(c) * e;
    if (!b->dlogits_part) return b->dlogits;
    device_copy_2d(b->m->dev, b->dlogits_part, width,
                   (const char *)b->dlogits + (size_t)config_first_vocab_row(c) * e,
                   (size_t)c->vocab_size * e, width, (size_t)rows);
    return b->dlogits_part;
}

static enum status head_back(struct backward *b, const struct batch *batch, const struct tape *tape,
                             const struct backward_loss *loss)
{
    enum status st = ST_OK;
    struct model *m = b->m;
    const struct model_config *c = m->config;
    const int n = batch_rows(batch);
    const size_t e = dtype_size(m->dt);
    for (int at = 0; at < n; at += b->chunk) {
        const int rows = chunk_rows(b, n, at);
        int first;
        CHECK(head_chunk(b, batch, tape->x_final, at, rows, &first));
        const struct head_rows head = model_head_rows(m, first);
        const struct norm_shape shape = model_norm_shape(m, rows);
        struct norm_args norm = model_norm(m, ROLE_FINAL_NORM, 0, head.x, head.rstd);
        norm.mean = head.mean;
        void *drows = (char *)b->drows + (size_t)at * (size_t)c->hidden * e;
        CHECK(logits_back(b, batch, loss, at, rows, first));
        const void *dlogits = own_dlogits(b, rows);
        rows_back(b, drows, dlogits, head.normed, rows, batch_rows_device(batch) + at, ROLE_HEAD, 0,
                  false);
        model_sum_ranks(m, drows, rows);
        norm_back(b, ROLE_FINAL_NORM, 0, drows, drows, &norm, &shape, false);
    }
    b->logits_kept = false;
    device_fill(m->dev, b->dx, 0, (size_t)batch_tokens(batch) * (size_t)c->hidden * e);
    m->ops->scatter_add_rows(
        m->dev, b->dx, m->dt, b->drows, batch_rows_order(batch),
        &(struct gather_args){batch_rows_device(batch), n, c->hidden, 1.0f, m->dt, 0, 0});
out:
    return st;
}

// ---- the layers ---------------------------------------------------------------------------------
// dy taken back through a norm of the layer over whole rows x, to `dx`; dy itself where it has
// none.
static const void *rows_norm_back(struct backward *b, enum tensor_role role, int l, void *dx,
                                  const void *dy, int rows, const void *x, float *rstd)
{
    const struct norm_shape shape = model_norm_shape(b->m, rows);
    const struct norm_args norm = model_norm(b->m, role, l, x, rstd);
    if (!norm.w) return dy;
    norm_back(b, role, l, dx, dy, &norm, &shape, false);
    return dx;
}

// The gradient of what a residual branch gives, x: dx itself, or dx taken back through its scale
// and its post-norm.
static const void *residual_back(struct backward *b, enum tensor_role role, int l, int rows,
                                 const void *x, float *rstd)
{
    struct model *m = b->m;
    const int64_t n = (int64_t)rows * m->config->hidden;
    const float scale = m->config->residual_scale;
    const void *dbranch = b->dx;
    if (scale != 1) {
        device_fill(m->dev, b->dproj, 0, (size_t)n * dtype_size(m->dt));
        m->ops->add(m->dev, b->dproj, b->dx, n, scale, m->dt);
        dbranch = b->dproj;
    }
    return rows_norm_back(b, role, l, b->dproj, dbranch, rows, x, rstd);
}

// dx = (add ? dx : 0) + dnormed, ranks' parts unless it is whole, taken back through the norm
// before a residual branch where there is one; where there is none, the branch's input is added to.
static void pre_norm_back(struct backward *b, enum tensor_role role, int l, void *dx, int rows,
                          const struct norm_args *norm, bool add, bool whole)
{
    struct model *m = b->m;
    const struct norm_shape shape = model_norm_shape(m, rows);
    if (!whole) model_sum_ranks(m, b->dnormed, rows);
    if (norm->w)
        norm_back(b, role, l, dx, b->dnormed, norm, &shape, add);
    else
        m->ops->add(m->dev, dx, b->dnormed, (int64_t)rows * m->config->hidden, 1.0f, m->dt);
}

// An MLP of two matrices of so many inner columns, from dout and m->normed: their gradients, and
// that of m->normed is in dnormed, or added to it. The activation is computed again on the way;
// beforehand where an adapter reads it.
static void dense_back(struct backward *b, int l, int rows, const void *dout, const void *gate_up,
                       int inner, enum tensor_role up, enum tensor_role down, bool add)
{
    struct model *m = b->m;
    const struct weight_matrix w = weights_matrix(m->weights, down, l),
                               g = weights_matrix(b->grads, down, l);
    const struct act_shape act = model_act_shape(m, rows, inner);
    if (b->adapter) {
        m->ops->act(m->dev, m->act, gate_up, &act);
        matrix_back(b, b->dact, dout, m->act, rows, down, l, false);
        m->ops->act_back(m->dev, b->dgate_up, NULL, NULL, b->dact, gate_up, &act);
    } else {
        input_back(b, b->dact, dout, &w, rows, false);
        m->ops->act_back(m->dev, b->dgate_up, NULL, m->act, b->dact, gate_up, &act);
        back_to_weight(m, &g, dout, m->act, rows, NULL);
    }
    matrix_back(b, b->dnormed, b->dgate_up, m->normed, rows, up, l, add);
}

// The gradients of experts' own scales, and of the routing's weights, times the factor of logits.
static void scales_back(struct backward *b, int l, int rows, const struct moe_routing *r)
{
    struct model *m = b->m;
    const struct act_shape gate = model_expert_gate(m, l, r, rows);
    const int a = rows * gate.width;
    const struct expert_rows shape = {a, m->config->layers[l].moe.n_experts, 1, DT_F32};
    float *dscale = b->grads->layers[l].at[ROLE_EXPERT_SCALE];
    m->ops->act_back(m->dev, m->expert_scales + a, b->dweight, NULL, b->dweight, m->expert_scales,
                     &gate);
    m->ops->softcap(m->dev, b->dweight, a, 0, model_router_scale(m));
    if (!dscale) return;
    const float *list = model_sort_by_expert(m, l, r, rows);
    m->ops->column_sum(m->dev, dscale, list, r->offsets, &shape);
}

// From m->normed and drouter, the gradients of a router or gate; dnormed is m->normed's, or more.
static void router_back(struct backward *b, int l, int rows, enum tensor_role role, bool add)
{
    struct model *m = b->m;
    const struct weight_matrix w = weights_matrix(m->weights, role, l),
                               g = weights_matrix(b->grads, role, l);
    back_to_weight(m, &g, b->drouter, m->normed, rows, NULL);
    if (model_begins_mlp(m, l))
        input_back(b, b->dnormed, b->drouter, &w, rows, add);
    else if (!add)
        device_fill(m->dev, b->dnormed, 0, (size_t)rows * (size_t)w.k * dtype_size(m->dt));
}

// From m->normed and dout, the experts' gradients, and the router's unless it reads by a norm of
// its own: its dlogits are then in drouter. Leaves the gradient of m->normed in dnormed.
static void experts_back(struct backward *b, int l, int rows, const struct layer_tape *tape,
                         const struct backward_loss *loss, const void *dout)
{
    struct model *m = b->m;
    const struct layer_config *layer = &m->config->layers[l];
    const struct ops *ops = m->ops;
    const struct weight_matrix up = weights_matrix(m->weights, ROLE_EXPERTS_GATE_UP, l),
                               down = weights_matrix(m->weights, ROLE_EXPERTS_DOWN, l),
                               dup = weights_matrix(b->grads, ROLE_EXPERTS_GATE_UP, l),
                               ddown = weights_matrix(b->grads, ROLE_EXPERTS_DOWN, l);
    const struct moe_routing *r = &tape->routing;
    const struct moe_shape shape = model_moe_shape(m, l, rows);
    const bool latent = layer->expert_latent > 0, beside = m->config->block & EXPERTS_BESIDE;
    const int width = shape.width, inner = layer->intermediate, a = rows * shape.top_k;
    const struct act_shape act = model_act_shape(m, a, inner);
    struct matmul to_act = model_experts_shape(m, l, r, a, &down, true),
                  to_input = model_experts_shape(m, l, r, a, &up, true);
    struct moe_routing scaled = *r;
    to_act.rounds = rounding(b, &down);
    to_input.rounds = rounding(b, &up);
    scaled.weight = model_expert_weights(m, l, r, rows);
    if (latent) {
        ops->moe_combine(m->dev, m->latent_sum, tape->expert_out, r->place, r->weight, &shape,
                         false);
        matrix_back(b, b->dlatent, dout, m->latent_sum, rows, ROLE_EXPERTS_OUT, l, false);
        dout = b->dlatent;
    }
    ops->moe_combine_back(m->dev, b->dexpert, b->dweight, dout, tape->expert_out, &scaled, &shape);
    ops->matmul(m->dev, b->dact, b->dexpert, down.w, NULL, &to_act);
    ops->act_back(m->dev, b->dgate_up, NULL, m->act, b->dact, tape->gate_up, &act);
    back_to_weight(m, &ddown, b->dexpert, m->act, a, &to_act);
    ops->gather_rows(m->dev, m->expert_in, experts_input(m, l, rows),
                     &(struct gather_args){r->row, a, width, 1.0f, m->dt, 0, 0});
    back_to_weight(m, &dup, b->dgate_up, m->expert_in, a, &to_input);
    model_experts_matmul(m, l, b->dexpert, b->dgate_up, up.w, NULL, &to_input);
    model_sum_mlp(m, l, b->dweight, (size_t)a, DT_F32);
    if (beside) scales_back(b, l, rows, r);
    ops->moe_route_back(m->dev, b->drouter, b->dweight, tape->router_logits, r, &shape);
    if (loss->assignments)
        ops->moe_balance_back(m->dev, b->drouter, tape->router_logits, loss->assignments, &shape,
                              loss->balance_scale * model_router_scale(m));
    if (!beside) router_back(b, l, rows, ROLE_ROUTER, false);
    ops->moe_combine(m->dev, latent ? b->dlatent : b->dnormed, b->dexpert, r->place, NULL, &shape,
                     !latent && !beside);
    if (latent) matrix_back(b, b->dnormed, b->dlatent, m->normed, rows, ROLE_EXPERTS_IN, l, true);
}

// From m->normed and dout, the shared expert's gradients; adds that of m->normed to dnormed, but
// for experts beside it, which have none there.
static void shared_back(struct backward *b, int l, int rows, const struct layer_tape *tape,
                        const void *dout)
{
    struct model *m = b->m;
    const struct layer_config *layer = &m->config->layers[l];
    const struct moe_shape one = model_shared_shape(m, rows);
    const struct moe_routing *r = &tape->shared_routing;

    dout = rows_norm_back(b, ROLE_POST_SHARED_NORM, l, b->dproj, dout, rows, tape->shared_out,
                          tape->rstd_shared);
    if (layer->shared_gate) {
        m->ops->moe_combine_back(m->dev, b->dexpert, b->dweight, dout, tape->shared_out, r, &one);
        model_sum_mlp(m, l, b->dweight, (size_t)rows, DT_F32);
        m->ops->moe_route_back(m->dev, b->drouter, b->dweight, tape->shared_logits, r, &one);
        router_back(b, l, rows, ROLE_SHARED_GATE, true);
        dout = b->dexpert;
    }
    dense_back(b, l, rows, dout, tape->shared_gate_up, layer->shared_intermediate,
               ROLE_SHARED_GATE_UP, ROLE_SHARED_DOWN, !(m->config->block & EXPERTS_BESIDE));
}

// From dout, the gradients of experts beside the MLP and of their router; adds that of x_mid to dx.
static void beside_back(struct backward *b, int l, int rows, const struct layer_tape *tape,
                        const struct backward_loss *loss, const void *dout)
{
    struct model *m = b->m;
    const void *x = tape->x_mid;
    const struct norm_args experts = model_branch_norm(m, ROLE_EXPERTS_NORM, l, x, tape),
                           router = model_branch_norm(m, ROLE_ROUTER_NORM, l, x, tape);
    const bool whole = layer_splits_experts(m->config, &m->config->layers[l]);
    dout = rows_norm_back(b, ROLE_POST_EXPERTS_NORM, l, b->dparallel, dout, rows, tape->experts_sum,
                          tape->rstd_experts);
    model_normalise(m, m->normed, rows, &experts);
    experts_back(b, l, rows, tape, loss, dout);
    pre_norm_back(b, ROLE_EXPERTS_NORM, l, b->dx, rows, &experts, true, whole);
    model_normalise(m, m->normed, rows, &router);
    router_back(b, l, rows, ROLE_ROUTER, false);
    pre_norm_back(b, ROLE_ROUTER_NORM, l, b->dx, rows, &router, true, whole);
}

void mlp_back(struct backward *b, int l, int rows, const struct layer_tape *tape,
              const struct backward_loss *loss)
{
    struct model *m = b->m;
    const struct model_config *c = m->config;
    const struct layer_config *layer = &c->layers[l];
    const bool parallel = c->block & PARALLEL_BLOCK;
    const enum tensor_role role = parallel ? ROLE_ATTN_NORM : ROLE_MLP_NORM;
    const struct norm_args norm =
        model_branch_norm(m, role, l, parallel ? tape->x : tape->x_mid, tape);
    const void *dout =
        residual_back(b, ROLE_POST_MLP_NORM, l, rows, tape->mlp_proj, tape->rstd_post2);

    if (c->block & EXPERTS_BESIDE) beside_back(b, l, rows, tape, loss, dout);
    model_normalise(m, m->normed, rows, &norm);
    if (layer->moe.n_experts == 0)
        dense_back(b, l, rows, dout, tape->gate_up, layer->intermediate, ROLE_GATE_UP, ROLE_DOWN,
                   false);
    else if (!(c->block & EXPERTS_BESIDE))
        experts_back(b, l, rows, tape, loss, dout);
    if (layer->shared_intermediate > 0) shared_back(b, l, rows, tape, dout);
    pre_norm_back(b, role, l, parallel ? b->dparallel : b->dx, rows, &norm, !parallel,
                  layer_splits_experts(c, layer));
}

// The same of norms over all heads of a row, of which ranks hold parts: dw is whole on each.
static void all_heads_back(struct backward *b, void *dx, const struct norm_args *own,
                           const struct heads *h)
{
    struct model *m = b->m;
    struct norm_args norm = *own;
    norm.x = b->heads_raw;
    model_all_heads(m, b->heads_raw, own->x, &(struct heads){h->l, h->rows, h->keys, false});
    const struct norm_shape shape = model_all_heads(m, m->all_heads, dx, h);
    norm_back(b, h->keys ? ROLE_K_NORM : ROLE_Q_NORM, h->l, m->all_heads, m->all_heads, &norm,
              &shape, false);
    model_own_heads(m, dx, m->all_heads, h);
}

// Takes dqkv back through the q and k norms, in place.
static void heads_norm_back(struct backward *b, int l, int rows, const struct layer_tape *tape)
{
    struct model *m = b->m;
    const struct layer_config *layer = &m->config->layers[l];
    size_t keys = (size_t)layer_q_width(layer) * dtype_size(m->dt);
    const struct norm_shape q = model_heads_shape(m, l, rows, layer->n_heads);
    const struct norm_shape k = model_heads_shape(m, l, rows, layer->n_kv_heads);
    const struct norm_args of_q = model_norm(m, ROLE_Q_NORM, l, tape->qkv_raw, tape->rstd_q);
    const struct norm_args of_k =
        model_norm(m, ROLE_K_NORM, l, (const char *)tape->qkv_raw + keys, tape->rstd_k);
    void *dk = (char *)b->dqkv + keys;
    if (m->all_heads) {
        all_heads_back(b, b->dqkv, &of_q, &(struct heads){l, rows, false, true});
        all_heads_back(b, dk, &of_k, &(struct heads){l, rows, true, true});
        return;
    }
    norm_back(b, ROLE_Q_NORM, l, b->dqkv, b->dqkv, &of_q, &q, false);
    if (layer->kv_from >= 0) return;
    norm_back(b, ROLE_K_NORM, l, dk, dk, &of_k, &k, false);
    if (!(m->config->block & V_NORM)) return;
    const size_t values = (size_t)layer_kv_width(layer) * dtype_size(m->dt);
    const struct norm_args of_v = {.x = (const char *)of_k.x + values, .rstd = tape->rstd_v};
    void *dv = (char *)dk + values;
    m->ops->norm_back(m->dev, dv, NULL, NULL, dv, &of_v, &k, false);
}

// Keys' and values' columns of b->dqkv, where layers share them: those of a layer that has none are
// added to what the layer that has them adds to its own.
static void share_back(struct backward *b, int l, int rows)
{
    struct model *m = b->m;
    const struct layer_config *layers = m->config->layers, *layer = &layers[l];
    const int from = layer->kv_from < 0 ? l : layer->kv_from, slot = layers[from].kv_shared;
    if (slot < 0) return;
    const size_t e = dtype_size(m->dt), width = (size_t)layer_qkv_width(layer) * e;
    const int64_t n = (int64_t)rows * 2 * layer_kv_width(layer);
    const size_t kv = 2 * (size_t)layer_kv_width(layer) * e;
    void *own = (char *)b->dqkv + (size_t)layer_q_width(layer) * e, *sum = b->dshared[slot];
    bool is_first = true; // of those that share, from the last layer down
    for (int k = l + 1; k < m->config->n_layers; k++)
        is_first = is_first && layers[k].kv_from != from;
    if (from != l && is_first) {
        device_copy_2d(m->dev, sum, kv, own, width, kv, (size_t)rows);
        return;
    }
    device_copy_2d(m->dev, b->dkv, kv, own, width, kv, (size_t)rows);
    m->ops->add(m->dev, from == l ? b->dkv : sum, from == l ? sum : b->dkv, n, 1.0f, m->dt);
    if (from == l) device_copy_2d(m->dev, own, width, b->dkv, kv, kv, (size_t)rows);
}

// b->dattn_in from b->dqkv, where attention's matmul gives no values, or neither keys nor values.
static void join_qkv(struct backward *b, const struct layer_config *layer, int rows)
{
    struct model *m = b->m;
    const size_t e = dtype_size(m->dt), width = (size_t)layer_qkv_width(layer) * e,
                 in = (size_t)layer_attn_in_width(m->config, layer) * e,
                 kv = (size_t)layer_kv_width(layer) * e, n = (size_t)rows;
    char *keys = (char *)b->dqkv + (size_t)layer_q_width(layer) * e, *sum = b->dkv;
    if (layer->k_is_v) {
        device_copy_2d(m->dev, sum, kv, keys, width, kv, n);
        device_copy_2d(m->dev, sum + n * kv, kv, keys + kv, width, kv, n);
        m->ops->add(m->dev, sum, sum + n * kv, (int64_t)(n * kv / e), 1.0f, m->dt);
        device_copy_2d(m->dev, keys, width, sum, kv, kv, n);
    }
    device_copy_2d(m->dev, b->dattn_in, in, b->dqkv, width, in, n);
}

// From the gradient of what attention gives, projected, to that of m->normed (in dnormed), which
// it computes again. m->gate, free here, takes the gradient of the gates.
static void attend_back(struct backward *b, int l, const struct batch_view *batch,
                        const struct layer_tape *tape, const void *dout,
                        const struct norm_args *norm)
{
    struct model *m = b->m;
    const struct model_config *c = m->config;
    const struct layer_weights *g = &b->grads->layers[l];
    const struct layer_config *layer = &c->layers[l];
    const int rows = batch->n_tokens;
    const struct act_shape gate = model_attn_gate(m, l, tape->attn, rows);
    void *din = layer_attn_in_differs(c, layer) ? b->dattn_in : b->dqkv;

    if (c->block & ATTN_GATE) m->ops->act(m->dev, m->attn_out, tape->gate, &gate);
    matrix_back(b, b->dattn, dout, c->block & ATTN_GATE ? m->attn_out : tape->attn, rows, ROLE_O, l,
                false);
    if (c->block & ATTN_GATE)
        m->ops->act_back(m->dev, m->gate, b->dattn, NULL, b->dattn, tape->gate, &gate);
    if (layer->latent.rank == 0) {
        m->ops->attn_back(m->dev, b->dqkv, g->at[ROLE_SINKS], b->dattn, tape->attn, tape->lse,
                          tape->qkv, batch, &m->attn[l]);
        share_back(b, l, rows);
        if (!(c->block & QK_NORM_LATE)) model_rotate(m, l, b->dqkv, batch, -1.0f);
        if (c->block & QK_NORM) heads_norm_back(b, l, rows, tape);
        if (c->block & QK_NORM_LATE) model_rotate(m, l, b->dqkv, batch, -1.0f);
        if (c->block & ATTN_GATE)
            m->ops->split_gate(m->dev, b->dqkv, m->gate, din, rows, &m->attn[l], true);
        else if (din != b->dqkv)
            join_qkv(b, layer, rows);
    }
    model_normalise(m, m->normed, rows, norm);
    if (layer->latent.rank > 0)
        latent_back(b, l, batch, tape);
    else
        matrix_back(b, b->dnormed, din, m->normed, rows, ROLE_QKV, l, false);
}

// dx is the gradient of x_mid on entry, of the layer's input on return.
static void attention_back(struct backward *b, int l, const struct batch_view *batch,
                           const struct layer_tape *tape)
{
    struct model *m = b->m;
    const struct model_config *c = m->config;
    int rows = batch->n_tokens;
    const struct norm_args norm = model_branch_norm(m, ROLE_ATTN_NORM, l, tape->x, tape);
    const void *dout =
        residual_back(b, ROLE_POST_ATTN_NORM, l, rows, tape->attn_proj, tape->rstd_post1);

    if (c->layers[l].delta.n_heads > 0) {
        model_normalise(m, m->normed, rows, &norm);
        delta_back(b, l, batch, tape, dout);
    } else {
        attend_back(b, l, batch, tape, dout, &norm);
    }
    pre_norm_back(b, ROLE_ATTN_NORM, l, b->dx, rows, &norm, true, false);
    if (c->block & PARALLEL_BLOCK)
        m->ops->add(m->dev, b->dx, b->dparallel, (int64_t)rows * c->hidden, 1.0f, m->dt);
}

// dx is the gradient of what a layer gives on entry, of what its MLP gives on return.
static void own_back(struct backward *b, int l, int rows, const struct tape *tape)
{
    struct model *m = b->m;
    const struct model_config *c = m->config;
    const struct layer_tape *lt = &tape->layers[l];
    const size_t e = dtype_size(m->dt);
    const struct act_shape act = model_own_act(m, rows), gate = model_own_gate(m, rows);
    const void *inputs = model_own_inputs(m, l, tape->layers[0].inputs);
    if (c->block & LAYER_SCALE)
        m->ops->multiply(m->dev, b->dx, m->weights->layers[l].at[ROLE_LAYER_SCALE],
                         (int64_t)rows * c->hidden, m->dt);
    if (c->layer_input == 0) return;
    const void *dout = residual_back(b, ROLE_POST_LAYER_NORM, l, rows, lt->own_proj, lt->rstd_own);
    m->ops->act(m->dev, m->own_act, lt->own_gate, &act);
    m->ops->act(m->dev, m->own_gate, inputs, &gate);
    matrix_back(b, b->down, dout, m->own_gate, rows, ROLE_LAYER_OUT, l, false);
    m->ops->act_back(m->dev, (char *)b->dinputs + (size_t)(l * c->layer_input) * e, b->down, NULL,
                     b->down, inputs, &gate);
    m->ops->act_back(m->dev, b->down_gate, NULL, NULL, b->down, lt->own_gate, &act);
    matrix_back(b, b->dx, b->down_gate, lt->x_own, rows, ROLE_LAYER_GATE, l, true);
}

// Adds dx (T, width), times the scale, to the gradients of the tokens' rows of a table, of which
// this rank holds `held` rows; NULL: it is not trained.
static void table_back(struct backward *b, void *dtable, const void *dx, const struct batch *batch,
                       int width, float scale, int held)
{
    const struct ops *ops = b->m->ops;
    const enum dtype dt = b->m->dt;
    const int n = batch_tokens(batch), first = b->m->config->shard.rank * held;
    const int32_t *tokens = batch_view(batch)->tokens, *order = batch_tokens_order(batch);
    const struct gather_args rows = {tokens, n, width, scale, dt, first, held};
    if (dtable) ops->scatter_add_rows(b->m->dev, dtable, DT_F32, dx, order, &rows);
}

// From the gradient of the inputs that layers have of their own to their table and their matrix,
// and to that of the embeddings, in dx.
static void inputs_back(struct backward *b, const struct batch *batch, const struct tape *tape)
{
    struct model *m = b->m;
    const struct model_config *c = m->config;
    const struct layer_tape *first = &tape->layers[0];
    const int rows = batch_tokens(batch), width = config_layer_inputs(c);
    const int64_t n = (int64_t)rows * width;
    const struct norm_shape shape = model_inputs_norm(m, rows);
    const struct norm_args norm =
        model_norm(m, ROLE_LAYER_INPUT_NORM, 0, first->inputs_raw, first->rstd_inputs);
    table_back(b, b->grads->at[ROLE_LAYER_EMBED], b->dinputs, batch, width, model_inputs_scale(m),
               config_layer_vocab_rows(c));
    device_fill(m->dev, m->inputs_in, 0, (size_t)n * dtype_size(m->dt));
    m->ops->add(m->dev, m->inputs_in, b->dinputs, n, (float)INPUTS_SHARE, m->dt);
    norm_back(b, ROLE_LAYER_INPUT_NORM, 0, m->inputs_in, m->inputs_in, &norm, &shape, false);
    matrix_back(b, b->dx, m->inputs_in, first->x, rows, ROLE_LAYER_INPUT, 0, true);
}

// From dx, the gradient of what a layer that predicts further tokens begins with, to its matrix and
// its two norms; what these read, embeddings and another model's hidden states, has none. m->mtp_in
// is of the forward pass, m->x free here.
static void mtp_back(struct backward *b, const struct batch_view *batch)
{
    struct model *m = b->m;
    const int rows = batch->n_tokens;
    const size_t width = (size_t)m->config->hidden * dtype_size(m->dt);
    const struct norm_shape shape = model_norm_shape(m, rows);
    const struct norm_args halves[] = {
        model_norm(m, ROLE_MTP_EMBED_NORM, 0, m->x, b->mtp_rstd),
        model_norm(m, ROLE_MTP_HIDDEN_NORM, 0, m->hidden_in, b->mtp_rstd)};
    matrix_back(b, b->dpair, b->dx, m->mtp_in, rows, ROLE_MTP_PROJ, 0, false);
    model_embed(m, m->x, batch);
    for (int i = 0; i < 2; i++) {
        device_copy_2d(m->dev, b->dnormed, width, (char *)b->dpair + (size_t)i * width, 2 * width,
                       width, (size_t)rows);
        m->ops->norm(m->dev, m->normed, &halves[i], &shape);
        norm_back(b, ROLE_MTP_EMBED_NORM + i, 0, b->dnormed, b->dnormed, &halves[i], &shape, false);
    }
}

// From the head's loss down to the lowest layer that is trained.
static enum status pass_back(struct backward *b, const struct batch *batch, struct tape *tape,
                             const struct backward_loss *loss)
{
    struct model *m = b->m;
    const struct batch_view *view = batch_view(batch);
    const enum status st = head_back(b, batch, tape, loss);
    if (st != ST_OK) return st;
    for (int l = m->config->n_layers - 1; l >= b->lowest; l--) {
        const struct layer_tape *layer = tape_layer(tape, m, l, view);
        own_back(b, l, view->n_tokens, tape);
        if (layer_has_mlp(&m->config->layers[l])) mlp_back(b, l, view->n_tokens, layer, loss);
        if (layer_mixes(&m->config->layers[l])) attention_back(b, l, view, layer);
        const struct weight_tensor *t = b->grads->tensors; // the layer's first
        while (t->role < ROLE_ATTN_NORM || t->layer < l) t++;
        if (loss->done) loss->done(loss->context, t->offset);
    }
    if (m->config->mtp) mtp_back(b, view);
    if (m->config->layer_input > 0 && b->lowest == 0) inputs_back(b, batch, tape);
    table_back(b, b->grads->at[ROLE_EMBED], b->dx, batch, m->config->hidden, model_embed_scale(m),
               config_vocab_rows(m->config));
    return ST_OK;
}

enum status backward_run(struct backward *b, const struct batch *batch, struct tape *tape,
                         const struct backward_loss *loss)
{
    const struct distillation *d = loss->distillation;
    const size_t bytes = (size_t)batch_rows(batch) * sizeof(float);
    enum status st = check_fits(b, batch);
    if (st != ST_OK) return st;
    if (d && b->chunk > d->teacher->max_rows)
        return status_fail(ST_INVALID,
                           "the teacher's logits come %d rows at a time, the student's %d",
                           d->teacher->max_rows, b->chunk);
    if (loss->dlogprobs) device_copy_in(b->m->dev, b->dlogprob, loss->dlogprobs, bytes);
    if (loss->dentropy) device_copy_in(b->m->dev, b->dentropy, loss->dentropy, bytes);
    if (d && d->weights) device_copy_in(b->m->dev, b->row_weights, d->weights, bytes);
    if ((st = pass_back(b, batch, tape, loss)) != ST_OK) return st;
    if (d) device_copy_out(b->m->dev, d->ret_divergence, b->logprob, bytes);
    if (d) device_copy_out(b->m->dev, d->ret_overlap, b->entropy, bytes);
    if (d && d->ret_agrees) device_copy_out(b->m->dev, d->ret_agrees, b->dlogprob, bytes);
    return device_sync(b->m->dev);
}
