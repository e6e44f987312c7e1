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
              {ADD "\n" ADD, false}};

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

// Whatever else its users do: tests/clients/openai_sdk.py says what.
TEST(test_openai_sdk)
{
    const char *python = test_python("openai");
    daemon_start(&served, daemon_model(test_folder(), true, 7), args("--listen 127.0.0.1:0"));
    daemon_client(&served, python, "tests/clients/openai_sdk.py", "model");
    served_stop();
}
