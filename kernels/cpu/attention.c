/* attention.c: causal attention over a paged cache or over rows of the same batch, and its
 * gradient.
 *
 * All three work on a block: a few neighbouring rows of one sequence with the query heads that
 * share a kv head, so that a key or value that was read serves up to BLOCK_QUERIES queries. Scores
 * of all keys that the block sees, softmax of each query over its own keys, weighted sum of the
 * values in key order. The score of a pair has an order of summation of its own (cpu_dots), a key
 * that a query does not see has weight 0 and adds exactly nothing: so a row's result has the same
 * bits whatever block, batch or cut of the context into memory blocks it is computed in.
 *
 * Rows of one tree (batch_view.h) add to gradients of the same keys; different trees and different
 * kv heads do not, and are what threads divide in the gradient. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include <omp.h>

enum { BLOCK_QUERIES = 16 };

// The keys and values one row sees, for one kv head: entries first..n-1 of its context.
struct context {
    int first, n;
    int64_t stride; // floats between keys
    // packed: of row 0, and the sequence, whose ancestors have the rows before its own
    const float *k, *v;
    const struct batch_view *batch;
    int s;
    // paged: of slot 0, of the pool's dtype; scales of the layer where that is e4m3, else NULL
    const void *pool_k, *pool_v;
    const int8_t *scales;
    const int32_t *blocks;
    int block_size;
};

// The slot of entry j of a paged context, and how many entries from j on follow it.
static int paged_run(const struct context *ctx, int j, int64_t *ret_slot)
{
    const int offset = j % ctx->block_size, run = ctx->n - j;
    *ret_slot = (int64_t)ctx->blocks[j / ctx->block_size] * ctx->block_size + offset;
    return run < ctx->block_size - offset ? run : ctx->block_size - offset;
}

// Where entry j lies, and how many entries from j on follow one another in memory.
static int context_run(const struct context *ctx, int j, const float **ret_k, const float **ret_v)
{
    int run = ctx->n - j;
    if (ctx->blocks) {
        int64_t slot;
        run = paged_run(ctx, j, &slot);
        *ret_k = (const float *)ctx->pool_k + slot * ctx->stride;
        *ret_v = (const float *)ctx->pool_v + slot * ctx->stride;
        return run;
    }
    const struct batch_view *b = ctx->batch;
    int s = ctx->s;
    while (j < b->first_position[s]) s = b->parent[s];
    const int row = b->query_start[s] + j - b->first_position[s],
              left = b->query_start[s + 1] - row;
    *ret_k = ctx->k + row * ctx->stride;
    *ret_v = ctx->v + row * ctx->stride;
    return run < left ? run : left;
}

static struct context packed_context(const float *qkv, const struct batch_view *batch,
                                     const struct attn_shape *shape, int row, int kv_head)
{
    const int s = batch->seq_of[row];
    const float *k = qkv + (int64_t)(shape->n_heads + kv_head) * shape->head_dim;
    const float *v = shape->latent > 0 ? k : k + (int64_t)shape->n_kv_heads * shape->head_dim;
    const int n = batch->first_position[s] + row - batch->query_start[s] + 1;
    return (struct context){
        .first = shape->window > 0 && n > shape->window ? n - shape->window : 0,
        .n = n,
        .stride = attn_row_width(shape),
        .k = k,
        .v = v,
        .batch = batch,
        .s = s,
    };
}

static struct context paged_context(const struct kv_view *kv, int layer,
                                    const struct batch_view *batch, const struct attn_shape *shape,
                                    int row, int kv_head)
{
    const int s = batch->seq_of[row];
    const int n = batch->context_len[s] > 0 ? batch->positions[row] + 1 : 0;
    const int64_t at = (kv->layers[layer].offset + (int64_t)kv_head * shape->head_dim) *
                       (int64_t)dtype_size(kv->dt);
    return (struct context){
        .first = shape->window > 0 && n > shape->window ? n - shape->window : 0,
        .n = n,
        .stride = kv->layers[layer].width,
        .pool_k = (const char *)kv->k + at,
        .pool_v = (const char *)(shape->latent > 0 ? kv->k : kv->v) + at,
        .scales = kv->dt == DT_E4M3 ? kv->scales + kv->layers[layer].scales : NULL,
        .blocks = batch->block_table + (int64_t)s * batch->table_stride,
        .block_size = kv->block_size,
    };
}

/* out[i] += sum over j < n of p[i * p_row + j * p_col] * x[j], for `rows` rows (1 or 4 at a time)
 * and `vecs` registers of columns: everything stays there while j runs, in order. */
