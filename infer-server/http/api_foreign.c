/* api_foreign.c: requests of OpenAI's newer interface (/v1/responses) and of Anthropic's
 * (/v1/messages) as the chats that they come to: what is given becomes what a chat would have
 * given, and from there on it is one. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/api_impl.h"

#include <string.h>

static const char *text_at(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

static bool is(const json_t *object, const char *key, const char *want)
{
    return strcmp(text_at(object, key), want) == 0;
}

// The value stays as long as the request is read.
static const json_t *keep(struct api_request *r, json_t *value)
{
    if (!r->translated) r->translated = json_array();
    json_array_append_new(r->translated, value);
    return value;
}

static enum status refuse(const char *where, size_t i, const json_t *item, const char *known)
{
    return status_fail(ST_UNSUPPORTED, "request: \"%s\": entry %zu is of the type \"%s\"; %s",
                       where, i, CUT(text_at(item, "type"), 40), known);
}

// A chat's parts: texts under whichever name, others as they are, which the chat refuses.
static json_t *parts_of(const json_t *content)
{
    static const char *const texts[] = {"input_text", "output_text", "text"};
    json_t *parts = json_array();
    const json_t *part;
    size_t i;
    if (!json_is_array(content)) {
        json_decref(parts);
        return json_incref((json_t *)content);
    }
    json_array_foreach (content, i, part) {
        bool text = false;
        for (int k = 0; k < 3; k++) text |= is(part, "type", texts[k]);
        if (text)
            json_array_append_new(parts, json_pack("{s:s, s:O?}", "type", "text", "text",
                                                   json_object_get(part, "text")));
        else
            json_array_append(parts, (json_t *)part);
    }
    return parts;
}

static void add_message(json_t *to, const char *role, const json_t *content)
{
    json_array_append_new(to, json_pack("{s:s, s:o}", "role", role, "content", parts_of(content)));
}

// To the assistant's message that stands last, or to a new one.
static void add_call(json_t *to, const json_t *id, const json_t *name, const json_t *arguments)
{
    json_t *last = json_array_get(to, json_array_size(to) - 1);
    if (!is(last, "role", "assistant")) {
        last = json_pack("{s:s, s:s}", "role", "assistant", "content", "");
        json_array_append_new(to, last);
    }
    if (!json_object_get(last, "tool_calls")) json_object_set_new(last, "tool_calls", json_array());
    json_array_append_new(json_object_get(last, "tool_calls"),
                          json_pack("{s:O?, s:s, s:{s:O?, s:O?}}", "id", id, "type", "function",
                                    "function", "name", name, "arguments", arguments));
}

static void add_result(json_t *to, const json_t *id, const json_t *content)
{
    json_t *text = content ? parts_of(content) : json_string("");
    json_array_append_new(
        to, json_pack("{s:s, s:O?, s:o}", "role", "tool", "tool_call_id", id, "content", text));
}

static json_t *begin_messages(const struct api_request *r)
{
    json_t *to = json_array();
    if (r->given.system) add_message(to, "system", r->given.system);
    return to;
}

// A chat's tool of a flat one, whose schema is called `schema`.
static enum status set_tools(struct api_request *r, const char *schema)
{
    json_t *to;
    const json_t *tool;
    size_t i;
    if (!r->given.tools) return ST_OK;
    if (!json_is_array(r->given.tools))
        return status_fail(ST_INVALID, "request: \"tools\" must be an array");
    to = json_array();
    keep(r, to);
    json_array_foreach (r->given.tools, i, tool) {
        json_t *function = json_object();
        static const char *const kept[] = {"name", "description", "strict"};
        const bool known = !json_object_get(tool, "type") || is(tool, "type", "function") ||
                           is(tool, "type", "custom");
        if (!known || !json_object_get(tool, "name") || json_object_get(tool, "format")) {
            json_decref(function);
            return refuse("tools", i, tool, "functions with a name are supported");
        }
        for (int k = 0; k < 3; k++)
            if (json_has(tool, kept[k]))
                json_object_set(function, kept[k], json_object_get(tool, kept[k]));
        if (json_has(tool, schema))
            json_object_set(function, "parameters", json_object_get(tool, schema));
        json_array_append_new(to,
                              json_pack("{s:s, s:o}", "type", "function", "function", function));
    }
    r->given.tools = to;
    return ST_OK;
}

static void set_named_choice(struct api_request *r, const json_t *name)
{
    r->given.tool_choice =
        keep(r, json_pack("{s:s, s:{s:O?}}", "type", "function", "function", "name", name));
}

// {"type": "json_schema", "schema": ...} and its like.
static void set_format(struct api_request *r, const json_t *format, const char *field)
{
    if (!format || is(format, "type", "text")) return;
    r->given.format_field = field;
    r->given.response_format =
        !is(format, "type", "json_schema")
            ? format
            : keep(r, json_pack("{s:s, s:{s:O?}}", "type", "json_schema", "json_schema", "schema",
                                json_object_get(format, "schema")));
}

// ---- /v1/responses ------------------------------------------------------------------------------

static enum status add_item(json_t *to, size_t i, const json_t *item)
{
    const char *type = text_at(item, "type");
    if (!*type || strcmp(type, "message") == 0)
        add_message(to, text_at(item, "role"), json_object_get(item, "content"));
    else if (strcmp(type, "function_call") == 0)
        add_call(to, json_object_get(item, "call_id"), json_object_get(item, "name"),
                 json_object_get(item, "arguments"));
    else if (strcmp(type, "function_call_output") == 0)
        add_result(to, json_object_get(item, "call_id"), json_object_get(item, "output"));
    else if (strcmp(type, "reasoning") != 0) // which no template reads
        return refuse("input", i, item,
                      "message, function_call, function_call_output and reasoning are supported");
    return ST_OK;
}

enum status api_read_responses_prompt(struct api_request *r, const struct api_model *model)
{
    struct api_given *given = &r->given;
    const json_t *item, *choice = given->tool_choice, *effort;
    json_t *messages = begin_messages(r);
    enum status st = ST_OK;
    size_t i;
    keep(r, messages);
    if (json_is_string(given->input))
        add_message(messages, "user", given->input);
    else if (json_is_array(given->input))
        json_array_foreach (given->input, i, item) CHECK(add_item(messages, i, item));
    else
        FAIL(ST_INVALID, "request: \"input\" must be a string or an array of items");
    given->messages = messages;
    CHECK(set_tools(r, "parameters"));
    if (is(choice, "type", "function")) set_named_choice(r, json_object_get(choice, "name"));
    set_format(r, json_object_get(given->text, "format"), "text.format");
    if (json_has(given->text, "verbosity") && !is(given->text, "verbosity", "medium"))
        FAIL(ST_UNSUPPORTED, "request: \"text\": \"verbosity\" is not supported but for medium");
    effort = json_object_get(given->thinking, "effort");
    if (json_is_string(effort)) given->effort = json_string_value(effort);
    st = api_read_chat_prompt(r, model);
out:
    return st;
}

// ---- /v1/messages -------------------------------------------------------------------------------

// Results of tools stand before the rest of a user's message; a thought of the assistant's is left
// out, as the templates leave it.
static enum status add_blocks(json_t *to, size_t i, const json_t *message)
{
    const json_t *content = json_object_get(message, "content"), *block;
    const char *role = text_at(message, "role");
    json_t *rest = json_array();
    size_t k;
    json_array_foreach (content, k, block)
        if (is(block, "type", "tool_result"))
            add_result(to, json_object_get(block, "tool_use_id"),
                       json_object_get(block, "content"));
        else if (!is(block, "type", "tool_use") && !is(block, "type", "thinking") &&
                 !is(block, "type", "redacted_thinking"))
            json_array_append(rest, (json_t *)block);
    if (!json_is_array(content))
        add_message(to, role, content);
    else if (json_array_size(rest) > 0)
        add_message(to, role, rest);
    json_decref(rest);
    if (strcmp(role, "user") != 0 && strcmp(role, "assistant") != 0)
        return status_fail(ST_INVALID,
                           "request: \"messages\": the role of entry %zu is neither user "
                           "nor assistant",
                           i);
    json_array_foreach (content, k, block)
        if (is(block, "type", "tool_use"))
            add_call(to, json_object_get(block, "id"), json_object_get(block, "name"),
                     json_object_get(block, "input"));
    return ST_OK;
}

static void set_choice(struct api_request *r)
{
    struct api_given *given = &r->given;
    const json_t *choice = given->tool_choice;
    if (json_is_true(json_object_get(choice, "disable_parallel_tool_use")))
        r->several_calls = false;
    if (is(choice, "type", "tool"))
        set_named_choice(r, json_object_get(choice, "name"));
    else if (is(choice, "type", "any"))
        given->tool_choice = keep(r, json_string("required"));
    else if (json_is_object(choice))
        given->tool_choice = json_object_get(choice, "type");
}

enum status api_read_messages_prompt(struct api_request *r, const struct api_model *model)
{
    struct api_given *given = &r->given;
    const json_t *message, *effort = json_object_get(given->text, "effort");
    const bool thinks = given->thinking && !is(given->thinking, "type", "disabled");
    json_t *messages = begin_messages(r);
    enum status st = ST_OK;
    size_t i;
    keep(r, messages);
    if (!json_is_array(given->input) || json_array_size(given->input) == 0)
        FAIL(ST_INVALID, "request: \"messages\" must be an array of one message or more");
    json_array_foreach (given->input, i, message) CHECK(add_blocks(messages, i, message));
    given->messages = messages;
    message = json_array_get(messages, json_array_size(messages) - 1);
    given->continue_final = is(message, "role", "assistant");
    given->generation_prompt = !given->continue_final;
    CHECK(set_tools(r, "input_schema"));
    set_choice(r);
    set_format(r, json_object_get(given->text, "format"), "output_config.format");
    if (json_is_string(effort))
        given->effort = json_string_value(effort);
    else if (thinks)
        given->effort = "high";
    else if (given->thinking && model->chat &&
             chat_template_mentions(model->chat, "enable_thinking"))
        given->effort = "none";
    st = api_read_chat_prompt(r, model);
out:
    return st;
}
