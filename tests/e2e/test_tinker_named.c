/* test_tinker_named.c: cw-trainer serve and whole models that were saved by name: who samples one
 * gets it from disk, once nobody trains what is there in its place. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

static struct tinker_pair pair;
static char session[128];
static struct tinker_run run;

static json_t *sample(const char *sampler, int seq_id, int tokens)
{
    return tinker_sample(&pair.server, sampler, seq_id, 200, tokens, "");
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

static void sample_path(const char *path, struct bytes *ret)
{
    char sampler[160];
    tinker_sampler_of(&pair.server, session, "model_path", path, sampler);
    for (int again = 0; again < 2; again++) // the second finds what the first has loaded
        take_sample(sample(sampler, again, 6), ret);
}

static void assert_same(const struct bytes *a, const struct bytes *b)
{
    assert_int_equal(a->len, b->len);
    assert_memory_equal(bytes_text(a), bytes_text(b), a->len);
}

static void finish(void)
{
    tinker_finish(&pair.server, session);
}

// A step, and what it gives under a name, as it is sampled while it is live.
static void save(const char *name, char ret_path[256], struct bytes *ret_sample)
{
    tinker_run_update(&run, &tinker_one);
    tinker_run_save(&run, "save_weights_for_sampler", name, ret_path);
    sample_path(ret_path, ret_sample);
}

TEST(test_from_disk)
{
    struct bytes first = BYTES_INIT, second = BYTES_INIT, got = BYTES_INIT;
    char one[256], two[256];
    tinker_pair_start(&pair, NULL, OPTIONS("--dtype", daemon_exact_dtype()), NULL);
    run = tinker_whole(&pair.server, session);
    save("one", one, &first);
    save("two", two, &second);
    assert_true(first.len != second.len ||
                memcmp(bytes_text(&first), bytes_text(&second), first.len) != 0);
    tinker_refused(tinker_sampler(&pair.server, session, 400, "model_path", one),
                   "sample it once that one has finished");
    finish();
    sample_path(one, &got);
    assert_same(&got, &first);
    sample_path(two, &got);
    assert_same(&got, &second);

    tinker_pair_kill(&pair, NULL);
    tinker_session(&pair.server, session);
    sample_path(one, &got);
    assert_same(&got, &first);
    finish();

    run = tinker_whole(&pair.server, session); // trains from the model folder again
    tinker_refused(tinker_sampler(&pair.server, session, 400, "model_path", one),
                   "which a client trains");
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
    char path[2][256], samplers[2][160];
    json_t *futures[2 * EACH];
    tinker_pair_start(&pair, NULL, OPTIONS("--dtype", daemon_exact_dtype()), NULL);
    run = tinker_whole(&pair.server, session);
    save("one", path[0], &got);
    save("two", path[1], &got);
    finish();
    for (int i = 0; i < 2; i++) {
        tinker_sampler_of(&pair.server, session, "model_path", path[i], samplers[i]);
        take_sample(sample(samplers[i], 0, LONG), &alone[i]);
    }
    const int before = updates();
    for (int i = 0; i < 2 * EACH; i++) futures[i] = sample(samplers[i % 2], 1 + i, LONG);
    for (int i = 0; i < 2 * EACH; i++) {
        take_sample(futures[i], &got);
        assert_same(&got, &alone[i % 2]);
    }
    assert_in_range(updates() - before, 1, MOST);
    for (int i = 0; i < 2; i++) bytes_release(&alone[i]);
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

// Whether it is a future, and not refused.
static bool ask(const char *sampler, int seq_id, int tokens, json_t **ret)
{
    *ret = tinker_sample(&pair.server, sampler, seq_id, 0, tokens, "");
    return json_object_get(*ret, "request_id") != NULL;
}

// One who samples the model's folder without a pause keeps no saved model, and nobody else,
// waiting.
TEST(test_beside_the_base)
{
    enum { AT_ONCE = 4, MOST = 60, LONG = 400 };
    struct bytes want = BYTES_INIT, got = BYTES_INIT;
    char path[256], of_base[160], of_path[160];
    json_t *base[MOST] = {NULL}; // the last: what was answered instead of a future
    int n = 0;
    tinker_pair_start(&pair, NULL, OPTIONS("--dtype", daemon_exact_dtype()), NULL);
    run = tinker_whole(&pair.server, session);
    save("one", path, &want);
    finish();
    const char *runs = pair.server.runs; // and anew, on the model's folder
    assert_int_equal(tinker_server_stop(&pair.server), 0);
    daemon_post(pair.daemon.socket, "/reload", 200, "{}");
    tinker_server_start(&pair.server, &pair.daemon, runs, NULL);
    tinker_session(&pair.server, session);
    tinker_sampler_of(&pair.server, session, "base_model", "any/model", of_base);
    tinker_sampler_of(&pair.server, session, "model_path", path, of_path);
    while (n < AT_ONCE && ask(of_base, n, LONG, &base[n])) n++;
    json_t *saved = sample(of_path, 0, 6);
    while (n < MOST && was_sampled(base[n - AT_ONCE]) && ask(of_base, n, LONG, &base[n])) n++;
    assert_in_range(n, AT_ONCE, MOST - 1); // the saved model has taken its place
    take_sample(saved, &got);
    assert_same(&got, &want);
    for (n = 0; n < MOST; n++) json_decref(base[n]);
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
    run = tinker_whole(&pair.server, session);
    save("one", path[0], &one);
    save("two", path[1], &two);
    finish();
    for (int i = 0; i < 8; i++) {
        sample_path(path[i % 2], &got);
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