VEC_INLINE void add_tile(float *out, int64_t out_stride, const float *p, int64_t p_row,
                         int64_t p_col, const float *x, int64_t x_stride, int n, int rows, int vecs)
{
    vec sum[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sum[i][v] = load_vec(out + i * out_stride + v * WIDTH);
    for (int j = 0; j < n; j++) {
        vec value[4];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) value[v] = load_vec(x + j * x_stride + v * WIDTH);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            vec weight = p[i * p_row + j * p_col] - (vec){0};
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) sum[i][v] = fma_vec(weight, value[v], sum[i][v]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) store_vec(out + i * out_stride + v * WIDTH, sum[i][v]);
}

// A weighted sum of rows: out (rows, dim) += P (rows, n) X (n, dim).
struct weighted_sum {
    float *out;
    const float *p, *x;
    int64_t out_stride, p_row, p_col, x_stride;
    int rows, n, dim;
};

static void add_weighted(const struct weighted_sum *w)
{
    int d = 0;
    while (d < w->dim) {
        const int left = w->dim - d;
        const int step = left >= 4 * WIDTH ? 4 * WIDTH : left >= WIDTH ? WIDTH : left;
        for (int i = 0; i < w->rows;) {
            float *out = w->out + i * w->out_stride + d;
            const float *p = w->p + i * w->p_row, *x = w->x + d;
            const int rows = w->rows - i >= 4 ? 4 : 1;
#define ADD_TILE(rows, vecs)                                                                       \
    add_tile(out, w->out_stride, p, w->p_row, w->p_col, x, w->x_stride, w->n, rows, vecs)
            if (step == 4 * WIDTH) {
                if (rows == 4)
                    ADD_TILE(4, 4);
                else
                    ADD_TILE(1, 4);
            } else if (step == WIDTH) {
                if (rows == 4)
                    ADD_TILE(4, 1);
                else
                    ADD_TILE(1, 1);
            } else {
                for (int r = 0; r < rows; r++)
                    for (int j = 0; j < w->n; j++) {
                        const float weight = p[r * w->p_row + j * w->p_col];
                        float *to = out + r * w->out_stride;
                        for (int c = 0; c < step; c++)
                            to[c] = fma_f32(weight, x[j * w->x_stride + c], to[c]);
                    }
            }
#undef ADD_TILE
            i += rows;
        }
        d += step;
    }
}

// One block: rows row .. row + rows - 1 of one sequence and the queries of one kv head. Query
// (i, h) is number i * group + h of its matrices.
struct block {
    const struct attn_shape *shape;
    int row, rows, kv_head, group;
    struct context all;       // everything that some row sees
    int first[BLOCK_QUERIES]; // of each row: its keys are first..end-1, relative to
    int end[BLOCK_QUERIES];   // all.first
    float *q;                 // (queries, dim), times the scale
    float *p;                 // (queries, keys): scores, then weights
    float *wide;              // of a pool in e4m3: (block_size, head_dim)
};

static int keys_of(const struct block *b)
{
    return b->all.n - b->all.first;
}
static int queries_of(const struct block *b)
{
    return b->rows * b->group;
}

