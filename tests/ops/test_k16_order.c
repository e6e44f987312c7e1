/* test_k16_order.c: every forward matmul of bf16 on Hopper sums in k16 order
 * (docs/internals/numerics.md): a row has the same bits whatever the number of rows beside it, one
 * or thousands, and they are those of the plain kernel of tests/support/k16_order.cu. At the sizes
 * of real models, experts and latent attention included.
 *
 *   test_k16_order [FILTER]     FILTER: shapes whose name contains it */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"
#if CW_CUDA
#include "tests/support/k16_order.h"

enum { MAX_ROWS = 8192, CHECKED = 256, SEED = 7 };

static const struct shape {
    const char *name;
    int n, k;
} shapes[] = {
    {"0.6B qkv", 4096, 1024},      {"0.6B o", 1024, 2048},        {"0.6B gate+up", 6144, 1024},
    {"0.6B down", 1024, 3072},     {"1.5B qkv", 2048, 1536},      {"1.5B o", 1536, 1536},
    {"1.5B gate+up", 17920, 1536}, {"1.5B down", 1536, 8960},     {"1.5B head", 151936, 1536},
    {"7.6B qkv", 4608, 3584},      {"7.6B o", 3584, 3584},        {"7.6B gate+up", 37888, 3584},
    {"7.6B down", 3584, 18944},    {"7.6B head", 152064, 3584},   {"router", 8, 4096},
    {"narrow", 272, 64},           {"k of half a tile", 320, 96}, {"odd n", 301, 1536},
    {"width 48 qkv", 96, 48},      {"width 48 o", 48, 64},        {"width 48 router", 4, 48},
    {"width 48 head", 200, 48},
};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };
static const int row_counts[] = {1, 7, 8, 16, 17, 33, 64, 65, 128, 129, 250, 256, 8192};
enum { N_COUNTS = sizeof row_counts / sizeof row_counts[0], EVERY = 320 };

// The i-th number of rows of a shape; 0: there are no more. Where k is no multiple of 64 the
// library multiplies few rows too, by whatever it chooses for their number: of narrow matrices
// every number is tried.
static int row_count(const struct shape *s, int i)
{
    if (s->k % 64 == 0 || s->n > EVERY) return i < N_COUNTS ? row_counts[i] : 0;
    return i < EVERY ? i + 1 : i == EVERY ? MAX_ROWS : 0;
}

// Device memory of n bf16 values, normal with this deviation; one in 50 is 40 times as large where
// `outliers`. A block of 1 Mi values repeated.
static uint16_t *random_bf16(size_t n, float deviation, bool outliers, uint64_t seed)
{
    enum { BLOCK = (1 << 20) - 8 }; // no multiple of a row
    struct rng rng;
    rng_init(&rng, seed, 0);
    uint16_t *host = op_host(BLOCK * sizeof *host), *p = to_device(NULL, n * sizeof *p);
    for (int i = 0; i < BLOCK; i++) {
        float x = deviation * rng_normal(&rng);
        host[i] = bf16_from_f32(outliers && rng_below(&rng, 50) == 0 ? 40 * x : x);
    }
    for (size_t at = 0; at < n; at += BLOCK)
        device_copy_in(dev, p + at, host, (n - at < BLOCK ? n - at : BLOCK) * sizeof *host);
    sync_or_fail();
    return p;
}

// A product to be checked: c = a b^T, with what may come on top.
struct product {
    struct matmul shape;
    uint16_t *a, *b, *bias; // bias NULL: none
    void *c;
    float *reference;               // host: (CHECKED first and CHECKED last rows, n)
    uint16_t *host_bias, *host_add; // of bias, and (n) of what every row of c begins with
    void *host;
};

