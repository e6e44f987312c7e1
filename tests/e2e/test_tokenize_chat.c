/* test_tokenize_chat.c: cw-tokenize --chat: a line for a line, also where a template refuses one;
 * the clock of --now, templates from files and by name. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "tests/support/tiny_tokenizer.h"

static const char *folder;

static void put(const char *name, const char *text)
{
    test_write(test_path(folder, name), text, strlen(text));
}

// Runs it on "in" with these options; what it answered is in "out", what it logged in "log".
static int tokenize(const char *options)
{
    const char *program = test_binary("cw-tokenize");
    const char *command = test_text("%s --model %s --chat %s < %s > %s", program, folder, options,
                                    test_path(folder, "in"), test_path(folder, "out"));
    remove(test_path(folder, "log"));
    return test_command(test_path(folder, "log"), 20000, args("sh -c %s", command));
}

// Line `number` (from 1) of the answer.
static json_t *answer(int number)
{
    char *text = test_read(test_path(folder, "out")), *line = text;
    json_t *value = NULL;
    for (int i = 1; i < number; i++) {
        line += strcspn(line, "\n");
        line += *line == '\n';
    }
    assert_ok(json_parse("out", line, strcspn(line, "\n"), &value));
    return value;
}

static void assert_answer(int number, const char *key, const char *part)
{
    json_t *value = answer(number);
    const char *text = json_string_value(json_object_get(value, key));
    assert_non_null(text);
    assert_contains(text, part);
}

static void make_folder(void)
{
    json_t *tokenizer = NULL, *config = NULL;
    folder = test_folder();
    assert_ok(tiny_tokenizer_json(&tokenizer, &config));
    assert_ok(json_write_file(test_path(folder, "tokenizer.json"), 0644, tokenizer));
    put("chat_template.jinja", "{% if messages|length > 1 %}{{ raise_exception('one at most') }}"
                               "{% endif %}{{ messages[0].content }} {{ strftime_now('%d %b %Y "
                               "%H:%M:%S') }}{{ ' tools' if tools }}{{ x }}\n");
    put("in",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}\n"
        "{\"messages\":[{},{}]}\n"
        "{\"messages\":[{\"content\":5}],\"tools\":[{}],\"chat_template_kwargs\":{\"x\":\"!\"}}\n");
}

TEST(refused_lines_are_answered)
{
    assert_int_equal(tokenize("--now 2025-01-02T03:04:05"), 0);
    assert_answer(1, "text", "a 02 Jan 2025 03:04:05");
    assert_answer(2, "error", "chat_template.jinja, line 1, column");
    assert_answer(2, "error", "one at most");
    assert_answer(3, "text", "5 02 Jan 2025 03:04:05 tools!");
    json_t *value = answer(1);
    assert_true(json_array_size(json_object_get(value, "ids")) > 10);
    assert_int_equal(tokenize(""), 0); // by the clock
    assert_answer(1, "text", ":");
    assert_int_equal(tokenize("--now yesterday"), 2);
    assert_contains(test_read(test_path(folder, "log")), "--now yesterday is not of the form");
}

TEST(other_templates)
{
    put("mine.jinja", "mine {{ messages|length }}");
    const char *options = test_text("--chat-template-file %s", test_path(folder, "mine.jinja"));
    assert_int_equal(tokenize(options), 0);
    assert_answer(2, "text", "mine 2");
    assert_int_equal(tokenize("--chat-template nosuch"), 1);
    // one that is no template: every chat is answered with why, and the exit status says so too
    put("mine.jinja", "{% if %}");
    assert_int_equal(tokenize(options), 1);
    for (int i = 1; i <= 3; i++) assert_answer(i, "error", "mine.jinja: line 1, column 7");
}

TESTS_BETWEEN(make_folder, NULL)
