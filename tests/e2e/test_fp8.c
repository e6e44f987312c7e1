/* test_fp8.c: cw-infer-server --quantization fp8-weights or fp8, and --kv-cache-dtype fp8, and
 * trainers on it: the trainer's log-probabilities are the sampler's to the bit, of the policy, of
 * an adapter, and against a reference; a run in two parts ends in the bits of one; and what does
 * not go with it is refused.
 */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#define FP8 "--quantization fp8-weights "

static void restart(struct scene *s, const char *const options[])
{
    daemon_start(&s->daemon, s->model, JOIN(args("--dtype %s", daemon_exact_dtype()), options));
}

static void assert_no_mismatch(const struct scene *s, const char *run, int steps)
{
    each_within(s, run, "sampler_mismatch/max", steps, 0, 0);
    each_within(s, run, "entropy", steps, DBL_MIN, INFINITY);
}

// With drafts, a prefix cache, chunked prompts and the KL term's reference, which begins as the
// policy does; other weights than those without come of it.
static void equal_bits(struct scene *s, const char *quantization)
{
    double kl[21];
    SCOPED(file_map_release) struct file_map a, b;
    restart(s, args("--exact --quantization %s --block-size 4 --prefill-chunk 5 --max-batch 8 "
                    "--speculative ngram:4,suffix:8",
                    quantization));
    json_t *info = daemon_get(s->daemon.socket, "/bridge/info", 200);
    assert_string_equal(json_string_value(json_object_get(info, "quantization")), quantization);
    assert_train(s, 0, "run", "--exact --max-steps 20 --beta 0.05");
    assert_no_mismatch(s, "run", 20);
    assert_int_equal(column(s, "run", "kl", kl, 21), 20);
    assert_true(kl[0] == 0 && kl[19] > 0);
    restart(s, args("--exact --block-size 4"));
    assert_train(s, 0, "plain", "--exact --max-steps 20 --beta 0.05");
    assert_ok(file_map_open(test_path(latest(s, "run"), "model.safetensors"), &a));
    assert_ok(file_map_open(test_path(latest(s, "plain"), "model.safetensors"), &b));
    assert_true(a.len == b.len && memcmp(a.data, b.data, a.len) != 0);
}

TEST_IN(equal_bits_in_every_step, scene_open)
{
    equal_bits(s, "fp8-weights");
}

TEST_IN(equal_bits_of_rows_too, scene_open)
{
    equal_bits(s, "fp8");
}

// Gradients that are rounded move no log-probability, and other weights come of them; nor do they
// where an adapter is trained. Of a model whose rows are not in e4m3 they are refused.
TEST_IN(gradients_in_eight_bits, scene_open)
{
    SCOPED(file_map_release) struct file_map plain, e4m3, e5m2;
    struct file_map *const weights[] = {&plain, &e4m3, &e5m2};
    restart(s, args("--exact " FP8));
    assert_train(s, 1, "none", "--max-steps 1 --gradient-dtype e4m3");
    assert_said(s, "--gradient-dtype e4m3 is of a model whose matrices are multiplied in e4m3 "
                   "(--quantization fp8), and this one has --quantization fp8-weights");
    for (int i = 0; i < 3; i++) {
        const char *dt = gradient_dtype_names[i];
        restart(s, args("--exact --quantization fp8"));
        assert_train(s, 0, dt, "--exact --max-steps 5 --gradient-dtype %s", dt);
        assert_no_mismatch(s, dt, 5);
        assert_ok(file_map_open(test_path(latest(s, dt), "model.safetensors"), weights[i]));
    }
    assert_true(plain.len == e4m3.len && memcmp(plain.data, e4m3.data, plain.len) != 0);
    assert_true(e4m3.len == e5m2.len && memcmp(e4m3.data, e5m2.data, e4m3.len) != 0);
    restart(s, args("--exact --quantization fp8 --max-adapters 1"));
    assert_train(s, 0, "adapter", "--exact --max-steps 5 --lora-r 4 --gradient-dtype e4m3");
    assert_no_mismatch(s, "adapter", 5);
}

