/* chat_probe.c: see chat_probe.h. A template is a program of somebody else's: what it does is seen
 * from what it renders, not from the words it has. */
#include "infer-server/http/chat_probe.h"
#include "common/base/json.h"

#include <string.h>

#define NAME      "get_weather"
#define ARGUMENTS "{\"city\": \"Paris\", \"days\": 3}"
#define USER      "{\"role\":\"user\",\"content\":\"a\"}"

static const char tools_text[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"" NAME "\",\"description\":\"d\","
    "\"parameters\":{\"type\":\"object\",\"properties\":{"
    "\"city\":{\"type\":\"string\",\"description\":\"d\"},"
    "\"days\":{\"type\":\"integer\",\"description\":\"d\"}},\"required\":[\"city\"]}}}]";

// False: the template refused. Messages and tools as JSON; tools may be NULL.
static bool render(const struct chat_template *chat, const char *messages, const char *tools,
                   bool generation_prompt, struct bytes *ret)
{
    json_t *list = json_loads(messages, 0, NULL),
           *given = tools ? json_loads(tools, 0, NULL) : NULL;
    const struct chat_input input = {
        .messages = list, .tools = given, .add_generation_prompt = generation_prompt};
    bytes_clear(ret);
    const bool rendered = list && chat_template_render(chat, &input, ret) == ST_OK;
    json_decref(list);
    json_decref(given);
    return rendered && !ret->failed;
}

static size_t common_bytes(const struct bytes *a, const struct bytes *b)
{
    size_t n = 0;
    while (n < a->len && n < b->len && a->data[n] == b->data[n]) n++;
    return n;
}

// ---- calls -------------------------------------------------------------------------------------

static bool parses_back(const struct tool_form *form, const char *text, size_t len)
{
    struct tool_calls *calls = NULL;
    json_t *tools = json_loads(tools_text, 0, NULL), *want = json_loads(ARGUMENTS, 0, NULL);
    json_t *got = NULL;
    bool same = tool_calls_new(form, tools, &calls) == ST_OK &&
                tool_calls_read(calls, text, len, true) == ST_OK && calls->n == 1 &&
                json_parse("call", calls->list[0].arguments, strlen(calls->list[0].arguments),
                           &got) == ST_OK;
    same = same && json_equal(got, want);
    tool_calls_free(calls);
    json_decref(tools);
    json_decref(want);
    json_decref(got);
    return same;
}

static const struct tool_form *form_of(const char *text, size_t len)
{
    const struct tool_form *form;
    for (int i = 0; (form = tool_form_at(i)); i++)
        if (parses_back(form, text, len)) return form;
    return NULL;
}

// The answer is what stands behind the generation prompt; where a template begins its answers
// otherwise than that prompt, behind the user's message.
const struct tool_form *chat_probe_tool_form(const struct chat_template *chat)
{
#define CALL(arguments)                                                                            \
    "[" USER ",{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":\"call00001\","    \
    "\"type\":\"function\",\"function\":{\"name\":\"" NAME "\",\"arguments\":" arguments "}}]}]"
    // as values, as requests have them here, and as text, which some templates can only take
    static const char *const calls[] = {CALL(ARGUMENTS),
                                        CALL("\"{\\\"city\\\": \\\"Paris\\\", \\\"days\\\": 3}\"")};
    const struct tool_form *form = NULL;
    struct bytes all = BYTES_INIT, before = BYTES_INIT;
    for (int i = 0; i < 2 && !form; i++) {
        if (!render(chat, calls[i], tools_text, false, &all)) continue;
        for (int prompt = 1; prompt >= 0 && !form; prompt--) {
            if (!render(chat, "[" USER "]", tools_text, prompt, &before)) continue;
            const size_t from = common_bytes(&all, &before);
            if (prompt && from < before.len) continue;
            form = form_of(bytes_text(&all) + from, all.len - from);
        }
    }
    bytes_release(&all);
    bytes_release(&before);
    return form;
}

// ---- turns -------------------------------------------------------------------------------------

// How many of the first prompt's tokens the second begins with; *ret_n: how many there are.
static int common_tokens(const struct tokenizer *tokenizer, const struct bytes *first,
                         const struct bytes *second, int *ret_n)
{
    struct token_list a = TOKEN_LIST_INIT, b = TOKEN_LIST_INIT;
    int same = 0;
    if (tokenizer_encode(tokenizer, bytes_text(first), first->len, false, &a) == ST_OK &&
        tokenizer_encode(tokenizer, bytes_text(second), second->len, false, &b) == ST_OK)
        while (same < a.n && same < b.n && a.ids[same] == b.ids[same]) same++;
    *ret_n = a.n;
    token_list_release(&a);
    token_list_release(&b);
    return same;
}

void chat_probe_repeats(const struct chat_template *chat, const struct tokenizer *tokenizer,
                        struct bytes *ret_sentence)
{
#define THOUGHT       "<think>\nb\n</think>\n\nc"
#define TURNS(answer) "[" USER ",{\"role\":\"assistant\",\"content\":\"" answer "\"}," USER "]"
    struct bytes first = BYTES_INIT, second = BYTES_INIT;
    int n = 0, same = 0;
    if (!render(chat, "[" USER "]", NULL, true, &first) ||
        !render(chat, TURNS("c"), NULL, true, &second))
        goto out;
    same = common_tokens(tokenizer, &first, &second, &n);
    if (same < n) {
        bytes_printf(ret_sentence,
                     "a conversation's next prompt does not begin with the tokens of the turn "
                     "before (its first %d of %d): the prefix cache serves up to there, and "
                     "training on several turns needs each turn's own tokens",
                     same, n);
        goto out;
    }
    if (!render(chat, TURNS("<think>\\nb\\n</think>\\n\\nc"), NULL, true, &second)) goto out;
    bytes_puts(&first, THOUGHT);
    if (common_bytes(&first, &second) < first.len)
        bytes_puts(
            ret_sentence,
            "a conversation's next prompt leaves out what earlier answers thought (<think>): "
            "the prefix cache serves up to there, and training on several turns needs each "
            "turn's own tokens");
out:
    bytes_release(&first);
    bytes_release(&second);
}
