/* response_inference.c: the objects of /inference/v1/generate, vLLM's endpoint of tokens in and
 * tokens out: whole, and as a stream of server-sent events. Tokens are called "token_id:N", and
 * there is no text. Loop's thread. */
#include "infer-server/http/response.h"

static void put_token(struct json_out *o, int32_t token, float logprob)
{
    struct bytes name = BYTES_INIT;
    bytes_printf(&name, "token_id:%d", token);
    json_out_key(o, "token");
    json_out_string(o, bytes_text(&name), name.len);
    json_out_key(o, "logprob");
    json_out_logprob(o, logprob);
    json_out_key(o, "bytes");
    json_out_null(o);
    bytes_release(&name);
}

static void put_top_token(struct json_out *o, int32_t token, float logprob)
{
    json_out_open(o, '{');
    put_token(o, token, logprob);
    json_out_close(o, '}');
}

// As in vLLM the sampled token is the first of "top_logprobs" and counts among the N.
static void put_position(struct json_out *o, const struct generation_sample *s, int i, int n_top)
{
    const struct token_record *sampled = &s->tokens[i];
    json_out_open(o, '{');
    put_token(o, sampled->token, sampled->logprob);
    json_out_key(o, "top_logprobs");
    json_out_open(o, '[');
    put_top_token(o, sampled->token, sampled->logprob);
    for (int k = 0, n = 1; n < n_top && k < n_top; k++) {
        const struct top_logprob *top = &s->top[(size_t)i * (size_t)n_top + (size_t)k];
        if (top->token == sampled->token) continue;
        put_top_token(o, top->token, top->logprob);
        n++;
    }
    json_out_close(o, ']');
    json_out_close(o, '}');
}

static void put_logprobs(struct json_out *o, const struct response *a,
                         const struct generation_sample *s, int from)
{
    const struct api_request *r = generation_request(a->generation);
    json_out_key(o, "logprobs");
    if (!r->want_logprobs) {
        json_out_null(o);
        return;
    }
    json_out_open(o, '{');
    json_out_key(o, "content");
    json_out_open(o, '[');
    for (int i = from; i < s->n; i++) put_position(o, s, i, r->sampling.logprobs);
    json_out_close(o, ']');
    json_out_close(o, '}');
}

// With the tokens from number `from` on.
static void put_choice(struct json_out *o, const struct response *a,
                       const struct generation_sample *s, int from)
{
    const bool ended = s->finish != FINISH_NONE;
    json_out_open(o, '{');
    json_out_key(o, "index");
    json_out_int(o, s->choice);
    json_out_key(o, "token_ids");
    put_token_ids(o, s, from);
    put_logprobs(o, a, s, from);
    json_out_key(o, "finish_reason");
    json_out_text(o, ended ? finish_name(s->finish) : NULL);
    if (ended) put_stop_reason(o, a, s);
    json_out_close(o, '}');
}

static void put_head(struct json_out *o, const struct response *a)
{
    json_out_key(o, "request_id");
    json_out_text(o, generation_request(a->generation)->id);
    json_out_key(o, "model");
    json_out_text(o, a->model->name);
}

static void put_asked_prompt_ids(struct json_out *o, const struct response *a)
{
    const struct api_request *r = generation_request(a->generation);
    if (!r->return_prompt_ids) return;
    json_out_key(o, "prompt_token_ids");
    put_prompt_ids(o, &r->prompts[0]);
}

void inference_response(struct response *a, struct bytes *to)
{
    struct json_out out = {to, false}, *o = &out;
    const struct generation_sample *samples = generation_samples(a->generation);
    json_out_open(o, '{');
    put_head(o, a);
    json_out_key(o, "choices");
    json_out_open(o, '[');
    for (int i = 0; i < generation_request(a->generation)->n_samples; i++)
        put_choice(o, a, &samples[i], 0);
    json_out_close(o, ']');
    put_asked_prompt_ids(o, a);
    if (generation_request(a->generation)->want_prompt_logprobs) put_prompt_logprobs(o, a, 0);
    put_usage(o, a);
    put_extras(o, a);
    json_out_close(o, '}');
    bytes_puts(to, "\n");
}

static void put_chunk(struct response *a, struct generation_sample *s, struct bytes *to)
{
    struct json_out out = {to, false}, *o = &out;
    bytes_puts(to, "data: ");
    json_out_open(o, '{');
    put_head(o, a);
    json_out_key(o, "choices");
    json_out_open(o, '[');
    if (s) put_choice(o, a, s, s->sent_tokens);
    json_out_close(o, ']');
    if (s && !s->sent_head) put_asked_prompt_ids(o, a);
    put_chunk_usage(o, a, s);
    if (s) put_chunk_extras(o, s);
    json_out_close(o, '}');
    bytes_puts(to, "\n\n");
    if (!s) return;
    s->sent_head = true;
    s->sent_tokens = s->n;
}

enum stream_state inference_stream(struct response *a, bool overdue, struct bytes *to)
{
    return events_stream(a, overdue, put_chunk, to);
}
