/* test_matmul.c: matrix multiplication: the table of shapes (tests/support/op_table.h), and that a
 * row has the same bits alone and among others. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/e4m3.h"
#include "tests/support/op_table.h"

// p: m n k trans_a trans_b beta bias out_f32

static void matmul_setup(struct op_test *t)
{
    floats(t, "c", t->p[5] ? INOUT : OUT, t->p[7] ? F32 : DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "a", IN, DATA, (int64_t)t->p[0] * t->p[2], 1);
    floats(t, "b", IN, DATA, (int64_t)t->p[1] * t->p[2], 1);
    floats(t, "bias", IN, DATA, t->p[1], 1);
}

static void matmul_launch(struct op_test *t, void **d)
{
    struct matmul shape = {
        .m = t->p[0], .n = t->p[1], .k = t->p[2], .trans_a = t->p[3], .trans_b = t->p[4]};
    shape.beta = (float)t->p[5];
    shape.in = dt;
    shape.out = t->p[7] ? DT_F32 : dt;
    ops->matmul(dev, d[0], d[1], d[2], t->p[6] ? d[3] : NULL, &shape);
}

static void matmul_reference(struct op_test *t, double **v)
{
    const int *p = t->p, m = p[0], n = p[1], k = p[2];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = p[5] ? v[0][(int64_t)i * n + j] : 0;
            if (p[6]) sum += v[3][j];
            for (int l = 0; l < k; l++)
                sum += v[1][p[3] ? (int64_t)l * m + i : (int64_t)i * k + l] *
                       v[2][p[4] ? (int64_t)j * k + l : (int64_t)l * n + j];
            t->a[0].expect[(int64_t)i * n + j] = sum;
        }
}

OP(matmul, "matmul");

static const struct op_case cases[] = {
    {&op_matmul, "m1 n7 k5 NT", {1, 7, 5, 0, 1, 0, 0, 0}, false},
    {&op_matmul, "m1 n130 k64 NT bias", {1, 130, 64, 0, 1, 0, 1, 0}, false},
    {&op_matmul, "m2 n65 k33 NT add", {2, 65, 33, 0, 1, 1, 0, 0}, false},
    {&op_matmul, "m3 n66 k100 NT bias out_f32", {3, 66, 100, 0, 1, 0, 1, 1}, false},
    {&op_matmul, "m4 n31 k17 NT bias", {4, 31, 17, 0, 1, 0, 1, 0}, false},
    {&op_matmul, "m5 n64 k96 NT bias", {5, 64, 96, 0, 1, 0, 1, 0}, false},
    {&op_matmul, "m37 n53 k71 NN", {37, 53, 71, 0, 0, 0, 0, 0}, false},
    {&op_matmul, "m37 n53 k71 TN add", {37, 53, 71, 1, 0, 1, 0, 0}, false},
    {&op_matmul, "m37 n53 k71 TT", {37, 53, 71, 1, 1, 0, 0, 0}, false},
    {&op_matmul, "m37 n53 k71 NT add bias", {37, 53, 71, 0, 1, 1, 1, 0}, false},
    {&op_matmul, "m128 n64 k256 TN add out_f32", {128, 64, 256, 1, 0, 1, 0, 1}, false},
    {&op_matmul, "m129 n384 k128 NN add out_f32", {129, 384, 128, 0, 0, 1, 0, 1}, false},
    {&op_matmul, "m256 n512 k1024 NT", {256, 512, 1024, 0, 1, 0, 0, 0}, false},
    {&op_matmul, "m1 n1000 k2048 NT", {1, 1000, 2048, 0, 1, 0, 0, 0}, false},
    {&op_matmul, "m515 n2049 k1537 NT out_f32", {515, 2049, 1537, 0, 1, 0, 0, 1}, true},
    {&op_matmul, "m1536 n1024 k513 TN out_f32", {1536, 1024, 513, 1, 0, 0, 0, 1}, true},
    {&op_matmul, "m16 n8960 k1536 NT bias", {16, 8960, 1536, 0, 1, 0, 1, 0}, true},
    {&op_matmul, "m3 n8961 k64 NT add", {3, 8961, 64, 0, 1, 1, 0, 0}, true},
    {&op_matmul, "m9 n1536 k8960 NT add", {9, 1536, 8960, 0, 1, 1, 0, 0}, true},
    {&op_matmul, "m7 n301 k4096 NT add bias out_f32", {7, 301, 4096, 0, 1, 1, 1, 1}, true},
    {&op_matmul, "m27 n2049 k1568 NT bias", {27, 2049, 1568, 0, 1, 0, 1, 0}, true},
};

/* A row of activations times a weight, alone and among others: on the CPU the same bits. */
ON_EACH_DEVICE(matmul_rows)
{
    enum { M = 37, N = 70, K = 1100 };
    struct rng rng;
    rng_init(&rng, 22, 0);
    static float a[M * K], b[N * K], bias[N], together[M * N], alone[M * N];
    for (int i = 0; i < M * K; i++) a[i] = rng_normal(&rng);
    for (int i = 0; i < N * K; i++) b[i] = rng_normal(&rng);
    for (int i = 0; i < N; i++) bias[i] = rng_normal(&rng);
    float *d_a = to_device(a, sizeof a), *d_b = to_device(b, sizeof b);
    float *d_bias = to_device(bias, sizeof bias), *d_c = to_device(NULL, sizeof together);
    double worst = 0;
    ops->matmul(dev, d_c, d_a, d_b, d_bias,
                &(struct matmul){.m = M, .n = N, .k = K, .trans_b = true});
    from_device(together, d_c, sizeof together);
    for (int rows = 1; rows <= 12; rows += rows < 4 ? 1 : 4) {
        device_fill(dev, d_c, 0xFF, sizeof together);
        for (int i = 0; i < M; i += rows) {
            int m = M - i < rows ? M - i : rows;
            ops->matmul(dev, d_c + i * N, d_a + i * K, d_b, d_bias,
                        &(struct matmul){.m = m, .n = N, .k = K, .trans_b = true});
        }
        from_device(alone, d_c, sizeof alone);
        for (int i = 0; i < M * N; i++) {
            assert_true(isfinite(alone[i]));
            worst = fmax(worst, fabs((double)together[i] - alone[i]) / sqrt(K));
        }
    }
    printf("matmul: rows alone and together differ by %.2g on %s\n", worst, device_spec(dev));
    assert_true(worst <= (device_kind(dev) == DEVICE_CPU ? 0 : 1e-5));
}

