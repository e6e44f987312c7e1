/* test_spec_counters.c: what a run counts of speculative decoding: its own samples', and those of
 * several servers. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/http/http_client.h"
#include "trainer/rollout/spec_counters.h"
#include "tests/support/daemon.h"
#include "tests/support/training.h"

// Sum of a field of the samples' telemetry over a step's rollouts.
static double telemetry_sum(const struct scene *s, const char *file, const char *key)
{
    double sum = 0;
    const json_t *samples = json_of_lines_file(test_path(s->folder, file)), *sample;
    size_t i;
    json_array_foreach (samples, i, sample)
        sum += json_number_value(json_object_get(json_object_get(sample, "telemetry"), key));
    return sum;
}

// Tokens that a step's rollouts mark as accepted drafts.
static int marked_tokens(const struct scene *s, const char *file)
{
    int marked = 0;
    const json_t *samples = json_of_lines_file(test_path(s->folder, file)), *sample, *entry;
    size_t i, k;
    json_array_foreach (samples, i, sample)
        json_array_foreach (json_object_get(sample, "accepted"), k, entry)
            marked += json_integer_value(entry) > 0;
    return marked;
}

// A step's speculative counters are the difference of the daemon's, and so the sum over its
// samples.
TEST_IN(speculative_counters, scene_open)
{
    assert_train(s, 0, "off", "--max-steps 1");
    json_t *m = last_metrics(s, "off");
    assert_null(json_object_get(m, "spec_decode/num_drafts"));
    daemon_kill(&s->daemon);
    // fixed: what is drafted is no matter of measured times
    daemon_start(&s->daemon, s->model, args("--speculative ngram:3 --draft-length fixed"));
    // so cold that samples repeat themselves, and long enough to be drafted from
    assert_train(
        s, 0, "on",
        "--max-steps 2 --temperature 0.01 --max-completion-length 200 --log-completions --cost");
    m = last_metrics(s, "on");
    double drafted = metric(m, "spec_decode/num_draft_tokens");
    double accepted = metric(m, "spec_decode/num_accepted_tokens");
    assert_true(drafted > 0 && accepted > 0);
    assert_true(telemetry_sum(s, "on/rollouts/step-2.jsonl", "num_drafts") ==
                metric(m, "spec_decode/num_drafts"));
    assert_true(telemetry_sum(s, "on/rollouts/step-2.jsonl", "num_draft_tokens") == drafted);
    assert_true(telemetry_sum(s, "on/rollouts/step-2.jsonl", "num_accepted_tokens") == accepted);
    assert_true(marked_tokens(s, "on/rollouts/step-2.jsonl") == accepted);
    assert_true(fabs(metric(m, "spec_decode/acceptance_rate") - accepted / drafted) < 1e-6);
    assert_true(metric(m, "spec_decode/acceptance_length") >= 1);
    assert_true(metric(m, "spec_decode/acceptance_rate_pos_0") >= 0);
    assert_true(metric(m, "inference/undrafted") < 1);
    assert_true(fabs(metric(m, "rewards/cost/acceptance") - metric(m, "inference/accept_rate")) <
                1e-6);
    assert_said(s, "SpecDecoding metrics: Mean acceptance length: ");
}

// Draft tokens of one answer, as its daemon's own counters have them.
static double draft_from(const struct daemon *d)
{
    daemon_post(d->socket, "/v1/completions", 200,
                "{\"prompt\":[5,6,7,5,6],\"max_tokens\":60,\"temperature\":0,"
                "\"ignore_eos\":true}");
    return real_of(daemon_get(d->socket, "/v1/spec_decode_stats", 200), "num_draft_tokens");
}

// Counters of the trained daemon, of one more that drafts and of one that does not.
TEST_IN(daemons_are_summed, scene_open)
{
    struct daemon second = {0}, third = {0};
    struct bridge_file *file;
    struct http_client *http;
    struct spec_watch *watch = NULL;
    struct spec_counters counted;
    daemon_kill(&s->daemon);
    const char *const *drafting = args("--speculative ngram:3 --draft-length fixed");
    daemon_start(&s->daemon, s->model, drafting);
    daemon_start(&second, s->model, drafting);
    daemon_start(&third, s->model, NULL);
    const char *more = test_text("%s,%s", second.bridge, third.bridge);
    assert_ok(bridge_file_read(s->daemon.bridge, &file));
    assert_ok(http_client_new(file->socket, &http));
    assert_ok(spec_watch_new(file, http, more, &watch));
    const double before = draft_from(&second); // not of the step
    assert_true(before > 0);
    assert_ok(spec_watch_begin(watch));
    const double first = draft_from(&s->daemon), both = draft_from(&second);
    draft_from(&third);
    assert_ok(spec_watch_end(watch, &counted));
    assert_true(counted.present && first > 0 && both > before);
    assert_true(counted.num_draft_tokens == first + both - before);
    assert_int_equal(counted.n_positions, 3);
    // of daemons that do not draft: nothing, and no error
    spec_watch_free(watch);
    http_client_free(http);
    bridge_file_free(file);
    watch = NULL;
    assert_ok(bridge_file_read(third.bridge, &file));
    assert_ok(http_client_new(file->socket, &http));
    assert_ok(spec_watch_new(file, http, NULL, &watch));
    assert_ok(spec_watch_begin(watch));
    draft_from(&third);
    assert_ok(spec_watch_end(watch, &counted));
    assert_false(counted.present);
    spec_watch_free(watch);
    http_client_free(http);
    bridge_file_free(file);

    // in a run: nobody else asked them, so it is what the samples say
    assert_train(s, 0, "run",
                 "--max-steps 1 --temperature 0.01 --max-completion-length 100 --log-completions "
                 "--also-count %s",
                 more);
    json_t *m = last_metrics(s, "run");
    assert_true(metric(m, "spec_decode/num_draft_tokens") > 0);
    assert_true(telemetry_sum(s, "run/rollouts/step-1.jsonl", "num_draft_tokens") ==
                metric(m, "spec_decode/num_draft_tokens"));
    // what cannot be counted is said before anything is done
    assert_train(s, 1, "twice", "--max-steps 1 --also-count %s", s->daemon.bridge);
    assert_said(s, "would count twice");
    assert_train(s, 1, "comma", "--max-steps 1 --also-count %s,", second.bridge);
    assert_said(s, "names no bridge file before or behind a comma");
    daemon_kill(&third);
    assert_train(s, 1, "gone", "--max-steps 1 --also-count %s", third.bridge);
    assert_said(s, third.bridge);
    assert_false(file_exists(test_path(s->folder, "gone")));
}
