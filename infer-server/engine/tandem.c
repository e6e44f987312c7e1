/* tandem.c: see tandem.h. No state. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/tandem.h"
#include "infer-server/engine/engine.h"
#include "infer-server/engine/request.h"
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

// Whether there is a new author for this token.
static bool starts_chunk(const struct tandem_choice *choice, int index, uint8_t ended)
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
    const struct sample_params author_params = {
        .seed = choice->shared ? sampler_stream(choice->seed, 0) : stream,
        .position = (uint64_t)index};
    uint32_t bits[4];
    if (!choice->on || !starts_chunk(choice, index, ended)) return;
    if (choice->selector == TANDEM_ALTERNATING) {
        author->frozen = ceil((index + 1) * choice->p) <= ceil(index * choice->p);
        return;
    }
    sampling_block(&author_params, 0, SAMPLING_AUTHOR, bits);
    author->frozen = rng_open01_f64(bits[0], bits[1]) >= choice->p;
}

// The author's. A prompt the other one computes first, so that siblings find it whole in the prefix
// cache.
enum runner_role sample_tandem_runner(const struct sample *s)
{
    const enum runner_role author = sample_author(s), other = runner_other(author);
    const bool first = s->text.n_generated == 0 && s->kv[other].computed < s->request->n_prompt - 1;
    return first ? other : author;
}

#define PASSED_OVER_MAX 16

// The sample that waits for this runner and has the fewest tokens, the oldest of these; or NULL.
static const struct sample *furthest_behind(struct sample *const *running, int n,
                                            enum runner_role runner)
{
    const struct sample *behind = NULL;
    for (int i = 0; i < n; i++) {
        const bool fewer = !behind || running[i]->text.n_generated < behind->text.n_generated;
        if (sample_runner(running[i]) == runner && fewer) behind = running[i];
    }
    return behind;
}

enum runner_role tandem_next_runner(struct sample *const *running, int n, enum runner_role last,
                                    int *passed_over)
{
    const struct sample *own = furthest_behind(running, n, last);
    const struct sample *others = furthest_behind(running, n, runner_other(last));
    const bool behind = others && (!own || others->text.n_generated < own->text.n_generated);
    *passed_over = others ? *passed_over + 1 : 0;
    if (!behind && *passed_over <= PASSED_OVER_MAX) return last;
    *passed_over = 0;
    return runner_other(last);
}

void sample_choose_author(struct sample *s, const uint8_t *token_ends, int n_token_ends)
{
    const int32_t last = s->text.generated[s->text.n_generated - 1];
    tandem_choose(&s->request->sampling.tandem, s->text.stream, s->text.n_generated,
                  last < n_token_ends ? token_ends[last] : 0, &s->author);
}

// ---- what cannot be asked for ------------------------------------------------------------------

static enum status check_frozen(const struct engine_options *o, const struct sampling *s)
{
    if (!o->frozen_folder)
        return status_fail(ST_INVALID, "the server was started without a frozen model: start it "
                                       "with --tandem-model DIR");
    if (s->adapter.index || s->tandem.on)
        return status_fail(ST_INVALID, "the frozen model samples alone: leave \"%s\" out",
                           s->tandem.on ? "tandem" : "lora");
    if (speculative_max(s->speculative) > 0)
        return status_fail(ST_INVALID, "nothing is drafted for the frozen model: leave "
                                       "\"speculative\" out");
    return ST_OK;
}

static enum status check_tandem(const struct engine_options *o, const struct sampling *s)
{
    const struct tandem_choice *t = &s->tandem;
    if (!o->frozen_folder)
        return status_fail(ST_INVALID,
                           "tandem: the server was started without a model that writes with the "
                           "policy; start it with --tandem-model DIR");
    if (!(t->p >= 0 && t->p <= 1))
        return status_fail(ST_INVALID, "tandem: p is %g; it must be 0 to 1", t->p);
    if (t->chunk < 1)
        return status_fail(ST_INVALID, "tandem: chunk is %d; it must be at least 1", t->chunk);
    if ((t->selector == TANDEM_SENTENCE || t->selector == TANDEM_WORD) && !o->token_ends)
        return status_fail(ST_INVALID,
                           "tandem: the selector %s goes by text, and %s has no tokenizer.json",
                           tandem_selector_names[t->selector], o->model_folder);
    if (s->prompt_logprobs)
        return status_fail(ST_INVALID, "tandem: prompt_logprobs are not given with it: ask for "
                                       "them in a request of their own");
    if (speculative_max(s->speculative) > 0)
        return status_fail(ST_INVALID, "tandem: nothing is drafted with it; leave \"speculative\" "
                                       "out");
    return ST_OK;
}

enum status tandem_check(const struct engine_options *o, const struct sampling *s)
{
    enum status st = s->tandem.on ? check_tandem(o, s) : ST_OK;
    return st == ST_OK && s->frozen ? check_frozen(o, s) : st;
}