/* Weights in e4m3 give the bits of the same weights widened: of few rows and many, forward and
 * back, of experts, and with what follows at once. */
enum form { FORWARD, ADDED, GATED, TO_INPUT, FORMS };
struct e4m3_shape {
    int n, k, experts; // experts 0: none
};
// What both runs are given, device: float arrays as `dt`.
struct e4m3_data {
    uint8_t *codes;
    int8_t *scales;
    void *a, *w, *bias, *before, *c, *x;
    int32_t *offsets;
};

static void run_e4m3(const struct e4m3_data *d, enum form form, int m, const struct e4m3_shape *p,
                     bool wide, size_t bytes)
{
    struct matmul s = {.m = m, .n = p->n, .k = p->k, .trans_b = true, .beta = form == ADDED};
    const struct act_shape act = {
        .rows = m, .width = p->n / 2, .kind = ACT_SILU, .gated = true, .dt = dt};
    const void *b = wide ? d->w : d->codes, *bias = p->experts || form > GATED ? NULL : d->bias;
    if (form == TO_INPUT) s = (struct matmul){.m = m, .n = p->k, .k = p->n};
    s.in = s.out = dt;
    s.early = true;
    s.scales = wide ? NULL : d->scales;
    device_copy(dev, d->c, d->before, bytes);
    if (p->experts) s.offsets = d->offsets;
    s.n_experts = p->experts;
    if (form == GATED) s.act = &act;
    s.x = d->x;
    ops->matmul(dev, d->c, d->a, b, bias, &s);
}

