/* test_loss.c: trainer/loss against hand-computed values and finite differences, trainer/advantage,
 * and trainer/schedule. (tests/golden compares every loss with torch's.) */
#include "common/base/rng.h"
#include "tests/support/support.h"
#include "trainer/advantage.h"
#include "trainer/loss.h"
#include "trainer/schedule.h"

#include <math.h>
#include <string.h>

#define SEQS 5
static const int first[SEQS + 1] = {0, 4, 4, 7, 8, 14}; // the second is empty
#define TOKENS 14

struct inputs {
    float logprobs[TOKENS], old[TOKENS], ref[TOKENS], advantages[SEQS];
};

static void make_inputs(uint64_t seed, struct inputs *in)
{
    struct rng r;
    rng_init(&r, seed, 0);
    for (int i = 0; i < TOKENS; i++) {
        in->logprobs[i] = -0.2f - 2 * rng_uniform(&r);
        in->old[i] = in->logprobs[i] + 0.3f * rng_normal(&r);
        in->ref[i] = in->logprobs[i] + 0.2f * rng_normal(&r);
    }
    for (int s = 0; s < SEQS; s++) in->advantages[s] = rng_normal(&r);
    in->advantages[3] = 0;
}

static struct loss_batch batch_of(const struct inputs *in)
{
    return (struct loss_batch){
        .n_seqs = SEQS,
        .first = first,
        .logprobs = in->logprobs,
        .old_logprobs = in->old,
        .ref_logprobs = in->ref,
        .advantages = in->advantages,
        .step_seqs = SEQS,
        .step_tokens = TOKENS,
    };
}

static double loss_of(const struct loss_config *config, const struct inputs *in, float *ret)
{
    struct loss_stats stats = {0};
    struct loss_batch batch = batch_of(in);
    float unused[TOKENS];
    loss_compute(config, &batch, &stats, ret ? ret : unused);
    return stats.loss;
}

// The ratio's clip, and CISPO's weight, have kinks: a step must not cross one.
static bool near_kink(const struct loss_config *config, const struct inputs *in, int seq,
                      float margin)
{
    double mean = 0;
    int n = first[seq + 1] - first[seq];
    for (int t = first[seq]; t < first[seq + 1]; t++) {
        double log_ratio = in->logprobs[t] - in->old[t];
        mean += log_ratio / n;
        if (!config->sequence_level && (fabs(exp(log_ratio) - 1 + config->epsilon) < margin ||
                                        fabs(exp(log_ratio) - 1 - config->epsilon_high) < margin))
            return true;
    }
    return config->sequence_level && (fabs(exp(mean) - 1 + config->epsilon) < margin ||
                                      fabs(exp(mean) - 1 - config->epsilon_high) < margin);
}

static const struct {
    enum loss_type type;
    bool sequence_level;
} variants[] = {
    {LOSS_GRPO, false}, {LOSS_BNPO, false},   {LOSS_DAPO, false}, {LOSS_DR_GRPO, false},
    {LOSS_GRPO, true},  {LOSS_DR_GRPO, true}, {LOSS_DAPO, true},
};

static void derivatives_are_finite_differences(void **state)
{
    (void)state;
    int checked = 0;
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++)
        for (uint64_t seed = 1; seed <= 20; seed++) {
            struct loss_config config = {
                variants[v].type, variants[v].sequence_level, 0.2, 0.28, 0.04, 10};
            struct inputs in;
            float derivative[TOKENS];
            const float h = 1.0f / 512;
            make_inputs(seed, &in);
            loss_of(&config, &in, derivative);
            for (int s = 0; s < SEQS; s++) {
                if (near_kink(&config, &in, s, 0.01f)) continue;
                for (int t = first[s]; t < first[s + 1]; t++) {
                    struct inputs up = in, down = in;
                    up.logprobs[t] += h;
                    down.logprobs[t] -= h;
                    // the distance that f32 really took
                    double step = (double)up.logprobs[t] - down.logprobs[t];
                    double slope =
                        (loss_of(&config, &up, NULL) - loss_of(&config, &down, NULL)) / step;
                    assert_true(fabs(slope - derivative[t]) < 2e-5);
                    checked++;
                }
            }
        }
    assert_true(checked > 1000);
}

// CISPO's weight is held fixed: its derivative is not that of its value, but weight * advantage.
static void cispo_weight_is_constant(void **state)
{
    (void)state;
    struct loss_config config = {LOSS_CISPO, false, 0.2, 0.28, 0, 10};
    struct inputs in;
    float derivative[TOKENS];
    make_inputs(3, &in);
    loss_of(&config, &in, derivative);
    for (int s = 0; s < SEQS; s++)
        for (int t = first[s]; t < first[s + 1]; t++) {
            double ratio = exp((double)in.logprobs[t] - in.old[t]);
            double wanted = -fmin(ratio, 1.28) * in.advantages[s] / TOKENS;
            assert_true(fabs(derivative[t] - wanted) < 1e-6);
        }
}

