/* response.c: what all responses share: pieces of a choice, tokens used, the version of the
 * weights, drafts verified. Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/response.h"

const char *const finish_reason_names[] = {[FINISH_NONE] = NULL,
                                           [FINISH_STOP] = "stop",
                                           [FINISH_LENGTH] = "length",
                                           [FINISH_CANCELLED] = "abort",
                                           [FINISH_ERROR] = "error"};

unsigned failure_code(const struct generation_sample *s, const char **ret_sentence)
{
    bool cancelled = s->finish == FINISH_CANCELLED;
    *ret_sentence = s->error && !cancelled
                        ? s->error
                        : "generation was cancelled because the server is stopping";
    return cancelled ? 503 : 500;
}

enum stream_state stream_next(struct response *a, bool overdue, const char *before,
                              const char *after, struct bytes *to, struct generation_sample **ret)
{
    struct generation_sample *s = generation_next(a->generation);
    const char *sentence = "the answer took longer than --request-timeout allows";
    unsigned code = 504;
    if (!overdue) {
        if (!s) return STREAM_WAIT;
        *ret = s;
        if (s->finish != FINISH_ERROR && s->finish != FINISH_CANCELLED) return STREAM_MORE;
        code = failure_code(s, &sentence);
    }
    bytes_puts(to, before);
    http_error_object(to, code, NULL, code == 504 ? "timeout_error" : "server_error", sentence);
    bytes_puts(to, after);
    return STREAM_END;
}

void put_prompt_ids(struct json_out *o, const char *key, const struct api_prompt *prompt)
{
    JSON_OUT_LIST(o, key, i, 0, prompt->n_ids, json_out_int(o, NULL, prompt->ids[i]));
}

void put_sample_text(struct json_out *o, const char *key, const struct response *a,
                     const struct generation_sample *s)
{
    if (a->model->tokenizer)
        json_out_string(o, key, bytes_text(&s->text), s->text.len);
    else
        json_out_null(o, key);
}

void put_token_ids(struct json_out *o, const char *key, const struct generation_sample *s, int from)
{
    JSON_OUT_LIST(o, key, i, from, s->n, json_out_int(o, NULL, s->tokens[i].token));
}

void put_finish(struct json_out *o, const struct response *a, const struct generation_sample *s)
{
    const struct sampling *sampling = &a->request->sampling;
    bool asked = false;
    const bool calls = s->tools && s->tools->n > 0 && s->finish == FINISH_STOP;
    json_out_text(o, "finish_reason", calls ? "tool_calls" : finish_reason_names[s->finish]);
    if (s->finish == FINISH_NONE) return;
    for (int i = 0; i < sampling->n_stop_ids; i++) asked |= sampling->stop_ids[i] == s->stop_token;
    if (!s->stop_string && asked)
        json_out_int(o, "stop_reason", s->stop_token);
    else
        json_out_text(o, "stop_reason", s->stop_string);
}

// ---- of the response ----------------------------------------------------------------------------

static void put_counts(struct json_out *o, int64_t prompt, int64_t completion)
{
    json_out_int(o, "prompt_tokens", prompt);
    json_out_int(o, "completion_tokens", completion);
    json_out_int(o, "total_tokens", prompt + completion);
}

void put_usage(struct json_out *o, const struct response *a)
{
    int64_t prompt = 0, completion = 0, cached = 0;
    for (int i = 0; i < a->request->n_prompts; i++) prompt += a->request->prompts[i].n_ids;
    for (int i = 0; i < a->request->n_samples; i++) {
        completion += a->samples[i].n;
        if (a->samples[i].index == 0) cached += a->samples[i].telemetry.cached_prompt_tokens;
    }
    json_out_open(o, "usage", '{');
    put_counts(o, prompt, completion);
    json_out_open(o, "prompt_tokens_details", '{');
    json_out_int(o, "cached_tokens", cached);
    json_out_close(o, '}');
    json_out_close(o, '}');
}

void put_chunk_usage(struct json_out *o, const struct response *a,
                     const struct generation_sample *s)
{
    if (!s) {
        put_usage(o, a);
    } else if (a->request->continuous_usage) {
        json_out_open(o, "usage", '{');
        put_counts(o, a->request->prompts[s->prompt].n_ids, s->n);
        json_out_close(o, '}');
    } else if (a->request->include_usage) {
        json_out_null(o, "usage");
    }
}

void put_spec_decode(struct json_out *o, const struct draft_counts *c)
{
    if (c->num_drafts > 0)
        put_verified_drafts(o, c);
    else
        json_out_null(o, "spec_decode");
}

static uint64_t last_version(const struct generation_sample *s)
{
    if (s->n > 0) return s->tokens[s->n - 1].weight_version;
    return s->telemetry.weight_version_last; // of a prompt alone, once it has ended
}

static void put_version(struct json_out *o, uint64_t version)
{
    if (version)
        json_out_uint(o, "weight_version", version);
    else
        json_out_null(o, "weight_version"); // no token yet
}

void put_chunk_extras(struct json_out *o, const struct generation_sample *s)
{
    put_version(o, last_version(s));
    put_spec_decode(o, &s->telemetry.drafts);
}

uint64_t response_version(const struct response *a)
{
    uint64_t version = 0;
    for (int i = 0; i < a->request->n_samples; i++)
        if (last_version(&a->samples[i]) > version) version = last_version(&a->samples[i]);
    return version;
}

void put_extras(struct json_out *o, const struct response *a)
{
    struct draft_counts drafts = {0}; // of all choices
    for (int i = 0; i < a->request->n_samples; i++)
        if (a->samples[i].telemetry.drafts.num_drafts > 0)
            draft_counts_add(&drafts, &a->samples[i].telemetry.drafts);
    put_version(o, response_version(a));
    put_spec_decode(o, &drafts);
}
