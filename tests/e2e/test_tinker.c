/* test_tinker.c: cw-trainer serve, by a client of the Tinker API without Python: a session from
 * beginning to end, numbers that come twice or in another order, gradients that add up, snapshots,
 * checkpoints over restarts, what is refused, and each process's death. */
#include "tests/support/tinker_client.h"
#include "common/base/clock.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct daemon d;
static struct tinker_server s;
static char session[128], model[128];

#define N 6
static const int32_t tokens[N] = {10, 20, 30, 40, 50, 60}, others[N] = {7, 8, 9, 10, 11, 12};
static const int64_t targets[N] = {20, 30, 40, 50, 60, 70},
                     other_targets[N] = {8, 9, 10, 11, 12, 13};
static const float weights[N] = {0, 1, 1, 0.5f, 1, 1};
static const struct tinker_datum one = {N, tokens, targets, {"weights"}, {weights}},
                                 other = {N, others, other_targets, {"weights"}, {weights}};

static void start(const char *const more[])
{
    daemon_start(&d, daemon_model(test_folder(), true, 5),
                 OPTIONS("--exact", "--dtype", daemon_exact_dtype()));
    tinker_server_start(&s, &d, NULL, more);
    tinker_model(&s, session, model);
}

static int stop(void **state)
{
    (void)state;
    tinker_server_kill(&s);
    daemon_kill(&d);
    return 0;
}

static void end(void)
{
    assert_int_equal(tinker_server_stop(&s), 0);
    assert_int_equal(daemon_stop(&d), 0);
}

static json_t *sample(int seq_id, const char *sampler, int status, const char *more)
{
    return tinker_post(&s, "asample", status,
                       "{\"sampling_session_id\":\"%s\",\"seq_id\":%d,\"num_samples\":1,"
                       "\"prompt\":{\"chunks\":[{\"type\":\"encoded_text\",\"tokens\":[10,20]},"
                       "{\"type\":\"encoded_text\",\"tokens\":[30]}]},\"sampling_params\":"
                       "{\"max_tokens\":4,\"temperature\":1,\"seed\":3,\"stop\":[]}%s}",
                       sampler, seq_id, more);
}

// The weights as they are now, to sample from.
static void take_snapshot(int seq_id, char ret[160])
{
    json_t *answer = tinker_retrieve(
        &s, tinker_post(&s, "save_weights_for_sampler", 200,
                        "{\"model_id\":\"%s\",\"seq_id\":%d,\"sampling_session_seq_id\":%d}", model,
                        seq_id, seq_id));
    snprintf(ret, 160, "%s", json_string_value(json_object_get(answer, "sampling_session_id")));
    json_decref(answer);
}

// ---- a session ----------------------------------------------------------------------------------

// Sampled, scored and trained log-probabilities are one number: the trainer's and the server's.
static void test_session(void **state)
{
    (void)state;
    char sampler[160];
    struct bytes answer = BYTES_INIT;
    int32_t drawn[4];
    float logprobs[4], scored[3], learnt[N];
    start(NULL);
    json_decref(tinker_post(&s, "client/config", 200, "{\"sdk_version\":\"0\"}"));
    json_t *info = tinker_post(&s, "get_info", 200, "{\"model_id\":\"%s\"}", model);
    assert_int_equal(json_integer_value(json_object_get(info, "lora_rank")), 0);
    json_decref(info);
    take_snapshot(1, sampler);
    json_t *future =
        sample(0, sampler, 200, ",\"prompt_logprobs\":true,\"topk_prompt_logprobs\":2");
    assert_int_equal(json_array_size(json_object_get(future, "sample_sequence_ids")), 1);
    json_t *poll = tinker_post(&s, "retrieve_futures", 200,
                               "{\"target\":{\"type\":\"sampling_session\",\"sampling_session_id\":"
                               "\"%s\",\"cloned_sampler_id\":0},\"prev_cursor\":0}",
                               sampler);
    const json_t *completion = json_array_get(json_object_get(poll, "completions"), 0);
    assert_string_equal(json_string_value(json_object_get(completion, "request_id")),
                        json_string_value(json_object_get(future, "request_id")));
    json_decref(poll);
    tinker_retrieve_bytes(&s, future, &answer);
    const struct proto_span message = {(const unsigned char *)bytes_text(&answer), answer.len};
    const struct proto_span sequence = tinker_field(message, 1);
    assert_int_equal(tinker_field(sequence, 2).len, sizeof drawn);
    memcpy(drawn, tinker_field(sequence, 2).data, sizeof drawn);
    memcpy(logprobs, tinker_field(sequence, 3).data, sizeof logprobs);
    assert_int_equal(tinker_field(message, 2).len, sizeof scored);
    memcpy(scored, tinker_field(message, 2).data, sizeof scored);
    assert_true(isnan(scored[0]));
    const struct proto_span top = tinker_field(message, 3);
    assert_int_equal(tinker_field(top, 1).len, 3 * 2 * sizeof(int32_t));
    bytes_release(&answer);

    int32_t input[N] = {10, 20, 30, drawn[0], drawn[1], drawn[2]};
    int64_t wanted[N] = {20, 30, drawn[0], drawn[1], drawn[2], drawn[3]};
    const struct tinker_datum datum = {N, input, wanted, {"weights"}, {weights}};
    const double before = tinker_logprobs(
        &s, tinker_learn(&s, model, 2, "cross_entropy", false, &datum, 1), N, learnt);
    if (strcmp(test_device(), "cpu") == 0 || strcmp(daemon_exact_dtype(), "bf16") == 0) {
        assert_memory_equal(learnt, scored + 1, 2 * sizeof(float));
        assert_memory_equal(learnt + 2, logprobs, 4 * sizeof(float));
    }
    assert_true(tinker_step(&s, model, 3, 1e-3) > 0);
    const double after = tinker_logprobs(
        &s, tinker_learn(&s, model, 4, "cross_entropy", true, &datum, 1), N, learnt);
    assert_true(after < before);
    char path[256];
    snprintf(path, sizeof path, "sessions/%s/finish", session);
    json_decref(tinker_post(&s, path, 200, "{\"reason\":{\"type\":\"success\"},\"detail\":null}"));
    end();
}