// Two sequences of 2 and 1 tokens, ratios e^0.5 (clipped at 1.2) and 1 with advantage 1, ratio
// e^-0.5 (clipped at 0.8) with advantage -2.
static void values_by_hand(void **state)
{
    (void)state;
    static const int bounds[3] = {0, 2, 3};
    static const float logprobs[3] = {-1.0f, -2.0f, -1.5f}, old[3] = {-1.5f, -2.0f, -1.0f};
    static const float advantages[2] = {1, -2};
    struct loss_batch batch = {2, bounds, logprobs, old, NULL, advantages, 2, 3};
    static const struct {
        enum loss_type type;
        double loss, slope[3];
    } wanted[] = {
        {LOSS_GRPO, ((-1.2 - 1) / 2 + 1.6) / 2, {0, -0.25, 0}},
        {LOSS_DAPO, (-1.2 - 1 + 1.6) / 3, {0, -1.0 / 3, 0}},
        {LOSS_BNPO, (-1.2 - 1 + 1.6) / 3, {0, -1.0 / 3, 0}},
        {LOSS_DR_GRPO, (-1.2 - 1 + 1.6) / 20, {0, -0.05, 0}},
        {LOSS_CISPO,
         (1.2 * 1.0 + 2.0 - 2 * 0.60653065971 * 1.5) / 3,
         {-0.4, -1.0 / 3, 2 * 0.60653065971 / 3}},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        struct loss_config config = {wanted[i].type, false, 0.2, 0.2, 0, 10};
        struct loss_stats stats = {0};
        float slope[3];
        loss_compute(&config, &batch, &stats, slope);
        assert_true(fabs(stats.loss - wanted[i].loss) < 1e-9);
        for (int t = 0; t < 3; t++) assert_true(fabs(slope[t] - wanted[i].slope[t]) < 1e-6);
        assert_int_equal(stats.tokens, 3);
        assert_int_equal(stats.seqs, 2);
        assert_true(stats.clip_high == 1);
        assert_true(stats.clip_low == (wanted[i].type == LOSS_CISPO ? 0 : 1));
        assert_true(fabs(stats.ratio_min - exp(-0.5)) < 1e-9);
        assert_true(fabs(stats.ratio_max - exp(0.5)) < 1e-9);
    }
}

static void kl_is_k3(void **state)
{
    (void)state;
    static const int bounds[2] = {0, 1};
    static const float logprob = -1, ref = -0.5f, zero = 0;
    struct loss_batch batch = {1, bounds, &logprob, &logprob, &ref, &zero, 1, 1};
    struct loss_config config = {LOSS_DAPO, false, 0.2, 0.2, 0.1, 1};
    struct loss_stats stats = {0};
    float slope;
    loss_compute(&config, &batch, &stats, &slope);
    assert_true(fabs(stats.kl - (exp(0.5) - 0.5 - 1)) < 1e-9);
    assert_true(fabs(stats.loss - 0.1 * stats.kl) < 1e-12);
    assert_true(fabs(slope - 0.1 * (1 - exp(0.5))) < 1e-7);
}

// However a step is cut into micro-batches, loss and derivatives are the same.
static void micro_batches_add_up(void **state)
{
    (void)state;
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        struct loss_config config = {
            variants[v].type, variants[v].sequence_level, 0.2, 0.28, 0.04, 10};
        struct inputs in;
        float whole[TOKENS], pieces[TOKENS];
        struct loss_stats stats = {0};
        make_inputs(7, &in);
        double loss = loss_of(&config, &in, whole);
        for (int s = 0; s < SEQS; s++) {
            struct loss_batch batch = batch_of(&in);
            int bounds[2] = {0, first[s + 1] - first[s]};
            batch.n_seqs = 1;
            batch.first = bounds;
            batch.logprobs += first[s];
            batch.old_logprobs += first[s];
            batch.ref_logprobs += first[s];
            batch.advantages += s;
            loss_compute(&config, &batch, &stats, pieces + first[s]);
        }
        assert_true(fabs(loss - stats.loss) < 1e-12);
        assert_memory_equal(whole, pieces, sizeof whole);
    }
}

static void empty_sequences_only(void **state)
{
    (void)state;
    static const int bounds[3] = {0, 0, 0};
    static const float advantages[2] = {1, -1};
    float nothing = 0;
    struct loss_batch batch = {2, bounds, &nothing, &nothing, &nothing, advantages, 2, 0};
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        struct loss_config config = {
            variants[v].type, variants[v].sequence_level, 0.2, 0.2, 0.1, 8};
        struct loss_stats stats = {0};
        loss_compute(&config, &batch, &stats, &nothing);
        assert_true(stats.loss == 0 && stats.tokens == 0 && stats.seqs == 2);
    }
}

