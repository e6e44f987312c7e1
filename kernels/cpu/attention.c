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
#include <limits.h>
#include <omp.h>

enum { BLOCK_QUERIES = 16 };

// A call of attn or, with dqkv, of its gradient, which reads out and lse.
struct pass {
    const float *qkv;
    const struct kv_view *kv; // NULL: keys and values are those of the batch's rows
    int layer;
    const struct batch_view *batch;
    const struct attn_shape *shape;
    float *out, *lse; // (T, n_heads, attn_value_dim()), (T, n_heads) or NULL
    float *dqkv;
    const float *dout;
};

// Keys that a row sees, but for the window: the first so many entries of its context.
static int keys_seen(const struct batch_view *b, int row)
{
    const int s = b->seq_of[row];
    if (b->packed) return b->first_position[s] + row - b->query_start[s] + 1;
    return b->context_len[s] > 0 ? b->positions[row] + 1 : 0;
}

// A weighted sum of rows: out (rows, dim) += P (rows, n) X (n, dim).
struct weighted_sum {
    float *out;
    const float *p, *x;
    int64_t out_stride, p_row, p_col, x_stride;
    int rows, n, dim;
};

/* Of rows i .. i + rows - 1 (1 or 4) the columns from d on, `cols` of them, which are `vecs`
 * registers, or a part of one: everything stays there while j runs over X's rows, in order. */
