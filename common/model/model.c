/* model.c: the walk over the layers, once, for prefill, decode, verification and training.
 *
 * A layer is: norm, qkv product, rope, attention, output product added to the residual stream; norm,
 * gate and up product, activation, down product added to the residual stream. In training every
 * tensor a backward pass needs is written straight into the tape instead of into scratch; the
 * arithmetic is the same. Decode steps on CUDA are captured once for each shape and replayed. One
 * thread, the owner of the device. */
#include "common/model/model.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- captured decode steps -----------------------------------------------------------------------------
#define MAX_GRAPHS 96

struct decode_graph { // one captured step; everything it froze is its key
    const struct batch *batch;
    const struct kv_view *kv;
    int rows, context;
    bool warm; // ran once uncaptured, so that no operation needs to set itself up while captured
    struct device_graph *graph;
};
struct decode_graphs {
    int n;
    struct decode_graph entry[MAX_GRAPHS];
};

// Shapes are rounded up so that few graphs serve all: rows to these steps, contexts to powers of two.
static int round_rows(int n)
{
    if (n <= 2) return n;
    if (n <= 8) return (n + 1) / 2 * 2;
    if (n <= 32) return (n + 7) / 8 * 8;
    if (n <= 128) return (n + 15) / 16 * 16;
    return (n + 31) / 32 * 32;
}

static int round_context(const struct model *m, int context)
{
    int bucket = 256;
    while (bucket < context) bucket *= 2;
    return bucket < m->max_context ? bucket : m->max_context;
}

int model_decode_padding(const struct model *m, int n)
{
    int rows = round_rows(n);
    return m->graphs && rows <= m->max_rows ? rows : n;
}

// ---- a model -------------------------------------------------------------------------------------------
struct scratch_part {
    void **at;
    size_t bytes;
};

static enum status alloc_scratch(struct model *m)
{
    const struct model_config *c = m->config;
    size_t e = dtype_size(m->dt), t = (size_t)m->max_tokens, r = (size_t)m->max_rows, h = (size_t)c->hidden;
    struct scratch_part parts[] = {
        {&m->x, t * h * e},
        {&m->normed, t * h * e},
        {&m->qkv, t * (size_t)config_qkv_width(c) * e},
        {&m->attn_out, t * (size_t)config_q_width(c) * e},
        {&m->gate_up, t * (size_t)c->intermediate * 2 * e},
        {&m->act, t * (size_t)c->intermediate * e},
        {&m->row_x, r * h * e},
        {&m->row_normed, r * h * e},
        {(void **)&m->row_rstd, r * sizeof(float)},
        {(void **)&m->logits, r * (size_t)c->vocab_size * sizeof(float)},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        enum status st = device_alloc(m->dev, parts[i].bytes, parts[i].at);
        if (st != ST_OK)
            return status_context(st, "model scratch for %d tokens and %d rows of logits", m->max_tokens,
                                  m->max_rows);
        m->scratch_bytes += parts[i].bytes;
    }
    return ST_OK;
}

static enum status upload_rope(struct model *m)
{
    size_t bytes = (size_t)m->max_context * (size_t)(m->config->rope.dim / 2) * 2 * sizeof(float);
    float *table = rope_table(m->config, m->max_context);
    enum status st = ST_OK;
    if (!table) return status_fail(ST_NO_MEMORY, "no memory for the rope table of %d positions", m->max_context);
    CHECK(device_alloc(m->dev, bytes, (void **)&m->rope));
    device_copy_in(m->dev, m->rope, table, bytes);
    st = device_sync(m->dev);
    m->scratch_bytes += bytes;
out:
    free(table);
    return st;
}

enum status model_new(struct device *dev, const struct model_config *config, const struct weights *w,
                      int max_tokens, int max_rows, int max_context, struct model **ret)
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
    if (!device_computes_in(dev, w->dt)) {
        st = status_fail(ST_UNSUPPORTED, "%s does not compute in %s; use --dtype f32", device_spec(dev),
                         dtype_name(w->dt));
        goto out;
    }
    m->attn = calloc((size_t)config->n_layers, sizeof *m->attn);
    if (device_kind(dev) == DEVICE_CUDA) m->graphs = calloc(1, sizeof *m->graphs);
    if (!m->attn || (device_kind(dev) == DEVICE_CUDA && !m->graphs)) {
        st = status_fail(ST_NO_MEMORY, "no memory for a model");
        goto out;
    }
    for (int l = 0; l < config->n_layers; l++)
        m->attn[l] = (struct attn_shape){.n_heads = config->n_heads,
                                         .n_kv_heads = config->n_kv_heads,
                                         .head_dim = config->head_dim,
                                         .scale = (float)(1.0 / sqrt((double)config->head_dim)),
                                         .softcap = 0,
                                         .window = config->window[l]};
    CHECK(alloc_scratch(m));
    CHECK(upload_rope(m));
    *ret = m;
    m = NULL;
out:
    model_free(m);
    return st;
}

