/* served_model.c: what the server knows of its model before it serves. A chat template is a program
 * of somebody else's: what it does is seen from what it renders, not from the words it has. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/server_impl.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/model/model_folder.h"

#include <limits.h>
#include <stdlib.h>
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
    bool same = tool_calls_new(form, tools, false, &calls) == ST_OK &&
                tool_calls_read(calls, text, len, true) == ST_OK && calls->n == 1 &&
                json_parse("call", bytes_text(&calls->list[0].arguments),
                           calls->list[0].arguments.len, &got) == ST_OK;
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

// ---- the folder --------------------------------------------------------------------------------

enum status api_model_read_defaults(const char *file, const json_t *generation_config,
                                    struct api_model *ret)
{
    struct wanted {
        double temperature, top_p, min_p;
        int top_k, max_new_tokens;
        bool sample;
    } w;
#define FIELDS_OF struct wanted
    static const struct json_field fields[] = {
        FIELD_REAL("temperature", temperature, 0, 100, 1),
        FIELD_REAL("top_p", top_p, 0, 1, 1),
        FIELD_REAL("min_p", min_p, 0, 1, 0),
        FIELD_INT32("top_k", top_k, -1, INT_MAX, 0),
        FIELD_INT32("max_new_tokens", max_new_tokens, 1, INT_MAX / 4, 0),
        FIELD_BOOL("do_sample", sample, true),
        {0},
    };
    enum status st = json_read_fields(file, generation_config, fields, NULL, &w);
    if (st != ST_OK) return st;
    ret->temperature = w.sample && w.temperature >= 1e-3 ? w.temperature : 0;
    ret->top_p = w.top_p > 0 ? w.top_p : 1;
    ret->min_p = w.min_p;
    ret->top_k = w.top_k;
    ret->max_new_tokens = w.max_new_tokens;
    return ST_OK;
}

// Sampling defaults of the OpenAI endpoints.
static enum status read_generation_config(struct server *s, const char *folder)
{
    char path[PATH_ROOM];
    json_t *object = NULL;
    enum status st;
    CHECK(path_put(path, folder, "generation_config.json"));
    CHECK(model_file_read_json(folder, "generation_config.json", 1 << 20, &object));
    CHECK(api_model_read_defaults(path, object, &s->model));
    double repetition = 1;
    CHECK(json_get_double(path, object, "repetition_penalty", 0, 100, &repetition));
    if (repetition != 1)
        log_warn("%s: repetition_penalty %g is not applied by default: it is no part of the "
                 "model's distribution; requests may send it",
                 path, repetition);
out:
    json_decref(object);
    return st;
}

// What passes between two models is a token id: it must mean the same to both.
static enum status check_tokenizer(const struct server *s, const char *option, const char *what,
                                   const char *folder)
{
    if (!folder || !model_file_exists(folder, "tokenizer.json")) return ST_OK;
    return status_context(
        tokenizer_check_same(s->tokenizer, s->options->engine.model_folder, folder, what), "%s %s",
        option, folder);
}

// What each token's text ends, for the selectors of a tandem.
static enum status read_token_ends(struct server *s)
{
    const int n = tokenizer_vocab_size(s->tokenizer);
    struct bytes text = BYTES_INIT;
    s->token_ends = malloc((size_t)n);
    if (!s->token_ends) return status_fail(ST_NO_MEMORY, "no memory for %d tokens", n);
    for (int id = 0; id < n; id++) {
        bytes_clear(&text);
        tokenizer_decode_inside(s->tokenizer, id, &text);
        s->token_ends[id] = token_ends_of(bytes_text(&text), text.len);
    }
    enum status st = bytes_status(&text);
    bytes_release(&text);
    return st;
}

// What the chat template says of itself, once: how it writes calls, and whether turns repeat.
static void read_chat(struct server *s)
{
    const int parser = s->options->tool_parser;
    struct bytes sentence = BYTES_INIT;
    log_info("chat template: %s", chat_template_source(s->chat));
    s->model.tool_form = parser == TOOL_PARSER_AUTO ? chat_probe_tool_form(s->chat)
                                                    : tool_form_at(parser - TOOL_PARSER_FORMS);
    if (s->model.tool_form)
        log_info("tool calls in answers are parsed: %s (--tool-call-parser)",
                 tool_form_name(s->model.tool_form));
    else if (chat_template_mentions(s->chat, "tools"))
        log_info("tool calls in answers stay text: %s",
                 parser == TOOL_PARSER_OFF
                     ? "--tool-call-parser off"
                     : "the chat template writes them in no form that --tool-call-parser has");
    chat_probe_repeats(s->chat, s->tokenizer, &sentence);
    if (sentence.len > 0) log_info("chat template: %s", bytes_text(&sentence));
    bytes_release(&sentence);
}

static enum status read_tokenizer(struct server *s, const char *folder)
{
    enum status st = model_folder_check(folder, "config.json");
    if (st != ST_OK) return st;
    if (!model_file_exists(folder, "tokenizer.json")) {
        log_warn("%s has no tokenizer.json: prompts must be token ids, answers have no text",
                 folder);
        return ST_OK;
    }
    st = tokenizer_load(folder, &s->tokenizer);
    const struct engine_options *o = &s->options->engine;
    if (st == ST_OK) st = check_tokenizer(s, "--draft", "draft model", o->draft_folder);
    if (st == ST_OK) st = check_tokenizer(s, "--tandem-model", "frozen model", o->frozen_folder);
    if (st == ST_OK && o->frozen_folder) st = read_token_ends(s);
    if (st != ST_OK) return st;
    const struct chat_template_choice *choice = &s->options->chat_template;
    st = chat_template_find(folder, choice, &s->chat);
    if (st == ST_OK) read_chat(s);
    if (st == ST_OK || choice->name || choice->file) return st;
    snprintf(s->why_no_chat, sizeof s->why_no_chat, "%s", status_message());
    log_warn("chat is off: %s", s->why_no_chat);
    return ST_OK;
}

enum status served_model_read(struct server *s)
{
    enum status st;
    const char *folder = s->options->engine.model_folder;
    if (s->options->model_name)
        snprintf(s->model_name, sizeof s->model_name, "%s", s->options->model_name);
    else
        model_folder_name(folder, s->model_name, sizeof s->model_name);
    CHECK(read_generation_config(s, folder));
    CHECK(read_tokenizer(s, folder));
    s->model.name = s->model_name;
    s->model.folder = folder;
    s->model.frozen = s->options->engine.frozen_folder != NULL;
    s->model.tokenizer = s->host.tokenizer = s->tokenizer;
    s->model.chat = s->chat;
    s->model.why_no_chat = s->why_no_chat;
    s->unknown.accept = s->options->accept_unknown;
    s->model.unknown = &s->unknown;
out:
    return st;
}
