/* response_rollouts.c: lines of /v1/rollouts. A finished sample's memory goes as soon as its line is
 * written. Loop's thread. */
#include "infer-server/http/response.h"

static void put_telemetry(struct json_out *o, const struct sample_telemetry *t)
{
    json_out_open(o, '{');
    json_out_key(o, "prompt_tokens");
    json_out_int(o, t->prompt_tokens);
    json_out_key(o, "cached_prompt_tokens");
    json_out_int(o, t->cached_prompt_tokens);
    json_out_key(o, "generated_tokens");
    json_out_int(o, t->generated_tokens);
    json_out_key(o, "queue_ms");
    json_out_real(o, t->queue_ms);
    json_out_key(o, "first_token_ms");
    json_out_real(o, t->first_token_ms);
    json_out_key(o, "latency_ms");
    json_out_real(o, t->latency_ms);
    json_out_key(o, "kv_bytes_peak");
    json_out_int(o, t->kv_bytes_peak);
    put_draft_counts(o, t);
    json_out_key(o, "weight_version_first");
    json_out_uint(o, t->weight_version_first);
    json_out_key(o, "weight_version_last");
    json_out_uint(o, t->weight_version_last);
    json_out_close(o, '}');
}

static void put_logprobs(struct json_out *o, const struct generation_sample *s)
{
    json_out_open(o, '[');
    for (int i = 0; i < s->n; i++) json_out_logprob(o, s->tokens[i].logprob);
    json_out_close(o, ']');
}

static void put_cut(struct json_out *o, const struct generation_sample *s)
{
    json_out_key(o, "cut_logprobs");
    json_out_open(o, '[');
    for (int i = 0; i < s->n; i++) json_out_logprob(o, s->tokens[i].processed_logprob);
    json_out_close(o, ']');
    json_out_key(o, "kept_mass");
    json_out_open(o, '[');
    for (int i = 0; i < s->n; i++) json_out_float(o, s->tokens[i].retained_mass);
    json_out_close(o, ']');
}

// Which tokens were accepted drafts, and where each begins in the text.
static void put_accepted(struct json_out *o, const struct response *a,
                         const struct generation_sample *s)
{
    json_out_key(o, "accepted");
    json_out_open(o, '[');
    for (int i = 0; i < s->n; i++) json_out_int(o, s->tokens[i].accepted_at);
    json_out_close(o, ']');
    if (!a->model->tokenizer) return;
    json_out_key(o, "text_offset");
    json_out_open(o, '[');
    for (int i = 0; i < s->n; i++) json_out_int(o, s->text_at[i]);
    json_out_close(o, ']');
}

static void put_line(const struct response *a, const struct generation_sample *s, struct bytes *to)
{
    struct json_out out = {to, false}, *o = &out;
    const struct api_request *r = generation_request(a->generation);
    const struct api_prompt *prompt = &r->prompts[s->prompt];
    json_out_open(o, '{');
    json_out_key(o, "id");
    json_out_text(o, r->id);
    json_out_key(o, "group_id");
    json_out_value(o, prompt->group_id);
    json_out_key(o, "sample");
    json_out_int(o, s->index);
    if (prompt->tokenised) {
        json_out_key(o, "prompt_token_ids");
        put_prompt_ids(o, prompt);
    }
    if (r->want_prompt_logprobs) put_prompt_lists(o, a, s->prompt);
    json_out_key(o, "token_ids");
    put_token_ids(o, s, 0);
    json_out_key(o, "logprobs");
    put_logprobs(o, s);
    if (r->cut_active) put_cut(o, s);
    if (s->telemetry.num_drafts > 0) put_accepted(o, a, s);
    json_out_key(o, "weight_versions");
    json_out_open(o, '[');
    for (int i = 0; i < s->n; i++) json_out_uint(o, s->tokens[i].weight_version);
    json_out_close(o, ']');
    json_out_key(o, "finish_reason");
    json_out_text(o, finish_name(s->finish));
    json_out_key(o, "text");
    put_sample_text(o, a, s);
    json_out_key(o, "telemetry");
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
