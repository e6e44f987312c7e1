/* response_openai.c: OpenAI's completion and chat completion objects, whole and as streams of
 * server-sent events. A streamed answer's chunks, joined, give what the whole answer gives: both
 * are written from the same samples, a chunk from where the last one ended. Loop's thread. */
#include "infer-server/http/response.h"

#include <math.h>
#include <string.h>

static bool is_chat(const struct response *a)
{
    return generation_request(a->generation)->kind == API_CHAT;
}

// ---- log-probabilities -------------------------------------------------------------------------

// What a token is called here: its text, or "token_id:N" where that was asked for.
static void name_token(const struct response *a, int32_t token, struct bytes *to)
{
    if (generation_request(a->generation)->tokens_as_ids)
        bytes_printf(to, "token_id:%d", token);
    else
        token_text(a->model, token, to);
}

static void put_token_name(struct json_out *o, const struct response *a, int32_t token)
{
    struct bytes name = BYTES_INIT;
    name_token(a, token, &name);
    json_out_string(o, bytes_text(&name), name.len);
    bytes_release(&name);
}

static bool name_is_listed(const struct response *a, const struct top_logprob *top, int n,
                           int32_t token)
{
    struct bytes mine = BYTES_INIT, other = BYTES_INIT;
    bool listed = false;
    name_token(a, token, &mine);
    for (int i = 0; i < n && !listed; i++) {
        bytes_clear(&other);
        name_token(a, top[i].token, &other);
        listed =
            other.len == mine.len && memcmp(bytes_text(&other), bytes_text(&mine), mine.len) == 0;
    }
    bytes_release(&mine);
    bytes_release(&other);
    return listed;
}

// The alternatives of one token as an object from name to log-probability: two tokens may have the
// same text (broken characters), of which the likelier stands; the token itself is always there.
static void put_top_object(struct json_out *o, const struct response *a,
                           const struct top_logprob *top, int n_top, struct top_logprob own)
{
    json_out_open(o, '{');
    struct bytes name = BYTES_INIT;
    for (int i = 0; i <= n_top; i++) {
        const struct top_logprob entry = i < n_top ? top[i] : own;
        if (name_is_listed(a, top, i, entry.token)) continue;
        bytes_clear(&name);
        name_token(a, entry.token, &name);
        json_out_string(o, bytes_text(&name), name.len);
        bytes_puts(o->to, ":");
        o->comma = false;
        json_out_logprob(o, entry.logprob);
    }
    bytes_release(&name);
    json_out_close(o, '}');
}

// What a list of a completion's log-probabilities is about: tokens of its prompt, where that is
// echoed, and behind them those from number `from` on.
struct listed {
    const struct generation_sample *s;
    const struct api_prompt *prompt;        // NULL: not echoed, or was in an earlier chunk
    const struct generation_prompt *report; // of the prompt
    int from, n_top, prompt_stride;
};

static struct listed listed_of(const struct response *a, const struct generation_sample *s, int from,
                               bool with_prompt)
{
    const struct api_request *r = generation_request(a->generation);
    return (struct listed){.s = s,
                           .prompt = with_prompt ? &r->prompts[s->prompt] : NULL,
                           .report = generation_prompt(a->generation, s->prompt),
                           .from = from,
                           .n_top = r->sampling.logprobs,
                           .prompt_stride = r->sampling.prompt_top};
}

static void put_listed_tokens(struct json_out *o, const struct response *a, const struct listed *l)
{
    json_out_key(o, "tokens");
    json_out_open(o, '[');
    for (int i = 0; l->prompt && i < l->prompt->n_ids; i++) put_token_name(o, a, l->prompt->ids[i]);
    for (int i = l->from; i < l->s->n; i++) put_token_name(o, a, l->s->tokens[i].token);
    json_out_close(o, ']');
}

static void put_listed_logprobs(struct json_out *o, const struct listed *l)
{
    json_out_key(o, "token_logprobs");
    json_out_open(o, '[');
    for (int i = 0; l->prompt && i < l->prompt->n_ids; i++) {
        if (i == 0)
            json_out_null(o);
        else
            json_out_logprob(o, l->report->tokens[i].logprob);
    }
    for (int i = l->from; i < l->s->n; i++) json_out_logprob(o, l->s->tokens[i].logprob);
    json_out_close(o, ']');
}

