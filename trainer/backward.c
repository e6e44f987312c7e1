/* backward.c: the layer walk in reverse. One thread.
 *
 * The head comes first, in chunks: the logits of at most model.max_rows rows exist at a time, are
 * turned into their gradient and used up, so the (tokens, vocabulary) matrix is never whole. What is
 * cheap to compute again (normalised inputs, activations) is not on the tape and is computed again.
 * Weight gradients are added in f32; the gradient of the residual stream, dx, has the weights' dtype.
 */
#include "trainer/backward.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

struct backward {
    struct model *m;
    const struct weights *grads;
    int max_tokens, max_targets;
    // device scratch
    void *dx, *dnormed;  // (max_tokens, hidden)
    void *dgate_up;      // (max_tokens, 2 * intermediate)
    void *dact;          // (max_tokens, intermediate)
    void *dqkv, *dattn;  // (max_tokens, qkv width), (max_tokens, q width)
    void *dlogits;       // (model.max_rows, vocab)
    void *drows;         // (max_targets, hidden)
    int32_t *targets;    // (max_targets)
    float *logprob, *lse, *entropy, *dlogprob; // (max_targets)
    bool logits_kept;    // the last backward_logprobs left all its logits in model.logits
};

// Every scratch buffer: where its pointer stands, and its bytes.
struct part {
    size_t field, bytes;
};
#define N_PARTS 13
#define PART(name, size) {offsetof(struct backward, name), (size)}

static void list_parts(const struct model *m, int max_tokens, int max_targets, struct part ret[N_PARTS])
{
    const struct model_config *c = m->config;
    size_t e = dtype_size(m->dt), t = (size_t)max_tokens, n = (size_t)max_targets, h = (size_t)c->hidden;
    struct part parts[N_PARTS] = {
        PART(dx, t * h * e),
        PART(dnormed, t * h * e),
        PART(dgate_up, t * (size_t)c->intermediate * 2 * e),
        PART(dact, t * (size_t)c->intermediate * e),
        PART(dqkv, t * (size_t)config_qkv_width(c) * e),
        PART(dattn, t * (size_t)config_q_width(c) * e),
        PART(dlogits, (size_t)m->max_rows * (size_t)c->vocab_size * e),
        PART(drows, n * h * e),
        PART(targets, n * sizeof(int32_t)),
        PART(logprob, n * sizeof(float)),
        PART(lse, n * sizeof(float)),
        PART(entropy, n * sizeof(float)),
        PART(dlogprob, n * sizeof(float)),
    };
    memcpy(ret, parts, sizeof parts);
}

static void **part_pointer(struct backward *b, const struct part *part)
{
    return (void **)((char *)b + part->field);
}

size_t backward_bytes(const struct model *m, int max_tokens, int max_targets)
{
    struct part parts[N_PARTS];
    size_t total = 0;
    list_parts(m, max_tokens, max_targets, parts);
    for (int i = 0; i < N_PARTS; i++) total += parts[i].bytes;
    return total;
}

enum status backward_new(struct model *m, const struct weights *grads, int max_tokens, int max_targets,
                         struct backward **ret)
{
    struct part parts[N_PARTS];
    enum status st = ST_OK;
    struct backward *b = calloc(1, sizeof *b);
    if (!b) return status_fail(ST_NO_MEMORY, "no memory for the backward pass");
    b->m = m;
    b->grads = grads;
    b->max_tokens = max_tokens;
    b->max_targets = max_targets;
    list_parts(m, max_tokens, max_targets, parts);
    for (int i = 0; i < N_PARTS; i++) {
        st = device_alloc(m->dev, parts[i].bytes, part_pointer(b, &parts[i]));
        if (st != ST_OK) {
            status_context(st, "backward scratch for %d tokens", max_tokens);
            goto out;
        }
    }
    *ret = b;
    b = NULL;
out:
    backward_free(b);
    return st;
}

void backward_free(struct backward *b)
{
    struct part parts[N_PARTS];
    if (!b) return;
    list_parts(b->m, b->max_tokens, b->max_targets, parts);
    for (int i = 0; i < N_PARTS; i++) device_release(b->m->dev, *part_pointer(b, &parts[i]));
    free(b);
}