VEC_INLINE void add_tile(const struct weighted_sum *w, int i0, int d, int rows, int vecs, int cols)
{
    float *out = w->out + i0 * w->out_stride + d;
    const float *p = w->p + i0 * w->p_row, *x = w->x + d;
    vec sum[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            sum[i][v] = load_some(out + i * w->out_stride + v * WIDTH, cols);
    for (int j = 0; j < w->n; j++) {
        vec value[4];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) value[v] = load_some(x + j * w->x_stride + v * WIDTH, cols);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            vec weight = p[i * w->p_row + j * w->p_col] - (vec){0};
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) sum[i][v] = fma_vec(weight, value[v], sum[i][v]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            store_some(out + i * w->out_stride + v * WIDTH, sum[i][v], cols);
}

static void add_weighted(const struct weighted_sum *w)
{
    for (int d = 0, step; d < w->dim; d += step) {
        const int left = w->dim - d;
        step = left >= 4 * WIDTH ? 4 * WIDTH : left >= WIDTH ? WIDTH : left;
        for (int i = 0, rows; i < w->rows; i += rows) {
            rows = w->rows - i >= 4 ? 4 : 1;
            if (step == 4 * WIDTH)
                rows == 4 ? add_tile(w, i, d, 4, 4, WIDTH) : add_tile(w, i, d, 1, 4, WIDTH);
            else if (step == WIDTH)
                rows == 4 ? add_tile(w, i, d, 4, 1, WIDTH) : add_tile(w, i, d, 1, 1, WIDTH);
            else
                rows == 4 ? add_tile(w, i, d, 4, 1, step) : add_tile(w, i, d, 1, 1, step);
        }
    }
}

// One block: rows row .. row + rows - 1 of one sequence and the queries of one kv head. Query
// (i, h) is number i * group + h of its matrices.
struct block {
    const struct pass *pass;
    const struct attn_shape *shape;
    int row, rows, kv_head, group;
    int from, to;             // entries of the context that some row sees
    int first[BLOCK_QUERIES]; // of each row: its keys are first..end-1, relative to `from`
    int end[BLOCK_QUERIES];
    // scratch: (queries, dim) the queries times the scale, and sums; of the gradient, dout
    float *q, *sum, *dout;
    // (queries, keys): scores, then weights; of the gradient: dout . v, then that of the scores
    float *p, *dp;
    float *wide; // of a pool in e4m3: (block_size, head_dim)
};

static int keys_of(const struct block *b)
{
    return b->to - b->from;
}
static int queries_of(const struct block *b)
{
    return b->rows * b->group;
}

// Where the block's first query lies among (T, n_heads, dim).
static int64_t first_query(const struct block *b, int dim)
{
    return ((int64_t)b->row * b->shape->n_heads + (int64_t)b->kv_head * b->group) * dim;
}

// What the caller knows, and scratch, are set; the rest is found here, and q is filled.
static void block_begin(struct block *b)
{
    const struct attn_shape *shape = b->shape;
    const int width = b->group * shape->head_dim, window = shape->window;
    b->from = INT_MAX, b->to = 0;
    for (int i = 0; i < b->rows; i++) {
        b->end[i] = keys_seen(b->pass->batch, b->row + i);
        b->first[i] = window > 0 && b->end[i] > window ? b->end[i] - window : 0;
        if (b->first[i] < b->from) b->from = b->first[i];
        if (b->end[i] > b->to) b->to = b->end[i];
    }
    for (int i = 0; i < b->rows; i++) {
        b->first[i] -= b->from;
        b->end[i] -= b->from;
        const float *q = b->pass->qkv + (b->row + i) * attn_row_width(shape) + b->kv_head * width;
        float *to = b->q + (int64_t)i * width;
#pragma omp simd
        for (int c = 0; c < width; c++) to[c] = shape->scale * q[c];
    }
}

// Keys, or values, of a context that follow one another in memory.
struct run {
    const float *rows;
    int64_t stride;
    int n;
};

// Of a pool: those of the block that entry j is in.
static struct run paged_run(const struct block *b, int s, int j, bool values)
{
    const struct attn_shape *shape = b->shape;
    const struct kv_view *kv = b->pass->kv;
    const struct kv_layer *layer = &kv->layers[b->pass->layer];
    const struct batch_view *batch = b->pass->batch;
    const int size = kv->block_size, offset = j % size, dim = shape->head_dim;
    const int n = size - offset < b->to - j ? size - offset : b->to - j;
    const int64_t block = batch->block_table[(int64_t)s * batch->table_stride + j / size];
    const int64_t at = layer->offset + (block * size + offset) * layer->width + b->kv_head * dim;
    const void *pool = values && shape->latent == 0 ? kv->v : kv->k;
    if (kv->dt != DT_E4M3) return (struct run){(const float *)pool + at, layer->width, n};
    for (int i = 0; i < n; i++) {
        const int64_t scale = kv_scale_at(block, offset + i, size, shape->n_kv_heads, b->kv_head,
                                          values && shape->latent == 0);
        cpu_widen_row(b->wide + (int64_t)i * dim, (const uint8_t *)pool + at + i * layer->width,
                      kv->scales[layer->scales + scale], dim);
    }
    return (struct run){b->wide, dim, n};
}

// Those from entry j on; of a packed batch ancestors have the rows before a sequence's own.
static struct run run_of(const struct block *b, int j, bool values)
{
    const struct attn_shape *shape = b->shape;
    const struct batch_view *batch = b->pass->batch;
    int s = batch->seq_of[b->row];
    if (b->pass->kv) return paged_run(b, s, j, values);
    while (j < batch->first_position[s]) s = batch->parent[s];
    const int row = batch->query_start[s] + j - batch->first_position[s];
    const int left = batch->query_start[s + 1] - row, n = b->to - j;
    const int head =
        shape->n_heads + b->kv_head + (values && shape->latent == 0 ? shape->n_kv_heads : 0);
    const int64_t stride = attn_row_width(shape);
    return (struct run){b->pass->qkv + row * stride + (int64_t)head * shape->head_dim, stride,
                        n < left ? n : left};
}

// scores (queries, keys) = a (queries, dim) times all keys, or all values
static void block_dots(const struct block *b, float *scores, const float *a, bool values)
{
    const int dim = b->shape->head_dim;
    struct run run;
    for (int j = b->from; j < b->to; j += run.n) {
        run = run_of(b, j, values);
        const struct dots dots = {.a = a,
                                  .b = run.rows,
                                  .c = scores + j - b->from,
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
    for (int j = b->from; j < b->to; j += run.n) {
        run = run_of(b, j, values);
        add_weighted(&(struct weighted_sum){.out = out,
                                            .p = weights + j - b->from,
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

static void attend(struct block *b)
{
    const struct attn_shape *shape = b->shape;
    const int n = keys_of(b), dim = attn_value_dim(shape);
    memset(b->sum, 0, (size_t)queries_of(b) * dim * sizeof *b->sum);
    if (n > 0) block_scores(b);
    for (int q = 0; q < queries_of(b) && n > 0; q++) {
        const int i = q / b->group, first = b->first[i], end = b->end[i];
        const int head = b->kv_head * b->group + q % b->group;
        const float *sink = shape->sinks ? (const float *)shape->sinks + head : NULL;
        float *p = b->p + (int64_t)q * n, log_sum = softmax(p + first, end - first, sink);
        clear_unseen(p, first, end, n);
        if (b->pass->lse) b->pass->lse[(int64_t)(b->row + i) * shape->n_heads + head] = log_sum;
    }
    if (n > 0) block_sum(b, b->sum, b->p, true);
    for (int i = 0; i < b->rows; i++)
        memcpy(b->pass->out + first_query(b, dim) + (int64_t)i * shape->n_heads * dim,
               b->sum + (int64_t)i * b->group * dim, (size_t)b->group * dim * sizeof *b->sum);
}

/* With p the softmax and D = dout . out:
 *   dscore_j = p_j (dout . v_j - D)   (times the slope of the soft cap)
 *   dq += scale dscore_j k_j    dk_j += scale dscore_j q    dv_j += p_j dout
 * dqkv has qkv's layout, so a key's gradient lies as far into dqkv as the key into qkv. */
static void attend_back(struct block *b)
{
    const struct pass *pass = b->pass;
    const struct attn_shape *shape = b->shape;
    const int n = keys_of(b), dim = shape->head_dim, queries = queries_of(b);
    for (int i = 0; i < b->rows; i++)
        memcpy(b->dout + (int64_t)i * b->group * dim,
               pass->dout + first_query(b, dim) + (int64_t)i * shape->n_heads * dim,
               (size_t)b->group * dim * sizeof *b->dout);
    block_scores(b);
    block_dots(b, b->dp, b->dout, true);
    for (int q = 0; q < queries; q++) {
        const int i = q / b->group, first = b->first[i], end = b->end[i];
        const int64_t at = first_query(b, 1) + (int64_t)i * shape->n_heads + q % b->group;
        const float *grad = b->dout + (int64_t)q * dim, log_sum = pass->lse[at];
        float *p = b->p + (int64_t)q * n, *dp = b->dp + (int64_t)q * n;
        const float inner = dot_f32(grad, pass->out + at * dim, dim);
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
    memset(b->sum, 0, (size_t)queries * dim * sizeof *b->sum);
    block_sum(b, b->sum, b->dp, false);
    for (int i = 0; i < b->rows; i++) {
        float *to = pass->dqkv + (b->row + i) * attn_row_width(shape) + b->kv_head * b->group * dim;
        const float *dq = b->sum + (int64_t)i * b->group * dim;
#pragma omp simd
        for (int c = 0; c < b->group * dim; c++) to[c] = shape->scale * dq[c];
    }
    struct run keys;
    for (int j = b->from; j < b->to; j += keys.n) {
        keys = run_of(b, j, false);
        struct weighted_sum sum = {.out = pass->dqkv + (keys.rows - pass->qkv),
                                   .p = b->dp + j - b->from,
                                   .x = b->q,
                                   .out_stride = keys.stride,
                                   .p_row = 1,
                                   .p_col = n,
                                   .x_stride = dim,
                                   .rows = keys.n,
                                   .n = queries,
                                   .dim = dim};
        add_weighted(&sum);
        sum.out = pass->dqkv + (run_of(b, j, true).rows - pass->qkv);
        sum.p = b->p + j - b->from;
        sum.x = b->dout;
        add_weighted(&sum);
    }
}

// Rows from `row` on, below `end`, that make one block: of one sequence, and not too many queries.
static int block_rows(const struct pass *pass, int row, int end)
{
    int group = pass->shape->n_heads / pass->shape->n_kv_heads, rows = 1;
    while (row + rows < end && (rows + 1) * group <= BLOCK_QUERIES &&
           pass->batch->seq_of[row + rows] == pass->batch->seq_of[row])
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

// A thread's scratch: n matrices each of (queries, keys) and of (queries, dim), of which the
// latter are one more, and a block of a pool widened. Shares it out where there is a block to.
static int64_t share_scratch(struct block *b, float *scratch, const struct attn_shape *shape,
                             int max_context, const struct kv_view *kv, bool back)
{
    const int64_t wide = matrix_floats(shape, max_context);
    const int64_t narrow = matrix_floats(shape, shape->head_dim), n = back ? 2 : 1;
    const int64_t widened = kv && kv->dt == DT_E4M3 ? (int64_t)kv->block_size * shape->head_dim : 0;
    if (b) {
        b->p = scratch, b->dp = scratch + wide;
        b->q = scratch + n * wide, b->sum = b->q + narrow, b->dout = b->sum + narrow;
        b->wide = b->dout;
    }
    return n * wide + (n + 1) * narrow + (widened + 15) / 16 * 16;
}

// The gradient takes more than the forward pass.
size_t cpu_attn_scratch(const struct attn_shape *shape, int max_context)
{
    return (size_t)omp_get_max_threads() * sizeof(float) *
           (size_t)share_scratch(NULL, NULL, shape, max_context, NULL, true);
}

// A rough count of multiplications, to decide whether threads are worth it.
static bool many(const struct pass *pass)
{
    return (int64_t)pass->batch->n_tokens * pass->shape->n_heads * pass->shape->head_dim *
               pass->batch->max_context >
           PARALLEL_WORK * 8;
}

// False, with the failure recorded, where a row sees more than max_context says: buffers rest on
// it.
static bool contexts_fit(struct device *dev, const struct batch_view *batch)
{
    for (int row = 0; row < batch->n_tokens; row++) {
        const int n = keys_seen(batch, row);
        if (n <= batch->max_context) continue;
        device_fail(dev, "attention: row %d sees %d keys, over max_context %d", row, n,
                    batch->max_context);
        return false;
    }
    return true;
}

// Threads take units of rows of a kv head, which blocks never cross: some neighbouring rows; in the
// gradient the rows of a tree, which add to the same keys.
static void run_blocks(struct device *dev, const struct pass *pass)
{
    const struct batch_view *batch = pass->batch;
    const struct attn_shape *shape = pass->shape;
    const int kv_heads = shape->n_kv_heads, n_tokens = batch->n_tokens, piece = BLOCK_QUERIES;
    const bool back = pass->dqkv;
    const int64_t each = share_scratch(NULL, NULL, shape, batch->max_context, pass->kv, back);
    float *scratch = cpu_workspace(dev, (size_t)omp_get_max_threads() * each * sizeof *scratch);
    if (!scratch || !contexts_fit(dev, batch)) return;
    const int units = (back ? batch->n_seqs : (n_tokens + piece - 1) / piece) * kv_heads;
#pragma omp parallel for schedule(dynamic) if (many(pass))
    for (int unit = 0; unit < units; unit++) {
        const int i = unit / kv_heads;
        if (back && batch->parent[i] >= 0) continue; // belongs to its tree
        int row = back ? batch->query_start[i] : i * piece;
        const int end = back                     ? batch->attend_end[i]
                        : row + piece < n_tokens ? row + piece
                                                 : n_tokens;
        struct block b = {.pass = pass,
                          .shape = shape,
                          .kv_head = unit % kv_heads,
                          .group = shape->n_heads / kv_heads};
        share_scratch(&b, scratch + omp_get_thread_num() * each, shape, batch->max_context,
                      pass->kv, back);
        for (; row < end; row += b.rows) {
            b.row = row;
            b.rows = block_rows(pass, row, end);
            block_begin(&b);
            (back ? attend_back : attend)(&b);
        }
    }
}

void cpu_attn(struct device *dev, void *out, float *lse, const void *qkv, const struct kv_view *kv,
              int layer, const struct batch_view *batch, const struct attn_shape *shape)
{
    if (!cpu_is_f32(dev, "attn", shape->dt)) return;
    run_blocks(dev, &(struct pass){qkv, kv, layer, batch, shape, .out = out, .lse = lse});
}

// A sink's value is 0, so with w its weight in a row's softmax, the gradient of its score is w * (0
// - dout . out).
static void sinks_back(float *dsinks, const float *dout, const float *out, const float *lse,
                       int rows, const struct attn_shape *shape)
{
    const int heads = shape->n_heads, dim = shape->head_dim;
    const float *sinks = shape->sinks;
#pragma omp parallel for if ((int64_t)rows * heads * dim > PARALLEL_WORK)
    for (int h = 0; h < heads; h++) {
        float sum = 0;
        for (int r = 0; r < rows; r++) {
            const int64_t at = (int64_t)r * heads + h;
            const float inner = dot_f32(dout + at * dim, out + at * dim, dim);
            sum = fma_f32(-exp_f32(sinks[h] - lse[at]), inner, sum);
        }
        dsinks[h] += sum;
    }
}

void cpu_attn_back(struct device *dev, void *dqkv, float *dsinks, const void *dout, const void *out,
                   const float *lse, const void *qkv, const struct batch_view *batch,
                   const struct attn_shape *shape)
{
    if (!cpu_is_f32(dev, "attn_back", shape->dt)) return;
    memset(dqkv, 0, (size_t)batch->n_tokens * attn_row_width(shape) * sizeof(float));
    run_blocks(dev,
               &(struct pass){qkv, NULL, 0, batch, shape, (float *)out, (float *)lse, dqkv, dout});
    if (dsinks) sinks_back(dsinks, dout, out, lse, batch->n_tokens, shape);
}
