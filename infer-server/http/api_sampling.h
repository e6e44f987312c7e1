/* api_sampling.h: the sampling fields of a request. Part of api_request.c's reading; private to the
 * parsers. */
#ifndef INFER_SERVER_API_SAMPLING_H
#define INFER_SERVER_API_SAMPLING_H

#include "infer-server/http/api.h"

#define UP_TO_CONTEXT (-1) // max_tokens, until the prompts are known

// The sampling fields of `object`; r->sampling holds the defaults.
enum status api_read_sampling(struct api_request *r, const json_t *object,
                              const struct api_model *model);

#endif
