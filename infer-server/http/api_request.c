/* api_request.c: request bodies to struct api_request. Each field by itself is read and checked by
 * the table (request_fields.c), here what they mean with one another and for this model; the engine
 * only sees token ids and numbers that make sense. Any thread: it reads the model's facts, which
 * nobody changes, and writes its own request. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/api_impl.h"
#include "common/base/hash.h"
#include "common/base/json.h"
#include "common/base/names.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define UP_TO_CONTEXT (-1) // max_tokens, until the prompts are known
#define UNSAID        INT_MIN

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
        constraint_release(r->prompts[i].constraint);
    }
    free(r->prompts);
    if (r->stop.n > 0) stop_set_release(&r->stop);
    free(r->logit_bias);
    json_decref(r->constraint);
    json_decref(r->calls);
    constraint_release(r->sampling.constraint);
    json_decref(r->tools);
    json_decref(r->translated);
    json_decref(r->body);
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
    return status_fail(
        ST_NOT_FOUND,
        "request: \"model\" is '%s'; this server has '%s', and what else /v1/models lists",
        CUT(name, 200), model->name);
}

enum status api_check_model_name(const struct api_request *r, const struct api_model *model)
{
    const char *name = r->given.model;
    struct adapter_ref ref;
    if (!name || names_policy(model, name) || api_names_frozen(model, name)) return ST_OK;
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

// "lora": an adapter's name; or "model", where that is one's, or the frozen model's.
static enum status set_model(struct api_request *r, const struct api_model *model)
{
    const char *name = r->given.model, *lora = r->given.lora;
    if (name && api_names_frozen(model, name)) {
        r->sampling.frozen = true;
        snprintf(r->adapter, sizeof r->adapter, API_FROZEN);
    } else if (name && !use_adapter(r, model, name) && !names_policy(model, name)) {
        return fail_model_name(model, name);
    }
    if (!lora && !name && r->kind == API_GENERATE && model->active_adapter[0])
        lora = model->active_adapter;
    if (lora && !use_adapter(r, model, lora))
        return status_fail(ST_NOT_FOUND,
                           "request: \"lora\" is '%s', which is no adapter of this server; "
                           "/v1/models lists them",
                           CUT(lora, 200));
    return ST_OK;
}

// Of rollouts it always is one.
static enum status set_stream(struct api_request *r, const struct api_model *model)
{
    const json_t *options = r->given.stream_options;
    if (r->kind == API_ROLLOUTS) r->stream = true;
    if (r->stream && r->kind == API_GENERATE)
        return status_fail(ST_UNSUPPORTED, "request: \"stream\" is not supported by /generate; use "
                                           "/v1/completions or /v1/rollouts");
    if (!options) return ST_OK;
    if (!json_is_object(options))
        return status_fail(ST_INVALID, "request: \"stream_options\" must be an object");
    if (!r->stream)
        return status_fail(ST_INVALID, "request: \"stream_options\" need \"stream\": true");
    enum status st = request_read(options, BODY_STREAM_OPTIONS, model->unknown, r);
    r->continuous_usage = r->continuous_usage && r->include_usage; // as vLLM has it
    return st;
}

// How the response and the request's blocks are to be known.
static enum status set_identity(struct api_request *r)
{
    const char *id = r->given.request_id, *salt = r->given.cache_salt;
    if (salt && !*salt)
        return status_fail(ST_INVALID, "request: \"cache_salt\" is empty: leave it out");
    if (salt) r->sampling.cache_salt = hash64(salt);
    if (r->kind == API_INFERENCE) r->tokens_as_ids = true;
    if (!id) return ST_OK;
    const size_t n = strlen(id);
    if (n == 0 || n >= REQUEST_NAME_BYTES)
        return status_fail(ST_INVALID, "request: \"request_id\" must have 1 to %d bytes",
                           REQUEST_NAME_BYTES - 1);
    memcpy(r->name, id, n + 1);
    return ST_OK;
}

// ---- sampling ----------------------------------------------------------------------------------

static enum status set_stop(const json_t *stop, struct stop_set *ret)
{
    const json_t *one;
    size_t i;
    if (!stop) return ST_OK;
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

static enum status set_stop_ids(const json_t *ids, const struct api_model *model,
                                struct sampling *s)
{
    const json_t *one;
    const int max = (int)(sizeof s->stop_ids / sizeof *s->stop_ids);
    size_t i;
    if (!ids) return ST_OK;
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

// The frozen model's part in what is sampled.
static enum status set_tandem(struct api_request *r, const struct api_model *model)
{
    const json_t *tandem = r->given.tandem;
    struct api_request own = {.sampling.tandem = {.p = 0.5, .chunk = TANDEM_CHUNK_TOKENS}};
    struct tandem_choice *t = &own.sampling.tandem;
    if (!tandem) return ST_OK;
    if (r->kind != API_ROLLOUTS)
        return status_fail(ST_UNSUPPORTED, "request: \"tandem\" is for /v1/rollouts only");
    if (!json_is_object(tandem))
        return status_fail(ST_INVALID, "request: \"tandem\" must be an object");
    enum status st = request_read(tandem, BODY_TANDEM, model->unknown, &own);
    if (st == ST_OK && own.given.selector)
        st = status_context(name_parse(tandem_selector_names, own.given.selector, &t->selector),
                            "request: \"tandem\": \"selector\"");
    t->on = true;
    t->shared = json_has(tandem, "seed");
    t->seed = own.sampling.seed;
    r->sampling.tandem = *t;
    return st;
}

// An object from token id, in decimal digits, to bias.
static enum status set_bias(struct api_request *r, int vocab)
{
    json_t *biases = (json_t *)r->given.logit_bias, *value;
    const char *key;
    if (!biases) return ST_OK;
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
                               "request: \"logit_bias\": '%s' is not a token id from 0 to %d",
                               CUT(key, 40), vocab - 1);
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

static enum status set_sampling(struct api_request *r, const struct api_model *model)
{
    struct sampling *s = &r->sampling;
    enum status st = ST_OK;
    CHECK(set_stop(r->given.stop, &r->stop));
    CHECK(set_stop_ids(r->given.stop_token_ids, model, s));
    if (r->given.speculative)
        CHECK(status_context(speculative_parse(r->given.speculative, &s->speculative),
                             "request: \"speculative\""));
    CHECK(set_tandem(r, model));
    CHECK(set_bias(r, model->vocab_size));
    CHECK(set_constraint(r, model));
    if (r->echo && r->kind != API_COMPLETIONS)
        FAIL(ST_UNSUPPORTED, "request: \"echo\" is for /v1/completions only; \"prompt_logprobs\" "
                             "gives a prompt's log-probabilities");
    if (r->want_text_offset && r->kind != API_ROLLOUTS)
        FAIL(ST_UNSUPPORTED, "request: \"text_offset\" is for /v1/rollouts only");
    if (!(s->top_p > 0)) FAIL(ST_INVALID, "request: \"top_p\" is 0; it must be above 0 (1 is off)");
    if (s->temperature > 0 && s->temperature < 1e-3f)
        FAIL(ST_INVALID, "request: \"temperature\" is %g; use 0 for greedy, or at least 0.001",
             (double)s->temperature);
    if (s->top_k < 0 || s->top_k >= model->vocab_size) s->top_k = 0;
    r->filtered = sampling_cuts(s) || sampling_changes(s);
    if (s->min_tokens > s->max_tokens && s->max_tokens != UP_TO_CONTEXT)
        FAIL(ST_INVALID, "request: \"min_tokens\" is %d, above max_tokens, %d", s->min_tokens,
             s->max_tokens);
    if (r->stop.n > 0 && !model->tokenizer)
        FAIL(ST_INVALID,
             "request: \"stop\" needs text, but %s has no tokenizer.json; use stop_token_ids",
             model->folder);
out:
    return st;
}

// Those of the sampled tokens, and of the prompt's; an echo with log-probabilities needs both.
static enum status set_logprobs(struct api_request *r)
{
    struct sampling *s = &r->sampling;
    if (r->kind == API_CHAT) {
        if (r->given.top_logprobs > 0 && !r->want_logprobs)
            return status_fail(ST_INVALID, "request: \"top_logprobs\" needs \"logprobs\": true");
        if (r->want_logprobs) s->logprobs = r->given.top_logprobs;
    } else if (r->kind == API_ROLLOUTS) {
        if (s->logprobs > 0)
            return status_fail(ST_INVALID,
                               "request: \"logprobs\" is %d; rollouts have the sampled token's "
                               "alone: it must be 0",
                               s->logprobs);
        s->logprobs = 0;
    }
    r->want_logprobs = s->logprobs >= 0;
    r->want_prompt_logprobs = r->prompt_top >= 0;
    if (r->want_prompt_logprobs && r->stream && r->kind != API_ROLLOUTS)
        return status_fail(
            ST_UNSUPPORTED,
            "request: \"prompt_logprobs\" are not given in a stream; leave \"stream\" out");
    const bool echoed = r->echo && r->want_logprobs;
    if (r->prompt_top < 0) r->prompt_top = 0;
    s->prompt_logprobs = r->want_prompt_logprobs || echoed;
    s->prompt_top = echoed && s->logprobs > r->prompt_top ? s->logprobs : r->prompt_top;
    return ST_OK;
}

// ---- the kinds ---------------------------------------------------------------------------------

static const struct kind {
    enum body body;
    const char *field;    // that the prompts come in, for errors
    const char *sampling; // the object that holds the sampling fields; NULL: the body itself
    int max_tokens;       // where neither the request nor (openai) the model says
    bool openai;          // with a name, and a default length that gives way to the context
    enum status (*read_prompts)(struct api_request *r, const struct api_model *model);
} kinds[] = {
    [API_COMPLETIONS] = {BODY_COMPLETIONS, "prompt", NULL, 16, true, api_read_completion_prompts},
    [API_CHAT] = {BODY_CHAT, "messages", NULL, UP_TO_CONTEXT, true, api_read_chat_prompt},
    [API_ROLLOUTS] = {BODY_ROLLOUTS, "groups", "sampling", 256, false, api_read_groups},
    [API_GENERATE] = {BODY_GENERATE, "prompt", NULL, 16, false, api_read_generate_prompts},
    [API_RESPONSES] = {BODY_RESPONSES, "input", NULL, UP_TO_CONTEXT, true,
                       api_read_responses_prompt},
    [API_MESSAGES] = {BODY_MESSAGES, "messages", NULL, UP_TO_CONTEXT, true,
                      api_read_messages_prompt},
    [API_INFERENCE] = {BODY_INFERENCE, "token_ids", "sampling_params", UP_TO_CONTEXT, true,
                       api_read_inference_prompt},
};

static void set_defaults(struct api_request *r, const struct api_model *model)
{
    const bool openai = r->kind == API_COMPLETIONS || r->kind == API_CHAT ||
                        r->kind == API_RESPONSES || r->kind == API_MESSAGES;
    r->skip_special = r->several_calls = true;
    r->prompt_top = -1;
    r->given = (struct api_given){.add_special = true, .generation_prompt = true};
    r->sampling = (struct sampling){
        .n = 1,
        .max_tokens = UNSAID,
        .temperature = openai ? (float)model->temperature : 1.0f,
        .top_p = openai ? (float)model->top_p : 1.0f,
        .min_p = openai ? (float)model->min_p : 0.0f,
        .top_k = openai ? model->top_k : 0,
        .repetition_penalty = 1,
        .logprobs = -1,
    };
    uint64_t *seed = &r->sampling.seed; // nobody's wish
    if (getrandom(seed, sizeof *seed, 0) != sizeof *seed) *seed = (uint64_t)(uintptr_t)r;
}

static enum status read_fields(struct api_request *r, const json_t *object,
                               const struct api_model *model)
{
    const struct kind *kind = &kinds[r->kind];
    const json_t **sampling = &r->given.sampling;
    enum status st;
    CHECK(request_read(object, kind->body, model->unknown, r));
    if (kind->sampling) { // that of rollouts may be left out
        if (!json_is_object(*sampling) && (*sampling || r->kind != API_ROLLOUTS))
            FAIL(ST_INVALID, "request: \"%s\" must be an object", kind->sampling);
        CHECK(request_read(*sampling, BODY_SAMPLING, model->unknown, r));
    }
    if (r->sampling.max_tokens == UNSAID) {
        const bool own = kind->openai && model->max_new_tokens > 0;
        r->sampling.max_tokens = own ? model->max_new_tokens : kind->max_tokens;
        r->shorten = kind->openai;
    }
    CHECK(set_model(r, model));
    CHECK(set_stream(r, model));
    CHECK(set_identity(r));
    CHECK(kind->read_prompts(r, model));
    CHECK(set_sampling(r, model)); // in which what the prompt asks of tools is a constraint
    CHECK(set_logprobs(r));
out:
    return st;
}

// What all prompts' log-probabilities take is bounded.
static enum status check_prompt_logprobs(const struct api_request *r)
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
    return check_prompt_logprobs(r);
}

enum status api_read_object(const char *body, size_t len, bool empty, json_t **ret)
{
    json_t *object = NULL;
    enum status st = ST_OK;
    if (len || !empty)
        st = json_parse("request", body, len, &object);
    else if (!(object = json_object()))
        st = status_fail(ST_NO_MEMORY, "out of memory");
    if (st == ST_OK && !json_is_object(object))
        st = status_fail(ST_INVALID, "request: the body must be a JSON object");
    if (st == ST_OK)
        *ret = object;
    else
        json_decref(object);
    return st;
}

enum status api_request_read(enum api_kind kind, const struct api_model *model,
                             const json_t *object, struct api_request **ret)
{
    enum status st;
    struct api_request *r = calloc(1, sizeof *r);
    if (!r) return status_fail(ST_NO_MEMORY, "out of memory");
    r->kind = kind;
    if (kind == API_RESPONSES) r->body = json_incref((json_t *)object);
    set_defaults(r, model);
    CHECK(read_fields(r, object, model));
    CHECK(check_lengths(r, model));
    r->given = (struct api_given){0}; // what is there goes
    *ret = TAKE_PTR(r);
out:
    api_request_free(r);
    return st;
}

enum status api_request_parse(enum api_kind kind, const struct api_model *model, const char *body,
                              size_t len, struct api_request **ret)
{
    json_t *object = NULL;
    enum status st = api_read_object(body, len, false, &object);
    if (st == ST_OK) st = api_request_read(kind, model, object, ret);
    json_decref(object);
    return st;
}
