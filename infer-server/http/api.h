/* api.h: what a request for text asks for, read from its JSON body and checked in full, and the
 * answers written from what was generated. Nothing here knows of sockets: the parsers take a body
 * and info about the model, the writers fill a byte buffer. The parsers run on any thread
 * (pending.c), all else on the loop's. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_API_H
#define INFER_SERVER_API_H

#include "infer-server/engine/engine.h"
#include "common/base/json.h"
#include "infer-server/http/tool_calls.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"

#define API_MAX_N          4096  // samples of one prompt
#define API_MAX_PROMPTS    1024  // prompts or groups of one request
#define API_MAX_SAMPLES    65536 // of one request
#define API_MAX_LOGPROBS   20
#define API_MAX_PROMPT_TOP 128      // likeliest tokens with each prompt token
#define API_MAX_BIASES     4096     // entries of logit_bias
#define API_FROZEN         "frozen" // the model of --tandem-model, as "model" and /v1/models have it
#define REQUEST_NAME_BYTES 129      // what a client may call its request
#define REQUEST_ID_BYTES   144      // "chatcmpl-NAME"
// Of all prompts in one whole answer, the likeliest tokens' among them: some 300 MB as JSON.
#define API_MAX_PROMPT_LOGPROBS 4000000

// ---- stop strings (stop.c) ----------------------------------------------------------------------
// Found in text that arrives in pieces. A match may lie across any number of tokens; what is found
// does not depend on where the pieces end: the stop string whose last byte comes first, and of
// several that end there the longest.

#define STOP_STRINGS_MAX 16
#define STOP_BYTES_MAX   1024 // of one string

struct stop_set {
    char *strings[STOP_STRINGS_MAX]; // owned
    size_t lengths[STOP_STRINGS_MAX];
    int n;
};

// Takes a copy. ST_INVALID for an empty or too long string, or one too many.
enum status stop_set_add(struct stop_set *set, const char *text, size_t len);
void stop_set_release(struct stop_set *set);

// Looks for the first stop string that ends after byte `from` of text; nothing ends before it (it
// was looked at when it came). ret_which and ret_at (first byte of the match) are set where one is
// found.
bool stop_find(const struct stop_set *set, const char *text, size_t len, size_t from,
               int *ret_which, size_t *ret_at);

// Bytes at the end of text that may be the beginning of a stop string: not to be given out yet.
size_t stop_hold(const struct stop_set *set, const char *text, size_t len);

// ---- requests -----------------------------------------------------------------------------------

// What is done about a field that the table (request_fields.c) does not have.
struct unknown_fields {
    bool accept; // --unknown-fields warn: each name is logged once, and the field has no effect
    char logged[32][64];
    int n_logged;
};

// The served model, as requests are checked against it.
struct api_model {
    const char *name; // what /v1/models lists and "model" must be
    const char *folder;
    const struct tokenizer *tokenizer; // NULL: token ids only
    struct constraints *constraints;   // NULL: there is no text to constrain
    const struct chat_template *chat;  // NULL: chat is refused with why_no_chat
    const char *why_no_chat;
    const struct tool_form *tool_form; // of calls in a chat's answers; NULL: they stay text
    struct engine *engine; // whose adapters "model" and "lora" name; NULL: there are none
    bool frozen;           // there is a frozen model, which "model" names as API_FROZEN
    char active_adapter[ADAPTER_NAME_BYTES]; // of /generate where it names none; "": none
    int vocab_size;
    int max_context;                // tokens, prompt and completion together
    struct unknown_fields *unknown; // NULL: refused
    // Defaults of the OpenAI endpoints: generation_config.json's.
    double temperature, top_p, min_p;
    int top_k;
    int max_new_tokens; // 0: OpenAI's own
};

// Whether a name is that of the frozen model, which there is.
bool api_names_frozen(const struct api_model *model, const char *name);

enum api_kind {
    API_COMPLETIONS,
    API_CHAT,
    API_ROLLOUTS,
    API_GENERATE,
    API_INFERENCE,
    API_RESPONSES,
    API_MESSAGES
};

// Fields that mean something with others alone, or are no numbers: as they stand in the JSON, whose
// they are; NULL where they do not.
struct api_given {
    const char *model, *lora, *request_id, *cache_salt, *speculative, *selector;
    const json_t *prompt, *prompts, *prompt_ids, *messages, *tools, *tool_choice, *template_kwargs;
    const json_t *input, *system, *text, *thinking; // of /v1/responses and /v1/messages
    const json_t *groups, *group_id, *sampling, *tandem, *stream_options;
    const json_t *stop, *stop_token_ids, *logit_bias;
    const json_t *response_format, *structured;
    const char *format_field; // where response_format stood; NULL: in its own
    const json_t *guided_json, *guided_regex, *guided_choice, *guided_grammar; // vLLM's
    const json_t *json_schema, *regex, *ebnf, *structural_tag;                 // SGLang's
    const char *constrained_by; // the one of these that is given; NULL: none, or tools alone
    const char *chat_template, *effort;
    bool add_special, generation_prompt, continue_final, token_strings, strict_whitespace;
    int best_of, top_logprobs; // best_of 0: not said
    // of the adapters' endpoints, and of /reload
    const char *lora_name, *lora_path, *copy_of, *adapter_path, *adapter_name;
    const json_t *config, *draft;
    bool in_place;
    int writer;
};

struct api_prompt {
    int32_t *ids; // owned
    int n_ids;
    bool tokenised;  // by the server, from text
    bool in_thought; // it ends behind <think>
    char *text;      // (text_len) as it was sent, where the response has it; owned; else NULL
    size_t text_len;
    json_t *group_id; // rollouts: as the client gave it
    int n;            // samples
    uint64_t seed;
    struct constraint *constraint; // a group's own; NULL: the request's
};

struct api_request {
    char name[REQUEST_NAME_BYTES];    // "request_id", or empty
    char id[REQUEST_ID_BYTES];        // "cmpl-NAME", "chatcmpl-NAME"...
    char adapter[ADAPTER_NAME_BYTES]; // that it is sampled by, or API_FROZEN; "": the model itself
    enum api_kind kind;
    int n_prompts, n_samples; // n_samples: of all prompts
    struct api_prompt *prompts;
    struct sampling sampling;      // of all prompts, but for n and seed
    struct token_bias *logit_bias; // sampling's; owned
    json_t *constraint;            // constraint.h's spec; owned; NULL: none
    json_t *calls;                 // the same of tool calls that may come instead; owned
    struct stop_set stop;
    bool include_stop, skip_special;
    bool stream, include_usage;
    bool continuous_usage;     // usage so far, in every chunk
    bool return_prompt_ids;    // in the response
    bool tokens_as_ids;        // log-probabilities name tokens "token_id:N"
    bool want_logprobs;        // in the answer; sampling.logprobs then says how many alternatives
    bool echo;                 // completions: a choice begins with its prompt
    bool want_prompt_logprobs; // in the answer, with prompt_top likeliest tokens
    int prompt_top;
    bool want_text_offset; // rollouts: also where nothing was drafted
    bool filtered;         // what is sampled from may differ from the raw distribution
    bool many_prompts;     // /generate: "prompts", not "prompt"
    json_t *tools;         // whose calls the answer is searched for; owned; NULL: it is not
    const struct tool_form *tool_form; // in which they are written
    bool several_calls;                // of a choice; false: one at most
    bool shorten;                      // max_tokens is a default, and gives way to the context
    json_t *body;                      // of /v1/responses, which gives parts of it back; owned
    json_t *translated;                // what `given` borrows beside the body; owned
    struct api_given given;            // while it is read, then empty
};

// ST_FORMAT: not JSON; ST_INVALID, ST_UNSUPPORTED: a field, named in quotes by the sentence;
// ST_NOT_FOUND: another model's name.
enum status api_request_parse(enum api_kind kind, const struct api_model *model, const char *body,
                              size_t len, struct api_request **ret);
// The same of a body that is parsed already.
enum status api_request_read(enum api_kind kind, const struct api_model *model,
                             const json_t *object, struct api_request **ret);
void api_request_free(struct api_request *r);

// A body that is an object (json_decref); with `empty`, none at all is {}.
enum status api_read_object(const char *body, size_t len, bool empty, json_t **ret);
// Token ids of {"prompt"} or {"messages"}, a body of /tokenize; *ret_strings: their spelling too.
enum status api_tokenize(const struct api_model *model, const json_t *object,
                         struct token_list *ret, bool *ret_strings);
// Ids of {"tokens"}, a body of /detokenize.
enum status api_detokenize(const struct api_model *model, const json_t *object,
                           struct token_list *ret);

#endif
