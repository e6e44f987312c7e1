/* logprobs.h: log-probabilities of given tokens, and the likeliest ones, from rows of logits
 * on the device: of sampled tokens (sampler.c) and of a prompt's, by the one
 * kernel that the trainer's come from (ops.h, top_logprobs). The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_LOGPROBS_H
#define INFER_SERVER_LOGPROBS_H

#include "common/model/model.h"
#include "infer-server/engine/scheduler.h"
#include "kernels/ops.h"

// Buffers that bring them back, and grow with what is read: none until somebody asks.
struct logprob_reader { // but for dev all zero at first
    struct device *dev;
    int cap_rows, cap_entries;
    int32_t *targets, *host_targets;              // (cap_rows)
    struct token_logprob *entries, *host_entries; // (cap_entries)
};
void logprob_reader_release(struct logprob_reader *r);

struct logprob_rows {
    const float *logits;    // device, (n, vocab) f32
    const int32_t *targets; // host, (n)
    int n, vocab;
    int n_top;         // likeliest tokens wanted, at most vocab and TOP_LOGPROBS_MOST
    float temperature; // 0 (greedy) counts as 1
};
// Enqueues and waits. *ret (n, 1 + n_top): each row's target, then its likeliest tokens; valid
// until the next call.
enum status logprob_reader_read(struct logprob_reader *r, const struct logprob_rows *rows,
                                const struct token_logprob **ret);

// Those of tokens that were sampled, where their rows list the likeliest ones or have an
// adjustment: their logits are read once more behind the sampling.
struct sampled_logprobs {
    struct logprob_reader reader;
    int vocab;
    struct top_logprob *top; // (max_rows, SAMPLER_MAX_TOP)
};
enum status sampled_logprobs_init(struct sampled_logprobs *s, struct device *dev, int max_rows,
                                  int vocab);
void sampled_logprobs_release(struct sampled_logprobs *s); // a zeroed one is fine
// Enqueues reading the logits of such rows, as the model gave them, for the tokens that results
// (device) will hold.
enum status sampled_logprobs_launch(struct sampled_logprobs *s, const float *logits,
                                    const struct sampler_row *rows, int n,
                                    const struct sample_result *results);
// Of what was launched, and has been waited for: replaces the log-probabilities of such rows'
// results (host), and sets their ret_top, which lasts until the next call.
void sampled_logprobs_take(struct sampled_logprobs *s, const struct sampler_row *rows, int n,
                           struct sample_result *results, const struct top_logprob **ret_top);

// Those of a prompt's tokens, each given those before it. Prefill computes every
// row of a prompt anyway; where a request asks for them, the vocabulary's logits of those rows are
// computed too, in chunks of as many rows as the model has logits for, so that no prompt makes
// memory grow.
struct prompt_logprobs;
enum status prompt_logprobs_new(struct runner *runner, struct prompt_logprobs **ret);
void prompt_logprobs_free(struct prompt_logprobs *p);

// After a runner's forward pass of a step under weights of this version, whose item i ends before
// row item_end[i]: reads what rows of it the requests still want, and waits. Its model's logits are
// overwritten; they are of as many rows as those of the runner that this was made for. ST_DEVICE:
// nothing is valid.
enum status prompt_logprobs_read(struct prompt_logprobs *p, struct runner *runner,
                                 const struct engine_step *step, const int *item_end,
                                 uint64_t version);

#endif