// ---- the head --------------------------------------------------------------------------------------------
enum status backward_logprobs(struct backward *b, const struct batch *batch, const void *x,
                              const int32_t *targets, float temperature, float *ret_logprobs,
                              float *ret_entropy)
{
    struct model *m = b->m;
    int n = batch_rows(batch), vocab = m->config->vocab_size;
    if (n > b->max_targets)
        return status_fail(ST_INVALID, "%d targets in a micro-batch that has room for %d", n, b->max_targets);
    device_copy_in(m->dev, b->targets, targets, (size_t)n * sizeof *targets);
    for (int at = 0; at < n; at += m->max_rows) {
        int rows = n - at < m->max_rows ? n - at : m->max_rows;
        model_head(m, x, batch_rows_device(batch) + at, rows);
        m->ops->logprob(m->dev, b->logprob + at, b->lse + at, ret_entropy ? b->entropy + at : NULL, m->logits,
                        b->targets + at, rows, vocab, temperature);
    }
    b->logits_kept = n <= m->max_rows;
    device_copy_out(m->dev, ret_logprobs, b->logprob, (size_t)n * sizeof(float));
    if (ret_entropy) device_copy_out(m->dev, ret_entropy, b->entropy, (size_t)n * sizeof(float));
    return device_sync(m->dev);
}

static struct norm_shape hidden_norm(const struct model *m, int rows)
{
    return (struct norm_shape){m->config->norm, rows, m->config->hidden, 1, m->config->hidden,
                               m->config->norm_eps};
}

// dx (rows, k) = dy (rows, n) . w (n, k)
static void back_to_input(struct model *m, void *dx, const void *dy, const void *w, int rows, int n, int k)
{
    struct matmul shape = {rows, k, n, false, false, 0, m->dt, m->dt};
    m->ops->matmul(m->dev, dx, dy, w, NULL, &shape);
}

// dw (n, k) += dy (rows, n)^T . x (rows, k), and db (n) += column sums of dy where there is a bias
static void back_to_weight(struct model *m, void *dw, void *db, const void *dy, const void *x, int rows,
                           int n, int k)
{
    struct matmul shape = {n, k, rows, true, false, 1, m->dt, DT_F32};
    m->ops->matmul(m->dev, dw, dy, x, NULL, &shape);
    if (db) m->ops->column_sum(m->dev, db, dy, rows, n, m->dt);
}

static void head_back(struct backward *b, const struct batch *batch, const struct tape *tape,
                      float temperature)
{
    struct model *m = b->m;
    const struct model_config *c = m->config;
    int n = batch_rows(batch);
    size_t e = dtype_size(m->dt);
    for (int at = 0; at < n; at += m->max_rows) {
        int rows = n - at < m->max_rows ? n - at : m->max_rows;
        struct norm_shape shape = hidden_norm(m, rows);
        void *drows = (char *)b->drows + (size_t)at * (size_t)c->hidden * e;
        if (!b->logits_kept) model_head(m, tape->x_final, batch_rows_device(batch) + at, rows);
        m->ops->logprob_back(m->dev, b->dlogits, b->dlogprob + at, m->logits, b->lse + at, b->targets + at,
                             rows, c->vocab_size, temperature, m->dt);
        back_to_weight(m, b->grads->head, NULL, b->dlogits, m->row_normed, rows, c->vocab_size, c->hidden);
        back_to_input(m, drows, b->dlogits, m->weights->head, rows, c->vocab_size, c->hidden);
        m->ops->norm_back(m->dev, drows, b->grads->final_norm, NULL, drows, m->row_x, m->weights->final_norm,
                          m->row_rstd, NULL, &shape, false, m->dt);
    }
    b->logits_kept = false;
    device_fill(m->dev, b->dx, 0, (size_t)batch_tokens(batch) * (size_t)c->hidden * e);
    m->ops->scatter_add_rows(m->dev, b->dx, b->drows, batch_rows_device(batch), batch_rows_order(batch), n,
                             c->hidden, 1.0f, m->dt, m->dt);
}

