/* test_sample.c: sampling against its formula in double precision: filters, noise, drafts. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"
#include "tests/support/sampling.h"

// drafts (n) or NULL, whose rows are of draft_logits (n, draft_vocab). masks: (n), or NULL.
static void masked_rows(struct sample_result *result, const float *logits,
                        const struct sample_params *params, const struct sample_draft *drafts,
                        const float *draft_logits, int n, int vocab, int draft_vocab,
                        const uint32_t *masks)
{
    float *d_logits = to_device(logits, (size_t)n * vocab * sizeof *logits);
    struct sample_params *d_params = to_device(params, (size_t)n * sizeof *params);
    struct sample_result *d_result = to_device(NULL, (size_t)n * sizeof *result);
    struct sample_draft *d_drafts = NULL;
    float *d_draft_logits = NULL;
    if (drafts) {
        d_drafts = to_device(drafts, (size_t)n * sizeof *drafts);
        d_draft_logits = to_device(draft_logits, (size_t)n * draft_vocab * sizeof(float));
    }
    const size_t bytes = (size_t)n * MASK_WORDS((size_t)vocab) * sizeof *masks;
    const struct sample_args args = {
        d_logits, d_params,       n,           vocab,
        d_drafts, d_draft_logits, draft_vocab, masks ? to_device(masks, bytes) : NULL};
    ops->sample(dev, d_result, &args);
    from_device(result, d_result, (size_t)n * sizeof *result);
}

static void verify_rows(struct sample_result *result, const float *logits,
                        const struct sample_params *params, const struct sample_draft *drafts,
                        const float *draft_logits, int n, int vocab, int draft_vocab)
{
    masked_rows(result, logits, params, drafts, draft_logits, n, vocab, draft_vocab, NULL);
}

static void sample_rows(struct sample_result *result, const float *logits,
                        const struct sample_params *params, int n, int vocab)
{
    verify_rows(result, logits, params, NULL, NULL, n, vocab, 0);
}

ON_EACH_DEVICE(sample_distribution)
{
    enum { VOCAB = 13, SAMPLES = 20000 };
    static const struct sample_params settings[] = {
        {1.0f, 1, 0, 0, 7, 0, 0},     {0.7f, 1, 0, 0, 7, 0, 0},
        {1.0f, 1, 0, 4, 7, 0, 0},     {1.0f, 0.6f, 0, 0, 7, 0, 0},
        {1.0f, 1, 0.15f, 0, 7, 0, 0}, {1.3f, 0.8f, 0.1f, 6, 7, 0, 0},
        {1.0f, 0.9f, 0, 5, 7, 0, 0},  {1.0f, 0, 0, 0, 7, 0, 0},
        {1.0f, 1, 0, 1, 7, 0, 0},     {0.5f, 0.95f, 0.02f, 8, 7, 0, 0},
    };
    // with ties at the places where filters cut
    static const float row[VOCAB] = {0.1f, 2.0f, -1.5f, 1.0f, 1.0f, 1.0f,     0.5f,
                                     3.0f, 0.5f, -4.0f, 2.0f, 0.2f, -INFINITY};
    float *logits = op_host(sizeof(float) * VOCAB * SAMPLES);
    struct sample_params *params = op_host(sizeof *params * SAMPLES);
    struct sample_result *result = op_host(sizeof *result * SAMPLES);
    for (size_t k = 0; k < sizeof settings / sizeof settings[0]; k++) {
        for (int i = 0; i < SAMPLES; i++) {
            memcpy(logits + (size_t)i * VOCAB, row, sizeof row);
            params[i] = settings[k];
            params[i].position = (uint64_t)i;
        }
        sample_rows(result, logits, params, SAMPLES, VOCAB);
        bool kept[VOCAB];
        double all, mass, chi = 0, t = settings[k].temperature;
        cut_formula(row, VOCAB, &settings[k], kept, &all, &mass);
        int count[VOCAB] = {0}, free_cells = -1;
        for (int i = 0; i < SAMPLES; i++) {
            const struct sample_result *r = &result[i];
            assert_in_range(r->token, 0, VOCAB - 1);
            if (!kept[r->token])
                fail_msg("setting %zu gave token %d, which is filtered out", k, r->token);
            count[r->token]++;
            double z = row[r->token] / t - 3.0 / t;
            if (fabs(r->logprob - (z - log(all))) > 1e-5 ||
                fabs(r->processed_logprob - (z - log(mass))) > 1e-5 ||
                fabs(r->retained_mass - mass / all) > 1e-5)
                fail_msg("setting %zu token %d: logprob %.7g cut %.7g mass %.7g; want %.7g %.7g "
                         "%.7g",
                         k, r->token, r->logprob, r->processed_logprob, r->retained_mass,
                         z - log(all), z - log(mass), mass / all);
        }
        for (int c = 0; c < VOCAB; c++) {
            double expected = SAMPLES * exp(row[c] / t - 3.0 / t) / mass;
            if (!kept[c] || expected == 0) continue;
            chi += (count[c] - expected) * (count[c] - expected) / expected;
            free_cells++;
        }
        // mean + 5 standard deviations of chi-square; the samples are fixed by their seed
        double limit = free_cells + 5 * sqrt(2.0 * free_cells) + 1e-9;
        if (chi > limit)
            fail_msg("setting %zu: chi-square %.1f over %d cells (limit %.1f)", k, chi, free_cells,
                     limit);
    }
}

// Rows with a mask give, with drafts too, what they do where the logits are MIN_LOGIT, to the bit;
// those that have none, what they do without.
ON_EACH_DEVICE(sample_masked)
{
    enum { VOCAB = 10007, ROWS = 48, WORDS = MASK_WORDS(VOCAB) };
    struct rng rng;
    rng_init(&rng, 41, 0);
    const size_t bytes = sizeof(float) * VOCAB * ROWS;
    float *logits = op_host(bytes), *ruled_out = op_host(bytes), *draft_logits = op_host(bytes);
    uint32_t *masks = op_host(sizeof *masks * ROWS * WORDS);
    struct sample_params params[ROWS], without[ROWS];
    struct sample_draft drafts[ROWS];
    struct sample_result got[ROWS], want[ROWS];
    int masked = 0, changed = 0;
    for (int i = 0; i < VOCAB * ROWS; i++) {
        logits[i] = ruled_out[i] = 4.0f * rng_normal(&rng);
        draft_logits[i] = logits[i] + rng_normal(&rng);
    }
    memset(masks, 0, sizeof *masks * ROWS * WORDS);
    for (int i = 0; i < ROWS; i++) {
        params[i] = (struct sample_params){.temperature = i % 5 == 4 ? 0 : 0.6f + 0.1f * (i % 7),
                                           .top_p = i % 4 == 1 ? 0.9f : 1,
                                           .min_p = i % 6 == 3 ? 0.05f : 0,
                                           .top_k = i % 4 >= 2 ? 50 * (i % 4) : 0,
                                           .seed = rng_u64(&rng),
                                           .position = (uint64_t)i,
                                           .mask = i % 3 ? ++masked : 0};
        without[i] = params[i];
        without[i].mask = 0;
        drafts[i] = (struct sample_draft){i % 7 ? (int)rng_below(&rng, VOCAB) : -1, i};
        for (int t = 0; params[i].mask && t < VOCAB; t++) { // few, half, or nearly all may come
            if ((int)rng_below(&rng, 1000) < (i % 4 == 0 ? 1 : i % 4 == 1 ? 998 : 500))
                masks[(params[i].mask - 1) * WORDS + t / 32] |= 1u << t % 32;
            else
                ruled_out[(size_t)i * VOCAB + (size_t)t] = MIN_LOGIT;
        }
    }
    for (int with_drafts = 0; with_drafts < 2; with_drafts++) {
        const struct sample_draft *d = with_drafts ? drafts : NULL;
        masked_rows(got, logits, params, d, draft_logits, ROWS, VOCAB, VOCAB, masks);
        verify_rows(want, ruled_out, without, d, draft_logits, ROWS, VOCAB, VOCAB);
        assert_memory_equal(got, want, sizeof got);
        verify_rows(want, logits, without, d, draft_logits, ROWS, VOCAB, VOCAB);
        for (int i = 0; i < ROWS; i++) changed += got[i].token != want[i].token;
    }
    assert_true(changed > ROWS / 4);
}

// Every sample of a large vocabulary against the formula in double.
ON_EACH_DEVICE(sample_large)
{
    enum { VOCAB = 5003, ROWS = 24 };
    struct rng rng;
    rng_init(&rng, 99, 0);
    float *logits = op_host(sizeof(float) * VOCAB * ROWS);
    struct sample_params params[ROWS];
    struct sample_result result[ROWS];
    bool *kept = op_host(VOCAB);
    for (int i = 0; i < VOCAB * ROWS; i++)
        logits[i] = (i / VOCAB % 3 == 0 ? 0.1f : 4.0f) * rng_normal(&rng);
    for (int i = 0; i < ROWS; i++)
        params[i] = (struct sample_params){.temperature = i % 5 == 4 ? 0 : 0.6f + 0.1f * (i % 7),
                                           .top_p = i % 4 == 1 ? 0.9f : 1,
                                           .min_p = i % 6 == 3 ? 0.05f : 0,
                                           .top_k = i % 4 >= 2 ? 50 * (i % 4) : 0,
                                           .seed = rng_u64(&rng),
                                           .position = ((uint64_t)i << 33) + 5};
    sample_rows(result, logits, params, ROWS, VOCAB);
    for (int i = 0; i < ROWS; i++) {
        const float *row = logits + (size_t)i * VOCAB;
        double all, mass, best = -INFINITY, second = -INFINITY, max = -INFINITY;
        double t = params[i].temperature > 0 ? (double)params[i].temperature : 1;
        int token = 0;
        cut_formula(row, VOCAB, &params[i], kept, &all, &mass);
        for (int c = 0; c < VOCAB; c++) {
            max = fmax(max, row[c] / t);
            if (!kept[c]) continue;
            double noise = params[i].temperature > 0 ? noise_formula(&params[i], c) : 0;
            double score = row[c] / t + noise;
            if (score > best) {
                second = best;
                best = score;
                token = c;
            } else {
                second = fmax(second, score);
            }
        }
        if (result[i].token != token && best - second > 1e-5)
            fail_msg("row %d: token %d, want %d (ahead by %.3g)", i, result[i].token, token,
                     best - second);
        double z = row[result[i].token] / t - max;
        if (fabs(result[i].logprob - (z - log(all))) > 2e-5 ||
            fabs(result[i].processed_logprob - (z - log(mass))) > 2e-5 ||
            fabs(result[i].retained_mass - mass / all) > 1e-5)
            fail_msg("row %d: logprob %.7g cut %.7g mass %.7g; want %.7g %.7g %.7g", i,
                     result[i].logprob, result[i].processed_logprob, result[i].retained_mass,
                     z - log(all), z - log(mass), mass / all);
    }
}

ON_EACH_DEVICE(sample_greedy)
{
    enum { VOCAB = 1001 };
    float logits[VOCAB];
    struct sample_params params = {.temperature = 0, .top_p = 1};
    struct sample_result result;
    for (int i = 0; i < VOCAB; i++) logits[i] = -1;
    logits[300] = logits[7] = logits[999] = 2.5f; // equal: the first wins
    sample_rows(&result, logits, &params, 1, VOCAB);
    assert_int_equal(result.token, 7);
    double want = -log(3 + (VOCAB - 3) * exp(-3.5));
    assert_true(fabs(result.logprob - want) < 1e-5);
    assert_true(fabs(result.retained_mass - 1) < 1e-6);
}

// A draft at one row of the test below.
struct verified {
    const float *logits;
    const double *p, *q; // (vocab), q 0 from the draft's vocabulary on
    const struct sample_params *params;
    int vocab, draft;
};

/* The token that the rule gives in double, and how far the decision was from another: the distance
 * of u q(d) from p(d) relative to the larger, and the winner's lead over the next. */
