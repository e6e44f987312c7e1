/* test_bridge_endpoints.c: /bridge/info, pause and resume, /reload, /metrics and the prefix cache
 * of a real cw-infer-server. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

TEST(test_bridge_info)
{
    json_t *info = daemon_get(served.socket, "/bridge/info", 200);
    assert_string_equal(text_of(info, "status"), "ok");
    assert_string_equal(text_of(info, "bridge"), served.bridge);
    assert_true(json_is_object(json_object_get(info, "control")));
    assert_null(json_object_get(info, "checksums"));
    json_int_t n = int_of(info, "num_tensors");
    info = daemon_get(served.socket, "/bridge/info?canary=1&checksums=1", 200);
    assert_int_equal(strlen(text_of(info, "canary")), 16);
    static const char *const misspelt[][2] = {
        {"/bridge/info?canary=1&checksum=1", "\"checksum\" is no parameter of /bridge/info"},
        {"/v1/spec_decode_stats?request_id=a", "\"request_id\" is no parameter of"}};
    for (int i = 0; i < 2; i++)
        assert_contains(text_of(daemon_get(served.socket, misspelt[i][0], 400), "error.message"),
                        misspelt[i][1]);
    daemon_get(served.socket, "/v1/models?api-version=1", 200); // as clients of OpenAI's may
    const json_t *sums = json_object_get(info, "checksums");
    assert_int_equal(json_array_size(sums), n);
    for (json_int_t i = 0; i < n; i++)
        assert_int_equal(strlen(json_string_value(json_array_get(sums, (size_t)i))), 16);
}

TEST(test_pause_and_resume)
{
    struct wire_answer a;
    ask("/bridge/pause", "");
    int fd = daemon_ask(&served, "/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":2}");
    assert_false(wire_read(fd, 400, &a)); // nothing while paused
    assert_int_equal(a.status, 0);
    json_t *resumed = ask("/bridge/resume", "");
    assert_string_equal(text_of(resumed, "status"), "resumed");
    assert_true(wire_read(fd, 10000, &a));
    assert_int_equal(a.status, 200);
    close(fd);
}

// Two groups wait; the first ends where it is, before its prompt is scored, the other goes on.
TEST(test_stopped_group)
{
    struct wire_answer a;
    ask("/bridge/pause", "");
    int fd = daemon_ask(&served, "/v1/rollouts",
                        "{\"request_id\":\"mine\",\"groups\":[{\"id\":7,\"n\":2,\"prompt\":\"ab\"},"
                        "{\"id\":8,\"prompt\":\"ab\"}],\"sampling\":{\"max_tokens\":5,"
                        "\"ignore_eos\":true,\"prompt_logprobs\":0}}");
    json_int_t stopped = 0;
    for (int i = 0; i < 100 && stopped == 0; i++) { // until the request was read
        json_t *answer = daemon_post(
            served.socket, "/v1/rollouts/stop?request_id=mine&group_ids=[7,%228%22]", 200, "");
        stopped = int_of(answer, "stopped");
        usleep(20000);
    }
    assert_int_equal(stopped, 2);
    ask("/bridge/resume", "");
    assert_true(wire_read(fd, 10000, &a));
    const json_t *samples = json_of_lines(bytes_text(&a.body)), *sample;
    size_t n;
    json_array_foreach (samples, n, sample) {
        const bool first = int_of(sample, "group_id") == 7;
        assert_string_equal(text_of(sample, "finish_reason"), first ? "stop" : "length");
        assert_int_equal(json_array_size(json_object_get(sample, "token_ids")), first ? 0 : 5);
    }
    assert_int_equal(n, 3);
    close(fd);
    static const char *const refused[][2] = {
        {"?group_ids=[7]", "request_id"},
        {"?request_id=mine&group_ids=7", "\"group_ids\" is '7', no JSON list"},
        {"?request_id=mine&group_ids=[7", "group_ids"},
        {"?request_id=mine", "group_ids"}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const char *path = test_text("/v1/rollouts/stop%s", refused[i][0]);
        json_t *answer = daemon_post(served.socket, path, 400, "");
        assert_contains(text_of(answer, "error.message"), refused[i][1]);
    }
}

TEST(test_reload)
{
    const char *asked = "{\"prompt\":\"reload\",\"max_tokens\":10,\"temperature\":0}";
    const char *other = daemon_model(test_folder(), false, 8);
    json_t *before = ask("/v1/completions", asked);
    json_t *reloaded = ask("/reload", test_text("{\"model\":\"%s\"}", other));
    json_t *between = ask("/v1/completions", asked);
    assert_int_equal(int_of(reloaded, "weight_version"), int_of(before, "weight_version") + 2);
    assert_int_equal(int_of(between, "weight_version"), int_of(reloaded, "weight_version"));
    ask("/reload", "");
    json_t *after = ask("/v1/completions", asked);
    assert_false(json_equal(json_at(before, "choices.0.token_ids"),
                            json_at(between, "choices.0.token_ids")));
    assert_true(
        json_equal(json_at(before, "choices.0.token_ids"), json_at(after, "choices.0.token_ids")));
}

TEST(test_metrics)
{
    const json_t *names = test_rows("metrics", "served");
    for (size_t i = 0; i < json_array_size(names); i++)
        daemon_metric(&served, json_string_value(json_array_get(names, i)));
    double tokens = daemon_metric(&served, "vllm:generation_tokens_total");
    double ended = daemon_metric(&served, "vllm:e2e_request_latency_seconds_count");
    ask("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":9}");
    assert_true(daemon_metric(&served, "vllm:generation_tokens_total") == tokens + 9);
    assert_true(daemon_metric(&served, "vllm:e2e_request_latency_seconds_count") == ended + 1);
}

// A prompt of 40 tokens that nobody asked before, then again, as one and as a group: blocks of 16
// tokens are found, and the answer is the same.
TEST(test_prefix_cache)
{
    const char *tokens = "20";
    for (int i = 1; i < 40; i++) tokens = test_text("%s,%d", tokens, 20 + i * 11 % 90);
    const char *asked =
        test_text("{\"max_tokens\":8,\"temperature\":0,\"logprobs\":1,\"prompt\":[%s]}", tokens);
    const char *group =
        test_text("{\"sampling\":{\"max_tokens\":2},\"groups\":[{\"id\":\"g\",\"n\":3,"
                  "\"prompt_token_ids\":[%s]}]}",
                  tokens);
    const double queries = daemon_metric(&served, "vllm:prefix_cache_queries_total");
    const double hits = daemon_metric(&served, "vllm:prefix_cache_hits_total");
    json_t *first = ask("/v1/completions", asked);
    json_t *second = ask("/v1/completions", asked);
    assert_int_equal(int_of(first, "usage.prompt_tokens_details.cached_tokens"), 0);
    assert_int_equal(int_of(second, "usage.prompt_tokens_details.cached_tokens"), 32);
    assert_true(
        json_equal(json_at(first, "choices.0.token_ids"), json_at(second, "choices.0.token_ids")));
    assert_true(
        json_equal(json_at(first, "choices.0.logprobs"), json_at(second, "choices.0.logprobs")));
    assert_true(daemon_metric(&served, "vllm:prefix_cache_queries_total") == queries + 80);
    assert_true(daemon_metric(&served, "vllm:prefix_cache_hits_total") == hits + 32);
    struct wire_answer a;
    daemon_request(served.socket, "POST", "/v1/rollouts", "", group, &a);
    assert_int_equal(a.status, 200);
    const json_t *lines = json_of_lines(bytes_text(&a.body)), *line;
    size_t n;
    json_array_foreach (lines, n, line)
        assert_int_equal(int_of(line, "telemetry.cached_prompt_tokens"), 32);
    assert_int_equal(n, 3);
}

TESTS_BETWEEN(served_start, served_stop)
