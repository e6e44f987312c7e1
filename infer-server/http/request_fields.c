/* request_fields.c: the table, and the check of one object against it. The names are those of
 * OpenAI's API, of vLLM's requests and SamplingParams, and this server's own. A field that gains
 * its effect changes its row to READ, and is read where its kind is parsed (api_request.c). */
#include "infer-server/http/request_fields.h"
#include "common/base/log.h"
#include "common/base/names.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OPENAI  (PLACE_COMPLETIONS | PLACE_CHAT)
#define SAMPLED (OPENAI | PLACE_GENERATE | PLACE_SAMPLING)
#define CHATS   (PLACE_CHAT | PLACE_GROUP | PLACE_TOKENIZE)
#define MODELS                                                                                     \
    (OPENAI | PLACE_GENERATE | PLACE_INFERENCE | PLACE_ROLLOUTS | PLACE_TOKENIZE | PLACE_DETOKENIZE)

#define READ   NULL
#define ANY    "*"
#define ABSENT "[]"                 // null only
#define EMPTY  "[false,\"\",[],{}]" // and what asks for nothing

struct field {
    const char *name;
    unsigned places;
    const char *accepts; // READ, ANY, or the values that change nothing; null is always taken
};

static const struct field fields[] = {
    // what is generated from
    {"model", MODELS, READ},
    {"lora", OPENAI | PLACE_GENERATE | PLACE_INFERENCE | PLACE_ROLLOUTS, READ},
    {"prompt", PLACE_COMPLETIONS | PLACE_GENERATE | PLACE_GROUP | PLACE_TOKENIZE | PLACE_PROMPT,
     READ},
    {"prompts", PLACE_GENERATE, READ},
    {"prompt_token_ids", PLACE_COMPLETIONS | PLACE_GROUP | PLACE_PROMPT, READ},
    {"token_ids", PLACE_INFERENCE, READ},
    {"tokens", PLACE_DETOKENIZE, READ},
    {"messages", CHATS, READ},
    {"groups", PLACE_ROLLOUTS, READ},
    {"sampling", PLACE_ROLLOUTS, READ},
    {"sampling_params", PLACE_INFERENCE, READ},
    {"id", PLACE_GROUP, READ},
    {"add_special_tokens", PLACE_COMPLETIONS | PLACE_GENERATE | PLACE_GROUP | PLACE_TOKENIZE, READ},
    {"add_special_tokens", PLACE_CHAT, "[false]"},
    {"add_generation_prompt", CHATS, READ},
    {"continue_final_message", CHATS, READ},
    {"chat_template", CHATS, ABSENT},
    {"chat_template_kwargs", CHATS, READ},
    {"documents", CHATS, "[[]]"},
    {"tools", CHATS, READ},
    {"tools", PLACE_COMPLETIONS | PLACE_GENERATE | PLACE_SAMPLING, "[[]]"},
    {"functions", CHATS | SAMPLED, "[[]]"},
    {"tool_choice", PLACE_CHAT, "[\"none\",\"auto\"]"},
    {"function_call", PLACE_CHAT, "[\"none\",\"auto\"]"},
    {"parallel_tool_calls", PLACE_CHAT, READ},
    {"suffix", SAMPLED, "[\"\"]"},
    {"prompt_embeds", PLACE_COMPLETIONS, EMPTY},
    {"images", SAMPLED, EMPTY},
    {"features", PLACE_INFERENCE, EMPTY},
    {"content_parts", PLACE_INFERENCE, EMPTY},
    {"mm_processor_kwargs", CHATS, EMPTY},
    {"media_io_kwargs", CHATS, EMPTY},
    {"audio", PLACE_CHAT, ABSENT},
    {"modalities", PLACE_CHAT, "[[\"text\"]]"},
    {"truncate_prompt_tokens", SAMPLED, "[-1]"},
    {"truncation_side", OPENAI, ANY}, // nothing is truncated
    {"lora_request", SAMPLED, EMPTY},
    {"generation_kwargs", PLACE_GENERATE, EMPTY},
    {"web_search_options", PLACE_CHAT, ABSENT},

    // how
    {"n", SAMPLED | PLACE_GROUP, READ},
    {"best_of", PLACE_COMPLETIONS, READ},
    {"max_tokens", SAMPLED, READ},
    {"max_completion_tokens", SAMPLED, READ},
    {"min_tokens", SAMPLED, READ},
    {"temperature", SAMPLED, READ},
    {"top_p", SAMPLED, READ},
    {"top_k", SAMPLED, READ},
    {"min_p", SAMPLED, READ},
    {"seed", SAMPLED | PLACE_GROUP | PLACE_TANDEM, READ},
    {"stop", SAMPLED, READ},
    {"stop_token_ids", SAMPLED, READ},
    {"include_stop_str_in_output", SAMPLED, READ},
    {"ignore_eos", SAMPLED, READ},
    {"skip_special_tokens", SAMPLED, READ},
    {"speculative", SAMPLED, READ},
    {"tandem", PLACE_SAMPLING, READ}, // of rollouts only
    {"selector", PLACE_TANDEM, READ},
    {"p", PLACE_TANDEM, READ},
    {"chunk", PLACE_TANDEM, READ},
    {"frequency_penalty", SAMPLED, READ},
    {"presence_penalty", SAMPLED, READ},
    {"repetition_penalty", SAMPLED, READ},
    {"length_penalty", SAMPLED, "[1]"},
    {"logit_bias", SAMPLED, READ},
    {"bad_words", SAMPLED, "[[]]"},
    {"allowed_token_ids", SAMPLED, "[[]]"},
    {"use_beam_search", SAMPLED, "[false]"},
    {"early_stopping", SAMPLED, "[false]"},
    {"response_format", SAMPLED, "[{\"type\":\"text\"}]"},
    {"structured_outputs", SAMPLED, EMPTY},
    {"structured_outputs_regex", SAMPLED, EMPTY},
    {"guided_decoding_regex", SAMPLED, EMPTY},
    {"guided_json", SAMPLED, EMPTY},
    {"guided_regex", SAMPLED, EMPTY},
    {"guided_choice", SAMPLED, EMPTY},
    {"guided_grammar", SAMPLED, EMPTY},
    {"thinking_token_budget", SAMPLED, "[-1]"},
    {"repetition_detection", SAMPLED, EMPTY},
    {"reasoning_effort", PLACE_CHAT, ABSENT},
    {"verbosity", PLACE_CHAT, "[\"medium\"]"},
    {"prediction", PLACE_CHAT, ANY}, // a hint: text that may come
    {"spaces_between_special_tokens", SAMPLED, "[true]"},
    {"vllm_xargs", OPENAI, EMPTY},
    {"extra_args", PLACE_GENERATE | PLACE_SAMPLING, EMPTY},
    {"cache_salt", OPENAI | PLACE_INFERENCE, READ},
    {"priority", OPENAI | PLACE_INFERENCE, "[0]"},
    {"kv_transfer_params", OPENAI | PLACE_INFERENCE, EMPTY},
    {"skip_reading_prefix_cache", PLACE_GENERATE | PLACE_SAMPLING, "[false]"},
    {"service_tier", PLACE_CHAT, "[\"auto\",\"default\"]"},

    // what is answered
    {"stream", OPENAI | PLACE_GENERATE | PLACE_INFERENCE, READ},
    {"stream_options", OPENAI | PLACE_INFERENCE, READ},
    {"include_usage", PLACE_STREAM_OPTIONS, READ},
    {"continuous_usage_stats", PLACE_STREAM_OPTIONS, READ},
    {"include_obfuscation", PLACE_STREAM_OPTIONS, "[false]"},
    {"logprobs", SAMPLED, READ},
    {"top_logprobs", PLACE_CHAT, READ},
    {"prompt_logprobs", SAMPLED, READ},
    {"logprob_token_ids", PLACE_GENERATE | PLACE_SAMPLING, "[[]]"},
    {"flat_logprobs", PLACE_GENERATE | PLACE_SAMPLING, "[false]"},
    {"echo", SAMPLED, READ},               // true: completions only
    {"text_offset", PLACE_SAMPLING, READ}, // true: rollouts only
    {"return_token_ids", OPENAI | PLACE_INFERENCE, READ},
    {"return_tokens_as_token_ids", OPENAI, READ},
    {"return_prompt_text", PLACE_CHAT, "[false]"},
    {"return_token_strs", PLACE_TOKENIZE, READ},
    {"include_reasoning", PLACE_CHAT, "[true]"},
    {"request_id", OPENAI | PLACE_INFERENCE, READ},
    {"detokenize", PLACE_GENERATE | PLACE_SAMPLING, ANY},  // text is given where the answer has it
    {"output_kind", PLACE_GENERATE | PLACE_SAMPLING, ANY}, // vLLM's own, within its process
    {"output_text_buffer_length", PLACE_GENERATE | PLACE_SAMPLING, ANY},
    {"skip_clone", PLACE_GENERATE | PLACE_SAMPLING, ANY},
    {"routed_experts_prompt_start", PLACE_GENERATE | PLACE_SAMPLING, "[0]"},

    // for the operator of a service
    {"user", OPENAI, ANY},
    {"safety_identifier", PLACE_CHAT, ANY},
    {"metadata", PLACE_CHAT, ANY},
    {"store", PLACE_CHAT, "[false]"},
    {"moderation", PLACE_CHAT, ABSENT},
    {"prompt_cache_key", PLACE_CHAT, ANY}, // the prefix cache finds prompts by themselves
    {"prompt_cache_options", PLACE_CHAT, ANY},
    {"prompt_cache_retention", PLACE_CHAT, ANY},
};

