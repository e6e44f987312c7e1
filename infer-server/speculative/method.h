/* method.h: what a method of drafting is, and the list of them. A method proposes the tokens that
 * may follow a sample's, and may remember what was sampled; how many of its drafts are verified,
 * and whether it is asked at all, is decided for it (speculative.c).
 *
 * A new one is a file beside ngram.c that fills a struct draft_method, and a line in DRAFT_METHODS.
 *
 * The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_METHOD_H
#define INFER_SERVER_METHOD_H

#include "common/base/status.h"
#include <stdint.h>
#include <stddef.h>

#define SPECULATIVE_MAX 16              // drafts of one sample in one step
#define DRAFT_RIDES     SPECULATIVE_MAX // tokens that it lags behind with which it still decodes

// A sample's tokens.
struct history {
    const int32_t *prompt, *generated;
    int n_prompt, n_generated;
    uint64_t prompt_key; // speculative_prompt_key(prompt)
};

static inline int32_t history_token(const struct history *h, int i)
{
    return i < h->n_prompt ? h->prompt[i] : h->generated[i - h->n_prompt];
}

// The name of the enum's entry, and of the struct draft_method.
#define DRAFT_METHODS(X)                                                                           \
    X(SPECULATIVE_NGRAM, method_ngram)                                                             \
    X(SPECULATIVE_SUFFIX, method_suffix)                                                           \
    X(SPECULATIVE_DRAFT_MODEL, method_draft_model)                                                 \
    X(SPECULATIVE_MTP, method_mtp)

enum speculative_method {
#define X(entry, method) entry,
    DRAFT_METHODS(X)
#undef X
        SPECULATIVE_METHODS
};
struct draft {                      // a sample's in one step
    enum speculative_method method; // that proposed them
    int32_t tokens[SPECULATIVE_MAX];
    int32_t rows[SPECULATIVE_MAX]; // draft_model: of its logits; the distributions of the tokens
    int n;                         // proposed; of a draft model: may be drafted, tokens to come
    int n_verify;                  // of these, wanted in the next step
    int matched;                   // tokens of the context that the first stands on
    int hidden_row;                // mtp: of the last pass, behind which the last token was sampled
    int lag; // draft_model: tokens of the context not computed there, the last not counted
};

struct draft_method {
    const char *name; // in --speculative and in requests
    int k;            // most drafts of a step, where no K is given
    double guess;     // acceptance rate of a draft before any was verified; with --draft-length
                      // fixed for ever: of several methods the larger expected sum drafts, of equal
                      // ones the earlier in the list
    // What it remembers while the engine lives, of all samples; all three NULL: nothing.
    enum status (*new_memory)(void **ret);
    void (*free_memory)(void *memory);
    // The last token was just sampled, by a sample that uses the method, while it does not rest: a
    // memory may not count on every token.
    void (*learn)(void *memory, const struct history *h);
    // Fills in tokens, 0 to max that may follow, with n and matched. Deterministic: it names
    // tokens, without probabilities. NULL: a model of the engine samples them instead.
    void (*propose)(void *memory, const struct history *h, int max, struct draft *ret);
};

#define X(entry, method) extern const struct draft_method method;
DRAFT_METHODS(X)
#undef X

extern const struct draft_method *const draft_methods[SPECULATIVE_METHODS];

// ---- suffix memory ------------------------------------------------------------------------------
// What followed which last tokens in completions of a prompt: counts of (last m tokens, next token)
// for m up to SUFFIX_DEPTH, by prompt. Memory is bounded: the prompt that was not used for longest
// is forgotten first. A hash stands for the tokens; two that meet make a poor draft, never a wrong
// token. The engine's thread.

#define SUFFIX_DEPTH 8

struct suffix_memory;
enum status suffix_memory_new(size_t max_bytes, struct suffix_memory **ret);
void suffix_memory_free(struct suffix_memory *m);

// `next` came after tail (n <= SUFFIX_DEPTH tokens, oldest first) in a completion of this prompt.
// Forgets silently where host memory is short.
void suffix_memory_add(struct suffix_memory *m, uint64_t prompt_key, const int32_t *tail, int n,
                       int32_t next);
// The most frequent token after the longest known part of tail (of equal ones the latest), and how
// long that part is; 0 where none of it is known.
int suffix_memory_next(struct suffix_memory *m, uint64_t prompt_key, const int32_t *tail, int n,
                       int32_t *ret_next);
size_t suffix_memory_bytes(const struct suffix_memory *m);
int suffix_memory_prompts(const struct suffix_memory *m);

#endif