static void put_listed_top(struct json_out *o, const struct response *a, const struct listed *l)
{
    json_out_key(o, "top_logprobs");
    json_out_open(o, '[');
    for (int i = 0; l->prompt && i < l->prompt->n_ids; i++) {
        const struct top_logprob own = {l->prompt->ids[i], l->report->tokens[i].logprob};
        if (i == 0)
            json_out_null(o);
        else
            put_top_object(o, a, l->report->top + (size_t)i * (size_t)l->prompt_stride, l->n_top,
                           own);
    }
    for (int i = l->from; i < l->s->n; i++) {
        const struct top_logprob own = {l->s->tokens[i].token, l->s->tokens[i].logprob};
        put_top_object(o, a, l->s->top ? l->s->top + (size_t)i * (size_t)l->n_top : NULL, l->n_top,
                       own);
    }
    json_out_close(o, ']');
}

static void put_completion_logprobs(struct json_out *o, const struct response *a,
                                    const struct generation_sample *s, int from, bool with_prompt)
{
    const struct listed l = listed_of(a, s, from, with_prompt);
    json_out_open(o, '{');
    put_listed_tokens(o, a, &l);
    put_listed_logprobs(o, &l);
    put_listed_top(o, a, &l);
    json_out_key(o, "text_offset");
    json_out_open(o, '[');
    for (int i = 0; l.prompt && i < l.prompt->n_ids; i++)
        json_out_int(o, l.report->echo.text_at[i]);
    for (int i = from; i < s->n; i++) json_out_int(o, l.report->echo.chars + s->text_at[i]);
    json_out_close(o, ']');
    json_out_close(o, '}');
}

static void put_chat_token(struct json_out *o, const struct response *a, int32_t token, float logprob)
{
    struct bytes text = BYTES_INIT;
    token_text(a->model, token, &text);
    json_out_key(o, "token");
    put_token_name(o, a, token);
    json_out_key(o, "token_id");
    json_out_int(o, token);
    json_out_key(o, "logprob");
    json_out_logprob(o, logprob);
    json_out_key(o, "bytes");
    if (a->model->tokenizer && !strstr(bytes_text(&text), "\xef\xbf\xbd")) {
        json_out_open(o, '[');
        for (size_t i = 0; i < text.len; i++) json_out_int(o, (unsigned char)text.data[i]);
        json_out_close(o, ']');
    } else {
        json_out_null(o); // a part of a character
    }
    bytes_release(&text);
}

static void put_chat_logprobs(struct json_out *o, const struct response *a,
                              const struct generation_sample *s, int from)
{
    int n_top = generation_request(a->generation)->sampling.logprobs;
    json_out_open(o, '{');
    json_out_key(o, "content");
    json_out_open(o, '[');
    for (int i = from; i < s->n; i++) {
        json_out_open(o, '{');
        put_chat_token(o, a, s->tokens[i].token, s->tokens[i].logprob);
        json_out_key(o, "top_logprobs");
        json_out_open(o, '[');
        for (int k = 0; s->top && k < n_top; k++) {
            const struct top_logprob *top = &s->top[(size_t)i * (size_t)n_top + (size_t)k];
            json_out_open(o, '{');
            put_chat_token(o, a, top->token, top->logprob);
            json_out_close(o, '}');
        }
        json_out_close(o, ']');
        json_out_close(o, '}');
    }
    json_out_close(o, ']');
    json_out_close(o, '}');
}

// ---- a choice, whole or from where the last chunk ended ----------------------------------------

static void put_text(struct json_out *o, const struct response *a, const char *key,
                     const struct generation_sample *s, size_t from, size_t to)
{
    json_out_key(o, key);
    if (a->model->tokenizer)
        json_out_string(o, bytes_text(&s->text) + from, to - from);
    else
        json_out_string(o, "", 0); // ids only; SDKs want a string here
}

// Ids of the prompt, where they were asked for: vLLM has them in a completion's choices, and beside
// those of a chat.
static void put_asked_prompt_ids(struct json_out *o, const struct response *a, int prompt)
{
    const struct api_request *r = generation_request(a->generation);
    if (!r->return_prompt_ids) return;
    json_out_key(o, "prompt_token_ids");
    put_prompt_ids(o, &r->prompts[prompt]);
}

// The completion's text, behind its prompt's.
static void put_echoed_text(struct json_out *o, const struct response *a,
                            const struct generation_sample *s, size_t from, size_t to)
{
    const struct bytes *prompt = &generation_prompt(a->generation, s->prompt)->echo.text;
    struct bytes whole = BYTES_INIT;
    bytes_append(&whole, bytes_text(prompt), prompt->len);
    bytes_append(&whole, bytes_text(&s->text) + from, to - from);
    json_out_key(o, "text");
    json_out_string(o, bytes_text(&whole), whole.len);
    o->to->failed |= whole.failed;
    bytes_release(&whole);
}

