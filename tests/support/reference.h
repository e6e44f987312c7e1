/* reference.h: a model folder run in the test's own process, in the plainest way: one sequence at a
 * time. What the daemon says is compared with this. Failures fail the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_REFERENCE_H
#define TESTS_SUPPORT_REFERENCE_H

#include "common/model/model.h"

struct reference {
    struct device *dev;
    struct model_config *config;
    struct weights *weights; // of the device's default type, in memory of this process
    struct model *model;
    struct batch *batch;
    int adapter; // of the model's table, that reference_logits() takes; -1, as opened: none
    enum quantization quantization;
};

void reference_open(const char *folder, const char *device, struct reference *ret);
void reference_open_as(const char *folder, const char *device, enum quantization q,
                       struct reference *ret);
void reference_close(struct reference *r);
struct reference *reference_of(const char *folder); // on the CPU; closed with the test
// The same on a device that is open (ret->dev; the rest zero), of a config.json that may be another
// than the folder's (NULL: that), for sequences of up to max_tokens. A failure leaves nothing.
enum status reference_build(const char *folder, json_t *config, int max_tokens,
                            struct reference *ret);
void reference_release(struct reference *r); // all but the device

// Logits of every row of ids: ret (n, vocab).
void reference_logits(struct reference *r, const int32_t *ids, int n, float *ret);

// Log-probabilities of ids[from] to ids[n - 1], each behind those before it: ret (n - from). from
// >= 1.
void reference_token_logprobs(struct reference *r, const int32_t *ids, int n, int from, float *ret);

// Greedy decoding over a paged cache whose blocks (of 4) are in scrambled order, the prompt in two
// chunks: the ids after the prompt, n_new of them, no stop token.
void reference_greedy(struct reference *r, const int32_t *prompt, int n_prompt, int n_new,
                      int32_t *ret);

// The greedy part of the above, by a runner with the weights of a model that is open, and its
// first adapter where it has any.
enum status greedy_decode(const struct model *like, const int32_t *prompt, int n_prompt, int n_new,
                          int32_t *ret);

// A test of each model folder of tests/golden, named like it and `suffix`, with its path in *state.
void reference_list_golden(void (*test)(void **state), const char *suffix);
// Skips the test where the tests' device is not exact, at all or with this model (NULL: at all).
void reference_skip_inexact(const char *model);

#endif
