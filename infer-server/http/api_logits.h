/* api_logits.h: the fields of a request that adjust logits, and those that ask for a prompt's
 * log-probabilities. Part of api_request.c's reading; private to the parsers. */
#ifndef INFER_SERVER_API_LOGITS_H
#define INFER_SERVER_API_LOGITS_H

#include "infer-server/http/api.h"

// presence_penalty, frequency_penalty, repetition_penalty, logit_bias into r->sampling.
enum status api_read_adjustments(struct api_request *r, const json_t *object,
                                 const struct api_model *model);
// prompt_logprobs. Behind logprobs and echo: an echo with log-probabilities needs the prompt's.
enum status api_read_prompt_logprobs(struct api_request *r, const json_t *object);
// What all prompts' log-probabilities take is bounded. Once the prompts are known.
enum status api_check_prompt_logprobs(const struct api_request *r);

#endif
