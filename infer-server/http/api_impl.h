/* api_impl.h: reading a request, as its files share it: api_request.c, the whole; api_prompt.c, its
 * prompts; api_chat.c, a chat's text; api_sampling.c, how it is sampled. Private to these; any
 * thread. A failure's sentence names the field. */
#ifndef INFER_SERVER_API_IMPL_H
#define INFER_SERVER_API_IMPL_H

#include "infer-server/http/api.h"

#define UP_TO_CONTEXT (-1) // max_tokens, until the prompts are known

// "model", which may be left out: ST_NOT_FOUND where it is another one's name.
enum status api_check_model_name(const json_t *object, const struct api_model *model);

// The sampling fields of `object`; r->sampling holds the defaults.
enum status api_read_sampling(struct api_request *r, const json_t *object,
                              const struct api_model *model);
// prompt_logprobs. Behind logprobs and echo: an echo with log-probabilities needs the prompt's.
enum status api_read_prompt_logprobs(struct api_request *r, const json_t *object);
// What all prompts' log-probabilities take is bounded. Once the prompts are known.
enum status api_check_prompt_logprobs(const struct api_request *r);

// The prompts of the body `object`, with their samples and seeds; r->sampling is read already.
enum status api_read_completion_prompts(struct api_request *r, const json_t *object,
                                        const struct api_model *model);
enum status api_read_chat_prompt(struct api_request *r, const json_t *object,
                                 const struct api_model *model);
enum status api_read_groups(struct api_request *r, const json_t *object,
                            const struct api_model *model);
enum status api_read_generate_prompts(struct api_request *r, const json_t *object,
                                      const struct api_model *model);
enum status api_read_inference_prompt(struct api_request *r, const json_t *object,
                                      const struct api_model *model);

// The text of `object`'s messages by the model's chat template. ST_INVALID, ST_UNSUPPORTED name the
// field.
enum status api_chat_render(const json_t *object, const struct api_model *model,
                            bool generation_prompt, struct bytes *ret);
// Whose calls the answer is searched for, and how many are given.
enum status api_read_tools(struct api_request *r, const json_t *object,
                           const struct api_model *model);
// ST_INVALID where `object`, which has no messages, has one of the other fields of a chat: they
// would do nothing.
enum status api_chat_refuse_fields(const json_t *object);
// A list (json_decref) of the same messages, in which role "developer" is "system" (its older name
// in OpenAI's API) unless it is known, and an empty "tool_calls" list is gone. What is no message
// is left as it is.
enum status api_messages_plain(const json_t *messages, bool knows_developer, json_t **ret);

#endif
