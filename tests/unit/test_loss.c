/* test_loss.c: trainer/learn/loss against a table of torch's values (tests/golden/losses),
 * hand-computed ones and finite differences; and of samples in which a frozen model's tokens stand
 * among the policy's: their weight in sum and mean, and what they have no part in. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/names.h"
#include "common/base/rng.h"
#include "tests/support/loss_batch.h"
#include "tests/support/support.h"
#include "trainer/learn/stats.h"
#include "trainer/learn/loss.h"

#define SEQS 5
static const int first[SEQS + 1] = {0, 4, 4, 7, 8, 14}; // the second is empty
#define TOKENS 14
enum { F = AUTHOR_FROZEN, P = AUTHOR_POLICY };
static const uint8_t mask[TOKENS] = {P, F, F, P, F, P, P, F, P, P, F, P, P, F}; // the fourth: none

struct inputs {
    float logprobs[TOKENS], old[TOKENS], sampler[TOKENS], ref[TOKENS], advantages[SEQS];
};

// within: the clip changes nothing.
static struct inputs make_inputs(uint64_t seed, bool within)
{
    struct inputs in;
    struct rng r;
    rng_init(&r, seed, 0);
    for (int i = 0; i < TOKENS; i++) {
        in.logprobs[i] = -0.2f - 2 * rng_uniform(&r);
        in.old[i] = in.logprobs[i] + (within ? 0.02f : 0.3f) * rng_normal(&r);
        in.ref[i] = in.logprobs[i] + 0.2f * rng_normal(&r);
        in.sampler[i] = in.old[i] + (within ? 0.1f : 0.4f) * rng_normal(&r);
    }
    for (int s = 0; s < SEQS; s++) in.advantages[s] = rng_normal(&r);
    in.advantages[3] = within; // or 0
    return in;
}

static double sum_of_weights(double frozen)
{
    double sum = 0;
    for (int t = 0; t < TOKENS; t++) sum += mask[t] == P ? 1 : frozen;
    return sum;
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

// authors: NULL, mask, or that the policy wrote all.
static struct update_stats stats_of(const struct loss_config *config, const struct inputs *in,
                                    const uint8_t *authors, float *ret)
{
    struct update_stats stats = {0};
    struct loss_batch batch = batch_of(in);
    float unused[TOKENS];
    batch.authors = authors;
    if (authors) batch.step_tokens = sum_of_weights(config->frozen_weight);
    loss_batch_compute(config, &batch, &stats, ret ? ret : unused);
    return stats;
}

static double loss_of(const struct loss_config *config, const struct inputs *in,
                      const uint8_t *authors, float *ret)
{
    return stats_of(config, in, authors, ret).range[STAT_LOSS].sum;
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

static void check_slopes_of(const struct loss_config *config, const struct inputs *in,
                            const uint8_t *authors)
{
    const float h = 1.0f / 512;
    float derivative[TOKENS];
    loss_of(config, in, authors, derivative);
    for (int s = 0; s < SEQS; s++) {
        if (near_kink(config, in, s, 0.01)) continue;
        for (int t = first[s]; t < first[s + 1]; t++) {
            struct inputs up = *in, down = *in;
            up.logprobs[t] += h;
            down.logprobs[t] -= h;
            // the distance that f32 really took
            const double step = (double)up.logprobs[t] - down.logprobs[t];
            const double slope =
                (loss_of(config, &up, authors, NULL) - loss_of(config, &down, authors, NULL)) /
                step;
            if (!(fabs(slope - derivative[t]) < 2e-5))
                fail_msg("%s, level %d, token %d: slope %g, derivative %g",
                         loss_type_names[config->type], config->sequence_level, t, slope,
                         (double)derivative[t]);
            slopes_checked++;
        }
    }
}

static void check_slopes(const struct loss_config *config)
{
    if (config->type == LOSS_CISPO) return; // see cispo_weight_is_constant
    for (uint64_t seed = 1; seed <= 4; seed++) {
        const struct inputs in = make_inputs(seed, false);
        check_slopes_of(config, &in, NULL);
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
}

// CISPO's weight is held fixed: its derivative is not that of its value, but weight * advantage.
TEST(cispo_weight_is_constant)
{
    struct loss_config config = plain;
    const struct inputs in = make_inputs(3, false);
    float derivative[TOKENS];
    config.type = LOSS_CISPO;
    config.epsilon_high = 1.28; // the cap itself
    loss_of(&config, &in, NULL, derivative);
    for (int s = 0; s < SEQS; s++)
        for (int t = first[s]; t < first[s + 1]; t++) {
            double ratio = exp((double)in.logprobs[t] - in.old[t]);
            double wanted = -fmin(ratio, 1.28) * in.advantages[s] / TOKENS;
            assert_near(derivative[t], wanted, 1e-6);
        }
}

static int value_of(const char *const names[], const char *text)
{
    int value = 0;
    assert_ok(name_parse(names, text, &value));
    return value;
}

// A list of a row's, or NULL where it has none.
static const float *floats_of(const json_t *row, const char *name, float ret[TOKENS])
{
    const json_t *list = json_object_get(row, name);
    for (size_t k = 0; k < json_array_size(list); k++)
        ret[k] = (float)json_number_value(json_array_get(list, k));
    return list ? ret : NULL;
}

static json_t *stats_json(const struct update_stats *stats)
{
    static const struct {
        const char *name;
        enum statistic stat;
    } list[] = {{"loss", STAT_LOSS},
                {"kl", STAT_KL},
                {"ratio", STAT_RATIO},
                {"off_policy", STAT_OFF_POLICY},
                {"clip_low", STAT_CLIP_LOW},
                {"clip_high", STAT_CLIP_HIGH},
                {"clip_delta", STAT_CLIP_DELTA},
                {"seq_clip_low", STAT_SEQ_CLIP_LOW},
                {"seq_clip_high", STAT_SEQ_CLIP_HIGH},
                {"tis", STAT_TIS}};
    json_t *json = test_keep(json_object());
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const struct range_stats *r = &stats->range[list[i].stat];
        json_object_set_new(json, list[i].name,
                            json_pack("{s:f, s:f, s:f, s:i}", "sum", r->sum, "min", r->min, "max",
                                      r->max, "n", (int)r->n));
    }
    return json;
}

// Two sequences of 2 and 1 tokens, ratios e^0.5 (clipped at 1.2) and 1 with advantage 1, ratio
// e^-0.5 (clipped at 0.8) with advantage -2. The three estimates of the divergence of one token
// with ratio 1 and d = 0.5 to the reference, and their slopes: the ratio as a factor leaves the
// value as it is and adds it to the slope; the divergence of what an environment wrote is none of
// the policy's. A ratio of e = 2.718 with advantage -1 has no bound from the clip; the dual clip is
// one; with advantage 1 the clip is the lower bound of the two, as without it.
TEST_EACH(values_by_hand, "loss")
{
    const json_t *row = json_array_get(cases, i);
    float logprobs[TOKENS], old[TOKENS], ref[TOKENS], advantages[TOKENS], slopes[TOKENS];
    double bounds[SEQS], numbers[TOKENS];
    int first_of[SEQS];
    uint8_t authors[TOKENS];
    struct loss_config config = plain;
    struct update_stats stats = {0};
    const int n_seqs = row_numbers(cases, i, "first", bounds, SEQS) - 1;
    for (int s = 0; s <= n_seqs; s++) first_of[s] = (int)bounds[s];
    memset(authors, AUTHOR_POLICY, sizeof authors);
    const int n_others = row_numbers(cases, i, "others", numbers, TOKENS);
    for (int k = 0; k < n_others; k++) authors[(int)numbers[k]] = AUTHOR_OTHER;
    config.type = (enum loss_type)value_of(loss_type_names, row_text(cases, i, "type"));
    config.epsilon_high = row_number(cases, i, "epsilon_high");
    config.delta = row_number(cases, i, "delta");
    config.beta = row_number(cases, i, "beta");
    config.kl_estimator =
        (enum kl_estimator)value_of(kl_estimator_names, row_text(cases, i, "estimator"));
    config.bias_correction_kl = row_flag(cases, i, "bias");
    const struct loss_batch batch = {.n_seqs = n_seqs,
                                     .first = first_of,
                                     .logprobs = floats_of(row, "logprobs", logprobs),
                                     .old_logprobs = floats_of(row, "old", old),
                                     .ref_logprobs = floats_of(row, "ref", ref),
                                     .advantages = floats_of(row, "advantages", advantages),
                                     .authors = n_others > 0 ? authors : NULL,
                                     .step_seqs = n_seqs,
                                     .step_tokens = first_of[n_seqs] - n_others};
    loss_batch_compute(&config, &batch, &stats, slopes);
    assert_has(stats_json(&stats), json_at(row, "stats"));
    const int n = row_numbers(cases, i, "slopes", numbers, TOKENS);
    for (int t = 0; t < n; t++) assert_near(slopes[t], numbers[t], numbers[t] == 0 ? 0 : 1e-7);
}

// Where trainer and sampler agree to the bit, the correction changes no bit.
static void correction_of_nothing(const struct loss_config *config)
{
    struct inputs in = make_inputs(5, false);
    float with[TOKENS], without[TOKENS];
    struct loss_config off = *config;
    if (config->tis == TIS_OFF) return;
    memcpy(in.sampler, in.old, sizeof in.sampler);
    off.tis = TIS_OFF;
    assert_true(loss_of(config, &in, NULL, with) == loss_of(&off, &in, NULL, without));
    assert_memory_equal(with, without, sizeof with);
}
// off_policy_mask at a threshold of 0: a sequence of negative advantage that the policy has moved
// away from has no part in the loss, and all others have theirs.
TEST(a_bound_of_0_masks)
{
    const struct inputs in = make_inputs(3, false);
    struct loss_config masked = plain;
    float slopes[TOKENS], all[TOKENS];
    masked.off_policy_mask = true;
    const struct update_stats stats = stats_of(&masked, &in, NULL, slopes);
    loss_of(&plain, &in, NULL, all);
    int n = 0;
    for (int s = 0; s < SEQS; s++) {
        double drift = 0;
        for (int t = first[s]; t < first[s + 1]; t++)
            drift += (double)in.sampler[t] - in.logprobs[t];
        const bool far = in.advantages[s] < 0 && drift > 0;
        for (int t = first[s]; t < first[s + 1]; t++) assert_true(slopes[t] == (far ? 0 : all[t]));
        n += far;
    }
    assert_true(n > 0 && n < SEQS);
    assert_true(stats.range[STAT_OFF_POLICY].sum == n);
}

TEST(correction_is_exactly_one)
{
    for_each_config(correction_of_nothing);
}

// However a step is cut into micro-batches, loss and derivatives are the same.
static void check_pieces(const struct loss_config *config)
{
    const struct inputs in = make_inputs(7, false);
    float whole[TOKENS], pieces[TOKENS];
    struct update_stats stats = {0};
    double loss = loss_of(config, &in, NULL, whole);
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
    assert_near(stats.range[STAT_LOSS].sum, loss, 1e-12);
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

// ---- of samples in which a frozen model's tokens stand among the policy's -----------------------

// Calls check() with 320 combinations of settings.
static void for_each_tandem(void (*check)(const struct loss_config *config))
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

static void check_tandem_value(const struct loss_config *config)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        const struct inputs in = make_inputs(seed, true);
        assert_near(loss_of(config, &in, mask, NULL), expected_loss(config, &in), 1e-12);
    }
}

TEST(values_are_the_formula_s)
{
    for_each_tandem(check_tandem_value);
}

static void check_tandem_slopes(const struct loss_config *config)
{
    const struct inputs in = make_inputs(4, true);
    float derivative[TOKENS];
    if (config->type == LOSS_CISPO) return; // its ratio is a constant
    check_slopes_of(config, &in, mask);
    loss_of(config, &in, mask, derivative);
    for (int t = 0; t < TOKENS; t++)
        if (config->frozen_weight == 0 && mask[t] != P) assert_true(derivative[t] == 0);
}

TEST(derivatives_with_others_are_finite_differences)
{
    slopes_checked = 0;
    for_each_tandem(check_tandem_slopes);
    assert_int_equal(slopes_checked, 256 * TOKENS); // none is near a kink
}

// The sampler's numbers of frozen tokens are looked at nowhere; what is counted is the policy's.
static void check_sampler(const struct loss_config *config)
{
    const struct inputs in = make_inputs(5, true);
    struct inputs other = in;
    for (int t = 0; t < TOKENS; t++)
        if (mask[t] != P) other.sampler[t] -= 3;
    float a[TOKENS], b[TOKENS];
    const struct update_stats x = stats_of(config, &in, mask, a),
                              y = stats_of(config, &other, mask, b);
    assert_memory_equal(a, b, sizeof a);
    assert_true(x.range[STAT_LOSS].sum == y.range[STAT_LOSS].sum &&
                x.range[STAT_TIS].sum == y.range[STAT_TIS].sum &&
                x.range[STAT_TIS].max == y.range[STAT_TIS].max);
    assert_int_equal(x.range[STAT_RATIO].n,
                     config->sequence_level ? 3 : 8); // tokens, or sequences with some
}

TEST(frozen_numbers_are_not_the_policy_s)
{
    for_each_tandem(check_sampler);
}

// Where the policy wrote all, a mask that says so changes no bit.
static void check_mask_of_ones(const struct loss_config *config)
{
    uint8_t all[TOKENS];
    float a[TOKENS], b[TOKENS];
    struct loss_config one = *config;
    const struct inputs in = make_inputs(6, true);
    memset(all, P, sizeof all);
    one.frozen_weight = 1; // the sum of weights is then the number of tokens
    assert_true(loss_of(&one, &in, NULL, a) == loss_of(&one, &in, all, b));
    assert_memory_equal(a, b, sizeof a);
}

TEST(a_mask_of_ones_changes_nothing)
{
    for_each_tandem(check_mask_of_ones);
}
