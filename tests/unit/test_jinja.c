/* test_jinja.c: common/text/jinja against what jinja2 gives (tests/jinja), where errors point, and
 * the limits that no template gets past. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/text/jinja/jinja.h"
#include "tests/support/support.h"

static const struct tm now = {.tm_year = 125,
                              .tm_mday = 2,
                              .tm_hour = 3,
                              .tm_min = 4,
                              .tm_sec = 5,
                              .tm_wday = 4,
                              .tm_yday = 1};

static enum status render_with(const char *text, size_t len, const json_t *variables,
                               const struct jinja_limits *limits, struct bytes *ret)
{
    struct jinja *t = NULL;
    enum status st = jinja_parse("T.jinja", text, len, &t);
    if (st == ST_OK) st = jinja_render(t, variables, &now, limits, ret);
    jinja_free(t);
    return st;
}

// With no variables at all; the sentence of a failure is status_message().
static enum status render(const char *text, const struct jinja_limits *limits, struct bytes *ret)
{
    json_t *none = test_keep(json_object());
    enum status st = render_with(text, strlen(text), none, limits, ret);
    return st;
}

static void assert_text(const char *text, const char *want)
{
    SCOPED(bytes_release) struct bytes got = BYTES_INIT;
    assert_ok(render(text, NULL, &got));
    assert_string_equal(bytes_text(&got), want);
}

static void assert_error(const char *text, enum status code, const char *message)
{
    SCOPED(bytes_release) struct bytes got = BYTES_INIT;
    assert_status(render(text, NULL, &got), code);
    assert_message(message);
    assert_int_equal(got.len, 0);
}

// ---- against jinja2 -----------------------------------------------------------------------------

// Of these jinja2's own sentence is looked for; Python's about types are its own affair.
static bool is_jinjas(const char *error)
{
    return strncmp(error, "TemplateError: ", 15) == 0 ||
           strncmp(error, "UndefinedError: ", 16) == 0 || strstr(error, " object is unsafe.");
}

static bool is_case_equal(const json_t *line, const json_t *variables)
{
    const json_t *template = json_object_get(line, "template"),
                 *text = json_object_get(line, "text");
    const char *error = json_string_value(json_object_get(line, "error"));
    SCOPED(bytes_release) struct bytes got = BYTES_INIT;
    enum status st = render_with(json_string_value(template), json_string_length(template),
                                 variables, NULL, &got);
    bool equal = error ? st != ST_OK
                       : st == ST_OK && got.len == json_string_length(text) &&
                             memcmp(bytes_text(&got), json_string_value(text), got.len) == 0;
    if (equal && error && is_jinjas(error))
        equal = strstr(status_message(), strstr(error, ": ") + 2) != NULL;
    if (!equal)
        print_message("%s\n  gives  %s\n  wanted %s\n", json_string_value(template),
                      st == ST_OK ? bytes_text(&got) : status_message(),
                      error ? error : json_string_value(text));
    return equal;
}

TEST(equal_to_jinja2)
{
    const char *folder = test_path(test_root(), "tests/jinja");
    const json_t *variables = json_of_file(test_path(folder, "variables.json")),
                 *cases = json_of_lines_file(test_path(folder, "cases.jsonl")), *one;
    int different = 0;
    size_t n;
    json_array_foreach (cases, n, one) different += !is_case_equal(one, variables);
    print_message("%zu templates, %d different from jinja2's\n", n, different);
    assert_true(n > 900);
    assert_int_equal(different, 0);
}

// ---- errors -------------------------------------------------------------------------------------

TEST(errors_name_the_place)
{
    const json_t *cases = test_rows("jinja", "errors_name_the_place");
    for (size_t i = 0; i < json_array_size(cases); i++)
        assert_error(row_text(cases, i, "text"), row_status(cases, i, "status"),
                     row_text(cases, i, "message"));
    assert_error("a\xff", ST_FORMAT, "column 2: the text is not UTF-8");
}

// The text of what went well before an error is not given.
TEST(failure_leaves_the_buffer)
{
    SCOPED(bytes_release) struct bytes got = BYTES_INIT;
    bytes_puts(&got, "before");
    assert_status(render("text {{ nope() }}", NULL, &got), ST_INVALID);
    assert_string_equal(bytes_text(&got), "before");
    assert_ok(render(" and behind", NULL, &got));
    assert_string_equal(bytes_text(&got), "before and behind");
}

// ---- limits -------------------------------------------------------------------------------------

static char *repeated(const char *start, const char *part, int n, const char *end)
{
    struct bytes text = BYTES_INIT;
    bytes_puts(&text, start);
    for (int i = 0; i < n; i++) bytes_puts(&text, part);
    bytes_puts(&text, end);
    assert_ok(bytes_status(&text));
    return text.data;
}

TEST(deep_templates)
{
    const json_t *cases = test_rows("jinja", "deep_templates");
    SCOPED(bytes_release) struct bytes got = BYTES_INIT;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        char *text = test_keep(repeated(row_text(cases, i, "start"), row_text(cases, i, "part"),
                                        row_int(cases, i, "times"), row_text(cases, i, "end")));
        assert_true(render(text, NULL, &got) != ST_OK);
        assert_message(row_text(cases, i, "message"));
    }
    // as deep as anybody writes them
    char *text = test_keep(repeated("{{ 1", "+1", 300, " }}"));
    assert_text(text, "301");
}

TEST(endless_templates)
{
    SCOPED(bytes_release) struct bytes got = BYTES_INIT;
    struct jinja_limits limits = {.steps = 100000, .memory = 1 << 20, .output = 1000};
    const json_t *cases = test_rows("jinja", "endless_templates");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        assert_true(render(row_text(cases, i, "text"), &limits, &got) != ST_OK);
        assert_message(row_text(cases, i, "message"));
        assert_int_equal(got.len, 0);
    }
}

// Each of these goes through a megabyte, and makes nothing that is charged as memory.
TEST(long_operands)
{
    enum { LENGTH = 1 << 20 };
    const json_t *cases = test_rows("jinja", "long_operands");
    static const struct jinja_limits limits = {.steps = 300000};
    char *text = malloc(LENGTH + 1), whole[200];
    SCOPED(bytes_release) struct bytes got = BYTES_INIT;
    memset(text, 'a', LENGTH);
    text[LENGTH] = 0;
    json_t *variables = test_keep(json_pack("{s:s, s:{s:i}}", "k", text, "d", text, 1));
    text[LENGTH - 1] = 'b';
    json_object_set_new(variables, "k2", json_string(text));
    json_object_set_new(json_object_get(variables, "d"), text, json_true());
    for (size_t i = 0; i < json_array_size(cases); i++) {
        snprintf(whole, sizeof whole, "{%% for i in range(40) %%}{%% set x = %s %%}{%% endfor %%}",
                 row_text(cases, i, "expression"));
        if (render_with(whole, strlen(whole), variables, &limits, &got) == ST_OK)
            fail_msg("%s is not charged", row_text(cases, i, "expression"));
        assert_message("more steps than the limit");
    }
    free(text);
}

TEST(deep_messages)
{
    SCOPED(bytes_release) struct bytes got = BYTES_INIT;
    json_t *deep = json_array(), *variables = json_object();
    for (int i = 0; i < 1000; i++) deep = json_pack("[o]", deep);
    json_object_set_new(variables, "x", deep);
    assert_fails(render_with("{{ x }}", 7, variables, NULL, &got), ST_INVALID, "deeper than");
    json_decref(variables);
}

TEST_EACH(content_in_parts, "jinja")
{
    struct jinja *t = NULL;
    assert_ok(jinja_parse("T", row_text(cases, i, "text"), strlen(row_text(cases, i, "text")), &t));
    assert_int_equal(jinja_loops_over_content(t), row_flag(cases, i, "loops"));
    jinja_free(t);
}
