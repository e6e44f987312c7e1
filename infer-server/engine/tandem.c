/* tandem.c: see tandem.h. No state. */
#include "infer-server/engine/tandem.h"
#include "infer-server/engine/sampler.h"
#include "kernels/sampling.h"
#include <math.h>
#include <string.h>

static bool is_word(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           c == '\'' || (c & 0x80);
}

uint8_t token_ends_of(const char *text, size_t len)
{
    uint8_t ends = 0;
    size_t n = len;
    if (len > 0 && !(is_word(text[0]) && is_word(text[len - 1]))) ends |= TOKEN_ENDS_WORD;
    while (n > 0 && strchr(" \t\"')]}*", text[n - 1]) && text[n - 1]) n--;
    if (n > 0 && text[n - 1] && strchr(".!?\n", text[n - 1])) ends |= TOKEN_ENDS_SENTENCE;
    if (memchr(text, '\n', len)) ends |= TOKEN_ENDS_SENTENCE;
    return ends;
}

// Whether there is a new draw for this token.
static bool draws(const struct tandem_choice *choice, int index, uint8_t ended)
{
    switch ((enum tandem_selector)choice->selector) {
    case TANDEM_CHUNK:
        return index % choice->chunk == 0;
    case TANDEM_SENTENCE:
        return index == 0 || (ended & TOKEN_ENDS_SENTENCE);
    case TANDEM_WORD:
        return index == 0 || (ended & TOKEN_ENDS_WORD);
    case TANDEM_BERNOULLI:
    case TANDEM_ALTERNATING:
        break;
    }
    return true;
}

void tandem_choose(const struct tandem_choice *choice, uint64_t stream, int index, uint8_t ended,
                   struct tandem_author *author)
{
    const struct sample_params draw = {.seed = choice->shared ? sampler_stream(choice->seed, 0)
                                                              : stream,
                                       .position = (uint64_t)index};
    uint32_t bits[4];
    if (!choice->on || !draws(choice, index, ended)) return;
    if (choice->selector == TANDEM_ALTERNATING) {
        author->frozen = ceil((index + 1) * choice->p) <= ceil(index * choice->p);
        return;
    }
    sampling_block(&draw, 0, SAMPLING_AUTHOR, bits);
    author->frozen = rng_open01_f64(bits[0], bits[1]) >= choice->p;
}