void model_free(struct model *m)
{
    if (!m) return;
    for (int i = 0; m->graphs && i < m->graphs->n; i++) device_graph_free(m->graphs->entry[i].graph);
    free(m->graphs);
    void *parts[] = {m->x,     m->normed,     m->qkv,      m->attn_out, m->gate_up, m->act,
                     m->row_x, m->row_normed, m->row_rstd, m->logits,   m->rope};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) device_release(m->dev, parts[i]);
    free(m->attn);
    free(m);
}

// ---- the walk ------------------------------------------------------------------------------------------
static struct norm_shape hidden_norm(const struct model *m, int rows)
{
    return (struct norm_shape){m->config->norm, rows, m->config->hidden, 1, m->config->hidden,
                               m->config->norm_eps};
}

// y (rows, n) = x (rows, k) . w (n, k)^T + beta * y + bias
static void product(struct model *m, void *y, const void *x, const void *w, const void *bias, int rows,
                    int n, int k, float beta, enum dtype out)
{
    struct matmul shape = {rows, n, k, false, true, beta, m->dt, out};
    m->ops->matmul(m->dev, y, x, w, bias, &shape);
}

// The residual stream after attention goes to x_mid, which is x itself outside of training.
static void attention_block(struct model *m, int l, const struct batch_view *batch,
                            const struct kv_view *kv, struct layer_tape *tape, void *x, void *x_mid)
{
    const struct model_config *c = m->config;
    const struct layer_weights *w = &m->weights->layers[l];
    const struct ops *ops = m->ops;
    int rows = batch->n_tokens, width = config_qkv_width(c);
    struct norm_shape shape = hidden_norm(m, rows);
    void *qkv = tape ? tape->qkv : m->qkv, *out = tape ? tape->attn : m->attn_out;

    ops->norm(m->dev, m->normed, tape ? tape->rstd1 : NULL, NULL, x, w->attn_norm, NULL, &shape, m->dt);
    product(m, qkv, m->normed, w->qkv, w->qkv_bias, rows, width, c->hidden, 0, m->dt);
    ops->rope(m->dev, qkv, m->rope, batch->positions, rows, width, c->n_heads + c->n_kv_heads, c->head_dim,
              c->rope.dim, 1.0f, m->dt);
    if (kv) {
        ops->kv_store(m->dev, kv, l, qkv, batch, &m->attn[l]);
        ops->attn_paged(m->dev, out, qkv, kv, l, batch, &m->attn[l]);
    } else {
        // without a tape nobody reads the log-sum-exp; gate_up is free here and large enough for it
        ops->attn_packed(m->dev, out, tape ? tape->lse : (float *)m->gate_up, qkv, batch, &m->attn[l], m->dt);
    }
    if (x_mid != x) device_copy(m->dev, x_mid, x, (size_t)rows * (size_t)c->hidden * dtype_size(m->dt));
    product(m, x_mid, out, w->o, w->o_bias, rows, c->hidden, config_q_width(c), 1, m->dt);
}

static void mlp_block(struct model *m, int l, int rows, struct layer_tape *tape, void *x_mid, void *x_out)
{
    const struct model_config *c = m->config;
    const struct layer_weights *w = &m->weights->layers[l];
    struct norm_shape shape = hidden_norm(m, rows);
    void *gate_up = tape ? tape->gate_up : m->gate_up;

    m->ops->norm(m->dev, m->normed, tape ? tape->rstd2 : NULL, NULL, x_mid, w->mlp_norm, NULL, &shape, m->dt);
    product(m, gate_up, m->normed, w->gate_up, w->gate_up_bias, rows, 2 * c->intermediate, c->hidden, 0, m->dt);
    m->ops->act(m->dev, m->act, gate_up, rows, c->intermediate, c->act, true, m->dt);
    if (x_out != x_mid)
        device_copy(m->dev, x_out, x_mid, (size_t)rows * (size_t)c->hidden * dtype_size(m->dt));
    product(m, x_out, m->act, w->down, w->down_bias, rows, c->hidden, c->intermediate, 1, m->dt);
}

void model_forward(struct model *m, const struct batch_view *batch, const struct kv_view *kv,
                   struct tape *tape, void **ret_x)
{
    const struct model_config *c = m->config;
    void *x = tape ? tape->layers[0].x : m->x;
    m->ops->gather_rows(m->dev, x, m->weights->embed, batch->tokens, batch->n_tokens, c->hidden, 1.0f, m->dt);
    for (int l = 0; l < c->n_layers; l++) {
        struct layer_tape *lt = tape ? &tape->layers[l] : NULL;
        void *x_mid = tape ? lt->x_mid : x;
        void *x_out = !tape ? x : l + 1 < c->n_layers ? tape->layers[l + 1].x : tape->x_final;
        attention_block(m, l, batch, kv, lt, x, x_mid);
        mlp_block(m, l, batch->n_tokens, lt, x_mid, x_out);
        x = x_out;
    }
    *ret_x = x;
}

