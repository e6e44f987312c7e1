/* response_generate.c: the object of /generate, in the form of Atropos' vLLM server, which is that
 * of vLLM's own demonstration server with more in it. Lists over samples go prompt by prompt.
 * Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/response.h"

// One object a token: {"ID": ..., ...}, the sampled one first, then the likeliest that were asked
// for.
static void put_position(struct json_out *o, const struct response *a,
                         const struct generation_sample *s, int i, bool decoded)
{
    const int n_top = a->request->sampling.logprobs;
    const struct top_logprob own = {s->tokens[i].token, s->tokens[i].logprob};
    json_out_open(o, NULL, '{');
    put_logprob(o, a, own, 0, decoded);
    for (int k = 0; s->top && k < n_top; k++) {
        const struct top_logprob top = s->top[(size_t)i * (size_t)n_top + (size_t)k];
        if (top.token != own.token) put_logprob(o, a, top, 0, decoded);
    }
    json_out_close(o, '}');
}

// [[{"ID": logprob, ...}], ...]: Atropos keeps each token's object in a list of its own.
static void put_sample_logprobs(struct json_out *o, const struct response *a,
                                const struct generation_sample *s)
{
    json_out_open(o, NULL, '[');
    for (int i = 0; i < s->n; i++) {
        json_out_open(o, NULL, '[');
        put_position(o, a, s, i, false);
        json_out_close(o, ']');
    }
    json_out_close(o, ']');
}

// An element of "outputs": vLLM's CompletionOutput.
static void put_output(struct json_out *o, const struct response *a,
                       const struct generation_sample *s)
{
    double cumulative = 0;
    for (int i = 0; i < s->n; i++) cumulative += s->tokens[i].logprob;
    json_out_open(o, NULL, '{');
    json_out_int(o, "index", s->index);
    json_out_int(o, "prompt_index", s->prompt);
    put_sample_text(o, "text", a, s);
    put_token_ids(o, "token_ids", s, 0);
    json_out_real(o, "cumulative_logprob", cumulative);
    if (a->request->want_logprobs)
        JSON_OUT_LIST(o, "logprobs", i, 0, s->n, put_position(o, a, s, i, true));
    else
        json_out_null(o, "logprobs");
    put_finish(o, a, s);
    put_spec_decode(o, &s->telemetry.drafts);
    json_out_close(o, '}');
}

static void put_prompt_text(struct json_out *o, const char *key, const struct response *a,
                            const struct api_prompt *prompt)
{
    struct bytes text = BYTES_INIT;
    if (prompt->text) {
        json_out_string(o, key, prompt->text, prompt->text_len);
    } else if (a->model->tokenizer) {
        tokenizer_decode(a->model->tokenizer, prompt->ids, prompt->n_ids, false, &text);
        json_out_string(o, key, bytes_text(&text), text.len);
    } else {
        json_out_null(o, key);
    }
    bytes_release(&text);
}

// Of one prompt as it is, of "prompts" as a list.
static void put_prompts(struct json_out *o, const struct response *a)
{
    const struct api_request *r = a->request;
    if (!r->many_prompts) {
        put_prompt_text(o, "prompt", a, &r->prompts[0]);
        put_prompt_ids(o, "prompt_token_ids", &r->prompts[0]);
        return;
    }
    JSON_OUT_LIST(o, "prompt", i, 0, r->n_prompts, put_prompt_text(o, NULL, a, &r->prompts[i]));
    JSON_OUT_LIST(o, "prompt_token_ids", i, 0, r->n_prompts,
                  put_prompt_ids(o, NULL, &r->prompts[i]));
}

void generate_response(struct response *a, struct bytes *to)
{
    struct json_out out = {to, false}, *o = &out;
    const struct api_request *r = a->request;
    const struct generation_sample *s = a->samples;
    const int n = r->n_samples;
    json_out_open(o, NULL, '{');
    JSON_OUT_LIST(o, "text", i, 0, n, put_sample_text(o, NULL, a, &s[i]));
    put_prompts(o, a);
    JSON_OUT_LIST(o, "token_ids", i, 0, n, put_token_ids(o, NULL, &s[i], 0));
    JSON_OUT_LIST(o, "finish_reasons", i, 0, n,
                  json_out_text(o, NULL, finish_reason_names[s[i].finish]));
    if (r->want_logprobs)
        JSON_OUT_LIST(o, "logprobs", i, 0, n, put_sample_logprobs(o, a, &s[i]));
    else
        json_out_null(o, "logprobs");
    if (r->want_prompt_logprobs)
        JSON_OUT_LIST(o, "prompt_logprobs", i, 0, r->n_prompts,
                      put_prompt_logprobs(o, NULL, a, i, false));
    JSON_OUT_LIST(o, "prompt_ids", i, 0, r->n_prompts, put_prompt_ids(o, NULL, &r->prompts[i]));
    JSON_OUT_LIST(o, "completion_ids", i, 0, n, put_token_ids(o, NULL, &s[i], 0));
    JSON_OUT_LIST(o, "outputs", i, 0, n, put_output(o, a, &s[i]));
    json_out_bool(o, "finished", true);
    json_out_uint(o, "weight_version", response_version(a));
    json_out_close(o, '}');
    bytes_puts(to, "\n");
}
