/* response_lists.c: answers with a list for each thing that is known of samples or tokens: the
 * lines of /v1/rollouts, a finished sample each, whose memory goes as soon as its line is written;
 * and the object of /generate, in the form of Atropos' vLLM server, which is that of vLLM's own
 * demonstration server with more in it, lists over samples going prompt by prompt;
 * and the objects of verified drafts. Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/response.h"

// ---- drafts -------------------------------------------------------------------------------------

void put_draft_counts(struct json_out *o, const struct draft_counts *c)
{
    json_out_int(o, "num_drafts", c->num_drafts);
    json_out_int(o, "num_draft_tokens", c->num_draft_tokens);
    json_out_int(o, "num_accepted_tokens", c->num_accepted_tokens);
    JSON_OUT_LIST(o, "num_accepted_tokens_per_pos", i, 0, c->draft_positions,
                  json_out_int(o, NULL, c->num_accepted_tokens_per_pos[i]));
    // null where nothing was drafted: 0 / 0 is no number
    json_out_real(o, "accept_rate", (double)c->num_accepted_tokens / (double)c->num_draft_tokens);
    json_out_real(o, "mean_acceptance_length",
                  1 + (double)c->num_accepted_tokens / (double)c->num_drafts);
}

void put_verified_drafts(struct json_out *o, const struct draft_counts *c)
{
    json_out_open(o, "spec_decode", '{');
    put_draft_counts(o, c);
    json_out_open(o, "acceptance_histogram", '[');
    int64_t reached = c->num_drafts; // steps that accepted i drafts or more
    for (int i = 0; i <= c->draft_positions; i++) {
        const int64_t further = i < c->draft_positions ? c->num_accepted_tokens_per_pos[i] : 0;
        json_out_int(o, NULL, reached - further);
        reached = further;
    }
    json_out_close(o, ']');
    json_out_close(o, '}');
}

// ---- /v1/rollouts -------------------------------------------------------------------------------

static void put_telemetry(struct json_out *o, const struct sample_telemetry *t)
{
    json_out_open(o, "telemetry", '{');
    json_out_int(o, "prompt_tokens", t->prompt_tokens);
    json_out_int(o, "cached_prompt_tokens", t->cached_prompt_tokens);
    json_out_int(o, "generated_tokens", t->generated_tokens);
    json_out_real(o, "queue_ms", t->queue_ms);
    json_out_real(o, "first_token_ms", t->first_token_ms);
    json_out_real(o, "latency_ms", t->latency_ms);
    json_out_int(o, "kv_bytes_peak", t->kv_bytes_peak);
    put_draft_counts(o, &t->drafts);
    json_out_uint(o, "weight_version_first", t->weight_version_first);
    json_out_uint(o, "weight_version_last", t->weight_version_last);
    json_out_close(o, '}');
}

// One list for each thing that is known of every token.
static void put_tokens(struct json_out *o, const struct response *a,
                       const struct generation_sample *s)
{
    const struct token_record *t = s->tokens;
    put_token_ids(o, "token_ids", s, 0);
    JSON_OUT_LIST(o, "logprobs", i, 0, s->n, json_out_logprob(o, NULL, t[i].logprob));
    if (a->request->filtered || a->request->prompts[s->prompt].constraint) {
        JSON_OUT_LIST(o, "cut_logprobs", i, 0, s->n,
                      json_out_logprob(o, NULL, t[i].processed_logprob));
        JSON_OUT_LIST(o, "kept_mass", i, 0, s->n, json_out_float(o, NULL, t[i].retained_mass));
    }
    const bool drafted = s->telemetry.drafts.num_drafts > 0;
    if (drafted) // which were accepted drafts
        JSON_OUT_LIST(o, "accepted", i, 0, s->n, json_out_int(o, NULL, t[i].accepted_at));
    if ((drafted || a->request->want_text_offset) && a->model->tokenizer)
        JSON_OUT_LIST(o, "text_offset", i, 0, s->n, json_out_int(o, NULL, s->text_at[i]));
    if (a->request->sampling.tandem.on)
        JSON_OUT_LIST(o, "model_mask", i, 0, s->n, json_out_int(o, NULL, !t[i].frozen));
    JSON_OUT_LIST(o, "weight_versions", i, 0, s->n, json_out_uint(o, NULL, t[i].weight_version));
}

static void put_line(const struct response *a, const struct generation_sample *s, struct bytes *to)
{
    struct json_out out = {to, false}, *o = &out;
    const struct api_prompt *prompt = &a->request->prompts[s->prompt];
    json_out_open(o, NULL, '{');
    json_out_text(o, "id", a->request->id);
    json_out_value(o, "group_id", prompt->group_id);
    json_out_int(o, "sample", s->index);
    if (prompt->tokenised) put_prompt_ids(o, "prompt_token_ids", prompt);
    // one that was stopped (handle_stop()) may end before its prompt was scored
    if (a->request->want_prompt_logprobs &&
        (a->generation->runs[s->prompt].report.tokens || prompt->n_ids == 1))
        put_prompt_lists(o, a, s->prompt);
    put_tokens(o, a, s);
    json_out_text(o, "finish_reason", finish_reason_names[s->finish]);
    put_sample_text(o, "text", a, s);
    put_telemetry(o, &s->telemetry);
    json_out_close(o, '}');
    bytes_puts(to, "\n");
}

enum stream_state rollouts_stream(struct response *a, bool overdue, struct bytes *to)
{
    struct generation_sample *s;
    enum stream_state state = stream_next(a, overdue, "", "\n", to, &s);
    if (state != STREAM_MORE) return state;
    put_line(a, s, to);
    generation_sample_clear(s);
    return --a->unfinished > 0 ? STREAM_MORE : STREAM_END;
}

// ---- /generate ----------------------------------------------------------------------------------

// One object a token: {"ID": ..., ...}, the sampled one first, then the likeliest that were asked
// for.
static void put_token_object(struct json_out *o, const struct response *a,
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
        put_token_object(o, a, s, i, false);
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
        JSON_OUT_LIST(o, "logprobs", i, 0, s->n, put_token_object(o, a, s, i, true));
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
