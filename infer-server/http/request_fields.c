/* request_fields.c: the one table of the fields that requests may have: those that are read, by
 * type and range, those that are taken with the value that changes nothing, and those that mean
 * nothing here whatever their value. No field is ignored unsaid: what is not in the table is
 * refused by its name. The names are those of OpenAI's API, of vLLM's requests and SamplingParams,
 * and this server's own. What fields mean with one another is api_request.c's. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/api_impl.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/names.h"

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OPENAI  (BODY_COMPLETIONS | BODY_CHAT)
#define SAMPLED (OPENAI | BODY_GENERATE | BODY_SAMPLING)
#define CHATS   (BODY_CHAT | BODY_GROUP | BODY_TOKENIZE)
#define MODELS                                                                                     \
    (OPENAI | BODY_GENERATE | BODY_INFERENCE | BODY_ROLLOUTS | BODY_TOKENIZE | BODY_DETOKENIZE |   \
     BODY_RESPONSES | BODY_MESSAGES)

// OpenAI's newer interface and Anthropic's, which are read as the chats that they come to.
#define FOREIGN (BODY_RESPONSES | BODY_MESSAGES)
#define TEXTS   (SAMPLED | FOREIGN)

#define ANY    "*"
#define ABSENT "[]"                 // null only
#define EMPTY  "[false,\"\",[],{}]" // and what asks for nothing

struct field {
    struct json_field how; // offset 0: it is not read
    unsigned bodies;
    const char *accepts; // ANY, or the values that change nothing; NULL: whatever it may be
};
#define FIELDS_OF struct api_request

// clang-format off
#define TEXT(name, bodies, member)      {FIELD_TEXT(name, given.member), bodies, NULL}
#define JSON(name, bodies, member)      {FIELD_JSON(name, given.member), bodies, NULL}
#define BOOL(name, bodies, member)      {FIELD_BOOL(name, member, 0), bodies, NULL}
#define INT(name, bodies, member, ...)  {FIELD_INT32(name, member, __VA_ARGS__), bodies, NULL}
#define REAL(name, bodies, member, ...) {FIELD_F32(name, member, __VA_ARGS__), bodies, NULL}
#define ONLY(n, bodies, values)         {{.name = n}, bodies, values}
// clang-format on
#define MAX_TOKENS 0, INT_MAX / 4

static const struct field fields[] = {
    // what is generated from
    TEXT("model", MODELS | BODY_RELOAD, model),
    TEXT("lora", OPENAI | FOREIGN | BODY_GENERATE | BODY_INFERENCE | BODY_ROLLOUTS, lora),
    JSON("prompt", BODY_COMPLETIONS | BODY_GENERATE | BODY_GROUP | BODY_TOKENIZE | BODY_PROMPT,
         prompt),
    JSON("prompts", BODY_GENERATE, prompts),
    JSON("prompt_token_ids", BODY_COMPLETIONS | BODY_GROUP | BODY_PROMPT, prompt_ids),
    JSON("token_ids", BODY_INFERENCE, prompt_ids),
    JSON("tokens", BODY_DETOKENIZE, prompt_ids),
    JSON("messages", CHATS, messages),
    JSON("messages", BODY_MESSAGES, input),
    JSON("input", BODY_RESPONSES, input),
    JSON("system", BODY_MESSAGES, system),
    JSON("instructions", BODY_RESPONSES, system),
    JSON("text", BODY_RESPONSES, text),
    JSON("output_config", BODY_MESSAGES, text),
    JSON("reasoning", BODY_RESPONSES, thinking),
    JSON("thinking", BODY_MESSAGES, thinking),
    JSON("groups", BODY_ROLLOUTS, groups),
    JSON("sampling", BODY_ROLLOUTS, sampling),
    JSON("sampling_params", BODY_INFERENCE, sampling),
    JSON("id", BODY_GROUP, group_id),
    BOOL("add_special_tokens", BODY_COMPLETIONS | BODY_GENERATE | BODY_GROUP | BODY_TOKENIZE,
         given.add_special),
    ONLY("add_special_tokens", BODY_CHAT, "[false]"),
    BOOL("add_generation_prompt", CHATS, given.generation_prompt),
    BOOL("continue_final_message", CHATS, given.continue_final),
    TEXT("chat_template", CHATS | FOREIGN, chat_template),
    TEXT("reasoning_effort", CHATS, effort),
    JSON("chat_template_kwargs", CHATS | FOREIGN, template_kwargs),
    ONLY("documents", CHATS, "[[]]"),
    JSON("tools", CHATS | FOREIGN, tools),
    ONLY("tools", BODY_COMPLETIONS | BODY_GENERATE | BODY_SAMPLING, "[[]]"),
    ONLY("functions", CHATS | SAMPLED, "[[]]"),
    JSON("tool_choice", BODY_CHAT | FOREIGN, tool_choice),
    ONLY("function_call", BODY_CHAT, "[\"none\",\"auto\"]"),
    BOOL("parallel_tool_calls", BODY_CHAT | BODY_RESPONSES, several_calls),
    ONLY("suffix", SAMPLED, "[\"\"]"),
    ONLY("prompt_embeds", BODY_COMPLETIONS, EMPTY),
    ONLY("images", SAMPLED, EMPTY),
    ONLY("features", BODY_INFERENCE, EMPTY),
    ONLY("content_parts", BODY_INFERENCE, EMPTY),
    ONLY("mm_processor_kwargs", CHATS, EMPTY),
    ONLY("media_io_kwargs", CHATS, EMPTY),
    ONLY("audio", BODY_CHAT, ABSENT),
    ONLY("modalities", BODY_CHAT, "[[\"text\"]]"),
    ONLY("truncate_prompt_tokens", SAMPLED, "[-1]"),
    ONLY("truncation_side", OPENAI, ANY), // nothing is truncated
    ONLY("lora_request", SAMPLED, EMPTY),
    ONLY("generation_kwargs", BODY_GENERATE, EMPTY),
    ONLY("web_search_options", BODY_CHAT, ABSENT),

    // how
    INT("n", SAMPLED | BODY_GROUP, sampling.n, 1, API_MAX_N),
    INT("best_of", BODY_COMPLETIONS, given.best_of, 1, API_MAX_N),
    INT("max_tokens", SAMPLED | BODY_MESSAGES, sampling.max_tokens, MAX_TOKENS),
    INT("max_output_tokens", BODY_RESPONSES, sampling.max_tokens, MAX_TOKENS),
    INT("max_completion_tokens", SAMPLED, sampling.max_tokens, MAX_TOKENS),
    INT("min_tokens", TEXTS, sampling.min_tokens, MAX_TOKENS),
    REAL("temperature", TEXTS, sampling.temperature, 0, 100),
    REAL("top_p", TEXTS, sampling.top_p, 0, 1),
    INT("top_k", TEXTS, sampling.top_k, -1, INT_MAX),
    REAL("min_p", TEXTS, sampling.min_p, 0, 1),
    {FIELD_INT("seed", sampling.seed, INT64_MIN, INT64_MAX), TEXTS | BODY_GROUP | BODY_TANDEM,
     NULL},
    JSON("stop", SAMPLED, stop),
    JSON("stop_sequences", BODY_MESSAGES, stop),
    JSON("stop_token_ids", TEXTS, stop_token_ids),
    BOOL("include_stop_str_in_output", SAMPLED, include_stop),
    BOOL("ignore_eos", TEXTS, sampling.ignore_eos),
    BOOL("skip_special_tokens", SAMPLED, skip_special),
    TEXT("speculative", TEXTS, speculative),
    JSON("tandem", BODY_SAMPLING, tandem), // of rollouts only
    TEXT("selector", BODY_TANDEM, selector),
    {FIELD_REAL("p", sampling.tandem.p, 0, 1), BODY_TANDEM, NULL},
    INT("chunk", BODY_TANDEM, sampling.tandem.chunk, 1, INT_MAX / 4),
    REAL("frequency_penalty", TEXTS, sampling.frequency_penalty, -2, 2),
    REAL("presence_penalty", TEXTS, sampling.presence_penalty, -2, 2),
    REAL("repetition_penalty", TEXTS, sampling.repetition_penalty, 0.01, 100),
    ONLY("length_penalty", SAMPLED, "[1]"),
    JSON("logit_bias", TEXTS, logit_bias),
    ONLY("bad_words", SAMPLED, "[[]]"),
    ONLY("allowed_token_ids", SAMPLED, "[[]]"),
    ONLY("use_beam_search", SAMPLED, "[false]"),
    ONLY("early_stopping", SAMPLED, "[false]"),
    JSON("response_format", SAMPLED | BODY_GROUP, response_format),
    JSON("structured_outputs", SAMPLED, structured),
    ONLY("structured_outputs_regex", SAMPLED, EMPTY),
    ONLY("guided_decoding_regex", SAMPLED, EMPTY),
    JSON("guided_json", SAMPLED, guided_json),
    JSON("guided_regex", SAMPLED, guided_regex),
    JSON("guided_choice", SAMPLED, guided_choice),
    JSON("guided_grammar", SAMPLED, guided_grammar),
    JSON("json_schema", SAMPLED, json_schema),
    JSON("regex", SAMPLED, regex),
    JSON("ebnf", SAMPLED, ebnf),
    JSON("structural_tag", SAMPLED, structural_tag),
    BOOL("strict_whitespace", SAMPLED, given.strict_whitespace),
    ONLY("thinking_token_budget", SAMPLED, "[-1]"),
    ONLY("repetition_detection", SAMPLED, EMPTY),
    ONLY("verbosity", BODY_CHAT, "[\"medium\"]"),
    ONLY("prediction", BODY_CHAT, ANY), // a hint: text that may come
    ONLY("spaces_between_special_tokens", SAMPLED, "[true]"),
    ONLY("vllm_xargs", OPENAI, EMPTY),
    ONLY("extra_args", BODY_GENERATE | BODY_SAMPLING, EMPTY),
    TEXT("cache_salt", OPENAI | FOREIGN | BODY_INFERENCE, cache_salt),
    ONLY("priority", OPENAI | BODY_INFERENCE, "[0]"),
    ONLY("kv_transfer_params", OPENAI | BODY_INFERENCE, EMPTY),
    ONLY("skip_reading_prefix_cache", BODY_GENERATE | BODY_SAMPLING, "[false]"),
    ONLY("service_tier", BODY_CHAT | BODY_RESPONSES, "[\"auto\",\"default\"]"),

    // what is answered
    BOOL("stream", OPENAI | FOREIGN | BODY_GENERATE | BODY_INFERENCE, stream),
    JSON("stream_options", OPENAI | BODY_INFERENCE, stream_options),
    BOOL("include_usage", BODY_STREAM_OPTIONS, include_usage),
    BOOL("continuous_usage_stats", BODY_STREAM_OPTIONS, continuous_usage),
    ONLY("include_obfuscation", BODY_STREAM_OPTIONS, "[false]"),
    BOOL("logprobs", BODY_CHAT, want_logprobs),
    INT("logprobs", SAMPLED & ~BODY_CHAT, sampling.logprobs, 0, API_MAX_LOGPROBS),
    INT("top_logprobs", BODY_CHAT, given.top_logprobs, 0, API_MAX_LOGPROBS),
    INT("prompt_logprobs", SAMPLED, prompt_top, 0, API_MAX_PROMPT_TOP),
    ONLY("logprob_token_ids", BODY_GENERATE | BODY_SAMPLING, "[[]]"),
    ONLY("flat_logprobs", BODY_GENERATE | BODY_SAMPLING, "[false]"),
    BOOL("echo", SAMPLED, echo),                          // true: completions only
    BOOL("text_offset", BODY_SAMPLING, want_text_offset), // true: rollouts only
    BOOL("return_token_ids", OPENAI | BODY_INFERENCE, return_prompt_ids),
    BOOL("return_tokens_as_token_ids", OPENAI, tokens_as_ids),
    ONLY("return_prompt_text", BODY_CHAT, "[false]"),
    BOOL("return_token_strs", BODY_TOKENIZE, given.token_strings),
    ONLY("include_reasoning", BODY_CHAT, "[true]"),
    TEXT("request_id", OPENAI | FOREIGN | BODY_INFERENCE | BODY_ROLLOUTS, request_id),
    ONLY("detokenize", BODY_GENERATE | BODY_SAMPLING,
         ANY), // text is given where the answer has it
    ONLY("output_kind", BODY_GENERATE | BODY_SAMPLING, ANY), // vLLM's own, within its process
    ONLY("output_text_buffer_length", BODY_GENERATE | BODY_SAMPLING, ANY),
    ONLY("skip_clone", BODY_GENERATE | BODY_SAMPLING, ANY),
    ONLY("routed_experts_prompt_start", BODY_GENERATE | BODY_SAMPLING, "[0]"),

    // what only a service that keeps responses, or has tools of its own, could do
    ONLY("previous_response_id", BODY_RESPONSES, ABSENT),
    ONLY("conversation", BODY_RESPONSES, ABSENT),
    ONLY("background", BODY_RESPONSES, "[false]"),
    ONLY("prompt", BODY_RESPONSES, ABSENT),
    ONLY("include", BODY_RESPONSES, "[[],[\"reasoning.encrypted_content\"]]"), // there is none
    ONLY("truncation", BODY_RESPONSES, "[\"disabled\"]"),
    ONLY("top_logprobs", BODY_RESPONSES, "[0]"),
    ONLY("max_tool_calls", BODY_RESPONSES, ABSENT),
    ONLY("context_management", FOREIGN, ABSENT),
    ONLY("stream_options", BODY_RESPONSES, "[{},{\"include_obfuscation\":false}]"),
    ONLY("container", BODY_MESSAGES, ABSENT),
    ONLY("mcp_servers", BODY_MESSAGES, "[[]]"),
    ONLY("cache_control", BODY_MESSAGES, ANY), // the prefix cache finds prompts by themselves
    ONLY("service_tier", BODY_MESSAGES, "[\"auto\",\"standard_only\"]"),

    // for the operator of a service
    ONLY("user", OPENAI | BODY_RESPONSES, ANY),
    ONLY("safety_identifier", BODY_CHAT | BODY_RESPONSES, ANY),
    ONLY("metadata", BODY_CHAT | FOREIGN, ANY),
    ONLY("store", BODY_CHAT | BODY_RESPONSES, "[false]"),
    ONLY("moderation", BODY_CHAT, ABSENT),
    ONLY("prompt_cache_key", BODY_CHAT | BODY_RESPONSES,
         ANY), // the prefix cache finds prompts by themselves
    ONLY("prompt_cache_options", BODY_CHAT | BODY_RESPONSES, ANY),
    ONLY("prompt_cache_retention", BODY_CHAT | BODY_RESPONSES, ANY),

    // adapters and weights
    TEXT("lora_name", BODY_LORA, lora_name),
    TEXT("lora_path", BODY_LORA, lora_path),
    TEXT("copy_of", BODY_LORA, copy_of),
    JSON("config", BODY_LORA, config),
    BOOL("load_inplace", BODY_LORA, given.in_place),
    INT("writer_pid", BODY_LORA, given.writer, 0, INT_MAX),
    TEXT("adapter_path", BODY_ADAPTER, adapter_path),
    TEXT("adapter_name", BODY_ADAPTER, adapter_name),
    JSON("draft", BODY_RELOAD, draft),
};

bool request_fields_row(int i, const char **ret_name, unsigned *ret_bodies,
                        const char **ret_accepts)
{
    if (i < 0 || (size_t)i >= sizeof fields / sizeof *fields) return false;
    *ret_name = fields[i].how.name;
    *ret_bodies = fields[i].bodies;
    *ret_accepts = fields[i].accepts;
    return true;
}

static const struct field *find(const char *name, enum body body)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].bodies & body) && strcmp(fields[i].how.name, name) == 0) return &fields[i];
    return NULL;
}

json_t *request_sampling_fields(const json_t *object)
{
    json_t *ret = json_object(), *value;
    const char *name;
    json_object_foreach ((json_t *)object, name, value) {
        const struct field *f = find(name, BODY_SAMPLING);
        if (f && !f->accepts) json_object_set(ret, name, value);
    }
    return ret;
}

static enum status check_value(const struct field *f, const json_t *value)
{
    if (!f->accepts || strcmp(f->accepts, ANY) == 0 || json_is_null(value)) return ST_OK;
    json_t *list = json_loads(f->accepts, 0, NULL), *one;
    bool taken = false;
    size_t i;
    json_array_foreach (list, i, one)
        taken |= json_is_number(one) && json_is_number(value)
                     ? json_number_value(one) == json_number_value(value)
                     : json_equal(one, value);
    const bool only_one = json_array_size(list) == 1;
    char *given = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(6));
    char *only =
        only_one ? json_dumps(json_array_get(list, 0), JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    json_decref(list);
    enum status st = ST_OK;
    if (!taken)
        st = status_fail(
            ST_UNSUPPORTED, "request: \"%s\" is not supported%s%s: it is %s; leave it out",
            f->how.name, only ? " but for " : "", only ? only : "", CUT(given ? given : "?", 60));
    free(given);
    free(only);
    return st;
}

static const char *body_name(enum body body)
{
#define X(symbol, name) name,
    static const char *const names[] = {BODIES(X)};
#undef X
    return names[__builtin_ctz(body)];
}

static enum status unknown_field(const char *name, enum body body)
{
    struct nearest_name near = {.word = name};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].bodies & body) && !fields[i].accepts)
            nearest_name_try(&near, fields[i].how.name);
    if (near.name)
        return status_fail(ST_INVALID, "request: \"%s\" is no field of %s; did you mean \"%s\"?",
                           CUT(name, 64), body_name(body), near.name);
    return status_fail(ST_INVALID,
                       "request: \"%s\" is no field of %s: leave it out (docs/use/protocol.md "
                       "has the list; --unknown-fields warn lets all pass)",
                       CUT(name, 64), body_name(body));
}

// Large bodies are parsed by several threads at once (pending.c).
static pthread_mutex_t logging = PTHREAD_MUTEX_INITIALIZER;

// With the lock.
static void log_once(struct unknown_fields *unknown, const char *name, const char *body)
{
    const int max = (int)(sizeof unknown->logged / sizeof *unknown->logged);
    char *slot = unknown->logged[unknown->n_logged];
    if (unknown->n_logged == max) return;
    snprintf(slot, sizeof unknown->logged[0], "%s", name);
    for (int i = 0; i < unknown->n_logged; i++)
        if (strcmp(unknown->logged[i], slot) == 0) return;
    unknown->n_logged++;
    log_warn("a request has the field \"%s\", which %s does not know: it has no effect%s", slot,
             body, unknown->n_logged == max ? "; no further names are logged" : "");
}

// What is not in the table. vLLM's and Atropos' clients send more of an adapter than is read here.
static enum status check_unknown(const char *name, enum body body, struct unknown_fields *unknown)
{
    const bool lenient = body & (BODY_LORA | BODY_ADAPTER);
    if (!lenient && !(unknown && unknown->accept)) return unknown_field(name, body);
    if (!unknown) return ST_OK;
    pthread_mutex_lock(&logging);
    log_once(unknown, name, body_name(body));
    pthread_mutex_unlock(&logging);
    return ST_OK;
}

enum status request_read(const json_t *object, enum body body, struct unknown_fields *unknown,
                         struct api_request *ret)
{
    const char *where = body == BODY_TANDEM ? "request: \"tandem\"" : "request", *name;
    json_t *value;
    enum status st = ST_OK;
    json_object_foreach ((json_t *)object, name, value) {
        const struct field *f = find(name, body);
        CHECK(f ? check_value(f, value) : check_unknown(name, body, unknown));
    }
    for (size_t i = 0; object && i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].bodies & body) && fields[i].how.offset)
            CHECK(json_read_field(where, object, &fields[i].how, ret));
out:
    return st;
}