// The rows first .. first + count - 1 of c that are not what the reference row `at` on says.
static long compare(struct product *p, int first, int count, int at)
{
    int n = p->shape.n;
    size_t size = dtype_size(p->shape.out);
    long wrong = 0;
    from_device(p->host, (char *)p->c + (size_t)first * n * size, (size_t)count * n * size);
    for (int64_t i = 0; i < (int64_t)count * n; i++) {
        float x = p->reference[(int64_t)at * n + i];
        if (p->bias) x += f32_from_bf16(p->host_bias[i % n]);
        if (p->shape.beta != 0)
            x = f32_from_bf16(bf16_from_f32(x)) + f32_from_bf16(p->host_add[i % n]);
        uint16_t half = bf16_from_f32(x);
        const char *got = (const char *)p->host + i * size;
        wrong += memcmp(got, size == 2 ? (void *)&half : (void *)&x, size) != 0;
    }
    return wrong;
}

// Entries that differ with m rows.
static long run(struct product *p, int m)
{
    int n = p->shape.n;
    size_t size = dtype_size(p->shape.out);
    p->shape.m = m;
    p->shape.early = m % 2 == 1; // the operation before fills or copies into C
    device_fill(dev, p->c, 0xff, (size_t)m * n * size);
    for (int i = 0; p->shape.beta != 0 && i < m; i++) // bf16 out
        device_copy_in(dev, (char *)p->c + (size_t)i * n * size, p->host_add, (size_t)n * size);
    ops->matmul(dev, p->c, p->a, p->b, p->bias, &p->shape);
    if (m <= CHECKED) return compare(p, 0, m, 0);
    return compare(p, 0, CHECKED, 0) +
           (m < MAX_ROWS ? 0 : compare(p, m - CHECKED, CHECKED, CHECKED));
}

static void reference(struct product *p)
{
    const size_t mark = op_mark();
    int n = p->shape.n, k = p->shape.k;
    float *c = to_device(NULL, (size_t)CHECKED * n * sizeof *c);
    for (int i = 0; i < 2; i++) {
        const uint16_t *a = p->a + (i ? (size_t)(MAX_ROWS - CHECKED) * k : 0);
        assert_true(k16_order_matmul(c, a, p->b, CHECKED, n, k));
        from_device(p->reference + (size_t)i * CHECKED * n, c, (size_t)CHECKED * n * sizeof *c);
    }
    op_release(mark);
}

static long check_shape(const struct shape *s)
{
    static const struct {
        const char *name;
        enum dtype out;
        bool bias, add;
    } forms[] = {{"bf16", DT_BF16, false, false},     {"f32", DT_F32, false, false},
                 {"f32 + bias", DT_F32, true, false}, {"bf16 + bias", DT_BF16, true, false},
                 {"bf16 + c", DT_BF16, false, true},  {"bf16 + c + bias", DT_BF16, true, true}};
    size_t n = (size_t)s->n, k = (size_t)s->k, mark = op_mark();
    bool large = n > 100000;
    struct product p = {
        .shape = {.n = s->n, .k = s->k, .trans_b = true, .in = DT_BF16, .out = DT_BF16}};
    uint16_t *bias = random_bf16(n, 1, false, SEED + 3);
    p.a = random_bf16(MAX_ROWS * k, 1, true, SEED + 1);
    p.b = random_bf16(n * k, 0.02f, false, SEED + 2);
    p.c = to_device(NULL, (large ? 512 : MAX_ROWS) * n * sizeof(float));
    p.reference = op_host(2 * CHECKED * n * sizeof(float));
    p.host = op_host(CHECKED * n * sizeof(float));
    p.host_bias = op_host(n * sizeof(uint16_t));
    p.host_add = op_host(n * sizeof(uint16_t));
    from_device(p.host_bias, bias, n * sizeof *bias);
    from_device(p.host_add, p.a, n * sizeof *p.a);
    reference(&p);
    long failed = 0;
    for (size_t f = 0; f < sizeof forms / sizeof forms[0]; f++)
        for (int i = 0, m; (m = row_count(s, i)) > 0; i++) {
            if (large && (m > 512 || f > 1)) continue;
            if (m == 1 && s->n == 4) continue; // its order is another: docs/use/limits.md
            p.shape.out = forms[f].out;
            p.shape.beta = forms[f].add;
            p.bias = forms[f].bias ? bias : NULL;
            long wrong = run(&p, m);
            if (wrong)
                printf("%s (%d x %d), %d rows, %s: %ld entries differ\n", s->name, s->n, s->k, m,
                       forms[f].name, wrong);
            failed += wrong != 0;
        }
    op_release(mark);
    return failed;
}

