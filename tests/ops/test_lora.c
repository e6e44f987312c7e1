/* test_lora.c: low-rank adapters: the table of shapes (tests/support/op_table.h), and that a row
 * has the same bits alone and among others of any adapter. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/dropout.h"
#include "tests/support/op_table.h"

// p: rows, k, parts, adapters, rank, first part's width; later parts are 3 and 6 columns narrower.
// p[6]: hundredths of dropout. p[7]: y is f32, and the rows are those of a batch in reverse.
// Adapter i has rank - i, and leaves part i alone where there are several parts.
enum { MAX_FACTORS = 12 };

static int part_width(const int *p, int part)
{
    return p[5] - 3 * part;
}

static int width_of(const int *p)
{
    int n = 0;
    for (int part = 0; part < p[2]; part++) n += part_width(p, part);
    return n;
}

static bool adapts(const int *p, int part, int adapter)
{
    return p[2] == 1 || part != adapter;
}

static float scale_of(int part, int adapter)
{
    return 0.5f + (float)part - 0.25f * (float)adapter;
}

// A and B have places at multiples of 128 elements in one array, as in an adapter's arena.
static int64_t place(const int *p, int part, int adapter, bool of_b)
{
    const int64_t each = ((int64_t)p[4] * (p[1] > p[5] ? p[1] : p[5]) + 127) / 128 * 128;
    return each * (2 * (part * p[3] + adapter) + of_b);
}

static void adapter_rows(struct op_test *t)
{
    int32_t *of = ints(t, "adapter", t->p[0]);
    for (int i = 0; i < t->p[0]; i++)
        of[i] = i % 11 < 3 ? 0 : (int)rng_below(&t->rng, (uint32_t)t->p[3] + 1) - 1;
}

// Where in the lists a row's entries stand.
static int place_of(const int *p, int row)
{
    return p[7] ? p[0] - 1 - row : row;
}

// What row r's dropout makes of column c of a part's x.
static double kept(const int *p, int part, int row, int c)
{
    const struct lora_dropout d = {.p = (float)p[6] / 100, .seed = 77, .matrix = 9};
    const int at = place_of(p, row);
    float factors[4];
    if (p[6] == 0) return 1;
    dropout_factors(&d, part, at / 3, at % 3, (uint32_t)c / 4, factors);
    return factors[c % 4];
}

// Rows of samples of three tokens.
static void sample_rows(struct op_test *t)
{
    int32_t *sample = ints(t, "sample", t->p[0]), *position = ints(t, "position", t->p[0]);
    int32_t *row = ints(t, "row", t->p[0]);
    for (int i = 0; i < t->p[0]; i++) {
        sample[i] = i / 3;
        position[i] = i % 3;
        row[i] = place_of(t->p, i);
    }
}

static void lora_setup(struct op_test *t)
{
    floats(t, "y", INOUT, t->p[7] ? F32 : DATA, (int64_t)t->p[0] * width_of(t->p), 1);
    floats(t, "x", IN, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "factors", IN, DATA, place(t->p, t->p[2], 0, false), 0.3f);
    adapter_rows(t);
    sample_rows(t);
}

// lists: sample, position and row; NULL: not needed.
static struct lora_args lora_args_of(const struct op_test *t, const int32_t *adapter, void **lists)
{
    struct lora_args l = {.adapter = adapter,
                          .row = lists && t->p[7] ? lists[2] : NULL,
                          .dropout = {(float)t->p[6] / 100, 77, 9, 0, lists ? lists[0] : NULL,
                                      lists ? lists[1] : NULL},
                          .n_adapters = t->p[3],
                          .n_parts = t->p[2],
                          .max_rank = t->p[4],
                          .rows = t->p[0],
                          .k = t->p[1],
                          .dt = dt,
                          .out = t->p[7] ? DT_F32 : dt};
    for (int part = 0; part < t->p[2]; part++)
        l.first[part + 1] = l.first[part] + part_width(t->p, part);
    return l;
}

// The list of factors, in device memory; the caller's to release.
static struct lora_factors *upload(const struct op_test *t, const void *memory)
{
    struct lora_factors list[MAX_FACTORS] = {{0}};
    for (int i = 0; i < t->p[2] * t->p[3]; i++) {
        const int part = i / t->p[3], adapter = i % t->p[3];
        const char *base = memory;
        if (!adapts(t->p, part, adapter)) continue;
        list[i] = (struct lora_factors){
            .a = base + (size_t)place(t->p, part, adapter, false) * dtype_size(dt),
            .b = base + (size_t)place(t->p, part, adapter, true) * dtype_size(dt),
            .rank = t->p[4] - adapter,
            .scale = scale_of(part, adapter)};
    }
    return to_device(list, sizeof list);
}

static void lora_launch(struct op_test *t, void **d)
{
    struct lora_args l = lora_args_of(t, d[3], d + 4);
    struct lora_factors *factors = upload(t, d[2]);
    l.factors = factors;
    ops->lora(dev, d[0], d[1], &l);
    sync_or_fail();
}

// What adapter `adapter` adds to column c of a part, for one row.
static double delta(const int *p, const double *x, const double *factors, int part, int adapter,
                    int row, int c)
{
    const double *a = factors + place(p, part, adapter, false),
                 *b = factors + place(p, part, adapter, true);
    const int rank = p[4] - adapter;
    double sum = 0;
    for (int j = 0; j < rank; j++) {
        double h = 0;
        for (int i = 0; i < p[1]; i++) h += kept(p, part, row, i) * x[i] * a[j * p[1] + i];
        sum += h * b[c * rank + j];
    }
    return adapts(p, part, adapter) ? (double)scale_of(part, adapter) * sum : 0;
}

static void lora_reference(struct op_test *t, double **v)
{
    const int *p = t->p, width = width_of(p);
    const struct lora_args l = lora_args_of(t, NULL, NULL);
    for (int row = 0; row < p[0]; row++)
        for (int part = 0; part < p[2]; part++)
            for (int c = 0; c < part_width(p, part); c++) {
                const int64_t at = (int64_t)row * width + l.first[part] + c;
                const int adapter = t->a[3].i[place_of(p, row)];
                t->a[0].expect[at] = v[0][at];
                if (adapter >= 0)
                    t->a[0].expect[at] +=
                        delta(p, v[1] + (int64_t)row * p[1], v[2], part, adapter, row, c);
            }
}

OP(lora, "lora");

static void lora_back_setup(struct op_test *t)
{
    floats(t, "dx", INOUT, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "dfactors", INOUT, F32, place(t->p, t->p[2], 0, false), 1);
    floats(t, "dy", IN, DATA, (int64_t)t->p[0] * width_of(t->p), 1);
    floats(t, "x", IN, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "factors", IN, DATA, place(t->p, t->p[2], 0, false), 0.3f);
    sample_rows(t);
}

static void lora_back_launch(struct op_test *t, void **d)
{
    struct lora_args l = lora_args_of(t, NULL, d + 5);
    struct lora_factors *factors = upload(t, d[4]);
    l.factors = factors;
    for (int part = 0; part < t->p[2]; part++)
        l.grads[part] = (struct lora_grads){(float *)d[1] + place(t->p, part, 0, false),
                                            (float *)d[1] + place(t->p, part, 0, true)};
    l.dy = d[2];
    ops->lora(dev, d[0], d[3], &l);
    sync_or_fail();
}

// sum of dy * y of the forward formula
static double lora_loss(struct op_test *t, double **v)
{
    const int *p = t->p, width = width_of(p);
    const struct lora_args l = lora_args_of(t, NULL, NULL);
    double loss = 0;
    for (int row = 0; row < p[0]; row++)
        for (int part = 0; part < p[2]; part++)
            for (int c = 0; c < part_width(p, part); c++)
                loss += v[2][(int64_t)row * width + l.first[part] + c] *
                        delta(p, v[3] + (int64_t)row * p[1], v[4], part, 0, row, c);
    return loss;
}

OP_BACK(lora_back, "lora, back", lora_loss);

static const struct op_case cases[] = {
    {&op_lora, "rows 1 k5 parts 1 r2", {1, 5, 1, 1, 2, 7}, false},
    {&op_lora, "rows 9 k64 parts 3 of 3 adapters r8", {9, 64, 3, 3, 8, 40}, false},
    {&op_lora, "rows 37 k53 parts 2 of 4 adapters r5", {37, 53, 2, 4, 5, 31}, false},
    {&op_lora, "rows 64 k512 parts 1 of 2 adapters r64", {64, 512, 1, 2, 64, 96}, false},
    {&op_lora, "rows 300 k1536 parts 3 of 4 adapters r16", {300, 1536, 3, 4, 16, 1536}, true},
    {&op_lora, "rows 20 k64 parts 1 of 2 adapters r700", {20, 64, 1, 2, 700, 96}, false},
    {&op_lora, "rows 33 k200 parts 3 of 2 adapters r17", {33, 200, 3, 2, 17, 70}, false},
    {&op_lora, "rows 37 k53 parts 2 of 4 adapters r5 dropout", {37, 53, 2, 4, 5, 31, 30}, false},
    {&op_lora,
     "rows 300 k1536 parts 3 of 4 adapters r16 dropout",
     {300, 1536, 3, 4, 16, 1536, 10},
     true},
    {&op_lora, "rows 1 k64 r4 logits", {1, 64, 1, 1, 4, 101, 0, 1}, false},
    {&op_lora, "rows 37 k53 of 4 adapters r5 logits", {37, 53, 1, 4, 5, 131, 0, 1}, false},
    {&op_lora, "rows 70 k64 of 3 adapters r8 logits", {70, 64, 1, 3, 8, 512, 0, 1}, false},
    {&op_lora, "rows 19 k64 r8 logits dropout", {19, 64, 1, 2, 8, 128, 30, 1}, false},
    {&op_lora, "rows 300 k1536 of 4 adapters r16 logits", {300, 1536, 1, 4, 16, 16384, 0, 1}, true},
    {&op_lora_back, "rows 3 k5 parts 1 r2", {3, 5, 1, 1, 2, 7}, false},
    {&op_lora_back, "rows 9 k33 parts 1 r6", {9, 33, 1, 1, 6, 11}, false},
    {&op_lora_back, "rows 7 k16 parts 3 r3", {7, 16, 3, 1, 3, 13}, false},
    {&op_lora_back, "rows 37 k72 parts 1 r18", {37, 72, 1, 1, 18, 24}, false},
    {&op_lora_back, "rows 7 k18 parts 3 r3 dropout", {7, 18, 3, 1, 3, 13, 40}, false},
    {&op_lora_back, "rows 7 k18 r3 logits dropout", {7, 18, 1, 1, 3, 13, 40, 1}, false},
    {&op_lora_back, "rows 515 k1024 parts 3 r16 dropout", {515, 1024, 3, 1, 16, 512, 10}, true},
    {&op_lora_back, "rows 515 k1025 parts 1 r16", {515, 1025, 1, 1, 16, 2049}, true},
    {&op_lora_back, "rows 515 k1024 parts 3 r33", {515, 1024, 3, 1, 33, 512}, true},
};

// ---- a row by itself ----------------------------------------------------------------------------
enum { ALL = 150, K = 96, N = 70, RANK = 7, ADAPTERS = 2 }; // more than CUDA takes as few

// out: of y.
static void rows_alone_in(enum dtype out)
{
    static char before[ALL * N * sizeof(float)], whole[ALL * N * sizeof(float)];
    char one[N * sizeof(float)];
    const size_t row = N * dtype_size(out);
    int32_t adapter[ALL], place[ALL];
    struct rng rng;
    rng_init(&rng, 5, 0);
    for (int i = 0; i < ALL; i++) adapter[i] = (int)rng_below(&rng, ADAPTERS + 1) - 1;
    for (int i = 0; i < ALL; i++) place[i] = i;
    char *dx = normal_on_device(dt, ALL * K, 1, 5), *dy = normal_on_device(out, ALL * N, 1, 6),
         *dm = normal_on_device(dt, 1024 * 2 * ADAPTERS, 1, 7);
    int32_t *da = to_device(adapter, sizeof adapter);
    int32_t *places = to_device(place, sizeof place);
    struct lora_factors list[ADAPTERS];
    for (size_t i = 0; i < ADAPTERS; i++)
        list[i] =
            (struct lora_factors){dm + 2048 * i * dtype_size(dt),
                                  dm + (2048 * i + 1024) * dtype_size(dt), RANK - (int)i, 0.7f};
    struct lora_factors *factors = to_device(list, sizeof list);
    struct lora_args l = {.factors = factors,
                          .adapter = da,
                          .n_adapters = ADAPTERS,
                          .n_parts = 1,
                          .max_rank = RANK,
                          .rows = ALL,
                          .k = K,
                          .first = {0, N},
                          .dt = dt,
                          .out = out};
    from_device(before, dy, ALL * row);
    ops->lora(dev, dy, dx, &l);
    from_device(whole, dy, ALL * row);
    l.rows = 1;
    for (size_t i = 0; i < ALL; i++) {
        device_copy_in(dev, dy, before + i * row, row);
        l.row = places + i;
        ops->lora(dev, dy, dx + i * K * dtype_size(dt), &l);
        from_device(one, dy, row);
        assert_memory_equal(one, whole + i * row, row);
        assert_int_equal(memcmp(one, before + i * row, row) == 0, adapter[i] < 0);
    }
}

ON_EACH_DTYPE(rows_alone)
{
    rows_alone_in(dt);
    if (dt == DT_BF16) rows_alone_in(DT_F32);
}

OP_TESTS(cases)
