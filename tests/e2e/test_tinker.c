/* test_tinker.c: cw-trainer serve, by a client of the Tinker API without Python: a session from
 * beginning to end, numbers that come twice or in another order, gradients that add up, snapshots,
 * checkpoints over restarts, what is refused, and each process's death. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

static struct tinker_pair pair;
static char session[128];
static struct tinker_run run;

static void start(const char *const more[])
{
    tinker_pair_start(&pair, NULL, OPTIONS("--exact", "--dtype", daemon_exact_dtype()), more);
    run = tinker_whole(&pair.server, session);
}

static json_t *sample(int seq_id, const char *sampler, int status, const char *more)
{
    return tinker_sample(&pair.server, sampler, seq_id, status, 4, more);
}

// ---- a session ----------------------------------------------------------------------------------

// Sampled, scored and trained log-probabilities are one number: the trainer's and the server's.
TEST(test_session)
{
    char sampler[160];
    struct bytes answer = BYTES_INIT;
    int32_t sampled[4];
    float logprobs[4], scored[3], learnt[TINKER_N];
    start(NULL);
    tinker_post(&pair.server, "client/config", 200, "{\"sdk_version\":\"0\"}");
    json_t *info = tinker_post(&pair.server, "get_info", 200, "{\"model_id\":\"%s\"}", run.id);
    assert_int_equal(json_integer_value(json_object_get(info, "lora_rank")), 0);
    tinker_run_snapshot(&run, "", sampler);
    json_t *future =
        sample(0, sampler, 200, ",\"prompt_logprobs\":true,\"topk_prompt_logprobs\":2");
    assert_int_equal(json_array_size(json_object_get(future, "sample_sequence_ids")), 1);
    json_t *poll = tinker_post(&pair.server, "retrieve_futures", 200,
                               "{\"target\":{\"type\":\"sampling_session\",\"sampling_session_id\":"
                               "\"%s\",\"cloned_sampler_id\":0},\"prev_cursor\":0}",
                               sampler);
    const json_t *completion = json_array_get(json_object_get(poll, "completions"), 0);
    assert_string_equal(json_string_value(json_object_get(completion, "request_id")),
                        json_string_value(json_object_get(future, "request_id")));
    tinker_retrieve_bytes(&pair.server, future, &answer);
    const struct proto_span message = {(const unsigned char *)bytes_text(&answer), answer.len};
    const struct proto_span sequence = tinker_field(message, 1);
    assert_int_equal(tinker_field(sequence, 2).len, sizeof sampled);
    memcpy(sampled, tinker_field(sequence, 2).data, sizeof sampled);
    memcpy(logprobs, tinker_field(sequence, 3).data, sizeof logprobs);
    assert_int_equal(tinker_field(message, 2).len, sizeof scored);
    memcpy(scored, tinker_field(message, 2).data, sizeof scored);
    assert_true(isnan(scored[0]));
    const struct proto_span top = tinker_field(message, 3);
    assert_int_equal(tinker_field(top, 1).len, 3 * 2 * sizeof(int32_t));
    bytes_release(&answer);

    int32_t input[TINKER_N] = {10, 20, 30, sampled[0], sampled[1], sampled[2]};
    int64_t wanted[TINKER_N] = {20, 30, sampled[0], sampled[1], sampled[2], sampled[3]};
    const struct tinker_datum datum = {
        TINKER_N, input, wanted, {"weights"}, {tinker_one.inputs[0]}};
    const double before = tinker_run_learn(&run, &datum, learnt);
    if (strcmp(test_device(), "cpu") == 0 || strcmp(daemon_exact_dtype(), "bf16") == 0) {
        assert_memory_equal(learnt, scored + 1, 2 * sizeof(float));
        assert_memory_equal(learnt + 2, logprobs, 4 * sizeof(float));
    }
    assert_true(tinker_run_step(&run, 1e-3) > 0);
    const double after = tinker_run_score(&run, &datum, learnt);
    assert_true(after < before);
    tinker_finish(&pair.server, session);
    tinker_pair_stop(&pair);
}

// ---- numbers ------------------------------------------------------------------------------------

TEST(test_numbers)
{
    float unused[TINKER_N];
    start(NULL);
    // behind a gap: held, and done once the gap is filled
    json_t *late = tinker_post(&pair.server, "optim_step", 200,
                               "{\"model_id\":\"%s\",\"seq_id\":2,\"adam_params\":{"
                               "\"learning_rate\":0}}",
                               run.id);
    json_t *first = tinker_learn(&pair.server, run.id, 1, "cross_entropy", false, &tinker_one, 1);
    json_t *again = tinker_learn(&pair.server, run.id, 1, "cross_entropy", false, &tinker_one, 1);
    assert_true(json_equal(first, again)); // one request, one future
    tinker_logprobs(&pair.server, first, TINKER_N, unused);
    json_t *answer = tinker_retrieve(&pair.server, late);
    const double norm =
        json_number_value(json_object_get(json_object_get(answer, "metrics"), "grad_norm:mean"));
    assert_true(norm > 0);
    // nothing was left of the first step's gradients, and a learning rate of 0 moved nothing
    run.seq_id = 2;
    tinker_run_learn(&run, &tinker_one, NULL);
    assert_true(tinker_run_step(&run, 0) == norm);
    tinker_refused(
        tinker_retrieve(&pair.server, tinker_post(&pair.server, "optim_step", 200,
                                                  "{\"model_id\":\"%s\",\"seq_id\":5}", run.id)),
        "\"adam_params\" is missing");
    tinker_pair_stop(&pair);
}

// With --exact the requests that datums come in leave no trace in the gradients: gradients of two
// and a step, or of one with both and a step, give the same bits.
TEST(test_adding_up)
{
    const struct tinker_datum both[2] = {tinker_one, tinker_other};
    float unused[2 * TINKER_N], apart[TINKER_N], together[TINKER_N];
    if (strcmp(daemon_exact_dtype(), "f32") != 0)
        test_skip("sums in another order, on this device");
    start(OPTIONS("--exact"));
    tinker_run_learn(&run, &both[0], NULL);
    tinker_run_learn(&run, &both[1], NULL);
    const double norm = tinker_run_step(&run, 1e-2);
    tinker_run_score(&run, &tinker_one, apart);

    // another model begins from the model folder again, with a new optimizer
    const struct tinker_run first = run;
    run = tinker_begun(&pair.server, tinker_create(&pair.server, session, 1, 200, ""));
    tinker_logprobs(
        &pair.server,
        tinker_learn(&pair.server, run.id, ++run.seq_id, "cross_entropy", false, both, 2),
        2 * TINKER_N, unused);
    assert_true(tinker_run_step(&run, 1e-2) == norm);
    tinker_run_score(&run, &tinker_one, together);
    assert_memory_equal(apart, together, sizeof apart);
    tinker_refused(
        tinker_retrieve(&pair.server, tinker_learn(&pair.server, first.id, 5, "cross_entropy", true,
                                                   &tinker_one, 1)),
        "has the weights no more");
    tinker_pair_stop(&pair);
}

// ---- snapshots and checkpoints ------------------------------------------------------------------

TEST(test_snapshots)
{
    char old[160], new[160];
    struct bytes answer = BYTES_INIT;
    start(NULL);
    tinker_run_snapshot(&run, "", old);
    tinker_run_learn(&run, &tinker_one, NULL);
    tinker_run_step(&run, 1e-3);
    tinker_refused(sample(0, old, 400, ""), "--snapshots inflight");
    tinker_run_snapshot(&run, "", new);
    tinker_retrieve_bytes(&pair.server, sample(0, new, 200, ""), &answer);
    bytes_release(&answer);
    tinker_refused(tinker_sampler(&pair.server, session, 400, "base_model", "model"),
                   "the base model was trained on");
    tinker_refused(sample(1, new, 400, ",\"record_stability_info\":true"),
                   "loss_fn=importance_sampling");
    tinker_refused(tinker_create(&pair.server, session, 3, 400, "\"rank\":32"), "\"rank\" is 32");
    tinker_pair_stop(&pair);
}

// Newer weights answer for older ones where that was asked for.
TEST(test_snapshots_in_flight)
{
    char old[160];
    struct bytes answer = BYTES_INIT;
    start(OPTIONS("--snapshots", "inflight"));
    tinker_run_snapshot(&run, "", old);
    tinker_run_learn(&run, &tinker_one, NULL);
    tinker_run_step(&run, 1e-3);
    tinker_retrieve_bytes(&pair.server, sample(0, old, 200, ""), &answer);
    bytes_release(&answer);
    tinker_pair_stop(&pair);
}

// What save_weights has acknowledged outlives a kill -9 of the process, and goes on from there to
// the same bits; the lease is free at once for the next.
TEST(test_checkpoints)
{
    float saved[TINKER_N], then[TINKER_N], again[TINKER_N];
    char path[256], second[256], place[512];
    start(OPTIONS("--exact"));
    tinker_run_learn(&run, &tinker_one, NULL);
    tinker_run_step(&run, 1e-3);
    tinker_run_save(&run, "save_weights", "first", path);
    tinker_run_learn(&run, &tinker_one, saved);
    tinker_run_step(&run, 1e-3);
    tinker_run_score(&run, &tinker_one, then);
    json_t *list = tinker_get(&pair.server, "training_runs", 200);
    const json_t *listed = json_array_get(json_object_get(list, "training_runs"), 0);
    assert_string_equal(json_string_value(json_object_get(listed, "training_run_id")), run.id);

    json_t *lost = tinker_learn(&pair.server, run.id, 7, "cross_entropy", true, &tinker_one, 1);
    tinker_pair_kill(&pair, OPTIONS("--exact"));
    tinker_refused(tinker_retrieve(&pair.server, lost), "cw-trainer serve was started anew since");
    tinker_refused(tinker_post(&pair.server, "retrieve_futures", 404,
                               "{\"target\":{\"sampling_session_id\":\"%s:sample:0\"}}", session),
                   "cw-trainer serve was started anew since");
    tinker_refused(tinker_post(&pair.server, "get_info", 404, "{\"model_id\":\"%s\"}", run.id),
                   "there is no model");
    run = tinker_whole(&pair.server, session);
    run = tinker_load(&pair.server, session, 1, path);
    tinker_run_learn(&run, &tinker_one, again);
    assert_memory_equal(again, saved, sizeof saved);
    tinker_run_step(&run, 1e-3); // by the moments that were saved
    tinker_run_score(&run, &tinker_one, again);
    assert_memory_equal(again, then, sizeof then);

    char *owner = strdup(path + strlen("tinker://"));
    *strchr(owner, '/') = 0;
    snprintf(place, sizeof place, "/api/v1/training_runs/%s/checkpoints/weights/first", owner);
    free(owner);
    struct wire_answer a;
    tinker_request(&pair.server, "DELETE", place, NULL, NULL, &a); // a restore would need it
    assert_int_equal(a.status, 400);
    tinker_run_save(&run, "save_weights", "second", second);
    tinker_request(&pair.server, "DELETE", place, NULL, NULL, &a);
    assert_int_equal(a.status, 200);
    tinker_refused(tinker_post(&pair.server, "load_weights", 404,
                               "{\"session_id\":\"%s\",\"model_seq_id\":5,\"path\":\"%s\","
                               "\"optimizer\":false}",
                               session, path),
                   "there is no checkpoint");
    tinker_pair_stop(&pair);
}

// ---- others, and what is broken -----------------------------------------------------------------

TEST(test_one_at_a_time)
{
    start(OPTIONS("--model-names", "org/one,two", "--loss-for", "stable_reinforce=ppo"));
    char *log = test_read(pair.server.log);
    assert_contains(log, "--loss-for stable_reinforce=ppo: ");
    json_t *all = tinker_get(&pair.server, "get_server_capabilities", 200);
    const json_t *models = json_object_get(all, "supported_models");
    static const char *const names[] = {"model", "org/one", "two"};
    assert_int_equal(json_array_size(models), 3);
    for (size_t i = 0; i < 3; i++)
        assert_string_equal(
            json_string_value(json_object_get(json_array_get(models, i), "model_name")), names[i]);
    char second[128];
    tinker_session(&pair.server, second);
    tinker_refused(tinker_create(&pair.server, second, 0, 409, ""),
                   "one full fine-tune is trained at a time");
    tinker_finish(&pair.server, session);
    tinker_create(&pair.server, second, 0, 200, "");
    tinker_refused(tinker_post(&pair.server, "create_model", 400,
                               "{\"session_id\":\"%s\",\"model_seq_id\":1,\"base_model\":\"a/b\"}",
                               second),
                   "--model-names a/b");
    tinker_pair_stop(&pair);
}

static void cancel(const json_t *future, int status)
{
    json_decref(tinker_post(&pair.server, "cancel_future", status, "{\"request_id\":\"%s\"}",
                            json_string_value(json_object_get(future, "request_id"))));
}

static int at_the_server(void)
{
    json_t *health = daemon_get(pair.daemon.socket, "/health", 200);
    const json_int_t n = json_integer_value(json_object_get(health, "running")) +
                         json_integer_value(json_object_get(health, "waiting"));
    json_decref(health);
    return (int)n;
}

// The server stands still and is full of the first request's samples, so that the others wait here.
// One of them is cancelled where it waits; then the first at the server, which makes room; then one
// of two that have gone there together.
TEST(test_cancelled)
{
    char sampler[160];
    struct bytes answer = BYTES_INIT;
    tinker_pair_start(&pair, NULL, OPTIONS("--max-batch", "1", "--max-queue", "2"), NULL);
    run = tinker_whole(&pair.server, session);
    tinker_run_snapshot(&run, "", sampler);
    json_decref(daemon_post(pair.daemon.socket, "/bridge/pause", 200, ""));
    json_t *first = sample(0, sampler, 200, ",\"num_samples\":3");
    while (at_the_server() < 3) clock_sleep_ms(10);
    json_t *waits = sample(1, sampler, 200, ""), *goes_on = sample(2, sampler, 200, ""),
           *goes = sample(3, sampler, 200, "");
    cancel(waits, 200);
    tinker_refused(tinker_retrieve(&pair.server, waits), "cancelled");
    cancel(first, 200);
    tinker_refused(tinker_retrieve(&pair.server, first), "cancelled");
    while (at_the_server() < 2) clock_sleep_ms(10);
    cancel(goes, 200);
    tinker_refused(tinker_retrieve(&pair.server, goes), "cancelled");
    assert_int_equal(at_the_server(), 1);
    json_decref(daemon_post(pair.daemon.socket, "/bridge/resume", 200, ""));
    tinker_retrieve_bytes(&pair.server, json_incref(goes_on), &answer);
    cancel(goes_on, 200); // too late, which is no fault
    json_decref(goes_on);
    bytes_release(&answer);
    json_t *trains = tinker_learn(&pair.server, run.id, 2, "cross_entropy", true, &tinker_one, 1);
    cancel(trains, 400);
    json_object_set_new(trains, "request_id", json_string("none"));
    cancel(trains, 404);
    json_decref(trains);
    tinker_pair_stop(&pair);
}

// A client waits for its answer; the server dies: it is told so, and so is whoever comes after.
TEST(test_server_gone)
{
    start(NULL);
    test_kill(&pair.daemon.child, SIGKILL);
    test_wait(&pair.daemon.child, 10000);
    const int64_t deadline = clock_deadline_ns(20000);
    for (int seq_id = 1;; seq_id++) { // what it has not noticed yet it still does
        struct wire_answer a;
        struct bytes body = BYTES_INIT;
        bytes_printf(&body, "{\"model_id\":\"%s\",\"seq_id\":%d,\"adam_params\":{}}", run.id,
                     seq_id);
        tinker_request(&pair.server, "POST", "/api/v1/optim_step", "application/json", &body, &a);
        bytes_release(&body);
        json_t *answer = json_incref(a.json);
        const int status = a.status;
        if (status == 200) answer = tinker_retrieve(&pair.server, answer);
        if (json_object_get(answer, "error")) {
            tinker_refused(answer, "go on from the last checkpoint");
            break;
        }
        json_decref(answer);
        assert_true(clock_now_ns() < deadline);
        clock_sleep_ms(50);
    }
}
