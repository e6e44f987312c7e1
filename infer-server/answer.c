/* answer.c: what all answers share. Loop's thread. */
#include "infer-server/answer.h"

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
        tokenizer_decode(model->tokenizer, &token, 1, false, to);
    else
        bytes_printf(to, "token_id:%d", token);
}

const char *failure_sentence(const struct generation_sample *s)
{
    if (s->finish == FINISH_ERROR && s->error) return s->error;
    return "generation was cancelled because the server is stopping";
}
