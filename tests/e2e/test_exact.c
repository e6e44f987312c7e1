/* test_exact.c: cw-infer-server --exact and cw-trainer --exact on the tests' device: the trainer's
 * log-probabilities are the sampler's to the bit in every step, while prompts are prefilled in
 * small chunks and found in the prefix cache, samples are preempted, and drafts are verified. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

enum { STEPS = 20 };

// The scene's server in exact mode, in the dtype that the device computes exactly in.
static void restart_server(struct scene *s, const char *const more[])
{
    daemon_start(&s->daemon, s->model,
                 JOIN(args("--exact --dtype %s", daemon_exact_dtype()), more));
}

static void assert_no_mismatch(const struct scene *s, const char *run)
{
    each_within(s, run, "sampler_mismatch/max", STEPS, 0, 0);
    each_within(s, run, "entropy", STEPS, DBL_MIN, INFINITY);
}

static void everything(struct scene *s, const char *kv_memory, const char *const numbers[])
{
    SCOPED(bytes_release) struct bytes lines = BYTES_INIT;
    for (int a = 0; a < 20; a++) // with a beginning to be found in the prefix cache
        bytes_printf(&lines, "{\"prompt\": \"the sum %d+3=\", \"answer\": \"%d\"}\n", a, a + 3);
    test_write(s->data, lines.data, lines.len);
    // 64 tokens of keys and values, where a batch would like to have 250
    restart_server(s, JOIN(args("--block-size 4 --prefill-chunk 5 --max-batch 8 --max-context 48 "
                                "--kv-memory %s --speculative ngram:4,suffix:8",
                                kv_memory),
                           numbers));
    assert_train(
        s, 0, "run",
        "--exact --max-steps 20 --max-completion-length 24 --temperature 0.7 --save-steps 0");
    assert_no_mismatch(s, "run");
    assert_true(daemon_metric(&s->daemon, "vllm:num_preemptions_total") > 0);
    assert_true(daemon_metric(&s->daemon, "vllm:prefix_cache_hits_total") > 0);
    assert_true(daemon_metric(&s->daemon, "vllm:spec_decode_num_accepted_tokens_total") > 0);
}

TEST_IN(everything_at_once, scene_open)
{
    everything(s, on_cpu() ? "32K" : "16K", NULL);
}

TEST_IN(everything_in_e4m3, scene_open)
{
    everything(s, on_cpu() ? "32K" : "16K", args("--quantization fp8-weights"));
}

TEST_IN(everything_with_keys_in_e4m3, scene_open)
{
    everything(s, "9K", args("--kv-cache-dtype fp8"));
}

TEST_IN(everything_and_its_keys_in_e4m3, scene_open)
{
    everything(s, "9K", args("--kv-cache-dtype fp8 --quantization fp8-weights"));
}

TEST_IN(everything_in_e4m3_rows_too, scene_open)
{
    everything(s, on_cpu() ? "32K" : "16K", args("--quantization fp8"));
}

// Without any of that too, and the weights end as they did with it.
TEST_IN(ends_as_without, scene_open)
{
    const char *const *run = args("--exact --max-steps 20 --save-steps 0");
    restart_server(s, args("--prefix-cache off"));
    assert_int_equal(train(s, "plain", run), 0);
    restart_server(
        s, args("--block-size 4 --prefill-chunk 3 --max-batch 5 --speculative ngram:4,suffix:8"));
    assert_int_equal(train(s, "other", run), 0);
    assert_no_mismatch(s, "plain");
    assert_no_mismatch(s, "other");
    test_same_file(latest(s, "plain"), latest(s, "other"), "model.safetensors");
}

// What --exact cannot promise it refuses, and says where it could.
TEST(f32_on_cuda_is_refused)
{
    if (on_cpu()) test_skip("needs a GPU");
    struct scene s;
    scene_open(&s);
    daemon_spawn(&s.daemon, s.model, args("--exact --dtype f32"));
    assert_int_equal(test_wait(&s.daemon.child, LIMIT_MS), 1);
    assert_contains(test_read(s.daemon.log), "bf16 on a GPU of compute capability 9.0");
}
