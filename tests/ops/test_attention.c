/* test_attention.c: rotary embedding, attention of packed and paged batches and its gradient, and
 * that the two forms agree. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

// p: rows heads(rotated) head_dim rot_dim extra(elements after the rotated heads) sign interleaved

static void rope_setup(struct op_test *t)
{
    const int *p = t->p, positions = 64, half = p[3] / 2;
    floats(t, "qkv", INOUT, DATA, (int64_t)p[0] * (p[1] * p[2] + p[4]), 1);
    float *table = floats(t, "table", IN, F32, (int64_t)positions * half * 2, 1);
    for (int i = 0; i < positions * half; i++) {
        double angle = i / half * pow(10000, -(double)(i % half) / half);
        table[2 * i] = (float)cos(angle);
        table[2 * i + 1] = (float)sin(angle);
    }
    int32_t *position = ints(t, "positions", p[0]);
    for (int r = 0; r < p[0]; r++) position[r] = (int32_t)rng_below(&t->rng, positions);
}

static void rope_launch(struct op_test *t, void **d)
{
    const struct rope_args args = {.table = d[1],
                                   .positions = d[2],
                                   .rows = t->p[0],
                                   .n = t->p[1],
                                   .head_dim = t->p[2],
                                   .rot_dim = t->p[3],
                                   .stride = t->p[1] * t->p[2] + t->p[4],
                                   .sign = (float)t->p[5],
                                   .interleaved = t->p[6] != 0,
                                   .dt = dt};
    ops->rope(dev, d[0], &args);
}

static void rope_reference(struct op_test *t, double **v)
{
    const int *p = t->p, half = p[3] / 2;
    const int64_t stride = p[1] * p[2] + p[4];
    const int step = p[6] ? 2 : 1, apart = p[6] ? 1 : half;
    for (int64_t i = 0; i < t->a[0].n; i++) t->a[0].expect[i] = v[0][i];
    for (int r = 0; r < p[0]; r++)
        for (int h = 0; h < p[1]; h++)
            for (int i = 0; i < half; i++) {
                int64_t at = r * stride + h * p[2] + i * step;
                double c = v[1][((int64_t)t->a[2].i[r] * half + i) * 2];
                double s = p[5] * v[1][((int64_t)t->a[2].i[r] * half + i) * 2 + 1];
                t->a[0].expect[at] = v[0][at] * c - v[0][at + apart] * s;
                t->a[0].expect[at + apart] = v[0][at + apart] * c + v[0][at] * s;
            }
}

OP(rope, "rope");

// p: n_heads n_kv_heads head_dim layout scale window softcap (packed); block_size at p[7] (paged);
// latent at p[8], sinks at p[9]

// Packed layouts, lengths times `scale`; {parent: index of the sequence that it goes on behind or
// -1}
struct layout_seq {
    int len, parent;
};
static const struct layout_seq layouts[][8] = {
    {{13, -1}},
    {{5, -1}, {1, -1}, {9, -1}},
    {{6, -1}, {4, 0}, {1, 0}, {7, 0}, {5, -1}, {3, -1}, {2, 5}, {8, 5}},
    {{3, -1}, {4, 0}, {6, 1}, {1, 1}, {5, 3}, {2, 3}, {7, 0}, {4, -1}},
};

static struct attn_shape attn_shape_of(const int *p)
{
    return (struct attn_shape){.n_heads = p[0],
                               .n_kv_heads = p[1],
                               .head_dim = p[2],
                               .scale = 1.0f / sqrtf((float)p[2]),
                               .window = p[5],
                               .softcap = (float)p[6],
                               .latent = p[8]};
}

// The seven index arrays of a packed batch, as arrays first..first + 6.
static void packed_setup(struct op_test *t, const struct layout_seq *seqs, int scale)
{
    int n_seqs = 0, rows = 0, longest = 0, context = 0;
    while (n_seqs < 8 && seqs[n_seqs].len) {
        int len = seqs[n_seqs].len * scale, whole = len;
        for (int p = seqs[n_seqs].parent; p >= 0; p = seqs[p].parent) whole += seqs[p].len * scale;
        rows += len;
        longest = len > longest ? len : longest;
        context = whole > context ? whole : context;
        n_seqs++;
    }
    int32_t *positions = ints(t, "positions", rows), *seq_of = ints(t, "seq_of", rows);
    int32_t *start = ints(t, "query_start", n_seqs + 1);
    int32_t *parent = ints(t, "parent", n_seqs);
    int32_t *first = ints(t, "first_position", n_seqs), *end = ints(t, "attend_end", n_seqs);
    int row = 0;
    for (int s = 0; s < n_seqs; s++) {
        start[s] = row;
        parent[s] = seqs[s].parent;
        if (parent[s] >= 0) first[s] = first[parent[s]] + seqs[parent[s]].len * scale;
        for (int i = 0; i < seqs[s].len * scale; i++, row++) {
            positions[row] = first[s] + i;
            seq_of[row] = s;
        }
        for (int p = s; p >= 0; p = parent[p]) end[p] = row;
    }
    start[n_seqs] = row;
    t->batch = (struct batch_view){.n_tokens = rows,
                                   .n_seqs = n_seqs,
                                   .max_query = longest,
                                   .max_context = context,
                                   .packed = true};
}

static struct batch_view packed_view(const struct op_test *t, void **d)
{
    struct batch_view b = t->batch;
    b.positions = d[0];
    b.seq_of = d[1];
    b.query_start = d[2];
    b.parent = d[3];
    b.first_position = d[4];
    b.attend_end = d[5];
    return b;
}

/* One row's attention in double: keys and values given as pointers per visible entry; sink: of the
 * head, or NULL. */
