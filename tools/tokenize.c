/* tokenize.c: cw-tokenize, a model folder's tokenizer over JSON lines: standard input to standard
 * output, a line for a line. One thread. A bad line ends it, with the line's number; a chat that
 * the template refuses is answered with {"error"} and the next line follows. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct config {
    const char *model, *now;
    struct chat_template_choice chat_template;
    bool chat, decode, add_special_tokens, skip_special_tokens;
};

#define OPTIONS_OF struct config
static const struct option_spec options[] = {
    OPT_TEXT("model", model, NULL, "DIR", "Hugging Face folder with tokenizer.json"),
    OPT_FLAG("chat", chat, NULL,
             "{\"messages\",\"add_generation_prompt\",\"tools\",\"chat_template_kwargs\"} -> "
             "{\"text\",\"ids\"} or {\"error\"}"),
    OPT_FLAG("decode", decode, NULL, "{\"ids\"} -> {\"text\"}"),
    OPT_TEXT("chat-template", chat_template.name, NULL, "NAME",
             "which of the folder's named chat templates (default: default, with tools tool_use)"),
    OPT_TEXT("chat-template-file", chat_template.file, NULL, "FILE",
             "Jinja chat template to use instead of the folder's"),
    OPT_TEXT("now", now, NULL, "TIME",
             "what templates take for the time: 2025-01-02T03:04:05 (default: the local clock)"),
    OPT_FLAG("add-special-tokens", add_special_tokens, NULL,
             "put the tokens around a text that the model's post-processor names (Llama's <s>)"),
    OPT_FLAG("skip-special-tokens", skip_special_tokens, NULL,
             "leave special tokens out of decoded text"),
    OPT_END,
};

struct tool {
    struct config config;
    struct tokenizer *tokenizer;
    struct chat_template *template;
    char *broken;  // why the template is none; every chat is answered with it
    struct tm now; // with config.now
};

static json_t *text_to_json(const struct bytes *text)
{
    return json_stringn(bytes_text(text), text->len);
}

static enum status encode_line(const struct tool *t, const json_t *line, json_t *answer)
{
    const json_t *text = json_object_get(line, "text");
    struct token_list ids = TOKEN_LIST_INIT;
    if (!json_is_string(text)) return status_fail(ST_INVALID, "text is not a string");
    enum status st = tokenizer_encode(t->tokenizer, json_string_value(text),
                                      json_string_length(text), t->config.add_special_tokens, &ids);
    if (st == ST_OK) json_object_set_new(answer, "ids", json_ids(ids.ids, ids.n));
    token_list_release(&ids);
    return st;
}

static enum status chat_line(const struct tool *t, const json_t *line, json_t *answer)
{
    struct token_list ids = TOKEN_LIST_INIT;
    struct bytes text = BYTES_INIT;
    bool prompt = false;
    enum status st;
    if (t->broken) {
        json_object_set_new(answer, "error", json_string(t->broken));
        return ST_OK;
    }
    CHECK(json_get_bool("line", line, "add_generation_prompt", &prompt));
    struct chat_input input = {
        .messages = json_object_get(line, "messages"),
        .tools = json_object_get(line, "tools"),
        .kwargs = json_object_get(line, "chat_template_kwargs"),
        .add_generation_prompt = prompt,
        .now = t->config.now ? &t->now : NULL,
    };
    st = chat_template_render(t->template, &input, &text);
    if (st == ST_INVALID || st == ST_UNSUPPORTED) { // this chat, not the rest
        json_object_set_new(answer, "error", json_string(status_message()));
        st = ST_OK;
        goto out;
    }
    CHECK(st);
    CHECK(tokenizer_encode(t->tokenizer, bytes_text(&text), text.len, t->config.add_special_tokens,
                           &ids));
    json_object_set_new(answer, "text", text_to_json(&text));
    json_object_set_new(answer, "ids", json_ids(ids.ids, ids.n));
out:
    token_list_release(&ids);
    bytes_release(&text);
    return st;
}

static enum status decode_line(const struct tool *t, const json_t *line, json_t *answer)
{
    static const struct number_list how = {"ids",     NUMBER_I32, 0,
                                           INT32_MAX, ST_INVALID, "is not a token id"};
    const json_t *list = json_object_get(line, "ids");
    int32_t *ids = NULL;
    struct bytes text = BYTES_INIT;
    enum status st;
    CHECK(json_read_numbers(list, &how, -1, &ids));
    CHECK(tokenizer_decode(t->tokenizer, ids, (int)json_array_size(list),
                           t->config.skip_special_tokens, &text));
    json_object_set_new(answer, "text", text_to_json(&text));
out:
    free(ids);
    bytes_release(&text);
    return st;
}

static enum status answer_line(const struct tool *t, const char *text, size_t len)
{
    json_t *line = NULL, *answer = json_object();
    enum status st = answer ? ST_OK : status_fail(ST_NO_MEMORY, "out of memory");
    if (st == ST_OK) st = json_parse("JSON", text, len, &line);
    if (st == ST_OK)
        st = t->config.decode ? decode_line(t, line, answer)
             : t->config.chat ? chat_line(t, line, answer)
                              : encode_line(t, line, answer);
    if (st == ST_OK && (json_dumpf(answer, stdout, JSON_COMPACT) != 0 || putchar('\n') == EOF))
        st = status_fail(ST_IO, "cannot write to standard output");
    json_decref(line);
    json_decref(answer);
    return st;
}

static bool is_blank(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!strchr(" \t\r\n", text[i]) || !text[i]) return false;
    return true;
}

static enum status answer_all(const struct tool *t)
{
    char *text = NULL;
    size_t cap = 0;
    enum status st = ST_OK;
    ssize_t len;
    for (long number = 1; st == ST_OK && (len = getline(&text, &cap, stdin)) >= 0; number++) {
        if (is_blank(text, (size_t)len)) continue;
        st = status_context(answer_line(t, text, (size_t)len), "line %ld", number);
    }
    if (st == ST_OK && ferror(stdin)) st = status_fail(ST_IO, "cannot read standard input");
    if (fflush(stdout) != 0 && st == ST_OK)
        st = status_fail(ST_IO, "cannot write to standard output");
    free(text);
    return st;
}

// "2025-01-02T03:04:05"
static enum status read_time(const char *text, struct tm *ret)
{
    struct tm tm = {.tm_isdst = -1};
    const char *end = strptime(text, "%Y-%m-%dT%H:%M:%S", &tm); // fills in the days too
    if (!end || *end)
        return status_fail(ST_INVALID, "--now %s is not of the form 2025-01-02T03:04:05", text);
    *ret = tm;
    return ST_OK;
}

static enum status check(void *context, struct option_set *set)
{
    struct tool *t = context;
    const struct config *c = &t->config;
    (void)set;
    if (!c->model) return status_fail(ST_INVALID, "--model DIR is missing");
    if (c->chat && c->decode)
        return status_fail(ST_INVALID, "--chat and --decode exclude each other");
    return c->now ? read_time(c->now, &t->now) : ST_OK;
}

static enum status run(void *context)
{
    struct tool *t = context;
    enum status st = tokenizer_load(t->config.model, &t->tokenizer);
    if (st == ST_OK && t->config.chat)
        st = chat_template_find(t->config.model, &t->config.chat_template, &t->template);
    if (st == ST_FORMAT && t->config.chat && (t->broken = strdup(status_message())))
        log_error("%s", t->broken);
    if (st == ST_OK || t->broken) st = answer_all(t);
    chat_template_free(t->template);
    tokenizer_free(t->tokenizer);
    free(t->broken);
    return st == ST_OK && t->broken ? ST_CANCELLED : st;
}

int main(int argc, char **argv)
{
    struct tool t = {.config = {0}};
    const struct program program = {
        .name = "cw-tokenize",
        .usage = "--model DIR [--chat|--decode] < lines.jsonl",
        .options = options,
        .config = &t.config,
        .check = check,
        .run = run,
        .context = &t,
    };
    return program_main(&program, argc, argv);
}
