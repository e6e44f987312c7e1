/* test_recipe_losses.c: the losses of recipes (sapo, luspo, gmpo), masks by entropy and by distance
 * from the sampler, verl's clamps and the entropy bonus, against TRL's and verl's own code
 * (tests/golden/losses/make_recipe_losses.py). */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/names.h"
#include "tests/support/loss_batch.h"
#include "tests/support/support.h"
#include "trainer/learn/loss.h"
#include "trainer/learn/stats.h"

enum { ROOM = 64 };

struct batch {
    float logprobs[ROOM], old[ROOM], sampler[ROOM], ref[ROOM], entropy[ROOM], advantages[ROOM];
    int first[ROOM], n_seqs, n;
};
static struct batch batch;
static int n_cases;

static int read_numbers(char *remaining, double *ret)
{
    int n = 0;
    for (char *word; (word = strsep(&remaining, " "));) {
        assert_true(n < 2 * ROOM);
        ret[n++] = strtod(word, NULL);
    }
    return n;
}

static bool read_floats(const char *name, const char *word, char *remaining, float *ret)
{
    double numbers[2 * ROOM];
    if (strcmp(word, name) != 0) return false;
    const int n = read_numbers(remaining, numbers);
    for (int i = 0; i < n; i++) ret[i] = (float)numbers[i];
    return true;
}

static bool read_batch(const char *word, char *remaining)
{
    double numbers[2 * ROOM];
    if (strcmp(word, "bounds") != 0)
        return read_floats("logprobs", word, remaining, batch.logprobs) ||
               read_floats("old", word, remaining, batch.old) ||
               read_floats("sampler", word, remaining, batch.sampler) ||
               read_floats("ref", word, remaining, batch.ref) ||
               read_floats("entropy", word, remaining, batch.entropy) ||
               read_floats("advantages", word, remaining, batch.advantages);
    batch.n_seqs = read_numbers(remaining, numbers) - 1;
    for (int i = 0; i <= batch.n_seqs; i++) batch.first[i] = (int)numbers[i];
    batch.n = batch.first[batch.n_seqs];
    return true;
}

static double next_number(char **remaining)
{
    return strtod(strsep(remaining, " "), NULL);
}

static struct loss_config read_config(char **remaining)
{
    int type;
    struct loss_config c = {.epsilon = 0.2,
                            .epsilon_high = 0.28,
                            .kl_estimator = KL_K3,
                            .max_completion_length = 10,
                            .sapo_temperature_neg = 1.05,
                            .sapo_temperature_pos = 0.9};
    assert_ok(name_parse(loss_type_names, strsep(remaining, " "), &type));
    c.type = (enum loss_type)type;
    c.sequence_level = strcmp(strsep(remaining, " "), "sequence") == 0;
    c.beta = next_number(remaining);
    c.bias_correction_kl = next_number(remaining) != 0;
    c.off_policy_threshold = next_number(remaining);
    c.off_policy_mask = c.off_policy_threshold > 0;
    return c;
}

// The tokens of highest entropy.
static long choose(double top, uint8_t *ret)
{
    double sorted[ROOM];
    long n = 0;
    for (int i = 0; i < batch.n; i++) sorted[i] = batch.entropy[i];
    const double min = top < 1 ? entropy_threshold(sorted, batch.n, top) : 0;
    for (int i = 0; i < batch.n; i++) n += ret[i] = batch.entropy[i] >= min;
    return n;
}

static void compare(const char *what, double have, double want)
{
    if (!(fabs(have - want) <= 1e-6 * fmax(fabs(want), 1e-6)))
        fail_msg("case %d: %s is %.9g, not %.9g", n_cases, what, have, want);
}

static void check_case(char *remaining)
{
    struct loss_config config = read_config(&remaining);
    const double top = next_number(&remaining), coef = next_number(&remaining);
    uint8_t chosen[ROOM];
    float slopes[ROOM], dentropy[ROOM];
    double want[2 * ROOM];
    struct update_stats stats = {0};
    config.clamp_log_ratios = next_number(&remaining) != 0;
    const long n_chosen = choose(top, chosen);
    const struct loss_batch b = {
        .n_seqs = batch.n_seqs,
        .first = batch.first,
        .logprobs = batch.logprobs,
        .old_logprobs = batch.old,
        .sampler_logprobs = batch.sampler,
        .ref_logprobs = batch.ref,
        .advantages = batch.advantages,
        .step_seqs = batch.n_seqs,
        .step_tokens = batch.n,
        .chosen = top < 1 ? chosen : NULL,
    };
    n_cases++;
    loss_batch_compute(&config, &b, &stats, slopes);
    const double loss = stats.range[STAT_LOSS].sum +
                        entropy_bonus(coef, n_chosen, batch.n, batch.entropy, chosen, dentropy);
    assert_int_equal(read_numbers(remaining, want), 1 + 2 * batch.n);
    compare("loss", loss, want[0]);
    for (int i = 0; i < batch.n; i++) compare("slope", slopes[i], want[1 + i]);
    for (int i = 0; i < batch.n; i++)
        compare("slope by entropy", dentropy[i], want[1 + batch.n + i]);
}

static void check_adaptive(char *remaining)
{
    struct entropy_config config = {.adaptive = true};
    config.coef = next_number(&remaining);
    config.coef_min = next_number(&remaining);
    config.coef_max = next_number(&remaining);
    config.coef_delta = next_number(&remaining);
    config.target = next_number(&remaining);
    struct entropy_state state = {.coef = config.coef, .last = INFINITY};
    assert_true(entropy_has_bonus(&config));
    for (n_cases++; remaining;) {
        const double mean = next_number(&remaining);
        const double have = entropy_coef(&config, &state), want = next_number(&remaining);
        if (!(fabs(have - want) < 1e-9)) fail_msg("coefficient %g, not %g", have, want);
        entropy_observe(&config, mean, &state);
    }
}

static void check_line(char *line)
{
    const char *word = strsep(&line, " ");
    if (strcmp(word, "case") == 0)
        check_case(line);
    else if (strcmp(word, "adaptive") == 0)
        check_adaptive(line);
    else
        assert_true(read_batch(word, line));
}

TEST(trl_and_verl_agree)
{
    for_lines("tests/golden/losses/recipe_losses.txt", check_line);
    assert_int_equal(n_cases, 172);
}
