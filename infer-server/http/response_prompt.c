/* response_prompt.c: a prompt's log-probabilities, in the form of each endpoint. The first token
 * has none: null. Loop's thread. */
#include "infer-server/http/response.h"

#include <stdio.h>

struct scored { // a prompt whose log-probabilities are there
    const struct api_prompt *prompt;
    const struct prompt_token *tokens; // (prompt->n_ids)
    const struct top_logprob *top;     // (prompt->n_ids, stride)
    int stride, n_top;                 // n_top of them are wanted
};

static struct scored scored_of(const struct response *a, int prompt)
{
    const struct generation_prompt *report = &a->generation->runs[prompt].report;
    return (struct scored){.prompt = &a->request->prompts[prompt],
                           .tokens = report->tokens,
                           .top = report->top,
                           .stride = a->request->sampling.prompt_top,
                           .n_top = a->request->prompt_top};
}

static const struct top_logprob *top_of(const struct scored *s, int i)
{
    return s->top + (size_t)i * (size_t)s->stride;
}

// named: "ID": {"logprob", "rank", "decoded_token"}; else {"ID": logprob}.
static void put_entry(struct json_out *o, const struct response *a, struct top_logprob token,
                      int rank, bool named)
{
    char key[16];
    snprintf(key, sizeof key, "%d", token.token);
    json_out_open(o, named ? key : NULL, '{');
    if (named) {
        struct bytes text = BYTES_INIT;
        token_text(a->model, token.token, &text);
        json_out_logprob(o, "logprob", token.logprob);
        json_out_int(o, "rank", rank);
        json_out_string(o, "decoded_token", bytes_text(&text), text.len);
        bytes_release(&text);
    } else {
        json_out_logprob(o, key, token.logprob);
    }
    json_out_close(o, '}');
}

// The prompt's token at each place, then the likeliest ones, which it may be among.
static void put_entries(struct json_out *o, const char *key, const struct response *a, int prompt,
                        bool named)
{
    const struct scored s = scored_of(a, prompt);
    json_out_open(o, key, '[');
    json_out_null(o, NULL);
    for (int i = 1; i < s.prompt->n_ids; i++) {
        const struct top_logprob own = {s.prompt->ids[i], s.tokens[i].logprob},
                                 *top = top_of(&s, i);
        json_out_open(o, NULL, named ? '{' : '[');
        put_entry(o, a, own, s.tokens[i].rank, named);
        for (int j = 0; j < s.n_top; j++)
            if (top[j].token != own.token) put_entry(o, a, top[j], j + 1, named);
        json_out_close(o, named ? '}' : ']');
    }
    json_out_close(o, ']');
}

void put_prompt_logprobs(struct json_out *o, const struct response *a, int prompt)
{
    put_entries(o, "prompt_logprobs", a, prompt, true);
}

void put_prompt_pairs(struct json_out *o, const struct response *a, int prompt)
{
    put_entries(o, NULL, a, prompt, false);
}

static void put_top_pairs(struct json_out *o, const struct scored *s, int i)
{
    json_out_open(o, NULL, '[');
    for (int j = 0; j < s->n_top; j++) {
        json_out_open(o, NULL, '[');
        json_out_int(o, NULL, top_of(s, i)[j].token);
        json_out_logprob(o, NULL, top_of(s, i)[j].logprob);
        json_out_close(o, ']');
    }
    json_out_close(o, ']');
}

void put_prompt_lists(struct json_out *o, const struct response *a, int prompt)
{
    const struct scored s = scored_of(a, prompt);
    const int n = s.prompt->n_ids;
    json_out_open(o, "prompt_logprobs", '[');
    json_out_null(o, NULL);
    for (int i = 1; i < n; i++) json_out_logprob(o, NULL, s.tokens[i].logprob);
    json_out_close(o, ']');
    json_out_open(o, "prompt_weight_versions", '[');
    json_out_null(o, NULL);
    for (int i = 1; i < n; i++) json_out_uint(o, NULL, s.tokens[i].weight_version);
    json_out_close(o, ']');
    if (s.n_top == 0) return;
    json_out_open(o, "prompt_top_logprobs", '[');
    json_out_null(o, NULL);
    for (int i = 1; i < n; i++) put_top_pairs(o, &s, i);
    json_out_close(o, ']');
}