// ---- numbers ------------------------------------------------------------------------------------

static void test_numbers(void **state)
{
    (void)state;
    float unused[N];
    start(NULL);
    // behind a gap: held, and done once the gap is filled
    json_t *late = tinker_post(&s, "optim_step", 200,
                               "{\"model_id\":\"%s\",\"seq_id\":2,\"adam_params\":{"
                               "\"learning_rate\":0}}",
                               model);
    json_t *first = tinker_learn(&s, model, 1, "cross_entropy", false, &one, 1);
    json_t *again = tinker_learn(&s, model, 1, "cross_entropy", false, &one, 1);
    assert_true(json_equal(first, again)); // one request, one future
    json_decref(again);
    tinker_logprobs(&s, first, N, unused);
    json_t *answer = tinker_retrieve(&s, late);
    const double norm =
        json_number_value(json_object_get(json_object_get(answer, "metrics"), "grad_norm:mean"));
    json_decref(answer);
    assert_true(norm > 0);
    // nothing was left of the first step's gradients, and a learning rate of 0 moved nothing
    tinker_logprobs(&s, tinker_learn(&s, model, 3, "cross_entropy", false, &one, 1), N, unused);
    assert_true(tinker_step(&s, model, 4, 0) == norm);
    tinker_refused(tinker_retrieve(&s, tinker_post(&s, "optim_step", 200,
                                                   "{\"model_id\":\"%s\",\"seq_id\":5}", model)),
                   "\"adam_params\" is missing");
    end();
}

// With --exact the requests that datums come in leave no trace in the gradients: gradients of two
// and a step, or of one with both and a step, give the same bits.
static void test_adding_up(void **state)
{
    (void)state;
    const struct tinker_datum both[2] = {one, other};
    float unused[2 * N], apart[N], together[N];
    char first[128];
    if (strcmp(daemon_exact_dtype(), "f32") != 0)
        test_skip("sums in another order, on this device");
    start(OPTIONS("--exact"));
    tinker_logprobs(&s, tinker_learn(&s, model, 1, "cross_entropy", false, &both[0], 1), N, unused);
    tinker_logprobs(&s, tinker_learn(&s, model, 2, "cross_entropy", false, &both[1], 1), N, unused);
    const double norm = tinker_step(&s, model, 3, 1e-2);
    tinker_logprobs(&s, tinker_learn(&s, model, 4, "cross_entropy", true, &one, 1), N, apart);

    // another model begins from the model folder again, with a new optimizer
    snprintf(first, sizeof first, "%s", model);
    json_t *begun = tinker_retrieve(
        &s, tinker_post(&s, "create_model", 200,
                        "{\"session_id\":\"%s\",\"model_seq_id\":1,\"base_model\":\"model\"}",
                        session));
    snprintf(model, sizeof model, "%s", json_string_value(json_object_get(begun, "model_id")));
    json_decref(begun);
    tinker_logprobs(&s, tinker_learn(&s, model, 1, "cross_entropy", false, both, 2), 2 * N, unused);
    assert_true(tinker_step(&s, model, 2, 1e-2) == norm);
    tinker_logprobs(&s, tinker_learn(&s, model, 3, "cross_entropy", true, &one, 1), N, together);
    assert_memory_equal(apart, together, sizeof apart);
    tinker_refused(tinker_retrieve(&s, tinker_learn(&s, first, 5, "cross_entropy", true, &one, 1)),
                   "has the weights no more");
    end();
}

