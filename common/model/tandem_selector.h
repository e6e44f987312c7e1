/* tandem_selector.h: how it is chosen which of two models writes a token, as the trainer's options
 * and the server's requests name it. What each does: infer-server/engine/tandem.h. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_TANDEM_SELECTOR_H
#define COMMON_MODEL_TANDEM_SELECTOR_H

// What a draw is for: one token, a number of tokens, a sentence or a word. Alternating draws
// nothing: the policy's tokens are spread evenly.
enum tandem_selector {
    TANDEM_BERNOULLI,
    TANDEM_CHUNK,
    TANDEM_ALTERNATING,
    TANDEM_SENTENCE,
    TANDEM_WORD
};
static const char *const tandem_selector_names[] = {"bernoulli", "chunk", "alternating",
                                                    "sentence",  "word",  0};

#endif
