/* test_exact.c: cw-infer-server --exact and cw-trainer --exact on the tests' device: the trainer's
 * log-probabilities are the sampler's to the bit in every step, while prompts are prefilled in
 * small chunks and found in the prefix cache, samples are preempted, and drafts are verified. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

enum { STEPS = 20 };

static bool on_cpu(void)
{
    return strcmp(test_device(), "cpu") == 0;
}

static double counter(const struct scene *s, const char *series)
{
    struct wire_answer a;
    daemon_request(s->daemon.socket, "GET", "/metrics", "", NULL, &a);
    assert_int_equal(a.status, 200);
    const char *line = bytes_text(&a.body);
    while (line && strncmp(line, series, strlen(series)) != 0) {
        line = strchr(line, '\n');
        if (line) line++;
    }
    if (!line) fail_msg("no series %s", series);
    double value = atof(strchr(line, ' '));
    return value;
}

// The scene's server in exact mode, in the dtype that the device computes exactly in.
static void restart_server(struct scene *s, const char *const more[])
{
    const char *options[32] = {"--exact", "--dtype", daemon_exact_dtype()};
    int n = 3;
    while (*more) options[n++] = *more++;
    options[n] = NULL;
    daemon_kill(&s->daemon);
    daemon_start(&s->daemon, s->model, options);
}

static void assert_no_mismatch(const struct scene *s, const char *run)
{
    double mismatch[STEPS + 1], mean[STEPS + 1];
    assert_int_equal(column(s, run, "sampler_mismatch/max", mismatch, STEPS + 1), STEPS);
    assert_int_equal(column(s, run, "entropy", mean, STEPS + 1), STEPS);
    for (int i = 0; i < STEPS; i++) {
        if (mismatch[i] != 0)
            fail_msg("step %d on %s: sampler_mismatch/max %g", i + 1, test_device(), mismatch[i]);
        assert_true(mean[i] > 0);
    }
}

TEST_IN(everything_at_once, scene_open)
{
    struct bytes lines = BYTES_INIT;
    for (int a = 0; a < 20; a++) // with a beginning to be found in the prefix cache
        bytes_printf(&lines, "{\"prompt\": \"the sum %d+3=\", \"answer\": \"%d\"}\n", a, a + 3);
    test_write(s.data, lines.data, lines.len);
    bytes_release(&lines);
    // 64 tokens of keys and values, where a batch would like to have 250
    restart_server(&s, OPTIONS("--block-size", "4", "--prefill-chunk", "5", "--max-batch", "8",
                               "--max-context", "48", "--kv-memory", on_cpu() ? "32K" : "16K",
                               "--speculative", "ngram:4,suffix:8"));
    assert_exit(0, train(&s, "run",
                         OPTIONS("--exact", "--max-steps", "20", "--max-completion-length", "24",
                                 "--temperature", "0.7", "--save-steps", "0")));
    assert_no_mismatch(&s, "run");
    assert_true(counter(&s, "vllm:num_preemptions_total") > 0);
    assert_true(counter(&s, "vllm:prefix_cache_hits_total") > 0);
    assert_true(counter(&s, "vllm:spec_decode_num_accepted_tokens_total") > 0);
    assert_int_equal(daemon_stop(&s.daemon), 0);
}

// Without any of that too, and the weights end as they did with it.
TEST_IN(ends_as_without, scene_open)
{
    const char *const run[] = {"--exact", "--max-steps", "20", "--save-steps", "0", NULL};
    restart_server(&s, OPTIONS("--prefix-cache", "off"));
    assert_int_equal(train(&s, "plain", run), 0);
    restart_server(&s, OPTIONS("--block-size", "4", "--prefill-chunk", "3", "--max-batch", "5",
                               "--speculative", "ngram:4,suffix:8"));
    assert_int_equal(train(&s, "other", run), 0);
    assert_no_mismatch(&s, "plain");
    assert_no_mismatch(&s, "other");
    test_same_file(latest(&s, "plain"), latest(&s, "other"), "model.safetensors");
}

// What --exact cannot promise it refuses, and says where it could.
TEST(f32_on_cuda_is_refused)
{
    if (on_cpu()) test_skip("needs a GPU");
    struct scene s;
    scene_open(&s);
    daemon_kill(&s.daemon);
    daemon_spawn(&s.daemon, s.model, OPTIONS("--exact", "--dtype", "f32"));
    assert_int_equal(test_wait(&s.daemon.child, LIMIT_MS), 1);
    char *log = test_read(s.daemon.log);
    assert_contains(log, "bf16 on a GPU of compute capability 9.0");
}
