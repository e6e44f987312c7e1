/* response.c: what all responses share. Loop's thread. */
#include "infer-server/http/response.h"

#include <stdio.h>

const char *const finish_reason_names[] = {[FINISH_NONE] = NULL,
                                           [FINISH_STOP] = "stop",
                                           [FINISH_LENGTH] = "length",
                                           [FINISH_CANCELLED] = "abort",
                                           [FINISH_ERROR] = "error"};

void token_text(const struct api_model *model, int32_t token, struct bytes *to)
{
    if (model->tokenizer)
        tokenizer_decode_inside(model->tokenizer, token, to);
    else
        bytes_printf(to, "token_id:%d", token);
}

void put_token_text(struct json_out *o, const char *key, const struct response *a, int32_t token,
                    bool as_id)
{
    struct bytes text = BYTES_INIT;
    if (as_id)
        bytes_printf(&text, "token_id:%d", token);
    else
        token_text(a->model, token, &text);
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