// Each test's first line: skips it where there is no GPU of known order.
static void want_device(void)
{
    if (!op_cuda) test_skip("there is no GPU");
    if (!k16_order_known(0)) test_skip("cuda:0 is not a GPU whose orders of sums are known");
    op_use(op_cuda, DT_BF16);
    if (!device_is_exact(dev, DT_BF16))
        test_skip("this build has no kernels of cuda:0's own, whose order is held to here");
}

TEST(test_products)
{
    want_device();
    long failed = 0;
    for (int i = 0; i < N_SHAPES; i++)
        if (op_wanted(shapes[i].name)) failed += check_shape(&shapes[i]);
    assert_int_equal(failed, 0);
}

// Rows spread unevenly over experts: each is the row of its expert's own product.
static long check_experts(int n_experts, int n, int k, int rows)
{
    struct rng rng;
    rng_init(&rng, SEED, (uint64_t)rows);
    const size_t mark = op_mark();
    int32_t *offsets = op_host(((size_t)n_experts + 1) * sizeof *offsets);
    uint16_t *a = random_bf16((size_t)rows * k, 1, true, SEED + 1);
    uint16_t *b = random_bf16((size_t)n_experts * n * k, 0.02f, false, SEED + 2);
    int32_t *d_offsets = to_device(NULL, ((size_t)n_experts + 1) * sizeof *d_offsets);
    float *c = to_device(NULL, (size_t)rows * n * sizeof *c),
          *expect = to_device(NULL, (size_t)rows * n * sizeof *c);
    float *host = op_host((size_t)rows * n * sizeof *host);
    float *other = op_host((size_t)rows * n * sizeof *host);
    const struct matmul shape = {.m = rows,
                                 .n = n,
                                 .k = k,
                                 .trans_b = true,
                                 .in = DT_BF16,
                                 .out = DT_F32,
                                 .early = rows % 2 == 1,
                                 .offsets = d_offsets,
                                 .n_experts = n_experts};
    for (int r = 0; r < rows; r++) {
        bool busy = rng_below(&rng, 3) == 0; // expert 1 has more than others
        offsets[busy ? 2 : rng_below(&rng, (uint32_t)n_experts) + 1]++;
    }
    for (int e = 0; e < n_experts; e++) offsets[e + 1] += offsets[e];
    device_copy_in(dev, d_offsets, offsets, ((size_t)n_experts + 1) * sizeof *offsets);
    device_fill(dev, c, 0xff, (size_t)rows * n * sizeof *c);
    ops->matmul(dev, c, a, b, NULL, &shape);
    from_device(host, c, (size_t)rows * n * sizeof *c);
    for (int e = 0; e < n_experts; e++)
        if (offsets[e + 1] > offsets[e])
            assert_true(k16_order_matmul(expect + (size_t)offsets[e] * n,
                                         a + (size_t)offsets[e] * k, b + (size_t)e * n * k,
                                         offsets[e + 1] - offsets[e], n, k));
    from_device(other, expect, (size_t)rows * n * sizeof *c);
    long wrong = 0;
    for (int64_t i = 0; i < (int64_t)rows * n; i++) wrong += memcmp(&host[i], &other[i], 4) != 0;
    if (wrong)
        printf("%d experts (%d x %d), %d rows: %ld entries differ\n", n_experts, n, k, rows, wrong);
    op_release(mark);
    return wrong != 0;
}

TEST(test_experts)
{
    static const int rows[] = {2, 7, 16, 17, 64, 100, 300, 1024, 4096};
    long failed = 0;
    want_device();
    if (!op_wanted("experts")) skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        failed += check_experts(8, 1792, 1024, rows[i]);
        failed += check_experts(6, 328, 4096, rows[i]);
        failed += check_experts(64, 768, 2048, rows[i]);
        failed += check_experts(4, 128, 48, rows[i]);
        failed += check_experts(4, 48, 64, rows[i]);
    }
    assert_int_equal(failed, 0);
}

