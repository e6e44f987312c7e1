/* attention.c: causal attention over a paged cache or over rows of the same batch, and its gradient.
 *
 * Both forward forms run attend(): for one row and one kv head, with the query heads that share it,
 * scores of all visible keys in order, softmax in two passes over them, weighted sum of the values in
 * order. How the keys are cut into runs of memory changes no bit, so a row's result depends neither
 * on the batch around it nor on where its context lies.
 *
 * The gradient goes row by row as well and adds to the keys and values that the row saw. Rows of one
 * group (a shared prefix and the sequences after it) touch each other's keys; different groups and
 * different kv heads do not, and are what threads divide. */
#include "kernels/cpu/cpu.h"
#include <omp.h>

// The keys and values one row sees, for one kv head: entries first..n-1 of its context.
struct context {
    int first, n;
    int64_t stride; // floats between keys
    // packed: keys below prefix_len come from the prefix rows, the others from the sequence's own
    const float *prefix_k, *prefix_v, *own_k, *own_v;
    int prefix_len;
    // paged
    const float *pool_k, *pool_v;
    const int32_t *blocks;
    int block_size;
};

// Where entry j lies, and how many entries from j on follow one another in memory.
static int context_run(const struct context *ctx, int j, const float **ret_k, const float **ret_v)
{
    int run = ctx->n - j;
    if (ctx->blocks) {
        int offset = j % ctx->block_size;
        int64_t at = ((int64_t)ctx->blocks[j / ctx->block_size] * ctx->block_size + offset) *
                     ctx->stride;
        *ret_k = ctx->pool_k + at;
        *ret_v = ctx->pool_v + at;
        return run < ctx->block_size - offset ? run : ctx->block_size - offset;
    }
    if (j < ctx->prefix_len) {
        *ret_k = ctx->prefix_k + j * ctx->stride;
        *ret_v = ctx->prefix_v + j * ctx->stride;
        return run < ctx->prefix_len - j ? run : ctx->prefix_len - j;
    }
    *ret_k = ctx->own_k + (j - ctx->prefix_len) * ctx->stride;
    *ret_v = ctx->own_v + (j - ctx->prefix_len) * ctx->stride;
    return run;
}

static int64_t qkv_width(const struct attn_shape *shape)
{
    return (int64_t)(shape->n_heads + 2 * shape->n_kv_heads) * shape->head_dim;
}

static struct context packed_context(const float *qkv, const struct batch_view *batch,
                                     const struct attn_shape *shape, int row, int kv_head)
{
    const int s = batch->seq_of[row], start = batch->query_start[s];
    const int64_t stride = qkv_width(shape);
    const int prefix_len = batch->prefix_len[s];
    const int64_t prefix = prefix_len > 0 ? batch->prefix_start[s] : 0;
    const float *k = qkv + (int64_t)(shape->n_heads + kv_head) * shape->head_dim;
    const float *v = k + (int64_t)shape->n_kv_heads * shape->head_dim;
    const int n = prefix_len + row - start + 1;
    return (struct context){
        .first = shape->window > 0 && n > shape->window ? n - shape->window : 0,
        .n = n,
        .stride = stride,
        .prefix_k = k + prefix * stride,
        .prefix_v = v + prefix * stride,
        .own_k = k + start * stride,
        .own_v = v + start * stride,
        .prefix_len = prefix_len,
    };
}

static struct context paged_context(const struct kv_view *kv, int layer,
                                    const struct batch_view *batch, const struct attn_shape *shape,
                                    int row, int kv_head)
{
    const int s = batch->seq_of[row];
    const int n = batch->context_len[s] > 0 ? batch->positions[row] + 1 : 0;
    const int64_t at = layer * kv->layer_stride + (int64_t)kv_head * shape->head_dim;
    return (struct context){
        .first = shape->window > 0 && n > shape->window ? n - shape->window : 0,
        .n = n,
        .stride = (int64_t)shape->n_kv_heads * shape->head_dim,
        .pool_k = (const float *)kv->k + at,
        .pool_v = (const float *)kv->v + at,
        .blocks = batch->block_table + (int64_t)s * batch->table_stride,
        .block_size = kv->block_size,
    };
}

