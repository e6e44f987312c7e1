/* response.h: the responses to requests for text, written from a generation: whole, or piece by
 * piece as the client reads them. Loop's thread.
 *
 * Functions put_X(o, key, ...) write one value, under `key` where they stand in an object (NULL: in
 * a list), as those of json.h do. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_RESPONSE_H
#define INFER_SERVER_RESPONSE_H

#include "infer-server/http/generation.h"
#include "common/http/http.h"

// How far a stream of events has come (response_foreign.c).
struct event_state {
    bool begun, open; // of the response; of part number `part`, of which `sent` bytes are out
    int part, sequence;
    size_t sent;
};

struct response {
    const struct api_model *model;
    struct generation *generation;
    const struct api_request *request;
    struct generation_sample *samples; // (request->n_samples), the generation's
    int64_t created;                   // seconds since 1970
    int unfinished; // choices or lines of a stream that have not had their last piece
    struct event_state events;
};

// OpenAI's objects, and those of /inference/v1/generate: whole, and as chunks of a stream of
// server-sent events. `overdue`: the request has run into its time-out; the stream ends with an
// error.
void choices_response(struct response *a, struct bytes *to);
enum stream_state choices_stream(struct response *a, bool overdue, struct bytes *to);
// /v1/rollouts: one line a finished sample.
enum stream_state rollouts_stream(struct response *a, bool overdue, struct bytes *to);
// /generate
void generate_response(struct response *a, struct bytes *to);

// /v1/responses and /v1/messages: OpenAI's newer object and its events, and Anthropic's.
void responses_response(struct response *a, struct bytes *to);
enum stream_state responses_stream(struct response *a, bool overdue, struct bytes *to);
void messages_response(struct response *a, struct bytes *to);
enum stream_state messages_stream(struct response *a, bool overdue, struct bytes *to);

// ---- pieces that several of them have ----------------------------------------------------------

// "stop", "length", "abort", "error"; NULL while it runs
extern const char *const finish_reason_names[];
// "ID": logprob, or decoded, as vLLM's Logprob: an object, with the rank where that is above 0.
void put_logprob(struct json_out *o, const struct response *a, struct top_logprob token, int rank,
                 bool decoded);
// What to tell the client of a sample that failed (500) or was cancelled by the engine (503).
unsigned failure_code(const struct generation_sample *s, const char **ret_sentence);
void put_prompt_ids(struct json_out *o, const char *key, const struct api_prompt *prompt);
// The text of a sample that has ended; null where there is no tokenizer.
void put_sample_text(struct json_out *o, const char *key, const struct response *a,
                     const struct generation_sample *s);
// Token ids from number `from` on.
void put_token_ids(struct json_out *o, const char *key, const struct generation_sample *s,
                   int from);
// "finish_reason", and of a sample that has ended "stop_reason", vLLM's: the stop string or the
// asked-for stop token that ended it, else null.
void put_finish(struct json_out *o, const struct response *a, const struct generation_sample *s);
// The next sample of a stream. STREAM_MORE: *ret has something to say. STREAM_WAIT: there is none.
// STREAM_END: the stream is overdue, or that sample failed; the error object has been written,
// between `before` and `after`.
enum stream_state stream_next(struct response *a, bool overdue, const char *before,
                              const char *after, struct bytes *to, struct generation_sample **ret);

// response_logprobs.c: the value of "logprobs" of a choice's tokens from number `from` on.
// with_prompt: behind those of its prompt, which is echoed.
void put_choice_logprobs(struct json_out *o, const struct response *a,
                         const struct generation_sample *s, int from, bool with_prompt);

// A prompt's log-probabilities, which the request has asked for: vLLM's list of
// {"ID": {"logprob", "rank", "decoded_token"}, ...}, or (not decoded) one with entries
// [{"ID": logprob}, ...]; the keys of /v1/rollouts.
void put_prompt_logprobs(struct json_out *o, const char *key, const struct response *a, int prompt,
                         bool decoded);
void put_prompt_lists(struct json_out *o, const struct response *a, int prompt);

// What a response says beside its choices.
// "usage" of the whole response.
void put_usage(struct json_out *o, const struct response *a);
// That of a chunk, where it was asked for: of the choice s so far, or (NULL) of all in the end.
void put_chunk_usage(struct json_out *o, const struct response *a,
                     const struct generation_sample *s);
uint64_t response_version(const struct response *a); // of the newest last token; 0: none yet
// "weight_version" of the last token and "spec_decode", of the whole response and of one choice.
void put_extras(struct json_out *o, const struct response *a);
void put_chunk_extras(struct json_out *o, const struct generation_sample *s);
// "spec_decode", the drafts of a sample: {"num_drafts", ..., "acceptance_histogram"}; null where
// nothing was drafted. Entry i of the histogram counts the verifying steps that accepted i drafts.
void put_spec_decode(struct json_out *o, const struct draft_counts *c);
void put_verified_drafts(struct json_out *o, const struct draft_counts *c); // where something was
// The keys of that object that others have too, into an open object.
void put_draft_counts(struct json_out *o, const struct draft_counts *c);

#endif
