/* response_generate.c: the object of /generate, in the form of Atropos' vLLM server, which is that of
 * vLLM's own demonstration server with more in it. Lists over samples go prompt by prompt.
 * Loop's thread. */
#include "infer-server/http/response.h"

#include <stdio.h>

static void put_id_key(struct json_out *o, int32_t token)
{
    char key[16];
    snprintf(key, sizeof key, "%d", token);
    json_out_key(o, key);
}

typedef void (*put_logprob_fn)(struct json_out *o, const struct response *a, int32_t token,
                               float logprob);

static void put_plain(struct json_out *o, const struct response *a, int32_t token, float logprob)
{
    (void)a;
    put_id_key(o, token);
    json_out_logprob(o, logprob);
}

// vLLM's Logprob: {"logprob", "decoded_token"}
static void put_decoded(struct json_out *o, const struct response *a, int32_t token, float logprob)
{
    struct bytes text = BYTES_INIT;
    token_text(a->model, token, &text);
    put_id_key(o, token);
    json_out_open(o, '{');
    json_out_key(o, "logprob");
    json_out_logprob(o, logprob);
    json_out_key(o, "decoded_token");
    json_out_string(o, bytes_text(&text), text.len);
    json_out_close(o, '}');
    bytes_release(&text);
}

// One object a token: {"ID": ..., ...}, the sampled one first, then the likeliest that were asked
// for.
static void put_position(struct json_out *o, const struct response *a,
                         const struct generation_sample *s, int i, put_logprob_fn put)
{
    int n_top = generation_request(a->generation)->sampling.logprobs;
    json_out_open(o, '{');
    put(o, a, s->tokens[i].token, s->tokens[i].logprob);
    for (int k = 0; s->top && k < n_top; k++) {
        const struct top_logprob *top = &s->top[(size_t)i * (size_t)n_top + (size_t)k];
        if (top->token != s->tokens[i].token) put(o, a, top->token, top->logprob);
    }
    json_out_close(o, '}');
}

// [[{"ID": logprob, ...}], ...]: Atropos keeps each token's object in a list of its own.
static void put_logprobs(struct json_out *o, const struct response *a,
                         const struct generation_sample *s)
{
    json_out_open(o, '[');
    for (int i = 0; i < s->n; i++) {
        json_out_open(o, '[');
        put_position(o, a, s, i, put_plain);
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
    json_out_open(o, '{');
    json_out_key(o, "index");
    json_out_int(o, s->index);
    json_out_key(o, "prompt_index");
    json_out_int(o, s->prompt);
    json_out_key(o, "text");
    put_sample_text(o, a, s);
    json_out_key(o, "token_ids");
    put_token_ids(o, s, 0);
    json_out_key(o, "cumulative_logprob");
    json_out_real(o, cumulative);
    json_out_key(o, "logprobs");
    if (generation_request(a->generation)->want_logprobs) {
        json_out_open(o, '[');
        for (int i = 0; i < s->n; i++) put_position(o, a, s, i, put_decoded);
        json_out_close(o, ']');
    } else {
        json_out_null(o);
    }
    json_out_key(o, "finish_reason");
    json_out_text(o, finish_name(s->finish));
    put_stop_reason(o, a, s);
    json_out_key(o, "spec_decode");
    put_spec_decode(o, &s->telemetry);
    json_out_close(o, '}');
}

static void put_prompt_text(struct json_out *o, const struct response *a,
                            const struct api_prompt *prompt)
{
    struct bytes text = BYTES_INIT;
    if (prompt->text) {
        json_out_string(o, prompt->text, prompt->text_len);
    } else if (a->model->tokenizer) {
        tokenizer_decode(a->model->tokenizer, prompt->ids, prompt->n_ids, false, &text);
        json_out_string(o, bytes_text(&text), text.len);
    } else {
        json_out_null(o);
    }
    bytes_release(&text);
}

// Of one prompt as it is, of "prompts" as a list.
static void put_prompts(struct json_out *o, const struct response *a)
{
    const struct api_request *r = generation_request(a->generation);
    json_out_key(o, "prompt");
    if (r->many_prompts) json_out_open(o, '[');
    for (int i = 0; i < r->n_prompts; i++) put_prompt_text(o, a, &r->prompts[i]);
    if (r->many_prompts) json_out_close(o, ']');
    json_out_key(o, "prompt_token_ids");
    if (r->many_prompts) json_out_open(o, '[');
    for (int i = 0; i < r->n_prompts; i++) put_prompt_ids(o, &r->prompts[i]);
    if (r->many_prompts) json_out_close(o, ']');
}

static void put_each(struct json_out *o, const struct response *a, const char *key,
                     void (*put)(struct json_out *o, const struct response *a,
                                 const struct generation_sample *s))
{
    const struct generation_sample *samples = generation_samples(a->generation);
    json_out_key(o, key);
    json_out_open(o, '[');
    for (int i = 0; i < generation_request(a->generation)->n_samples; i++) put(o, a, &samples[i]);
    json_out_close(o, ']');
}

static void put_ids(struct json_out *o, const struct response *a, const struct generation_sample *s)
{
    (void)a;
    put_token_ids(o, s, 0);
}

static void put_finish(struct json_out *o, const struct response *a,
                       const struct generation_sample *s)
{
    (void)a;
    json_out_text(o, finish_name(s->finish));
}

void generate_response(struct response *a, struct bytes *to)
{
    struct json_out out = {to, false}, *o = &out;
    const struct api_request *r = generation_request(a->generation);
    const struct generation_sample *samples = generation_samples(a->generation);
    uint64_t version = 0;
    for (int i = 0; i < r->n_samples; i++)
        if (samples[i].telemetry.weight_version_last > version)
            version = samples[i].telemetry.weight_version_last;
    json_out_open(o, '{');
    put_each(o, a, "text", put_sample_text);
    put_prompts(o, a);
    put_each(o, a, "token_ids", put_ids);
    put_each(o, a, "finish_reasons", put_finish);
    if (r->want_logprobs) {
        put_each(o, a, "logprobs", put_logprobs);
    } else {
        json_out_key(o, "logprobs");
        json_out_null(o);
    }
    if (r->want_prompt_logprobs) {
        json_out_key(o, "prompt_logprobs");
        json_out_open(o, '[');
        for (int i = 0; i < r->n_prompts; i++) put_prompt_pairs(o, a, i);
        json_out_close(o, ']');
    }
    json_out_key(o, "prompt_ids");
    json_out_open(o, '[');
    for (int i = 0; i < r->n_prompts; i++) put_prompt_ids(o, &r->prompts[i]);
    json_out_close(o, ']');
    put_each(o, a, "completion_ids", put_ids);
    put_each(o, a, "outputs", put_output);
    json_out_key(o, "finished");
    json_out_bool(o, true);
    json_out_key(o, "weight_version");
    json_out_uint(o, version);
    json_out_close(o, '}');
    bytes_puts(to, "\n");
}
