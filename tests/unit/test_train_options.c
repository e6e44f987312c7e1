/* test_train_options.c: the options of cw-trainer train: names and defaults of TRL's GRPOConfig
 * (1.16) and of the transformers.TrainingArguments beneath it, how each option of the loss reaches
 * it, and what is said of those that are missing. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/config.h"
#include "tests/support/support.h"

LATER(options_free)

// Parses `more` (NULL-ended) behind --data.
static struct option_set *parse(const char *const more[], struct train_config *ret_config)
{
    char *argv[48] = {"train", "--data", "x.jsonl"};
    int argc = 3;
    struct option_set *set;
    memset(ret_config, 0, sizeof *ret_config);
    for (int i = 0; more[i]; i++) argv[argc++] = (char *)more[i];
    assert_int_equal(
        options_parse(train_options, "train", "", argc, argv, 0, ret_config, NULL, &set),
        OPTIONS_OK);
    return test_later(set, options_free_later);
}

static struct loss_config loss_of(const char *const more[])
{
    struct train_config config;
    struct train_resolved resolved;
    struct option_set *set = parse(more, &config);
    assert_ok(train_config_resolve(&config, set, &resolved));
    return resolved.loss;
}
#define NONE ((const char *const[]){NULL})

// As the config is written to a run's folder. What TRL calls None is 0 here, -1 for epsilon_high.
TEST_EACH(defaults_are_trls, "train_options")
{
    struct train_config config;
    parse(NONE, &config);
    const json_t *json = test_keep(options_to_json(train_options, &config));
    const json_t *value = json_at(json, "%s", row_text(cases, i, "name"));
    const char *text = test_keep(json_dumps(value, JSON_ENCODE_ANY));
    json_t *wanted = test_keep(json_loads(row_text(cases, i, "value"), JSON_DECODE_ANY, NULL));
    if (!json_equal(value, wanted))
        fail_msg("%s is %s, not %s", row_text(cases, i, "name"), text, row_text(cases, i, "value"));
}

TEST(options_reach_the_loss)
{
    struct loss_config l = loss_of(NONE);
    assert_int_equal(l.type, LOSS_DAPO);
    assert_false(l.sequence_level);
    assert_true(l.epsilon == 0.2 && l.epsilon_high == 0.2);
    assert_true(l.delta == 0 && l.beta == 0 && l.bias_correction_kl);
    assert_int_equal(l.kl_estimator, KL_K3);
    assert_int_equal(l.tis, TIS_SEQUENCE_MASK);
    assert_true(l.tis_min == 0 && l.tis_max == 3);
    assert_int_equal(l.max_completion_length, 512);

    l = loss_of(OPTIONS("--loss-type", "dr_grpo", "--importance-sampling-level", "sequence",
                        "--epsilon", "0.1", "--epsilon-high", "0.3", "--delta", "1.5", "--beta",
                        "0.04", "--kl-estimator", "k2", "--no-use-bias-correction-kl",
                        "--max-completion-length", "77", "--importance-sampling-mode",
                        "token_truncate", "--importance-sampling-clip-max", "4",
                        "--importance-sampling-clip-min", "0.25"));
    assert_int_equal(l.type, LOSS_DR_GRPO);
    assert_true(l.sequence_level);
    assert_true(l.epsilon == 0.1 && l.epsilon_high == 0.3);
    assert_true(l.delta == 1.5 && l.beta == 0.04 && !l.bias_correction_kl);
    assert_int_equal(l.kl_estimator, KL_K2);
    assert_int_equal(l.tis, TIS_TOKEN_TRUNCATE);
    assert_true(l.tis_min == 0.25 && l.tis_max == 4);
    assert_int_equal(l.max_completion_length, 77);

    l = loss_of(OPTIONS("--epsilon", "0.1")); // clip-higher is off: both sides alike
    assert_true(l.epsilon_high == 0.1);
    l = loss_of(OPTIONS("--loss-type", "cispo")); // its epsilon_high is the cap itself
    assert_true(l.epsilon_high == 5);
    l = loss_of(OPTIONS("--no-importance-sampling-correction"));
    assert_int_equal(l.tis, TIS_OFF);
    for (int type = LOSS_GRPO; type <= LOSS_CISPO; type++)
        assert_int_equal(loss_of(OPTIONS("--loss-type", loss_type_names[type])).type, type);
}

TEST(a_former_name_is_still_read)
{
    struct train_config config;
    struct option_set *set = parse(OPTIONS("--head-rows", "7"), &config);
    assert_int_equal(config.learner.logits_chunk, 7);
    assert_true(options_given(set, "logits-chunk"));
}

// Staleness is counted in updates, of which a step has --num-iterations; what may be ordered ahead
// follows from it, however it is said. Without --async --max-staleness says nothing.
TEST_EACH(staleness_says_what_runs_ahead, "train_options")
{
    struct train_config config;
    struct train_resolved resolved;
    struct option_set *set = parse(row_words(cases, i, "options"), &config);
    assert_ok(train_config_resolve(&config, set, &resolved));
    assert_int_equal(resolved.max_staleness, row_int(cases, i, "max_staleness"));
    assert_int_equal(resolved.steps_ahead, row_int(cases, i, "steps_ahead"));
    assert_int_equal(resolved.async, config.async || config.rollout_ahead > 0);
}

TEST_EACH(what_is_missing_is_said, "train_options")
{
    struct train_config config;
    struct train_resolved resolved;
    struct option_set *set = parse(row_words(cases, i, "options"), &config);
    if (!row_flag(cases, i, "data")) config.data = NULL;
    assert_fails(train_config_resolve(&config, set, &resolved), ST_INVALID,
                 row_text(cases, i, "sentence"));
}
