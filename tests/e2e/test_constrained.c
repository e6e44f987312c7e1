/* test_constrained.c: constrained responses of a real cw-infer-server with a tiny random model,
 * beside all that sampling has: whatever the rest of the request says, what ends by itself is what
 * the constraint takes, and raw log-probabilities are those of the same text without one. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

#include <regex.h>

TESTS_BETWEEN(served_start, served_stop)

static json_t *with(const json_t *fields, const json_t *more)
{
    json_t *body = json_pack("{s:s, s:i, s:i, s:f}", "prompt", "hello there", "max_tokens", 120,
                             "seed", 5, "temperature", 1.5);
    json_object_update(body, (json_t *)fields);
    json_object_update(body, (json_t *)more);
    return body;
}

static json_t *post(const json_t *body, int status)
{
    char *text = test_keep(json_dumps(body, 0));
    json_t *answer = daemon_post(served.socket, "/v1/completions", status, text);
    return answer;
}

static void check_text(const json_t *constraint, const char *what, const char *text)
{
    const char *pattern = json_string_value(json_object_get(constraint, "pattern"));
    regex_t compiled;
    if (pattern) {
        assert_int_equal(regcomp(&compiled, pattern, REG_EXTENDED | REG_NOSUB), 0);
        if (regexec(&compiled, text, 0, NULL, 0) != 0)
            fail_msg("%s: \"%s\" is no %s", what, text, pattern);
        regfree(&compiled);
        return;
    }
    const json_t *value = json_of(text), *b = json_object_get(value, "b");
    assert_in_range(int_of(value, "a"), 10, 99);
    assert_true(json_object_size(value) == 1 || json_is_string(b));
}

static int check_one(const json_t *constraint, const json_t *request)
{
    json_t *body =
        test_keep(with(json_object_get(constraint, "fields"), json_object_get(request, "fields")));
    const json_t *choices = json_object_get(post(body, 200), "choices");
    int ended = 0;
    for (size_t i = 0; i < json_array_size(choices); i++) {
        const json_t *choice = json_array_get(choices, i);
        const bool stopped = strcmp(text_of(choice, "finish_reason"), "stop") == 0;
        if (stopped) check_text(constraint, text_of(request, "what"), text_of(choice, "text"));
        ended += stopped;
    }
    return ended;
}

TEST(beside_what_sampling_has)
{
    const json_t *requests = test_rows("constrained", "requests"),
                 *constraints = test_rows("constrained", "constraints");
    size_t i, k;
    json_t *constraint, *request;
    int ended = 0, asked = 0;
    json_array_foreach (constraints, i, constraint)
        json_array_foreach (requests, k, request) {
            ended += check_one(constraint, request);
            asked++;
        }
    assert_true(ended > asked); // several of some
}

TEST(refusals)
{
    const json_t *rows = test_rows("constrained", "refused");
    for (size_t i = 0; i < json_array_size(rows); i++) {
        json_t *body = test_keep(with(json_object_get(json_array_get(rows, i), "fields"), NULL));
        json_t *object = post(body, 400);
        char *answer = test_keep(json_dumps(object, 0));
        assert_contains(answer, row_text(rows, i, "says"));
        assert_string_equal(text_of(object, "error.param"), row_text(rows, i, "param"));
    }
}

// The same tokens as a prompt have the numbers that they were sampled with, to the bit.
TEST(log_probabilities_are_raw)
{
    json_t *body = test_keep(with(json_of("{\"guided_regex\":\"[a-z]{4}-\\\\d\",\"logprobs\":0,"
                                          "\"temperature\":1}"),
                                  NULL));
    const json_t *choice = json_at(post(body, 200), "choices.0"),
                 *ids = json_object_get(choice, "token_ids"),
                 *sampled = json_at(choice, "logprobs.token_logprobs");
    assert_string_equal(text_of(choice, "finish_reason"), "stop");
    json_t *all = json_of("[104,101,108,108,111]"), *plain;
    json_object_set_new(body, "prompt", json_copy(all));
    choice = json_at(post(body, 200), "choices.0");
    ids = json_object_get(choice, "token_ids");
    sampled = json_at(choice, "logprobs.token_logprobs");
    json_array_extend(all, (json_t *)ids);
    plain = json_pack("{s:O, s:i, s:i, s:b, s:f}", "prompt", all, "max_tokens", 0, "logprobs", 0,
                      "echo", 1, "temperature", 1.0);
    const json_t *scored = json_at(post(plain, 200), "choices.0.logprobs.token_logprobs");
    const size_t n = json_array_size(sampled);
    const double limit = on_cpu() ? 0 : 1e-4; // a GPU adds up a prompt in another order
    assert_true(n > 5 && json_array_size(scored) == n + 5);
    for (size_t i = 0; i < n; i++)
        assert_true(fabs(json_number_value(json_array_get(sampled, i)) -
                         json_number_value(json_array_get(scored, i + 5))) <= limit);
    json_decref(plain);
}

// A stream gives the same text, and a cut-off answer says so.
TEST(streams_and_ends)
{
    json_t *body =
        test_keep(with(json_of("{\"guided_regex\":\"[ab]{60}\",\"max_tokens\":20}"), NULL));
    const json_t *cut = json_at(post(body, 200), "choices.0");
    assert_string_equal(text_of(cut, "finish_reason"), "length");
    assert_int_equal(strspn(text_of(cut, "text"), "ab"), strlen(text_of(cut, "text")));
    json_object_set_new(body, "stream", json_true());
    struct wire_answer a;
    char *text = test_keep(json_dumps(body, 0));
    daemon_request(served.socket, "POST", "/v1/completions", "", text, &a);
    assert_int_equal(a.status, 200);
    SCOPED(bytes_release) struct bytes joined = BYTES_INIT;
    for (const char *at = bytes_text(&a.body); (at = strstr(at, "data: {")); at++) {
        json_t *chunk = test_keep(json_loads(at + 6, JSON_DISABLE_EOF_CHECK, NULL));
        const json_t *piece = json_at(chunk, "choices.0.text");
        bytes_puts(&joined, json_string_value(piece));
    }
    assert_string_equal(bytes_text(&joined), text_of(cut, "text"));
}