// ---- snapshots and checkpoints ------------------------------------------------------------------

static void test_snapshots(void **state)
{
    (void)state;
    char old[160], new[160];
    struct bytes answer = BYTES_INIT;
    float unused[N];
    start(NULL);
    take_snapshot(1, old);
    tinker_logprobs(&s, tinker_learn(&s, model, 2, "cross_entropy", false, &one, 1), N, unused);
    tinker_step(&s, model, 3, 1e-3);
    tinker_refused(sample(0, old, 400, ""), "--snapshots inflight");
    take_snapshot(4, new);
    tinker_retrieve_bytes(&s, sample(0, new, 200, ""), &answer);
    bytes_release(&answer);
    tinker_refused(tinker_post(&s, "create_sampling_session", 400,
                               "{\"session_id\":\"%s\",\"sampling_session_seq_id\":9,"
                               "\"base_model\":\"model\"}",
                               session),
                   "the base model was trained on");
    tinker_refused(sample(1, new, 400, ",\"record_stability_info\":true"),
                   "loss_fn=importance_sampling");
    tinker_refused(tinker_post(&s, "create_model", 400,
                               "{\"session_id\":\"%s\",\"model_seq_id\":3,\"base_model\":\"model\","
                               "\"lora_config\":{\"rank\":32}}",
                               session),
                   "\"rank\" is 32");
    end();
}

// Newer weights answer for older ones where that was asked for.
static void test_snapshots_in_flight(void **state)
{
    (void)state;
    char old[160];
    struct bytes answer = BYTES_INIT;
    float unused[N];
    start(OPTIONS("--snapshots", "inflight"));
    take_snapshot(1, old);
    tinker_logprobs(&s, tinker_learn(&s, model, 2, "cross_entropy", false, &one, 1), N, unused);
    tinker_step(&s, model, 3, 1e-3);
    tinker_retrieve_bytes(&s, sample(0, old, 200, ""), &answer);
    bytes_release(&answer);
    end();
}

static json_t *load(int number, const char *path)
{
    return tinker_retrieve(&s, tinker_post(&s, "load_weights", 200,
                                           "{\"session_id\":\"%s\",\"model_seq_id\":%d,"
                                           "\"path\":\"%s\",\"optimizer\":true}",
                                           session, number, path));
}

// What save_weights has acknowledged outlives a kill -9 of the process, and goes on from there to
// the same bits; the lease is free at once for the next.
static void test_checkpoints(void **state)
{
    (void)state;
    float unused[N], saved[N], then[N], again[N];
    char path[256], place[512];
    start(OPTIONS("--exact"));
    tinker_logprobs(&s, tinker_learn(&s, model, 1, "cross_entropy", false, &one, 1), N, unused);
    tinker_step(&s, model, 2, 1e-3);
    json_t *answer = tinker_retrieve(&s, tinker_post(&s, "save_weights", 200,
                                                     "{\"model_id\":\"%s\",\"seq_id\":3,"
                                                     "\"path\":\"first\"}",
                                                     model));
    snprintf(path, sizeof path, "%s", json_string_value(json_object_get(answer, "path")));
    json_decref(answer);
    tinker_logprobs(&s, tinker_learn(&s, model, 4, "cross_entropy", false, &one, 1), N, saved);
    tinker_step(&s, model, 5, 1e-3);
    tinker_logprobs(&s, tinker_learn(&s, model, 6, "cross_entropy", true, &one, 1), N, then);
    json_t *list = tinker_get(&s, "training_runs", 200);
    const json_t *run = json_array_get(json_object_get(list, "training_runs"), 0);
    assert_string_equal(json_string_value(json_object_get(run, "training_run_id")), model);
    json_decref(list);

    const char *runs = s.runs;
    test_kill(&s.child, SIGKILL);
    assert_int_equal(test_wait(&s.child, 10000), 128 + SIGKILL);
    tinker_server_start(&s, &d, runs, OPTIONS("--exact"));
    tinker_refused(tinker_post(&s, "get_info", 404, "{\"model_id\":\"%s\"}", model),
                   "there is no model");
    tinker_model(&s, session, model);
    answer = load(1, path);
    snprintf(model, sizeof model, "%s", json_string_value(json_object_get(answer, "model_id")));
    json_decref(answer);
    tinker_logprobs(&s, tinker_learn(&s, model, 1, "cross_entropy", false, &one, 1), N, again);
    assert_memory_equal(again, saved, sizeof saved);
    tinker_step(&s, model, 2, 1e-3); // by the moments that were saved
    tinker_logprobs(&s, tinker_learn(&s, model, 3, "cross_entropy", true, &one, 1), N, again);
    assert_memory_equal(again, then, sizeof then);

    char *owner = strdup(path + strlen("tinker://"));
    *strchr(owner, '/') = 0;
    snprintf(place, sizeof place, "/api/v1/training_runs/%s/checkpoints/weights/first", owner);
    free(owner);
    struct wire_answer a;
    tinker_request(&s, "DELETE", place, NULL, NULL, &a); // a restore would need it
    assert_int_equal(a.status, 400);
    wire_answer_release(&a);
    answer = tinker_retrieve(&s, tinker_post(&s, "save_weights", 200,
                                             "{\"model_id\":\"%s\",\"seq_id\":4,"
                                             "\"path\":\"second\"}",
                                             model));
    json_decref(answer);
    tinker_request(&s, "DELETE", place, NULL, NULL, &a);
    assert_int_equal(a.status, 200);
    wire_answer_release(&a);
    tinker_refused(tinker_post(&s, "load_weights", 404,
                               "{\"session_id\":\"%s\",\"model_seq_id\":5,\"path\":\"%s\","
                               "\"optimizer\":false}",
                               session, path),
                   "there is no checkpoint");
    end();
}

