/* sample_request.c: requests of samples, as they are read and filled. */
#include "trainer/serve/sample_request.h"
#include "common/base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_SAMPLES 1024 // of one request
#define MOST_TOP     128

void sample_request_clear(struct sample_request *r)
{
    for (int i = 0; r->samples && i < r->n; i++) {
        free(r->samples[i].tokens);
        free(r->samples[i].logprobs);
        r->samples[i] = (struct sampled){0};
    }
    free(r->logprobs);
    free(r->top_ids);
    free(r->top_logprobs);
    r->logprobs = r->top_logprobs = NULL;
    r->top_ids = NULL;
    r->oldest = r->newest = 0;
    r->n_done = 0;
}

void sample_request_release(struct sample_request *r)
{
    sample_request_clear(r);
    free(r->samples);
    free(r->prompt);
    json_decref(r->sampling);
}

// ---- as it is asked for -------------------------------------------------------------------------

// Chunks of token ids, which are put behind one another.
static enum status read_prompt(const json_t *body, int vocab, struct sample_request *r)
{
    const json_t *chunks = json_object_get(json_object_get(body, "prompt"), "chunks"), *chunk, *id;
    size_t i, k, n = 0;
    json_array_foreach (chunks, i, chunk) {
        const char *type = json_string_value(json_object_get(chunk, "type"));
        if (!json_is_array(json_object_get(chunk, "tokens")))
            return status_fail(ST_UNSUPPORTED,
                               "\"prompt\": chunk %zu is of type \"%.40s\"; there is "
                               "\"encoded_text\" alone",
                               i, type ? type : "");
        n += json_array_size(json_object_get(chunk, "tokens"));
    }
    if (n == 0 || n > INT32_MAX) return status_fail(ST_INVALID, "\"prompt\" holds no tokens");
    r->prompt = malloc(n * sizeof *r->prompt);
    if (!r->prompt) return status_fail(ST_NO_MEMORY, "out of memory");
    json_array_foreach (chunks, i, chunk)
        json_array_foreach (json_object_get(chunk, "tokens"), k, id) {
            const json_int_t token = json_integer_value(id);
            if (!json_is_integer(id) || token < 0 || token >= vocab)
                return status_fail(ST_INVALID,
                                   "\"prompt\": chunk %zu, token %zu is no token id from 0 to %d",
                                   i, k, vocab - 1);
            r->prompt[r->n_prompt++] = (int32_t)token;
        }
    return ST_OK;
}

// null: the model's own end of a sequence stops; else what is listed, alone.
static enum status put_stop(const json_t *params, json_t *sampling)
{
    json_t *stop = json_object_get(params, "stop");
    if (!stop || json_is_null(stop)) return ST_OK;
    const bool ids = json_is_integer(json_array_get(stop, 0));
    if (!json_is_string(stop) && !json_is_array(stop))
        return status_fail(ST_INVALID, "\"stop\" must be a string, or a list of strings or ids");
    json_object_set_new(sampling, "ignore_eos", json_true());
    if (json_is_string(stop) || json_array_size(stop) > 0)
        json_object_set(sampling, ids ? "stop_token_ids" : "stop", stop);
    return ST_OK;
}

static enum status read_sampling(const json_t *body, int max_context, struct sample_request *r)
{
    const json_t *params = json_object_get(body, "sampling_params");
    const int room = max_context - r->n_prompt;
    int64_t max_tokens = room > 1 ? room : 1;
    double temperature = 1, top_p = 1;
    int top_k = -1;
    enum status st;
    if (params && !json_is_object(params))
        FAIL(ST_INVALID, "request: \"sampling_params\" must be an object");
    CHECK(json_get_int("sampling_params", params, "max_tokens", 1, INT32_MAX, &max_tokens));
    CHECK(json_get_double("sampling_params", params, "temperature", 0, 100, &temperature));
    CHECK(json_get_double("sampling_params", params, "top_p", 0, 1, &top_p));
    CHECK(json_get_int32("sampling_params", params, "top_k", -1, INT32_MAX, &top_k));
    CHECK(json_get_int("sampling_params", params, "seed", INT64_MIN, INT64_MAX, &r->seed));
    r->has_seed = json_has(params, "seed");
    r->sampling = json_pack("{s:I, s:f, s:f, s:i}", "max_tokens", (json_int_t)max_tokens,
                            "temperature", temperature, "top_p", top_p, "top_k", top_k);
    if (!r->sampling) FAIL(ST_NO_MEMORY, "out of memory");
    CHECK(put_stop(params, r->sampling));
    CHECK(json_get_bool("request", body, "prompt_logprobs", &r->prompt_logprobs));
    CHECK(json_get_int32("request", body, "topk_prompt_logprobs", 0, MOST_TOP, &r->top));
    r->prompt_logprobs |= r->top > 0;
    if (r->prompt_logprobs)
        json_object_set_new(r->sampling, "prompt_logprobs", json_integer(r->top));
out:
    return st;
}

