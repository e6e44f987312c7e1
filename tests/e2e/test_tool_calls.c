/* test_tool_calls.c: tool calls from a real cw-infer-server, by OpenAI's SDK for Python
 * (tests/clients/openai_tools.py). The model is a random one: its tokenizer has tokens that
 * together are an answer with calls, and logit_bias and a penalty bring them one after the other.
 */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

// Qwen's way of writing calls.
static const char template_text[] =
    "{% for t in tools or [] %}{{ t|tojson }}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>{\"name\": \"' + c.function.name + '\", "
    "\"arguments\": ' + c.function.arguments|tojson + '}</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

// Added to the tokenizer's, from 263 on, as tests/clients/openai_tools.py numbers them. The marker
// is special: it is no part of a text, but the parser sees it.
#define ADD "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>"
static const struct {
    const char *text;
    bool special;
} pieces[] = {{"I look it up. ", false},
              {"<tool_call>", true},
              {"{\"name\": \"get_weather\", \"argu", false},
              {"ments\": {\"city\": \"Paris\"}}</tool", false},
              {"_call>", false},
              {"{\"name\": \"add\", \"arguments\": {}}</tool_call>", false},
              {"{\"name\": \"nosuch\", \"arguments\": {}}</tool_call>", false},
              {ADD "\n" ADD, false},
              // what ends a text in the forms that have texts
              {"</parameter>", false},
              {"</arg_value>", false},
              {"\n</parameter>", false}};

static const char *model_with_pieces(void)
{
    const char *model = daemon_model(test_folder(), true, 7);
    const char *path = test_path(model, "tokenizer.json");
    json_t *tokenizer = NULL;
    assert_ok(json_read_file(path, 1 << 20, &tokenizer));
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        json_array_append_new(json_object_get(tokenizer, "added_tokens"),
                              json_pack("{s:i,s:s,s:b,s:b,s:b,s:b,s:b}", "id", 263 + (int)i,
                                        "content", pieces[i].text, "single_word", 0, "lstrip", 0,
                                        "rstrip", 0, "normalized", 0, "special",
                                        (int)pieces[i].special));
    assert_ok(json_write_file(path, 0644, tokenizer));
    json_decref(tokenizer);
    path = test_path(model, "config.json");
    assert_ok(json_read_file(path, 1 << 20, &tokenizer));
    json_object_set_new(tokenizer, "eos_token_id", json_integer(261));
    assert_ok(json_write_file(path, 0644, tokenizer));
    json_decref(tokenizer);
    test_write(test_path(model, "chat_template.jinja"), template_text, strlen(template_text));
    return model;
}

static void assert_logged(const char *sentence)
{
    assert_contains(test_read(served.child.log), sentence);
}

TEST(test_tool_calls)
{
    const char *python = test_python("openai"), *model = model_with_pieces();
    daemon_start(&served, model, args("--listen 127.0.0.1:0"));
    assert_logged("tool calls in answers are parsed: hermes");
    daemon_client(&served, python, "tests/clients/openai_tools.py", "hermes");
    served_stop();
    daemon_start(&served, model, args("--listen 127.0.0.1:0 --tool-call-parser off"));
    assert_logged("tool calls in answers stay text: --tool-call-parser off");
    daemon_client(&served, python, "tests/clients/openai_tools.py", "off");
    served_stop();
}

// OpenAI's newer interface, and Anthropic's.
TEST(test_responses)
{
    const char *python = test_python("openai");
    daemon_start(&served, model_with_pieces(), args("--listen 127.0.0.1:0"));
    daemon_client(&served, python, "tests/clients/responses.py", "");
    served_stop();
}

TEST(test_anthropic_sdk)
{
    const char *python = test_python("anthropic");
    daemon_start(&served, model_with_pieces(), args("--listen 127.0.0.1:0"));
    daemon_client(&served, python, "tests/clients/anthropic_sdk.py", "");
    served_stop();
}

// Whatever else its users do: tests/clients/openai_sdk.py says what.
TEST(test_openai_sdk)
{
    const char *python = test_python("openai");
    daemon_start(&served, daemon_model(test_folder(), true, 7), args("--listen 127.0.0.1:0"));
    daemon_client(&served, python, "tests/clients/openai_sdk.py", "model");
    served_stop();
}

// ---- asked for ---------------------------------------------------------------------------------

