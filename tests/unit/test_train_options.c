/* test_train_options.c: the options of cw-trainer train: names and defaults of TRL's GRPOConfig
 * (1.16) and of the transformers.TrainingArguments beneath it, how each option of the loss reaches
 * it, and what is said of those that are missing. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/config.h"
#include "tests/support/support.h"

#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))

// Parses `more` (NULL-ended) behind --data; the caller frees ret_set.
static void parse(const char *const more[], struct train_config *config,
                  struct option_set **ret_set)
{
    char *argv[48] = {"train", "--data", "x.jsonl"};
    int argc = 3;
    memset(config, 0, sizeof *config);
    for (int i = 0; more[i]; i++) argv[argc++] = (char *)more[i];
    assert_int_equal(
        options_parse(train_options, "train", "", argc, argv, 0, config, NULL, ret_set),
        OPTIONS_OK);
}

static struct loss_config loss_of(const char *const more[])
{
    struct train_config config;
    struct train_resolved resolved;
    struct option_set *set;
    parse(more, &config, &set);
    assert_ok(train_config_resolve(&config, set, &resolved));
    options_free(set);
    return resolved.loss;
}
#define NONE ((const char *const[]){NULL})

// As the config is written to a run's folder. What TRL calls None is 0 here, -1 for epsilon_high.
TEST(defaults_are_trls)
{
    const json_t *defaults = test_rows("train_options", "defaults_are_trls");
    struct train_config config;
    struct option_set *set;
    parse(NONE, &config, &set);
    json_t *json = options_to_json(train_options, &config);
    assert_non_null(json);
    for (int i = 0; i < (int)json_array_size(defaults); i++) {
        json_t *wanted =
            test_keep(json_loads(row_text(defaults, i, "value"), JSON_DECODE_ANY, NULL));
        const json_t *value = json_object_get(json, row_text(defaults, i, "name"));
        assert_non_null(wanted);
        if (!value) fail_msg("there is no option %s", row_text(defaults, i, "name"));
        if (!json_equal(value, wanted)) {
            char *text = json_dumps(value, JSON_ENCODE_ANY);
            fail_msg("%s is %s, not %s", row_text(defaults, i, "name"), text,
                     row_text(defaults, i, "value"));
        }
    }
    json_decref(json);
    options_free(set);
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

    static const struct {
        const char *name;
        enum loss_type type;
    } types[] = {{"grpo", LOSS_GRPO},
                 {"bnpo", LOSS_BNPO},
                 {"dapo", LOSS_DAPO},
                 {"dr_grpo", LOSS_DR_GRPO},
                 {"cispo", LOSS_CISPO}};
    for (int i = 0; i < LENGTH(types); i++)
        assert_int_equal(loss_of(OPTIONS("--loss-type", types[i].name)).type, types[i].type);
}

TEST(a_former_name_is_still_read)
{
    struct train_config config;
    struct option_set *set;
    parse((const char *const[]){"--head-rows", "7", NULL}, &config, &set);
    assert_int_equal(config.learner.logits_chunk, 7);
    assert_true(options_given(set, "logits-chunk"));
    options_free(set);
}

// Staleness is counted in updates, of which a step has --num-iterations; what may be ordered ahead
// follows from it, however it is said.
TEST(staleness_says_what_runs_ahead)
{
    static const struct {
        const char *options[8];
        int max_staleness, steps_ahead;
    } cases[] = {
        {{NULL}, 0, 0},
        {{"--max-staleness", "3"}, 0, 0}, // without --async
        {{"--async"}, 1, 1},
        {{"--async", "--max-staleness", "0"}, 0, 0},
        {{"--async", "--max-staleness", "5", "--num-iterations", "2"}, 5, 2},
        {{"--async", "--max-staleness", "1", "--num-iterations", "2"}, 1, 0},
        {{"--rollout-ahead", "3", "--num-iterations", "2"}, 6, 3},
    };
    for (int i = 0; i < LENGTH(cases); i++) {
        struct train_config config;
        struct train_resolved resolved;
        struct option_set *set;
        parse(cases[i].options, &config, &set);
        assert_ok(train_config_resolve(&config, set, &resolved));
        assert_int_equal(resolved.max_staleness, cases[i].max_staleness);
        assert_int_equal(resolved.steps_ahead, cases[i].steps_ahead);
        assert_int_equal(resolved.async, config.async || config.rollout_ahead > 0);
        options_free(set);
    }
}

TEST(what_is_missing_is_said)
{
    static const struct {
        const char *options[3], *sentence;
    } cases[] = {
        {{NULL}, "--data is missing"},
        {{"--resume"}, "--resume needs --run-dir"},
        {{"--resume", "--run-dir=none"}, "none holds no run to go on with; a new one needs --data"},
        {{"--model=m", "--data=x"}, "is the model that a server serves (--bridge)"},
    };
    for (int i = 0; i < LENGTH(cases); i++) {
        struct train_config config;
        struct train_resolved resolved;
        struct option_set *set;
        parse(cases[i].options, &config, &set);
        if (i < 3) config.data = NULL;
        assert_fails(train_config_resolve(&config, set, &resolved), ST_INVALID, cases[i].sentence);
        options_free(set);
    }
}
