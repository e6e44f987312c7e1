/* api_logits.c: penalties, biases and prompt log-probabilities as vLLM and OpenAI name them. Loop's
 * thread. */
#include "infer-server/http/api_logits.h"
#include "common/base/json.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

static const char where[] = "request";

// An object from token id, in decimal digits, to bias.
static enum status read_bias(struct api_request *r, const json_t *object, int vocab)
{
    json_t *biases = json_object_get(object, "logit_bias"), *value;
    const char *key;
    if (!biases || json_is_null(biases)) return ST_OK;
    if (!json_is_object(biases) || json_object_size(biases) > API_MAX_BIASES)
        return status_fail(
            ST_INVALID,
            "request: \"logit_bias\" must be an object of at most %d biases by token "
            "id",
            API_MAX_BIASES);
    r->logit_bias = calloc(json_object_size(biases) + 1, sizeof *r->logit_bias);
    if (!r->logit_bias) return status_fail(ST_NO_MEMORY, "out of memory");
    json_object_foreach (biases, key, value) {
        char *end;
        errno = 0;
        const long id = strtol(key, &end, 10);
        if (end == key || *end || errno || id < 0 || id >= vocab)
            return status_fail(ST_INVALID,
                               "request: \"logit_bias\": '%.40s' is not a token id from 0 to %d",
                               key, vocab - 1);
        const double bias = json_number_value(value);
        if (!json_is_number(value) || !(fabs(bias) <= 100))
            return status_fail(ST_INVALID,
                               "request: \"logit_bias\" of token %ld must be a number from -100 to "
                               "100",
                               id);
        if (bias == 0) continue;
        r->logit_bias[r->sampling.n_logit_bias++] =
            (struct token_bias){.token = (int32_t)id, .bias = (float)bias};
    }
    r->sampling.logit_bias = r->logit_bias;
    return ST_OK;
}

enum status api_read_adjustments(struct api_request *r, const json_t *object,
                                 const struct api_model *model)
{
    struct sampling *s = &r->sampling;
    double frequency = 0, presence = 0, repetition = 1;
    enum status st = ST_OK;
    CHECK(json_get_double(where, object, "frequency_penalty", -2, 2, &frequency));
    CHECK(json_get_double(where, object, "presence_penalty", -2, 2, &presence));
    CHECK(json_get_double(where, object, "repetition_penalty", 0.01, 100, &repetition));
    CHECK(read_bias(r, object, model->vocab_size));
    s->frequency_penalty = (float)frequency;
    s->presence_penalty = (float)presence;
    s->repetition_penalty = (float)repetition;
out:
    return st;
}

enum status api_read_prompt_logprobs(struct api_request *r, const json_t *object)
{
    struct sampling *s = &r->sampling;
    int n = -1;
    const bool echoed = r->echo && r->want_logprobs;
    enum status st = json_get_int32(where, object, "prompt_logprobs", 0, API_MAX_PROMPT_TOP, &n);
    if (st != ST_OK) return st;
    if (n >= 0 && r->stream && r->kind != API_ROLLOUTS)
        return status_fail(ST_UNSUPPORTED,
                           "request: \"prompt_logprobs\" are not given in a stream; "
                           "leave \"stream\" out");
    r->want_prompt_logprobs = n >= 0;
    r->prompt_top = n > 0 ? n : 0;
    s->prompt_logprobs = n >= 0 || echoed;
    s->prompt_top = r->prompt_top;
    if (echoed && s->logprobs > s->prompt_top) s->prompt_top = s->logprobs;
    return ST_OK;
}

enum status api_check_prompt_logprobs(const struct api_request *r)
{
    int64_t n = 0;
    if (!r->sampling.prompt_logprobs) return ST_OK;
    for (int i = 0; i < r->n_prompts; i++) {
        const int copies = r->kind == API_COMPLETIONS ? r->prompts[i].n : 1; // in every choice
        n += (int64_t)r->prompts[i].n_ids * (1 + r->sampling.prompt_top) * copies;
    }
    if (n <= API_MAX_PROMPT_LOGPROBS) return ST_OK;
    return status_fail(
        ST_INVALID,
        "request: \"prompt_logprobs\" of all prompts makes %lld log-probabilities; at "
        "most %d in one request",
        (long long)n, API_MAX_PROMPT_LOGPROBS);
}
