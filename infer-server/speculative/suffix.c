/* suffix.c: drafts what followed the same last tokens in completions of the same prompt, by
 * siblings of the group or by earlier requests (suffix_memory.h); where nothing is known, as ngram.
 */
#include "infer-server/speculative/method.h"
#include "infer-server/speculative/suffix_memory.h"

#define MEMORY_BYTES ((size_t)64 << 20) // some thousand prompts of a GRPO epoch

static enum status new_memory(void **ret)
{
    struct suffix_memory *m;
    enum status st = suffix_memory_new(MEMORY_BYTES, &m);
    if (st == ST_OK) *ret = m;
    return st;
}

static void free_memory(void *memory)
{
    suffix_memory_free(memory);
}

// The last tokens before `end`, oldest first; how many.
static int tail_of(const struct history *h, int end, int32_t *ret)
{
    const int n = end < SUFFIX_DEPTH ? end : SUFFIX_DEPTH;
    for (int i = 0; i < n; i++) ret[i] = history_token(h, end - n + i);
    return n;
}

static void propose(void *memory, const struct history *h, int max, struct proposal *ret)
{
    int32_t tail[SUFFIX_DEPTH + SPECULATIVE_MOST];
    int n = tail_of(h, h->n_prompt + h->n_generated, tail);
    for (ret->n = 0; ret->n < max; ret->n++) {
        const int known = n < SUFFIX_DEPTH ? n : SUFFIX_DEPTH;
        const int matched =
            suffix_memory_next(memory, h->prompt_key, tail + n - known, known, &tail[n]);
        if (matched == 0) break;
        if (ret->n == 0) ret->matched = matched;
        ret->tokens[ret->n] = tail[n++];
    }
    if (ret->n == 0) method_ngram.propose(NULL, h, max, ret);
}

static void learn(void *memory, const struct history *h)
{
    int32_t tail[SUFFIX_DEPTH];
    const int before = h->n_prompt + h->n_generated - 1, n = tail_of(h, before, tail);
    suffix_memory_add(memory, h->prompt_key, tail, n, history_token(h, before));
}

const struct draft_method method_suffix = {.name = "suffix",
                                           .k = 8,
                                           .guess = 0.5,
                                           .new_memory = new_memory,
                                           .free_memory = free_memory,
                                           .learn = learn,
                                           .propose = propose};