static double attention_row(double *out, const double *q, const double **k, const double **v, int n,
                            const double *sink, const struct attn_shape *s)
{
    double *p = op_host((size_t)n * sizeof *p), max = sink ? *sink : -INFINITY, sum = 0;
    for (int j = 0; j < n; j++) {
        p[j] = 0;
        for (int d = 0; d < s->head_dim; d++) p[j] += q[d] * k[j][d];
        p[j] *= s->scale;
        if (s->softcap > 0) p[j] = s->softcap * tanh(p[j] / s->softcap);
        max = fmax(max, p[j]);
    }
    for (int j = 0; j < n; j++) sum += p[j] = exp(p[j] - max);
    if (sink) sum += exp(*sink - max);
    for (int d = 0; d < attn_value_dim(s); d++) out[d] = 0;
    for (int j = 0; j < n; j++)
        for (int d = 0; d < attn_value_dim(s); d++) out[d] += p[j] / sum * v[j][d];
    return max + log(sum);
}

// A head's of the sinks, which are the case's or none.
static const double *sink_of(const struct op_test *t, const double *sinks, int h)
{
    return t->p[9] ? sinks + h : NULL;
}

// out, lse of a packed batch in double, from the masks as batch_view.h words them
static void packed_formula(struct op_test *t, int index_arrays, double *out, double *lse,
                           const double *qkv, const double *sinks)
{
    const struct attn_shape s = attn_shape_of(t->p);
    const struct array *a = t->a + index_arrays;
    const int64_t width = attn_row_width(&s);
    const double **k = op_host((size_t)t->batch.n_tokens * sizeof *k);
    const double **v = op_host((size_t)t->batch.n_tokens * sizeof *v);
    for (int row = 0; row < t->batch.n_tokens; row++)
        for (int h = 0; h < s.n_heads; h++) {
            int seq = a[1].i[row], kv = h / (s.n_heads / s.n_kv_heads), n = 0;
            for (int j = 0; j <= row; j++) {
                int up = seq; // to the ancestor that has row j, if one does
                while (up >= 0 && up != a[1].i[j]) up = a[3].i[up];
                if (up < 0) continue;
                if (s.window && a[0].i[j] <= a[0].i[row] - s.window) continue;
                k[n] = qkv + j * width + (s.n_heads + kv) * s.head_dim;
                v[n] = s.latent ? k[n] : k[n] + s.n_kv_heads * s.head_dim;
                n++;
            }
            double l = attention_row(out + ((int64_t)row * s.n_heads + h) * attn_value_dim(&s),
                                     qkv + row * width + h * s.head_dim, k, v, n,
                                     sink_of(t, sinks, h), &s);
            if (lse) lse[(int64_t)row * s.n_heads + h] = l;
        }
}

enum { AP_INDEX, AP_OUT = 6, AP_LSE, AP_QKV, AP_SINKS };

static void attn_packed_setup(struct op_test *t)
{
    const struct attn_shape s = attn_shape_of(t->p);
    packed_setup(t, layouts[t->p[3]], t->p[4]);
    int64_t rows = t->batch.n_tokens;
    floats(t, "out", OUT, DATA, rows * t->p[0] * attn_value_dim(&s), 1);
    floats(t, "lse", OUT, F32, rows * t->p[0], 1);
    floats(t, "qkv", IN, DATA, rows * attn_row_width(&s), 1);
    floats(t, "sinks", IN, DATA, t->p[0], 1);
}