// The rows in e4m3, on the device, and what they then are, on the host: those of normal numbers
// whose scales are far apart.
static void round_rows(float *x, uint8_t *ret_codes, int8_t *ret_scales, int64_t rows, int64_t k)
{
    const int64_t n = rows * k;
    uint8_t *codes = op_host((size_t)n);
    int8_t *scales = op_host((size_t)rows);
    for (int64_t i = 0; i < n; i++) x[i] = ldexpf(x[i], (int)(i / k % 19) - 9);
    ops->quantise(dev, ret_codes, ret_scales, to_device(x, (size_t)n * sizeof *x), rows, (int)k,
                  DT_F32, NULL, 0);
    from_device(codes, ret_codes, (size_t)n);
    from_device(scales, ret_scales, (size_t)rows);
    for (int64_t i = 0; i < n; i++)
        x[i] = ldexpf(f32_from_e4m3(codes[i / k * k + e4m3_place(i % k, k)]), scales[i / k]);
}

static void set_offsets(int32_t *offsets, int experts, int rows)
{
    for (int e = 1; e <= experts; e++) // one has none
        offsets[e] = e == experts ? rows : e == 2 ? offsets[1] : rows * e / (experts + 1);
}

static void as_widened(const struct e4m3_shape *p, const int *rows, int n_rows)
{
    const int matrices = p->experts ? p->experts : 1, widest = p->n > p->k ? p->n : p->k;
    const size_t n_w = (size_t)matrices * (size_t)p->n * (size_t)p->k;
    const size_t n_c = (size_t)rows[n_rows - 1] * (size_t)widest, bytes = n_c * dtype_size(dt);
    const size_t mark = op_mark();
    struct rng rng;
    rng_init(&rng, 23, 0);
    float *x = normal_numbers(&rng, n_w, 1);
    int32_t offsets[9] = {0};
    void *plain = to_device(NULL, bytes);
    struct e4m3_data d = {.codes = to_device(NULL, n_w),
                          .scales = to_device(NULL, (size_t)(matrices * p->n)),
                          .a = normal_on_device(dt, n_c, 1, 1),
                          .w = to_device(NULL, n_w * dtype_size(dt)),
                          .bias = normal_on_device(dt, (size_t)p->n, 1, 2),
                          .before = normal_on_device(dt, n_c, 1, 3),
                          .c = to_device(NULL, bytes),
                          .x = to_device(NULL, bytes),
                          .offsets = to_device(NULL, sizeof offsets)};
    round_rows(x, d.codes, d.scales, matrices * p->n, p->k);
    ops->convert(dev, d.w, dt, to_device(x, n_w * sizeof *x), DT_F32, (int64_t)n_w);
    for (int r = 0; r < n_rows; r++)
        for (enum form form = FORWARD; form < FORMS; form++) {
            char what[80];
            if (p->experts && form == ADDED) continue;
            set_offsets(offsets, p->experts, rows[r]);
            device_copy_in(dev, d.offsets, offsets, sizeof offsets);
            run_e4m3(&d, form, rows[r], p, true, bytes);
            device_copy(dev, plain, d.c, bytes);
            run_e4m3(&d, form, rows[r], p, false, bytes);
            snprintf(what, sizeof what, "%d rows, (%d, %d) of %d experts, form %d", rows[r], p->n,
                     p->k, p->experts, form);
            assert_same_bytes(what, d.c, plain, bytes);
        }
    op_release(mark);
}

ON_EACH_DTYPE(matmul_e4m3)
{
    // of one slab of 8 rows to 17 a block of 132, and k that ends within a chunk of 128
    static const struct e4m3_shape shapes[] = {
        {70, 1100, 0},   {160, 1152, 0}, {1536, 512, 0}, {8456, 256, 0}, {10560, 64, 0},
        {17952, 192, 0}, {36, 130, 5},   {96, 256, 8},   {24, 640, 3},   {1040, 320, 8},
        {48, 64, 0},     {96, 48, 0},    {48, 64, 4},    {128, 48, 4}};
    static const int rows[] = {1, 3, 9, 16, 33, 64, 70, 130, 257, 513};
    if (!device_computes_in(dev, DT_E4M3)) return;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        as_widened(&shapes[i], rows, device_kind(dev) == DEVICE_CPU ? 3 : 10);
}