// What is there of the API and not here.
static enum status check_wishes(const json_t *body)
{
    static const char *const counts[] = {"topk_sample_logprobs", "prompt_alt_tokens_k"};
    bool stable = false;
    enum status st;
    CHECK(json_get_bool("request", body, "record_stability_info", &stable));
    if (stable)
        FAIL(ST_UNSUPPORTED, "\"record_stability_info\" is of the loss stable_reinforce, whose "
                             "formula is not published: take loss_fn=importance_sampling");
    for (int i = 0; i < 2; i++) {
        int64_t n = 0;
        CHECK(json_get_int("request", body, counts[i], 0, INT64_MAX, &n));
        if (n > 0) FAIL(ST_UNSUPPORTED, "\"%s\" is not there", counts[i]);
    }
    if (json_has(body, "target_prompt_logprobs"))
        FAIL(ST_UNSUPPORTED,
             "\"target_prompt_logprobs\" is not there; \"topk_prompt_logprobs\" is, "
             "and forward with target_tokens (N, K)");
out:
    return st;
}

enum status sample_request_parse(const json_t *body, const struct sample_limits *limits,
                                 struct sample_request *ret)
{
    struct sample_request *r = ret;
    enum status st;
    r->n = 1;
    CHECK(check_wishes(body));
    CHECK(json_get_int32("request", body, "num_samples", 1, MOST_SAMPLES, &r->n));
    CHECK(read_prompt(body, limits->vocab, r));
    CHECK(read_sampling(body, limits->max_context, r));
    CHECK(json_get_int32("request", body, "prompt_logprobs_last_n", 1,
                         r->n_prompt > 1 ? r->n_prompt - 1 : 1, &r->last_n));
    r->samples = calloc((size_t)r->n, sizeof *r->samples);
    if (!r->samples) st = status_fail(ST_NO_MEMORY, "out of memory");
out:
    return st;
}

// ---- what comes back ----------------------------------------------------------------------------

static enum status take_floats(const json_t *line, const char *key, int n, float **ret)
{
    const json_t *list = json_object_get(line, key);
    float *values = malloc((size_t)(n + 1) * sizeof *values);
    if (!values) return status_fail(ST_NO_MEMORY, "out of memory");
    for (int i = 0; i < n; i++) {
        const json_t *one = json_array_get(list, (size_t)i);
        values[i] = json_is_number(one) ? (float)json_number_value(one) : NAN;
    }
    free(*ret);
    *ret = values;
    return ST_OK;
}

static enum status take_tokens(const json_t *ids, struct sampled *to)
{
    to->n = (int)json_array_size(ids);
    to->tokens = malloc((size_t)(to->n + 1) * sizeof *to->tokens);
    if (!to->tokens) return status_fail(ST_NO_MEMORY, "out of memory");
    for (int i = 0; i < to->n; i++)
        to->tokens[i] = (int32_t)json_integer_value(json_array_get(ids, (size_t)i));
    return ST_OK;
}

static void take_versions(const json_t *line, const char *key, struct sample_request *r)
{
    const json_t *one;
    size_t i;
    json_array_foreach (json_object_get(line, key), i, one) {
        const uint64_t version = (uint64_t)json_integer_value(one);
        if (!json_is_integer(one)) continue; // null: the first of a prompt
        if (r->oldest == 0 || version < r->oldest) r->oldest = version;
        if (version > r->newest) r->newest = version;
    }
}

// The likeliest tokens of each place of the prompt: [null, [[id, logprob], ...], ...].
static enum status take_top(const json_t *line, struct sample_request *r)
{
    const size_t n = (size_t)r->n_prompt * (size_t)r->top;
    const json_t *places = json_object_get(line, "prompt_top_logprobs");
    if (r->top == 0 || r->top_ids) return ST_OK;
    r->top_ids = calloc(n, sizeof *r->top_ids);
    r->top_logprobs = malloc(n * sizeof *r->top_logprobs);
    if (!r->top_ids || !r->top_logprobs) return status_fail(ST_NO_MEMORY, "out of memory");
    for (size_t i = 0; i < n; i++) {
        const json_t *one =
            json_array_get(json_array_get(places, i / (size_t)r->top), i % (size_t)r->top);
        r->top_logprobs[i] = SAMPLE_NO_LOGPROB;
        if (!one) continue;
        r->top_ids[i] = (int32_t)json_integer_value(json_array_get(one, 0));
        r->top_logprobs[i] = (float)json_number_value(json_array_get(one, 1));
    }
    return ST_OK;
}

enum status sample_request_take(struct sample_request *r, int i, const json_t *line)
{
    struct sampled *to = &r->samples[i];
    const char *finish = json_string_value(json_object_get(line, "finish_reason"));
    enum status st;
    CHECK(take_tokens(json_object_get(line, "token_ids"), to));
    CHECK(take_floats(line, "logprobs", to->n, &to->logprobs));
    to->stopped = finish && strcmp(finish, "stop") == 0;
    take_versions(line, "weight_versions", r);
    r->cached_tokens = (int)json_integer_value(
        json_object_get(json_object_get(line, "telemetry"), "cached_prompt_tokens"));
    if (!r->prompt_logprobs || r->logprobs) return ST_OK;
    CHECK(take_floats(line, "prompt_logprobs", r->n_prompt, &r->logprobs));
    take_versions(line, "prompt_weight_versions", r);
    st = take_top(line, r);
out:
    return st;
}
