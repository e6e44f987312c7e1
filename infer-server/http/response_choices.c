/* response_choices.c: completions, chat completions and /inference/v1/generate: an object with a
 * list of choices, whole or as a stream of server-sent events. A stream's chunks, joined, give what
 * the whole response gives: both are written from the same samples, a chunk from where the last one
 * ended. /inference/v1/generate is tokens in, tokens out: it has no text. Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/response.h"

// Ids of the prompt, where they were asked for: vLLM has them in a completion's choices, and beside
// those of the others.
static void put_asked_prompt_ids(struct json_out *o, const struct response *a, int prompt)
{
    if (a->request->return_prompt_ids)
        put_prompt_ids(o, "prompt_token_ids", &a->request->prompts[prompt]);
}

// The completion's text, behind its prompt's where that is echoed. Without a tokenizer there is
// none; SDKs want a string all the same.
static void put_text(struct json_out *o, const struct response *a, struct generation_sample *s,
                     bool chunk, bool with_prompt)
{
    const size_t from = chunk ? s->sent_text : 0, to = chunk ? s->safe : s->text.len;
    struct bytes whole = BYTES_INIT;
    if (with_prompt) {
        const struct bytes *prompt = &a->generation->runs[s->prompt].report.echo.text;
        bytes_append(&whole, bytes_text(prompt), prompt->len);
    }
    bytes_append(&whole, bytes_text(&s->text) + from, to - from);
    json_out_string(o, "text", bytes_text(&whole), whole.len);
    o->to->failed |= whole.failed;
    bytes_release(&whole);
    s->sent_text = to;
}

static bool calls_grew(const struct generation_sample *s, int n)
{
    return n > s->sent_calls || (n > 0 && s->tools->list[n - 1].arguments.len > s->sent_arguments);
}

// What is new of the first n calls; only the last one that was sent may have grown.
static void put_call_deltas(struct json_out *o, struct generation_sample *s, int n)
{
    json_out_open(o, "tool_calls", '[');
    for (int i = s->sent_calls > 0 ? s->sent_calls - 1 : 0; i < n; i++) {
        const bool first = i >= s->sent_calls;
        put_tool_call_delta(o, &s->tools->list[i], i, first, first ? 0 : s->sent_arguments);
        s->sent_arguments = s->tools->list[i].arguments.len;
    }
    json_out_close(o, ']');
    s->sent_calls = n;
}

// "message", or what a chunk adds to it.
static void put_message(struct json_out *o, const struct response *a, struct generation_sample *s,
                        bool chunk, bool first)
{
    const struct bytes *content = s->tools ? &s->tools->content : &s->text;
    const size_t from = chunk ? s->sent_text : 0;
    const size_t to = chunk && !s->tools ? s->safe : content->len;
    const int n = !s->tools ? 0 : !a->request->several_calls && s->tools->n > 0 ? 1 : s->tools->n;
    json_out_open(o, chunk ? "delta" : "message", '{');
    if (first) json_out_text(o, "role", "assistant");
    const bool calls = chunk ? calls_grew(s, n) : n > 0;
    if (calls && to == from)
        json_out_null(o, "content");
    else
        json_out_string(o, "content", bytes_text(content) + from, to - from);
    if (calls && chunk)
        put_call_deltas(o, s, n);
    else if (calls)
        JSON_OUT_LIST(o, "tool_calls", i, 0, n, put_tool_call(o, &s->tools->list[i]));
    if (!chunk) json_out_null(o, "refusal");
    json_out_close(o, '}');
    s->sent_text = to;
}

static void put_choice(struct json_out *o, const struct response *a, struct generation_sample *s,
                       bool chunk)
{
    const enum api_kind kind = a->request->kind;
    const bool first = !chunk || !s->sent_head, with_prompt = a->request->echo && first;
    const int from = chunk ? s->sent_tokens : 0;
    json_out_open(o, NULL, '{');
    json_out_int(o, "index", s->choice);
    if (kind == API_CHAT) {
        put_message(o, a, s, chunk, first);
    } else if (kind == API_COMPLETIONS) {
        put_text(o, a, s, chunk, with_prompt);
    } else {
        put_token_ids(o, "token_ids", s, from);
    }
    if (a->request->want_logprobs)
        put_choice_logprobs(o, a, s, from, with_prompt);
    else
        json_out_null(o, "logprobs");
    if (a->request->want_prompt_logprobs && kind == API_COMPLETIONS)
        put_prompt_logprobs(o, "prompt_logprobs", a, s->prompt, true);
    put_finish(o, a, s);
    if (kind != API_INFERENCE) put_token_ids(o, "token_ids", s, from);
    if (kind == API_COMPLETIONS && first) put_asked_prompt_ids(o, a, s->prompt);
    json_out_close(o, '}');
    s->sent_tokens = s->n;
}

static void put_head(struct json_out *o, const struct response *a, bool chunk)
{
    const enum api_kind kind = a->request->kind;
    json_out_text(o, kind == API_INFERENCE ? "request_id" : "id", a->request->id);
    if (kind != API_INFERENCE) {
        json_out_text(o, "object",
                      kind == API_COMPLETIONS ? "text_completion"
                      : chunk                 ? "chat.completion.chunk"
                                              : "chat.completion");
        json_out_int(o, "created", a->created);
    }
    json_out_text(o, "model", a->request->adapter[0] ? a->request->adapter : a->model->name);
}

void choices_response(struct response *a, struct bytes *to)
{
    struct json_out out = {to, false}, *o = &out;
    json_out_open(o, NULL, '{');
    put_head(o, a, false);
    JSON_OUT_LIST(o, "choices", i, 0, a->request->n_samples,
                  put_choice(o, a, &a->samples[i], false));
    if (a->request->kind != API_COMPLETIONS) {
        put_asked_prompt_ids(o, a, 0);
        if (a->request->want_prompt_logprobs) put_prompt_logprobs(o, "prompt_logprobs", a, 0, true);
    }
    put_usage(o, a);
    put_extras(o, a);
    json_out_close(o, '}');
    bytes_puts(to, "\n");
}

// What is new of a sample, or (NULL) the usage of all behind the last.
static void put_chunk(struct response *a, struct generation_sample *s, struct bytes *to)
{
    struct json_out out = {to, false}, *o = &out;
    const enum api_kind kind = a->request->kind;
    const bool first = s && !s->sent_head;
    bytes_puts(to, "data: ");
    json_out_open(o, NULL, '{');
    put_head(o, a, true);
    if (first && kind == API_CHAT) put_asked_prompt_ids(o, a, 0);
    json_out_open(o, "choices", '[');
    if (s) put_choice(o, a, s, true);
    json_out_close(o, ']');
    if (first && kind == API_INFERENCE) put_asked_prompt_ids(o, a, 0);
    put_chunk_usage(o, a, s);
    if (s) {
        put_chunk_extras(o, s);
        s->sent_head = true;
    }
    json_out_close(o, '}');
    bytes_puts(to, "\n\n");
}

enum stream_state choices_stream(struct response *a, bool overdue, struct bytes *to)
{
    struct generation_sample *s;
    enum stream_state state = stream_next(a, overdue, "data: ", "\n\ndata: [DONE]\n\n", to, &s);
    if (state != STREAM_MORE) return state;
    put_chunk(a, s, to);
    if (s->finish == FINISH_NONE || --a->unfinished > 0) return STREAM_MORE;
    if (a->request->include_usage) put_chunk(a, NULL, to);
    bytes_puts(to, "data: [DONE]\n\n");
    return STREAM_END;
}
