/* test_tinker_named.c: cw-trainer serve and whole models that were saved by name: who samples one
 * gets it from disk, once nobody trains what is there in its place. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

static struct tinker_pair pair;
static char session[128], model[128];

static json_t *sampler_of(const char *path, int number, int status)
{
    return tinker_post(&pair.server, "create_sampling_session", status,
                       "{\"session_id\":\"%s\",\"sampling_session_seq_id\":%d,\"model_path\":"
                       "\"%s\"}",
                       session, number, path);
}

// Asks for a sample; the future, or what was answered instead (json_decref), and its status.
static int ask(const char *sampler, int seq_id, int tokens, json_t **ret)
{
    struct bytes body = BYTES_INIT;
    struct wire_answer a;
    bytes_printf(&body,
                 "{\"sampling_session_id\":\"%s\",\"seq_id\":%d,\"num_samples\":1,"
                 "\"prompt\":{\"chunks\":[{\"type\":\"encoded_text\",\"tokens\":[10,20]}]},"
                 "\"sampling_params\":{\"max_tokens\":%d,\"seed\":3,\"stop\":[]}}",
                 sampler, seq_id, tokens);
    tinker_request(&pair.server, "POST", "/api/v1/asample", "application/json", &body, &a);
    const int status = a.status;
    *ret = json_incref(a.json);
    bytes_release(&body);
    return status;
}

static json_t *sample(const char *sampler, int seq_id, int tokens)
{
    json_t *future;
    assert_int_equal(ask(sampler, seq_id, tokens, &future), 200);
    return future;
}

// Tokens and log-probabilities of the future's sample.
static void take_sample(json_t *future, struct bytes *ret)
{
    struct bytes answer = BYTES_INIT;
    tinker_retrieve_bytes(&pair.server, future, &answer);
    const struct proto_span message = {(const unsigned char *)bytes_text(&answer), answer.len};
    const struct proto_span sequence = tinker_field(message, 1);
    bytes_clear(ret);
    bytes_append(ret, (const char *)sequence.data, sequence.len);
    bytes_release(&answer);
}

// One sample of a path, by a sampling session of that number.
static void sample_path(const char *path, int number, struct bytes *ret)
{
    json_t *made = sampler_of(path, number, 200);
    const char *sampler = json_string_value(json_object_get(made, "sampling_session_id"));
    for (int again = 0; again < 2; again++) // the second finds what the first has loaded
        take_sample(sample(sampler, again, 6), ret);
    json_decref(made);
}

static void assert_same(const struct bytes *a, const struct bytes *b)
{
    assert_int_equal(a->len, b->len);
    assert_memory_equal(bytes_text(a), bytes_text(b), a->len);
}

static void begin_session(void)
{
    json_t *answer = tinker_post(&pair.server, "create_session", 200, "{}");
    snprintf(session, sizeof session, "%s",
             json_string_value(json_object_get(answer, "session_id")));
}

static void finish(void)
{
    char path[256];
    snprintf(path, sizeof path, "sessions/%s/finish", session);
    tinker_post(&pair.server, path, 200, "{\"reason\":{\"type\":\"success\"}}");
}

// A step, and what it gives under a name, as it is sampled while it is live.
static void save(int seq_id, const char *name, char ret_path[256], struct bytes *ret_sample)
{
    float unused[TINKER_N];
    tinker_logprobs(
        &pair.server,
        tinker_learn(&pair.server, model, seq_id, "cross_entropy", false, &tinker_one, 1), TINKER_N,
        unused);
    tinker_step(&pair.server, model, seq_id + 1, 1e-2);
    json_t *saved =
        tinker_retrieve(&pair.server, tinker_post(&pair.server, "save_weights_for_sampler", 200,
                                                  "{\"model_id\":\"%s\",\"seq_id\":%d,\"path\":"
                                                  "\"%s\"}",
                                                  model, seq_id + 2, name));
    snprintf(ret_path, 256, "%s", json_string_value(json_object_get(saved, "path")));
    json_decref(saved);
    sample_path(ret_path, seq_id, ret_sample);
}

TEST(test_from_disk)
{
    struct bytes first = BYTES_INIT, second = BYTES_INIT, got = BYTES_INIT;
    char one[256], two[256];
    tinker_pair_start(&pair, NULL, OPTIONS("--dtype", daemon_exact_dtype()), NULL);
    tinker_model(&pair.server, session, model);
    save(1, "one", one, &first);
    save(4, "two", two, &second);
    assert_true(first.len != second.len ||
                memcmp(bytes_text(&first), bytes_text(&second), first.len) != 0);
    tinker_refused(sampler_of(one, 20, 400), "sample it once that one has finished");
    finish();
    sample_path(one, 21, &got);
    assert_same(&got, &first);
    sample_path(two, 22, &got);
    assert_same(&got, &second);

    const char *runs = pair.server.runs;
    test_kill(&pair.server.child, SIGKILL);
    assert_int_equal(test_wait(&pair.server.child, 10000), 128 + SIGKILL);
    tinker_server_start(&pair.server, &pair.daemon, runs, NULL);
    begin_session();
    sample_path(one, 0, &got);
    assert_same(&got, &first);
    finish();

    tinker_model(&pair.server, session, model); // trains from the model folder again
    tinker_refused(sampler_of(one, 1, 400), "which a client trains");
    bytes_release(&first);
    bytes_release(&second);
    bytes_release(&got);
    tinker_pair_stop(&pair);
}

// Updates of the server's weights so far.
static int updates(void)
{
    json_t *health = daemon_get(pair.daemon.socket, "/health", 200);
    const int version = (int)json_integer_value(json_object_get(health, "weight_version"));
    return version / 2;
}

// Two clients, each of which samples a saved model of its own: each request has the model that it
// asked for from its first token to its last, and of those that wait together none has it loaded
// anew.
TEST(test_in_turn)
{
    enum { EACH = 12, LONG = 400, MOST = 8 };
    struct bytes alone[2] = {BYTES_INIT, BYTES_INIT}, got = BYTES_INIT;
    char path[2][256];
    json_t *samplers[2], *futures[2 * EACH];
    const char *ids[2];
    tinker_pair_start(&pair, NULL, OPTIONS("--dtype", daemon_exact_dtype()), NULL);
    tinker_model(&pair.server, session, model);
    save(1, "one", path[0], &got);
    save(4, "two", path[1], &got);
    finish();
    for (int i = 0; i < 2; i++) {
        samplers[i] = sampler_of(path[i], 20 + i, 200);
        ids[i] = json_string_value(json_object_get(samplers[i], "sampling_session_id"));
        take_sample(sample(ids[i], 0, LONG), &alone[i]);
    }
    const int before = updates();
    for (int i = 0; i < 2 * EACH; i++) futures[i] = sample(ids[i % 2], 1 + i, LONG);
    for (int i = 0; i < 2 * EACH; i++) {
        take_sample(futures[i], &got);
        assert_same(&got, &alone[i % 2]);
    }
    assert_in_range(updates() - before, 1, MOST);
    for (int i = 0; i < 2; i++) {
        json_decref(samplers[i]);
        bytes_release(&alone[i]);
    }
    bytes_release(&got);
    tinker_pair_stop(&pair);
}

static bool was_sampled(const json_t *future)
{
    struct bytes body = BYTES_INIT;
    struct wire_answer a;
    bytes_printf(&body, "{\"request_id\":\"%s\"}",
                 json_string_value(json_object_get(future, "request_id")));
    tinker_request(&pair.server, "POST", "/api/v1/retrieve_future", "application/json", &body, &a);
    const bool sampled = strstr(bytes_text(&a.head), "application/x-protobuf") != NULL;
    bytes_release(&body);
    return sampled;
}

// One who samples the model's folder without a pause keeps no saved model, and nobody else,
// waiting.
TEST(test_beside_the_base)
{
    enum { AT_ONCE = 4, MOST = 60, LONG = 400 };
    struct bytes want = BYTES_INIT, got = BYTES_INIT;
    char path[256];
    json_t *base[MOST] = {NULL}; // the last: what was answered instead of a future
    int n = 0;
    tinker_pair_start(&pair, NULL, OPTIONS("--dtype", daemon_exact_dtype()), NULL);
    tinker_model(&pair.server, session, model);
    save(1, "one", path, &want);
    finish();
    const char *runs = pair.server.runs; // and anew, on the model's folder
    assert_int_equal(tinker_server_stop(&pair.server), 0);
    daemon_post(pair.daemon.socket, "/reload", 200, "{}");
    tinker_server_start(&pair.server, &pair.daemon, runs, NULL);
    begin_session();
    json_t *of_base = tinker_post(&pair.server, "create_sampling_session", 200,
                                  "{\"session_id\":\"%s\",\"sampling_session_seq_id\":0,"
                                  "\"base_model\":\"any/model\"}",
                                  session),
           *of_path = sampler_of(path, 1, 200);
    const char *id = json_string_value(json_object_get(of_base, "sampling_session_id"));
    while (n < AT_ONCE && ask(id, n, LONG, &base[n]) == 200) n++;
    json_t *saved =
        sample(json_string_value(json_object_get(of_path, "sampling_session_id")), 0, 6);
    while (n < MOST && was_sampled(base[n - AT_ONCE]) && ask(id, n, LONG, &base[n]) == 200) n++;
    assert_in_range(n, AT_ONCE, MOST - 1); // the saved model has taken its place
    take_sample(saved, &got);
    assert_same(&got, &want);
    for (n = 0; n < MOST; n++) json_decref(base[n]);
    json_decref(of_path);
    bytes_release(&want);
    bytes_release(&got);
    tinker_pair_stop(&pair);
}

// That it goes on so is said once, however long it does.
TEST(test_many_turns)
{
    struct bytes one = BYTES_INIT, two = BYTES_INIT, got = BYTES_INIT;
    char path[2][256];
    tinker_pair_start(&pair, NULL, OPTIONS("--dtype", daemon_exact_dtype()), NULL);
    tinker_model(&pair.server, session, model);
    save(1, "one", path[0], &one);
    save(4, "two", path[1], &two);
    finish();
    for (int i = 0; i < 8; i++) {
        sample_path(path[i % 2], 20 + i, &got);
        assert_same(&got, i % 2 ? &two : &one);
    }
    char *log = test_read(pair.server.child.log), *said = strstr(log, "This is said once");
    assert_non_null(said);
    assert_null(strstr(said, "is loaded as the model"));
    assert_null(strstr(said + 1, "This is said once"));
    bytes_release(&one);
    bytes_release(&two);
    bytes_release(&got);
    tinker_pair_stop(&pair);
}
