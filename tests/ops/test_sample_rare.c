/* test_sample_rare.c: tokens of less than 1e-7 are sampled as often as they should be. The uniforms
 * that noise and acceptance are made of, near where rare events are decided; and `sample` itself at
 * positions whose random words make a rare token win, on the CPU and, where there is one, a GPU. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"
#include "tests/support/sampling.h"

enum { VOCAB = 8, ROWS = 6, LIKELIEST = 0 };

// ---- uniforms -----------------------------------------------------------------------------------

// Falls as the word grows, joins at the seams, and comes within 2^-65 of 0.
TEST(below_one)
{
    static const uint32_t seams[] = {0, 1u << 9, 1u << 31, ~(1u << 23) - 600, ~256u - 1100};
    for (size_t i = 0; i < sizeof seams / sizeof *seams; i++)
        for (uint32_t k = 0; k < 1200; k++) {
            float here = rng_below1(seams[i] + k, 0), next = rng_below1(seams[i] + k + 1, 0);
            uint32_t below = ~(seams[i] + k);
            assert_true(here < 1 && next > 0 && next <= here);
            // half a step from its word's middle at most: 2^-24, and 2^-33 close to 1
            double middle = ((double)below + 0.5) * 0x1p-32;
            assert_true(fabs((double)here - middle) <= (below < 1u << 23 ? 0x1p-33 : 0x1p-24));
        }
    assert_true(rng_below1(~0u, 0) == 0x1p-65f);
    assert_true(rng_below1(~0u, 1) == 1.5f * 0x1p-64f);
    assert_true(rng_below1(~255u, ~0u) < rng_below1(~256u, 0));
    assert_true(rng_below1(0, 0) == 1 - 0x1p-24f);
    assert_true(rng_wants_more(~255u) && !rng_wants_more(~256u) && !rng_wants_more(0));
    assert_true(rng_gumbel(~0u, 0) < RNG_GUMBEL_MAX && rng_gumbel(~0u, 0) > 45);
    assert_true(rng_gumbel(0, 0) > RNG_GUMBEL_MIN);
    assert_true(rng_gumbel(0x80000000u, 0) == -logf(-logf(rng_open01(0x80000000u))));
}

// Of words that take further bits, the distance to 1 is uniform on (0, 2^-24): counts below
// 2^-24-k against their binomial.
TEST(rare_is_as_rare_as_it_should_be)
{
    enum { N = 1 << 20, LEVELS = 12 };
    struct rng r;
    int counts[LEVELS] = {0};
    rng_init(&r, 17, 0);
    for (int i = 0; i < N; i++) {
        uint32_t word = rng_u32(&r) | 0xffffff00u;
        float below = rng_below1(word, rng_u32(&r));
        for (int k = 0; k < LEVELS; k++) counts[k] += below < 0x1p-24f / (float)(1 << k);
    }
    for (int k = 0; k < LEVELS; k++) {
        double p = 1.0 / (1 << k), sigma = sqrt(N * p * (1 - p));
        assert_true(fabs(counts[k] - N * p) <= 5 * sigma);
    }
}

TEST(open01_f64)
{
    assert_true(rng_open01_f64(0, 0) == 0x1p-53);
    assert_true(rng_open01_f64(~0u, ~0u) < 1);
    assert_true(rng_open01_f64(~0u, ~0u) == 1 - 0x1p-53);
    assert_true(rng_open01_f64(1u << 31, 0) == 0.5 + 0x1p-53);
    assert_true(rng_open01_f64(0, 1u << 12) == 1.5 * 0x1p-52);
}

// ---- sample -------------------------------------------------------------------------------------

static void sample(const float *logits, const struct sample_params *params,
                   const struct sample_draft *drafts, const float *draft_logits,
                   struct sample_result *ret)
{
    const size_t bytes = ROWS * VOCAB * sizeof(float);
    void *d[5] = {
        to_device(NULL, ROWS * sizeof *ret),
        to_device(logits, bytes),
        to_device(params, ROWS * sizeof *params),
        drafts ? to_device(drafts, ROWS * sizeof *drafts) : NULL,
        drafts ? to_device(draft_logits, bytes) : NULL,
    };
    const struct sample_args args = {d[1], d[2], ROWS, VOCAB, d[3], d[4], drafts ? VOCAB : 0, NULL};
    ops->sample(dev, d[0], &args);
    from_device(ret, d[0], ROWS * sizeof *ret);
}

static uint32_t word_of(uint64_t position, uint32_t use, int word)
{
    const uint32_t key[2] = {5, 0}, counter[4] = {0, use, (uint32_t)position, 0};
    uint32_t bits[4];
    philox4x32(counter, key, bits);
    return bits[word];
}

static struct sample_params params_at(uint64_t position)
{
    return (struct sample_params){.temperature = 1, .top_p = 1, .seed = 5, .position = position};
}

// At positions where token 1's noise is beyond what 23 bits can give, its logit is set so that it
// wins by 0.01, or loses by it. It is never more likely than 2^-22.
ON_EACH_DEVICE(rare_token)
{
    float logits[ROWS * VOCAB];
    struct sample_params params[ROWS];
    struct sample_result result[ROWS];
    uint64_t position = 0;
    for (int i = 0; i < ROWS; i++) {
        if (i % 2 == 0) do
                position++;
            while (word_of(position, 0, 1) < ~200u);
        params[i] = params_at(position);
        double lead = noise_formula(&params[i], 1) - noise_formula(&params[i], LIKELIEST);
        for (int t = 0; t < VOCAB; t++) logits[i * VOCAB + t] = t == LIKELIEST ? 0 : -80;
        logits[i * VOCAB + 1] = (float)(-lead + (i % 2 ? -0.01 : 0.01));
    }
    sample(logits, params, NULL, NULL, result);
    for (int i = 0; i < ROWS; i++) assert_int_equal(result[i].token, i % 2 ? LIKELIEST : 1);
}

// A draft that q is sure of and p holds for less than 2^-25: accepted where u says so.
ON_EACH_DEVICE(rare_draft)
{
    float logits[ROWS * VOCAB], draft_logits[ROWS * VOCAB];
    struct sample_params params[ROWS];
    struct sample_draft drafts[ROWS];
    struct sample_result result[ROWS];
    uint64_t position = 0;
    for (int i = 0; i < ROWS; i++) {
        if (i % 2 == 0) do
                position++;
            while (word_of(position, 1, 0) > 100);
        params[i] = params_at(position);
        drafts[i] = (struct sample_draft){.token = 1, .row = i};
        for (int t = 0; t < VOCAB; t++) {
            logits[i * VOCAB + t] = t == LIKELIEST ? 0 : -80;
            draft_logits[i * VOCAB + t] = t == 1 ? 0 : -80;
        }
        double u = acceptance_formula(&params[i]);
        logits[i * VOCAB + 1] = (float)log(u * (i % 2 ? 0.99 : 1.01));
    }
    sample(logits, params, drafts, draft_logits, result);
    for (int i = 0; i < ROWS; i++) assert_int_equal(result[i].token, i % 2 ? LIKELIEST : 1);
}

OP_BODIES
