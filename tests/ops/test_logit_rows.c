/* test_logit_rows.c: the operations on rows of logits beside sampling. top_logprobs: tokens, ranks
 * and numbers against a sorted row in double precision, and to the bit against `logprob` on the
 * same device. adjust_logits: against the formula in double precision, CUDA to the bit against the
 * CPU, and undone to the bit. mask_logits: to the bit.
 *
 *   test_logit_rows [--device cuda:N] */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "kernels/ops.h"
#include "tests/support/op_table.h"

// ---- top_logprobs ------------------------------------------------------------------------------

struct shape {
    int n, vocab, k;
    float temperature;
};
static const struct shape shapes[] = {
    {4, 11, 0, 1}, {5, 11, 11, 1}, {3, 320, 20, 0.7f}, {2, 50257, 5, 1.3f}, {2, 151936, 128, 1},
};

// With ties, and forbidden tokens in the second row. The likeliest of the first lie 512 apart, all
// of them one thread's on CUDA.
static float *make_logits(const struct shape *s)
{
    struct rng r;
    rng_init(&r, (uint64_t)s->vocab, 7);
    float *logits = op_host(((size_t)s->n * (size_t)s->vocab) * sizeof *logits);
    for (int i = 0; i < s->n * s->vocab; i++)
        logits[i] = roundf(rng_normal(&r) * 40) / (s->vocab > 1000 ? 1000 : 8);
    for (int t = 0; t < s->vocab; t += 512) logits[t] += 1;
    for (int t = 0; t < s->vocab; t += 3) logits[s->vocab + t] = -INFINITY;
    return logits;
}

static const float *sorting;

static int by_logit(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    if (sorting[x] != sorting[y]) return sorting[x] > sorting[y] ? -1 : 1;
    return x < y ? -1 : x > y;
}

// Tokens and ranks of one row, and its numbers within rounding.
static void check_row(const struct shape *s, const float *row, int32_t target,
                      const struct token_logprob *got)
{
    int32_t *order = op_host(((size_t)s->vocab) * sizeof *order);
    for (int t = 0; t < s->vocab; t++) order[t] = t;
    sorting = row;
    qsort(order, (size_t)s->vocab, sizeof *order, by_logit);
    double sum = 0;
    const double max = row[order[0]] / (double)s->temperature;
    for (int t = 0; t < s->vocab; t++) sum += exp(row[t] / (double)s->temperature - max);
    assert_int_equal(got[0].token, target);
    assert_true(got[0].rank >= 1 && got[0].rank <= s->vocab);
    assert_int_equal(order[got[0].rank - 1], target);
    for (int j = 0; j <= s->k; j++) {
        const double want = row[got[j].token] / (double)s->temperature - max - log(sum);
        if (j > 0) assert_int_equal(got[j].token, order[j - 1]);
        if (j > 0) assert_int_equal(got[j].rank, j);
        if (isinf(want))
            assert_true(isinf(got[j].logprob) && got[j].logprob < 0);
        else if (!(fabs(got[j].logprob - want) < 2e-5))
            fail_msg("token %d: %.9g, want %.9g", got[j].token, got[j].logprob, want);
    }
}

// Entry j of every row against what `logprob` says of that token.
static void check_bits(const struct shape *s, const float *logits, const struct token_logprob *got,
                       int j)
{
    int32_t *tokens = op_host(((size_t)s->n) * sizeof *tokens);
    float *want = op_host(((size_t)s->n) * sizeof *want);
    for (int i = 0; i < s->n; i++) tokens[i] = got[i * (1 + s->k) + j].token;
    int32_t *d_tokens = to_device(tokens, (size_t)s->n * sizeof *tokens);
    float *d_want = to_device(NULL, (size_t)s->n * sizeof *want);
    float *d_lse = to_device(NULL, (size_t)s->n * sizeof *want);
    const struct head_args head = {logits, d_tokens, s->n, s->vocab, s->temperature};
    ops->logprob(dev, d_want, d_lse, NULL, &head);
    from_device(want, d_want, (size_t)s->n * sizeof *want);
    for (int i = 0; i < s->n; i++)
        assert_memory_equal(&want[i], &got[i * (1 + s->k) + j].logprob, sizeof *want);
}

