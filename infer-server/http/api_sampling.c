/* api_sampling.c: how a request is sampled, when it ends, and which log-probabilities of its prompt
 * it wants, as OpenAI and vLLM name it. Any thread. */
#include "infer-server/http/api_impl.h"
#include "common/base/json.h"
#include "common/base/names.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <sys/random.h>

static const char where[] = "request";

// A seed nobody asked for.
static uint64_t random_seed(void)
{
    uint64_t seed = 0;
    if (getrandom(&seed, sizeof seed, 0) != sizeof seed) seed = (uint64_t)(uintptr_t)&seed;
    return seed;
}

static enum status read_stop(const json_t *object, struct stop_set *ret)
{
    const json_t *stop = json_object_get(object, "stop"), *one;
    size_t i;
    if (!stop || json_is_null(stop)) return ST_OK;
    if (json_is_string(stop))
        return stop_set_add(ret, json_string_value(stop), json_string_length(stop));
    if (!json_is_array(stop))
        return status_fail(ST_INVALID, "request: \"stop\" must be a string or an array of strings");
    json_array_foreach (stop, i, one) {
        if (!json_is_string(one))
            return status_fail(ST_INVALID, "request: \"stop\": entry %zu is not a string", i);
        enum status st = stop_set_add(ret, json_string_value(one), json_string_length(one));
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

static enum status read_stop_ids(const json_t *object, const struct api_model *model,
                                 struct sampling *s)
{
    const json_t *ids = json_object_get(object, "stop_token_ids"), *one;
    const int max = (int)(sizeof s->stop_ids / sizeof *s->stop_ids);
    size_t i;
    if (!ids || json_is_null(ids)) return ST_OK;
    if (!json_is_array(ids) || json_array_size(ids) > (size_t)max)
        return status_fail(ST_INVALID,
                           "request: \"stop_token_ids\" must be an array of at most %d token ids",
                           max);
    json_array_foreach (ids, i, one) {
        json_int_t id = json_integer_value(one);
        if (!json_is_integer(one) || id < 0 || id >= model->vocab_size)
            return status_fail(
                ST_INVALID, "request: \"stop_token_ids\": entry %zu is not a token id from 0 to %d",
                i, model->vocab_size - 1);
        s->stop_ids[s->n_stop_ids++] = (int32_t)id;
    }
    return ST_OK;
}

static enum status read_speculative(const json_t *object, struct speculative_choice *ret)
{
    const char *text = NULL;
    enum status st = json_get_string(where, object, "speculative", &text);
    if (st != ST_OK || !text) return st;
    st = speculative_parse(text, ret);
    return st == ST_OK ? st : status_context(st, "request: \"speculative\"");
}

// The frozen model's part in what is sampled.
static enum status read_tandem(const struct api_request *r, const json_t *object,
                               const struct api_model *model, struct tandem_choice *ret)
{
    static const char within[] = "request: \"tandem\"";
    const json_t *tandem = json_object_get(object, "tandem");
    struct tandem_choice t = {.on = true, .p = 0.5, .chunk = TANDEM_CHUNK_TOKENS};
    const char *selector = NULL;
    int64_t seed = 0;
    enum status st = ST_OK;
    if (!tandem || json_is_null(tandem)) return ST_OK;
    if (r->kind != API_ROLLOUTS)
        return status_fail(ST_UNSUPPORTED, "request: \"tandem\" is for /v1/rollouts only");
    if (!json_is_object(tandem))
        return status_fail(ST_INVALID, "request: \"tandem\" must be an object");
    CHECK(request_fields_check(tandem, PLACE_TANDEM, model->unknown));
    CHECK(json_get_string(within, tandem, "selector", &selector));
    CHECK(json_get_double(within, tandem, "p", 0, 1, &t.p));
    CHECK(json_get_int32(within, tandem, "chunk", 1, INT_MAX / 4, &t.chunk));
    CHECK(json_get_int(within, tandem, "seed", INT64_MIN, INT64_MAX, &seed));
    if (selector)
        CHECK(status_context(name_parse(tandem_selector_names, selector, &t.selector),
                             "%s: \"selector\"", within));
    t.shared = json_has(tandem, "seed");
    t.seed = (uint64_t)seed;
    *ret = t;
out:
    return st;
}

static enum status read_echo(struct api_request *r, const json_t *object)
{
    enum status st = json_get_bool(where, object, "echo", &r->echo);
    if (st == ST_OK && r->echo && r->kind != API_COMPLETIONS)
        st = status_fail(ST_UNSUPPORTED, "request: \"echo\" is for /v1/completions only; "
                                         "\"prompt_logprobs\" gives a prompt's log-probabilities");
    return st;
}

static enum status read_text_offset(struct api_request *r, const json_t *object)
{
    enum status st = json_get_bool(where, object, "text_offset", &r->want_text_offset);
    if (st == ST_OK && r->want_text_offset && r->kind != API_ROLLOUTS)
        st = status_fail(ST_UNSUPPORTED, "request: \"text_offset\" is for /v1/rollouts only");
    return st;
}

// An object from token id, in decimal digits, to bias.
static enum status read_bias(struct api_request *r, const json_t *object, int vocab)
{
    json_t *biases = json_object_get(object, "logit_bias"), *value;
    const char *key;
    if (!biases || json_is_null(biases)) return ST_OK;
    if (!json_is_object(biases) || json_object_size(biases) > API_MAX_BIASES)
        return status_fail(
            ST_INVALID,
            "request: \"logit_bias\" must be an object of at most %d biases by token id",
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
            return status_fail(
                ST_INVALID,
                "request: \"logit_bias\" of token %ld must be a number from -100 to 100", id);
        if (bias == 0) continue;
        r->logit_bias[r->sampling.n_logit_bias++] =
            (struct token_bias){.token = (int32_t)id, .bias = (float)bias};
    }
    r->sampling.logit_bias = r->logit_bias;
    return ST_OK;
}

static enum status read_adjustments(struct api_request *r, const json_t *object,
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

enum status api_read_sampling(struct api_request *r, const json_t *object,
                              const struct api_model *model)
{
    enum status st;
    struct sampling *s = &r->sampling;
    double temperature = s->temperature, top_p = s->top_p, min_p = s->min_p;
    int64_t seed = 0;
    CHECK(json_get_int32(where, object, "n", 1, API_MAX_N, &s->n));
    CHECK(json_get_int32(where, object, "max_tokens", 0, INT_MAX / 4, &s->max_tokens));
    CHECK(json_get_int32(where, object, "max_completion_tokens", 0, INT_MAX / 4, &s->max_tokens));
    CHECK(json_get_int32(where, object, "min_tokens", 0, INT_MAX / 4, &s->min_tokens));
    CHECK(json_get_double(where, object, "temperature", 0, 100, &temperature));
    CHECK(json_get_double(where, object, "top_p", 0, 1, &top_p));
    CHECK(json_get_double(where, object, "min_p", 0, 1, &min_p));
    CHECK(json_get_int32(where, object, "top_k", -1, INT_MAX, &s->top_k));
    CHECK(json_get_bool(where, object, "ignore_eos", &s->ignore_eos));
    CHECK(json_get_bool(where, object, "skip_special_tokens", &r->skip_special));
    CHECK(json_get_bool(where, object, "include_stop_str_in_output", &r->include_stop));
    CHECK(json_get_int(where, object, "seed", INT64_MIN, INT64_MAX, &seed));
    CHECK(read_stop(object, &r->stop));
    CHECK(read_stop_ids(object, model, s));
    CHECK(read_speculative(object, &s->speculative));
    CHECK(read_tandem(r, object, model, &s->tandem));
    CHECK(read_adjustments(r, object, model));
    CHECK(read_echo(r, object));
    CHECK(read_text_offset(r, object));
    if (!(top_p > 0))
        return status_fail(ST_INVALID, "request: \"top_p\" is 0; it must be above 0 (1 is off)");
    if (temperature > 0 && temperature < 1e-3)
        return status_fail(ST_INVALID,
                           "request: \"temperature\" is %g; use 0 for greedy, or at least 0.001",
                           temperature);
    if (s->top_k < 0 || s->top_k >= model->vocab_size) s->top_k = 0;
    s->temperature = (float)temperature;
    s->top_p = (float)top_p;
    s->min_p = (float)min_p;
    s->seed = json_has(object, "seed") ? (uint64_t)seed : random_seed();
    r->filtered = s->temperature > 0 && (s->top_k > 0 || s->top_p < 1 || s->min_p > 0);
    r->filtered |= sampling_adjusts(s);
    if (s->min_tokens > s->max_tokens && s->max_tokens != UP_TO_CONTEXT)
        return status_fail(ST_INVALID, "request: \"min_tokens\" is %d, above max_tokens, %d",
                           s->min_tokens, s->max_tokens);
    if (r->stop.n > 0 && !model->tokenizer)
        return status_fail(
            ST_INVALID,
            "request: \"stop\" needs text, but %s has no tokenizer.json; use stop_token_ids",
            model->folder);
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
        return status_fail(
            ST_UNSUPPORTED,
            "request: \"prompt_logprobs\" are not given in a stream; leave \"stream\" out");
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
    return status_fail(ST_INVALID,
                       "request: \"prompt_logprobs\" of all prompts makes %lld log-probabilities; "
                       "at most %d in one request",
                       (long long)n, API_MAX_PROMPT_LOGPROBS);
}
