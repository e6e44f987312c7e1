/* response_prompt.c: a prompt's log-probabilities, in the form of each endpoint. The first token
 * has none: null. Loop's thread. */
#include "infer-server/http/response.h"

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

// The prompt's token at each place, then the likeliest ones, which it may be among.
static void put_place(struct json_out *o, const struct response *a, const struct scored *s, int i,
                      bool decoded)
{
    const struct top_logprob own = {s->prompt->ids[i], s->tokens[i].logprob}, *top = top_of(s, i);
    json_out_open(o, NULL, decoded ? '{' : '[');
    for (int j = -1; j < s->n_top; j++) {
        if (j >= 0 && top[j].token == own.token) continue;
        if (!decoded) json_out_open(o, NULL, '{');
        put_logprob(o, a, j < 0 ? own : top[j], j < 0 ? s->tokens[i].rank : j + 1, decoded);
        if (!decoded) json_out_close(o, '}');
    }
    json_out_close(o, decoded ? '}' : ']');
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

// A list over the prompt's tokens, the first of which has nothing.
#define PUT_SCORED(o, key, i, n, put)                                                              \
    JSON_OUT_LIST(o, key, i, 0, n, i == 0 ? json_out_null(o, NULL) : put)

void put_prompt_logprobs(struct json_out *o, const char *key, const struct response *a, int prompt,
                         bool decoded)
{
    const struct scored s = scored_of(a, prompt);
    PUT_SCORED(o, key, i, s.prompt->n_ids, put_place(o, a, &s, i, decoded));
}

void put_prompt_lists(struct json_out *o, const struct response *a, int prompt)
{
    const struct scored s = scored_of(a, prompt);
    const int n = s.prompt->n_ids;
    PUT_SCORED(o, "prompt_logprobs", i, n, json_out_logprob(o, NULL, s.tokens[i].logprob));
    PUT_SCORED(o, "prompt_weight_versions", i, n,
               json_out_uint(o, NULL, s.tokens[i].weight_version));
    if (s.n_top > 0) PUT_SCORED(o, "prompt_top_logprobs", i, n, put_top_pairs(o, &s, i));
}