static void attn_packed_launch(struct op_test *t, void **d)
{
    struct attn_shape s = attn_shape_of(t->p);
    struct batch_view b = packed_view(t, d);
    s.dt = dt;
    s.sinks = t->p[9] ? d[AP_SINKS] : NULL;
    ops->attn(dev, d[AP_OUT], d[AP_LSE], d[AP_QKV], NULL, 0, &b, &s);
}

static void attn_packed_reference(struct op_test *t, double **v)
{
    packed_formula(t, AP_INDEX, t->a[AP_OUT].expect, t->a[AP_LSE].expect, v[AP_QKV], v[AP_SINKS]);
}

OP(attn_packed, "attn, packed");

enum { AB_INDEX, AB_DQKV = 6, AB_DOUT, AB_OUT, AB_LSE, AB_QKV, AB_SINKS, AB_DSINKS };

static void attn_back_setup(struct op_test *t)
{
    packed_setup(t, layouts[t->p[3]], t->p[4]);
    int64_t rows = t->batch.n_tokens, n = rows * t->p[0] * t->p[2];
    floats(t, "dqkv", OUT, DATA, rows * (t->p[0] + 2 * t->p[1]) * t->p[2], 1);
    floats(t, "dout", IN, DATA, n, 1);
    float *out = floats(t, "out", IN, DATA, n, 1);
    float *lse = floats(t, "lse", IN, F32, rows * t->p[0], 1);
    struct array *qkv = &t->a[t->n_arrays];
    floats(t, "qkv", IN, DATA, t->a[AB_DQKV].n, 1);
    struct array *sinks = &t->a[t->n_arrays];
    floats(t, "sinks", IN, DATA, t->p[0], 1);
    floats(t, "dsinks", INOUT, F32, t->p[0], 1);
    double *x = op_host((size_t)qkv->n * 8), *o = op_host((size_t)n * 8), z[32];
    double *l = op_host((size_t)rows * t->p[0] * 8);
    for (int64_t i = 0; i < qkv->n; i++) // rounded as bf16 first, so that out and lse fit both runs
        x[i] = qkv->f[i] = f32_from_bf16(bf16_from_f32(qkv->f[i]));
    for (int64_t i = 0; i < sinks->n; i++)
        z[i] = sinks->f[i] = f32_from_bf16(bf16_from_f32(sinks->f[i]));
    packed_formula(t, AB_INDEX, o, l, x, z);
    for (int64_t i = 0; i < n; i++) out[i] = (float)o[i];
    for (int64_t i = 0; i < rows * t->p[0]; i++) lse[i] = (float)l[i];
}

static void attn_back_launch(struct op_test *t, void **d)
{
    struct attn_shape s = attn_shape_of(t->p);
    struct batch_view b = packed_view(t, d);
    s.dt = dt;
    s.sinks = d[AB_SINKS];
    ops->attn_back(dev, d[AB_DQKV], t->p[9] ? d[AB_DSINKS] : NULL, d[AB_DOUT], d[AB_OUT], d[AB_LSE],
                   d[AB_QKV], &b, &s);
}

static double attn_loss(struct op_test *t, double **v)
{
    double *out = op_host((size_t)t->a[AB_OUT].n * sizeof *out);
    packed_formula(t, AB_INDEX, out, NULL, v[AB_QKV], v[AB_SINKS]);
    return dot(v[AB_DOUT], out, t->a[AB_OUT].n);
}

OP_BACK(attn_back, "attn_back", attn_loss);

/* Paged: sequences with a context and some rows at its end (layout 0: decode, 1: chunks of
 * prefill), the last one padding. Layer 1 of a pool of two layers; blocks in random order.
 * rope writes the rows' keys and values first, so one case covers both operations. */
static const struct {
    int context, rows;
} paged_layouts[][6] = {
    {{1, 1}, {17, 1}, {5, 1}, {33, 1}},
    {{9, 9}, {20, 4}, {31, 1}, {16, 16}, {7, 2}},
};

enum {
    PG_OUT,
    PG_K,
    PG_V,
    PG_QKV,
    PG_POSITIONS,
    PG_SEQ,
    PG_START,
    PG_SLOTS,
    PG_CONTEXT,
    PG_TABLE,
    PG_SINKS
};

