/* api_request.c: request bodies to struct api_request. Every field is checked here, where its name
 * is known; the engine only sees token ids and numbers that make sense. Which fields there are, and
 * what becomes of those that are not read here, is in request_fields.c. Any thread: it reads the
 * model's facts, which nobody changes, and writes its own request. */
#include "infer-server/http/api_impl.h"
#include "common/base/hash.h"
#include "common/base/json.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

static const char where[] = "request";

// 64 bits of a text's SHA-256, never 0.
static uint64_t hash64(const char *text)
{
    unsigned char digest[HASH_SHA256_BYTES];
    uint64_t x;
    hash_sha256(text, strlen(text), digest);
    memcpy(&x, digest, sizeof x);
    return x ? x : 1;
}

void api_request_free(struct api_request *r)
{
    if (!r) return;
    for (int i = 0; i < r->n_prompts; i++) {
        free(r->prompts[i].ids);
        free(r->prompts[i].text);
        json_decref(r->prompts[i].group_id);
    }
    free(r->prompts);
    stop_set_release(&r->stop);
    free(r->logit_bias);
    json_decref(r->tools);
    free(r);
}

bool api_names_frozen(const struct api_model *model, const char *name)
{
    return model->frozen && strcmp(name, API_FROZEN) == 0 && strcmp(name, model->name) != 0;
}

static bool names_policy(const struct api_model *model, const char *name)
{
    return !*name || strcmp(name, model->name) == 0 || strcmp(name, model->folder) == 0;
}

static enum status fail_model_name(const struct api_model *model, const char *name)
{
    return status_fail(ST_NOT_FOUND, "request: \"model\" is '%.200s'; this server has '%s'", name,
                       model->name);
}

enum status api_check_model_name(const json_t *object, const struct api_model *model)
{
    const char *name = NULL;
    struct adapter_ref ref;
    enum status st = json_get_string(where, object, "model", &name);
    if (st != ST_OK || !name) return st;
    if (names_policy(model, name) || api_names_frozen(model, name)) return ST_OK;
    if (model->engine && engine_find_adapter(model->engine, name, &ref)) return ST_OK;
    return fail_model_name(model, name);
}

static bool use_adapter(struct api_request *r, const struct api_model *model, const char *name)
{
    if (!model->engine || !engine_find_adapter(model->engine, name, &r->sampling.adapter))
        return false;
    snprintf(r->adapter, sizeof r->adapter, "%s", name);
    return true;
}

// "lora": an adapter's name; or "model", where that is one's, or the frozen model's. An adapter may
// have gone since api_check_model_name() was content.
static enum status read_adapter(struct api_request *r, const json_t *object,
                                const struct api_model *model)
{
    const char *name = NULL, *lora = NULL;
    enum status st;
    CHECK(json_get_string(where, object, "model", &name));
    CHECK(json_get_string(where, object, "lora", &lora));
    if (name && api_names_frozen(model, name)) {
        r->sampling.frozen = true;
        snprintf(r->adapter, sizeof r->adapter, API_FROZEN);
    } else if (name && !use_adapter(r, model, name) && !names_policy(model, name)) {
        return fail_model_name(model, name);
    }
    if (!lora && !name && r->kind == API_GENERATE && model->active_adapter[0])
        lora = model->active_adapter;
    if (lora && !use_adapter(r, model, lora))
        st = status_fail(ST_NOT_FOUND,
                         "request: \"lora\" is '%.200s', which is no adapter of this server; "
                         "/v1/models lists them",
                         lora);
out:
    return st;
}

static enum status read_stream(struct api_request *r, const json_t *object,
                               const struct api_model *model)
{
    enum status st;
    CHECK(json_get_bool(where, object, "stream", &r->stream));
    if (!json_has(object, "stream_options")) return ST_OK;
    const json_t *options = json_object_get(object, "stream_options");
    if (!json_is_object(options))
        return status_fail(ST_INVALID, "request: \"stream_options\" must be an object");
    if (!r->stream)
        return status_fail(ST_INVALID, "request: \"stream_options\" need \"stream\": true");
    CHECK(request_fields_check(options, PLACE_STREAM_OPTIONS, model->unknown));
    CHECK(json_get_bool(where, options, "include_usage", &r->include_usage));
    CHECK(json_get_bool(where, options, "continuous_usage_stats", &r->continuous_usage));
    r->continuous_usage = r->continuous_usage && r->include_usage; // as vLLM has it
out:
    return st;
}

