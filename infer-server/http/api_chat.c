/* api_chat.c: messages as OpenAI's clients send them to what chat templates read. Contents in parts
 * become one text where the template wants one, and the arguments of earlier tool calls, which
 * travel as JSON in a string, become values again. Any thread. */
#include "infer-server/http/api_impl.h"
#include "common/base/json.h"

#include <stdio.h>
#include <string.h>

static enum status no_memory(void)
{
    return status_fail(ST_NO_MEMORY, "out of memory for a chat");
}

// ---- in the words that chat templates know: what needs no change is not copied ------------------

static bool is_developer(const json_t *message)
{
    const char *role = json_string_value(json_object_get(message, "role"));
    return role && strcmp(role, "developer") == 0;
}

static bool has_empty_calls(const json_t *message)
{
    const json_t *calls = json_object_get(message, "tool_calls");
    return json_is_array(calls) && json_array_size(calls) == 0;
}

static json_t *plain_copy(json_t *message, bool knows_developer)
{
    const bool developer = !knows_developer && is_developer(message),
               empty = has_empty_calls(message);
    if (!developer && !empty) return json_incref(message);
    json_t *copy = json_copy(message);
    if (copy && developer) json_object_set_new(copy, "role", json_string("system"));
    if (copy && empty) json_object_del(copy, "tool_calls");
    return copy;
}

enum status api_messages_plain(const json_t *messages, bool knows_developer, json_t **ret)
{
    json_t *list = json_array(), *message;
    size_t i;
    bool whole = list != NULL;
    json_array_foreach (messages, i, message)
        whole = whole && json_array_append_new(list, plain_copy(message, knows_developer)) == 0;
    if (!whole) {
        json_decref(list);
        return no_memory();
    }
    *ret = list;
    return ST_OK;
}

// ---- tool calls --------------------------------------------------------------------------------

// One call of message `i`; others hold it too, so that it is copied before it changes.
static enum status parse_arguments(json_t *calls, size_t i, size_t k)
{
    const json_t *call = json_array_get(calls, k), *function = json_object_get(call, "function");
    const json_t *arguments = json_object_get(function, "arguments");
    json_t *value = NULL, *new_function = NULL, *new_call = NULL;
    char where[100];
    enum status st = ST_OK;
    if (!json_is_string(arguments) || json_string_length(arguments) == 0) return ST_OK;
    snprintf(where, sizeof where, "messages[%zu].tool_calls[%zu].function.arguments", i, k);
    CHECK(json_parse(where, json_string_value(arguments), json_string_length(arguments), &value));
    new_function = json_copy((json_t *)function);
    new_call = json_copy((json_t *)call);
    if (!new_function || !new_call || json_object_set(new_function, "arguments", value) != 0 ||
        json_object_set(new_call, "function", new_function) != 0 ||
        json_array_set(calls, k, new_call) != 0)
        st = no_memory();
out:
    json_decref(value);
    json_decref(new_function);
    json_decref(new_call);
    return st;
}

// Messages with tool calls, in a copy of the list: *messages is replaced.
static enum status parse_tool_calls(json_t **messages)
{
    json_t *list = json_copy(*messages);
    enum status st = list ? ST_OK : no_memory();
    for (size_t i = 0; st == ST_OK && i < json_array_size(list); i++) {
        json_t *message = json_array_get(list, i);
        json_t *calls = json_copy(json_object_get(message, "tool_calls")), *copy = NULL;
        if (json_array_size(calls) > 0) {
            for (size_t k = 0; st == ST_OK && k < json_array_size(calls); k++)
                st = parse_arguments(calls, i, k);
            copy = json_copy(message);
            if (st == ST_OK && (!copy || json_object_set(copy, "tool_calls", calls) != 0 ||
                                json_array_set(list, i, copy) != 0))
                st = no_memory();
        }
        json_decref(calls);
        json_decref(copy);
    }
    if (st == ST_OK) {
        json_decref(*messages);
        *messages = list;
    } else {
        json_decref(list);
    }
    return st;
}

// ---- the whole ---------------------------------------------------------------------------------

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

enum status api_chat_render(const json_t *object, const struct api_model *model,
                            bool generation_prompt, struct bytes *ret)
{
    json_t *plain = NULL, *messages = NULL;
    const json_t *given = json_object_get(object, "messages");
    const json_t *tools = json_object_get(object, "tools");
    const char *where = "request: \"messages\"";
    enum status st;
    CHECK(check_messages(given));
    CHECK(api_messages_plain(given, chat_template_mentions(model->chat, "developer"), &plain));
    CHECK(chat_messages_join_parts(model->chat, plain, &messages));
    CHECK(parse_tool_calls(&messages));
    struct chat_input input = {
        .messages = messages,
        .tools = json_is_array(tools) && json_array_size(tools) == 0 ? NULL : tools,
        .kwargs = json_object_get(object, "chat_template_kwargs"),
        .add_generation_prompt = generation_prompt,
    };
    CHECK(chat_template_render(model->chat, &input, ret)); // which checks the fields' types
    where = "request";
    st = chat_template_check_used(model->chat, &input);
out:
    json_decref(plain);
    json_decref(messages);
    return status_context(st, "%s", where);
}

enum status api_chat_refuse_fields(const json_t *object)
{
    static const char *const fields[] = {"tools", "chat_template_kwargs"};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const json_t *value = json_object_get(object, fields[i]);
        bool empty = !value || json_is_null(value) ||
                     (json_is_array(value) && json_array_size(value) == 0) ||
                     (json_is_object(value) && json_object_size(value) == 0);
        if (!empty)
            return status_fail(
                ST_INVALID,
                "request: \"%s\" goes with messages and would do nothing here; leave "
                "it out, or put it beside them",
                fields[i]);
    }
    return ST_OK;
}
