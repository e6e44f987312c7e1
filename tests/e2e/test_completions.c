/* test_completions.c: /v1/completions, /v1/chat/completions, /v1/rollouts and /generate of a real
 * cw-infer-server with a tiny random model: prompts of every form, seeds, log-probabilities. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

TEST(test_health_and_models)
{
    json_t *health = daemon_get(served.socket, "/health", 200);
    assert_string_equal(text_of(health, "status"), "ok");
    assert_int_equal(int_of(health, "weight_version") % 2, 0);
    assert_string_equal(text_of(health, "model"), "model");
    json_t *models = daemon_get(served.socket, "/v1/models", 200);
    const json_t *one = json_at(models, "data.0");
    assert_string_equal(text_of(one, "id"), "model");
    assert_int_equal(int_of(one, "max_model_len"), 512);
}

TEST(test_completion)
{
    const char *body = "{\"model\":\"model\",\"prompt\":\"hello there\",\"max_tokens\":12,"
                       "\"temperature\":0,\"logprobs\":0}";
    json_t *a = ask("/v1/completions", body);
    json_t *b = ask("/v1/completions", body);
    const json_t *choice = json_at(a, "choices.0"), *usage = json_object_get(a, "usage");
    assert_string_equal(text_of(a, "object"), "text_completion");
    assert_int_equal(json_array_size(json_object_get(choice, "token_ids")), 12);
    assert_string_equal(text_of(choice, "finish_reason"), "length");
    assert_int_equal(int_of(usage, "completion_tokens"), 12);
    assert_int_equal(int_of(usage, "total_tokens"), 12 + int_of(usage, "prompt_tokens"));
    assert_true(int_of(a, "weight_version") >= 2);
    assert_true(json_is_null(json_object_get(a, "spec_decode")));
    const json_t *logprobs = json_at(choice, "logprobs.token_logprobs");
    assert_int_equal(json_array_size(logprobs), 12);
    for (size_t i = 0; i < 12; i++)
        assert_true(json_number_value(json_array_get(logprobs, i)) <= 0);
    // greedy: the same again
    assert_true(
        json_equal(json_object_get(choice, "token_ids"), json_at(b, "choices.0.token_ids")));
}

TEST(test_prompts_of_every_form)
{
    // "hello" is "hell" (259) and "o"
    json_t *text = ask("/v1/completions", "{\"prompt\":\"hello\",\"max_tokens\":4,\"seed\":3}");
    json_t *ids = ask("/v1/completions", "{\"prompt\":[259,111],\"max_tokens\":4,\"seed\":3}");
    json_t *many =
        ask("/v1/completions", "{\"prompt\":[[259,111],[5]],\"max_tokens\":4,\"seed\":3,\"n\":2}");
    json_t *texts =
        ask("/v1/completions", "{\"prompt\":[\"hello\",\"x\"],\"max_tokens\":4,\"seed\":3}");
    const json_t *want = json_at(text, "choices.0.token_ids");
    assert_true(json_equal(want, json_at(ids, "choices.0.token_ids")));
    assert_true(json_equal(want, json_at(many, "choices.0.token_ids")));
    assert_true(json_equal(want, json_at(texts, "choices.0.token_ids")));
    assert_int_equal(json_array_size(json_object_get(many, "choices")), 4);
    assert_int_equal(int_of(many, "choices.3.index"), 3);
    assert_false(json_equal(want, json_at(many, "choices.1.token_ids")));
}

TEST(test_seeds)
{
    const char *form = "{\"prompt\":\"abc\",\"max_tokens\":16,\"seed\":%d,\"n\":%d}";
    json_t *three = ask("/v1/completions", test_text(form, 11, 3));
    json_t *one = ask("/v1/completions", test_text(form, 11, 1));
    json_t *other = ask("/v1/completions", test_text(form, 12, 1));
    const json_t *ids = json_at(one, "choices.0.token_ids");
    assert_true(json_equal(ids, json_at(three, "choices.0.token_ids")));
    assert_false(json_equal(ids, json_at(three, "choices.1.token_ids")));
    assert_false(json_equal(ids, json_at(other, "choices.0.token_ids")));
}

TEST(test_top_logprobs)
{
    json_t *a = ask("/v1/completions",
                    "{\"prompt\":\"abc\",\"max_tokens\":6,\"temperature\":0,\"logprobs\":3}");
    const json_t *l = json_at(a, "choices.0.logprobs");
    for (size_t i = 0; i < 6; i++) {
        double sampled = json_number_value(json_at(l, "token_logprobs.%zu", i));
        json_t *top = json_at(l, "top_logprobs.%zu", i), *value;
        const char *key;
        double best = -INFINITY;
        assert_in_range(json_object_size(top), 1, 4);
        json_object_foreach (top, key, value) best = fmax(best, json_number_value(value));
        assert_true(best == sampled); // greedy takes the likeliest, and its number is one
    }
}

// All 300 tokens, once: the distribution sums to 1 and holds the sampled token.
TEST(test_logprobs_are_a_distribution)
{
    json_t *a = ask("/v1/rollouts",
                    "{\"groups\":[{\"prompt_token_ids\":[1,2,3]}],\"sampling\":{\"max_tokens\":"
                    "8,\"top_k\":20,\"seed\":5}}");
    const json_t *raw = json_object_get(a, "logprobs"), *cut = json_object_get(a, "cut_logprobs");
    const json_t *mass = json_object_get(a, "kept_mass");
    assert_int_equal(json_array_size(raw), 8);
    for (size_t i = 0; i < 8; i++) {
        double l = json_number_value(json_array_get(raw, i)),
               c = json_number_value(json_array_get(cut, i));
        double kept = json_number_value(json_array_get(mass, i));
        assert_true(l <= c && c <= 0 && kept > 0 && kept <= 1);
        assert_true(fabs(exp(l - c) - kept) < 1e-4);
    }
}

TEST(test_chat)
{
    const char *chat = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":10,"
                       "\"temperature\":0,\"logprobs\":true,\"top_logprobs\":2}";
    json_t *a = ask("/v1/chat/completions", chat);
    json_t *b = ask("/v1/completions",
                    "{\"prompt\":\"<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n\","
                    "\"max_tokens\":10,\"temperature\":0}");
    const json_t *message = json_at(a, "choices.0.message");
    assert_string_equal(text_of(a, "object"), "chat.completion");
    assert_string_equal(text_of(message, "role"), "assistant");
    assert_true(json_equal(json_object_get(message, "content"), json_at(b, "choices.0.text")));
    assert_int_equal(int_of(a, "usage.prompt_tokens"), int_of(b, "usage.prompt_tokens"));
    const json_t *content = json_at(a, "choices.0.logprobs.content");
    assert_int_equal(json_array_size(content), 10);
    assert_int_equal(json_array_size(json_at(content, "0.top_logprobs")), 2);
}

static void check_telemetry(const json_t *line, int prompt, int generated)
{
    static const char *const numbers[] = {
        "cached_prompt_tokens", "queue_ms",   "first_token_ms",   "latency_ms",
        "kv_bytes_peak",        "num_drafts", "num_draft_tokens", "num_accepted_tokens"};
    const json_t *t = json_object_get(line, "telemetry");
    assert_int_equal(int_of(t, "prompt_tokens"), prompt);
    assert_int_equal(int_of(t, "generated_tokens"), generated);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!json_is_number(json_object_get(t, numbers[i]))) fail_msg("no %s", numbers[i]);
    assert_true(int_of(t, "kv_bytes_peak") > 0);
    assert_true(json_is_null(json_object_get(t, "accept_rate")));
    assert_true(json_is_array(json_object_get(t, "num_accepted_tokens_per_pos")));
    assert_non_null(json_object_get(t, "mean_acceptance_length"));
    assert_int_equal(int_of(t, "weight_version_first"), int_of(t, "weight_version_last"));
    assert_true(real_of(t, "first_token_ms") <= real_of(t, "latency_ms"));
}

// What a chat is rendered to generates what the chat does.
TEST(test_render)
{
    const char *chat = "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"seed\":5,"
                       "\"max_completion_tokens\":6,\"logprobs\":true,\"cache_salt\":\"s\","
                       "\"stop\":[\"zz\"],\"tools\":[]}";
    json_t *rendered = ask("/v1/chat/completions/render", chat);
    const json_t *sampling = json_at(rendered, "sampling_params");
    assert_int_equal(int_of(sampling, "max_tokens"), 6);
    assert_string_equal(text_of(sampling, "stop.0"), "zz");
    assert_string_equal(text_of(rendered, "cache_salt"), "s");
    char *body = test_keep(json_dumps(rendered, 0));
    const json_t *want = json_at(ask("/v1/chat/completions", chat), "choices.0.token_ids"),
                 *got = json_at(ask("/inference/v1/generate", body), "choices.0.token_ids");
    assert_int_equal(json_array_size(want), 6);
    assert_true(json_equal(want, got));
}

TEST(test_rollouts)
{
    struct wire_answer a;
    int seen[3] = {0};
    daemon_request(served.socket, "POST", "/v1/rollouts", "",
                   "{\"groups\":[{\"id\":\"a\",\"prompt_token_ids\":[1,2,3],\"n\":4},"
                   "{\"id\":7,\"prompt\":\"hello\"},"
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"n\":2}],"
                   "\"sampling\":{\"n\":3,\"max_tokens\":20,\"temperature\":0.7,\"seed\":4}}",
                   &a);
    assert_int_equal(a.status, 200);
    assert_contains(bytes_text(&a.head), "application/x-ndjson");
    const json_t *lines = json_of_lines(bytes_text(&a.body)), *line;
    size_t i;
    json_array_foreach (lines, i, line) {
        const json_t *id = json_object_get(line, "group_id"),
                     *ids = json_object_get(line, "token_ids");
        int group = json_is_string(id) ? 0 : json_integer_value(id) == 7 ? 1 : 2;
        size_t n = json_array_size(ids);
        if (group == 2) assert_int_equal(json_integer_value(id), 2); // its index
        assert_int_equal(seen[group] & 1 << int_of(line, "sample"), 0);
        seen[group] |= 1 << int_of(line, "sample");
        assert_int_equal(n, 20);
        assert_int_equal(json_array_size(json_object_get(line, "logprobs")), n);
        assert_int_equal(json_array_size(json_object_get(line, "weight_versions")), n);
        assert_null(json_object_get(line, "cut_logprobs"));
        assert_string_equal(text_of(line, "finish_reason"), "length");
        text_of(line, "text");
        const json_t *prompt = json_object_get(line, "prompt_token_ids");
        assert_true((prompt != NULL) == (group != 0)); // only what the server tokenised
        if (prompt) assert_true(json_array_size(prompt) > 0);
        if (group == 1) assert_int_equal(json_array_size(prompt), 2);
        check_telemetry(line, prompt ? (int)json_array_size(prompt) : 3, (int)n);
    }
    assert_int_equal(i, 9);
    assert_int_equal(seen[0], 15);
    assert_int_equal(seen[1], 7);
    assert_int_equal(seen[2], 3);
}

TEST(test_rollouts_equal_completions)
{
    json_t *line = ask("/v1/rollouts", "{\"groups\":[{\"prompt_token_ids\":[9,8,7]}],\"sampling\":"
                                       "{\"max_tokens\":16,\"seed\":77,\"stop\":\"zz\"}}");
    json_t *completion =
        ask("/v1/completions", "{\"prompt\":[9,8,7],\"max_tokens\":16,\"seed\":77}");
    assert_true(
        json_equal(json_object_get(line, "token_ids"), json_at(completion, "choices.0.token_ids")));
}

TEST(test_generate)
{
    json_t *a =
        ask("/generate", "{\"prompt\":{\"prompt_token_ids\":[1,2,3]},\"n\":2,\"max_tokens\":5,"
                         "\"temperature\":1.0,\"logprobs\":0}");
    const json_t *ids = json_object_get(a, "completion_ids"),
                 *logprobs = json_object_get(a, "logprobs");
    const json_t *outputs = json_object_get(a, "outputs");
    assert_int_equal(json_array_size(ids), 2);
    assert_int_equal(json_array_size(json_array_get(ids, 1)), 5);
    assert_int_equal(json_array_size(json_array_get(logprobs, 1)), 5);
    assert_int_equal(json_array_size(json_at(a, "prompt_ids.0")), 3);
    assert_int_equal(json_array_size(outputs), 2);
    assert_true(json_equal(json_at(outputs, "1.token_ids"), json_array_get(ids, 1)));
    a = ask("/generate", "{\"prompts\":[\"hello\",[1,2]],\"max_tokens\":2}");
    assert_int_equal(json_array_size(json_object_get(a, "completion_ids")), 2);
    assert_true(json_is_null(json_object_get(a, "logprobs")));
}

TESTS_BETWEEN(served_start, served_stop)
