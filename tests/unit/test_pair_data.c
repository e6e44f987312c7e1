/* test_pair_data.c: completions as messages, and pairs of them: which lines are read, to which
 * tokens, and which are refused. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include "tests/support/support.h"
#include "tests/support/tiny_tokenizer.h"
#include "trainer/data/data.h"

static struct reader {
    struct tokenizer *tokenizer;
    struct chat_template *chat;
} reader;

static void open_reader(void)
{
    const char *folder = test_folder();
    assert_ok(tiny_tokenizer_write(folder));
    assert_ok(tokenizer_load(folder, &reader.tokenizer));
    assert_ok(chat_template_find(folder, NULL, &reader.chat));
}

static void close_reader(void)
{
    chat_template_free(reader.chat);
    tokenizer_free(reader.tokenizer);
}

// side NULL: a completion to learn.
static struct dataset *read_as(const struct reader *r, const char *side, const char *line)
{
    const struct prompt_options options = {.side = side, .completions = true, .end_id = 5};
    const struct prompt_format format = {.options = &options,
                                         .tokenizer = r->tokenizer,
                                         .chat = r->chat,
                                         .vocab_size = TINY_TOKENIZER_VOCAB};
    struct dataset *d;
    int left_out;
    assert_ok(dataset_parse("lines", line, strlen(line), &options, &d));
    assert_ok(dataset_tokenize(d, &format, &left_out));
    return d;
}

static void same_list(const struct token_list *a, const struct token_list *b)
{
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->ids, b->ids, (size_t)a->n * sizeof *a->ids);
}

// Both lines are the same prompt and completion.
static void same(const struct reader *r, const char *side_a, const char *a, const char *side_b,
                 const char *b)
{
    struct dataset *x = read_as(r, side_a, a), *y = read_as(r, side_b, b);
    same_list(&x->examples[0].prompt_ids, &y->examples[0].prompt_ids);
    same_list(&x->examples[0].completion_ids, &y->examples[0].completion_ids);
    dataset_free(x);
    dataset_free(y);
}

#define USER       "{\"role\": \"user\", \"content\": \"ab\"}"
#define SAYS(text) "{\"role\": \"assistant\", \"content\": \"" text "\"}"
#define CHAT(text) "{\"messages\": [" USER ", " SAYS(text) "]}"

TEST(all_forms_are_one)
{
    const struct reader *r = &reader;
    static const char *const forms[] = {
        "{\"prompt\": [" USER "], \"chosen\": [" SAYS("cd") "], \"rejected\": [" SAYS("e") "]}",
        "{\"prompt\": [" USER "], \"chosen\": \"cd\", \"rejected\": \"e\"}",
        "{\"messages\": [" USER "], \"chosen\": \"cd\", \"rejected\": \"e\"}",
        "{\"chosen\": [" USER ", " SAYS("cd") "], \"rejected\": [" USER ", " SAYS("e") "]}",
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        same(r, "chosen", forms[i], NULL, CHAT("cd"));
        same(r, "rejected", forms[i], NULL, CHAT("e"));
    }
    same(r, NULL, "{\"prompt\": [" USER "], \"completion\": [" SAYS("cd") "]}", NULL, CHAT("cd"));
    // text stays text
    static const char text[] = "{\"prompt\": \"ab\", \"chosen\": \"cd\", \"rejected\": \"e\"}";
    same(r, "chosen", text, NULL, "{\"prompt\": \"ab\", \"completion\": \"cd\"}");
    same(r, "rejected", text, NULL, "{\"prompt\": \"ab\", \"completion\": \"e\"}");
    same(r, "rejected", text, NULL, "{\"prompt\": \"ab\", \"completion\": [" SAYS("e") "]}");
}

TEST_EACH(what_is_no_pair, "data")
{
    const struct prompt_options options = {.side = row_text(cases, i, "side")};
    char *line = test_keep(json_dumps(json_object_get(json_array_get(cases, i), "line"), 0));
    struct dataset *d;
    assert_true(dataset_parse("lines", line, strlen(line), &options, &d) != ST_OK);
    assert_message("lines, line 1");
    assert_message(row_text(cases, i, "says"));
}

TESTS_BETWEEN(open_reader, close_reader)
