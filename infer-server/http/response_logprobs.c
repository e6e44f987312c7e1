/* response_logprobs.c: log-probabilities in the form of each endpoint: of a choice's tokens, as
 * lists beside each other for completions, a list of objects for the others; and of a prompt's.
 * Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/response.h"

#include <stdio.h>
#include <string.h>

// ---- tokens -------------------------------------------------------------------------------------

// What a token is called: its text as it stands behind other text, or (as_id, or where there is no
// tokenizer) "token_id:N".
static void name_token(const struct response *a, int32_t token, bool as_id, struct bytes *to)
{
    if (a->model->tokenizer && !as_id)
        tokenizer_decode_inside(a->model->tokenizer, token, to);
    else
        bytes_printf(to, "token_id:%d", token);
}

static void put_token_text(struct json_out *o, const char *key, const struct response *a,
                           int32_t token, bool as_id)
{
    struct bytes text = BYTES_INIT;
    name_token(a, token, as_id, &text);
    json_out_string(o, key, bytes_text(&text), text.len);
    bytes_release(&text);
}

void put_logprob(struct json_out *o, const struct response *a, struct top_logprob token, int rank,
                 bool decoded)
{
    char key[16];
    snprintf(key, sizeof key, "%d", token.token);
    if (!decoded) {
        json_out_logprob(o, key, token.logprob);
        return;
    }
    json_out_open(o, key, '{');
    json_out_logprob(o, "logprob", token.logprob);
    if (rank > 0) json_out_int(o, "rank", rank);
    put_token_text(o, "decoded_token", a, token.token, false);
    json_out_close(o, '}');
}

// The likeliest tokens at position i of a sample, n_top of them; NULL where none were asked for.
static const struct top_logprob *top_of(const struct generation_sample *s, int i, int n_top)
{
    return s->top ? s->top + (size_t)i * (size_t)n_top : NULL;
}

// ---- completions -------------------------------------------------------------------------------

static bool name_is_listed(const struct response *a, const struct top_logprob *top, int n,
                           const struct bytes *mine)
{
    struct bytes other = BYTES_INIT;
    bool listed = false;
    for (int i = 0; i < n && !listed; i++) {
        bytes_clear(&other);
        name_token(a, top[i].token, a->request->tokens_as_ids, &other);
        listed =
            other.len == mine->len && memcmp(bytes_text(&other), bytes_text(mine), other.len) == 0;
    }
    bytes_release(&other);
    return listed;
}

// The alternatives of one token as an object from name to log-probability: two tokens may have the
// same text (broken characters), of which the likelier stands; the token itself is always there.
static void put_top_object(struct json_out *o, const struct response *a,
                           const struct top_logprob *top, int n_top, struct top_logprob own)
{
    struct bytes name = BYTES_INIT;
    json_out_open(o, NULL, '{');
    for (int i = 0; i <= n_top; i++) {
        const struct top_logprob entry = i < n_top ? top[i] : own;
        bytes_clear(&name);
        name_token(a, entry.token, a->request->tokens_as_ids, &name);
        if (name_is_listed(a, top, i, &name)) continue;
        json_out_string(o, NULL, bytes_text(&name), name.len);
        bytes_puts(o->to, ":");
        o->comma = false;
        json_out_logprob(o, NULL, entry.logprob);
    }
    bytes_release(&name);
    json_out_close(o, '}');
}

// The lists are of the prompt's tokens, where it is echoed, and behind them of those from number
// `from` on. The first of all has no log-probability.
static void put_lists(struct json_out *o, const struct response *a,
                      const struct generation_sample *s, int from, bool with_prompt)
{
    const struct sampling *sampling = &a->request->sampling;
    const struct generation_prompt *prompt = &a->generation->runs[s->prompt].report;
    const int32_t *ids = a->request->prompts[s->prompt].ids;
    const int n_prompt = with_prompt ? a->request->prompts[s->prompt].n_ids : 0;
    const int n_top = sampling->logprobs, first = with_prompt ? 1 : 0;
    const bool as_ids = a->request->tokens_as_ids;
    json_out_open(o, "tokens", '[');
    for (int i = 0; i < n_prompt; i++) put_token_text(o, NULL, a, ids[i], as_ids);
    for (int i = from; i < s->n; i++) put_token_text(o, NULL, a, s->tokens[i].token, as_ids);
    json_out_close(o, ']');
    json_out_open(o, "token_logprobs", '[');
    if (with_prompt) json_out_null(o, NULL);
    for (int i = first; i < n_prompt; i++) json_out_logprob(o, NULL, prompt->tokens[i].logprob);
    for (int i = from; i < s->n; i++) json_out_logprob(o, NULL, s->tokens[i].logprob);
    json_out_close(o, ']');
    json_out_open(o, "top_logprobs", '[');
    if (with_prompt) json_out_null(o, NULL);
    for (int i = first; i < n_prompt; i++)
        put_top_object(o, a, prompt->top + (size_t)i * (size_t)sampling->prompt_top, n_top,
                       (struct top_logprob){ids[i], prompt->tokens[i].logprob});
    for (int i = from; i < s->n; i++)
        put_top_object(o, a, top_of(s, i, n_top), n_top,
                       (struct top_logprob){s->tokens[i].token, s->tokens[i].logprob});
    json_out_close(o, ']');
    json_out_open(o, "text_offset", '[');
    for (int i = 0; i < n_prompt; i++) json_out_int(o, NULL, prompt->echo.text_at[i]);
    for (int i = from; i < s->n; i++) json_out_int(o, NULL, prompt->echo.chars + s->text_at[i]);
    json_out_close(o, ']');
}

// ---- the others --------------------------------------------------------------------------------

// A chat's tokens have ids and bytes, of which those of a character may be spread over several.
static void put_token(struct json_out *o, const struct response *a, int32_t token, float logprob)
{
    struct bytes text = BYTES_INIT;
    const bool given = a->request->kind == API_CHAT && a->model->tokenizer;
    put_token_text(o, "token", a, token, a->request->tokens_as_ids);
    if (a->request->kind == API_CHAT) json_out_int(o, "token_id", token);
    if (given) tokenizer_token_bytes(a->model->tokenizer, token, &text);
    json_out_logprob(o, "logprob", logprob);
    if (given)
        JSON_OUT_LIST(o, "bytes", i, 0, (int)text.len,
                      json_out_int(o, NULL, (unsigned char)text.data[i]));
    else
        json_out_null(o, "bytes");
    bytes_release(&text);
}

static void put_token_object(struct json_out *o, const struct response *a, int32_t token,
                             float logprob)
{
    json_out_open(o, NULL, '{');
    put_token(o, a, token, logprob);
    json_out_close(o, '}');
}

// As in vLLM the sampled token is the first of /inference/v1/generate's "top_logprobs", and counts
// among the N; a chat has the N likeliest.
static void put_position(struct json_out *o, const struct response *a,
                         const struct generation_sample *s, int i)
{
    const struct token_record *sampled = &s->tokens[i];
    const bool own_first = a->request->kind == API_INFERENCE;
    const int n_top = a->request->sampling.logprobs;
    const struct top_logprob *top = top_of(s, i, n_top);
    json_out_open(o, NULL, '{');
    put_token(o, a, sampled->token, sampled->logprob);
    json_out_open(o, "top_logprobs", '[');
    if (own_first) put_token_object(o, a, sampled->token, sampled->logprob);
    for (int k = 0, n = own_first; top && n < n_top && k < n_top; k++) {
        if (own_first && top[k].token == sampled->token) continue;
        put_token_object(o, a, top[k].token, top[k].logprob);
        n++;
    }
    json_out_close(o, ']');
    json_out_close(o, '}');
}

void put_choice_logprobs(struct json_out *o, const struct response *a,
                         const struct generation_sample *s, int from, bool with_prompt)
{
    json_out_open(o, "logprobs", '{');
    if (a->request->kind == API_COMPLETIONS)
        put_lists(o, a, s, from, with_prompt);
    else
        JSON_OUT_LIST(o, "content", i, from, s->n, put_position(o, a, s, i));
    json_out_close(o, '}');
}

// ---- a prompt's log-probabilities ---------------------------------------------------------------
// The first token has none: null.

struct scored { // a prompt whose log-probabilities are there
    const struct api_prompt *prompt;
    const struct prompt_token *tokens; // (prompt->n_ids)
    const struct top_logprob *top;     // (prompt->n_ids, stride)
    int stride, n_top;                 // n_top of them are wanted
};

static struct scored scored_of(const struct response *a, int prompt)
{
    const struct generation_prompt *report = &a->generation->runs[prompt].report;
    return (struct scored){.prompt = &a->request->prompts[prompt],
                           .tokens = report->tokens,
                           .top = report->top,
                           .stride = a->request->sampling.prompt_top,
                           .n_top = a->request->prompt_top};
}

static const struct top_logprob *scored_top(const struct scored *s, int i)
{
    return s->top + (size_t)i * (size_t)s->stride;
}

// The prompt's token at each place, then the likeliest ones, which it may be among.
static void put_place(struct json_out *o, const struct response *a, const struct scored *s, int i,
                      bool decoded)
{
    const struct top_logprob own = {s->prompt->ids[i], s->tokens[i].logprob},
                             *top = scored_top(s, i);
    json_out_open(o, NULL, decoded ? '{' : '[');
    for (int j = -1; j < s->n_top; j++) {
        if (j >= 0 && top[j].token == own.token) continue;
        if (!decoded) json_out_open(o, NULL, '{');
        put_logprob(o, a, j < 0 ? own : top[j], j < 0 ? s->tokens[i].rank : j + 1, decoded);
        if (!decoded) json_out_close(o, '}');
    }
    json_out_close(o, decoded ? '}' : ']');
}

static void put_top_pairs(struct json_out *o, const struct scored *s, int i)
{
    json_out_open(o, NULL, '[');
    for (int j = 0; j < s->n_top; j++) {
        json_out_open(o, NULL, '[');
        json_out_int(o, NULL, scored_top(s, i)[j].token);
        json_out_logprob(o, NULL, scored_top(s, i)[j].logprob);
        json_out_close(o, ']');
    }
    json_out_close(o, ']');
}

// A list over the prompt's tokens, the first of which has nothing.
#define PUT_SCORED(o, key, i, n, put)                                                              \
    JSON_OUT_LIST(o, key, i, 0, n, i == 0 ? json_out_null(o, NULL) : put)

void put_prompt_logprobs(struct json_out *o, const char *key, const struct response *a, int prompt,
                         bool decoded)
{
    const struct scored s = scored_of(a, prompt);
    PUT_SCORED(o, key, i, s.prompt->n_ids, put_place(o, a, &s, i, decoded));
}

void put_prompt_lists(struct json_out *o, const struct response *a, int prompt)
{
    const struct scored s = scored_of(a, prompt);
    const int n = s.prompt->n_ids;
    PUT_SCORED(o, "prompt_logprobs", i, n, json_out_logprob(o, NULL, s.tokens[i].logprob));
    PUT_SCORED(o, "prompt_weight_versions", i, n,
               json_out_uint(o, NULL, s.tokens[i].weight_version));
    if (s.n_top > 0) PUT_SCORED(o, "prompt_top_logprobs", i, n, put_top_pairs(o, &s, i));
}