// Latent attention's products with one head, which is all that strides of heads leave.
struct latent_test {
    struct latent_shape shape;
    uint16_t *x, *w, *keys, *out, *flat; // flat: the keys' part of w, transposed
};

static void latent_open(struct latent_test *t)
{
    const size_t n = (size_t)t->shape.nope, rank = (size_t)t->shape.rank;
    uint16_t *host = op_host(n * rank * sizeof *host), *turned = op_host(n * rank * sizeof *turned);
    t->x = random_bf16(MAX_ROWS * (n > rank ? n : rank), 1, true, SEED + 1);
    t->w = random_bf16((n + (size_t)t->shape.value) * rank, 0.02f, false, SEED + 2);
    t->keys = random_bf16(MAX_ROWS * rank, 1, false, SEED + 3);
    t->out = to_device(NULL, MAX_ROWS * 2 * rank * sizeof *t->out);
    t->flat = to_device(NULL, n * rank * sizeof *t->flat);
    from_device(host, t->w, n * rank * sizeof *host);
    for (size_t i = 0; i < n * rank; i++) turned[i % rank * n + i / rank] = host[i];
    device_copy_in(dev, t->flat, turned, n * rank * sizeof *turned);
    sync_or_fail();
}

// Entries of the first n of every `stride` of out's rows that differ from those of x b^T.
static long latent_differ(const struct latent_test *t, const uint16_t *b, int n, int k, int stride)
{
    const size_t rows = (size_t)t->shape.rows, mark = op_mark();
    float *c = to_device(NULL, rows * (size_t)n * sizeof *c),
          *expect = op_host(rows * (size_t)n * sizeof *c);
    uint16_t *got = op_host(rows * (size_t)stride * sizeof *got);
    long wrong = 0;
    assert_true(k16_order_matmul(c, t->x, b, t->shape.rows, n, k));
    from_device(expect, c, rows * (size_t)n * sizeof *c);
    from_device(got, t->out, rows * (size_t)stride * sizeof *got);
    for (size_t i = 0; i < rows * (size_t)n; i++)
        wrong += got[i / (size_t)n * (size_t)stride + i % (size_t)n] != bf16_from_f32(expect[i]);
    op_release(mark);
    return wrong;
}

TEST(test_latent)
{
    static const struct {
        int nope, rank, value;
    } sizes[] = {{128, 512, 128}, {192, 512, 256}, {16, 48, 24}};
    long failed = 0;
    want_device();
    if (!op_wanted("latent")) skip();
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const size_t mark = op_mark();
        struct latent_test t = {.shape = {.n_heads = 1,
                                          .nope = sizes[i].nope,
                                          .rank = sizes[i].rank,
                                          .value = sizes[i].value,
                                          .dt = DT_BF16}};
        const struct latent_shape *s = &t.shape;
        latent_open(&t);
        for (int k = 0; k < N_COUNTS; k++) {
            t.shape.rows = row_counts[k];
            t.shape.early = k % 2 == 1; // the operation before is no one's that writes weights
            device_fill(dev, t.out, 0xff, MAX_ROWS * 2 * (size_t)s->rank * sizeof *t.out);
            ops->latent_matmul(dev, t.out, t.x, t.keys, t.w, s);
            long query = latent_differ(&t, t.flat, s->rank, s->nope, 2 * s->rank);
            ops->latent_matmul(dev, t.out, t.x, NULL, t.w, s);
            long value = latent_differ(&t, t.w + s->nope * s->rank, s->value, s->rank, s->value);
            if (query + value)
                printf("latent %d of %d, values %d, %d rows: %ld and %ld entries differ\n", s->nope,
                       s->rank, s->value, s->rows, query, value);
            failed += query + value;
        }
        op_release(mark);
    }
    assert_int_equal(failed, 0);
}

OP_BODIES
#else
TEST(test_without_cuda)
{
    test_skip("built without CUDA");
}
#endif
