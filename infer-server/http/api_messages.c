/* api_messages.c: see api_messages.h. Messages that need no change are not copied. */
#include "infer-server/http/api_messages.h"

#include <string.h>

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
        return status_fail(ST_NO_MEMORY, "out of memory");
    }
    *ret = list;
    return ST_OK;
}