// The same of a KV cache in e4m3, which has room for nearly four times the tokens that f32 has.
TEST_IN(equal_bits_with_keys_in_e4m3, scene_open)
{
    SCOPED(file_map_release) struct file_map a, b;
    restart(s, args("--exact --block-size 4 --kv-memory 64K --max-batch 64"));
    assert_train(s, 0, "plain", "--exact --max-steps 10 --beta 0.05");
    const double plain = daemon_metric(&s->daemon, "commonweight:kv_blocks");
    restart(s, args("--exact --kv-cache-dtype fp8 --block-size 4 --prefill-chunk 5 --max-batch 64 "
                    "--speculative ngram:4,suffix:8 --kv-memory 64K"));
    json_t *info = daemon_get(s->daemon.socket, "/bridge/info", 200);
    assert_string_equal(json_string_value(json_object_get(info, "kv_cache_dtype")), "fp8");
    assert_true(daemon_metric(&s->daemon, "commonweight:kv_blocks") >
                (on_cpu() ? 3.5 : 1.75) * plain);
    assert_train(s, 0, "run", "--exact --max-steps 10 --beta 0.05");
    assert_no_mismatch(s, "run", 10);
    assert_ok(file_map_open(test_path(latest(s, "run"), "model.safetensors"), &a));
    assert_ok(file_map_open(test_path(latest(s, "plain"), "model.safetensors"), &b));
    assert_true(a.len == b.len && memcmp(a.data, b.data, a.len) != 0);
}

TEST_IN(an_adapter_beside_it, scene_open)
{
    static const char *const quantizations[] = {"fp8-weights", "fp8"};
    for (int i = 0; i < 2; i++) {
        restart(s, args("--exact --quantization %s --kv-cache-dtype fp8 --max-adapters 1",
                        quantizations[i]));
        assert_train(s, 0, quantizations[i], "--exact --max-steps 8 --lora-r 4");
        assert_no_mismatch(s, quantizations[i], 8);
        // a server that has the codes alone knows it as its own
        restart(s, args("--exact --quantization %s --max-adapters 1 --inference-only",
                        quantizations[i]));
        daemon_call(&s->daemon, "/v1/load_lora_adapter", 200, "added successfully",
                    "{\"lora_name\":\"a\",\"lora_path\":\"%s\"}", latest(s, quantizations[i]));
    }
}

// Another server and another trainer go on from a checkpoint, which holds the weights alone.
TEST_IN(resumes_to_the_bit, scene_open)
{
    restart(s, args("--exact " FP8));
    assert_train(s, 0, "whole", "--exact --max-steps 6");
    restart(s, args("--exact " FP8));
    assert_train(s, 0, "halves", "--exact --max-steps 3 --resume");
    restart(s, args("--exact " FP8));
    assert_train(s, 0, "halves", "--exact --max-steps 6 --resume");
    assert_said(s, "resumed at step 3");
    assert_no_mismatch(s, "halves", 6);
    test_same_file(latest(s, "whole"), latest(s, "halves"), "model.safetensors");
    test_same_file(latest(s, "whole"), latest(s, "halves"), "trainer/optimizer.safetensors");
}

// Log-probabilities of a prompt, by the server that runs.
static json_t *prompt_logprobs(const struct scene *s)
{
    const char *body = "{\"prompt\":[5,53,10,51,48,28,57,100],\"max_tokens\":6,"
                       "\"temperature\":0,\"prompt_logprobs\":0,\"logprobs\":1}";
    json_t *choice = json_array_get(
        json_object_get(daemon_post(s->daemon.socket, "/v1/completions", 200, body), "choices"), 0);
    return json_pack("{s:O, s:O}", "prompt", json_object_get(choice, "prompt_logprobs"), "tokens",
                     json_object_get(choice, "logprobs"));
}

