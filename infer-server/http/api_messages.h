/* api_messages.h: chat messages as clients write them, in the words that chat templates know. Pure
 * functions; any thread. */
#ifndef INFER_SERVER_API_MESSAGES_H
#define INFER_SERVER_API_MESSAGES_H

#include "common/base/status.h"
#include <jansson.h>

// A list (json_decref) of the same messages, in which role "developer" is "system" (its older name
// in OpenAI's API), and an empty "tool_calls" list is gone. What is no message is left for the
// template to refuse.
enum status api_messages_plain(const json_t *messages, json_t **ret);

#endif