/* Rows and weights in e4m3: near the sums in f64 of what they are; a row's bits are the same in any
 * number of rows, among an expert's too, and with what follows at once; on the CPU those of sums
 * over E4M3_CHUNK of k, one added to the other. */
struct rounded {
    const struct e4m3_shape *p;
    int rows;                 // the most there are
    float *x, *w;             // what the operands are, host
    uint8_t *codes, *w_codes; // device, as all below
    int8_t *scales, *w_scales;
    void *bias, *c; // (n), (rows, n)
};

// m rows from `first` on, times an expert's weights or, of all experts, those from 0 on.
static struct matmul rounded_shape(const struct rounded *d, int first, int m, int expert)
{
    return (struct matmul){.m = m,
                           .n = d->p->n,
                           .k = d->p->k,
                           .trans_b = true,
                           .in = dt,
                           .out = dt,
                           .early = true,
                           .scales = d->w_scales + (int64_t)expert * d->p->n,
                           .a_scales = d->scales + first};
}

static void run_rounded(const struct rounded *d, void *c, int first, int m, int expert)
{
    const struct e4m3_shape *p = d->p;
    const struct matmul s = rounded_shape(d, first, m, expert);
    ops->matmul(dev, c, d->codes + (int64_t)first * p->k,
                d->w_codes + (int64_t)expert * p->n * p->k, p->experts ? NULL : d->bias, &s);
}

static void near_exact(const struct rounded *d)
{
    const int n = d->p->n, k = d->p->k;
    float *have = op_host((size_t)(d->rows * n) * sizeof *have), *bias = op_host((size_t)n * 4);
    void *wide = to_device(NULL, (size_t)(d->rows * n) * sizeof *have);
    ops->convert(dev, wide, DT_F32, d->c, dt, (int64_t)d->rows * n);
    from_device(have, wide, (size_t)(d->rows * n) * sizeof *have);
    ops->convert(dev, wide, DT_F32, d->bias, dt, n);
    from_device(bias, wide, (size_t)n * sizeof *bias);
    const double rounding = dt == DT_BF16 ? 1.0 / 256 : 1e-6;
    for (int i = 0; i<d->rows; i += d->rows> 64 ? 23 : 1)
        for (int j = 0; j < n; j++) {
            double sum = bias[j], all = fabs(sum);
            for (int c = 0; c < k; c++) {
                const double product = (double)d->x[(int64_t)i * k + c] * d->w[(int64_t)j * k + c];
                sum += product;
                all += fabs(product);
            }
            const double off = fabs((double)have[(int64_t)i * n + j] - sum);
            if (!(off <= rounding * fabs(sum) + 1e-4 * all))
                fail_msg("row %d of %d, column %d of (%d, %d): %g is off by %g of %g", i, d->rows,
                         j, n, k, sum, off, all);
        }
}

// d->c, whose bias is added last, by matmuls of numbers of f32 (the CPU).
static void in_chunks(const struct rounded *d)
{
    const int n = d->p->n, k = d->p->k;
    const size_t bytes = (size_t)(d->rows * n) * sizeof(float);
    float *a = op_host((size_t)(d->rows * E4M3_CHUNK) * sizeof *a);
    float *b = op_host((size_t)(n * E4M3_CHUNK) * sizeof *b);
    void *c = to_device(NULL, bytes);
    for (int at = 0; at < k; at += E4M3_CHUNK) {
        const int width = k - at < E4M3_CHUNK ? k - at : E4M3_CHUNK;
        for (int i = 0; i < d->rows * width; i++)
            a[i] = d->x[(int64_t)(i / width) * k + at + i % width];
        for (int i = 0; i < n * width; i++) b[i] = d->w[(int64_t)(i / width) * k + at + i % width];
        ops->matmul(
            dev, c, a, b, at + width == k ? d->bias : NULL,
            &(struct matmul){.m = d->rows, .n = n, .k = width, .trans_b = true, .beta = at > 0});
    }
    assert_same_bytes("sums over chunks of k", d->c, c, bytes);
}