static int verify_formula(const struct verified *j, bool *ret_accepted, double *ret_margin)
{
    double bar = acceptance_formula(j->params) * j->q[j->draft], p = j->p[j->draft];
    double margin = fabs(bar - p) / fmax(bar, p);
    int token = j->draft;
    *ret_accepted = bar < p;
    if (bar >= p) {
        double best = -INFINITY, second = -INFINITY;
        for (int t = 0; t < j->vocab; t++) {
            if (j->p[t] <= j->q[t]) continue;
            double score = log(j->p[t] - j->q[t]) + noise_formula(j->params, t);
            if (score > best) {
                second = best;
                best = score;
                token = t;
            } else {
                second = fmax(second, score);
            }
        }
        margin = fmin(margin, best - second);
    }
    *ret_margin = margin;
    return token;
}

// Every verification over a large vocabulary against the rule in double; p and q overlap by a half
// or so. Draft rows are taken in another order than the rows they are for.
static void sample_drafts(int vocab, int draft_vocab)
{
    enum { ROWS = 48 };
    struct rng rng;
    rng_init(&rng, 77, (uint64_t)draft_vocab);
    float *logits = op_host((size_t)vocab * ROWS * sizeof *logits);
    float *draft_logits = op_host((size_t)draft_vocab * ROWS * sizeof *draft_logits);
    double *p = op_host((size_t)vocab * 2 * sizeof *p), *q = p + vocab;
    struct sample_params params[ROWS], draft_params[ROWS];
    struct sample_draft drafts[ROWS];
    struct sample_result result[ROWS], plain[ROWS];
    for (int i = 0; i < ROWS; i++) {
        float *row = logits + (size_t)i * vocab;
        float *draft_row = draft_logits + (size_t)(ROWS - 1 - i) * draft_vocab;
        for (int c = 0; c < vocab; c++) {
            row[c] = (i % 3 == 0 ? 0.1f : 4.0f) * rng_normal(&rng);
            if (c < draft_vocab) draft_row[c] = row[c] + (i % 5 + 0.2f) * rng_normal(&rng);
        }
        params[i] = (struct sample_params){.temperature = i % 12 == 11 ? 0 : 0.6f + 0.1f * (i % 7),
                                           .top_p = i % 4 == 1 ? 0.9f : 1,
                                           .min_p = i % 6 == 3 ? 0.05f : 0,
                                           .top_k = i % 4 >= 2 ? 50 * (i % 4) : 0,
                                           .seed = rng_u64(&rng),
                                           .position = ((uint64_t)i << 33) + 5};
        draft_params[ROWS - 1 - i] = params[i];
        draft_params[ROWS - 1 - i].seed = rng_u64(&rng);
    }
    sample_rows(result, draft_logits, draft_params, ROWS, draft_vocab);
    sample_rows(plain, logits, params, ROWS, vocab);
    for (int i = 0; i < ROWS; i++)
        drafts[i] =
            (struct sample_draft){i % 8 == 7 ? -1 : result[ROWS - 1 - i].token, ROWS - 1 - i};
    verify_rows(result, logits, params, drafts, draft_logits, ROWS, vocab, draft_vocab);
    int n_accepted = 0, n_refused = 0;
    for (int i = 0; i < ROWS; i++) {
        const struct sample_result *r = &result[i];
        if (drafts[i].token < 0 || params[i].temperature == 0) {
            if (memcmp(r, &plain[i], sizeof *r) != 0)
                fail_msg("row %d: token %d; without drafts %d", i, r->token, plain[i].token);
            continue;
        }
        const float *row = logits + (size_t)i * vocab;
        distribution_formula(row, vocab, &params[i], p);
        memset(q, 0, (size_t)vocab * sizeof *q);
        distribution_formula(draft_logits + (size_t)drafts[i].row * draft_vocab, draft_vocab,
                             &params[i], q);
        struct verified verified = {row, p, q, &params[i], vocab, drafts[i].token};
        bool accepted;
        double margin;
        int token = verify_formula(&verified, &accepted, &margin);
        n_accepted += accepted;
        n_refused += !accepted;
        if (margin <= 1e-4) continue; // rounding decides
        if (r->token != token)
            fail_msg("row %d: token %d, want %d (draft %d, %s; margin %.3g)", i, r->token, token,
                     drafts[i].token, accepted ? "accepted" : "refused", margin);
        // the other fields, from those of the plain draw: the masses are the row's
        double z = (row[token] - row[plain[i].token]) / (double)params[i].temperature;
        if (fabs(r->logprob - (plain[i].logprob + z)) > 2e-5 ||
            fabs(r->processed_logprob - log(p[token])) > 2e-5 ||
            r->retained_mass != plain[i].retained_mass)
            fail_msg("row %d: logprob %.7g cut %.7g mass %.7g; want %.7g %.7g %.7g", i, r->logprob,
                     r->processed_logprob, r->retained_mass, plain[i].logprob + z, log(p[token]),
                     plain[i].retained_mass);
    }
    if (n_accepted < 8 || n_refused < 8)
        fail_msg("%d accepted and %d refused: too few to prove anything", n_accepted, n_refused);
    // nothing to verify: the same bits as without drafts
    for (int i = 0; i < ROWS; i++) drafts[i].token = -1;
    verify_rows(result, logits, params, drafts, draft_logits, ROWS, vocab, draft_vocab);
    assert_memory_equal(result, plain, sizeof result);
}

