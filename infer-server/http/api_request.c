/* api_request.c: request bodies to struct api_request. Every field is checked here, where its name
 * is known; the engine only sees token ids and numbers that make sense. Which fields there are, and
 * what becomes of those that are not read here, is in request_fields.c. Any thread: it reads the
 * model's facts, which nobody changes, and writes its own request. */
#include "infer-server/http/api.h"
#include "infer-server/http/api_chat.h"
#include "common/base/json.h"
#include "common/base/rng.h"
#include "infer-server/http/api_logits.h"

#include <limits.h>
#include <math.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static const char where[] = "request";

#define UP_TO_CONTEXT (-1) // max_tokens, until the prompts are known

uint64_t api_random_seed(void)
{
    uint64_t seed = 0;
    if (getrandom(&seed, sizeof seed, 0) != sizeof seed) seed = (uint64_t)(uintptr_t)&seed;
    return seed;
}

// 64 bits of a text's SHA-256, never 0.
static uint64_t hash64(const char *text)
{
    unsigned char digest[32];
    uint64_t x = 0;
    EVP_Digest(text, strlen(text), digest, NULL, EVP_sha256(), NULL);
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
    free(r);
}

// ---- prompts -----------------------------------------------------------------------------------

static enum status make_prompts(struct api_request *r, size_t n, const char *field)
{
    if (n == 0) return status_fail(ST_INVALID, "request: \"%s\" is empty", field);
    if (n > API_MAX_PROMPTS)
        return status_fail(ST_INVALID, "request: \"%s\" has %zu entries; at most %d in one request",
                           field, n, API_MAX_PROMPTS);
    r->prompts = calloc(n, sizeof *r->prompts);
    if (!r->prompts) return status_fail(ST_NO_MEMORY, "out of memory");
    r->n_prompts = (int)n;
    return ST_OK;
}

static enum status read_ids(const json_t *array, const char *field, const struct api_model *model,
                            struct api_prompt *ret)
{
    if (!json_is_array(array))
        return status_fail(ST_INVALID, "request: \"%s\" must be an array of token ids", field);
    size_t n = json_array_size(array);
    if (n == 0)
        return status_fail(ST_INVALID, "request: \"%s\" is empty: give one token at least", field);
    if (n > INT_MAX / 8) return status_fail(ST_INVALID, "request: \"%s\" is too long", field);
    int32_t *ids = malloc(n * sizeof *ids);
    if (!ids) return status_fail(ST_NO_MEMORY, "out of memory");
    for (size_t i = 0; i < n; i++) {
        const json_t *x = json_array_get(array, i);
        json_int_t id = json_is_integer(x) ? json_integer_value(x) : -1;
        if (!json_is_integer(x)) {
            free(ids);
            return status_fail(ST_INVALID, "request: \"%s\": entry %zu is not a whole number",
                               field, i);
        }
        if (id < 0 || id >= model->vocab_size) {
            free(ids);
            return status_fail(
                ST_INVALID,
                "request: \"%s\": entry %zu is token id %lld; this model's go from 0 "
                "to %d",
                field, i, (long long)id, model->vocab_size - 1);
        }
        ids[i] = (int32_t)id;
    }
    ret->ids = ids;
    ret->n_ids = (int)n;
    return ST_OK;
}

static enum status encode_text(const char *text, size_t len, bool add_special, const char *field,
                               const struct api_model *model, struct api_prompt *ret)
{
    if (!model->tokenizer)
        return status_fail(ST_INVALID,
                           "request: \"%s\" is text, but %s has no tokenizer.json; send token ids "
                           "(prompt_token_ids) instead",
                           field, model->folder);
    // a text that cannot fit is not worth the seconds that megabytes take
    size_t most = (size_t)model->max_context * tokenizer_max_token_bytes(model->tokenizer);
    if (most && len > most)
        return status_fail(
            ST_TOO_LONG,
            "request: \"%s\" has %zu bytes. This model's maximum context length is %d "
            "tokens, which hold %zu bytes at most: shorten the prompt",
            field, len, model->max_context, most);
    struct token_list list = TOKEN_LIST_INIT;
    enum status st = tokenizer_encode(model->tokenizer, text, len, add_special, &list);
    if (st == ST_OK && list.n == 0)
        st = status_fail(ST_INVALID, "request: \"%s\" has no tokens: give some text", field);
    else if (st != ST_OK)
        st = status_context(st, "request: \"%s\"", field);
    for (int i = 0; st == ST_OK && i < list.n; i++)
        if (list.ids[i] >= model->vocab_size)
            st = status_fail(ST_INVALID,
                             "request: \"%s\" holds token id %d, which this model (%d embeddings) "
                             "does not have",
                             field, list.ids[i], model->vocab_size);
    if (st != ST_OK) {
        token_list_release(&list);
        return st;
    }
    ret->ids = list.ids;
    ret->n_ids = list.n;
    ret->tokenised = true;
    return ST_OK;
}