static void in_any_batch(const struct rounded *d, int m)
{
    const size_t row = (size_t)d->p->n * dtype_size(dt);
    void *c = to_device(NULL, (size_t)m * row);
    for (int first = 0; first + m <= d->rows; first += d->rows - m > 0 ? d->rows - m : 1) {
        char what[80];
        snprintf(what, sizeof what, "%d rows from %d on, (%d, %d)", m, first, d->p->n, d->p->k);
        run_rounded(d, c, first, m, 0);
        assert_same_bytes(what, c, (char *)d->c + (size_t)first * row, (size_t)m * row);
    }
}

// The same sums, with what follows.
static void with_ends(const struct rounded *d, int m)
{
    const int n = d->p->n, k = d->p->k;
    const size_t bytes = (size_t)(m * n) * dtype_size(dt);
    const struct act_shape act = {
        .rows = m, .width = n / 2, .kind = ACT_SILU, .gated = true, .dt = dt};
    struct matmul s = {.m = m, .n = n, .k = k, .trans_b = true, .in = dt, .out = dt, .early = true};
    void *have = to_device(NULL, bytes), *want = to_device(NULL, bytes),
         *x = to_device(NULL, bytes);
    s.scales = d->w_scales;
    s.a_scales = d->scales;
    if (n % 2 == 0) {
        ops->act(dev, want, d->c, &act);
        s.act = &act;
        s.x = x;
        ops->matmul(dev, have, d->codes, d->w_codes, d->bias, &s);
        assert_same_bytes("activated", have, want, bytes / 2);
        s.act = NULL;
    }
    if (device_kind(dev) == DEVICE_CPU) return; // C is the first of the sum's numbers there
    void *before = normal_on_device(dt, (size_t)(m * n), 1, 3);
    s.beta = 1;
    device_copy(dev, want, before, bytes);
    ops->add(dev, want, d->c, (int64_t)m * n, 1.0f, dt);
    device_copy(dev, have, before, bytes);
    ops->matmul(dev, have, d->codes, d->w_codes, d->bias, &s);
    assert_same_bytes("added", have, want, bytes);
}

static void of_experts(const struct rounded *d, int m)
{
    const struct e4m3_shape *p = d->p;
    const size_t row = (size_t)p->n * dtype_size(dt), bytes = (size_t)m * row;
    const struct act_shape act = {
        .rows = m, .width = p->n / 2, .kind = ACT_SILU, .gated = true, .dt = dt};
    int32_t offsets[9] = {0}, *on_device = to_device(NULL, sizeof offsets);
    char *have = to_device(NULL, bytes), *want = to_device(NULL, bytes),
         *x = to_device(NULL, bytes);
    struct matmul s = rounded_shape(d, 0, m, 0);
    s.offsets = on_device;
    s.n_experts = p->experts;
    set_offsets(offsets, p->experts, m);
    device_copy_in(dev, on_device, offsets, sizeof offsets);
    for (int e = 0; e < p->experts; e++)
        run_rounded(d, want + (size_t)offsets[e] * row, offsets[e], offsets[e + 1] - offsets[e], e);
    ops->matmul(dev, have, d->codes, d->w_codes, NULL, &s);
    assert_same_bytes("experts", have, want, bytes);
    ops->act(dev, x, want, &act);
    s.act = &act;
    s.x = want;
    ops->matmul(dev, have, d->codes, d->w_codes, NULL, &s);
    assert_same_bytes("experts, activated", have, x, bytes / 2);
}

