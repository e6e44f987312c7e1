/* api_prompt.h: the fields of a request that hold its prompts. Part of api_request.c's reading;
 * private to the parsers. A failure's sentence names the field. */
#ifndef INFER_SERVER_API_PROMPT_H
#define INFER_SERVER_API_PROMPT_H

#include "infer-server/http/api.h"

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

// "model", which may be left out: ST_NOT_FOUND where it is another one's name.
enum status api_check_model_name(const json_t *object, const struct api_model *model);

#endif
