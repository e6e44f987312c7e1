/* test_streams.c: streams of a real cw-infer-server give what whole responses give, and stop
 * strings and tokens end both alike. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

struct joined { // what the chunks of a stream give together, by choice
    struct bytes text[4];
    json_t *ids[4], *logprobs[4];
    const char *finish[4];
    json_t *usage;
    int chunks;
    bool done;
};

static void join_chunk(struct joined *j, const json_t *chunk)
{
    const json_t *choice = json_array_get(json_object_get(chunk, "choices"), 0); // NULL: the last
    j->chunks++;
    if (!choice) {
        j->usage = json_object_get(chunk, "usage");
        return;
    }
    json_int_t i = int_of(choice, "index");
    assert_in_range(i, 0, 3);
    const json_t *delta = json_object_get(choice, "delta");
    const json_t *text =
        delta ? json_object_get(delta, "content") : json_object_get(choice, "text");
    assert_true(json_is_string(text));
    bytes_append(&j->text[i], json_string_value(text), json_string_length(text));
    if (!j->ids[i]) j->ids[i] = test_keep(json_array());
    if (!j->logprobs[i]) j->logprobs[i] = test_keep(json_array());
    json_array_extend(j->ids[i], json_object_get(choice, "token_ids"));
    const json_t *l = json_object_get(choice, "logprobs");
    json_t *list = json_object_get(l, json_object_get(l, "content") ? "content" : "token_logprobs");
    if (list) json_array_extend(j->logprobs[i], list);
    const char *finish = json_string_value(json_object_get(choice, "finish_reason"));
    if (!finish) return;
    assert_null(j->finish[i]); // once
    j->finish[i] = finish;
}

static void join_stream(const char *path, const char *body, struct joined *ret)
{
    struct wire_answer a;
    memset(ret, 0, sizeof *ret);
    daemon_request(served.socket, "POST", path, "", body, &a);
    assert_int_equal(a.status, 200);
    assert_contains(bytes_text(&a.head), "text/event-stream");
    for (char *line, *rest = a.body.data; (line = strsep(&rest, "\n"));) {
        if (!*line) continue;
        assert_int_equal(strncmp(line, "data: ", 6), 0);
        assert_false(ret->done);
        if (strcmp(line, "data: [DONE]") == 0) {
            ret->done = true;
            continue;
        }
        json_t *chunk = test_keep(json_loads(line + 6, JSON_ALLOW_NUL, NULL));
        if (!chunk) fail_msg("not JSON: %s", line);
        join_chunk(ret, chunk);
    }
    assert_true(ret->done);
}

static void compare_stream(const char *path, const char *fields, int n)
{
    struct joined j;
    json_t *whole = ask(path, test_text("{%s}", fields));
    join_stream(
        path, test_text("{%s,\"stream\":true,\"stream_options\":{\"include_usage\":true}}", fields),
        &j);
    for (int i = 0; i < n; i++) {
        const json_t *choice = json_at(whole, "choices.%d", i),
                     *l = json_object_get(choice, "logprobs");
        const json_t *message = json_object_get(choice, "message");
        const json_t *text =
            json_object_get(message ? message : choice, message ? "content" : "text");
        assert_int_equal(j.text[i].len, json_string_length(text));
        assert_memory_equal(bytes_text(&j.text[i]), json_string_value(text), j.text[i].len);
        assert_true(json_equal(j.ids[i], json_object_get(choice, "token_ids")));
        assert_string_equal(j.finish[i], text_of(choice, "finish_reason"));
        const json_t *list = json_object_get(l, message ? "content" : "token_logprobs");
        if (list) assert_true(json_array_size(list) == json_array_size(j.logprobs[i]));
        if (list && !message) // batches differ between the two runs, so rounding may
            for (size_t k = 0; k < json_array_size(list); k++)
                assert_true(fabs(json_number_value(json_array_get(list, k)) -
                                 json_number_value(json_array_get(j.logprobs[i], k))) < 1e-4);
    }
    assert_non_null(j.usage);
    assert_true(int_of(j.usage, "prompt_tokens_details.cached_tokens") >=
                int_of(whole, "usage.prompt_tokens_details.cached_tokens")); // asked again
    json_object_del(j.usage, "prompt_tokens_details");
    json_object_del(json_object_get(whole, "usage"), "prompt_tokens_details");
    assert_true(json_equal(j.usage, json_object_get(whole, "usage")));
    for (int i = 0; i < 4; i++) bytes_release(&j.text[i]);
}

TEST(test_stream_equals_whole)
{
    compare_stream("/v1/completions",
                   "\"prompt\":\"tell\",\"max_tokens\":40,\"seed\":1,\"n\":3,\"logprobs\":0", 3);
    compare_stream("/v1/completions", "\"prompt\":\"tell\",\"max_tokens\":40,\"seed\":2", 1);
    compare_stream("/v1/completions",
                   "\"prompt\":\"tell\",\"max_tokens\":20,\"seed\":2,\"n\":2,\"echo\":true,"
                   "\"logprobs\":1,\"stop\":[\"e\"]",
                   2);
    compare_stream("/v1/completions",
                   "\"prompt\":[1,2,3],\"max_tokens\":200,\"seed\":3,\"stop\":[\"a\",\"b\",\"cc\"]",
                   1);
    compare_stream(
        "/v1/chat/completions",
        "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"max_tokens\":30,\"seed\":4,"
        "\"n\":2,\"logprobs\":true",
        2);
}

static json_t *with_stop(const char *stop, const char *more)
{
    const char *quoted = test_keep(json_dumps(test_keep(json_string(stop)), JSON_ENCODE_ANY));
    return ask("/v1/completions",
               test_text("{\"prompt\":\"once\",\"max_tokens\":60,\"seed\":21,\"stop\":%s%s}",
                         quoted, more));
}

TEST(test_stop_string)
{
    json_t *free_run = with_stop("never to be found in here", "");
    const char *text = text_of(free_run, "choices.0.text");
    size_t len = json_string_length(json_at(free_run, "choices.0.text"));
    const json_t *all = json_at(free_run, "choices.0.token_ids");
    assert_string_equal(text_of(free_run, "choices.0.finish_reason"), "length");
    assert_int_equal(json_array_size(all), 60);
    // three characters from the middle: almost always three tokens
    assert_int_equal(strlen(text), len); // this seed's text has no U+0000
    size_t middle = len / 2, end;
    while (((unsigned char)text[middle] & 0xc0) == 0x80) middle++;
    end = middle;
    for (int i = 0; i < 3; i++) do
            end++;
        while (((unsigned char)text[end] & 0xc0) == 0x80);
    char stop_text[32] = {0};
    memcpy(stop_text, text + middle, end - middle);
    size_t first = (size_t)(strstr(text, stop_text) - text);

    json_t *cut = with_stop(stop_text, "");
    const json_t *ids = json_at(cut, "choices.0.token_ids");
    const char *cut_text = text_of(cut, "choices.0.text");
    assert_string_equal(text_of(cut, "choices.0.finish_reason"), "stop");
    assert_string_equal(text_of(cut, "choices.0.stop_reason"), stop_text);
    assert_int_equal(strlen(cut_text), first);
    assert_memory_equal(cut_text, text, first);
    assert_true(json_array_size(ids) < 60);
    for (size_t i = 0; i < json_array_size(ids); i++)
        assert_true(json_equal(json_array_get(ids, i), json_array_get(all, i)));
    assert_int_equal(int_of(cut, "usage.completion_tokens"), json_array_size(ids));

    json_t *with = with_stop(stop_text, ",\"include_stop_str_in_output\":true");
    assert_int_equal(strlen(text_of(with, "choices.0.text")), first + strlen(stop_text));
}

TEST(test_stop_token)
{
    const char *form = "{\"prompt\":\"once\",\"max_tokens\":30,\"seed\":9%s}";
    json_t *all = ask("/v1/completions", test_text(form, ""));
    const json_t *ids = json_at(all, "choices.0.token_ids");
    json_int_t stop_id = int_of(ids, "10");
    size_t first = 0;
    while (json_integer_value(json_array_get(ids, first)) != stop_id) first++;
    const char *more = test_text(",\"stop_token_ids\":[%d]", (int)stop_id);
    const char *body = test_text(form, more);
    json_t *cut = ask("/v1/completions", body);
    const json_t *cut_ids = json_at(cut, "choices.0.token_ids");
    assert_int_equal(json_array_size(cut_ids), first + 1); // the token itself is the last
    assert_string_equal(text_of(cut, "choices.0.finish_reason"), "stop");
    assert_int_equal(int_of(cut, "choices.0.stop_reason"), stop_id);
    json_t *same = ask("/generate", body);
    const json_t *output = json_at(same, "outputs.0");
    assert_true(json_equal(json_object_get(output, "token_ids"), cut_ids));
    assert_int_equal(int_of(output, "stop_reason"), stop_id);
}

TESTS_BETWEEN(served_start, served_stop)