static void rounded(const struct e4m3_shape *p, const int *rows, int n_rows)
{
    const size_t mark = op_mark();
    const int64_t n_w = (int64_t)(p->experts ? p->experts : 1) * p->n;
    struct rounded d = {.p = p, .rows = rows[n_rows - 1]};
    struct rng rng;
    rng_init(&rng, 24, 0);
    d.x = normal_numbers(&rng, (size_t)(d.rows * p->k), 1);
    d.w = normal_numbers(&rng, (size_t)(n_w * p->k), 1);
    d.codes = to_device(NULL, (size_t)(d.rows * p->k));
    d.scales = to_device(NULL, (size_t)d.rows);
    d.w_codes = to_device(NULL, (size_t)(n_w * p->k));
    d.w_scales = to_device(NULL, (size_t)n_w);
    d.bias = normal_on_device(dt, (size_t)p->n, 1, 2);
    d.c = to_device(NULL, (size_t)(d.rows * p->n) * dtype_size(dt));
    round_rows(d.x, d.codes, d.scales, d.rows, p->k);
    round_rows(d.w, d.w_codes, d.w_scales, n_w, p->k);
    if (!p->experts) {
        run_rounded(&d, d.c, 0, d.rows, 0);
        near_exact(&d);
        if (device_kind(dev) == DEVICE_CPU) in_chunks(&d);
    }
    const bool exact = dt == DT_BF16 ? p->k % 64 == 0 && p->n % 16 == 0 : device_is_exact(dev, dt);
    for (int i = 0; i < n_rows && exact; i++)
        if (p->experts) {
            of_experts(&d, rows[i]);
        } else {
            in_any_batch(&d, rows[i]);
            with_ends(&d, rows[i]);
        }
    op_release(mark);
}

ON_EACH_DTYPE(matmul_rounded)
{
    // on a GPU stages of four chunks, by threes and what is left of them, the last one of one
    static const struct e4m3_shape shapes[] = {{70, 1100, 0},  {160, 1152, 0}, {1536, 512, 0},
                                               {256, 8960, 0}, {4464, 192, 0}, {4096, 1152, 0},
                                               {64, 64, 0},    {36, 130, 5},   {96, 256, 8},
                                               {1040, 320, 8}, {528, 2176, 0}};
    static const int rows[] = {1, 3, 9, 16, 33, 64, 70, 130, 257, 700};
    if (!device_computes_in(dev, DT_E4M3)) return;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        rounded(&shapes[i], rows, device_kind(dev) == DEVICE_CPU ? 4 : 10);
}

/* A gradient that is rounded on its way, times weights in e4m3 along the other side: near the sums
 * in f64 of what the format makes of the row, whose columns have the powers of two of the weights'
 * rows. */
struct format {
    int mantissa, least; // bits, and the exponent of the smallest normal number
    double most;
};

// To nearest, of two the even one; nothing above the most.
static double in_format(double x, const struct format *f)
{
    int exponent;
    frexp(x, &exponent);
    const double unit = ldexp(1, (exponent - 1 > f->least ? exponent - 1 : f->least) - f->mantissa);
    return copysign(fmin(nearbyint(fabs(x) / unit) * unit, f->most), x);
}

// Row (k) times the factors (k), rounded with the least power of two that it is within.
static void row_in_format(double *row, const int8_t *factors, int k, const struct format *f)
{
    double largest = 0;
    int scale = -100;
    for (int l = 0; l < k; l++) {
        row[l] = ldexp(row[l], factors[l]);
        largest = fmax(largest, fabs(row[l]));
    }
    while (largest > ldexp(f->most, scale)) scale++;
    for (int l = 0; l < k; l++) row[l] = ldexp(in_format(ldexp(row[l], -scale), f), scale);
}

// c (m, n) = [c +] rows of `numbers` (m, k), of an expert each, rounded . codes.
struct gradient_case {
    int m, n, k, experts;
    enum gradient_dtype rounds;
    bool add;
};

