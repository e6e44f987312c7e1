/* test_loss.c: trainer/loss against a table of torch's values (tests/golden/losses), hand-computed
 * ones and finite differences, and trainer/advantage. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/names.h"
#include "common/base/rng.h"
#include "tests/support/loss_batch.h"
#include "tests/support/support.h"
#include "trainer/learn/stats.h"
#include "trainer/reward/advantage.h"
#include "trainer/learn/loss.h"

#define SEQS 5
static const int first[SEQS + 1] = {0, 4, 4, 7, 8, 14}; // the second is empty
#define TOKENS 14

struct inputs {
    float logprobs[TOKENS], old[TOKENS], sampler[TOKENS], ref[TOKENS], advantages[SEQS];
};

static void make_inputs(uint64_t seed, struct inputs *in)
{
    struct rng r;
    rng_init(&r, seed, 0);
    for (int i = 0; i < TOKENS; i++) {
        in->logprobs[i] = -0.2f - 2 * rng_uniform(&r);
        in->old[i] = in->logprobs[i] + 0.3f * rng_normal(&r);
        in->ref[i] = in->logprobs[i] + 0.2f * rng_normal(&r);
        in->sampler[i] = in->old[i] + 0.4f * rng_normal(&r);
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
        .sampler_logprobs = in->sampler,
        .ref_logprobs = in->ref,
        .advantages = in->advantages,
        .step_seqs = SEQS,
        .step_tokens = TOKENS,
    };
}

static double loss_of(const struct loss_config *config, const struct inputs *in, float *ret)
{
    struct update_stats stats = {0};
    struct loss_batch batch = batch_of(in);
    float unused[TOKENS];
    loss_batch_compute(config, &batch, &stats, ret ? ret : unused);
    return stats.range[STAT_LOSS].sum;
}

static const struct loss_config plain = {
    .type = LOSS_DAPO,
    .epsilon = 0.2,
    .epsilon_high = 0.28,
    .kl_estimator = KL_K3,
    .max_completion_length = 10,
    .sapo_temperature_neg = 1.05,
    .sapo_temperature_pos = 1,
};

// Calls check() with every combination of settings of each loss: 1,000 of them.
static void for_each_config(void (*check)(const struct loss_config *config))
{
    for (int type = 0; type < N_SAMPLE_LOSSES; type++)
        for (int level = type == LOSS_LUSPO; level < (type == LOSS_GMPO ? 1 : 2); level++)
            for (int kl = -2; kl < 2 * 3; kl++) // -2, -1: off
                for (int dual = 0; dual < 2; dual++)
                    for (int mode = TIS_OFF; mode <= TIS_SEQUENCE_MASK; mode++) {
                        struct loss_config config = plain;
                        if (kl == -1) continue;
                        config.type = (enum loss_type)type;
                        config.sequence_level = level;
                        config.beta = kl < 0 ? 0 : 0.04;
                        config.kl_estimator = kl < 0 ? KL_K3 : (enum kl_estimator)(kl / 2);
                        config.bias_correction_kl = kl >= 0 && kl % 2;
                        config.delta = dual ? 1.6 : 0;
                        config.tis = (enum tis_mode)mode;
                        config.tis_min = dual ? 0.5 : 0;
                        config.tis_max = 1.5;
                        if (type == LOSS_CISPO) config.epsilon_high = 1.2;
                        check(&config);
                    }
}

// The ratio's clip, and CISPO's weight, have kinks: a step must not cross one. GMPO's are of the
// ratio's logarithm.
static bool near_kink(const struct loss_config *config, const struct inputs *in, int seq,
                      double margin)
{
    const bool logs = config->type == LOSS_GMPO;
    const double kinks[] = {logs ? exp(-config->epsilon) : 1 - config->epsilon,
                            logs ? exp(config->epsilon_high) : 1 + config->epsilon_high,
                            config->delta};
    double mean = 0;
    int n = first[seq + 1] - first[seq];
    for (int t = first[seq]; t < first[seq + 1]; t++)
        mean += ((double)in->logprobs[t] - in->old[t]) / n;
    for (int t = first[seq]; t < first[seq + 1]; t++)
        for (size_t k = 0; k < sizeof kinks / sizeof *kinks; k++) {
            double ratio = exp(config->sequence_level ? mean : in->logprobs[t] - in->old[t]);
            if (fabs(ratio - kinks[k]) < margin) return true;
        }
    return false;
}

static int slopes_checked;

static void check_slopes(const struct loss_config *config)
{
    const float h = 1.0f / 512;
    if (config->type == LOSS_CISPO) return; // see cispo_weight_is_constant
    for (uint64_t seed = 1; seed <= 4; seed++) {
        struct inputs in;
        float derivative[TOKENS];
        make_inputs(seed, &in);
        loss_of(config, &in, derivative);
        for (int s = 0; s < SEQS; s++) {
            if (near_kink(config, &in, s, 0.01)) continue;
            for (int t = first[s]; t < first[s + 1]; t++) {
                struct inputs up = in, down = in;
                up.logprobs[t] += h;
                down.logprobs[t] -= h;
                // the distance that f32 really took
                double step = (double)up.logprobs[t] - down.logprobs[t];
                double slope = (loss_of(config, &up, NULL) - loss_of(config, &down, NULL)) / step;
                if (!(fabs(slope - derivative[t]) < 2e-5))
                    fail_msg("%s, level %d, seed %d, token %d: slope %g, derivative %g",
                             loss_type_names[config->type], config->sequence_level, (int)seed, t,
                             slope, (double)derivative[t]);
                slopes_checked++;
            }
        }
    }
}

TEST(derivatives_are_finite_differences)
{
    for_each_config(check_slopes);
    assert_true(slopes_checked > 10000);
}

TEST(each_loss_has_its_formula_on_the_page)
{
    char *page = test_read(test_path(test_root(), "docs/use/losses.md")), name[32];
    for (int type = 0; type < N_SAMPLE_LOSSES; type++) {
        snprintf(name, sizeof name, "`%s`", loss_type_names[type]);
        if (!strstr(page, name)) fail_msg("docs/use/losses.md does not have %s", name);
    }
    free(page);
}

// CISPO's weight is held fixed: its derivative is not that of its value, but weight * advantage.
TEST(cispo_weight_is_constant)
{
    struct loss_config config = plain;
    struct inputs in;
    float derivative[TOKENS];
    config.type = LOSS_CISPO;
    config.epsilon_high = 1.28; // the cap itself
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
TEST(values_by_hand)
{
    static const int bounds[3] = {0, 2, 3};
    static const float logprobs[3] = {-1.0f, -2.0f, -1.5f}, old[3] = {-1.5f, -2.0f, -1.0f};
    static const float advantages[2] = {1, -2};
    struct loss_batch batch = {.n_seqs = 2,
                               .first = bounds,
                               .logprobs = logprobs,
                               .old_logprobs = old,
                               .advantages = advantages,
                               .step_seqs = 2,
                               .step_tokens = 3};
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
        struct loss_config config = plain;
        struct update_stats stats = {0};
        float slope[3];
        config.type = wanted[i].type;
        config.epsilon_high = config.type == LOSS_CISPO ? 1.2 : 0.2;
        loss_batch_compute(&config, &batch, &stats, slope);
        assert_true(fabs(stats.range[STAT_LOSS].sum - wanted[i].loss) < 1e-9);
        for (int t = 0; t < 3; t++) assert_true(fabs(slope[t] - wanted[i].slope[t]) < 1e-6);
        assert_int_equal(stats.range[STAT_RATIO].n, 3);
        assert_int_equal(stats.range[STAT_OFF_POLICY].n, 2); // sequences
        assert_true(stats.range[STAT_CLIP_HIGH].sum == 1);
        assert_true(stats.range[STAT_CLIP_LOW].sum == (wanted[i].type == LOSS_CISPO ? 0 : 1));
        assert_true(fabs(stats.range[STAT_RATIO].min - exp(-0.5)) < 1e-9);
        assert_true(fabs(stats.range[STAT_RATIO].max - exp(0.5)) < 1e-9);
        assert_true(stats.range[STAT_SEQ_CLIP_HIGH].max == 0.5 &&
                    stats.range[STAT_SEQ_CLIP_HIGH].min == 0);
        assert_true(stats.range[STAT_SEQ_CLIP_LOW].min == 0 &&
                    stats.range[STAT_SEQ_CLIP_LOW].n == 2);
        assert_int_equal(stats.range[STAT_TIS].n, 0);
    }
}

// One token with ratio 1 and d = 0.5 to the reference: the three estimates and their slopes. The
// ratio as a factor leaves the value as it is and adds it to the slope.
TEST(kl_by_hand)
{
    static const int bounds[2] = {0, 1};
    static const float logprob = -1, ref = -0.5f, zero = 0;
    struct loss_batch batch = {.n_seqs = 1,
                               .first = bounds,
                               .logprobs = &logprob,
                               .old_logprobs = &logprob,
                               .ref_logprobs = &ref,
                               .advantages = &zero,
                               .step_seqs = 1,
                               .step_tokens = 1};
    static const struct {
        enum kl_estimator estimator;
        double kl, slope;
    } wanted[] = {{KL_K1, -0.5, 1}, {KL_K2, 0.125, -0.5}, {KL_K3, 0.14872127070, -0.64872127070}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        for (int bias = 0; bias < 2; bias++) {
            struct loss_config config = plain;
            struct update_stats stats = {0};
            float slope;
            config.beta = 0.1;
            config.kl_estimator = wanted[i].estimator;
            config.bias_correction_kl = bias;
            loss_batch_compute(&config, &batch, &stats, &slope);
            assert_true(fabs(stats.range[STAT_KL].sum - wanted[i].kl) < 1e-9);
            assert_true(fabs(stats.range[STAT_LOSS].sum - 0.1 * wanted[i].kl) < 1e-10);
            double by_ratio = bias ? wanted[i].kl : 0;
            assert_true(fabs(slope - 0.1 * (wanted[i].slope + by_ratio)) < 1e-7);
        }
}

// The divergence of what an environment wrote is none of the policy's.
TEST(kl_is_of_the_policy_s_tokens)
{
    static const int bounds[2] = {0, 3};
    static const uint8_t authors[3] = {AUTHOR_POLICY, AUTHOR_OTHER, AUTHOR_POLICY};
    static const float logprobs[3] = {-1, -9, -1}, ref[3] = {-0.5f, -0.1f, -0.5f}, zero = 0;
    struct loss_config config = plain;
    struct update_stats stats = {0};
    float slopes[3];
    struct loss_batch batch = {.n_seqs = 1,
                               .first = bounds,
                               .logprobs = logprobs,
                               .old_logprobs = logprobs,
                               .ref_logprobs = ref,
                               .advantages = &zero,
                               .authors = authors,
                               .step_seqs = 1,
                               .step_tokens = 2};
    config.beta = 0.1;
    config.kl_estimator = KL_K2;
    loss_batch_compute(&config, &batch, &stats, slopes);
    assert_int_equal(stats.range[STAT_KL].n, 2);
    assert_true(fabs(stats.range[STAT_KL].sum - 0.25) < 1e-9);
    assert_true(slopes[1] == 0);
}

// A ratio of e = 2.718 with advantage -1 has no bound from the clip; the dual clip is one.
TEST(dual_clip_by_hand)
{
    static const int bounds[2] = {0, 1};
    static const float logprob = -1, old = -2, down = -1, up = 1;
    struct loss_batch batch = {.n_seqs = 1,
                               .first = bounds,
                               .logprobs = &logprob,
                               .old_logprobs = &old,
                               .advantages = &down,
                               .step_seqs = 1,
                               .step_tokens = 1};
    struct loss_config config = plain;
    struct update_stats stats = {0};
    float slope;
    loss_batch_compute(&config, &batch, &stats, &slope);
    assert_true(fabs(stats.range[STAT_LOSS].sum - M_E) < 1e-9 && fabs(slope - M_E) < 1e-6);
    assert_true(stats.range[STAT_CLIP_DELTA].sum == 0);
    config.delta = 2;
    stats = (struct update_stats){0};
    loss_batch_compute(&config, &batch, &stats, &slope);
    assert_true(fabs(stats.range[STAT_LOSS].sum - 2) < 1e-9 && slope == 0);
    assert_true(stats.range[STAT_CLIP_DELTA].sum == 1 && stats.range[STAT_CLIP_LOW].sum == 0 &&
                stats.range[STAT_CLIP_HIGH].sum == 0);
    batch.advantages = &up; // here the clip is the lower bound of the two, as without it
    stats = (struct update_stats){0};
    loss_batch_compute(&config, &batch, &stats, &slope);
    assert_true(fabs(stats.range[STAT_LOSS].sum + 1.28) < 1e-9 && slope == 0);
    assert_true(stats.range[STAT_CLIP_DELTA].sum == 0 && stats.range[STAT_CLIP_HIGH].sum == 1);
}

// Where trainer and sampler agree to the bit, the correction changes no bit.
static void correction_of_nothing(const struct loss_config *config)
{
    struct inputs in;
    float with[TOKENS], without[TOKENS];
    struct loss_config off = *config;
    if (config->tis == TIS_OFF) return;
    make_inputs(5, &in);
    memcpy(in.sampler, in.old, sizeof in.sampler);
    off.tis = TIS_OFF;
    assert_true(loss_of(config, &in, with) == loss_of(&off, &in, without));
    assert_memory_equal(with, without, sizeof with);
}
TEST(correction_is_exactly_one)
{
    for_each_config(correction_of_nothing);
}

// However a step is cut into micro-batches, loss and derivatives are the same.
static void check_pieces(const struct loss_config *config)
{
    struct inputs in;
    float whole[TOKENS], pieces[TOKENS];
    struct update_stats stats = {0};
    make_inputs(7, &in);
    double loss = loss_of(config, &in, whole);
    for (int s = 0; s < SEQS; s++) {
        struct loss_batch batch = batch_of(&in);
        int bounds[2] = {0, first[s + 1] - first[s]};
        batch.n_seqs = 1;
        batch.first = bounds;
        batch.logprobs += first[s];
        batch.old_logprobs += first[s];
        batch.sampler_logprobs += first[s];
        batch.ref_logprobs += first[s];
        batch.advantages += s;
        loss_batch_compute(config, &batch, &stats, pieces + first[s]);
    }
    assert_true(fabs(loss - stats.range[STAT_LOSS].sum) < 1e-12);
    assert_memory_equal(whole, pieces, sizeof whole);
}
TEST(micro_batches_add_up)
{
    for_each_config(check_pieces);
}

static void check_empty(const struct loss_config *config)
{
    static const int bounds[3] = {0, 0, 0};
    static const float advantages[2] = {1, -1};
    float nothing = 0;
    struct loss_batch batch = {.n_seqs = 2,
                               .first = bounds,
                               .logprobs = &nothing,
                               .old_logprobs = &nothing,
                               .sampler_logprobs = &nothing,
                               .ref_logprobs = &nothing,
                               .advantages = advantages,
                               .step_seqs = 2,
                               .step_tokens = 0};
    struct update_stats stats = {0};
    loss_batch_compute(config, &batch, &stats, &nothing);
    assert_true(stats.range[STAT_LOSS].sum == 0 && stats.range[STAT_KL].n == 0 &&
                stats.range[STAT_OFF_POLICY].n == 2);
    assert_true(stats.range[STAT_RATIO].n == 0 && stats.range[STAT_TIS].n == 0 &&
                stats_mean(&stats, STAT_RATIO) == 0);
}
TEST(empty_sequences_only)
{
    for_each_config(check_empty);
}

// ---- torch's values -----------------------------------------------------------------------------

#define TABLE         "tests/golden/losses/losses.txt"
#define TABLE_ROOM    32
#define BEFORE_SLOPES 8 // columns of a case between its settings and its derivatives

struct table {
    FILE *file;
    float logprobs[TABLE_ROOM], old[TABLE_ROOM], sampler[TABLE_ROOM], ref[TABLE_ROOM];
    float advantages[TABLE_ROOM];
    int first[TABLE_ROOM], n_seqs, n_tokens;
    double settings[TABLE_ROOM];
    int n_cases, first_off; // first_off: 0: none
    double worst;           // relative
};

static int read_numbers(char **remaining, double *ret)
{
    int n = 0;
    for (char *word; (word = strsep(remaining, " \n"));)
        if (*word) {
            char *end;
            assert_true(n < TABLE_ROOM);
            ret[n++] = strtod(word, &end);
            assert_true(*end == '\0');
        }
    return n;
}

static void read_floats(char **remaining, int n, float *ret)
{
    double numbers[TABLE_ROOM];
    assert_int_equal(read_numbers(remaining, numbers), n);
    for (int i = 0; i < n; i++) {
        ret[i] = (float)numbers[i];
        assert_true(ret[i] == numbers[i]); // the table holds what f32 holds
    }
}

static void compare(struct table *t, double have, double want)
{
    double off = fabs(have - want), relative = want != 0 ? off / fabs(want) : off;
    if (relative > t->worst) t->worst = relative;
    if (!(relative <= 1e-6) && !t->first_off) t->first_off = t->n_cases;
}

static int value_of(const char *const names[], const char *text)
{
    int value = 0;
    assert_ok(name_parse(names, text, &value));
    return value;
}

static struct loss_config table_config(const struct table *t, char **remaining)
{
    struct loss_config config = {
        .epsilon = t->settings[0],
        .beta = t->settings[3],
        .kl_estimator = KL_K3,
        .max_completion_length = (int)t->settings[4],
    };
    config.type = (enum loss_type)value_of(loss_type_names, strsep(remaining, " "));
    config.epsilon_high = t->settings[config.type == LOSS_CISPO ? 2 : 1];
    config.sequence_level = strcmp(strsep(remaining, " "), "sequence") == 0;
    const char *kl = strsep(remaining, " ");
    if (strcmp(kl, "none") == 0)
        config.beta = 0;
    else
        config.kl_estimator = (enum kl_estimator)value_of(kl_estimator_names, kl);
    config.bias_correction_kl = atoi(strsep(remaining, " "));
    config.delta = atof(strsep(remaining, " "));
    config.tis = (enum tis_mode)value_of(tis_mode_names, strsep(remaining, " "));
    config.tis_min = atof(strsep(remaining, " "));
    config.tis_max = atof(strsep(remaining, " "));
    return config;
}

static void check_case(struct table *t, char *remaining)
{
    struct loss_config config = table_config(t, &remaining);
    struct loss_batch batch = {
        .n_seqs = t->n_seqs,
        .first = t->first,
        .logprobs = t->logprobs,
        .old_logprobs = t->old,
        .sampler_logprobs = config.tis == TIS_OFF ? NULL : t->sampler,
        .ref_logprobs = config.beta != 0 ? t->ref : NULL,
        .advantages = t->advantages,
        .step_seqs = t->n_seqs,
        .step_tokens = t->n_tokens,
    };
    struct update_stats stats = {0};
    float slopes[TABLE_ROOM];
    double want[TABLE_ROOM];
    t->n_cases++;
    loss_batch_compute(&config, &batch, &stats, slopes);
    assert_int_equal(read_numbers(&remaining, want), BEFORE_SLOPES + t->n_tokens);
    bool corrected = config.tis != TIS_OFF;
    compare(t, stats.range[STAT_LOSS].sum, want[0]);
    compare(t, stats_mean(&stats, STAT_KL), want[1]);
    compare(t, stats_mean(&stats, STAT_RATIO), want[2]);
    compare(t, stats_mean(&stats, STAT_CLIP_LOW), want[3]);
    compare(t, stats_mean(&stats, STAT_CLIP_HIGH), want[4]);
    compare(t, corrected ? stats_mean(&stats, STAT_TIS) : 1, want[5]);
    compare(t, corrected ? stats.range[STAT_TIS].min : 1, want[6]);
    compare(t, corrected ? stats.range[STAT_TIS].max : 1, want[7]);
    for (int i = 0; i < t->n_tokens; i++) compare(t, slopes[i], want[BEFORE_SLOPES + i]);
}

static void read_batch(struct table *t, const char *key, char *remaining)
{
    double numbers[TABLE_ROOM];
    if (strcmp(key, "bounds") == 0) {
        t->n_seqs = read_numbers(&remaining, numbers) - 1;
        for (int s = 0; s <= t->n_seqs; s++) t->first[s] = (int)numbers[s];
        t->n_tokens = t->first[t->n_seqs];
    } else if (strcmp(key, "settings") == 0) {
        assert_int_equal(read_numbers(&remaining, t->settings), 5);
    } else {
        float *values = strcmp(key, "logprobs") == 0  ? t->logprobs
                        : strcmp(key, "old") == 0     ? t->old
                        : strcmp(key, "sampler") == 0 ? t->sampler
                        : strcmp(key, "ref") == 0     ? t->ref
                                                      : t->advantages;
        read_floats(&remaining, values == t->advantages ? t->n_seqs : t->n_tokens, values);
    }
}

TEST(torch_agrees)
{
    const char *path = test_path(test_root(), "tests/golden/losses/losses.txt");
    struct table t = {.file = fopen(path, "r")};
    char *line = NULL;
    size_t room = 0;
    if (!t.file) fail_msg("cannot open %s", path);
    while (getline(&line, &room, t.file) > 0) {
        char *remaining = line, *key = strsep(&remaining, " ");
        if (*key == '#') continue;
        if (strcmp(key, "case") == 0)
            check_case(&t, remaining);
        else
            read_batch(&t, key, remaining);
    }
    free(line);
    fclose(t.file);
    assert_int_equal(t.n_cases, 5 * 2 * 7 * 2 * 5);
    printf("%d cases, largest relative difference from torch %.1e\n", t.n_cases, t.worst);
    if (t.first_off) fail_msg("case %d is the first that differs", t.first_off);
}

// ---- advantages ---------------------------------------------------------------------------------

TEST(advantages_by_hand)
{
    // mean 0.5625, deviations .4375 -.5625 -.3125 .4375; std with n - 1: 0.515388
    static const double rewards[8] = {1, 0, 0.25, 1, 0.5, 0.5, 0.5, 0.5};
    struct advantage_stats stats;
    float a[8];
    advantage_estimate(&(struct advantage_config){.scale = SCALE_GROUP}, rewards, NULL, NULL, 2, 4,
                       &stats, a);
    double std = sqrt((2 * 0.4375 * 0.4375 + 0.5625 * 0.5625 + 0.3125 * 0.3125) / 3);
    assert_true(fabs(a[0] - 0.4375 / (std + 1e-4)) < 1e-6);
    assert_true(fabs(a[1] + 0.5625 / (std + 1e-4)) < 1e-6);
    for (int i = 4; i < 8; i++) assert_true(a[i] == 0);
    assert_true(fabs(stats.group_std - std / 2) < 1e-9);
    // deviations from 0.53125: .46875 -.53125 -.28125 .46875 and four times -.03125
    assert_true(fabs(stats.reward_std - sqrt((2 * 0.46875 * 0.46875 + 0.53125 * 0.53125 +
                                              0.28125 * 0.28125 + 4 * 0.03125 * 0.03125) /
                                             7)) < 1e-9);
    assert_true(stats.frac_zero_std == 0.5);
    assert_true(fabs(stats.reward_mean - 0.53125) < 1e-12);
    assert_true(fabs(stats.mean) < 1e-7);

    advantage_estimate(&(struct advantage_config){.scale = SCALE_NONE}, rewards, NULL, NULL, 2, 4,
                       &stats, a);
    assert_true(fabs(a[1] + 0.5625) < 1e-7);
    double all;
    mean_std(rewards, 8, NULL, &all);
    advantage_estimate(&(struct advantage_config){.scale = SCALE_BATCH}, rewards, NULL, NULL, 2, 4,
                       &stats, a);
    assert_true(fabs(a[0] - 0.4375 / (all + 1e-4)) < 1e-6);
}

TEST(equal_rewards_give_zero)
{
    double rewards[6];
    struct advantage_stats stats;
    float a[6];
    for (int i = 0; i < 6; i++) rewards[i] = 0.1; // not exact in binary: the mean may round
    static const enum advantage_scale scales[] = {SCALE_GROUP, SCALE_BATCH, SCALE_NONE};
    for (int k = 0; k < 3; k++) {
        advantage_estimate(&(struct advantage_config){.scale = scales[k]}, rewards, NULL, NULL, 2,
                           3, &stats, a);
        for (int i = 0; i < 6; i++) assert_true(a[i] == 0);
        assert_true(stats.frac_zero_std == 1);
    }
    advantage_estimate(&(struct advantage_config){.scale = SCALE_GROUP}, rewards, NULL, NULL, 6, 1,
                       &stats, a); // groups of one
    for (int i = 0; i < 6; i++) assert_true(a[i] == 0);
}