ON_EACH_DEVICE(sample_drafts_odd)
{
    sample_drafts(5003, 5003);
    sample_drafts(5003, 4801);
}

ON_EACH_DEVICE(sample_drafts_aligned)
{
    sample_drafts(8448, 8448);
    sample_drafts(8448, 4000);
}

// Shapes and, where they can be read (on the CPU), drafts that make no sense are refused by name.
ON_EACH_DEVICE(sample_refuses)
{
    enum { VOCAB = 8 };
    static const struct sample_draft wrong[] = {{VOCAB - 1, 0}, {0, -1}};
    const struct sample_params params = {.temperature = 1, .top_p = 1};
    float *logits = to_device(NULL, VOCAB * sizeof *logits);
    void *d_params = to_device(&params, sizeof params), *drafts = to_device(NULL, 8);
    void *result = to_device(NULL, sizeof(struct sample_result));
    struct sample_args args = {logits, d_params, 1, VOCAB - 1, drafts, logits, VOCAB, NULL};
    ops->sample(dev, result, &args);
    assert_int_equal(device_sync(dev), ST_DEVICE);
    assert_non_null(strstr(status_message(), "draft vocabulary of 8"));
    const struct distill_args distill = {.student = logits,
                                         .teacher = logits,
                                         .n = 1,
                                         .vocab = VOCAB,
                                         .teacher_vocab = VOCAB - 1,
                                         .temperature = 1,
                                         .scale = 1};
    ops->distill(dev, logits, logits, NULL, &distill, DT_F32);
    assert_int_equal(device_sync(dev), ST_DEVICE);
    assert_non_null(strstr(status_message(), "teacher vocabulary of 7"));
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0] && device_kind(dev) == DEVICE_CPU; i++) {
        device_copy_in(dev, drafts, &wrong[i], sizeof wrong[i]);
        args.vocab = VOCAB;
        args.draft_vocab = VOCAB - 1;
        ops->sample(dev, result, &args);
        assert_int_equal(device_sync(dev), ST_DEVICE);
        assert_non_null(strstr(status_message(), "outside the vocabulary of 7"));
    }
}

OP_BODIES