static const char asked_tools[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"strict\":true,\"parameters\":"
    "{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\",\"maxLength\":5},\"days\":"
    "{\"type\":\"integer\",\"minimum\":1,\"maximum\":20},\"unit\":{\"enum\":[\"C\",\"F\"]},"
    "\"sure\":"
    "{\"type\":\"boolean\"},\"list\":{\"$ref\":\"#/$defs/l\"}},\"required\":[\"days\",\"sure\"],"
    "\"additionalProperties\":false,\"$defs\":{\"l\":{\"type\":\"array\",\"items\":{\"type\":"
    "\"null\"},"
    "\"maxItems\":2}}}}},{\"type\":\"function\",\"function\":{\"name\":\"now\",\"strict\":true,"
    "\"parameters\":"
    "{\"type\":\"object\",\"properties\":{},\"additionalProperties\":false}}}]";

static void check_asked(const json_t *call)
{
    const json_t *a = json_of(text_of(call, "function.arguments")),
                 *list = json_object_get(a, "list"), *city = json_object_get(a, "city"),
                 *unit = json_object_get(a, "unit");
    if (strcmp(text_of(call, "function.name"), "now") == 0) {
        assert_int_equal(json_object_size(a), 0);
        return;
    }
    assert_string_equal(text_of(call, "function.name"), "get_weather");
    assert_in_range(int_of(a, "days"), 1, 20);
    assert_true(json_is_boolean(json_at(a, "sure")));
    assert_true(!city || json_is_string(city));
    assert_true(!unit || strchr("CF", json_string_value(unit)[0]));
    assert_true(!list || (json_is_array(list) && json_array_size(list) <= 2));
}

// A row's answers, of which as many as it says end by themselves.
static void check_row(const json_t *rows, size_t i)
{
    json_t *body =
        json_of("{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"chat_template\":\"{{ 0 if "
                "tools }}\",\"n\":24,\"max_tokens\":300,"
                "\"seed\":3,"
                "\"temperature\":1,\"logit_bias\":{\"271\":3,\"272\":3,\"273\":3,\"261\":1,\"9\":-"
                "50,\"10\":-50,\"13\":-50,\"32\":-4,\"97\":-50,\"60\":-3,\"104\":-50,\"264\":2}}");
    json_object_set(body, "tools", json_of(asked_tools));
    json_object_update(body, json_object_get(json_array_get(rows, i), "fields"));
    char *text = test_keep(json_dumps(body, 0));
    const json_t *choices =
        json_at(daemon_post(served.socket, "/v1/chat/completions", 200, text), "choices");
    const char *only = json_string_value(json_object_get(json_array_get(rows, i), "only"));
    const bool free_text = row_flag(rows, i, "free");
    int ended = 0, most = 0;
    for (size_t k = 0; k < json_array_size(choices); k++) {
        const json_t *choice = json_array_get(choices, k), *calls, *call;
        const char *why = text_of(choice, "finish_reason"),
                   *content = json_string_value(json_at(choice, "message.content"));
        size_t c;
        calls = json_object_get(json_at(choice, "message"), "tool_calls");
        if (strcmp(why, "stop") == 0) print_message("%s: [%s]\n", why, content);
        if (strcmp(why, "length") == 0) continue;
        ended++;
        if (!free_text) {
            assert_string_equal(why, "tool_calls");
            assert_true(!content || strncmp(content, "<", 1) == 0); // a thought before it
        }
        json_array_foreach (calls, c, call) {
            check_asked(call);
            assert_true(!only || strcmp(only, text_of(call, "function.name")) == 0);
        }
        if ((int)json_array_size(calls) > most) most = (int)json_array_size(calls);
    }
    print_message("%d of 24 ended, with %d calls at most\n", ended, most);
    assert_true(ended >= row_int(rows, i, "ended"));
    assert_true(most >= row_int(rows, i, "most") && (most == 1 || !row_flag(rows, i, "single")));
    json_decref(body);
}

TEST(calls_that_are_asked_for)
{
    const json_t *rows = test_rows("tool_calls", "asked");
    const char *running = "";
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const char *form = row_text(rows, i, "form");
        if (strcmp(form, running) != 0) {
            if (*running) served_stop();
            daemon_start(&served, model_with_pieces(), args("--tool-call-parser %s", form));
        }
        running = form;
        char *row = test_keep(json_dumps(json_array_get(rows, i), 0));
        print_message("%s\n", row);
        check_row(rows, i);
    }
    served_stop();
}
