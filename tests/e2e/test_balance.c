/* test_balance.c: the load-balancing loss of a mixture's routers in whole runs: that it is said
 * and reported. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/mpirun.h"
#include "tests/support/training.h"

// Makes a mixture with random weights by `cw-trainer sft`, and looks at what that says.
static const char *mixture(void)
{
    const char *folder = test_folder(), *log = test_path(folder, "sft.log");
    const char *config = test_path(folder, "config.json"), *data = test_path(folder, "data.jsonl");
    const char *out = test_path(folder, "out");
    static const char mixtral[] =
        "{\"model_type\": \"mixtral\", \"architectures\": [\"MixtralForCausalLM\"],"
        " \"hidden_size\": 32, \"intermediate_size\": 32, \"num_hidden_layers\": 2,"
        " \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"num_local_experts\": 4,"
        " \"num_experts_per_tok\": 2, \"vocab_size\": 300, \"max_position_embeddings\": 64,"
        " \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000, \"hidden_act\": \"silu\","
        " \"tie_word_embeddings\": false, \"eos_token_id\": 2, \"router_aux_loss_coef\": 0.02}";
    static const char line[] = "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n";
    const char *tokenizer = daemon_model(folder, true, 3);
    test_write(config, mixtral, strlen(mixtral));
    test_write(data, line, strlen(line));
    assert_exit(0, test_command(log, LIMIT_MS,
                                OPTIONS(test_binary("cw-trainer"), "sft", "--init", config,
                                        "--tokenizer", tokenizer, "--data", data, "--out", out,
                                        "--max-steps", "1", "--device", test_device())));
    char *text = test_read(log);
    assert_contains(text, "mixture of 4 experts");
    assert_contains(text, "load-balancing loss");
    assert_contains(text, "coefficient of 0.02");
    return out;
}

TEST(loss_is_reported)
{
    struct scene s;
    double aux[4], loss[4], policy[4];
    scene_open_model(&s, mixture(), OPTIONS(NULL));
    // as config.json says; the loss has it, and what is left of that is the policy's
    assert_exit(0, train_alone(&s, "own",
                               OPTIONS("--max-steps", "2", "--entropy-coef", "1e-9",
                                       "--steps-per-generation", "3")));
    assert_said(&s, "coefficient of 0.02");
    assert_int_equal(column(&s, "own", "aux_loss", aux, 4), 2);
    column(&s, "own", "loss", loss, 4);
    column(&s, "own", "policy_loss", policy, 4);
    for (int i = 0; i < 2; i++) {
        assert_true(aux[i] > 1.9);
        assert_true(fabs(loss[i] - policy[i] - 0.02 * aux[i]) < 1e-6);
    }
    assert_exit(0,
                train_alone(&s, "off", OPTIONS("--max-steps", "1", "--router-aux-loss-coef", "0")));
    assert_said(&s, "may come to favour few experts");
    json_t *m = last_metrics(&s, "off");
    assert_null(json_object_get(m, "aux_loss"));
}

TEST_IN(is_refused_without_experts, scene_open)
{
    assert_exit(
        1, train_alone(&s, "dense", OPTIONS("--max-steps", "1", "--router-aux-loss-coef", "0.1")));
    assert_said(&s, "is no mixture of experts");
}

// Rows of both ranks are one batch: the loss is one of all, not one of each.
TEST(ranks_share_it)
{
    struct scene s;
    struct daemon other = {0};
    struct test_child child = {0};
    double one[2], both[2], loss[2], policy[2];
    const char *argv[MPIRUN_WORDS + TRAINER_WORDS];
    const char *const options[] = {"--max-steps", "1", "--entropy-coef", "1e-9", NULL};
    if (strcmp(test_device(), "cpu") != 0) test_skip("ranks of mpirun are on the CPU");
    const int n = mpirun_put(2, argv);
    scene_open_model(&s, mixture(), OPTIONS(NULL));
    daemon_start(&other, s.model, NULL);
    trainer_command(&s, test_path(s.folder, "both"), options, argv + n);
    assert_int_equal(symlink(s.daemon.bridge, test_path(s.folder, "rank-0.json")), 0);
    assert_int_equal(symlink(other.bridge, test_path(s.folder, "rank-1.json")), 0);
    for (const char **word = argv; *word; word++)
        if (strcmp(*word, s.daemon.bridge) == 0) *word = test_path(s.folder, "rank-{rank}.json");
    test_spawn(&child, test_path(s.folder, "trainer.log"), argv);
    if (test_wait(&child, LIMIT_MS) != 0) fail_msg("%s", test_read(child.log));
    assert_int_equal(train_alone(&s, "one", options), 0);
    assert_int_equal(column(&s, "one", "aux_loss", one, 2), 1);
    assert_int_equal(column(&s, "both", "aux_loss", both, 2), 1);
    column(&s, "both", "loss", loss, 2);
    column(&s, "both", "policy_loss", policy, 2);
    // other micro-batches, and the first of the two has moved the weights by one step
    assert_true(fabs(both[0] - one[0]) < 0.1);
    assert_true(fabs(loss[0] - policy[0] - 0.02 * both[0]) < 1e-6);
}
