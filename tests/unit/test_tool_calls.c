/* test_tool_calls.c: infer-server/http/tool_calls.h: against vLLM's parsers (tests/tool-calls), cut
 * at every byte, and what chat templates render of a call parses back to it. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/server_impl.h"
#include "infer-server/http/tool_calls.h"
#include "tests/support/support.h"
#include "tests/support/tiny_tokenizer.h"

#include <glob.h>

static json_t *tools; // get_weather, add

static void make_tools(void)
{
    tools = json_loads("[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\"}},"
                       "{\"type\":\"function\",\"function\":{\"name\":\"add\"}}]",
                       0, NULL);
    assert_non_null(tools);
}

static void free_tools(void)
{
    json_decref(tools);
}

static const struct tool_form *form_named(const char *name)
{
    const struct tool_form *form;
    for (int i = 0; (form = tool_form_at(i)); i++)
        if (strcmp(tool_form_name(form), name) == 0) return form;
    fail_msg("no form %s", name);
    return NULL;
}

// The text in one piece.
static struct tool_calls *whole(const char *form, const char *text)
{
    struct tool_calls *c = NULL;
    assert_ok(tool_calls_new(form_named(form), tools, &c));
    assert_ok(tool_calls_read(c, text, strlen(text), true));
    return c;
}

static void assert_same(const struct tool_calls *a, const struct tool_calls *b)
{
    assert_string_equal(bytes_text(&a->content), bytes_text(&b->content));
    assert_int_equal(a->n, b->n);
    for (int i = 0; i < a->n; i++) {
        assert_string_equal(a->list[i].name, b->list[i].name);
        assert_string_equal(a->list[i].arguments, b->list[i].arguments);
    }
}

// Byte by byte, and in two pieces at every byte, nothing is taken back and all comes out the same.
static void cut_everywhere(const char *form, const char *text)
{
    struct tool_calls *want = whole(form, text), *bytewise = NULL;
    const size_t len = strlen(text);
    assert_ok(tool_calls_new(form_named(form), tools, &bytewise));
    for (size_t cut = 0; cut <= len; cut++) {
        struct tool_calls *halves = NULL;
        assert_ok(tool_calls_new(form_named(form), tools, &halves));
        assert_ok(tool_calls_read(halves, text, cut, false));
        assert_int_equal(
            memcmp(bytes_text(&halves->content), bytes_text(&want->content), halves->content.len),
            0);
        assert_ok(tool_calls_read(halves, text, len, true));
        assert_same(halves, want);
        assert_ok(tool_calls_read(bytewise, text, cut, false));
        tool_calls_free(halves);
    }
    assert_ok(tool_calls_read(bytewise, text, len, true));
    assert_same(bytewise, want);
    tool_calls_free(bytewise);
    tool_calls_free(want);
}

// ---- against vLLM ------------------------------------------------------------------------------

static bool same_json(const char *a, const char *b)
{
    json_t *x = NULL, *y = NULL;
    const bool same = json_parse("a", a, strlen(a), &x) == ST_OK &&
                      json_parse("b", b, strlen(b), &y) == ST_OK && json_equal(x, y);
    json_decref(x);
    json_decref(y);
    return same;
}

static size_t trimmed(const char *text)
{
    size_t len = strlen(text);
    while (len > 0 && strchr(" \n", text[len - 1])) len--;
    return len;
}

// vLLM leaves white space before a call in the content, and drops text behind one, which no case
// has.
static void check_case(const json_t *c)
{
    const char *text = json_string_value(json_object_get(c, "text"));
    const char *form = json_string_value(json_object_get(c, "form"));
    const char *content = json_string_value(json_object_get(c, "content"));
    const json_t *calls = json_object_get(c, "calls"), *one;
    struct tool_calls *got = whole(form, text);
    size_t i;
    print_message("%s: %s\n", form, text);
    assert_int_equal(got->n, json_array_size(calls));
    json_array_foreach (calls, i, one) {
        assert_string_equal(got->list[i].name, json_string_value(json_array_get(one, 0)));
        assert_true(same_json(got->list[i].arguments, json_string_value(json_array_get(one, 1))));
    }
    if (!content) content = "";
    assert_int_equal(got->content.len, got->n ? trimmed(content) : strlen(content));
    assert_memory_equal(bytes_text(&got->content), content, got->content.len);
    tool_calls_free(got);
    cut_everywhere(form, text);
}

TEST(as_vllm_parses)
{
    const char *path = test_path(test_root(), "tests/tool-calls/cases.jsonl");
    char *cases = test_read(path);
    int n = 0;
    for (char *line = cases; *line; n++) {
        size_t len = strcspn(line, "\n");
        json_t *one = NULL;
        assert_ok(json_parse(path, line, len, &one));
        check_case(one);
        json_decref(one);
        line += len + (line[len] == '\n');
    }
    assert_true(n > 20);
}

// ---- what vLLM does otherwise, or not at all ---------------------------------------------------

TEST(texts)
{
    static const struct {
        const char *form, *text, *content, *calls; // NAME ARGUMENTS; with line ends between
    } cases[] = {
#define HERMES(name) "<tool_call>{\"name\":\"" name "\",\"arguments\":{}}</tool_call>"
        // a function that there is not, and JSON that is none, stay text; the others are calls
        {"hermes", HERMES("add") HERMES("nosuch") " so", HERMES("nosuch") " so", "add {}\n"},
        {"hermes", "<tool_call>{]</tool_call> " HERMES("add"), "<tool_call>{]</tool_call>",
         "add {}\n"},
        {"hermes", "<tool_call><tool_call>" HERMES("add"), "<tool_call><tool_call>", "add {}\n"},
        // text between and behind calls is kept, white space beside them is not
        {"hermes", " \n" HERMES("add") "\n and \n" HERMES("add") "\nend \n",
         "and"
         "end \n",
         "add {}\nadd {}\n"},
        {"hermes", "a \n", "a \n", ""},
        {"hermes", "<tool_call>{\"name\":\"add\",\"arguments\":\"{}\"}</tool_call>",
         "<tool_call>{\"name\":\"add\",\"arguments\":\"{}\"}</tool_call>", ""},
        {"hermes", "<tool_call>{\"name\":\"add\",\"arguments\":{\"x\":1e400}}</tool_call>",
         "<tool_call>{\"name\":\"add\",\"arguments\":{\"x\":1e400}}</tool_call>", ""},
        // as the model wrote them: neither long numbers nor spaces change
        {"hermes",
         "<tool_call>{\"arguments\" : { \"arguments\":{}, \"x\" : 123456789012345678901 } , "
         "\"name\":\"add\"}",
         "", "add { \"arguments\":{}, \"x\" : 123456789012345678901 }\n"},
        {"llama3", "Well, {\"name\":\"add\",\"parameters\":{}}",
         "Well, {\"name\":\"add\",\"parameters\":{}}", ""},
        {"llama3", "Well, <|python_tag|>{\"name\":\"add\",\"parameters\":{}}", "Well,", "add {}\n"},
        {"llama3", "\n{\"name\":\"add\",\"parameters\":{}} {\"name\":\"add\",\"parameters\":{}}",
         "", "add {}\nadd {}\n"},
        {"mistral", "[TOOL_CALLS] [{\"name\":\"add\",\"arguments\":{\"a\":[1]}, \"id\":\"x\"}]", "",
         "add {\"a\":[1]}\n"},
        {"mistral",
         "[TOOL_CALLS][{\"name\":\"add\",\"arguments\":{}},{\"name\":\"no\",\"arguments\":{}}]",
         "[TOOL_CALLS][{\"name\":\"add\",\"arguments\":{}},{\"name\":\"no\",\"arguments\":{}}]",
         ""},
        {"mistral", "So[TOOL_CALLS]add[ARGS]{\"a\": 1}[TOOL_CALLS]get_weather{\"a\": 2}", "So",
         "add {\"a\": 1}\nget_weather {\"a\": 2}\n"},
        {"mistral", "[TOOL_CALLS]add[CALL_ID]abc123DEF[ARGS]{}", "", "add {}\n"},
        {"gpt-oss",
         "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\":1}<|call|>", "",
         "add {\"a\":1}\n"},
        {"gpt-oss", " to=functions.add<|channel|>commentary json<|message|>{\"a\":1}", "",
         "add {\"a\":1}\n"},
        {"gpt-oss",
         "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
         "to=functions.add <|constrain|>json<|message|>{}",
         "<|channel|>analysis<|message|>hm<|end|>", "add {}\n"},
        {"gpt-oss", "<|channel|>final<|message|>to=functions.",
         "<|channel|>final<|message|>to=functions.", ""},
        {"deepseek",
         "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "",
         "add {}\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tool_calls *got = whole(cases[i].form, cases[i].text);
        struct bytes calls = BYTES_INIT;
        for (int k = 0; k < got->n; k++) {
            bytes_printf(&calls, "%s %s\n", got->list[k].name, got->list[k].arguments);
            assert_int_equal(strspn(got->list[k].id, "abcdefghijklmnopqrstuvwxyz0123456789"), 9);
            assert_true(k == 0 || strcmp(got->list[k].id, got->list[0].id) != 0);
        }
        print_message("%s: %s\n", cases[i].form, cases[i].text);
        assert_string_equal(bytes_text(&calls), cases[i].calls);
        assert_string_equal(bytes_text(&got->content), cases[i].content);
        bytes_release(&calls);
        tool_calls_free(got);
        cut_everywhere(cases[i].form, cases[i].text);
    }
}

// What may yet become a call is held back, and nothing else is.
TEST(held_back)
{
    static const struct {
        const char *form, *text, *given;
    } cases[] = {
        {"hermes", "a <tool", "a"},
        {"hermes", "a < b", "a < b"},
        {"hermes", "a <tool_call>{\"x\":\"</tool_call>", "a"},
        {"hermes", "a <tool_call>[", "a <tool_call>["},
        {"hermes", "a <tool_call>{x", "a <tool_call>{x"},
        {"llama3", "a {", "a {"},
        {"llama3", "{\"a\":", ""},
        {"llama3", "{x", "{x"},
        {"mistral", "x [TOOL_CALLS]add", "x"},
        {"deepseek", "x<\xef\xbd", "x"},
        {"gpt-oss", "two t", "two"},
        {"gpt-oss", "two th", "two th"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tool_calls *c = NULL;
        assert_ok(tool_calls_new(form_named(cases[i].form), tools, &c));
        assert_ok(tool_calls_read(c, cases[i].text, strlen(cases[i].text), false));
        print_message("%s: %s\n", cases[i].form, cases[i].text);
        assert_string_equal(bytes_text(&c->content), cases[i].given);
        tool_calls_free(c);
    }
}

// ---- the shared templates -----------------------------------------------------------------------

TEST(templates_parse_back)
{
    static const struct {
        const char *name, *form;
    } wanted[] = {{"qwen2_5", "hermes"},
                  {"qwen3", "hermes"},
                  {"qwen3_instruct_2507", "hermes"},
                  {"llama3_1", "llama3"},
                  {"deepseekv3_training", "deepseek"},
                  {"gptoss", "gpt-oss"},
                  {"qwen3_5_nothink", NULL},
                  {"glm4moe_training", NULL},
                  {"llama3", NULL}};
    char folder[PATH_MAX], pattern[PATH_MAX + 16];
    size_t seen = 0;
    glob_t found = {0};
    test_data_folder("chat-templates", folder);
    snprintf(pattern, sizeof pattern, "%s/*.jinja", folder);
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    json_t *tokens = test_keep(json_pack("{s:s,s:s}", "bos_token", "<s>", "eos_token", "</s>"));
    for (size_t i = 0; i < found.gl_pathc; i++) {
        struct chat_template *t = NULL;
        char *text = test_read(found.gl_pathv[i]), name[100];
        const char *file = strrchr(found.gl_pathv[i], '/') + 1;
        snprintf(name, sizeof name, "%.*s", (int)strcspn(file, "."), file);
        assert_ok(chat_template_parse(name, text, strlen(text), tokens, &t));
        const struct tool_form *form = chat_probe_tool_form(t);
        const char *got = form ? tool_form_name(form) : "-";
        print_message("%-32s %s\n", name, got);
        for (size_t k = 0; k < sizeof wanted / sizeof *wanted; k++) {
            if (strcmp(wanted[k].name, name) != 0) continue;
            assert_string_equal(got, wanted[k].form ? wanted[k].form : "-");
            seen++;
        }
        chat_template_free(t);
    }
    assert_int_equal(seen, sizeof wanted / sizeof *wanted);
    globfree(&found);
}

// Of templates that are not there: Mistral's list, and arguments that have to be text.
TEST(other_templates_parse_back)
{
#define CALLS(text)                                                                                \
    "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}" text                  \
    "{% endfor %}{% endfor %}"
    static const struct {
        const char *template, *form;
    } cases[] = {
        {CALLS("[TOOL_CALLS] [{{ c.function|tojson }}]"), "mistral"},
        {CALLS("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments|tojson }}"),
         "mistral"},
        {CALLS("{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + "
               "c.function.arguments + '<｜tool▁call▁end｜>' }}"),
         "deepseek"},
        {CALLS("{{ c.function.name }}({{ c.function.arguments|tojson }})"), NULL},
        {"{{ raise_exception('no') }}", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct chat_template *t = NULL;
        assert_ok(chat_template_parse("T", cases[i].template, strlen(cases[i].template), NULL, &t));
        const struct tool_form *form = chat_probe_tool_form(t);
        assert_string_equal(form ? tool_form_name(form) : "-", cases[i].form ? cases[i].form : "-");
        chat_template_free(t);
    }
}

// ---- turns -------------------------------------------------------------------------------------

TEST(turns_that_do_not_repeat_are_said)
{
#define TURN(content) "{% for m in messages %}<{{ m.role }}>" content "\n{% endfor %}"
#define PROMPT(text)  "{% if add_generation_prompt %}" text "{% endif %}"
    static const struct {
        const char *template, *sentence; // a part of it
    } cases[] = {
        {TURN("{{ m.content }}") PROMPT("<assistant>"), ""},
        {TURN("{{ m.content }}") PROMPT("<assistant><think>"), "(its first 19 of 26)"},
        {TURN("{{ m.content.split('</think>')[-1] }}") PROMPT("<assistant>"), "leaves out"},
        {"{{ raise_exception('no') if messages|length > 1 }}a", ""},
    };
    struct tokenizer *tokenizer = NULL;
    const char *folder = test_folder();
    assert_ok(tiny_tokenizer_write_bytes(folder));
    assert_ok(tokenizer_load(folder, &tokenizer));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct chat_template *t = NULL;
        struct bytes sentence = BYTES_INIT;
        assert_ok(chat_template_parse("T", cases[i].template, strlen(cases[i].template), NULL, &t));
        chat_probe_repeats(t, tokenizer, &sentence);
        assert_contains(bytes_text(&sentence), cases[i].sentence);
        assert_int_equal(sentence.len > 0, cases[i].sentence[0] != 0);
        bytes_release(&sentence);
        chat_template_free(t);
    }
    tokenizer_free(tokenizer);
}

TESTS_BETWEEN(make_tools, free_tools)