static void check_top(const struct shape *s)
{
    const size_t n_out = (size_t)s->n * (size_t)(1 + s->k), guard = 4;
    float *logits = make_logits(s);
    int32_t *targets = op_host(((size_t)s->n) * sizeof *targets);
    struct token_logprob *got = op_host((n_out + guard) * sizeof *got);
    for (int i = 0; i < s->n; i++) targets[i] = (s->vocab / 3 * i) % s->vocab;
    float *d_logits = to_device(logits, (size_t)s->n * (size_t)s->vocab * sizeof *logits);
    int32_t *d_targets = to_device(targets, (size_t)s->n * sizeof *targets);
    memset(got, 0x5A, (n_out + guard) * sizeof *got);
    struct token_logprob *d_got = to_device(got, (n_out + guard) * sizeof *got);
    const struct head_args head = {d_logits, d_targets, s->n, s->vocab, s->temperature};
    ops->top_logprobs(dev, d_got, s->k, &head);
    from_device(got, d_got, (n_out + guard) * sizeof *got);
    for (size_t i = 0; i < guard; i++) assert_int_equal(got[n_out + i].token, 0x5A5A5A5A);
    for (int i = 0; i < s->n; i++)
        check_row(s, logits + (size_t)i * (size_t)s->vocab, targets[i], got + i * (1 + s->k));
    for (int j = 0; j <= s->k; j += j < 3 ? 1 : 31) check_bits(s, d_logits, got, j);
}

ON_EACH_DEVICE(tops)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) check_top(&shapes[i]);
}

// A broken model's row: every token still has one place, and the others' numbers do not matter.
ON_EACH_DEVICE(no_number_comes_last)
{
    const float row[] = {NAN, 1, NAN, 3, -INFINITY};
    const int32_t target = 2, order[] = {3, 1, 0, 2, 4};
    struct token_logprob got[6];
    float *d_row = to_device(row, sizeof row);
    int32_t *d_target = to_device(&target, sizeof target);
    struct token_logprob *d_got = to_device(NULL, sizeof got);
    const struct head_args head = {d_row, d_target, 1, 5, 1};
    ops->top_logprobs(dev, d_got, 5, &head);
    from_device(got, d_got, sizeof got);
    assert_int_equal(got[0].rank, 4);
    for (int j = 0; j < 5; j++) assert_int_equal(got[1 + j].token, order[j]);
}

// ---- adjust_logits -----------------------------------------------------------------------------

enum { ROWS = 6, VOCAB = 501, ADJUSTED = 4, ENTRIES = 3 * 90 };

struct adjustment {
    float logits[ROWS * VOCAB];
    struct logit_row rows[ADJUSTED]; // the last has no entries
    struct logit_entry entries[ENTRIES];
};

static void make_adjustment(struct adjustment *a)
{
    struct rng r;
    rng_init(&r, 3, 3);
    *a = (struct adjustment){
        .rows = {{5, 0, 90, 1.3f, 0.4f, 0.7f},
                 {0, 90, 90, 1, 0, -1.5f},
                 {2, 180, 90, 0.8f, -0.3f, 0}},
    };
    a->rows[3] = (struct logit_row){3, ENTRIES, 0, 2, 2, 2};
    for (int i = 0; i < ROWS * VOCAB; i++) a->logits[i] = 4 * rng_normal(&r);
    for (int e = 0; e < ENTRIES; e++) {
        const int32_t count = (int32_t)rng_below(&r, 4);
        a->entries[e] = (struct logit_entry){.token = (e * 7) % VOCAB,
                                             .count = count,
                                             .seen = count > 0 || rng_below(&r, 2),
                                             .bias = e % 5 ? 0 : 10 * rng_normal(&r)};
    }
}

