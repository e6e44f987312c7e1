/* api_chat.c: messages as OpenAI's clients send them to what chat templates read. Contents in parts
 * become one text where the template wants one, and the arguments of earlier tool calls, which
 * travel as JSON in a string, become values again. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/api_impl.h"
#include "common/base/json.h"
#include "common/base/names.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

static enum status no_memory(void)
{
    return status_fail(ST_NO_MEMORY, "out of memory for a chat");
}

// A string of JSON becomes its value; an empty one, or none, stays.
static enum status parse_arguments(json_t *call, size_t i, size_t k)
{
    json_t *function = json_object_get(call, "function"), *value = NULL;
    const json_t *arguments = json_object_get(function, "arguments");
    char where[100];
    if (!json_is_string(arguments) || json_string_length(arguments) == 0) return ST_OK;
    snprintf(where, sizeof where, "messages[%zu].tool_calls[%zu].function.arguments", i, k);
    enum status st =
        json_parse(where, json_string_value(arguments), json_string_length(arguments), &value);
    if (st == ST_OK && json_object_set_new(function, "arguments", value) != 0) st = no_memory();
    return st;
}

static enum status parse_tool_calls(json_t *messages)
{
    json_t *message, *call;
    size_t i, k;
    json_array_foreach (messages, i, message)
        json_array_foreach (json_object_get(message, "tool_calls"), k, call) {
            enum status st = parse_arguments(call, i, k);
            if (st != ST_OK) return st;
        }
    return ST_OK;
}

enum status api_messages_plain(const json_t *messages, bool knows_developer, json_t **ret)
{
    json_t *list = json_deep_copy(messages), *message;
    size_t i;
    if (!list) return no_memory();
    json_array_foreach (list, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        const json_t *calls = json_object_get(message, "tool_calls");
        if (!knows_developer && role && strcmp(role, "developer") == 0)
            json_object_set_new(message, "role", json_string("system"));
        if (json_is_array(calls) && json_array_size(calls) == 0)
            json_object_del(message, "tool_calls");
    }
    *ret = list;
    return ST_OK;
}

// ---- rendering ---------------------------------------------------------------------------------

static enum status check_messages(const json_t *messages)
{
    const json_t *message;
    size_t i;
    json_array_foreach (messages, i, message) {
        if (!json_is_object(message))
            return status_fail(ST_INVALID, "messages[%zu] is not an object", i);
        if (!json_is_string(json_object_get(message, "role")))
            return status_fail(ST_INVALID, "messages[%zu].role is not a string", i);
        const json_t *content = json_object_get(message, "content");
        bool absent = !content || json_is_null(content);
        if (!json_is_string(content) && !json_is_array(content) &&
            !(absent && json_array_size(json_object_get(message, "tool_calls")) > 0))
            return status_fail(ST_INVALID,
                               "messages[%zu].content is neither a string nor a list of parts", i);
    }
    return ST_OK;
}

// An answer of calls alone comes back with null as its content. True: it was, and is "" now.
static bool empty_nulls(json_t *messages)
{
    bool any = false;
    json_t *message;
    size_t i;
    json_array_foreach (messages, i, message)
        if (json_is_null(json_object_get(message, "content")))
            any = json_object_set_new(message, "content", json_string("")) == 0 || any;
    return any;
}

// There are templates that know a call by its null, and some, as gpt-oss's, that fail on it: these
// get "".
static enum status render(const struct chat_template *chat, const struct chat_input *input,
                          json_t *messages, struct bytes *ret)
{
    struct status_kept first;
    const size_t len = ret->len;
    enum status st = chat_template_render(chat, input, ret);
    status_keep(&first, st);
    if (st != ST_INVALID || !empty_nulls(messages)) return st;
    ret->len = len;
    st = chat_template_render(chat, input, ret);
    return st == ST_OK ? st : status_recall(&first);
}

// ---- a message that is continued ----------------------------------------------------------------

// Stands behind the content of the last message while it is rendered, as transformers has it: its
// space shows whether the template trims. Templates know the word.
#define CONTINUE_WORD "CONTINUE_FINAL_MESSAGE_TAG"
#define CONTINUE      CONTINUE_WORD " "

static enum status mark_final(json_t *messages)
{
    json_t *owner = json_array_get(messages, json_array_size(messages) - 1);
    json_t *parts = json_object_get(owner, "content");
    const char *key = json_is_array(parts) ? "text" : "content";
    if (json_is_array(parts)) owner = json_array_get(parts, json_array_size(parts) - 1);
    const json_t *text = json_object_get(owner, key);
    if (!json_is_string(text))
        return status_fail(ST_INVALID, "\"continue_final_message\": the last message has no text");
    json_t *marked = json_pack("s%+", json_string_value(text), json_string_length(text), CONTINUE);
    return json_object_set_new(owner, key, marked) == 0 ? ST_OK : no_memory();
}

static enum status cut_at_mark(struct bytes *text)
{
    char *at = NULL, *next = text->data, *end = text->data + text->len;
    while ((next = memmem(next, (size_t)(end - next), CONTINUE_WORD, strlen(CONTINUE_WORD))))
        at = next++;
    if (!at)
        return status_fail(ST_INVALID, "\"continue_final_message\": the chat template leaves the "
                                       "last message out");
    const bool trims = at[strlen(CONTINUE_WORD)] != ' ';
    text->len = (size_t)(at - text->data);
    while (trims && text->len > 0 && isspace((unsigned char)text->data[text->len - 1])) text->len--;
    text->data[text->len] = 0;
    return ST_OK;
}

// ---- the whole ----------------------------------------------------------------------------------

// chat_template_kwargs, and the effort as what the template reads of it: a variable of that name,
// or whether to think at all.
static enum status set_kwargs(const struct api_given *given, const struct chat_template *chat,
                              json_t **ret)
{
    static const char *const efforts[] = {"none", "minimal", "low", "medium",
                                          "high", "xhigh",   "max", NULL};
    const char *effort = given->effort;
    int which;
    json_t *kwargs = given->template_kwargs ? json_copy((json_t *)given->template_kwargs) : NULL;
    *ret = kwargs;
    if (!effort) return ST_OK;
    enum status st = name_parse(efforts, effort, &which);
    if (st != ST_OK) return status_context(st, "\"reasoning_effort\"");
    const bool graded = chat_template_mentions(chat, "reasoning_effort");
    if (!graded && !chat_template_mentions(chat, "enable_thinking"))
        return status_fail(ST_UNSUPPORTED,
                           "\"reasoning_effort\" would be ignored: the chat template (%s) reads "
                           "neither reasoning_effort nor enable_thinking",
                           chat_template_source(chat));
    json_t *own = graded ? json_pack("{s:s}", "reasoning_effort", effort)
                         : json_pack("{s:b}", "enable_thinking", which > 0);
    if (!kwargs) *ret = kwargs = json_object();
    const bool set = json_object_update(kwargs, own) == 0;
    json_decref(own);
    return set || !json_is_object(kwargs) ? ST_OK : no_memory(); // what it is, is checked later
}

// The text of the given messages by that template.
static enum status chat_text(const struct api_given *given, const struct chat_template *chat,
                             struct bytes *ret)
{
    json_t *plain = NULL, *messages = NULL, *kwargs = NULL;
    const char *where = "request: \"messages\"";
    const bool no_tools = json_is_array(given->tools) && json_array_size(given->tools) == 0;
    enum status st;
    CHECK(check_messages(given->messages));
    CHECK(api_messages_plain(given->messages, chat_template_mentions(chat, "developer"), &plain));
    CHECK(parse_tool_calls(plain));
    CHECK(chat_messages_join_parts(chat, plain, &messages));
    where = "request";
    if (given->continue_final && given->generation_prompt)
        FAIL(ST_INVALID, "\"continue_final_message\" needs \"add_generation_prompt\": false");
    if (given->continue_final) CHECK(mark_final(messages));
    CHECK(set_kwargs(given, chat, &kwargs));
    struct chat_input input = {
        .messages = messages,
        .tools = no_tools ? NULL : given->tools,
        .kwargs = kwargs,
        .add_generation_prompt = given->generation_prompt,
    };
    where = "request: \"messages\"";
    CHECK(render(chat, &input, messages, ret)); // which checks the fields' types
    where = "request";
    if (given->continue_final) CHECK(cut_at_mark(ret));
    st = chat_template_check_used(chat, &input);
out:
    json_decref(plain);
    json_decref(messages);
    json_decref(kwargs);
    return status_context(st, "%s", where);
}

// ---- tools --------------------------------------------------------------------------------------

// "none", "auto", "required" or {"type": "function", "function": {"name": ...}}.
static enum status read_choice(const struct api_given *given, struct tool_ask *ret, bool *ret_none)
{
    const json_t *choice = given->tool_choice,
                 *name = json_object_get(json_object_get(choice, "function"), "name"), *tool;
    const char *word = json_string_value(choice);
    size_t i;
    *ret_none = word && strcmp(word, "none") == 0;
    ret->name = json_string_value(name);
    ret->required = ret->name || (word && strcmp(word, "required") == 0);
    if (!choice || *ret_none || (word && strcmp(word, "auto") == 0)) return ST_OK;
    if (!ret->required)
        return status_fail(ST_UNSUPPORTED,
                           "request: \"tool_choice\" must be \"none\", \"auto\", \"required\" or "
                           "{\"type\": \"function\", \"function\": {\"name\": ...}}");
    json_array_foreach (ret->tools, i, tool) {
        const json_t *one = json_object_get(json_object_get(tool, "function"), "name");
        if (one && (!name || json_equal(one, name))) return ST_OK;
    }
    return status_fail(ST_INVALID, "request: \"tool_choice\": \"tools\" have no function%s%s",
                       name ? " of the name " : "", name ? CUT(ret->name, 60) : "");
}

enum status api_set_tools(struct api_request *r, const struct api_model *model)
{
    struct tool_ask ask = {.tools = r->given.tools,
                           .several = r->several_calls,
                           .thinks = tokenizer_id(model->tokenizer, "<think>") >= 0,
                           .in_thought = r->prompts[0].in_thought};
    const json_t *tool;
    bool none, strict = !r->several_calls;
    size_t i;
    enum status st = read_choice(&r->given, &ask, &none);
    if (st != ST_OK || none) return st;
    ask.several &= !ask.name; // exactly one of it, as OpenAI has it
    if (ask.required && !model->tool_form)
        return status_fail(ST_UNSUPPORTED,
                           "request: \"tool_choice\": it is not known in which form this model "
                           "writes calls; --tool-call-parser says it");
    json_array_foreach (ask.tools, i, tool)
        strict |= json_is_true(json_object_get(json_object_get(tool, "function"), "strict"));
    if (!model->tool_form || json_array_size(ask.tools) == 0) return ST_OK;
    r->tool_form = model->tool_form;
    r->tools = json_incref((json_t *)ask.tools);
    const bool other = r->given.response_format || r->given.structured;
    if (ask.required) r->given.response_format = NULL; // there is no other text
    if (ask.required || (strict && !other && model->constraints))
        r->constraint = tool_form_spec(r->tool_form, &ask);
    ask.alone = other && !ask.required;
    if (ask.alone) r->calls = tool_form_spec(r->tool_form, &ask);
    return ask.required && !r->constraint ? no_memory() : ST_OK;
}

enum status api_read_messages(const struct api_given *given, const struct api_model *model,
                              struct api_prompt *ret)
{
    struct bytes text = BYTES_INIT;
    struct chat_template *own = NULL; // the request's
    const char *source = given->chat_template;
    enum status st;
    if (!json_is_array(given->messages) || json_array_size(given->messages) == 0)
        return status_fail(ST_INVALID,
                           "request: \"messages\" must be an array of one message or more");
    if (!model->tokenizer)
        return status_fail(ST_INVALID,
                           "request: \"messages\" are text, but %s has no tokenizer.json; send "
                           "token ids to /v1/completions or /v1/rollouts instead",
                           model->folder);
    if (!model->chat && !source)
        return status_fail(ST_INVALID, "request: \"messages\" need a chat template: %s",
                           model->why_no_chat);
    if (source)
        CHECK(chat_template_parse("request: \"chat_template\"", source, strlen(source),
                                  model->chat ? chat_template_tokens(model->chat) : NULL, &own));
    CHECK(chat_text(given, own ? own : model->chat, &text));
    CHECK(bytes_status(&text));
    // the template has written the special tokens itself
    CHECK(api_encode_text(bytes_text(&text), text.len, false, "messages", model, ret));
    while (text.len > 0 && isspace((unsigned char)text.data[text.len - 1])) text.len--;
    ret->in_thought = text.len >= 7 && memcmp(text.data + text.len - 7, "<think>", 7) == 0;
out:
    bytes_release(&text);
    chat_template_free(own);
    return st;
}

enum status api_chat_refuse_fields(const struct api_given *given)
{
    const struct {
        const char *name;
        const json_t *value;
        bool given; // or a value that is not empty
    } fields[] = {{"tools", given->tools, false},
                  {"chat_template_kwargs", given->template_kwargs, false},
                  {"chat_template", NULL, given->chat_template != NULL},
                  {"reasoning_effort", NULL, given->effort != NULL},
                  {"continue_final_message", NULL, given->continue_final}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const json_t *value = fields[i].value;
        const bool empty = !value || (json_is_array(value) && json_array_size(value) == 0) ||
                           (json_is_object(value) && json_object_size(value) == 0);
        if (!empty || fields[i].given)
            return status_fail(ST_INVALID,
                               "request: \"%s\" goes with messages and would do nothing here; "
                               "leave it out, or put it beside them",
                               fields[i].name);
    }
    return ST_OK;
}
