/* api_messages.h: chat messages as clients write them, in the words that chat templates know. Pure
 * functions; any thread. */
#ifndef INFER_SERVER_API_MESSAGES_H
#define INFER_SERVER_API_MESSAGES_H

#include "common/base/status.h"
#include <jansson.h>

// A list (json_decref) of the same messages, in which role "developer" is "system" (its older name
// in OpenAI's API) unless it is known, and an empty "tool_calls" list is gone. What is no message
// is left as it is.
enum status api_messages_plain(const json_t *messages, bool knows_developer, json_t **ret);

#endif
