/* api_impl.h: reading a request, as its files share it: request_fields.c, the table of all fields;
 * api_request.c, the whole; api_prompt.c, its prompts; api_chat.c, a chat's text. Any thread. A
 * failure's sentence names the field. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_API_IMPL_H
#define INFER_SERVER_API_IMPL_H

#include "infer-server/http/api.h"

// The objects that have fields: bodies by endpoint, and objects within them.
#define BODIES(X)                                                                                  \
    X(COMPLETIONS, "/v1/completions")                                                              \
    X(CHAT, "/v1/chat/completions")                                                                \
    X(GENERATE, "/generate")                                                                       \
    X(INFERENCE, "/inference/v1/generate")                                                         \
    X(ROLLOUTS, "/v1/rollouts")                                                                    \
    X(SAMPLING, "the sampling parameters") /* of /v1/rollouts and /inference/v1/generate */        \
    X(GROUP, "a group of /v1/rollouts")                                                            \
    X(STREAM_OPTIONS, "\"stream_options\"")                                                        \
    X(TOKENIZE, "/tokenize")                                                                       \
    X(DETOKENIZE, "/detokenize")                                                                   \
    X(PROMPT, "a \"prompt\" object") /* of /generate */                                            \
    X(TANDEM, "\"tandem\"")                                                                        \
    X(LORA, "/v1/load_lora_adapter") /* and /v1/unload_lora_adapter */                             \
    X(ADAPTER, "/lora/load")         /* and /lora/unload */                                        \
    X(RELOAD, "/reload")                                                                           \
    X(RESPONSES, "/v1/responses")                                                                  \
    X(MESSAGES, "/v1/messages") /* and /v1/messages/count_tokens */
#define X(symbol, name) NTH_##symbol,
enum { BODIES(X) };
#undef X
#define X(symbol, name) BODY_##symbol = 1 << NTH_##symbol,
enum body { BODIES(X) };
#undef X

// Reads an object's fields by the table: the body's into the request itself, those of an object
// within it into one of its own. What is absent or null stays as it is; object NULL: all are.
// ST_UNSUPPORTED: a value asks for what nothing here does. ST_INVALID: an unknown field, which
// `unknown` may let pass (NULL: it does not), or one of another type or range.
enum status request_read(const json_t *object, enum body body, struct unknown_fields *unknown,
                         struct api_request *ret);
// A new object of those fields that are read among the sampling parameters, too.
json_t *request_sampling_fields(const json_t *object);
// Row i of the table for tests and documentation; false past its end. ret_accepts is NULL for a
// field that is read, "*" for one that means nothing here, else a JSON array of the values taken.
bool request_fields_row(int i, const char **ret_name, unsigned *ret_bodies,
                        const char **ret_accepts);

// The given "model", which may be left out: ST_NOT_FOUND where it is another one's name.
enum status api_check_model_name(const struct api_request *r, const struct api_model *model);

// The prompts that are given, with their samples and seeds; r->sampling is read already.
enum status api_read_completion_prompts(struct api_request *r, const struct api_model *model);
enum status api_read_chat_prompt(struct api_request *r, const struct api_model *model);
enum status api_read_groups(struct api_request *r, const struct api_model *model);
enum status api_read_generate_prompts(struct api_request *r, const struct api_model *model);
enum status api_read_inference_prompt(struct api_request *r, const struct api_model *model);
// api_foreign.c: what is given becomes that of a chat, and its prompt is read.
enum status api_read_responses_prompt(struct api_request *r, const struct api_model *model);
enum status api_read_messages_prompt(struct api_request *r, const struct api_model *model);

// Those of an array of ids, which came in `field`; and of one of "prompt_token_ids", "messages" and
// "prompt", as a group of rollouts has it.
enum status api_read_ids(const json_t *array, const char *field, const struct api_model *model,
                         struct api_prompt *ret);
enum status api_read_group_prompt(const struct api_given *given, const struct api_model *model,
                                  struct api_prompt *ret);
// A text's ids, which came in `field`; and those of the given messages, by the model's chat
// template. ST_INVALID, ST_TOO_LONG, ST_UNSUPPORTED name the field.
enum status api_encode_text(const char *text, size_t len, bool add_special, const char *field,
                            const struct api_model *model, struct api_prompt *ret);
enum status api_read_messages(const struct api_given *given, const struct api_model *model,
                              struct api_prompt *ret);
// Whose calls the answer is searched for, and which of them it must hold: r's constraint, of which
// constraint.c makes what is sampled by. The prompt is there.
enum status api_set_tools(struct api_request *r, const struct api_model *model);
// ST_INVALID where what is given, without messages, has one of the other fields of a chat: they
// would do nothing.
enum status api_chat_refuse_fields(const struct api_given *given);
// A list (json_decref) of the same messages, in which role "developer" is "system" (its older name
// in OpenAI's API) unless it is known, and an empty "tool_calls" list is gone. What is no message
// is left as it is.
enum status api_messages_plain(const json_t *messages, bool knows_developer, json_t **ret);

// api_constraint.c: the request's constraint, out of the fields that ask for one.
enum status set_constraint(struct api_request *r, const struct api_model *model);

#endif