// The codes alone give what both copies give, in fewer bytes and after /reload; nobody may train.
TEST_IN(without_the_numbers, scene_open)
{
    json_t *info[2], *logprobs[2], *reloaded[2];
    assert_train(s, 0, "run", "--max-steps 3 --learning-rate 1e-2");
    for (int i = 0; i < 2; i++) {
        restart(s, i ? args(FP8 "--inference-only") : args(FP8));
        info[i] = daemon_get(s->daemon.socket, "/bridge/info?checksums=1", 200);
        logprobs[i] = prompt_logprobs(s);
        daemon_post(s->daemon.socket, "/reload", 200,
                    test_text("{\"model\":\"%s\"}", latest(s, "run")));
        reloaded[i] = prompt_logprobs(s);
    }
    assert_true(json_equal(logprobs[0], logprobs[1]));
    assert_true(json_equal(reloaded[0], reloaded[1]));
    assert_false(json_equal(logprobs[0], reloaded[0]));
    assert_true(int_of(info[1], "weight_bytes") < int_of(info[0], "weight_bytes"));
    assert_int_equal(int_of(info[0], "num_tensors"), int_of(info[1], "num_tensors"));
    assert_int_equal(json_array_size(json_object_get(info[1], "checksums")),
                     int_of(info[1], "num_tensors"));
    assert_train(s, 1, "other", "--max-steps 1");
    assert_said(s, "the server was started with --inference-only");
    assert_contains(test_output(1, OPTIONS(test_binary("cw-ipc-check"), s->daemon.bridge)),
                    "was started with --inference-only");
    for (int i = 0; i < 2; i++) {
        json_decref(logprobs[i]);
        json_decref(reloaded[i]);
    }
}

// Weights of the trainer's own are multiplied alike by it and by the servers that it starts.
TEST_IN(weights_of_the_trainer, scene_open_exact)
{
    for (int i = 0; i < 2; i++) {
        const char *quantization = i ? "fp8" : "fp8-weights";
        assert_int_equal(0, train_on(s, quantization,
                                     args("--model %s --device %s --max-steps 3 --sync checkpoint "
                                          "--quantization %s",
                                          s->model, test_device(), quantization)));
        each_within(s, quantization, "sampler_mismatch/max", 3, 0, 0);
    }
    assert_int_equal(0, train_on(s, "plain",
                                 args("--model %s --device %s --max-steps 3 --sync checkpoint",
                                      s->model, test_device())));
    double loss[2][4];
    column(s, "plain", "entropy", loss[0], 4);
    column(s, "fp8-weights", "entropy", loss[1], 4);
    assert_true(loss[0][0] != loss[1][0]);
}

TEST_IN(what_does_not_go_with_it, scene_open)
{
    struct daemon worker = {0};
    assert_train(s, 0, "plain", "--max-steps 1");
    restart(s, args(FP8));
    daemon_start(&worker, s->model, NULL);
    assert_train(s, 1, "run", "--max-steps 1 --workers %s", worker.bridge);
    assert_said(s, "it serves with --quantization none, and what is trained has fp8-weights");
    daemon_kill(&worker);
    assert_train(s, 1, "plain", "--max-steps 2 --resume");
    assert_said(s, "was made on a server with --quantization none, and this one has fp8-weights");
    restart(s, args("--quantization fp8"));
    daemon_start(&worker, s->model, args("--dtype %s " FP8, daemon_exact_dtype()));
    assert_train(s, 1, "other", "--max-steps 1 --workers %s", worker.bridge);
    assert_said(s, "it serves with --quantization fp8-weights, and what is trained has fp8");
    daemon_kill(&worker);
    assert_int_equal(1, train_on(s, "own",
                                 args("--model %s --max-steps 1 --sync checkpoint --server-args %s",
                                      s->model, FP8)));
    assert_said(s, "are this process's own, whose --quantization the server is given too");
    assert_train(s, 2, "flag", "--max-steps 1 --quantization fp8");
    assert_said(s, "--quantization fp8 needs --sync checkpoint, else --bridge's server says (with "
                   "--gpus or --ranks: --server-args)");
    restart(s, args("--kv-cache-dtype fp8"));
    assert_train(s, 1, "plain", "--max-steps 2 --resume");
    assert_said(s, "was made on a server with --kv-cache-dtype auto, and this one has fp8");
    daemon_start(&worker, s->model, NULL);
    assert_train(s, 1, "other", "--max-steps 1 --workers %s", worker.bridge);
    assert_said(s, "it serves with --kv-cache-dtype auto, and what is trained has fp8");
    daemon_kill(&worker);
}