struct source { // where the keys are: in the pool (kv not NULL) or in the batch
    const float *qkv;
    const struct kv_view *kv;
    int layer;
    const struct batch_view *batch;
    const struct attn_shape *shape;
};

static struct context context_of(const struct source *from, int row, int kv_head)
{
    return from->kv ? paged_context(from->kv, from->layer, from->batch, from->shape, row, kv_head)
                    : packed_context(from->qkv, from->batch, from->shape, row, kv_head);
}

// b->row, rows, kv_head, q and p are set; the rest is found here, and q is filled.
static void block_begin(struct block *b, const struct source *from)
{
    const struct attn_shape *shape = b->shape = from->shape;
    const int dim = shape->head_dim;
    b->group = shape->n_heads / shape->n_kv_heads;
    struct context row[BLOCK_QUERIES];
    for (int i = 0; i < b->rows; i++) {
        row[i] = context_of(from, b->row + i, b->kv_head);
        if (i == 0) b->all = row[0];
        if (row[i].first < b->all.first) b->all.first = row[i].first;
        if (row[i].n > b->all.n) b->all.n = row[i].n;
    }
    for (int i = 0; i < b->rows; i++) {
        b->first[i] = row[i].first - b->all.first;
        b->end[i] = row[i].n - b->all.first;
        const float *q =
            from->qkv + (b->row + i) * attn_row_width(shape) + (int64_t)b->kv_head * b->group * dim;
        float *to = b->q + (int64_t)i * b->group * dim;
#pragma omp simd
        for (int c = 0; c < b->group * dim; c++) to[c] = shape->scale * q[c];
    }
}

// Keys, or values, of a context that follow one another in memory.
struct run {
    const float *rows;
    int64_t stride;
    int n;
};

static struct run run_of(const struct block *b, int j, bool values)
{
    const struct context *ctx = &b->all;
    const struct attn_shape *shape = b->shape;
    const float *k = NULL, *v = NULL;
    if (!ctx->scales) {
        const int n = context_run(ctx, j, &k, &v);
        return (struct run){values ? v : k, ctx->stride, n};
    }
    const uint8_t *codes = values ? ctx->pool_v : ctx->pool_k;
    int64_t slot;
    const int n = paged_run(ctx, j, &slot), dim = shape->head_dim;
    for (int i = 0; i < n; i++) {
        const int64_t at =
            kv_scale_at(slot / ctx->block_size, (int)(slot % ctx->block_size) + i, ctx->block_size,
                        shape->n_kv_heads, b->kv_head, values && shape->latent == 0);
        cpu_widen_row(b->wide + (int64_t)i * dim, codes + (slot + i) * ctx->stride, ctx->scales[at],
                      dim);
    }
    return (struct run){b->wide, dim, n};
}

// scores (queries, keys) = a (queries, dim) times all keys, or all values
static void block_dots(const struct block *b, float *scores, const float *a, bool values)
{
    const int dim = b->shape->head_dim;
    struct run run;
    for (int j = b->all.first; j < b->all.n; j += run.n) {
        run = run_of(b, j, values);
        const struct dots dots = {.a = a,
                                  .b = run.rows,
                                  .c = scores + j - b->all.first,
                                  .lda = dim,
                                  .ldb = run.stride,
                                  .ldc = keys_of(b),
                                  .k = dim};
        cpu_dots(&dots, 0, queries_of(b), 0, run.n);
    }
}

// out (queries, dim) += weights (queries, keys) times all values, or all keys
static void block_sum(const struct block *b, float *out, const float *weights, bool values)
{
    const int dim = values ? attn_value_dim(b->shape) : b->shape->head_dim;
    struct run run;
    for (int j = b->all.first; j < b->all.n; j += run.n) {
        run = run_of(b, j, values);
        add_weighted(&(struct weighted_sum){.out = out,
                                            .p = weights + j - b->all.first,
                                            .x = run.rows,
                                            .out_stride = dim,
                                            .p_row = keys_of(b),
                                            .p_col = 1,
                                            .x_stride = run.stride,
                                            .rows = queries_of(b),
                                            .n = run.n,
                                            .dim = dim});
    }
}

