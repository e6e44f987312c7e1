/* test_tinker_base.c: version 0 while the whole model is trained: with the server's frozen model of
 * the model's own folder, snapshots of the beginning and sampling clients of the base model stay,
 * to the bit, log-probabilities of prompts included. Without it they end with what would help. With
 * the SDK, where there is one: the check `base` of tests/clients/tinker_sdk.py. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

static const char *folder;
static struct tinker_pair pair;
static char session[128], model[128];
static int n_asked, n_sessions;

static void start(const char *frozen, const char *const more[])
{
    folder = daemon_model(test_folder(), true, 5);
    if (!frozen) frozen = folder;
    tinker_pair_start(&pair, folder,
                      OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--tandem-model", frozen),
                      more);
    tinker_model(&pair.server, session, model);
}

static void finish(void)
{
    char path[160];
    snprintf(path, sizeof path, "sessions/%s/finish", session);
    tinker_post(&pair.server, path, 200, "{}");
}

static void step(int seq_id)
{
    float unused[TINKER_N];
    tinker_logprobs(
        &pair.server,
        tinker_learn(&pair.server, model, seq_id, "cross_entropy", false, &tinker_one, 1), TINKER_N,
        unused);
    assert_true(tinker_step(&pair.server, model, seq_id + 1, 1e-2) > 0);
}

static json_t *ask(const char *sampler, int status)
{
    return tinker_post(&pair.server, "asample", status,
                       "{\"sampling_session_id\":\"%s\",\"seq_id\":%d,\"num_samples\":2,"
                       "\"prompt\":{\"chunks\":[{\"type\":\"encoded_text\",\"tokens\":[10,20,30,40]"
                       "}]},\"sampling_params\":{\"max_tokens\":6,\"seed\":3,\"stop\":[]},"
                       "\"prompt_logprobs\":true,\"topk_prompt_logprobs\":3}",
                       sampler, n_asked++);
}

struct said { // all that was sampled and scored
    struct bytes bytes;
};

static void put(struct bytes *to, struct proto_span span)
{
    bytes_append(to, span.data, span.len);
}

static void listen_to(const char *sampler, struct said *ret)
{
    struct bytes answer = BYTES_INIT;
    tinker_retrieve_bytes(&pair.server, ask(sampler, 200), &answer);
    const struct proto_span message = {(const unsigned char *)bytes_text(&answer), answer.len};
    bytes_clear(&ret->bytes);
    for (uint32_t field = 1; field <= 3; field++) put(&ret->bytes, tinker_field(message, field));
    bytes_release(&answer);
}

static bool is_same(const struct said *a, const struct said *b)
{
    return a->bytes.len == b->bytes.len && memcmp(a->bytes.data, b->bytes.data, a->bytes.len) == 0;
}

static void snapshot(int seq_id, const char *kind, char ret[160])
{
    json_t *answer = tinker_retrieve(
        &pair.server,
        tinker_post(&pair.server, "save_weights_for_sampler", 200,
                    "{\"model_id\":\"%s\",\"seq_id\":%d,\"sampling_session_seq_id\":%d,"
                    "\"kind\":\"%s\"}",
                    model, seq_id, n_sessions++, kind));
    snprintf(ret, 160, "%s", json_string_value(json_object_get(answer, "sampling_session_id")));
}

static json_t *sample_base(int status)
{
    return tinker_post(&pair.server, "create_sampling_session", status,
                       "{\"session_id\":\"%s\",\"sampling_session_seq_id\":%d,"
                       "\"base_model\":\"any/model\"}",
                       session, n_sessions++);
}

static void base(char ret[160])
{
    json_t *answer = sample_base(200);
    snprintf(ret, 160, "%s", json_string_value(json_object_get(answer, "sampling_session_id")));
    json_decref(answer);
}

TEST(test_kept)
{
    char first[160], inflight[160], reference[160], live[160];
    struct said wanted = {0}, now = {0}, other = {0};
    start(NULL, OPTIONS("--exact"));
    snapshot(1, "snapshot", first);
    snapshot(2, "inflight", inflight);
    base(reference);
    listen_to(first, &wanted);
    for (int i = 3; i < 9; i += 2) {
        step(i);
        listen_to(first, &now);
        assert_true(is_same(&now, &wanted));
        listen_to(reference, &now);
        assert_true(is_same(&now, &wanted));
    }
    snapshot(9, "snapshot", live);
    listen_to(live, &now);
    assert_false(is_same(&now, &wanted));
    listen_to(inflight, &other); // that follows the live weights
    assert_true(is_same(&now, &other));
    base(reference); // made when the model had changed
    listen_to(reference, &now);
    assert_true(is_same(&now, &wanted));
    step(10);
    tinker_refused(ask(live, 400), "--snapshots inflight");
    finish();
    tinker_model(&pair.server, session, model); // another run begins with it
    listen_to(first, &now);
    assert_true(is_same(&now, &wanted));
    daemon_holds(&pair.daemon, "frozen", folder);
    bytes_release(&wanted.bytes);
    bytes_release(&now.bytes);
    bytes_release(&other.bytes);
    tinker_pair_stop(&pair);
}

// A frozen model that is another one says nothing of version 0.
TEST(test_other_model)
{
    char first[160];
    start(daemon_model(test_folder(), true, 6), NULL);
    snapshot(1, "snapshot", first);
    step(2);
    tinker_refused(ask(first, 400), "--tandem-model with the model's own folder");
    tinker_refused(sample_base(400), "--tandem-model");
    char *log = test_read(pair.server.log);
    assert_contains(log, "is not of the model's folder");
    tinker_pair_stop(&pair);
}

static void run_script(const char *python)
{
    start(NULL, OPTIONS("--exact"));
    finish();
    tinker_script(&pair.server, python, "tests/clients/tinker_sdk.py", "base");
    tinker_pair_stop(&pair);
}

TEST(test_sdk)
{
    tinker_each_python(run_script);
}
