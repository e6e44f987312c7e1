/* prompt_logprobs.h: the log-probabilities of a prompt's tokens, each given those before it.
 * Prefill computes every row of a prompt anyway; where a request asks for them, the vocabulary's
 * logits of those rows are computed too, in chunks of as many rows as the model has logits for, so
 * that no prompt makes memory grow. The engine's thread. */
#ifndef INFER_SERVER_PROMPT_LOGPROBS_H
#define INFER_SERVER_PROMPT_LOGPROBS_H

#include "common/model/model.h"
#include "infer-server/engine/scheduler.h"

struct prompt_logprobs;
enum status prompt_logprobs_new(struct model *model, struct prompt_logprobs **ret);
void prompt_logprobs_free(struct prompt_logprobs *p);

// After the forward pass of a step under weights of this version, whose item i ends before row
// item_end[i]: reads what rows of it the requests still want, and waits. model->logits is
// overwritten. ST_DEVICE: nothing is valid.
enum status prompt_logprobs_read(struct prompt_logprobs *p, const struct step *step,
                                 const int *item_end, uint64_t version);

#endif