bool request_fields_row(int i, const char **ret_name, unsigned *ret_places,
                        const char **ret_accepts)
{
    if (i < 0 || (size_t)i >= sizeof fields / sizeof *fields) return false;
    *ret_name = fields[i].name;
    *ret_places = fields[i].places;
    *ret_accepts = fields[i].accepts;
    return true;
}

static const struct field *find(const char *name, enum field_place place)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].places & place) && strcmp(fields[i].name, name) == 0) return &fields[i];
    return NULL;
}

static bool same(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b)) return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static enum status check_value(const struct field *f, const json_t *value)
{
    if (!f->accepts || strcmp(f->accepts, ANY) == 0 || json_is_null(value)) return ST_OK;
    json_t *list = json_loads(f->accepts, 0, NULL), *one;
    bool taken = false;
    size_t i;
    json_array_foreach (list, i, one) taken |= same(one, value);
    const bool only_one = json_array_size(list) == 1;
    char *given = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(6));
    char *only =
        only_one ? json_dumps(json_array_get(list, 0), JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    json_decref(list);
    enum status st = ST_OK;
    if (!taken)
        st = status_fail(ST_UNSUPPORTED,
                         "request: \"%s\" is not supported%s%s: it is %.60s; leave it out", f->name,
                         only ? " but for " : "", only ? only : "", given ? given : "?");
    free(given);
    free(only);
    return st;
}

