/* test_trained_exact.c: every model of tests/golden, trained by GRPO with --exact beside its
 * server, which drafts, prefills in chunks, finds prompts in its prefix cache and preempts: the
 * trainer's log-probabilities are the sampler's to the bit in every step, while the weights change.
 * On a GPU (COMMONWEIGHT_TEST_DEVICE) 50 steps in bf16. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reference.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/training.h"

enum { MAX_STEPS = 50 };

#define STEPS "--exact --max-steps %d --temperature 0.7 --ignore-eos --save-steps 0"

static void train_model(const char *model, const char *const numbers[], const char *options)
{
    const int n_steps = on_cpu() ? 2 : MAX_STEPS;
    double mismatch[MAX_STEPS + 1], entropy[MAX_STEPS + 1];
    struct scene s;
    scene_open_model(&s, tiny_tokenizer_beside(model),
                     JOIN(args("--dtype %s --exact --block-size 4 --prefill-chunk 3 --max-batch 8 "
                               "--max-context 48 --speculative ngram:4,suffix:8",
                               daemon_exact_dtype()),
                          numbers));
    assert_train(&s, 0, "run", options, n_steps);
    assert_int_equal(column(&s, "run", "sampler_mismatch/max", mismatch, n_steps + 1), n_steps);
    assert_int_equal(column(&s, "run", "entropy", entropy, n_steps + 1), n_steps);
    for (int i = 0; i < n_steps; i++) {
        if (mismatch[i] != 0) fail_msg("step %d: sampler_mismatch/max %g", i + 1, mismatch[i]);
        assert_true(entropy[i] > 0);
    }
    scene_end(&s);
}

// Adapters beside experts in four bits, which themselves nobody trains.
static void in_four_bits(void **state)
{
    const char *model = test_golden("gpt-oss-mxfp4");
    struct scene s;
    (void)state;
    train_model(model, args("--quantization mxfp4 --max-adapters 1"), STEPS " --lora-r 4");
    scene_open_model(&s, tiny_tokenizer_beside(model), args("--quantization mxfp4"));
    assert_train(&s, 1, "whole", "--max-steps 1");
    assert_contains(test_read(test_path(s.folder, "trainer.log")), "train an adapter beside them");
    scene_end(&s);
}

static void one_model(void **state)
{
    reference_skip_inexact(*state);
    train_model(*state, NULL, STEPS);
}

static void in_e4m3(void **state)
{
    reference_skip_inexact(*state);
    train_model(*state, args("--quantization fp8-weights"), STEPS);
}

static void with_kv_in_e4m3(void **state)
{
    reference_skip_inexact(*state);
    train_model(*state, args("--kv-cache-dtype fp8"), STEPS);
}

static void both_in_e4m3(void **state)
{
    reference_skip_inexact(*state);
    train_model(*state, args("--quantization fp8-weights --kv-cache-dtype fp8"), STEPS);
}

static void rounded(void **state)
{
    reference_skip_inexact(*state);
    train_model(*state, args("--quantization fp8"), STEPS " --gradient-dtype e4m3");
}

int main(int argc, char **argv)
{
    test_only(argc, argv);
    reference_list_golden(one_model, "");
    reference_list_golden(rounded, " in e4m3, rows too");
    // On the CPU, whose time is short, weights with keys and values alone: no path is another.
    if (!on_cpu()) reference_list_golden(in_e4m3, " in e4m3");
    if (!on_cpu()) reference_list_golden(with_kv_in_e4m3, " with keys and values in e4m3");
    reference_list_golden(both_in_e4m3, " all in e4m3");
    test_list(0, (struct CMUnitTest){"gpt-oss-mxfp4 in four bits", in_four_bits, NULL, NULL, NULL});
    return test_main();
}
