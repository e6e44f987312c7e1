/* test_bench.c: cw-bench speculative on a tiny model with a draft model: the form of its report,
 * and what must hold of the figures whatever the machine; never a time. And what a limit counts of
 * a model with experts. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/variants.h"
#include "tests/support/daemon.h"
#include "tests/support/support.h"

static char *run(int status, const char *model, const char *draft, const char *methods)
{
    return test_output(status, args("%s speculative --model %s --draft %s --methods %s --batches "
                                    "1,6 --group 3 --tokens 12 --rounds 2 --device cpu --json",
                                    test_binary("cw-bench"), model, draft, methods));
}

static void check_row(const json_t *row, int batch, const char *method)
{
    const double drafts = json_real_value(json_object_get(row, "draft_tokens_per_step"));
    const json_t *rate = json_object_get(row, "accept_rate");
    assert_int_equal(int_of(row, "batch"), batch);
    assert_string_equal(text_of(row, "method"), method);
    assert_true(json_real_value(json_object_get(row, "tokens_per_s")) > 0);
    const double low = json_real_value(json_object_get(row, "ratio_quartile_1"));
    const double ratio = json_real_value(json_object_get(row, "ratio_to_off"));
    assert_true(0 < low && low <= ratio);
    assert_true(ratio <= json_real_value(json_object_get(row, "ratio_quartile_3")));
    if (strcmp(method, "off") == 0) assert_true(drafts == 0 && ratio == 1);
    if (strncmp(method, "fixed-", 6) == 0) assert_true(drafts > 0);
    if (drafts == 0) {
        assert_true(json_is_null(rate));
        return;
    }
    assert_true(json_real_value(rate) >= 0 && json_real_value(rate) <= 1);
    assert_true(json_real_value(json_object_get(row, "mean_acceptance_length")) >= 1);
}

TEST(methods_are_compared)
{
    static const char *const methods[] = {"off", "ngram:3", "fixed-draft_model:2",
                                          "suffix:8+ngram:2"};
    const char *model = daemon_model(test_folder(), true, 5);
    const json_t *report =
        json_of(run(0, model, model, "ngram:3,fixed-draft_model:2,suffix:8+ngram:2"));
    assert_string_equal(text_of(report, "benchmark"), "speculative");
    assert_int_equal(int_of(report, "tokens"), 12);
    const json_t *results = json_object_get(report, "results");
    assert_int_equal(json_array_size(results), 8);
    for (size_t i = 0; i < 8; i++)
        check_row(json_array_get(results, i), i < 4 ? 1 : 6, methods[i % 4]);
}

// A model that carries states along has room for those of the batch and of its drafts.
TEST(states_have_room)
{
    const char *config = test_path(test_root(), "tests/golden/mtp/qwen35/config.json");
    const json_t *report = json_of(test_output(
        0,
        args("%s speculative --config %s --methods fixed-mtp:2 --batches 4 --group 2 --tokens 12 "
             "--prompt-tokens 8 --rounds 1 --repeats 1 --warmup-rounds 0 --device cpu --json",
             test_binary("cw-bench"), config)));
    const json_t *row = json_array_get(json_object_get(report, "results"), 1);
    check_row(row, 4, "fixed-mtp:2");
    assert_true(json_real_value(json_object_get(row, "draft_tokens_per_step")) > 4);
}

#define CONVERSATIONS                                                                              \
    "%s train --turns 4 --read 40 --sampled 16 --kept 10 --batch 2 --steps 1 --warmup 0 "          \
    "--device cpu --json --model %s --shared "

TEST(conversations_share_what_is_asked_for)
{
    const char *bench = test_binary("cw-bench"), *model = daemon_model(test_folder(), false, 5);
    const json_t *report = json_of(test_output(0, args(CONVERSATIONS "45", bench, model)));
    assert_near(json_real_value(json_object_get(report, "shared")), 0.45, 0.002);
    assert_contains(test_output(1, args(CONVERSATIONS "99", bench, model)),
                    "--shared 99: these conversations can share");
}

TEST(bad_methods_are_named)
{
    const char *model = daemon_model(test_folder(), true, 5);
    char *said = run(1, model, model, "ngram:3,guess:2");
    assert_contains(said, "--methods");
    assert_contains(said, "guess:2");
}

TEST(too_many_tokens_are_named_by_their_option)
{
    const char *model = test_path(test_root(), "tools/demo-model"); // 128 positions
    char *said = test_output(1, args("%s speculative --model %s --methods off --device cpu",
                                     test_binary("cw-bench"), model));
    assert_contains(said, "--tokens 128");
    assert_null(strstr(said, "--max-context"));
}

// Operations of a pass, as its limit counts them, of a model with n experts of which a row is given
// to two.
static double operations(const char *folder, int n)
{
    const char *config = test_path(folder, "config.json");
    json_t *object = test_keep(json_pack(
        "{s:[s], s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:b}", "architectures",
        "Qwen3MoeForCausalLM", "model_type", "qwen3_moe", "vocab_size", 64, "hidden_size", 32,
        "intermediate_size", 64, "moe_intermediate_size", 64, "num_hidden_layers", 2,
        "num_attention_heads", 2, "num_key_value_heads", 1, "num_experts", n, "num_experts_per_tok",
        2, "norm_topk_prob", 1, "tie_word_embeddings", 1));
    assert_int_equal(json_dump_file(object, config, 0), 0);
    const json_t *report =
        json_of(test_output(0, args("%s prefill --config %s --device cpu --batch 2 --context 8 "
                                    "--steps 1 --warmup 0 --json",
                                    test_binary("cw-bench"), config)));
    const double work = json_real_value(json_object_get(report, "limit_ms")) *
                        json_real_value(json_object_get(report, "product_tflops"));
    return work;
}

// Twenty-eight more experts cost a row no more than their router.
TEST(experts_that_rest_are_no_work)
{
    const double few = operations(test_folder(), 4), many = operations(test_folder(), 32);
    assert_true(few > 0 && many > few && many < 1.2 * few);
}

// Every operation has a row, and one that was called is timed.
TEST(variants_are_printed)
{
    size_t i;
    json_t *row;
    int timed = 0;
    bool found[N_OPS] = {false};
    const json_t *rows =
        json_at(json_of(test_output(0, args("%s ops --variants --json --device %s",
                                            test_binary("cw-bench"), test_device()))),
                "rows");
    json_array_foreach (rows, i, row) {
        const char *name = text_of(row, "op");
        for (int op = 0; op < N_OPS; op++)
            found[op] = found[op] || strcmp(name, op_name((enum op)op)) == 0;
        timed += json_real_value(json_object_get(row, "us")) > 0;
    }
    for (int op = 0; op < N_OPS; op++) assert_int_equal(found[op], op != OP_scratch_bytes);
    assert_true(timed >= 10);
}