static void block_scores(const struct block *b)
{
    block_dots(b, b->p, b->q, false);
    const float cap = b->shape->softcap;
    if (cap > 0)
        for (int64_t i = 0; i < (int64_t)queries_of(b) * keys_of(b); i++)
            b->p[i] = cap * tanhf(b->p[i] / cap);
}

// Turns n scores into weights, beside that of a sink (NULL: there is none); returns their
// log-sum-exp.
static float softmax(float *p, int n, const float *sink)
{
    float max = max_f32(p, n), sum;
    if (sink && *sink > max) max = *sink;
#pragma omp simd
    for (int j = 0; j < n; j++) p[j] = exp_f32(p[j] - max);
    sum = sum_f32(p, n);
    if (sink) sum += exp_f32(*sink - max);
    const float scale = 1.0f / sum;
#pragma omp simd
    for (int j = 0; j < n; j++) p[j] *= scale;
    return max + logf(sum);
}

static void clear_unseen(float *p, int first, int end, int n)
{
    memset(p, 0, (size_t)first * sizeof *p);
    memset(p + end, 0, (size_t)(n - end) * sizeof *p);
}

// sum: scratch (queries, dim)
static void attend(float *out, float *lse, struct block *b, float *sum)
{
    const struct attn_shape *shape = b->shape;
    const int n = keys_of(b), dim = attn_value_dim(shape), head = b->kv_head * b->group;
    memset(sum, 0, (size_t)queries_of(b) * dim * sizeof *sum);
    if (n > 0) block_scores(b);
    for (int q = 0; q < queries_of(b) && n > 0; q++) {
        const int i = q / b->group, first = b->first[i], end = b->end[i];
        const float *sink = shape->sinks ? (const float *)shape->sinks + head + q % b->group : NULL;
        float *p = b->p + (int64_t)q * n, log_sum = softmax(p + first, end - first, sink);
        clear_unseen(p, first, end, n);
        if (lse) lse[(int64_t)(b->row + i) * shape->n_heads + head + q % b->group] = log_sum;
    }
    if (n > 0) block_sum(b, sum, b->p, true);
    for (int i = 0; i < b->rows; i++)
        memcpy(out + ((int64_t)(b->row + i) * shape->n_heads + head) * dim,
               sum + (int64_t)i * b->group * dim, (size_t)b->group * dim * sizeof *out);
}

// Rows from `row` on, below `end`, that make one block: of one sequence, and not too many queries.
static int block_rows(const struct source *from, int row, int end)
{
    int group = from->shape->n_heads / from->shape->n_kv_heads, rows = 1;
    while (row + rows < end && (rows + 1) * group <= BLOCK_QUERIES &&
           from->batch->seq_of[row + rows] == from->batch->seq_of[row])
        rows++;
    return rows;
}

// Floats of a scratch matrix of (queries, columns).
static int64_t matrix_floats(const struct attn_shape *shape, int64_t columns)
{
    int group = shape->n_heads / shape->n_kv_heads;
    int64_t queries = group > BLOCK_QUERIES ? group : BLOCK_QUERIES;
    return (queries * columns + 15) / 16 * 16;
}

// A rough count of multiplications, to decide whether threads are worth it.
static bool many(const struct source *from)
{
    return (int64_t)from->batch->n_tokens * from->shape->n_heads * from->shape->head_dim *
               from->batch->max_context >
           PARALLEL_WORK * 8;
}

// False, with the failure recorded, where a row sees more than max_context says: buffers rest on
// it.
static bool contexts_fit(struct device *dev, const struct batch_view *batch)
{
    for (int row = 0; row < batch->n_tokens; row++) {
        int s = batch->seq_of[row], n;
        if (batch->packed)
            n = batch->first_position[s] + row - batch->query_start[s] + 1;
        else
            n = batch->context_len[s] > 0 ? batch->positions[row] + 1 : 0;
        if (n <= batch->max_context) continue;
        device_fail(dev, "attention: row %d sees %d keys, over max_context %d", row, n,
                    batch->max_context);
        return false;
    }
    return true;
}

