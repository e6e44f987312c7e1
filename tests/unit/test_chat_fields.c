/* test_chat_fields.c: messages, tools and chat_template_kwargs on their way into a prompt: of a
 * request (infer-server/http/api_chat.c), and of a line of data (trainer/data/data.h). */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/chat_template.h"
#include "infer-server/http/api.h"
#include "tests/support/support.h"
#include "tests/support/tiny_tokenizer.h"
#include "trainer/data/data.h"

static const char template_text[] =
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}:{{ c.function.arguments|tojson }}]"
    "{% endfor %}{% endfor %}{% if tools %}T{{ tools|length }}{% endif %}"
    "{% if enable_thinking is defined %}E{{ enable_thinking }}{% endif %}"
    "{{ raise_exception('only once') if messages|length > 2 }}";

// A folder with the tiny tokenizer and a template.
static const char *model_folder(const char *text)
{
    const char *folder = test_folder();
    json_t *tokenizer = NULL, *config = NULL;
    assert_ok(tiny_tokenizer_json(&tokenizer, &config));
    assert_ok(json_write_file(test_path(folder, "tokenizer.json"), 0644, tokenizer));
    assert_ok(json_write_file(test_path(folder, "tokenizer_config.json"), 0644, config));
    json_decref(tokenizer);
    json_decref(config);
    test_write(test_path(folder, "chat_template.jinja"), text, strlen(text));
    return folder;
}

static void assert_ids(const struct tokenizer *t, const int32_t *ids, int n, const char *want)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    assert_ok(tokenizer_decode(t, ids, n, false, &text));
    assert_string_equal(bytes_text(&text), want);
}

// ---- requests -----------------------------------------------------------------------------------

struct served {
    struct tokenizer *tokenizer;
    struct chat_template *chat;
    struct api_model model;
};

static void serve(struct served *s, const char *text)
{
    const char *folder = model_folder(text);
    const struct chat_template_choice own = {NULL, NULL};
    *s = (struct served){.tokenizer = NULL};
    assert_ok(tokenizer_load(folder, &s->tokenizer));
    assert_ok(chat_template_find(folder, &own, &s->chat));
    s->model = (struct api_model){.name = "m",
                                  .folder = folder,
                                  .tokenizer = s->tokenizer,
                                  .chat = s->chat,
                                  .vocab_size = 300,
                                  .max_context = 512,
                                  .temperature = 1,
                                  .top_p = 1};
}

static void serve_no_more(struct served *s)
{
    chat_template_free(s->chat);
    tokenizer_free(s->tokenizer);
}

// The row's "body", as a request of its "kind".
static enum status parse_row(const struct served *s, const json_t *rows, size_t i,
                             struct api_request **ret)
{
    static const char *const kinds[] = {
        [API_COMPLETIONS] = "completions", [API_CHAT] = "chat",
        [API_ROLLOUTS] = "rollouts",       [API_GENERATE] = "generate",
        [API_INFERENCE] = "inference",     [API_RESPONSES] = "responses",
        [API_MESSAGES] = "messages"};
    char *body = test_keep(json_dumps(json_object_get(json_array_get(rows, i), "body"), 0));
    size_t kind = 0;
    while (kind < sizeof kinds / sizeof *kinds && strcmp(kinds[kind], row_text(rows, i, "kind")))
        kind++;
    assert_in_range(kind, 0, sizeof kinds / sizeof *kinds - 1);
    const enum status st =
        api_request_parse((enum api_kind)kind, &s->model, body, strlen(body), ret);
    return st;
}

TEST(requests)
{
    const json_t *cases = test_rows("chat_fields", "requests");
    struct served s;
    serve(&s, template_text);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct api_request *r = NULL;
        assert_ok(parse_row(&s, cases, i, &r));
        assert_ids(s.tokenizer, r->prompts[0].ids, r->prompts[0].n_ids, row_text(cases, i, "want"));
        api_request_free(r);
    }
    serve_no_more(&s);
}

// Who sends an answer back as it came sends null beside its calls, which some templates fail on.
TEST(null_is_no_failure)
{
    const json_t *cases = test_rows("chat_fields", "null_is_no_failure");
    static const char body[] =
        "{\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"1\","
        "\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]}]}";
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct served s;
        struct api_request *r = NULL;
        serve(&s, row_text(cases, i, "template"));
        const enum status st = api_request_parse(API_CHAT, &s.model, body, strlen(body), &r);
        assert_int_equal(st, row_flag(cases, i, "fails") ? ST_INVALID : ST_OK);
        if (r)
            assert_ids(s.tokenizer, r->prompts[0].ids, r->prompts[0].n_ids,
                       row_text(cases, i, "want"));
        else
            assert_contains(status_message(), row_text(cases, i, "want"));
        api_request_free(r);
        serve_no_more(&s);
    }
}

TEST(requests_refused)
{
    const json_t *cases = test_rows("chat_fields", "requests_refused");
    struct served s;
    serve(&s, template_text);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct api_request *r = NULL;
        assert_fails(parse_row(&s, cases, i, &r), row_status(cases, i, "status"),
                     row_text(cases, i, "says"));
        assert_null(r);
    }
    serve_no_more(&s);
}

// ---- lines of data ------------------------------------------------------------------------------

static enum status load(const char *folder, const char *lines, struct dataset **ret)
{
    const char *path = test_path(folder, "set.jsonl");
    const struct prompt_options options = {.prompt_field = NULL};
    int left_out;
    test_write(path, lines, strlen(lines));
    return prompts_load(path, folder, 300, &options, ret, &left_out);
}

TEST(data)
{
    const char *folder = model_folder(template_text);
    struct tokenizer *tokenizer = NULL;
    struct dataset *d = NULL;
    assert_ok(tokenizer_load(folder, &tokenizer));
    assert_ok(load(folder,
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[{}],"
                   "\"chat_template_kwargs\":{\"enable_thinking\":false}}\n"
                   "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":"
                   "\"f\",\"arguments\":{\"x\":1}}}]},{\"role\":\"tool\",\"content\":\"r\"}]}\n"
                   "{\"prompt\":\"plain\"}\n",
                   &d));
    static const char *const want[] = {"<user>aT1EFalse", "<assistant>[f:{\"x\": 1}]<tool>r",
                                       "plain"};
    for (int i = 0; i < 3; i++)
        assert_ids(tokenizer, d->examples[i].prompt_ids.ids, d->examples[i].prompt_ids.n, want[i]);
    // what the log of rollouts shows beside what the row says
    assert_string_equal(json_string_value(d->examples[0].prompt_text), want[0]);
    assert_null(d->examples[2].prompt_text);
    assert_contains(d->chat_source, "chat_template.jinja");
    assert_null(d->ignored);
    dataset_free(d);
    d = NULL;
    assert_fails(load(folder,
                      "{\"prompt\":\"x\"}\n{\"messages\":[{\"role\":\"a\",\"content\":\"\"},"
                      "{\"role\":\"a\",\"content\":\"\"},{\"role\":\"a\",\"content\":\"\"}]}\n",
                      &d),
                 ST_INVALID, "set.jsonl, line 2: ");
    assert_message("only once");
    assert_fails(
        load(folder, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":{}}", &d),
        ST_INVALID, "tools is not a list");
    assert_null(d);
    // what the template does not read is ignored, and said once
    assert_ok(load(folder,
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}\n"
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                   "\"chat_template_kwargs\":{\"date\":1}}\n",
                   &d));
    assert_contains(d->ignored, "set.jsonl, line 2: \"chat_template_kwargs\": \"date\"");
    dataset_free(d);
    tokenizer_free(tokenizer);
}