// ---- others, and what is broken -----------------------------------------------------------------

static void test_one_at_a_time(void **state)
{
    (void)state;
    start(NULL);
    json_t *answer = tinker_post(&s, "create_session", 200, "{}");
    char second[128], path[256];
    snprintf(second, sizeof second, "%s", json_string_value(json_object_get(answer, "session_id")));
    json_decref(answer);
    tinker_refused(
        tinker_post(&s, "create_model", 409,
                    "{\"session_id\":\"%s\",\"model_seq_id\":0,\"base_model\":\"model\"}", second),
        "one full fine-tune is trained at a time");
    snprintf(path, sizeof path, "sessions/%s/finish", session);
    json_decref(tinker_post(&s, path, 200, "{\"reason\":{\"type\":\"success\"}}"));
    json_decref(tinker_post(&s, "create_model", 200,
                            "{\"session_id\":\"%s\",\"model_seq_id\":0,\"base_model\":\"model\"}",
                            second));
    tinker_refused(tinker_post(&s, "create_model", 400,
                               "{\"session_id\":\"%s\",\"model_seq_id\":1,\"base_model\":\"a/b\"}",
                               second),
                   "--model-names a/b");
    end();
}

// A client waits for its answer; the server dies: it is told so, and so is whoever comes after.
static void test_server_gone(void **state)
{
    (void)state;
    start(NULL);
    test_kill(&d.child, SIGKILL);
    test_wait(&d.child, 10000);
    const int64_t deadline = clock_deadline_ns(20000);
    for (int seq_id = 1;; seq_id++) { // what it has not noticed yet it still does
        struct wire_answer a;
        struct bytes body = BYTES_INIT;
        bytes_printf(&body, "{\"model_id\":\"%s\",\"seq_id\":%d,\"adam_params\":{}}", model,
                     seq_id);
        tinker_request(&s, "POST", "/api/v1/optim_step", "application/json", &body, &a);
        bytes_release(&body);
        json_t *answer = json_incref(a.json);
        const int status = a.status;
        wire_answer_release(&a);
        if (status == 200) answer = tinker_retrieve(&s, answer);
        if (json_object_get(answer, "error")) {
            tinker_refused(answer, "go on from the last checkpoint");
            break;
        }
        json_decref(answer);
        assert_true(clock_now_ns() < deadline);
        clock_sleep_ms(50);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_session, stop),
        cmocka_unit_test_teardown(test_numbers, stop),
        cmocka_unit_test_teardown(test_adding_up, stop),
        cmocka_unit_test_teardown(test_snapshots, stop),
        cmocka_unit_test_teardown(test_snapshots_in_flight, stop),
        cmocka_unit_test_teardown(test_checkpoints, stop),
        cmocka_unit_test_teardown(test_one_at_a_time, stop),
        cmocka_unit_test_teardown(test_server_gone, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