static enum status encode_messages(const json_t *object, const struct api_model *model,
                                   struct api_prompt *ret)
{
    struct bytes text = BYTES_INIT;
    enum status st = ST_OK;
    bool generation_prompt = true, continue_final = false;
    const json_t *messages = json_object_get(object, "messages");
    if (!json_is_array(messages) || json_array_size(messages) == 0)
        return status_fail(ST_INVALID, "request: \"messages\" must be an array of one message or "
                                       "more");
    CHECK(json_get_bool(where, object, "add_generation_prompt", &generation_prompt));
    CHECK(json_get_bool(where, object, "continue_final_message", &continue_final));
    if (continue_final)
        return status_fail(ST_UNSUPPORTED, "request: \"continue_final_message\" is not supported");
    if (!model->tokenizer)
        return status_fail(
            ST_INVALID,
            "request: \"messages\" are text, but %s has no tokenizer.json; send token "
            "ids to /v1/completions or /v1/rollouts instead",
            model->folder);
    if (!model->chat)
        return status_fail(ST_INVALID, "request: \"messages\" need a chat template: %s",
                           model->why_no_chat);
    CHECK(api_chat_render(object, model, generation_prompt, &text));
    CHECK(bytes_status(&text));
    // the template has written the special tokens itself
    CHECK(encode_text(bytes_text(&text), text.len, false, "messages", model, ret));
out:
    bytes_release(&text);
    return st;
}

static enum status add_special_of(const json_t *object, bool *ret)
{
    *ret = true;
    return json_get_bool(where, object, "add_special_tokens", ret);
}

// A prompt that is a string, which an echo and /generate give back.
static enum status read_text(const struct api_request *r, const json_t *value, bool add_special,
                             const char *field, const struct api_model *model,
                             struct api_prompt *ret)
{
    const char *text = json_string_value(value);
    const size_t len = json_string_length(value);
    if (r->echo || r->kind == API_GENERATE) {
        ret->text = malloc(len + 1);
        if (!ret->text) return status_fail(ST_NO_MEMORY, "out of memory");
        memcpy(ret->text, text, len);
        ret->text_len = len;
    }
    return encode_text(text, len, add_special, field, model, ret);
}

// A string, an array of strings, an array of ids, or an array of arrays of ids.
static enum status read_prompt_field(struct api_request *r, const json_t *object, const char *field,
                                     const struct api_model *model)
{
    enum status st = ST_OK;
    const json_t *value = json_object_get(object, field);
    bool add_special;
    CHECK(add_special_of(object, &add_special));
    if (json_is_string(value)) {
        CHECK(make_prompts(r, 1, field));
        return read_text(r, value, add_special, field, model, &r->prompts[0]);
    }
    if (!json_is_array(value))
        return status_fail(ST_INVALID,
                           "request: \"%s\" must be a string, an array of strings, an array of "
                           "token ids, or an array of arrays of token ids",
                           field);
    if (json_is_integer(json_array_get(value, 0))) {
        CHECK(make_prompts(r, 1, field));
        return read_ids(value, field, model, &r->prompts[0]);
    }
    CHECK(make_prompts(r, json_array_size(value), field));
    for (int i = 0; i < r->n_prompts; i++) {
        const json_t *one = json_array_get(value, (size_t)i);
        if (json_is_string(one))
            CHECK(read_text(r, one, add_special, field, model, &r->prompts[i]));
        else if (json_is_array(one))
            CHECK(read_ids(one, field, model, &r->prompts[i]));
        else
            return status_fail(
                ST_INVALID,
                "request: \"%s\": entry %d is neither a string nor an array of token "
                "ids",
                field, i);
    }
out:
    return st;
}

