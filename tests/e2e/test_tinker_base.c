/* test_tinker_base.c: version 0 while the whole model is trained: with the server's frozen model of
 * the model's own folder, snapshots of the beginning and sampling clients of the base model stay,
 * to the bit, log-probabilities of prompts included. Without it they end with what would help. With
 * the SDK, where there is one: the check `base` of tests/clients/tinker_sdk.py. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"

static const char *folder;
static int n_asked;

static void start(const char *frozen, const char *const more[])
{
    folder = daemon_model(test_folder(), true, 5);
    if (!frozen) frozen = folder;
    tinker_pair_start(
        folder, args("--exact --dtype %s --tandem-model %s", daemon_exact_dtype(), frozen), more);
    trained = tinker_whole();
}

static json_t *ask(const char *sampler, int status)
{
    return tinker_sample(sampler, n_asked++, status, 6,
                         ",\"num_samples\":2,\"prompt_logprobs\":true,\"topk_prompt_logprobs\":3");
}

// All that was sampled and scored.
static struct proto_span said_by(const char *sampler)
{
    return tinker_message(ask(sampler, 200));
}

static bool is_same(struct proto_span a, struct proto_span b)
{
    bool same = true;
    for (uint32_t field = 1; field <= 3; field++) {
        const struct proto_span x = tinker_field(a, field), y = tinker_field(b, field);
        same &= x.len == y.len && memcmp(x.data, y.data, x.len) == 0;
    }
    return same;
}

TINKER_TEST(test_kept)
{
    const char *first, *inflight, *reference, *live;
    start(NULL, args("--exact"));
    first = tinker_run_snapshot(&trained, ",\"kind\":\"snapshot\"");
    inflight = tinker_run_snapshot(&trained, ",\"kind\":\"inflight\"");
    reference = tinker_sampler_of("base_model", "any/model");
    const struct proto_span wanted = said_by(first);
    for (int i = 0; i < 3; i++) {
        tinker_run_update(&trained, &tinker_one);
        assert_true(is_same(said_by(first), wanted));
        assert_true(is_same(said_by(reference), wanted));
    }
    live = tinker_run_snapshot(&trained, ",\"kind\":\"snapshot\"");
    assert_false(is_same(said_by(live), wanted));
    assert_true(is_same(said_by(live), said_by(inflight)));   // that follows the live weights
    reference = tinker_sampler_of("base_model", "any/model"); // made when the model had changed
    assert_true(is_same(said_by(reference), wanted));
    tinker_run_update(&trained, &tinker_one);
    tinker_refused(ask(live, 400), "--snapshots inflight");
    tinker_finish(session);
    trained = tinker_whole(); // another run begins with it
    assert_true(is_same(said_by(first), wanted));
    daemon_holds(&pair.daemon, "frozen", folder);
}

// A frozen model that is another one says nothing of version 0.
TINKER_TEST(test_other_model)
{
    const char *first;
    start(daemon_model(test_folder(), true, 6), NULL);
    first = tinker_run_snapshot(&trained, ",\"kind\":\"snapshot\"");
    tinker_run_update(&trained, &tinker_one);
    tinker_refused(ask(first, 400), "--tandem-model with the model's own folder");
    tinker_refused(tinker_sampler(400, "base_model", "any/model"), "--tandem-model");
    assert_contains(test_read(pair.server.log), "is not of the model's folder");
}

static void run_script(const char *python)
{
    start(NULL, args("--exact"));
    tinker_finish(session);
    tinker_script(python, "tests/clients/tinker_sdk.py", "base");
    tinker_pair_stop();
}

TEST(test_sdk)
{
    tinker_each_python(run_script);
}