// ---- the layers --------------------------------------------------------------------------------------------
// dx is the gradient of the layer's output on entry, of x_mid on return.
static void mlp_back(struct backward *b, int l, int rows, const struct layer_tape *tape)
{
    struct model *m = b->m;
    const struct model_config *c = m->config;
    const struct layer_weights *w = &m->weights->layers[l], *g = &b->grads->layers[l];
    struct norm_shape shape = hidden_norm(m, rows);
    int hidden = c->hidden, inner = c->intermediate;

    m->ops->act(m->dev, m->act, tape->gate_up, rows, inner, c->act, true, m->dt);
    back_to_weight(m, g->down, g->down_bias, b->dx, m->act, rows, hidden, inner);
    back_to_input(m, b->dact, b->dx, w->down, rows, hidden, inner);
    m->ops->act_back(m->dev, b->dgate_up, b->dact, tape->gate_up, rows, inner, c->act, true, m->dt);
    m->ops->norm(m->dev, m->normed, NULL, NULL, tape->x_mid, w->mlp_norm, NULL, &shape, m->dt);
    back_to_weight(m, g->gate_up, g->gate_up_bias, b->dgate_up, m->normed, rows, 2 * inner, hidden);
    back_to_input(m, b->dnormed, b->dgate_up, w->gate_up, rows, 2 * inner, hidden);
    m->ops->norm_back(m->dev, b->dx, g->mlp_norm, NULL, b->dnormed, tape->x_mid, w->mlp_norm, tape->rstd2,
                      NULL, &shape, true, m->dt);
}

// dx is the gradient of x_mid on entry, of the layer's input on return.
static void attention_back(struct backward *b, int l, const struct batch_view *batch,
                           const struct layer_tape *tape)
{
    struct model *m = b->m;
    const struct model_config *c = m->config;
    const struct layer_weights *w = &m->weights->layers[l], *g = &b->grads->layers[l];
    int rows = batch->n_tokens, width = config_qkv_width(c), q_width = config_q_width(c);
    struct norm_shape shape = hidden_norm(m, rows);

    back_to_weight(m, g->o, g->o_bias, b->dx, tape->attn, rows, c->hidden, q_width);
    back_to_input(m, b->dattn, b->dx, w->o, rows, c->hidden, q_width);
    m->ops->attn_packed_back(m->dev, b->dqkv, b->dattn, tape->attn, tape->lse, tape->qkv, batch, &m->attn[l],
                             m->dt);
    m->ops->rope(m->dev, b->dqkv, m->rope, batch->positions, rows, width, c->n_heads + c->n_kv_heads,
                 c->head_dim, c->rope.dim, -1.0f, m->dt);
    m->ops->norm(m->dev, m->normed, NULL, NULL, tape->x, w->attn_norm, NULL, &shape, m->dt);
    back_to_weight(m, g->qkv, g->qkv_bias, b->dqkv, m->normed, rows, width, c->hidden);
    back_to_input(m, b->dnormed, b->dqkv, w->qkv, rows, width, c->hidden);
    m->ops->norm_back(m->dev, b->dx, g->attn_norm, NULL, b->dnormed, tape->x, w->attn_norm, tape->rstd1, NULL,
                      &shape, true, m->dt);
}

enum status backward_run(struct backward *b, const struct batch *batch, const struct tape *tape,
                         const float *dlogprobs, float temperature)
{
    struct model *m = b->m;
    const struct batch_view *view = batch_view(batch);
    int n = batch_rows(batch);
    if (view->n_tokens > b->max_tokens || n > b->max_targets)
        return status_fail(ST_INVALID, "a micro-batch of %d tokens and %d targets; there is room for %d and %d",
                           view->n_tokens, n, b->max_tokens, b->max_targets);
    device_copy_in(m->dev, b->dlogprob, dlogprobs, (size_t)n * sizeof *dlogprobs);
    head_back(b, batch, tape, temperature);
    for (int l = m->config->n_layers - 1; l >= 0; l--) {
        mlp_back(b, l, view->n_tokens, &tape->layers[l]);
        attention_back(b, l, view, &tape->layers[l]);
    }
    m->ops->scatter_add_rows(m->dev, b->grads->embed, b->dx, view->tokens, batch_tokens_order(batch),
                             view->n_tokens, m->config->hidden, 1.0f, m->dt, DT_F32);
    return device_sync(m->dev);
}
