/* test_tool_calls.c: infer-server/http/tool_calls.h: against vLLM's parsers (tests/tool-calls), cut
 * at every byte, and what chat templates render of a call parses back to it. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/server_impl.h"
#include "infer-server/http/tool_calls.h"
#include "tests/support/support.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/tokens.h"

#include <glob.h>

static json_t *tools;

static void make_tools(void)
{
    tools = json_quoted(
        "[{'type':'function','function':{'name':'get_weather','parameters':{'properties':{"
        "'city':{'type':'string'},'days':{'type':'integer'}}}}},"
        "{'type':'function','function':{'name':'add','parameters':{'properties':{"
        "'s':{'type':'string'},'o':{'anyOf':[{'type':'string'},{'type':'null'}]},"
        "'e':{'enum':['1','x']},'b':{'type':'boolean'},'l':{'type':['array','object']}}}}}]");
}

LATER(tool_calls_free)
LATER(chat_template_free)

// The template of a text, kept with the test.
static struct chat_template *template_of(const char *name, const char *text, const json_t *tokens)
{
    struct chat_template *t = NULL;
    assert_ok(chat_template_parse(name, text, strlen(text), tokens, &t));
    return test_later(t, chat_template_free_later);
}

static const struct tool_form *form_named(const char *name)
{
    const struct tool_form *form;
    for (int i = 0; (form = tool_form_at(i)); i++)
        if (strcmp(tool_form_name(form), name) == 0) return form;
    fail_msg("no form %s", name);
    return NULL;
}

// None of the text yet.
static struct tool_calls *calls_of(const char *form, bool early)
{
    struct tool_calls *c = NULL;
    assert_ok(tool_calls_new(form_named(form), tools, early, &c));
    return test_later(c, tool_calls_free_later);
}

// The text in one piece.
static struct tool_calls *whole(const char *form, const char *text)
{
    struct tool_calls *c = calls_of(form, false);
    assert_ok(tool_calls_read(c, text, strlen(text), true));
    return c;
}

static void assert_same(const struct tool_calls *a, const struct tool_calls *b)
{
    assert_string_equal(bytes_text(&a->content), bytes_text(&b->content));
    assert_int_equal(a->n, b->n);
    for (int i = 0; i < a->n; i++) {
        assert_string_equal(a->list[i].name, b->list[i].name);
        assert_string_equal(bytes_text(&a->list[i].arguments), bytes_text(&b->list[i].arguments));
    }
}

// Byte by byte, and in two pieces at every byte, nothing is taken back and all comes out the same.
static void cut_everywhere(const char *form, const char *text)
{
    struct tool_calls *want = whole(form, text), *bytewise = calls_of(form, false);
    const size_t len = strlen(text);
    for (size_t cut = 0; cut <= len; cut++) {
        struct tool_calls *halves = calls_of(form, false);
        assert_ok(tool_calls_read(halves, text, cut, false));
        assert_int_equal(
            memcmp(bytes_text(&halves->content), bytes_text(&want->content), halves->content.len),
            0);
        assert_ok(tool_calls_read(halves, text, len, true));
        assert_same(halves, want);
        assert_ok(tool_calls_read(bytewise, text, cut, false));
        test_now(halves);
    }
    assert_ok(tool_calls_read(bytewise, text, len, true));
    assert_same(bytewise, want);
    test_now(bytewise);
    test_now(want);
}

// ---- against vLLM ------------------------------------------------------------------------------

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
    const char *text = text_of(c, "text"), *form = text_of(c, "form");
    const char *content = json_string_value(json_at(c, "content"));
    const json_t *calls = json_at(c, "calls"), *one;
    struct tool_calls *got = whole(form, text);
    size_t i;
    print_message("%s: %s\n", form, text);
    assert_int_equal(got->n, json_array_size(calls));
    json_array_foreach (calls, i, one) {
        assert_string_equal(got->list[i].name, text_of(one, "0"));
        assert_true(
            json_equal(json_of(bytes_text(&got->list[i].arguments)), json_of(text_of(one, "1"))));
    }
    if (!content) content = "";
    assert_int_equal(got->content.len, got->n ? trimmed(content) : strlen(content));
    assert_memory_equal(bytes_text(&got->content), content, got->content.len);
    cut_everywhere(form, text);
}

TEST(as_vllm_parses)
{
    const json_t *cases =
        json_of_lines_file(test_path(test_root(), "tests/tool-calls/cases.jsonl"));
    const size_t n = json_array_size(cases);
    for (size_t i = 0; i < n; i++) check_case(json_array_get(cases, i));
    assert_true(n > 20);
}

// ---- what vLLM does otherwise, or not at all ---------------------------------------------------

// A function that there is not, and JSON that is none, stay text; text between and behind calls is
// kept, white space beside them is not. Arguments stay as the model wrote them: neither long
// numbers nor spaces change. calls: NAME ARGUMENTS, with line ends between.
TEST_EACH(texts, "tool_calls")
{
    const char *form = row_text(cases, i, "form"), *text = row_text(cases, i, "text");
    struct tool_calls *got = whole(form, text);
    SCOPED(bytes_release) struct bytes calls = BYTES_INIT;
    for (int k = 0; k < got->n; k++) {
        bytes_printf(&calls, "%s %s\n", got->list[k].name, bytes_text(&got->list[k].arguments));
        assert_int_equal(strspn(got->list[k].id, "abcdefghijklmnopqrstuvwxyz0123456789"), 9);
        assert_true(k == 0 || strcmp(got->list[k].id, got->list[0].id) != 0);
    }
    print_message("%s: %s\n", form, text);
    assert_string_equal(bytes_text(&calls), row_text(cases, i, "calls"));
    assert_string_equal(bytes_text(&got->content), row_text(cases, i, "content"));
    cut_everywhere(form, text);
}

// What may yet become a call is held back, and nothing else is.
TEST_EACH(held_back, "tool_calls")
{
    const char *text = row_text(cases, i, "text");
    struct tool_calls *c = calls_of(row_text(cases, i, "form"), false);
    // without: bytes of the last character that have not come
    const size_t len = strlen(text) - (size_t)row_int(cases, i, "without");
    assert_ok(tool_calls_read(c, text, len, false));
    print_message("%s\n", text);
    assert_string_equal(bytes_text(&c->content), row_text(cases, i, "given"));
}

// ---- early -------------------------------------------------------------------------------------

// As a stream gives them: after each byte the arguments have only grown; in the end a call that is
// whole is what it is without, and one that is not stays as far as it came. pieces: what the
// arguments are when they have grown, with | between.
TEST_EACH(early, "tool_calls")
{
    const char *form = row_text(cases, i, "form"), *text = row_text(cases, i, "text");
    struct tool_calls *c = calls_of(form, true);
    SCOPED(bytes_release) struct bytes calls = BYTES_INIT;
    const size_t len = strlen(text);
    size_t grown = 0;
    int n = 0;
    print_message("%s: %s\n", form, text);
    for (size_t to = 0; to <= len; to++) {
        assert_ok(tool_calls_read(c, text, to, to == len));
        for (int k = n > 0 ? n - 1 : 0; k < c->n; k++) {
            const struct bytes *arguments = &c->list[k].arguments;
            if (k >= n) {
                bytes_printf(&calls, k ? " %s:" : "%s:", c->list[k].name);
                grown = 0;
            }
            if (arguments->len > grown) bytes_printf(&calls, "|%s", arguments->data + grown);
            grown = arguments->len;
        }
        n = c->n;
    }
    assert_string_equal(bytes_text(&calls), row_text(cases, i, "calls"));
    assert_string_equal(bytes_text(&c->content), row_text(cases, i, "content"));
}

// ---- the shared templates -----------------------------------------------------------------------

static const char *form_of(struct chat_template *t)
{
    const struct tool_form *form = chat_probe_tool_form(t);
    return form ? tool_form_name(form) : "-";
}

TEST(templates_parse_back)
{
    const json_t *wanted = test_rows("tool_calls", "templates");
    char folder[PATH_MAX], pattern[PATH_MAX + 16];
    size_t seen = 0;
    glob_t found = {0};
    test_data_folder("chat-templates", folder);
    snprintf(pattern, sizeof pattern, "%s/*.jinja", folder);
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    const json_t *tokens = json_quoted("{'bos_token': '<s>', 'eos_token': '</s>'}");
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char name[100];
        const char *file = strrchr(found.gl_pathv[i], '/') + 1;
        snprintf(name, sizeof name, "%.*s", (int)strcspn(file, "."), file);
        const char *got = form_of(template_of(name, test_read(found.gl_pathv[i]), tokens));
        print_message("%-32s %s\n", name, got);
        for (size_t k = 0; k < json_array_size(wanted); k++) {
            if (strcmp(row_text(wanted, k, "name"), name) != 0) continue;
            assert_string_equal(got, row_text(wanted, k, "form"));
            seen++;
        }
    }
    assert_int_equal(seen, json_array_size(wanted));
    globfree(&found);
}

// Of templates that are not there: Mistral's list, and arguments that have to be text.
TEST_EACH(other_templates_parse_back, "tool_calls")
{
    assert_string_equal(form_of(template_of("T", row_text(cases, i, "template"), NULL)),
                        row_text(cases, i, "form"));
}

// ---- turns -------------------------------------------------------------------------------------

// sentence: a part of it.
TEST_EACH(turns_that_do_not_repeat_are_said, "tool_calls")
{
    const char *folder = test_folder(), *wanted = row_text(cases, i, "sentence");
    SCOPED(bytes_release) struct bytes sentence = BYTES_INIT;
    assert_ok(tiny_tokenizer_write_bytes(folder));
    struct tokenizer *tokenizer = tokenizer_of(folder);
    chat_probe_repeats(template_of("T", row_text(cases, i, "template"), NULL), tokenizer,
                       &sentence);
    assert_contains(bytes_text(&sentence), wanted);
    assert_int_equal(sentence.len > 0, wanted[0] != 0);
}

TESTS_BETWEEN(make_tools, NULL)