// Fields that say how the response and the request's blocks are to be known.
static enum status read_identity(struct api_request *r, const json_t *object)
{
    const char *id = NULL, *salt = NULL;
    enum status st;
    CHECK(json_get_bool(where, object, "return_token_ids", &r->return_prompt_ids));
    CHECK(json_get_bool(where, object, "return_tokens_as_token_ids", &r->tokens_as_ids));
    CHECK(json_get_string(where, object, "request_id", &id));
    CHECK(json_get_string(where, object, "cache_salt", &salt));
    if (salt && !*salt)
        return status_fail(ST_INVALID, "request: \"cache_salt\" is empty: leave it out");
    if (salt) r->sampling.cache_salt = hash64(salt);
    if (!id) return ST_OK;
    const size_t n = strlen(id);
    if (n == 0 || n >= REQUEST_NAME_BYTES)
        return status_fail(ST_INVALID, "request: \"request_id\" must have 1 to %d bytes",
                           REQUEST_NAME_BYTES - 1);
    memcpy(r->name, id, n + 1);
out:
    return st;
}

// ---- the five kinds ----------------------------------------------------------------------------

static const struct kind {
    enum field_place place;
    const char *field;    // that the prompts come in, for errors
    const char *sampling; // the object that holds the sampling fields; NULL: the body itself
    int max_tokens;       // where neither the request nor (openai) the model says
    bool openai;          // with a name, and a default length that gives way to the context
    enum status (*read_prompts)(struct api_request *r, const json_t *object,
                                const struct api_model *model);
} kinds[] = {
    [API_COMPLETIONS] = {PLACE_COMPLETIONS, "prompt", NULL, 16, true, api_read_completion_prompts},
    [API_CHAT] = {PLACE_CHAT, "messages", NULL, UP_TO_CONTEXT, true, api_read_chat_prompt},
    [API_ROLLOUTS] = {PLACE_ROLLOUTS, "groups", "sampling", 256, false, api_read_groups},
    [API_GENERATE] = {PLACE_GENERATE, "prompt", NULL, 16, false, api_read_generate_prompts},
    [API_INFERENCE] = {PLACE_INFERENCE, "token_ids", "sampling_params", UP_TO_CONTEXT, true,
                       api_read_inference_prompt},
};

// "sampling" of rollouts may be left out.
static enum status find_sampling(const struct kind *kind, const json_t *object, const json_t **ret)
{
    if (!kind->sampling) return ST_OK;
    const json_t *sampling = json_object_get(object, kind->sampling);
    const bool absent = !sampling || json_is_null(sampling);
    if (!json_is_object(sampling) && !(absent && kind->place == PLACE_ROLLOUTS))
        return status_fail(ST_INVALID, "request: \"%s\" must be an object", kind->sampling);
    *ret = absent ? NULL : sampling;
    return ST_OK;
}

static enum status read_logprobs(struct api_request *r, const json_t *sampling)
{
    enum status st;
    const bool always = r->kind == API_ROLLOUTS;
    int n = always ? 0 : -1, top = 0;
    if (r->kind == API_CHAT) {
        CHECK(json_get_bool(where, sampling, "logprobs", &r->want_logprobs));
        CHECK(json_get_int32(where, sampling, "top_logprobs", 0, API_MAX_LOGPROBS, &top));
        if (top > 0 && !r->want_logprobs)
            return status_fail(ST_INVALID, "request: \"top_logprobs\" needs \"logprobs\": true");
        n = r->want_logprobs ? top : -1;
    } else {
        CHECK(json_get_int32(where, sampling, "logprobs", 0, always ? 0 : API_MAX_LOGPROBS, &n));
    }
    r->want_logprobs = n >= 0;
    r->sampling.logprobs = n;
    st = api_read_prompt_logprobs(r, sampling);
out:
    return st;
}

static enum status read_fields(struct api_request *r, const json_t *object,
                               const struct api_model *model)
{
    const struct kind *kind = &kinds[r->kind];
    const json_t *sampling = object;
    enum status st;
    CHECK(find_sampling(kind, object, &sampling));
    r->sampling.max_tokens = kind->max_tokens;
    if (kind->openai && model->max_new_tokens > 0) r->sampling.max_tokens = model->max_new_tokens;
    r->shorten = kind->openai && !json_has(sampling, "max_tokens") &&
                 !json_has(sampling, "max_completion_tokens");
    CHECK(request_fields_check(object, kind->place, model->unknown));
    if (kind->sampling) CHECK(request_fields_check(sampling, PLACE_SAMPLING, model->unknown));
    if (r->kind == API_ROLLOUTS)
        r->stream = true;
    else
        CHECK(read_stream(r, object, model));
    if (r->stream && r->kind == API_GENERATE)
        return status_fail(ST_UNSUPPORTED, "request: \"stream\" is not supported by /generate; use "
                                           "/v1/completions or /v1/rollouts");
    if (kind->openai) CHECK(read_identity(r, object));
    if (r->kind == API_INFERENCE) r->tokens_as_ids = true;
    CHECK(api_read_sampling(r, sampling, model));
    CHECK(read_logprobs(r, sampling));
    CHECK(kind->read_prompts(r, object, model));
out:
    return st;
}