static void forward(struct device *dev, float *out, float *lse, const struct source *from)
{
    const int kv_heads = from->shape->n_kv_heads, n_tokens = from->batch->n_tokens;
    const int64_t wide = matrix_floats(from->shape, from->batch->max_context);
    const int64_t narrow = matrix_floats(from->shape, from->shape->head_dim);
    const struct kv_view *kv = from->kv;
    const int64_t widened =
        kv && kv->dt == DT_E4M3 ? (int64_t)kv->block_size * from->shape->head_dim : 0;
    const int64_t per_thread = wide + 2 * narrow + (widened + 15) / 16 * 16;
    float *scratch =
        cpu_workspace(dev, (size_t)omp_get_max_threads() * per_thread * sizeof *scratch);
    if (!scratch || !contexts_fit(dev, from->batch)) return;
    // pieces of rows that threads take; blocks never cross them
    const int piece = BLOCK_QUERIES, units = (n_tokens + piece - 1) / piece * kv_heads;
#pragma omp parallel for schedule(dynamic) if (many(from))
    for (int unit = 0; unit < units; unit++) {
        float *mine = scratch + omp_get_thread_num() * per_thread;
        int row = unit / kv_heads * piece, end = row + piece < n_tokens ? row + piece : n_tokens;
        for (int rows; row < end; row += rows) {
            rows = block_rows(from, row, end);
            struct block b = {.row = row, .rows = rows, .kv_head = unit % kv_heads};
            b.p = mine;
            b.q = mine + wide;
            b.wide = mine + wide + 2 * narrow;
            block_begin(&b, from);
            attend(out, lse, &b, mine + wide + narrow);
        }
    }
}

// The heads of a row's keys, or of its values, into a slot of a pool in e4m3.
static void store_codes(const struct kv_view *kv, int layer, int64_t slot, const float *from,
                        const struct attn_shape *shape, bool values)
{
    const struct kv_layer *l = &kv->layers[layer];
    uint8_t *codes = (uint8_t *)(values ? kv->v : kv->k) + l->offset + slot * l->width;
    for (int h = 0; h < shape->n_kv_heads; h++) {
        const int64_t at = (int64_t)h * shape->head_dim;
        const int64_t scale = kv_scale_at(slot / kv->block_size, (int)(slot % kv->block_size),
                                          kv->block_size, shape->n_kv_heads, h, values);
        kv->scales[l->scales + scale] = cpu_quantise_row(codes + at, from + at, shape->head_dim);
    }
}

void cpu_rope_store(struct device *dev, void *qkv, const struct rope_store *store)
{
    const struct attn_shape *shape = store->shape;
    const struct batch_view *batch = store->batch;
    const struct kv_view *kv = store->kv;
    const int layer = store->layer;
    if (!cpu_is_f32(dev, "rope_store", shape->dt)) return;
    const struct rope_args rope =
        rope_of_batch(store->table, store->rot_dim, batch, shape, 1, shape->dt);
    if (rope.table) cpu_rope(dev, qkv, &rope);
    const int64_t width = (int64_t)shape->n_kv_heads * shape->head_dim;
    const int64_t stride = kv->layers[layer].width, at = kv->layers[layer].offset;
    const bool latent = shape->latent > 0;
#pragma omp parallel for if (batch->n_tokens * width > PARALLEL_WORK)
    for (int row = 0; row < batch->n_tokens; row++) {
        int64_t slot = batch->slots[row];
        if (slot < 0) continue;
        const float *from = (const float *)qkv + row * attn_row_width(shape) +
                            (int64_t)shape->n_heads * shape->head_dim;
        if (kv->dt == DT_E4M3) {
            store_codes(kv, layer, slot, from, shape, false);
            if (!latent) store_codes(kv, layer, slot, from + width, shape, true);
            continue;
        }
        const size_t bytes = (size_t)width * sizeof(float);
        memcpy((float *)kv->k + at + slot * stride, from, bytes);
        if (!latent) memcpy((float *)kv->v + at + slot * stride, from + width, bytes);
    }
}

