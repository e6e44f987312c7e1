/* test_clients.c: what clients of vLLM call and read: /generate as Atropos does, tokens in and out,
 * /tokenize and its kin, names of requests, paths with a slash, salted prefixes, and texts of a
 * SentencePiece model. One daemon with a tiny random model of that kind. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer.h"
#include "tests/support/daemon.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_sentencepiece.h"

static struct daemon d;
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
    daemon_start(&d, model, OPTIONS("--max-batch", "8", "--kv-memory", "32M"));
}

static void stop(void)
{
    tokenizer_free(tokenizer);
    daemon_end(&d);
}

static const json_t *at(const json_t *list, size_t i)
{
    const json_t *value = json_array_get(list, i);
    if (!value) fail_msg("there is no entry %zu", i);
    return value;
}

static const json_t *of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (!value) fail_msg("there is no \"%s\"", key);
    return value;
}

static const char *text_of(const json_t *object, const char *key)
{
    const json_t *value = of(object, key);
    if (!json_is_string(value)) fail_msg("\"%s\" is not a string", key);
    return json_string_value(value);
}

static json_t *ask(const char *path, const char *body)
{
    return daemon_post(d.socket, path, 200, body);
}

// ---- texts of a SentencePiece model ------------------------------------------------------------

// The text of ids behind [<s>, " a"], by the tokenizer alone.
static void expected_text(const json_t *ids, struct bytes *ret)
{
    int32_t all[256] = {TINY_SENTENCEPIECE_BOS, 270};
    struct bytes prompt = BYTES_INIT, whole = BYTES_INIT;
    int n = 2;
    for (size_t i = 0; i < json_array_size(ids); i++)
        all[n++] = (int32_t)json_integer_value(at(ids, i));
    assert_ok(tokenizer_decode(tokenizer, all, 2, true, &prompt));
    assert_ok(tokenizer_decode(tokenizer, all, n, true, &whole));
    bytes_append(ret, bytes_text(&whole) + prompt.len, whole.len - prompt.len);
    bytes_release(&prompt);
    bytes_release(&whole);
}

static void joined_stream(const char *body, struct bytes *ret)
{
    struct wire_answer a;
    char *save = NULL;
    daemon_request(d.socket, "POST", "/v1/completions", "", body, &a);
    assert_int_equal(a.status, 200);
    for (char *line = strtok_r(a.body.data, "\n", &save); line;
         line = strtok_r(NULL, "\n", &save)) {
        json_t *chunk = json_loads(line + strlen("data: "), JSON_ALLOW_NUL, NULL);
        const json_t *choice = json_array_get(json_object_get(chunk, "choices"), 0);
        if (choice) bytes_puts(ret, text_of(choice, "text"));
        json_decref(chunk);
    }
}

// One completion, as it comes from each endpoint.
static void check_texts(int seed, int *ret_spaces)
{
    char fields[160], body[256];
    struct bytes want = BYTES_INIT, streamed = BYTES_INIT;
    snprintf(fields, sizeof fields,
             "\"prompt\":[1,270],\"max_tokens\":8,\"seed\":%d,\"stop\":\"zz\"", seed);
    snprintf(body, sizeof body, "{%s}", fields);
    json_t *a = ask("/v1/completions", body), *g = ask("/generate", body);
    const json_t *choice = at(of(a, "choices"), 0), *ids = of(choice, "token_ids");
    expected_text(ids, &want);
    assert_string_equal(text_of(choice, "text"), bytes_text(&want));
    assert_true(json_equal(at(of(g, "token_ids"), 0), ids));
    assert_true(json_equal(at(of(g, "text"), 0), of(choice, "text")));
    snprintf(body, sizeof body, "{%s,\"stream\":true}", fields);
    joined_stream(body, &streamed);
    assert_string_equal(bytes_text(&streamed), bytes_text(&want));
    *ret_spaces += bytes_text(&want)[0] == ' ';
    bytes_release(&want);
    bytes_release(&streamed);
    json_decref(a);
    json_decref(g);
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
    char body[128];
    snprintf(body, sizeof body, form, "");
    json_t *a = ask("/v1/completions", body);
    snprintf(body, sizeof body, form, ",\"echo\":true");
    json_t *b = ask("/v1/completions", body);
    const char *text = text_of(at(of(a, "choices"), 0), "text");
    const char *whole = text_of(at(of(b, "choices"), 0), "text");
    assert_int_equal(text[0], ' ');
    assert_int_equal(whole[0], 'a');
    assert_string_equal(whole + 1, text);
    json_decref(a);
    json_decref(b);
}

TEST(test_token_texts_keep_their_space)
{
    json_t *a =
        ask("/v1/completions", "{\"prompt\":[1,270],\"max_tokens\":40,\"seed\":3,\"logprobs\":1,"
                               "\"skip_special_tokens\":false}");
    const json_t *choice = at(of(a, "choices"), 0), *ids = of(choice, "token_ids");
    const json_t *tokens = of(of(choice, "logprobs"), "tokens");
    for (size_t i = 0; i < json_array_size(ids); i++) {
        struct bytes text = BYTES_INIT;
        int id = (int)json_integer_value(at(ids, i));
        assert_ok(tokenizer_decode_inside(tokenizer, id, &text));
        assert_string_equal(json_string_value(at(tokens, i)), bytes_text(&text));
        bytes_release(&text);
    }
    json_decref(a);
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
    const json_t *choice = at(of(a, "choices"), 0), *tokens = of(of(choice, "logprobs"), "tokens");
    assert_string_equal(text_of(choice, "text"), " a time");
    assert_string_equal(json_string_value(at(tokens, 0)), " a");
    assert_int_equal(json_integer_value(at(of(of(choice, "logprobs"), "text_offset"), 1)), 2);
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
    assert_int_equal(json_array_size(of(a, "finish_reasons")), 2);
    for (size_t i = 0; i < 2; i++) {
        const json_t *choice = at(of(b, "choices"), i), *ids = of(choice, "token_ids");
        const json_t *logprobs = of(of(choice, "logprobs"), "token_logprobs");
        assert_true(json_equal(at(of(a, "token_ids"), i), ids));
        assert_true(json_equal(at(of(a, "finish_reasons"), i), of(choice, "finish_reason")));
        for (size_t t = 0; t < json_array_size(ids); t++) {
            char key[16];
            const json_t *position = at(at(of(a, "logprobs"), i), t);
            assert_int_equal(json_array_size(position), 1);
            snprintf(key, sizeof key, "%d", (int)json_integer_value(at(ids, t)));
            assert_true(fabs(json_number_value(of(at(position, 0), key)) -
                             json_number_value(at(logprobs, t))) < 1e-4);
        }
    }
    assert_int_equal(json_array_size(of(a, "prompt_token_ids")), 2);
    json_decref(a);
    json_decref(b);
    a = ask("/generate", "{\"prompts\":[\"on\",[1,2,3]],\"max_tokens\":2,\"logprobs\":2}");
    assert_string_equal(json_string_value(at(of(a, "prompt"), 0)), "on");
    assert_int_equal(json_array_size(at(of(a, "prompt_token_ids"), 1)), 3);
    assert_in_range(json_object_size(at(at(at(of(a, "logprobs"), 1), 0), 0)), 2, 3);
    json_decref(a);
}

// ---- tokens in, tokens out ---------------------------------------------------------------------

static const char *const inference = "{\"model\":\"model\",\"token_ids\":[1,270],"
                                     "\"request_id\":\"mine\",\"sampling_params\":{\"n\":2,"
                                     "\"max_tokens\":6,\"seed\":5,\"logprobs\":%d,"
                                     "\"temperature\":0.8,\"output_kind\":2}%s}";

TEST(test_inference)
{
    char body[400];
    snprintf(body, sizeof body, inference, 2, ",\"return_token_ids\":true");
    json_t *a = ask("/inference/v1/generate", body);
    json_t *b = ask("/v1/completions", "{\"prompt\":[1,270],\"n\":2,\"max_tokens\":6,\"seed\":5,"
                                       "\"temperature\":0.8}");
    assert_string_equal(text_of(a, "request_id"), "mine");
    assert_int_equal(json_array_size(of(a, "prompt_token_ids")), 2);
    assert_true(json_equal(of(of(a, "usage"), "completion_tokens"),
                           of(of(b, "usage"), "completion_tokens")));
    for (size_t i = 0; i < 2; i++) {
        const json_t *choice = at(of(a, "choices"), i), *ids = of(choice, "token_ids");
        const json_t *content = of(of(choice, "logprobs"), "content");
        assert_true(json_equal(ids, of(at(of(b, "choices"), i), "token_ids")));
        assert_int_equal(json_array_size(content), json_array_size(ids));
        for (size_t t = 0; t < json_array_size(ids); t++) {
            char name[32];
            const json_t *entry = at(content, t), *top = of(entry, "top_logprobs");
            snprintf(name, sizeof name, "token_id:%d", (int)json_integer_value(at(ids, t)));
            assert_string_equal(text_of(entry, "token"), name);
            assert_int_equal(json_array_size(top), 2);
            assert_string_equal(text_of(at(top, 0), "token"), name); // the sampled one leads
            assert_true(json_equal(of(at(top, 0), "logprob"), of(entry, "logprob")));
            assert_string_not_equal(text_of(at(top, 1), "token"), name);
        }
    }
    json_decref(a);
    json_decref(b);
}

TEST(test_inference_defaults)
{
    json_t *a = ask("/inference/v1/generate", "{\"token_ids\":[1],\"sampling_params\":{}}");
    const json_t *choice = at(of(a, "choices"), 0);
    assert_true(json_is_null(of(choice, "logprobs")));
    assert_int_equal(strlen(text_of(a, "request_id")), 32);
    if (strcmp(text_of(choice, "finish_reason"), "length") == 0) // up to the context
        assert_int_equal(json_array_size(of(choice, "token_ids")), 511);
    json_decref(a);
    a = ask("/inference/v1/generate", "{\"token_ids\":[1,270,299],\"sampling_params\":"
                                      "{\"max_tokens\":0,\"prompt_logprobs\":0}}");
    assert_int_equal(json_array_size(of(a, "prompt_logprobs")), 3);
    assert_int_equal(json_array_size(of(at(of(a, "choices"), 0), "token_ids")), 0);
    json_decref(a);
}

TEST(test_inference_stream)
{
    struct wire_answer a;
    char body[400], *save = NULL;
    json_t *ids[2] = {json_array(), json_array()};
    int chunks = 0, usages = 0;
    snprintf(body, sizeof body, inference, 0, "");
    json_t *whole = ask("/inference/v1/generate", body);
    snprintf(body, sizeof body, inference, 0,
             ",\"stream\":true,\"stream_options\":{\"include_usage\":true}");
    daemon_request(d.socket, "POST", "/inference/v1/generate", "", body, &a);
    for (char *line = strtok_r(a.body.data, "\n", &save); line;
         line = strtok_r(NULL, "\n", &save)) {
        json_t *chunk = json_loads(line + strlen("data: "), 0, NULL);
        if (!chunk) continue; // [DONE]
        json_t *choice = json_array_get(of(chunk, "choices"), 0);
        chunks++;
        usages += json_is_object(of(chunk, "usage"));
        if (choice) {
            json_t *i = ids[json_integer_value(of(choice, "index"))];
            json_array_extend(i, (json_t *)of(choice, "token_ids"));
        }
        json_decref(chunk);
    }
    assert_true(chunks >= 3 && usages == 1);
    for (size_t i = 0; i < 2; i++) {
        assert_true(json_equal(ids[i], of(at(of(whole, "choices"), i), "token_ids")));
        json_decref(ids[i]);
    }
    json_decref(whole);
}

// ---- /tokenize and others ----------------------------------------------------------------------

TEST(test_tokenize)
{
    json_t *a = ask("/tokenize", "{\"prompt\":\"a time\",\"return_token_strs\":true}");
    json_t *want = json_pack("[i,i,i]", TINY_SENTENCEPIECE_BOS, 270, TINY_SENTENCEPIECE_TIME);
    assert_true(json_equal(of(a, "tokens"), want));
    assert_int_equal(json_integer_value(of(a, "count")), 3);
    assert_int_equal(json_integer_value(of(a, "max_model_len")), 512);
    assert_string_equal(json_string_value(at(of(a, "token_strs"), 2)), "\xe2\x96\x81time");
    json_decref(a);
    a = ask("/tokenize", "{\"prompt\":\"a time\",\"add_special_tokens\":false}");
    assert_int_equal(json_array_size(of(a, "tokens")), 2);
    assert_true(json_is_null(of(a, "token_strs")));
    json_decref(a);
    a = ask("/detokenize", "{\"tokens\":[270,299]}");
    assert_string_equal(text_of(a, "prompt"), "a time");
    json_decref(a);
    json_decref(ask("/detokenize", "{\"tokens\":[]}"));
    daemon_post(d.socket, "/detokenize", 400, "{\"tokens\":[300]}");
    daemon_post(d.socket, "/detokenize", 400, "{\"tokens\":\"a\"}");
    daemon_post(d.socket, "/tokenize", 400, "{\"prompt\":\"a\",\"messages\":[]}");
    daemon_post(d.socket, "/tokenize", 400, "{\"text\":\"a\"}");
    a = daemon_get(d.socket, "/tokenizer_info", 200);
    assert_string_equal(text_of(a, "tokenizer_class"), "LlamaTokenizer");
    assert_string_equal(text_of(a, "bos_token"), "<s>");
    json_decref(a);
    json_decref(want);
}

TEST(test_version_and_model)
{
    json_t *a = daemon_get(d.socket, "/version", 200);
    assert_true(strlen(text_of(a, "version")) > 0);
    json_t *list = daemon_get(d.socket, "/v1/models/", 200);
    a = daemon_get(d.socket, "/v1/models/model", 200);
    assert_true(json_equal(a, at(of(list, "data"), 0)));
    a = daemon_get(d.socket, "/v1/models/meta/llama", 404);
    assert_contains(text_of(of(a, "error"), "message"), "meta/llama");
    daemon_get(d.socket, "/health///", 200);
    daemon_get(d.socket, "/healthy", 404);
}

TEST(test_request_names)
{
    struct wire_answer a;
    const char *body = "{\"prompt\":[1],\"max_tokens\":1}";
    daemon_request(d.socket, "POST", "/v1/completions", "X-Request-Id: trace 7\r\n", body, &a);
    assert_contains(bytes_text(&a.head), "X-Request-Id: trace 7\r\n");
    assert_string_equal(text_of(a.json, "id"), "cmpl-trace 7");
    daemon_request(d.socket, "POST", "/v1/completions", "X-Request-Id: b\r\n",
                   "{\"prompt\":[1],\"max_tokens\":1,\"request_id\":\"own\"}", &a);
    assert_string_equal(text_of(a.json, "id"), "cmpl-own");
    struct bytes longer = BYTES_INIT; // than is taken: a name is made
    bytes_puts(&longer, "X-Request-Id: ");
    for (int i = 0; i < 300; i++) bytes_puts(&longer, "n");
    bytes_puts(&longer, "\r\n");
    daemon_request(d.socket, "POST", "/v1/completions", bytes_text(&longer), body, &a);
    assert_int_equal(strlen(text_of(a.json, "id")), strlen("cmpl-") + 32);
    bytes_release(&longer);
    daemon_request(d.socket, "GET", "/nowhere", "X-Request-Id: lost\r\n", NULL, &a);
    assert_contains(bytes_text(&a.head), "X-Request-Id: lost\r\n");
}

static json_int_t cached(const char *salt)
{
    char body[512];
    snprintf(body, sizeof body,
             "{\"prompt\":[1,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9],"
             "\"max_tokens\":1%s}",
             salt);
    json_t *a = ask("/v1/completions", body);
    json_int_t n =
        json_integer_value(of(of(of(a, "usage"), "prompt_tokens_details"), "cached_tokens"));
    json_decref(a);
    return n;
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
    const json_t *cases = test_rows("clients", "test_context_overflow");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *a =
            daemon_post(d.socket, row_text(cases, i, "path"), 400, row_text(cases, i, "body"));
        const json_t *error = of(a, "error");
        assert_string_equal(text_of(error, "code"), "context_length_exceeded");
        assert_string_equal(text_of(error, "param"), row_text(cases, i, "param"));
        assert_contains(text_of(error, "message"), "maximum context length is 512 tokens");
    }
}

TEST(test_refused_fields)
{
    const json_t *cases = test_rows("clients", "test_refused_fields");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *a =
            daemon_post(d.socket, row_text(cases, i, "path"), 400, row_text(cases, i, "body"));
        const json_t *error = of(a, "error");
        if (strcmp(text_of(error, "param"), row_text(cases, i, "param")) != 0)
            fail_msg("%s: %s", row_text(cases, i, "body"), text_of(error, "message"));
    }
}

TEST(test_unknown_fields_may_pass)
{
    struct daemon other = {0};
    const char *body = "{\"prompt\":[1],\"max_tokens\":1,\"fancy\":{\"a\":1}}";
    daemon_start(&other, sentencepiece_model(), OPTIONS("--unknown-fields", "warn"));
    for (int i = 0; i < 3; i++) daemon_post(other.socket, "/v1/completions", 200, body);
    daemon_post(other.socket, "/v1/completions", 400, "{\"prompt\":[1],\"priority\":3}");
    assert_int_equal(daemon_stop(&other), 0);
    char *log = test_read(other.log), *first = strstr(log, "\"fancy\"");
    assert_non_null(first);
    assert_null(strstr(first + 1, "\"fancy\"")); // once
}

TESTS_BETWEEN(start, stop)