static enum status check_lengths(struct api_request *r, const struct api_model *model)
{
    int longest = 0;
    int64_t samples = 0;
    for (int i = 0; i < r->n_prompts; i++) {
        if (r->prompts[i].n_ids > longest) longest = r->prompts[i].n_ids;
        samples += r->prompts[i].n;
    }
    if (samples > API_MAX_SAMPLES)
        return status_fail(
            ST_INVALID,
            "request: \"n\" over all prompts makes %lld samples; at most %d in one request",
            (long long)samples, API_MAX_SAMPLES);
    r->n_samples = (int)samples;
    // Without double quotes: beside an apostrophe Python's repr() escapes that, and clients that
    // look for "model's maximum context length" in an error's text (litellm) would not find it.
    if (longest + (r->sampling.max_tokens != 0) > model->max_context)
        return status_fail(ST_TOO_LONG,
                           "request: %s has %d tokens. This model's maximum context length is "
                           "%d tokens, prompt and completion together: shorten the prompt",
                           kinds[r->kind].field, longest, model->max_context);
    int room = model->max_context - longest;
    if (r->sampling.max_tokens == UP_TO_CONTEXT || (r->shorten && r->sampling.max_tokens > room))
        r->sampling.max_tokens = room;
    if (r->sampling.max_tokens > room)
        return status_fail(
            ST_TOO_LONG,
            "request: max_tokens is %d after a prompt of %d tokens. This model's maximum "
            "context length is %d tokens, prompt and completion together: ask for at most %d",
            r->sampling.max_tokens, longest, model->max_context, room);
    return api_check_prompt_logprobs(r);
}

enum status api_model_read_defaults(const char *file, const json_t *generation_config,
                                    struct api_model *ret)
{
    double temperature = 1, top_p = 1, min_p = 0;
    int top_k = 0, max_new_tokens = 0;
    bool sample = true;
    enum status st;
    CHECK(json_get_double(file, generation_config, "temperature", 0, 100, &temperature));
    CHECK(json_get_double(file, generation_config, "top_p", 0, 1, &top_p));
    CHECK(json_get_double(file, generation_config, "min_p", 0, 1, &min_p));
    CHECK(json_get_int32(file, generation_config, "top_k", -1, INT_MAX, &top_k));
    CHECK(
        json_get_int32(file, generation_config, "max_new_tokens", 1, INT_MAX / 4, &max_new_tokens));
    CHECK(json_get_bool(file, generation_config, "do_sample", &sample));
    ret->temperature = sample && temperature >= 1e-3 ? temperature : 0;
    ret->top_p = top_p > 0 ? top_p : 1;
    ret->min_p = min_p;
    ret->top_k = top_k;
    ret->max_new_tokens = max_new_tokens;
out:
    return st;
}

enum status api_request_parse(enum api_kind kind, const struct api_model *model, const char *body,
                              size_t len, struct api_request **ret)
{
    enum status st;
    json_t *object = NULL;
    struct api_request *r = calloc(1, sizeof *r);
    if (!r) return status_fail(ST_NO_MEMORY, "out of memory");
    bool openai = kind == API_COMPLETIONS || kind == API_CHAT;
    r->kind = kind;
    r->skip_special = true;
    r->sampling = (struct sampling){
        .n = 1,
        .temperature = openai ? (float)model->temperature : 1.0f,
        .top_p = openai ? (float)model->top_p : 1.0f,
        .min_p = openai ? (float)model->min_p : 0.0f,
        .top_k = openai ? model->top_k : 0,
        .logprobs = -1,
    };
    CHECK(json_parse(where, body, len, &object));
    if (!json_is_object(object)) FAIL(ST_INVALID, "request: the body must be a JSON object");
    CHECK(api_check_model_name(object, model));
    CHECK(read_adapter(r, object, model));
    CHECK(read_fields(r, object, model));
    CHECK(check_lengths(r, model));
    *ret = r;
    r = NULL;
out:
    json_decref(object);
    api_request_free(r);
    return st;
}