void cpu_attn_paged(struct device *dev, void *out, const void *qkv, const struct kv_view *kv,
                    int layer, const struct batch_view *batch, const struct attn_shape *shape)
{
    if (!cpu_is_f32(dev, "attn_paged", shape->dt)) return;
    forward(dev, out, NULL, &(struct source){qkv, kv, layer, batch, shape});
}

void cpu_attn_packed(struct device *dev, void *out, float *lse, const void *qkv,
                     const struct batch_view *batch, const struct attn_shape *shape)
{
    if (!cpu_is_f32(dev, "attn_packed", shape->dt)) return;
    forward(dev, out, lse, &(struct source){qkv, NULL, 0, batch, shape});
}

// The matrices of a block's gradient, scratch: (queries, keys) and (queries, dim).
struct gradient {
    float *dp;        // (queries, keys): dout . v, then the gradient of the scores
    float *dout, *dq; // (queries, dim)
};

/* With p the softmax and D = dout . out:
 *   dscore_j = p_j (dout . v_j - D)   (times the slope of the soft cap)
 *   dq += scale dscore_j k_j    dk_j += scale dscore_j q    dv_j += p_j dout
 * dqkv has qkv's layout, so a key's gradient lies as far into dqkv as the key into qkv. */
static void attend_back(float *dqkv, const float *dout, const float *out, const float *lse,
                        const struct source *from, struct block *b, const struct gradient *g)
{
    const struct attn_shape *shape = b->shape;
    const int n = keys_of(b), dim = shape->head_dim, head = b->kv_head * b->group;
    const int queries = queries_of(b);
    for (int i = 0; i < b->rows; i++)
        memcpy(g->dout + (int64_t)i * b->group * dim,
               dout + ((int64_t)(b->row + i) * shape->n_heads + head) * dim,
               (size_t)b->group * dim * sizeof *dout);
    block_scores(b);
    block_dots(b, g->dp, g->dout, true);
    for (int q = 0; q < queries; q++) {
        const int i = q / b->group, first = b->first[i], end = b->end[i];
        const int64_t at = (int64_t)(b->row + i) * shape->n_heads + head + q % b->group;
        const float *grad = g->dout + (int64_t)q * dim, log_sum = lse[at];
        float *p = b->p + (int64_t)q * n, *dp = g->dp + (int64_t)q * n;
        const float inner = dot_f32(grad, out + at * dim, dim);
        const float inverse_cap = shape->softcap > 0 ? 1.0f / shape->softcap : 0;
#pragma omp simd
        for (int j = first; j < end; j++) {
            float t = p[j] * inverse_cap;
            p[j] = exp_f32(p[j] - log_sum);
            dp[j] = p[j] * (dp[j] - inner) * fma_f32(-t, t, 1.0f);
        }
        clear_unseen(p, first, end, n);
        clear_unseen(dp, first, end, n);
    }
    memset(g->dq, 0, (size_t)queries * dim * sizeof *g->dq);
    block_sum(b, g->dq, g->dp, false);
    for (int i = 0; i < b->rows; i++) {
        float *to = dqkv + (b->row + i) * attn_row_width(shape) + (int64_t)head * dim;
        const float *dq = g->dq + (int64_t)i * b->group * dim;
#pragma omp simd
        for (int c = 0; c < b->group * dim; c++) to[c] = shape->scale * dq[c];
    }
    const float *k, *v;
    for (int j = b->all.first, run; j < b->all.n; j += run) {
        run = context_run(&b->all, j, &k, &v);
        struct weighted_sum sum = {.out = dqkv + (k - from->qkv),
                                   .p = g->dp + j - b->all.first,
                                   .x = b->q,
                                   .out_stride = b->all.stride,
                                   .p_row = 1,
                                   .p_col = n,
                                   .x_stride = dim,
                                   .rows = run,
                                   .n = queries,
                                   .dim = dim};
        add_weighted(&sum);
        sum.out = dqkv + (v - from->qkv);
        sum.p = b->p + j - b->all.first;
        sum.x = g->dout;
        add_weighted(&sum);
    }
}

