/* test_balance.c: the load-balancing loss of a mixture's routers in whole runs: that it is said
 * and reported. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/pair.h"

// Makes a mixture with random weights by `cw-trainer sft`, and looks at what that says.
static const char *mixture(void)
{
    struct scene s = {.folder = test_folder()};
    const char *config = test_path(s.folder, "config.json"), *out = test_path(s.folder, "out");
    const char *data = test_path(s.folder, "data.jsonl");
    static const char mixtral[] =
        "{\"model_type\": \"mixtral\", \"architectures\": [\"MixtralForCausalLM\"],"
        " \"hidden_size\": 32, \"intermediate_size\": 32, \"num_hidden_layers\": 2,"
        " \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"num_local_experts\": 4,"
        " \"num_experts_per_tok\": 2, \"vocab_size\": 300, \"max_position_embeddings\": 64,"
        " \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000, \"hidden_act\": \"silu\","
        " \"tie_word_embeddings\": false, \"eos_token_id\": 2, \"router_aux_loss_coef\": 0.02}";
    static const char line[] = "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n";
    const char *tokenizer = daemon_model(s.folder, true, 3);
    test_write(config, mixtral, strlen(mixtral));
    test_write(data, line, strlen(line));
    assert_trainer(&s, 0,
                   "sft --init %s --tokenizer %s --data %s --out %s --max-steps 1 --device %s",
                   config, tokenizer, data, out, test_device());
    assert_said(&s, "mixture of 4 experts");
    assert_said(&s, "load-balancing loss");
    assert_said(&s, "coefficient of 0.02");
    return out;
}

TEST(loss_is_reported)
{
    struct scene s;
    double aux[4], loss[4], policy[4];
    scene_open_model(&s, mixture(), OPTIONS(NULL));
    // as config.json says; the loss has it, and what is left of that is the policy's
    assert_train(&s, 0, "own", "--max-steps 2 --entropy-coef 1e-9 --steps-per-generation 3");
    assert_said(&s, "coefficient of 0.02");
    assert_int_equal(column(&s, "own", "aux_loss", aux, 4), 2);
    column(&s, "own", "loss", loss, 4);
    column(&s, "own", "policy_loss", policy, 4);
    for (int i = 0; i < 2; i++) {
        assert_true(aux[i] > 1.9);
        assert_true(fabs(loss[i] - policy[i] - 0.02 * aux[i]) < 1e-6);
    }
    assert_train(&s, 0, "off", "--max-steps 1 --router-aux-loss-coef 0");
    assert_said(&s, "may come to favour few experts");
    assert_null(json_object_get(last_metrics(&s, "off"), "aux_loss"));
}

TEST_IN(is_refused_without_experts, scene_open)
{
    assert_train(s, 1, "dense", "--max-steps 1 --router-aux-loss-coef 0.1");
    assert_said(s, "is no mixture of experts");
}

// Rows of both ranks are one batch: the loss is one of all, not one of each.
TEST(ranks_share_it)
{
    struct pair p = {0};
    double one[2], both[2], loss[2], policy[2];
    const char *const *options = args("--max-steps 1 --entropy-coef 1e-9");
    if (!on_cpu()) test_skip("ranks of mpirun are on the CPU");
    scene_open_model(&p.s, mixture(), NULL);
    pair_open_other(&p, NULL);
    assert_exit(0, pair_run(&p, "both", options));
    assert_exit(0, train(&p.s, "one", options));
    assert_int_equal(column(&p.s, "one", "aux_loss", one, 2), 1);
    assert_int_equal(column(&p.s, "both", "aux_loss", both, 2), 1);
    column(&p.s, "both", "loss", loss, 2);
    column(&p.s, "both", "policy_loss", policy, 2);
    // other micro-batches, and the first of the two has moved the weights by one step
    assert_true(fabs(both[0] - one[0]) < 0.1);
    assert_true(fabs(loss[0] - policy[0] - 0.02 * both[0]) < 1e-6);
}
