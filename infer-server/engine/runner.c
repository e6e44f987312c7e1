/* runner.c: see runner.h. The host's side of a batch may be refilled as soon as its step was waited
 * for (batch.h), which runner_collect() does.
 *
 * Captured steps. A decode step on CUDA is captured when its shape comes for the second time (the
 * first lets operations set themselves up) and replayed from then on. Shapes are rounded up so that
 * few graphs serve all: rows to a list of sizes, contexts to powers of two. Until a shape's graph
 * is there, and in steps that hold prompts, the time of a step says nothing of a decode step's:
 * `warm` is false. Where nothing is captured, it is always true. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/runner.h"
#include "infer-server/engine/decode_graphs.h"
#include <stdlib.h>

static enum status make_side(const struct runner *r, struct runner_side *ret)
{
    const struct runner_limits *limits = &r->limits;
    const struct model_config *config = r->config;
    const int max_rows = limits->max_rows;
    enum status st;
    CHECK(batch_new(r->dev, limits->max_tokens, limits->max_seqs,
                    (limits->max_context + limits->block_size - 1) / limits->block_size, max_rows,
                    &ret->batch));
    CHECK(sampler_new(r->dev, max_rows, config->vocab_size, config->eos_ids, config->n_eos,
                      &ret->sampler));
    ret->rows = malloc((size_t)max_rows * sizeof *ret->rows);
    ret->top = malloc((size_t)max_rows * sizeof(struct top_logprob *));
    if (!ret->rows || !ret->top) FAIL(ST_NO_MEMORY, "no memory for steps of %d rows", max_rows);
out:
    return st;
}

static void free_side(struct runner_side *side)
{
    free(side->rows);
    free(side->top);
    sampler_free(side->sampler);
    batch_free(side->batch);
}

void runner_turn(struct runner *r)
{
    const struct runner_side was = {r->batch, r->sampler, r->n_rows, r->rows, r->results, r->top};
    r->batch = r->other.batch;
    r->sampler = r->other.sampler;
    r->n_rows = r->other.n_rows;
    r->rows = r->other.rows;
    r->results = r->other.results;
    r->top = r->other.top;
    r->other = was;
    r->mark ^= 1;
}

enum status runner_make_sides(struct runner *r)
{
    r->fed = malloc((size_t)r->limits.max_rows * sizeof *r->fed);
    if (!r->fed) return status_fail(ST_NO_MEMORY, "no memory for steps ahead");
    return make_side(r, &r->other);
}

// Scratch for a sequence's keys and values of a layer in dt, which a GPU takes where many rows
// attend to a cache in e4m3 (kernels/cuda/attention/attention.cu).
static size_t widened_kv_bytes(const struct device *dev, const struct model_config *config,
                               enum dtype dt, int max_context)
{
    size_t most = 0;
    if (device_kind(dev) == DEVICE_CPU || config->kv_cache == KV_CACHE_AUTO) return 0;
    for (int l = 0; l < config->n_layers; l++) {
        const struct layer_config *layer = &config->layers[l];
        const size_t width = (size_t)(layer_cached_width(layer) * (layer->latent.rank > 0 ? 1 : 2));
        if (width > most) most = width;
    }
    return most * dtype_size(dt) * (size_t)((max_context + 63) / 64 * 64) + sizeof(int32_t);
}

enum status runner_new(struct device *dev, const struct weights *weights,
                       const struct runner_limits *limits, struct runner **ret)
{
    enum status st = ST_OK;
    const struct model_config *config = weights->config;
    const int max_rows = limits->max_rows;
    struct runner *r = calloc(1, sizeof *r);
    if (!r) return status_fail(ST_NO_MEMORY, "no memory for a runner");
    r->dev = dev;
    r->limits = *limits;
    r->config = config;
    CHECK(model_new(dev, config, weights, limits->max_tokens, max_rows, limits->max_context,
                    &r->model));
    const size_t widened = (size_t)weights_widest(weights) + model_codes(r->model);
    CHECK(device_reserve(dev, widened * dtype_size(weights->dt)));
    CHECK(device_reserve(dev, widened_kv_bytes(dev, config, weights->dt, limits->max_context)));
    CHECK(make_side(r, &r->other));
    runner_turn(r);
    r->tokens = malloc((size_t)limits->max_tokens * sizeof *r->tokens);
    if (config->mtp)
        CHECK(device_alloc(dev, (size_t)limits->max_tokens * sizeof *r->hidden_rows,
                           (void **)&r->hidden_rows));
    if (device_kind(dev) == DEVICE_CUDA) r->graphs = decode_graphs_new(dev);
    r->rows_apart = r->graphs != NULL;
    if (!r->tokens || (device_kind(dev) == DEVICE_CUDA && !r->graphs))
        FAIL(ST_NO_MEMORY, "no memory for steps of %d rows", max_rows);
    *ret = r;
    return ST_OK;
out:
    runner_free(r);
    return st;
}

void runner_free(struct runner *r)
{
    if (!r) return;
    free(r->tokens);
    device_release(r->dev, r->hidden_rows);
    free(r->fed);
    decode_graphs_free(r->graphs);
    bytes_release(&r->message);
    kv_memory_release(&r->kv);
    free_side(&r->other);
    runner_turn(r);
    free_side(&r->other);
    model_free(r->model);
    free(r);
}

enum status runner_allocate_kv(struct runner *r, int n_blocks, int n_states)
{
    const int n[] = {n_blocks, n_states};
    enum status st;
    CHECK(group_order(r->group, ORDER_KV, r->role, n, sizeof n));
    CHECK(kv_memory_alloc(&r->kv, r->dev, r->config, r->model->dt, r->limits.block_size, n_blocks,
                          n_states));
    st = group_wait(r->group, NULL, 0);
out:
    return st;
}

void runner_use_adapters(struct runner *r, const struct adapter_table *adapters)
{
    r->model->adapters = adapters;
    r->adapted = adapters ? adapter_table_sites(adapters) : 0;
}

void runner_clear(struct runner *r)
{
    batch_clear(r->batch);
    r->n_rows = r->n_fed = 0;
    r->results = NULL;
}

enum status runner_feed(struct runner *r, const int32_t *tokens, int n, int first,
                        const int32_t *blocks, int n_blocks, struct batch_seq seq)
{
    // A table may reach further than this model's context does.
    const int block_size = r->limits.block_size, used = (first + n + block_size - 1) / block_size;
    return batch_add_paged(r->batch, tokens, n, first, blocks, used < n_blocks ? used : n_blocks,
                           block_size, seq);
}

void runner_feed_sampled(struct runner *r, int from)
{
    r->fed[r->n_fed++] = (struct fed_token){batch_tokens(r->batch) - 1, from};
}

enum status runner_want(struct runner *r, int row, const struct sampler_row *sampling)
{
    enum status st = batch_want_row(r->batch, row);
    if (st == ST_OK) r->rows[r->n_rows++] = *sampling;
    return st;
}

static int padded(const struct runner *r, int n, int max)
{
    if (!r->graphs) return n; // none is captured
    const int rows = decode_graphs_rows(n);
    return rows <= max ? rows : n;
}

int runner_padded_rows(const struct runner *r, int n)
{
    return padded(r, n, r->limits.max_seqs);
}

static void forward(struct runner *r, const struct batch_view *view)
{
    const int n = batch_rows(r->batch);
    void *x;
    model_forward(r->model, view, &r->kv.view, NULL, &x);
    if (n > 0) model_head(r->model, x, batch_rows_device(r->batch), 0, n);
}

static void decode_captured(struct runner *r)
{
    struct batch_view view = *batch_view(r->batch);
    view.max_context = decode_graphs_context(view.max_context, r->limits.max_context);
    const struct decode_graph_key key = {.batch = r->batch,
                                         .kv = &r->kv,
                                         .rows = view.n_seqs,
                                         .wanted = batch_rows(r->batch),
                                         .context = view.max_context,
                                         .table_stride = view.table_stride,
                                         .adapted = r->adapted};
    struct decode_graph *g = decode_graphs_find(r->graphs, &key);
    r->warm = g->graph != NULL;
    if (!g->graph && g->warm && device_capture_begin(r->dev)) {
        forward(r, &view);
        if (device_capture_end(r->dev, &g->graph) != ST_OK)
            g->graph = NULL; // the device has the failure
    }
    if (g->graph)
        device_graph_launch(r->dev, g->graph);
    else
        forward(r, &view);
    g->warm = true;
}

static void compute(struct runner *r)
{
    r->warm = !r->graphs;
    if (batch_decodes(r->batch) && r->graphs)
        decode_captured(r);
    else
        forward(r, batch_view(r->batch));
}

// Neighbours of both steps, which are most of them, go in one copy.
static void feed_sampled(struct runner *r)
{
    const struct sample_result *results = r->n_fed ? sampler_results(r->other.sampler) : NULL;
    int32_t *tokens = (int32_t *)batch_view(r->batch)->tokens;
    for (int i = 0, n; i < r->n_fed; i += n) {
        const struct fed_token *fed = &r->fed[i];
        for (n = 1; i + n < r->n_fed && fed[n].row == fed->row + n && fed[n].from == fed->from + n;)
            n++;
        device_copy_2d(r->dev, tokens + fed->row, sizeof *tokens, &results[fed->from].token,
                       sizeof *results, sizeof *tokens, (size_t)n);
    }
}

enum status runner_read_hidden(struct runner *r, const struct model *policy, const int32_t *rows,
                               int n)
{
    struct model *m = r->model;
    const struct model *from = policy ? policy : m;
    const struct gather_args args = {
        .index = r->hidden_rows, .n = n, .width = m->config->hidden, .scale = 1, .dt = m->dt};
    const size_t bytes = (size_t)n * sizeof *rows;
    enum status st =
        group_order(r->group, policy ? ORDER_HIDDEN : ORDER_FURTHER, r->role, rows, bytes);
    if (st != ST_OK) return st;
    device_copy_in(r->dev, r->hidden_rows, rows, bytes);
    m->ops->gather_rows(r->dev, m->hidden_in, from->x, &args);
    if (policy || m->config->family->mtp_normalised) {
        const struct norm_args norm = model_norm(from, ROLE_FINAL_NORM, 0, m->hidden_in, NULL);
        model_normalise(m, m->hidden_in, n, &norm);
    }
    return ST_OK;
}

enum status runner_step(struct runner *r)
{
    const bool decodes = batch_decodes(r->batch);
    enum status st;
    CHECK(batch_commit(r->batch,
                       decodes ? padded(r, batch_tokens(r->batch), r->limits.max_seqs) : 0,
                       decodes ? padded(r, r->n_rows, r->limits.max_rows) : 0));
    if (r->group) {
        bytes_clear(&r->message);
        CHECK(batch_write(r->batch, &r->message));
        CHECK(group_order(r->group, ORDER_STEP, r->role, r->message.data, r->message.len));
    }
    feed_sampled(r);
    compute(r);
out:
    return st;
}

enum status runner_follow(struct runner *r, const void *data, size_t n)
{
    enum status st = batch_read(r->batch, data, n);
    if (st != ST_OK) return st;
    compute(r);
    return device_sync(r->dev);
}

enum status runner_copy(struct runner *r, const struct kv_copy *copy)
{
    if (copy->of_state && (r->kv.n_states == 0 || copy->from == copy->to)) return ST_OK;
    const enum status st = group_order(r->group, ORDER_COPY, r->role, copy, sizeof *copy);
    if (st == ST_OK)
        (copy->of_state ? kv_memory_copy_state : kv_memory_copy_block)(&r->kv, copy->from,
                                                                       copy->to);
    return st;
}

enum status runner_head(struct runner *r, const int32_t *rows, int n, int32_t *device)
{
    const size_t bytes = (size_t)n * sizeof *rows;
    enum status st = group_order(r->group, ORDER_HEAD, r->role, rows, bytes);
    if (st != ST_OK) return st;
    device_copy_in(r->dev, device, rows, bytes);
    model_head(r->model, r->model->x, device, 0, n);
    return ST_OK;
}

enum status runner_sample(struct runner *r)
{
    enum status st = ST_OK;
    if (r->n_rows > 0)
        st = sampler_launch(r->sampler, r->model->logits, r->rows, r->n_rows, &r->drafts);
    if (r->fed) device_mark(r->dev, r->mark);
    return st;
}

enum status runner_collect(struct runner *r)
{
    const enum status st = r->fed ? device_wait(r->dev, r->mark) : device_sync(r->dev);
    if (st == ST_OK && r->n_rows > 0)
        r->results = sampler_collect(r->sampler, r->rows, r->n_rows, r->top);
    return st;
}
