/* response.c: what all answers share. Loop's thread. */
#include "infer-server/http/response.h"

const char *finish_name(enum finish_reason finish)
{
    switch (finish) {
    case FINISH_STOP:
        return "stop";
    case FINISH_LENGTH:
        return "length";
    case FINISH_CANCELLED:
        return "abort";
    case FINISH_ERROR:
        return "error";
    case FINISH_NONE:
        break;
    }
    return NULL;
}

void token_text(const struct api_model *model, int32_t token, struct bytes *to)
{
    if (model->tokenizer)
        tokenizer_decode_inside(model->tokenizer, token, to);
    else
        bytes_printf(to, "token_id:%d", token);
}

unsigned failure_code(const struct generation_sample *s, const char **ret_sentence)
{
    bool cancelled = s->finish == FINISH_CANCELLED;
    *ret_sentence = s->error && !cancelled
                        ? s->error
                        : "generation was cancelled because the server is stopping";
    return cancelled ? 503 : 500;
}

enum stream_state stream_next(struct response *a, bool overdue, const char *before, const char *after,
                              struct bytes *to, struct generation_sample **ret)
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
    http_error_object(to, code, code == 504 ? "timeout_error" : "server_error", sentence);
    bytes_puts(to, after);
    return STREAM_END;
}

enum stream_state events_stream(struct response *a, bool overdue, put_chunk_fn put, struct bytes *to)
{
    struct generation_sample *s;
    enum stream_state state = stream_next(a, overdue, "data: ", "\n\ndata: [DONE]\n\n", to, &s);
    if (state != STREAM_MORE) return state;
    put(a, s, to);
    if (s->finish == FINISH_NONE || --a->unfinished > 0) return STREAM_MORE;
    if (generation_request(a->generation)->include_usage) put(a, NULL, to);
    bytes_puts(to, "data: [DONE]\n\n");
    return STREAM_END;
}

void put_prompt_ids(struct json_out *o, const struct api_prompt *prompt)
{
    json_out_open(o, '[');
    for (int i = 0; i < prompt->n_ids; i++) json_out_int(o, prompt->ids[i]);
    json_out_close(o, ']');
}

void put_sample_text(struct json_out *o, const struct response *a, const struct generation_sample *s)
{
    if (a->model->tokenizer)
        json_out_string(o, bytes_text(&s->text), s->text.len);
    else
        json_out_null(o);
}

void put_token_ids(struct json_out *o, const struct generation_sample *s, int from)
{
    json_out_open(o, '[');
    for (int i = from; i < s->n; i++) json_out_int(o, s->tokens[i].token);
    json_out_close(o, ']');
}

void put_stop_reason(struct json_out *o, const struct response *a, const struct generation_sample *s)
{
    const struct sampling *sampling = &generation_request(a->generation)->sampling;
    bool asked = false;
    for (int i = 0; i < sampling->n_stop_ids; i++) asked |= sampling->stop_ids[i] == s->stop_token;
    json_out_key(o, "stop_reason");
    if (s->stop_string)
        json_out_text(o, s->stop_string);
    else if (asked)
        json_out_int(o, s->stop_token);
    else
        json_out_null(o);
}

void put_draft_counts(struct json_out *o, const struct sample_telemetry *t)
{
    json_out_key(o, "num_drafts");
    json_out_int(o, t->num_drafts);
    json_out_key(o, "num_draft_tokens");
    json_out_int(o, t->num_draft_tokens);
    json_out_key(o, "num_accepted_tokens");
    json_out_int(o, t->num_accepted_tokens);
    json_out_key(o, "num_accepted_tokens_per_pos");
    json_out_open(o, '[');
    for (int i = 0; i < t->draft_positions; i++) json_out_int(o, t->num_accepted_tokens_per_pos[i]);
    json_out_close(o, ']');
    json_out_key(o, "accept_rate");
    if (t->num_draft_tokens > 0)
        json_out_real(o, (double)t->num_accepted_tokens / t->num_draft_tokens);
    else
        json_out_null(o);
    json_out_key(o, "mean_acceptance_length");
    if (t->num_drafts > 0)
        json_out_real(o, 1 + (double)t->num_accepted_tokens / t->num_drafts);
    else
        json_out_null(o);
}

void put_spec_decode(struct json_out *o, const struct sample_telemetry *t)
{
    if (t->num_drafts == 0) {
        json_out_null(o);
        return;
    }
    json_out_open(o, '{');
    put_draft_counts(o, t);
    json_out_key(o, "acceptance_histogram");
    json_out_open(o, '[');
    int reached = t->num_drafts; // steps that accepted i drafts or more
    for (int i = 0; i <= t->draft_positions; i++) {
        const int further = i < t->draft_positions ? t->num_accepted_tokens_per_pos[i] : 0;
        json_out_int(o, reached - further);
        reached = further;
    }
    json_out_close(o, ']');
    json_out_close(o, '}');
}