static void loss_names(void **state)
{
    (void)state;
    enum loss_type type;
    assert_ok(loss_type_from_name("dr_grpo", &type));
    assert_int_equal(type, LOSS_DR_GRPO);
    assert_status(loss_type_from_name("gspo", &type), ST_INVALID);
    assert_message("sequence");
    assert_status(loss_type_from_name("ppo", &type), ST_INVALID);
    assert_message("\"ppo\"");
}

// ---- advantages ---------------------------------------------------------------------------------

static void advantages_by_hand(void **state)
{
    (void)state;
    // mean 0.5625, deviations .4375 -.5625 -.3125 .4375; std with n - 1: 0.515388
    static const double rewards[8] = {1, 0, 0.25, 1, 0.5, 0.5, 0.5, 0.5};
    struct advantage_stats stats;
    float a[8];
    advantage_compute(rewards, 2, 4, SCALE_GROUP, &stats, a);
    double std = sqrt((2 * 0.4375 * 0.4375 + 0.5625 * 0.5625 + 0.3125 * 0.3125) / 3);
    assert_true(fabs(a[0] - 0.4375 / (std + 1e-4)) < 1e-6);
    assert_true(fabs(a[1] + 0.5625 / (std + 1e-4)) < 1e-6);
    for (int i = 4; i < 8; i++) assert_true(a[i] == 0);
    assert_true(fabs(stats.reward_std - std / 2) < 1e-9);
    assert_true(stats.frac_zero_std == 0.5);
    assert_true(fabs(stats.reward_mean - 0.53125) < 1e-12);
    assert_true(fabs(stats.mean) < 1e-7);

    advantage_compute(rewards, 2, 4, SCALE_NONE, &stats, a);
    assert_true(fabs(a[1] + 0.5625) < 1e-7);
    double all;
    mean_std(rewards, 8, NULL, &all);
    advantage_compute(rewards, 2, 4, SCALE_BATCH, &stats, a);
    assert_true(fabs(a[0] - 0.4375 / (all + 1e-4)) < 1e-6);
}

static void equal_rewards_give_zero(void **state)
{
    (void)state;
    double rewards[6];
    struct advantage_stats stats;
    float a[6];
    for (int i = 0; i < 6; i++) rewards[i] = 0.1; // not exact in binary: the mean may round
    static const enum advantage_scale scales[] = {SCALE_GROUP, SCALE_BATCH, SCALE_NONE};
    for (int k = 0; k < 3; k++) {
        advantage_compute(rewards, 2, 3, scales[k], &stats, a);
        for (int i = 0; i < 6; i++) assert_true(a[i] == 0);
        assert_true(stats.frac_zero_std == 1);
    }
    advantage_compute(rewards, 6, 1, SCALE_GROUP, &stats, a); // groups of one
    for (int i = 0; i < 6; i++) assert_true(a[i] == 0);
}

// ---- schedule -----------------------------------------------------------------------------------

static void schedules(void **state)
{
    (void)state;
    struct schedule s = {SCHEDULE_LINEAR, 2.0, 4, 12};
    assert_true(schedule_at(&s, 0) == 0);
    assert_true(schedule_at(&s, 2) == 1.0);
    assert_true(schedule_at(&s, 4) == 2.0);
    assert_true(fabs(schedule_at(&s, 8) - 1.0) < 1e-12);
    assert_true(schedule_at(&s, 12) == 0);
    s.type = SCHEDULE_COSINE;
    assert_true(fabs(schedule_at(&s, 8) - 1.0) < 1e-12);
    assert_true(fabs(schedule_at(&s, 6) - (1 + cos(M_PI / 4))) < 1e-12);
    s.type = SCHEDULE_CONSTANT;
    assert_true(schedule_at(&s, 11) == 2.0);
    s = (struct schedule){SCHEDULE_LINEAR, 1.0, 0, 10};
    assert_true(schedule_at(&s, 0) == 1.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(derivatives_are_finite_differences),
        cmocka_unit_test(cispo_weight_is_constant),
        cmocka_unit_test(values_by_hand),
        cmocka_unit_test(kl_is_k3),
        cmocka_unit_test(micro_batches_add_up),
        cmocka_unit_test(empty_sequences_only),
        cmocka_unit_test(loss_names),
        cmocka_unit_test(advantages_by_hand),
        cmocka_unit_test(equal_rewards_give_zero),
        cmocka_unit_test(schedules),
    };
    return cmocka_run_group_tests_name("loss", tests, NULL, NULL);
}
