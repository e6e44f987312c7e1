/* test_chat_template.c: common/text/chat_template.h: where templates are found and which is taken,
 * what they see, contents in parts; and the shared templates with what transformers makes of them,
 * skipped where they are absent. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/chat_template.h"
#include "tests/support/support.h"

#include <glob.h>

static const struct chat_template_choice own = {NULL, NULL};

#define USER "[{\"role\":\"user\",\"content\":\"U\"}]"

static enum status render(const struct chat_template *t, const char *messages, const char *tools,
                          const char *kwargs, struct bytes *ret)
{
    const struct chat_input input = {.messages = json_of(messages),
                                     .tools = tools ? json_of(tools) : NULL,
                                     .kwargs = kwargs ? json_of(kwargs) : NULL,
                                     .add_generation_prompt = true};
    return chat_template_render(t, &input, ret);
}

// With a message of the user "U".
static void assert_text(const struct chat_template *t, const char *tools, const char *kwargs,
                        const char *want)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    assert_ok(render(t, USER, tools, kwargs, &text));
    assert_string_equal(bytes_text(&text), want);
}

LATER(chat_template_free)

// Freed with the test.
static struct chat_template *template_of(const char *name, const char *text, const json_t *tokens)
{
    struct chat_template *t = NULL;
    assert_ok(chat_template_parse(name, text, strlen(text), tokens, &t));
    return test_later(t, chat_template_free_later);
}

static void assert_found(const char *folder, struct chat_template_choice choice, const char *source,
                         const char *tools, const char *want)
{
    struct chat_template *t = NULL;
    assert_ok(chat_template_find(folder, &choice, &t));
    assert_contains(chat_template_source(t), source);
    assert_text(t, tools, NULL, want);
    chat_template_free(t);
}

static void assert_not_found(const char *folder, struct chat_template_choice choice,
                             enum status code, const char *message)
{
    struct chat_template *t = NULL;
    assert_fails(chat_template_find(folder, &choice, &t), code, message);
    assert_null(t);
}

// ---- where from ---------------------------------------------------------------------------------

TEST(found_as_transformers_does)
{
    const char *folder = test_folder();
    assert_not_found(folder, own, ST_NOT_FOUND, "--chat-template-file");
    test_put(folder, "tokenizer_config.json",
             "{\"chat_template\":\"config {{ messages[0].content }}\"}");
    assert_found(folder, own, "tokenizer_config.json", NULL, "config U");
    test_put(folder, "chat_template.jinja", "file {{ messages[0].content }}\n");
    assert_found(folder, own, "chat_template.jinja", NULL, "file U");

    // further ones by name; tool_use is taken with tools
    assert_int_equal(test_command(test_path(folder, "log"), 5000,
                                  OPTIONS("mkdir", test_path(folder, "additional_chat_templates"))),
                     0);
    test_put(folder, "additional_chat_templates/tool_use.jinja", "tools {{ tools|length }}");
    test_put(folder, "additional_chat_templates/rag.jinja", "rag");
    test_put(folder, "additional_chat_templates/notes.txt", "{% no template");
    assert_found(folder, own, "chat_template.jinja (default, rag, tool_use)", NULL, "file U");
    assert_found(folder, own, "tool_use", "[{}, {}]", "tools 2");
    assert_found(folder, (struct chat_template_choice){.name = "rag"}, "rag", "[{}]", "rag");
    assert_found(folder, (struct chat_template_choice){.name = "default"}, "default", "[{}]",
                 "file U");
    assert_not_found(folder, (struct chat_template_choice){.name = "chatml"}, ST_INVALID,
                     "default, rag, tool_use");

    // a file of one's own stands in for all of them
    const char *file = test_path(folder, "mine.jinja");
    test_put(folder, "mine.jinja", "mine {{ messages[0].content }}");
    assert_found(folder, (struct chat_template_choice){.file = file}, "mine.jinja", "[{}]",
                 "mine U");
    assert_not_found(folder, (struct chat_template_choice){.file = "/no/such/file"}, ST_NOT_FOUND,
                     "/no/such/file");
}

TEST(named_in_the_config)
{
    const char *folder = test_folder();
    test_put(folder, "tokenizer_config.json",
             "{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"T\"},"
             "{\"name\":\"default\",\"template\":\"D\"}]}");
    assert_found(folder, own, "tokenizer_config.json", NULL, "D");
    assert_found(folder, own, "(tool_use, default)", "[{}]", "T");
    test_put(folder, "tokenizer_config.json",
             "{\"chat_template\":[{\"name\":\"a\",\"template\":\"A\"},{\"name\":\"b\",\"template\":"
             "\"B\"}]}");
    assert_not_found(folder, own, ST_INVALID, "none called default");
    assert_found(folder, (struct chat_template_choice){.name = "b"}, "b", NULL, "B");
    test_put(folder, "tokenizer_config.json", "{\"chat_template\":[{\"name\":\"a\"}]}");
    assert_not_found(folder, own, ST_FORMAT, "entry 0");
    test_put(folder, "tokenizer_config.json", "{\"chat_template\":7}");
    assert_not_found(folder, own, ST_FORMAT, "chat_template is neither");
    test_put(folder, "tokenizer_config.json", "{\"chat_template\":\"{% if %}\"}");
    assert_not_found(folder, own, ST_FORMAT, "line 1, column 7");
    test_put(folder, "tokenizer_config.json", "{\"chat_template\":\"{{ 1|nosuch }}\"}");
    assert_not_found(folder, own, ST_FORMAT, "No filter named 'nosuch'.");
}

// A template that resembles another is not taken for it: what it says is what comes.
TEST_EACH(variants_are_themselves, "chat_template")
{
    assert_text(template_of("F", row_text(cases, i, "text"), NULL), NULL, NULL,
                row_text(cases, i, "want"));
}

// ---- what a template sees -----------------------------------------------------------------------

TEST(sees_tokens_tools_and_kwargs)
{
    const char *folder = test_folder();
    struct chat_template *t = NULL;
    test_put(folder, "tokenizer_config.json",
             "{\"bos_token\":{\"content\":\"<B>\"},\"eos_token\":\"<E>\",\"pad_token\":null,"
             "\"add_bos_token\":true,\"extra_special_tokens\":{\"image_token\":\"<I>\"}}");
    test_put(folder, "special_tokens_map.json", "{\"bos_token\":\"<X>\",\"unk_token\":\"<U>\"}");
    test_put(
        folder, "chat_template.jinja",
        "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ image_token }}{{ pad_token is defined }}"
        "{{ add_bos_token is defined }} {{ tools is none }} {{ documents is none }} "
        "{{ add_generation_prompt }} {{ enable_thinking is defined and enable_thinking }}");
    assert_ok(chat_template_find(folder, &own, &t));
    assert_text(t, NULL, NULL, "<B><E><U><I>FalseFalse True True True False");
    assert_text(t, "[]", "{\"enable_thinking\":true,\"bos_token\":\"-\"}",
                "-<E><U><I>FalseFalse False True True True");
    chat_template_free(t);
}

TEST(refusals)
{
    const json_t *cases = test_rows("chat_template", "refusals");
    SCOPED(bytes_release) struct bytes got = BYTES_INIT;
    struct chat_template *t = template_of("F.jinja",
                                          "{% for m in messages %}{{ m.content + '' }}{% endfor %}"
                                          "{{ raise_exception('No, no') if messages|length > 1 }}",
                                          NULL);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        assert_fails(render(t, row_text(cases, i, "messages"), row_text(cases, i, "tools"),
                            row_text(cases, i, "kwargs"), &got),
                     ST_INVALID, row_text(cases, i, "message"));
        assert_int_equal(got.len, 0);
    }
    // a NUL in a message is text like any other
    assert_ok(render(t, "[{\"content\":\"a\\u0000b\"}]", NULL, NULL, &got));
    assert_int_equal(got.len, 3);
}

TEST(parts_of_contents)
{
    json_t *joined = NULL;
    json_t *messages = json_quoted("[{'content':[{'type':'text','text':'a'},"
                                   "{'type':'text','text':'b'}]},{'content':'c'}]");
    json_t *image = json_quoted("[{'content':[{'type':'image_url'}]}]");
    struct chat_template *t = template_of("F", "{{ messages[0].content }}", NULL);
    assert_ok(chat_messages_join_parts(t, messages, &joined));
    assert_string_equal(text_of(test_keep(joined), "0.content"), "ab");
    assert_true(json_is_array(json_at(messages, "0.content")));
    joined = NULL;
    assert_fails(chat_messages_join_parts(t, image, &joined), ST_UNSUPPORTED,
                 "messages[0].content[0]");
    assert_null(joined);
    t = template_of("F", "{% for p in messages[0].content %}({{ p.text }}){% endfor %}", NULL);
    assert_ok(chat_messages_join_parts(t, messages, &joined));
    assert_true(json_equal(test_keep(joined), messages));
}

// ---- the shared templates -----------------------------------------------------------------------

static bool is_case_equal(const struct chat_template *t, const char *name, const json_t *line)
{
    static const struct tm now = {.tm_year = 125,
                                  .tm_mday = 2,
                                  .tm_hour = 3,
                                  .tm_min = 4,
                                  .tm_sec = 5,
                                  .tm_wday = 4,
                                  .tm_yday = 1};
    struct chat_input input = {
        .messages = json_object_get(line, "messages"),
        .tools = json_object_get(line, "tools"),
        .kwargs = json_object_get(line, "kwargs"),
        .add_generation_prompt = json_is_true(json_object_get(line, "add_generation_prompt")),
        .now = &now,
    };
    const json_t *text = json_object_get(line, "text");
    const char *error = json_string_value(json_object_get(line, "error"));
    SCOPED(bytes_release) struct bytes got = BYTES_INIT;
    enum status st = chat_template_render(t, &input, &got);
    bool equal = error ? st != ST_OK && strstr(status_message(), strstr(error, ": ") + 2)
                       : st == ST_OK && got.len == json_string_length(text) &&
                             memcmp(bytes_text(&got), json_string_value(text), got.len) == 0;
    if (!equal)
        print_message("%s, %s:\n  gives  %s\n  wanted %s\n", name,
                      json_string_value(json_object_get(line, "case")),
                      st == ST_OK ? bytes_text(&got) : status_message(),
                      error ? error : json_string_value(text));
    return equal;
}

// Cases that differ, of one template; *ret_n counts all.
static int check_template(const char *path, int *ret_n)
{
    const json_t *tokens = json_quoted("{'bos_token':'<s>','eos_token':'</s>',"
                                       "'unk_token':'<unk>','pad_token':'<pad>'}"),
                 *one;
    struct chat_template *t = template_of(path, test_read(path), tokens);
    char cases_path[PATH_MAX];
    int different = 0;
    size_t i;
    snprintf(cases_path, sizeof cases_path, "%.*s.jsonl", (int)strlen(path) - 6, path);
    const json_t *cases = json_of_lines_file(cases_path);
    json_array_foreach (cases, i, one) different += !is_case_equal(t, path, one);
    *ret_n += (int)i;
    return different;
}

TEST(shared_templates)
{
    char folder[PATH_MAX], pattern[PATH_MAX + 16];
    glob_t found = {0};
    int n = 0, different = 0;
    test_data_folder("chat-templates", folder);
    snprintf(pattern, sizeof pattern, "%s/*.jinja", folder);
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    for (size_t i = 0; i < found.gl_pathc; i++) different += check_template(found.gl_pathv[i], &n);
    print_message("%zu templates, %d cases, %d different\n", found.gl_pathc, n, different);
    globfree(&found);
    assert_int_equal(different, 0);
}