static void attn_paged_setup(struct op_test *t)
{
    const int *p = t->p, block = p[7], layout = p[3], scale = p[4];
    int n_seqs = 0, rows = 1, blocks = 0, table_stride = 0, max_query = 1, max_context = 1;
    while (n_seqs < 5 && paged_layouts[layout][n_seqs].context) {
        int context = paged_layouts[layout][n_seqs].context * scale;
        int queries = paged_layouts[layout][n_seqs].rows * (layout ? scale : 1);
        int need = (context + block - 1) / block;
        rows += queries;
        blocks += need;
        table_stride = need > table_stride ? need : table_stride;
        max_query = queries > max_query ? queries : max_query;
        max_context = context > max_context ? context : max_context;
        n_seqs++;
    }
    int64_t pool = (int64_t)2 * blocks * block * p[1] * p[2];
    const struct attn_shape shape = attn_shape_of(p);
    floats(t, "out", OUT, DATA, (int64_t)rows * p[0] * attn_value_dim(&shape), 1);
    floats(t, "pool keys", INOUT, DATA, pool, 1);
    floats(t, "pool values", INOUT, DATA, pool, 1);
    floats(t, "qkv", IN, DATA, (int64_t)rows * attn_row_width(&shape), 1);
    int32_t *positions = ints(t, "positions", rows), *seq_of = ints(t, "seq_of", rows);
    int32_t *start = ints(t, "query_start", n_seqs + 2), *slots = ints(t, "slots", rows);
    int32_t *context_len = ints(t, "context_len", n_seqs + 1);
    int32_t *table = ints(t, "block_table", (int64_t)(n_seqs + 1) * table_stride);
    floats(t, "sinks", IN, DATA, p[0], 1);
    int32_t *order = op_host((size_t)blocks * sizeof *order);
    for (int i = 0; i < blocks; i++) order[i] = i;
    for (int i = blocks - 1; i > 0; i--) {
        int j = (int)rng_below(&t->rng, (uint32_t)i + 1), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    int row = 0, next = 0;
    for (int s = 0; s < n_seqs; s++) {
        int context = paged_layouts[layout][s].context * scale;
        int queries = paged_layouts[layout][s].rows * (layout ? scale : 1);
        start[s] = row;
        context_len[s] = context;
        for (int i = 0; i < (context + block - 1) / block; i++)
            table[s * table_stride + i] = order[next++];
        for (int i = 0; i < queries; i++, row++) {
            positions[row] = context - queries + i;
            seq_of[row] = s;
            slots[row] =
                table[s * table_stride + positions[row] / block] * block + positions[row] % block;
        }
    }
    start[n_seqs] = row;
    seq_of[row] = n_seqs; // padding: one row, slot -1, context_len 0
    slots[row] = -1;
    start[n_seqs + 1] = row + 1;
    t->batch = (struct batch_view){.n_tokens = rows,
                                   .n_seqs = n_seqs + 1,
                                   .max_query = max_query,
                                   .max_context = max_context,
                                   .table_stride = table_stride};
}

static void attn_paged_launch(struct op_test *t, void **d)
{
    struct attn_shape s = attn_shape_of(t->p);
    struct batch_view b = t->batch;
    b.positions = d[PG_POSITIONS];
    b.seq_of = d[PG_SEQ];
    b.query_start = d[PG_START];
    b.slots = d[PG_SLOTS];
    b.context_len = d[PG_CONTEXT];
    b.block_table = d[PG_TABLE];
    s.sinks = t->p[9] ? d[PG_SINKS] : NULL;
    s.dt = dt;
    int block = t->p[7];
    const int width = s.n_kv_heads * s.head_dim;
    const struct kv_layer layers[2] = {{.width = width},
                                       {.offset = t->a[PG_K].n / 2, .width = width}};
    struct kv_view kv = {.k = d[PG_K],
                         .v = d[PG_V],
                         .layers = layers,
                         .n_blocks = (int)(t->a[PG_K].n / 2 / block / s.n_kv_heads / s.head_dim),
                         .block_size = block,
                         .dt = dt};
    op_kv_store(&kv, 1, d[PG_QKV], &b, &s);
    ops->attn(dev, d[PG_OUT], NULL, d[PG_QKV], &kv, 1, &b, &s);
}

static void attn_paged_reference(struct op_test *t, double **v)
{
    const struct attn_shape s = attn_shape_of(t->p);
    const int block = t->p[7];
    const int64_t kv_width = (int64_t)s.n_kv_heads * s.head_dim;
    const int64_t width = attn_row_width(&s), layer = t->a[PG_K].n / 2;
    const int value_dim = attn_value_dim(&s);
    double *pool_k = t->a[PG_K].expect, *pool_v = t->a[PG_V].expect;
    for (int64_t i = 0; i < t->a[PG_K].n; i++) {
        pool_k[i] = v[PG_K][i];
        pool_v[i] = v[PG_V][i];
    }
    for (int row = 0; row < t->batch.n_tokens; row++)
        for (int64_t c = 0; c < kv_width && t->a[PG_SLOTS].i[row] >= 0; c++) {
            const double *from = v[PG_QKV] + row * width + s.n_heads * s.head_dim;
            int64_t to = layer + t->a[PG_SLOTS].i[row] * kv_width + c;
            pool_k[to] = from[c];
            if (!s.latent) pool_v[to] = from[kv_width + c];
        }
    const double **k = op_host((size_t)t->batch.max_context * sizeof *k);
    const double **w = op_host((size_t)t->batch.max_context * sizeof *w);
    for (int row = 0; row < t->batch.n_tokens; row++)
        for (int h = 0; h < s.n_heads; h++) {
            double *out = t->a[PG_OUT].expect + ((int64_t)row * s.n_heads + h) * value_dim;
            int seq = t->a[PG_SEQ].i[row], n = 0, last = t->a[PG_POSITIONS].i[row];
            if (t->a[PG_SLOTS].i[row] < 0) {
                for (int c = 0; c < value_dim; c++) out[c] = 0;
                continue;
            }
            for (int j = 0; j <= last; j++) {
                if (s.window && j <= last - s.window) continue;
                int32_t number = t->a[PG_TABLE].i[seq * t->batch.table_stride + j / block];
                int64_t at = layer + ((int64_t)number * block + j % block) * kv_width +
                             h / (s.n_heads / s.n_kv_heads) * s.head_dim;
                k[n] = pool_k + at;
                w[n++] = (s.latent ? pool_k : pool_v) + at;
            }
            attention_row(out, v[PG_QKV] + row * width + h * s.head_dim, k, w, n,
                          sink_of(t, v[PG_SINKS], h), &s);
        }
}

OP(attn_paged, "attn, paged");

static const struct op_case cases[] = {
    {&op_rope, "5 rows 3 x 8", {5, 3, 8, 8, 8, 1}, false},
    {&op_rope, "33 rows 6 x 64 partial 16", {33, 6, 64, 16, 128, 1}, false},
    {&op_rope, "17 rows 14 x 128 inverse", {17, 14, 128, 128, 256, -1}, false},
    {&op_rope, "9 rows 5 x 12 interleaved", {9, 5, 12, 6, 7, 1, 1}, false},
    {&op_rope, "33 rows 16 x 192 interleaved inverse", {33, 16, 192, 64, 0, -1, 1}, false},
    // heads kv_heads head_dim layout scale window softcap, block_size, latent
    {&op_attn_packed, "latent h4 24 of 32 shared", {4, 1, 32, 2, 1, 0, 0, 0, 24}, false},
    {&op_attn_packed, "latent h3 7 of 10 three x3", {3, 1, 10, 1, 3, 0, 0, 0, 7}, false},
    {&op_attn_packed, "latent h16 512 of 576 shared", {16, 1, 576, 2, 1, 0, 0, 0, 512}, false},
    {&op_attn_packed, "latent h20 512 of 576 one x20", {20, 1, 576, 0, 20, 0, 0, 0, 512}, true},
    {&op_attn_packed, "latent h16 512 of 576 one x40", {16, 1, 576, 0, 40, 0, 0, 0, 512}, true},
    {&op_attn_packed, "latent h128 512 of 576 three x2", {128, 1, 576, 1, 2, 0, 0, 0, 512}, true},
    {&op_attn_packed, "latent h4 48 of 80 one x30 window", {4, 1, 80, 0, 30, 40, 0, 0, 48}, false},
    {&op_attn_packed, "latent h4 24 of 40 softcap sinks", {4, 1, 40, 2, 3, 0, 4, 0, 24, 1}, false},
    {&op_attn_packed, "h2/2 d8 one", {2, 2, 8, 0, 1, 0, 0}, false},
    {&op_attn_packed, "h4/2 d16 three", {4, 2, 16, 1, 1, 0, 0}, false},
    {&op_attn_packed, "h6/2 d32 shared", {6, 2, 32, 2, 1, 0, 0}, false},
    {&op_attn_packed, "h4/1 d64 shared x5", {4, 1, 64, 2, 5, 0, 0}, false},
    {&op_attn_packed, "h2/1 d80 shared x3 window", {2, 1, 80, 2, 3, 7, 0}, false},
    {&op_attn_packed, "h3/3 d96 shared x2", {3, 3, 96, 2, 2, 0, 0}, false},
    {&op_attn_packed, "h7/1 d128 shared x4", {7, 1, 128, 2, 4, 0, 0}, false},
    {&op_attn_packed, "h2/1 d256 shared softcap", {2, 1, 256, 2, 1, 0, 2}, false},
    {&op_attn_packed, "h14/2 d64 three x11 window softcap", {14, 2, 64, 1, 11, 20, 5}, false},
    {&op_attn_packed, "h6/2 d32 tree", {6, 2, 32, 3, 1, 0, 0}, false},
    {&op_attn_packed, "h2/1 d80 tree x3 window", {2, 1, 80, 3, 3, 7, 0}, false},
    {&op_attn_packed, "latent h4 24 of 32 tree", {4, 1, 32, 3, 1, 0, 0, 0, 24}, false},
    {&op_attn_packed, "h6/2 d32 shared sinks", {6, 2, 32, 2, 1, 0, 0, 0, 0, 1}, false},
    {&op_attn_packed, "h8/1 d64 three x9 window sinks", {8, 1, 64, 1, 9, 20, 0, 0, 0, 1}, false},
    {&op_attn_packed, "h8/2 d64 one x100 sinks", {8, 2, 64, 0, 100, 0, 0, 0, 0, 1}, true},
    {&op_attn_packed, "h2/1 d512 shared", {2, 1, 512, 2, 1, 0, 0}, false},
    {&op_attn_packed, "h2/1 d256 one x30 sinks", {2, 1, 256, 0, 30, 0, 0, 0, 0, 1}, true},
    {&op_attn_packed, "h12/2 d128 shared x40", {12, 2, 128, 2, 40, 0, 0}, true},
    {&op_attn_packed, "h12/2 d128 tree x40", {12, 2, 128, 3, 40, 0, 0}, true},
    {&op_attn_packed, "h8/2 d64 tree x20 window", {8, 2, 64, 3, 20, 50, 0}, true},
    {&op_attn_packed, "h8/2 d64 one x100", {8, 2, 64, 0, 100, 0, 0}, true},
    {&op_attn_back, "h2/2 d8 one", {2, 2, 8, 0, 1, 0, 0}, false},
    {&op_attn_back, "h4/2 d16 three", {4, 2, 16, 1, 1, 0, 0}, false},
    {&op_attn_back, "h6/2 d32 shared", {6, 2, 32, 2, 1, 0, 0}, false},
    {&op_attn_back, "h6/2 d32 tree", {6, 2, 32, 3, 1, 0, 0}, false},
    {&op_attn_back, "h4/1 d64 tree window", {4, 1, 64, 3, 1, 5, 0}, false},
    {&op_attn_back, "h2/1 d80 tree softcap", {2, 1, 80, 3, 1, 0, 2}, false},
    {&op_attn_back, "h4/1 d64 shared window", {4, 1, 64, 2, 1, 5, 0}, false},
    {&op_attn_back, "h2/1 d80 shared softcap", {2, 1, 80, 2, 1, 0, 2}, false},
    {&op_attn_back, "h3/1 d96 shared window softcap", {3, 1, 96, 2, 1, 6, 2}, false},
    {&op_attn_back, "h6/3 d128 three", {6, 3, 128, 1, 1, 0, 0}, false},
    {&op_attn_back, "h2/1 d256 shared", {2, 1, 256, 2, 1, 0, 0}, false},
    {&op_attn_back, "h3/3 d192 three window", {3, 3, 192, 1, 1, 5, 0}, false},
    {&op_attn_back, "h2/1 d160 shared softcap", {2, 1, 160, 2, 1, 0, 2}, false},
    {&op_attn_back, "h16/16 d192 shared x20", {16, 16, 192, 2, 20, 0, 0}, true},
    {&op_attn_back, "h2/1 d512 shared", {2, 1, 512, 2, 1, 0, 0}, false},
    {&op_attn_back, "h4/1 d512 three x40", {4, 1, 512, 1, 40, 0, 0}, true},
    {&op_attn_back, "h4/1 d256 three x40", {4, 1, 256, 1, 40, 0, 0}, true},
    {&op_attn_back, "h4/2 d16 three sinks", {4, 2, 16, 1, 1, 0, 0, 0, 0, 1}, false},
    {&op_attn_back, "h8/2 d64 shared window sinks", {8, 2, 64, 2, 1, 5, 0, 0, 0, 1}, false},
    {&op_attn_back, "h8/1 d64 one x50 sinks", {8, 1, 64, 0, 50, 0, 0, 0, 0, 1}, true},
    {&op_attn_back, "h12/2 d128 shared x20", {12, 2, 128, 2, 20, 0, 0}, true},
    {&op_attn_back, "h12/2 d128 tree x20", {12, 2, 128, 3, 20, 0, 0}, true},
    {&op_attn_back, "h4/4 d64 tree x9 window", {4, 4, 64, 3, 9, 30, 0}, true},
    {&op_attn_back, "h14/2 d64 one x50", {14, 2, 64, 0, 50, 0, 0}, true},
    {&op_attn_back, "h4/4 d64 shared x9 window", {4, 4, 64, 2, 9, 30, 0}, true},
    // ... and block_size; layout 0 decodes, 1 prefills in chunks
    {&op_attn_paged, "decode h2/2 d8 b4", {2, 2, 8, 0, 1, 0, 0, 4}, false},
    {&op_attn_paged, "decode h14/2 d64 b16", {14, 2, 64, 0, 3, 0, 0, 16}, false},
    {&op_attn_paged, "decode h4/1 d80 b16 window", {4, 1, 80, 0, 2, 9, 0, 16}, false},
    {&op_attn_paged, "decode h12/2 d128 b32", {12, 2, 128, 0, 7, 0, 0, 32}, false},
    {&op_attn_paged, "decode h2/1 d512 b16", {2, 1, 512, 0, 2, 0, 0, 16}, false},
    {&op_attn_paged, "decode h2/1 d256 b16 softcap", {2, 1, 256, 0, 2, 0, 3, 16}, false},
    {&op_attn_paged, "chunks h4/2 d16 b4", {4, 2, 16, 1, 1, 0, 0, 4}, false},
    {&op_attn_paged, "chunks h6/3 d32 b8 window", {6, 3, 32, 1, 2, 11, 0, 8}, false},
    {&op_attn_paged, "chunks h8/2 d64 b16", {8, 2, 64, 1, 3, 0, 0, 16}, false},
    {&op_attn_paged, "chunks h3/1 d96 b16", {3, 1, 96, 1, 2, 0, 0, 16}, false},
    {&op_attn_paged, "chunks h7/1 d128 b16 softcap", {7, 1, 128, 1, 2, 0, 4, 16}, false},
    {&op_attn_paged, "latent decode h4 24 of 32 b4", {4, 1, 32, 0, 1, 0, 0, 4, 24}, false},
    {&op_attn_paged, "latent decode h16 512 of 576 b16", {16, 1, 576, 0, 2, 0, 0, 16, 512}, false},
    {&op_attn_paged, "latent chunks h3 7 of 10 b8", {3, 1, 10, 1, 2, 0, 0, 8, 7}, false},
    {&op_attn_paged, "latent chunks h16 512 of 576 b16", {16, 1, 576, 1, 8, 0, 0, 16, 512}, true},
    {&op_attn_paged, "latent decode h128 512 of 576", {128, 1, 576, 0, 2, 0, 0, 16, 512}, true},
    {&op_attn_paged, "latent decode h16 512 long", {16, 1, 576, 0, 120, 0, 0, 16, 512}, true},
    {&op_attn_paged, "latent decode h4 48 window", {4, 1, 80, 0, 120, 300, 0, 16, 48}, true},
    {&op_attn_paged, "latent chunks h20 512 long", {20, 1, 576, 1, 20, 0, 0, 16, 512}, true},
    {&op_attn_paged, "decode h8/1 d64 b16 sinks", {8, 1, 64, 0, 3, 0, 0, 16, 0, 1}, false},
    {&op_attn_paged, "decode h4/2 d16 b4 window sinks", {4, 2, 16, 0, 2, 9, 0, 4, 0, 1}, false},
    {&op_attn_paged, "chunks h8/1 d64 b16 sinks", {8, 1, 64, 1, 3, 0, 0, 16, 0, 1}, false},
    {&op_attn_paged, "decode h8/1 d64 b16 long sinks", {8, 1, 64, 0, 120, 0, 0, 16, 0, 1}, true},
    {&op_attn_paged, "chunks h8/1 d64 b16 long sinks", {8, 1, 64, 1, 20, 0, 0, 16, 0, 1}, true},
    {&op_attn_paged, "chunks h2/1 d256 b16 long sinks", {2, 1, 256, 1, 20, 0, 0, 16, 0, 1}, true},
    {&op_attn_paged, "decode h12/2 d128 b16 long", {12, 2, 128, 0, 120, 0, 0, 16}, true},
    {&op_attn_paged, "chunks h12/2 d128 b16 long", {12, 2, 128, 1, 20, 0, 0, 16}, true},
};

/* The same sequence as a packed batch, as one paged prefill, and row by row as decode steps: on the
 * CPU the same bits, whatever the batch and the block size. */
ON_EACH_DEVICE(attention_forms)
{
    enum { ROWS = 45, HEADS = 6, KV_HEADS = 2, DIM = 32, BLOCK = 8, BLOCKS = 6 };
    enum { WIDTH = (HEADS + 2 * KV_HEADS) * DIM, OUT_WIDTH = HEADS * DIM };
    struct rng rng;
    rng_init(&rng, 21, 0);
    static float qkv[ROWS * WIDTH], packed[ROWS * OUT_WIDTH], paged[ROWS * OUT_WIDTH],
        decoded[ROWS * OUT_WIDTH];
    for (int i = 0; i < ROWS * WIDTH; i++) qkv[i] = rng_normal(&rng);
    int32_t positions[ROWS], zeros[ROWS] = {0}, slots[ROWS], start[2] = {0, ROWS}, none = -1;
    static const int32_t table[BLOCKS] = {3, 0, 5, 1, 4, 2};
    int32_t rows = ROWS;
    for (int i = 0; i < ROWS; i++) {
        positions[i] = i;
        slots[i] = table[i / BLOCK] * BLOCK + i % BLOCK;
    }
    static const float sinks[HEADS] = {0.5f, -1, 2, 0, -3, 1};
    float *d_sinks = to_device(sinks, sizeof sinks);
    const struct attn_shape shape = {.n_heads = HEADS,
                                     .n_kv_heads = KV_HEADS,
                                     .head_dim = DIM,
                                     .scale = 0.17f,
                                     .window = 20,
                                     .sinks = d_sinks};
    float *d_qkv = to_device(qkv, sizeof qkv), *d_out = to_device(NULL, sizeof packed);
    float *d_lse = to_device(NULL, ROWS * HEADS * sizeof *d_lse);
    int32_t *d_positions = to_device(positions, sizeof positions);
    int32_t *d_zeros = to_device(zeros, sizeof zeros), *d_none = to_device(&none, sizeof none);
    int32_t *d_slots = to_device(slots, sizeof slots);
    int32_t *d_start = to_device(start, sizeof start);
    int32_t *d_table = to_device(table, sizeof table);
    int32_t *d_rows = to_device(&rows, sizeof rows);
    float *pool = to_device(NULL, sizeof(float) * 2 * BLOCKS * BLOCK * KV_HEADS * DIM);
    struct batch_view batch = {.n_tokens = ROWS,
                               .n_seqs = 1,
                               .max_query = ROWS,
                               .max_context = ROWS,
                               .packed = true,
                               .positions = d_positions,
                               .seq_of = d_zeros,
                               .query_start = d_start,
                               .parent = d_none,
                               .first_position = d_zeros,
                               .attend_end = d_rows};
    ops->attn(dev, d_out, d_lse, d_qkv, NULL, 0, &batch, &shape);
    from_device(packed, d_out, sizeof packed);

    const struct kv_layer layer = {.width = KV_HEADS * DIM};
    struct kv_view kv = {.k = pool,
                         .v = pool + BLOCKS * BLOCK * KV_HEADS * DIM,
                         .layers = &layer,
                         .n_blocks = BLOCKS,
                         .block_size = BLOCK,
                         .dt = DT_F32};
    batch.packed = false;
    batch.slots = d_slots;
    batch.context_len = d_rows;
    batch.block_table = d_table;
    batch.table_stride = BLOCKS;
    op_kv_store(&kv, 0, d_qkv, &batch, &shape);
    ops->attn(dev, d_out, NULL, d_qkv, &kv, 0, &batch, &shape);
    from_device(paged, d_out, sizeof paged);

    device_fill(dev, d_out, 0xFF, sizeof packed);
    for (int i = 0; i < ROWS; i++) {
        int32_t one_row[2] = {0, 1}, context = i + 1;
        device_copy_in(dev, d_start, one_row, sizeof one_row);
        device_copy_in(dev, d_rows, &context, sizeof context);
        struct batch_view row = batch;
        row.n_tokens = row.max_query = 1;
        row.max_context = i + 1;
        row.positions = d_positions + i;
        row.slots = d_slots + i;
        ops->attn(dev, d_out + i * OUT_WIDTH, NULL, d_qkv + i * WIDTH, &kv, 0, &row, &shape);
        sync_or_fail();
    }
    from_device(decoded, d_out, sizeof decoded);
    double worst = 0;
    for (int i = 0; i < ROWS * OUT_WIDTH; i++) {
        assert_true(isfinite(packed[i]) && isfinite(paged[i]) && isfinite(decoded[i]));
        worst = fmax(worst, fabs((double)packed[i] - paged[i]));
        worst = fmax(worst, fabs((double)packed[i] - decoded[i]));
    }
    printf("attention: packed, paged and decoded differ by %.2g on %s\n", worst, device_spec(dev));
    assert_true(worst <= (device_kind(dev) == DEVICE_CPU ? 0 : 1e-5));
}

OP_TESTS(cases)