static void check_gradient(const struct gradient_case *g)
{
    static const struct format formats[] = {
        [GRADIENT_E4M3] = {3, -6, 448}, [GRADIENT_E5M2] = {2, -14, 57344}};
    const int m = g->m, n = g->n, k = g->k, matrices = g->experts ? g->experts : 1;
    const size_t mark = op_mark(), n_w = (size_t)(matrices * k) * (size_t)n, n_c = (size_t)(m * n);
    struct rng rng;
    rng_init(&rng, 25, 0);
    float *w = normal_numbers(&rng, n_w, 1), *a = normal_numbers(&rng, (size_t)(m * k), 1);
    float *have = op_host(n_c * sizeof *have), *before = op_host(n_c * sizeof *before);
    double *row = op_host((size_t)k * sizeof *row);
    int8_t *factors = op_host((size_t)(matrices * k));
    int32_t offsets[9] = {0, m};
    uint8_t *codes = to_device(NULL, n_w);
    int8_t *scales = to_device(NULL, (size_t)(matrices * k));
    void *c = normal_on_device(dt, n_c, 1, 3),
         *dy = to_device(NULL, (size_t)(m * k) * dtype_size(dt)),
         *wide = to_device(NULL, n_c * sizeof *have);
    round_rows(w, codes, scales, matrices * k, n);
    from_device(factors, scales, (size_t)(matrices * k));
    if (g->experts) set_offsets(offsets, g->experts, m);
    // Rows whose sizes are far apart, and columns too, as the rows of the weights are
    // (round_rows()), but not products: a tensor core cuts each 13 bits behind the largest of 32.
    for (int i = 0, e = 0; i < m; i++) {
        while (offsets[e + 1] <= i) e++;
        for (int l = 0; l < k; l++) {
            float *x = &a[i * k + l];
            *x = f32_from_bf16(bf16_from_f32(ldexpf(*x, i % 40 - 21 - (e * k + l) % 19 - l % 3)));
        }
    }
    ops->convert(dev, dy, dt, to_device(a, (size_t)(m * k) * sizeof *a), DT_F32, (int64_t)m * k);
    ops->convert(dev, wide, DT_F32, c, dt, (int64_t)n_c);
    from_device(before, wide, n_c * sizeof *before);
    const struct matmul s = {.m = m,
                             .n = n,
                             .k = k,
                             .beta = g->add,
                             .in = dt,
                             .out = dt,
                             .scales = scales,
                             .rounds = g->rounds,
                             .offsets = g->experts ? to_device(offsets, sizeof offsets) : NULL,
                             .n_experts = g->experts};
    ops->matmul(dev, c, dy, codes, NULL, &s);
    ops->convert(dev, wide, DT_F32, c, dt, (int64_t)n_c);
    from_device(have, wide, n_c * sizeof *have);
    const double rounding = dt == DT_BF16 ? 1.0 / 256 : 1e-6;
    for (int i = 0, e = 0; i<m; i += m> 64 ? 23 : 1) {
        while (offsets[e + 1] <= i) e++;
        for (int l = 0; l < k; l++) row[l] = (double)a[i * k + l];
        row_in_format(row, factors + e * k, k, &formats[g->rounds]);
        for (int j = 0; j < n; j++) {
            double sum = 0, all = 0;
            for (int l = 0; l < k; l++) {
                const int64_t at = ((int64_t)e * k + l) * n + j;
                const double product = row[l] * ldexp((double)w[at], -factors[e * k + l]);
                sum += product;
                all += fabs(product);
            }
            if (g->add) sum += (double)before[i * n + j];
            const double off = fabs((double)have[i * n + j] - sum);
            if (!(off <= rounding * (fabs(sum) + (g->add ? all : 0)) + 2e-4 * all))
                fail_msg("%s: row %d of %d, column %d of (%d, %d), %d experts: %g is off by %g",
                         gradient_dtype_names[g->rounds], i, m, j, n, k, g->experts, sum, off);
        }
    }
    op_release(mark);
}

ON_EACH_DTYPE(gradients_in_eight_bits)
{
    static const struct gradient_case cases_of[] = {
        {3, 70, 110, 0, 0, false},  {37, 160, 128, 0, 0, true},   {130, 256, 192, 0, 0, false},
        {70, 48, 320, 0, 0, false}, {300, 1536, 512, 0, 0, true}, {1030, 272, 1152, 0, 0, false},
        {70, 30, 50, 4, 0, false},  {257, 96, 256, 8, 0, false},  {700, 320, 128, 3, 0, false}};
    if (!device_computes_in(dev, DT_E4M3)) return;
    for (size_t i = 0; i < sizeof cases_of / sizeof *cases_of; i++)
        for (enum gradient_dtype to = GRADIENT_E4M3; to <= GRADIENT_E5M2; to++) {
            struct gradient_case g = cases_of[i];
            g.rounds = to;
            check_gradient(&g);
        }
}

OP_TESTS(cases)