// One of "prompt_token_ids", "messages", "prompt": a group of rollouts.
static enum status read_group_prompt(const json_t *object, const struct api_model *model,
                                     struct api_prompt *ret)
{
    bool ids = json_has(object, "prompt_token_ids"), messages = json_has(object, "messages");
    bool prompt = json_has(object, "prompt"), add_special;
    if (ids + messages + prompt != 1)
        return status_fail(ST_INVALID, "request: \"groups\": give each group exactly one of "
                                       "prompt_token_ids, messages and prompt");
    enum status st = messages ? ST_OK : api_chat_refuse_fields(object);
    if (st != ST_OK) return st;
    if (ids)
        return read_ids(json_object_get(object, "prompt_token_ids"), "prompt_token_ids", model,
                        ret);
    if (messages) return encode_messages(object, model, ret);
    const json_t *value = json_object_get(object, "prompt");
    if (!json_is_string(value))
        return status_fail(ST_INVALID, "request: \"prompt\" of a group must be a string (token ids "
                                       "go into prompt_token_ids)");
    st = add_special_of(object, &add_special);
    if (st != ST_OK) return st;
    return encode_text(json_string_value(value), json_string_length(value), add_special, "prompt",
                       model, ret);
}

// ---- sampling ----------------------------------------------------------------------------------

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
    const int most = (int)(sizeof s->stop_ids / sizeof *s->stop_ids);
    size_t i;
    if (!ids || json_is_null(ids)) return ST_OK;
    if (!json_is_array(ids) || json_array_size(ids) > (size_t)most)
        return status_fail(ST_INVALID,
                           "request: \"stop_token_ids\" must be an array of at most %d token ids",
                           most);
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

