/* test_turns.c: which tokens of a conversation are learnt: the last turn of the assistant, or every
 * one, found by rendering the conversation's beginnings; and templates that render a turn otherwise
 * once others follow. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include "tests/support/support.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/tokens.h"
#include "trainer/data/data.h"

// ---- turns_find() -------------------------------------------------------------------------------

// "[role:content]" a message, "[assistant:" as the opening. `forgets`: what stands before "|" in an
// assistant's content is left out of all but the last message, as reasoning is.
struct template
{
    bool forgets, refuses_empty;
    int calls;
};

static enum status render(void *context, const json_t *messages, bool generation_prompt,
                          struct bytes *ret)
{
    struct template *t = context;
    size_t i, n = json_array_size(messages);
    const json_t *message;
    t->calls++;
    if (t->refuses_empty && n == 0) return status_fail(ST_INVALID, "no messages");
    json_array_foreach (messages, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        const char *content = json_string_value(json_object_get(message, "content"));
        const char *bar = strchr(content, '|');
        if (t->forgets && bar && i + 1 < n) content = bar + 1;
        bytes_printf(ret, "[%s:%s]", role, content);
    }
    if (generation_prompt) bytes_puts(ret, "[assistant:");
    return bytes_status(ret);
}

// "u:hello a:hi": roles by their first letter.
static json_t *conversation(const char *text)
{
    json_t *messages = json_array();
    char *copy = strdup(text), *remaining = copy, *word;
    while ((word = strsep(&remaining, " "))) {
        const char *role = word[0] == 'a' ? "assistant" : word[0] == 's' ? "system" : "user";
        json_array_append_new(messages, json_pack("{s:s, s:s}", "role", role, "content", word + 2));
    }
    free(copy);
    return messages;
}

// The turns found, "one/two/", as text.
static enum status find(struct template *t, const char *text, bool all, char ret[256])
{
    struct turns turns = TURNS_INIT;
    json_t *messages = test_keep(conversation(text));
    enum status st = turns_find(messages, all, render, t, &turns);
    ret[0] = '\0';
    for (int i = 0; i < turns.n; i++) {
        const struct turn *turn = &turns.turns[i];
        strncat(ret, bytes_text(&turns.text) + turn->start, turn->end - turn->start);
        strcat(ret, "/");
    }
    turns_release(&turns);
    return st;
}

TEST_EACH(finds_turns, "turns")
{
    struct template t = {row_flag(cases, i, "forgets"), row_flag(cases, i, "refuses_empty"), 0};
    char got[256];
    assert_ok(find(&t, row_text(cases, i, "messages"), row_flag(cases, i, "all"), got));
    assert_string_equal(got, row_text(cases, i, "wanted"));
}

// The last turn is what the run is about: where it cannot be found, that is an error.
static enum status render_otherwise(void *context, const json_t *messages, bool generation_prompt,
                                    struct bytes *ret)
{
    enum status st = render(context, messages, generation_prompt, ret);
    if (generation_prompt) bytes_puts(ret, "<think>");
    return st;
}

TEST(last_turn_must_be_there)
{
    struct template t = {0};
    struct turns turns = TURNS_INIT;
    json_t *messages = test_keep(conversation("u:x a:one"));
    assert_fails(turns_find(messages, true, render_otherwise, &t, &turns), ST_UNSUPPORTED,
                 "in this chat template an answered conversation does not begin with");
}

// ---- a data set ---------------------------------------------------------------------------------

#define CHAT(messages) "{\"messages\": [" messages "]}\n"
#define USER(text)     "{\"role\": \"user\", \"content\": \"" text "\"}"
#define SAID(text)     "{\"role\": \"assistant\", \"content\": \"" text "\"}"
static const char data[] = CHAT(USER("one") "," SAID("two") "," USER("three") "," SAID("four"))
    CHAT(USER("five") "," SAID("six")) //
    "{\"prompt\": [" USER("a") "," SAID("b") "," USER(
        "c") "], \"completion\": \"d\"}\n"
             "{\"prompt\": \"plain\", \"completion\": \"text\"}\n";

// The example's completion, with what is not learnt in braces.
static void completion_text(const struct example *e, const struct tokenizer *tokenizer,
                            struct bytes *ret)
{
    bool open = false;
    bytes_clear(ret);
    for (int t = 0; t <= e->completion_ids.n; t++) {
        bool skipped = t < e->completion_ids.n && e->learnt && !e->learnt[t];
        if (skipped != open) bytes_puts(ret, skipped ? "{" : "}");
        open = skipped;
        if (t < e->completion_ids.n)
            assert_ok(tokenizer_decode(tokenizer, &e->completion_ids.ids[t], 1, false, ret));
    }
}

TEST(learns_what_was_asked)
{
    static const char *const wanted[2][4] = {
        {"four<|im_end|>\n", "six<|im_end|>\n", "d<|im_end|>\n", "text<|im_end|>"},
        {"two<|im_end|>\n{<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n}four<|im_end|>"
         "\n",
         "six<|im_end|>\n",
         "b<|im_end|>\n{<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n}d<|im_end|>\n",
         "text<|im_end|>"}};
    const char *folder = test_folder();
    struct prompt_options options = {.completions = true, .end_id = TINY_TOKENIZER_IM_END};
    struct prompt_format format = {.options = &options, .vocab_size = TINY_TOKENIZER_VOCAB};
    struct chat_template *chat;
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    assert_ok(tiny_tokenizer_write(folder));
    struct tokenizer *tokenizer = tokenizer_of(folder);
    assert_ok(chat_template_find(folder, NULL, &chat));
    format.tokenizer = tokenizer;
    format.chat = chat;
    for (int all = 0; all < 2; all++) {
        struct dataset *d;
        int left_out, longest = 0;
        options.all_turns = all;
        assert_ok(dataset_parse("data", data, sizeof data - 1, NULL, &d));
        assert_ok(dataset_tokenize(d, &format, &left_out));
        for (int i = 0; i < 4; i++) {
            completion_text(&d->examples[i], tokenizer, &text);
            assert_string_equal(bytes_text(&text), wanted[all][i]);
            if (d->examples[i].prompt_ids.n > longest) longest = d->examples[i].prompt_ids.n;
        }
        assert_int_equal(d->max_prompt, longest);
        assert_int_equal(d->turns.several, 2);
        assert_int_equal(d->turns.earlier, 2);
        assert_int_equal(d->turns.learnt, all ? 2 : 0);
        dataset_free(d);
    }
    chat_template_free(chat);
}
