/* test_token_loss.c: the losses that a client weighs token by token, against a table of torch's
 * values (tests/golden/losses/token_losses.txt), and what the table of losses refuses. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/learn/loss.h"
#include "trainer/learn/stats.h"

#define TOKENS   10
#define SETTINGS 3 // beta is the last

// One sequence of a client.
static double loss_of(const struct loss_config *config, int n, const float *logprobs,
                      const float *const inputs[LOSS_INPUTS], float *ret_dlogprobs)
{
    struct pack_completion completion = {.n = n};
    const struct loss_rows rows = {.n = n, .logprobs = logprobs};
    const struct loss_scale scale = {0};
    memcpy(completion.inputs, inputs, sizeof completion.inputs);
    struct update_stats stats = {0};
    loss_compute(config, &scale, &completion, &rows, &stats, ret_dlogprobs);
    return stats.range[STAT_LOSS].sum;
}

static void read_doubles(char **words, int n, double *ret)
{
    for (int i = 0; i < n; i++) {
        char *word = strtok_r(NULL, " \n", words);
        assert_non_null(word);
        ret[i] = strtod(word, NULL);
    }
}

struct columns {
    float logprobs[TOKENS], sampler[TOKENS], advantages[TOKENS], weights[TOKENS], mask[TOKENS];
};

static void read_column(FILE *file, const char *name, float ret[TOKENS])
{
    char line[1024], *words;
    double values[TOKENS];
    assert_non_null(fgets(line, sizeof line, file));
    assert_string_equal(strtok_r(line, " \n", &words), name);
    read_doubles(&words, TOKENS, values);
    for (int i = 0; i < TOKENS; i++) ret[i] = (float)values[i];
}

static void check_line(char *line, const struct columns *c)
{
    char *words;
    const char *name = strtok_r(line, " \n", &words);
    const float *const inputs[LOSS_INPUTS] = {[INPUT_WEIGHTS] = c->weights,
                                              [INPUT_LOGPROBS] = c->sampler,
                                              [INPUT_ADVANTAGES] = c->advantages,
                                              [INPUT_RATIO_MASK] = c->mask};
    struct loss_config config;
    double settings[SETTINGS], loss, gradient[TOKENS];
    float dlogprobs[TOKENS];
    assert_ok(loss_of_client(name, &config));
    read_doubles(&words, SETTINGS, settings);
    read_doubles(&words, 1, &loss);
    read_doubles(&words, TOKENS, gradient);
    for (int i = 0; i < SETTINGS; i++)
        if (loss_setting(&config, i)) *loss_setting(&config, i) = settings[i];
    const double got = loss_of(&config, TOKENS, c->logprobs, inputs, dlogprobs);
    assert_true(fabs(got - loss) < 1e-12 * (1 + fabs(loss)));
    for (int i = 0; i < TOKENS; i++)
        assert_true(fabs(dlogprobs[i] - gradient[i]) <= 1e-7 * fabs(gradient[i])); // of a float
}

TEST(test_torch_table)
{
    struct columns c;
    char line[2048];
    int n = 0;
    FILE *file = fopen(test_path(test_root(), "tests/golden/losses/token_losses.txt"), "r");
    assert_non_null(file);
    read_column(file, "logprobs", c.logprobs);
    read_column(file, "sampler", c.sampler);
    read_column(file, "advantages", c.advantages);
    read_column(file, "weights", c.weights);
    read_column(file, "mask", c.mask);
    for (; fgets(line, sizeof line, file); n++) check_line(line, &c);
    fclose(file);
    assert_int_equal(n, 11);
}

// The defaults are those of the first line of each loss in the table.
TEST(test_defaults)
{
    struct loss_config config;
    assert_ok(loss_of_client("ppo", &config));
    assert_true(config.epsilon == 0.8);
    assert_true(config.epsilon_high == 1.2);
    assert_ok(loss_of_client("cispo", &config));
    assert_true(config.epsilon == 0);
    assert_true(config.epsilon_high == 4);
    assert_null(loss_setting(&config, SETTINGS - 1));
    assert_ok(loss_of_client("dro", &config));
    assert_true(config.beta == 0.05);
}

// Bounds that a client gives for each token count instead of the settings.
TEST(test_bounds_of_tokens)
{
    const float logprobs[2] = {0, 0}, sampler[2] = {-1, -1}, advantages[2] = {1, 1},
                high[2] = {1.5f, 10};
    const float *const inputs[LOSS_INPUTS] = {
        [INPUT_LOGPROBS] = sampler, [INPUT_ADVANTAGES] = advantages, [INPUT_CLIP_HIGH] = high};
    struct loss_config config;
    float dlogprobs[2];
    assert_ok(loss_of_client("ppo", &config));
    assert_true(losses[config.type].takes & INPUT_BIT(INPUT_CLIP_HIGH));
    assert_false(losses[config.type].needs & INPUT_BIT(INPUT_CLIP_HIGH));
    const double loss = loss_of(&config, 2, logprobs, inputs, dlogprobs);
    assert_true(fabs(loss + 1.5 + exp(1)) < 1e-12);
    assert_true(dlogprobs[0] == 0); // clipped
    assert_true(fabs(dlogprobs[1] + exp(1)) < 1e-6);
}

TEST(test_refusals)
{
    struct loss_config config;
    assert_fails(loss_of_client("stable_reinforce", &config), ST_UNSUPPORTED,
                 "loss_fn=importance_sampling");
    assert_fails(loss_of_client("reinforce", &config), ST_INVALID,
                 "cross_entropy, importance_sampling, ppo, cispo, dro and gspo");
}
