/* test_tandem.c: a server with a frozen model beside the one that is trained, and cw-trainer train
 * --tandem on it: with p 1 it is the plain run to the bit; with less both write, each token's
 * log-probability is its author's, and a run that is killed goes on to the same bits, though the
 * KV cache is so small that samples are preempted. What cannot be is refused by name. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tiny_model.h"
#include "tests/support/training.h"

#define STEPS "6"

static const char *frozen; // another model of the tokenizer's

static void open_frozen(struct scene *s)
{
    scene_open(s);
    frozen = daemon_model(test_folder(), true, 12);
}

SCENE_OF_ALL(open_frozen)

static void serve(const char *const options[])
{
    daemon_start(&scene.daemon, scene.model,
                 JOIN(args("--dtype %s", daemon_exact_dtype()), options));
}

// ---- rollouts ----------------------------------------------------------------------------------

// The response's lines, in the order of their samples.
static int roll_out(const char *sampling, json_t *ret[8])
{
    struct wire_answer answer;
    daemon_request(scene.daemon.socket, "POST", "/v1/rollouts", "",
                   test_text("{\"groups\":[{\"prompt\":\"12+34=\",\"n\":4}],\"sampling\":"
                             "{\"max_tokens\":24,\"seed\":5,\"ignore_eos\":true%s}}",
                             sampling),
                   &answer);
    assert_int_equal(answer.status, 200);
    const json_t *lines = json_of_lines(bytes_text(&answer.body));
    json_t *one;
    size_t i;
    memset(ret, 0, 8 * sizeof *ret);
    json_array_foreach (lines, i, one) ret[int_of(one, "sample")] = one;
    return (int)json_array_size(lines);
}

static void assert_same_key(const json_t *a, const json_t *b, const char *key)
{
    const json_t *x = json_object_get(a, key);
    assert_non_null(x);
    assert_true(json_equal(x, json_object_get(b, key)));
}

// How many of a line's tokens are the policy's.
static int sum_mask(const json_t *line)
{
    const json_t *mask = json_object_get(line, "model_mask"), *one;
    size_t i;
    int sum = 0;
    assert_int_equal(json_array_size(mask), json_array_size(json_object_get(line, "token_ids")));
    json_array_foreach (mask, i, one) sum += (int)json_integer_value(one);
    return sum;
}

// One model's own numbers of a line's tokens: those of the prompt that ends with them. With
// "tandem", p 0, it is the frozen model's rollout; here the policy's.
TEST(lines_name_their_authors)
{
    json_t *plain[8], *one[8], *half[8], *same[8];
    serve(OPTIONS("--tandem-model", frozen));
    assert_int_equal(roll_out("", plain), 4);
    assert_int_equal(roll_out(",\"tandem\":{\"p\":1}", one), 4);
    assert_int_equal(roll_out(",\"tandem\":{}", half), 4);
    assert_int_equal(roll_out(",\"tandem\":{\"selector\":\"bernoulli\",\"p\":0.5}", same), 4);
    int policy = 0;
    for (int i = 0; i < 4; i++) {
        assert_null(json_object_get(plain[i], "model_mask"));
        assert_same_key(plain[i], one[i], "token_ids");
        assert_same_key(plain[i], one[i], "logprobs");
        assert_same_key(half[i], same[i], "token_ids");
        assert_same_key(half[i], same[i], "logprobs");
        assert_same_key(half[i], same[i], "model_mask");
        assert_int_equal(sum_mask(one[i]), 24);
        policy += sum_mask(half[i]);
    }
    assert_in_range(policy, 20, 76); // of 96
}

static void assert_bad_request(const char *path, const char *body, const char *part)
{
    json_t *answer = daemon_post(scene.daemon.socket, path, 400, body);
    assert_contains(text_of(answer, "error.message"), part);
}

TEST(bad_fields_are_named)
{
    const json_t *bad = test_rows("tandem", "bad_fields_are_named");
    for (size_t i = 0; i < json_array_size(bad); i++)
        assert_bad_request("/v1/rollouts",
                           test_text("{\"groups\":[{\"prompt\":\"1+2=\"}],\"sampling\":{%s}}",
                                     row_text(bad, i, "sampling")),
                           row_text(bad, i, "part"));
    assert_bad_request("/v1/completions", "{\"prompt\":\"1\",\"tandem\":{}}", "\"tandem\"");
    assert_bad_request("/inference/v1/generate",
                       "{\"token_ids\":[1],\"sampling_params\":{\"tandem\":{}}}", "/v1/rollouts");
}

TEST(the_bridge_lists_it)
{
    daemon_holds(&scene.daemon, "policy", scene.model);
    daemon_holds(&scene.daemon, "frozen", frozen);
    const char *const *check = OPTIONS(test_binary("cw-ipc-check"), scene.daemon.bridge);
    scene_ended(&scene, scene_run(&scene, check), 0);
}

// ---- training ----------------------------------------------------------------------------------

TEST(with_p_1_it_is_the_plain_run)
{
    serve(OPTIONS("--tandem-model", scene.model)); // the model that is trained, as it was
    assert_train(&scene, 0, "plain", "--max-steps " STEPS);
    assert_train(&scene, 0, "p-1", "--max-steps " STEPS " --tandem --tandem-p 1 --eval-data %s",
                 scene.data);
    assert_said(&scene, "writes with the policy: selector bernoulli, p 1");
    test_same_file(latest(&scene, "plain"), latest(&scene, "p-1"), "model.safetensors");
    test_same_file(latest(&scene, "plain"), latest(&scene, "p-1"), "trainer/optimizer.safetensors");
    json_t *plain = last_metrics(&scene, "plain"), *m = last_metrics(&scene, "p-1");
    assert_null(json_object_get(plain, "tandem/primary_token_fraction"));
    assert_true(metric(m, "tandem/primary_token_fraction") == 1);
    assert_true(metric(m, "tandem/frozen_token_fraction") == 0);
    assert_true(metric(m, "loss") == metric(plain, "loss"));
    daemon_holds(&scene.daemon, "frozen", scene.model); // trained on, it stays
}

// The same rollouts, of which the frozen model's tokens count as its policy's, twice as much, or
// not.
TEST(the_frozen_models_tokens_have_their_weight)
{
    static const char *const weights[] = {"0", "1", "2"};
    double norms[3], rewards[3];
    for (int i = 0; i < 3; i++) {
        serve(args("--exact --tandem-model %s", frozen));
        assert_train(&scene, 0, weights[i],
                     "--max-steps 1 --tandem --exact --tandem-frozen-weight %s", weights[i]);
        json_t *m = last_metrics(&scene, weights[i]);
        assert_true(metric(m, "tandem/frozen_token_fraction") > 0);
        norms[i] = metric(m, "grad_norm");
        rewards[i] = metric(m, "reward");
    }
    assert_true(rewards[0] == rewards[1] && rewards[1] == rewards[2]);
    assert_true(norms[0] > 0 && norms[1] > 0 && norms[2] > 0);
    assert_true(norms[0] != norms[1] && norms[1] != norms[2] && norms[0] != norms[2]);
}

// Tokens of a step's rollouts, and those that they mark as the policy's.
static void count_logged(const char *run, const char *file, int *ret_tokens, int *ret_policy)
{
    const char *path = test_path(test_path(scene.folder, run), file);
    const json_t *samples = json_of_lines_file(path), *sample, *one;
    size_t i, k;
    *ret_tokens = *ret_policy = 0;
    json_array_foreach (samples, i, sample) {
        const json_t *mask = json_object_get(sample, "model_mask");
        json_array_foreach (mask, k, one) *ret_policy += json_integer_value(one) == 1;
        assert_int_equal(json_array_size(mask), int_of(sample, "tokens"));
        *ret_tokens += (int)json_array_size(mask);
    }
}

static void assert_fractions(const char *run)
{
    int tokens, policy;
    json_t *m = last_metrics(&scene, run);
    count_logged(run, "rollouts/step-6.jsonl", &tokens, &policy);
    assert_true(policy > 0 && policy < tokens);
    assert_true(fabs(metric(m, "tandem/primary_token_fraction") - (double)policy / tokens) < 1e-9);
    assert_true(fabs(metric(m, "tandem/frozen_token_fraction") - 1 + (double)policy / tokens) <
                1e-9);
    // Over the policy's tokens, where sampler and trainer agree to the bit; the frozen model's
    // numbers would be far off.
    assert_true(metric(m, "sampler_mismatch/max") == 0);
    assert_true(metric(m, "sampler_mismatch/mean") == 0);
    assert_true(metric(m, "importance_ratio/mean") == 1);
}

#define TANDEM                                                                                     \
    "--max-steps " STEPS " --tandem --tandem-selector chunk --tandem-chunk 3 --exact "             \
    "--log-completions --max-completion-length 24 --num-generations 6 --save-steps 2"

// A kill in the middle; and a server that has no room for all samples of a step.
TEST(killed_and_preempted_it_comes_to_the_same_bits)
{
    struct test_child child = {0};
    serve(args("--exact --tandem-model %s", frozen));
    assert_train(&scene, 0, "whole", TANDEM);
    assert_fractions("whole");
    serve(args("--exact --tandem-model %s --max-context 40 --kv-memory 64K --block-size 4 "
               "--prefill-chunk 5",
               frozen));
    start_trainer(&scene, &child, "killed", args(TANDEM));
    wait_for_steps(&scene, "killed", 3, &child);
    kill(child.pid, SIGKILL);
    test_wait(&child, LIMIT_MS);
    assert_train(&scene, 0, "killed", TANDEM " --resume");
    assert_fractions("killed");
    test_same_file(latest(&scene, "whole"), latest(&scene, "killed"), "model.safetensors");
    assert_true(daemon_metric(&scene.daemon, "vllm:num_preemptions_total") > 0);
}

// An adapter of the policy's is none of the frozen model's.
TEST(adapters_are_the_policy_s)
{
    serve(args("--tandem-model %s --max-adapters 1", frozen));
    assert_train(&scene, 0, "lora",
                 "--max-steps " STEPS " --tandem --lora-r 4 --log-completions --no-tandem-shared");
    assert_fractions("lora");
    daemon_holds(&scene.daemon, "policy", scene.model);
    daemon_holds(&scene.daemon, "frozen", frozen);
}

// ---- what is refused ---------------------------------------------------------------------------

TEST(without_a_frozen_model_it_is_refused)
{
    serve(NULL);
    assert_bad_request("/v1/rollouts",
                       "{\"groups\":[{\"prompt\":\"1+2=\"}],\"sampling\":{\"tandem\":{}}}",
                       "--tandem-model");
    assert_train(&scene, 1, "no", "--tandem --max-steps 1");
    assert_said(&scene, "cw-infer-server --tandem-model DIR");
    assert_train(&scene, 0, "idle", "--tandem-p 1 --max-steps 1");
    assert_said(&scene, "--tandem-p has no effect without --tandem");
}

static void assert_start_refused(const char *folder, const char *part)
{
    struct daemon d = {0};
    daemon_spawn(&d, scene.model, OPTIONS("--tandem-model", folder));
    assert_int_equal(test_wait(&d.child, LIMIT_MS), 1);
    assert_contains(test_read(d.log), part);
}

TEST(other_models_are_refused)
{
    const char *demo = test_path(test_root(), "tools/demo-model"), *brief = test_folder();
    const struct tiny_model shape = {
        .hidden = 32, .layers = 1, .vocab = 300, .max_positions = 64, .eos_id = -1, .seed = 9};
    assert_ok(tiny_model_write_as(brief, &shape));
    assert_start_refused(demo, "a frozen model must be of the same tokenizer");
    assert_start_refused(brief, "it has a context of 64 tokens");
}
