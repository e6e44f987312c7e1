/* test_latent.c: a model with latent attention, served and trained by the real processes: the
 * trainer's log-probabilities are the sampler's to the bit in every step, while prompts are
 * prefilled in small chunks and found in the prefix cache, samples are preempted, and drafts are
 * verified. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tiny_latent.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/training.h"

enum { STEPS = 6 };

static const char *write_model(void)
{
    const char *folder = test_folder();
    assert_ok(tiny_latent_write(folder, 4, 300));
    assert_ok(tiny_tokenizer_write(folder));
    return folder;
}

static double counter(const struct scene *s, const char *series)
{
    struct wire_answer a;
    daemon_request(s->daemon.socket, "GET", "/metrics", "", NULL, &a);
    const char *line = strstr(bytes_text(&a.body), series);
    while (line && line > bytes_text(&a.body) && line[-1] != '\n') line = strstr(line + 1, series);
    if (!line) fail_msg("no series %s", series);
    double value = atof(strchr(line, ' '));
    return value;
}

static void learn(struct scene *s, const char *run, const char *const more[])
{
    const char *options[32] = {"--exact", "--max-steps",   "6",  "--max-completion-length",
                               "24",      "--temperature", "0.3"};
    double mismatch[STEPS + 1], mean[STEPS + 1];
    int n = 7;
    while (*more) options[n++] = *more++;
    options[n] = NULL;
    assert_int_equal(train(s, run, options), 0);
    assert_int_equal(column(s, run, "sampler_mismatch/max", mismatch, STEPS + 1), STEPS);
    assert_int_equal(column(s, run, "entropy", mean, STEPS + 1), STEPS);
    for (int i = 0; i < STEPS; i++)
        if (mismatch[i] != 0 || !(mean[i] > 0))
            fail_msg("%s: step %d on %s: mismatch %g, entropy %g", run, i + 1, test_device(),
                     mismatch[i], mean[i]);
}

TEST(sampler_is_the_trainer)
{
    struct scene s;
    SCOPED(bytes_release) struct bytes lines = BYTES_INIT;
    scene_open_model(&s, write_model(),
                     args("--exact --dtype %s --block-size 4 --prefill-chunk 5 --max-batch 8 "
                          "--max-context 48 --kv-memory %s --speculative ngram:4",
                          daemon_exact_dtype(), on_cpu() ? "24K" : "12K"));
    assert_contains(test_read(s.daemon.log),
                    "model.layers.2, which predicts further tokens, is no part of it");
    for (int a = 0; a < 20; a++) // with a beginning to be found in the prefix cache
        bytes_printf(&lines, "{\"prompt\": \"the sum %d+3=\", \"answer\": \"%d\"}\n", a, a + 3);
    test_write(s.data, lines.data, lines.len);
    learn(&s, "run", args("--save-steps 0"));
    assert_true(counter(&s, "vllm:num_preemptions_total") > 0);
    assert_true(counter(&s, "vllm:prefix_cache_hits_total") > 0);
    assert_true(counter(&s, "vllm:spec_decode_num_accepted_tokens_total") > 0);
    daemon_holds(&s.daemon, "policy", latest(&s, "run")); // biases too, as they were loaded
    assert_int_equal(daemon_stop(&s.daemon), 0);
}

// With a frozen model beside it, an adapter is trained, and then the model through tandem.
TEST(adapters_and_tandem)
{
    struct scene s;
    const char *model = write_model();
    scene_open_model(
        &s, model,
        args("--exact --dtype %s --tandem-model %s --max-adapters 1", daemon_exact_dtype(), model));
    learn(&s, "adapter",
          args("--lora-r 4 --lora-target q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj --recompute "
               "layer"));
    daemon_holds(&s.daemon, "policy", model);
    daemon_holds_adapter(&s.daemon, "policy", latest(&s, "adapter"));
    assert_train(&s, 1, "no", "--lora-r 4 --lora-target kv_b_proj");
    assert_said(&s, "adapters of kv_b_proj");
    learn(&s, "tandem", args("--tandem --tandem-p 0.5 --save-steps 0"));
    assert_int_equal(daemon_stop(&s.daemon), 0);
}
