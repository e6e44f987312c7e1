/* test_latent.c: what latent attention needs beside attention: queries into the absorbed form and
 * results out of it, the expanded form and its gradient, that both forms give one result, and that
 * a row has the same bits in decoding and in training. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

// p: rows heads nope rope rank value
static struct latent_shape shape_of(const struct op_test *t)
{
    return (struct latent_shape){.rows = t->p[0],
                                 .n_heads = t->p[1],
                                 .nope = t->p[2],
                                 .rope = t->p[3],
                                 .rank = t->p[4],
                                 .value = t->p[5],
                                 .dt = dt,
                                 .early =
                                     t->p[0] % 2 == 1}; // the operation before writes no weights
}

static int64_t weights_of(const struct latent_shape *s)
{
    return (int64_t)s->n_heads * (s->nope + s->value) * s->rank;
}

// ---- into the absorbed form ---------------------------------------------------------------------
enum { Q_QKV, Q_Q, Q_KEYS, Q_W };

static void query_setup(struct op_test *t)
{
    const struct latent_shape s = shape_of(t);
    const int64_t rows = s.rows, width = s.rank + s.rope;
    floats(t, "qkv", OUT, DATA, rows * (s.n_heads + 1) * width, 1);
    floats(t, "q", IN, DATA, rows * s.n_heads * (s.nope + s.rope), 1);
    floats(t, "keys", IN, DATA, rows * width, 1);
    floats(t, "w", IN, DATA, weights_of(&s), 1);
}

static void query_launch(struct op_test *t, void **d)
{
    const struct latent_shape s = shape_of(t);
    ops->latent_matmul(dev, d[Q_QKV], d[Q_Q], d[Q_KEYS], d[Q_W], &s);
}

static void query_reference(struct op_test *t, double **v)
{
    const struct latent_shape s = shape_of(t);
    const int width = s.rank + s.rope, dim = s.nope + s.rope;
    for (int64_t r = 0; r < s.rows; r++) {
        double *row = t->a[Q_QKV].expect + r * (s.n_heads + 1) * width;
        for (int h = 0; h < s.n_heads; h++) {
            const double *q = v[Q_Q] + (r * s.n_heads + h) * dim;
            const double *w = v[Q_W] + (int64_t)h * (s.nope + s.value) * s.rank;
            for (int c = 0; c < width; c++) {
                double sum = c < s.rank ? 0 : q[s.nope + c - s.rank];
                for (int d = 0; d < s.nope && c < s.rank; d++) sum += q[d] * w[d * s.rank + c];
                row[h * width + c] = sum;
            }
        }
        for (int c = 0; c < width; c++) row[s.n_heads * width + c] = v[Q_KEYS][r * width + c];
    }
}

OP(query, "latent_matmul, queries");

// ---- and out of it ------------------------------------------------------------------------------
enum { V_OUT, V_O, V_W };

static void value_setup(struct op_test *t)
{
    const struct latent_shape s = shape_of(t);
    floats(t, "out", OUT, DATA, (int64_t)s.rows * s.n_heads * s.value, 1);
    floats(t, "o", IN, DATA, (int64_t)s.rows * s.n_heads * s.rank, 1);
    floats(t, "w", IN, DATA, weights_of(&s), 1);
}

static void value_launch(struct op_test *t, void **d)
{
    const struct latent_shape s = shape_of(t);
    ops->latent_matmul(dev, d[V_OUT], d[V_O], NULL, d[V_W], &s);
}

static void value_reference(struct op_test *t, double **v)
{
    const struct latent_shape s = shape_of(t);
    for (int64_t i = 0; i < t->a[V_OUT].n; i++) {
        const int64_t head = i / s.value, j = s.nope + i % s.value; // of all rows
        const double *w = v[V_W] + (head % s.n_heads * (s.nope + s.value) + j) * s.rank,
                     *o = v[V_O] + head * s.rank;
        double sum = 0;
        for (int c = 0; c < s.rank; c++) sum += o[c] * w[c];
        t->a[V_OUT].expect[i] = sum;
    }
}

OP(value, "latent_matmul, values");

// ---- the expanded form --------------------------------------------------------------------------
enum { E_QKV, E_Q, E_KV, E_KEYS };

static void expand_setup(struct op_test *t)
{
    const struct latent_shape s = shape_of(t);
    const int64_t heads = (int64_t)s.rows * s.n_heads, dim = s.nope + s.rope;
    floats(t, "qkv", OUT, DATA, 3 * heads * latent_expanded_dim(s.nope, s.rope, s.value), 1);
    floats(t, "q", IN, DATA, heads * dim, 1);
    floats(t, "kv", IN, DATA, heads * (s.nope + s.value), 1);
    floats(t, "keys", IN, DATA, (int64_t)s.rows * (s.rank + s.rope), 1);
}

static void expand_launch(struct op_test *t, void **d)
{
    const struct latent_shape s = shape_of(t);
    ops->latent_expand(dev, d[E_QKV], d[E_Q], d[E_KV], d[E_KEYS], &s, false);
}

static void expand(double *qkv, const double *q, const double *kv, const double *keys,
                   const struct latent_shape *s)
{
    const int64_t dim = s->nope + s->rope, wide = dim > s->value ? dim : s->value,
                  n = s->n_heads * wide;
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t i = 0; i < n; i++) {
            const int64_t h = i / wide, d = i % wide;
            const double *head = kv + (r * s->n_heads + h) * (s->nope + s->value);
            double *to = qkv + 3 * r * n + i;
            to[0] = d < dim ? q[(r * s->n_heads + h) * dim + d] : 0;
            to[n] = d < s->nope ? head[d]
                    : d < dim   ? keys[r * (s->rank + s->rope) + s->rank + d - s->nope]
                                : 0;
            to[2 * n] = d < s->value ? head[s->nope + d] : 0;
        }
}

static void expand_reference(struct op_test *t, double **v)
{
    const struct latent_shape s = shape_of(t);
    expand(t->a[E_QKV].expect, v[E_Q], v[E_KV], v[E_KEYS], &s);
}

OP(expand, "latent_expand");

// ---- its gradient -------------------------------------------------------------------------------
enum { B_DQ, B_DKV, B_DKEYS, B_DQKV, B_Q, B_KV, B_KEYS };

static void expand_back_setup(struct op_test *t)
{
    const struct latent_shape s = shape_of(t);
    const int64_t heads = (int64_t)s.rows * s.n_heads, dim = s.nope + s.rope;
    const int64_t kv = heads * (s.nope + s.value), keys = (int64_t)s.rows * (s.rank + s.rope);
    floats(t, "dq", OUT, DATA, heads * dim, 1);
    floats(t, "dkv", OUT, DATA, kv, 1);
    floats(t, "dkeys", INOUT, DATA, keys, 1); // all but the last `rope` entries stay
    floats(t, "dqkv", IN, DATA, 3 * heads * latent_expanded_dim(s.nope, s.rope, s.value), 1);
    floats(t, "q", IN, DATA, heads * dim, 1);
    floats(t, "kv", IN, DATA, kv, 1);
    floats(t, "keys", IN, DATA, keys, 1);
}

static void expand_back_launch(struct op_test *t, void **d)
{
    const struct latent_shape s = shape_of(t);
    ops->latent_expand(dev, d[B_DQKV], d[B_DQ], d[B_DKV], d[B_DKEYS], &s, true);
}

static double expand_loss(struct op_test *t, double **v)
{
    const struct latent_shape s = shape_of(t);
    double *qkv = op_host((size_t)t->a[B_DQKV].n * sizeof *qkv), sum = 0;
    expand(qkv, v[B_Q], v[B_KV], v[B_KEYS], &s);
    for (int64_t i = 0; i < t->a[B_DQKV].n; i++) sum += qkv[i] * v[B_DQKV][i];
    return sum;
}

static void expand_back_reference(struct op_test *t, double **v)
{
    const struct latent_shape s = shape_of(t);
    const int width = s.rank + s.rope;
    differentiate(t, v, B_DQ, B_Q, false, expand_loss);
    differentiate(t, v, B_DKV, B_KV, false, expand_loss);
    differentiate(t, v, B_DKEYS, B_KEYS, false, expand_loss);
    for (int64_t i = 0; i < t->a[B_DKEYS].n; i++)
        if (i % width < s.rank) t->a[B_DKEYS].expect[i] = v[B_DKEYS][i];
}

OP(expand_back, "latent_expand, back");

static const struct op_case cases[] = {
    // rows heads nope rope rank value
    {&op_query, "5 rows h2 6+4 of 9, values 3", {5, 2, 6, 4, 9, 3}, false},
    {&op_query, "37 rows h4 16+8 of 24, values 12", {37, 4, 16, 8, 24, 12}, false},
    {&op_query, "3 rows h16 128+64 of 512, values 128", {3, 16, 128, 64, 512, 128}, false},
    {&op_query, "70 rows h20 192+64 of 512, values 256", {70, 20, 192, 64, 512, 256}, true},
    {&op_query, "200 rows h5 40+24 of 72, values 56", {200, 5, 40, 24, 72, 56}, false},
    {&op_query, "131 rows h128 128+64 of 512, values 128", {131, 128, 128, 64, 512, 128}, true},
    {&op_value, "5 rows h2 6+4 of 9, values 3", {5, 2, 6, 4, 9, 3}, false},
    {&op_value, "37 rows h4 16+8 of 24, values 12", {37, 4, 16, 8, 24, 12}, false},
    {&op_value, "3 rows h16 128+64 of 512, values 128", {3, 16, 128, 64, 512, 128}, false},
    {&op_value, "70 rows h20 192+64 of 512, values 256", {70, 20, 192, 64, 512, 256}, true},
    {&op_value, "200 rows h5 40+24 of 72, values 56", {200, 5, 40, 24, 72, 56}, false},
    {&op_value, "131 rows h128 128+64 of 512, values 128", {131, 128, 128, 64, 512, 128}, true},
    {&op_expand, "5 rows h2 6+4 of 9, values 3", {5, 2, 6, 4, 9, 3}, false},
    {&op_expand, "70 rows h20 192+64 of 512, values 256", {70, 20, 192, 64, 512, 256}, true},
    {&op_expand, "5 rows h2 6+4 of 9, values 17", {5, 2, 6, 4, 9, 17}, false},
    {&op_expand, "7 rows h4 16+8 of 24, values 40", {7, 4, 16, 8, 24, 40}, false},
    {&op_expand_back, "5 rows h2 6+4 of 9, values 17", {5, 2, 6, 4, 9, 17}, false},
    {&op_expand_back, "7 rows h4 16+8 of 24, values 40", {7, 4, 16, 8, 24, 40}, false},
    {&op_expand_back, "5 rows h2 6+4 of 9, values 3", {5, 2, 6, 4, 9, 3}, false},
    {&op_expand_back, "9 rows h4 16+8 of 24, values 24", {9, 4, 16, 8, 24, 24}, false},
    {&op_expand_back, "70 rows h20 192+64 of 512, values 256", {70, 20, 192, 64, 512, 256}, true},
};

// ---- both forms, and both batches ---------------------------------------------------------------
enum { ROWS = 45, HEADS = 3, NOPE = 10, ROPE = 6, RANK = 20, VALUE = 8, DIM = NOPE + ROPE };
enum { WIDTH = RANK + ROPE, KV = HEADS * (NOPE + VALUE), BLOCK = 8, BLOCKS = 6 };

static const struct latent_shape latent = {ROWS, HEADS, NOPE, ROPE, RANK, VALUE, .dt = DT_F32};
static const struct attn_shape absorbed = {
    .n_heads = HEADS, .n_kv_heads = 1, .head_dim = WIDTH, .latent = RANK, .scale = 0.3f};
static const struct attn_shape expanded = {
    .n_heads = HEADS, .n_kv_heads = HEADS, .head_dim = DIM, .scale = 0.3f};

struct input { // one sequence; device
    float *q, *keys, *latents, *w;
    int32_t *positions, *zeros, *none, *rows, *start, *slots, *table;
    float *qkv, *o, *out, *lse; // results
};

static float *normal(struct rng *rng, int n)
{
    return to_device(normal_numbers(rng, (size_t)n, 1), (size_t)n * sizeof(float));
}

static void input_open(struct input *in)
{
    static const int32_t table[BLOCKS] = {3, 0, 5, 1, 4, 2}, start[2] = {0, ROWS}, rows = ROWS,
                         none = -1;
    int32_t positions[ROWS], zeros[ROWS] = {0}, slots[ROWS];
    struct rng rng;
    rng_init(&rng, 5, 0);
    for (int i = 0; i < ROWS; i++) {
        positions[i] = i;
        slots[i] = table[i / BLOCK] * BLOCK + i % BLOCK;
    }
    in->q = normal(&rng, ROWS * HEADS * DIM);
    in->keys = normal(&rng, ROWS * WIDTH);
    in->w = normal(&rng, KV * RANK);
    in->latents = to_device(NULL, sizeof(float) * ROWS * RANK);
    device_copy_2d(dev, in->latents, RANK * sizeof(float), in->keys, WIDTH * sizeof(float),
                   RANK * sizeof(float), ROWS);
    in->positions = to_device(positions, sizeof positions);
    in->zeros = to_device(zeros, sizeof zeros);
    in->none = to_device(&none, sizeof none);
    in->slots = to_device(slots, sizeof slots);
    in->table = to_device(table, sizeof table);
    in->start = to_device(start, sizeof start);
    in->rows = to_device(&rows, sizeof rows);
    in->qkv = to_device(NULL, sizeof(float) * ROWS * 3 * HEADS * (DIM + WIDTH));
    in->o = to_device(NULL, sizeof(float) * ROWS * HEADS * (DIM + RANK));
    in->out = to_device(NULL, sizeof(float) * ROWS * HEADS * VALUE);
    in->lse = to_device(NULL, sizeof(float) * ROWS * HEADS);
}

static struct batch_view packed_batch(const struct input *in)
{
    return (struct batch_view){.n_tokens = ROWS,
                               .n_seqs = 1,
                               .max_query = ROWS,
                               .max_context = ROWS,
                               .packed = true,
                               .positions = in->positions,
                               .seq_of = in->zeros,
                               .query_start = in->start,
                               .parent = in->none,
                               .first_position = in->zeros,
                               .attend_end = in->rows,
                               .slots = in->slots,
                               .context_len = in->rows,
                               .block_table = in->table,
                               .table_stride = BLOCKS};
}

typedef float values[ROWS][HEADS][VALUE];

static void run_absorbed(struct input *in, values ret)
{
    const struct batch_view batch = packed_batch(in);
    ops->latent_matmul(dev, in->qkv, in->q, in->keys, in->w, &latent);
    ops->attn(dev, in->o, in->lse, in->qkv, NULL, 0, &batch, &absorbed);
    ops->latent_matmul(dev, in->out, in->o, NULL, in->w, &latent);
    from_device(ret, in->out, sizeof(values));
}

// Row by row, each behind those before it, from a pool of latents alone.
static void run_decoding(struct input *in, values ret)
{
    const struct kv_layer layer = {.width = WIDTH};
    struct kv_view kv = {.layers = &layer, .n_blocks = BLOCKS, .block_size = BLOCK, .dt = DT_F32};
    const int32_t one_row[2] = {0, 1};
    kv.k = to_device(NULL, sizeof(float) * BLOCKS * BLOCK * WIDTH);
    device_copy_in(dev, in->start, one_row, sizeof one_row);
    for (int i = 0; i < ROWS; i++) {
        const int32_t context = i + 1;
        struct latent_shape shape = latent;
        struct batch_view batch = packed_batch(in);
        device_copy_in(dev, in->rows, &context, sizeof context);
        shape.rows = batch.n_tokens = batch.max_query = 1;
        batch.max_context = context;
        batch.packed = false;
        batch.positions += i;
        batch.slots += i;
        ops->latent_matmul(dev, in->qkv, in->q + i * HEADS * DIM, in->keys + i * WIDTH, in->w,
                           &shape);
        op_kv_store(&kv, 0, in->qkv, &batch, &absorbed);
        ops->attn(dev, in->o, NULL, in->qkv, &kv, 0, &batch, &absorbed);
        ops->latent_matmul(dev, in->out, in->o, NULL, in->w, &shape);
        from_device(ret[i], in->out, sizeof ret[i]);
    }
}

static void run_expanded(struct input *in, values ret)
{
    static float all[ROWS][HEADS][DIM];
    const struct batch_view batch = packed_batch(in);
    const struct matmul of_latents = {
        .m = ROWS, .n = KV, .k = RANK, .trans_b = true, .in = DT_F32, .out = DT_F32};
    float *kv = to_device(NULL, sizeof(float) * ROWS * KV);
    ops->matmul(dev, kv, in->latents, in->w, NULL, &of_latents);
    ops->latent_expand(dev, in->qkv, in->q, kv, in->keys, &latent, false);
    ops->attn(dev, in->o, in->lse, in->qkv, NULL, 0, &batch, &expanded);
    from_device(all, in->o, sizeof all);
    for (int i = 0; i < ROWS; i++)
        for (int h = 0; h < HEADS; h++) memcpy(ret[i][h], all[i][h], sizeof ret[i][h]);
}

ON_EACH_DEVICE(forms_agree)
{
    static values packed, decoded, by_heads;
    struct input in;
    double worst = 0, largest = 0;
    input_open(&in);
    run_absorbed(&in, packed);
    run_expanded(&in, by_heads);
    run_decoding(&in, decoded);
    assert_memory_equal(packed, decoded, sizeof packed);
    const float *x = (const float *)packed, *y = (const float *)by_heads;
    for (int i = 0; i < ROWS * HEADS * VALUE; i++) {
        worst = fmax(worst, fabs((double)x[i] - (double)y[i]));
        largest = fmax(largest, fabs((double)y[i]));
    }
    printf("latent attention: the two forms differ by %.2g of %.2g on %s\n", worst, largest,
           device_spec(dev));
    assert_true(worst < 1e-5 * largest);
}

OP_TESTS(cases)
