/* test_tinker.c: cw-trainer serve, by a client of the Tinker API without Python: a session from
 * beginning to end, numbers that come twice or in another order, gradients that add up, snapshots,
 * checkpoints over restarts, what is refused, and each process's death. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"

static void start(const char *const more[])
{
    tinker_pair_start(NULL, args("--exact --dtype %s", daemon_exact_dtype()), more);
    trained = tinker_whole();
}

static json_t *sample(int seq_id, const char *sampler, int status, const char *more)
{
    return tinker_sample(sampler, seq_id, status, 4, more);
}

// ---- a session ----------------------------------------------------------------------------------

// Sampled, scored and trained log-probabilities are one number: the trainer's and the server's.
TINKER_TEST(test_session)
{
    const char *sampler;
    float scored[3], learnt[TINKER_N];
    start(NULL);
    tinker_post("client/config", 200, "{\"sdk_version\":\"0\"}");
    json_t *info = tinker_post("get_info", 200, "{\"model_id\":\"%s\"}", trained.id);
    assert_int_equal(int_of(info, "lora_rank"), 0);
    sampler = tinker_run_snapshot(&trained, "");
    json_t *future =
        sample(0, sampler, 200, ",\"prompt_logprobs\":true,\"topk_prompt_logprobs\":2");
    assert_int_equal(json_array_size(json_object_get(future, "sample_sequence_ids")), 1);
    json_t *poll = tinker_post("retrieve_futures", 200,
                               "{\"target\":{\"type\":\"sampling_session\",\"sampling_session_id\":"
                               "\"%s\",\"cloned_sampler_id\":0},\"prev_cursor\":0}",
                               sampler);
    const json_t *completion = json_at(poll, "completions.0");
    assert_string_equal(text_of(completion, "request_id"), text_of(future, "request_id"));
    const struct tinker_sampled got = tinker_sampled(future);
    const int32_t *sampled = got.tokens;
    assert_int_equal(got.n, 4);
    assert_int_equal(tinker_field(got.message, 2).len, sizeof scored);
    memcpy(scored, tinker_field(got.message, 2).data, sizeof scored);
    assert_true(isnan(scored[0]));
    const struct proto_span top = tinker_field(got.message, 3);
    assert_int_equal(tinker_field(top, 1).len, 3 * 2 * sizeof(int32_t));

    int32_t input[TINKER_N] = {10, 20, 30, sampled[0], sampled[1], sampled[2]};
    int64_t wanted[TINKER_N] = {20, 30, sampled[0], sampled[1], sampled[2], sampled[3]};
    const struct tinker_datum datum = {
        TINKER_N, input, wanted, {"weights"}, {tinker_one.inputs[0]}};
    const double before = tinker_run_learn(&trained, &datum, learnt);
    if (on_cpu() || strcmp(daemon_exact_dtype(), "bf16") == 0) {
        assert_memory_equal(learnt, scored + 1, 2 * sizeof(float));
        assert_memory_equal(learnt + 2, got.logprobs, 4 * sizeof(float));
    }
    assert_true(tinker_run_step(&trained, 1e-3) > 0);
    const double after = tinker_run_score(&trained, &datum, learnt);
    assert_true(after < before);
    tinker_finish(session);
}

// ---- numbers ------------------------------------------------------------------------------------

TINKER_TEST(test_numbers)
{
    float unused[TINKER_N];
    start(NULL);
    // behind a gap: held, and done once the gap is filled
    json_t *late = tinker_post("optim_step", 200,
                               "{\"model_id\":\"%s\",\"seq_id\":2,\"adam_params\":{"
                               "\"learning_rate\":0}}",
                               trained.id);
    json_t *first = tinker_learn(trained.id, 1, "cross_entropy", false, &tinker_one, 1);
    json_t *again = tinker_learn(trained.id, 1, "cross_entropy", false, &tinker_one, 1);
    assert_true(json_equal(first, again)); // one request, one future
    tinker_logprobs(first, TINKER_N, unused);
    json_t *answer = tinker_retrieve(late);
    const double norm = real_of(answer, "metrics.grad_norm:mean");
    assert_true(norm > 0);
    // nothing was left of the first step's gradients, and a learning rate of 0 moved nothing
    trained.seq_id = 2;
    tinker_run_learn(&trained, &tinker_one, NULL);
    assert_true(tinker_run_step(&trained, 0) == norm);
    tinker_refused(tinker_retrieve(tinker_post("optim_step", 200,
                                               "{\"model_id\":\"%s\",\"seq_id\":5}", trained.id)),
                   "\"adam_params\" is missing");
}

// With --exact the requests that datums come in leave no trace in the gradients: gradients of two
// and a step, or of one with both and a step, give the same bits.
TINKER_TEST(test_adding_up)
{
    const struct tinker_datum both[2] = {tinker_one, tinker_other};
    float unused[2 * TINKER_N], apart[TINKER_N], together[TINKER_N];
    if (strcmp(daemon_exact_dtype(), "f32") != 0)
        test_skip("sums in another order, on this device");
    start(args("--exact"));
    tinker_run_learn(&trained, &both[0], NULL);
    tinker_run_learn(&trained, &both[1], NULL);
    const double norm = tinker_run_step(&trained, 1e-2);
    tinker_run_score(&trained, &tinker_one, apart);

    // another model begins from the model folder again, with a new optimizer
    const struct tinker_run first = trained;
    trained = tinker_begun(tinker_create(session, 1, 200, ""));
    tinker_logprobs(tinker_learn(trained.id, ++trained.seq_id, "cross_entropy", false, both, 2),
                    2 * TINKER_N, unused);
    assert_true(tinker_run_step(&trained, 1e-2) == norm);
    tinker_run_score(&trained, &tinker_one, together);
    assert_memory_equal(apart, together, sizeof apart);
    tinker_refused(
        tinker_retrieve(tinker_learn(first.id, 5, "cross_entropy", true, &tinker_one, 1)),
        "has the weights no more");
}

// ---- snapshots and checkpoints ------------------------------------------------------------------

TINKER_TEST(test_snapshots)
{
    const char *old, *new;
    start(NULL);
    old = tinker_run_snapshot(&trained, "");
    tinker_run_learn(&trained, &tinker_one, NULL);
    tinker_run_step(&trained, 1e-3);
    tinker_refused(sample(0, old, 400, ""), "--snapshots inflight");
    new = tinker_run_snapshot(&trained, "");
    tinker_message(sample(0, new, 200, ""));
    tinker_refused(tinker_sampler(400, "base_model", "model"), "the base model was trained on");
    tinker_refused(sample(1, new, 400, ",\"record_stability_info\":true"),
                   "loss_fn=importance_sampling");
    tinker_refused(tinker_create(session, 3, 400, "\"rank\":32"), "\"rank\" is 32");
}

// Newer weights answer for older ones where that was asked for.
TINKER_TEST(test_snapshots_in_flight)
{
    const char *old;
    start(args("--snapshots inflight"));
    old = tinker_run_snapshot(&trained, "");
    tinker_run_learn(&trained, &tinker_one, NULL);
    tinker_run_step(&trained, 1e-3);
    tinker_message(sample(0, old, 200, ""));
}

// What save_weights has acknowledged outlives a kill -9 of the process, and goes on from there to
// the same bits; the lease is free at once for the next.
TINKER_TEST(test_checkpoints)
{
    float saved[TINKER_N], then[TINKER_N], again[TINKER_N];
    const char *path;
    start(args("--exact"));
    tinker_run_learn(&trained, &tinker_one, NULL);
    tinker_run_step(&trained, 1e-3);
    path = tinker_run_save(&trained, "save_weights", "first");
    tinker_run_learn(&trained, &tinker_one, saved);
    tinker_run_step(&trained, 1e-3);
    tinker_run_score(&trained, &tinker_one, then);
    json_t *list = tinker_get("training_runs", 200);
    assert_string_equal(text_of(list, "training_runs.0.training_run_id"), trained.id);

    json_t *lost = tinker_learn(trained.id, 7, "cross_entropy", true, &tinker_one, 1);
    tinker_pair_kill(args("--exact"));
    tinker_refused(tinker_retrieve(lost), "cw-trainer serve was started anew since");
    tinker_refused(tinker_post("retrieve_futures", 404,
                               "{\"target\":{\"sampling_session_id\":\"%s:sample:0\"}}", session),
                   "cw-trainer serve was started anew since");
    tinker_refused(tinker_post("get_info", 404, "{\"model_id\":\"%s\"}", trained.id),
                   "there is no model");
    trained = tinker_whole();
    trained = tinker_load(1, path);
    tinker_run_learn(&trained, &tinker_one, again);
    assert_memory_equal(again, saved, sizeof saved);
    tinker_run_step(&trained, 1e-3); // by the moments that were saved
    tinker_run_score(&trained, &tinker_one, again);
    assert_memory_equal(again, then, sizeof then);

    const char *owner = path + strlen("tinker://");
    const char *place = test_text("/api/v1/training_runs/%.*s/checkpoints/weights/first",
                                  (int)strcspn(owner, "/"), owner);
    struct wire_answer a;
    tinker_request("DELETE", place, NULL, NULL, &a); // a restore would need it
    assert_int_equal(a.status, 400);
    tinker_run_save(&trained, "save_weights", "second");
    tinker_request("DELETE", place, NULL, NULL, &a);
    assert_int_equal(a.status, 200);
    tinker_refused(tinker_post("load_weights", 404,
                               "{\"session_id\":\"%s\",\"model_seq_id\":5,\"path\":\"%s\","
                               "\"optimizer\":false}",
                               session, path),
                   "there is no checkpoint");
}

// ---- others, and what is broken -----------------------------------------------------------------

TINKER_TEST(test_one_at_a_time)
{
    start(args("--model-names org/one,two --loss-for stable_reinforce=ppo"));
    assert_contains(test_read(pair.server.log), "--loss-for stable_reinforce=ppo: ");
    json_t *all = tinker_get("get_server_capabilities", 200);
    const json_t *models = json_object_get(all, "supported_models");
    static const char *const names[] = {"model", "org/one", "two"};
    assert_int_equal(json_array_size(models), 3);
    for (size_t i = 0; i < 3; i++)
        assert_string_equal(text_of(json_at(models, "%zu", i), "model_name"), names[i]);
    const char *second;
    second = tinker_session();
    tinker_refused(tinker_create(second, 0, 409, ""), "one full fine-tune is trained at a time");
    tinker_finish(session);
    tinker_create(second, 0, 200, "");
    tinker_refused(tinker_post("create_model", 400,
                               "{\"session_id\":\"%s\",\"model_seq_id\":1,\"base_model\":\"a/b\"}",
                               second),
                   "--model-names a/b");
}

static void cancel(const json_t *future, int status)
{
    tinker_post("cancel_future", status, "{\"request_id\":\"%s\"}", text_of(future, "request_id"));
}

static int at_the_server(void)
{
    json_t *health = daemon_get(pair.daemon.socket, "/health", 200);
    return (int)(int_of(health, "running") + int_of(health, "waiting"));
}

// The server stands still and is full of the first request's samples, so that the others wait here.
// One of them is cancelled where it waits; then the first at the server, which makes room; then one
// of two that have gone there together.
TINKER_TEST(test_cancelled)
{
    const char *sampler;
    tinker_pair_start(NULL, args("--max-batch 1 --max-queue 2"), NULL);
    trained = tinker_whole();
    sampler = tinker_run_snapshot(&trained, "");
    daemon_post(pair.daemon.socket, "/bridge/pause", 200, "");
    json_t *first = sample(0, sampler, 200, ",\"num_samples\":3");
    while (at_the_server() < 3) clock_sleep_ms(10);
    json_t *waits = sample(1, sampler, 200, ""), *goes_on = sample(2, sampler, 200, ""),
           *goes = sample(3, sampler, 200, "");
    cancel(waits, 200);
    tinker_refused(tinker_retrieve(waits), "cancelled");
    cancel(first, 200);
    tinker_refused(tinker_retrieve(first), "cancelled");
    while (at_the_server() < 2) clock_sleep_ms(10);
    cancel(goes, 200);
    tinker_refused(tinker_retrieve(goes), "cancelled");
    assert_int_equal(at_the_server(), 1);
    daemon_post(pair.daemon.socket, "/bridge/resume", 200, "");
    tinker_message(goes_on);
    cancel(goes_on, 200); // too late, which is no fault
    json_t *trains = tinker_learn(trained.id, 2, "cross_entropy", true, &tinker_one, 1);
    cancel(trains, 400);
    json_object_set_new(trains, "request_id", json_string("none"));
    cancel(trains, 404);
}

// A client waits for its answer; the server dies: it is told so, and so is whoever comes after.
TEST(test_server_gone)
{
    start(NULL);
    test_kill(&pair.daemon.child, SIGKILL);
    test_wait(&pair.daemon.child, 10000);
    const int64_t deadline = clock_deadline_ns(20000);
    for (int seq_id = 1;; seq_id++) { // what it has not noticed yet it still does
        json_t *answer =
            tinker_post("optim_step", 0, "{\"model_id\":\"%s\",\"seq_id\":%d,\"adam_params\":{}}",
                        trained.id, seq_id);
        if (json_has(answer, "request_id")) answer = tinker_retrieve(answer);
        if (json_object_get(answer, "error")) {
            tinker_refused(answer, "go on from the last checkpoint");
            break;
        }
        assert_true(clock_now_ns() < deadline);
        clock_sleep_ms(50);
    }
}