// The sampling fields of `object`; r->sampling holds the defaults.
static enum status read_sampling(struct api_request *r, const json_t *object,
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
    r->cut_active = s->temperature > 0 && (s->top_k > 0 || s->top_p < 1 || s->min_p > 0);
    r->cut_active |= sampling_adjusts(s);
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

static enum status check_model_name(const json_t *object, const struct api_model *model)
{
    const char *name = NULL;
    enum status st = json_get_string(where, object, "model", &name);
    if (st != ST_OK || !name || !*name) return st;
    if (strcmp(name, model->name) == 0 || strcmp(name, model->folder) == 0) return ST_OK;
    return status_fail(ST_NOT_FOUND, "request: \"model\" is '%.200s'; this server has '%s'", name,
                       model->name);
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

// max_tokens of an OpenAI request that does not say: the model's own, or as much as fits.
static void default_length(struct api_request *r, const json_t *object,
                           const struct api_model *model, int otherwise)
{
    r->sampling.max_tokens = model->max_new_tokens > 0 ? model->max_new_tokens : otherwise;
    r->shorten = !json_has(object, "max_tokens") && !json_has(object, "max_completion_tokens");
}

static enum status parse_completions(struct api_request *r, const json_t *object,
                                     const struct api_model *model)
{
    enum status st;
    int logprobs = -1, best_of = 0;
    default_length(r, object, model, 16);
    CHECK(request_fields_check(object, PLACE_COMPLETIONS, model->unknown));
    CHECK(read_stream(r, object, model));
    CHECK(read_identity(r, object));
    CHECK(read_sampling(r, object, model));
    CHECK(json_get_int32(where, object, "best_of", 1, API_MAX_N, &best_of));
    if (best_of > 0 && best_of != r->sampling.n)
        return status_fail(ST_UNSUPPORTED, "request: \"best_of\" must be equal to n");
    CHECK(json_get_int32(where, object, "logprobs", 0, API_MAX_LOGPROBS, &logprobs));
    r->sampling.logprobs = logprobs;
    r->want_logprobs = logprobs >= 0;
    CHECK(api_read_prompt_logprobs(r, object));
    const char *field = json_has(object, "prompt_token_ids") ? "prompt_token_ids" : "prompt";
    CHECK(read_prompt_field(r, object, field, model));
out:
    return st;
}

static enum status parse_chat(struct api_request *r, const json_t *object,
                              const struct api_model *model)
{
    enum status st;
    int top = 0;
    default_length(r, object, model, UP_TO_CONTEXT);
    CHECK(request_fields_check(object, PLACE_CHAT, model->unknown));
    CHECK(read_stream(r, object, model));
    CHECK(read_identity(r, object));
    CHECK(read_sampling(r, object, model));
    CHECK(json_get_bool(where, object, "logprobs", &r->want_logprobs));
    CHECK(json_get_int32(where, object, "top_logprobs", 0, API_MAX_LOGPROBS, &top));
    if (top > 0 && !r->want_logprobs)
        return status_fail(ST_INVALID, "request: \"top_logprobs\" needs \"logprobs\": true");
    r->sampling.logprobs = r->want_logprobs ? top : -1;
    CHECK(api_read_prompt_logprobs(r, object));
    CHECK(make_prompts(r, 1, "messages"));
    CHECK(encode_messages(object, model, &r->prompts[0]));
out:
    return st;
}

static enum status parse_rollouts(struct api_request *r, const json_t *object,
                                  const struct api_model *model)
{
    enum status st;
    int logprobs = 0;
    const json_t *groups = json_object_get(object, "groups");
    const json_t *sampling = json_object_get(object, "sampling");
    if (sampling && !json_is_null(sampling) && !json_is_object(sampling))
        return status_fail(ST_INVALID, "request: \"sampling\" must be an object");
    json_t *none = json_object();
    if (!none) return status_fail(ST_NO_MEMORY, "out of memory");
    if (!json_is_object(sampling)) sampling = none;
    r->stream = true;
    r->want_logprobs = true;
    r->sampling.max_tokens = 256;
    CHECK(request_fields_check(object, PLACE_ROLLOUTS, model->unknown));
    CHECK(request_fields_check(sampling, PLACE_SAMPLING, model->unknown));
    CHECK(read_sampling(r, sampling, model));
    CHECK(json_get_int32(where, sampling, "logprobs", 0, 0, &logprobs));
    r->sampling.logprobs = 0;
    CHECK(api_read_prompt_logprobs(r, sampling));
    if (!json_is_array(groups)) {
        st = status_fail(ST_INVALID, "request: \"groups\" must be an array of groups");
        goto out;
    }
    CHECK(make_prompts(r, json_array_size(groups), "groups"));
    for (int i = 0; i < r->n_prompts; i++) {
        const json_t *group = json_array_get(groups, (size_t)i), *id = json_object_get(group, "id");
        struct api_prompt *prompt = &r->prompts[i];
        int64_t seed = (int64_t)rng_seed_of(r->sampling.seed, i);
        prompt->n = r->sampling.n;
        if (!json_is_object(group)) {
            st = status_fail(ST_INVALID, "request: \"groups\": entry %d is not an object", i);
            goto out;
        }
        if (id && !json_is_null(id) && !json_is_string(id) && !json_is_integer(id)) {
            st = status_fail(ST_INVALID,
                             "request: \"id\" of group %d must be a string or a whole "
                             "number",
                             i);
            goto out;
        }
        CHECK(request_fields_check(group, PLACE_GROUP, model->unknown));
        prompt->group_id = id && !json_is_null(id) ? json_deep_copy(id) : json_integer(i);
        CHECK(json_get_int32(where, group, "n", 1, API_MAX_N, &prompt->n));
        CHECK(json_get_int(where, group, "seed", INT64_MIN, INT64_MAX, &seed));
        prompt->seed = (uint64_t)seed;
        st = read_group_prompt(group, model, prompt);
        if (st != ST_OK) {
            status_context(st, "group %d", i);
            goto out;
        }
    }
out:
    json_decref(none);
    return st;
}

// "prompt" is a string, token ids, or an object as vLLM's TokensPrompt and TextPrompt; "prompts" is
// a list of any of them.
static enum status read_generate_prompt(const struct api_request *r, const json_t *value,
                                        const json_t *object, const struct api_model *model,
                                        struct api_prompt *ret)
{
    bool add_special;
    enum status st = add_special_of(object, &add_special);
    if (st == ST_OK && json_is_object(value))
        st = request_fields_check(value, PLACE_PROMPT, model->unknown);
    if (st != ST_OK) return st;
    if (json_is_object(value) && json_has(value, "prompt_token_ids"))
        return read_ids(json_object_get(value, "prompt_token_ids"), "prompt_token_ids", model, ret);
    if (json_is_object(value)) value = json_object_get(value, "prompt");
    if (json_is_array(value)) return read_ids(value, "prompt", model, ret);
    if (json_is_string(value)) return read_text(r, value, add_special, "prompt", model, ret);
    return status_fail(ST_INVALID,
                       "request: \"prompt\" must be a string, an array of token ids, or "
                       "an object with prompt_token_ids or prompt");
}

static enum status parse_generate(struct api_request *r, const json_t *object,
                                  const struct api_model *model)
{
    enum status st;
    int logprobs = -1;
    r->sampling.max_tokens = 16;
    CHECK(request_fields_check(object, PLACE_GENERATE, model->unknown));
    CHECK(read_stream(r, object, model));
    if (r->stream)
        return status_fail(ST_UNSUPPORTED, "request: \"stream\" is not supported by /generate; use "
                                           "/v1/completions or /v1/rollouts");
    CHECK(read_sampling(r, object, model));
    CHECK(json_get_int32(where, object, "logprobs", 0, API_MAX_LOGPROBS, &logprobs));
    r->sampling.logprobs = logprobs;
    r->want_logprobs = logprobs >= 0;
    CHECK(api_read_prompt_logprobs(r, object));
    const json_t *many = json_object_get(object, "prompts");
    if (json_has(object, "prompts") == json_has(object, "prompt"))
        return status_fail(ST_INVALID, "request: give exactly one of \"prompt\" and \"prompts\"");
    if (json_has(object, "prompt")) {
        CHECK(make_prompts(r, 1, "prompt"));
        return read_generate_prompt(r, json_object_get(object, "prompt"), object, model,
                                    &r->prompts[0]);
    }
    if (!json_is_array(many))
        return status_fail(ST_INVALID, "request: \"prompts\" must be an array");
    r->many_prompts = true;
    CHECK(make_prompts(r, json_array_size(many), "prompts"));
    for (int i = 0; i < r->n_prompts; i++)
        CHECK(read_generate_prompt(r, json_array_get(many, (size_t)i), object, model,
                                   &r->prompts[i]));
out:
    return st;
}

// Tokens in, tokens out: vLLM's /inference/v1/generate.
static enum status parse_inference(struct api_request *r, const json_t *object,
                                   const struct api_model *model)
{
    enum status st;
    int logprobs = -1;
    const json_t *sampling = json_object_get(object, "sampling_params");
    if (!json_is_object(sampling))
        return status_fail(ST_INVALID, "request: \"sampling_params\" must be an object");
    default_length(r, sampling, model, UP_TO_CONTEXT);
    CHECK(request_fields_check(object, PLACE_INFERENCE, model->unknown));
    CHECK(request_fields_check(sampling, PLACE_SAMPLING, model->unknown));
    CHECK(read_stream(r, object, model));
    CHECK(read_identity(r, object));
    CHECK(read_sampling(r, sampling, model));
    CHECK(json_get_int32(where, sampling, "logprobs", 0, API_MAX_LOGPROBS, &logprobs));
    r->sampling.logprobs = logprobs;
    r->want_logprobs = logprobs >= 0;
    r->tokens_as_ids = true;
    CHECK(api_read_prompt_logprobs(r, sampling));
    CHECK(make_prompts(r, 1, "token_ids"));
    CHECK(read_ids(json_object_get(object, "token_ids"), "token_ids", model, &r->prompts[0]));
out:
    return st;
}

// The field that a prompt came in, for errors.
static const char *prompt_field(const struct api_request *r)
{
    return r->kind == API_CHAT        ? "messages"
           : r->kind == API_INFERENCE ? "token_ids"
           : r->kind == API_ROLLOUTS  ? "groups"
                                      : "prompt";
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
        return status_fail(ST_INVALID,
                           "request: \"n\" over all prompts makes %lld samples; at most "
                           "%d in one request",
                           (long long)samples, API_MAX_SAMPLES);
    r->n_samples = (int)samples;
    if (longest + (r->sampling.max_tokens != 0) > model->max_context)
        return status_fail(ST_TOO_LONG,
                           "request: \"%s\" has %d tokens. This model's maximum context length is "
                           "%d tokens, prompt and completion together: shorten the prompt",
                           prompt_field(r), longest, model->max_context);
    int room = model->max_context - longest;
    if (r->sampling.max_tokens == UP_TO_CONTEXT || (r->shorten && r->sampling.max_tokens > room))
        r->sampling.max_tokens = room;
    if (r->sampling.max_tokens > room)
        return status_fail(
            ST_TOO_LONG,
            "request: \"max_tokens\" is %d after a prompt of %d tokens. This model's "
            "maximum context length is %d tokens, prompt and completion together: ask "
            "for at most %d",
            r->sampling.max_tokens, longest, model->max_context, room);
    return api_check_prompt_logprobs(r);
}

enum status api_tokenize(const struct api_model *model, const json_t *object,
                         struct token_list *ret)
{
    struct api_prompt prompt = {0};
    struct api_model unbounded = *model; // a text need not fit to be counted
    bool add_special = false;
    enum status st;
    unbounded.max_context = 0;
    CHECK(request_fields_check(object, PLACE_TOKENIZE, model->unknown));
    CHECK(check_model_name(object, model));
    if (json_has(object, "messages") == json_has(object, "prompt"))
        return status_fail(ST_INVALID, "request: give exactly one of \"prompt\" and \"messages\"");
    if (json_has(object, "messages"))
        CHECK(json_get_bool(where, object, "add_special_tokens", &add_special));
    if (add_special)
        return status_fail(ST_UNSUPPORTED, "request: \"add_special_tokens\" with messages is not "
                                           "supported: the chat template writes them");
    CHECK(read_group_prompt(object, &unbounded, &prompt));
    *ret = (struct token_list){prompt.ids, prompt.n_ids, prompt.n_ids};
out:
    return st;
}

enum status api_detokenize(const struct api_model *model, const json_t *object,
                           struct token_list *ret)
{
    struct api_prompt tokens = {0};
    const json_t *list = json_object_get(object, "tokens");
    enum status st;
    CHECK(request_fields_check(object, PLACE_DETOKENIZE, model->unknown));
    CHECK(check_model_name(object, model));
    if (json_is_array(list) && json_array_size(list) == 0) return ST_OK; // the empty text
    CHECK(read_ids(list, "tokens", model, &tokens));
    *ret = (struct token_list){tokens.ids, tokens.n_ids, tokens.n_ids};
out:
    return st;
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
    if (!json_is_object(object)) {
        st = status_fail(ST_INVALID, "request: the body must be a JSON object");
        goto out;
    }
    CHECK(check_model_name(object, model));
    switch (kind) {
    case API_COMPLETIONS:
        CHECK(parse_completions(r, object, model));
        break;
    case API_CHAT:
        CHECK(parse_chat(r, object, model));
        break;
    case API_ROLLOUTS:
        CHECK(parse_rollouts(r, object, model));
        break;
    case API_GENERATE:
        CHECK(parse_generate(r, object, model));
        break;
    case API_INFERENCE:
        CHECK(parse_inference(r, object, model));
        break;
    }
    if (kind != API_ROLLOUTS)
        for (int i = 0; i < r->n_prompts; i++) {
            r->prompts[i].n = r->sampling.n;
            r->prompts[i].seed = rng_seed_of(r->sampling.seed, i);
        }
    CHECK(check_lengths(r, model));
    *ret = r;
    r = NULL;
out:
    json_decref(object);
    api_request_free(r);
    return st;
}
