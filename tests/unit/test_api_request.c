/* test_api_request.c: infer-server/http/api.h: what a body becomes, field by field. Refusals are in
 * tests/e2e/test_refusals.c, where their answers are seen too. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/server_impl.h"
#include "tests/support/support.h"

static const struct api_model model = {.name = "m",
                                       .folder = "folder",
                                       .vocab_size = 100,
                                       .max_context = 64,
                                       .temperature = 0.6,
                                       .top_p = 0.9,
                                       .top_k = 20};

static struct api_request *parse(enum api_kind kind, const char *body)
{
    struct api_request *r = NULL;
    assert_ok(api_request_parse(kind, &model, body, strlen(body), &r));
    return r;
}

static void refuse(enum api_kind kind, const char *body, enum status code, const char *part)
{
    struct api_request *r = NULL;
    assert_status(api_request_parse(kind, &model, body, strlen(body), &r), code);
    assert_message(part);
    assert_null(r);
}

TEST(test_defaults)
{
    struct api_request *r = parse(API_COMPLETIONS, "{\"prompt\":[1,2]}");
    assert_int_equal(r->n_samples, 1);
    assert_int_equal(r->sampling.max_tokens, 16);
    assert_true(r->sampling.temperature == 0.6f &&
                r->sampling.top_p == 0.9f); // generation_config's
    assert_int_equal(r->sampling.top_k, 20);
    assert_int_equal(r->sampling.logprobs, -1);
    assert_true(r->filtered && r->skip_special && !r->stream);
    api_request_free(r);
    // what is trained on is not cut unasked
    r = parse(API_ROLLOUTS,
              "{\"groups\":[{\"prompt_token_ids\":[1]}],\"sampling\":{\"max_tokens\":9}}");
    assert_true(r->sampling.temperature == 1 && r->sampling.top_p == 1 && r->sampling.top_k == 0);
    assert_false(r->filtered);
    assert_true(r->stream);
    assert_int_equal(r->sampling.logprobs, 0);
    api_request_free(r);
}

// The default of max_tokens gives way to the context; an explicit one is refused (test_context).
TEST(test_generation_config)
{
    static const char text[] = "{\"temperature\":0.7,\"top_p\":0.8,\"top_k\":40,\"min_p\":0.05,"
                               "\"max_new_tokens\":50,\"do_sample\":true,\"eos_token_id\":[1,2]}";
    struct api_model m = model;
    struct api_request *r = NULL;
    json_t *config = NULL;
    assert_ok(json_parse("generation_config.json", text, strlen(text), &config));
    assert_ok(api_model_read_defaults("generation_config.json", config, &m));
    const char *chat = "{\"prompt\":[1,2]}", *long_prompt =
                                                 "{\"prompt\":[1,2,3,4,5,6,7,8,9,10,11,12,"
                                                 "13,14,15,16,17,18,19,20]}";
    assert_ok(api_request_parse(API_COMPLETIONS, &m, chat, strlen(chat), &r));
    assert_true(r->sampling.temperature == 0.7f && r->sampling.top_p == 0.8f &&
                r->sampling.min_p == 0.05f);
    assert_int_equal(r->sampling.top_k, 40);
    assert_int_equal(r->sampling.max_tokens, 50);
    api_request_free(r);
    assert_ok(api_request_parse(API_COMPLETIONS, &m, long_prompt, strlen(long_prompt), &r));
    assert_int_equal(r->sampling.max_tokens, m.max_context - 20);
    api_request_free(r);

    json_object_set_new(config, "do_sample", json_false());
    assert_ok(api_model_read_defaults("generation_config.json", config, &m));
    assert_ok(api_request_parse(API_COMPLETIONS, &m, chat, strlen(chat), &r));
    assert_true(r->sampling.temperature == 0 && !r->filtered);
    api_request_free(r);
    const char *own = "{\"prompt\":[1,2],\"temperature\":1,\"min_p\":0,\"max_tokens\":3}";
    assert_ok(api_request_parse(API_COMPLETIONS, &m, own, strlen(own), &r));
    assert_true(r->sampling.temperature == 1 && r->sampling.min_p == 0);
    assert_int_equal(r->sampling.max_tokens, 3);
    api_request_free(r);
    // rollouts take none of them
    const char *rollouts =
        "{\"groups\":[{\"prompt_token_ids\":[1]}],\"sampling\":{\"max_tokens\":9}}";
    assert_ok(api_request_parse(API_ROLLOUTS, &m, rollouts, strlen(rollouts), &r));
    assert_true(r->sampling.temperature == 1 && r->sampling.min_p == 0);
    api_request_free(r);

    json_object_set_new(config, "max_new_tokens", json_integer(0));
    assert_fails(api_model_read_defaults("generation_config.json", config, &m), ST_INVALID,
                 "max_new_tokens");
    assert_ok(api_model_read_defaults("generation_config.json", NULL, &m));
    assert_true(m.temperature == 1 && m.top_p == 1 && m.min_p == 0 && m.top_k == 0 &&
                m.max_new_tokens == 0);
    json_decref(config);
}

TEST(test_groups)
{
    struct api_request *r = parse(
        API_ROLLOUTS, "{\"groups\":[{\"prompt_token_ids\":[1],\"n\":3},{\"prompt_token_ids\":"
                      "[2,3]},{\"prompt_token_ids\":[4],\"seed\":5,\"id\":\"x\"}],\"sampling\":"
                      "{\"n\":2,\"seed\":-1,\"max_tokens\":8}}");
    assert_int_equal(r->n_prompts, 3);
    assert_int_equal(r->n_samples, 7);
    assert_int_equal(r->prompts[0].n, 3);
    assert_int_equal(r->prompts[1].n, 2);
    assert_true(r->prompts[0].seed == UINT64_MAX); // the first takes the seed as it is
    assert_true(r->prompts[1].seed != r->prompts[0].seed);
    assert_true(r->prompts[2].seed == 5);
    assert_int_equal(json_integer_value(r->prompts[1].group_id), 1);
    assert_string_equal(json_string_value(r->prompts[2].group_id), "x");
    api_request_free(r);
}

TEST(test_context)
{
    struct api_request *r = parse(API_COMPLETIONS, "{\"prompt\":[1,2,3,4],\"max_tokens\":60}");
    api_request_free(r);
    refuse(API_COMPLETIONS, "{\"prompt\":[1,2,3,4],\"max_tokens\":61}", ST_TOO_LONG,
           "request: max_tokens is 61");
    refuse(API_COMPLETIONS, "{\"prompt\":[[1],[1,2,3,4]],\"max_tokens\":61}", ST_TOO_LONG,
           "request: max_tokens is 61");
}

TEST(test_neutral_values_pass)
{
    struct api_request *r = parse(
        API_COMPLETIONS,
        "{\"prompt\":[1],\"model\":\"m\",\"frequency_penalty\":0,\"presence_penalty\":0.0,"
        "\"repetition_penalty\":1.0,\"logit_bias\":{},\"tools\":[],\"best_of\":1,\"echo\":false,"
        "\"suffix\":null,\"response_format\":{\"type\":\"text\"},\"user\":\"someone\",\"stop\":"
        "null,"
        "\"logprobs\":null,\"top_k\":-1,\"temperature\":0,\"stream_options\":null}");
    assert_int_equal(r->sampling.top_k, 0);
    assert_false(r->filtered); // greedy
    api_request_free(r);
    refuse(API_COMPLETIONS, "{\"prompt\":[1],\"length_penalty\":1.1}", ST_UNSUPPORTED,
           "\"length_penalty\"");
    refuse(API_COMPLETIONS, "{\"prompt\":[1],\"model\":\"other\"}", ST_NOT_FOUND, "other");
}

TEST(test_too_much)
{
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    bytes_puts(&body, "{\"prompt\":[[1]");
    for (int i = 0; i < API_MAX_PROMPTS; i++) bytes_puts(&body, ",[1]");
    bytes_puts(&body, "]}");
    refuse(API_COMPLETIONS, bytes_text(&body), ST_INVALID, "1024");
    bytes_clear(&body);
    bytes_puts(&body, "{\"max_tokens\":1,\"n\":4096,\"prompt\":[[1]");
    for (int i = 0; i < 20; i++) bytes_puts(&body, ",[1]");
    bytes_puts(&body, "]}");
    refuse(API_COMPLETIONS, bytes_text(&body), ST_INVALID, "65536");
    bytes_clear(&body);
    for (int i = 0; i < 100000; i++) bytes_puts(&body, "["); // nesting is bounded by the parser
    refuse(API_COMPLETIONS, bytes_text(&body), ST_FORMAT, "request");
}
