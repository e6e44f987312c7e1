/* test_tinker_base.c: version 0 while the whole model is trained: with the server's frozen model of
 * the model's own folder, snapshots of the beginning and sampling clients of the base model stay,
 * to the bit, log-probabilities of prompts included. Without it they end with what would help. With
 * the SDK, where there is one: the check `base` of tests/clients/tinker_sdk.py. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

static const char *folder;
static struct tinker_pair pair;
static char session[128];
static struct tinker_run run;
static int n_asked;

static void start(const char *frozen, const char *const more[])
{
    folder = daemon_model(test_folder(), true, 5);
    if (!frozen) frozen = folder;
    tinker_pair_start(&pair, folder,
                      OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--tandem-model", frozen),
                      more);
    run = tinker_whole(&pair.server, session);
}

static json_t *ask(const char *sampler, int status)
{
    return tinker_sample(&pair.server, sampler, n_asked++, status, 6,
                         ",\"num_samples\":2,\"prompt_logprobs\":true,\"topk_prompt_logprobs\":3");
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

TEST(test_kept)
{
    char first[160], inflight[160], reference[160], live[160];
    struct said wanted = {0}, now = {0}, other = {0};
    start(NULL, OPTIONS("--exact"));
    tinker_run_snapshot(&run, ",\"kind\":\"snapshot\"", first);
    tinker_run_snapshot(&run, ",\"kind\":\"inflight\"", inflight);
    tinker_sampler_of(&pair.server, session, "base_model", "any/model", reference);
    listen_to(first, &wanted);
    for (int i = 0; i < 3; i++) {
        tinker_run_update(&run, &tinker_one);
        listen_to(first, &now);
        assert_true(is_same(&now, &wanted));
        listen_to(reference, &now);
        assert_true(is_same(&now, &wanted));
    }
    tinker_run_snapshot(&run, ",\"kind\":\"snapshot\"", live);
    listen_to(live, &now);
    assert_false(is_same(&now, &wanted));
    listen_to(inflight, &other); // that follows the live weights
    assert_true(is_same(&now, &other));
    tinker_sampler_of(&pair.server, session, "base_model", "any/model",
                      reference); // made when the model had changed
    listen_to(reference, &now);
    assert_true(is_same(&now, &wanted));
    tinker_run_update(&run, &tinker_one);
    tinker_refused(ask(live, 400), "--snapshots inflight");
    tinker_finish(&pair.server, session);
    run = tinker_whole(&pair.server, session); // another run begins with it
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
    tinker_run_snapshot(&run, ",\"kind\":\"snapshot\"", first);
    tinker_run_update(&run, &tinker_one);
    tinker_refused(ask(first, 400), "--tandem-model with the model's own folder");
    tinker_refused(tinker_sampler(&pair.server, session, 400, "base_model", "any/model"),
                   "--tandem-model");
    char *log = test_read(pair.server.log);
    assert_contains(log, "is not of the model's folder");
    tinker_pair_stop(&pair);
}

static void run_script(const char *python)
{
    start(NULL, OPTIONS("--exact"));
    tinker_finish(&pair.server, session);
    tinker_script(&pair.server, python, "tests/clients/tinker_sdk.py", "base");
    tinker_pair_stop(&pair);
}

TEST(test_sdk)
{
    tinker_each_python(run_script);
}
