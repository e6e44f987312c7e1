/* api_sampling.c: how a request is sampled, and when it ends, as OpenAI and vLLM name it. Any
 * thread. */
#include "infer-server/http/api_sampling.h"
#include "common/base/json.h"
#include "infer-server/http/api_logits.h"

#include <limits.h>
#include <sys/random.h>

static const char where[] = "request";

uint64_t api_random_seed(void)
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

static enum status read_echo(struct api_request *r, const json_t *object)
{
    enum status st = json_get_bool(where, object, "echo", &r->echo);
    if (st == ST_OK && r->echo && r->kind != API_COMPLETIONS)
        st = status_fail(ST_UNSUPPORTED, "request: \"echo\" is for /v1/completions only; "
                                         "\"prompt_logprobs\" gives a prompt's log-probabilities");
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
    CHECK(api_read_adjustments(r, object, model));
    CHECK(read_echo(r, object));
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
    s->seed = json_has(object, "seed") ? (uint64_t)seed : api_random_seed();
    r->filtered = s->temperature > 0 && (s->top_k > 0 || s->top_p < 1 || s->min_p > 0);
    r->filtered |= sampling_adjusts(s);
    if (s->min_tokens > s->max_tokens && s->max_tokens != UP_TO_CONTEXT)
        return status_fail(ST_INVALID, "request: \"min_tokens\" is %d, above max_tokens, %d",
                           s->min_tokens, s->max_tokens);
    if (r->stop.n > 0 && !model->tokenizer)
        return status_fail(ST_INVALID,
                           "request: \"stop\" needs text, but %s has no tokenizer.json; use "
                           "stop_token_ids",
                           model->folder);
out:
    return st;
}
