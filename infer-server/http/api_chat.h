/* api_chat.h: the fields of a request that make a chat's prompt: messages, tools,
 * chat_template_kwargs. Loop's thread. */
#ifndef INFER_SERVER_API_CHAT_H
#define INFER_SERVER_API_CHAT_H

#include "infer-server/http/api.h"

// The text of `object`'s messages by the model's chat template. ST_INVALID, ST_UNSUPPORTED name the
// field.
enum status api_chat_render(const json_t *object, const struct api_model *model,
                            bool generation_prompt, struct bytes *ret);

// ST_INVALID where `object`, which has no messages, has one of the other fields: they would do
// nothing.
enum status api_chat_refuse_fields(const json_t *object);

#endif