void model_head(struct model *m, const void *x, const int32_t *rows, int n)
{
    const struct model_config *c = m->config;
    struct norm_shape shape = hidden_norm(m, n);
    m->ops->gather_rows(m->dev, m->row_x, x, rows, n, c->hidden, 1.0f, m->dt);
    m->ops->norm(m->dev, m->row_normed, m->row_rstd, NULL, m->row_x, m->weights->final_norm, NULL, &shape, m->dt);
    product(m, m->logits, m->row_normed, m->weights->head, NULL, n, c->vocab_size, c->hidden, 0, DT_F32);
}

static void run_step(struct model *m, const struct batch_view *view, const struct batch *batch,
                     const struct kv_view *kv)
{
    void *x;
    model_forward(m, view, kv, NULL, &x);
    if (batch_rows(batch) > 0) model_head(m, x, batch_rows_device(batch), batch_rows(batch));
}

static struct decode_graph *find_graph(struct model *m, const struct batch *batch, const struct kv_view *kv,
                                       int context)
{
    struct decode_graphs *g = m->graphs;
    int rows = batch_view(batch)->n_seqs;
    for (int i = 0; i < g->n; i++) {
        struct decode_graph *e = &g->entry[i];
        if (e->batch == batch && e->kv == kv && e->rows == rows && e->context == context) return e;
    }
    if (g->n == MAX_GRAPHS) return NULL; // further shapes simply run uncaptured
    g->entry[g->n] = (struct decode_graph){.batch = batch, .kv = kv, .rows = rows, .context = context};
    return &g->entry[g->n++];
}

void model_step(struct model *m, const struct batch *batch, const struct kv_view *kv)
{
    struct batch_view view = *batch_view(batch);
    bool decode = view.max_query == 1 && !view.packed && batch_rows(batch) == view.n_seqs;
    struct decode_graph *g = NULL;
    if (decode && m->graphs) {
        view.max_context = round_context(m, view.max_context);
        g = find_graph(m, batch, kv, view.max_context);
    }
    if (g && !g->graph && g->warm && device_capture_begin(m->dev)) {
        run_step(m, &view, batch, kv);
        if (device_capture_end(m->dev, &g->graph) != ST_OK) g->graph = NULL; // the device has the failure
    }
    if (g && g->graph) {
        device_graph_launch(m->dev, g->graph);
        return;
    }
    run_step(m, &view, batch, kv);
    if (g) g->warm = true;
}

// ---- the tape ------------------------------------------------------------------------------------------
// Visits every part of a tape in one fixed order: sums their sizes, or sets the pointers.
static size_t lay_out(const struct model_config *c, enum dtype dt, size_t t, struct tape *tape)
{
    size_t e = dtype_size(dt), at = 0;
    char *base = tape ? tape->memory : NULL;
    size_t hidden = t * (size_t)c->hidden * e, stat = t * sizeof(float);
    size_t sizes[] = {hidden,
                      stat,
                      t * (size_t)config_qkv_width(c) * e,
                      t * (size_t)config_q_width(c) * e,
                      t * (size_t)c->n_heads * sizeof(float),
                      hidden,
                      stat,
                      t * (size_t)c->intermediate * 2 * e};
    for (int l = 0; l < c->n_layers; l++) {
        struct layer_tape *lt = tape ? &tape->layers[l] : NULL;
        void **at_pointer[8] = {0};
        if (lt) {
            void **list[8] = {&lt->x,   (void **)&lt->rstd1, &lt->qkv, &lt->attn, (void **)&lt->lse, &lt->x_mid,
                              (void **)&lt->rstd2, &lt->gate_up};
            memcpy(at_pointer, list, sizeof list);
        }
        for (int i = 0; i < 8; i++) {
            if (lt) *at_pointer[i] = base + at;
            at += (sizes[i] + 255) / 256 * 256;
        }
    }
    if (tape) tape->x_final = base + at;
    return at + hidden;
}

size_t tape_bytes(const struct model_config *config, enum dtype dt, int max_tokens)
{
    return lay_out(config, dt, (size_t)max_tokens, NULL);
}

enum status tape_new(const struct model *m, int max_tokens, struct tape **ret)
{
    enum status st = ST_OK;
    struct tape *tape = calloc(1, sizeof *tape);
    if (tape) tape->layers = calloc((size_t)m->config->n_layers, sizeof *tape->layers);
    if (!tape || !tape->layers) {
        st = status_fail(ST_NO_MEMORY, "no memory for a tape");
        goto out;
    }
    tape->max_tokens = max_tokens;
    tape->bytes = tape_bytes(m->config, m->dt, max_tokens);
    st = device_alloc(m->dev, tape->bytes, &tape->memory);
    if (st != ST_OK) {
        status_context(st, "activations of %d tokens", max_tokens);
        goto out;
    }
    lay_out(m->config, m->dt, (size_t)max_tokens, tape);
    *ret = tape;
    tape = NULL;
out:
    tape_free(m->dev, tape);
    return st;
}

void tape_free(struct device *dev, struct tape *tape)
{
    if (!tape) return;
    device_release(dev, tape->memory);
    free(tape->layers);
    free(tape);
}
