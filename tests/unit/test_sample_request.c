/* test_sample_request.c: asample's body, what of it is refused, and the server's lines. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "common/base/protobuf.h"
#include "trainer/serve/request.h"

static const struct trained_model_info model = {.limits = {.vocab = 300}, .max_context = 64};
#define PROMPT "\"prompt\":{\"chunks\":[{\"tokens\":[10,20]},{\"tokens\":[30]}]}"

static json_t *parse(const char *text)
{
    json_t *json = NULL;
    assert_ok(json_parse("test", text, strlen(text), &json));
    return json;
}

static enum status ask(const char *text, struct sample_request *ret)
{
    json_t *body = test_keep(parse(text));
    *ret = (struct sample_request){0};
    enum status st = sample_request_parse(body, &model, ret);
    return st;
}

TEST(test_asked)
{
    struct sample_request r;
    assert_ok(ask("{" PROMPT "}", &r)); // all else has a default
    assert_int_equal(r.n, 1);
    assert_int_equal(r.prompt.n, 3);
    assert_int_equal(r.prompt.ids[2], 30);
    assert_int_equal(json_integer_value(json_object_get(r.sampling, "max_tokens")), 64 - 3);
    assert_null(json_object_get(r.sampling, "ignore_eos"));
    sample_request_release(&r.request);
    assert_ok(ask("{" PROMPT ",\"sampling_params\":{\"stop\":[]}}", &r)); // nothing stops
    assert_true(json_is_true(json_object_get(r.sampling, "ignore_eos")));
    sample_request_release(&r.request);
    assert_ok(ask("{" PROMPT ",\"sampling_params\":{\"stop\":[7]}}", &r)); // these alone
    assert_true(json_is_true(json_object_get(r.sampling, "ignore_eos")));
    assert_int_equal(json_array_size(json_object_get(r.sampling, "stop_token_ids")), 1);
    sample_request_release(&r.request);
    static const char *const texts[] = {"\"end\"",
                                        "[\"end\",\"or\"]"}; // beside the model's own end
    for (size_t i = 0; i < 2; i++) {
        char body[200];
        snprintf(body, sizeof body, "{" PROMPT ",\"sampling_params\":{\"stop\":%s}}", texts[i]);
        assert_ok(ask(body, &r));
        assert_null(json_object_get(r.sampling, "ignore_eos"));
        assert_non_null(json_object_get(r.sampling, "stop"));
        sample_request_release(&r.request);
    }
    static const struct trained_model_info stands_in = {
        .limits = {.vocab = 300, .loss_for = "stable_reinforce=ppo"}, .max_context = 64};
    json_t *body = test_keep(parse("{" PROMPT ",\"record_stability_info\":true}"));
    r = (struct sample_request){0};
    assert_ok(sample_request_parse(body, &stands_in, &r));
    sample_request_release(&r.request);
}

// What is of the wrong kind is refused, by its name, and not taken for what is not there.
TEST(test_refused)
{
    const json_t *cases = test_rows("sample_request", "test_refused");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct sample_request r;
        char text[256];
        snprintf(text, sizeof text, "{" PROMPT ",%s}", row_text(cases, i, "a"));
        if (ask(text, &r) == ST_OK) fail_msg("%s was taken", row_text(cases, i, "a"));
        if (!strstr(status_message(), row_text(cases, i, "b")))
            fail_msg("%s: %s", text, status_message());
        sample_request_release(&r.request);
    }
}

TEST(test_filled)
{
    struct sample_request r;
    assert_ok(ask("{" PROMPT ",\"num_samples\":2,\"topk_prompt_logprobs\":1}", &r));
    json_t *line =
        test_keep(parse("{\"token_ids\":[7,8],\"logprobs\":[-0.5,-1],\"finish_reason\":\"stop\","
                        "\"weight_versions\":[4,6],\"prompt_logprobs\":[null,-2,-3],"
                        "\"prompt_weight_versions\":[null,4,4],"
                        "\"prompt_top_logprobs\":[null,[[9,-0.25]],[]]}"));
    assert_ok(sample_request_read(&r, 1, line));
    assert_int_equal(r.samples[1].n, 2);
    assert_int_equal(r.samples[1].ids[1], 8);
    assert_true(r.samples[1].logprobs[0] == -0.5f && !r.samples[1].truncated);
    assert_int_equal(r.oldest, 4);
    assert_int_equal(r.newest, 6);
    struct proto_span scores = {(const unsigned char *)r.scores.data, r.scores.len}, top;
    struct proto_field f;
    enum status st = ST_OK;
    float values[3];
    assert_true(proto_each(&scores, &st, &f)); // a log-probability of each token
    assert_true(f.number == 2 && f.span.len == sizeof values);
    memcpy(values, f.span.data, sizeof values);
    assert_true(isnan(values[0]) && values[2] == -3);
    assert_true(proto_each(&scores, &st, &f)); // the likeliest tokens of each
    assert_int_equal(f.number, 3);
    top = f.span;
    assert_true(proto_each(&top, &st, &f));
    assert_memory_equal(f.span.data, ((int32_t[]){0, 9, 0}), 12);
    assert_true(proto_each(&top, &st, &f));
    assert_memory_equal(f.span.data, ((float[]){SAMPLE_NO_LOGPROB, -0.25f, SAMPLE_NO_LOGPROB}), 12);
    sample_request_release(&r.request);
}