static int64_t back_floats(const struct attn_shape *shape, int max_context)
{
    return 2 * matrix_floats(shape, max_context) + 3 * matrix_floats(shape, shape->head_dim);
}

// The backward pass takes more than the forward pass.
size_t cpu_attn_scratch(const struct attn_shape *shape, int max_context)
{
    return (size_t)omp_get_max_threads() * (size_t)back_floats(shape, max_context) * sizeof(float);
}

void cpu_attn_packed_back(struct device *dev, void *dqkv, const void *dout, const void *out,
                          const float *lse, const void *qkv, const struct batch_view *batch,
                          const struct attn_shape *shape)
{
    if (!cpu_is_f32(dev, "attn_packed_back", shape->dt)) return;
    const struct source from = {qkv, NULL, 0, batch, shape};
    const int64_t wide = matrix_floats(shape, batch->max_context);
    const int64_t narrow = matrix_floats(shape, shape->head_dim),
                  per_thread = back_floats(shape, batch->max_context);
    float *scratch = cpu_workspace(dev, cpu_attn_scratch(shape, batch->max_context));
    if (!scratch || !contexts_fit(dev, batch)) return;
    memset(dqkv, 0, (size_t)batch->n_tokens * attn_row_width(shape) * sizeof(float));
    const int units = batch->n_seqs * shape->n_kv_heads;
#pragma omp parallel for schedule(dynamic) if (many(&from))
    for (int unit = 0; unit < units; unit++) {
        const int first = unit / shape->n_kv_heads, end = batch->attend_end[first];
        if (batch->parent[first] >= 0) continue; // belongs to its tree
        float *mine = scratch + omp_get_thread_num() * per_thread;
        const struct gradient g = {mine + wide, mine + 2 * wide + narrow,
                                   mine + 2 * wide + 2 * narrow};
        for (int row = batch->query_start[first], rows; row < end; row += rows) {
            rows = block_rows(&from, row, end);
            struct block b = {.row = row, .rows = rows, .kv_head = unit % shape->n_kv_heads};
            b.p = mine;
            b.q = mine + 2 * wide;
            block_begin(&b, &from);
            attend_back(dqkv, dout, out, lse, &from, &b, &g);
        }
    }
}

// ---- gradient of the sinks ---------------------------------------------------------------------

// A sink's value is 0, so with w its weight in a row's softmax, the gradient of its score is w * (0
// - dout . out).
void cpu_attn_sinks_back(struct device *dev, float *dsinks, const void *dout, const void *out,
                         const float *lse, int rows, const struct attn_shape *shape)
{
    if (!cpu_is_f32(dev, "attn_sinks_back", shape->dt)) return;
    const int heads = shape->n_heads, dim = shape->head_dim;
    const float *sinks = shape->sinks;
#pragma omp parallel for if ((int64_t)rows * heads * dim > PARALLEL_WORK)
    for (int h = 0; h < heads; h++) {
        float sum = 0;
        for (int r = 0; r < rows; r++) {
            const int64_t at = (int64_t)r * heads + h;
            const float *x = (const float *)dout + at * dim, *y = (const float *)out + at * dim;
            sum = fma_f32(-exp_f32(sinks[h] - lse[at]), dot_f32(x, y, dim), sum);
        }
        dsinks[h] += sum;
    }
}
