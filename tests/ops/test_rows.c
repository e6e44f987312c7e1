/* test_rows.c: operations that move, add, convert or sum rows of memory; and, of many operations,
 * calls of nothing. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/e4m3.h"
#include "tests/support/op_table.h"

// gather_rows, scatter_add_rows: p: n width numbered_rows [first rows, of those that the table
// holds]

static int rows_held(const struct op_test *t)
{
    return t->p[4] ? t->p[4] : t->p[2];
}

// Where the table has the i-th index's row; -1: nowhere.
static int place_of(const struct op_test *t, const int32_t *index, int i)
{
    const int at = index[i] - t->p[3];
    return at >= 0 && at < rows_held(t) ? at : -1;
}

static void gather_setup(struct op_test *t)
{
    floats(t, "y", OUT, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "table", IN, DATA, (int64_t)rows_held(t) * t->p[1], 1);
    int32_t *index = ints(t, "index", t->p[0]);
    for (int i = 0; i < t->p[0]; i++) index[i] = (int32_t)rng_below(&t->rng, (uint32_t)t->p[2]);
}

static void gather_launch(struct op_test *t, void **d)
{
    const struct gather_args args = {d[2], t->p[0], t->p[1], 1.5f, dt, t->p[3], t->p[4]};
    ops->gather_rows(dev, d[0], d[1], &args);
}

static void gather_reference(struct op_test *t, double **v)
{
    for (int i = 0; i < t->p[0]; i++) {
        const int64_t at = place_of(t, t->a[2].i, i);
        for (int c = 0; c < t->p[1]; c++)
            t->a[0].expect[(int64_t)i * t->p[1] + c] = at < 0 ? 0 : 1.5 * v[1][at * t->p[1] + c];
    }
}

OP(gather, "gather_rows");

static const int32_t *sort_index;

static int by_index(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    if (sort_index[x] != sort_index[y]) return sort_index[x] < sort_index[y] ? -1 : 1;
    return x < y ? -1 : x > y;
}

static void scatter_setup(struct op_test *t)
{
    floats(t, "table", INOUT, F32, (int64_t)rows_held(t) * t->p[1], 1);
    floats(t, "y", IN, DATA, (int64_t)t->p[0] * t->p[1], 1);
    int32_t *index = ints(t, "index", t->p[0]), *order = ints(t, "order", t->p[0]);
    for (int i = 0; i < t->p[0]; i++) {
        index[i] = (int32_t)rng_below(&t->rng, (uint32_t)t->p[2]);
        order[i] = i;
    }
    sort_index = index;
    qsort(order, (size_t)t->p[0], sizeof *order, by_index);
}

static void scatter_launch(struct op_test *t, void **d)
{
    const struct gather_args args = {d[2], t->p[0], t->p[1], 0.5f, dt, t->p[3], t->p[4]};
    ops->scatter_add_rows(dev, d[0], DT_F32, d[1], d[3], &args);
}

static void scatter_reference(struct op_test *t, double **v)
{
    double *table = t->a[0].expect;
    for (int64_t i = 0; i < t->a[0].n; i++) table[i] = v[0][i];
    for (int i = 0; i < t->p[0]; i++) {
        const int64_t at = place_of(t, t->a[2].i, i);
        for (int c = 0; at >= 0 && c < t->p[1]; c++)
            table[at * t->p[1] + c] += 0.5 * v[1][(int64_t)i * t->p[1] + c];
    }
}

OP(scatter, "scatter_add_rows");

// add: p: n, tenths of the scale.  column_sum: p: rows cols

static void add_setup(struct op_test *t)
{
    floats(t, "y", INOUT, DATA, t->p[0], 1);
    floats(t, "x", IN, DATA, t->p[0], 1);
}

static void add_launch(struct op_test *t, void **d)
{
    ops->add(dev, d[0], d[1], t->p[0], (float)t->p[1] / 10.0f, dt);
}

static void add_reference(struct op_test *t, double **v)
{
    const double scale = (float)t->p[1] / 10.0f;
    for (int i = 0; i < t->p[0]; i++) t->a[0].expect[i] = v[0][i] + scale * v[1][i];
}

OP(add, "add");

static void multiply_setup(struct op_test *t)
{
    floats(t, "x", INOUT, DATA, t->p[0], 1);
    floats(t, "factor", IN, F32, 1, 1);
}

static void multiply_launch(struct op_test *t, void **d)
{
    ops->multiply(dev, d[0], d[1], t->p[0], dt);
}

static void multiply_reference(struct op_test *t, double **v)
{
    for (int i = 0; i < t->p[0]; i++) t->a[0].expect[i] = v[1][0] * v[0][i];
}

OP(multiply, "multiply");

static void column_setup(struct op_test *t)
{
    floats(t, "out", INOUT, F32, t->p[1], 1);
    floats(t, "x", IN, DATA, (int64_t)t->p[0] * t->p[1], 1);
}

static void column_launch(struct op_test *t, void **d)
{
    ops->column_sum(dev, d[0], d[1], NULL, &(struct expert_rows){t->p[0], 1, t->p[1], dt});
}

static void column_reference(struct op_test *t, double **v)
{
    for (int c = 0; c < t->p[1]; c++) {
        double sum = v[0][c];
        for (int r = 0; r < t->p[0]; r++) sum += v[1][(int64_t)r * t->p[1] + c];
        t->a[0].expect[c] = sum;
    }
}

OP(column, "column_sum");

static const struct op_case cases[] = {
    {&op_gather, "n9 width33 of 20", {9, 33, 20}, false},
    {&op_gather, "n300 width1536 of 1000", {300, 1536, 1000}, false},
    {&op_gather, "n40 width33 of 30, rows 10 to 16", {40, 33, 30, 10, 7}, false},
    {&op_gather, "n300 width1536 of 1000, the last 500", {300, 1536, 1000, 500, 500}, false},
    {&op_scatter, "n50 width33 of 30, rows 10 to 16", {50, 33, 30, 10, 7}, false},
    {&op_scatter, "n1000 width256 of 300, the first 150", {1000, 256, 300, 0, 150}, false},
    {&op_scatter, "n50 width33 of 7", {50, 33, 7}, false},
    {&op_scatter, "n1000 width256 of 300", {1000, 256, 300}, false},
    {&op_scatter, "n5 width8 of 1000", {5, 8, 1000}, false},
    {&op_add, "n7", {7, 10}, false},
    {&op_add, "n100003", {100003, 10}, false},
    {&op_add, "n1000 scaled", {1000, 3}, false},
    {&op_multiply, "n7", {7}, false},
    {&op_multiply, "n100003", {100003}, false},
    {&op_column, "5 x 3", {5, 3}, false},
    {&op_column, "333 x 517", {333, 517}, false},
    {&op_column, "1 x 2048", {1, 2048}, false},
};

ON_EACH_DEVICE(checksum_regions)
{
    enum { BYTES = 1 << 20, REGIONS = 5 };
    unsigned char *host = op_host(BYTES);
    struct rng rng;
    rng_init(&rng, 8, 0);
    for (int i = 0; i < BYTES; i++) host[i] = (unsigned char)rng_u32(&rng);
    const uint64_t offset[REGIONS] = {0, 256, 4096, 512, 65536};
    const uint64_t bytes[REGIONS] = {4, 7, 65536, 0, BYTES - 65536 - 1};
    uint64_t sums[REGIONS], changed[REGIONS];
    void *d = to_device(host, BYTES);
    ops->checksum(dev, sums, d, offset, bytes, REGIONS);
    for (int r = 0; r < REGIONS; r++) {
        uint64_t want = 0;
        for (uint64_t j = 0; j * 4 < bytes[r]; j++) {
            uint64_t x = 0;
            for (uint64_t b = 0; b < 4 && j * 4 + b < bytes[r]; b++)
                x |= (uint64_t)host[offset[r] + j * 4 + b] << (8 * b);
            x += j * 0x9E3779B97F4A7C15u;
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
            x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
            want += x ^ (x >> 31);
        }
        if (sums[r] != want) fail_msg("region %d: %016lx, want %016lx", r, sums[r], want);
    }
    // two swapped words change it
    memcpy(host + BYTES - 16, host + 65536, 4);
    device_copy_in(dev, d, host, BYTES);
    ops->checksum(dev, changed, d, offset, bytes, REGIONS);
    assert_true(changed[4] != sums[4]);
    assert_true(changed[2] == sums[2]);
}

ON_EACH_DEVICE(convert_all)
{
    enum { N = 70001 };
    static const enum dtype from[] = {DT_F32, DT_BF16, DT_F16}, to[] = {DT_F32, DT_BF16};
    struct rng rng;
    rng_init(&rng, 3, 0);
    uint32_t *host = op_host(N * 4), *got = op_host(N * 4);
    for (int i = 0; i < N; i++) host[i] = rng_u32(&rng) & 0xbfffbfffu; // no infinities, no NaN
    for (int a = 0; a < 3; a++)
        for (int b = 0; b < 2; b++) {
            void *x = to_device(host, N * 4), *y = to_device(NULL, N * 4);
            ops->convert(dev, y, to[b], x, from[a], N);
            from_device(got, y, N * 4);
            for (int i = 0; i < N; i++) {
                float value, result;
                if (from[a] == DT_F32)
                    memcpy(&value, &host[i], 4);
                else if (from[a] == DT_BF16)
                    value = f32_from_bf16(((uint16_t *)host)[i]);
                else
                    value = f32_from_f16(((uint16_t *)host)[i]);
                if (to[b] == DT_F32) {
                    memcpy(&result, &got[i], 4);
                } else {
                    value = f32_from_bf16(bf16_from_f32(value));
                    result = f32_from_bf16(((uint16_t *)got)[i]);
                }
                if (memcmp(&value, &result, 4) != 0)
                    fail_msg("%s to %s: entry %d is %.9g, want %.9g", dtype_name(from[a]),
                             dtype_name(to[b]), i, result, value);
            }
        }
}

enum { QUANTISED_ROWS = 70, QUANTISED_COLS = 17008 };

// The scales alone, and codes by the largest of three ranks': this one's, and two that have more in
// every second row, and a NaN in the last but one.
static void check_ranks(const void *x, int cols, enum dtype w_dt, const float *w, const int8_t *own)
{
    enum { ROWS = QUANTISED_ROWS, RANKS = 3 };
    static uint8_t codes[ROWS * QUANTISED_COLS];
    int8_t scales[ROWS], of_ranks[RANKS * ROWS];
    void *c = to_device(NULL, sizeof codes), *s = to_device(NULL, sizeof scales);
    ops->quantise(dev, NULL, s, x, ROWS, cols, w_dt, NULL, 0);
    from_device(scales, s, sizeof scales);
    assert_memory_equal(scales, own, sizeof scales);
    for (int r = 0; r < ROWS; r++) {
        of_ranks[r] = r % 4 == 0 && own[r] < 100 ? (int8_t)(own[r] + 1) : (int8_t)-120;
        of_ranks[ROWS + r] = own[r];
        of_ranks[2 * ROWS + r] = r % 4 == 2 && own[r] < 100 ? (int8_t)(own[r] + 2) : (int8_t)-127;
    }
    of_ranks[ROWS - 2] = E4M3_SCALE_NAN;
    ops->quantise(dev, c, s, x, ROWS, cols, w_dt, to_device(of_ranks, sizeof of_ranks), RANKS);
    from_device(codes, c, sizeof codes);
    from_device(scales, s, sizeof scales);
    for (int r = 0; r < ROWS; r++) {
        const int more = own[r] >= 100 ? 0 : r % 4 == 0 ? 1 : r % 4 == 2 ? 2 : 0;
        assert_int_equal(scales[r], r == ROWS - 2 ? E4M3_SCALE_NAN : own[r] + more);
        for (int i = 0; i < cols && scales[r] != E4M3_SCALE_NAN; i++)
            assert_int_equal(codes[r * cols + e4m3_place(i, cols)],
                             e4m3_from_f32(ldexpf(w[r * cols + i], -scales[r])));
    }
}

// Codes and scales of rows, one of zeros, one of tiny numbers and one with a NaN.
static void check_quantise(int cols)
{
    enum { ROWS = QUANTISED_ROWS, MAX = ROWS * QUANTISED_COLS };
    const int n = ROWS * cols;
    static float w[MAX];
    static uint16_t half[MAX];
    static uint8_t codes[MAX];
    int8_t scales[ROWS];
    struct rng rng;
    rng_init(&rng, 4, 0);
    for (int i = 0; i < n; i++)
        w[i] = f32_from_bf16(bf16_from_f32(ldexpf(rng_normal(&rng), i / cols * 2 - 64)));
    memset(w, 0, (size_t)cols * sizeof *w);
    w[cols] = NAN;
    w[2 * cols] = 1e-38f;
    for (int i = 0; i < n; i++) half[i] = bf16_from_f32(w[i] = f32_from_bf16(bf16_from_f32(w[i])));
    for (int bf16 = 0; bf16 < 2; bf16++) {
        void *x = to_device(bf16 ? (void *)half : w, bf16 ? sizeof half : sizeof w);
        void *c = to_device(NULL, sizeof codes), *s = to_device(NULL, sizeof scales);
        ops->quantise(dev, c, s, x, ROWS, cols, bf16 ? DT_BF16 : DT_F32, NULL, 0);
        from_device(codes, c, sizeof codes);
        from_device(scales, s, sizeof scales);
        for (int r = 0; r < ROWS; r++) {
            float largest = 0;
            for (int i = r * cols; i < (r + 1) * cols; i++)
                if (fabsf(w[i]) > largest) largest = fabsf(w[i]);
            assert_int_equal(scales[r], r == 1 ? E4M3_SCALE_NAN : e4m3_scale(largest));
            for (int i = 0; i < cols && r != 1; i++)
                assert_int_equal(codes[r * cols + e4m3_place(i, cols)],
                                 e4m3_from_f32(ldexpf(w[r * cols + i], -scales[r])));
        }
        check_ranks(x, cols, bf16 ? DT_BF16 : DT_F32, w, scales);
    }
}

ON_EACH_DEVICE(quantise_rows)
{
    check_quantise(515);
    check_quantise(528);
    check_quantise(8960);
    check_quantise(QUANTISED_COLS);
}

// Heads of rows, one of zeros and one with a NaN; what lies beside them stays. A pool gives the
// same numbers (test_attention_order.c).
static void check_kv_round(int heads, int dim)
{
    enum { ROWS = 9, BESIDE = 24, MAX = ROWS * (4 * 130 + 2 * BESIDE) };
    const int stride = heads * dim + 2 * BESIDE;
    static float x[MAX], got[MAX];
    struct rng rng;
    rng_init(&rng, 6, 0);
    for (int i = 0; i < ROWS * stride; i++) x[i] = ldexpf(rng_normal(&rng), i / stride * 5 - 20);
    memset(x + BESIDE, 0, (size_t)dim * sizeof *x);
    x[stride + BESIDE + 1] = NAN;
    float *wide = to_device(x, sizeof x);
    void *d = to_device(NULL, MAX * dtype_size(dt));
    ops->convert(dev, d, dt, wide, DT_F32, MAX);
    ops->convert(dev, wide, DT_F32, d, dt, MAX);
    from_device(x, wide, sizeof x);
    const struct rope_args args = {
        .rows = ROWS, .n = heads, .head_dim = dim, .stride = stride, .dt = dt, .rounds = true};
    ops->rope(dev, (char *)d + BESIDE * dtype_size(dt), &args);
    ops->convert(dev, wide, DT_F32, d, dt, MAX);
    from_device(got, wide, sizeof got);
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < heads; h++) {
            float *head = x + r * stride + BESIDE + h * dim, largest = 0;
            for (int c = 0; c < dim; c++) largest = fmaxf(largest, fabsf(head[c]));
            const bool has_nan = r == 1 && h == 0;
            const int8_t scale = has_nan ? E4M3_SCALE_NAN : e4m3_scale(largest);
            for (int c = 0; c < dim; c++) head[c] = e4m3_rounded(head[c], scale);
            for (int c = 0; c < dim && has_nan; c++) {
                float *to = got + r * stride + BESIDE + c;
                assert_true(isnan(*to));
                *to = head[c];
            }
        }
    assert_memory_equal(got, x, (size_t)ROWS * (size_t)stride * sizeof *x);
}

ON_EACH_DTYPE(kv_round)
{
    check_kv_round(4, 130);
    check_kv_round(4, 128);
    check_kv_round(2, 64);
    check_kv_round(1, 24);
}

// The numbers of rng_normal(), chunk by chunk a stream further; on CUDA within the last bit.
ON_EACH_DEVICE(random_numbers)
{
    enum { N = 2 * RANDOM_CHUNK + 7 };
    const uint64_t seed = 5ull << 40 | 9, stream = 3ull << 32 | 0xffffffff;
    float *got = op_host(N * sizeof *got), last_bit = device_kind(dev) == DEVICE_CPU ? 0 : 2e-7f;
    uint16_t *half = op_host(N * sizeof *half);
    struct rng rng;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        if (!device_computes_in(dev, bf16 ? DT_BF16 : DT_F32)) continue;
        void *d = to_device(NULL, N * sizeof *got);
        ops->random_normal(dev, d, N, 0.5f, seed, stream, bf16 ? DT_BF16 : DT_F32);
        from_device(bf16 ? (void *)half : got, d, N * (bf16 ? 2 : 4));
        for (int i = 0; i < N; i++) {
            if (i % RANDOM_CHUNK == 0) rng_init(&rng, seed, stream + (uint64_t)i / RANDOM_CHUNK);
            const float want = 0.5f * rng_normal(&rng), x = bf16 ? f32_from_bf16(half[i]) : got[i];
            if (!(fabsf(x - want) <= fabsf(want) * (bf16 ? 0.00391f : last_bit)))
                fail_msg("number %d is %.9g, want %.9g", i, x, want);
        }
    }
}

// Of rows, or numbers, that are none: one piece of memory stands for all arrays.
static void nothing_of_rows(void *x)
{
    const struct rope_args rope = {.table = x,
                                   .positions = x,
                                   .n = 2,
                                   .head_dim = 8,
                                   .rot_dim = 8,
                                   .stride = 16,
                                   .sign = 1,
                                   .dt = dt,
                                   .rounds = true};
    const struct norm_args norm = {.x = x, .w = x, .rstd = x};
    const struct norm_shape norms = {NORM_RMS, 0, 8, 1, 8, 1e-6f, dt, false};
    const struct attn_shape heads = {.n_heads = 1, .n_kv_heads = 1, .head_dim = 8, .dt = dt};
    const struct act_shape act = {.width = 8, .kind = ACT_SILU, .gated = true, .dt = dt};
    ops->gather_rows(dev, x, x, &(struct gather_args){x, 0, 8, 1, dt, 0, 0});
    ops->scatter_add_rows(dev, x, DT_F32, x, x, &(struct gather_args){x, 0, 8, 1, dt, 0, 0});
    ops->norm(dev, x, &norm, &norms);
    ops->norm_back(dev, x, NULL, NULL, x, &norm, &norms, false);
    ops->rope(dev, x, &rope);
    ops->split_gate(dev, x, x, x, 0, &heads, false);
    ops->act(dev, x, x, &act);
    ops->act_back(dev, x, NULL, x, x, x, &act);
    ops->multiply(dev, x, x, 0, dt);
    ops->add(dev, x, x, 0, 1, dt);
    ops->column_sum(dev, x, x, NULL, &(struct expert_rows){0, 1, 8, dt});
    ops->convert(dev, x, DT_F32, x, DT_F32, 0);
    ops->softcap(dev, x, 0, 1, 1);
    ops->softcap_back(dev, x, x, 0, 1, 1);
    ops->random_normal(dev, x, 0, 1, 0, 0, dt);
}

static void nothing_of_logits(void *x)
{
    const struct head_args head = {x, x, 0, 8, 1};
    const struct head_grads grads = {.dlogprob = x, .lse = x};
    const struct distill_args pair = {x, x, 0, 8, 8, 1, 0.5f, 1, NULL, false, NULL};
    ops->logprob(dev, x, x, x, &head);
    ops->logprob_back(dev, x, &grads, &head, dt);
    ops->top_logprobs(dev, x, 2, &head);
    ops->adjust_logits(dev, x, x, x, x, 0, 8, false);
    ops->mask_logits(dev, x, NULL, x, 0, 8);
    ops->distill(dev, x, x, x, &pair, dt);
}

// Rows that are none, experts that are none, and (x: zeros) experts of which none has a row.
static void nothing_of_experts(void *x, const int32_t *zeros)
{
    const struct moe_routing routing = {x, x, x, x, x};
    const struct moe_shape moe = {.n_experts = 2, .top_k = 1, .width = 8, .dt = dt};
    struct matmul m = {0, 8, 64, .trans_b = true, .in = dt, .out = dt, .offsets = zeros};
    ops->moe_route_back(dev, x, x, x, &routing, &moe);
    ops->moe_balance(dev, x, x, x, &routing, &moe);
    ops->moe_balance_back(dev, x, x, x, &moe, 1);
    ops->moe_combine(dev, x, x, x, x, &moe, false);
    ops->moe_combine_back(dev, x, x, x, x, &routing, &moe);
    ops->experts_bias(dev, x, x, zeros, &(struct expert_rows){0, 2, 8, dt});
    for (int experts = 0; experts <= 2; experts += 2)
        for (int rows = 0; rows <= 3; rows += 3) {
            m.m = rows;
            m.n_experts = experts;
            ops->matmul(dev, x, x, x, NULL, &m);
            ops->column_sum(dev, x, x, zeros, &(struct expert_rows){rows, experts, 8, dt});
            ops->matmul(dev, x, x, x, NULL,
                        &(struct matmul){8, 8, rows, .trans_a = true, .beta = 1, .in = dt,
                                         .out = DT_F32, .offsets = zeros, .n_experts = experts});
        }
}

// A call of nothing is no failure, and writes nothing.
ON_EACH_DTYPE(nothing)
{
    enum { BYTES = 1 << 16 };
    static const int32_t zeros[3];
    char *host = memset(op_host(BYTES), 0x3c, BYTES), *after = op_host(BYTES); // small numbers
    void *x = to_device(host, BYTES), *offsets = to_device(zeros, sizeof zeros);
    nothing_of_rows(x);
    nothing_of_logits(x);
    nothing_of_experts(x, offsets);
    sync_or_fail();
    from_device(after, x, BYTES);
    assert_memory_equal(after, host, BYTES);
}

OP_TESTS(cases)
