/* test_tinker_named.c: cw-trainer serve and whole models that were saved by name: who samples one
 * gets it from disk, once nobody trains what is there in its place. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"

static json_t *sample(const char *sampler, int seq_id, int tokens)
{
    return tinker_sample(sampler, seq_id, 200, tokens, "");
}

// The second finds what the first has loaded.
static struct tinker_sampled sample_path(const char *path)
{
    const char *sampler = tinker_sampler_of("model_path", path);
    tinker_sampled(sample(sampler, 0, 6));
    return tinker_sampled(sample(sampler, 1, 6));
}

static void same(const char *path, const struct tinker_sampled *want)
{
    const struct tinker_sampled got = sample_path(path);
    tinker_same_sample(&got, want);
}

static void finish(void)
{
    tinker_finish(session);
}

// A step, and what it gives under a name, as it is sampled while it is live.
static struct tinker_sampled save(const char *name, const char **ret_path)
{
    tinker_run_update(&trained, &tinker_one);
    *ret_path = tinker_run_save(&trained, "save_weights_for_sampler", name);
    return sample_path(*ret_path);
}

static void start(void)
{
    tinker_pair_start(NULL, OPTIONS("--dtype", daemon_exact_dtype()), NULL);
    trained = tinker_whole();
}

TINKER_TEST(test_from_disk)
{
    const char *one, *two;
    start();
    const struct tinker_sampled first = save("one", &one), second = save("two", &two);
    assert_true(first.sequence.len != second.sequence.len ||
                memcmp(first.sequence.data, second.sequence.data, first.sequence.len) != 0);
    tinker_refused(tinker_sampler(400, "model_path", one), "sample it once that one has finished");
    finish();
    same(one, &first);
    same(two, &second);

    tinker_pair_kill(NULL);
    session = tinker_session();
    same(one, &first);
    finish();

    trained = tinker_whole(); // trains from the model folder again
    tinker_refused(tinker_sampler(400, "model_path", one), "which a client trains");
}

// Updates of the server's weights so far.
static int updates(void)
{
    return (int)int_of(daemon_get(pair.daemon.socket, "/health", 200), "weight_version") / 2;
}

// Two clients, each of which samples a saved model of its own: each request has the model that it
// asked for from its first token to its last, and of those that wait together none has it loaded
// anew.
TINKER_TEST(test_in_turn)
{
    enum { EACH = 12, LONG = 400, MOST = 8 };
    struct tinker_sampled alone[2];
    const char *path[2], *samplers[2];
    json_t *futures[2 * EACH];
    start();
    save("one", &path[0]);
    save("two", &path[1]);
    finish();
    for (int i = 0; i < 2; i++) {
        samplers[i] = tinker_sampler_of("model_path", path[i]);
        alone[i] = tinker_sampled(sample(samplers[i], 0, LONG));
    }
    const int before = updates();
    daemon_post(pair.daemon.socket, "/bridge/pause", 200, ""); // until they wait together
    for (int i = 0; i < 2 * EACH; i++) futures[i] = sample(samplers[i % 2], 1 + i, LONG);
    daemon_post(pair.daemon.socket, "/bridge/resume", 200, "");
    for (int i = 0; i < 2 * EACH; i++) {
        const struct tinker_sampled got = tinker_sampled(futures[i]);
        tinker_same_sample(&got, &alone[i % 2]);
    }
    assert_in_range(updates() - before, 1, MOST);
}

static bool was_sampled(const json_t *future)
{
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    struct wire_answer a;
    bytes_printf(&body, "{\"request_id\":\"%s\"}", text_of(future, "request_id"));
    tinker_request("POST", "/api/v1/retrieve_future", "application/json", &body, &a);
    const bool sampled = strstr(bytes_text(&a.head), "application/x-protobuf") != NULL;
    return sampled;
}

// Whether it is a future, and not refused.
static bool ask(const char *sampler, int seq_id, int tokens, json_t **ret)
{
    *ret = tinker_sample(sampler, seq_id, 0, tokens, "");
    return json_object_get(*ret, "request_id") != NULL;
}

// One who samples the model's folder without a pause keeps no saved model, and nobody else,
// waiting.
TINKER_TEST(test_beside_the_base)
{
    enum { AT_ONCE = 4, MOST = 60, LONG = 400 };
    const char *path, *of_base, *of_path;
    json_t *base[MOST] = {NULL}; // the last: what was answered instead of a future
    int n = 0;
    start();
    const struct tinker_sampled want = save("one", &path);
    finish();
    const char *runs = pair.server.runs; // and anew, on the model's folder
    assert_int_equal(tinker_server_stop(&pair.server), 0);
    daemon_post(pair.daemon.socket, "/reload", 200, "{}");
    tinker_server_start(&pair.server, &pair.daemon, runs, NULL);
    session = tinker_session();
    of_base = tinker_sampler_of("base_model", "any/model");
    of_path = tinker_sampler_of("model_path", path);
    while (n < AT_ONCE && ask(of_base, n, LONG, &base[n])) n++;
    json_t *saved = sample(of_path, 0, 6);
    while (n < MOST && was_sampled(base[n - AT_ONCE]) && ask(of_base, n, LONG, &base[n])) n++;
    assert_in_range(n, AT_ONCE, MOST - 1); // the saved model has taken its place
    const struct tinker_sampled got = tinker_sampled(saved);
    tinker_same_sample(&got, &want);
}

// That it goes on so is said once, however long it does.
TINKER_TEST(test_many_turns)
{
    const char *path[2];
    start();
    const struct tinker_sampled one = save("one", &path[0]), two = save("two", &path[1]);
    finish();
    for (int i = 0; i < 8; i++) {
        same(path[i % 2], i % 2 ? &two : &one);
    }
    char *log = test_read(pair.server.child.log), *said = strstr(log, "This is said once");
    assert_non_null(said);
    assert_null(strstr(said, "is loaded as the model"));
    assert_null(strstr(said + 1, "This is said once"));
}