// The logits after `adjust_logits`, and after it was undone.
static void run_adjustment(struct device *on, const struct adjustment *a,
                           float ret_adjusted[ROWS * VOCAB], float ret_undone[ROWS * VOCAB])
{
    op_use(on, DT_F32);
    float *logits = to_device(a->logits, sizeof a->logits);
    float *saved = to_device(NULL, ENTRIES * sizeof *saved);
    struct logit_row *rows = to_device(a->rows, sizeof a->rows);
    struct logit_entry *entries = to_device(a->entries, sizeof a->entries);
    ops->adjust_logits(dev, logits, saved, rows, entries, ADJUSTED, VOCAB, false);
    device_copy_out(dev, ret_adjusted, logits, sizeof a->logits);
    assert_ok(device_sync(dev));
    ops->adjust_logits(dev, logits, saved, rows, entries, ADJUSTED, VOCAB, true);
    from_device(ret_undone, logits, sizeof a->logits);
}

ON_EACH_DEVICE(adjustments)
{
    struct device *const on = dev;
    static struct adjustment a;
    static float got[ROWS * VOCAB], undone[ROWS * VOCAB], on_cpu[ROWS * VOCAB];
    static double want[ROWS * VOCAB];
    make_adjustment(&a);
    for (int i = 0; i < ROWS * VOCAB; i++) want[i] = a.logits[i];
    for (int i = 0; i < ADJUSTED; i++)
        for (int e = a.rows[i].first; e < a.rows[i].first + a.rows[i].n; e++) {
            double *z = &want[a.rows[i].row * VOCAB + a.entries[e].token];
            const double penalty = a.rows[i].repetition;
            *z += a.entries[e].bias;
            if (a.entries[e].seen) *z = *z > 0 ? *z / penalty : *z * penalty;
            *z -= a.rows[i].frequency * a.entries[e].count;
            if (a.entries[e].count) *z -= a.rows[i].presence;
        }
    run_adjustment(op_cpu, &a, on_cpu, undone);
    run_adjustment(on, &a, got, undone);
    int changed = 0;
    for (int i = 0; i < ROWS * VOCAB; i++) {
        assert_true(fabs(got[i] - want[i]) < 1e-5);
        changed += got[i] != a.logits[i];
    }
    assert_true(changed > ENTRIES / 2);
    assert_memory_equal(got, on_cpu, sizeof got);
    assert_memory_equal(undone, a.logits, sizeof undone);
}

// ---- mask_logits -------------------------------------------------------------------------------

ON_EACH_DEVICE(masks)
{
    enum { MASKED = 3, WORDS = MASK_WORDS(VOCAB) };
    static const int32_t rows[MASKED] = {4, 0, 2};
    static float z[ROWS * VOCAB], want[ROWS * VOCAB], got[ROWS * VOCAB];
    uint32_t masks[MASKED * WORDS];
    struct rng r;
    rng_init(&r, 5, 1);
    for (int i = 0; i < ROWS * VOCAB; i++) want[i] = z[i] = rng_normal(&r);
    for (int i = 0; i < MASKED * WORDS; i++) masks[i] = (uint32_t)rng_below(&r, 1u << 31) * 2;
    for (int i = 0; i < MASKED; i++)
        for (int t = 0; t < VOCAB; t++)
            if (!(masks[i * WORDS + t / 32] >> t % 32 & 1)) want[rows[i] * VOCAB + t] = MIN_LOGIT;
    float *logits = to_device(z, sizeof z), *plain = to_device(z, sizeof z);
    int32_t *d_rows = to_device(rows, sizeof rows);
    uint32_t *d_masks = to_device(masks, sizeof masks);
    ops->mask_logits(dev, logits, d_rows, d_masks, MASKED, VOCAB);
    device_copy_out(dev, got, logits, sizeof got);
    assert_ok(device_sync(dev));
    assert_memory_equal(got, want, sizeof got);
    ops->mask_logits(dev, plain, NULL, d_masks, 1, VOCAB); // the first rows
    from_device(got, plain, sizeof got);
    for (int t = 0; t < VOCAB; t++)
        assert_true(got[t] == (masks[t / 32] >> t % 32 & 1 ? z[t] : MIN_LOGIT));
    assert_memory_equal(got + VOCAB, z + VOCAB, sizeof z - VOCAB * sizeof *z);
}

OP_BODIES
