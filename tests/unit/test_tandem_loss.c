/* test_tandem_loss.c: the loss of samples in which a frozen model's tokens stand among the
 * policy's: their weight in sum and mean, by the formula and by finite differences, what they have
 * no part in, and what a line of a rollout must say of them. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/loss_batch.h"
#include "tests/support/support.h"
#include "trainer/learn/loss.h"
#include "trainer/learn/stats.h"
#include "trainer/rollout/completion.h"

enum { SEQS = 4, TOKENS = 13 };
static const int first[SEQS + 1] = {0, 5, 7, 7, TOKENS}; // the third is empty
enum { F = AUTHOR_FROZEN, P = AUTHOR_POLICY };
static const uint8_t mask[TOKENS] = {P, F, F, P, P, F, F, P, F, P, P, P, F}; // the second has none

struct inputs {
    float logprobs[TOKENS], old[TOKENS], sampler[TOKENS], ref[TOKENS], advantages[SEQS];
};

static struct inputs make_inputs(uint64_t seed)
{
    struct inputs in;
    struct rng r;
    rng_init(&r, seed, 0);
    for (int i = 0; i < TOKENS; i++) {
        in.logprobs[i] = -0.2f - 2 * rng_uniform(&r);
        in.old[i] = in.logprobs[i] + 0.02f * rng_normal(&r); // within the clip
        in.ref[i] = in.logprobs[i] + 0.2f * rng_normal(&r);
        in.sampler[i] = in.old[i] + 0.1f * rng_normal(&r);
    }
    for (int s = 0; s < SEQS; s++) in.advantages[s] = rng_normal(&r);
    return in;
}

static double sum_of_weights(double frozen)
{
    double sum = 0;
    for (int t = 0; t < TOKENS; t++) sum += mask[t] == P ? 1 : frozen;
    return sum;
}

static struct update_stats loss_of(const struct loss_config *config, const struct inputs *in,
                                   const uint8_t *authors, float *ret)
{
    struct update_stats stats = {0};
    float unused[TOKENS];
    const struct loss_batch batch = {
        .n_seqs = SEQS,
        .first = first,
        .logprobs = in->logprobs,
        .old_logprobs = in->old,
        .sampler_logprobs = in->sampler,
        .ref_logprobs = in->ref,
        .advantages = in->advantages,
        .step_seqs = SEQS,
        .step_tokens = authors ? sum_of_weights(config->frozen_weight) : TOKENS,
        .authors = authors,
    };
    loss_batch_compute(config, &batch, &stats, ret ? ret : unused);
    return stats;
}

// Calls check() with 320 combinations of settings.
static void for_each_config(void (*check)(const struct loss_config *config))
{
    static const double weights[] = {0, 0.2, 1, 3};
    for (int type = LOSS_GRPO; type <= LOSS_CISPO; type++)
        for (int level = 0; level < 2; level++)
            for (int kl = 0; kl < 2; kl++)
                for (int mode = TIS_OFF; mode <= TIS_SEQUENCE_TRUNCATE; mode++)
                    for (size_t w = 0; w < sizeof weights / sizeof *weights; w++)
                        check(&(struct loss_config){.type = (enum loss_type)type,
                                                    .sequence_level = level,
                                                    .epsilon = 0.2,
                                                    .epsilon_high = type == LOSS_CISPO ? 5 : 0.2,
                                                    .beta = kl ? 0.04 : 0,
                                                    .kl_estimator = KL_K3,
                                                    .bias_correction_kl = true,
                                                    .max_completion_length = 10,
                                                    .tis = (enum tis_mode)mode,
                                                    .tis_max = 1.5,
                                                    .frozen_weight = weights[w]});
}

// The formula of docs/use/losses.md, written down once more.
static double expected_loss(const struct loss_config *c, const struct inputs *in)
{
    double loss = 0;
    for (int s = 0; s < SEQS; s++) {
        double n = 0, log_ratio = 0, log_tis = 0;
        int policy = 0;
        for (int t = first[s]; t < first[s + 1]; t++) {
            n += mask[t] == P ? 1 : c->frozen_weight;
            if (mask[t] != P) continue;
            policy++;
            log_ratio += (double)in->logprobs[t] - in->old[t];
            log_tis += (double)in->old[t] - in->sampler[t];
        }
        const double share = c->type == LOSS_GRPO      ? 1 / (n * SEQS)
                             : c->type == LOSS_DR_GRPO ? 1.0 / (SEQS * 10)
                                                       : 1 / sum_of_weights(c->frozen_weight);
        for (int t = first[s]; t < first[s + 1] && n > 0; t++) {
            const double logprob = in->logprobs[t], d = in->ref[t] - logprob;
            const double r =
                exp(c->sequence_level ? (policy ? log_ratio / policy : 0) : logprob - in->old[t]);
            double tis = mask[t] == P ? exp((double)in->old[t] - in->sampler[t]) : 1;
            if (c->tis == TIS_OFF) tis = 1;
            if (c->tis == TIS_SEQUENCE_TRUNCATE) tis = exp(log_tis);
            if (c->tis == TIS_TOKEN_MASK && tis > c->tis_max) tis = 0;
            tis = fmin(tis, c->tis_max);
            const double gain = r * in->advantages[s] * (c->type == LOSS_CISPO ? logprob : 1);
            loss += share * (mask[t] == P ? 1 : c->frozen_weight) *
                    (-tis * gain + c->beta * r * (expm1(d) - d));
        }
    }
    return loss;
}

static void check_value(const struct loss_config *config)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        const struct inputs in = make_inputs(seed);
        assert_true(fabs(loss_of(config, &in, mask, NULL).range[STAT_LOSS].sum -
                         expected_loss(config, &in)) < 1e-12);
    }
}

TEST(values_are_the_formula_s)
{
    for_each_config(check_value);
}

static void check_slopes(const struct loss_config *config)
{
    const float h = 1.0f / 512;
    if (config->type == LOSS_CISPO) return; // its ratio is a constant
    const struct inputs in = make_inputs(4);
    float derivative[TOKENS];
    loss_of(config, &in, mask, derivative);
    for (int t = 0; t < TOKENS; t++) {
        struct inputs up = in, down = in;
        up.logprobs[t] += h;
        down.logprobs[t] -= h;
        const double step = (double)up.logprobs[t] - down.logprobs[t]; // that f32 really took
        const double slope = (loss_of(config, &up, mask, NULL).range[STAT_LOSS].sum -
                              loss_of(config, &down, mask, NULL).range[STAT_LOSS].sum) /
                             step;
        assert_true(fabs(slope - derivative[t]) < 2e-5);
        if (config->frozen_weight == 0 && mask[t] != P) assert_true(derivative[t] == 0);
    }
}

TEST(derivatives_are_finite_differences)
{
    for_each_config(check_slopes);
}

// The sampler's numbers of frozen tokens are looked at nowhere; what is counted is the policy's.
static void check_sampler(const struct loss_config *config)
{
    const struct inputs in = make_inputs(5);
    struct inputs other = in;
    for (int t = 0; t < TOKENS; t++)
        if (mask[t] != P) other.sampler[t] -= 3;
    float a[TOKENS], b[TOKENS];
    const struct update_stats x = loss_of(config, &in, mask, a),
                              y = loss_of(config, &other, mask, b);
    assert_memory_equal(a, b, sizeof a);
    assert_true(x.range[STAT_LOSS].sum == y.range[STAT_LOSS].sum &&
                x.range[STAT_TIS].sum == y.range[STAT_TIS].sum &&
                x.range[STAT_TIS].max == y.range[STAT_TIS].max);
    assert_int_equal(x.range[STAT_RATIO].n,
                     config->sequence_level ? 2 : 7); // tokens, or sequences with some
}

TEST(frozen_numbers_are_not_the_policy_s)
{
    for_each_config(check_sampler);
}

// Where the policy wrote all, a mask that says so changes no bit.
static void check_plain(const struct loss_config *config)
{
    uint8_t all[TOKENS];
    float a[TOKENS], b[TOKENS];
    struct loss_config one = *config;
    const struct inputs in = make_inputs(6);
    memset(all, 1, sizeof all);
    one.frozen_weight = 1; // the sum of weights is then the number of tokens
    const struct update_stats x = loss_of(&one, &in, NULL, a), y = loss_of(&one, &in, all, b);
    assert_memory_equal(a, b, sizeof a);
    assert_true(x.range[STAT_LOSS].sum == y.range[STAT_LOSS].sum);
}

TEST(a_mask_of_ones_changes_nothing)
{
    for_each_config(check_plain);
}

// ---- a line of a rollout -----------------------------------------------------------------------

static enum status read_line(const char *more, bool tandem, struct completion *ret)
{
    char text[512];
    const struct completion_bounds bounds = {
        .vocab_size = 10, .max_tokens = 4, .tandem = tandem, .oldest = 2, .newest = 4};
    json_t *line = NULL;
    snprintf(text, sizeof text,
             "{\"token_ids\":[1,2,3],\"logprobs\":[-1,-2,-3],\"weight_versions\":[2,2,2],"
             "\"finish_reason\":\"length\",\"text\":\"x\"%s}",
             more);
    assert_ok(json_parse("line", text, strlen(text), &line));
    const enum status st = completion_read("line", line, &bounds, ret);
    json_decref(line);
    return st;
}

TEST(a_mask_is_asked_for_and_checked)
{
    struct completion c;
    assert_ok(read_line(",\"model_mask\":[1,0,1]", true, &c));
    assert_true(c.authors[0] == AUTHOR_POLICY && c.authors[1] == AUTHOR_FROZEN);
    completion_release(&c);
    assert_ok(read_line("", false, &c));
    assert_true(c.authors == NULL && token_author(c.authors, 1) == AUTHOR_POLICY);
    completion_release(&c);
    const struct {
        const char *more;
        bool tandem;
        enum status status;
        const char *words;
    } bad[] = {
        {"", true, ST_MISMATCH, "\"model_mask\" is missing"},
        {",\"model_mask\":null", true, ST_MISMATCH, "\"model_mask\" is missing"},
        {",\"model_mask\":[1,0,1]", false, ST_MISMATCH, "none was asked for"},
        {",\"model_mask\":[1,0]", true, ST_FORMAT, "2 entries for 3 tokens"},
        {",\"model_mask\":[1,0,2]", true, ST_FORMAT, "entry 2"},
        {",\"model_mask\":[1,0,true]", true, ST_FORMAT, "entry 2"},
        {",\"model_mask\":\"101\"", true, ST_FORMAT, "not a list"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_fails(read_line(bad[i].more, bad[i].tandem, &c), bad[i].status, bad[i].words);
    }
}
