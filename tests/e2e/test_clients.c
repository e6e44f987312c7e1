/* test_clients.c: what clients of vLLM call and read: /generate as Atropos does, tokens in and out,
 * /tokenize and its kin, names of requests, paths with a slash, salted prefixes, and texts of a
 * SentencePiece model. One daemon with a tiny random model of that kind. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer.h"
#include "tests/support/served.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_sentencepiece.h"

static struct tokenizer *tokenizer;

static const char *sentencepiece_model(void)
{
    const char *folder = test_path(test_folder(), "model");
    assert_ok(file_make_folders(folder));
    assert_ok(tiny_model_write(folder, 64, 2, TINY_SENTENCEPIECE_VOCAB, 7));
    assert_ok(tiny_sentencepiece_write(folder));
    return folder;
}

static void start(void)
{
    const char *model = sentencepiece_model();
    assert_ok(tokenizer_load(model, &tokenizer));
    daemon_start(&served, model, args("--max-batch 8 --kv-memory 32M"));
}

static void stop(void)
{
    tokenizer_free(tokenizer);
    served_stop();
}

// ---- texts of a SentencePiece model ------------------------------------------------------------

// The text of ids behind [<s>, " a"], by the tokenizer alone.
static void expected_text(const json_t *ids, struct bytes *ret)
{
    int32_t all[256] = {TINY_SENTENCEPIECE_BOS, 270};
    SCOPED(bytes_release) struct bytes prompt = BYTES_INIT, whole = BYTES_INIT;
    int n = 2;
    for (size_t i = 0; i < json_array_size(ids); i++)
        all[n++] = (int32_t)json_integer_value(json_array_get(ids, i));
    assert_ok(tokenizer_decode(tokenizer, all, 2, true, &prompt));
    assert_ok(tokenizer_decode(tokenizer, all, n, true, &whole));
    bytes_append(ret, bytes_text(&whole) + prompt.len, whole.len - prompt.len);
}

// The events of a stream, without its end.
static json_t *chunks_of(const struct wire_answer *a)
{
    json_t *chunks = test_keep(json_array());
    for (const char *at = bytes_text(&a->body); (at = strstr(at, "data: {")); at++)
        json_array_append_new(chunks, json_loads(at + strlen("data: "),
                                                 JSON_DISABLE_EOF_CHECK | JSON_ALLOW_NUL, NULL));
    return chunks;
}

static void joined_stream(const char *body, struct bytes *ret)
{
    struct wire_answer a;
    daemon_request(served.socket, "POST", "/v1/completions", "", body, &a);
    assert_int_equal(a.status, 200);
    const json_t *chunks = chunks_of(&a), *chunk;
    size_t i;
    json_array_foreach (chunks, i, chunk)
        if (json_array_size(json_at(chunk, "choices")) > 0)
            bytes_puts(ret, text_of(chunk, "choices.0.text"));
}

// One completion, as it comes from each endpoint.
static void check_texts(int seed, int *ret_spaces)
{
    SCOPED(bytes_release) struct bytes want = BYTES_INIT, streamed = BYTES_INIT;
    const char *body =
        test_text("{\"prompt\":[1,270],\"max_tokens\":8,\"seed\":%d,\"stop\":\"zz\"}", seed);
    json_t *a = ask("/v1/completions", body), *g = ask("/generate", body);
    const json_t *choice = json_at(a, "choices.0"), *ids = json_at(choice, "token_ids");
    expected_text(ids, &want);
    assert_string_equal(text_of(choice, "text"), bytes_text(&want));
    assert_true(json_equal(json_at(g, "token_ids.0"), ids));
    assert_true(json_equal(json_at(g, "text.0"), json_at(choice, "text")));
    joined_stream(test_text("{\"stream\":true,%s", body + 1), &streamed);
    assert_string_equal(bytes_text(&streamed), bytes_text(&want));
    *ret_spaces += bytes_text(&want)[0] == ' ';
}

TEST(test_text_in_context)
{
    int spaces = 0;
    for (int seed = 236; seed < 296; seed++) check_texts(seed, &spaces);
    if (spaces == 0) fail_msg("none of the completions begins with a space: take other seeds");
}

// Prompt and completion are one text.
TEST(test_echo)
{
    const char *form = "{\"prompt\":[1,270],\"max_tokens\":8,\"seed\":239%s}";
    json_t *a = ask("/v1/completions", test_text(form, ""));
    json_t *b = ask("/v1/completions", test_text(form, ",\"echo\":true"));
    const char *text = text_of(a, "choices.0.text");
    const char *whole = text_of(b, "choices.0.text");
    assert_int_equal(text[0], ' ');
    assert_int_equal(whole[0], 'a');
    assert_string_equal(whole + 1, text);
}

TEST(test_token_texts_keep_their_space)
{
    json_t *a =
        ask("/v1/completions", "{\"prompt\":[1,270],\"max_tokens\":40,\"seed\":3,\"logprobs\":1,"
                               "\"skip_special_tokens\":false}");
    const json_t *choice = json_at(a, "choices.0"), *ids = json_at(choice, "token_ids");
    const json_t *tokens = json_at(choice, "logprobs.tokens");
    for (size_t i = 0; i < json_array_size(ids); i++) {
        SCOPED(bytes_release) struct bytes text = BYTES_INIT;
        int id = (int)json_integer_value(json_array_get(ids, i));
        assert_ok(tokenizer_decode_inside(tokenizer, id, &text));
        assert_string_equal(json_string_value(json_array_get(tokens, i)), bytes_text(&text));
    }
}

// A really trained model, where it is at hand.
TEST(test_once_upon)
{
    char folder[PATH_MAX];
    struct daemon stories = {0};
    test_data_folder("models/stories260K/hf", folder);
    daemon_start(&stories, folder, NULL);
    json_t *a = daemon_post(stories.socket, "/v1/completions", 200,
                            "{\"prompt\":\"Once upon\",\"max_tokens\":2,\"temperature\":0,"
                            "\"logprobs\":0}");
    const json_t *choice = json_at(a, "choices.0"), *tokens = json_at(choice, "logprobs.tokens");
    assert_string_equal(text_of(choice, "text"), " a time");
    assert_string_equal(text_of(tokens, "0"), " a");
    assert_int_equal(int_of(choice, "logprobs.text_offset.1"), 2);
    a = daemon_post(stories.socket, "/v1/rollouts", 200,
                    "{\"groups\":[{\"prompt\":\"Once upon\"}],\"sampling\":{\"max_tokens\":2,"
                    "\"temperature\":0}}");
    assert_string_equal(text_of(a, "text"), " a time");
    assert_int_equal(daemon_stop(&stories), 0);
}

// ---- /generate ---------------------------------------------------------------------------------

TEST(test_generate)
{
    json_t *a = ask("/generate/", "{\"prompt\":{\"prompt_token_ids\":[1,270]},\"n\":2,"
                                  "\"max_tokens\":5,\"seed\":1,\"logprobs\":0,\"top_k\":-1}");
    json_t *b = ask("/v1/completions", "{\"prompt\":[1,270],\"n\":2,\"max_tokens\":5,\"seed\":1,"
                                       "\"logprobs\":0}");
    assert_int_equal(json_array_size(json_at(a, "finish_reasons")), 2);
    for (size_t i = 0; i < 2; i++) {
        const json_t *choice = json_at(b, "choices.%zu", i), *ids = json_at(choice, "token_ids");
        const json_t *logprobs = json_at(choice, "logprobs.token_logprobs");
        assert_true(json_equal(json_at(a, "token_ids.%zu", i), ids));
        assert_true(
            json_equal(json_at(a, "finish_reasons.%zu", i), json_at(choice, "finish_reason")));
        for (size_t t = 0; t < json_array_size(ids); t++) {
            const json_t *position = json_at(a, "logprobs.%zu.%zu", i, t);
            assert_int_equal(json_array_size(position), 1);
            const int id = (int)json_integer_value(json_array_get(ids, t));
            assert_true(fabs(json_number_value(json_at(position, "0.%d", id)) -
                             json_number_value(json_array_get(logprobs, t))) < 1e-4);
        }
    }
    assert_int_equal(json_array_size(json_at(a, "prompt_token_ids")), 2);
    a = ask("/generate", "{\"prompts\":[\"on\",[1,2,3]],\"max_tokens\":2,\"logprobs\":2}");
    assert_string_equal(text_of(a, "prompt.0"), "on");
    assert_int_equal(json_array_size(json_at(a, "prompt_token_ids.1")), 3);
    assert_in_range(json_object_size(json_at(a, "logprobs.1.0.0")), 2, 3);
}

// ---- tokens in, tokens out ---------------------------------------------------------------------

static const char *const inference = "{\"model\":\"model\",\"token_ids\":[1,270],"
                                     "\"request_id\":\"mine\",\"sampling_params\":{\"n\":2,"
                                     "\"max_tokens\":6,\"seed\":5,\"logprobs\":%d,"
                                     "\"temperature\":0.8,\"output_kind\":2}%s}";

TEST(test_inference)
{
    json_t *a =
        ask("/inference/v1/generate", test_text(inference, 2, ",\"return_token_ids\":true"));
    json_t *b = ask("/v1/completions", "{\"prompt\":[1,270],\"n\":2,\"max_tokens\":6,\"seed\":5,"
                                       "\"temperature\":0.8}");
    assert_string_equal(text_of(a, "request_id"), "mine");
    assert_int_equal(json_array_size(json_at(a, "prompt_token_ids")), 2);
    assert_true(
        json_equal(json_at(a, "usage.completion_tokens"), json_at(b, "usage.completion_tokens")));
    for (size_t i = 0; i < 2; i++) {
        const json_t *choice = json_at(a, "choices.%zu", i), *ids = json_at(choice, "token_ids");
        const json_t *content = json_at(choice, "logprobs.content");
        assert_true(json_equal(ids, json_at(b, "choices.%zu.token_ids", i)));
        assert_int_equal(json_array_size(content), json_array_size(ids));
        for (size_t t = 0; t < json_array_size(ids); t++) {
            const json_t *entry = json_at(content, "%zu", t), *top = json_at(entry, "top_logprobs");
            const char *name =
                test_text("token_id:%d", (int)json_integer_value(json_array_get(ids, t)));
            assert_string_equal(text_of(entry, "token"), name);
            assert_int_equal(json_array_size(top), 2);
            assert_string_equal(text_of(top, "0.token"), name); // the sampled one leads
            assert_true(json_equal(json_at(top, "0.logprob"), json_at(entry, "logprob")));
            assert_string_not_equal(text_of(top, "1.token"), name);
        }
    }
}

TEST(test_inference_defaults)
{
    json_t *a = ask("/inference/v1/generate", "{\"token_ids\":[1],\"sampling_params\":{}}");
    const json_t *choice = json_at(a, "choices.0");
    assert_true(json_is_null(json_at(choice, "logprobs")));
    assert_int_equal(strlen(text_of(a, "request_id")), 32);
    if (strcmp(text_of(choice, "finish_reason"), "length") == 0) // up to the context
        assert_int_equal(json_array_size(json_at(choice, "token_ids")), 511);
    a = ask("/inference/v1/generate", "{\"token_ids\":[1,270,299],\"sampling_params\":"
                                      "{\"max_tokens\":0,\"prompt_logprobs\":0}}");
    assert_int_equal(json_array_size(json_at(a, "prompt_logprobs")), 3);
    assert_int_equal(json_array_size(json_at(a, "choices.0.token_ids")), 0);
}

TEST(test_inference_stream)
{
    struct wire_answer a;
    json_t *ids[2] = {test_keep(json_array()), test_keep(json_array())}, *chunk, *choice;
    int usages = 0;
    size_t i, k;
    json_t *whole = ask("/inference/v1/generate", test_text(inference, 0, ""));
    daemon_request(
        served.socket, "POST", "/inference/v1/generate", "",
        test_text(inference, 0, ",\"stream\":true,\"stream_options\":{\"include_usage\":true}"),
        &a);
    const json_t *chunks = chunks_of(&a);
    json_array_foreach (chunks, i, chunk) {
        usages += json_is_object(json_at(chunk, "usage"));
        json_array_foreach (json_at(chunk, "choices"), k, choice)
            json_array_extend(ids[int_of(choice, "index")], json_at(choice, "token_ids"));
    }
    assert_true(json_array_size(chunks) >= 3 && usages == 1);
    for (i = 0; i < 2; i++)
        assert_true(json_equal(ids[i], json_at(whole, "choices.%zu.token_ids", i)));
}

// ---- /tokenize and others ----------------------------------------------------------------------

TEST(test_tokenize)
{
    json_t *a = ask("/tokenize", "{\"prompt\":\"a time\",\"return_token_strs\":true}");
    const json_t *want =
        test_keep(json_pack("[i,i,i]", TINY_SENTENCEPIECE_BOS, 270, TINY_SENTENCEPIECE_TIME));
    assert_true(json_equal(json_at(a, "tokens"), want));
    assert_int_equal(int_of(a, "count"), 3);
    assert_int_equal(int_of(a, "max_model_len"), 512);
    assert_string_equal(text_of(a, "token_strs.2"), "\xe2\x96\x81time");
    a = ask("/tokenize", "{\"prompt\":\"a time\",\"add_special_tokens\":false}");
    assert_int_equal(json_array_size(json_at(a, "tokens")), 2);
    assert_true(json_is_null(json_at(a, "token_strs")));
    a = ask("/detokenize", "{\"tokens\":[270,299]}");
    assert_string_equal(text_of(a, "prompt"), "a time");
    ask("/detokenize", "{\"tokens\":[]}");
    daemon_post(served.socket, "/detokenize", 400, "{\"tokens\":[300]}");
    daemon_post(served.socket, "/detokenize", 400, "{\"tokens\":\"a\"}");
    daemon_post(served.socket, "/tokenize", 400, "{\"prompt\":\"a\",\"messages\":[]}");
    daemon_post(served.socket, "/tokenize", 400, "{\"text\":\"a\"}");
    a = daemon_get(served.socket, "/tokenizer_info", 200);
    assert_string_equal(text_of(a, "tokenizer_class"), "LlamaTokenizer");
    assert_string_equal(text_of(a, "bos_token"), "<s>");
}

TEST(test_version_and_model)
{
    json_t *a = daemon_get(served.socket, "/version", 200);
    assert_true(strlen(text_of(a, "version")) > 0);
    json_t *list = daemon_get(served.socket, "/v1/models/", 200);
    a = daemon_get(served.socket, "/v1/models/model", 200);
    assert_true(json_equal(a, json_at(list, "data.0")));
    a = daemon_get(served.socket, "/v1/models/meta/llama", 404);
    assert_contains(text_of(a, "error.message"), "meta/llama");
    daemon_get(served.socket, "/health///", 200);
    daemon_get(served.socket, "/healthy", 404);
}

TEST(test_request_names)
{
    struct wire_answer a;
    const char *body = "{\"prompt\":[1],\"max_tokens\":1}";
    daemon_request(served.socket, "POST", "/v1/completions", "X-Request-Id: trace 7\r\n", body, &a);
    assert_contains(bytes_text(&a.head), "X-Request-Id: trace 7\r\n");
    assert_string_equal(text_of(a.json, "id"), "cmpl-trace 7");
    daemon_request(served.socket, "POST", "/v1/completions", "X-Request-Id: b\r\n",
                   "{\"prompt\":[1],\"max_tokens\":1,\"request_id\":\"own\"}", &a);
    assert_string_equal(text_of(a.json, "id"), "cmpl-own");
    SCOPED(bytes_release) struct bytes longer = BYTES_INIT; // than is taken: a name is made
    bytes_puts(&longer, "X-Request-Id: ");
    for (int i = 0; i < 300; i++) bytes_puts(&longer, "n");
    bytes_puts(&longer, "\r\n");
    daemon_request(served.socket, "POST", "/v1/completions", bytes_text(&longer), body, &a);
    assert_int_equal(strlen(text_of(a.json, "id")), strlen("cmpl-") + 32);
    daemon_request(served.socket, "GET", "/nowhere", "X-Request-Id: lost\r\n", NULL, &a);
    assert_contains(bytes_text(&a.head), "X-Request-Id: lost\r\n");
}

static json_int_t cached(const char *salt)
{
    const char *body = test_text(
        "{\"prompt\":[1,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9],"
        "\"max_tokens\":1%s}",
        salt);
    return int_of(ask("/v1/completions", body), "usage.prompt_tokens_details.cached_tokens");
}

TEST(test_cache_salt)
{
    const char *salted = ",\"cache_salt\":\"secret\"";
    assert_int_equal(cached(""), 0);
    assert_int_equal(cached(""), 32);
    assert_int_equal(cached(salted), 0); // does not find what others left
    assert_int_equal(cached(salted), 32);
    assert_int_equal(cached(",\"cache_salt\":\"another\""), 0);
}

// ---- what is refused ---------------------------------------------------------------------------

TEST(test_context_overflow)
{
    served_refuses("clients", "test_context_overflow");
}

TEST(test_refused_fields)
{
    served_refuses("clients", "test_refused_fields");
}

TEST(test_unknown_fields_may_pass)
{
    struct daemon other = {0};
    const char *body = "{\"prompt\":[1],\"max_tokens\":1,\"fancy\":{\"a\":1}}";
    daemon_start(&other, sentencepiece_model(), args("--unknown-fields warn"));
    for (int i = 0; i < 3; i++) daemon_post(other.socket, "/v1/completions", 200, body);
    daemon_post(other.socket, "/v1/completions", 400, "{\"prompt\":[1],\"priority\":3}");
    assert_int_equal(daemon_stop(&other), 0);
    char *log = test_read(other.log), *first = strstr(log, "\"fancy\"");
    assert_non_null(first);
    assert_null(strstr(first + 1, "\"fancy\"")); // once
}

TESTS_BETWEEN(start, stop)