static const char *near_field(const char *name, enum field_place place)
{
    struct nearest_name nearest = {.word = name};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].places & place) && fields[i].accepts == READ)
            nearest_name_try(&nearest, fields[i].name);
    return nearest.name;
}

static const char *place_name(enum field_place place)
{
    static const char *const names[] = {"/v1/completions",
                                        "/v1/chat/completions",
                                        "/generate",
                                        "/inference/v1/generate",
                                        "/v1/rollouts",
                                        "the sampling parameters",
                                        "a group of /v1/rollouts",
                                        "\"stream_options\"",
                                        "/tokenize",
                                        "/detokenize",
                                        "a \"prompt\" object",
                                        "\"tandem\""}; // by the number of its bit
    return names[__builtin_ctz(place)];
}

static enum status unknown_field(const char *name, enum field_place place)
{
    const char *near = near_field(name, place);
    if (near)
        return status_fail(ST_INVALID, "request: \"%.64s\" is no field of %s; did you mean \"%s\"?",
                           name, place_name(place), near);
    return status_fail(ST_INVALID,
                       "request: \"%.64s\" is no field of %s: leave it out (docs/use/protocol.md "
                       "has the list; --unknown-fields warn lets all pass)",
                       name, place_name(place));
}

// Large bodies are parsed by several threads at once (job.h).
static pthread_mutex_t logging = PTHREAD_MUTEX_INITIALIZER;

// With the lock.
static void log_once(struct unknown_fields *unknown, const char *name, const char *place)
{
    const int max = (int)(sizeof unknown->logged / sizeof *unknown->logged);
    char *slot = unknown->logged[unknown->n_logged];
    if (unknown->n_logged == max) return;
    snprintf(slot, sizeof unknown->logged[0], "%s", name);
    for (int i = 0; i < unknown->n_logged; i++)
        if (strcmp(unknown->logged[i], slot) == 0) return;
    unknown->n_logged++;
    log_warn("a request has the field \"%s\", which %s does not know: it has no effect%s", slot,
             place, unknown->n_logged == max ? "; no further names are logged" : "");
}

enum status request_fields_check(const json_t *object, enum field_place place,
                                 struct unknown_fields *unknown)
{
    const char *name;
    json_t *value;
    json_object_foreach ((json_t *)object, name, value) {
        const struct field *f = find(name, place);
        enum status st = ST_OK;
        if (f)
            st = check_value(f, value);
        else if (unknown && unknown->accept) {
            pthread_mutex_lock(&logging);
            log_once(unknown, name, place_name(place));
            pthread_mutex_unlock(&logging);
        } else
            st = unknown_field(name, place);
        if (st != ST_OK) return st;
    }
    return ST_OK;
}