static inline float dot(const float *a, const float *b, int n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static inline void axpy(float *y, float a, const float *x, int n)
{
#pragma omp simd
    for (int i = 0; i < n; i++) y[i] += a * x[i];
}

/* scores[h * n + j - first] = the score of key j for query h of `group` queries that lie head_dim
 * apart at q; n is the number of visible keys. */
static void score_keys(float *scores, const float *q, int group, const struct context *ctx,
                       const struct attn_shape *shape)
{
    const int n = ctx->n - ctx->first, dim = shape->head_dim;
    const float *k, *v;
    for (int j = ctx->first, run; j < ctx->n; j += run) {
        run = context_run(ctx, j, &k, &v);
        for (int h = 0; h < group; h++)
            for (int i = 0; i < run; i++)
                scores[(int64_t)h * n + j - ctx->first + i] =
                    shape->scale * dot(q + (int64_t)h * dim, k + i * ctx->stride, dim);
    }
    if (shape->softcap > 0)
        for (int64_t i = 0; i < (int64_t)group * n; i++)
            scores[i] = shape->softcap * tanhf(scores[i] / shape->softcap);
}

// out (group, head_dim), lse (group) or NULL
static void attend(float *out, float *lse, const float *q, int group, const struct context *ctx,
                   const struct attn_shape *shape, float *scores)
{
    const int n = ctx->n - ctx->first, dim = shape->head_dim;
    memset(out, 0, (size_t)group * dim * sizeof *out);
    if (n <= 0) {
        for (int h = 0; lse && h < group; h++) lse[h] = -INFINITY;
        return;
    }
    score_keys(scores, q, group, ctx, shape);
    for (int h = 0; h < group; h++) {
        float *p = scores + (int64_t)h * n, max = -INFINITY, sum = 0;
#pragma omp simd reduction(max : max)
        for (int j = 0; j < n; j++) max = p[j] > max ? p[j] : max;
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < n; j++) {
            p[j] = exp_f32(p[j] - max);
            sum += p[j];
        }
        float scale = 1.0f / sum;
#pragma omp simd
        for (int j = 0; j < n; j++) p[j] *= scale;
        if (lse) lse[h] = max + logf(sum);
    }
    const float *k, *v;
    for (int j = ctx->first, run; j < ctx->n; j += run) {
        run = context_run(ctx, j, &k, &v);
        for (int h = 0; h < group; h++)
            for (int i = 0; i < run; i++)
                axpy(out + (int64_t)h * dim, scores[(int64_t)h * n + j - ctx->first + i],
                     v + i * ctx->stride, dim);
    }
}

// Scores of one kv head's queries for one row, per thread.
static int64_t scores_per_thread(const struct batch_view *batch, const struct attn_shape *shape)
{
    int64_t n = (int64_t)(shape->n_heads / shape->n_kv_heads) * batch->max_context;
    return (n + 63) / 64 * 64;
}

// A rough count of multiplications, to decide whether threads are worth it.
static bool many(const struct batch_view *batch, const struct attn_shape *shape)
{
    return (int64_t)batch->n_tokens * shape->n_heads * shape->head_dim * batch->max_context >
           PARALLEL_WORK * 8;
}

// False, with the failure recorded, where a row sees more than max_context says: buffers rest on it.
static bool contexts_fit(struct device *dev, const struct batch_view *batch)
{
    for (int row = 0; row < batch->n_tokens; row++) {
        int s = batch->seq_of[row], n;
        if (batch->packed)
            n = batch->prefix_len[s] + row - batch->query_start[s] + 1;
        else
            n = batch->context_len[s] > 0 ? batch->positions[row] + 1 : 0;
        if (n <= batch->max_context) continue;
        device_fail(dev, "attention: row %d sees %d keys, over max_context %d", row, n,
                    batch->max_context);
        return false;
    }
    return true;
}

static void forward(struct device *dev, float *out, float *lse, const float *qkv,
                    const struct kv_view *kv, int layer, const struct batch_view *batch,
                    const struct attn_shape *shape)
{
    const int group = shape->n_heads / shape->n_kv_heads, dim = shape->head_dim;
    const int64_t per_thread = scores_per_thread(batch, shape);
    float *scores = cpu_workspace(dev, (size_t)omp_get_max_threads() * per_thread * sizeof *scores);
    if (!scores || !contexts_fit(dev, batch)) return;
    const int units = batch->n_tokens * shape->n_kv_heads;
#pragma omp parallel for schedule(dynamic, 8) if (many(batch, shape))
    for (int unit = 0; unit < units; unit++) {
        int row = unit / shape->n_kv_heads, kv_head = unit % shape->n_kv_heads;
        int head = kv_head * group;
        struct context ctx = kv ? paged_context(kv, layer, batch, shape, row, kv_head)
                                : packed_context(qkv, batch, shape, row, kv_head);
        attend(out + ((int64_t)row * shape->n_heads + head) * dim,
               lse ? lse + (int64_t)row * shape->n_heads + head : NULL,
               qkv + row * qkv_width(shape) + (int64_t)head * dim, group, &ctx, shape,
               scores + omp_get_thread_num() * per_thread);
    }
}

