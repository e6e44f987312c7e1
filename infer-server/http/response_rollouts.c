/* response_rollouts.c: lines of /v1/rollouts. A finished sample's memory goes as soon as its line
 * is written. Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/response.h"

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
    if (a->request->filtered) {
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
    // one that was stopped (generation_stop()) may end before its prompt was scored
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
