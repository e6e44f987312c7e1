/* suffix_memory.h: what followed which last tokens in completions of a prompt: counts of (last m
 * tokens, next token) for m up to SUFFIX_DEPTH, by prompt. Memory is bounded: the prompt that was
 * not used for longest is forgotten first. A hash stands for the tokens; two that meet make a poor
 * draft, never a wrong token. The engine's thread. */
#ifndef INFER_SERVER_SUFFIX_MEMORY_H
#define INFER_SERVER_SUFFIX_MEMORY_H

#include "common/base/status.h"
#include <stddef.h>
#include <stdint.h>

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
