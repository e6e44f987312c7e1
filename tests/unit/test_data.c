/* test_data.c: trainer/data: lines and their errors, tokenising, order. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/chat_template.h"
#include "tests/support/support.h"
#include "tests/support/tiny_tokenizer.h"
#include "trainer/data/data.h"

LATER(dataset_free)

static enum status parse_as(const char *text, const struct prompt_options *options,
                            struct dataset **ret)
{
    const enum status st = dataset_parse("set.jsonl", text, strlen(text), options, ret);
    if (st == ST_OK) test_later(*ret, dataset_free_later);
    return st;
}

static enum status parse(const char *text, struct dataset **ret)
{
    return parse_as(text, NULL, ret);
}

TEST(fields)
{
    struct dataset *d;
    assert_ok(parse("{\"prompt\": \"a\", \"answer\": \"b\"}\n"
                    "\n"
                    "{\"question\": \"q\", \"answer\": \"5 #### 5\", \"id\": 7}\r\n"
                    "{\"prompt\": \"p\", \"completion\": \"c\"}\n"
                    "{\"messages\": [{\"role\": \"user\", \"content\": \"m\"}], \"answer\": 12}\n"
                    "{\"prompt\": [{\"role\": \"user\", \"content\": \"n\"}], \"answer\": null}",
                    &d));
    assert_int_equal(d->n, 5);
    assert_string_equal(d->examples[0].prompt, "a");
    assert_string_equal(d->examples[0].completion, "b");
    assert_string_equal(d->examples[1].prompt, "q");
    assert_int_equal(d->examples[1].line, 3);
    assert_int_equal(json_integer_value(json_object_get(d->examples[1].row, "id")), 7);
    assert_string_equal(d->examples[2].answer, "c");
    assert_string_equal(d->examples[3].answer, "12");
    assert_null(d->examples[3].prompt);
    assert_int_equal(json_array_size(d->examples[4].messages), 1);
    assert_null(d->examples[4].answer);
    assert_true(d->messages);
    assert_fails(dataset_require_answers(d), ST_INVALID, "set.jsonl, line 6");
    assert_message("name another with --answer-field");
}

static void assert_bad(const char *text, const char *sentence)
{
    struct dataset *d = NULL;
    assert_true(parse(text, &d) != ST_OK);
    assert_message(sentence);
    assert_message("set.jsonl");
    assert_null(d);
}

TEST(bad_lines)
{
    const json_t *cases = test_rows("data", "bad_lines");
    struct dataset *d = NULL;
    for (size_t i = 0; i < json_array_size(cases); i++)
        assert_bad(row_text(cases, i, "text"), row_text(cases, i, "says"));
    assert_bad("{\"prompt\": \"\xff\"}\n", "line 1");
    assert_fails(dataset_load(test_path(test_folder(), "none.jsonl"), NULL, &d), ST_NOT_FOUND,
                 "none.jsonl");
}

static int left_out;

// From a folder that has a tokenizer.
static enum status load_from(const char *folder, const char *text,
                             const struct prompt_options *options, int vocab_size,
                             struct dataset **ret)
{
    test_put(folder, "set.jsonl", text);
    const enum status st =
        prompts_load(test_path(folder, "set.jsonl"), folder, vocab_size, options, ret, &left_out);
    if (st == ST_OK) test_later(*ret, dataset_free_later);
    return st;
}

static enum status load(const char *text, const struct prompt_options *options, int vocab_size,
                        struct dataset **ret)
{
    const char *folder = test_folder();
    assert_ok(tiny_tokenizer_write(folder));
    return load_from(folder, text, options, vocab_size, ret);
}

// The tokenizer of the tests: a byte is its own id.
TEST(tokens)
{
    struct dataset *d;
    struct prompt_options options = {.completions = true, .end_id = 261};
    assert_ok(load("{\"prompt\": \"xyz\", \"completion\": \"9\"}\n"
                   "{\"prompt\": \"x\", \"completion\": \"98\"}\n",
                   &options, 300, &d));
    assert_int_equal(d->examples[0].prompt_ids.n, 3);
    assert_int_equal(d->examples[0].prompt_ids.ids[2], 'z');
    assert_int_equal(d->examples[1].completion_ids.n, 3);
    assert_int_equal(d->examples[1].completion_ids.ids[1], '8');
    assert_int_equal(d->examples[1].completion_ids.ids[2], 261);
    assert_int_equal(d->max_prompt, 3);
    assert_int_equal(d->max_completion, 3);
    assert_int_equal(left_out, 0);

    options = (struct prompt_options){.max_prompt_length = 2};
    assert_ok(load("{\"prompt\": \"xyz\"}\n{\"prompt\": \"x\"}\n{\"prompt\": \"yx\"}\n", &options,
                   300, &d));
    assert_int_equal(left_out, 1);
    assert_int_equal(d->n, 2);
    assert_int_equal(d->examples[0].line, 2);
    assert_int_equal(d->max_prompt, 2);
    assert_fails(load("{\"prompt\": \"xyz\"}\n", &options, 300, &d), ST_INVALID,
                 "--max-prompt-length 2");

    options = (struct prompt_options){0};
    assert_fails(load("{\"prompt\": \"az\"}\n", &options, 'z', &d), ST_MISMATCH, "token id 122");
}

static const char *decoded(const struct token_list *ids)
{
    struct bytes text = BYTES_INIT;
    for (int i = 0; i < ids->n; i++)
        if (ids->ids[i] < 256)
            bytes_printf(&text, "%c", ids->ids[i]);
        else
            bytes_printf(&text, "<%d>", ids->ids[i]);
    return test_keep(text.data);
}

TEST(chats)
{
    struct dataset *d;
    struct prompt_options options = {
        .chat = true, .system_prompt = "S", .completions = true, .end_id = 1};
    assert_ok(load("{\"prompt\": \"P\", \"completion\": \"C\"}\n", &options, 300, &d));
    assert_contains(decoded(&d->examples[0].prompt_ids), "S<261>");
    assert_contains(decoded(&d->examples[0].prompt_ids), "P<261>");
    assert_contains(decoded(&d->examples[0].completion_ids), "C<261>");

    // a conversation is prompt and completion in one
    options = (struct prompt_options){.completions = true, .end_id = 1};
    assert_ok(load("{\"messages\": [{\"role\": \"user\", \"content\": \"Q\"},"
                   "{\"role\": \"assistant\", \"content\": \"A\"}]}\n",
                   &options, 300, &d));
    const char *prompt = decoded(&d->examples[0].prompt_ids),
               *completion = decoded(&d->examples[0].completion_ids);
    assert_contains(prompt, "Q<261>");
    assert_null(strchr(prompt, 'A'));
    assert_contains(completion, "A<261>");
    assert_null(strchr(completion, 'Q'));
    assert_fails(
        load("{\"messages\": [{\"role\": \"user\", \"content\": \"Q\"}]}\n", &options, 300, &d),
        ST_FORMAT, "line 1");
}

// What a data set of GSM8K's form becomes: a chat with the reward's request where there is a chat
// template, the question as it is where there is none, and what was asked for where it was.
TEST(questions)
{
    struct dataset *d;
    static const char lines[] = "{\"question\": \"Q1?\", \"answer\": \"1 + 1 = 2\\n#### 2\"}\n"
                                "{\"prompt\": \"P2\", \"answer\": \"3\"}\n";
    struct prompt_options options = {.question_template = "Say: {prompt} End on ####."};
    assert_ok(load(lines, &options, 300, &d));
    assert_true(d->asks);
    assert_string_equal(decoded(&d->examples[0].prompt_ids),
                        "<260>user\nSay: Q1? End on ####.<261>\n<260>assistant\n");
    assert_string_equal(decoded(&d->examples[1].prompt_ids), "P2"); // not a question
    assert_string_equal(json_string_value(d->examples[0].prompt_json), "Q1?");
    assert_string_equal(d->examples[0].answer, "1 + 1 = 2\n#### 2");

    const json_t *cases = test_rows("data", "questions");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        options.prompt_template = row_text(cases, i, "template");
        options.chat = row_flag(cases, i, "chat");
        assert_ok(load(lines, &options, 300, &d));
        assert_string_equal(decoded(&d->examples[0].prompt_ids), row_text(cases, i, "first"));
        assert_string_equal(decoded(&d->examples[1].prompt_ids), row_text(cases, i, "second"));
    }
    options = (struct prompt_options){.prompt_template = "Q: {question}"};
    assert_fails(load(lines, &options, 300, &d), ST_INVALID, "{prompt}");

    // a model folder without a chat template: the question as it is, unless a chat is asked for
    const char *folder = test_folder();
    json_t *tokenizer = NULL, *config = NULL;
    assert_ok(tiny_tokenizer_json(&tokenizer, &config));
    assert_ok(json_write_file(test_path(folder, "tokenizer.json"), 0644, tokenizer));
    json_decref(tokenizer);
    json_decref(config);
    options = (struct prompt_options){.question_template = "Say: {prompt}"};
    assert_ok(load_from(folder, lines, &options, 300, &d));
    assert_false(d->asks);
    assert_string_equal(decoded(&d->examples[0].prompt_ids), "Q1?");
    options.chat = true;
    assert_fails(load_from(folder, lines, &options, 300, &d), ST_NOT_FOUND, "--chat-template-file");
    const char *file = test_path(folder, "own.jinja");
    test_put(folder, "own.jinja", "{% for m in messages %}<{{ m.content }}>{% endfor %}");
    options =
        (struct prompt_options){.question_template = "{prompt}!", .chat_template = {.file = file}};
    assert_ok(load_from(folder, lines, &options, 300, &d));
    assert_string_equal(decoded(&d->examples[0].prompt_ids), "<Q1?!>");
    assert_string_equal(d->chat_source, file);
}

TEST(named_fields_and_limits)
{
    struct dataset *d, *first;
    static const char lines[] = "{\"problem\": \"a\", \"prompt\": \"-\", \"solution\": 7}\n\n"
                                "{\"problem\": \"b\", \"solution\": \"8\", \"answer\": \"-\"}\n"
                                "{\"problem\": 3, \"solution\": \"9\"}\n";
    struct prompt_options options = {
        .prompt_field = "problem", .answer_field = "solution", .max_samples = 2};
    assert_ok(parse_as(lines, &options, &d));
    assert_int_equal(d->n, 2);
    assert_string_equal(d->examples[0].prompt, "a");
    assert_string_equal(d->examples[0].answer, "7");
    assert_true(d->examples[0].question && d->questions);
    assert_string_equal(d->examples[1].answer, "8");
    assert_int_equal(d->examples[1].line, 3);
    options.max_samples = 1;
    assert_ok(parse_as(lines, &options, &first));
    assert_int_equal(first->n, 1);
    assert_true(first->digest != d->digest); // another part of the file is another data set

    options.max_samples = 0;
    assert_fails(parse_as(lines, &options, &d), ST_FORMAT,
                 "set.jsonl, line 4: field \"problem\" must be text or a list of messages");
    options = (struct prompt_options){.prompt_field = "task"};
    assert_fails(parse_as(lines, &options, &d), ST_FORMAT,
                 "set.jsonl, line 1: no field \"task\" (--prompt-field)");
    options = (struct prompt_options){.prompt_field = "problem", .answer_field = "answer"};
    assert_fails(parse_as(lines, &options, &d), ST_FORMAT,
                 "set.jsonl, line 1: no field \"answer\" (--answer-field)");
    assert_fails(parse("{\"text\": \"a\"}\n", &d), ST_FORMAT, "--prompt-field");
}

TEST(order)
{
    struct data_order a, b;
    int seen[10] = {0}, first[10], moved = 0;
    assert_ok(data_order_init(&a, 7, 10));
    assert_ok(data_order_init(&b, 7, 10));
    for (int i = 0; i < 10; i++) seen[first[i] = data_order_at(&a, i)]++;
    for (int i = 0; i < 10; i++) assert_int_equal(seen[i], 1);
    for (int i = 10; i < 20; i++) {
        int other = data_order_at(&a, i);
        seen[other]++;
        moved += other != first[i - 10];
    }
    for (int i = 0; i < 10; i++) assert_int_equal(seen[i], 2);
    assert_true(moved > 0); // another epoch, another permutation
    // a function of (seed, i): going back, or starting in the middle, gives the same
    assert_int_equal(data_order_at(&b, 13), data_order_at(&a, 13));
    for (int i = 0; i < 10; i++) assert_int_equal(data_order_at(&b, i), first[i]);
    data_order_release(&b);
    assert_ok(data_order_init(&b, 8, 10));
    moved = 0;
    for (int i = 0; i < 10; i++) moved += data_order_at(&b, i) != first[i];
    assert_true(moved > 0);
    data_order_release(&a);
    data_order_release(&b);
}

TEST(gsm8k)
{
    char folder[PATH_MAX];
    struct dataset *d;
    test_data_folder("gsm8k", folder);
    assert_ok(dataset_load(test_path(folder, "test.jsonl"), NULL, &d));
    test_later(d, dataset_free_later);
    assert_int_equal(d->n, 1319);
    assert_ok(dataset_require_answers(d));
    for (int i = 0; i < d->n; i++) assert_non_null(strstr(d->examples[i].answer, "#### "));
}