void cpu_kv_store(struct device *dev, const struct kv_view *kv, int layer, const void *qkv,
                  const struct batch_view *batch, const struct attn_shape *shape)
{
    if (!cpu_is_f32(dev, "kv_store", kv->dt)) return;
    const int64_t width = (int64_t)shape->n_kv_heads * shape->head_dim;
    float *k = (float *)kv->k + layer * kv->layer_stride;
    float *v = (float *)kv->v + layer * kv->layer_stride;
#pragma omp parallel for if (batch->n_tokens * width > PARALLEL_WORK)
    for (int row = 0; row < batch->n_tokens; row++) {
        int64_t slot = batch->slots[row];
        if (slot < 0) continue;
        const float *from = (const float *)qkv + row * qkv_width(shape) +
                            (int64_t)shape->n_heads * shape->head_dim;
        memcpy(k + slot * width, from, (size_t)width * sizeof *k);
        memcpy(v + slot * width, from + width, (size_t)width * sizeof *v);
    }
}

void cpu_attn_paged(struct device *dev, void *out, const void *qkv, const struct kv_view *kv,
                    int layer, const struct batch_view *batch, const struct attn_shape *shape)
{
    if (!cpu_is_f32(dev, "attn_paged", kv->dt)) return;
    forward(dev, out, NULL, qkv, kv, layer, batch, shape);
}

void cpu_attn_packed(struct device *dev, void *out, float *lse, const void *qkv,
                     const struct batch_view *batch, const struct attn_shape *shape, enum dtype dt)
{
    if (!cpu_is_f32(dev, "attn_packed", dt)) return;
    forward(dev, out, lse, qkv, NULL, 0, batch, shape);
}

/* Gradients of one row and one kv head. With p the softmax, D = dout . out:
 *   dscore_j = p_j (dout . v_j - D)   (times the slope of the soft cap)
 *   dq += scale dscore_j k_j    dk_j += scale dscore_j q    dv_j += p_j dout
 * dqkv has qkv's layout, so a key's gradient lies as far into dqkv as the key into qkv. */
static void attend_back(float *dqkv, const float *qkv, const float *dout, const float *out,
                        const float *lse, int row, int kv_head, const struct batch_view *batch,
                        const struct attn_shape *shape, float *scores)
{
    const int group = shape->n_heads / shape->n_kv_heads, dim = shape->head_dim;
    const int head = kv_head * group;
    const struct context ctx = packed_context(qkv, batch, shape, row, kv_head);
    const int n = ctx.n - ctx.first;
    const int64_t q_at = row * qkv_width(shape) + (int64_t)head * dim;
    const int64_t out_at = ((int64_t)row * shape->n_heads + head) * dim;
    score_keys(scores, qkv + q_at, group, &ctx, shape);
    for (int h = 0; h < group; h++) {
        const float *q = qkv + q_at + (int64_t)h * dim, *grad = dout + out_at + (int64_t)h * dim;
        float *dq = dqkv + q_at + (int64_t)h * dim;
        const float *score = scores + (int64_t)h * n;
        const float log_sum = lse[(int64_t)row * shape->n_heads + head + h];
        const float inner = dot(grad, out + out_at + (int64_t)h * dim, dim);
        const float *k, *v;
        for (int j = ctx.first, run; j < ctx.n; j += run) {
            run = context_run(&ctx, j, &k, &v);
            float *dk = dqkv + (k - qkv), *dv = dqkv + (v - qkv);
            for (int i = 0; i < run; i++) {
                const int64_t at = i * ctx.stride;
                const float s = score[j - ctx.first + i], p = exp_f32(s - log_sum);
                float ds = p * (dot(grad, v + at, dim) - inner) * shape->scale;
                if (shape->softcap > 0) {
                    float t = s / shape->softcap;
                    ds *= 1.0f - t * t;
                }
                axpy(dv + at, p, grad, dim);
                axpy(dq, ds, k + at, dim);
                axpy(dk + at, ds, q, dim);
            }
        }
    }
}

void cpu_attn_packed_back(struct device *dev, void *dqkv, const void *dout, const void *out,
                          const float *lse, const void *qkv, const struct batch_view *batch,
                          const struct attn_shape *shape, enum dtype dt)
{
    if (!cpu_is_f32(dev, "attn_packed_back", dt)) return;
    const int64_t per_thread = scores_per_thread(batch, shape);
    float *scores = cpu_workspace(dev, (size_t)omp_get_max_threads() * per_thread * sizeof *scores);
    if (!scores || !contexts_fit(dev, batch)) return;
    memset(dqkv, 0, (size_t)batch->n_tokens * qkv_width(shape) * sizeof(float));
    const int units = batch->n_seqs * shape->n_kv_heads;
#pragma omp parallel for schedule(dynamic) if (many(batch, shape))
    for (int unit = 0; unit < units; unit++) {
        int first = unit / shape->n_kv_heads, kv_head = unit % shape->n_kv_heads;
        if (batch->prefix_len[first] > 0) continue; // belongs to the group of its prefix
        int end = batch->attend_end[first];
        for (int row = batch->query_start[first]; row < end; row++)
            attend_back(dqkv, qkv, dout, out, lse, row, kv_head, batch, shape,
                        scores + omp_get_thread_num() * per_thread);
    }
}