static void put_choice(struct json_out *o, const struct response *a, struct generation_sample *s,
                       bool chunk)
{
    const struct api_request *r = generation_request(a->generation);
    bool chat = is_chat(a), ended = s->finish != FINISH_NONE;
    bool with_prompt = r->echo && !(chunk && s->sent_head);
    int from = chunk ? s->sent_tokens : 0;
    size_t text_from = chunk ? s->sent_text : 0, text_to = chunk ? s->safe : s->text.len;
    json_out_open(o, '{');
    json_out_key(o, "index");
    json_out_int(o, s->choice);
    if (chat) {
        json_out_key(o, chunk ? "delta" : "message");
        json_out_open(o, '{');
        if (!chunk || !s->sent_head) {
            json_out_key(o, "role");
            json_out_text(o, "assistant");
        }
        put_text(o, a, "content", s, text_from, text_to);
        if (!chunk) {
            json_out_key(o, "refusal");
            json_out_null(o);
        }
        json_out_close(o, '}');
    } else if (with_prompt) {
        put_echoed_text(o, a, s, text_from, text_to);
    } else {
        put_text(o, a, "text", s, text_from, text_to);
    }
    json_out_key(o, "logprobs");
    if (!r->want_logprobs)
        json_out_null(o);
    else if (chat)
        put_chat_logprobs(o, a, s, from);
    else
        put_completion_logprobs(o, a, s, from, with_prompt);
    if (r->want_prompt_logprobs && !chat) put_prompt_logprobs(o, a, s->prompt);
    json_out_key(o, "finish_reason");
    json_out_text(o, ended ? finish_name(s->finish) : NULL);
    if (ended) put_stop_reason(o, a, s);
    json_out_key(o, "token_ids");
    put_token_ids(o, s, from);
    if (!chat && !(chunk && s->sent_head)) put_asked_prompt_ids(o, a, s->prompt);
    json_out_close(o, '}');
    s->sent_head = true;
    s->sent_tokens = s->n;
    s->sent_text = text_to;
}

// ---- objects -----------------------------------------------------------------------------------

static void put_head(struct json_out *o, const struct response *a, bool chunk)
{
    json_out_key(o, "id");
    json_out_text(o, generation_request(a->generation)->id);
    json_out_key(o, "object");
    json_out_text(o, !is_chat(a) ? "text_completion"
                     : chunk     ? "chat.completion.chunk"
                                 : "chat.completion");
    json_out_key(o, "created");
    json_out_int(o, a->created);
    json_out_key(o, "model");
    json_out_text(o, a->model->name);
}

void openai_response(struct response *a, struct bytes *to)
{
    struct json_out out = {to, false}, *o = &out;
    struct generation_sample *samples = generation_samples(a->generation);
    int n = generation_request(a->generation)->n_samples;
    json_out_open(o, '{');
    put_head(o, a, false);
    json_out_key(o, "choices");
    json_out_open(o, '[');
    for (int i = 0; i < n; i++) put_choice(o, a, &samples[i], false);
    json_out_close(o, ']');
    if (is_chat(a)) put_asked_prompt_ids(o, a, 0);
    if (is_chat(a) && generation_request(a->generation)->want_prompt_logprobs)
        put_prompt_logprobs(o, a, 0);
    put_usage(o, a);
    put_extras(o, a);
    json_out_close(o, '}');
    bytes_puts(to, "\n");
}

// ---- streams -----------------------------------------------------------------------------------

static void put_chunk(struct response *a, struct generation_sample *s, struct bytes *to)
{
    struct json_out out = {to, false}, *o = &out;
    bytes_puts(to, "data: ");
    json_out_open(o, '{');
    put_head(o, a, true);
    if (s && is_chat(a) && !s->sent_head) put_asked_prompt_ids(o, a, 0);
    json_out_key(o, "choices");
    json_out_open(o, '[');
    if (s) put_choice(o, a, s, true);
    json_out_close(o, ']');
    put_chunk_usage(o, a, s);
    if (s) put_chunk_extras(o, s);
    json_out_close(o, '}');
    bytes_puts(to, "\n\n");
}

enum stream_state openai_stream(struct response *a, bool overdue, struct bytes *to)
{
    return events_stream(a, overdue, put_chunk, to);
}
